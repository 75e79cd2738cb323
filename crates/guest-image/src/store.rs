//! The folder that holds all images, and the shelf it is built on: a folder of folders that appear
//! and vanish whole.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, RenameFlags, Timespec};
use rustix::io::Errno;

use crate::error::StoreError;
use crate::metadata::{INITRD_FILE, KERNEL_FILE, Metadata, ROOT_FILE, SCHEMA};
use crate::remedy::AtPath as _;

/// The lock is held for renames and removals, never for a build.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30);
const LOCK_TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
const TMP_PREFIX: &str = ".tmp-";
pub(crate) const METADATA_FILE: &str = "image.json";
/// What was learnt of how VMs use the image.
const PROFILES_FILE: &str = "profiles";
/// A larger file was not written here.
const PROFILES_BYTES_MAX: u64 = 16 << 20;
/// `image.json` has about a page; a larger file is not one.
const METADATA_BYTES_MAX: u64 = 1 << 20;

/// All images of one host.
#[derive(Debug, Clone)]
pub struct Store {
    shelf: Shelf,
}

/// An image, opened. Its files live until these are closed, even if the image is removed meanwhile.
#[derive(Debug)]
pub struct ImageFiles {
    /// What is known about it.
    pub metadata: Metadata,
    /// bzImage or ELF. Absent in an image that boots from its disk, `root`.
    pub kernel: Option<File>,
    /// Absent only in imported images.
    pub initrd: Option<File>,
    /// Raw file system, to be attached read-only as the first virtio disk; without a kernel, the
    /// disk that is booted. Absent only in imported images, and in those whose root is in the store
    /// of snapshots.
    pub root: Option<File>,
    /// The folder that they are in. Another build may put other files there at any time: use the
    /// fds.
    pub folder: PathBuf,
}

impl ImageFiles {
    /// Where its root file system is, for who opens it by name. Another build may put another one
    /// there.
    pub fn root_path(&self) -> PathBuf {
        self.folder.join(ROOT_FILE)
    }

    /// The same files for another VM.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let again = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        let (kernel, initrd) = (again(&self.kernel)?, again(&self.initrd)?);
        let (root, folder) = (again(&self.root)?, self.folder.clone());
        Ok(Self { metadata: self.metadata.clone(), kernel, initrd, root, folder })
    }

    /// One of its files, by the name under which `metadata` has it.
    #[must_use]
    pub fn file(self, name: &str) -> Option<File> {
        match name {
            KERNEL_FILE => self.kernel,
            INITRD_FILE => self.initrd,
            ROOT_FILE => self.root,
            _ => None,
        }
    }
}

