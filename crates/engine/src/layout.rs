//! Images across hosts: what a host must know of another's image to serve readers of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmfork_image::{
    BLOCK_PAGES, BlockIdx, ImageId, Origin, PageRange, PageSource, PageTable, Source,
};

use crate::homes::Homes;
use crate::host_image::{Ancestors, Brought, HostImage, OpenError, PageLost};

/// All of an image that isn't bytes.
#[derive(Debug, Clone)]
pub struct Layout {
    pub table: PageTable,
    /// Of each block of 2 MiB: the image that changed it last, whose cache serves it.
    pub homes: Vec<Option<ImageId>>,
}

impl HostImage {
    /// What another host must know of it, once its table is complete. The images that it names are
    /// [`HostImage::with_ancestors`].
    pub fn layout(&self) -> Option<Layout> {
        let (table, homes) = self.sealed()?;
        Some(Layout { table: table.clone(), homes: homes.iter().collect() })
    }

    /// An image that another host has a layout and the bytes of: `source` reads its own pages from
    /// there. `relatives` are the other images that the layout names, by the ids of this host. An
    /// engine brings it to readers (`Engine::serve`).
    ///
    /// # Errors
    /// A relative is missing or of another size, the layout doesn't fit together, or the host is
    /// out of memory or fds.
    pub fn remote(
        id: ImageId,
        layout: Layout,
        relatives: &[Arc<Self>],
        source: Arc<dyn PageSource>,
    ) -> Result<Arc<Self>, OpenError> {
        let Layout { table, homes } = layout;
        let pages = table.pages();
        let known: BTreeMap<ImageId, &Arc<Self>> = relatives
            .iter()
            .filter(|image| image.pages() == pages)
            .map(|image| (image.id(), image))
            .collect();
        let named = table.owners().iter().map(|(image, _)| image);
        let named = named.chain(homes.iter().copied().flatten());
        let mut ancestors = Ancestors::new();
        for image in named.filter(|image| *image != id) {
            let relative = known.get(&image).ok_or(OpenError::Relative { image, pages })?;
            ancestors.insert(image, Arc::clone(relative));
        }
        let blocks = pages.div_ceil(BLOCK_PAGES);
        if homes.len() as u64 != blocks {
            return Err(OpenError::Homes { found: homes.len() as u64, blocks });
        }
        let mut kept = Homes::none(pages);
        for (block, home) in (0..blocks).map(BlockIdx).zip(homes) {
            // A block that isn't zero has a home: where another image's cache can't serve it, its
            // own does.
            let serves = |home: &ImageId| {
                let theirs = ancestors.get(home).and_then(|image| image.table());
                theirs.is_some_and(|theirs| table.same_block(theirs, block))
            };
            let is_zero = block.pages().is_none_or(|all| {
                table.runs(all.intersect(&table.range())).all(|(_, source)| source == Source::Zero)
            });
            match home.filter(serves) {
                Some(home) => kept.set(block, home),
                None if is_zero => {}
                None => kept.set(block, id),
            }
        }
        let image = Self::with_source(id, pages, Some(source)).map_err(OpenError::Cache)?;
        let _named = image.seal(table, kept, ancestors);
        Ok(Arc::new(image))
    }

    /// Read pages of its own for another host. What has to be fetched for that stays in the cache,
    /// so that it comes to this host once. From any thread, for as long as an engine of an image
    /// that names the pages is held.
    ///
    /// # Errors
    /// [`PageLost`]; also for pages that are not its own by its table.
    pub fn lend(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), PageLost> {
        let start = range.start();
        let owned = self.table().is_some_and(|table| {
            table.range().covers(&range)
                && !range.is_empty()
                && table.run_at(start, range) == (range, Source::Image(self.id()))
        });
        if !owned {
            return Err(self.lost(start, format!("{range} is not all its own")));
        }
        let absent = match self.is_stored() {
            true => self.cache().presence().absent(range),
            false => Vec::new(),
        };
        let Brought { origin, .. } = self.read_owned(range, bytes)?;
        self.counters().lent_bytes.add(range.byte_len());
        let came = match origin {
            Origin::Peer => &self.counters().from_peer_bytes,
            _ => &self.counters().from_stored_bytes,
        };
        for run in absent {
            let from = usize::try_from(run.byte_offset() - range.byte_offset()).unwrap_or(0);
            let len = usize::try_from(run.byte_len()).unwrap_or(0);
            let part = bytes.get(from..from + len).unwrap_or_default();
            if self.keep(run, part) {
                came.add(run.byte_len());
            }
        }
        Ok(())
    }
}
