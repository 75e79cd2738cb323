//! A block of several sources, packed.

use std::ops::Range;

use crate::{BLOCK_PAGES, Source};

/// Pages of a block, as an array's length.
#[expect(clippy::cast_possible_truncation, reason = "512")]
pub(super) const PAGES: usize = BLOCK_PAGES as usize;

/// The sources of one block's 512 pages, at least two: a palette, and for each page its place in
/// it. A place takes as many bits (1, 2, 4, 8 or 16) as the palette needs.
///
/// Packing was chosen over a list of runs. With two sources it takes 136 bytes however
/// scattered the pages are; a list takes 10 bytes a run. Up to 192 sources in one block
/// stay within 2 KiB; 512, the most possible, take 5 KiB.
///
/// The palette is in the order in which the sources first occur, so that equal blocks are packed
/// equally.
#[derive(Clone, PartialEq, Eq)]
pub struct MixedBlock {
    palette: Box<[Source]>,
    words: Box<[u64]>,
    /// Bits per page, as a power of two: 0 to 4.
    bits_log2: u32,
    /// Pages that count: 512, fewer in a block cut short by the image's end.
    pages: u16,
}

/// A block, packed.
pub(super) enum Packed {
    Uniform(Source),
    Mixed(MixedBlock),
}

impl MixedBlock {
    /// Packs the first `pages` of `sources`.
    pub(super) fn pack(sources: &[Source; PAGES], pages: usize) -> Packed {
        let sources = &sources[..pages.clamp(1, PAGES)];
        let mut palette: Vec<Source> = Vec::with_capacity(4);
        let mut runs = [(0u16, 0u16); PAGES];
        let (mut run_count, mut end) = (0, 0);
        for run in sources.chunk_by(|a, b| a.word() == b.word()) {
            let place = palette.iter().position(|source| *source == run[0]).unwrap_or_else(|| {
                palette.push(run[0]);
                palette.len() - 1
            });
            end += run.len();
            runs[run_count] = (narrow(end), narrow(place));
            run_count += 1;
        }
        if run_count == 1 {
            return Packed::Uniform(sources[0]);
        }
        let bits_log2 = match palette.len() {
            0..=2 => 0,
            3..=4 => 1,
            5..=16 => 2,
            17..=256 => 3,
            _ => 4,
        };
        let mut words = vec![0u64; PAGES >> (6 - bits_log2)].into_boxed_slice();
        let mut start = 0;
        for (end, place) in &runs[..run_count] {
            let end = usize::from(*end);
            fill(&mut words, bits_log2, start..end, *place);
            start = end;
        }
        let palette = palette.into_boxed_slice();
        Packed::Mixed(Self { palette, words, bits_log2, pages: narrow(end) })
    }

    /// How many pages count: 512, fewer in a block cut short by the image's end.
    pub fn pages(&self) -> usize {
        usize::from(self.pages)
    }

    /// The source of a page, by its number in the block.
    ///
    /// # Panics
    /// If `index` is 512 or more.
    pub fn source(&self, index: usize) -> Source {
        self.palette[self.place(index)]
    }

    /// The sources that occur, each once.
    pub fn palette(&self) -> &[Source] {
        &self.palette
    }

    /// The sources of all pages that count, in order.
    pub fn sources(&self) -> impl Iterator<Item = Source> + '_ {
        (0..self.pages()).map(|index| self.source(index))
    }

    /// The runs of pages of one source, in order.
    fn runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> + '_ {
        let mut start = 0;
        std::iter::from_fn(move || {
            if start == self.pages() {
                return None;
            }
            let run = start..self.run_end(start);
            start = run.end;
            Some((run.clone(), self.place(run.start)))
        })
    }

    /// Unpacks the block; pages that do not count are left as they are.
    pub(super) fn unpack_to(&self, sources: &mut [Source; PAGES]) {
        for (run, place) in self.runs() {
            sources[run].fill(self.palette[place]);
        }
    }

    /// The first page after `index` that has another source, or the end.
    pub(super) fn run_end(&self, index: usize) -> usize {
        let (mut word, shift) = position(index, self.bits_log2);
        let same = repeat(self.place(index), self.bits_log2);
        // Pages of `index`'s source show as zero bits.
        let mut other = ((self.words[word] ^ same) >> shift) << shift;
        while other == 0 {
            word += 1;
            match self.words.get(word) {
                Some(next) => other = next ^ same,
                None => return self.pages(),
            }
        }
        let end =
            (word << (6 - self.bits_log2)) + (other.trailing_zeros() >> self.bits_log2) as usize;
        end.min(self.pages())
    }

    /// The first page of the run that `index` is in.
    pub(super) fn run_start(&self, index: usize) -> usize {
        let (mut word, shift) = position(index, self.bits_log2);
        let same = repeat(self.place(index), self.bits_log2);
        let below = (1u64 << shift) - 1;
        let mut other = (self.words[word] ^ same) & below;
        while other == 0 {
            let Some(before) = word.checked_sub(1) else { return 0 };
            word = before;
            other = self.words[word] ^ same;
        }
        let last = (63 - other.leading_zeros()) >> self.bits_log2;
        (word << (6 - self.bits_log2)) + last as usize + 1
    }

    /// The first page at or after `index` whose source is `source`.
    pub(super) fn next_of(&self, source: Source, index: usize) -> Option<usize> {
        let place = self.palette.iter().position(|s| *s == source)?;
        let mut at = index;
        while at < self.pages() {
            if self.place(at) == place {
                return Some(at);
            }
            at = self.run_end(at);
        }
        None
    }

    /// The sources with the number of pages of each.
    pub(super) fn counts(&self) -> impl Iterator<Item = (Source, u64)> + '_ {
        let mut counts = vec![0; self.palette.len()];
        for (run, place) in self.runs() {
            counts[place] += run.len() as u64;
        }
        self.palette.iter().copied().zip(counts)
    }

    /// Bytes on the heap, those of this struct left out.
    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.palette) + size_of_val(&*self.words)
    }

    #[expect(clippy::cast_possible_truncation, reason = "masked to at most 16 bits")]
    fn place(&self, index: usize) -> usize {
        let (word, shift) = position(index, self.bits_log2);
        let mask = (1u64 << (1 << self.bits_log2)) - 1;
        ((self.words[word] >> shift) & mask) as usize
    }
}

