//! The folder of a host's layers.
//!
//! ```text
//!   lock             held by the one daemon that uses the folder
//!   bases/ID         a file that disks begin with: a hard link
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
//! A disk that is frozen on and on would leave a layer each time. So in the background, before an
//! image's table is made, the pages of many layers are copied into one ([`merge`]).
//!
//! Promises: a layer's folder is found whole or reported. Folders without a note are half-made, and
//! removed. A layer that an earlier daemon left stays until the caller decides.
//!
//! Left to others: which VM a disk is of; which layers of an earlier daemon are wanted.

mod bases;
mod found;
mod layers;
mod merge;
mod note;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockWriteGuard, Weak};

use rustix::fs::{FlockOperation, Mode, OFlags};
use vmfork_image::{ImageId, PAGE_BYTES, PageTable, wire};

use self::bases::Bases;
pub use self::found::{BadLayer, FoundLayer, Listing};
use self::layers::DiskLayers;
use self::merge::MergedLayers;
pub use self::note::{BaseKind, BaseNote, Note};
use crate::background::Background;
use crate::counters::Counter;
use crate::disk::Disk;
use crate::image::{DiskImage, ImageError, WeakImage};
use crate::layer::{Keep, LayerError, LayerFiles, LayerFolder, PageState, StoredLayer};
use crate::lower::OwnPages;
use crate::merging::MergeLimits;
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
    #[error("there is no layer {0}")]
    Missing(ImageId),
    #[error("there is no disk {0}: `vmfork disk ls` lists them")]
    NoDisk(ImageId),
    #[error("{0} is in use")]
    Busy(ImageId),
    #[error("layer {by} lies on layer {id}")]
    Under { id: ImageId, by: ImageId },
    #[error("`{}` is damaged: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error(
        "the disk {0} that it began with was in a stored snapshot, which is not in the store any more"
    )]
    Base(ImageId),
    #[error(
        "layer {0} has pages of several layers, and is no disk's: `vmfork disk ls` lists disks"
    )]
    Merged(ImageId),
}

/// A disk in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundDisk {
    pub id: ImageId,
    /// Its newest layer: see [`DiskStore::image`].
    pub newest: ImageId,
    pub name: String,
    /// Which VM it is of, in the caller's words.
    pub vm: String,
    pub size_bytes: u64,
    /// What its own layers hold. They may lie on layers of other disks.
    pub written_bytes: u64,
    /// [`DiskStore::create`] or [`DiskStore::reopen`] gave it, and it was not dropped yet.
    pub in_use: bool,
    /// See [`Listing::is_suspect`].
    pub is_suspect: bool,
}

