//! The folder of a layer, and its end.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{Mode, OFlags};

use crate::background::Background;

/// Whether layers stay on disk although nothing names them any more.
#[derive(Debug, Default)]
pub(crate) struct Keep(AtomicBool);

impl Keep {
    pub(crate) fn set(&self, keep: bool) {
        self.0.store(keep, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A layer's folder. It is unlinked in the background after the last reference has gone.
#[derive(Debug)]
pub(crate) struct LayerFolder {
    path: PathBuf,
    /// All layers of the store stay: another daemon takes over.
    all: Arc<Keep>,
    /// This one stays: an earlier daemon left it, and the caller has not decided yet.
    pub(crate) this: Keep,
    rubbish: Arc<Background>,
    /// Held while a file beside the data and the map is written.
    writing: Mutex<()>,
}

impl LayerFolder {
    pub(crate) fn new(path: PathBuf, all: Arc<Keep>, rubbish: Arc<Background>) -> Self {
        Self { path, all, this: Keep::default(), rubbish, writing: Mutex::default() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Held while a note or a table is written, or made durable.
    pub(crate) fn writing(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LayerFolder {
    fn drop(&mut self) {
        if self.all.get() || self.this.get() {
            return;
        }
        let path = std::mem::take(&mut self.path);
        self.rubbish.put(Box::new(move || {
            if let Err(error) = remove_layer(&path) {
                tracing::warn!(path = %path.display(), %error, "a layer can't be removed");
            }
        }));
    }
}

/// Removes a layer's folder. Without its note it is half-made: the next daemon removes the rest.
///
/// # Errors
/// The file system's.
pub(crate) fn remove_layer(path: &Path) -> io::Result<()> {
    let absent_is_fine = |outcome: io::Result<()>| match outcome {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    absent_is_fine(std::fs::remove_file(path.join("note")))?;
    absent_is_fine(std::fs::remove_dir_all(path))
}

/// Writes `name` in `folder`, whole or not at all. `durable`: it survives the host.
///
/// # Errors
/// The medium's, or it is full.
pub(crate) fn write_atomically(
    folder: &Path,
    name: &str,
    bytes: &[u8],
    durable: bool,
) -> io::Result<()> {
    let new = folder.join(format!("{name}.new"));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(&new, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all(bytes)?;
    if durable {
        file.sync_data()?;
    }
    std::fs::rename(&new, folder.join(name))?;
    if durable {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}
