//! Disks that began in a stored snapshot: what they need of it, and which of them need it.
//!
//! A layer's note has the ID of what its disk began with. An ID of a stored disk is the same for
//! each daemon, so the store of snapshots finds it again.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use vmfork_api::ErrorCode;
use vmfork_disk::layer::LayerError;
use vmfork_disk::{BaseKind, DiskImage, DiskSet, StoreError};
use vmfork_image::ImageId;

use super::{DiskContent, DiskError, DiskSpec, HostDisks};

/// Disks of stored snapshots. As long as an image of one lives, the snapshot stays.
pub trait StoredBases: Debug + Send + Sync {
    /// A stored disk, by its ID. `None`: the store does not have it, or it can't be opened, which
    /// is logged.
    fn image(&self, id: ImageId) -> Option<DiskImage>;

    /// The disk of that name of a snapshot. Blocking: reads tables.
    ///
    /// # Errors
    /// There is no such snapshot, it has no such disk, or it can't be opened.
    fn disk(&self, snapshot: &str, disk: &str) -> Result<DiskImage, StoredError>;
}

/// A stored disk that no disk can begin with, in the words of the store.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct StoredError {
    pub code: ErrorCode,
    pub cause: String,
    pub remedy: Option<String>,
}

/// The store of snapshots, once there is one.
#[derive(Debug, Default)]
pub(super) struct Known(OnceLock<Arc<dyn StoredBases>>);

impl Known {
    pub(super) fn image(&self, id: ImageId) -> Option<DiskImage> {
        self.0.get()?.image(id)
    }

    /// What a disk begins with.
    pub(super) async fn disk(&self, snapshot: &str, disk: &str) -> Result<DiskImage, DiskError> {
        let bases = self.0.get().cloned().ok_or(DiskError::NoStore)?;
        let (snapshot, disk) = (snapshot.to_owned(), disk.to_owned());
        let opened = tokio::task::spawn_blocking(move || bases.disk(&snapshot, &disk));
        Ok(opened.await.map_err(|_panicked| DiskError::GivenUp)??)
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
        let on = self.look_for(bases)?;
        if on.iter().all(|disk| disk.in_use) {
            return Ok(on);
        }
        // A disk that has ended a moment ago is not in use, and its files may still be there.
        self.store.drain();
        let was_left = |disk: &OnBase| on.contains(&OnBase { in_use: false, ..disk.clone() });
        let again = self.look_for(bases)?.into_iter();
        Ok(again.map(|disk| OnBase { in_use: disk.in_use || !was_left(&disk), ..disk }).collect())
    }

    /// The VMs whose disks began with one of these, or descend from one that did. Blocking: reads
    /// all notes.
    ///
    /// # Errors
    /// As [`HostDisks::on_bases`].
    pub fn vms_on(&self, bases: &BTreeSet<ImageId>) -> Result<BTreeSet<String>, DiskError> {
        let on = self.look_for(bases)?.into_iter();
        Ok(on.filter(|disk| disk.in_use).map(|disk| disk.vm).collect())
    }

    fn look_for(&self, bases: &BTreeSet<ImageId>) -> Result<BTreeSet<OnBase>, DiskError> {
        let listing = self.store.list().map_err(DiskError::Left)?;
        if let Some(bad) = listing.bad.iter().find(|bad| bad.unread) {
            let (path, reason) = (bad.folder.clone(), bad.reason.clone());
            return Err(DiskError::Left(StoreError::Unread { path, reason }));
        }
        let found = self.store.disks_in(&listing);
        let left: BTreeSet<ImageId> =
            found.iter().filter(|it| !it.in_use).map(|it| it.id).collect();
        let is_on = |kind: &BaseKind, id| *kind == BaseKind::Given && bases.contains(&id);
        let layers = listing.layers.values().map(|layer| &layer.note);
        let on = layers.filter(|note| is_on(&note.base.kind, note.base.id)).map(|note| OnBase {
            vm: note.vm.clone(),
            name: note.disk.clone(),
            // A layer of a disk that has ended is there for a clone, or goes soon.
            in_use: !left.contains(&note.disk_id),
        });
        Ok(on.collect())
    }
}

impl DiskContent {
    /// How large it is as it is stored: a shared volume may have grown above its image.
    pub fn stored_bytes(&self) -> u64 {
        self.lease.as_ref().map_or(self.image.size_bytes(), |lease| lease.disk().size_bytes())
    }

    /// Of a VM on another host. What is written to it counts on no quota yet.
    pub fn from_elsewhere(spec: DiskSpec, image: DiskImage) -> Self {
        Self { spec, image, set: DiskSet::new(None), on_clients_file: false, lease: None }
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vmfork_disk::DiskSet;
    use vmfork_image::{PageTable, Source};
    use vmfork_nbd::Span;

    use super::*;

    const SIZE: u64 = 1 << 20;

    #[test]
    fn a_disk_that_has_just_ended_is_not_left_and_one_that_can_not_be_read_may_be() {
        let folder = tempfile::tempdir().expect("a folder");
        let sockets = folder.path().join("sockets");
        std::fs::create_dir(&sockets).expect("made");
        let disks = HostDisks::open(&folder.path().join("disks"), sockets).expect("room");
        let id = ImageId::new(77).expect("not 0");
        let table = PageTable::uniform(SIZE / 4096, Source::Zero);
        let stored = DiskImage::from_table(id, SIZE, table, BTreeMap::new()).expect("an image");
        let bases = BTreeSet::from([id]);
        for _ in 0..20 {
            let (name, vm, set) = ("data".to_owned(), "web".to_owned(), DiskSet::new(None));
            let spec = vmfork_disk::DiskSpec { name, vm, size_bytes: SIZE, set };
            let disk = disks.store.create(&spec, &stored).expect("room");
            disk.write(Span { offset_bytes: 0, len_bytes: 4096 }, &[1; 4096]).expect("room");
            let on = disks.on_bases(&bases).expect("readable");
            assert!(on.len() == 1 && on.iter().all(|disk| disk.in_use), "{on:?}");
            drop(disk);
            let on = disks.on_bases(&bases).expect("readable");
            assert!(on.iter().all(|disk| disk.in_use), "it ends: {on:?}");
        }
        // As with EMFILE or EIO: it is there, and reading it fails.
        let other = ImageId::new(78).expect("not 0").to_string();
        let note = folder.path().join("disks/layers").join(other).join("note");
        std::fs::create_dir_all(note).expect("made");
        let refused = disks.on_bases(&bases).expect_err("it may need the snapshot");
        let DiskError::Left(StoreError::Unread { .. }) = refused else { panic!("{refused}") };
    }
}
