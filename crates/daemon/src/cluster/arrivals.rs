//! Snapshots of other hosts that VMs here came of: that their pages are still needed, and the memory that those will take.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vmfork_api::ErrorBody;
use vmfork_image::{ImageName, PAGE_BYTES};
use vmfork_memory::{Engine, HostImage};

use crate::admission::{Admission, Lease};

/// VMs hold it that came of one snapshot of another host, and hand it on to their clones: as long as any does, the other host is
/// told to keep the pages ([`super::loans`]).
#[derive(Debug)]
pub(crate) struct Arrival {
    engine: Weak<Engine>,
    image: Weak<HostImage>,
    /// For what is still to come.
    memory: Lease,
    /// All of it has come: its VMs depend on no other host any more.
    is_complete: AtomicBool,
}

impl Arrival {
    /// What has come since is used, and needs no promise any more.
    fn update_promise(&self) {
        if self.is_complete.load(Ordering::Relaxed) {
            return;
        }
        let missing = self.image.upgrade().map_or(0, |image| missing_bytes(&image));
        self.memory.is_enough(missing);
        self.is_complete.store(missing == 0, Ordering::Relaxed);
    }
}

fn missing_bytes(image: &Arc<HostImage>) -> u64 {
    image.missing_pages().saturating_mul(PAGE_BYTES)
}

/// Of one host.
#[derive(Debug, Default)]
pub(super) struct Arrivals(Mutex<BTreeMap<ImageName, Weak<Arrival>>>);

impl Arrivals {
    fn all(&self) -> MutexGuard<'_, BTreeMap<ImageName, Weak<Arrival>>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, arrival| arrival.strong_count() > 0);
        all
    }

    /// That of a snapshot, which `engine` serves here. `message` says what it is for.
    ///
    /// # Errors
    /// `no_capacity`: what is still to come of its memory does not fit.
    pub(super) fn of(
        &self,
        name: ImageName,
        engine: &Arc<Engine>,
        admission: &Admission,
        message: &str,
    ) -> Result<Arc<Arrival>, ErrorBody> {
        let mut all = self.all();
        if let Some(known) = all.get(&name).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let memory = admission.cache(message, missing_bytes(engine.image()))?;
        let arrival = Arc::new(Arrival {
            engine: Arc::downgrade(engine),
            image: Arc::downgrade(engine.image()),
            memory,
            is_complete: AtomicBool::new(false),
        });
        all.insert(name, Arc::downgrade(&arrival));
        Ok(arrival)
    }

    /// The snapshots that VMs here came of, and may still need pages of.
    pub(super) fn names(&self) -> BTreeSet<ImageName> {
        let needs = |arrival: &Weak<Arrival>| {
            arrival.upgrade().is_some_and(|arrival| !arrival.is_complete.load(Ordering::Relaxed))
        };
        self.all().iter().filter(|(_, arrival)| needs(arrival)).map(|(name, _)| *name).collect()
    }

    fn living(&self) -> Vec<Arc<Arrival>> {
        self.all().values().filter_map(Weak::upgrade).collect()
    }

    /// What has come since needs no promise any more.
    pub(super) fn update_promises(&self) {
        self.living().iter().for_each(|arrival| arrival.update_promise());
    }

    /// What nobody asked for comes or waits, as there is memory for it.
    pub(super) fn allow_prefetch(&self, allow: bool) {
        for engine in self.living().iter().filter_map(|arrival| arrival.engine.upgrade()) {
            engine.allow_prefetch(allow);
        }
    }
}
