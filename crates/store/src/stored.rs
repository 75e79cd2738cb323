//! Opening a snapshot, and the snapshot that is open.

use std::sync::Arc;

use vmfork_image::PageRange;

use crate::error::StoreError;
use crate::files::{read_descriptor, read_origin, read_section, read_table};
use crate::format::descriptor::{BaseRef, Descriptor};
use crate::format::sealed::{SealedKind, unseal};
use crate::format::table::{Extent, Table};
use crate::names::snapshot_key;
use crate::store::{CHAIN_MAX, Store, base_error, check_base, check_name};

/// A snapshot: what it is and which pages it has. As long as one lives, its chunks stay in the
/// store.
#[derive(Debug)]
pub struct Stored {
    store: Store,
    descriptor: Descriptor,
    table: Table,
    origin: Option<String>,
}

impl Store {
    /// Open snapshot `name`: its descriptor and table, checked against each other. Its chunks stay
    /// as long as the answer lives, even if it is removed.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn open(&self, name: &str) -> Result<Arc<Stored>, StoreError> {
        check_name(name)?;
        let _catalogue = self.inner.catalogue.lock();
        let descriptor = read_descriptor(self.inner.blobs(), name)?;
        let table = read_table(self.inner.blobs(), &descriptor)?;
        let origin = read_origin(self.inner.blobs(), &descriptor)?;
        Ok(Arc::new(Stored::new(self.clone(), descriptor, table, origin)))
    }

    /// Open `name` and all that it is a delta on: itself first, the one without a base last.
    ///
    /// # Errors
    /// As `open`, of any of them; a base that isn't there, is another snapshot by that name, or
    /// doesn't fit.
    pub fn open_chain(&self, name: &str) -> Result<Vec<Arc<Stored>>, StoreError> {
        let mut chain = vec![self.open(name)?];
        while let Some(top) = chain.last()
            && let Some(base) = top.descriptor().base.clone()
        {
            let top = top.descriptor();
            let wrong = |why: String| base_error(&top.name, &base, why);
            let below = match self.open(&base.name) {
                Ok(below) => below,
                Err(StoreError::NotFound { .. }) => return Err(wrong("not there".into())),
                Err(error) => return Err(error),
            };
            check_base(&base, below.descriptor(), top.pages).map_err(wrong)?;
            if chain.len() >= CHAIN_MAX {
                return Err(StoreError::DeepChain { name: name.to_owned(), most: CHAIN_MAX });
            }
            chain.push(below);
        }
        Ok(chain)
    }
}

impl Stored {
    /// To be called while the snapshot can't be removed.
    fn new(store: Store, descriptor: Descriptor, table: Table, origin: Option<String>) -> Self {
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
