//! A VM's log: what its serial console and detached programs printed, in a file of bounded size.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::{broadcast, mpsc};

/// When the file is this long it becomes the old one (`log.1`), and a new one is begun.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Pieces that a follower may lag behind.
const FOLLOW_PIECES: usize = 1024;
const READ_BYTES: usize = 64 << 10;
/// How much of the end is looked at for the last lines.
const TAIL_BYTES: u64 = 4 << 10;

/// Append-only text of one VM.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    bytes: u64,
    /// `None` once the VM has ended.
    live: Option<broadcast::Sender<Bytes>>,
}

impl Log {
    /// Begin the log of a VM in its folder.
    ///
    /// # Errors
    /// The file can't be made.
    pub fn create(folder: &Path) -> io::Result<Arc<Self>> {
        let path = folder.join("log");
        let file = File::options().create(true).append(true).open(&path)?;
        let (live, _) = broadcast::channel(FOLLOW_PIECES);
        Ok(Arc::new(Self { path, inner: Mutex::new(Inner { file, bytes: 0, live: Some(live) }) }))
    }

    /// Append. A full disk loses the text, not the VM.
    pub fn append(&self, text: Bytes) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.bytes + text.len() as u64 > FILE_BYTES_MAX {
            let rotated = std::fs::rename(&self.path, self.old_path())
                .and_then(|()| File::options().create(true).append(true).open(&self.path));
            match rotated {
                Ok(file) => (inner.file, inner.bytes) = (file, 0),
                Err(error) => {
                    tracing::warn!(%error, path = %self.path.display(), "rotate a VM's log");
                    return;
                }
            }
        }
        if let Err(error) = inner.file.write_all(&text) {
            tracing::debug!(%error, path = %self.path.display(), "write a VM's log");
        }
        inner.bytes += text.len() as u64;
        if let Some(live) = &inner.live {
            let _no_follower = live.send(text);
        }
    }

    /// The VM has ended: followers come to their end.
    pub fn close(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).live = None;
    }

    /// What was written so far, then, if asked for, what comes until the VM ends.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn read(self: &Arc<Self>, follow: bool) -> io::Result<mpsc::Receiver<Bytes>> {
        let (tx, rx) = mpsc::channel(16);
        // Under the lock: nothing is missed or doubled between the file and what follows.
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let old = File::open(self.old_path()).ok();
        let now = File::open(&self.path)?;
        let now_bytes = inner.bytes;
        let live = inner.live.as_ref().filter(|_| follow).map(broadcast::Sender::subscribe);
        drop(inner);
        tokio::spawn(async move {
            for (file, limit) in
                old.map(|file| (file, u64::MAX)).into_iter().chain([(now, now_bytes)])
            {
                let mut file = file.take(limit);
                loop {
                    let read = tokio::task::block_in_place(|| {
                        let mut piece = vec![0; READ_BYTES];
                        file.read(&mut piece).map(|read| {
                            piece.truncate(read);
                            piece
                        })
                    });
                    match read {
                        Ok(piece) if piece.is_empty() => break,
                        Ok(piece) => {
                            if tx.send(piece.into()).await.is_err() {
                                return;
                            }
                        }
                        Err(error) => {
                            tracing::warn!(%error, "read a VM's log");
                            return;
                        }
                    }
                }
            }
            let Some(mut live) = live else { return };
            loop {
                let piece = match live.recv().await {
                    Ok(piece) => piece,
                    Err(broadcast::error::RecvError::Lagged(pieces)) => {
                        format!("\n[vmfork: {pieces} pieces of output were skipped]\n").into()
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                };
                tokio::select! {
                    sent = tx.send(piece) => if sent.is_err() { return },
                    () = tx.closed() => return,
                }
            }
        });
        Ok(rx)
    }

    /// The last lines so far, at most `count`, without what a terminal would act on.
    pub fn last_lines(&self, count: usize) -> Vec<String> {
        let read = || -> io::Result<Vec<u8>> {
            let mut file = File::open(&self.path)?;
            let bytes = file.metadata()?.len();
            file.seek(SeekFrom::Start(bytes.saturating_sub(TAIL_BYTES)))?;
            let mut tail = Vec::new();
            file.take(TAIL_BYTES).read_to_end(&mut tail)?;
            Ok(tail)
        };
        let tail = read().unwrap_or_default();
        let text = String::from_utf8_lossy(&tail);
        let plain = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
        let mut lines: Vec<String> =
            text.lines().map(plain).filter(|line| !line.trim().is_empty()).collect();
        lines.drain(..lines.len().saturating_sub(count));
        lines
    }

    fn old_path(&self) -> PathBuf {
        self.path.with_extension("1")
    }
}
