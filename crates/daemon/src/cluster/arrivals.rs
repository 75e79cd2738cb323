//! Snapshots of other hosts that VMs here came of: that their pages are still needed, and the memory that those will take.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vmfork_api::ErrorBody;
use vmfork_image::{ImageName, PAGE_BYTES};
use vmfork_memory::{Engine, HostImage};

use crate::admission::{Admission, Lease};

/// VMs hold it that came of one snapshot of another host, and hand it on to their clones: as long as any does, the other host is
/// told to keep the pages ([`super::loans`]).
#[derive(Debug)]
pub(crate) struct Arrival {
    /// The snapshot's own.
    image: Weak<HostImage>,
    /// The snapshot's, and those of what its VMs were frozen into since.
    engines: Mutex<Vec<Weak<Engine>>>,
    /// For what is still to come.
    memory: Lease,
    /// All of it has come: its VMs depend on no other host any more.
    is_complete: AtomicBool,
    /// Bytes per second at which all of it comes; 0: on demand.
    hydration: AtomicU64,
    /// Bytes that lacked when it was looked at last.
    lacked: AtomicU64,
}

impl Arrival {
    /// A VM that came of it goes on as a view of this engine's image.
    pub(crate) fn goes_on(&self, engine: &Arc<Engine>) {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.retain(|engine| engine.strong_count() > 0);
        engines.push(Arc::downgrade(engine));
    }

    /// All of it is to come at this rate.
    pub(super) fn hydrate(&self, bytes_per_s: NonZeroU64) {
        self.hydration.store(bytes_per_s.get(), Ordering::Relaxed);
        self.engines().iter().for_each(|engine| engine.hydrate(bytes_per_s));
    }

    fn engines(&self) -> Vec<Arc<Engine>> {
        let engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.iter().filter_map(Weak::upgrade).collect()
    }

    /// What has come since is used, and needs no promise any more. What was to come, and could not be had, is tried again.
    fn look(&self) {
        if self.is_complete.load(Ordering::Relaxed) {
            return;
        }
        // Without the image it can't be told: what descends from it may need pages of others that it named.
        let lacks = self.image.upgrade().and_then(|image| missing_bytes(&image));
        if let Some(lacks) = lacks {
            self.memory.is_enough(lacks);
        }
        let engines = self.engines();
        // Nor by one whose table is not complete yet.
        let each = engines.iter().map(|engine| missing_bytes(engine.image()));
        let lack = each.sum::<Option<u64>>().filter(|_| !engines.is_empty());
        if lacks == Some(0) || lack == Some(0) {
            self.is_complete.store(true, Ordering::Relaxed);
            return;
        }
        let Some(lack) = lack else { return };
        let stands_still = self.lacked.swap(lack, Ordering::Relaxed) == lack;
        let rate = NonZeroU64::new(self.hydration.load(Ordering::Relaxed));
        if let Some(rate) = rate.filter(|_| stands_still) {
            engines.iter().for_each(|engine| engine.hydrate(rate));
        }
    }
}

/// What views of it would have to fetch; `None`: its table is not complete.
fn missing_bytes(image: &Arc<HostImage>) -> Option<u64> {
    image.table().map(|_| image.missing_pages().saturating_mul(PAGE_BYTES))
}

/// Of one host.
#[derive(Debug, Default)]
pub(super) struct Arrivals(Mutex<Vec<(ImageName, Weak<Arrival>)>>);

impl Arrivals {
    fn all(&self) -> MutexGuard<'_, Vec<(ImageName, Weak<Arrival>)>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, arrival)| arrival.strong_count() > 0);
        all
    }

    /// That of a snapshot, which `engine` serves here. `message` says what it is for; it takes the place of what was `set_aside`
    /// for what is to come.
    ///
    /// # Errors
    /// `no_capacity`: what is still to come of its memory does not fit.
    pub(super) fn of(
        &self,
        name: ImageName,
        engine: &Arc<Engine>,
        admission: &Admission,
        message: &str,
        set_aside: &[Arc<Lease>],
    ) -> Result<Arc<Arrival>, ErrorBody> {
        let mut all = self.all();
        let known = all.iter().filter(|(known, _)| *known == name);
        let mut known = known.filter_map(|(_, arrival)| arrival.upgrade());
        // One whose image has gone is another's: what its VMs need is not known by it.
        let is_its = |it: &Arc<Arrival>| Weak::ptr_eq(&it.image, &Arc::downgrade(engine.image()));
        if let Some(known) = known.find(is_its) {
            set_aside.iter().for_each(|lease| lease.is_enough(0));
            return Ok(known);
        }
        // What comes from another host has a table that is complete.
        let missing = missing_bytes(engine.image()).unwrap_or_default();
        let memory = admission.cache_in_place_of(message, missing, set_aside)?;
        let arrival = Arc::new(Arrival {
            image: Arc::downgrade(engine.image()),
            engines: Mutex::new(vec![Arc::downgrade(engine)]),
            memory,
            is_complete: AtomicBool::new(false),
            hydration: AtomicU64::new(0),
            lacked: AtomicU64::new(0),
        });
        all.push((name, Arc::downgrade(&arrival)));
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
        self.all().iter().filter_map(|(_, arrival)| arrival.upgrade()).collect()
    }

    /// What has come since needs no promise any more, and what could not be had is tried again.
    pub(super) fn look(&self) {
        self.living().iter().for_each(|arrival| arrival.look());
    }

    /// What nobody asked for comes or waits, as there is memory for it.
    pub(super) fn allow_prefetch(&self, allow: bool) {
        for engine in self.living().iter().flat_map(|arrival| arrival.engines()) {
            engine.allow_prefetch(allow);
        }
    }
}

#[cfg(test)]
mod tests;
