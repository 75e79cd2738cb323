//! Demand prediction: a VM that has touched a part of a segment will touch the rest.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use vmfork_image::{BLOCK_PAGES, PageIdx, PageRange, PageTable, Source};

use super::{Background, Priority, Proposal};
use crate::page_set::PageSet;

/// Most pages of a segment: 256 MiB. Few enough to distinguish the shares of two segments exactly.
pub const SEGMENT_PAGES_MAX: u64 = 1 << 16;

/// Sizes of [`Segments`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentsConfig {
    /// Pages of a segment: a multiple of `unit_pages`, at most [`SEGMENT_PAGES_MAX`].
    pub segment_pages: u64,
    /// Once more than this percentage of a segment's pages has been demanded, the rest is proposed.
    /// 0 to 99.
    pub percent: u64,
    /// One fault brings the aligned window of this many pages, and counts for all of them. A power
    /// of two, 1 to 512: the scheduler's.
    pub unit_pages: u64,
    /// Most pages of one fetch, at least 1.
    pub pages_max: u64,
}

impl Default for SegmentsConfig {
    /// Twinkle's N = 1024 and P = 30 %, in units and fetches as the engine's.
    fn default() -> Self {
        Self { segment_pages: 1024, percent: 30, unit_pages: 16, pages_max: 64 }
    }
}

/// Sizes that make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SegmentsError {
    #[error("fill unit of {unit_pages} pages; it must be a power of two from 1 to {BLOCK_PAGES}")]
    Unit { unit_pages: u64 },
    #[error(
        "segments of {segment_pages} pages; it must be a multiple of the fill unit, {unit_pages}, \
         from there to {SEGMENT_PAGES_MAX}"
    )]
    Segment { segment_pages: u64, unit_pages: u64 },
    #[error("segments are proposed past {percent} % of their pages; it must be 0 to 99")]
    Percent { percent: u64 },
}

/// Proposes the rest of each segment of which enough has been demanded, fullest segment first, each
/// once (Twinkle, INFOCOM 2011, "demand prediction").
///
/// ```text
///   Counting ── more than P % of its non-zero pages demanded ──► Ready ── it is the fullest ──► Proposed
/// ```
///
/// A share is of the pages that are not zero, since the others never travel. A segment with ten
/// such pages is past 30 % with the fourth. Faults in a segment that is ready still count, and may
/// make it the fullest. Pages of a segment that fail are left to demand.
///
/// Takes a bit for each demanded page of segments that have not been proposed yet. Takes a few
/// words, too, for each segment that has ever seen a fault.
#[derive(Debug)]
pub struct Segments {
    config: SegmentsConfig,
    /// In segments not proposed yet.
    demanded: PageSet,
    segments: BTreeMap<u64, Segment>,
    /// The fullest first; of equally full ones, the one that was ready first.
    ready: BTreeSet<(Reverse<Share>, Crossing, u64)>,
    crossings: Crossing,
}

/// How full a segment is: demanded over non-zero pages, in 2⁻³². Two different shares of at most
/// [`SEGMENT_PAGES_MAX`] pages differ by more.
type Share = u64;

/// The place of a segment in the order in which segments became ready.
type Crossing = u64;

#[derive(Debug, Clone, Copy)]
enum Segment {
    /// `pages`: those not zero, of which `demanded` are. `ready`: since when, if it is.
    Counting {
        pages: u64,
        demanded: u64,
        ready: Option<Crossing>,
    },
    Proposed,
}

impl Segments {
    /// # Errors
    /// If `config` makes no sense.
    pub fn new(config: SegmentsConfig) -> Result<Self, SegmentsError> {
        let SegmentsConfig { segment_pages, percent, unit_pages, pages_max } = config;
        if !unit_pages.is_power_of_two() || unit_pages > BLOCK_PAGES {
            return Err(SegmentsError::Unit { unit_pages });
        }
        let sizes = unit_pages..=SEGMENT_PAGES_MAX;
        if !sizes.contains(&segment_pages) || !segment_pages.is_multiple_of(unit_pages) {
            return Err(SegmentsError::Segment { segment_pages, unit_pages });
        }
        if percent >= 100 {
            return Err(SegmentsError::Percent { percent });
        }
        Ok(Self {
            config: SegmentsConfig { pages_max: pages_max.max(1), ..config },
            demanded: PageSet::default(),
            segments: BTreeMap::new(),
            ready: BTreeSet::new(),
            crossings: 0,
        })
    }

