//! Plain counters, written by the threads that transfer and read by anyone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::proto::RefusalKind;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Buckets of a [`Histogram`]: the last begins at a second.
const BUCKETS: usize = 16;

/// How long things took. Bucket k has those of less than 64 µs × 2^k, the last all the rest.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [Counter; BUCKETS],
    sum_us: Counter,
}

impl Histogram {
    pub(crate) fn add(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - (us >> 6).leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)].add(1);
        self.sum_us.add(us);
    }

    /// The upper bound of each bucket in µs (`None` of the last) and how many are in it.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> + '_ {
        let last = BUCKETS - 1;
        self.buckets.iter().enumerate().map(move |(k, n)| ((k < last).then(|| 64 << k), n.get()))
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::get).sum()
    }

    /// The sum of all of them.
    pub fn sum_us(&self) -> u64 {
        self.sum_us.get()
    }
}

/// The part of answers that were background reads.
#[derive(Debug, Default)]
pub struct AheadCounters {
    pub requests: Counter,
    pub pages: Counter,
    pub wire_bytes: Counter,
}

impl AheadCounters {
    pub(crate) fn add(&self, pages: u64, wire_bytes: u64) {
        self.requests.add(1);
        self.pages.add(pages);
        self.wire_bytes.add(wire_bytes);
    }
}

/// What a `PageService` did since it started.
#[derive(Debug, Default)]
pub struct ServiceCounters {
    /// Connections of members.
    pub connections: Counter,
    /// Connections that were closed at once, since there were too many.
    pub turned_away: Counter,
    /// Those that did not become TLS between members.
    pub handshakes_failed: Counter,
    /// Requests for pages that were understood.
    pub requests: Counter,
    /// Pages that were answered, zero ones among them …
    pub pages: Counter,
    /// … and how many those are.
    pub zero_pages: Counter,
    /// Bytes of the others, …
    pub raw_bytes: Counter,
    /// … and as they were sent, compressed if it paid; without TLS's own.
    pub wire_bytes: Counter,
    /// Of all these.
    pub ahead: AheadCounters,
    refusals: [Counter; RefusalKind::ALL.len()],
}

impl ServiceCounters {
    pub(crate) fn refused(&self, kind: RefusalKind) {
        if let Some(counter) = self.refusals.get(kind.place()) {
            counter.add(1);
        }
    }

    /// Requests that were refused, by kind.
    pub fn refusals(&self) -> impl Iterator<Item = (RefusalKind, u64)> + '_ {
        RefusalKind::ALL.into_iter().zip(self.refusals.iter().map(Counter::get))
    }
}

/// What was asked of one other host.
#[derive(Debug, Default)]
pub struct PeerCounters {
    /// Connections that were made.
    pub connections: Counter,
    /// Requests for pages that were answered with them.
    pub requests: Counter,
    pub pages: Counter,
    /// How many of the pages were zero, which takes no bytes.
    pub zero_pages: Counter,
    /// Bytes of the others, …
    pub raw_bytes: Counter,
    /// … and as they came.
    pub wire_bytes: Counter,
    /// Of all these.
    pub ahead: AheadCounters,
    /// Requests made again, since a connection had ended while it was not used.
    pub retries: Counter,
    /// Requests that were answered with the name of another host that has the pages.
    pub redirected: Counter,
    /// Requests without an answer, or with another one than pages.
    pub failures: Counter,
    /// Requests for pages, from first to last byte; waiting for a connection is not in it.
    pub latency: Histogram,
    last_rtt_us: AtomicU64,
}

impl PeerCounters {
    pub(crate) fn set_last_rtt(&self, rtt: Duration) {
        let us = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX);
        self.last_rtt_us.store(us, Ordering::Relaxed);
    }

    /// How long the last request took beyond what the other host needed to read the pages: both
    /// ways, and the bytes' own time. 0 before the first.
    pub fn last_rtt_us(&self) -> u64 {
        self.last_rtt_us.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_bucket_below_whose_bound_it_is() {
        let histogram = Histogram::default();
        for us in [0, 63, 64, 127, 128, 1_000_000, 10_000_000] {
            histogram.add(Duration::from_micros(us));
        }
        let found: Vec<_> = histogram.buckets().filter(|(_, n)| *n > 0).collect();
        let second = (Some(1 << 20), 1);
        assert_eq!(found, [(Some(64), 2), (Some(128), 2), (Some(256), 1), second, (None, 1)]);
        assert_eq!(histogram.count(), 7);
        assert_eq!(histogram.sum_us(), 11_000_382);
    }
}
