//! Guest images in stores of snapshots: pushed to one, and pulled from it.
//!
//! ```text
//!   push  kernel, initrd, root ─► disks of a stored snapshot, whose `vm` has the metadata
//!   seed  the same disks, in this host's own store: hosts of its cluster pull from there
//!   pull  adopt ─► read kernel, initrd ─► the image is there, its root a stored disk
//!                                             └─ all chunks here ─► its root is a file
//! ```
//!
//! Promises: a VM boots from an image as soon as its kernel and initrd are here. What it reads of
//! the root was verified, chunk by chunk. Snapshots are listed without such images.
//!
//! Left to others: the folder of images (`vmfork-guest-image`), disks of VMs.

use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::MutexGuard;
use vmfork_api::{ErrorBody, SCHEMA, TransferReply, TransferRequest};
use vmfork_disk::Lower as _;
use vmfork_guest_image::{Arrival, INITRD_FILE, ImageFiles, KERNEL_FILE, Metadata, ROOT_FILE};
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};
use vmfork_store::{
    BlobError, Compression, Draft, Extent, ImageDraft, KeyOf, Role, SnapshotId, StoreError,
    VerifiedChunk, Work, is_origin,
};

use crate::create::{CHUNK_PAGES, ZSTD_LEVEL};
use crate::error::{GuestImageError, SnapshotError};
use crate::image_use::offer_profiles;
use crate::keep::{self, with_work};
pub use crate::kind::ROOT_DISK;
use crate::kind::{Kind, described, is_guest_image, metadata_of};
use crate::library::{Library, Snapshots};
use crate::location::{For, Found};
use crate::transfer::bring;
use crate::under_way::{Doing, UnderWay};
use crate::work::blocking;
use vmfork_host::error::{chain, outcome};

/// Of a stored disk.
const SECTOR_BYTES: u64 = 512;
/// What is read at a time of a stored file.
const PIECE_PAGES: u64 = 256;
/// A kernel or an initrd that is larger is none.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// How a stored image is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known<'a> {
    /// Of an image of this host.
    Name(&'a str),
    /// Of what is stored.
    Id(SnapshotId),
}

/// What this host has of a stored image.
#[derive(Debug)]
pub struct StoredHere {
    pub found: Found,
    /// All of it is here.
    pub is_whole: bool,
    /// How many runs its profiles were learnt from.
    pub runs: u32,
}

/// Its disk, and the file of the image that it holds.
const PARTS: [(&str, &str); 3] =
    [("kernel", KERNEL_FILE), ("initrd", INITRD_FILE), (ROOT_DISK, ROOT_FILE)];

/// Copy a guest image to another store.
///
/// # Errors
/// There is none of that name here; another one has its name there.
pub async fn push(
    library: &Arc<Library>,
    name: &str,
    request: TransferRequest,
) -> Result<TransferReply, ErrorBody> {
    let began = Instant::now();
    let message = format!("push image `{name}` to {}", request.location);
    let failed = |error: SnapshotError| error.to_body(&message);
    let name = name.to_owned();
    let (names, sent_bytes) = with_work(library, move |library, work| {
        let files = vmfork_host::core::open_image(&library.core, &name)
            .map_err(|error| SnapshotError::Host(error.into()))?;
        check_copyable(&files.metadata)?;
        let snapshots = &library.snapshots;
        let other = snapshots.places.store_at(&request.location, For::Writing)?;
        if let Some(stored) = &files.metadata.root_stored {
            let copied = snapshots.store.copy_to(stored, &other, work)?;
            let there = copied.names.last().or(copied.there.last());
            let profiles = library.profiles(&files.metadata);
            there.inspect(|there| offer_profiles(&other, there, &profiles));
            return Ok((copied.names, copied.bytes));
        }
        match other.descriptor(&name).ok().as_ref().map(metadata_of) {
            Some(Some(there)) if there.files == files.metadata.files => {
                offer_profiles(&other, &name, &library.profiles(&files.metadata));
                return Ok((Vec::new(), 0));
            }
            _ => {}
        }
        let profiles = library.profiles(&files.metadata);
        let (draft, parts) = draft(files)?;
        let read =
            |role: &Role, range: PageRange, bytes: &mut [u8]| part(&parts, role, range, bytes);
        let stored = other.create(draft, &read, work)?;
        offer_profiles(&other, &name, &profiles);
        Ok((vec![name], stored.counts().stored_bytes))
    })
    .await
    .map_err(failed)?;
    let total_ms = vmfork_fork::ms(began.elapsed());
    Ok(TransferReply { schema: SCHEMA.to_owned(), names, sent_bytes, total_ms })
}

