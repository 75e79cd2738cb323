//! A folder for files that are made for disks. The store has them: each goes with the last image
//! that needs it, and its name here goes at once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::FLOOR_BYTES;

#[derive(Debug)]
pub(super) struct Scratch {
    folder: PathBuf,
}

impl Scratch {
    /// In `folder`. What a daemon that was killed left there is removed.
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(&folder)?.flatten() {
            let path = entry.path();
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "a file of an earlier daemon stays");
            }
        }
        Ok(Self { folder })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// What may be written beside the space that disks leave to the host.
    pub(super) fn free_bytes(&self) -> io::Result<u64> {
        let found = rustix::fs::statvfs(&self.folder)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize).saturating_sub(FLOOR_BYTES))
    }

    /// An empty file. Its name goes when it is dropped.
    pub(super) fn file(&self) -> io::Result<NamedTempFile> {
        tempfile::Builder::new().prefix("new-").tempfile_in(&self.folder)
    }
}
