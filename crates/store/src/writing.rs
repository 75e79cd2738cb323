//! A snapshot on its way into a store, and nothing of it left if it doesn't arrive.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};

use blake3::Hash;
use parking_lot::Mutex;

use crate::error::StoreError;
use crate::files::{Sections, read_descriptor};
use crate::format::chunk;
use crate::format::descriptor::{Attempt, Counts, Descriptor, FileRef, SnapshotId};
use crate::format::table::{Extent, Table};
use crate::names::{DESCRIPTOR, STATE, TABLE, chunk_key, snapshot_key};
use crate::store::{Inner, base_error, check_base, check_name};

/// Whether a snapshot by the name may be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Commit {
    New,
    /// There is one, which this one replaces.
    Replace,
}

/// As long as it lives, no other operation writes or removes that snapshot, or removes its bases.
#[derive(Debug)]
pub(crate) struct Reserved<'a> {
    inner: &'a Inner,
    name: String,
}

impl<'a> Reserved<'a> {
    pub(crate) fn new(
        inner: &'a Inner,
        name: &str,
        bases: Vec<String>,
    ) -> Result<Self, StoreError> {
        match inner.writing.lock().entry(name.to_owned()) {
            Entry::Occupied(_) => Err(StoreError::Busy { name: name.to_owned() }),
            Entry::Vacant(entry) => {
                entry.insert(bases);
                Ok(Self { inner, name: name.to_owned() })
            }
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.inner.writing.lock().remove(&self.name);
    }
}

/// As long as it lives, no other operation writes a snapshot by that name or removes its bases.
/// What it has put or found there is not collected. Dropped without a commit, it removes its
/// sections, whose names no other writer uses. Chunks may stay, for `collect`.
#[derive(Debug)]
pub(crate) struct Writing<'a> {
    inner: &'a Inner,
    name: String,
    /// Given back last, when nothing of it is left.
    _reserved: Reserved<'a>,
    attempt: Attempt,
    commit: Commit,
    pinned: Mutex<Vec<String>>,
    /// With the bytes of each file, once it is known.
    chunks: Mutex<HashMap<Hash, Option<u64>>>,
    stored_bytes: AtomicU64,
    shared_bytes: AtomicU64,
    /// Keys to be removed if it comes to nothing.
    sections: Mutex<Vec<String>>,
}

impl<'a> Writing<'a> {
    pub(crate) fn begin(
        inner: &'a Inner,
        name: &str,
        commit: Commit,
        bases: Vec<String>,
    ) -> Result<Self, StoreError> {
        check_name(name)?;
        let attempt = Attempt::random().map_err(StoreError::io("get a random number"))?;
        let catalogue = inner.catalogue.lock();
        let found = inner.blobs().size(&snapshot_key(name, DESCRIPTOR))?;
        if commit == Commit::New && found.is_some() {
            let place = inner.blobs().describe();
            return Err(StoreError::Exists { name: name.to_owned(), place });
        }
        let reserved = Reserved::new(inner, name, bases)?;
        drop(catalogue);
        let it = Self {
            inner,
            name: name.to_owned(),
            _reserved: reserved,
            attempt,
            commit,
            pinned: Mutex::default(),
            chunks: Mutex::default(),
            stored_bytes: AtomicU64::new(0),
            shared_bytes: AtomicU64::new(0),
            sections: Mutex::default(),
        };
        inner.references.lock().refresh(inner.blobs())?;
        Ok(it)
    }

    fn pin(&self, key: &str) {
        self.inner.pins.pin(key.to_owned());
        self.pinned.lock().push(key.to_owned());
    }

    /// See to it that the chunk is there. `file` makes the file, if it has to be written.
    pub(crate) fn keep_chunk(
        &self,
        hash: &Hash,
        file: impl FnOnce() -> Result<Vec<u8>, StoreError>,
    ) -> Result<(), StoreError> {
        self.keep(hash, |key| self.find_chunk(hash, key), file)
    }

    /// The same of one whose file is in hand, verified: it takes the place of one that is damaged.
    pub(crate) fn keep_or_mend_chunk(&self, hash: &Hash, file: &[u8]) -> Result<(), StoreError> {
        let find = |key: &str| {
            let Some(bytes) = self.find_chunk(hash, key)? else { return Ok(None) };
            match self.inner.blobs().get(key).map_err(StoreError::from) {
                Ok(there) => {
                    let is_right = there == file || chunk::decode(&there, hash).is_ok();
                    Ok(is_right.then_some(bytes))
                }
                Err(error) if error.is_damage() => Ok(None),
                Err(error) => Err(error),
            }
        };
        self.keep(hash, find, || Ok(file.to_vec()))
    }

