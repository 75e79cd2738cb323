//! How a fault is answered: a decision without I/O.
//!
//! ```text
//!   in the cache already? ───────────────────────────► Wake
//!   zero?   whole untouched blocks of zeros ─────────► MapZeros   (no more faults there)
//!           else ────────────────────────────────────► Zeros      (the rest of the run in the block)
//!   an ancestor's, in an untouched block that is
//!           the ancestor's as a whole, and complete ─► MapCache   (share its pages: design.md §3.2)
//!   else ────────────────────────────────────────────► Fetch
//! ```

use std::sync::Arc;

use vmfork_image::{
    BLOCK_PAGES, BlockIdx, BlockView, ImageId, PageIdx, PageRange, PageTable, Source,
};

use crate::host_image::{Ancestors, HostImage};
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
}

/// What a decision is made from.
pub(crate) struct Sight<'a> {
    pub(crate) table: &'a PageTable,
    pub(crate) presence: &'a Presence,
    pub(crate) ancestors: &'a Ancestors,
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
        match (self.state)(block) {
            BlockState::Mapped(id) => {
                let there =
                    self.ancestors.get(&id).is_none_or(|k| k.cache().presence().is_present(page));
                return if there { Answer::Wake } else { self.zeros_at(page) };
            }
            BlockState::Zeros => return self.zeros_at(page),
            BlockState::Fresh | BlockState::Touched => {}
        }
        if self.presence.is_present(page) {
            return Answer::Wake;
        }
        match self.table.get(page) {
            None | Some(Source::Zero) => self
                .run_of_blocks(block, |block| self.is_all_zero(block))
                .map_or_else(|| self.zeros_at(page), Answer::MapZeros),
            Some(Source::Image(id)) => {
                let Some(ancestor) = self.ancestors.get(&id) else { return Answer::Fetch };
                self.run_of_blocks(block, |block| self.is_whole(block, ancestor))
                    .map_or(Answer::Fetch, |run| Answer::MapCache(id, run))
            }
        }
    }

    /// The zero run that begins at `page`, within its block. (What lies before it may be installed already.)
    fn zeros_at(&self, page: PageIdx) -> Answer {
        let Some(block) = page.block().pages() else { return Answer::Zeros(page.range()) };
        let within = block.intersect(&self.table.range());
        if self.table.get(page) != Some(Source::Zero) {
            return Answer::Zeros(page.range());
        }
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

    /// Whether all of a block can be served by the ancestor's cache: each page is the ancestor's and present
    /// there, or zero in both (a hole of that cache that its engine will never fill). At least one is not zero.
    fn is_whole(&self, block: BlockIdx, ancestor: &Arc<HostImage>) -> bool {
        let Some(pages) = block.pages() else { return false };
        let theirs = ancestor.cache().presence();
        match self.table.block(block) {
            BlockView::Uniform(Source::Zero) => false,
            BlockView::Uniform(Source::Image(id)) => {
                id == ancestor.id() && theirs.count(pages) == BLOCK_PAGES
            }
            BlockView::Mixed(_) => {
                let Some(their_table) = ancestor.table() else { return false };
                self.table.runs(pages).all(|(run, source)| match source {
                    Source::Image(id) => id == ancestor.id() && theirs.count(run) == run.len(),
                    Source::Zero => their_table.runs(run).all(|(_, source)| source == Source::Zero),
                })
            }
        }
    }
}
