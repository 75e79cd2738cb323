//! What comes before anyone asks, when VMs of a snapshot start.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmfork_api::Prefetch;
use vmfork_image::PageRange;
use vmfork_store::{Fetched, Role, StoreError};

use crate::error::SnapshotError;
use crate::library::{Library, Snapshots};
use crate::opened::Opened;
use crate::opened::WorkingSetClaim;
use vmfork_host::error::chain;
use vmfork_host::metrics::PulledChunk;

/// How often that is looked at, and whether a store is needed no more.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// At every this many ticks, the present pages of open snapshots are counted.
/// That takes a while. Until then, more is promised than necessary.
const UPDATE_LOOKS: u64 = 4;
/// How long hydration waits at most until it tries again: a store that is away may be away for
/// long, and is not to be asked all the time.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// After so much of a working set (1 MiB) what views wait for comes first, ...
const GIVE_WAY_PAGES: u64 = 256;
/// ... for so long at most: loading as much takes about 1 ms, and what is loaded is what they ask
/// for next.
const GIVE_WAY_MAX: Duration = Duration::from_millis(4);

/// Have pages come, once for all VMs that share them.
pub(super) fn begin(
    library: &Arc<Library>,
    name: &str,
    opened: &Arc<Opened>,
    prefetch: Prefetch,
    mib_per_s: u32,
) {
    if matches!(prefetch, Prefetch::WorkingSet | Prefetch::All)
        && let Some(claim) = opened.claim_working_set()
    {
        let (library, name) = (Arc::clone(library), name.to_owned());
        tokio::task::spawn_blocking(move || {
            // What it lacks comes on demand.
            if let Err(error) = load(&library, &name, claim) {
                let error = chain(&error);
                tracing::warn!(snapshot = name, error, "working set not loaded");
            }
        });
    }
    if matches!(prefetch, Prefetch::Demand | Prefetch::All) && opened.claim_prediction() {
        opened.engine.predict();
    }
    if let Some(bytes_per_s) = NonZeroU64::new(u64::from(mib_per_s) << 20)
        && opened.claim_hydration(bytes_per_s)
    {
        watch_hydration(library, name, opened);
    }
}

/// Read the working set, in the order in which it is stored, into the caches: as long as a VM may
/// need it and the host has memory for it.
fn load(library: &Library, name: &str, claim: WorkingSetClaim) -> Result<(), SnapshotError> {
    let began = Instant::now();
    let Some(set) = library.snapshots.store.working_set(name, &Role::Memory)? else {
        return Ok(());
    };
    if claim.opened().is_none_or(|opened| opened.id != set.id()) {
        return Ok(());
    }
    // The VMs that start meanwhile need processors, too.
    let work = library.snapshots.work_on((library.core.cores / 2).max(1));
    let pages = AtomicU64::new(0);
    let insert = |range: PageRange, bytes: &[u8]| {
        let wanted = claim.opened().filter(|_| !library.core.is_short_of_memory());
        let Some(opened) = wanted else {
            work.cancelled.store(true, Ordering::Relaxed);
            return Ok(());
        };
        let came = opened.engine.insert(range, bytes)?;
        let before = pages.fetch_add(came, Ordering::Relaxed);
        if before / GIVE_WAY_PAGES != (before + came) / GIVE_WAY_PAGES {
            opened.engine.wait_for_demand(GIVE_WAY_MAX);
        }
        Ok(())
    };
    let outcome = set.for_each(&insert, &work);
    let (pages, took_ms) = (pages.into_inner(), vmfork_fork::ms(began.elapsed()));
    match outcome {
        Err(StoreError::Cancelled) => {
            tracing::info!(snapshot = name, pages, "working set cut short: no memory, or no VM");
        }
        outcome => {
            outcome?;
            claim.loaded();
            tracing::debug!(snapshot = name, pages, took_ms, "working set loaded");
        }
    }
    Ok(())
}