impl Store {
    /// The store in `root` (`<state>/images`). The folder is made when something is first put
    /// there.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { shelf: Shelf::private(root) }
    }

    /// The store's folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.shelf.root
    }

    /// All images by name. What is damaged is left out, with a warning in the log.
    ///
    /// # Errors
    /// The folder cannot be read. A folder that is not there is an empty store.
    pub fn list(&self) -> Result<Vec<Metadata>, StoreError> {
        let mut images = Vec::new();
        for name in self.shelf.names()? {
            if !vmfork_api::name_is_valid(&name) {
                continue;
            }
            match self.metadata(&name) {
                Ok(metadata) => images.push(metadata),
                Err(StoreError::NotFound { .. }) => {} // removed since we read the folder
                Err(error) => tracing::warn!(image = name, %error, "image left out of the list"),
            }
        }
        images.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(images)
    }

    /// What is known about image `name`.
    ///
    /// # Errors
    /// No such image, or an `image.json` that is none.
    pub fn metadata(&self, name: &str) -> Result<Metadata, StoreError> {
        let folder = self.folder(name)?;
        let path = folder.join(METADATA_FILE);
        let damaged = |why: String| StoreError::Damaged { name: name.into(), why };
        let text = match fs::metadata(&path) {
            Ok(m) if m.len() > METADATA_BYTES_MAX => {
                return Err(damaged(format!("{METADATA_FILE} has {} bytes", m.len())));
            }
            Ok(_) => fs::read(&path).map_err(StoreError::io("read", &path))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !folder.exists() => {
                return Err(StoreError::NotFound { name: name.into() });
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(damaged(format!("{METADATA_FILE} is missing")));
            }
            Err(e) => return Err(StoreError::io("read", &path)(e)),
        };
        let metadata: Metadata = serde_json::from_slice(&text)
            .map_err(|e| damaged(format!("{METADATA_FILE} cannot be read: {e}")))?;
        if metadata.schema != SCHEMA {
            return Err(damaged(format!("its layout is {}, not {SCHEMA}", metadata.schema)));
        }
        if metadata.name != name {
            return Err(damaged(format!("{METADATA_FILE} is that of `{}`", metadata.name)));
        }
        Ok(metadata)
    }

    /// Open the files of image `name`.
    ///
    /// # Errors
    /// No such image; a file that is missing or has another length than when it was stored.
    pub fn open(&self, name: &str) -> Result<ImageFiles, StoreError> {
        let metadata = self.metadata(name)?;
        let folder = self.folder(name)?;
        let file = |file_name: &'static str| -> Result<Option<File>, StoreError> {
            let is_here = metadata.here().any(|name| name == file_name);
            let Some(info) = metadata.files.get(file_name).filter(|_| is_here) else {
                return Ok(None);
            };
            let path = folder.join(file_name);
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
                .open(&path)
                .map_err(StoreError::io("open", &path))?;
            let found = file.metadata().map_err(StoreError::io("look at", &path))?;
            if !found.is_file() || found.len() != info.size_bytes {
                let why = format!("{file_name} has {} bytes, not {}", found.len(), info.size_bytes);
                return Err(StoreError::Damaged { name: name.into(), why });
            }
            Ok(Some(file))
        };
        let (kernel, initrd, root) = (file(KERNEL_FILE)?, file(INITRD_FILE)?, file(ROOT_FILE)?);
        if !metadata.boots() {
            return Err(StoreError::Damaged { name: name.into(), why: "it has no kernel".into() });
        }
        Ok(ImageFiles { kernel, initrd, root, folder: folder.clone(), metadata })
    }

    /// Open the image that has this root disk as a file, whatever it is called: image `name` if it
    /// has, else the first by name. `None`: there is none that is whole.
    ///
    /// # Errors
    /// The folder or a file cannot be read.
    pub fn open_root(
        &self,
        name: &str,
        root_blake3: &str,
    ) -> Result<Option<ImageFiles>, StoreError> {
        let has = |metadata: &Metadata| {
            metadata.root_blake3() == Some(root_blake3) && metadata.root_stored.is_none()
        };
        let whole = |metadata: Metadata| match self.open(&metadata.name) {
            // It may have been replaced since.
            Ok(files) => Ok(Some(files).filter(|files| has(&files.metadata))),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error @ StoreError::Damaged { .. }) => {
                tracing::warn!(image = metadata.name, %error, "another one is looked for");
                Ok(None)
            }
            Err(error) => Err(error),
        };
        let named = self.metadata(name).ok().filter(has);
        if let Some(files) = named.map(whole).transpose()?.flatten() {
            return Ok(Some(files));
        }
        for metadata in self.list()?.into_iter().filter(has) {
            if let Some(files) = whole(metadata)? {
                return Ok(Some(files));
            }
        }
        Ok(None)
    }

    /// Remove what builds and arrivals left that ended half-way, the daemon with them.
    ///
    /// # Errors
    /// Another process holds the store.
    pub fn sweep(&self) -> Result<(), StoreError> {
        if self.shelf.root.exists() {
            let _lock = self.shelf.lock()?;
            self.shelf.sweep();
        }
        Ok(())
    }

    /// Remove image `name`. VMs that have its files open keep them.
    ///
    /// # Errors
    /// No such image, or the folder cannot be changed.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        self.folder(name)?;
        if self.shelf.remove(name)? {
            Ok(())
        } else {
            Err(StoreError::NotFound { name: name.into() })
        }
    }

    /// Say where the copy of an image is that other hosts pull, or that there is none. → whether
    /// the image is still that one.
    ///
    /// # Errors
    /// No such image, or its folder cannot be changed.
    pub fn set_seeded(&self, image: &Metadata, seeded: Option<String>) -> Result<bool, StoreError> {
        let path = self.folder(&image.name)?.join(METADATA_FILE);
        let _lock = self.shelf.lock()?;
        let there = self.metadata(&image.name)?;
        if there.files != image.files {
            return Ok(false);
        }
        text_of(&Metadata { seeded, ..there })
            .and_then(|text| write_whole(&path, &text))
            .map_err(StoreError::io("write", &path))?;
        Ok(true)
    }

    /// What was learnt of how VMs use image `name`, as it was put; empty if nothing was.
    ///
    /// # Errors
    /// Its folder cannot be read, or the file is too large to be one of these.
    pub fn profiles(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let path = self.folder(name)?.join(PROFILES_FILE);
        match fs::metadata(&path) {
            Ok(found) if found.len() > PROFILES_BYTES_MAX => {
                let why = format!("{PROFILES_FILE} has {} bytes", found.len());
                Err(StoreError::Damaged { name: name.into(), why })
            }
            Ok(_) => fs::read(&path).map_err(StoreError::io("read", &path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(StoreError::io("look at", &path)(error)),
        }
    }

    /// Keep what was learnt of an image, in place of what there was. → whether the image is still
    /// that one.
    ///
    /// # Errors
    /// No such image, or its folder cannot be changed.
    pub fn set_profiles(&self, image: &Metadata, profiles: &[u8]) -> Result<bool, StoreError> {
        let path = self.folder(&image.name)?.join(PROFILES_FILE);
        let _lock = self.shelf.lock()?;
        if self.metadata(&image.name)?.files != image.files {
            return Ok(false);
        }
        write_whole(&path, profiles).map_err(StoreError::io("write", &path))?;
        Ok(true)
    }

    /// A place to put image `name` together, out of sight; sweeps away what dead builds left.
    pub(crate) fn stage(&self, name: &str) -> Result<Staging, StoreError> {
        self.folder(name)?;
        self.shelf.stage(name)
    }

    /// Write `image.json` and let the image appear, in place of one of that name.
    pub(crate) fn commit(&self, staging: Staging, metadata: &Metadata) -> Result<(), StoreError> {
        self.describe(&staging, metadata)?;
        self.shelf.commit(staging, &metadata.name)
    }

    /// The same, unless there is one of that name. → whether it appeared.
    pub(crate) fn commit_new(
        &self,
        staging: &Staging,
        metadata: &Metadata,
    ) -> Result<bool, StoreError> {
        self.describe(staging, metadata)?;
        self.shelf.commit_new(staging, &metadata.name)
    }

    /// The same, in place of an image of that name with the same files. → whether there was one.
    pub(crate) fn commit_over(
        &self,
        staging: &Staging,
        metadata: &Metadata,
    ) -> Result<bool, StoreError> {
        self.describe(staging, metadata)?;
        // What was learnt of it stays known.
        let path = staging.path().join(PROFILES_FILE);
        let learnt = self.profiles(&metadata.name).and_then(|learnt| match learnt.is_empty() {
            true => Ok(()),
            false => fs::write(&path, learnt).map_err(StoreError::io("write", &path)),
        });
        if let Err(error) = learnt {
            tracing::warn!(image = metadata.name, %error, "what was learnt of it is forgotten");
        }
        let there = || self.metadata(&metadata.name).ok();
        let is_same = || there().is_some_and(|there| there.files == metadata.files);
        self.shelf.commit_over(staging, &metadata.name, &is_same)
    }

    fn describe(&self, staging: &Staging, metadata: &Metadata) -> Result<(), StoreError> {
        let path = staging.path().join(METADATA_FILE);
        text_of(metadata)
            .and_then(|text| fs::write(&path, text))
            .map_err(StoreError::io("write", &path))
    }

    fn folder(&self, name: &str) -> Result<PathBuf, StoreError> {
        if vmfork_api::name_is_valid(name) {
            Ok(self.shelf.root.join(name))
        } else {
            Err(StoreError::BadName { name: name.into() })
        }
    }
}

fn text_of(metadata: &Metadata) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(metadata)?;
    text.push(b'\n');
    Ok(text)
}