impl std::fmt::Debug for MixedBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MixedBlock")
            .field("palette", &self.palette)
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

/// In which word page `index` has its bits, and how far up.
fn position(index: usize, bits_log2: u32) -> (usize, usize) {
    let per_word_log2 = 6 - bits_log2;
    (index >> per_word_log2, (index & ((1 << per_word_log2) - 1)) << bits_log2)
}

/// A word of which every page has `place`.
fn repeat(place: usize, bits_log2: u32) -> u64 {
    // 1 in the lowest bit of each page.
    let ones = u64::MAX / ((1u64 << (1 << bits_log2)) - 1);
    ones * place as u64
}

/// Gives the pages `run` of `words`, all zero so far, the place `place`.
fn fill(words: &mut [u64], bits_log2: u32, run: Range<usize>, place: u16) {
    let all = repeat(usize::from(place), bits_log2);
    let mut start = run.start;
    while start < run.end {
        let (word, shift) = position(start, bits_log2);
        let end = ((word + 1) << (6 - bits_log2)).min(run.end);
        let bits = (end - start) << bits_log2;
        words[word] |= (all & (u64::MAX >> (64 - bits))) << shift;
        start = end;
    }
}

/// A number of pages, or of a page, of a block: at most 512.
#[expect(clippy::cast_possible_truncation, reason = "at most 512")]
fn narrow(n: usize) -> u16 {
    debug_assert!(n <= PAGES);
    n as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ImageId;

    fn source(n: u64) -> Source {
        ImageId::new(n).map_or(Source::Zero, Source::Image)
    }

    fn pack(sources: &[Source; PAGES], pages: usize) -> MixedBlock {
        match MixedBlock::pack(sources, pages) {
            Packed::Mixed(mixed) => mixed,
            Packed::Uniform(source) => panic!("all {source}"),
        }
    }

    #[test]
    fn sizes_are_as_documented() {
        let whole = |mixed: &MixedBlock| mixed.heap_bytes() + size_of::<MixedBlock>() + 16;
        let with = |n: u64| {
            let sources = std::array::from_fn(|i| source(i as u64 % n));
            whole(&pack(&sources, PAGES))
        };
        assert_eq!(with(2), 136);
        assert!(with(16) <= 480, "{}", with(16));
        assert!(with(180) <= 2048, "{}", with(180));
        assert!(pack(&std::array::from_fn(|i| source(i as u64 % 192)), PAGES).heap_bytes() <= 2048);
        assert!(with(512) <= 5 * 1024 + 64, "{}", with(512));
    }

    #[test]
    fn a_block_of_one_source_is_not_mixed() {
        let mut sources = [source(3); PAGES];
        sources[100] = Source::Zero;
        assert!(matches!(MixedBlock::pack(&sources, 100), Packed::Uniform(s) if s == source(3)));
        assert!(matches!(MixedBlock::pack(&sources, 101), Packed::Mixed(_)));
    }

    proptest! {
        #[test]
        fn a_packed_block_says_what_went_in(
            (palette, pages) in (2u64..600, 2usize..=PAGES),
            picks in prop::collection::vec(any::<u64>(), PAGES),
        ) {
            let mut sources: [Source; PAGES] = std::array::from_fn(|i| source(picks[i] % palette));
            sources[1] = source(palette);
            sources[0] = source(0);
            let mixed = pack(&sources, pages);
            prop_assert!(mixed.sources().eq(sources[..pages].iter().copied()));
            let mut unpacked = [source(0xdead); PAGES];
            mixed.unpack_to(&mut unpacked);
            prop_assert_eq!(&unpacked[..pages], &sources[..pages]);
            prop_assert_eq!(mixed.counts().map(|(_, n)| n).sum::<u64>(), pages as u64);
            for (s, n) in mixed.counts() {
                prop_assert_eq!(n, sources[..pages].iter().filter(|t| **t == s).count() as u64);
            }
            for at in [0, 1, pages / 2, pages - 1] {
                let end = mixed.run_end(at);
                prop_assert!(sources[at..end].iter().all(|s| *s == sources[at]));
                prop_assert!(end == pages || sources[end] != sources[at]);
                let start = mixed.run_start(at);
                prop_assert!(sources[start..at].iter().all(|s| *s == sources[at]));
                prop_assert!(start == 0 || sources[start - 1] != sources[at]);
                let next = (at..pages).find(|i| sources[*i] == sources[0]);
                prop_assert_eq!(mixed.next_of(sources[0], at), next);
            }
        }
    }
}
