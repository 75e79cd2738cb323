//! A snapshot's small files: read from a store's blobs, and checked.

use crate::blobs::{BlobError, Blobs};
use crate::error::StoreError;
use crate::format::Flaw;
use crate::format::descriptor::{Descriptor, FileRef, ImageDescriptor, Unreadable};
use crate::format::table::{Extent, Table};
use crate::names::{DESCRIPTOR, ORIGIN, snapshot_key};

/// A snapshot's small files, each checked.
#[derive(Debug)]
pub(crate) struct Sections {
    /// In the order of its images.
    pub(crate) tables: Vec<Vec<u8>>,
    pub(crate) state: Vec<u8>,
    /// Working sets and profiles, by what their names end in. What was learnt may be lost: it is
    /// left out if it is damaged.
    pub(crate) extras: Vec<(String, Vec<u8>)>,
}

impl Sections {
    /// All of them by name, as they are in the snapshot's folder.
    pub(crate) fn files<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> impl Iterator<Item = (String, &'a [u8])> {
        let images = descriptor.images.iter().zip(&self.tables);
        let tables = images.map(|(image, table)| (image.table.file.clone(), table.as_slice()));
        let state = (descriptor.state.file.clone(), self.state.as_slice());
        let extras = self.extras.iter();
        let extras = extras.map(|(ending, bytes)| (descriptor.beside(ending), bytes.as_slice()));
        tables.chain([state]).chain(extras)
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
        Err(Unreadable::Flaw(flaw)) => Err(damaged(flaw)),
        Err(Unreadable::Newer(what)) => {
            Err(StoreError::Newer { key, place: blobs.describe(), what })
        }
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

/// The page tables of its images, in their order, each checked against the descriptor.
pub(crate) fn read_tables(
    blobs: &dyn Blobs,
    descriptor: &Descriptor,
) -> Result<Vec<Table>, StoreError> {
    let name = &descriptor.name;
    descriptor.images.iter().map(|image| read_table(blobs, name, image)).collect()
}

pub(crate) fn read_table(
    blobs: &dyn Blobs,
    name: &str,
    image: &ImageDescriptor,
) -> Result<Table, StoreError> {
    let bytes = read_section(blobs, name, &image.table)?;
    let damaged = StoreError::damaged(blobs, &snapshot_key(name, &image.table.file));
    let table = match Table::decode(&bytes) {
        Ok(table) => table,
        Err(flaw) => return Err(damaged(flaw)),
    };
    match table_flaw(&table, image) {
        None => Ok(table),
        Some(what) => Err(damaged(Flaw::at(0, what))),
    }
}

/// What in `table` is other than in the descriptor of its image.
pub(crate) fn table_flaw(table: &Table, image: &ImageDescriptor) -> Option<String> {
    if image.base.is_none() && table.count(Extent::Zero) > 0 {
        return Some("pages that are zero, other than in a base, which there isn't".to_owned());
    }
    for (what, found, told) in [
        ("pages", table.pages(), image.pages()),
        ("pages a window", table.chunk_pages(), image.chunk_pages),
        ("own pages", table.count(Extent::Own), image.counts.own_pages),
        ("chunks", table.windows().len() as u64, image.counts.chunks),
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
