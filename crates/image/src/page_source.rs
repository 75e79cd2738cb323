//! Where an image's own pages can be read from besides its cache.

use std::fmt::Debug;
use std::io;
use std::time::Duration;

use crate::{Origin, PageIdx, PageRange};

/// A place that holds an image's own pages for good: a stored snapshot, another host.
///
/// A reader knows neither which place it is nor what form pages have there. Several threads may ask
/// a source at a time.
pub trait PageSource: Debug + Send + Sync {
    /// What kind of place it is.
    fn origin(&self) -> Origin;

    /// Number of pages that are best read together, as an aligned window. A power of two, 1 to 512.
    fn unit_pages(&self) -> u64;

    /// How many background reads at a time suit it: as many as it has processors or, far away,
    /// more.
    fn reads_ahead(&self) -> usize {
        2
    }

    /// Read `range`, of which every page is the image's own, into `bytes`, which is exactly as
    /// long. May take as long as a network does, but has a bound. What it returns has been
    /// verified.
    ///
    /// # Errors
    /// The pages can't be had, or are not what was stored: says which, where, and why.
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()>;

    /// The same, with a demand read for `page`: `came` gets its bytes as soon as they have been
    /// verified, if they come before the others. That may happen although the others are not
    /// available, and more than once.
    ///
    /// # Errors
    /// As [`PageSource::read`].
    fn read_first(
        &self,
        range: PageRange,
        page: PageIdx,
        bytes: &mut [u8],
        came: &mut dyn FnMut(&[u8]),
    ) -> io::Result<()> {
        let (_, _) = (page, came);
        self.read(range, bytes)
    }

    /// The same as a background read: yields to demand reads.
    ///
    /// # Errors
    /// As [`PageSource::read`].
    fn read_ahead(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.read(range, bytes)
    }

    /// How many background reads should be asked for together, by [`PageSource::read_ahead_all`].
    fn together(&self) -> usize {
        1
    }

    /// Several of [`PageSource::read_ahead`]: `done` is told of each once, with its place, when it
    /// has come or failed.
    fn read_ahead_all(
        &self,
        reads: &mut [AheadRead<'_>],
        done: &mut dyn FnMut(usize, io::Result<&[u8]>),
    ) {
        for (place, read) in reads.iter_mut().enumerate() {
            let outcome = self.read_ahead(read.range, read.bytes);
            done(place, outcome.map(|()| &*read.bytes));
        }
    }

    /// Decides the order of background reads, where the order matters.
    fn order(&self) -> Option<&dyn AheadOrder> {
        None
    }
}

/// A background read: its pages, and where they are to go.
#[derive(Debug)]
pub struct AheadRead<'a> {
    pub range: PageRange,
    /// Exactly as long.
    pub bytes: &'a mut [u8],
}

/// Decides which background reads are best done first.
///
/// Several hosts that all bring the same pages in another order each can give each other what they
/// lack.
pub trait AheadOrder: Send + Sync {
    /// The place of a piece in this host's own order: the lowest first.
    fn place(&self, piece: PageRange) -> u64;

    /// The same where there is an order in which they are wanted, and this one is number `at`: near
    /// there.
    fn place_near(&self, at: u64, piece: PageRange) -> u64;

    /// Which of `pieces`, those that come first in that order and are not there yet, to read now.
    fn next(&self, pieces: &[PageRange]) -> NextAhead;
}

/// What [`AheadOrder::next`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextAhead {
    /// The one at this place.
    Piece(usize),
    /// None of them yet: ask again after so long, or when something has been read.
    Later(Duration),
}
