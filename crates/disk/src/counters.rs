//! What disks did, counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one disk.
#[derive(Debug, Default)]
pub(crate) struct DiskCounters {
    pub(crate) reads: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) writes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) partial_writes: Counter,
    pub(crate) flushes: Counter,
    pub(crate) trims: Counter,
    pub(crate) trimmed_bytes: Counter,
    pub(crate) errors: Counter,
    pub(crate) no_space: Counter,
    pub(crate) freezes: Counter,
    pub(crate) late_layers: Counter,
}

/// What a disk did since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskCounts {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    /// Writes that covered a page in part.
    pub partial_writes: u64,
    pub flushes: u64,
    /// Trims and writes of zeros.
    pub trims: u64,
    pub trimmed_bytes: u64,
    /// Requests that failed, for lack of space too.
    pub errors: u64,
    /// Requests that failed for lack of space, or by the quota.
    pub no_space: u64,
    pub freezes: u64,
    /// Freezes that had to make the next layer themselves.
    pub late_layers: u64,
}

impl DiskCounters {
    pub(crate) fn counts(&self) -> DiskCounts {
        DiskCounts {
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            writes: self.writes.get(),
            written_bytes: self.written_bytes.get(),
            partial_writes: self.partial_writes.get(),
            flushes: self.flushes.get(),
            trims: self.trims.get(),
            trimmed_bytes: self.trimmed_bytes.get(),
            errors: self.errors.get(),
            no_space: self.no_space.get(),
            freezes: self.freezes.get(),
            late_layers: self.late_layers.get(),
        }
    }
}
