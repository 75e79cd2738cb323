//! Going through an image in order, until all of a kind is there.

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable};

use super::{Background, Proposal};

/// Brings in all pages that the image itself owns, in order, so that nothing depends any more on
/// where it was frozen. Pages of ancestors it leaves where they are.
///
/// If a fetch of several pages fails, another pass goes over what is missing, page by page. So one
/// bad page does not cost its neighbours. `Presence` tells whether all pages came in.
#[derive(Debug, Clone)]
pub struct Drain {
    image: ImageId,
    sweep: Sweep,
}

impl Drain {
    /// `pages_max`: most pages of one fetch, at least 1. A view that touches a page of it waits
    /// until all are there, unless they are reported piecemeal.
    pub fn new(image: ImageId, pages_max: u64) -> Self {
        Self { image, sweep: Sweep::new(pages_max) }
    }
}

impl Background for Drain {
    fn name(&self) -> &'static str {
        "drain"
    }

    fn propose(&mut self, table: &PageTable) -> Option<Proposal> {
        self.sweep.next(|from| table.next_of(self.image, from))
    }

    fn is_done(&self) -> bool {
        self.sweep.pass == Pass::Done
    }

    fn on_failed(&mut self, range: PageRange) {
        self.sweep.on_failed(range);
    }
}

/// Where a policy stands that goes through an image in order.
#[derive(Debug, Clone)]
struct Sweep {
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

impl Sweep {
    fn new(pages_max: u64) -> Self {
        let pages_max = pages_max.max(1);
        Self { pages_max, pass: Pass::First, cursor: PageIdx(0), failed: false }
    }

    /// `wanted`: the first run of pages to bring in at or after a page.
    fn next(&mut self, wanted: impl Fn(PageIdx) -> Option<PageRange>) -> Option<Proposal> {
        loop {
            let pages_max = match self.pass {
                Pass::First => self.pages_max,
                Pass::Again => 1,
                Pass::Done => return None,
            };
            if let Some(range) = wanted(self.cursor) {
                self.cursor = range.end();
                return Some(Proposal { range, pages_max });
            }
            self.cursor = PageIdx(0);
            let again = std::mem::take(&mut self.failed);
            self.pass = if again { Pass::Again } else { Pass::Done };
        }
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
