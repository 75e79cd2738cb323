//! Snapshots of other hosts that VMs here came of: that their pages are still needed, and the
//! memory that those will take.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vmfork_engine::{Engine, HostImage};
use vmfork_image::{ImageId, ImageName, PAGE_BYTES, PageIdx, PageRange};

use crate::disks::{self, ArrivedPages, Hydrated, Needs};
use vmfork_host::admission::{Admission, Lease};
use vmfork_host::error::Refusal;
use vmfork_host::vm::CameOf;

/// VMs hold it that came of one snapshot of another host, and hand it on to their clones: as long
/// as any does, the other host is told to keep the pages ([`super::loans`]).
#[derive(Debug)]
pub(crate) struct Arrival {
    /// The snapshot's own.
    image: Weak<HostImage>,
    /// The snapshot's, and those of what its VMs were frozen into since.
    engines: Mutex<Vec<Weak<Engine>>>,
    /// What was to come when it arrived.
    needs: Vec<Need>,
    /// Of its disks.
    disk_needs: Mutex<Needs>,
    /// A thread brings all of its disks.
    is_hydrating: AtomicBool,
    /// All of it has come: its VMs depend on no other host any more.
    is_complete: AtomicBool,
    /// Bytes per second at which all of it comes; 0: on demand.
    hydration: AtomicU64,
    /// Bytes that lacked when it was looked at last.
    lacked: AtomicU64,
}

/// Memory for what is still to come into the cache of one image: once for all arrivals that need
/// pages there.
#[derive(Debug)]
struct Promise {
    image: Weak<HostImage>,
    memory: Lease,
}

/// What an arrival needs in the cache of one image.
#[derive(Debug)]
struct Need {
    promise: Arc<Promise>,
    runs: Vec<PageRange>,
}

impl CameOf for Arrival {
    fn goes_on(&self, engine: &Arc<Engine>) {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.retain(|engine| engine.strong_count() > 0);
        engines.push(Arc::downgrade(engine));
    }
}

impl Arrival {
    /// All of it is to come at this rate.
    pub(super) fn hydrate(self: &Arc<Self>, bytes_per_s: NonZeroU64) {
        self.hydration.store(bytes_per_s.get(), Ordering::Relaxed);
        self.engines().iter().for_each(|engine| engine.hydrate(bytes_per_s));
        self.hydrate_disks();
    }

    fn disk_needs(&self) -> MutexGuard<'_, Needs> {
        self.disk_needs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As memory; one thread at a time.
    fn hydrate_disks(self: &Arc<Self>) {
        if self.rate().is_none() || self.disk_needs().are_here() {
            return;
        }
        if self.is_hydrating.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = disks::hydrate(self) {
            tracing::warn!(%error, "another host's disks come on demand alone");
            self.over();
        }
    }

    fn engines(&self) -> Vec<Arc<Engine>> {
        let engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.iter().filter_map(Weak::upgrade).collect()
    }

    /// Once all of it has arrived, it depends on no other host. Fetches that failed are tried
    /// again.
    fn look(self: &Arc<Self>) {
        if self.is_complete.load(Ordering::Relaxed) {
            return;
        }
        // Without the image it can't be told: what descends from it may need pages of others that
        // it named.
        let lacks = self.image.upgrade().and_then(|image| missing_bytes(&image));
        let engines = self.engines();
        // Nor by one whose table is not complete yet.
        let each = engines.iter().map(|engine| missing_bytes(engine.image()));
        let lack = each.sum::<Option<u64>>().filter(|_| !engines.is_empty());
        self.hydrate_disks();
        let disk_needs = self.disk_needs();
        if (lacks == Some(0) || lack == Some(0)) && disk_needs.are_here() {
            self.is_complete.store(true, Ordering::Relaxed);
            return;
        }
        drop(disk_needs);
        let Some(lack) = lack else { return };
        let stands_still = self.lacked.swap(lack, Ordering::Relaxed) == lack;
        let rate = NonZeroU64::new(self.hydration.load(Ordering::Relaxed));
        if let Some(rate) = rate.filter(|_| stands_still) {
            engines.iter().for_each(|engine| engine.hydrate(rate));
        }
    }
}

impl Hydrated for Arrival {
    fn missing(&self) -> Vec<(Arc<ArrivedPages>, PageRange)> {
        self.disk_needs().missing()
    }

    fn rate(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.hydration.load(Ordering::Relaxed))
    }

    fn over(&self) {
        self.is_hydrating.store(false, Ordering::Relaxed);
    }
}

/// What views of it would have to fetch; `None`: its table is not complete.
fn missing_bytes(image: &Arc<HostImage>) -> Option<u64> {
    image.table().map(|_| image.missing_pages().saturating_mul(PAGE_BYTES))
}

