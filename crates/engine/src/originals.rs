//! Where a frozen image's own pages lie until the drain has copied them into the cache.

use std::fmt::Debug;
use std::io;

use vmfork_image::{PageIdx, PageRange};

/// How a page differs from the image that its writer began from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It has bytes of its own.
    Written,
    /// It is zero.
    Zero,
}

/// What became of an attempt to give pages back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// There is nothing to give back.
    Nothing,
    Begun,
    /// Earlier stretches are still being given back: try again later.
    Busy,
}

/// The pages as they were at the freeze. The engine reads them, copies them, and gives them back.
pub trait Originals: Debug + Send + Sync {
    /// Read pages that were written. A page that has been released gives an error or zeros: the
    /// caller tests presence afterwards.
    ///
    /// # Errors
    /// The pages are gone, or were released.
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()>;

    /// Calls `found` for each run of changed pages in `range`, in order. Pages that did not change
    /// are left out.
    ///
    /// # Errors
    /// The pages are gone.
    fn scan(&self, range: PageRange, found: &mut dyn FnMut(PageRange, Change)) -> io::Result<()>;

    /// Give the next stretch back to the host, of what lies before `limit`. Does not wait for it.
    fn release_some(&self, limit: PageIdx) -> Release;

    /// Whether anything still holds the pages.
    fn is_held(&self) -> bool;

    /// Where a page lies, for messages.
    fn place_of(&self, page: PageIdx) -> String;
}
