//! What a host holds.

use std::cell::RefCell;
use std::rc::Rc;

use vmfork_image::{PageIdx, PageRange};
use vmfork_policy::Presence;

/// A bit for each page of an image. Copies share it.
#[derive(Debug, Clone)]
pub(crate) struct Cache(Rc<RefCell<Vec<u64>>>);

impl Cache {
    pub(crate) fn new(pages: u64) -> Self {
        let words = usize::try_from(pages.div_ceil(64)).unwrap_or(0);
        Self(Rc::new(RefCell::new(vec![0; words])))
    }

    /// Returns how many were not there.
    pub(crate) fn insert(&self, range: PageRange) -> u64 {
        let mut bits = self.0.borrow_mut();
        let mut new = 0;
        for (at, mask) in words(range) {
            if let Some(word) = bits.get_mut(at) {
                new += u64::from((mask & !*word).count_ones());
                *word |= mask;
            }
        }
        new
    }

    pub(crate) fn has_all(&self, range: PageRange) -> bool {
        self.next_absent(range).is_none()
    }

    /// What is here.
    pub(crate) fn runs(&self) -> Vec<PageRange> {
        let (mut runs, mut start) = (Vec::new(), None);
        let bits = self.0.borrow();
        for (first, word) in (0..).step_by(64).zip(bits.iter().copied().chain([0])) {
            let mut at = 0;
            while at < 64 {
                let rest = (if start.is_some() { !word } else { word }) >> at;
                if rest == 0 {
                    break;
                }
                at += u64::from(rest.trailing_zeros());
                start = match start {
                    None => Some(first + at),
                    Some(start) => {
                        runs.push(PageRange::between(PageIdx(start), PageIdx(first + at)));
                        None
                    }
                };
            }
        }
        runs
    }

    /// Where the first page of `range` is that is present or absent, as asked for; else its end.
    fn first(&self, range: PageRange, present: bool) -> PageIdx {
        let bits = self.0.borrow();
        for (at, mask) in words(range) {
            let word = bits.get(at).copied().unwrap_or(0);
            let found = mask & if present { word } else { !word };
            if found != 0 {
                return PageIdx(at as u64 * 64 + u64::from(found.trailing_zeros()));
            }
        }
        range.end()
    }
}

impl Presence for Cache {
    fn is_present(&self, page: PageIdx) -> bool {
        let word =
            usize::try_from(page.0 / 64).ok().and_then(|at| self.0.borrow().get(at).copied());
        word.is_some_and(|word| word >> (page.0 % 64) & 1 == 1)
    }

    fn next_absent(&self, range: PageRange) -> Option<PageRange> {
        let rest = range.from_page(self.first(range, false));
        let absent = rest.until_page(self.first(rest, true));
        (!absent.is_empty()).then_some(absent)
    }
}

/// The words that a run touches, with the bits that it has in each.
fn words(range: PageRange) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (range.start().0, range.end().0);
    (start / 64..end.div_ceil(64)).filter(move |_| start < end).filter_map(move |word| {
        let (from, to) = (start.max(word * 64) - word * 64, end.min(word * 64 + 64) - word * 64);
        Some((usize::try_from(word).ok()?, u64::MAX >> (64 - (to - from)) << from))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_cache_behaves_like_a_list_of_flags(
            inserts in prop::collection::vec((0..300u64, 0..150u64), 0..6), (start, len) in (0..300u64, 0..150u64),
        ) {
            let (cache, model) = (Cache::new(450), RefCell::new(vec![false; 450]));
            for (start, len) in inserts {
                let range = PageRange::new(PageIdx(start), len).expect("small");
                let cells = usize::try_from(start).expect("small")..usize::try_from(start + len).expect("small");
                let new = model.borrow()[cells.clone()].iter().filter(|cell| !**cell).count() as u64;
                prop_assert_eq!(cache.insert(range), new);
                model.borrow_mut()[cells].fill(true);
            }
            let here = model.borrow().iter().zip(0..).filter(|(here, _)| **here).map(|(_, page)| PageIdx(page)).collect::<Vec<_>>();
            let runs = cache.runs();
            prop_assert!(runs.windows(2).all(|two| two[0].end() < two[1].start()));
            prop_assert_eq!(runs.iter().flat_map(|run| run.pages()).collect::<Vec<_>>(), here);
            let range = PageRange::new(PageIdx(start), len).expect("small");
            prop_assert_eq!(cache.next_absent(range), model.next_absent(range));
            prop_assert!(range.pages().all(|page| cache.is_present(page) == model.is_present(page)));
        }
    }
}
