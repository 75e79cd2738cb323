//! What a layer has of each page: two bits.
//!
//! Words are allocated in chunks, each when the first of its pages is set. So the cost of a layer
//! is that of what was written, apart from 16 bytes for each 64 MiB of the disk.
//!
//! Promises: a page's state is one of three at any time, whatever threads change and read it. A
//! count of pages is O(1). A run over pages that were never set costs one step for each chunk.
//!
//! Left to others: the files that hold pages and bits ([`super::files`]). No I/O.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use vmfork_image::{PageIdx, PageRange};

/// Pages whose bits are in one word.
const WORD_PAGES: u64 = 32;
/// Pages whose bits are in one byte.
const BYTE_PAGES: u64 = 4;
/// Bytes of a map that are allocated together, in memory and as a rule in a file.
pub(super) const CHUNK_BYTES: u64 = 4096;
/// Pages whose bits are in one chunk: 64 MiB.
pub(crate) const CHUNK_PAGES: u64 = CHUNK_BYTES * BYTE_PAGES;
const CHUNK_WORDS: u64 = CHUNK_BYTES / 8;
/// The lower bit of each page.
const LOWER: u64 = 0x5555_5555_5555_5555;

/// What a layer has of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// Nothing: what it lies on shows through.
    Absent,
    /// Its bytes.
    Written,
    /// It is zeros, and takes no space.
    Zero,
}

impl PageState {
    const fn bits(self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Written => 1,
            Self::Zero => 2,
        }
    }

    /// `None`: no state has these bits.
    const fn of(bits: u64) -> Option<Self> {
        match bits {
            0 => Some(Self::Absent),
            1 => Some(Self::Written),
            2 => Some(Self::Zero),
            _ => None,
        }
    }
}

/// Bits that no layer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapFlaw {
    #[error("{found} bytes for {pages} pages")]
    Length { found: usize, pages: u64 },
    #[error("page {0} is in no state")]
    State(PageIdx),
    #[error("a state beyond the last page")]
    Beyond,
}

type Chunk = Box<[AtomicU64]>;

/// The states of all pages.
#[derive(Debug)]
pub struct LayerMap {
    /// Pages of a chunk that is missing are absent.
    chunks: Box<[OnceLock<Chunk>]>,
    pages: u64,
    written: AtomicU64,
    zero: AtomicU64,
}

impl LayerMap {
    /// All pages are absent.
    pub fn new(pages: u64) -> Self {
        let chunks = (0..pages.div_ceil(CHUNK_PAGES)).map(|_| OnceLock::new()).collect();
        Self { chunks, pages, written: AtomicU64::new(0), zero: AtomicU64::new(0) }
    }

    /// Bytes that hold the states of `pages` pages.
    pub const fn byte_len(pages: u64) -> u64 {
        pages.div_ceil(WORD_PAGES) * 8
    }

    /// Takes over what [`LayerMap::bytes`] gave: the states of pages that are absent so far. `at`
    /// is where the bytes begin, a multiple of 8 as their length is. Zeros allocate nothing.
    ///
    /// # Errors
    /// [`MapFlaw`]. Some of the states may have been taken over.
    pub fn load(&self, at: u64, bytes: &[u8]) -> Result<(), MapFlaw> {
        let end = at.saturating_add(bytes.len() as u64);
        if !at.is_multiple_of(8)
            || !bytes.len().is_multiple_of(8)
            || end > Self::byte_len(self.pages)
        {
            return Err(MapFlaw::Length { found: bytes.len(), pages: self.pages });
        }
        for (number, chunk) in (at / 8..).zip(bytes.chunks_exact(8)) {
            let bits = chunk.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
            if bits == 0 {
                continue;
            }
            let first = number * WORD_PAGES;
            let beyond = (self.pages - first).min(WORD_PAGES) * 2;
            if beyond < 64 && bits >> beyond != 0 {
                return Err(MapFlaw::Beyond);
            }
            // Both bits of a page.
            let both = bits & (bits >> 1) & LOWER;
            if both != 0 {
                let page = first + u64::from(both.trailing_zeros() / 2);
                return Err(MapFlaw::State(PageIdx(page)));
            }
            self.change(number, u64::MAX, bits);
        }
        Ok(())
    }

    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The state of a page. Those beyond the layer are absent.
    pub fn state(&self, page: PageIdx) -> PageState {
        PageState::of(self.word(page.0 / WORD_PAGES) >> (page.0 % WORD_PAGES * 2) & 3)
            .unwrap_or(PageState::Absent)
    }

    fn chunk(&self, index: u64) -> Option<&OnceLock<Chunk>> {
        usize::try_from(index).ok().and_then(|index| self.chunks.get(index))
    }

    /// Whether the pages around this one were never set.
    fn is_missing(&self, page: PageIdx) -> bool {
        self.chunk(page.0 / CHUNK_PAGES).is_none_or(|chunk| chunk.get().is_none())
    }

