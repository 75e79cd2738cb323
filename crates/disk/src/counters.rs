//! What disks did, counted.
//!
//! Each disk has counters of its own, which its connection adds to. [`Totals`] adds them up when
//! it is asked, and keeps those of disks that have ended.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vmfork_nbd::Command;

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

/// Bounds of [`RequestTimes`].
const BOUNDS: usize = 24;

/// What a request does, for counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    Read,
    Write,
    Flush,
    /// Writes of zeros, too.
    Trim,
}

impl Operation {
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Trim];

    pub(crate) fn of(command: &Command) -> Option<Self> {
        match command {
            Command::Read { .. } => Some(Self::Read),
            Command::Write { .. } => Some(Self::Write),
            Command::Flush => Some(Self::Flush),
            Command::Trim { .. } | Command::WriteZeroes { .. } => Some(Self::Trim),
            Command::BlockStatus { .. } | Command::Disconnect => None,
        }
    }
}

#[derive(Debug, Default)]
struct TimeCounters {
    steps: [Counter; BOUNDS + 1],
    sum_ns: Counter,
}

impl TimeCounters {
    fn add(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let step = (ns / 1000).checked_ilog2().map_or(0, |power| power as usize + 1);
        if let Some(step) = self.steps.get(step.min(BOUNDS)) {
            step.add(1);
        }
        self.sum_ns.add(ns);
    }
}

/// How long requests took, from when they had come until their reply was made, to a power of two.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTimes {
    steps: [u64; BOUNDS + 1],
    sum_ns: u64,
}

impl RequestTimes {
    /// The bounds of the steps in µs, exclusive: 1, 2, 4 and so on, to 8 s.
    pub fn bounds_us() -> impl Iterator<Item = u64> {
        (0..BOUNDS).map(|step| 1 << step)
    }

    /// How many are in each step; the last has no bound.
    pub fn steps(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().copied()
    }

    /// All of them together.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    fn add(&mut self, counters: &TimeCounters) {
        for (sum, step) in self.steps.iter_mut().zip(&counters.steps) {
            *sum += step.get();
        }
        self.sum_ns = self.sum_ns.saturating_add(counters.sum_ns.get());
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
    pub(crate) reconnects: Counter,
    /// In the order of [`Operation::ALL`].
    took: [TimeCounters; Operation::ALL.len()],
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
    /// Freezes that had to make their next layer.
    pub late_layers: u64,
    /// Clients that got it from a server which another had got it from before.
    pub reconnects: u64,
}

impl DiskCounters {
    pub(crate) fn took(&self, operation: Operation, took: Duration) {
        if let Some(times) = self.took.get(operation as usize) {
            times.add(took);
        }
    }

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
            reconnects: self.reconnects.get(),
        }
    }
}

impl DiskCounts {
    /// What it did since it had done what `before` says.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let less = |now: u64, before: u64| now.saturating_sub(before);
        Self {
            reads: less(self.reads, before.reads),
            read_bytes: less(self.read_bytes, before.read_bytes),
            writes: less(self.writes, before.writes),
            written_bytes: less(self.written_bytes, before.written_bytes),
            partial_writes: less(self.partial_writes, before.partial_writes),
            flushes: less(self.flushes, before.flushes),
            trims: less(self.trims, before.trims),
            trimmed_bytes: less(self.trimmed_bytes, before.trimmed_bytes),
            errors: less(self.errors, before.errors),
            no_space: less(self.no_space, before.no_space),
            freezes: less(self.freezes, before.freezes),
            late_layers: less(self.late_layers, before.late_layers),
            reconnects: less(self.reconnects, before.reconnects),
        }
    }

    fn add(&mut self, more: &Self) {
        let Self { reads, read_bytes, writes, written_bytes, partial_writes, flushes, .. } = more;
        self.reads += reads;
        self.read_bytes += read_bytes;
        self.writes += writes;
        self.written_bytes += written_bytes;
        self.partial_writes += partial_writes;
        self.flushes += flushes;
        self.trims += more.trims;
        self.trimmed_bytes += more.trimmed_bytes;
        self.errors += more.errors;
        self.no_space += more.no_space;
        self.freezes += more.freezes;
        self.late_layers += more.late_layers;
        self.reconnects += more.reconnects;
    }
}

/// What all disks of a store did since it was opened. No figure gets smaller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskTotals {
    pub counts: DiskCounts,
    took: [RequestTimes; Operation::ALL.len()],
}

impl DiskTotals {
    /// How long requests took.
    pub fn took(&self, operation: Operation) -> RequestTimes {
        self.took.get(operation as usize).copied().unwrap_or_default()
    }

    fn add(&mut self, counters: &DiskCounters) {
        self.counts.add(&counters.counts());
        for (sum, times) in self.took.iter_mut().zip(&counters.took) {
            sum.add(times);
        }
    }
}

/// The counters of all disks.
#[derive(Debug, Default)]
pub(crate) struct Totals(Mutex<All>);

#[derive(Debug, Default)]
struct All {
    ended: DiskTotals,
    open: Vec<Arc<DiskCounters>>,
}

impl Totals {
    /// Those of one more disk. They count here as long as anything has them, and after that.
    pub(crate) fn open(&self) -> Arc<DiskCounters> {
        let counters = Arc::<DiskCounters>::default();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.settle();
        all.open.push(Arc::clone(&counters));
        counters
    }

    pub(crate) fn sum(&self) -> DiskTotals {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.settle();
        let mut sum = all.ended;
        all.open.iter().for_each(|counters| sum.add(counters));
        sum
    }
}

impl All {
    /// So that there are no more counters than disks.
    fn settle(&mut self) {
        let Self { ended, open } = self;
        // Nothing else has those any more, and nothing adds to them.
        let has_ended = |counters: &mut Arc<DiskCounters>| Arc::get_mut(counters).is_some();
        open.extract_if(.., has_ended).for_each(|counters| ended.add(&counters));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_disks_did_stays_in_the_sum() {
        let totals = Totals::default();
        let (one, two) = (totals.open(), totals.open());
        one.reads.add(3);
        one.took(Operation::Read, Duration::from_micros(3));
        two.reads.add(4);
        two.reconnects.add(1);
        assert_eq!(totals.sum().counts.reads, 7);
        drop(one);
        for _ in 0..2 {
            let sum = totals.sum();
            assert_eq!((sum.counts.reads, sum.counts.reconnects), (7, 1));
            assert_eq!(sum.took(Operation::Read).steps().sum::<u64>(), 1);
            assert_eq!(sum.took(Operation::Write), RequestTimes::default());
        }
        drop((two, totals.open()));
        let all = totals.0.lock().expect("no panic");
        assert!(all.open.len() <= 2, "none is kept for each disk that ever was");
    }

    #[test]
    fn times_are_in_the_step_below_their_bound() {
        let times = TimeCounters::default();
        for ns in [0, 999, 1_000, 2_000, 3_999, 4_000, 8_388_607_999, 8_388_608_000, u64::MAX] {
            times.add(Duration::from_nanos(ns));
        }
        let mut sum = RequestTimes::default();
        sum.add(&times);
        let steps: Vec<u64> = sum.steps().collect();
        assert_eq!(steps.len(), RequestTimes::bounds_us().count() + 1);
        assert_eq!((&steps[..4], &steps[BOUNDS - 1..]), (&[2, 1, 2, 1][..], &[1, 2][..]));
        assert_eq!(RequestTimes::bounds_us().last(), Some(8_388_608));
    }
}
