//! Disks that began in a stored snapshot: what they need of it, and which of them need it.
//!
//! A layer's note has the ID of what its disk began with. An ID of a stored disk is the same for
//! each daemon, so the store of snapshots finds it again.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use vmfork_disk::layer::LayerError;
use vmfork_disk::{BaseKind, DiskImage};
use vmfork_image::ImageId;

use super::{DiskContent, DiskError, DiskSpec, HostDisks};

/// Disks of stored snapshots, found by their IDs.
pub trait StoredBases: Debug + Send + Sync {
    /// A stored disk. `None`: the store does not have it, or it can't be opened, which is logged.
    fn image(&self, id: ImageId) -> Option<DiskImage>;
}

/// The store of snapshots, once there is one.
#[derive(Debug, Default)]
pub(super) struct Known(OnceLock<Arc<dyn StoredBases>>);

impl Known {
    pub(super) fn image(&self, id: ImageId) -> Option<DiskImage> {
        self.0.get()?.image(id)
    }
}

/// A disk that needs a stored one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OnBase {
    /// Which VM it is of, or was of.
    pub vm: String,
    pub name: String,
    /// A VM has it, or gives it back soon; else it was left by an earlier daemon.
    pub in_use: bool,
}

impl HostDisks {
    /// Where disks are found that began in a stored snapshot. Only the first call counts.
    pub fn know_stored(&self, stored: Arc<dyn StoredBases>) {
        let _first = self.stored.0.set(stored);
    }

    /// The disks that began with one of these, or descend from one that did. Blocking: reads all
    /// notes.
    ///
    /// # Errors
    /// Their folder can't be read, or a layer in it: that may be of such a disk.
    pub fn on_bases(&self, bases: &BTreeSet<ImageId>) -> Result<BTreeSet<OnBase>, DiskError> {
        let look = || -> Result<_, DiskError> {
            let listing = self.store.list().map_err(DiskError::Left)?;
            let found = self.store.disks_in(&listing);
            let left: BTreeSet<ImageId> =
                found.iter().filter(|it| !it.in_use).map(|it| it.id).collect();
            Ok((listing, left))
        };
        let (_, left_before) = look()?;
        // One that has ended a moment ago is not in use, and its files may still be there.
        self.store.drain();
        let (listing, left) = look()?;
        if let Some(bad) = listing.bad.iter().find(|bad| bad.unread) {
            let (path, reason) = (bad.folder.clone(), bad.reason.clone());
            return Err(DiskError::Left(vmfork_disk::StoreError::Unread { path, reason }));
        }
        let is_left = |id| left_before.contains(id) && left.contains(id);
        let is_on = |kind: &BaseKind, id| *kind == BaseKind::Given && bases.contains(&id);
        let layers = listing.layers.values().map(|layer| &layer.note);
        let on = layers.filter(|note| is_on(&note.base.kind, note.base.id)).map(|note| OnBase {
            vm: note.vm.clone(),
            name: note.disk.clone(),
            // A layer of a disk that has ended is there for a clone, or goes soon.
            in_use: !is_left(&note.disk_id),
        });
        Ok(on.collect())
    }
}

impl DiskContent {
    /// How large it is as it is stored: a shared volume may have grown above its image.
    pub fn stored_bytes(&self) -> u64 {
        self.lease.as_ref().map_or(self.image.size_bytes(), |lease| lease.disk().size_bytes())
    }

    /// As it is stored: the content of a shared volume is in its own layer, too.
    ///
    /// # Errors
    /// The volume can't be frozen.
    pub fn whole(&self) -> Result<DiskImage, LayerError> {
        match &self.lease {
            Some(lease) => lease.disk().freeze(),
            None => Ok(self.image.clone()),
        }
    }

    /// What a VM that is started from it later has in its place: a disk of its own.
    pub fn stored_spec(&self) -> DiskSpec {
        let read_only = self.spec.is_shared();
        DiskSpec {
            volume: None,
            durability: super::Durability::Host,
            read_only,
            ..self.spec.clone()
        }
    }

    /// Whether what it begins with is as it was, as far as `stat` tells. Only a client's file can
    /// change.
    ///
    /// # Errors
    /// It has changed.
    pub fn check_base(&self) -> Result<(), DiskError> {
        super::check_base(self)
    }
}
