//! The nodes of the tree and the arithmetic of its shape.

use std::sync::Arc;

use super::{BlockView, MixedBlock};
use crate::{BLOCK_PAGES, BlockIdx, PageIdx, PageRange, Source};

/// Children of an inner node, as a power of two. 16 children are 256 bytes: a derive that
/// changes one block of 4 GiB copies three such nodes. With 64 children it would be two of
/// 1 KiB, with no fewer cache misses.
const FANOUT_LOG2: u32 = 4;

/// Children of an inner node.
pub(super) const FANOUT: usize = 1 << FANOUT_LOG2;

/// One slot of the tree.
#[derive(Debug, Clone)]
pub(super) enum Node {
    /// Every page below has this source.
    Uniform(Source),
    /// A block (height 0 only) of at least two sources.
    Mixed(Arc<MixedBlock>),
    /// (Above height 0 only.) Never all of one source.
    Inner(Arc<Inner>),
}

const _: () = assert!(size_of::<Node>() == 16);

#[derive(Debug, Clone)]
pub(super) struct Inner {
    /// Those beyond the end of the table are `Uniform(Zero)`.
    pub(super) slots: [Node; FANOUT],
}

/// How large a table is, and with it how high its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) pages: u64,
    /// Of the root: it stands for `FANOUT ^ height` blocks.
    pub(super) height: u32,
}

/// A stretch of pages that one slot stands for, cut at the table's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Extent {
    pub(super) fn len(self) -> u64 {
        self.end - self.start
    }

    pub(super) fn range(self) -> PageRange {
        PageRange::between(PageIdx(self.start), PageIdx(self.end))
    }

    pub(super) fn is_within(self, range: PageRange) -> bool {
        range.start().0 <= self.start && self.end <= range.end().0
    }
}

impl Shape {
    pub(super) fn for_pages(pages: u64) -> Self {
        let blocks = pages.div_ceil(BLOCK_PAGES);
        let mut height = 0;
        while blocks_of_slot(height) < blocks {
            height += 1;
        }
        Self { pages, height }
    }

    pub(super) fn blocks(self) -> u64 {
        self.pages.div_ceil(BLOCK_PAGES)
    }

    /// How many pages of the table are in a block: 512, fewer in the last, 0 beyond.
    pub(super) fn in_block(self, block: BlockIdx) -> u64 {
        block
            .0
            .checked_mul(BLOCK_PAGES)
            .map_or(0, |first| self.pages.saturating_sub(first).min(BLOCK_PAGES))
    }

    /// The pages of the slot of `height` that begins with block `first_block`.
    pub(super) fn extent(self, first_block: u64, height: u32) -> Extent {
        // No overflow: `pages` is below 2^52, and no slot begins beyond it and is used.
        let start = (first_block * BLOCK_PAGES).min(self.pages);
        let end = start.saturating_add(blocks_of_slot(height) * BLOCK_PAGES).min(self.pages);
        Extent { start, end }
    }

    /// How many slots of an inner node of `height` that begins with `first_block` hold pages.
    pub(super) fn slots_used(self, first_block: u64, height: u32) -> usize {
        let blocks = self.blocks().saturating_sub(first_block);
        let slots = blocks.div_ceil(blocks_of_slot(height - 1));
        usize::try_from(slots).unwrap_or(FANOUT).min(FANOUT)
    }
}

/// How many blocks a slot of `height` stands for. Heights go up to 11 (2^43 blocks and more).
pub(super) const fn blocks_of_slot(height: u32) -> u64 {
    1 << (FANOUT_LOG2 * height)
}

/// Which child of an inner node of `height` holds `block`.
#[expect(clippy::cast_possible_truncation, reason = "masked to FANOUT")]
pub(super) const fn slot_of(block: u64, height: u32) -> usize {
    ((block >> (FANOUT_LOG2 * (height - 1))) & (FANOUT as u64 - 1)) as usize
}

impl Node {
    pub(super) fn find(&self, block: BlockIdx, shape: Shape) -> (BlockView<'_>, Extent) {
        let (mut node, mut height) = (self, shape.height);
        loop {
            let first_block = block.0 & !(blocks_of_slot(height) - 1);
            match node {
                Self::Uniform(source) => {
                    return (BlockView::Uniform(*source), shape.extent(first_block, height));
                }
                Self::Mixed(mixed) => {
                    return (BlockView::Mixed(mixed), shape.extent(first_block, height));
                }
                Self::Inner(inner) => {
                    node = &inner.slots[slot_of(block.0, height)];
                    height -= 1;
                }
            }
        }
    }

    /// Whether two nodes of the same place say the same.
    pub(super) fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Uniform(a), Self::Uniform(b)) => a == b,
            (Self::Mixed(a), Self::Mixed(b)) => Arc::ptr_eq(a, b) || a == b,
            (Self::Inner(a), Self::Inner(b)) => {
                Arc::ptr_eq(a, b) || a.slots.iter().zip(&b.slots).all(|(a, b)| a.same(b))
            }
            _ => false,
        }
    }
}

impl Inner {
    /// An inner node of which `used` slots say `source`.
    pub(super) fn split(source: Source, used: usize) -> Self {
        Self {
            slots: std::array::from_fn(|i| {
                Node::Uniform(if i < used { source } else { Source::Zero })
            }),
        }
    }

    /// The source of all of the first `used` slots, if they have but one.
    pub(super) fn one_source(&self, used: usize) -> Option<Source> {
        let Node::Uniform(first) = self.slots[0] else { return None };
        let one = |slot: &Node| matches!(slot, Node::Uniform(source) if *source == first);
        self.slots[1..used.max(1)].iter().all(one).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGES_MAX;

    #[test]
    fn a_tree_is_no_higher_than_it_must_be() {
        for (pages, height) in
            [(0, 0), (1, 0), (512, 0), (513, 1), (512 * 16, 1), (512 * 16 + 1, 2), (1 << 20, 3)]
        {
            assert_eq!(Shape::for_pages(pages).height, height, "{pages} pages");
        }
        assert_eq!(Shape::for_pages(PAGES_MAX).height, 11);
    }

    #[test]
    fn the_last_slots_are_cut_at_the_end() {
        let shape = Shape::for_pages(512 * 17 + 3);
        assert_eq!(shape.blocks(), 18);
        assert_eq!(shape.slots_used(0, 2), 2);
        assert_eq!(shape.slots_used(16, 1), 2);
        assert_eq!(shape.in_block(BlockIdx(17)), 3);
        assert_eq!(shape.in_block(BlockIdx(18)), 0);
        assert_eq!(shape.in_block(BlockIdx(u64::MAX)), 0);
        assert_eq!(shape.extent(16, 1).len(), 515);
    }
}
