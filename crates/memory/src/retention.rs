//! Which blocks of an image's cache are mapped by views of *other* images, and so must stay as they are.
//!
//! A block is lent if it is complete; it is discarded if nobody maps it. Each is a test and a change, and one
//! lock makes each pair one step, so that they exclude each other:
//!
//! ```text
//!   engine of another image     lock { complete? ──► count + 1 } ──► map it … unmapped ──► lock { count - 1 }
//!   garbage collection          lock { count = 0? ──► clear presence } ──► punch the hole
//! ```

use std::sync::PoisonError;

use vmfork_image::{BLOCK_PAGES, BlockIdx, PageRange};

use crate::presence::Presence;
use crate::sync::Mutex;

/// How many views map each block.
#[derive(Debug)]
pub(crate) struct Retention {
    mapped: Mutex<Box<[u32]>>,
}

impl Retention {
    pub(crate) fn new(pages: u64) -> Self {
        let blocks = usize::try_from(pages.div_ceil(BLOCK_PAGES)).unwrap_or(0);
        Self { mapped: Mutex::new(vec![0; blocks].into()) }
    }

    /// A view is about to map the blocks of `run`. False: one of them is not complete (any more), and none is
    /// retained. To be ended by [`Retention::release`].
    pub(crate) fn retain(&self, run: PageRange, is_complete: impl Fn(BlockIdx) -> bool) -> bool {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if !run.by_block().all(|(block, _)| is_complete(block)) {
            return false;
        }
        for (block, _) in run.by_block() {
            if let Some(count) = slot(&mut mapped, block) {
                *count = count.saturating_add(1);
            }
        }
        true
    }

    /// A view maps the blocks of `run` no more.
    pub(crate) fn release(&self, run: PageRange) {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        for (block, _) in run.by_block() {
            if let Some(count) = slot(&mut mapped, block) {
                *count = count.saturating_sub(1);
            }
        }
    }

    /// Clear the presence of those pages of `range` that are in blocks which nobody maps. → the stretches that
    /// were cleared: their bytes may go; and how many pages were present there.
    pub(crate) fn clear_unmapped(
        &self,
        range: PageRange,
        presence: &Presence,
    ) -> (Vec<PageRange>, u64) {
        let (mut cleared, mut pages) = (Vec::<PageRange>::new(), 0);
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        for (block, piece) in range.by_block() {
            let is_mapped = slot(&mut mapped, block).is_some_and(|count| *count > 0);
            let present = presence.count(piece);
            if is_mapped || present == 0 {
                continue;
            }
            pages += present;
            presence.clear(piece);
            match cleared.last_mut() {
                Some(last) if last.end() == piece.start() => {
                    *last = PageRange::between(last.start(), piece.end());
                }
                _ => cleared.push(piece),
            }
        }
        (cleared, pages)
    }
}

fn slot(mapped: &mut [u32], block: BlockIdx) -> Option<&mut u32> {
    usize::try_from(block.0).ok().and_then(|block| mapped.get_mut(block))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use vmfork_image::PageIdx;

    use super::*;

    #[test]
    fn a_block_stays_until_the_last_view_has_unmapped_it() {
        let (retention, presence) = (Retention::new(1024), Presence::new(1024));
        presence.set(PageRange::first(1024));
        let block = PageRange::first(512);
        assert!(retention.retain(block, |_| true));
        assert!(retention.retain(block, |_| true));
        let other = PageRange::between(PageIdx(512), PageIdx(1024));
        let collect = || retention.clear_unmapped(PageRange::first(1024), &presence);
        assert_eq!(collect(), (vec![other], 512));
        retention.release(block);
        assert_eq!(collect(), (vec![], 0));
        retention.release(block);
        assert_eq!(collect(), (vec![block], 512));
        assert_eq!(presence.count(PageRange::first(1024)), 0);
    }

    #[test]
    fn a_run_with_an_incomplete_block_is_not_retained_at_all() {
        let (retention, presence) = (Retention::new(1024), Presence::new(1024));
        presence.set(PageRange::first(512));
        assert!(!retention.retain(PageRange::first(1024), |block| block == BlockIdx(0)));
        let (cleared, _) = retention.clear_unmapped(PageRange::first(1024), &presence);
        assert_eq!(cleared, [PageRange::first(512)]);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Whoever managed to map a block finds its bytes there for as long as it maps it.
    #[test]
    fn loom_what_is_mapped_is_never_discarded() {
        loom::model(|| {
            let image = Arc::new((Retention::new(1), Presence::new(1), AtomicU64::new(7)));
            image.1.set(PageRange::first(1));
            let theirs = Arc::clone(&image);
            let collector = loom::thread::spawn(move || {
                let (retention, presence, bytes) = &*theirs;
                for _ in retention.clear_unmapped(PageRange::first(1), presence).0 {
                    bytes.store(0, Ordering::Relaxed);
                }
            });
            let (retention, presence, bytes) = &*image;
            let run = PageRange::first(1);
            if retention.retain(run, |_| presence.count(run) == 1) {
                assert_eq!(bytes.load(Ordering::Relaxed), 7);
                loom::thread::yield_now();
                assert_eq!(bytes.load(Ordering::Relaxed), 7);
                retention.release(run);
            }
            collector.join().expect("collector");
        });
    }
}
