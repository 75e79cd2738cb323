//! A snapshot, opened.

use std::sync::Arc;

use vmfork_image::PageRange;

use crate::error::StoreError;
use crate::format::descriptor::{BaseRef, Descriptor};
use crate::format::sealed::{SealedKind, unseal};
use crate::format::table::{Extent, Table};
use crate::names::snapshot_key;
use crate::source::{SourceOptions, StoredPages};
use crate::store::{Store, read_section};

/// A snapshot: what it is and which pages it has. As long as one lives, its chunks stay in the
/// store.
#[derive(Debug)]
pub struct Stored {
    store: Store,
    descriptor: Descriptor,
    table: Table,
    origin: Option<String>,
}

impl Stored {
    /// To be called while the snapshot can't be removed.
    pub(crate) fn new(
        store: Store,
        descriptor: Descriptor,
        table: Table,
        origin: Option<String>,
    ) -> Self {
        let mut open = store.inner.open.lock();
        for window in table.windows() {
            open.entry(window.hash).or_default().count += 1;
        }
        drop(open);
        Self { store, descriptor, table, origin }
    }

    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// What differs from the base, ascending; without a base, from zeros.
    pub fn extents(&self) -> impl Iterator<Item = (PageRange, Extent)> + '_ {
        self.table.extents().iter().copied()
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    /// How many pages are in its own chunks.
    pub fn own_pages(&self) -> u64 {
        self.descriptor.counts.own_pages
    }

    /// What it is a delta on.
    pub fn base(&self) -> Option<&BaseRef> {
        self.descriptor.base.as_ref()
    }

    /// Where its chunks are, if they were not all here when it was opened: what was given to
    /// [`Store::adopt_from`].
    pub fn origin(&self) -> Option<&str> {
        self.origin.as_deref()
    }

    /// The device state, verified.
    ///
    /// # Errors
    /// It is damaged, or can't be read.
    pub fn state(&self) -> Result<Vec<u8>, StoreError> {
        let blobs = self.store.inner.blobs();
        let Descriptor { name, files, .. } = &self.descriptor;
        let file = read_section(blobs, name, &files.state)?;
        let key = snapshot_key(name, &files.state.file);
        unseal(SealedKind::State, &file).map_err(StoreError::damaged(blobs, &key))
    }

    /// Its own pages, to be read by anyone.
    pub fn source(self: &Arc<Self>, options: SourceOptions) -> Arc<StoredPages> {
        Arc::new(StoredPages::new(self.clone(), options))
    }

    pub(crate) fn check_is_here(&self) -> Result<(), StoreError> {
        match &self.origin {
            None => Ok(()),
            Some(origin) => {
                let (name, origin) = (self.descriptor.name.clone(), origin.clone());
                Err(StoreError::Incomplete { name, origin })
            }
        }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        let mut open = self.store.inner.open.lock();
        let mut are_left = false;
        for window in self.table.windows() {
            match open.get_mut(&window.hash) {
                Some(users) if users.count > 1 => users.count -= 1,
                _ => are_left |= open.remove(&window.hash).is_some_and(|users| users.is_leftover),
            }
        }
        drop(open);
        if are_left && let Some(on_leftovers) = self.store.inner.on_leftovers.get() {
            on_leftovers.call();
        }
    }
}
