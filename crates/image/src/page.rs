//! Where in an image: pages, blocks, and runs of pages.

use std::fmt;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// Pages of a block: 2 MiB, what one page-table page of the CPU maps.
pub const BLOCK_PAGES: u64 = 512;

/// Bytes of a block.
pub const BLOCK_BYTES: u64 = PAGE_BYTES * BLOCK_PAGES;

/// Most pages an image may have: every byte offset in it fits a `u64`.
pub const PAGES_MAX: u64 = u64::MAX / PAGE_BYTES;

/// The number of a page in its image, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIdx(pub u64);

impl PageIdx {
    /// The page that holds the byte at `offset_bytes`.
    pub const fn of_byte(offset_bytes: u64) -> Self {
        Self(offset_bytes / PAGE_BYTES)
    }

    /// Where the page begins in its image, in bytes.
    ///
    /// # Panics
    /// If the page lies beyond [`PAGES_MAX`], where no image has one.
    pub const fn byte_offset(self) -> u64 {
        assert!(self.0 <= PAGES_MAX, "no image has such a page");
        self.0 * PAGE_BYTES
    }

    /// The block that the page is in.
    pub const fn block(self) -> BlockIdx {
        BlockIdx(self.0 / BLOCK_PAGES)
    }

    /// Which page of its block it is: 0 to 511.
    pub const fn index_in_block(self) -> usize {
        (self.0 % BLOCK_PAGES) as usize
    }

    /// The run of this page alone.
    ///
    /// # Panics
    /// If the page lies beyond [`PAGES_MAX`].
    pub const fn range(self) -> PageRange {
        assert!(self.0 < PAGES_MAX, "no image has such a page");
        PageRange { start: self.0, len: 1 }
    }
}

impl fmt::Display for PageIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a block of [`BLOCK_PAGES`] pages in its image, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockIdx(pub u64);

impl BlockIdx {
    /// The first page of the block, or `None` if no image is as large.
    pub fn first_page(self) -> Option<PageIdx> {
        self.0.checked_mul(BLOCK_PAGES).filter(|page| *page < PAGES_MAX).map(PageIdx)
    }

    /// All pages of the block, or `None` if no image is as large.
    pub fn pages(self) -> Option<PageRange> {
        PageRange::new(self.first_page()?, BLOCK_PAGES).ok()
    }
}

impl fmt::Display for BlockIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Numbers that make no run of pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    #[error(
        "{len} pages from page {start} end beyond page {PAGES_MAX}, the last an image may have"
    )]
    TooFar { start: u64, len: u64 },
    #[error("bytes {offset_bytes:#x}+{len_bytes:#x} are not whole pages of {PAGE_BYTES} bytes")]
    Unaligned { offset_bytes: u64, len_bytes: u64 },
}

/// A run of pages: `len` of them from `start` on. May be empty. Its end is at most [`PAGES_MAX`],
/// so that neither pages nor bytes of a run ever overflow.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRange {
    start: u64,
    len: u64,
}

impl PageRange {
    /// # Errors
    /// If the run would end beyond [`PAGES_MAX`].
    pub fn new(start: PageIdx, len: u64) -> Result<Self, RangeError> {
        match start.0.checked_add(len) {
            Some(end) if end <= PAGES_MAX => Ok(Self { start: start.0, len }),
            _ => Err(RangeError::TooFar { start: start.0, len }),
        }
    }

    /// The run from `start` up to, not including, `end`; empty if `end` is not after `start`.
    ///
    /// # Panics
    /// If either lies beyond [`PAGES_MAX`].
    pub fn between(start: PageIdx, end: PageIdx) -> Self {
        assert!(start.0 <= PAGES_MAX && end.0 <= PAGES_MAX, "no image has such pages");
        Self { start: start.0, len: end.0.saturating_sub(start.0) }
    }

    /// The first `pages` pages of an image.
    ///
    /// # Panics
    /// If `pages` is more than [`PAGES_MAX`].
    pub fn first(pages: u64) -> Self {
        Self::between(PageIdx(0), PageIdx(pages))
    }

