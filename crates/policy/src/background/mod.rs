//! What to fetch in the background.

mod listed;
mod segments;
mod sweep;

use std::fmt::Debug;

use vmfork_image::{PageIdx, PageRange, PageTable};

pub use self::listed::Listed;
pub use self::segments::{SEGMENT_PAGES_MAX, Segments, SegmentsConfig, SegmentsError};
pub use self::sweep::Drain;

/// A stretch of an image that a [`Background`] wants in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proposal {
    pub range: PageRange,
    /// Most pages to fetch of it at a time; at least 1.
    pub pages_max: u64,
}

/// Which background policies go before which, the first one first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// What was touched by others that began here: most of it will be wanted, and soon.
    WorkingSet,
    /// What VMs will probably want, judged by their accesses up to now: some of it will be wanted.
    Prediction,
    /// All the rest, wanted or not: the drain, hydration.
    Rest,
}

/// A policy that proposes pages for background reads. It proposes what it wants. The scheduler
/// leaves out what is zero, present or in flight, and cuts the rest to the available bandwidth.
///
/// A policy that follows a list (the drain, a working set, a profile) proposes it piece by piece.
/// One that predicts (by segment) learns from [`Background::on_fault`] and proposes when it has
/// seen enough.
pub trait Background: Debug + Send {
    /// One word, for metrics. A scheduler has one policy of a name.
    fn name(&self) -> &'static str;

    /// Its place among other policies. Must not change once the policy has been added.
    fn priority(&self) -> Priority {
        Priority::Rest
    }

    /// What to fetch next. Called when all of the last proposal has been asked for (or was not
    /// needed). After finitely many proposals the answer must be `None`, at least until something
    /// new is learnt from the calls below. `table` is the image's.
    fn propose(&mut self, table: &PageTable) -> Option<Proposal>;

    /// Whether `propose` would return `None`, and will unless something new is learnt.
    fn is_done(&self) -> bool;

    /// A view touched `page`, which is not zero; maybe it was present already. `table` is the
    /// image's.
    fn on_fault(&mut self, page: PageIdx, table: &PageTable) {
        let _ = (page, table);
    }

    /// These pages came into the cache, for whatever reason.
    fn on_filled(&mut self, range: PageRange) {
        let _ = range;
    }

    /// A fetch of these pages failed. If there are several, some of them may be readable.
    fn on_failed(&mut self, range: PageRange) {
        let _ = range;
    }
}
