//! Which image's cache serves a block: the one that changed it last.
//!
//! ```text
//!   image 1 (booted)   1 1 1 1 -      a block that was never written has no home
//!   image 2            1 2 1 1 -      its VM wrote to, or gave back pages of, block 1
//!   image 3            1 2 3 1 -      and image 3's VM to block 2
//! ```
//!
//! By the tables of an image and of a block's home, the block's pages have the same sources. So the
//! home's cache can be mapped over the block in a view of either, and what is missing there filled
//! in by the engine of either: the bytes are the same. A page of an ancestor is copied at most once
//! for each time that its block changes, not once for each image that descends from it.

use vmfork_image::{BLOCK_PAGES, BlockIdx, ImageId, PageRange};

/// The home of each block of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Homes(Box<[Option<ImageId>]>);

impl Homes {
    /// Of an image that was never written to.
    pub(crate) fn none(pages: u64) -> Self {
        let blocks = usize::try_from(pages.div_ceil(BLOCK_PAGES)).unwrap_or(0);
        Self(vec![None; blocks].into())
    }

    pub(crate) fn get(&self, block: BlockIdx) -> Option<ImageId> {
        usize::try_from(block.0).ok().and_then(|block| self.0.get(block).copied().flatten())
    }

    pub(crate) fn set(&mut self, block: BlockIdx, home: ImageId) {
        if let Some(slot) = usize::try_from(block.0).ok().and_then(|block| self.0.get_mut(block)) {
            *slot = Some(home);
        }
    }

    /// Of each block in turn.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Option<ImageId>> {
        self.0.iter().copied()
    }

    /// Whether any block's home is this image.
    pub(crate) fn has(&self, image: ImageId) -> bool {
        self.0.contains(&Some(image))
    }

    /// The blocks whose home is this image, as runs of pages.
    pub(crate) fn blocks_of(&self, image: ImageId) -> impl Iterator<Item = PageRange> {
        (0..)
            .map(BlockIdx)
            .zip(&self.0)
            .filter(move |(_, home)| **home == Some(image))
            .filter_map(|(block, _)| block.pages())
    }
}
