//! What clones on other hosts requested, so that those of the next fork have it before they ask.
//! SnowFlock's working sets are those of Twinkle (INFOCOM 2011, §4.3), recorded where the pages are
//! requested.

use std::collections::BTreeSet;

use vmfork_image::{PageIdx, PageRange};

use crate::page_set::PageSet;

/// Demand brings its neighbours along: this many pages, at a multiple of it.
const WINDOW_PAGES: u64 = 16;
/// A window of which this many pages were touched stays whole: one run, at a place where others
/// ask, too.
const WHOLE_PAGES: u64 = 10;
/// Pages between two runs that are taken along: to ask for two runs costs about as much as these.
const GAP_PAGES: u64 = 2;

/// Pages of a VM's snapshots in the order in which they were demanded first, each once. Where it is
/// known which of them a clone has touched in all its life, only those.
#[derive(Debug)]
pub struct Demanded {
    known: PageSet,
    /// That some clone has touched.
    touched: PageSet,
    runs: Vec<PageRange>,
    pages: u64,
    pages_max: u64,
}

impl Demanded {
    /// `pages_max`: what is demanded beyond is left out.
    pub fn new(pages_max: u64) -> Self {
        let (known, touched) = (PageSet::default(), PageSet::default());
        Self { known, touched, runs: Vec::new(), pages: 0, pages_max }
    }

    /// A VM waits for these.
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

    /// A clone has touched these pages and no others, until its end or for long. Of the neighbours
    /// fetched around a touched page, only pages stay that it, or one before it, has touched. All
    /// stay if that is most of the window. What it touched without a request (it had come unasked)
    /// comes behind all else.
    pub fn refine(&mut self, touched: &[PageRange]) {
        for run in touched {
            self.touched.insert(*run);
        }
        let (mut needed, mut untouched) = (Vec::new(), PageSet::default());
        for window in windows_of(touched) {
            if self.touched.count(window) >= WHOLE_PAGES {
                needed.push(window);
                continue;
            }
            needed.extend(self.touched.present(window));
            for run in self.touched.absent(window) {
                untouched.insert(run);
            }
        }
        let before = std::mem::take(&mut self.runs);
        (self.known, self.pages) = (PageSet::default(), 0);
        for run in before {
            untouched.absent(run).for_each(|run| self.record(run));
        }
        needed.into_iter().for_each(|run| self.record(run));
    }

    /// [`Demanded::runs`], as they are best asked for: small gaps are no gaps.
    pub fn ahead(&self) -> Vec<PageRange> {
        let mut ahead: Vec<PageRange> = Vec::new();
        for run in &self.runs {
            match ahead.last_mut().filter(|last| is_near(last, run)) {
                Some(last) => *last = PageRange::between(last.start(), run.end()),
                None => ahead.push(*run),
            }
        }
        ahead
    }

    /// All of them, the first one first.
    pub fn runs(&self) -> &[PageRange] {
        &self.runs
    }

    pub fn pages(&self) -> u64 {
        self.pages
    }
}

/// Those that have a page of these, each once.
fn windows_of(runs: &[PageRange]) -> impl Iterator<Item = PageRange> {
    let of = |run: &PageRange| run.start().0 / WINDOW_PAGES..run.end().0.div_ceil(WINDOW_PAGES);
    let numbers: BTreeSet<u64> = runs.iter().flat_map(of).collect();
    numbers
        .into_iter()
        .filter_map(|at| PageRange::new(PageIdx(at * WINDOW_PAGES), WINDOW_PAGES).ok())
}

fn is_near(last: &PageRange, next: &PageRange) -> bool {
    next.start().0.checked_sub(last.end().0).is_some_and(|gap| gap <= GAP_PAGES)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    #[test]
    fn of_what_came_along_only_what_was_touched_stays() {
        let mut demanded = Demanded::new(1000);
        for (start, len) in [(96, 16), (0, 16), (48, 16)] {
            demanded.record(range(start, len));
        }
        demanded.refine(&[range(3, 2), range(98, 1), range(101, 3), range(200, 1)]);
        let runs = [range(98, 1), range(101, 3), range(3, 2), range(48, 16), range(200, 1)];
        assert_eq!(demanded.runs(), runs, "nothing is known of the window at 48");
        let ahead = [range(98, 6), range(3, 2), range(48, 16), range(200, 1)];
        assert_eq!(demanded.ahead(), ahead);
        // Asked for again, by a clone that does something else: all of it, until it is known
        // better.
        demanded.record(range(0, 16));
        assert_eq!(demanded.pages(), 4 + 16 + 16 + 1);
        demanded.refine(&[range(8, 1)]);
        assert_eq!(
            demanded.known.present(range(0, 16)).collect::<Vec<_>>(),
            [range(3, 2), range(8, 1)]
        );
        assert_eq!(demanded.pages(), 4 + 3 + 16 + 1);
        // Most of a window that was read in the background.
        demanded.refine(&[range(304, 4), range(310, 6)]);
        assert_eq!(demanded.runs().last(), Some(&range(304, 16)));
    }

    proptest! {
        #[test]
        fn what_was_touched_is_there_and_what_was_not_only_where_nothing_was(
            asked in prop::collection::vec((0..900u64, 1..60u64), 0..12),
            touched in prop::collection::vec((0..900u64, 1..20u64), 0..12),
        ) {
            let mut demanded = Demanded::new(10_000);
            asked.iter().for_each(|(start, len)| demanded.record(range(*start, *len)));
            let before = demanded.known.clone();
            let touched: Vec<_> = touched.into_iter().map(|(start, len)| range(start, len)).collect();
            demanded.refine(&touched);
            let is_touched = |page: u64| touched.iter().any(|run| run.contains(PageIdx(page)));
            for page in 0..1000 {
                let window = page / 16 * 16..page / 16 * 16 + 16;
                let stays = match window.filter(|page| is_touched(*page)).count() {
                    0 => before.contains(PageIdx(page)),
                    10.. => true,
                    _ => is_touched(page),
                };
                prop_assert_eq!(demanded.known.contains(PageIdx(page)), stays, "page {}", page);
            }
            let listed: u64 = demanded.runs().iter().map(PageRange::len).sum();
            prop_assert_eq!(demanded.pages(), listed);
            let ahead = demanded.ahead();
            prop_assert!(demanded.runs().iter().all(|run| ahead.iter().any(|it| it.intersect(run) == *run)));
        }

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
