//! Memory of dead relatives: pages in caches that no live table names.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmfork_image::{ImageId, PageIdx, PageRange};

use crate::engine::Engine;
use crate::host_image::HostImage;

/// Give back what the caches of images without an engine of their own (no views, no more forks from them) hold
/// and no page table of `live` names. → bytes given back.
///
/// A parent that is forked for ever, while its clones come and go, overwrites its own pages again and again;
/// each of its images is kept alive by the few pages that were not overwritten since. This keeps host memory at
/// what live VMs can still see. An image that the last table has ceased to name goes as a whole, by itself.
pub fn collect_garbage(live: &[Arc<Engine>]) -> u64 {
    let mut dead: BTreeMap<ImageId, Arc<HostImage>> = BTreeMap::new();
    for engine in live {
        if let Some(sealed) = engine.image().sealed() {
            dead.extend(sealed.ancestors.iter().map(|(id, image)| (*id, Arc::clone(image))));
        }
    }
    for engine in live {
        dead.remove(&engine.image().id());
    }
    let mut freed_bytes = 0;
    for image in dead.values() {
        for stretch in unneeded(image, live) {
            let present = image.cache().presence().count(stretch);
            if present == 0 {
                continue;
            }
            match image.cache().discard(stretch) {
                Ok(()) => freed_bytes += present * vmfork_image::PAGE_BYTES,
                Err(error) => tracing::warn!(%error, image = %image.id(), "discard garbage"),
            }
        }
    }
    freed_bytes
}

/// Stretches of an image's pages that no live table names.
fn unneeded(image: &HostImage, live: &[Arc<Engine>]) -> Vec<PageRange> {
    let pages = usize::try_from(image.pages()).unwrap_or(0);
    let mut needed = vec![false; pages];
    for engine in live {
        let table = engine.reachable();
        if table.owners().get(image.id()) == 0 {
            continue;
        }
        for run in table.pages_of(image.id()) {
            for page in run.pages() {
                if let Some(flag) =
                    usize::try_from(page.0).ok().and_then(|page| needed.get_mut(page))
                {
                    *flag = true;
                }
            }
        }
    }
    let mut stretches = Vec::new();
    let mut at = 0;
    while at < pages {
        let same = needed[at..].iter().take_while(|flag| **flag == needed[at]).count();
        if !needed[at] {
            stretches.push(PageRange::between(PageIdx(at as u64), PageIdx((at + same) as u64)));
        }
        at += same;
    }
    stretches
}
