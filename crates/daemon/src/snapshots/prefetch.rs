//! What comes before anyone asks, when VMs of a snapshot start.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmfork_api::Prefetch;
use vmfork_image::PageRange;
use vmfork_store::StoreError;

use super::{Opened, SnapshotError, Snapshots};
use crate::hub::{Core, chain};

/// What a host that is short of memory must have free, on top of its reserve, before anything is fetched that nobody
/// asked for.
const SPARE_BYTES: u64 = 256 << 20;
/// How often that is looked at, and whether a store is needed no more.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often what could not be fetched is tried again until a snapshot's memory depends on the store no more.
const HYDRATE_TRIES_MAX: u32 = 10;

/// Have pages come, once for all VMs that share them.
pub(super) fn begin(
    core: &Arc<Core>,
    name: &str,
    opened: &Arc<Opened>,
    prefetch: Prefetch,
    mib_per_s: u32,
) {
    if matches!(prefetch, Prefetch::WorkingSet | Prefetch::All) && opened.claim_working_set() {
        let (core, opened, name) = (Arc::clone(core), Arc::clone(opened), name.to_owned());
        tokio::task::spawn_blocking(move || match load(&core, &name, &opened) {
            Ok(()) => {}
            // What it lacks comes on demand.
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(snapshot = name, error, "working set not loaded");
            }
        });
    }
    if matches!(prefetch, Prefetch::Demand | Prefetch::All) && opened.claim_prediction() {
        opened.engine.predict();
    }
    if let Some(bytes_per_s) = NonZeroU64::new(u64::from(mib_per_s) << 20) {
        hydrate(name, opened, bytes_per_s);
    }
}

/// Read the working set, in the order in which it is stored, into the caches.
fn load(core: &Core, name: &str, opened: &Opened) -> Result<(), SnapshotError> {
    let began = Instant::now();
    let Some(set) = core.snapshots.store.working_set(name)? else { return Ok(()) };
    if set.id() != opened.id {
        return Ok(());
    }
    // The VMs that start meanwhile need processors, too.
    let work = core.snapshots.work_on((core.cores / 2).max(1));
    let pages = AtomicU64::new(0);
    let insert = |range: PageRange, bytes: &[u8]| {
        if core.is_short_of_memory() {
            work.cancelled.store(true, Ordering::Relaxed);
            return Ok(());
        }
        pages.fetch_add(opened.engine.insert(range, bytes)?, Ordering::Relaxed);
        Ok(())
    };
    let outcome = set.for_each(&insert, &work);
    let (pages, took_ms) = (pages.into_inner(), crate::fork::ms(began.elapsed()));
    match outcome {
        Err(StoreError::Cancelled) => {
            tracing::info!(snapshot = name, pages, "working set cut short: no memory");
        }
        outcome => {
            outcome?;
            tracing::debug!(snapshot = name, pages, took_ms, "working set loaded");
        }
    }
    Ok(())
}

/// Fetch the rest, until nothing depends on the store any more, or all its VMs have ended.
fn hydrate(name: &str, opened: &Arc<Opened>, bytes_per_s: NonZeroU64) {
    opened.engine.hydrate(bytes_per_s);
    let (opened, name) = (Arc::downgrade(opened), name.to_owned());
    tokio::spawn(async move {
        let (mut left, mut tries) = (u64::MAX, 0);
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(opened) = opened.upgrade() else { return };
            let missing = tokio::task::block_in_place(|| opened.engine.image().missing_pages());
            if missing == 0 {
                tracing::info!(snapshot = name, "its VMs depend on the store no more");
                return;
            }
            if missing < left {
                (left, tries) = (missing, 0);
                continue;
            }
            // Nothing has come for a while: the store did not answer, or the host is short of memory.
            tries += 1;
            if tries > HYDRATE_TRIES_MAX {
                tracing::warn!(snapshot = name, missing, "not all pages can be had");
                return;
            }
            opened.engine.hydrate(bytes_per_s);
        }
    });
}

impl Core {
    /// Whether nothing is to come into memory that nobody asked for.
    fn is_short_of_memory(&self) -> bool {
        let available = self.admission.host().available_bytes;
        available < self.config.memory_reserve_bytes.saturating_add(SPARE_BYTES)
    }
}

/// Have prefetching give way whenever the host is short of memory, for as long as the daemon lives.
pub(crate) fn mind_memory(core: &Arc<Core>) {
    let weak = Arc::downgrade(core);
    tokio::spawn(async move {
        let mut was_short = false;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(core) = weak.upgrade() else { return };
            let is_short = core.is_short_of_memory();
            if is_short != was_short {
                tracing::info!(is_short, "memory for what nobody asked for");
            }
            if is_short || was_short {
                tokio::task::block_in_place(|| core.snapshots.allow_prefetch(!is_short));
            }
            was_short = is_short;
        }
    });
}

impl Snapshots {
    fn allow_prefetch(&self, allow: bool) {
        for opened in self.all_opened() {
            opened.engine.allow_prefetch(allow);
        }
    }
}