/// Replace a file by another one, which outlasts a power cut once this returns.
fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let (part, folder) = (path.with_extension("new"), path.parent().unwrap_or(path));
    fs::write(&part, content)?;
    fs::set_permissions(&part, fs::Permissions::from_mode(0o644))?;
    File::open(&part)?.sync_all()?;
    fs::rename(&part, path)?;
    File::open(folder)?.sync_all()
}

/// A folder whose entries are folders of files, each there whole or not at all.
#[derive(Debug, Clone)]
pub(crate) struct Shelf {
    root: PathBuf,
    /// Only its owner may look in.
    is_private: bool,
}

impl Shelf {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), is_private: false }
    }

    /// One whose entries other users cannot read.
    pub(crate) fn private(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), is_private: true }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The entries' names, unsorted, without hidden ones.
    pub(crate) fn names(&self) -> Result<Vec<String>, StoreError> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(StoreError::io("read", &self.root)(e)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(StoreError::io("read", &self.root))?;
            if let Ok(name) = entry.file_name().into_string()
                && !name.starts_with('.')
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    pub(crate) fn stage(&self, name: &str) -> Result<Staging, StoreError> {
        self.make_root().map_err(StoreError::io("make", &self.root))?;
        let _lock = self.lock()?;
        self.sweep();
        let path = self.tmp_path(name);
        fs::create_dir(&path).map_err(StoreError::io("make", &path))?;
        let lock = File::open(&path).map_err(StoreError::io("open", &path))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|e| StoreError::io("lock", &path)(e.into()))?;
        Ok(Staging { path, _lock: lock })
    }

    pub(crate) fn commit(&self, staging: Staging, name: &str) -> Result<(), StoreError> {
        settle(&staging)?;
        let target = self.root.join(name);
        let _lock = self.lock()?;
        // What was there trades places with the new one and goes with `staging`.
        if !move_new(&staging, &target)? {
            rename(&staging, &target, RenameFlags::EXCHANGE)
                .map_err(|e| StoreError::io("move into place", &target)(e.into()))?;
        }
        self.sync()
    }

    /// The same, unless there is an entry of that name. → whether it appeared.
    pub(crate) fn commit_new(&self, staging: &Staging, name: &str) -> Result<bool, StoreError> {
        settle(staging)?;
        let _lock = self.lock()?;
        let appeared = move_new(staging, &self.root.join(name))?;
        self.sync()?;
        Ok(appeared)
    }

    /// The same, in place of the entry of that name, if `may` says so of it.
    pub(crate) fn commit_over(
        &self,
        staging: &Staging,
        name: &str,
        may: &dyn Fn() -> bool,
    ) -> Result<bool, StoreError> {
        settle(staging)?;
        let target = self.root.join(name);
        let _lock = self.lock()?;
        if !may() {
            return Ok(false);
        }
        rename(staging, &target, RenameFlags::EXCHANGE)
            .map_err(|e| StoreError::io("move into place", &target)(e.into()))?;
        self.sync()?;
        Ok(true)
    }

    /// Whether there was such an entry.
    pub(crate) fn remove(&self, name: &str) -> Result<bool, StoreError> {
        if !self.root.join(name).exists() {
            return Ok(false);
        }
        let _lock = self.lock()?;
        let (from, to) = (self.root.join(name), self.tmp_path(name));
        match fs::rename(&from, &to) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(StoreError::io("remove", &from)(e)),
        }
        self.sync()?;
        // No longer visible as an image. After a crash here, the next sweep removes it.
        fs::remove_dir_all(&to).map_err(StoreError::io("remove", &to))?;
        Ok(true)
    }

    fn make_root(&self) -> io::Result<()> {
        fs::create_dir_all(&self.root)?;
        if self.is_private {
            // Also one that was made by an earlier version, or by hand.
            fs::set_permissions(&self.root, fs::Permissions::from_mode(0o700))?;
        }
        Ok(())
    }

    fn tmp_path(&self, name: &str) -> PathBuf {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        self.root.join(format!("{TMP_PREFIX}{name}-{}-{count}", std::process::id()))
    }

    /// Remove what dead builds left. A live one holds a lock on its folder, which dies with it.
    fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.root) else { return };
        for entry in entries.flatten() {
            if !entry.file_name().to_string_lossy().starts_with(TMP_PREFIX) {
                continue;
            }
            let path = entry.path();
            let Ok(folder) = File::open(&path) else { continue };
            if rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
                tracing::info!(path = %path.display(), "removing what a dead build left");
                if let Err(error) = fs::remove_dir_all(&path) {
                    tracing::warn!(path = %path.display(), %error, "a dead build's folder stays");
                }
            }
        }
    }

    fn lock(&self) -> Result<File, StoreError> {
        let path = self.root.join(".lock");
        let file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(false)
            .open(&path)
            .map_err(StoreError::io("open", &path))?;
        let deadline = Instant::now() + LOCK_WAIT_MAX;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                    let _ = rustix::event::poll(&mut [], Some(&LOCK_TICK));
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => {
                    let seconds = LOCK_WAIT_MAX.as_secs();
                    return Err(StoreError::Busy { path: self.root.clone(), seconds });
                }
                Err(e) => return Err(StoreError::io("lock", &path)(e.into())),
            }
        }
    }

    fn sync(&self) -> Result<(), StoreError> {
        File::open(&self.root)
            .and_then(|folder| folder.sync_all())
            .map_err(StoreError::io("sync", &self.root))
    }
}

