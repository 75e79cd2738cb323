//! What a machine's drives hold, in the order of the slots of its [`Shape`](crate::Shape).
//!
//! The shape says how many drives a QEMU has, of which kind, and the sizes of its disks.
//!
//! | kind | QEMU gets | and reads it | of a QEMU that waits |
//! |---|---|---|---|
//! | [`DriveSlot::ReadOnly`] | an open file | itself | it is bound when a clone gets the QEMU ([`Qmp::bind_files`](crate::Qmp::bind_files)) |
//! | [`DriveSlot::Disk`] | a folder with a socket | from the NBD server behind the socket | it is connected, and its server gets the content |
//!
//! QEMU gets the folder and not a connection: when the server was away, QEMU connects again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, OFlags};
use serde_json::{Value, json};

use crate::shape::{DRIVES_MAX, DiskSlot, DriveSlot, GuestKind};

/// A BIOS cylinder: SeaBIOS can't read a smaller virtio disk.
const BOOT_DISK_BYTES_MIN: u64 = 516_096;
/// Longest name of a socket, in bytes. With `/proc/self/fd/N/` before it, it has to fit into the
/// 107 bytes of a socket's address.
const SOCKET_NAME_BYTES_MAX: usize = 80;
/// Longest name of an export, in bytes: the protocol's own limit.
const EXPORT_NAME_BYTES_MAX: usize = 4096;
/// How long QEMU tries to reach a server when it opens a disk, in seconds. Its main loop stands
/// still until then, so this is below the timeout of a QMP command.
const OPEN_SECONDS: u64 = 5;
/// How long a guest's request waits for a server that is away, in seconds. Then the VM stops.
const RECONNECT_SECONDS: u64 = 3600;

/// What one drive holds.
#[derive(Debug)]
pub enum DriveContent {
    /// A file that is not written while the VM runs.
    ReadOnly(OwnedFd),
    /// A disk with a server. Of a bare guest's first drive, it has at least 516,096 bytes: the
    /// firmware can't boot from a smaller one.
    Disk(NbdSocket),
}

impl DriveContent {
    /// The kind of slot that it fits.
    pub fn slot(&self) -> DriveSlot {
        match self {
            Self::ReadOnly(_) => DriveSlot::ReadOnly,
            Self::Disk(disk) => DriveSlot::Disk(disk.slot),
        }
    }

    /// The fd that QEMU needs.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::ReadOnly(file) => file.as_fd(),
            Self::Disk(disk) => disk.folder.as_fd(),
        }
    }

    /// A node of QEMU's block layer that shows this. `path` is that of [`DriveContent::fd`] inside
    /// QEMU.
    pub(crate) fn node(&self, name: &str, path: &str) -> Value {
        match self {
            // Many QEMUs read one file that is never written: no locks. The host's page cache is
            // shared.
            Self::ReadOnly(_) => json!({
                "driver": "file", "node-name": name, "filename": path, "read-only": true,
                "locking": "off",
            }),
            Self::Disk(disk) => disk.node(name, path),
        }
    }
}

/// Where the NBD server of a disk listens: a unix socket in a folder.
///
/// QEMU's user needs the right to search the folder (`x`) and to write to the socket (`w`). It
/// needs no right to the folders above: QEMU gets the folder as an fd. So a folder of mode 0711 in
/// one of mode 0700 will do, with a socket of mode 0600 that belongs to QEMU's user.
///
/// QEMU connects when it is started, or gets the disk in place of another, and again whenever the
/// connection is lost. So the server listens by the same name in the same folder for as long as the
/// VM lives.
#[derive(Debug)]
pub struct NbdSocket {
    /// `O_PATH`: QEMU can't list it.
    folder: OwnedFd,
    socket: String,
    export: String,
    slot: DiskSlot,
}

/// A socket that QEMU could not connect to.
#[derive(Debug, thiserror::Error)]
pub enum NbdSocketError {
    #[error(
        "{name:?} names no socket in a folder: use 1 to {SOCKET_NAME_BYTES_MAX} bytes, without `/`"
    )]
    Name { name: String },
    #[error("an NBD export's name of {len} bytes is longer than {EXPORT_NAME_BYTES_MAX}")]
    Export { len: usize },
    #[error("open the folder of a disk's socket again")]
    Folder(#[source] io::Error),
}