/// See to it that all comes, until nothing depends on the store any more, or all VMs have ended.
fn watch_hydration(library: &Arc<Library>, name: &str, opened: &Arc<Opened>) {
    let (library, opened) = (Arc::downgrade(library), Arc::downgrade(opened));
    let name = name.to_owned();
    tokio::spawn(async move {
        let (mut watch, mut wait) = (HydrationWatch::new(), LOOK_EVERY);
        loop {
            tokio::time::sleep(wait).await;
            let Some((library, opened)) = library.upgrade().zip(opened.upgrade()) else { return };
            let look =
                || (opened.engine.image().missing_pages(), !library.core.is_short_of_memory());
            let (missing, is_allowed) = tokio::task::block_in_place(look);
            wait = match watch.look(missing, is_allowed) {
                Next::Over => {
                    tracing::info!(snapshot = name, "its VMs depend on the store no more");
                    return;
                }
                Next::Look => LOOK_EVERY,
                Next::Retry { after } => {
                    if after == RETRY_AFTER_MAX {
                        tracing::warn!(snapshot = name, missing, "pages can't be had; trying on");
                    }
                    opened.hydrate_again();
                    after
                }
            };
        }
    });
}

/// Decides when what could not be fetched is tried again.
#[derive(Debug)]
struct HydrationWatch {
    /// Pages that were missing last.
    missing: u64,
    retry_after: Duration,
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Nothing is missing.
    Over,
    Look,
    /// Begin again with what is missing, and look again then.
    Retry {
        after: Duration,
    },
}

impl HydrationWatch {
    fn new() -> Self {
        Self { missing: u64::MAX, retry_after: LOOK_EVERY }
    }

    /// `is_allowed`: the host has memory for prefetch. While it has not, no page is expected.
    /// That no page arrives then means nothing about the store.
    fn look(&mut self, missing: u64, is_allowed: bool) -> Next {
        if missing == 0 {
            return Next::Over;
        }
        if missing < self.missing || !is_allowed {
            *self = Self { missing, retry_after: LOOK_EVERY };
            return Next::Look;
        }
        self.retry_after = (self.retry_after * 2).min(RETRY_AFTER_MAX);
        Next::Retry { after: self.retry_after }
    }
}

/// Have prefetching give way whenever the host is short of memory, and count what comes from other
/// stores, for as long as the daemon lives.
pub fn mind_memory(library: &Arc<Library>) {
    let weak = Arc::downgrade(library);
    tokio::spawn(async move {
        let mut was_short = false;
        for look in 1_u64.. {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(library) = weak.upgrade() else { return };
            if look.is_multiple_of(UPDATE_LOOKS) {
                tokio::task::block_in_place(|| library.snapshots.update_promises());
            }
            let Fetched { waited, ahead } = library.snapshots.store.take_fetched();
            library.core.metrics.add_pulled_chunks(PulledChunk::Waited, waited);
            library.core.metrics.add_pulled_chunks(PulledChunk::Ahead, ahead);
            let is_short = library.core.is_short_of_memory();
            if is_short != was_short {
                tracing::info!(is_short, "memory for prefetch");
            }
            if is_short || was_short {
                tokio::task::block_in_place(|| library.snapshots.allow_prefetch(!is_short));
            }
            was_short = is_short;
        }
    });
}

impl Snapshots {
    fn update_promises(&self) {
        for opened in self.all_opened() {
            opened.update_promise();
        }
    }

    fn allow_prefetch(&self, allow: bool) {
        for opened in self.all_opened() {
            opened.engine.allow_prefetch(allow);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BRIEF: Duration = Duration::from_secs(1);

    #[test]
    fn hydration_tries_on_ever_more_rarely_for_as_long_as_something_is_missing() {
        let mut watch = HydrationWatch::new();
        assert_eq!(watch.look(100, true), Next::Look);
        assert_eq!(watch.look(90, true), Next::Look);
        let mut last = Duration::ZERO;
        for _ in 0..100 {
            let Next::Retry { after } = watch.look(90, true) else { panic!("it gave up") };
            assert!(after >= last && after <= RETRY_AFTER_MAX, "{after:?} after {last:?}");
            last = after;
        }
        assert_eq!(last, RETRY_AFTER_MAX);
        // The store is there again.
        assert_eq!(watch.look(89, true), Next::Look);
        assert_eq!(watch.look(89, true), Next::Retry { after: BRIEF });
        assert_eq!(watch.look(0, true), Next::Over);
    }

    #[test]
    fn that_nothing_comes_while_nothing_may_is_no_reason_to_try_again() {
        let mut watch = HydrationWatch::new();
        assert_eq!(watch.look(100, true), Next::Look);
        assert!((0..100).all(|_| watch.look(100, false) == Next::Look));
        assert_eq!(watch.look(100, true), Next::Retry { after: BRIEF });
    }
}
