//! Doing many things of a kind with a few threads.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::error::StoreError;

/// How a long operation is watched, and ended before it has finished.
#[derive(Debug)]
pub struct Work {
    /// Most threads at a time; at least 1.
    pub threads: usize,
    /// Set it, and the operation ends with [`StoreError::Cancelled`] after the chunks that are in
    /// hand.
    pub cancelled: AtomicBool,
    /// Raw bytes of pages that are done with. Grows.
    pub done_bytes: AtomicU64,
    /// Of how many; set once it is known.
    pub total_bytes: AtomicU64,
    /// The names of the snapshots that are new in the store, in the order in which they came.
    stored: Mutex<Vec<String>>,
}

impl Default for Work {
    /// As many threads as the host has cores.
    fn default() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from))
    }
}

impl Work {
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            cancelled: AtomicBool::new(false),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            stored: Mutex::default(),
        }
    }

    /// The names of the snapshots that this work has put into the store and that were not asked for
    /// before, the bases first. Also when it failed half-way.
    pub fn take_stored(&self) -> Vec<String> {
        std::mem::take(&mut *self.stored.lock())
    }

    pub(crate) fn has_stored(&self, name: &str) {
        self.stored.lock().push(name.to_owned());
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        if self.cancelled.load(Ordering::Relaxed) { Err(StoreError::Cancelled) } else { Ok(()) }
    }

    pub(crate) fn done(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn expect(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Call `each` with every item, on several threads, each with a state of its own from `begin`.
    /// Answers in the order of the items. After the first error no more are begun.
    pub(crate) fn for_each<T: Sync, S, R: Send>(
        &self,
        items: &[T],
        begin: impl Fn() -> Result<S, StoreError> + Sync,
        each: impl Fn(&mut S, &T) -> Result<R, StoreError> + Sync,
    ) -> Result<Vec<R>, StoreError> {
        self.for_each_on(self.threads, items, begin, each)
    }

    /// The same with another number of threads: for what waits more than it computes.
    pub(crate) fn for_each_on<T: Sync, S, R: Send>(
        &self,
        threads: usize,
        items: &[T],
        begin: impl Fn() -> Result<S, StoreError> + Sync,
        each: impl Fn(&mut S, &T) -> Result<R, StoreError> + Sync,
    ) -> Result<Vec<R>, StoreError> {
        let next = AtomicUsize::new(0);
        let stop = AtomicBool::new(false);
        let one_thread = || -> Result<Vec<(usize, R)>, StoreError> {
            let mut state = begin()?;
            let mut answers = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(at) else { break };
                self.check()?;
                answers.push((at, each(&mut state, item)?));
            }
            Ok(answers)
        };
        let all = Mutex::new(Vec::with_capacity(items.len()));
        let failed: Mutex<Option<StoreError>> = Mutex::new(None);
        let run = || match one_thread() {
            Ok(answers) => all.lock().extend(answers),
            Err(error) => {
                stop.store(true, Ordering::Relaxed);
                failed.lock().get_or_insert(error);
            }
        };
        std::thread::scope(|scope| {
            // This thread is one of them, so the work gets done even where no thread can be had.
            for i in 1..threads.min(items.len()) {
                let thread = std::thread::Builder::new().name(format!("store-{i}"));
                if let Err(error) = thread.spawn_scoped(scope, run) {
                    tracing::warn!(%error, "work goes on with fewer threads");
                    break;
                }
            }
            run();
        });
        self.check()?;
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let mut all = all.into_inner();
        all.sort_unstable_by_key(|(at, _)| *at);
        Ok(all.into_iter().map(|(_, answer)| answer).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_items_order() {
        let items: Vec<u64> = (0..1000).collect();
        for threads in [0, 1, 4, 2000] {
            let work = Work::new(threads);
            let answers = work.for_each(&items, || Ok(()), |(), item| Ok(item * 2)).expect("done");
            assert!(
                answers.iter().eq(items.iter().map(|item| item * 2).collect::<Vec<_>>().iter())
            );
        }
    }

    #[test]
    fn the_first_error_ends_the_work() {
        let items: Vec<u64> = (0..100_000).collect();
        let work = Work::new(4);
        let calls = AtomicUsize::new(0);
        let done = work.for_each(
            &items,
            || Ok(()),
            |(), item| {
                calls.fetch_add(1, Ordering::Relaxed);
                if *item == 10 { Err(StoreError::Busy { name: "x".into() }) } else { Ok(()) }
            },
        );
        assert!(matches!(done, Err(StoreError::Busy { .. })));
        assert!(calls.into_inner() < items.len());
    }

    #[test]
    fn work_that_is_cancelled_ends() {
        let items = [1, 2, 3];
        let work = Work::new(2);
        let done = work.for_each(
            &items,
            || Ok(()),
            |(), _| {
                work.cancelled.store(true, Ordering::Relaxed);
                Ok(())
            },
        );
        assert!(matches!(done, Err(StoreError::Cancelled)));
    }
}
