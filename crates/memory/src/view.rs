//! One VM's sight of an image, as its engine sees it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use vmfork_image::{BLOCK_BYTES, BlockIdx, ImageId, PAGE_BYTES, PageIdx, PageRange};
use vmfork_tap_proto::Op;

use crate::counters::ViewCounters;
use crate::host_image::HostImage;
use crate::tap::{MAP_TIMEOUT, Tap, TapError};
use crate::uffd::{Installed, Uffd};

/// Most runs that are mapped into one view. The next freeze moves each by itself, 3 µs, with its VM stopped: 1.5 ms
/// in all. Beyond that, pages are copied. (The kernel allows a process 65530 mappings.)
const MAPPED_RUNS_MAX: usize = 512;

/// How often a run is tried, each time shorter by a block that QEMU has touched.
const MAP_TRIES_MAX: usize = 16;

/// How often a busy address space is tried again.
const RETRIES_MAX: u32 = 1000;

/// What was done in a block of the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// The engine has installed nothing; whatever the VM touches first faults, unless the image's cache has it.
    Fresh,
    /// Pages come from the image's own cache, or are zero pages.
    Touched,
    /// The cache of another image is mapped there, at home to the block.
    Mapped(ImageId),
    /// Anonymous memory is mapped there: no more faults.
    Zeros,
}

#[derive(Debug)]
pub(crate) struct View {
    pub(crate) uffd: Arc<Uffd>,
    pub(crate) counters: Arc<ViewCounters>,
    hva: u64,
    pages: u64,
    tap: Arc<Tap>,
    blocks: Vec<BlockState>,
    mapped_runs: usize,
    /// Images whose caches are mapped, so that they stay.
    homes: BTreeMap<ImageId, Arc<HostImage>>,
    /// Faults that came to light while something was mapped.
    unserved: Vec<(PageIdx, bool)>,
    /// The end of the last pages that the VM was given as its own because it wrote there.
    written_until: PageIdx,
}

/// Wakes who waits for some pages of a view, from any thread, for as long as there is the view.
#[derive(Debug)]
pub(crate) struct Waker {
    uffd: Weak<Uffd>,
    hva: u64,
    bytes: u64,
}

