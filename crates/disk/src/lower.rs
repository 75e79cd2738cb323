//! What a disk reads from.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::sync::Arc;

use vmfork_image::{ImageName, PageRange};

/// Immutable content: what a layer lies on.
pub trait Lower: Debug + Send + Sync {
    /// Calls `found` with each run of `range`, in order, and whether it is zeros.
    fn runs(&self, range: PageRange, found: &mut dyn FnMut(PageRange, bool));

    /// Whether pages can be read at once, without waiting for another host or a store.
    fn is_here(&self, range: PageRange) -> bool;

    /// Calls `found` with each run of `range` that is not zeros, in order, and the file that has
    /// it, as [`OwnPages::file`].
    fn files(&self, range: PageRange, found: &mut dyn FnMut(PageRange, Option<&Arc<File>>));

    /// Read whole pages, zeros too. May take as long as a network does.
    ///
    /// # Errors
    /// No source has them, or the medium fails.
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()>;
}

/// An image's own pages: those that a page table says are this image's.
pub trait OwnPages: Debug + Send + Sync {
    /// Whether they can be read at once, without waiting for another host or a store.
    fn is_here(&self, range: PageRange) -> bool;

    /// Calls `found` with the runs of `range` that are its own, in order. What it has of others is
    /// not theirs.
    fn owned(&self, range: PageRange, found: &mut dyn FnMut(PageRange)) {
        found(range);
    }

    /// What it is called across hosts, if it came from another one.
    fn name_elsewhere(&self) -> Option<ImageName> {
        None
    }

    /// A file of the store's own that has page p at p × 4096, and is not cut while it is used.
    fn file(&self) -> Option<&Arc<File>> {
        None
    }

    /// Read a run of them. May take as long as a network does, but has a bound.
    ///
    /// # Errors
    /// They are not available, or the medium fails.
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()>;
}

/// The next `len` of the bytes, which are taken from the front of `rest`.
pub(crate) fn split_mut<'a>(rest: &mut &'a mut [u8], len: u64) -> io::Result<&'a mut [u8]> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let (part, after) =
        std::mem::take(rest).split_at_mut_checked(len).ok_or(io::ErrorKind::InvalidInput)?;
    *rest = after;
    Ok(part)
}
