//! Images of the layers on disk: by an image's page table, or by the chain of notes.
//!
//! A table is derived and stored in the background. From then on, the image needs only the layers
//! that its table names.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

use vmfork_image::{ImageId, PAGE_BYTES, PageTable, wire};

use super::note::{BaseKind, BaseNote, Note};
use super::{Shared, StoreError, found, layers};
use crate::image::{DiskImage, ImageError};
use crate::layer::{LayerFiles, LayerFolder, PageState, StoredLayer};
use crate::lower::OwnPages;
use crate::raw::{RawError, RawFile};
use crate::space::{Charge, DiskSet};

/// Largest table that is read: a disk of 16 TiB.
const LIMITS: wire::Limits =
    wire::Limits { pages_max: 1 << 32, names_max: 1 << 16, runs_max: 1 << 26 };

impl Shared {
    /// The page table of an image and of those below it is derived and written down, oldest first.
    pub(super) fn settle_later(self: &Arc<Self>, image: DiskImage) {
        let shared = Arc::downgrade(self);
        self.work.put(Box::new(move || {
            let Some(shared) = shared.upgrade() else { return };
            let mut merged = Vec::new();
            image.flatten_by(&mut |image, flat| shared.merge(image, flat, &mut merged));
            let durable = merged.iter().any(|layer| layer.is_durable());
            image.each_linked(&mut |image| shared.store_table(image, durable));
            // The layers that they replace are off the account by now, if nothing else names them.
            merged.iter().for_each(|layer| layer.count_copies());
        }));
    }

    /// Without its table on disk, an image keeps what lies below.
    ///
    /// Nothing waits for the medium, unless a layer below is durable. Then a guest was told so, and
    /// that layer may be removed only after this one is durable, too. `durable`: so is a layer that
    /// others were merged into.
    fn store_table(&self, image: &DiskImage, durable: bool) {
        let (Some(own), Some(table)) = (image.own(), image.table()) else { return };
        let Some(lower) = image.lower() else { return };
        let stored = || -> io::Result<()> {
            // From now on it is an image: see `reopen`.
            layers::change_note(own, |note| note.frozen = true)?;
            if durable || lower.own().is_some_and(|lower| lower.is_durable()) {
                own.sync()?;
            }
            let name = |id: ImageId| wire::ImageName { host: 0, image: id.get() };
            let bytes = wire::encode(table, name);
            let _writing = own.folder().writing();
            let path = own.folder().path();
            crate::layer::write_atomically(path, "table", &bytes, own.is_durable())
        };
        match stored() {
            Ok(()) => {
                self.tables.add(1);
                image.settle();
            }
            Err(error) => tracing::warn!(image = %image.id(), %error, "a table is not stored"),
        }
    }

    /// An earlier daemon's layer, which stays on disk until the caller decides.
    pub(super) fn open_layer(
        &self,
        id: ImageId,
        set: &Arc<DiskSet>,
    ) -> Result<(Arc<StoredLayer>, Note), StoreError> {
        let path = self.folder(id);
        let note = match found::read_note(&path) {
            Ok(Some(note)) => note,
            Ok(None) => return Err(StoreError::Missing(id)),
            Err(found::Flaw::Damaged(reason)) => {
                return Err(StoreError::Damaged { path, reason });
            }
            Err(found::Flaw::Unread(reason)) => return Err(StoreError::Unread { path, reason }),
        };
        if let Some(layer) = self.live_layer(id) {
            return Ok((layer, note));
        }
        let files = LayerFiles::open(&path)?;
        if files.map().pages() < note.size_bytes.div_ceil(PAGE_BYTES) {
            let reason = format!("its map is too short for {} bytes", note.size_bytes);
            return Err(StoreError::Damaged { path, reason });
        }
        let pages = files.map().count(PageState::Written);
        let charge = Charge::new(Arc::clone(set), Arc::clone(&self.floor), pages);
        let folder = LayerFolder::new(path, Arc::clone(&self.keep), Arc::clone(&self.rubbish));
        folder.this.set(true);
        // It may be durable.
        self.rely_on_merged();
        let layer = StoredLayer::new((id, note.disk_id), files, folder, charge);
        Ok((self.register(layer), note))
    }