/// What a store did since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreCounts {
    pub layers_made: u64,
    pub layers_removed: u64,
    pub tables_stored: u64,
    /// Layers that were made of several others.
    pub merges: u64,
    /// Bytes that were copied for that.
    pub merged_bytes: u64,
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
    bases: Bases,
    live: Mutex<BTreeMap<ImageId, Weak<StoredLayer>>>,
    /// Disks that are open, by ID.
    open: Mutex<BTreeMap<ImageId, Weak<DiskLayers>>>,
    images: Mutex<BTreeMap<ImageId, WeakImage>>,
    limits: MergeLimits,
    merged: Mutex<MergedLayers>,
    /// Held for reading while a layer is made.
    making: RwLock<()>,
    made: Counter,
    removed: Arc<Counter>,
    tables: Counter,
    merges: Counter,
    merged_pages: Counter,
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
        Self::open_with(root, options, MergeLimits::default())
    }

    fn open_with(
        root: &Path,
        options: StoreOptions,
        limits: MergeLimits,
    ) -> Result<Self, StoreError> {
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
        let bases_folder = root.join("bases");
        make_folders(&bases_folder).map_err(failed)?;
        let keep = Arc::<Keep>::default();
        let rubbish = Arc::new(Background::start("disk-rubbish").map_err(failed)?);
        let bases = Bases::new(bases_folder, Arc::clone(&keep), Arc::clone(&rubbish));
        let shared = Arc::new(Shared {
            _lock: lock.into(),
            floor: Arc::new(Floor::new(folder, options.floor_bytes)),
            keep,
            spares: Background::start("disk-spare").map_err(failed)?,
            work: Background::start("disk-work").map_err(failed)?,
            rubbish,
            bases,
            live: Mutex::default(),
            open: Mutex::default(),
            images: Mutex::default(),
            limits,
            merged: Mutex::default(),
            making: RwLock::default(),
            made: Counter::default(),
            removed: Arc::default(),
            tables: Counter::default(),
            merges: Counter::default(),
            merged_pages: Counter::default(),
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
        Ok(Disk::new(size_bytes, layer, on.clone(), self.shared.opened(layers)))
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
        self.image_for(id, &DiskSet::new(None), given)
    }

    /// The layers that are opened count on `set`.
    fn image_for(
        &self,
        id: ImageId,
        set: &Arc<DiskSet>,
        given: &dyn Fn(ImageId) -> Option<DiskImage>,
    ) -> Result<DiskImage, StoreError> {
        let image = self.shared.chain(Some(id), None, set, given)?;
        let image = image.ok_or(StoreError::Missing(id))?;
        self.shared.settle_later(image.clone());
        Ok(image)
    }

    /// The disk that an earlier daemon left, with `layer` as its newest: see [`Listing::disks`].
    /// That is its own layer again, unless clones lie on it, or it was made an image for an
    /// export. Then the disk gets a new layer on it. What it lies on counts on `set`, too, unless
    /// that is open already.
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
        if note.merged {
            return Err(StoreError::Merged(layer));
        }
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
            let image = self.image_for(layer, set, given)?;
            let own = layers.make_on(Some(layer), size_bytes, false)?;
            return Ok(Disk::new(size_bytes, own, image, self.shared.opened(layers)));
        }
        let image = match self.shared.chain(note.on, Some(layer), set, given)? {
            Some(image) => image,
            None => self.shared.base_image(&note.base, given)?,
        };
        self.shared.settle_later(image.clone());
        Ok(Disk::new(size_bytes, own, image, self.shared.opened(layers)))
    }

    /// What a file has, for disks that begin with it. It gets a name in the store: `from` may go,
    /// or be replaced, and the next daemon still finds it.
    ///
    /// # Errors
    /// It can't be read, or is no regular file.
    pub fn base(&self, from: &Path) -> Result<DiskImage, ImageError> {
        self.shared.bases.image(from)
    }

    /// The disks, in use or left by an earlier daemon, in the order of their IDs. What is damaged
    /// is in [`DiskStore::list`].
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn disks(&self) -> Result<Vec<FoundDisk>, StoreError> {
        Ok(self.disks_in(&self.list()?))
    }

    /// The disks of a listing, as [`DiskStore::disks`].
    pub fn disks_in(&self, listing: &Listing) -> Vec<FoundDisk> {
        let found = listing.disks().into_iter().map(|newest| {
            let own = |layer: &&FoundLayer| layer.note.disk_id == newest.note.disk_id;
            let layers = listing.layers.values().filter(own);
            FoundDisk {
                id: newest.note.disk_id,
                newest: newest.id,
                name: newest.note.disk.clone(),
                vm: newest.note.vm.clone(),
                size_bytes: newest.note.size_bytes,
                written_bytes: layers.map(|layer| layer.written_bytes).sum(),
                in_use: self.shared.is_in_use(&newest.note.disk_id),
                is_suspect: listing.is_suspect(newest),
            }
        });
        found.collect()
    }

    /// Removes a disk that an earlier daemon left, and what only it needs; or the damaged layer of
    /// that ID.
    ///
    /// # Errors
    /// It is in use, or there is none.
    pub fn remove_disk(&self, id: ImageId) -> Result<(), StoreError> {
        // What was read a moment ago may have work left.
        self.drain();
        let _none_is_made = self.shared.none_is_made();
        let listing = self.list()?;
        let damaged = |bad: &BadLayer| bad.folder == self.shared.folder(id);
        if listing.bad.iter().any(damaged) {
            if self.shared.is_in_use(&id) || self.shared.live_layer(id).is_some() {
                return Err(StoreError::Busy(id));
            }
            let path = self.shared.folder(id);
            return crate::layer::remove_layer(&path).map_err(|source| self.shared.failed(source));
        }
        let newest = listing.disks().into_iter().find(|newest| newest.note.disk_id == id);
        let newest = newest.ok_or(StoreError::NoDisk(id))?.id;
        // It may be read, too.
        if self.shared.is_in_use(&id) || self.shared.live_layer(newest).is_some() {
            return Err(StoreError::Busy(id));
        }
        self.shared.remove_but(&listing, Some(id)).map(drop)
    }

    /// Removes what no disk needs: layers made in advance, and those of disks that had ended.
    /// → how many layers. From now on, the layers of disks that were opened again are removed like
    /// others, when nothing names them any more. What a disk needs that was left stays.
    ///
    /// # Errors
    /// The folder can't be read, or a layer not be removed.
    pub fn remove_unneeded(&self) -> Result<u64, StoreError> {
        let _none_is_made = self.shared.none_is_made();
        self.shared.remove_but(&self.list()?, None)
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
            merges: shared.merges.get(),
            merged_bytes: shared.merged_pages.get() * PAGE_BYTES,
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
    /// A layer that is being made is not in use yet.
    fn none_is_made(&self) -> RwLockWriteGuard<'_, ()> {
        self.making.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a disk is open.
    fn is_in_use(&self, disk: &ImageId) -> bool {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, disk| disk.strong_count() > 0);
        open.contains_key(disk)
    }

    /// Removes the layers that neither live nor are needed by a disk that is to stay: all but
    /// `goes`. What a damaged layer needs is not known: while there is one, no more than layers of
    /// that disk are removed.
    fn remove_but(&self, listing: &Listing, goes: Option<ImageId>) -> Result<u64, StoreError> {
        let disks = listing.disks();
        let stay = disks.iter().filter(|disk| Some(disk.note.disk_id) != goes);
        let needed = listing.needed_by(stay.map(|disk| disk.id));
        let mut removed = 0;
        // Those above first.
        let mut layers: Vec<_> = listing.layers.values().collect();
        layers.sort_by_key(|layer| std::cmp::Reverse(layer.note.number));
        let is_gone = |layer: &&FoundLayer| {
            let known = listing.bad.is_empty() || Some(layer.note.disk_id) == goes;
            known && !needed.contains(&layer.id) && self.live_layer(layer.id).is_none()
        };
        let gone: Vec<&FoundLayer> = layers.into_iter().filter(is_gone).collect();
        for layer in &gone {
            let path = self.folder(layer.id);
            crate::layer::remove_layer(&path).map_err(|source| self.failed(source))?;
            self.removed.add(1);
            removed += 1;
        }
        self.release(listing, goes);
        let stay =
            listing.layers.values().filter(|layer| !gone.iter().any(|one| one.id == layer.id));
        let notes = stay.map(|layer| &layer.note);
        // A note that can't be read may name one.
        if listing.bad.is_empty() {
            self.bases.remove_unnamed(notes).map_err(|source| self.failed(source))?;
        }
        Ok(removed)
    }

    /// Live layers that no left disk needs, but for the one that goes, end with their last name.
    fn release(&self, listing: &Listing, goes: Option<ImageId>) {
        if !listing.bad.is_empty() {
            return;
        }
        let disks = listing.disks();
        let left = disks.iter().filter(|disk| {
            let id = disk.note.disk_id;
            Some(id) != goes && !self.is_in_use(&id)
        });
        let needed = listing.needed_by(left.map(|disk| disk.id));
        // The table that names a merged layer may not be stored yet.
        let is_named = |id: &ImageId| listing.layers.values().any(|layer| layer.names.contains(id));
        let settled = |layer: &&FoundLayer| !layer.note.merged || is_named(&layer.id);
        let layers = listing.layers.values().filter(settled);
        for id in layers.map(|layer| &layer.id).filter(|id| !needed.contains(id)) {
            if let Some(layer) = self.live_layer(*id) {
                layer.folder().this.set(false);
            }
        }
    }

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

    /// The layers of a disk that is in use from now on.
    fn opened(&self, layers: DiskLayers) -> Arc<DiskLayers> {
        let layers = Arc::new(layers);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, layers| layers.strong_count() > 0);
        if let Some(id) = layers.id.get() {
            open.insert(*id, Arc::downgrade(&layers));
        }
        drop(open);
        layers
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
    fn chain(
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
    fn base_image(
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