impl NbdSocket {
    /// The socket by this name in `folder`, the name of the disk's export there, and what its
    /// server tells of it. The socket need not exist yet.
    ///
    /// # Errors
    /// [`NbdSocketError`].
    pub fn new(
        folder: impl AsFd,
        socket: impl Into<String>,
        export: impl Into<String>,
        slot: DiskSlot,
    ) -> Result<Self, NbdSocketError> {
        let (name, export) = (socket.into(), export.into());
        let in_folder = !matches!(name.as_str(), "" | "." | "..") && !name.contains(['/', '\0']);
        if !in_folder || name.len() > SOCKET_NAME_BYTES_MAX {
            return Err(NbdSocketError::Name { name });
        }
        if export.len() > EXPORT_NAME_BYTES_MAX {
            return Err(NbdSocketError::Export { len: export.len() });
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = format!("/proc/self/fd/{}", folder.as_fd().as_raw_fd());
        let folder = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| NbdSocketError::Folder(errno.into()))?;
        Ok(Self { folder, socket: name, export, slot })
    }

    /// `path`: that of the folder inside QEMU.
    pub(crate) fn node(&self, name: &str, path: &str) -> Value {
        let Self { socket, export, .. } = self;
        let server = json!({
            "driver": "nbd",
            "server": {"type": "unix", "path": format!("{path}/{socket}")},
            "export": export,
            "open-timeout": OPEN_SECONDS,
            "reconnect-delay": RECONNECT_SECONDS,
            "discard": "unmap",
        });
        match self.slot.read_only {
            true => json!({
                "driver": "raw", "node-name": name, "read-only": true, "file": server,
            }),
            // detect-zeroes: zeros that a guest writes take no space in the disk's layer, and do
            // not pass through the socket.
            false => json!({
                "driver": "raw", "node-name": name, "discard": "unmap", "detect-zeroes": "unmap",
                "file": server,
            }),
        }
    }

    /// The folder, without the right to list it.
    pub fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// The socket's name in its folder.
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// What the disk is called by its server.
    pub fn export(&self) -> &str {
        &self.export
    }
}

/// The content of a machine's drives. Clones of it share the open files.
#[derive(Debug, Clone, Default)]
pub struct Drives {
    drives: Arc<[Arc<DriveContent>]>,
}

impl Drives {
    /// The content of each drive, in this order. A bare guest's first drive, if it is a file, is
    /// padded with zeros to a size that the firmware can boot from.
    ///
    /// # Errors
    /// If a file can't be read, or the process has no fd left.
    pub fn new(guest: GuestKind, contents: Vec<DriveContent>) -> io::Result<Self> {
        let ready = |drive| ready(guest, drive).map(Arc::new);
        let drives: io::Result<Vec<_>> = (0..).zip(contents).map(ready).collect();
        Ok(Self { drives: drives?.into() })
    }

    /// These, and after them disks of a machine's own.
    #[must_use]
    pub fn with_disks(&self, disks: Vec<NbdSocket>) -> Self {
        let disks = disks.into_iter().map(|disk| Arc::new(DriveContent::Disk(disk)));
        Self { drives: self.drives.iter().cloned().chain(disks).collect() }
    }

    /// The slots of a shape that these fit.
    pub fn slots(&self) -> Vec<DriveSlot> {
        self.iter().map(DriveContent::slot).collect()
    }

