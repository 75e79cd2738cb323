//! The prefetches of an image from afar that are in flight: several engines that need a page fetch
//! it once.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmfork_image::PageRange;

/// Of one image, for all engines that fetch it.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    runs: Mutex<Vec<PageRange>>,
    ended: Condvar,
}

/// A run of it, until it is dropped: it is here then, or does not come.
#[derive(Debug)]
pub(crate) struct Bringing<'a> {
    incoming: &'a Incoming,
    run: PageRange,
}

impl Incoming {
    fn runs(&self) -> MutexGuard<'_, Vec<PageRange>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `run` is fetched from now on, or from when no other engine fetches any of it.
    /// `None`: another still does after `wait`. It may be present by then.
    pub(crate) fn begin(&self, run: PageRange, wait: Duration) -> Option<Bringing<'_>> {
        let is_brought = |runs: &[PageRange]| runs.iter().any(|it| !it.intersect(&run).is_empty());
        let waited =
            self.ended.wait_timeout_while(self.runs(), wait, |runs| is_brought(runs.as_slice()));
        let (mut runs, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if is_brought(&runs) {
            return None;
        }
        runs.push(run);
        Some(Bringing { incoming: self, run })
    }
}

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        let mut runs = self.incoming.runs();
        if let Some(at) = runs.iter().position(|run| *run == self.run) {
            runs.swap_remove(at);
        }
        drop(runs);
        self.incoming.ended.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use vmfork_image::PageIdx;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn run(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn no_page_is_brought_by_two() {
        let incoming = Incoming::default();
        let first = incoming.begin(run(0, 16), Duration::ZERO).expect("no other read does");
        assert!(incoming.begin(run(15, 2), Duration::ZERO).is_none());
        let other = incoming.begin(run(16, 16), Duration::ZERO).expect("other pages");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| incoming.begin(run(8, 1), LONG).is_some());
            drop(first);
            assert!(waits.join().expect("no panic"));
        });
        drop(other);
        assert!(incoming.runs().is_empty());
    }
}
