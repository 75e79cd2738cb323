//! Plain counters, written by engines and read by anyone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmfork_image::Origin;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Steps of [`Times`] before the last, which has no bound: from 16 µs to 8.4 s.
const BOUNDS: usize = 4 * 19;

/// How long things took, to a quarter of a power of two.
#[derive(Debug)]
pub struct Times {
    steps: [Counter; BOUNDS + 1],
    sum_us: Counter,
}

impl Default for Times {
    fn default() -> Self {
        Self { steps: std::array::from_fn(|_| Counter::default()), sum_us: Counter::default() }
    }
}

impl Times {
    /// The bounds of the steps in µs, exclusive: 20, 24, 28, 32, 40 and so on.
    pub fn bounds_us() -> impl Iterator<Item = u64> {
        (0..BOUNDS).map(|step| (5 + step as u64 % 4) << (step / 4 + 2))
    }

    pub(crate) fn add(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let octave = (us >> 4).checked_ilog2().unwrap_or(0);
        let quarter = us.max(16) >> (octave + 2) & 3;
        let step = 4 * octave as usize + quarter as usize;
        self.steps[step.min(BOUNDS)].add(1);
        self.sum_us.add(us);
    }

    /// How many are in each step; the last has no bound.
    pub fn steps(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().map(Counter::get)
    }

    /// The sum of all of them.
    pub fn sum_us(&self) -> u64 {
        self.sum_us.get()
    }
}

/// Of one image on this host. Bytes count what was brought into the cache.
#[derive(Debug, Default)]
pub struct ImageCounters {
    pub demand_bytes: Counter,
    pub drained_bytes: Counter,
    pub from_frozen_bytes: Counter,
    pub from_image_bytes: Counter,
    pub from_stored_bytes: Counter,
    pub from_peer_bytes: Counter,
    /// The part of it that was prefetched.
    pub from_peer_ahead_bytes: Counter,
    /// Read for other hosts.
    pub lent_bytes: Counter,
    /// Brought in before anyone asked: by a working set, a prediction, or to be independent of the
    /// store.
    pub prefetched_bytes: Counter,
    /// Faults of views on pages of a store: those that were there, or on their way, because they
    /// were fetched ahead …
    pub predicted_faults: Counter,
    /// … and those for which they had to be fetched.
    pub remote_faults: Counter,
    /// How long views waited for pages that were on this host, …
    pub waited_here: Times,
    /// … that came from other hosts, …
    pub waited_for_peer: Times,
    /// … and from stores. From when the engine learned of the fault.
    pub waited_for_stored: Times,
    /// Pages that its VM had written when it was frozen.
    pub frozen_pages: Counter,
    /// How long finding those took, in µs, all in.
    pub derive_us: Counter,
}

impl ImageCounters {
    /// How long views waited for pages that were there; `None`: on this host.
    pub(crate) fn waited(&self, from: Option<Origin>) -> &Times {
        match from {
            Some(Origin::Peer) => &self.waited_for_peer,
            Some(Origin::Chunk) => &self.waited_for_stored,
            _ => &self.waited_here,
        }
    }
}

/// Of one view: faults that reached user space, by how they were answered.
#[derive(Debug, Default)]
pub struct ViewCounters {
    pub zero: Counter,
    pub fetch: Counter,
    pub present: Counter,
    pub mapped: Counter,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_step_below_whose_bound_it_is() {
        let bounds: Vec<u64> = Times::bounds_us().collect();
        assert_eq!(bounds[..9], [20, 24, 28, 32, 40, 48, 56, 64, 80]);
        assert_eq!(bounds.last(), Some(&(1 << 23)));
        for us in
            [0, 15, 16, 19, 20, 31, 32, 39, 40, 63, 64, 1000, (1 << 23) - 1, 1 << 23, u64::MAX]
        {
            let times = Times::default();
            times.add(Duration::from_micros(us));
            let expected = bounds.iter().position(|bound| us < *bound).unwrap_or(bounds.len());
            assert_eq!(times.steps().position(|n| n == 1), Some(expected), "{us} µs");
            assert_eq!((times.steps().sum::<u64>(), times.sum_us()), (1, us));
        }
    }
}