impl Waker {
    pub(crate) fn wake(&self) {
        if let Some(uffd) = self.uffd.upgrade() {
            uffd.wake(self.hva, self.bytes);
        }
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
            mapped_runs: 0,
            homes: BTreeMap::new(),
            unserved: Vec::new(),
            written_until: PageIdx(u64::MAX),
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

    /// An image whose cache is mapped somewhere in the view.
    pub(crate) fn home(&self, id: ImageId) -> Option<&Arc<HostImage>> {
        self.homes.get(&id)
    }

    /// Faults that were read while something was mapped, and whether they are writes: to be served like others.
    pub(crate) fn take_unserved(&mut self) -> Vec<(PageIdx, bool)> {
        std::mem::take(&mut self.unserved)
    }

    /// Whether another run may be mapped.
    pub(crate) fn may_map(&self) -> bool {
        self.mapped_runs < MAPPED_RUNS_MAX
    }

    pub(crate) fn wake(&self, range: PageRange) {
        if range.is_empty() {
            return;
        }
        self.uffd.wake(self.hva + range.byte_offset(), range.byte_len());
    }

    /// For who has the pages of `range` before this view's engine hears of it.
    pub(crate) fn waker(&self, range: PageRange) -> Waker {
        let (hva, bytes) = (self.hva + range.byte_offset(), range.byte_len());
        Waker { uffd: Arc::downgrade(&self.uffd), hva, bytes }
    }

    /// Install the zero page from the start of `range` on, as far as nothing is there, and wake who waits in it.
    pub(crate) fn install_zeros(&mut self, range: PageRange) {
        let hva = self.hva;
        self.install(range, |uffd, rest| uffd.zeropage(hva + rest.byte_offset(), rest.byte_len()));
    }

    /// Install pages of the view's own with these bytes, as [`View::install_zeros`].
    pub(crate) fn install_private(&mut self, range: PageRange, bytes: &[u8]) {
        self.written_until = range.end();
        let hva = self.hva;
        self.install(range, |uffd, rest| {
            let from = usize::try_from(rest.byte_offset() - range.byte_offset()).unwrap_or(0);
            uffd.copy(hva + rest.byte_offset(), &bytes[from..])
        });
    }

    /// Whether the VM wrote to the page before this one when it was last given a copy of its own.
    pub(crate) fn writes_on(&self, page: PageIdx) -> bool {
        self.written_until == page
    }

    fn install(&mut self, range: PageRange, some: impl Fn(&Uffd, PageRange) -> Installed) {
        let mut rest = range;
        let mut retries = 0;
        for (block, _) in range.by_block() {
            self.touch(block);
        }
        while !rest.is_empty() {
            match some(&self.uffd, rest) {
                Installed::Bytes(bytes) => {
                    rest = rest.from_page(PageIdx(rest.start().0 + bytes / PAGE_BYTES));
                }
                Installed::AlreadyThere => break,
                Installed::Retry if retries < RETRIES_MAX => retries += 1,
                Installed::Retry | Installed::Gone => {
                    // Either the VM has ended, which its owner notices by itself, or its address space changes
                    // without end.
                    tracing::debug!(%rest, "pages refused");
                    break;
                }
            }
        }
        self.wake(rest);
    }

    /// Map the cache of `home` over whole blocks that are `Fresh`, or else at least over the block of `page`.
    /// → what was mapped, for the caller to wake who waits there; `None` if QEMU itself has touched the block, or
    /// the keeper has gone.
    ///
    /// # Errors
    /// Who knows what is mapped there now: the VM must not go on.
    pub(crate) fn map_home(
        &mut self,
        page: PageIdx,
        run: PageRange,
        home: &Arc<HostImage>,
    ) -> Result<Option<PageRange>, TapError> {
        let mapped = self.map_run_or_block(page, run, Some(home))?;
        if mapped.is_some() {
            self.homes.entry(home.id()).or_insert_with(|| Arc::clone(home));
        }
        Ok(mapped)
    }

    /// As [`View::map_home`], with anonymous memory in blocks of zeros.
    ///
    /// # Errors
    /// As [`View::map_home`].
    pub(crate) fn map_zeros(
        &mut self,
        page: PageIdx,
        run: PageRange,
    ) -> Result<Option<PageRange>, TapError> {
        self.map_run_or_block(page, run, None)
    }

    fn map_run_or_block(
        &mut self,
        page: PageIdx,
        run: PageRange,
        home: Option<&Arc<HostImage>>,
    ) -> Result<Option<PageRange>, TapError> {
        let mut run = run;
        for _ in 0..MAP_TRIES_MAX {
            match self.map(run, home) {
                Ok(()) => return Ok(Some(run)),
                Err(error) if error.is_fatal() => return Err(error),
                Err(TapError::Busy { block, .. }) => {
                    // What is left of the run on this side of the block that QEMU has touched.
                    let block = BlockIdx(block);
                    self.touch(block);
                    let Some(pages) = block.pages().filter(|pages| !pages.contains(page)) else {
                        return Ok(None);
                    };
                    run = match pages.start() < page {
                        true => run.from_page(pages.end()),
                        false => run.until_page(pages.start()),
                    };
                }
                Err(error) => {
                    tracing::debug!(%error, %run, "map a run");
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    fn map(&mut self, run: PageRange, home: Option<&Arc<HostImage>>) -> Result<(), TapError> {
        let args = [run.byte_offset(), run.byte_len(), 0, 0];
        match home {
            Some(image) => self.map_cache(args, image)?,
            None => self.tap.call(Op::MapZero, args, None)?,
        };
        let state = home.map_or(BlockState::Zeros, |image| BlockState::Mapped(image.id()));
        for (block, _) in run.by_block() {
            if let Some(slot) =
                usize::try_from(block.0).ok().and_then(|block| self.blocks.get_mut(block))
            {
                *slot = state;
            }
        }
        self.mapped_runs += 1;
        Ok(())
    }

    /// The keeper moves the new mapping into its place, and waits until that is read from the userfaultfd.
    fn map_cache(
        &mut self,
        args: [u64; 4],
        image: &HostImage,
    ) -> Result<([u64; 6], Option<OwnedFd>), TapError> {
        let (tap, uffd) = (Arc::clone(&self.tap), Arc::clone(&self.uffd));
        let mut faults = Vec::new();
        let cache = Some(image.cache().for_views());
        let outcome = tap.call_beside(Op::MapCache, args, cache, |socket| {
            uffd.read_faults_until(socket, MAP_TIMEOUT, |address, is_write| {
                faults.push((address, is_write));
            })
        });
        for (address, is_write) in faults {
            let page = self.page_at(address);
            self.unserved.extend(page.map(|page| (page, is_write)));
        }
        outcome
    }
}