    /// The file of the first drive, if that is one that QEMU reads itself.
    pub fn first_file(&self) -> Option<BorrowedFd<'_>> {
        match self.iter().next()? {
            DriveContent::ReadOnly(file) => Some(file.as_fd()),
            DriveContent::Disk(_) => None,
        }
    }

    /// Each drive of a QEMU with these slots, with its content. One that `waits` has no files yet.
    pub(crate) fn by_slot<'a>(
        &'a self,
        slots: &'a [DriveSlot],
        waits: bool,
    ) -> impl Iterator<Item = (u8, &'a DriveSlot, Option<&'a DriveContent>)> {
        let mut contents = self.iter();
        (0..DRIVES_MAX).zip(slots).map(move |(index, slot)| match slot {
            DriveSlot::ReadOnly if waits => (index, slot, None),
            _ => (index, slot, contents.next()),
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &DriveContent> {
        self.drives.iter().map(|drive| &**drive)
    }
}

/// A drive's content as QEMU needs it.
fn ready(guest: GuestKind, (index, content): (usize, DriveContent)) -> io::Result<DriveContent> {
    let file = match content {
        DriveContent::ReadOnly(file) if guest == GuestKind::Bare && index == 0 => {
            padded_boot_disk(file)?
        }
        DriveContent::ReadOnly(file) => file,
        disk @ DriveContent::Disk(_) => return Ok(disk),
    };
    Ok(DriveContent::ReadOnly(read_only(file)?))
}

/// The file, open for reading alone: QEMU looks for exactly that mode in an fd set.
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

    fn file(bytes: &[u8]) -> DriveContent {
        let mut file = tempfile::tempfile().expect("temp file");
        file.write_all(bytes).expect("room");
        DriveContent::ReadOnly(file.into())
    }

    #[test]
    fn files_of_drives_are_open_for_reading_alone() {
        let drives = Drives::new(GuestKind::Linux, vec![file(b"root")]).expect("readable");
        assert_eq!(drives.slots(), [DriveSlot::ReadOnly]);
        for drive in drives.iter() {
            let flags = rustix::fs::fcntl_getfl(drive.fd()).expect("open");
            assert_eq!(flags & OFlags::RWMODE, OFlags::RDONLY);
        }
        assert_eq!(Drives::default().slots(), []);
    }

    #[test]
    fn only_a_boot_disk_is_padded() {
        let size = |guest| {
            let drives = Drives::new(guest, vec![file(&[7; 512])]).expect("readable");
            let file = drives.iter().next().expect("one").fd().try_clone_to_owned();
            File::from(file.expect("fds left")).metadata().expect("open").len()
        };
        assert_eq!(size(GuestKind::Linux), 512);
        assert_eq!(size(GuestKind::Bare), 2 * BOOT_DISK_BYTES_MIN);
    }

    fn slot(read_only: bool) -> DiskSlot {
        DiskSlot { size_bytes: 1 << 20, read_only, flushes: false }
    }

    #[test]
    fn a_disk_is_a_socket_in_a_folder_that_cannot_be_listed() {
        let folder = File::open(std::env::temp_dir()).expect("there");
        let disk = NbdSocket::new(&folder, "disk", "data", slot(false)).expect("possible");
        let flags = rustix::fs::fcntl_getfl(disk.folder()).expect("open");
        assert!(flags.contains(OFlags::PATH), "{flags:?}");
        let root = Drives::new(GuestKind::Linux, vec![file(b"root")]).expect("readable");
        let drives = root.with_disks(vec![disk]);
        assert_eq!(root.slots(), [DriveSlot::ReadOnly]);
        assert_eq!(drives.slots(), [DriveSlot::ReadOnly, DriveSlot::Disk(slot(false))]);
        let node = drives.iter().nth(1).expect("the disk").node("n", "/proc/self/fd/9");
        assert_eq!(node["file"]["server"]["path"], "/proc/self/fd/9/disk");
        assert_eq!((&node["file"]["export"], &node["node-name"]), (&"data".into(), &"n".into()));
        let disk = NbdSocket::new(&folder, "disk", "data", slot(true)).expect("possible");
        let drives = root.with_disks(vec![disk]);
        assert_eq!(drives.slots(), [DriveSlot::ReadOnly, DriveSlot::Disk(slot(true))]);
        let node = drives.iter().nth(1).expect("the disk").node("n", "/proc/self/fd/9");
        assert_eq!((&node["read-only"], &node["detect-zeroes"]), (&true.into(), &Value::Null));
    }

    #[test]
    fn a_socket_of_another_folder_is_refused() {
        let folder = File::open(std::env::temp_dir()).expect("there");
        let longest = "s".repeat(SOCKET_NAME_BYTES_MAX);
        assert!(NbdSocket::new(&folder, longest.as_str(), "", slot(false)).is_ok());
        for name in ["", ".", "..", "../disk", "a\0b", &format!("{longest}s")] {
            let refused = NbdSocket::new(&folder, name, "", slot(false)).expect_err(name);
            assert!(matches!(refused, NbdSocketError::Name { .. }), "{refused}");
        }
        let long = NbdSocket::new(&folder, "s", "e".repeat(EXPORT_NAME_BYTES_MAX + 1), slot(false));
        assert!(matches!(long, Err(NbdSocketError::Export { len: 4097 })));
        let file = tempfile::tempfile().expect("temp file");
        assert!(matches!(
            NbdSocket::new(&file, "s", "", slot(false)),
            Err(NbdSocketError::Folder(_))
        ));
    }

    #[test]
    fn qemu_gives_up_before_its_answer_is_given_up() {
        assert!(OPEN_SECONDS < crate::qmp::client::ANSWER_TIMEOUT.as_secs());
    }
}
