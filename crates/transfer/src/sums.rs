//! Sums of pages: what a host that only passes pages on can't make up.

use std::collections::BTreeMap;

use vmfork_image::{BLOCK_PAGES, PageIdx, PageRange};

/// The first 16 bytes of a page's BLAKE3.
pub(crate) type Sum = [u8; SUM_BYTES];
pub(crate) const SUM_BYTES: usize = 16;
/// In the place of one that is not known.
pub(crate) const UNKNOWN: Sum = [0; SUM_BYTES];

pub(crate) fn of(page: &[u8]) -> Sum {
    let mut sum = UNKNOWN;
    sum.copy_from_slice(&blake3::hash(page).as_bytes()[..SUM_BYTES]);
    sum
}

/// Those of an image that are known: 16 bytes for each page of each block that one was asked of.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    blocks: BTreeMap<u64, Vec<Sum>>,
}

impl Sums {
    /// Of each page in `range`, or [`UNKNOWN`].
    pub(crate) fn get(&self, range: PageRange) -> Vec<Sum> {
        let sum = |page: PageIdx| {
            let block = self.blocks.get(&(page.0 / BLOCK_PAGES))?;
            block.get(usize::try_from(page.0 % BLOCK_PAGES).ok()?).copied()
        };
        range.pages().map(|page| sum(page).unwrap_or(UNKNOWN)).collect()
    }

    /// Those of `range` are needed no more.
    pub(crate) fn forget(&mut self, range: PageRange) {
        for page in range.pages() {
            let number = page.0 / BLOCK_PAGES;
            let Some(block) = self.blocks.get_mut(&number) else { continue };
            let at = usize::try_from(page.0 % BLOCK_PAGES).unwrap_or(usize::MAX);
            block.get_mut(at).into_iter().for_each(|sum| *sum = UNKNOWN);
            if block.iter().all(|sum| *sum == UNKNOWN) {
                self.blocks.remove(&number);
            }
        }
    }

    /// Those of `range`; one that is not known is none.
    pub(crate) fn put(&mut self, range: PageRange, sums: &[Sum]) {
        for (page, sum) in range.pages().zip(sums).filter(|(_, sum)| **sum != UNKNOWN) {
            let whole = || vec![UNKNOWN; usize::try_from(BLOCK_PAGES).unwrap_or(0)];
            let block = self.blocks.entry(page.0 / BLOCK_PAGES).or_insert_with(whole);
            let at = usize::try_from(page.0 % BLOCK_PAGES).unwrap_or(usize::MAX);
            if let Some(place) = block.get_mut(at) {
                *place = *sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, pages: u64) -> PageRange {
        PageRange::new(PageIdx(first), pages).expect("small")
    }

    #[test]
    fn what_was_put_is_there_and_nothing_else() {
        let (mut sums, one, two) = (Sums::default(), of(&[1; 4096]), of(&[2; 4096]));
        assert!(one != two && one != UNKNOWN);
        sums.put(range(511, 3), &[one, UNKNOWN, two]);
        assert_eq!(sums.get(range(510, 5)), [UNKNOWN, one, UNKNOWN, two, UNKNOWN]);
        sums.put(range(511, 1), &[UNKNOWN]);
        assert_eq!(sums.get(range(511, 1)), [one]);
        sums.forget(range(500, 12));
        assert_eq!(sums.get(range(511, 3)), [UNKNOWN, UNKNOWN, two]);
        sums.forget(range(513, 1));
        assert!(sums.blocks.is_empty());
    }
}
