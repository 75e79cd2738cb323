//! Which host to ask for which pages, one host at a time. By unicast these are hosts that have
//! them. In a swarm, hosts also ask each other what they hold (vmTorrent, CoNEXT 2012).
//!
//! ```text
//!   Swarm: members ──rounds of asking what they hold──► Holders ◄── answered, failed, redirected
//!                                                        │   ▲
//!                            choose: whom to ask ◄───────┘   └── Pick: which piece to read in the background
//!
//!   the host that froze the image: Spread ──► serve it, or name who was sent it
//! ```
//!
//! A host that has the whole image is an *origin*: the parent's host, a store. With origins alone
//! this is unicast. Hosts are told apart by pieces, aligned windows of pages. A host that lacks a
//! page of a piece does not count as its holder.
//!
//! Demand goes to the best holder: the one that is expected to answer first, by what it has to do
//! for us and how long it took lately. Background reads are picked from the next pieces in an order
//! of the host's own, the rarest that a peer has first. So hosts come to hold different pieces and
//! can trade. A list that is most urgent first comes nearly in its order, but in another on each
//! host ([`Pick::place_near`]). The origin serves last: what no peer has. There vmTorrent leaves it
//! to chance whether two hosts take the same piece from the origin. Here each host first fetches a
//! *share* of its own ([`Pick::set_share`]). An origin that is asked for what another host has just
//! got sends the asker there ([`Spread`]). So most pieces leave the origin once.

mod holders;
mod hosts;
mod members;
mod pick;
mod spread;

#[cfg(test)]
mod tests;

use vmfork_image::{BLOCK_PAGES, PageRange};

pub use self::holders::{Choice, Failure, Holders, HoldersConfig};
pub use self::members::{Asked, Chosen, READS_AHEAD, Route, Swarm, SwarmConfig, UNIT_PAGES};
pub use self::pick::{Pick, PickConfig, Picked};
pub use self::spread::{Serve, Spread, SpreadConfig};

/// An image cut into pieces: aligned windows of a power of two of pages. The last may be short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pieces {
    image: PageRange,
    piece_pages: u64,
}

impl Pieces {
    /// Sizes that make no sense are put right: the next power of two, at most a block.
    fn new(pages: u64, piece_pages: u64) -> Self {
        let image = PageRange::first(pages.min(vmfork_image::PAGES_MAX));
        Self { image, piece_pages: piece_pages.clamp(1, BLOCK_PAGES).next_power_of_two() }
    }

    fn count(self) -> u64 {
        self.image.len().div_ceil(self.piece_pages)
    }

    /// Those with a page in `range`.
    fn touching(self, range: PageRange) -> std::ops::Range<u64> {
        let range = range.intersect(&self.image);
        match range.is_empty() {
            true => 0..0,
            false => range.start().0 / self.piece_pages..range.end().0.div_ceil(self.piece_pages),
        }
    }

    /// Those with all their pages in `range`.
    fn inside(self, range: PageRange) -> std::ops::Range<u64> {
        let range = range.intersect(&self.image);
        let start = range.start().0.div_ceil(self.piece_pages);
        let whole_image = range.end() == self.image.end();
        let end = if whole_image { self.count() } else { range.end().0 / self.piece_pages };
        start..end.max(start)
    }
}