    /// The image whose newest layer is `top`; `None`: there is none. `above`: a layer that lies on
    /// it.
    pub(super) fn chain(
        &self,
        top: Option<ImageId>,
        above: Option<ImageId>,
        set: &Arc<DiskSet>,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<Option<DiskImage>, StoreError> {
        let mut seen: BTreeSet<ImageId> = above.into_iter().collect();
        let mut open: Vec<(Arc<StoredLayer>, u64)> = Vec::new();
        let mut at = top;
        let mut base = None;
        let mut image = loop {
            let Some(id) = at else {
                let Some(base) = &base else { return Ok(None) };
                break self.base_image(base, given)?;
            };
            if let Some(image) = self.live_image(id) {
                break image;
            }
            if !seen.insert(id) {
                let reason = format!("layer {id} lies on itself");
                return Err(StoreError::Damaged { path: self.folder(id), reason });
            }
            let (layer, note) = self.open_layer(id, set)?;
            if note.merged {
                return Err(StoreError::Merged(id));
            }
            if !layer.folder().this.get() && !note.frozen {
                return Err(StoreError::Busy(id));
            }
            if let Some(image) = self.by_table(&layer, &note, set, given)? {
                break image;
            }
            open.push((layer, note.size_bytes));
            (at, base) = (note.on, Some(note.base));
        };
        while let Some((layer, size_bytes)) = open.pop() {
            image = DiskImage::frozen(layer, image, size_bytes);
        }
        self.remember(&image);
        Ok(Some(image))
    }

    /// A base, by what a note says of it.
    pub(super) fn base_image(
        &self,
        note: &BaseNote,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<DiskImage, StoreError> {
        match &note.kind {
            BaseKind::Blank => Ok(DiskImage::blank_as(note.id, note.size_bytes)),
            BaseKind::Given => given(note.id).ok_or(StoreError::Base(note.id)),
            BaseKind::Raw { path, stamp } => {
                let path = self.bases.now_at(path);
                let file = RawFile::open(&path).map_err(ImageError::Raw)?;
                if file.stamp() != *stamp {
                    return Err(ImageError::Raw(RawError::Changed { path }).into());
                }
                Ok(DiskImage::raw_as(note.id, file)?)
            }
        }
    }

    /// The image of a layer whose table is stored.
    fn by_table(
        &self,
        layer: &Arc<StoredLayer>,
        note: &Note,
        set: &Arc<DiskSet>,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<Option<DiskImage>, StoreError> {
        let path = layer.folder().path().join("table");
        let Some(table) = read_table(&path)? else { return Ok(None) };
        let base = self.base_image(&note.base, given)?;
        let mut owners: BTreeMap<ImageId, Arc<dyn OwnPages>> =
            base.owners().map(|(id, own)| (id, Arc::clone(own))).collect();
        for (id, _) in table.owners().iter() {
            if id == layer.id() {
                owners.insert(id, Arc::<StoredLayer>::clone(layer));
            } else if let Entry::Vacant(place) = owners.entry(id) {
                let (own, _) = self.open_layer(id, set)?;
                place.insert(own);
            }
        }
        let (own, base) = (Arc::clone(layer), base.base().clone());
        let owner = |id| owners.get(&id).cloned();
        Ok(Some(DiskImage::with_table(own, base, note.size_bytes, table, owner)?))
    }
}

/// `None`: there is none.
pub(super) fn read_table(path: &Path) -> Result<Option<PageTable>, StoreError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(StoreError::Folder { path: path.to_owned(), source }),
    };
    let damaged = |reason| StoreError::Damaged { path: path.to_owned(), reason };
    let coded = wire::decode(&bytes, LIMITS).map_err(|flaw| damaged(flaw.to_string()))?;
    let table = coded.to_table(|name| ImageId::new(name.image));
    Ok(Some(table.map_err(|name| damaged(format!("no image is called {name}")))?))
}
