//! The folder of a host's layers.
//!
//! ```text
//!   lock             held by the one daemon that uses the folder
//!   layers/ID/data   pages
//!   layers/ID/map    which pages
//!   layers/ID/note   whose it is and what it lies on; the last that is made, the first that goes
//!   layers/ID/table  of a frozen layer: the whole image's page table, in `image::wire`'s form
//! ```
//!
//! A layer's ID is the name of the image that is frozen from it. A layer is made in advance, with a
//! note that says what it will lie on. So a freeze writes nothing down. Whether such a layer was in
//! use when the daemon died does not matter: an empty layer changes nothing.
//!
//! What is under a layer is its `table`, or, before that is written, the chain of notes. A layer
//! lives as long as a disk or an image names it, and its folder as long as the layer.
//!
//! Promises: a layer's folder is found whole or reported. Folders without a note are half-made, and
//! removed. A layer that an earlier daemon left stays until the caller decides.
//!
//! Left to others: which VM a disk is of; which layers of an earlier daemon are wanted.

mod found;
mod layers;
mod note;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use rustix::fs::{FlockOperation, Mode, OFlags};
use vmfork_image::{ImageId, PageTable, wire};

pub use self::found::{BadLayer, FoundLayer, Listing};
use self::layers::DiskLayers;
pub use self::note::{BaseKind, BaseNote, Note};
use crate::background::Background;
use crate::counters::Counter;
use crate::disk::Disk;
use crate::image::{DiskImage, ImageError, WeakImage};
use crate::layer::{Keep, LayerError, LayerFiles, LayerFolder, PageState, StoredLayer};
use crate::lower::OwnPages;
use crate::raw::{RawError, RawFile};
use crate::space::{Charge, DiskSet, Floor};

/// Largest table that is read: a disk of 16 TiB.
const LIMITS: wire::Limits =
    wire::Limits { pages_max: 1 << 32, names_max: 1 << 16, runs_max: 1 << 26 };

/// How a store is used.
#[derive(Debug, Clone, Copy)]
pub struct StoreOptions {
    /// Free space that writes leave to the host. Should be several times 16 MiB, which are written
    /// between two looks.
    pub floor_bytes: u64,
}

/// A new disk.
#[derive(Debug, Clone)]
pub struct DiskSpec {
    pub name: String,
    /// Which VM it is of, in the caller's words.
    pub vm: String,
    /// At least its image's, a multiple of 512.
    pub size_bytes: u64,
    pub set: Arc<DiskSet>,
}

/// The store can't do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("`{}`", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("`{}` is in use by another daemon", path.display())]
    Locked { path: PathBuf },
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(
        "a disk of {size_bytes} bytes on an image of {image_bytes}: give at least those, and a multiple of 512"
    )]
    Size { size_bytes: u64, image_bytes: u64 },
    #[error("there is no layer {0}: `vmfork disk ls` lists them")]
    Missing(ImageId),
    #[error("layer {0} is in use by a disk")]
    Busy(ImageId),
    #[error("layer {by} lies on layer {id}")]
    Under { id: ImageId, by: ImageId },
    #[error("`{}` is damaged: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("the base {0} of the disk is not known here")]
    Base(ImageId),
}

/// What a store did since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreCounts {
    pub layers_made: u64,
    pub layers_removed: u64,
    pub tables_stored: u64,
    /// Looks at the host's free space.
    pub space_looks: u64,
    /// Writes refused because of the floor.
    pub floor_refusals: u64,
}

#[derive(Debug)]
struct Shared {
    layers: PathBuf,
    _lock: File,
    floor: Arc<Floor>,
    keep: Arc<Keep>,
    /// Layers made in advance, and notes: a freeze may come to need them.
    spares: Background,
    /// Tables.
    work: Background,
    rubbish: Arc<Background>,
    live: Mutex<BTreeMap<ImageId, Weak<StoredLayer>>>,
    images: Mutex<BTreeMap<ImageId, WeakImage>>,
    /// Held for reading while a layer is made.
    making: RwLock<()>,
    made: Counter,
    removed: Arc<Counter>,
    tables: Counter,
}

/// The layers of a host.
#[derive(Debug)]
pub struct DiskStore {
    shared: Arc<Shared>,
}

