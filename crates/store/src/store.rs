//! The store: which snapshots there are.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use blake3::Hash;
use parking_lot::Mutex;

use crate::blobs::{BlobError, Blobs, Folder};
use crate::error::StoreError;
use crate::files::{read_descriptor, read_origin};
use crate::flights::Flights;
use crate::format::descriptor::{BaseRef, Descriptor, ImageDescriptor};
use crate::names::{DESCRIPTOR, FORMAT_KEY, FORMAT_LINE, name_is_valid};
use crate::pins::Pins;
use crate::references::{References, files_by_snapshot};
use crate::work::Work;

/// Most snapshots that belong together: one, and all that its images are deltas on.
pub const CHAIN_MAX: usize = 1024;

/// A snapshot's name, and what it is or what is wrong with it.
pub type Listed = (String, Result<Descriptor, StoreError>);

/// A place with snapshots in it. Clones are the same store.
///
/// Operations of one process may run at the same time, on any names: what one needs, another
/// doesn't remove. Two processes that use one store are to see to it that neither removes while the
/// other writes.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) blobs: Arc<dyn Blobs>,
    /// Held while a snapshot appears, is opened or vanishes: never for as long as chunks take.
    /// Taken before the locks below.
    pub(crate) catalogue: Mutex<()>,
    pub(crate) references: Mutex<References>,
    /// What is being written, and what its images are deltas on.
    pub(crate) writing: Mutex<HashMap<String, Vec<String>>>,
    pub(crate) pins: Pins,
    /// The chunks of open snapshots, perhaps removed since: each stays until they are closed.
    pub(crate) open: Mutex<HashMap<Hash, Openers>>,
    pub(crate) on_leftovers: OnceLock<OnLeftovers>,
    /// Chunks that come from other stores.
    pub(crate) flights: Flights,
}

/// Who has a chunk's snapshot open.
#[derive(Debug, Default)]
pub(crate) struct Openers {
    pub(crate) count: u32,
    /// It would have been removed, had it not been open.
    pub(crate) is_leftover: bool,
}

pub(crate) struct OnLeftovers(Box<dyn Fn() + Send + Sync>);

impl OnLeftovers {
    pub(crate) fn call(&self) {
        (self.0)();
    }
}

impl fmt::Debug for OnLeftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnLeftovers").finish_non_exhaustive()
    }
}

impl Store {
    /// The store in `blobs`; a new one if there is none.
    ///
    /// # Errors
    /// It is one of another layout, or can't be read or made.
    pub fn new(blobs: Arc<dyn Blobs>) -> Result<Self, StoreError> {
        if blobs.size(FORMAT_KEY)?.is_none() {
            blobs.put_new(FORMAT_KEY, FORMAT_LINE)?;
        }
        Self::existing(blobs)
    }

