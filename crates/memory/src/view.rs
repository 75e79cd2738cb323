//! One VM's sight of an image, as its engine sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmfork_image::{BLOCK_BYTES, BlockIdx, ImageId, PAGE_BYTES, PageIdx, PageRange};
use vmfork_tap_proto::Op;

use crate::counters::ViewCounters;
use crate::host_image::HostImage;
use crate::tap::{Tap, TapError};
use crate::uffd::{Uffd, ZeroOutcome};

/// Most runs that are mapped into one view. Each is moved by itself at the next freeze (about 2 µs), and the
/// kernel allows a process 65530 mappings.
const MAPPED_RUNS_MAX: usize = 4096;

/// How often a busy address space is tried again.
const RETRIES_MAX: u32 = 1000;

/// What was done in a block of the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// The engine has installed nothing; whatever the VM touches first faults, unless the image's cache has it.
    Fresh,
    /// Pages come from the image's own cache, or are zero pages.
    Touched,
    /// The cache of an ancestor is mapped there.
    Mapped(ImageId),
    /// Anonymous memory is mapped there: no more faults.
    Zeros,
}

/// How zero pages were installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZeroInstall {
    Done,
    /// The VM has gone.
    Gone,
}

#[derive(Debug)]
pub(crate) struct View {
    pub(crate) uffd: Arc<Uffd>,
    pub(crate) counters: Arc<ViewCounters>,
    hva: u64,
    pages: u64,
    tap: Arc<Tap>,
    blocks: Vec<BlockState>,
    /// What is mapped of other images' caches, which keep it for as long as this view lives.
    loans: Vec<Loan>,
    mapped_runs: usize,
    lenders: BTreeMap<ImageId, Arc<HostImage>>,
}

/// A run of blocks of another image's cache that may be mapped.
#[derive(Debug)]
pub(crate) struct Loan {
    run: PageRange,
    lender: Arc<HostImage>,
}

impl Loan {
    /// Take a loan of blocks that are complete; `None` if one is not (any more).
    pub(crate) fn take(
        lender: &Arc<HostImage>,
        run: PageRange,
        is_complete: impl Fn(BlockIdx) -> bool,
    ) -> Option<Self> {
        let lent = lender.retention().retain(run, is_complete);
        lent.then(|| Self { run, lender: Arc::clone(lender) })
    }

    /// The same, of one of its blocks alone.
    fn narrow(mut self, block: PageRange) -> Self {
        let (before, after) = (self.run.until_page(block.start()), self.run.from_page(block.end()));
        self.lender.retention().release(before);
        self.lender.retention().release(after);
        self.run = block;
        self
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.lender.retention().release(self.run);
    }
}

impl View {
    pub(crate) fn new(
        uffd: Arc<Uffd>,
        tap: Arc<Tap>,
        hva: u64,
        pages: u64,
        counters: Arc<ViewCounters>,
    ) -> Self {
        let blocks = usize::try_from(pages * PAGE_BYTES / BLOCK_BYTES).unwrap_or(0);
        Self {
            uffd,
            counters,
            hva,
            pages,
            tap,
            blocks: vec![BlockState::Fresh; blocks],
            loans: Vec::new(),
            mapped_runs: 0,
            lenders: BTreeMap::new(),
        }
    }

    /// The page at an address of QEMU's, if it is in RAM.
    pub(crate) fn page_at(&self, address: u64) -> Option<PageIdx> {
        let offset = address.checked_sub(self.hva)?;
        let page = PageIdx::of_byte(offset);
        (page.0 < self.pages).then_some(page)
    }

    pub(crate) fn block(&self, block: BlockIdx) -> BlockState {
        usize::try_from(block.0)
            .ok()
            .and_then(|block| self.blocks.get(block).copied())
            .unwrap_or(BlockState::Touched)
    }

    pub(crate) fn touch(&mut self, block: BlockIdx) {
        if let Some(state) =
            usize::try_from(block.0).ok().and_then(|block| self.blocks.get_mut(block))
            && *state == BlockState::Fresh
        {
            *state = BlockState::Touched;
        }
    }