impl DiskStore {
    /// Opens the folder, and makes it if it does not exist. Removes layers that were half-made.
    ///
    /// # Errors
    /// Another daemon uses it, or it can't be read.
    pub fn open(root: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        let layers = root.join("layers");
        let failed = |source| StoreError::Folder { path: layers.clone(), source };
        make_folders(&layers).map_err(failed)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let lock =
            rustix::fs::open(root.join("lock"), flags, mode).map_err(|e| failed(e.into()))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(StoreError::Locked { path: root.to_owned() });
            }
            Err(error) => return Err(failed(error.into())),
        }
        let folder = File::open(&layers).map_err(failed)?;
        let shared = Arc::new(Shared {
            _lock: lock.into(),
            floor: Arc::new(Floor::new(folder, options.floor_bytes)),
            keep: Arc::default(),
            spares: Background::start("disk-spare").map_err(failed)?,
            work: Background::start("disk-work").map_err(failed)?,
            rubbish: Arc::new(Background::start("disk-rubbish").map_err(failed)?),
            live: Mutex::default(),
            images: Mutex::default(),
            making: RwLock::default(),
            made: Counter::default(),
            removed: Arc::default(),
            tables: Counter::default(),
            layers: layers.clone(),
        });
        let removed = found::remove_half_made(&layers).map_err(failed)?;
        shared.removed.add(removed);
        Ok(Self { shared })
    }

    /// A new disk on an image.
    ///
    /// # Errors
    /// Its size does not fit the image, or its layer can't be made.
    pub fn create(&self, spec: &DiskSpec, on: &DiskImage) -> Result<Disk, StoreError> {
        let (size_bytes, image_bytes) = (spec.size_bytes, on.size_bytes());
        if size_bytes < image_bytes || !size_bytes.is_multiple_of(512) {
            return Err(StoreError::Size { size_bytes, image_bytes });
        }
        let layers = DiskLayers {
            shared: Arc::clone(&self.shared),
            id: OnceLock::new(),
            number: AtomicU64::new(0),
            name: spec.name.clone(),
            vm: spec.vm.clone(),
            set: Arc::clone(&spec.set),
            base: BaseNote::of(on),
        };
        let lies_on = on.own().map(|own| own.id());
        let layer = layers.make_on(lies_on, size_bytes, false)?;
        self.shared.remember(on);
        Ok(Disk::new(size_bytes, layer, on.clone(), Arc::new(layers)))
    }

    /// All layers on disk, those in use too.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Listing, StoreError> {
        found::list(&self.shared.layers).map_err(|source| self.shared.failed(source))
    }

    /// What a disk had whose newest layer is `id`: to export it, or for clones. The layer stays on
    /// disk. `given` says which image a base is that only the caller knows.
    ///
    /// # Errors
    /// The layer is in use as a disk's own, or what it lies on is missing, damaged, or has changed.
    pub fn image(
        &self,
        id: ImageId,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<DiskImage, StoreError> {
        let image = self.shared.chain(Some(id), None, given)?;
        let image = image.ok_or(StoreError::Missing(id))?;
        self.shared.settle_later(image.clone());
        Ok(image)
    }

    /// The disk that an earlier daemon left, with `layer` as its newest: see [`Listing::disks`].
    /// That is its own layer again, unless clones lie on it, or it was made an image for an
    /// export. Then the disk gets a new layer on it.
    ///
    /// # Errors
    /// As [`DiskStore::image`]; or a newer layer of the disk lies on it.
    pub fn reopen(
        &self,
        layer: ImageId,
        set: &Arc<DiskSet>,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<Disk, StoreError> {
        if self.shared.live_layer(layer).is_some() {
            return Err(StoreError::Busy(layer));
        }
        let above = found::used_above(&self.shared.layers, layer);
        let above = above.map_err(|source| self.shared.failed(source))?;
        let (own, note) = self.shared.open_layer(layer, set)?;
        if let Some(by) = above {
            let of = found::read_note(&self.shared.folder(by)).ok().flatten();
            if of.is_none_or(|above| above.disk_id == note.disk_id) {
                return Err(StoreError::Under { id: layer, by });
            }
        }
        let layers = DiskLayers {
            shared: Arc::clone(&self.shared),
            id: OnceLock::from(note.disk_id),
            number: AtomicU64::new(note.number.saturating_add(1)),
            name: note.disk,
            vm: note.vm,
            set: Arc::clone(set),
            base: note.base.clone(),
        };
        let size_bytes = note.size_bytes;
        // Its table would be out of date after the first write, and so would clones.
        if above.is_some() || own.folder().path().join("table").exists() {
            let image = self.image(layer, given)?;
            let own = layers.make_on(Some(layer), size_bytes, false)?;
            return Ok(Disk::new(size_bytes, own, image, Arc::new(layers)));
        }
        let image = match self.shared.chain(note.on, Some(layer), given)? {
            Some(image) => image,
            None => base_image(&note.base, given)?,
        };
        self.shared.settle_later(image.clone());
        Ok(Disk::new(size_bytes, own, image, Arc::new(layers)))
    }

    /// Removes a layer that an earlier daemon left.
    ///
    /// # Errors
    /// It is in use, or others lie on it.
    pub fn remove(&self, id: ImageId) -> Result<(), StoreError> {
        let shared = &self.shared;
        if shared.live_layer(id).is_some() {
            return Err(StoreError::Busy(id));
        }
        if let Some(by) = self.list()?.above(id) {
            return Err(StoreError::Under { id, by });
        }
        let path = shared.folder(id);
        if !path.exists() {
            return Err(StoreError::Missing(id));
        }
        crate::layer::remove_layer(&path).map_err(|source| shared.failed(source))?;
        shared.removed.add(1);
        Ok(())
    }

    /// Removes all layers that no disk and no image names. → the removed ones. From now on, a layer
    /// that an earlier daemon left is removed like others: when nothing names it any more.
    ///
    /// # Errors
    /// The folder can't be read, or a layer not be removed.
    pub fn remove_unused(&self) -> Result<Vec<ImageId>, StoreError> {
        let shared = &self.shared;
        // A layer that is being made is not in use yet.
        let _none_is_made = shared.making.write().unwrap_or_else(PoisonError::into_inner);
        let mut removed = Vec::new();
        for id in found::ids(&shared.layers).map_err(|source| shared.failed(source))? {
            match shared.live_layer(id) {
                Some(layer) => layer.folder().this.set(false),
                None => {
                    let path = shared.folder(id);
                    crate::layer::remove_layer(&path).map_err(|source| shared.failed(source))?;
                    removed.push(id);
                    shared.removed.add(1);
                }
            }
        }
        Ok(removed)
    }

    /// From now on, no layer is removed when it is dropped: the next daemon opens them.
    pub fn keep_all(&self) {
        self.shared.keep.set(true);
    }

    /// Waits until all work in the background so far has ended: tables, next layers, unlinks.
    pub fn drain(&self) {
        // Each puts jobs into those after it.
        self.shared.spares.drain();
        self.shared.work.drain();
        self.shared.rubbish.drain();
    }

    /// What it did since it was opened.
    pub fn counts(&self) -> StoreCounts {
        let shared = &self.shared;
        StoreCounts {
            layers_made: shared.made.get(),
            layers_removed: shared.removed.get(),
            tables_stored: shared.tables.get(),
            space_looks: shared.floor.looks.get(),
            floor_refusals: shared.floor.refused.get(),
        }
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.shared.spares.end();
        self.shared.work.end();
        self.shared.rubbish.end();
    }
}

impl Shared {
    fn failed(&self, source: io::Error) -> StoreError {
        StoreError::Folder { path: self.layers.clone(), source }
    }

    fn folder(&self, id: ImageId) -> PathBuf {
        self.layers.join(id.to_string())
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<ImageId, Weak<StoredLayer>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live_layer(&self, id: ImageId) -> Option<Arc<StoredLayer>> {
        self.live().get(&id).and_then(Weak::upgrade)
    }

    fn register(&self, layer: StoredLayer) -> Arc<StoredLayer> {
        let layer = Arc::new(layer);
        let mut live = self.live();
        live.retain(|_, layer| layer.strong_count() > 0);
        live.insert(layer.id(), Arc::downgrade(&layer));
        layer
    }

    fn remember(&self, image: &DiskImage) {
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        images.retain(|_, image| image.get().is_some());
        images.insert(image.id(), image.weak());
    }

    fn live_image(&self, id: ImageId) -> Option<DiskImage> {
        let images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        images.get(&id).and_then(WeakImage::get)
    }

    /// The page table of an image and of those below it is derived and written down, oldest first.
    fn settle_later(self: &Arc<Self>, image: DiskImage) {
        let shared = Arc::downgrade(self);
        self.work.put(Box::new(move || {
            let Some(shared) = shared.upgrade() else { return };
            image.flatten();
            image.each_linked(&mut |image| shared.store_table(image));
        }));
    }

    /// Without its table on disk, an image keeps what lies below.
    ///
    /// Nothing waits for the medium, unless a layer below is durable. Then a guest was told so, and
    /// that layer may be removed only after this one is durable, too.
    fn store_table(&self, image: &DiskImage) {
        let (Some(own), Some(table)) = (image.own(), image.table()) else { return };
        let Some(lower) = image.lower() else { return };
        let stored = || -> io::Result<()> {
            // From now on it is an image: see `reopen`.
            layers::change_note(own, |note| note.frozen = true)?;
            if lower.own().is_some_and(|lower| lower.is_durable()) {
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
    fn open_layer(
        &self,
        id: ImageId,
        set: &Arc<DiskSet>,
    ) -> Result<(Arc<StoredLayer>, Note), StoreError> {
        let path = self.folder(id);
        let note = match found::read_note(&path) {
            Ok(Some(note)) => note,
            Ok(None) => return Err(StoreError::Missing(id)),
            Err(reason) => return Err(StoreError::Damaged { path, reason }),
        };
        if let Some(layer) = self.live_layer(id) {
            return Ok((layer, note));
        }
        let files = LayerFiles::open(&path)?;
        if files.map().pages() < note.size_bytes.div_ceil(vmfork_image::PAGE_BYTES) {
            let reason = format!("its map is too short for {} bytes", note.size_bytes);
            return Err(StoreError::Damaged { path, reason });
        }
        let pages = files.map().count(PageState::Written);
        let charge = Charge::new(Arc::clone(set), Arc::clone(&self.floor), pages);
        let folder = LayerFolder::new(path, Arc::clone(&self.keep), Arc::clone(&self.rubbish));
        folder.this.set(true);
        Ok((self.register(StoredLayer::new(id, files, folder, charge)), note))
    }

    /// The image whose newest layer is `top`; `None`: there is none. `above`: a layer that lies on
    /// it.
    fn chain(
        &self,
        top: Option<ImageId>,
        above: Option<ImageId>,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<Option<DiskImage>, StoreError> {
        let mut seen: BTreeSet<ImageId> = above.into_iter().collect();
        let mut open: Vec<(Arc<StoredLayer>, u64)> = Vec::new();
        let mut at = top;
        let mut base = None;
        let set = DiskSet::new(None);
        let mut image = loop {
            let Some(id) = at else {
                let Some(base) = &base else { return Ok(None) };
                break base_image(base, given)?;
            };
            if let Some(image) = self.live_image(id) {
                break image;
            }
            if !seen.insert(id) {
                let reason = format!("layer {id} lies on itself");
                return Err(StoreError::Damaged { path: self.folder(id), reason });
            }
            let (layer, note) = self.open_layer(id, &set)?;
            if !layer.folder().this.get() && !note.frozen {
                return Err(StoreError::Busy(id));
            }
            if let Some(image) = self.by_table(&layer, &note, given)? {
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

    /// The image of a layer whose table is stored.
    fn by_table(
        &self,
        layer: &Arc<StoredLayer>,
        note: &Note,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<Option<DiskImage>, StoreError> {
        let path = layer.folder().path().join("table");
        let Some(table) = read_table(&path)? else { return Ok(None) };
        let set = DiskSet::new(None);
        let base = base_image(&note.base, given)?;
        let mut owners: BTreeMap<ImageId, Arc<dyn OwnPages>> =
            base.owners().map(|(id, own)| (id, Arc::clone(own))).collect();
        for (id, _) in table.owners().iter() {
            if id == layer.id() {
                owners.insert(id, Arc::<StoredLayer>::clone(layer));
            } else if let Entry::Vacant(place) = owners.entry(id) {
                let (own, _) = self.open_layer(id, &set)?;
                place.insert(own);
            }
        }
        let (own, base) = (Arc::clone(layer), base.base().clone());
        let owner = |id| owners.get(&id).cloned();
        Ok(Some(DiskImage::with_table(own, base, note.size_bytes, table, owner)?))
    }
}

/// A base, by what a note says of it.
fn base_image(
    note: &BaseNote,
    given: &dyn Fn(ImageId) -> Option<DiskImage>,
) -> Result<DiskImage, StoreError> {
    match &note.kind {
        BaseKind::Blank => Ok(DiskImage::blank_as(note.id, note.size_bytes)),
        BaseKind::Given => given(note.id).ok_or(StoreError::Base(note.id)),
        BaseKind::Raw { path, stamp } => {
            let file = RawFile::open(path).map_err(ImageError::Raw)?;
            if file.stamp() != *stamp {
                let path = path.clone();
                return Err(ImageError::Raw(RawError::Changed { path }).into());
            }
            Ok(DiskImage::raw_as(note.id, file)?)
        }
    }
}

/// `None`: there is none.
fn read_table(path: &Path) -> Result<Option<PageTable>, StoreError> {
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

fn make_folders(layers: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    // Layers hold guests' secrets.
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(layers)
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
