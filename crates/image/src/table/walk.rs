//! Walking a table by runs.

use super::{BlockView, PageTable};
use crate::{ImageId, PageIdx, PageRange, Source};

/// The longest stretch of one source around `page` that a single slot or block shows. The page
/// must be in the table.
fn segment(table: &PageTable, page: PageIdx) -> (PageRange, Source) {
    let (view, extent) = table.find(page.block());
    match view {
        BlockView::Uniform(source) => (extent.range(), source),
        BlockView::Mixed(mixed) => {
            let index = page.index_in_block();
            let at = |index: usize| PageIdx(extent.start + index as u64);
            let run = PageRange::between(at(mixed.run_start(index)), at(mixed.run_end(index)));
            (run, mixed.source(index))
        }
    }
}

/// The end of the run that goes on from `page`, at most `end`.
fn run_end(table: &PageTable, page: PageIdx, end: PageIdx) -> (PageIdx, Source) {
    let mut at = page;
    let mut source = None;
    while at < end {
        let (view, extent) = table.find(at.block());
        let (here, next) = match view {
            BlockView::Uniform(here) => (here, extent.end),
            BlockView::Mixed(mixed) => {
                let index = at.index_in_block();
                (mixed.source(index), extent.start + mixed.run_end(index) as u64)
            }
        };
        if source.is_some_and(|source| source != here) {
            break;
        }
        source = Some(here);
        at = PageIdx(next);
        if next < extent.end {
            // The run ended inside a block.
            break;
        }
    }
    (at.min(end), source.unwrap_or(Source::Zero))
}

/// The run around `page`, which must be in `within`, which must be in the table.
pub(super) fn run_around(
    table: &PageTable,
    page: PageIdx,
    within: PageRange,
) -> (PageRange, Source) {
    let (end, source) = run_end(table, page, within.end());
    let mut start = segment(table, page).0.start();
    while start > within.start() {
        let (before, other) = segment(table, PageIdx(start.0 - 1));
        if other != source {
            break;
        }
        start = before.start();
    }
    (PageRange::between(start.max(within.start()), end), source)
}

/// See [`PageTable::next_of`].
pub(super) fn next_of(table: &PageTable, image: ImageId, from: PageIdx) -> Option<PageRange> {
    let (source, mut at) = (Source::Image(image), from);
    let end = table.range().end();
    while at < end {
        let (view, extent) = table.find(at.block());
        let start = match view {
            BlockView::Uniform(other) => (other == source).then_some(at),
            BlockView::Mixed(mixed) => mixed
                .next_of(source, at.index_in_block())
                .map(|index| PageIdx(extent.start + index as u64)),
        };
        if let Some(start) = start {
            return Some(PageRange::between(start, run_end(table, start, end).0));
        }
        at = PageIdx(extent.end);
    }
    None
}

/// The runs of a stretch of a table; see [`PageTable::runs`].
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    table: &'a PageTable,
    rest: PageRange,
}

impl<'a> Runs<'a> {
    /// `range` must be in the table.
    pub(super) fn new(table: &'a PageTable, range: PageRange) -> Self {
        Self { table, rest: range }
    }
}

impl Iterator for Runs<'_> {
    type Item = (PageRange, Source);

    fn next(&mut self) -> Option<(PageRange, Source)> {
        if self.rest.is_empty() {
            return None;
        }
        let start = self.rest.start();
        let (end, source) = run_end(self.table, start, self.rest.end());
        self.rest = self.rest.from_page(end);
        Some((PageRange::between(start, end), source))
    }
}
