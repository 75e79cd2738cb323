//! Blobs as files below a folder.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use parking_lot::RwLock;
use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{BlobError, Blobs};
use crate::bounds::bytes_max;
use crate::names::key_is_valid;

/// No key begins so.
const TMP_PREFIX: &str = ".tmp-";

/// Another process may remove a folder as empty, or a temporary file as left behind, just before
/// something is put there.
const ATTEMPTS_MAX: u32 = 5;

/// Deepest folder below the root: `snapshots/NAME`.
const DEPTH_MAX: u32 = 4;

/// Files below a folder that no other user may read: guests' memory holds their secrets.
///
/// A file appears whole, by a rename in its own folder. It outlasts a power cut from the next
/// [`Blobs::sync`] on. That is one `syncfs`: an fsync for each of ten thousand chunks would take
/// longer than writing them. What replaces something is on the medium before it does.
#[derive(Debug)]
pub struct Folder {
    root: PathBuf,
    /// Read: a temporary file is about to be there. Written: empty folders and dead writers' files
    /// go.
    tidying: RwLock<()>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Existing {
    Replaced,
    /// By what is on the medium as soon as it is there.
    ReplacedForGood,
    Kept,
}

impl Folder {
    /// Makes the folder, if it isn't there, for its owner alone.
    ///
    /// # Errors
    /// It can't be made, or there is a file by that name.
    pub fn new(root: impl Into<PathBuf>) -> Result<Self, BlobError> {
        let it = Self { root: root.into(), tidying: RwLock::default() };
        make_folder(&it.root).map_err(it.error("make the folder of", "format"))?;
        Ok(it)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn error(
        &self,
        action: &'static str,
        key: &str,
    ) -> impl FnOnce(io::Error) -> BlobError + use<> {
        BlobError::io(action, key, &self.describe())
    }

    fn path(&self, key: &str) -> Result<PathBuf, BlobError> {
        if !key_is_valid(key) {
            return Err(BlobError::BadKey { key: key.to_owned() });
        }
        Ok(self.root.join(key))
    }

    fn open(&self, key: &str) -> Result<(File, u64), BlobError> {
        let path = self.path(key)?;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(path)
            .and_then(|file| {
                let metadata = file.metadata()?;
                if metadata.is_file() { Ok((file, metadata.len())) } else { Err(not_a_file()) }
            });
        let (file, bytes) = opened.map_err(self.error("open", key))?;
        if bytes > bytes_max(key) {
            return Err(BlobError::TooLarge { key: key.to_owned(), place: self.describe(), bytes });
        }
        Ok((file, bytes))
    }

    /// Whether it was put there.
    fn write(&self, key: &str, bytes: &[u8], existing: Existing) -> Result<bool, BlobError> {
        let target = self.path(key)?;
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.write_once(&target, bytes, existing) {
                Err(e) if e.kind() == io::ErrorKind::NotFound && attempts < ATTEMPTS_MAX => {}
                other => return other.map_err(self.error("write", key)),
            }
        }
    }

    fn write_once(&self, target: &Path, bytes: &[u8], existing: Existing) -> io::Result<bool> {
        let folder = target.parent().ok_or_else(not_a_file)?;
        let tidying = self.tidying.read();
        let temporary = Temporary::create(folder)?;
        drop(tidying);
        let mut file = &temporary.file;
        file.write_all(bytes)?;
        if existing != Existing::Replaced || target.exists() {
            file.sync_all()?;
        }
        if existing != Existing::Kept {
            fs::rename(&temporary.path, target)?;
            if existing == Existing::ReplacedForGood {
                File::open(folder)?.sync_all()?;
            }
            return Ok(true);
        }
        let done = match rustix::fs::renameat_with(
            CWD,
            &temporary.path,
            CWD,
            target,
            RenameFlags::NOREPLACE,
        ) {
            // A file system without it, as NFS: a hard link does not replace either. Dropping
            // `temporary` takes the other name away.
            Err(Errno::INVAL) => rustix::fs::link(&temporary.path, target),
            other => other,
        };
        match done {
            Ok(()) => {}
            // Ours after all, if the answer to a first attempt was lost, as over NFS.
            Err(Errno::EXIST) => return Ok(is_content(target, bytes).unwrap_or(false)),
            Err(e) => return Err(e.into()),
        }
        File::open(folder)?.sync_all()?;
        Ok(true)
    }

    /// Calls `each` with the path and key of all files below `folder`, hidden ones too.
    fn walk(
        folder: &Path,
        key: &str,
        depth: u32,
        each: &mut dyn FnMut(&Path, &str) -> io::Result<()>,
    ) -> io::Result<()> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            // Removed since we read its parent.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let (path, key) = (entry.path(), format!("{key}{name}"));
            let kind = entry.file_type()?;
            if kind.is_dir() && depth > 0 {
                Self::walk(&path, &format!("{key}/"), depth - 1, each)?;
            } else if kind.is_file() {
                each(&path, &key)?;
            }
        }
        Ok(())
    }
}