/// Keep a copy of a guest image in this host's store, for other hosts of its cluster. One that was
/// pulled, and whose root is in the store, is there already. Given up with this future.
///
/// # Errors
/// There is none of that name; snapshots have the names that the copy could have; it is being
/// stored already.
pub async fn seed(library: &Arc<Library>, name: &str) -> Result<(), ErrorBody> {
    let message = format!("seed image `{name}`");
    let seeding = Seeding::begin(library, name).map_err(|error| error.to_body(&message))?;
    let _waiter = seeding.under_way.wait();
    let (library, failed) = (Arc::clone(library), message.clone());
    // A task of its own: what is stored becomes the image's copy or goes.
    let task = tokio::spawn(async move {
        let seeded = {
            let library = Arc::clone(&library);
            blocking(move || library.seed(&seeding.under_way.name, &seeding.under_way.work)).await
        };
        if seeded.is_err() {
            library.snapshots.collector.soon();
            library.forget_unneeded().await;
        }
        seeded.map_err(|error| error.to_body(failed))
    });
    outcome(task, message).await
}

/// A copy of an image is being stored: no other one of it is.
struct Seeding {
    library: Arc<Library>,
    under_way: Arc<UnderWay>,
}

impl Seeding {
    fn begin(library: &Arc<Library>, name: &str) -> Result<Self, SnapshotError> {
        let snapshots = &library.snapshots;
        let under_way = Arc::new(UnderWay::new(name, Doing::Write, snapshots.work()));
        match snapshots.seeding().entry(name.to_owned()) {
            Entry::Occupied(_) => Err(GuestImageError::Seeding { name: name.to_owned() }.into()),
            Entry::Vacant(vacant) => {
                vacant.insert(Arc::clone(&under_way));
                Ok(Self { library: Arc::clone(library), under_way })
            }
        }
    }
}

impl Drop for Seeding {
    fn drop(&mut self) {
        self.library.snapshots.seeding().remove(&self.under_way.name);
        self.under_way.over.cancel();
    }
}

/// Remove the copy, also while it is being stored. Hosts that have not pulled all of it find the
/// rest at each other, or not.
///
/// # Errors
/// There is none of that name; its root is in the store.
pub async fn unseed(library: &Arc<Library>, name: &str) -> Result<(), ErrorBody> {
    let message = format!("stop seeding image `{name}`");
    let seeding = library.snapshots.seeding().get(name).cloned();
    if let Some(under_way) = seeding {
        under_way.give_up();
        under_way.over.cancelled().await;
    }
    let ended = {
        let _turn = library.snapshots.image_turn.lock().await;
        let (library, name) = (Arc::clone(library), name.to_owned());
        blocking(move || {
            let images = &library.core.images;
            let failed = |error| SnapshotError::from(GuestImageError::Images(Box::new(error)));
            let metadata = images.metadata(&name).map_err(failed)?;
            if metadata.root_stored.is_some() {
                return Err(GuestImageError::Needed { name }.into());
            }
            images.set_seeded(&metadata, None).map(drop).map_err(failed)
        })
        .await
    };
    ended.map_err(|error| error.to_body(message))?;
    library.forget_unneeded().await;
    Ok(())
}

