//! Pages of several layers are copied into one layer, before a table that names it is made.
//!
//! ```text
//!   lower image's table   A A B . C D D     own layer of the image: E
//!   without a merge       A A B E C D D
//!   with one              M M M E M D D     M has what shows of A, B and C
//! ```
//!
//! Nothing that exists is changed. An image whose table was made before keeps A, B and C. They end
//! with the last such image.
//!
//! Promises: killed at any point, the next daemon finds tables whose layers are whole. M has its
//! note after its pages, and is named after its note. Without space for the copy, nothing changes
//! but that there are more layers.
//!
//! Left to others: which layers ([`crate::merging`]); when ([`super::Shared::settle_later`]).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vmfork_image::{ImageId, PageIdx, PageRange};

use super::layers::write_note;
use super::{Shared, found};
use crate::image::{DiskImage, Flat, new_id};
use crate::layer::{LayerError, LayerFiles, LayerFolder, PageState, StoredLayer};
use crate::lower::OwnPages;
use crate::merging::{Named, plan};
use crate::space::Charge;

/// Pages that are copied at a time: 1 MiB.
const COPY_PAGES: u64 = 256;

/// The merged layers of a store, and whether a guest relies on the medium.
#[derive(Debug, Default)]
pub(super) struct MergedLayers {
    /// From now on, each is durable before a table names it.
    durable: bool,
    /// Those that were made before.
    unsynced: Vec<Weak<StoredLayer>>,
}

fn lock(merged: &Mutex<MergedLayers>) -> MutexGuard<'_, MergedLayers> {
    merged.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The same content of `image` from fewer layers, if there are too many. Those that it makes
    /// are put into `made`: their pages are not on the account yet.
    pub(super) fn merge(
        &self,
        image: &DiskImage,
        mut flat: Flat,
        made: &mut Vec<Arc<StoredLayer>>,
    ) -> Flat {
        let Some(own) = image.own() else { return flat };
        for ids in plan(&self.named_below(own, &flat), self.limits) {
            match self.merge_into_one(own, &flat, &ids) {
                Ok((merged, layer)) => {
                    self.merges.add(1);
                    self.merged_pages.add(layer.map().count(PageState::Written));
                    made.push(layer);
                    flat = merged;
                }
                Err(error) => {
                    let (image, layers) = (image.id(), ids.len());
                    tracing::warn!(%image, layers, %error, "layers can't be merged yet");
                }
            }
        }
        flat
    }

    /// The layers that a table names, without the image's own: its folder has the table.
    fn named_below(&self, own: &StoredLayer, flat: &Flat) -> Vec<Named> {
        let live = self.live();
        let layer = |id: ImageId| live.get(&id).and_then(Weak::upgrade);
        let below = flat.table.owners().iter().filter(|(id, _)| *id != own.id());
        below
            .filter_map(|(id, shown)| {
                let layer = layer(id)?;
                let (ours, written) =
                    (layer.disk() == own.disk(), layer.map().count(PageState::Written));
                Some(Named { id, ours, written, shown })
            })
            .collect()
    }

    fn merge_into_one(
        &self,
        own: &StoredLayer,
        flat: &Flat,
        ids: &[ImageId],
    ) -> io::Result<(Flat, Arc<StoredLayer>)> {
        let mut pages: Vec<(PageRange, &Arc<dyn OwnPages>)> = Vec::new();
        for id in ids {
            let source = flat.owners.get(id).ok_or(io::ErrorKind::NotFound)?;
            pages.extend(flat.table.pages_of(*id).map(|run| (run, source)));
        }
        pages.sort_unstable_by_key(|(run, _)| run.start());
        let layer = self.copied(own, &pages).map_err(io::Error::other)?;
        self.make_durable(&layer)?;
        let runs: Vec<PageRange> = pages.into_iter().map(|(run, _)| run).collect();
        let merged = flat.with(&layer, &runs).ok_or(io::ErrorKind::InvalidData)?;
        Ok((merged, layer))
    }

    /// A new layer that has these pages.
    fn copied(
        &self,
        own: &StoredLayer,
        pages: &[(PageRange, &Arc<dyn OwnPages>)],
    ) -> Result<Arc<StoredLayer>, LayerError> {
        let id = new_id().map_err(LayerError::Name)?;
        let _making = self.being_made(id);
        let path = self.folder(id);
        let failed = |source| LayerError::File { path: path.clone(), source };
        let note = found::read_note(own.folder().path()).map_err(|flaw| failed(flaw.into_io()))?;
        let mut note = note.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        (note.on, note.frozen, note.spare, note.merged) = (None, true, false, true);
        super::make_folders(&path).map_err(failed)?;
        // From here on, what fails takes the folder with it.
        let folder =
            LayerFolder::new(path.clone(), Arc::clone(&self.keep), Arc::clone(&self.rubbish));
        let files = LayerFiles::create(&path, own.map().pages())?;
        let charge = Charge::new(Arc::clone(own.charge().set()), Arc::clone(&self.floor), 0);
        let layer = StoredLayer::new((id, own.disk()), files, folder, charge);
        let mut bytes = Vec::new();
        for (run, source) in pages {
            let mut rest = *run;
            while !rest.is_empty() {
                let part = rest.until_page(PageIdx(rest.start().0 + COPY_PAGES));
                bytes.resize(usize::try_from(part.byte_len()).unwrap_or(usize::MAX), 0);
                source.read(part, &mut bytes).map_err(failed)?;
                layer.copy_in(part, &bytes).map_err(failed)?;
                rest = rest.from_page(part.end());
            }
        }
        // A table that stays names layers that stay.
        layer.folder().this.set(own.folder().this.get());
        write_note(&path, &note, false).map_err(failed)?;
        self.made.add(1);
        Ok(self.register(layer))
    }

    /// What was acknowledged as durable is so in a merged layer, before the layers go that had it.
    fn make_durable(&self, layer: &Arc<StoredLayer>) -> io::Result<()> {
        let mut merged = lock(&self.merged);
        if merged.durable {
            drop(merged);
            return layer.sync();
        }
        merged.unsynced.retain(|layer| layer.strong_count() > 0);
        merged.unsynced.push(Arc::downgrade(layer));
        Ok(())
    }

    /// Merged layers are durable from now on; those that exist may not be yet.
    pub(super) fn rely_on_merged(&self) {
        lock(&self.merged).durable = true;
    }

    /// Merged layers survive the host, those that are made from now on too.
    ///
    /// # Errors
    /// The medium's. The next call fails, too.
    pub(super) fn sync_merged(&self) -> io::Result<()> {
        // Another disk's sync waits: it needs the same layers.
        let mut merged = lock(&self.merged);
        merged.durable = true;
        while let Some(layer) = merged.unsynced.last() {
            if let Some(layer) = layer.upgrade() {
                layer.sync()?;
            }
            merged.unsynced.pop();
        }
        Ok(())
    }
}