    /// The run that bytes `offset_bytes` to `offset_bytes + len_bytes` are.
    ///
    /// # Errors
    /// If they are not whole pages, or too many.
    pub fn from_bytes(offset_bytes: u64, len_bytes: u64) -> Result<Self, RangeError> {
        if !offset_bytes.is_multiple_of(PAGE_BYTES) || !len_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(RangeError::Unaligned { offset_bytes, len_bytes });
        }
        Self::new(PageIdx::of_byte(offset_bytes), len_bytes / PAGE_BYTES)
    }

    /// The first page; of an empty run, where it would be.
    pub const fn start(&self) -> PageIdx {
        PageIdx(self.start)
    }

    /// The page after the last.
    pub const fn end(&self) -> PageIdx {
        PageIdx(self.start + self.len)
    }

    /// How many pages.
    pub const fn len(&self) -> u64 {
        self.len
    }

    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the run begins in its image, in bytes.
    pub const fn byte_offset(&self) -> u64 {
        self.start * PAGE_BYTES
    }

    /// How many bytes.
    pub const fn byte_len(&self) -> u64 {
        self.len * PAGE_BYTES
    }

    pub const fn contains(&self, page: PageIdx) -> bool {
        self.start <= page.0 && page.0 < self.start + self.len
    }

    /// Whether every page of `other` is in this run; of an empty one that is true anywhere.
    pub fn covers(&self, other: &Self) -> bool {
        other.is_empty() || (self.start <= other.start && other.end() <= self.end())
    }

    /// The pages in both; may be empty.
    pub fn intersect(&self, other: &Self) -> Self {
        let start = self.start.max(other.start);
        Self::between(PageIdx(start), self.end().min(other.end()))
    }

    /// The first `pages` pages of the run, or all if there are fewer.
    pub fn truncate(&self, pages: u64) -> Self {
        Self { start: self.start, len: self.len.min(pages) }
    }

    /// The pages from `page` on; all if the run begins later.
    pub fn from_page(&self, page: PageIdx) -> Self {
        let start = page.0.clamp(self.start, self.end().0);
        Self { start, len: self.end().0 - start }
    }

    /// The pages before `page`.
    pub fn until_page(&self, page: PageIdx) -> Self {
        self.truncate(page.0.saturating_sub(self.start))
    }

    /// The pages one by one.
    pub fn pages(&self) -> impl DoubleEndedIterator<Item = PageIdx> + use<> {
        (self.start..self.end().0).map(PageIdx)
    }

    /// The run cut at block borders, each piece with its block.
    pub fn by_block(&self) -> impl Iterator<Item = (BlockIdx, Self)> + use<> {
        let whole = *self;
        let mut at = self.start();
        std::iter::from_fn(move || {
            let rest = whole.from_page(at);
            if rest.is_empty() {
                return None;
            }
            let piece = rest.truncate(BLOCK_PAGES - at.0 % BLOCK_PAGES);
            let block = at.block();
            at = piece.end();
            Some((block, piece))
        })
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.start, self.len)
    }
}

impl fmt::Debug for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageRange({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn a_run_that_would_overflow_is_refused() {
        for (start, len) in [(u64::MAX, 1), (1, u64::MAX), (PAGES_MAX, 1), (0, PAGES_MAX + 1)] {
            let refused = PageRange::new(PageIdx(start), len);
            assert_eq!(refused, Err(RangeError::TooFar { start, len }));
        }
        assert_eq!(range(PAGES_MAX - 1, 1).byte_len(), PAGE_BYTES);
        assert_eq!(range(PAGES_MAX, 0).byte_offset(), PAGES_MAX * PAGE_BYTES);
    }

    #[test]
    fn bytes_that_are_not_whole_pages_are_refused() {
        assert_eq!(PageRange::from_bytes(0x2000, 0x1000), Ok(range(2, 1)));
        let error = PageRange::from_bytes(0x2000, 0x10).expect_err("unaligned");
        assert_eq!(error.to_string(), "bytes 0x2000+0x10 are not whole pages of 4096 bytes");
    }

    #[test]
    fn runs_intersect_and_split() {
        assert_eq!(range(5, 10).intersect(&range(10, 10)), range(10, 5));
        assert!(range(5, 10).intersect(&range(20, 10)).is_empty());
        assert!(range(20, 10).intersect(&range(5, 10)).is_empty());
        assert_eq!(range(5, 10).from_page(PageIdx(7)), range(7, 8));
        assert_eq!(range(5, 10).from_page(PageIdx(1)), range(5, 10));
        assert!(range(5, 10).from_page(PageIdx(99)).is_empty());
        assert_eq!(range(5, 10).until_page(PageIdx(7)), range(5, 2));
        assert!(range(5, 10).until_page(PageIdx(1)).is_empty());
        assert!(range(5, 10).covers(&range(99, 0)));
        assert!(!range(5, 10).covers(&range(14, 2)));
    }

    #[test]
    fn a_run_is_cut_at_block_borders() {
        let pieces: Vec<_> = range(510, 516).by_block().collect();
        assert_eq!(
            pieces,
            [
                (BlockIdx(0), range(510, 2)),
                (BlockIdx(1), range(512, 512)),
                (BlockIdx(2), range(1024, 2)),
            ]
        );
        assert_eq!(range(7, 0).by_block().count(), 0);
    }
}
