//! What to bring in when nobody waits.

use std::fmt::Debug;

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable};

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
    /// What is likely by what has been touched so far: some of it will be wanted.
    Prediction,
    /// All the rest, wanted or not: the drain, hydration.
    Rest,
}

/// A policy that proposes pages nobody waits for. It says what it wants; the scheduler leaves
/// out what is zero, present or under way, and cuts the rest to the bandwidth there is.
///
/// A policy that follows a list (the drain, a working set, a profile) proposes it piece by piece; one
/// that predicts (by segment) learns from [`Background::on_fault`] and proposes when it has seen
/// enough.
pub trait Background: Debug + Send {
    /// One word, for metrics. A scheduler has one policy of a name.
    fn name(&self) -> &'static str;

    /// Its place among other policies. Must not change once the policy has been added.
    fn priority(&self) -> Priority {
        Priority::Rest
    }

    /// What to fetch next. Called when all of the last proposal has been asked for (or was not
    /// needed). After finitely many proposals the answer must be `None`, at least until something new
    /// is learnt from the calls below. `table` is the image's.
    fn propose(&mut self, table: &PageTable) -> Option<Proposal>;

    /// Whether `propose` would return `None`, and will unless something new is learnt.
    fn is_done(&self) -> bool;

    /// A view touched `page`, which is not zero; maybe it was present already.
    fn on_fault(&mut self, page: PageIdx) {
        let _ = page;
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

/// Brings in all pages that the image itself owns, in order, so that nothing depends any more on where
/// it was frozen. Pages of ancestors it leaves where they are.
///
/// If a fetch of several pages fails, another pass goes over what is missing, page by page, so that
/// one bad page does not cost its neighbours. Whether all came in, presence tells.
#[derive(Debug, Clone)]
pub struct Drain {
    image: ImageId,
    pages_max: u64,
    pass: Pass,
    cursor: PageIdx,
    /// A fetch of several pages has failed in this pass.
    failed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    First,
    /// Page by page.
    Again,
    Done,
}

impl Drain {
    /// `pages_max`: most pages of one fetch, at least 1. A view that touches a page of it waits
    /// until all are there, unless they are reported piecemeal.
    pub fn new(image: ImageId, pages_max: u64) -> Self {
        let pages_max = pages_max.max(1);
        Self { image, pages_max, pass: Pass::First, cursor: PageIdx(0), failed: false }
    }
}

impl Background for Drain {
    fn name(&self) -> &'static str {
        "drain"
    }

    fn propose(&mut self, table: &PageTable) -> Option<Proposal> {
        loop {
            let pages_max = match self.pass {
                Pass::First => self.pages_max,
                Pass::Again => 1,
                Pass::Done => return None,
            };
            if let Some(range) = table.next_of(self.image, self.cursor) {
                self.cursor = range.end();
                return Some(Proposal { range, pages_max });
            }
            self.cursor = PageIdx(0);
            let again = std::mem::take(&mut self.failed);
            self.pass = if again { Pass::Again } else { Pass::Done };
        }
    }

    fn is_done(&self) -> bool {
        self.pass == Pass::Done
    }

    fn on_failed(&mut self, range: PageRange) {
        // A page that failed alone will not get better by asking again. And the passes end: one
        // that goes page by page gives no cause for another.
        if range.len() > 1 {
            self.failed = true;
            if self.pass == Pass::Done {
                self.pass = Pass::Again;
            }
        }
    }
}
