//! Doing many things of a kind with a few threads.

use std::fmt;
use std::sync::OnceLock;
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
    stored: OnStored,
}

/// What [`Work::on_stored`] was given.
#[derive(Default)]
struct OnStored(OnceLock<Call>);

type Call = Box<dyn Fn(&str) + Send + Sync>;

impl fmt::Debug for OnStored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnStored").finish_non_exhaustive()
    }
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
            stored: OnStored::default(),
        }
    }

    /// Has `call` called with the name of each snapshot that this work puts into the store, the
    /// bases first. At that time it can be opened, and cannot be removed yet. A second call of this
    /// has no effect.
    pub fn on_stored(&self, call: impl Fn(&str) + Send + Sync + 'static) {
        let _the_first_stands = self.stored.0.set(Box::new(call));
    }

    /// A snapshot is new in the store. Call it while the snapshot's `Writing` lives, which keeps it
    /// from being removed.
    pub(crate) fn has_stored(&self, name: &str) {
        if let Some(call) = self.stored.0.get() {
            call(name);
        }
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