    fn word(&self, index: u64) -> u64 {
        let chunk = self.chunk(index / CHUNK_WORDS).and_then(OnceLock::get);
        let within = usize::try_from(index % CHUNK_WORDS).unwrap_or(usize::MAX);
        let word = chunk.and_then(|words| words.get(within));
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// The bits of a word under `mask` are `bits` from now on. → how many pages were written there.
    fn change(&self, index: u64, mask: u64, bits: u64) -> u64 {
        let Some(chunk) = self.chunk(index / CHUNK_WORDS) else { return 0 };
        if bits == 0 && chunk.get().is_none() {
            return 0;
        }
        let words = chunk.get_or_init(|| (0..CHUNK_WORDS).map(|_| AtomicU64::new(0)).collect());
        let within = usize::try_from(index % CHUNK_WORDS).unwrap_or(usize::MAX);
        let Some(word) = words.get(within) else { return 0 };
        let next = |old: u64| Some(old & !mask | bits);
        let (Ok(old) | Err(old)) = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        let written = |word: u64| u64::from((word & mask & LOWER).count_ones());
        let zero = |word: u64| written(word >> 1 & LOWER);
        // A sum that wraps between the two is right again after both.
        self.written.fetch_add(written(bits).wrapping_sub(written(old)), Ordering::Relaxed);
        self.zero.fetch_add(zero(bits).wrapping_sub(zero(old)), Ordering::Relaxed);
        written(old)
    }

    /// All pages of `range` are in this state from now on. What is read of them before is complete:
    /// a caller writes their bytes first. → how many of the pages were written before.
    pub fn set(&self, range: PageRange, state: PageState) -> u64 {
        let mut at = range.start().0;
        let end = range.end().0.min(self.pages);
        let mut written = 0;
        while at < end {
            let next = (at / WORD_PAGES + 1) * WORD_PAGES;
            let count = next.min(end) - at;
            let lowest = at % WORD_PAGES * 2;
            let ones = if count == WORD_PAGES { u64::MAX } else { (1 << (count * 2)) - 1 };
            let mask = ones << lowest;
            written += self.change(at / WORD_PAGES, mask, (LOWER * state.bits()) & mask);
            at += count;
        }
        written
    }

    /// The longest run from the start of `range` on whose pages are all in one state, and which.
    /// Empty only if `range` is.
    pub fn run(&self, range: PageRange) -> (PageRange, PageState) {
        let state = self.state(range.start());
        let same = LOWER * state.bits();
        let (mut at, end) = (range.start().0, range.end().0);
        while at < end {
            if state == PageState::Absent && self.is_missing(PageIdx(at)) {
                at = (at / CHUNK_PAGES + 1) * CHUNK_PAGES;
                continue;
            }
            let lowest = at % WORD_PAGES * 2;
            let differing = (self.word(at / WORD_PAGES) ^ same) >> lowest;
            let pages = u64::from(differing.trailing_zeros() / 2).min(WORD_PAGES - lowest / 2);
            at += pages;
            if differing != 0 {
                break;
            }
        }
        (range.until_page(PageIdx(at.min(end))), state)
    }

    /// Each run of `range` that is in one state.
    pub fn runs(&self, range: PageRange) -> impl Iterator<Item = (PageRange, PageState)> + '_ {
        let mut rest = range;
        std::iter::from_fn(move || {
            (!rest.is_empty()).then(|| {
                let (run, state) = self.run(rest);
                rest = rest.from_page(run.end());
                (run, state)
            })
        })
    }

    /// The bytes that hold the states of `range`, as a file has them, and where they begin in it.
    pub fn bytes(&self, range: PageRange) -> (u64, Vec<u8>) {
        let first = range.start().0 / BYTE_PAGES;
        let end = range.end().0.div_ceil(BYTE_PAGES);
        let byte = |index: u64| {
            let shifted = self.word(index / 8) >> (index % 8 * 8);
            u8::try_from(shifted & 0xff).unwrap_or(0)
        };
        (first, (first..end).map(byte).collect())
    }

    /// The same, as if all pages of `range` were in `state`.
    pub fn bytes_with(&self, range: PageRange, state: PageState) -> (u64, Vec<u8>) {
        let (first, mut bytes) = self.bytes(range);
        for page in range.pages() {
            let shift = page.0 % BYTE_PAGES * 2;
            let index = usize::try_from(page.0 / BYTE_PAGES - first).unwrap_or(usize::MAX);
            if let Some(byte) = bytes.get_mut(index) {
                let bits = u8::try_from(state.bits() << shift).unwrap_or(0);
                *byte = *byte & !(3 << shift) | bits;
            }
        }
        (first, bytes)
    }

    /// The same states, of more pages. Nothing may be set meanwhile.
    pub(super) fn grown(&self, pages: u64) -> Self {
        let grown = Self::new(pages.max(self.pages));
        for (new, old) in grown.chunks.iter().zip(&self.chunks) {
            if let Some(old) = old.get() {
                let copied = old.iter().map(|word| AtomicU64::new(word.load(Ordering::Acquire)));
                new.get_or_init(|| copied.collect());
            }
        }
        grown.written.store(self.written.load(Ordering::Acquire), Ordering::Release);
        grown.zero.store(self.zero.load(Ordering::Acquire), Ordering::Release);
        grown
    }

    /// How many pages of `range` are written.
    pub fn written(&self, range: PageRange) -> u64 {
        let written = self.runs(range).filter(|(_, state)| *state == PageState::Written);
        written.map(|(run, _)| run.len()).sum()
    }

    /// How many pages are in a state, without a look at each.
    pub fn count(&self, state: PageState) -> u64 {
        let (written, zero) =
            (self.written.load(Ordering::Relaxed), self.zero.load(Ordering::Relaxed));
        match state {
            PageState::Absent => self.pages.saturating_sub(written).saturating_sub(zero),
            PageState::Written => written,
            PageState::Zero => zero,
        }
    }

    /// How many chunks a change of `range` would allocate.
    pub(super) fn chunks_missing(&self, range: PageRange) -> u64 {
        let chunks = range.start().0 / CHUNK_PAGES..range.end().0.div_ceil(CHUNK_PAGES);
        chunks.filter(|chunk| self.is_missing(PageIdx(chunk * CHUNK_PAGES))).count() as u64
    }
}

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
