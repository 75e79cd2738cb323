//! Making a new image's page table, after the VM has gone on.
//!
//! The new table starts as the table of the image that the VM began from.
//! Pages that the VM had written are set to the new image, and pages that it had given back to
//! zero.
//! [`Originals::scan`] reports both, 1 ms per GiB.
//! A block that is asked for meanwhile is scanned first, so that no fault waits for the whole scan.

use std::io;
use std::time::{Duration, Instant};

use vmfork_image::{BLOCK_PAGES, BlockIdx, ImageId, PageIdx, PageRange, PageTable, Source};

use crate::homes::Homes;
use crate::originals::{Change, Originals};

/// Blocks scanned by one call in the background: 8 MiB, which takes 1 µs where nothing or huge
/// pages are, and 120 µs where every page is one by itself.
const STRIDE_BLOCKS: u64 = 4;

/// A step ends after the stride in which it has taken so long. A fault may have to wait for it.
const STEP_TIME: Duration = Duration::from_micros(60);

pub(crate) struct Derivation {
    image: ImageId,
    base: PageTable,
    table: PageTable,
    homes: Homes,
    known: Vec<bool>,
    next: u64,
    blocks: u64,
    /// Time spent, without what lay between.
    pub(crate) spent: Duration,
}

impl Derivation {
    pub(crate) fn new(image: ImageId, base: PageTable, homes: Homes) -> Self {
        let blocks = base.pages().div_ceil(BLOCK_PAGES);
        let known = vec![false; usize::try_from(blocks).unwrap_or(0)];
        let table = base.clone();
        Self { image, base, table, homes, known, next: 0, blocks, spent: Duration::ZERO }
    }

    pub(crate) fn table(&self) -> &PageTable {
        &self.table
    }

    /// The home of a block that is known.
    pub(crate) fn home(&self, block: BlockIdx) -> Option<ImageId> {
        self.homes.get(block)
    }

    pub(crate) fn into_parts(self) -> (PageTable, Homes) {
        (self.table, self.homes)
    }

    pub(crate) fn is_known(&self, block: BlockIdx) -> bool {
        usize::try_from(block.0)
            .ok()
            .and_then(|block| self.known.get(block).copied())
            .unwrap_or(true)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.next >= self.blocks
    }

    /// Make the table right for one block. → whether it may have changed.
    ///
    /// # Errors
    /// The process that holds the frozen pages has gone.
    pub(crate) fn ensure(&mut self, block: BlockIdx, frozen: &dyn Originals) -> io::Result<bool> {
        if self.is_known(block) {
            return Ok(false);
        }
        self.scan(block.0, block.0 + 1, frozen)?;
        Ok(true)
    }

    /// Scan some more.
    ///
    /// # Errors
    /// As [`Derivation::ensure`].
    pub(crate) fn step(&mut self, frozen: &dyn Originals) -> io::Result<()> {
        let began = Instant::now();
        while !self.is_complete() {
            let end = self.blocks.min(self.next + STRIDE_BLOCKS);
            self.scan(self.next, end, frozen)?;
            self.next = end;
            if began.elapsed() >= STEP_TIME {
                break;
            }
        }
        Ok(())
    }

    fn scan(&mut self, first: u64, end: u64, frozen: &dyn Originals) -> io::Result<()> {
        let began = Instant::now();
        let last = self.table.pages().min(end * BLOCK_PAGES);
        let range = PageRange::between(PageIdx(first * BLOCK_PAGES), PageIdx(last));
        let mut changes = Vec::new();
        frozen.scan(range, &mut |run, change| {
            let source = match change {
                Change::Written => Source::Image(self.image),
                Change::Zero => Source::Zero,
            };
            changes.push((run, source));
        })?;
        if !changes.is_empty() {
            self.table = self.table.derive(changes).map_err(io::Error::other)?;
        }
        for block in first..end {
            if !self.table.same_block(&self.base, BlockIdx(block)) {
                self.homes.set(BlockIdx(block), self.image);
            }
            if let Some(known) =
                usize::try_from(block).ok().and_then(|block| self.known.get_mut(block))
            {
                *known = true;
            }
        }
        self.spent += began.elapsed();
        Ok(())
    }
}