/// The ID of an image's copy. Hosts that store the same image by themselves have the same chunks
/// and tables, and so the same copy.
fn copy_id(metadata: &Metadata) -> Result<SnapshotId, SnapshotError> {
    let layout = (metadata, CHUNK_PAGES, ZSTD_LEVEL);
    let words = serde_json::to_vec(&layout)
        .map_err(|source| SnapshotError::Stream { source: source.into() })?;
    let hash = blake3::derive_key("vmfork 2026-11-27 copy of a guest image", &words);
    let (id, _) = hash.split_first_chunk().unwrap_or((&[0; 16], &[]));
    Ok(SnapshotId(*id))
}

/// Whether all of an image is here to be copied.
fn check_copyable(metadata: &Metadata) -> Result<(), GuestImageError> {
    match &metadata.root_object {
        None => Ok(()),
        Some(location) => {
            let (name, location) = (metadata.name.clone(), location.clone());
            Err(GuestImageError::RootObject { name, location })
        }
    }
}

/// How it is stored, and the files that its images are read from.
fn draft(mut files: ImageFiles) -> Result<(Draft, Vec<(Role, File)>), SnapshotError> {
    check_copyable(&files.metadata)?;
    let metadata = Metadata { seeded: None, ..files.metadata.clone() };
    let opened = [files.kernel.take(), files.initrd.take(), files.root.take()];
    let mut parts = Vec::new();
    let mut images = Vec::new();
    for ((disk, _), file) in PARTS.into_iter().zip(opened) {
        let Some(file) = file else { continue };
        let length = file.metadata().map_err(|source| SnapshotError::Stream { source })?.len();
        let bytes = length.next_multiple_of(SECTOR_BYTES);
        let (role, all) = (Role::Disk(disk.parse()?), PageRange::first(bytes.div_ceil(PAGE_BYTES)));
        images.push(ImageDraft {
            role: role.clone(),
            bytes,
            base: None,
            extents: vec![(all, Extent::Own)],
            compression: Compression::Zstd { level: ZSTD_LEVEL },
            chunk_pages: CHUNK_PAGES,
            keep_zero_pages: false,
        });
        parts.push((role, file));
    }
    let (vm, id) = (described(&metadata), Some(copy_id(&metadata)?));
    Ok((Draft { name: metadata.name, id, images, state: Vec::new(), vm }, parts))
}

/// Pages of one of the files.
fn part(parts: &[(Role, File)], role: &Role, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
    let part = parts.iter().find(|(of, _)| of == role);
    part.map_or(Err(io::ErrorKind::NotFound.into()), |(_, file)| read_at(file, range, bytes))
}

