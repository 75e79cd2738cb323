//! Making a table out of another: copy what changes, share the rest.

use std::sync::Arc;

use super::node::{FANOUT, Inner, Node, Shape, blocks_of_slot, slot_of};
use super::packed::{PAGES, Packed};
use super::{BlockView, MixedBlock, Owners, PageTable, TableError};
use crate::{BLOCK_PAGES, BlockIdx, PageRange, Source};

/// A table under change. One block at a time is held unpacked, so that many changes to the same
/// block, one after the other, pack it once.
pub(super) struct Editor {
    /// `root` and `owners` may still be shared with the table this began as; both are copied
    /// where they are first written. While a block is open, `owners` is ahead of `root`.
    table: PageTable,
    open: Option<OpenBlock>,
    /// The sources of the open block, if there is one.
    sources: Box<[Source; PAGES]>,
}

struct OpenBlock {
    block: BlockIdx,
    changed: bool,
}

impl Editor {
    pub(super) fn new(table: &PageTable) -> Self {
        Self { table: table.clone(), open: None, sources: Box::new([Source::Zero; PAGES]) }
    }

    pub(super) fn set(&mut self, range: PageRange, source: Source) -> Result<(), TableError> {
        let shape = self.table.shape;
        if range.end().0 > shape.pages {
            return Err(TableError::OutOfBounds { range, pages: shape.pages });
        }
        if range.is_empty() {
            return Ok(());
        }
        let is_partial = |block: BlockIdx, piece: PageRange| piece.len() < shape.in_block(block);
        let mut whole = range;
        let head = range.truncate(BLOCK_PAGES - range.start().0 % BLOCK_PAGES);
        if is_partial(head.start().block(), head) {
            self.set_part(head, source);
            whole = whole.from_page(head.end());
        }
        let tail_block = BlockIdx((range.end().0 - 1) / BLOCK_PAGES);
        let tail = whole.from_page(crate::PageIdx(tail_block.0 * BLOCK_PAGES));
        if !tail.is_empty() && is_partial(tail_block, tail) {
            whole = whole.until_page(tail.start());
            self.set_whole(whole, source);
            self.set_part(tail, source);
        } else {
            self.set_whole(whole, source);
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> PageTable {
        self.close();
        self.table
    }

    /// Sets pages of one block.
    fn set_part(&mut self, range: PageRange, source: Source) {
        let block = range.start().block();
        if self.open.as_ref().is_none_or(|open| open.block != block) {
            self.close();
            let view = self.table.find(block).0;
            if matches!(view, BlockView::Uniform(already) if already == source) {
                return;
            }
            match view {
                BlockView::Uniform(source) => self.sources.fill(source),
                BlockView::Mixed(mixed) => mixed.unpack_to(&mut self.sources),
            }
            self.open = Some(OpenBlock { block, changed: false });
        }
        let Some(open) = &mut self.open else { unreachable!("opened above") };
        let first = range.start().index_in_block();
        let len = usize::try_from(range.len()).unwrap_or(usize::MAX);
        let pages = &mut self.sources[first..first + len];
        if pages.iter().all(|page| *page == source) {
            return;
        }
        let owners = Arc::make_mut(&mut self.table.owners);
        for run in pages.chunk_by(|a, b| a.word() == b.word()) {
            owners.take(run[0], run.len() as u64);
        }
        owners.add(source, range.len());
        pages.fill(source);
        open.changed = true;
    }

    /// Sets whole blocks (of the last one, all its pages).
    fn set_whole(&mut self, range: PageRange, source: Source) {
        if range.is_empty() {
            return;
        }
        self.close();
        let (run, already) = super::walk::run_around(&self.table, range.start(), range);
        if already == source && run == range {
            return;
        }
        let owners = Arc::make_mut(&mut self.table.owners);
        Edit { shape: self.table.shape, owners }.fill(&mut self.table.root, range, source);
    }

    /// Packs the open block and puts it into the tree.
    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        if !open.changed {
            return;
        }
        let shape = self.table.shape;
        let pages = usize::try_from(shape.in_block(open.block)).unwrap_or(usize::MAX);
        let node = match MixedBlock::pack(&self.sources, pages) {
            Packed::Uniform(source) => Node::Uniform(source),
            Packed::Mixed(mixed) => Node::Mixed(Arc::new(mixed)),
        };
        place(&mut self.table.root, shape, shape.height, open.block, node);
    }
}

/// Puts `new` in the place of a block below `node`, a slot of `height`.
fn place(node: &mut Node, shape: Shape, height: u32, block: BlockIdx, new: Node) {
    if height == 0 {
        *node = new;
        return;
    }
    let first_block = block.0 & !(blocks_of_slot(height) - 1);
    let used = shape.slots_used(first_block, height);
    let inner = writable(node, used);
    place(&mut inner.slots[slot_of(block.0, height)], shape, height - 1, block, new);
    if let Some(source) = inner.one_source(used) {
        *node = Node::Uniform(source);
    }
}

/// The inner node in `node`, for this table alone: split if it was uniform, copied if shared.
fn writable(node: &mut Node, used: usize) -> &mut Inner {
    if let Node::Uniform(source) = node {
        *node = Node::Inner(Arc::new(Inner::split(*source, used)));
    }
    match node {
        Node::Inner(inner) => Arc::make_mut(inner),
        Node::Uniform(_) | Node::Mixed(_) => unreachable!("mixed blocks are at height 0 only"),
    }
}

/// Filling a run of whole blocks.
struct Edit<'a> {
    shape: Shape,
    owners: &'a mut Owners,
}

impl Edit<'_> {
    fn fill(&mut self, root: &mut Node, range: PageRange, source: Source) {
        self.fill_slot(root, 0, self.shape.height, range, source);
    }

    fn fill_slot(
        &mut self,
        node: &mut Node,
        first_block: u64,
        height: u32,
        range: PageRange,
        source: Source,
    ) {
        let extent = self.shape.extent(first_block, height);
        if range.intersect(&extent.range()).is_empty() {
            return;
        }
        if matches!(node, Node::Uniform(already) if *already == source) {
            return;
        }
        if extent.is_within(range) {
            self.disown(node, first_block, height);
            self.owners.add(source, extent.len());
            *node = Node::Uniform(source);
            return;
        }
        let used = self.shape.slots_used(first_block, height);
        let inner = writable(node, used);
        let below = blocks_of_slot(height - 1);
        for (i, slot) in (0..).zip(&mut inner.slots[..used]) {
            self.fill_slot(slot, first_block + i * below, height - 1, range, source);
        }
        if let Some(source) = inner.one_source(used) {
            *node = Node::Uniform(source);
        }
    }

    /// Takes what is below a slot from its owners.
    fn disown(&mut self, node: &Node, first_block: u64, height: u32) {
        let extent = self.shape.extent(first_block, height);
        match node {
            Node::Uniform(source) => self.owners.take(*source, extent.len()),
            Node::Mixed(mixed) => {
                for (source, pages) in mixed.counts() {
                    self.owners.take(source, pages);
                }
            }
            Node::Inner(inner) => {
                let below = blocks_of_slot(height - 1);
                let used = self.shape.slots_used(first_block, height).min(FANOUT);
                for (i, slot) in (0..).zip(&inner.slots[..used]) {
                    self.disown(slot, first_block + i * below, height - 1);
                }
            }
        }
    }
}
