//! Which chunks the snapshots of a store name.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use blake3::Hash;

use crate::blobs::Blobs;
use crate::error::StoreError;
use crate::files::{read_descriptor, read_tables};
use crate::format::descriptor::Descriptor;
use crate::format::table::Table;
use crate::names::{DESCRIPTOR, ORIGIN, SNAPSHOTS, snapshot_of};

/// Kept from one operation to the next and brought up to date at the beginning of each: tables
/// never change, so each is read once.
#[derive(Debug, Default)]
pub(crate) struct References {
    snapshots: BTreeMap<String, Known>,
    users: HashMap<Hash, Users>,
    /// Those of which it isn't known what chunks they have, with the descriptor if that can be
    /// read.
    damaged: BTreeMap<String, Option<Descriptor>>,
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
            let descriptor = match read_descriptor(blobs, &name) {
                Ok(descriptor) => descriptor,
                Err(StoreError::NotFound { .. }) => {
                    self.forget(&name); // removed since we listed
                    continue;
                }
                Err(error) => {
                    self.set_aside(name, None, error)?;
                    continue;
                }
            };
            if let Err(error) = self.look_at(blobs, &descriptor, &files) {
                self.set_aside(name, Some(descriptor), error)?;
            }
        }
        Ok(())
    }

    /// What is damaged of one snapshot keeps the others from nothing but being collected.
    fn set_aside(
        &mut self,
        name: String,
        descriptor: Option<Descriptor>,
        error: StoreError,
    ) -> Result<(), StoreError> {
        if !error.is_damage() {
            return Err(error);
        }
        tracing::warn!(snapshot = name, %error, "chunks stay as long as it does");
        self.forget(&name);
        self.damaged.insert(name, descriptor);
        Ok(())
    }

    fn look_at(
        &mut self,
        blobs: &dyn Blobs,
        descriptor: &Descriptor,
        files: &BTreeSet<String>,
    ) -> Result<(), StoreError> {
        let name = &descriptor.name;
        let is_whole = !files.contains(&descriptor.beside(ORIGIN));
        if let Some(known) = self.snapshots.get(name)
            && known.descriptor == *descriptor
            && known.is_whole == is_whole
        {
            return Ok(());
        }
        let tables = read_tables(blobs, descriptor)?;
        self.forget(name);
        let windows = tables.iter().flat_map(Table::windows);
        let chunks: BTreeSet<_> = windows.map(|window| *window.hash.as_bytes()).collect();
        let chunks: Vec<_> = chunks.into_iter().map(Hash::from_bytes).collect();
        for hash in &chunks {
            let users = self.users.entry(*hash).or_default();
            users.all += 1;
            users.whole += u32::from(is_whole);
        }
        let known = Known { descriptor: descriptor.clone(), is_whole, chunks };
        self.snapshots.insert(name.to_owned(), known);
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

    /// Whether the chunk, if its file is there, is whole: a snapshot was committed with it. Of a
    /// file that no snapshot names one can't tell; it may be what a power cut left.
    pub(crate) fn is_whole(&self, hash: &Hash) -> bool {
        self.users.get(hash).is_some_and(|users| users.whole > 0)
    }

    /// Those whose chunks are not known, which may be any.
    pub(crate) fn damaged(&self) -> impl Iterator<Item = &str> {
        self.damaged.keys().map(String::as_str)
    }

    /// Those of which nothing is known: what they are deltas on, either.
    pub(crate) fn unreadable(&self) -> impl Iterator<Item = &str> {
        let unreadable = self.damaged.iter().filter(|(_, descriptor)| descriptor.is_none());
        unreadable.map(|(name, _)| name.as_str())
    }

    pub(crate) fn chunks_of(&self, name: &str) -> &[Hash] {
        self.snapshots.get(name).map_or(&[], |known| &known.chunks)
    }

    /// All snapshots that can be read.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        self.snapshots.values().map(|known| &known.descriptor)
    }

    /// Also those of which something else is damaged.
    pub(crate) fn all_descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        self.descriptors().chain(self.damaged.values().flatten())
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