/// Bytes of a file, and zeros after its end.
fn read_at(file: &File, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, range.byte_offset() + done as u64) {
            Ok(0) => {
                rest.fill(0);
                return Ok(());
            }
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Bring a guest image from another store: VMs can boot from it when this returns. With `wait`, all
/// of it is here then, and its root is a file. → what it is called here.
///
/// # Errors
/// There is none of that name; another one has its name here; a file is not what was stored.
pub async fn pull(
    library: &Arc<Library>,
    name: &str,
    request: TransferRequest,
) -> Result<String, ErrorBody> {
    let message = format!("pull image `{name}` from {}", request.location);
    let wait = request.wait;
    let (name, location) = {
        let (library, name) = (Arc::clone(library), name.to_owned());
        let location = request.location.clone();
        let found = blocking(move || library.snapshots.places.resolve(&name, &location)).await;
        found.map_err(|error| error.to_body(&message))?
    };
    let request = TransferRequest { location, ..request };
    let comes = Coming::begin(library, &name);
    let stored = bring(library, (Kind::GuestImage, &name), request, message.clone()).await;
    let stored = match stored {
        Ok(stored) => stored,
        Err(error) => {
            drop(comes);
            library.forget_unneeded().await;
            return Err(error);
        }
    };
    let comes = [comes, Coming::begin(library, &stored)];
    let (library, failed) = (Arc::clone(library), message.clone());
    // A task of its own: what was brought becomes an image or goes, also when the client
    // disconnects.
    let task = tokio::spawn(async move {
        let taken = {
            let _turn = library.snapshots.image_turn.lock().await;
            let library = Arc::clone(&library);
            blocking(move || library.take_in(&stored, wait)).await
        };
        drop(comes);
        library.forget_unneeded().await;
        taken.map_err(|error| error.to_body(failed))
    });
    outcome(task, message).await
}

/// An image of this stored name is being brought: it is needed, though no image names it yet.
struct Coming {
    library: Arc<Library>,
    name: String,
}

impl Coming {
    fn begin(library: &Arc<Library>, name: &str) -> Self {
        library.snapshots.coming().push(name.to_owned());
        Self { library: Arc::clone(library), name: name.to_owned() }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        let mut coming = self.library.snapshots.coming();
        if let Some(at) = coming.iter().position(|name| *name == self.name) {
            coming.swap_remove(at);
        }
        drop(coming);
        // What was brought for a client that has gone is not needed.
        let library = Arc::clone(&self.library);
        self.library.snapshots.runtime.spawn(async move { library.forget_unneeded().await });
    }
}

impl Library {
    /// Store a copy of an image, unless there is one.
    fn seed(self: &Arc<Self>, name: &str, work: &Work) -> Result<(), SnapshotError> {
        let files = vmfork_host::core::open_image(&self.core, name)
            .map_err(|error| SnapshotError::Host(error.into()))?;
        let metadata = files.metadata.clone();
        let store = &self.snapshots.store;
        if metadata.stored().is_some_and(|stored| store.descriptor(stored).is_ok()) {
            return Ok(());
        }
        let (mut draft, parts) = draft(files)?;
        draft.name = self.free_name(&metadata)?;
        let stored = draft.name.clone();
        let _needed = Coming::begin(self, &stored);
        let read = |role: &Role, range, bytes: &mut [u8]| part(&parts, role, range, bytes);
        store.create(draft, &read, work)?;
        let profiles = self.profiles(&metadata);
        offer_profiles(store, &stored, &profiles);
        let _turn = self.snapshots.image_turn.blocking_lock();
        let is_same = self.core.images.set_seeded(&metadata, Some(stored));
        match is_same.map_err(|error| GuestImageError::Images(Box::new(error)))? {
            true => Ok(()),
            false => Err(GuestImageError::Replaced { name: metadata.name }.into()),
        }
    }

    /// Make an image of what was brought. → its name here.
    fn take_in(&self, stored: &str, whole: bool) -> Result<String, SnapshotError> {
        let descriptor = self.snapshots.store.descriptor(stored)?;
        let bad =
            |why: &str| GuestImageError::Unfit { name: stored.to_owned(), why: why.to_owned() };
        let metadata = metadata_of(&descriptor).ok_or_else(|| bad("its description"))?;
        for (disk, file) in PARTS {
            let bytes = descriptor.image(&Role::Disk(disk.parse()?)).map(|image| image.bytes);
            let said = metadata.files.get(file).map(|file| file.size_bytes);
            let said = said.map(|bytes| bytes.checked_next_multiple_of(SECTOR_BYTES));
            if bytes != said.flatten() || said == Some(None) {
                return Err(bad(file).into());
            }
        }
        let images = &self.core.images;
        let all = images.list().map_err(|error| GuestImageError::Images(Box::new(error)))?;
        let is_same = |here: &Metadata| here.files == metadata.files && here.root_object.is_none();
        let same = all.into_iter().find(is_same);
        let has_root = metadata.files.contains_key(ROOT_FILE);
        let root_stored = (has_root && !whole).then(|| stored.to_owned());
        let becomes_whole = whole && same.as_ref().is_some_and(|here| here.root_stored.is_some());
        let name = same.as_ref().map_or(&metadata.name, |here| &here.name).clone();
        if let Some(here) = same.as_ref().filter(|_| !becomes_whole) {
            self.take_profiles(here, stored);
            return Ok(name);
        }
        // An object is nothing that a store may name.
        let root_object = None;
        let metadata = Metadata { root_stored, root_object, name: name.clone(), ..metadata };
        let mut arrival = images.arrive(metadata.clone()).map_err(Box::new)?;
        for (disk, file) in PARTS {
            if arrival.files().iter().any(|wanted| wanted == file) {
                self.snapshots.copy_disk(stored, disk, file, &mut arrival)?;
            }
        }
        if becomes_whole {
            arrival.replace().map_err(Box::new)?;
            return Ok(name);
        }
        let name = arrival.commit().map_err(Box::new)?;
        self.take_profiles(&Metadata { name: name.clone(), ..metadata }, stored);
        Ok(name)
    }

    /// Remove what this host's store has of images that no image here names, unless disks or
    /// snapshots need it. Whatever leaves such a thing, be it a crash, the next call removes it.
    pub async fn forget_unneeded(self: &Arc<Self>) {
        let _turn = self.snapshots.image_turn.lock().await;
        let library = Arc::clone(self);
        let unneeded = blocking(move || library.unneeded()).await;
        let unneeded = unneeded.unwrap_or_else(|error| {
            let error = chain(&error);
            tracing::warn!(error, "what the store has of images can't be told");
            Vec::new()
        });
        for stored in unneeded {
            match keep::remove_all(self, &stored, false).await {
                Ok(_) => tracing::info!(stored, "no image needs this stored one any more"),
                Err(error) => tracing::debug!(stored, error = chain(&error), "it is needed"),
            }
        }
    }

    fn unneeded(&self) -> Result<Vec<String>, SnapshotError> {
        let images = self.core.images.list();
        let images = images.map_err(|error| GuestImageError::Images(Box::new(error)))?;
        let stored = self.snapshots.store.list()?.into_iter();
        let stored = stored.filter(|(_, found)| found.as_ref().is_ok_and(is_guest_image));
        let coming = self.snapshots.coming().clone();
        let is_needed = |name: &String| {
            coming.contains(name) || images.iter().any(|image| image.stored() == Some(name))
        };
        Ok(stored.map(|(name, _)| name).filter(|name| !is_needed(name)).collect())
    }

    /// Why what is pulled can't have its name, if that is why.
    pub(crate) fn taken(&self, error: StoreError) -> SnapshotError {
        let StoreError::Exists { name, .. } = &error else { return error.into() };
        let images = self.core.images.list().unwrap_or_default();
        match images.into_iter().find(|image| image.stored() == Some(name)) {
            Some(image) => {
                GuestImageError::OtherHere { name: name.clone(), image: image.name }.into()
            }
            None => error.into(),
        }
    }

    /// What the copy of an image can be called in the store.
    fn free_name(&self, metadata: &Metadata) -> Result<String, SnapshotError> {
        let is_free = |name: &String| {
            self.snapshots.store.descriptor(name).is_err()
                && !self.snapshots.store.is_being_written(name)
        };
        let mut names = metadata.names();
        let taken = || SnapshotError::NameTaken { name: metadata.name.clone() };
        names.find(is_free).ok_or_else(taken)
    }

    /// A stored guest image of this host, by its image's name or by its ID. Blocking.
    #[must_use]
    pub fn stored_image(&self, of: Known<'_>) -> Option<StoredHere> {
        let store = &self.snapshots.store;
        let descriptor = match of {
            Known::Id(id) => store.by_id(id).ok()??,
            Known::Name(name) => {
                let stored = self.core.images.metadata(name).ok()?.stored()?.clone();
                store.descriptor(&stored).ok()?
            }
        };
        let is_whole = store.origin(&descriptor.name).ok()?.is_none();
        let found = Found { name: descriptor.name.clone(), id: descriptor.id };
        let runs = self.snapshots.runs_of(&descriptor.name, descriptor.id);
        is_guest_image(&descriptor).then_some(StoredHere { found, is_whole, runs })
    }

    /// A file of a stored guest image, or a chunk, for another host. Blocking.
    ///
    /// # Errors
    /// There is none of that key, or it is none that other hosts need.
    pub fn give(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        let store = &self.snapshots.store;
        let is_of_image = |name: &str| store.descriptor(name).is_ok_and(|it| is_guest_image(&it));
        match KeyOf::parse(key) {
            Some(KeyOf::Format | KeyOf::Chunk(_)) => store.give(key),
            Some(KeyOf::Snapshot(name)) if !is_origin(key) && is_of_image(name) => store.give(key),
            _ => Err(BlobError::NotFound { key: key.to_owned(), place: store.describe() }),
        }
    }

    /// Keep a chunk that was brought for another host. Blocking.
    ///
    /// # Errors
    /// It can't be written.
    pub fn keep_chunk(&self, chunk: &VerifiedChunk<impl AsRef<[u8]>>) -> Result<(), StoreError> {
        self.snapshots.store.keep_chunk(chunk)
    }

    /// While this is held, no image becomes one here, and none goes.
    pub async fn image_turn(&self) -> MutexGuard<'_, ()> {
        self.snapshots.image_turn.lock().await
    }

    /// Where a guest image was pulled from, as long as its root depends on that. Blocks as long as
    /// reading a small file takes.
    pub fn origin_of(&self, stored: &str) -> Option<String> {
        self.snapshots.store.origin(stored).ok().flatten()
    }

    /// Remove what this host's store has of a guest image.
    ///
    /// # Errors
    /// Disks or snapshots need it.
    pub async fn forget_image(self: &Arc<Self>, stored: &str) -> Result<(), ErrorBody> {
        match self.snapshots.store.descriptor(stored) {
            Ok(descriptor) if is_guest_image(&descriptor) => {
                let removed = keep::remove_all(self, stored, false).await;
                let failed =
                    |error: SnapshotError| error.to_body(format!("remove image `{stored}`"));
                removed.map(drop).map_err(failed)
            }
            // It is gone, or was never here.
            _ => Ok(()),
        }
    }
}

