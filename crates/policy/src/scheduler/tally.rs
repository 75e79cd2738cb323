//! What faults found, and what became of the pages that were fetched.

use vmfork_image::{PageIdx, PageRange};

use super::Reason;
use crate::page_set::PageSet;

/// Faults, by what they found. A view that faults again where it waits already is not counted
/// again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// The page is zero.
    pub zero: u64,
    /// It is present or in flight because a background policy proposed it.
    pub predicted: u64,
    /// It is present or in flight because another fault brought it, or a part other than this
    /// scheduler.
    pub shared: u64,
    /// It had to be fetched for this fault.
    pub remote: u64,
}

/// Pages that came in for one [`Reason`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetched {
    pub pages: u64,
    /// Those of them that a view has touched, before or after they came. Of a prediction: its hits.
    pub touched_pages: u64,
}

/// What a scheduler has counted. Takes two bits of memory for each page that was fetched.
#[derive(Debug, Default)]
pub struct Tally {
    faults: Faults,
    /// By the order of their first fetches.
    reasons: Vec<Brought>,
    touched: PageSet,
}

/// What came in for one reason. No page came in for two.
#[derive(Debug)]
struct Brought {
    reason: Reason,
    fetched: Fetched,
    pages: PageSet,
}

impl Tally {
    pub fn faults(&self) -> Faults {
        self.faults
    }

    /// What came in for `reason`.
    pub fn fetched(&self, reason: Reason) -> Fetched {
        let brought = self.reasons.iter().find(|brought| brought.reason == reason);
        brought.map(|brought| brought.fetched).unwrap_or_default()
    }

    /// The reasons for which pages came in, those of policies that have ended, too.
    pub fn by_reason(&self) -> impl Iterator<Item = (Reason, Fetched)> + '_ {
        self.reasons.iter().map(|brought| (brought.reason, brought.fetched))
    }

    pub(super) fn on_zero(&mut self) {
        self.faults.zero += 1;
    }

    /// A fault on a page that is present.
    pub(super) fn on_present(&mut self, page: PageIdx) {
        let brought = self.reasons.iter().find(|brought| brought.pages.contains(page));
        self.count(brought.map(|brought| brought.reason));
        self.on_touched(page.range());
    }

    /// A fault on a page that is in flight.
    pub(super) fn on_under_way(&mut self, page: PageIdx, reason: Reason) {
        self.count(Some(reason));
        self.touched.insert(page.range());
    }

    /// A fault on a page that is neither. `queued`: it is to be fetched for another view anyhow.
    pub(super) fn on_absent(&mut self, page: PageIdx, queued: bool) {
        if queued {
            self.faults.shared += 1;
        } else {
            self.faults.remote += 1;
        }
        self.touched.insert(page.range());
    }

    /// A page that came for this reason was found, or is awaited.
    fn count(&mut self, reason: Option<Reason>) {
        match reason {
            Some(Reason::Background(_)) => self.faults.predicted += 1,
            Some(Reason::Demand) | None => self.faults.shared += 1,
        }
    }

    /// Views have touched these pages, which need not be present.
    pub(super) fn on_touched(&mut self, range: PageRange) {
        for run in self.touched.absent(range) {
            for Brought { fetched, pages, .. } in &mut self.reasons {
                fetched.touched_pages += pages.count(run);
            }
        }
        self.touched.insert(range);
    }

    /// These pages came in, which were in flight for this reason.
    pub(super) fn on_brought(&mut self, range: PageRange, reason: Reason) {
        let at = self.reasons.iter().position(|brought| brought.reason == reason);
        let at = at.unwrap_or_else(|| {
            let (fetched, pages) = Default::default();
            self.reasons.push(Brought { reason, fetched, pages });
            self.reasons.len() - 1
        });
        let Brought { fetched, pages, .. } = &mut self.reasons[at];
        pages.insert(range);
        fetched.pages += range.len();
        fetched.touched_pages += self.touched.count(range);
    }
}
