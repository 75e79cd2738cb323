//! A snapshot's small files: read from a store's blobs, and checked.

use crate::blobs::{BlobError, Blobs};
use crate::error::StoreError;
use crate::format::Flaw;
use crate::format::descriptor::{Descriptor, FileRef};
use crate::format::table::{Extent, Table};
use crate::names::{DESCRIPTOR, ORIGIN, PROFILE, WORKING_SET, snapshot_key};

/// A snapshot's small files, each checked.
#[derive(Debug)]
pub(crate) struct Sections {
    pub(crate) table: Vec<u8>,
    pub(crate) state: Vec<u8>,
    pub(crate) working_set: Option<Vec<u8>>,
    pub(crate) profile: Option<Vec<u8>>,
}

impl Sections {
    /// What can be replaced, and what was learnt may be lost: it is left out if it is damaged. With
    /// what its name ends in.
    pub(crate) fn extras(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let extras = [(WORKING_SET, &self.working_set), (PROFILE, &self.profile)];
        extras.into_iter().filter_map(|(name, file)| Some((name, file.as_deref()?)))
    }

    /// All of them by name, as they are in the snapshot's folder.
    pub(crate) fn files<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> impl Iterator<Item = (String, &'a [u8])> {
        let files = &descriptor.files;
        let table = (files.table.file.clone(), self.table.as_slice());
        let state = (files.state.file.clone(), self.state.as_slice());
        let extras = self.extras().map(|(ending, bytes)| (files.beside(ending), bytes));
        [table, state].into_iter().chain(extras)
    }
}

pub(crate) fn read_descriptor(blobs: &dyn Blobs, name: &str) -> Result<Descriptor, StoreError> {
    let key = snapshot_key(name, DESCRIPTOR);
    let file = match blobs.get(&key) {
        Ok(file) => file,
        Err(BlobError::NotFound { .. }) => {
            return Err(StoreError::NotFound { name: name.to_owned(), place: blobs.describe() });
        }
        Err(error) => return Err(error.into()),
    };
    let damaged = StoreError::damaged(blobs, &key);
    match Descriptor::decode(&file) {
        Ok(it) if it.name == name => Ok(it),
        Ok(it) => Err(damaged(Flaw::at(0, format!("it is that of snapshot `{}`", it.name)))),
        Err(flaw) => Err(damaged(flaw)),
    }
}

/// One of the files that never change.
pub(crate) fn read_section(
    blobs: &dyn Blobs,
    name: &str,
    file: &FileRef,
) -> Result<Vec<u8>, StoreError> {
    let key = snapshot_key(name, &file.file);
    let bytes = match blobs.get(&key) {
        Ok(bytes) => bytes,
        Err(BlobError::NotFound { .. }) => {
            return Err(StoreError::damaged(blobs, &key)(Flaw::at(0, "it isn't there")));
        }
        Err(error) => return Err(error.into()),
    };
    match file.flaw_of(&bytes) {
        None => Ok(bytes),
        Some(flaw) => Err(StoreError::damaged(blobs, &key)(flaw)),
    }
}

/// The page table, checked against the descriptor.
pub(crate) fn read_table(blobs: &dyn Blobs, descriptor: &Descriptor) -> Result<Table, StoreError> {
    let file = &descriptor.files.table;
    let bytes = read_section(blobs, &descriptor.name, file)?;
    let damaged = StoreError::damaged(blobs, &snapshot_key(&descriptor.name, &file.file));
    let table = match Table::decode(&bytes) {
        Ok(table) => table,
        Err(flaw) => return Err(damaged(flaw)),
    };
    match table_flaw(&table, descriptor) {
        None => Ok(table),
        Some(what) => Err(damaged(Flaw::at(0, what))),
    }
}

/// What in `table` is other than in the descriptor.
pub(crate) fn table_flaw(table: &Table, descriptor: &Descriptor) -> Option<String> {
    if descriptor.base.is_none() && table.count(Extent::Zero) > 0 {
        return Some("pages that are zero, other than in a base, which there isn't".to_owned());
    }
    for (what, found, told) in [
        ("pages", table.pages(), descriptor.pages),
        ("pages a window", table.chunk_pages(), descriptor.chunk_pages),
        ("own pages", table.count(Extent::Own), descriptor.counts.own_pages),
        ("chunks", table.windows().len() as u64, descriptor.counts.chunks),
    ] {
        if found != told {
            return Some(format!("{found} {what}, but {told} in the descriptor"));
        }
    }
    None
}

/// Where the chunks of a snapshot are, as long as they are not all here.
pub(crate) fn read_origin(
    blobs: &dyn Blobs,
    descriptor: &Descriptor,
) -> Result<Option<String>, StoreError> {
    match blobs.get(&descriptor.key_beside(ORIGIN)) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(BlobError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