/// Make the files of a folder durable, and readable to QEMU.
fn settle(staging: &Staging) -> Result<(), StoreError> {
    // QEMU runs as another user and gets these files as fds; it re-opens them through /proc, which
    // checks the mode of the file. Other users cannot reach it by path: the store's folder is
    // closed.
    let entries = fs::read_dir(&staging.path).map_err(StoreError::io("read", &staging.path))?;
    for entry in entries {
        let path = entry.map_err(StoreError::io("read", &staging.path))?.path();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
            .and_then(|()| File::open(&path)?.sync_all())
            .map_err(StoreError::io("sync", &path))?;
    }
    fs::set_permissions(&staging.path, fs::Permissions::from_mode(0o755))
        .and_then(|()| File::open(&staging.path)?.sync_all())
        .map_err(StoreError::io("sync", &staging.path))
}

fn rename(staging: &Staging, target: &Path, flags: RenameFlags) -> Result<(), Errno> {
    let here = rustix::fs::CWD;
    rustix::fs::renameat_with(here, &staging.path, here, target, flags)
}

/// Move a folder to its place. → `false`: there is something.
fn move_new(staging: &Staging, target: &Path) -> Result<bool, StoreError> {
    match rename(staging, target, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(e) => Err(StoreError::io("move into place", target)(e.into())),
    }
}

/// A folder being filled. Dropping it removes it, with all that is in it.
#[derive(Debug)]
pub(crate) struct Staging {
    path: PathBuf,
    _lock: File,
}

impl Staging {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "temporary folder stays");
            }
        }
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
