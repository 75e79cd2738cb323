//! How a fault is answered: a decision without I/O.
//!
//! ```text
//!   where another image's cache is mapped:
//!           present there ──► Wake     zero ──► Zeros     else ──► Fetch (into that cache)
//!   in the image's own cache? ───────────────────────► Wake
//!   zero, in whole untouched blocks of zeros ────────► MapZeros   (no more faults there)
//!   in untouched blocks at home in another image ────► MapHome    (share its cache: decision 0008)
//!   zero? ───────────────────────────────────────────► Zeros      (the rest of the run in the block)
//!   else ────────────────────────────────────────────► Fetch      (into the image's own cache)
//!
//!   instead of Fetch, for a write to a page that another image owns ──► Private
//! ```

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
    MapHome(ImageId, PageRange),
    /// Bring it into the cache of this image.
    Fetch(ImageId),
    /// Give the view a copy of its own, past the cache of the first image, from the second, which
    /// owns the page.
    Private(ImageId, ImageId),
    /// What is mapped over the page's block can't give its bytes.
    Lost,
}

/// An image and its cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held<'a> {
    pub(crate) id: ImageId,
    /// Right for every block that is known.
    pub(crate) table: &'a PageTable,
    pub(crate) presence: &'a Presence,
}

/// What a decision is made from.
pub(crate) struct Sight<'a> {
    /// The view's image.
    pub(crate) image: Held<'a>,
    /// Other images that its blocks are at home in.
    pub(crate) other: &'a dyn Fn(ImageId) -> Option<Held<'a>>,
    pub(crate) home: &'a dyn Fn(BlockIdx) -> Option<ImageId>,
    /// Whether table and home are right for a block (while they are being derived).
    pub(crate) is_known: &'a dyn Fn(BlockIdx) -> bool,
    /// What was done in a block of the view.
    pub(crate) state: &'a dyn Fn(BlockIdx) -> BlockState,
    /// Whether runs may be mapped into the view at all.
    pub(crate) may_map: bool,
}

impl Sight<'_> {
    /// Answer a fault on `page`, whose block is known; `is_write`: on an attempt to write there.
    pub(crate) fn decide(&self, page: PageIdx, is_write: bool) -> Answer {
        let block = page.block();
        let is_zero = matches!(self.image.table.get(page), None | Some(Source::Zero));
        match (self.state)(block) {
            BlockState::Mapped(id) => {
                return match (self.other)(id) {
                    Some(home) if home.presence.is_present(page) => Answer::Wake,
                    Some(_) if is_zero => self.zeros_at(page),
                    Some(home) if self.is_same(block, home) => Self::bring(home, page, is_write),
                    _ => Answer::Lost,
                };
            }
            BlockState::Zeros if is_zero => return self.zeros_at(page),
            BlockState::Zeros => return Answer::Lost,
            BlockState::Fresh | BlockState::Touched => {}
        }
        if self.image.presence.is_present(page) {
            return Answer::Wake;
        }
        if is_zero && let Some(run) = self.run_of_blocks(block, |block| self.is_all_zero(block)) {
            return Answer::MapZeros(run);
        }
        if let Some(home) = self.foreign_home(block)
            && let Some(run) = self.run_of_blocks(block, |block| {
                (self.home)(block) == Some(home.id)
                    && self.is_same(block, home)
                    && !self.is_all_zero(block)
            })
        {
            return Answer::MapHome(home.id, run);
        }
        if is_zero { self.zeros_at(page) } else { Self::bring(self.image, page, is_write) }
    }

    /// A page that an image's cache lacks. Its own pages reach the cache in any case, by the drain.
    /// A copy of an ancestor's page, which the VM overwrites, would serve no VM.
    fn bring(image: Held<'_>, page: PageIdx, is_write: bool) -> Answer {
        let owner = image.table.get(page).and_then(Source::image);
        match owner.filter(|owner| is_write && *owner != image.id) {
            Some(owner) => Answer::Private(image.id, owner),
            None => Answer::Fetch(image.id),
        }
    }

    fn foreign_home(&self, block: BlockIdx) -> Option<Held<'_>> {
        let id = (self.home)(block).filter(|id| *id != self.image.id)?;
        (self.other)(id)
    }

    /// Whether each page of a block has the same source by another image's table.
    /// If so, its cache has, or may be given, the same bytes. (A zero page is a hole there, which
    /// is never filled.)
    fn is_same(&self, block: BlockIdx, other: Held<'_>) -> bool {
        self.image.table.same_block(other.table, block)
    }

    /// The zero run that begins at `page`, within its block. (What lies before it may be installed
    /// already.)
    fn zeros_at(&self, page: PageIdx) -> Answer {
        let table = self.image.table;
        let within = page.block().pages().map(|block| block.intersect(&table.range()));
        let Some(within) = within.filter(|within| within.contains(page)) else {
            return Answer::Zeros(page.range());
        };
        let (run, _) = table.run_at(page, within);
        Answer::Zeros(run.from_page(page))
    }

    /// The longest run of untouched blocks around `block` for all of which `fits` holds, if it does
    /// for `block`.
    fn run_of_blocks(&self, block: BlockIdx, fits: impl Fn(BlockIdx) -> bool) -> Option<PageRange> {
        let blocks = self.image.table.pages() / BLOCK_PAGES; // a last block cut short is never mapped
        let usable = |block: BlockIdx| {
            block.0 < blocks
                && (self.state)(block) == BlockState::Fresh
                && (self.is_known)(block)
                // Else the VM may have installed, and written to, a page of the cache without a
                // fault.
                && block.pages().is_some_and(|pages| self.image.presence.count(pages) == 0)
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
        matches!(self.image.table.block(block), BlockView::Uniform(Source::Zero))
    }
}

#[cfg(all(test, not(loom)))]
#[path = "answer_tests.rs"]
mod tests;
