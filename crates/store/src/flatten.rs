//! Making a delta whole: its base is needed no more.

use std::sync::Arc;

use vmfork_image::{PAGE_BYTES, PageRange, PageSource as _};

use crate::create::{Extents, WindowWriter, table_of};
use crate::error::StoreError;
use crate::format::chunk::ChunkEncoder;
use crate::format::descriptor::{Descriptor, ImageDescriptor};
use crate::format::table::{Extent, Table, own_windows};
use crate::hot::HotChunks;
use crate::names::{TABLE, chunk_key, snapshot_key};
use crate::source::{SourceOptions, StoredPages, decode_chunk};
use crate::store::Store;
use crate::stored::StoredImage;
use crate::work::Work;
use crate::writing::{Commit, Writing};

/// Windows of different layers overlap where their sizes differ: what was decompressed for one
/// serves the next.
const HOT_BYTES: u64 = 64 << 20;

/// Who has a run of pages: one of the chain, by number from the top.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layer {
    range: PageRange,
    /// `None`: zero.
    owner: Option<usize>,
}

/// `upper`, and where it says nothing, `lower`. Both ascend.
fn merged(upper: &[Layer], lower: &[Layer]) -> Vec<Layer> {
    let mut out = Vec::with_capacity(upper.len() + lower.len());
    let mut upper = upper.iter().peekable();
    for layer in lower {
        // One from above may reach into this layer, or beyond it.
        let start = layer.range.start();
        let mut at = out.last().map_or(start, |last: &Layer| start.max(last.range.end()));
        while let Some(above) = upper.next_if(|above| above.range.start() < layer.range.end()) {
            let before = PageRange::between(at, above.range.start());
            if !before.is_empty() {
                out.push(Layer { range: before, ..*layer });
            }
            at = at.max(above.range.end());
            out.push(*above);
        }
        let rest = PageRange::between(at, layer.range.end());
        if !rest.is_empty() {
            out.push(Layer { range: rest, ..*layer });
        }
    }
    out.extend(upper);
    out
}

/// Whose the pages of a chain are: without those that are zero, ascending.
fn layers_of(chain: &[StoredImage]) -> Vec<Layer> {
    let mut all = Vec::new();
    for (at, image) in chain.iter().enumerate() {
        let layers = image
            .extents()
            .map(|(range, kind)| Layer { range, owner: (kind == Extent::Own).then_some(at) });
        all = merged(&all, &layers.collect::<Vec<_>>());
    }
    all.retain(|layer| layer.owner.is_some());
    all
}

struct Flattening<'a> {
    store: &'a Store,
    chain: &'a [StoredImage],
    sources: Vec<Arc<StoredPages>>,
    layers: Vec<Layer>,
    chunk_pages: u64,
}

impl Flattening<'_> {
    fn layers_in(&self, window: PageRange) -> impl Iterator<Item = Layer> + '_ {
        let from = self.layers.partition_point(|layer| layer.range.end() <= window.start());
        self.layers[from..]
            .iter()
            .take_while(move |layer| layer.range.start() < window.end())
            .map(move |layer| Layer { range: layer.range.intersect(&window), ..*layer })
    }

    /// The chunk of window `index`: one that is there already, if a single layer has all of the
    /// pages and nothing else in its window.
    fn write(&self, writer: &mut WindowWriter<'_>, index: u64) -> Result<blake3::Hash, StoreError> {
        let top = self.chain[0].table();
        let window = top.window_range(index);
        let layers: Vec<_> = self.layers_in(window).collect();
        let pages: u64 = layers.iter().map(|layer| layer.range.len()).sum();
        let first = layers.first().and_then(|layer| layer.owner).unwrap_or(0);
        let table = self.chain[first].table();
        if layers.iter().all(|layer| layer.owner == Some(first))
            && table.chunk_pages() == self.chunk_pages
            && let Some(whole) = table.window_of(window.start())
            && whole.own_pages == pages
        {
            writer.writing.keep_chunk(&whole.hash, || {
                let blobs = self.store.inner.blobs();
                let file = blobs.get(&chunk_key(&whole.hash))?;
                decode_chunk(blobs, &file, &whole.hash, Some(pages))?;
                Ok(file)
            })?;
            return Ok(whole.hash);
        }
        let runs: Vec<_> = layers.iter().map(|layer| layer.range).collect();
        let read = |range: PageRange, bytes: &mut [u8]| {
            let owner = layers.iter().find(|layer| layer.range == range);
            let owner = owner.and_then(|layer| layer.owner).unwrap_or(0);
            self.sources[owner].read(range, bytes)
        };
        // What the layers have stored is kept as they have it.
        let (hash, _) = writer.write(&runs, &read, true)?;
        hash.ok_or_else(|| StoreError::BadDraft { why: format!("window {index} has no pages") })
    }
}

