//! Chunks on their way from other stores: each comes once, and those that something waits for come
//! before the others.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blake3::Hash;
use parking_lot::{Condvar, Mutex};
use vmfork_policy::AheadLimit;

use crate::error::StoreError;
use crate::work::Work;

/// How often is looked whether a turn is still wanted, and whether reads have become rare.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Chunks that have come from other stores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Because something read them.
    pub waited: u64,
    /// Before anything did.
    pub ahead: u64,
}

/// How long a smaller chunk takes says nothing of the way.
const MEASURED_BYTES: usize = 32 << 10;

/// Of one store.
#[derive(Debug)]
pub(crate) struct Flights {
    began: Instant,
    waited: AtomicU64,
    ahead: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    under_way: HashSet<Hash>,
    ahead: AheadLimit,
}

impl Default for Flights {
    fn default() -> Self {
        let state = State { under_way: HashSet::new(), ahead: AheadLimit::new(1) };
        let (waited, ahead) = (AtomicU64::new(0), AtomicU64::new(0));
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { began: Instant::now(), waited, ahead, state, changed }
    }
}

/// A chunk comes as long as this lives.
#[derive(Debug)]
pub(crate) struct Flight<'a> {
    flights: &'a Flights,
    hash: Hash,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.flights.state.lock().under_way.remove(&self.hash);
        self.flights.changed.notify_all();
    }
}

/// Something waits for a chunk as long as this lives.
#[derive(Debug)]
pub(crate) struct Waiting<'a>(&'a Flights);

impl Waiting<'_> {
    /// A chunk came for it.
    pub(crate) fn came(&self) {
        self.0.waited.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().ahead.waited(self.0.now());
        self.0.changed.notify_all();
    }
}

/// One of the background fetches, as long as this lives.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    flights: &'a Flights,
    took: Option<Duration>,
}

impl Turn<'_> {
    /// A chunk of `bytes` bytes came in this time.
    pub(crate) fn came(mut self, bytes: usize, took: Duration) {
        self.took = (bytes >= MEASURED_BYTES).then_some(took);
        self.flights.ahead.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.flights.state.lock().ahead.end(self.took);
        self.flights.changed.notify_all();
    }
}

impl Flights {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// What has come since the last call of this.
    pub(crate) fn take(&self) -> Fetched {
        let take = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        Fetched { waited: take(&self.waited), ahead: take(&self.ahead) }
    }

    /// Something waits for a chunk.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        self.state.lock().ahead.wait(self.now());
        Waiting(self)
    }

    /// The caller is the only one to bring this chunk, from when this returns. Another one may have
    /// brought it just before.
    pub(crate) fn begin(&self, hash: &Hash) -> Flight<'_> {
        let mut state = self.state.lock();
        while !state.under_way.insert(*hash) {
            self.changed.wait(&mut state);
        }
        Flight { flights: self, hash: *hash }
    }

    /// Wait until one more may come that nothing waits for. `max`: as many as their source takes.
    ///
    /// # Errors
    /// The work is cancelled.
    pub(crate) fn turn(&self, max: usize, work: &Work) -> Result<Turn<'_>, StoreError> {
        let mut state = self.state.lock();
        state.ahead.raise(max);
        while !state.ahead.begin(self.now()) {
            if work.cancelled.load(Ordering::Relaxed) {
                return Err(StoreError::Cancelled);
            }
            self.changed.wait_for(&mut state, LOOK_EVERY);
        }
        Ok(Turn { flights: self, took: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_comes_once_for_all_that_want_it_at_the_same_time() {
        let flights = Flights::default();
        let hash = blake3::hash(b"one");
        let at_once = AtomicU64::new(0);
        let flight = flights.begin(&hash);
        drop(flights.begin(&blake3::hash(b"another")));
        std::thread::scope(|scope| {
            let bring = || {
                let _flight = flights.begin(&hash);
                let others = at_once.fetch_add(1, Ordering::SeqCst);
                std::thread::park_timeout(Duration::from_millis(2));
                at_once.fetch_sub(1, Ordering::SeqCst);
                others
            };
            let all: Vec<_> = (0..4).map(|_| scope.spawn(bring)).collect();
            std::thread::park_timeout(Duration::from_millis(20));
            assert!(all.iter().all(|one| !one.is_finished()));
            drop(flight);
            assert!(all.into_iter().all(|one| one.join().is_ok_and(|others| others == 0)));
        });
    }

    #[test]
    fn a_turn_is_had_once_nothing_waits_and_given_up_with_its_work() {
        let (flights, work) = (Flights::default(), Work::new(1));
        let waiting = flights.wait();
        let one = flights.turn(4, &work).expect("one goes on");
        std::thread::scope(|scope| {
            let next = scope.spawn(|| flights.turn(4, &work).map(drop));
            std::thread::park_timeout(Duration::from_millis(20));
            assert!(!next.is_finished());
            one.came(MEASURED_BYTES, Duration::from_millis(1));
            assert!(next.join().expect("ended").is_ok());
            let _first = flights.turn(4, &work).expect("one");
            let next = scope.spawn(|| flights.turn(4, &work).map(drop));
            work.cancelled.store(true, Ordering::Relaxed);
            assert!(matches!(next.join().expect("ended"), Err(StoreError::Cancelled)));
        });
        drop(waiting);
    }
}