/// How much of these runs, which may overlap, is absent in the cache of an image.
fn absent_bytes(image: &HostImage, mut runs: Vec<PageRange>) -> u64 {
    runs.sort_unstable_by_key(PageRange::start);
    let (presence, mut end, mut absent) = (image.cache().presence(), PageIdx(0), 0);
    for run in runs {
        let rest = run.from_page(end);
        absent += rest.len() - presence.count(rest);
        end = end.max(run.end());
    }
    absent * PAGE_BYTES
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

    /// That of a snapshot, which `engine` serves here. `disk_needs`: what its disks need. It takes
    /// the place of what was `set_aside` for what is to come.
    ///
    /// # Errors
    /// What is still to come of its memory does not fit.
    pub(super) fn of(
        &self,
        name: ImageName,
        engine: &Arc<Engine>,
        admission: &Admission,
        set_aside: &[Arc<Lease>],
        disk_needs: Needs,
    ) -> Result<Arc<Arrival>, Refusal> {
        let mut all = self.all();
        let known = all.iter().filter(|(known, _)| *known == name);
        let mut known = known.filter_map(|(_, arrival)| arrival.upgrade());
        // One whose image has gone is another's: what its VMs need is not known by it.
        let is_its = |it: &Arc<Arrival>| Weak::ptr_eq(&it.image, &Arc::downgrade(engine.image()));
        if let Some(known) = known.find(is_its) {
            set_aside.iter().for_each(|lease| lease.is_enough(0));
            if !disk_needs.are_here() {
                let mut needs = known.disk_needs();
                needs.add(disk_needs);
                known.is_complete.store(false, Ordering::Relaxed);
            }
            return Ok(known);
        }
        let mut lacking: BTreeMap<ImageId, (Arc<HostImage>, Vec<PageRange>)> = BTreeMap::new();
        // What comes from another host has a table that is complete.
        for (image, run) in engine.image().lacks() {
            lacking.entry(image.id()).or_insert_with(|| (image, Vec::new())).1.push(run);
        }
        let others: Vec<_> = all.iter().filter_map(|(_, arrival)| arrival.upgrade()).collect();
        let promised = |image: &Weak<HostImage>| {
            let needs = others.iter().flat_map(|arrival| &arrival.needs);
            let theirs: Vec<_> =
                needs.filter(|need| Weak::ptr_eq(&need.promise.image, image)).collect();
            (theirs.first().map(|need| Arc::clone(&need.promise)), theirs)
        };
        let lacking = lacking.into_values().map(|(image, runs)| {
            let (promise, theirs) = promised(&Arc::downgrade(&image));
            let theirs = theirs.iter().flat_map(|need| &need.runs);
            let bytes = absent_bytes(&image, runs.iter().chain(theirs).copied().collect());
            let has = promise.as_ref().map_or(0, |promise| promise.memory.bytes());
            (image, runs, promise, bytes.saturating_sub(has))
        });
        let lacking: Vec<_> = lacking.collect();
        let more = lacking.iter().map(|(.., more)| *more).fold(0, u64::saturating_add);
        let memory = admission.cache_in_place_of(more, set_aside)?;
        let needs = lacking.into_iter().map(|(image, runs, promise, more)| {
            let memory = memory.split_off(more);
            let promise = match promise {
                Some(promise) => {
                    promise.memory.add(memory);
                    promise
                }
                None => Arc::new(Promise { image: Arc::downgrade(&image), memory }),
            };
            Need { promise, runs }
        });
        let arrival = Arc::new(Arrival {
            image: Arc::downgrade(engine.image()),
            engines: Mutex::new(vec![Arc::downgrade(engine)]),
            needs: needs.collect(),
            disk_needs: Mutex::new(disk_needs),
            is_hydrating: AtomicBool::new(false),
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

    /// Of all VMs here that came of other hosts' snapshots, whatever they were frozen into since.
    pub(super) fn engines(&self) -> Vec<Arc<Engine>> {
        self.living().iter().flat_map(|arrival| arrival.engines()).collect()
    }

    /// What has come since needs no promise any more, and what could not be had is tried again.
    pub(super) fn look(&self) {
        self.keep_promises();
        self.living().iter().for_each(|arrival| arrival.look());
    }

    /// Pages that have arrived since count as used. Promises that no arrival needs any more are
    /// left out.
    fn keep_promises(&self) {
        // Who arrives meanwhile adds to them.
        let all = self.all();
        let living: Vec<_> = all.iter().filter_map(|(_, arrival)| arrival.upgrade()).collect();
        let mut needs: HashMap<*const Promise, (&Promise, Vec<PageRange>)> = HashMap::new();
        for Need { promise, runs } in living.iter().flat_map(|arrival| &arrival.needs) {
            let needed = needs.entry(Arc::as_ptr(promise)).or_insert((promise, Vec::new()));
            needed.1.extend(runs);
        }
        for (promise, runs) in needs.into_values() {
            let image = promise.image.upgrade();
            promise.memory.is_enough(image.map_or(0, |image| absent_bytes(&image, runs)));
        }
    }

    /// Allows or pauses prefetch, as the host has memory for it.
    pub(super) fn allow_prefetch(&self, allow: bool) {
        for engine in self.living().iter().flat_map(|arrival| arrival.engines()) {
            engine.allow_prefetch(allow);
        }
    }
}

#[cfg(test)]
mod tests;