    /// The pages of a segment of an image. The last one may be cut short.
    fn pages(&self, index: u64, table: &PageTable) -> PageRange {
        let len = self.config.segment_pages;
        let start = PageIdx((index * len).min(table.pages()));
        table.range().from_page(start).truncate(len)
    }
}

impl Background for Segments {
    fn name(&self) -> &'static str {
        "segments"
    }

    fn priority(&self) -> Priority {
        Priority::Prediction
    }

    fn propose(&mut self, table: &PageTable) -> Option<Proposal> {
        let (_, _, index) = self.ready.pop_first()?;
        self.segments.insert(index, Segment::Proposed);
        let range = self.pages(index, table);
        self.demanded.remove(range);
        Some(Proposal { range, pages_max: self.config.pages_max })
    }

    fn is_done(&self) -> bool {
        self.ready.is_empty()
    }

    fn on_fault(&mut self, page: PageIdx, table: &PageTable) {
        let SegmentsConfig { segment_pages, percent, unit_pages, .. } = self.config;
        let index = page.0 / segment_pages;
        let whole = self.pages(index, table);
        if !whole.contains(page) {
            return;
        }
        let count = || Segment::Counting {
            pages: non_zero(table, whole).map(|run| run.len()).sum(),
            demanded: 0,
            ready: None,
        };
        let segment = self.segments.entry(index).or_insert_with(count);
        let Segment::Counting { pages, demanded, ready } = segment else { return };
        let share = |demanded: u64| Reverse((demanded << 32) / (*pages).max(1));
        let before = share(*demanded);
        let window =
            whole.from_page(PageIdx(page.0 / unit_pages * unit_pages)).truncate(unit_pages);
        for run in non_zero(table, window) {
            *demanded += self.demanded.insert(run);
        }
        let after = share(*demanded);
        match *ready {
            Some(crossing) => {
                self.ready.remove(&(before, crossing, index));
                self.ready.insert((after, crossing, index));
            }
            None if *demanded * 100 > percent * *pages => {
                *ready = Some(self.crossings);
                self.ready.insert((after, self.crossings, index));
                self.crossings += 1;
            }
            None => {}
        }
    }
}

