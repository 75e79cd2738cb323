//! Which of the origin's sums to ask for.

use std::time::Duration;

use vmfork_image::{BLOCK_PAGES, PageIdx, PageRange};

use crate::transfer::Urgency;
use crate::transfer::bounds::{ANSWER, DEMAND_WAIT};

/// How long a read waits for sums.
pub fn sums_wait(urgency: Urgency) -> Duration {
    match urgency {
        Urgency::Demand => DEMAND_WAIT,
        Urgency::Ahead => ANSWER,
    }
}

/// The sums of one image that its origin is being asked for.
///
/// A demand read asks for the sums of its pages at once. A prefetch asks for those of the whole
/// block, so that the next pieces of it need no request. While another one asks for that block, it
/// waits for that reply.
#[derive(Debug, Default)]
pub struct SumRequests {
    under_way: Vec<PageRange>,
}

impl SumRequests {
    /// What to ask for if the sums of `pages` are needed.
    pub fn wanted(pages: PageRange, urgency: Urgency) -> PageRange {
        let block = PageIdx(pages.start().0 / BLOCK_PAGES * BLOCK_PAGES);
        let block = PageRange::new(block, BLOCK_PAGES).ok();
        block.filter(|block| urgency == Urgency::Ahead && block.covers(&pages)).unwrap_or(pages)
    }

    /// Whether the origin is being asked for all of these.
    pub fn is_under_way(&self, wanted: PageRange) -> bool {
        self.under_way.iter().any(|asked| asked.covers(&wanted))
    }

    /// The origin is asked for these from now on. [`SumRequests::ended`] must follow.
    pub fn began(&mut self, wanted: PageRange) {
        self.under_way.push(wanted);
    }

    /// It has replied, or will not.
    pub fn ended(&mut self, wanted: PageRange) {
        if let Some(at) = self.under_way.iter().position(|asked| *asked == wanted) {
            self.under_way.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn a_prefetch_asks_for_the_block_once_and_demand_for_its_pages() {
        let pages = range(530, 16);
        assert_eq!(SumRequests::wanted(pages, Urgency::Demand), pages);
        let block = SumRequests::wanted(pages, Urgency::Ahead);
        assert_eq!(block, range(512, 512));
        let across = range(1020, 10);
        assert_eq!(SumRequests::wanted(across, Urgency::Ahead), across, "no block has all of it");
        let mut sums = SumRequests::default();
        sums.began(block);
        let other = SumRequests::wanted(range(700, 16), Urgency::Ahead);
        assert!(sums.is_under_way(other) && !sums.is_under_way(across));
        sums.ended(across);
        assert!(sums.is_under_way(other), "that was another one");
        sums.ended(block);
        assert!(!sums.is_under_way(other));
    }
}
