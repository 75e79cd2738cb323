//! What a machine's drives hold: open files, in the order of the slots of its
//! [`Shape`](crate::Shape).
//!
//! The shape says how many drives a QEMU has and of which kind. Their content is bound when a VM
//! boots ([`Launch::drives`](crate::Launch::drives)), or when a clone gets a QEMU that waits
//! ([`Qmp::bind_drives`](crate::Qmp::bind_drives)).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, OFlags};

use crate::shape::{DriveSlot, GuestKind};

/// A BIOS cylinder: SeaBIOS can't read a smaller virtio disk.
const BOOT_DISK_BYTES_MIN: u64 = 516_096;

/// The content of a machine's drives. Clones of it share the open files.
#[derive(Debug, Clone, Default)]
pub struct Drives {
    drives: Arc<[Drive]>,
}

#[derive(Debug)]
struct Drive {
    slot: DriveSlot,
    /// Open with the access mode of the slot: QEMU looks for exactly that in an fd set.
    file: OwnedFd,
}

impl Drives {
    /// Each file for a slot of that kind, in this order. A bare guest's first disk is padded with
    /// zeros to a size that the firmware can boot from.
    ///
    /// # Errors
    /// If a file can't be read, or the process has no fd left.
    pub fn new(guest: GuestKind, files: Vec<(DriveSlot, OwnedFd)>) -> io::Result<Self> {
        let mut drives = Vec::with_capacity(files.len());
        for (index, (slot, file)) in files.into_iter().enumerate() {
            let file = match guest {
                GuestKind::Bare if index == 0 => padded_boot_disk(file)?,
                GuestKind::Bare | GuestKind::Linux => file,
            };
            let DriveSlot::ReadOnly = slot;
            drives.push(Drive { slot, file: read_only(file)? });
        }
        Ok(Self { drives: drives.into() })
    }

    /// The slots of a shape that these fit.
    pub fn slots(&self) -> Vec<DriveSlot> {
        self.drives.iter().map(|drive| drive.slot).collect()
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.drives.iter().map(|drive| drive.file.as_fd())
    }
}

/// The file, open for reading alone.
fn read_only(file: OwnedFd) -> io::Result<OwnedFd> {
    let mode = rustix::fs::fcntl_getfl(&file)? & OFlags::RWMODE;
    if mode == OFlags::RDONLY {
        return Ok(file);
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The disk, or a copy that is long enough to boot from.
fn padded_boot_disk(disk: OwnedFd) -> io::Result<OwnedFd> {
    let size = u64::try_from(rustix::fs::fstat(&disk)?.st_size).unwrap_or(0);
    if size >= BOOT_DISK_BYTES_MIN {
        return Ok(disk);
    }
    let copy = rustix::fs::memfd_create("vmfork-boot-disk", MemfdFlags::CLOEXEC)?;
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
    let disk = std::fs::File::from(disk);
    std::os::unix::fs::FileExt::read_exact_at(&disk, &mut bytes, 0)?;
    rustix::io::write(&copy, &bytes)?;
    rustix::fs::ftruncate(&copy, 2 * BOOT_DISK_BYTES_MIN)?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;

    fn file(bytes: &[u8]) -> OwnedFd {
        let mut file = tempfile::tempfile().expect("temp file");
        file.write_all(bytes).expect("room");
        file.into()
    }

    #[test]
    fn files_of_drives_are_open_for_reading_alone() {
        let drives = Drives::new(GuestKind::Linux, vec![(DriveSlot::ReadOnly, file(b"root"))]);
        let drives = drives.expect("readable");
        assert_eq!(drives.slots(), [DriveSlot::ReadOnly]);
        for file in drives.files() {
            let flags = rustix::fs::fcntl_getfl(file).expect("open");
            assert_eq!(flags & OFlags::RWMODE, OFlags::RDONLY);
        }
        assert_eq!(Drives::default().slots(), []);
    }

    #[test]
    fn only_a_boot_disk_is_padded() {
        let size = |guest| {
            let drives = Drives::new(guest, vec![(DriveSlot::ReadOnly, file(&[7; 512]))]);
            let drives = drives.expect("readable");
            let file = drives.files().next().expect("one").try_clone_to_owned().expect("fds left");
            File::from(file).metadata().expect("open").len()
        };
        assert_eq!(size(GuestKind::Linux), 512);
        assert_eq!(size(GuestKind::Bare), 2 * BOOT_DISK_BYTES_MIN);
    }
}