/// The runs of `range` that are not zero.
fn non_zero(table: &PageTable, range: PageRange) -> impl Iterator<Item = PageRange> {
    table.runs(range).filter(|(_, source)| *source != Source::Zero).map(|(run, _)| run)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmfork_image::ImageId;

    use super::*;

    const CONFIG: SegmentsConfig =
        SegmentsConfig { segment_pages: 40, percent: 30, unit_pages: 4, pages_max: 8 };

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    fn image() -> Source {
        Source::Image(ImageId::new(7).expect("not 0"))
    }

    fn segments() -> Segments {
        Segments::new(CONFIG).expect("valid")
    }

    fn proposed(segments: &mut Segments, table: &PageTable) -> Vec<PageRange> {
        std::iter::from_fn(|| segments.propose(table)).map(|proposal| proposal.range).collect()
    }

    #[test]
    fn a_segment_is_proposed_once_and_past_the_share_only() {
        let table = PageTable::uniform(400, image());
        let mut segments = segments();
        // Three windows of four are 30 % of 40 pages; a window counts once.
        for page in [40, 43, 50, 49, 60] {
            segments.on_fault(PageIdx(page), &table);
        }
        assert!(segments.is_done());
        segments.on_fault(PageIdx(79), &table);
        assert!(!segments.is_done());
        assert_eq!(proposed(&mut segments, &table), [range(40, 40)]);
        assert!(segments.is_done());
        for page in 40..80 {
            segments.on_fault(PageIdx(page), &table);
        }
        assert!(segments.is_done());
        assert_eq!(segments.demanded.count(range(0, 400)), 0, "what is proposed needs no bits");
    }

    #[test]
    fn shares_are_of_pages_that_are_not_zero_and_the_last_segment_may_be_short() {
        let table = PageTable::uniform(89, Source::Zero);
        let table = table.derive([(range(10, 5), image()), (range(80, 9), image())]);
        let table = table.expect("within");
        let mut segments = segments();
        // Pages 10 and 11 of five.
        segments.on_fault(PageIdx(10), &table);
        assert_eq!(proposed(&mut segments, &table), [range(0, 40)]);
        // The window is cut by the image's end: 1 page of 9, then 5.
        segments.on_fault(PageIdx(88), &table);
        assert!(segments.is_done());
        segments.on_fault(PageIdx(80), &table);
        assert_eq!(proposed(&mut segments, &table), [range(80, 9)]);
        // Nothing that can be asked for.
        segments.on_fault(PageIdx(70), &table);
        segments.on_fault(PageIdx(89), &table);
        segments.on_fault(PageIdx(u64::MAX), &table);
        assert!(segments.is_done());
    }

    #[test]
    fn the_fullest_goes_first_and_of_equals_the_one_that_was_ready_first() {
        let table = PageTable::uniform(400, image());
        let mut segments = segments();
        let mut demand = |segment: u64, windows: std::ops::Range<u64>| {
            for window in windows {
                segments.on_fault(PageIdx(segment * 40 + window * 4), &table);
            }
        };
        demand(3, 0..4);
        demand(1, 0..4);
        demand(2, 0..4);
        demand(5, 0..6);
        demand(2, 4..5);
        let order: Vec<_> =
            proposed(&mut segments, &table).iter().map(|run| run.start().0 / 40).collect();
        assert_eq!(order, [5, 2, 3, 1]);
    }

    #[test]
    fn senseless_sizes_are_refused() {
        let error = |config| Segments::new(config).expect_err("refused").to_string();
        assert_eq!(
            error(SegmentsConfig { unit_pages: 3, ..CONFIG }),
            "fill unit of 3 pages; it must be a power of two from 1 to 512"
        );
        for segment_pages in [0, 2, 42, SEGMENT_PAGES_MAX + 4] {
            assert_eq!(
                error(SegmentsConfig { segment_pages, ..CONFIG }),
                format!(
                    "segments of {segment_pages} pages; it must be a multiple of the fill unit, 4, from \
                     there to 65536"
                )
            );
        }
        assert_eq!(
            error(SegmentsConfig { percent: 100, ..CONFIG }),
            "segments are proposed past 100 % of their pages; it must be 0 to 99"
        );
    }

    /// Faults and proposals against counting by hand.
    #[derive(Debug, Clone)]
    enum Step {
        Fault(u64),
        Propose,
    }

    proptest! {
        #[test]
        fn proposals_are_as_counted_by_hand(
            runs in prop::collection::vec((1..30u64, any::<bool>()), 1..30),
            steps in prop::collection::vec(
                prop_oneof![8 => (0..300u64).prop_map(Step::Fault), 1 => Just(Step::Propose)], 1..200,
            ),
        ) {
            let mut changes = Vec::new();
            let mut at = 0;
            for (len, is_zero) in runs {
                let source = if is_zero { Source::Zero } else { image() };
                changes.push((range(at, len).intersect(&PageRange::first(290)), source));
                at = (at + len).min(290);
            }
            let table = PageTable::uniform(290, image()).derive(changes).expect("within");
            let is_zero = |page: u64| table.get(PageIdx(page)).is_none_or(|source| source == Source::Zero);
            let mut segments = segments();
            // By segment: the demanded pages, and whether it was proposed.
            let mut model: BTreeMap<u64, (BTreeSet<u64>, bool)> = BTreeMap::new();
            let mut ready = Vec::new();
            let pages = |index: u64| (index * 40..index * 40 + 40).filter(|page| !is_zero(*page)).count() as u64;
            for step in steps {
                match step {
                    Step::Fault(page) if is_zero(page) => {} // as the scheduler does
                    Step::Fault(page) => {
                        segments.on_fault(PageIdx(page), &table);
                        let index = page / 40;
                        let (demanded, proposed) = model.entry(index).or_default();
                        let window = page / 4 * 4..page / 4 * 4 + 4;
                        demanded.extend(window.filter(|page| !is_zero(*page)));
                        let past = demanded.len() as u64 * 100 > 30 * pages(index);
                        if past && !*proposed && !ready.contains(&index) {
                            ready.push(index);
                        }
                    }
                    Step::Propose => {
                        let full = |index: &u64| (model[index].0.len() as u64, pages(*index));
                        // The first of the fullest.
                        let best = ready.iter().copied().reduce(|best, index| {
                            let ((a, b), (c, d)) = (full(&best), full(&index));
                            if c * b > a * d { index } else { best }
                        });
                        let proposal = segments.propose(&table);
                        let expected = best.map(|index| range(index * 40, 40).intersect(&table.range()));
                        prop_assert_eq!(proposal.map(|proposal| proposal.range), expected);
                        if let Some(best) = best {
                            ready.retain(|index| *index != best);
                            model.entry(best).or_default().1 = true;
                        }
                    }
                }
                prop_assert_eq!(segments.is_done(), ready.is_empty());
            }
        }
    }
}
