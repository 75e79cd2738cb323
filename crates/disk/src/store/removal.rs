//! What no disk needs is removed.
//!
//! It is decided from a listing, while disks are made and frozen. A layer that is newer than the
//! listing is not looked at. Others go if no disk of the listing needs them, and if they are unused
//! at that moment. A layer that is being made is in use.
//!
//! Promises: neither a freeze nor a new disk waits for a removal.

use std::sync::{MutexGuard, PoisonError};

use vmfork_image::ImageId;

use super::found::{BadLayer, FoundLayer, Listing, look};
use super::{DiskStore, Shared, StoreError};

impl DiskStore {
    /// Removes a disk that an earlier daemon left, and what only it needs; or the damaged layer of
    /// that ID.
    ///
    /// # Errors
    /// It is in use, or there is none. A layer can't be read now: it may be whole, and may need
    /// those of this disk.
    pub fn remove_disk(&self, id: ImageId) -> Result<(), StoreError> {
        // What was read a moment ago may have work left.
        self.drain();
        let _removing = self.shared.removing();
        let listing = self.list()?;
        if let Some(BadLayer { folder, reason, .. }) = listing.bad.iter().find(|bad| bad.unread) {
            let (path, reason) = (folder.clone(), reason.clone());
            return Err(StoreError::Unread { path, reason });
        }
        let damaged = |bad: &BadLayer| bad.folder == self.shared.folder(id);
        if listing.bad.iter().any(damaged) {
            if self.shared.is_in_use(&id) || self.shared.live_layer(id).is_some() {
                return Err(StoreError::Busy(id));
            }
            let path = self.shared.folder(id);
            return crate::layer::remove_layer(&path).map_err(|source| self.shared.failed(source));
        }
        let newest = listing.disks().into_iter().find(|newest| newest.note.disk_id == id);
        let newest = newest.ok_or(StoreError::NoDisk(id))?.id;
        // It may be read, too.
        if self.shared.is_in_use(&id) || self.shared.live_layer(newest).is_some() {
            return Err(StoreError::Busy(id));
        }
        self.shared.remove_but(&listing, Some(id)).map(drop)
    }

    /// Removes what no disk needs: layers made in advance, and those of disks that had ended.
    /// → how many layers. From now on, the layers of disks that were opened again are removed like
    /// others, when nothing names them any more. What a disk needs that was left stays.
    ///
    /// # Errors
    /// The folder can't be read, or a layer not be removed.
    pub fn remove_unneeded(&self) -> Result<u64, StoreError> {
        let _removing = self.shared.removing();
        self.shared.remove_but(&self.list()?, None)
    }
}

impl Shared {
    /// One removal at a time.
    fn removing(&self) -> MutexGuard<'_, ()> {
        self.removing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no image, disk or work in the background has this layer now.
    fn is_unused(&self, id: ImageId) -> bool {
        // In this order: a layer is in use before it is not being made any more.
        !self.is_being_made(id) && self.live_layer(id).is_none()
    }

    /// Removes the layers that neither live nor are needed by a disk that is to stay: all but
    /// `goes`. What a damaged layer needs is not known: while there is one, no more than layers of
    /// that disk are removed.
    fn remove_but(&self, listing: &Listing, goes: Option<ImageId>) -> Result<u64, StoreError> {
        let disks = listing.disks();
        let stay = disks.iter().filter(|disk| Some(disk.note.disk_id) != goes);
        let needed = listing.needed_by(stay.map(|disk| disk.id));
        let mut removed = 0;
        // Those above first.
        let mut layers: Vec<_> = listing.layers.values().collect();
        layers.sort_by_key(|layer| std::cmp::Reverse(layer.note.number));
        let is_gone = |layer: &&FoundLayer| {
            let known = listing.bad.is_empty() || Some(layer.note.disk_id) == goes;
            // Not what a disk that ended since we listed has made its newest.
            let is_listed = || {
                let now = look(layer.id, &self.folder(layer.id));
                now.is_ok_and(|now| now.as_ref() == Some(*layer))
            };
            known && !needed.contains(&layer.id) && self.is_unused(layer.id) && is_listed()
        };
        let gone: Vec<&FoundLayer> = layers.into_iter().filter(is_gone).collect();
        for layer in &gone {
            let path = self.folder(layer.id);
            crate::layer::remove_layer(&path).map_err(|source| self.failed(source))?;
            self.removed.add(1);
            removed += 1;
        }
        self.release(listing, goes);
        let stay =
            listing.layers.values().filter(|layer| !gone.iter().any(|one| one.id == layer.id));
        let notes = stay.map(|layer| &layer.note);
        // A note that can't be read may name one.
        if listing.bad.is_empty() {
            self.bases.remove_unnamed(notes).map_err(|source| self.failed(source))?;
        }
        Ok(removed)
    }

    /// Live layers that no left disk needs, but for the one that goes, end with their last name.
    fn release(&self, listing: &Listing, goes: Option<ImageId>) {
        if !listing.bad.is_empty() {
            return;
        }
        let disks = listing.disks();
        let left = disks.iter().filter(|disk| {
            let id = disk.note.disk_id;
            Some(id) != goes && !self.is_in_use(&id)
        });
        let needed = listing.needed_by(left.map(|disk| disk.id));
        // The table that names a merged layer may not be stored yet.
        let is_named = |id: &ImageId| listing.layers.values().any(|layer| layer.names.contains(id));
        let settled = |layer: &&FoundLayer| !layer.note.merged || is_named(&layer.id);
        let layers = listing.layers.values().filter(settled);
        for id in layers.map(|layer| &layer.id).filter(|id| !needed.contains(id)) {
            if let Some(layer) = self.live_layer(*id) {
                layer.folder().this.set(false);
            }
        }
    }
}

#[cfg(test)]
#[path = "removal_tests.rs"]
mod tests;
