//! Which pages of an image are in its cache: the one structure that several engines share without a
//! lock.
//!
//! A page's bit is set after the page's bytes are in the cache (Release), by the image's own engine
//! or by that of an image whose block is at home here, and never cleared while anyone may read it.
//! Who copies or maps the page tests it first (Acquire). A frozen page's original is given back
//! only after its bit is set; so a reader that took bytes from the original and *still* finds the
//! bit unset had good bytes (`handover`).

use vmfork_image::{PageIdx, PageRange};

use crate::sync::{AtomicU64, Ordering};

/// A bit per page.
#[derive(Debug)]
pub struct Presence {
    words: Box<[AtomicU64]>,
    pages: u64,
}

impl Presence {
    pub fn new(pages: u64) -> Self {
        Self { words: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(), pages }
    }

    /// How many pages the image has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether the page's bytes are in the cache. Pages beyond the image are not.
    pub fn is_present(&self, page: PageIdx) -> bool {
        self.word(page.0 / 64) & (1 << (page.0 % 64)) != 0
    }

    /// The bytes of all pages of `range` are in the cache from now on.
    pub fn set(&self, range: PageRange) {
        self.change(range, |word, mask| {
            word.fetch_or(mask, Ordering::Release);
        });
    }

    /// The pages of `range` are in the cache no more. Only for pages that no live image needs.
    pub fn clear(&self, range: PageRange) {
        self.change(range, |word, mask| {
            word.fetch_and(!mask, Ordering::Release);
        });
    }

    /// How many pages of `range` are present.
    pub fn count(&self, range: PageRange) -> u64 {
        let mut sum = 0;
        each_word(range, self.pages, |index, mask| {
            sum += u64::from((self.word(index) & mask).count_ones());
        });
        sum
    }

    /// The longest run from the start of `range` on whose pages are all present, or all absent, and
    /// which.
    pub fn run(&self, range: PageRange) -> (PageRange, bool) {
        let first = self.is_present(range.start());
        let mut at = range.start().0;
        let end = range.end().0;
        while at < end {
            let word = self.word(at / 64);
            let differing = if first { !word } else { word } >> (at % 64);
            let same = u64::from(differing.trailing_zeros()).min(64 - at % 64);
            at += same;
            if differing != 0 {
                break;
            }
        }
        (range.until_page(PageIdx(at.min(end))), first)
    }

    /// The runs of `range` that are absent.
    pub fn absent(&self, range: PageRange) -> Vec<PageRange> {
        let mut absent = Vec::new();
        let mut rest = range;
        while !rest.is_empty() {
            let (run, is_present) = self.run(rest);
            if !is_present {
                absent.push(run);
            }
            rest = rest.from_page(run.end());
        }
        absent
    }

    fn word(&self, index: u64) -> u64 {
        usize::try_from(index)
            .ok()
            .and_then(|index| self.words.get(index))
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn change(&self, range: PageRange, with: impl Fn(&AtomicU64, u64)) {
        each_word(range, self.pages, |index, mask| {
            if let Some(word) = usize::try_from(index).ok().and_then(|index| self.words.get(index))
            {
                with(word, mask);
            }
        });
    }
}

impl vmfork_policy::Presence for Presence {
    fn is_present(&self, page: PageIdx) -> bool {
        Presence::is_present(self, page)
    }

    fn next_absent(&self, range: PageRange) -> Option<PageRange> {
        let mut rest = range;
        while !rest.is_empty() {
            let (run, present) = self.run(rest);
            if !present {
                return Some(run);
            }
            rest = rest.from_page(run.end());
        }
        None
    }
}

/// Each word that `range` (clipped to the image) touches, with the mask of its bits there.
fn each_word(range: PageRange, pages: u64, mut with: impl FnMut(u64, u64)) {
    let (mut at, end) = (range.start().0, range.end().0.min(pages));
    while at < end {
        let upto = end.min((at / 64 + 1) * 64);
        let bits = upto - at;
        let mask = if bits == 64 { u64::MAX } else { ((1 << bits) - 1) << (at % 64) };
        with(at / 64, mask);
        at = upto;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    proptest! {
        #[test]
        fn behaves_like_a_list_of_flags(
            ops in prop::collection::vec((any::<bool>(), 0u64..300, 0u64..200), 0..40),
            probe in (0u64..300, 1u64..300),
        ) {
            let pages = 290;
            let (bits, mut model) = (Presence::new(pages), vec![false; 290]);
            for (set, start, len) in ops {
                if set { bits.set(range(start, len)) } else { bits.clear(range(start, len)) }
                for page in start..(start + len).min(pages) {
                    model[usize::try_from(page).expect("small")] = set;
                }
            }
            let at = |page: u64| model.get(usize::try_from(page).expect("small")).copied().unwrap_or(false);
            for page in 0..320 {
                prop_assert_eq!(bits.is_present(PageIdx(page)), at(page));
            }
            let whole = range(probe.0, probe.1);
            prop_assert_eq!(bits.count(whole), whole.pages().filter(|page| at(page.0)).count() as u64);
            let (run, first) = bits.run(whole);
            prop_assert_eq!(first, at(probe.0));
            let expected = whole.pages().take_while(|page| at(page.0) == first).count() as u64;
            prop_assert_eq!(run, range(probe.0, expected));
            let absent = vmfork_policy::Presence::next_absent(&bits, whole);
            prop_assert_eq!(absent.map(|run| run.start()), whole.pages().find(|page| !at(page.0)));
            prop_assert!(absent.is_none_or(|run| run.pages().all(|page| !at(page.0))));
        }
    }
}
