//! The drain: frozen pages that no reader asked for move to the cache, and their originals back to
//! the host.
//!
//! ```text
//!   Idle ──sealed──► Copying ──all tried──► Releasing ──all given back──► Complete
//!                       └──some lost──► Incomplete
//! ```
//!
//! The scheduler's [`vmfork_policy::Drain`] says which pages. This module keeps how far originals
//! may be given back. That holds for as long as the drain goes through the image in order and none
//! of it fails.

use vmfork_image::{BLOCK_PAGES, PageIdx, PageRange, PageTable};

use crate::host_image::HostImage;
use crate::presence::Presence;

/// Pages copied in one go: 256 KiB, about 60 µs, which a fault may have to wait.
pub(super) const STEP_PAGES: u64 = 64;

/// The policy's name in the scheduler.
pub(super) const NAME: &str = "drain";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not frozen, or not sealed yet.
    #[default]
    Idle,
    Copying,
    /// All pages are in the cache.
    Releasing,
    /// And the originals are given back.
    Complete,
    /// Some pages could not be had. Originals stay where they are, as far as there are any.
    Incomplete,
}

/// Where the drain stands in one image.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) stage: Stage,
    /// All own pages before this one are present.
    copied: u64,
    failed: bool,
    /// There is more to copy, when a copy in flight has arrived.
    pub(super) is_held_up: bool,
}

impl Progress {
    pub(super) fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Copying | Stage::Releasing)
    }

    /// Pages that the drain proposed were copied.
    pub(super) fn on_filled(&mut self, range: PageRange) {
        if !self.failed {
            self.copied = self.copied.max(range.end().0);
        }
    }

    /// Or were not.
    pub(super) fn on_failed(&mut self) {
        self.failed = true;
    }

    /// Originals before this page may be given back: whole blocks, since a huge page that is given
    /// back in part is split.
    pub(super) fn release_limit(&self, pages: u64) -> PageIdx {
        match self.stage {
            Stage::Releasing => PageIdx(pages),
            _ => PageIdx(self.copied / BLOCK_PAGES * BLOCK_PAGES),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Whether there is something to do at once.
    pub(super) fn is_due(&self) -> bool {
        self.is_running() && !self.is_held_up
    }

    /// Everything has been tried. Nothing is given back unless all of it is there, whatever has
    /// been counted.
    pub(super) fn on_copied(&mut self, image: &HostImage, table: &PageTable) {
        let all_there = |presence: &Presence| {
            table.pages_of(image.id()).all(|run| presence.count(run) == run.len())
        };
        self.stage = match all_there(image.cache().presence()) {
            true => Stage::Releasing,
            false => Stage::Incomplete,
        };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn nothing_is_given_back_behind_a_page_that_failed() {
        let mut progress = Progress { stage: Stage::Copying, ..Progress::default() };
        progress.on_filled(range(0, 600));
        assert_eq!(progress.release_limit(4096), PageIdx(512));
        progress.on_failed();
        progress.on_filled(range(600, 2000));
        assert_eq!(progress.release_limit(4096), PageIdx(512));
    }
}
