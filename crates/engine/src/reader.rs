//! What waits for an image's pages: the memory of a VM, or anything else that reads page by page.
//!
//! ```text
//!   absent page ──► faults_fd is readable ──► read_faults
//!                                                 │
//!        wake ◄── the page is in the cache ───────┤
//!        install_zeros ◄── it is zero ────────────┤
//!        refuse ◄── it can't be had ──────────────┘
//! ```
//!
//! Promises to the engine: no call blocks for longer than it takes to tell a process or a thread.
//!
//! Left to others: where the bytes are read from. That is the image's cache, by the reader's own
//! hand.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

use vmfork_image::{PageIdx, PageRange};

use crate::cache::Cache;

/// Wakes what waits for some pages of one reader, from any thread.
pub trait Waker: Debug + Send {
    /// The pages are in the cache. If the reader has gone, nothing happens.
    fn wake(&self);
}

/// A run can't be mapped into a reader.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The reader itself uses this block: nothing has changed.
    #[error("block {block} is in use")]
    Busy { block: u64 },
    /// Nothing has changed.
    #[error("{0}")]
    Refused(String),
    /// What is mapped there now is unknown: the reader must not go on.
    #[error("{0}")]
    Lost(String),
}

/// One reader of an image. The engine calls it on its own thread. It drops the reader when it
/// serves it no more.
///
/// A woken reader finds its page in the image's cache, or asks again: a wake may come too early or
/// twice.
pub trait Reader: Debug + Send {
    /// Readable while there are faults to read. The same file for as long as the reader lives.
    fn faults_fd(&self) -> BorrowedFd<'_>;

    /// Calls `found` with the page of each new fault, and whether the reader is about to overwrite
    /// it. A page that is to be overwritten may be answered by [`Reader::install_private`].
    ///
    /// # Errors
    /// Faults can't be read any more: the view is lost.
    fn read_faults(&self, found: &mut dyn FnMut(PageIdx, bool)) -> io::Result<()>;

    /// Pages of `range` may have come into the cache: what waits in it looks there again.
    fn wake(&self, range: PageRange);

    /// For what has the pages of `range` before the engine hears of it.
    fn waker(&self, range: PageRange) -> Box<dyn Waker>;

    /// All pages of `range` are zero, and not in the cache. Wakes what waits in it.
    fn install_zeros(&self, range: PageRange);

    /// The reader's own copy of pages that it is about to overwrite. Wakes what waits in `range`.
    fn install_private(&self, range: PageRange, bytes: &[u8]);

    /// A page can't be had now. `true`: what waits for it has been told, and the reader goes on.
    /// `false`: the reader can't tell it (a VM can't), so that its view is lost.
    fn refuse(&self, _page: PageIdx, _reason: &str) -> bool {
        false
    }

    /// Its view is lost: no fault is answered any more.
    fn lost(&self, _reason: &str) {}

    /// Whether [`Reader::map`] is of use.
    fn can_map(&self) -> bool {
        false
    }

    /// Show another image's cache in place of the image's own, or zeros if `cache` is `None`, in
    /// all of `run`, which is whole blocks. `found` is told of faults that are read meanwhile, as
    /// by [`Reader::read_faults`].
    ///
    /// # Errors
    /// [`MapError`].
    fn map(
        &mut self,
        run: PageRange,
        _cache: Option<&Cache>,
        _found: &mut dyn FnMut(PageIdx, bool),
    ) -> Result<(), MapError> {
        Err(MapError::Refused(format!("{run} can't be mapped in this reader")))
    }
}
