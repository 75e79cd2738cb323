//! qcow2 files of clients: disks begin with the raw file that is made of one.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use vmfork_api::disk::{DISK_BYTES_MAX, DISK_BYTES_MIN};
use vmfork_disk::DiskImage;
use vmfork_guest_image::qcow2::{Bounds, Qcow2Error, convert};
use vmfork_guest_image::{Cancel, Remedy as _};

use super::DiskError;
use super::base::Bases;
use super::scratch::Scratch;

/// How many are converted at a time: each takes a processor and the medium.
const TURNS: usize = 2;
/// How often is looked whether there is still space.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Converts files, and forgets them: a disk that begins with the same file later gets a new copy,
/// because the file may have changed.
#[derive(Debug)]
pub(super) struct Converter {
    scratch: Scratch,
    turns: Arc<Semaphore>,
}

/// Ends a conversion that no client waits for.
struct OnDrop(Cancel);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Converter {
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        Ok(Self { scratch: Scratch::open(folder)?, turns: Arc::new(Semaphore::new(TURNS)) })
    }

    /// What the disk in a qcow2 file holds.
    ///
    /// # Errors
    /// It can't be converted, or does not fit.
    pub(super) async fn get(&self, path: PathBuf, bases: &Bases) -> Result<DiskImage, DiskError> {
        // A file system that hangs keeps no turn.
        bases.answers(path.clone()).await?;
        let turns = Arc::clone(&self.turns);
        let turn = turns.acquire_owned().await.map_err(|_closed| DiskError::GivenUp)?;
        let file = self.scratch.file().map_err(DiskError::Scratch)?;
        let bounds = Bounds {
            min_bytes: DISK_BYTES_MIN,
            max_bytes: DISK_BYTES_MAX,
            free_bytes: self.scratch.free_bytes().map_err(DiskError::Scratch)?,
        };
        let cancel = Cancel::default();
        let _on_drop = OnDrop(cancel.clone());
        let (tell, mut told) = oneshot::channel();
        let (from, to) = (path.clone(), file.path().to_owned());
        // Not a thread of the runtime: the daemon's end would wait for it.
        let thread = std::thread::Builder::new().name("qcow2".to_owned());
        let (of_thread, shown) = (cancel.clone(), path.clone());
        let thread = thread.spawn(move || {
            let (_turn, cancel) = (turn, of_thread);
            let _given_up = tell.send(convert(&from, &to, bounds, &cancel));
        });
        thread.map_err(DiskError::Thread)?;
        let converted = loop {
            if let Ok(converted) = timeout(LOOK_EVERY, &mut told).await {
                break converted.map_err(|_panicked| DiskError::GivenUp)?;
            }
            // Others write meanwhile.
            if self.scratch.free_bytes().map_err(DiskError::Scratch)? == 0 {
                cancel.cancel();
                let bytes = file.as_file().metadata().map_or(0, |found| found.blocks() * 512);
                return Err(Qcow2Error::Full { path: shown, bytes, free: 0 }.into());
            }
        };
        converted.map_err(DiskError::from)?;
        bases.keep(file.path().to_owned()).await
    }
}

impl From<Qcow2Error> for DiskError {
    fn from(source: Qcow2Error) -> Self {
        let remedy = source.remedy();
        Self::Qcow2 { source: Box::new(source), remedy }
    }
}