    /// The store in `blobs`, which must be one already: to get snapshots from.
    ///
    /// # Errors
    /// There is none, or one of another layout, or it can't be read.
    pub fn existing(blobs: Arc<dyn Blobs>) -> Result<Self, StoreError> {
        let foreign = |why: String| StoreError::Foreign { place: blobs.describe(), why };
        match blobs.get(FORMAT_KEY) {
            Ok(line) if line == FORMAT_LINE => {}
            Ok(line) => {
                let line: Vec<u8> = line.into_iter().take(40).collect();
                return Err(foreign(format!(
                    "its `{FORMAT_KEY}` is \"{}\", not \"{}\"",
                    line.escape_ascii(),
                    FORMAT_LINE.escape_ascii()
                )));
            }
            Err(BlobError::NotFound { .. }) => {
                return Err(foreign(format!("there is no `{FORMAT_KEY}`")));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Self {
            inner: Arc::new(Inner {
                blobs,
                catalogue: Mutex::default(),
                references: Mutex::default(),
                writing: Mutex::default(),
                pins: Pins::default(),
                open: Mutex::default(),
                on_leftovers: OnceLock::new(),
                flights: Flights::default(),
            }),
        })
    }

    /// The store in a folder, which is made if it isn't there.
    ///
    /// # Errors
    /// As `new`; and a folder that holds something else.
    pub fn folder(path: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let folder = Folder::new(path)?;
        let entries =
            std::fs::read_dir(folder.root()).map_err(StoreError::io("read the store's folder"))?;
        let has_others =
            entries.flatten().any(|e| !e.file_name().to_string_lossy().starts_with('.'));
        if has_others && folder.size(FORMAT_KEY)?.is_none() {
            let why = format!("it is not empty, and has no `{FORMAT_KEY}`");
            return Err(StoreError::Foreign { place: folder.describe(), why });
        }
        Self::new(Arc::new(folder))
    }

    /// Have `call` called whenever the last is closed that kept chunks of a removed snapshot: it is
    /// time for [`Store::collect`]. It is called by who closes, whom it must not keep waiting. Only
    /// the first `call` counts.
    pub fn on_leftovers(&self, call: impl Fn() + Send + Sync + 'static) {
        let _first = self.inner.on_leftovers.set(OnLeftovers(Box::new(call)));
    }

    /// Whether any operation of this process is writing a snapshot by this name into the store, or
    /// is about to replace it.
    #[must_use]
    pub fn is_being_written(&self, name: &str) -> bool {
        self.inner.writing.lock().contains_key(name)
    }

    pub(crate) fn not_found(&self, name: &str) -> StoreError {
        StoreError::NotFound { name: name.to_owned(), place: self.describe() }
    }

    /// Where it is, for messages.
    pub fn describe(&self) -> String {
        self.inner.blobs.describe()
    }

    /// All snapshots by name. What is damaged is in the list with what is wrong.
    ///
    /// # Errors
    /// The store can't be listed.
    pub fn list(&self) -> Result<Vec<Listed>, StoreError> {
        let blobs = self.inner.blobs();
        let files = files_by_snapshot(blobs)?;
        let names = files.into_iter().filter(|(_, files)| files.contains(DESCRIPTOR));
        let all = names.map(|(name, _)| {
            let descriptor = read_descriptor(blobs, &name);
            (name, descriptor)
        });
        // Removed since we listed them.
        Ok(all.filter(|(_, d)| !matches!(d, Err(StoreError::NotFound { .. }))).collect())
    }

    /// What snapshot `name` is, in words.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn descriptor(&self, name: &str) -> Result<Descriptor, StoreError> {
        check_name(name)?;
        read_descriptor(self.inner.blobs(), name)
    }

    /// Where the chunks of snapshot `name` are, if they are not all here.
    ///
    /// # Errors
    /// There is no such snapshot, or the store can't be read.
    pub fn origin(&self, name: &str) -> Result<Option<String>, StoreError> {
        check_name(name)?;
        read_origin(self.inner.blobs(), &read_descriptor(self.inner.blobs(), name)?)
    }
}

impl Inner {
    pub(crate) fn blobs(&self) -> &dyn Blobs {
        &*self.blobs
    }

    /// How many threads `work` on this store is for: more where they mostly wait.
    pub(crate) fn threads(&self, work: &Work) -> usize {
        work.threads.max(self.blobs.in_flight())
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), StoreError> {
    if name_is_valid(name) { Ok(()) } else { Err(StoreError::BadName { name: name.to_owned() }) }
}

pub(crate) fn base_error(name: &str, base: &BaseRef, why: String) -> StoreError {
    StoreError::Base { name: name.to_owned(), base: base.name.clone(), why }
}

/// Why `found` has not the base that was meant, for an image of `pages`.
pub(crate) fn check_base(base: &BaseRef, found: &Descriptor, pages: u64) -> Result<(), String> {
    if found.id != base.id {
        return Err(format!(
            "another snapshot by that name: its id is {}, not {}",
            found.id, base.id
        ));
    }
    match found.image(&base.role).map(ImageDescriptor::pages) {
        None => Err(format!("without an image of role `{}`", base.role)),
        Some(found) if found != pages => Err(format!("of {found} pages, not {pages}")),
        Some(_) => Ok(()),
    }
}
