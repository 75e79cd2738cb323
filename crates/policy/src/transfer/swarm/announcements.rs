//! What to tell others of what has come here.

use std::time::Duration;

use vmfork_image::PageRange;

use super::{Flags, Pieces};
use crate::page_set::PageSet;

/// Sizes of [`Announcements`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnnouncementsConfig {
    /// What is announced at a time: as everywhere in the swarm. A power of two, 1 to 512.
    pub piece_pages: u64,
    /// At the latest so long after a piece became whole.
    pub every: Duration,
    /// Sooner, if so many have.
    pub pieces_max: u64,
}

impl Default for AnnouncementsConfig {
    /// So that news is younger than a piece takes at 1 Gbit/s to go to a hundred hosts, and costs little.
    fn default() -> Self {
        Self { piece_pages: 16, every: Duration::from_millis(20), pieces_max: 256 }
    }
}

/// Collects what came into a cache, until it is worth telling the others.
#[derive(Debug)]
pub struct Announcements {
    config: AnnouncementsConfig,
    pieces: Pieces,
    have: PageSet,
    whole: Flags,
    /// Whole pieces that have not been announced.
    fresh: PageSet,
    fresh_pieces: u64,
    since: Duration,
}

impl Announcements {
    /// For an image of `pages` pages. What never has to travel (zero pages, pages of another image) is to be reported as come, too:
    /// else no piece with such a page is ever whole.
    pub fn new(pages: u64, config: AnnouncementsConfig) -> Self {
        let pieces = Pieces::new(pages, config.piece_pages);
        Self {
            config,
            pieces,
            have: PageSet::default(),
            whole: Flags::new(pieces.count()),
            fresh: PageSet::default(),
            fresh_pieces: 0,
            since: Duration::ZERO,
        }
    }

    /// These pages are in the cache now. May say again what it said before.
    pub fn came(&mut self, pages: PageRange, now: Duration) {
        let pages = pages.intersect(&self.pieces.image);
        self.have.insert(pages);
        for piece in self.pieces.touching(pages) {
            let run = self.pieces.pages(piece);
            if self.whole.get(piece) || self.have.count(run) < run.len() {
                continue;
            }
            self.whole.set(piece, true);
            self.fresh.insert(run);
            if self.fresh_pieces == 0 {
                self.since = now;
            }
            self.fresh_pieces += 1;
        }
    }

    /// What to announce now, each piece once, in runs as long as possible.
    pub fn take(&mut self, now: Duration) -> Option<Vec<PageRange>> {
        if self.wake_at()? > now {
            return None;
        }
        self.fresh_pieces = 0;
        let fresh = std::mem::take(&mut self.fresh);
        Some(fresh.present(self.pieces.image).collect())
    }

    /// When there is something to announce.
    pub fn wake_at(&self) -> Option<Duration> {
        if self.fresh_pieces == 0 {
            return None;
        }
        let full = self.fresh_pieces >= self.config.pieces_max;
        Some(if full { self.since } else { self.since.saturating_add(self.config.every) })
    }

    /// All that is whole: for a host that has just joined.
    pub fn all(&self) -> Vec<PageRange> {
        let mut all = PageSet::default();
        for piece in (0..self.pieces.count()).filter(|piece| self.whole.get(*piece)) {
            all.insert(self.pieces.pages(piece));
        }
        all.present(self.pieces.image).collect()
    }
}
