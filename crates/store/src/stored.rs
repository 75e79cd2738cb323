//! Opening a snapshot, and the snapshot that is open.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use vmfork_image::PageRange;

use crate::error::StoreError;
use crate::files::{read_descriptor, read_origin, read_section, read_tables};
use crate::format::descriptor::{BaseRef, Descriptor, ImageDescriptor};
use crate::format::role::Role;
use crate::format::sealed::{SealedKind, unseal};
use crate::format::table::{Extent, Table};
use crate::names::snapshot_key;
use crate::store::{CHAIN_MAX, Store, base_error, check_base, check_name};

/// A snapshot: what it is and which pages its images have. As long as one lives, its chunks stay
/// in the store.
#[derive(Debug)]
pub struct Stored {
    store: Store,
    descriptor: Descriptor,
    /// In the order of the images.
    tables: Vec<Table>,
    origin: Option<String>,
}

/// One image of a snapshot that is open, and stays so as long as one lives.
#[derive(Debug, Clone)]
pub struct StoredImage {
    stored: Arc<Stored>,
    /// Which of its images.
    at: usize,
}

impl Store {
    /// Open snapshot `name`: its descriptor and tables, checked against each other. Its chunks
    /// stay as long as the answer lives, even if it is removed.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn open(&self, name: &str) -> Result<Arc<Stored>, StoreError> {
        check_name(name)?;
        let _catalogue = self.inner.catalogue.lock();
        let descriptor = read_descriptor(self.inner.blobs(), name)?;
        let tables = read_tables(self.inner.blobs(), &descriptor)?;
        let origin = read_origin(self.inner.blobs(), &descriptor)?;
        Ok(Arc::new(Stored::new(self.clone(), descriptor, tables, origin)))
    }

    /// Open the image `role` of `name` and all that it is a delta on: itself first, the one
    /// without a base last.
    ///
    /// # Errors
    /// As `open`, of any of them; no image of that role; a base that isn't there, is another
    /// snapshot by that name, or doesn't fit.
    pub fn open_chain(&self, name: &str, role: &Role) -> Result<Vec<StoredImage>, StoreError> {
        self.open_chain_of(self.open(name)?.image(role)?)
    }

    /// The same of an image that is open.
    ///
    /// # Errors
    /// As `open_chain`, of what it is a delta on.
    pub fn open_chain_of(&self, image: StoredImage) -> Result<Vec<StoredImage>, StoreError> {
        let name = image.stored().descriptor.name.clone();
        let mut chain = vec![image];
        while let Some(top) = chain.last()
            && let Some(base) = top.base().cloned()
        {
            let below = self.open_base(top.stored(), &base)?;
            let wrong = |why: String| base_error(&top.stored().descriptor.name, &base, why);
            check_base(&base, &below.descriptor, top.image().pages()).map_err(wrong)?;
            if chain.len() >= CHAIN_MAX {
                return Err(StoreError::DeepChain { name, most: CHAIN_MAX });
            }
            chain.push(below.image(&base.role)?);
        }
        Ok(chain)
    }

    /// Open `name` and all snapshots that any of its images is a delta on: itself last, each after
    /// all that it is a delta on.
    ///
    /// # Errors
    /// As `open_chain`, of any image.
    pub fn open_family(&self, name: &str) -> Result<Vec<Arc<Stored>>, StoreError> {
        let mut family = Vec::new();
        let mut done = HashMap::<String, Arc<Stored>>::new();
        // From the one that was meant down to the one that is looked at, each with how many of its
        // images were looked at.
        let mut path = vec![(self.open(name)?, 0)];
        let mut on_path = HashSet::from([name.to_owned()]);
        while let Some((top, looked_at)) = path.last_mut() {
            let Some(image) = top.descriptor.images.get(*looked_at) else {
                let Some((whole, _)) = path.pop() else { break };
                on_path.remove(&whole.descriptor.name);
                done.insert(whole.descriptor.name.clone(), whole.clone());
                family.push(whole);
                continue;
            };
            *looked_at += 1;
            let Some(base) = &image.base else { continue };
            let wrong = |why: String| base_error(&top.descriptor.name, base, why);
            if on_path.contains(&base.name) {
                return Err(wrong("a delta on itself".into()));
            }
            let known = done.get(&base.name).cloned();
            let is_new = known.is_none();
            let below = match known {
                Some(below) => below,
                None => self.open_base(top, base)?,
            };
            check_base(base, &below.descriptor, image.pages()).map_err(wrong)?;
            if is_new {
                if done.len() + path.len() >= CHAIN_MAX {
                    return Err(StoreError::DeepChain { name: name.to_owned(), most: CHAIN_MAX });
                }
                on_path.insert(below.descriptor.name.clone());
                path.push((below, 0));
            }
        }
        Ok(family)
    }

    fn open_base(&self, top: &Stored, base: &BaseRef) -> Result<Arc<Stored>, StoreError> {
        match self.open(&base.name) {
            Err(StoreError::NotFound { .. }) => {
                Err(base_error(&top.descriptor.name, base, "not there".into()))
            }
            found => found,
        }
    }
}

impl Stored {
    /// To be called while the snapshot can't be removed.
    fn new(
        store: Store,
        descriptor: Descriptor,
        tables: Vec<Table>,
        origin: Option<String>,
    ) -> Self {
        let mut open = store.inner.open.lock();
        for window in tables.iter().flat_map(Table::windows) {
            open.entry(window.hash).or_default().count += 1;
        }
        drop(open);
        Self { store, descriptor, tables, origin }
    }

    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Its image of that role.
    ///
    /// # Errors
    /// It has none.
    pub fn image(self: &Arc<Self>, role: &Role) -> Result<StoredImage, StoreError> {
        match self.descriptor.images.iter().position(|image| image.role == *role) {
            Some(at) => Ok(StoredImage { stored: self.clone(), at }),
            None => {
                let (name, role) = (self.descriptor.name.clone(), role.clone());
                Err(StoreError::NoImage { name, role })
            }
        }
    }

    /// All its images.
    pub fn images(self: &Arc<Self>) -> impl Iterator<Item = StoredImage> {
        (0..self.tables.len()).map(|at| StoredImage { stored: self.clone(), at })
    }

    /// The tables of all its images, in their order.
    pub(crate) fn tables(&self) -> &[Table] {
        &self.tables
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
        let Descriptor { name, state, .. } = &self.descriptor;
        let file = read_section(blobs, name, state)?;
        let key = snapshot_key(name, &state.file);
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

impl StoredImage {
    /// The snapshot that it is an image of.
    pub fn stored(&self) -> &Arc<Stored> {
        &self.stored
    }

    pub fn image(&self) -> &ImageDescriptor {
        &self.stored.descriptor.images[self.at]
    }

    /// What differs from the base, ascending; without a base, from zeros.
    pub fn extents(&self) -> impl Iterator<Item = (PageRange, Extent)> + '_ {
        self.table().extents().iter().copied()
    }

    pub fn table(&self) -> &Table {
        &self.stored.tables[self.at]
    }

    /// What it is a delta on.
    pub fn base(&self) -> Option<&BaseRef> {
        self.image().base.as_ref()
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        let mut open = self.store.inner.open.lock();
        let mut are_left = false;
        for window in self.tables.iter().flat_map(Table::windows) {
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
