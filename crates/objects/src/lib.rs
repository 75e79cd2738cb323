//! Raw objects of an object store, as what disks begin with.
//!
//! ```text
//!   s3://BUCKET/KEY ──ranges of one version──► Cached ──► DiskImage ──► layers of disks
//!                                                │
//!                                FOLDER/ID/{object.json, data, units}
//! ```
//!
//! What a disk reads is fetched in units of 256 KiB, once, into a sparse file of this host. Reads
//! in order fetch ahead.
//!
//! Promises: all bytes are those of the content that the object had when a disk was made on it, or
//! there is an error. After a restart, what was fetched is there, if a disk lies on it. After a
//! crash of the host it is fetched again. Where the host has no room, bytes are read and not kept.
//!
//! Not promised: that the object store gives the bytes that were put. They have no hash.
//!
//! Left to others: disks and their layers (`vmfork-disk`), HTTP (`vmfork-store-s3`).
#![deny(unsafe_code)]

mod ahead;
mod cached;
mod note;
mod reader;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use vmfork_api::disk::{DISK_BYTES_MAX, DISK_BYTES_MIN};
use vmfork_disk::{DiskImage, ImageError, OwnPages};
use vmfork_image::{ImageId, PAGE_BYTES, PageTable, Source};
use vmfork_store::{BlobError, Failure};
use vmfork_store_s3::{Location, LocationError, OpenError, RawObject, Settings};

use self::ahead::Ahead;
use self::cached::{Cached, make_private};
use self::note::{Boot, Note};
use self::reader::{Later, Reader};

/// An object that no disk can begin with.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    #[error(transparent)]
    Location(#[from] LocationError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Blob(#[from] BlobError),
    #[error("`{}`", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("a disk on it")]
    Image(#[from] ImageError),
    #[error("the object has {size_bytes} bytes: a disk has 1 MiB to 2 TiB")]
    Size { size_bytes: u64 },
}

impl ObjectError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Location(_) => Some("write s3://BUCKET/KEY".to_owned()),
            Self::Open(error) => error.remedy(),
            Self::Blob(BlobError::NotFound { .. }) => {
                Some("check the bucket and the key".to_owned())
            }
            Self::Blob(error) => error.remedy(),
            Self::Size { .. } => Some("put an object of such a size there".to_owned()),
            Self::Folder { .. } | Self::Image(_) => None,
        }
    }
}

type Readers = Arc<dyn Fn(&str) -> Result<Arc<dyn Reader>, ObjectError> + Send + Sync>;

