//! Disks that began with an object of an object store.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use vmfork_disk::DiskImage;
use vmfork_image::ImageId;

use super::{DiskError, HostDisks, StoredError};

/// Objects, and what of them is on this host.
pub trait ObjectBases: Debug + Send + Sync {
    /// An object that a disk of an earlier daemon began with, by its ID. `None`: there is none, or
    /// it can't be opened, which is logged.
    fn image(&self, id: ImageId) -> Option<DiskImage>;

    /// What the object at a location holds now. Blocking: asks the object store.
    ///
    /// # Errors
    /// It can't be reached, or is no disk.
    fn disk(&self, location: &str) -> Result<DiskImage, StoredError>;

    /// Removes what is kept of objects that are not open, and that `is_needed` does not name.
    fn prune(&self, is_needed: &dyn Fn(ImageId) -> bool);
}

/// The objects, once they are known.
#[derive(Debug, Default)]
pub(super) struct KnownObjects(OnceLock<Arc<dyn ObjectBases>>);

impl KnownObjects {
    pub(super) fn image(&self, id: ImageId) -> Option<DiskImage> {
        self.0.get()?.image(id)
    }

    /// What a disk begins with.
    pub(super) async fn disk(&self, location: &str) -> Result<DiskImage, DiskError> {
        let bases = self.0.get().cloned().ok_or(DiskError::NoStore)?;
        let location = location.to_owned();
        let opened = tokio::task::spawn_blocking(move || bases.disk(&location));
        Ok(opened.await.map_err(|_panicked| DiskError::GivenUp)??)
    }
}

impl HostDisks {
    /// Where objects are found. Only the first call counts.
    pub fn know_objects(&self, objects: Arc<dyn ObjectBases>) {
        let _first = self.objects.0.set(objects);
    }

    /// Removes what is kept of objects that no disk lies on any more. Blocking: reads all notes.
    pub fn prune_objects(&self) {
        let Some(objects) = self.objects.0.get() else { return };
        // What can't be told is needed.
        let is_needed = |id| self.on_bases(&BTreeSet::from([id])).map_or(true, |on| !on.is_empty());
        objects.prune(&is_needed);
    }
}
