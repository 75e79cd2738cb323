//! Plain counters, written by engines and read by anyone.

use std::sync::atomic::{AtomicU64, Ordering};

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

/// Of one image on this host. Bytes count what was brought into the cache.
#[derive(Debug, Default)]
pub struct ImageCounters {
    pub demand_bytes: Counter,
    pub drained_bytes: Counter,
    pub from_frozen_bytes: Counter,
    pub from_image_bytes: Counter,
    pub from_stored_bytes: Counter,
    pub from_peer_bytes: Counter,
    /// Brought in before anyone asked: by a working set, a prediction, or to be independent of the store.
    pub prefetched_bytes: Counter,
    /// Faults of views on pages of a store: those that were there, or on their way, because they were fetched ahead …
    pub predicted_faults: Counter,
    /// … and those for which they had to be fetched.
    pub remote_faults: Counter,
    /// Pages that its VM had written when it was frozen.
    pub frozen_pages: Counter,
    /// How long finding those took, in µs, all in.
    pub derive_us: Counter,
}

/// Of one view: faults that reached user space, by how they were answered.
#[derive(Debug, Default)]
pub struct ViewCounters {
    pub zero: Counter,
    pub fetch: Counter,
    pub present: Counter,
    pub mapped: Counter,
}