impl Snapshots {
    /// Read a stored file of an image, as long as that was.
    fn copy_disk(
        &self,
        stored: &str,
        disk: &str,
        file: &str,
        arrival: &mut Arrival,
    ) -> Result<(), SnapshotError> {
        let image = self.disk_by_name(stored, disk)?;
        let mut arriving = arrival.begin(file).map_err(Box::new)?;
        let length = arriving.expected_bytes();
        if length > image.size_bytes() || (file != ROOT_FILE && length > FILE_BYTES_MAX) {
            let (name, why) = (stored.to_owned(), file.to_owned());
            return Err(GuestImageError::Unfit { name, why }.into());
        }
        let pages = length.div_ceil(PAGE_BYTES).min(image.size_bytes().div_ceil(PAGE_BYTES));
        let mut left = length;
        for first in (0..pages).step_by(usize::try_from(PIECE_PAGES).unwrap_or(1)) {
            let range = PageRange::new(PageIdx(first), PIECE_PAGES.min(pages - first));
            let range = range.map_err(|_beyond| SnapshotError::Empty)?;
            let mut bytes = vec![0; usize::try_from(range.byte_len()).unwrap_or(0)];
            image.read(range, &mut bytes).map_err(|source| SnapshotError::Stream { source })?;
            bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            arriving.write(&bytes).map_err(Box::new)?;
            left -= bytes.len() as u64;
        }
        Ok(arrival.end(arriving).map_err(Box::new)?)
    }
}
