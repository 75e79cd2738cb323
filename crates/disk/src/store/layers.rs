//! The layers of one disk: made, grown, written down.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use vmfork_image::{ImageId, PAGE_BYTES};

use super::note::{BaseNote, Note, VERSION};
use super::{Shared, found};
use crate::background::Job;
use crate::counters::DiskCounters;
use crate::disk::Layers;
use crate::image::{DiskImage, new_id};
use crate::layer::{LayerError, LayerFiles, LayerFolder, StoredLayer, write_atomically};
use crate::space::{Charge, DiskSet};

/// What the layers of one disk have in common.
#[derive(Debug)]
pub(super) struct DiskLayers {
    pub(super) shared: Arc<Shared>,
    /// That of the first layer.
    pub(super) id: OnceLock<ImageId>,
    /// That of the next layer.
    pub(super) number: AtomicU64,
    pub(super) name: String,
    pub(super) vm: String,
    pub(super) set: Arc<DiskSet>,
    pub(super) base: BaseNote,
}

impl DiskLayers {
    /// A new layer. It survives the host after its first sync.
    pub(super) fn make_on(
        &self,
        on: Option<ImageId>,
        size_bytes: u64,
        spare: bool,
    ) -> Result<Arc<StoredLayer>, LayerError> {
        let id = new_id().map_err(LayerError::Name)?;
        let _making = self.shared.being_made(id);
        let path = self.shared.folder(id);
        let failed = |source| LayerError::File { path: path.clone(), source };
        super::make_folders(&path).map_err(failed)?;
        // From here on, what fails takes the folder with it.
        let (keep, rubbish) = (Arc::clone(&self.shared.keep), Arc::clone(&self.shared.rubbish));
        let folder = LayerFolder::new(path.clone(), keep, rubbish);
        let files = LayerFiles::create(&path, size_bytes.div_ceil(PAGE_BYTES))?;
        let note = Note {
            version: VERSION,
            disk_id: *self.id.get_or_init(|| id),
            number: self.number.fetch_add(1, Ordering::Relaxed),
            disk: self.name.clone(),
            vm: self.vm.clone(),
            size_bytes,
            on,
            base: self.base.clone(),
            frozen: false,
            spare,
            merged: false,
        };
        write_note(&path, &note, false).map_err(failed)?;
        self.shared.made.add(1);
        let charge = Charge::new(Arc::clone(&self.set), Arc::clone(&self.shared.floor), 0);
        let layer = StoredLayer::new((id, note.disk_id), files, folder, charge);
        Ok(self.shared.register(layer))
    }
}

/// A layer is being made until this is dropped. By then it is registered, or its folder goes.
pub(super) struct BeingMade<'a> {
    shared: &'a Shared,
    id: ImageId,
}

impl Shared {
    pub(super) fn being_made(&self, id: ImageId) -> BeingMade<'_> {
        self.making().insert(id);
        BeingMade { shared: self, id }
    }

    pub(super) fn is_being_made(&self, id: ImageId) -> bool {
        self.making().contains(&id)
    }

    fn making(&self) -> MutexGuard<'_, BTreeSet<ImageId>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for BeingMade<'_> {
    fn drop(&mut self) {
        self.shared.making().remove(&self.id);
    }
}

impl Layers for DiskLayers {
    fn id(&self) -> Option<ImageId> {
        self.id.get().copied()
    }

    fn make(
        &self,
        on: ImageId,
        size_bytes: u64,
        spare: bool,
    ) -> Result<Arc<StoredLayer>, LayerError> {
        self.make_on(Some(on), size_bytes, spare)
    }

    fn grow(&self, layer: &StoredLayer, size_bytes: u64) -> Result<Arc<StoredLayer>, LayerError> {
        let failed = |source| LayerError::File { path: layer.folder().path().to_owned(), source };
        let grown = layer.grown(size_bytes)?;
        // The files first: a note may say less than there is, never more. Also after a crash of
        // the host, if the note survives that.
        if layer.is_durable() {
            grown.sync().map_err(failed)?;
        }
        let changed = change_note(layer, |note| {
            // The disk has it: else an older layer with the old size would pass for its newest.
            note.spare = false;
            note.size_bytes = size_bytes;
        });
        changed.map_err(failed)?;
        Ok(self.shared.register(grown))
    }

    fn frozen(&self, image: DiskImage, own: Arc<StoredLayer>) {
        let shared = Arc::downgrade(&self.shared);
        // Before the layer after the next is made: the notes are short, and a table is not.
        self.shared.spares.put(Box::new(move || {
            let Some(shared) = shared.upgrade() else { return };
            shared.remember(&image);
            // A frozen layer without one above it is a disk's newest: see `Listing::disks`.
            let folders = [(Some(own), false), (image.own().cloned(), true)];
            for (layer, frozen) in folders {
                let Some(layer) = layer else { continue };
                let changed = change_note(&layer, |note| {
                    (note.spare, note.frozen) = (false, frozen);
                });
                if let Err(error) = changed {
                    tracing::warn!(layer = %layer.id(), %error, "a layer's note is out of date");
                }
            }
            shared.settle_later(image);
        }));
    }

    fn soon(&self, job: Job) {
        self.shared.spares.put(job);
    }

    fn counters(&self) -> Arc<DiskCounters> {
        self.shared.totals.open()
    }

    fn sync_merged(&self) -> io::Result<()> {
        self.shared.sync_merged()
    }
}

pub(super) fn write_note(folder: &Path, note: &Note, durable: bool) -> io::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(note)?;
    bytes.push(b'\n');
    write_atomically(folder, "note", &bytes, durable)
}

/// Writes a layer's note again, if it changes.
pub(super) fn change_note(layer: &StoredLayer, change: impl FnOnce(&mut Note)) -> io::Result<()> {
    // A growth and a freeze may both change it.
    let _writing = layer.folder().writing();
    let folder = layer.folder().path();
    let note = found::read_note(folder).map_err(found::Flaw::into_io)?;
    let old = note.ok_or(io::ErrorKind::NotFound)?;
    let mut new = old.clone();
    change(&mut new);
    if new == old { Ok(()) } else { write_note(folder, &new, layer.is_durable()) }
}
