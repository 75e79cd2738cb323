//! Files that disks begin with: opened off the async workers, since a hung file system blocks.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use vmfork_api::disk::{DISK_BYTES_MAX, DISK_BYTES_MIN};
use vmfork_disk::{Base, DiskImage, DiskStore, ImageError, RawError};

use super::DiskError;

/// How long a file may take to be opened, and to say where its holes are.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Most files that are opened at a time. One that hangs has a thread until it answers.
const OPENS_MAX: usize = 16;

/// Opens files as what disks begin with.
#[derive(Debug)]
pub(super) struct Bases {
    store: Arc<DiskStore>,
    turns: Arc<Semaphore>,
}

impl Bases {
    pub(super) fn new(store: Arc<DiskStore>) -> Self {
        Self { store, turns: Arc::new(Semaphore::new(OPENS_MAX)) }
    }

    /// A client's file, under its own name.
    ///
    /// # Errors
    /// It can't be read, or does not answer.
    pub(super) async fn open(&self, path: PathBuf) -> Result<DiskImage, DiskError> {
        // Its content is not asked: a guest writes what it likes to a raw disk.
        if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("qcow2")) {
            return Err(DiskError::IsQcow2 { path });
        }
        self.opened(path, |path| Ok(DiskImage::raw(path)?)).await
    }

    /// Whether a file's file system answers. What kind of file it is, is not asked.
    ///
    /// # Errors
    /// There is none, or no answer comes.
    pub(super) async fn answers(&self, path: PathBuf) -> Result<(), DiskError> {
        let missing = |path: &Path, source: io::Error| {
            let path = path.to_owned();
            DiskError::File(ImageError::Raw(RawError::File { path, source }))
        };
        self.opened(path, move |path| {
            std::fs::metadata(path).map(drop).map_err(|source| missing(path, source))
        })
        .await
    }

    /// A file that may go, or be replaced, while disks are on it.
    ///
    /// # Errors
    /// As [`Bases::open`].
    pub(super) async fn keep(&self, path: PathBuf) -> Result<DiskImage, DiskError> {
        let store = Arc::clone(&self.store);
        self.opened(path, move |path| Ok(store.base(path)?)).await
    }

    async fn opened<T: Send + 'static>(
        &self,
        path: PathBuf,
        open: impl FnOnce(&Path) -> Result<T, DiskError> + Send + 'static,
    ) -> Result<T, DiskError> {
        let late = || DiskError::Late { path: path.clone(), after: OPEN_TIMEOUT };
        let opened = timeout(OPEN_TIMEOUT, async {
            let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_closed| late())?;
            let (tell, told) = oneshot::channel();
            let of_thread = path.clone();
            // Not a thread of the runtime: the daemon's end would wait for it.
            let thread = std::thread::Builder::new().name("disk-base".to_owned());
            let thread = thread.spawn(move || {
                let _turn = turn;
                let _given_up = tell.send(open(&of_thread));
            });
            thread.map_err(DiskError::Thread)?;
            told.await.map_err(|_panicked| late())?
        });
        opened.await.map_err(|_late| late())?
    }
}

/// Whether a disk can begin with it: its size, as it was opened.
pub(super) fn check_size(image: &DiskImage) -> Result<(), DiskError> {
    let Base::Raw(_, file) = image.base() else { return Ok(()) };
    let (path, bytes) = (|| file.path().to_owned(), file.stamp().size_bytes);
    match bytes {
        0 => Err(DiskError::Empty { path: path() }),
        bytes if !(DISK_BYTES_MIN..=DISK_BYTES_MAX).contains(&bytes) => {
            Err(DiskError::Range { path: path(), bytes })
        }
        bytes if !bytes.is_multiple_of(512) => Err(DiskError::Size { path: path(), bytes }),
        _ => Ok(()),
    }
}
