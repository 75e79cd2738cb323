//! A folder for files that are made for disks. The store has them: each goes with the last image
//! that needs it, and its name here goes at once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

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

    /// An empty file. Its name goes when it is dropped.
    pub(super) fn file(&self) -> io::Result<NamedTempFile> {
        tempfile::Builder::new().prefix("new-").tempfile_in(&self.folder)
    }
}