    /// The image whose cache is mapped somewhere in the view.
    pub(crate) fn lender(&self, id: ImageId) -> Option<&Arc<HostImage>> {
        self.lenders.get(&id)
    }

    /// Whether another run may be mapped.
    pub(crate) fn may_map(&self) -> bool {
        self.mapped_runs < MAPPED_RUNS_MAX
    }

    pub(crate) fn wake(&self, range: PageRange) {
        self.uffd.wake(self.hva + range.byte_offset(), range.byte_len());
    }

    /// Install the zero page from the start of `range` on, as far as nothing is there, and wake who waits in it.
    pub(crate) fn install_zeros(&mut self, range: PageRange) -> ZeroInstall {
        let mut rest = range;
        let mut retries = 0;
        for (block, _) in range.by_block() {
            self.touch(block);
        }
        while !rest.is_empty() {
            let start = self.hva + rest.byte_offset();
            match self.uffd.zeropage(start, rest.byte_len()) {
                ZeroOutcome::Installed(bytes) => {
                    rest = rest.from_page(PageIdx(rest.start().0 + bytes / PAGE_BYTES));
                }
                ZeroOutcome::AlreadyThere => break,
                ZeroOutcome::Retry if retries < RETRIES_MAX => retries += 1,
                ZeroOutcome::Retry | ZeroOutcome::Gone => return ZeroInstall::Gone,
            }
        }
        if !rest.is_empty() {
            self.wake(rest);
        }
        ZeroInstall::Done
    }

    /// Map what is lent over whole blocks that are `Fresh`, or else at least the block of `page`, and wake who
    /// waits there. → whether that was done; not if QEMU itself has touched the block, or the keeper has gone.
    ///
    /// # Errors
    /// Who knows what is mapped there now: the VM must not go on.
    pub(crate) fn map_loan(&mut self, page: PageIdx, mut loan: Loan) -> Result<bool, TapError> {
        let lender = Arc::clone(&loan.lender);
        if !self.map(loan.run, Some(&lender))? {
            match page.block().pages() {
                Some(block) if block != loan.run && loan.run.covers(&block) => {
                    loan = loan.narrow(block);
                }
                _ => return Ok(false),
            }
            if !self.map(loan.run, Some(&lender))? {
                return Ok(false);
            }
        }
        self.lenders.entry(lender.id()).or_insert(lender);
        self.loans.push(loan);
        Ok(true)
    }

    /// As [`View::map_loan`], with anonymous memory in blocks of zeros.
    ///
    /// # Errors
    /// As [`View::map_loan`].
    pub(crate) fn map_zeros(&mut self, page: PageIdx, run: PageRange) -> Result<bool, TapError> {
        if self.map(run, None)? {
            return Ok(true);
        }
        match page.block().pages() {
            Some(block) if block != run && run.covers(&block) => self.map(block, None),
            _ => Ok(false),
        }
    }

    fn map(&mut self, run: PageRange, lender: Option<&Arc<HostImage>>) -> Result<bool, TapError> {
        let args = [run.byte_offset(), run.byte_len(), 0, 0];
        let outcome = match lender {
            Some(image) => self.tap.call(Op::MapCache, args, Some(image.cache().for_views())),
            None => self.tap.call(Op::MapZero, args, None),
        };
        match outcome {
            Ok(_) => {}
            Err(error) if error.is_fatal() => return Err(error),
            Err(error) => {
                tracing::debug!(%error, %run, "map a run");
                return Ok(false);
            }
        }
        let state = lender.map_or(BlockState::Zeros, |image| BlockState::Mapped(image.id()));
        for (block, _) in run.by_block() {
            if let Some(slot) =
                usize::try_from(block.0).ok().and_then(|block| self.blocks.get_mut(block))
            {
                *slot = state;
            }
        }
        self.mapped_runs += 1;
        self.wake(run);
        Ok(true)
    }
}
