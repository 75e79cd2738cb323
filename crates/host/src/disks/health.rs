//! What of this host's disks needs its owner's attention.

use std::io;

use vmfork_api::DiskState;

use super::{DiskError, FLOOR_BYTES, HostDisks};

/// What `vmfork doctor` is told.
#[derive(Debug)]
pub struct DiskHealth {
    /// Disks that VMs of earlier daemons left.
    pub left: usize,
    /// What was written to them and still takes space.
    pub left_bytes: u64,
    /// IDs of disks that can't be used.
    pub damaged: Vec<String>,
    /// Names of volumes that no VM can have.
    pub broken_volumes: Vec<String>,
    /// Bytes that are free where disks are.
    pub free_bytes: io::Result<u64>,
    /// With less than that, VMs that write to their disks stall.
    pub floor_bytes: u64,
}

impl HostDisks {
    /// Blocking: looks at each layer.
    ///
    /// # Errors
    /// The folder of disks can't be read.
    pub fn health(&self) -> Result<DiskHealth, DiskError> {
        let disks = self.list()?;
        let is_left = |state| state == DiskState::Left;
        let left = disks.iter().filter(|disk| is_left(disk.state));
        let damaged = disks.iter().filter(|disk| disk.state == DiskState::Damaged);
        let volumes = self.volumes.list().into_iter();
        Ok(DiskHealth {
            left: left.clone().count(),
            left_bytes: left.map(|disk| disk.written_bytes).sum(),
            damaged: damaged.map(|disk| disk.id.clone()).collect(),
            broken_volumes: volumes
                .filter(|volume| volume.reason.is_some())
                .map(|volume| volume.name)
                .collect(),
            free_bytes: self.store.free_bytes(),
            floor_bytes: FLOOR_BYTES,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use vmfork_disk::{DiskImage, DiskSet, DiskSpec};
    use vmfork_nbd::Span;

    use super::*;

    fn open(folder: &Path) -> HostDisks {
        let sockets = folder.join("sockets");
        std::fs::create_dir_all(&sockets).expect("made");
        HostDisks::open(&folder.join("disks"), sockets).expect("room")
    }

    /// A disk of a VM, with a page on it. → its ID.
    fn disk_of(disks: &HostDisks, vm: &str) -> (Arc<vmfork_disk::Disk>, String) {
        let blank = DiskImage::blank(1 << 20).expect("an image");
        let (name, vm, set) = ("data".to_owned(), vm.to_owned(), DiskSet::new(None));
        let spec = DiskSpec { name, vm, size_bytes: 1 << 20, set };
        let disk = disks.store.create(&spec, &blank).expect("room");
        disk.write(Span { offset_bytes: 0, len_bytes: 4096 }, &[1; 4096]).expect("room");
        let id = disk.id().to_string();
        (Arc::new(disk), id)
    }

    #[test]
    fn what_is_left_and_what_is_damaged_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let disks = open(folder.path());
        let (one, damaged) = disk_of(&disks, "one");
        let (two, _) = disk_of(&disks, "two");
        let health = disks.health().expect("readable");
        assert_eq!((health.left, health.left_bytes), (0, 0), "VMs have them");
        assert!(health.damaged.is_empty() && health.broken_volumes.is_empty());
        assert!(health.free_bytes.is_ok_and(|free| free > 0));
        disks.keep_all();
        drop((one, two, disks));
        let note = folder.path().join("disks/layers").join(&damaged).join("note");
        std::fs::write(note, "{").expect("damaged");
        std::fs::create_dir_all(folder.path().join("disks/volumes")).expect("there");
        let health = open(folder.path()).health().expect("readable");
        assert_eq!((health.left, health.left_bytes), (1, 4096));
        assert_eq!(health.damaged, [damaged]);
    }
}
