//! Files that disks begin with, kept under a name of the store's own: hard links.
//!
//! Promises: a disk that a daemon left finds the bytes that it began with. The file's first name
//! may go, or name another file. A name goes with the last image that needs it.
//!
//! Left to others: which files may not be kept, since their owner changes them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::note::{BaseKind, Note};
use crate::background::Background;
use crate::image::{DiskImage, ImageError, new_id};
use crate::layer::Keep;
use crate::raw::RawFile;

/// The folder of these names.
#[derive(Debug)]
pub(super) struct Bases {
    folder: PathBuf,
    keep: Arc<Keep>,
    rubbish: Arc<Background>,
    live: Mutex<BTreeMap<PathBuf, Weak<BaseName>>>,
}

/// A name, which goes in the background.
#[derive(Debug)]
struct BaseName {
    path: PathBuf,
    keep: Arc<Keep>,
    rubbish: Arc<Background>,
}

impl Drop for BaseName {
    fn drop(&mut self) {
        if self.keep.get() {
            return;
        }
        let path = std::mem::take(&mut self.path);
        self.rubbish.put(Box::new(move || unlink(&path)));
    }
}

fn unlink(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "a disk's base can't be removed");
    }
}

impl Bases {
    pub(super) fn new(folder: PathBuf, keep: Arc<Keep>, rubbish: Arc<Background>) -> Self {
        Self { folder, keep, rubbish, live: Mutex::default() }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Weak<BaseName>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the file `from` has, with a name here. On another file system it keeps its own name.
    pub(super) fn image(&self, from: &Path) -> Result<DiskImage, ImageError> {
        let id = new_id().map_err(ImageError::Name)?;
        let path = self.folder.join(id.to_string());
        // Under the lock, so that `remove_unnamed` does not take it for one that was left.
        let mut live = self.live();
        if let Err(error) = std::fs::hard_link(from, &path) {
            tracing::debug!(from = %from.display(), %error, "a disk's base keeps its own name");
            drop(live);
            return DiskImage::raw_as(id, RawFile::open(from)?);
        }
        let (keep, rubbish) = (Arc::clone(&self.keep), Arc::clone(&self.rubbish));
        let name = Arc::new(BaseName { path: path.clone(), keep, rubbish });
        live.retain(|_, name| name.strong_count() > 0);
        live.insert(path.clone(), Arc::downgrade(&name));
        drop(live);
        DiskImage::raw_as(id, RawFile::open(&path)?.holding(name))
    }

    /// Where a base is that a note says was at `path`: the store may have moved since.
    pub(super) fn now_at(&self, path: &Path) -> PathBuf {
        let is_ours = path.parent().and_then(Path::file_name) == self.folder.file_name();
        let here = path.file_name().filter(|_| is_ours).map(|name| self.folder.join(name));
        here.filter(|here| here.exists()).unwrap_or_else(|| path.to_owned())
    }

    /// Removes the names that an earlier daemon left and that no note has.
    pub(super) fn remove_unnamed<'a>(
        &self,
        notes: impl Iterator<Item = &'a Note>,
    ) -> io::Result<()> {
        let named: BTreeSet<PathBuf> = notes
            .filter_map(|note| match &note.base.kind {
                BaseKind::Raw { path, .. } => Some(self.now_at(path)),
                BaseKind::Blank | BaseKind::Given => None,
            })
            .collect();
        let live = self.live();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let lives = live.get(&path).is_some_and(|name| name.strong_count() > 0);
            // A disk that ends with the daemon, and is newer than these notes, keeps its name.
            if !lives && !named.contains(&path) && !self.keep.get() {
                unlink(&path);
            }
        }
        Ok(())
    }
}