    fn keep(
        &self,
        hash: &Hash,
        find: impl FnOnce(&str) -> Result<Option<u64>, StoreError>,
        file: impl FnOnce() -> Result<Vec<u8>, StoreError>,
    ) -> Result<(), StoreError> {
        if let Entry::Vacant(entry) = self.chunks.lock().entry(*hash) {
            entry.insert(None);
        } else {
            return Ok(()); // Another thread is at it. Should it fail, all fails.
        }
        let key = chunk_key(hash);
        let (bytes, counter) = match find(&key)? {
            Some(bytes) => (bytes, &self.shared_bytes),
            None => {
                let file = file()?;
                self.inner.blobs().put(&key, &file)?;
                (file.len() as u64, &self.stored_bytes)
            }
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
        self.chunks.lock().insert(*hash, Some(bytes));
        Ok(())
    }

    /// The bytes of the chunk's file, if it is there and can be relied upon.
    pub(crate) fn find_chunk(&self, hash: &Hash, key: &str) -> Result<Option<u64>, StoreError> {
        // First pinned, then looked for: what is found then stays.
        self.pin(key);
        if !self.inner.references.lock().is_whole(hash) {
            return Ok(None);
        }
        Ok(self.inner.blobs().size(key)?)
    }

    /// The bytes of a chunk's file that was kept.
    pub(crate) fn chunk_bytes(&self, hash: &Hash) -> Option<u64> {
        self.chunks.lock().get(hash).copied().flatten()
    }

    /// Put one of the files of snapshot `id` there: which, `ending` says.
    pub(crate) fn put_section(
        &self,
        id: SnapshotId,
        ending: &str,
        content: &[u8],
    ) -> Result<FileRef, StoreError> {
        let file = self.attempt.file(id, ending);
        let key = snapshot_key(&self.name, &file);
        self.pin(&key);
        self.sections.lock().push(key.clone());
        self.inner.blobs().put(&key, content)?;
        self.stored_bytes.fetch_add(content.len() as u64, Ordering::Relaxed);
        Ok(FileRef::of(file, content))
    }

    /// Put all small files of a snapshot there, and let `descriptor` name them. Returns their
    /// bytes.
    pub(crate) fn put_sections(
        &self,
        descriptor: &mut Descriptor,
        sections: &Sections,
    ) -> Result<u64, StoreError> {
        let put = |ending: &str, content: &[u8]| self.put_section(descriptor.id, ending, content);
        let mut tables = Vec::new();
        for (image, table) in descriptor.images.iter().zip(&sections.tables) {
            tables.push(put(&image.role.ending(TABLE), table)?);
        }
        let state = put(STATE, &sections.state)?;
        let mut bytes = state.bytes + tables.iter().map(|table| table.bytes).sum::<u64>();
        for (ending, content) in &sections.extras {
            bytes += put(ending, content)?.bytes;
        }
        descriptor.state = state;
        for (image, table) in descriptor.images.iter_mut().zip(tables) {
            image.table = table;
        }
        Ok(bytes)
    }

    /// Of an image with this table, and with the bytes that were written since the last call.
    pub(crate) fn take_counts(&self, table: &Table, has_base: bool) -> Counts {
        let own_pages = table.count(Extent::Own);
        Counts {
            own_pages,
            zero_pages: match has_base {
                true => table.count(Extent::Zero),
                false => table.pages() - own_pages,
            },
            chunks: table.windows().len() as u64,
            stored_bytes: self.stored_bytes.swap(0, Ordering::Relaxed),
            shared_bytes: self.shared_bytes.swap(0, Ordering::Relaxed),
        }
    }

    /// All is written: let the snapshot appear.
    pub(crate) fn commit(&self, descriptor: &Descriptor) -> Result<(), StoreError> {
        let file = encoded(descriptor)?;
        let blobs = self.inner.blobs();
        // What the descriptor names is on the medium before it is.
        blobs.sync()?;
        let _catalogue = self.inner.catalogue.lock();
        for image in &descriptor.images {
            let Some(base) = &image.base else { continue };
            let wrong = |why| base_error(&self.name, base, why);
            match read_descriptor(blobs, &base.name) {
                Ok(found) => check_base(base, &found, image.pages()).map_err(wrong)?,
                Err(StoreError::NotFound { .. }) => return Err(wrong("gone".into())),
                Err(error) => return Err(error),
            }
        }
        let key = snapshot_key(&self.name, DESCRIPTOR);
        // An error doesn't say that it isn't there: an answer may have been lost on its way. The sections stay, then,
        // for `collect`, which looks.
        let sections = std::mem::take(&mut *self.sections.lock());
        if self.commit == Commit::Replace {
            blobs.put(&key, &file)?;
            blobs.sync()?;
        } else if !blobs.put_new(&key, &file)? {
            // By another process.
            *self.sections.lock() = sections;
            let place = blobs.describe();
            return Err(StoreError::Exists { name: self.name.clone(), place });
        }
        Ok(())
    }
}

/// A descriptor's file, if it can be one.
pub(crate) fn encoded(descriptor: &Descriptor) -> Result<Vec<u8>, StoreError> {
    let bad = |why: String| StoreError::BadDraft { why };
    let file = descriptor.encode().map_err(bad)?;
    // What JSON can hold, its reader may refuse: a `vm` that is nested a hundred levels deep.
    Descriptor::decode(&file).map_err(|error| bad(error.to_string()))?;
    Ok(file)
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        for key in std::mem::take(&mut *self.sections.lock()) {
            if let Err(error) = self.inner.blobs().delete(&key) {
                tracing::warn!(%error, "left for collect");
            }
        }
        self.inner.pins.unpin(std::mem::take(&mut *self.pinned.lock()));
    }
}
