//! Files to and from the daemon: [`Outgoing`] and [`Incoming`].
//!
//! Only regular files are moved: everything else may block, or be endless, and the agent has one
//! thread. A file that comes in is written beside its target and takes the target's name at the
//! end. So the target is the old file or the new one at any moment, also after a failure.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use vmfork_agent_proto::{FileInfo, Kind, RequestError, ToHost};

use crate::exec::CHUNK_BYTES;
use crate::pipe::Window;
use crate::port::Port;

/// Bits of a mode that `WriteFile` may set.
const MODE_BITS: u32 = 0o7777;

fn failed(what: &str, path: &Path, error: &io::Error) -> RequestError {
    let errno = error.raw_os_error().unwrap_or(match error.kind() {
        ErrorKind::WriteZero => libc::ENOSPC,
        _ => libc::EINVAL,
    });
    RequestError { errno, message: format!("{what} {}: {error}", path.display()) }
}

fn refused(errno: i32, path: &Path) -> RequestError {
    failed("use", path, &io::Error::from_raw_os_error(errno))
}

fn absolute(path: &str) -> Result<&Path, RequestError> {
    let path = Path::new(path);
    if path.is_absolute() {
        return Ok(path);
    }
    let message = format!("`{}` is not an absolute path", path.display());
    Err(RequestError { errno: libc::EINVAL, message })
}

/// A file on its way to the daemon.
#[derive(Debug)]
pub(crate) struct Outgoing {
    file: File,
    path: PathBuf,
    window: Window,
}

impl Outgoing {
    /// Open a regular file.
    ///
    /// # Errors
    /// Of `open`; `EISDIR` for a folder; `EINVAL` for what is no regular file.
    pub(crate) fn open(path: &str) -> Result<(Self, FileInfo), RequestError> {
        let path = absolute(path)?;
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        let file = options.open(path).map_err(|error| failed("open", path, &error))?;
        let metadata = file.metadata().map_err(|error| failed("look at", path, &error))?;
        if metadata.is_dir() {
            return Err(refused(libc::EISDIR, path));
        } else if !metadata.is_file() {
            return Err(refused(libc::EINVAL, path));
        }
        let info = FileInfo { mode: metadata.mode() & MODE_BITS, size_bytes: metadata.len() };
        Ok((Self { file, path: path.to_owned(), window: Window::full() }, info))
    }

    /// Whether [`Outgoing::step`] could send something, the port permitting.
    pub(crate) fn is_ready(&self) -> bool {
        self.window.left() > 0
    }

    pub(crate) fn credit(&mut self, bytes: u32) {
        self.window.credit(bytes);
    }

    /// Send one frame if the window allows. Returns whether the transfer is over.
    pub(crate) fn step(&mut self, channel: u32, port: &mut Port, scratch: &mut [u8]) -> bool {
        let bytes = CHUNK_BYTES.min(self.window.left()).min(scratch.len());
        let Some(room) = scratch.get_mut(..bytes).filter(|room| !room.is_empty()) else {
            return false;
        };
        match self.file.read(room) {
            Ok(n) => {
                self.window.spend(n);
                port.send_stream(Kind::File, channel, n == 0, room.get(..n).unwrap_or_default());
                n == 0
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => false,
            Err(error) => {
                port.send(channel, &ToHost::Failed(failed("read", &self.path, &error)));
                true
            }
        }
    }
}

/// A file on its way into the guest. Dropped before its end, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Incoming {
    file: File,
    /// Where the bytes are until the end.
    beside: PathBuf,
    target: PathBuf,
    mode: u32,
    written_bytes: u64,
    renamed: bool,
}

impl Incoming {
    /// Make the file beside `path`; `channel` makes its name unique.
    ///
    /// # Errors
    /// Of `open`; `EISDIR` if `path` is a folder, `EINVAL` if it is another thing than a file.
    pub(crate) fn create(path: &str, mode: u32, channel: u32) -> Result<Self, RequestError> {
        if path.ends_with('/') {
            return Err(refused(libc::EISDIR, Path::new(path)));
        }
        let path = absolute(path)?;
        // Through symbolic links, so that the link stays and what it points to is replaced.
        let existing = match std::fs::canonicalize(path) {
            Ok(target) => Some((std::fs::metadata(&target), target)),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed("find", path, &error)),
        };
        let (target, owner) = match existing {
            None => (path.to_owned(), None),
            Some((Err(error), target)) => return Err(failed("look at", &target, &error)),
            Some((Ok(metadata), target)) if metadata.is_file() => {
                (target, Some((metadata.uid(), metadata.gid())))
            }
            Some((Ok(metadata), target)) => {
                let errno = if metadata.is_dir() { libc::EISDIR } else { libc::EINVAL };
                return Err(refused(errno, &target));
            }
        };
        let folder = target.parent().unwrap_or(Path::new("/"));
        let beside = folder.join(format!(".vmfork-{}-{channel}", std::process::id()));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = options.open(&beside).map_err(|error| failed("create", &target, &error))?;
        let incoming = Self { file, beside, target, mode, written_bytes: 0, renamed: false };
        if let Some((uid, gid)) = owner {
            // Not ours to give away: then it stays the agent's.
            let _ = std::os::unix::fs::fchown(&incoming.file, Some(uid), Some(gid));
        }
        Ok(incoming)
    }

    /// Write the next bytes.
    ///
    /// # Errors
    /// Of `write`: `ENOSPC`, …; the transfer is over.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), RequestError> {
        self.file.write_all(bytes).map_err(|error| failed("write", &self.target, &error))?;
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    /// All bytes are there: set the mode, take the target's name. Returns the size.
    ///
    /// # Errors
    /// Of `fchmod` and `rename`.
    pub(crate) fn finish(mut self) -> Result<u64, RequestError> {
        let mode = Permissions::from_mode(self.mode & MODE_BITS);
        self.file
            .set_permissions(mode)
            .and_then(|()| std::fs::rename(&self.beside, &self.target))
            .map_err(|error| failed("finish", &self.target, &error))?;
        self.renamed = true;
        Ok(self.written_bytes)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = std::fs::remove_file(&self.beside);
        }
    }
}
