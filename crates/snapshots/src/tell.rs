//! What readers of events are told of the store.

use vmfork_api::{EventSnapshot, EventVm, Happening};
use vmfork_control::Events;
use vmfork_store::Work;

use crate::library::Library;

/// Tells them.
#[derive(Debug)]
pub(super) struct Tell<'a> {
    pub(super) events: &'a Events,
    /// The VM that the snapshots were taken of.
    pub(super) vm: Option<EventVm>,
}

impl Library {
    /// For readers of events.
    pub(crate) fn tell(&self) -> Tell<'_> {
        Tell { events: &self.core.events, vm: None }
    }
}

impl Tell<'_> {
    /// Work has put snapshots into the store.
    pub(super) fn stored(&self, work: &Work) {
        for name in work.take_stored() {
            let snapshot = EventSnapshot { name, vm: self.vm.clone() };
            self.events.tell(Happening::SnapshotStored { snapshot });
        }
    }

    /// A snapshot was removed from it.
    pub(super) fn removed(&self, name: &str) {
        let snapshot = EventSnapshot { name: name.to_owned(), vm: None };
        self.events.tell(Happening::SnapshotRemoved { snapshot });
    }
}
