//! What clones on other hosts asked for, so that those of the next fork have it before they ask: SnowFlock's working sets are
//! those of Twinkle (INFOCOM 2011, §4.3), recorded where the pages are asked for.

use vmfork_image::PageRange;

use crate::page_set::PageSet;

/// Pages of a VM's snapshots in the order in which they were demanded first, each once.
#[derive(Debug)]
pub struct Demanded {
    known: PageSet,
    runs: Vec<PageRange>,
    pages: u64,
    pages_max: u64,
}

impl Demanded {
    /// `pages_max`: what is demanded beyond is left out.
    pub fn new(pages_max: u64) -> Self {
        Self { known: PageSet::default(), runs: Vec::new(), pages: 0, pages_max }
    }

    /// Somebody waits for these.
    pub fn record(&mut self, range: PageRange) {
        let new: Vec<PageRange> = self.known.absent(range).collect();
        for run in new {
            let run = run.truncate(self.pages_max - self.pages);
            if run.is_empty() {
                return;
            }
            self.pages += self.known.insert(run);
            match self.runs.last_mut().filter(|last| last.end() == run.start()) {
                Some(last) => {
                    *last = PageRange::new(last.start(), last.len() + run.len()).unwrap_or(*last)
                }
                None => self.runs.push(run),
            }
        }
    }

    /// All of them, the first one first.
    pub fn runs(&self) -> &[PageRange] {
        &self.runs
    }

    pub fn pages(&self) -> u64 {
        self.pages
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmfork_image::PageIdx;

    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn pages_stand_in_the_order_in_which_they_were_demanded_first() {
        let mut demanded = Demanded::new(1000);
        for (start, len) in [(100, 16), (116, 16), (0, 8), (96, 40), (4, 8)] {
            demanded.record(range(start, len));
        }
        let runs = [range(100, 32), range(0, 8), range(96, 4), range(132, 4), range(8, 4)];
        assert_eq!(demanded.runs(), runs);
        assert_eq!(demanded.pages(), 52);
    }

    proptest! {
        #[test]
        fn each_page_stands_once_and_there_are_no_more_than_may_be(
            asked in prop::collection::vec((0..900u64, 1..200u64), 0..20),
            pages_max in 0..600u64,
        ) {
            let mut demanded = Demanded::new(pages_max);
            let mut order: Vec<u64> = Vec::new();
            for (start, len) in asked {
                demanded.record(range(start, len));
                order.extend((start..start + len).filter(|page| !order.contains(page)).collect::<Vec<_>>());
            }
            order.truncate(usize::try_from(pages_max).expect("small"));
            let recorded = demanded.runs().iter().flat_map(|run| run.pages()).map(|page| page.0);
            prop_assert_eq!(recorded.collect::<Vec<_>>(), order);
        }
    }
}
