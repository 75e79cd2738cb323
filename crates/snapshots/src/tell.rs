//! What readers of events are told of the store.

use std::sync::Arc;

use vmfork_api::{EventSnapshot, EventVm, Happening};
use vmfork_control::Events;
use vmfork_store::Work;

use crate::library::Library;

/// Tells them.
#[derive(Debug)]
pub(super) struct Tell {
    pub(super) events: Arc<Events>,
    /// The VM that the snapshots were taken of.
    pub(super) vm: Option<EventVm>,
}

impl Library {
    /// For readers of events.
    pub(crate) fn tell(&self) -> Tell {
        Tell { events: Arc::clone(&self.core.events), vm: None }
    }
}

impl Tell {
    /// Of each snapshot that this work puts into the store, before it can be removed.
    pub(super) fn stored_by(self, work: &Work) {
        work.on_stored(move |name| {
            let snapshot = EventSnapshot { name: name.to_owned(), vm: self.vm.clone() };
            self.events.tell(Happening::SnapshotStored { snapshot });
        });
    }

    /// A snapshot was removed from it.
    pub(super) fn removed(&self, name: &str) {
        let snapshot = EventSnapshot { name: name.to_owned(), vm: None };
        self.events.tell(Happening::SnapshotRemoved { snapshot });
    }
}