/// Whether the file holds just `bytes`.
fn is_content(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let file = File::open(path)?;
    let mut found = Vec::new();
    let is_as_long = file.metadata()?.len() == bytes.len() as u64;
    file.take(bytes.len() as u64).read_to_end(&mut found)?;
    Ok(is_as_long && found == bytes)
}

fn not_a_file() -> io::Error {
    io::Error::other("it is no file")
}

fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// A file that is being written. Locked as long as its writer lives; removed when dropped, if it
/// hasn't been renamed.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn create(folder: &Path) -> io::Result<Self> {
        // Not by its pid: processes on one store may have the same, in containers or on hosts of
        // their own.
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|e| io::Error::other(e.to_string()))?;
        let path = folder.join(format!("{TMP_PREFIX}{:016x}", u64::from_be_bytes(random)));
        let create = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = match create() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                make_folder(folder)?;
                create()?
            }
            other => other?,
        };
        let it = Self { path, file };
        rustix::fs::flock(&it.file, FlockOperation::LockExclusive)?;
        Ok(it)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // By now it has another name, unless something failed.
        let _ = fs::remove_file(&self.path);
    }
}

impl Blobs for Folder {
    fn describe(&self) -> String {
        self.root.display().to_string()
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        let (file, len) = self.open(key)?;
        let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
        // Bounded: a file may grow while it is read, if somebody else writes to it.
        file.take(bytes_max(key)).read_to_end(&mut bytes).map_err(self.error("read", key))?;
        Ok(bytes)
    }

    fn reader(&self, key: &str) -> Result<Box<dyn Read + Send>, BlobError> {
        let (file, _) = self.open(key)?;
        // Read from front to back, once: let the kernel read ahead as far as it likes.
        let advice = rustix::fs::Advice::Sequential;
        if let Err(error) = rustix::fs::fadvise(&file, 0, None, advice) {
            tracing::debug!(%error, key, "no advice on reading ahead");
        }
        Ok(Box::new(file))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.write(key, bytes, Existing::Replaced).map(drop)
    }

    fn put_for_good(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.write(key, bytes, Existing::ReplacedForGood).map(drop)
    }

    fn put_new(&self, key: &str, bytes: &[u8]) -> Result<bool, BlobError> {
        self.write(key, bytes, Existing::Kept)
    }

    fn size(&self, key: &str) -> Result<Option<u64>, BlobError> {
        match fs::symlink_metadata(self.path(key)?) {
            Ok(metadata) if metadata.is_file() => Ok(Some(metadata.len())),
            Ok(_) => Err(self.error("look at", key)(not_a_file())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.error("look at", key)(e)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, BlobError> {
        let folder = match prefix.strip_suffix('/') {
            Some(folder) => self.path(folder)?,
            None if prefix.is_empty() => self.root.clone(),
            None => return Err(BlobError::BadKey { key: prefix.to_owned() }),
        };
        let mut keys = Vec::new();
        Self::walk(&folder, prefix, DEPTH_MAX, &mut |_, key| {
            // What isn't ours is not listed.
            if key_is_valid(key) {
                keys.push(key.to_owned());
            }
            Ok(())
        })
        .map_err(self.error("list", prefix))?;
        Ok(keys)
    }

    fn delete(&self, key: &str) -> Result<(), BlobError> {
        let path = self.path(key)?;
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(self.error("remove", key)(e)),
        }
        // So that nothing stays of a snapshot. A folder with something in it stays by itself.
        if let Some(folder) = path.parent()
            && folder != self.root
        {
            let _tidying = self.tidying.write();
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), BlobError> {
        File::open(&self.root)
            .and_then(|root| Ok(rustix::fs::syncfs(&root)?))
            .map_err(self.error("sync", "format"))
    }

    fn sweep(&self) -> Result<u64, BlobError> {
        let mut freed_bytes = 0;
        Self::walk(&self.root, "", DEPTH_MAX, &mut |path, _| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if !name.starts_with(TMP_PREFIX) {
                return Ok(());
            }
            // A live writer holds a lock on it, which dies with it.
            let Ok(file) = File::open(path) else { return Ok(()) };
            let _tidying = self.tidying.write();
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                freed_bytes += file.metadata()?.len();
                tracing::info!(path = %path.display(), "removing what a dead writer left");
                match fs::remove_file(path) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                    _ => {}
                }
            }
            Ok(())
        })
        .map_err(self.error("sweep", ""))?;
        Ok(freed_bytes)
    }
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