/// Make the image that a chain begins with whole.
fn flatten_image(
    store: &Store,
    chain: &[StoredImage],
    writing: &Writing<'_>,
    work: &Work,
) -> Result<ImageDescriptor, StoreError> {
    let old = chain[0].image();
    let hot = HotChunks::new(HOT_BYTES);
    let options = SourceOptions { hot, remote: None };
    let it = Flattening {
        store,
        chain,
        sources: chain.iter().map(|image| image.source(options.clone())).collect(),
        layers: layers_of(chain),
        chunk_pages: old.chunk_pages,
    };
    let mut extents = Extents::default();
    it.layers.iter().for_each(|layer| extents.push(layer.range, Extent::Own));
    let extents = extents.into_inner();
    let windows: Vec<_> = own_windows(&extents, old.chunk_pages).collect();
    work.expect(windows.iter().map(|(_, pages)| pages * PAGE_BYTES).sum());
    let begin = || {
        let encoder = ChunkEncoder::new(old.compression).map_err(StoreError::io("set up zstd"))?;
        Ok(WindowWriter { writing, encoder, raw: Vec::new() })
    };
    let chunks =
        work.for_each_on(store.inner.threads(work), &windows, begin, |writer, (index, pages)| {
            let hash = it.write(writer, *index)?;
            work.done(pages * PAGE_BYTES);
            Ok(hash)
        })?;
    let table = table_of(writing, old.pages(), old.chunk_pages, extents, chunks)?;
    // Besides the old one: until the descriptor is replaced, that is the right one.
    let id = chain[0].stored().descriptor().id;
    let file = writing.put_section(id, &old.role.ending(TABLE), &table.encode())?;
    let counts = writing.take_counts(&table, false);
    Ok(ImageDescriptor { base: None, table: file, counts, ..old.clone() })
}

impl Store {
    /// Make snapshot `name` whole. Its images that are deltas take over the pages that they had of
    /// their bases, and depend on them no more. Its content and id stay, so its own deltas stay
    /// right. What is whole already stays as it is.
    ///
    /// # Errors
    /// No such snapshot; it or a base is damaged, being written, or not all here;
    /// [`StoreError::Cancelled`]. It is as it was, then.
    pub fn flatten(&self, name: &str, work: &Work) -> Result<Descriptor, StoreError> {
        let top = self.open(name)?;
        if top.descriptor().bases().next().is_none() {
            return Ok(top.descriptor().clone());
        }
        drop(top);
        let writing = Writing::begin(&self.inner, name, Commit::Replace, Vec::new())?;
        let top = self.open(name)?;
        let mut new = top.descriptor().clone();
        for image in new.images.iter_mut().filter(|image| image.base.is_some()) {
            let chain = self.open_chain(name, &image.role)?;
            chain.iter().try_for_each(|image| image.stored().check_is_here())?;
            *image = flatten_image(self, &chain, &writing, work)?;
        }
        work.check()?;
        writing.commit(&new)?;
        // Chunks of what is open stay.
        let deltas = top.images().filter(|image| image.base().is_some());
        let old: Vec<_> =
            deltas.map(|image| (image.image().clone(), image.table().clone())).collect();
        drop(top);
        if let Err(error) = self.drop_old_tables(name, &old) {
            tracing::warn!(%error, "an older table is left for collect");
        }
        Ok(new)
    }

    /// Remove what only these tables, which are not the snapshot's any more, have named.
    fn drop_old_tables(
        &self,
        name: &str,
        old: &[(ImageDescriptor, Table)],
    ) -> Result<(), StoreError> {
        let collector = self.inner.pins.collector();
        self.inner.references.lock().refresh(self.inner.blobs())?;
        for (image, _) in old {
            collector.delete(self.inner.blobs(), &snapshot_key(name, &image.table.file))?;
        }
        let windows = old.iter().flat_map(|(_, table)| table.windows());
        let chunks = windows.map(|window| window.hash).collect();
        self.inner.delete_unused(&collector, chunks)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmfork_image::PageIdx;

    use super::*;

    /// One owner a page, in the manner of a page table without runs.
    fn layers(model: &[Option<Option<usize>>]) -> Vec<Layer> {
        let mut out: Vec<Layer> = Vec::new();
        for (page, says) in (0..).zip(model) {
            let Some(owner) = *says else { continue };
            match out.last_mut() {
                Some(last) if last.owner == owner && last.range.end() == PageIdx(page) => {
                    last.range = PageRange::between(last.range.start(), PageIdx(page + 1));
                }
                _ => out.push(Layer { range: PageIdx(page).range(), owner }),
            }
        }
        out
    }

    proptest! {
        #[test]
        fn the_upper_layer_hides_the_lower(
            pages in prop::collection::vec((
                prop::option::of(prop::option::of(0usize..2)),
                prop::option::of(prop::option::of(2usize..4)),
            ), 0..60)
        ) {
            let (upper, lower): (Vec<_>, Vec<_>) = pages.into_iter().unzip();
            let merged = merged(&layers(&upper), &layers(&lower));
            let model: Vec<_> = upper.iter().zip(&lower).map(|(u, l)| u.or(*l)).collect();
            let mut found = vec![None; model.len()];
            let mut end = PageIdx(0);
            for layer in merged {
                prop_assert!(layer.range.start() >= end && !layer.range.is_empty());
                end = layer.range.end();
                for page in layer.range.pages() {
                    found[usize::try_from(page.0).expect("small")] = Some(layer.owner);
                }
            }
            prop_assert_eq!(found, model);
        }
    }
}
