//! How a fault is answered: a decision without I/O.
//!
//! ```text
//!   where another image is mapped:   present there ──► Wake    zero ──► Zeros    else ──► Lost
//!   in the cache already? ───────────────────────────► Wake
//!   zero?   whole untouched blocks of zeros ─────────► MapZeros   (no more faults there)
//!           else ────────────────────────────────────► Zeros      (the rest of the run in the block)
//!   in an untouched block whose every page another
//!           image has too, and that image's cache holds
//!           all that is not zero ────────────────────► MapCache   (share its pages: design.md §3.2)
//!   else ────────────────────────────────────────────► Fetch
//! ```
//!
//! The *lenders* that come into question for a block are the owners of its pages, of which the youngest may
//! have all the others' pages copied, and the image that the VM began from.

use vmfork_image::{
    BLOCK_PAGES, BlockIdx, BlockView, ImageId, PageIdx, PageRange, PageTable, Source,
};

use crate::presence::Presence;
use crate::view::BlockState;

/// Most blocks mapped at one fault: 1 GiB. Bounds the time that one decision takes.
const RUN_BLOCKS_MAX: u64 = 512;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Wake,
    Zeros(PageRange),
    MapZeros(PageRange),
    MapCache(ImageId, PageRange),
    Fetch,
    /// Something is mapped over the page's block that can't give its bytes.
    Lost,
}

/// Another image whose cache may be mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lender<'a> {
    /// Complete.
    pub(crate) table: &'a PageTable,
    pub(crate) presence: &'a Presence,
}

impl Lender<'_> {
    /// Whether a block of the image of `table` can be served by the lender's cache: by both tables each page has
    /// the same source, and what is not zero is present. (What is zero is a hole there, which nobody ever fills.)
    /// At least one page is not zero. The last block, if cut short, can't.
    pub(crate) fn has_whole(&self, table: &PageTable, block: BlockIdx) -> bool {
        let Some(pages) = block.pages().filter(|pages| table.range().covers(pages)) else {
            return false;
        };
        if !table.same_block(self.table, block) {
            return false;
        }
        match table.block(block) {
            BlockView::Uniform(Source::Zero) => false,
            BlockView::Uniform(_) => self.presence.count(pages) == BLOCK_PAGES,
            BlockView::Mixed(_) => table.runs(pages).all(|(run, source)| {
                source == Source::Zero || self.presence.count(run) == run.len()
            }),
        }
    }
}

/// What a decision is made from.
pub(crate) struct Sight<'a> {
    pub(crate) table: &'a PageTable,
    pub(crate) presence: &'a Presence,
    /// The image that the VM began from, if that may lend.
    pub(crate) base: Option<ImageId>,
    /// Images that may lend: not the view's own.
    pub(crate) lender: &'a dyn Fn(ImageId) -> Option<Lender<'a>>,
    /// Whether an image, whose cache is mapped in the view, has a page present. `None`: no such image.
    pub(crate) is_lent: &'a dyn Fn(ImageId, PageIdx) -> Option<bool>,
    /// Whether the table is right for a block (while it is being derived).
    pub(crate) is_known: &'a dyn Fn(BlockIdx) -> bool,
    /// What was done in a block of the view.
    pub(crate) state: &'a dyn Fn(BlockIdx) -> BlockState,
    /// Whether runs may be mapped into the view at all.
    pub(crate) may_map: bool,
}

impl Sight<'_> {
    /// Answer a fault on `page`, whose block is known.
    pub(crate) fn decide(&self, page: PageIdx) -> Answer {
        let block = page.block();
        let is_zero = matches!(self.table.get(page), None | Some(Source::Zero));
        match (self.state)(block) {
            BlockState::Mapped(id) if (self.is_lent)(id, page) == Some(true) => {
                return Answer::Wake;
            }
            BlockState::Mapped(_) | BlockState::Zeros if is_zero => return self.zeros_at(page),
            BlockState::Mapped(_) | BlockState::Zeros => return Answer::Lost,
            BlockState::Fresh | BlockState::Touched => {}
        }
        if self.presence.is_present(page) {
            return Answer::Wake;
        }
        if is_zero {
            return self
                .run_of_blocks(block, |block| self.is_all_zero(block))
                .map_or_else(|| self.zeros_at(page), Answer::MapZeros);
        }
        let mut best: Option<(ImageId, PageRange)> = None;
        self.each_candidate(block, |id| {
            let Some(lender) = (self.lender)(id) else { return };
            let run = self.run_of_blocks(block, |block| lender.has_whole(self.table, block));
            // A longer run is one mapping instead of many, each of which the next freeze moves by itself.
            if let Some(run) = run
                && best.is_none_or(|(_, other)| run.len() > other.len())
            {
                best = Some((id, run));
            }
        });
        best.map_or(Answer::Fetch, |(id, run)| Answer::MapCache(id, run))
    }

    fn each_candidate(&self, block: BlockIdx, mut with: impl FnMut(ImageId)) {
        if let Some(base) = self.base {
            with(base);
        }
        let mut also = |source: Source| {
            if let Some(id) = source.image().filter(|id| self.base != Some(*id)) {
                with(id);
            }
        };
        match self.table.block(block) {
            BlockView::Uniform(source) => also(source),
            BlockView::Mixed(mixed) => mixed.palette().iter().copied().for_each(also),
        }
    }

    /// The zero run that begins at `page`, within its block. (What lies before it may be installed already.)
    fn zeros_at(&self, page: PageIdx) -> Answer {
        let within = page.block().pages().map(|block| block.intersect(&self.table.range()));
        let Some(within) = within.filter(|within| within.contains(page)) else {
            return Answer::Zeros(page.range());
        };
        let (run, _) = self.table.run_at(page, within);
        Answer::Zeros(run.from_page(page))
    }

    /// The longest run of untouched blocks around `block` for all of which `fits` holds, if it does for `block`.
    fn run_of_blocks(&self, block: BlockIdx, fits: impl Fn(BlockIdx) -> bool) -> Option<PageRange> {
        let blocks = self.table.pages() / BLOCK_PAGES; // a last block cut short is never mapped
        let usable = |block: BlockIdx| {
            block.0 < blocks
                && (self.state)(block) == BlockState::Fresh
                && (self.is_known)(block)
                // Else the VM may have installed, and written to, a page of the cache without a fault.
                && block.pages().is_some_and(|pages| self.presence.count(pages) == 0)
                && fits(block)
        };
        if !self.may_map || !usable(block) {
            return None;
        }
        let (mut first, mut end) = (block.0, block.0 + 1);
        while end - first < RUN_BLOCKS_MAX && usable(BlockIdx(end)) {
            end += 1;
        }
        while end - first < RUN_BLOCKS_MAX && first > 0 && usable(BlockIdx(first - 1)) {
            first -= 1;
        }
        Some(PageRange::between(PageIdx(first * BLOCK_PAGES), PageIdx(end * BLOCK_PAGES)))
    }

    fn is_all_zero(&self, block: BlockIdx) -> bool {
        matches!(self.table.block(block), BlockView::Uniform(Source::Zero))
    }
}

#[cfg(all(test, not(loom)))]
#[path = "answer_tests.rs"]
mod tests;
