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

mod account;
mod bases;
mod found;
mod images;
mod layers;
mod merge;
mod note;
mod removal;
mod totals;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::fs::{FlockOperation, Mode, OFlags};
use vmfork_image::{ImageId, PAGE_BYTES};

use self::bases::Bases;
pub use self::found::{BadLayer, FoundLayer, Listing};
use self::layers::DiskLayers;
use self::merge::MergedLayers;
pub use self::note::{BaseKind, BaseNote, Note};
use crate::background::Background;
use crate::counters::{Counter, Totals};
use crate::disk::Disk;
use crate::image::{DiskImage, ImageError, WeakImage};
use crate::layer::{Keep, LayerError, StoredLayer};
use crate::merging::MergeLimits;
use crate::space::{DiskSet, Floor};

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
    #[error("`{}` {reason}", path.display())]
    Unread { path: PathBuf, reason: String },
    #[error(
        "the disk {0} that it began with is not here: it was a stored snapshot or an object, which this host does not know any more, or was on another host"
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
    /// Layers that are being made: not in use yet, and not to be removed.
    making: Mutex<BTreeSet<ImageId>>,
    /// Held while layers are removed.
    removing: Mutex<()>,
    made: Counter,
    removed: Arc<Counter>,
    tables: Counter,
    merges: Counter,
    merged_pages: Counter,
    totals: Totals,
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
            making: Mutex::default(),
            removing: Mutex::default(),
            made: Counter::default(),
            removed: Arc::default(),
            tables: Counter::default(),
            merges: Counter::default(),
            merged_pages: Counter::default(),
            totals: Totals::default(),
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
    /// Whether a disk is open.
    fn is_in_use(&self, disk: &ImageId) -> bool {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, disk| disk.strong_count() > 0);
        open.contains_key(disk)
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
}

fn make_folders(layers: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    // Layers hold guests' secrets.
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(layers)
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
