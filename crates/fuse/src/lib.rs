//! An NBD export as a file in a folder, which any program can open.
//!
//! ```text
//!   program ──► kernel's page cache ──► /dev/fuse ──► ImageFile ──► vmfork_nbd::Client
//! ```
//!
//! Promises: what is read is what the export has; a request that can't be answered is an error of
//! the program. What was written is with the server when `write` returns, and as durable as the
//! server makes it when `fsync` returns. A mount that was dropped is gone from its folder, and
//! programs that have the file open get errors once this process has ended.
//!
//! Left to others: where the export is; which folder, and who may use it.
#![deny(unsafe_code)]

mod file;

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use fuser::{Config, Session, SessionACL};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use vmfork_nbd::Client;

use self::file::ImageFile;

/// A folder that can't show the file.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("look at the folder `{}`", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("`{}` is not an empty folder", path.display())]
    NotEmpty { path: PathBuf },
    #[error("open /dev/fuse")]
    Device(#[source] io::Error),
    #[error("mount on `{}`", path.display())]
    Mount { path: PathBuf, source: io::Error },
    #[error("speak with the kernel")]
    Session(#[source] io::Error),
}

/// How it is shown.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// The file's name.
    pub name: String,
    /// All users may use it, and not the caller alone.
    pub allow_other: bool,
}

/// A file in a folder, until this is dropped.
#[derive(Debug)]
pub struct Mounted {
    folder: PathBuf,
    /// It ends with the kernel's side of the connection.
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Mounted {
    /// Show the export as a file in an empty folder. It takes the right to mount.
    ///
    /// # Errors
    /// The folder, the kernel, or the caller's rights.
    pub fn new(
        client: Arc<Client>,
        folder: &Path,
        options: &MountOptions,
    ) -> Result<Self, MountError> {
        let read_only = client.export().read_only;
        let file = ImageFile::new(client, &options.name);
        // What a process left that was killed answers nothing any more.
        let found = std::fs::read_dir(folder);
        if found.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotConnected) {
            let failed = |errno| MountError::Mount { path: folder.to_owned(), source: errno };
            unmount(folder, UnmountFlags::DETACH).map_err(|errno| failed(errno.into()))?;
        }
        let failed = |source| MountError::Folder { path: folder.to_owned(), source };
        let folder = std::fs::canonicalize(folder).map_err(failed)?;
        let failed = |source| MountError::Folder { path: folder.clone(), source };
        if std::fs::read_dir(&folder).map_err(failed)?.next().is_some() {
            return Err(MountError::NotEmpty { path: folder });
        }
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(MountError::Device)?;
        mount_at(&folder, &device, read_only, options)
            .map_err(|source| MountError::Mount { path: folder.clone(), source })?;
        // From here on, a drop unmounts.
        let mut mounted = Self { folder, thread: None };
        let acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
        let mut config = Config::default();
        config.acl = acl;
        let session = Session::from_fd(file, OwnedFd::from(device), acl, config);
        let session = session.map_err(MountError::Session)?;
        let named = std::thread::Builder::new().name("fuse".to_owned());
        let thread = named.spawn(move || session.run()).map_err(MountError::Session)?;
        mounted.thread = Some(thread);
        Ok(mounted)
    }

    /// Whether it is still there: somebody may unmount it.
    pub fn is_there(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.thread.is_some() && !self.is_there() {
            // What is on the folder now is somebody else's.
            return;
        }
        // Programs that have the file open keep the rest of it until they or this process end.
        if let Err(error) = unmount(&self.folder, UnmountFlags::DETACH) {
            let folder = self.folder.display();
            tracing::warn!(%folder, %error, "a folder can't be unmounted");
        }
    }
}

fn mount_at(
    folder: &Path,
    device: &File,
    read_only: bool,
    options: &MountOptions,
) -> io::Result<()> {
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    flags.set(MountFlags::RDONLY, read_only);
    let (fd, uid) = (device.as_raw_fd(), rustix::process::geteuid().as_raw());
    let gid = rustix::process::getegid().as_raw();
    let mut data = format!("fd={fd},rootmode=40000,user_id={uid},group_id={gid}");
    data.push_str(",default_permissions");
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let data = CString::new(data).map_err(io::Error::other)?;
    mount("vmfork", folder, "fuse.vmfork", flags, data.as_c_str())?;
    Ok(())
}
