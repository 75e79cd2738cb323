//! A set of pages.

use std::collections::BTreeMap;

use vmfork_image::{BLOCK_PAGES, BlockIdx, PageIdx, PageRange};

const WORDS: usize = 8;
const _: () = assert!(WORDS as u64 * 64 == BLOCK_PAGES);

/// A set of pages: a bit for each page of the blocks that have one in it. It costs at most a bit
/// for each page of an image and a few words for each block. Where it is empty it costs nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageSet {
    blocks: BTreeMap<BlockIdx, [u64; WORDS]>,
}

impl PageSet {
    pub(crate) fn contains(&self, page: PageIdx) -> bool {
        let index = page.index_in_block();
        self.blocks
            .get(&page.block())
            .is_some_and(|words| words[index / 64] >> (index % 64) & 1 == 1)
    }

    /// How many pages of `range` are in it.
    pub(crate) fn count(&self, range: PageRange) -> u64 {
        let counts = range.by_block().filter_map(|(block, piece)| {
            let words = self.blocks.get(&block)?;
            Some(masks(piece).map(|(at, mask)| ones(words[at] & mask)).sum::<u64>())
        });
        counts.sum()
    }

    /// Puts pages in; returns how many were not there.
    pub(crate) fn insert(&mut self, range: PageRange) -> u64 {
        let mut new = 0;
        for (block, piece) in range.by_block() {
            let words = self.blocks.entry(block).or_default();
            for (at, mask) in masks(piece) {
                new += ones(mask & !words[at]);
                words[at] |= mask;
            }
        }
        new
    }

    /// Takes pages out.
    pub(crate) fn remove(&mut self, range: PageRange) {
        for (block, piece) in range.by_block() {
            let Some(words) = self.blocks.get_mut(&block) else { continue };
            for (at, mask) in masks(piece) {
                words[at] &= !mask;
            }
            if words.iter().all(|word| *word == 0) {
                self.blocks.remove(&block);
            }
        }
    }

    /// The runs of `range` that are not in it, in order, each as long as possible.
    pub(crate) fn absent(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        self.runs(range, false)
    }

    /// The runs of `range` that are in it, in order, each as long as possible.
    pub(crate) fn present(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        self.runs(range, true)
    }

    fn runs(&self, range: PageRange, inside: bool) -> impl Iterator<Item = PageRange> {
        let mut rest = range;
        std::iter::from_fn(move || {
            rest = rest.from_page(self.run_end(rest, !inside));
            if rest.is_empty() {
                return None;
            }
            let end = self.run_end(rest, inside);
            let run = rest.until_page(end);
            rest = rest.from_page(end);
            Some(run)
        })
    }

    /// The end of the run that starts where `range` starts, of pages that are all in it, or all
    /// not. At most the end of `range`.
    fn run_end(&self, range: PageRange, inside: bool) -> PageIdx {
        for (block, piece) in range.by_block() {
            let start = piece.start().0 - piece.start().index_in_block() as u64;
            let words = self.blocks.get(&block).copied().unwrap_or_default();
            for (at, mask) in masks(piece) {
                let other = mask & if inside { !words[at] } else { words[at] };
                if other != 0 {
                    return PageIdx(start + at as u64 * 64 + u64::from(other.trailing_zeros()));
                }
            }
        }
        range.end()
    }
}

fn ones(word: u64) -> u64 {
    u64::from(word.count_ones())
}

/// The words that a run within a block touches, with the bits that it has in each.
fn masks(piece: PageRange) -> impl Iterator<Item = (usize, u64)> {
    let start = piece.start().index_in_block();
    let end = start + usize::try_from(piece.len()).unwrap_or(0);
    (start / 64..end.div_ceil(64)).map(move |at| {
        let (from, to) = (start.max(at * 64) - at * 64, end.min(at * 64 + 64) - at * 64);
        (at, u64::MAX >> (64 - (to - from)) << from)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_behaves_like_a_list_of_flags(
            steps in prop::collection::vec((any::<bool>(), 0..1600u64, 0..700u64), 0..20),
            (start, len) in (0..1600u64, 0..800u64),
        ) {
            let (mut set, mut model) = (PageSet::default(), vec![false; 2400]);
            for (insert, start, len) in steps {
                let range = PageRange::new(PageIdx(start), len).expect("small");
                let cells = &mut model[usize::try_from(start).expect("small")..][..usize::try_from(len).expect("small")];
                if insert {
                    let new = cells.iter().filter(|cell| !**cell).count() as u64;
                    prop_assert_eq!(set.insert(range), new);
                } else {
                    set.remove(range);
                }
                cells.fill(insert);
            }
            let at = |page: PageIdx| model[usize::try_from(page.0).expect("small")];
            prop_assert!(PageRange::first(2400).pages().all(|page| set.contains(page) == at(page)));
            let range = PageRange::new(PageIdx(start), len).expect("small");
            prop_assert_eq!(set.count(range), range.pages().filter(|page| at(*page)).count() as u64);
            let absent: Vec<_> = set.absent(range).collect();
            let pages: Vec<_> = absent.iter().flat_map(PageRange::pages).collect();
            prop_assert_eq!(pages, range.pages().filter(|page| !at(*page)).collect::<Vec<_>>());
            prop_assert!(absent.windows(2).all(|pair| pair[0].end() < pair[1].start()), "runs are not the longest");
            let pages: Vec<_> = set.present(range).flat_map(|run| run.pages()).collect();
            prop_assert_eq!(pages, range.pages().filter(|page| at(*page)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_taken_out_costs_nothing_any_more() {
        let mut set = PageSet::default();
        set.insert(PageRange::first(2000));
        assert_eq!(set.blocks.len(), 4);
        set.remove(PageRange::first(1024));
        assert_eq!(set.blocks.len(), 2);
    }
}
