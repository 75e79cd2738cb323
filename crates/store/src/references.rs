//! Which chunks the snapshots of a store name.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use blake3::Hash;

use crate::blobs::{BlobError, Blobs};
use crate::error::StoreError;
use crate::format::descriptor::Descriptor;
use crate::names::{DESCRIPTOR, ORIGIN, SNAPSHOTS, snapshot_of};
use crate::store::{read_descriptor, read_table};

/// Kept from one operation to the next and brought up to date at the beginning of each: tables never change, so each
/// is read once.
#[derive(Debug, Default)]
pub(crate) struct References {
    snapshots: BTreeMap<String, Known>,
    users: HashMap<Hash, Users>,
    /// Names of snapshots of which it isn't known what chunks they have.
    damaged: Vec<String>,
}

#[derive(Debug)]
struct Known {
    descriptor: Descriptor,
    is_whole: bool,
    chunks: Vec<Hash>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Users {
    all: u32,
    /// Those whose chunks were all here, and on the medium, before the snapshot appeared.
    whole: u32,
}

impl References {
    /// Look which snapshots there are now.
    pub(crate) fn refresh(&mut self, blobs: &dyn Blobs) -> Result<(), StoreError> {
        let files = files_by_snapshot(blobs)?;
        self.damaged.clear();
        let gone: Vec<_> =
            self.snapshots.keys().filter(|name| !files.contains_key(*name)).cloned().collect();
        gone.iter().for_each(|name| self.forget(name));
        for (name, files) in files {
            if !files.contains(DESCRIPTOR) {
                self.forget(&name);
                continue;
            }
            match self.look_at(blobs, &name, &files) {
                Ok(()) => {}
                Err(StoreError::NotFound { .. }) => self.forget(&name), // removed since we listed
                Err(
                    error @ (StoreError::Damaged(_) | StoreError::Blob(BlobError::NotFound { .. })),
                ) => {
                    tracing::warn!(snapshot = name, %error, "chunks stay as long as it does");
                    self.damaged.push(name);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn look_at(
        &mut self,
        blobs: &dyn Blobs,
        name: &str,
        files: &BTreeSet<String>,
    ) -> Result<(), StoreError> {
        let descriptor = read_descriptor(blobs, name)?;
        let is_whole = !files.contains(&descriptor.files.beside(ORIGIN));
        if let Some(known) = self.snapshots.get(name)
            && known.descriptor == descriptor
            && known.is_whole == is_whole
        {
            return Ok(());
        }
        let table = read_table(blobs, &descriptor)?;
        self.forget(name);
        let chunks: BTreeSet<_> = table.windows().iter().map(|w| *w.hash.as_bytes()).collect();
        let chunks: Vec<_> = chunks.into_iter().map(Hash::from_bytes).collect();
        for hash in &chunks {
            let users = self.users.entry(*hash).or_default();
            users.all += 1;
            users.whole += u32::from(is_whole);
        }
        self.snapshots.insert(name.to_owned(), Known { descriptor, is_whole, chunks });
        Ok(())
    }

    fn forget(&mut self, name: &str) {
        let Some(known) = self.snapshots.remove(name) else { return };
        for hash in known.chunks {
            if let Some(users) = self.users.get_mut(&hash) {
                users.all -= 1;
                users.whole -= u32::from(known.is_whole);
                if users.all == 0 {
                    self.users.remove(&hash);
                }
            }
        }
    }

    /// Whether some snapshot names the chunk.
    pub(crate) fn is_used(&self, hash: &Hash) -> bool {
        self.users.contains_key(hash)
    }

    /// Whether the chunk, if its file is there, is whole: a snapshot was committed with it. Of a file that no snapshot
    /// names one can't tell; it may be what a power cut left.
    pub(crate) fn is_whole(&self, hash: &Hash) -> bool {
        self.users.get(hash).is_some_and(|users| users.whole > 0)
    }

    /// Those whose chunks are not known, which may be any.
    pub(crate) fn damaged(&self) -> &[String] {
        &self.damaged
    }

    pub(crate) fn chunks_of(&self, name: &str) -> &[Hash] {
        self.snapshots.get(name).map_or(&[], |known| &known.chunks)
    }

    /// All snapshots that can be read.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        self.snapshots.values().map(|known| &known.descriptor)
    }
}

/// Names with the files that are there of each.
pub(crate) fn files_by_snapshot(
    blobs: &dyn Blobs,
) -> Result<BTreeMap<String, BTreeSet<String>>, StoreError> {
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for key in blobs.list(SNAPSHOTS)? {
        if let Some((name, file)) = snapshot_of(&key) {
            found.entry(name.to_owned()).or_default().insert(file.to_owned());
        }
    }
    Ok(found)
}
