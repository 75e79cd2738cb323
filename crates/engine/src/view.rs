//! One reader's sight of an image, as its engine sees it: what was mapped and what was touched.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vmfork_image::{BLOCK_BYTES, BlockIdx, ImageId, PAGE_BYTES, PageIdx, PageRange};

use crate::counters::ViewCounters;
use crate::host_image::HostImage;
use crate::reader::{MapError, Reader, Waker};

/// Most runs that are mapped into one view. The next freeze moves each by itself, 3 µs, with its VM
/// stopped: 1.5 ms in all. Beyond that, pages are copied. (The kernel allows a process 65530
/// mappings.)
const MAPPED_RUNS_MAX: usize = 512;

/// How often a run is tried, each time shorter by a block that the reader has touched.
const MAP_TRIES_MAX: usize = 16;

/// What was done in a block of the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// The engine has installed nothing; whatever the reader touches first faults, unless the
    /// image's cache has it.
    Fresh,
    /// Pages come from the image's own cache, or are zero pages.
    Touched,
    /// The cache of another image is mapped there, at home to the block.
    Mapped(ImageId),
    /// Anonymous memory is mapped there: no more faults.
    Zeros,
}

/// A reader, and what the engine has done in it.
#[derive(Debug)]
pub struct View {
    reader: Box<dyn Reader>,
    pub(crate) counters: Arc<ViewCounters>,
    blocks: Vec<BlockState>,
    mapped_runs: usize,
    /// Images whose caches are mapped, so that they stay.
    homes: BTreeMap<ImageId, Arc<HostImage>>,
    /// Faults that came to light while something was mapped.
    unserved: Vec<(PageIdx, bool)>,
    /// The end of the last pages that the reader was given as its own because it writes there.
    written_until: PageIdx,
}

impl View {
    /// A view of an image of `pages` pages.
    pub fn new(reader: Box<dyn Reader>, pages: u64, counters: Arc<ViewCounters>) -> Self {
        let blocks = usize::try_from(pages * PAGE_BYTES / BLOCK_BYTES).unwrap_or(0);
        Self {
            reader,
            counters,
            blocks: vec![BlockState::Fresh; blocks],
            mapped_runs: 0,
            homes: BTreeMap::new(),
            unserved: Vec::new(),
            written_until: PageIdx(u64::MAX),
        }
    }

    pub(crate) fn faults_fd(&self) -> BorrowedFd<'_> {
        self.reader.faults_fd()
    }

    /// Calls `found` as [`Reader::read_faults`] does.
    ///
    /// # Errors
    /// As [`Reader::read_faults`].
    pub(crate) fn read_faults(&self, mut found: impl FnMut(PageIdx, bool)) -> io::Result<()> {
        self.reader.read_faults(&mut found)
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

    /// Faults that were read while something was mapped, and whether they are writes: to be served
    /// like others.
    pub(crate) fn take_unserved(&mut self) -> Vec<(PageIdx, bool)> {
        std::mem::take(&mut self.unserved)
    }

    /// Whether another run may be mapped.
    pub(crate) fn may_map(&self) -> bool {
        self.reader.can_map() && self.mapped_runs < MAPPED_RUNS_MAX
    }

    pub(crate) fn wake(&self, range: PageRange) {
        if !range.is_empty() {
            self.reader.wake(range);
        }
    }

    /// For what has the pages of `range` before this view's engine hears of it.
    pub(crate) fn waker(&self, range: PageRange) -> Box<dyn Waker> {
        self.reader.waker(range)
    }

    /// As [`Reader::install_zeros`].
    pub(crate) fn install_zeros(&mut self, range: PageRange) {
        self.touch_all(range);
        self.reader.install_zeros(range);
    }

    /// As [`Reader::install_private`].
    pub(crate) fn install_private(&mut self, range: PageRange, bytes: &[u8]) {
        self.written_until = range.end();
        self.touch_all(range);
        self.reader.install_private(range, bytes);
    }

    fn touch_all(&mut self, range: PageRange) {
        for (block, _) in range.by_block() {
            self.touch(block);
        }
    }

    /// Whether the reader wrote to the page before this one when it was last given a copy of its
    /// own.
    pub(crate) fn writes_on(&self, page: PageIdx) -> bool {
        self.written_until == page
    }

    /// As [`Reader::refuse`].
    pub(crate) fn refuse(&self, page: PageIdx, reason: &str) -> bool {
        self.reader.refuse(page, reason)
    }

    /// As [`Reader::lost`].
    pub(crate) fn lost(&self, reason: &str) {
        self.reader.lost(reason);
    }

    /// Map the cache of `home` over whole blocks that are `Fresh`, or else at least over the block
    /// of `page`. → what was mapped, for the caller to wake what waits there; `None` if the reader
    /// itself has touched the block, or maps nothing.
    ///
    /// # Errors
    /// What is mapped there now is unknown: the reader must not go on. Says why.
    pub(crate) fn map_home(
        &mut self,
        page: PageIdx,
        run: PageRange,
        home: &Arc<HostImage>,
    ) -> Result<Option<PageRange>, String> {
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
    ) -> Result<Option<PageRange>, String> {
        self.map_run_or_block(page, run, None)
    }

    fn map_run_or_block(
        &mut self,
        page: PageIdx,
        run: PageRange,
        home: Option<&Arc<HostImage>>,
    ) -> Result<Option<PageRange>, String> {
        let mut run = run;
        for _ in 0..MAP_TRIES_MAX {
            match self.map(run, home) {
                Ok(()) => return Ok(Some(run)),
                Err(MapError::Lost(reason)) => return Err(reason),
                Err(MapError::Busy { block }) => {
                    // What is left of the run on this side of the block that the reader has
                    // touched.
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
                Err(error @ MapError::Refused(_)) => {
                    tracing::debug!(%error, %run, "map a run");
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    fn map(&mut self, run: PageRange, home: Option<&Arc<HostImage>>) -> Result<(), MapError> {
        let unserved = &mut self.unserved;
        self.reader.map(run, home.map(|image| image.cache()), &mut |page, is_write| {
            unserved.push((page, is_write));
        })?;
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
}
