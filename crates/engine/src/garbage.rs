//! Memory of dead relatives: pages in caches that no live image can read.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmfork_image::{ImageId, PAGE_BYTES, PageIdx, PageRange};

use crate::engine::Engine;
use crate::host_image::HostImage;

/// Give back what the caches of images without an engine of their own (no views, no more forks from
/// them) hold and no live image needs: its table names the page, or its block is at home there.
/// `live`: the engines whose relatives to look at. → bytes given back.
///
/// A parent that is forked forever, while its clones start and end, overwrites its own pages again
/// and again.
/// Each of its images is kept alive by the few pages that were not overwritten since.
/// This keeps host memory at what live VMs can still see.
/// An image that the last table has ceased to name is freed as a whole, by itself.
///
/// The images themselves know what is needed: engines that `live` lacks (of a fork in progress)
/// lose nothing.
pub fn collect_garbage(live: &[Arc<Engine>]) -> u64 {
    let mut dead: BTreeMap<ImageId, Arc<HostImage>> = BTreeMap::new();
    for engine in live {
        dead.extend(engine.image().ancestors());
    }
    // A stored image may be served again, and would look for its pages where they were.
    dead.retain(|_, image| !image.has_engine() && !image.is_stored());
    dead.values().map(|image| collect_from(image)).sum()
}

fn collect_from(image: &HostImage) -> u64 {
    let presence = image.cache().presence();
    let mut freed_bytes = 0;
    for stretch in unneeded(image) {
        // A page that no image needs can never be needed again: tables and homes are derived from
        // existing ones.
        // So no thread maps it, reads it or fills it while it is freed.
        for (_, piece) in stretch.by_block() {
            let pages = presence.count(piece);
            if pages == 0 {
                continue;
            }
            presence.clear(piece);
            match image.cache().discard(piece) {
                Ok(()) => freed_bytes += pages * PAGE_BYTES,
                Err(error) => {
                    tracing::warn!(%error, image = %image.id(), %piece, "discard garbage");
                }
            }
        }
    }
    freed_bytes
}

/// Stretches of an image's pages that no live engine can come to read.
fn unneeded(image: &HostImage) -> Vec<PageRange> {
    let mut needed: Vec<PageRange> =
        image.needed_by().iter().flat_map(|reach| reach.needed_of(image.id())).collect();
    needed.sort_by_key(PageRange::start);
    let mut stretches = Vec::new();
    let mut at = PageIdx(0);
    for run in needed {
        if run.start() > at {
            stretches.push(PageRange::between(at, run.start()));
        }
        at = at.max(run.end());
    }
    if at < PageIdx(image.pages()) {
        stretches.push(PageRange::between(at, PageIdx(image.pages())));
    }
    stretches
}