/// All objects that disks of this host began with.
pub struct Objects {
    folder: PathBuf,
    /// What the host keeps free, in bytes.
    floor_bytes: u64,
    readers: Readers,
    ahead: Arc<Ahead>,
    boot: Boot,
    open: Mutex<BTreeMap<ImageId, Weak<Cached>>>,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Objects {
    /// Those in this folder, which is made if need be. Credentials are those of the environment.
    ///
    /// # Errors
    /// The folder can't be made, or no thread starts.
    pub fn new(folder: &Path, floor_bytes: u64, runtime: Handle) -> Result<Self, ObjectError> {
        let readers = move |location: &str| -> Result<Arc<dyn Reader>, ObjectError> {
            let location = location.parse::<Location>()?;
            Ok(Arc::new(RawObject::new(&location, &Settings::from_env()?, runtime.clone())?))
        };
        Self::with_readers(folder, floor_bytes, Arc::new(readers))
    }

    fn with_readers(
        folder: &Path,
        floor_bytes: u64,
        readers: Readers,
    ) -> Result<Self, ObjectError> {
        let failed = |source| ObjectError::Folder { path: folder.to_owned(), source };
        make_private(folder).map_err(failed)?;
        let ahead = Arc::new(Ahead::start().map_err(failed)?);
        let (folder, boot, open) = (folder.to_owned(), Boot::this(), Mutex::default());
        Ok(Self { folder, floor_bytes, readers, ahead, boot, open })
    }

    /// What the object at `s3://BUCKET/KEY` holds now. Blocking: asks the object store.
    ///
    /// # Errors
    /// It can't be reached, or is no disk.
    pub fn disk(&self, location: &str) -> Result<DiskImage, ObjectError> {
        let reader = (self.readers)(location)?;
        let version = reader.version()?;
        check_size(version.size_bytes)?;
        // Whether it can be read is told now, and not to a guest.
        reader.read(&version, 0..1)?;
        let note = Note::new(location.trim_end_matches('/'), version, &self.boot);
        let mut open = self.open.lock();
        let id = note.id();
        let cached = match open.get(&id).and_then(Weak::upgrade) {
            Some(cached) => cached,
            None => self.opened(&mut open, &note, reader)?,
        };
        image(id, cached)
    }

    /// The object of that ID, which a disk of an earlier daemon began with. `None`: there is none,
    /// or it can't be opened, which is logged. Nothing is asked of the object store.
    pub fn image(&self, id: ImageId) -> Option<DiskImage> {
        let found = || -> Result<Option<DiskImage>, ObjectError> {
            let mut open = self.open.lock();
            if let Some(cached) = open.get(&id).and_then(Weak::upgrade) {
                return image(id, cached).map(Some);
            }
            let path = self.folder.join(id.to_string());
            let failed = |source| ObjectError::Folder { path: path.clone(), source };
            let Some(note) = Note::read(&path).map_err(failed)? else { return Ok(None) };
            check_size(note.object_version().size_bytes)?;
            if note.id() != id {
                return Ok(None);
            }
            let (readers, location) = (Arc::clone(&self.readers), note.location.clone());
            let reader =
                Later::new(move || readers(&location).map_err(|error| no_reader(&location, error)));
            image(id, self.opened(&mut open, &note, Arc::new(reader))?).map(Some)
        };
        found().unwrap_or_else(|error| {
            tracing::warn!(%id, %error, "an object that a disk lies on can't be opened");
            None
        })
    }

    /// Removes what was fetched of objects that no disk lies on.
    pub fn prune(&self, is_needed: impl Fn(ImageId) -> bool) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            let id = entry.file_name().to_str().and_then(|name| name.parse::<ImageId>().ok());
            let is_open = |open: &BTreeMap<ImageId, Weak<Cached>>| {
                let cached = id.and_then(|id| open.get(&id));
                cached.is_some_and(|cached| cached.strong_count() > 0)
            };
            if is_open(&self.open.lock()) || id.is_some_and(&is_needed) {
                continue;
            }
            // One that was opened meanwhile stays. No disk is made on one that goes.
            let open = self.open.lock();
            let path = entry.path();
            // Without its note, what can't be removed is not taken for fetched.
            let remove = || Note::remove(&path).and_then(|()| fs::remove_dir_all(&path));
            if !is_open(&open)
                && let Err(error) = remove()
            {
                tracing::warn!(path = %path.display(), %error, "an object's bytes stay");
            }
        }
    }

    fn opened(
        &self,
        open: &mut BTreeMap<ImageId, Weak<Cached>>,
        note: &Note,
        reader: Arc<dyn Reader>,
    ) -> Result<Arc<Cached>, ObjectError> {
        let path = self.folder.join(note.id().to_string());
        let failed = |source| ObjectError::Folder { path: path.clone(), source };
        let note = Note::new(&note.location, note.object_version(), &self.boot);
        let cached = Cached::open(&path, &note, reader, (self.floor_bytes, &self.ahead));
        let cached = cached.map_err(failed)?;
        open.retain(|_, cached| cached.strong_count() > 0);
        open.insert(note.id(), Arc::downgrade(&cached));
        Ok(cached)
    }
}

/// Before files are made of that size.
fn check_size(size_bytes: u64) -> Result<(), ObjectError> {
    match size_bytes {
        DISK_BYTES_MIN..=DISK_BYTES_MAX => Ok(()),
        _ => Err(ObjectError::Size { size_bytes }),
    }
}

/// What a read is told whose reader can't be made.
fn no_reader(location: &str, error: ObjectError) -> BlobError {
    let (action, key, place) = ("open", location.to_owned(), "the object store".to_owned());
    let why = match &error {
        ObjectError::Open(OpenError::NoCredentials { .. }) => Failure::Denied,
        _ => Failure::Other,
    };
    BlobError::Failed { action, key, place, why, source: Box::new(error) }
}

fn image(id: ImageId, cached: Arc<Cached>) -> Result<DiskImage, ObjectError> {
    let size_bytes = cached.size_bytes().next_multiple_of(512);
    let table = PageTable::uniform(size_bytes.div_ceil(PAGE_BYTES), Source::Image(id));
    let own: Arc<dyn OwnPages> = cached;
    Ok(DiskImage::from_table(id, size_bytes, table, BTreeMap::from([(id, own)]))?)
}

#[cfg(test)]
mod tests;
