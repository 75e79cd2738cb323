//! Empty file systems, made once for each size.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tempfile::NamedTempFile;
use tokio::sync::Mutex;
use vmfork_disk::DiskImage;

use super::DiskError;
use super::base::Bases;
use super::scratch::Scratch;

/// The program that makes them, of Debian's `e2fsprogs`.
const MKE2FS: &str = "mke2fs";
/// It writes a few MB, whatever the size.
const MKE2FS_TIMEOUT: Duration = Duration::from_secs(60);
/// How many sizes are kept for the next VM. Each holds an fd, and a few MB of the host's disk.
const KEPT_MAX: usize = 8;

/// An empty file system that can't be made.
#[derive(Debug, thiserror::Error)]
pub enum BlankError {
    #[error("run {MKE2FS}")]
    Run(#[source] io::Error),
    #[error("{MKE2FS} ended with {status}: {said}")]
    Failed { status: String, said: String },
    #[error("{MKE2FS} did not end within {} s", MKE2FS_TIMEOUT.as_secs())]
    Late,
    #[error("the file of an empty disk")]
    File(#[source] io::Error),
}

/// Those that were made last, by size. All disks of one size begin as the same image.
#[derive(Debug)]
pub(super) struct Blanks {
    scratch: Scratch,
    /// The newest last. Held while one is made: the next request of that size wants the same.
    made: Mutex<VecDeque<(u64, DiskImage)>>,
}

impl Blanks {
    /// Makes files in `folder`.
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        Ok(Self { scratch: Scratch::open(folder)?, made: Mutex::default() })
    }

    /// An empty ext4 file system of `size_bytes`.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(super) async fn get(&self, size_bytes: u64, bases: &Bases) -> Result<DiskImage, DiskError> {
        let mut made = self.made.lock().await;
        if let Some((_, image)) = made.iter().find(|(size, _)| *size == size_bytes) {
            return Ok(image.clone());
        }
        let file = self.make(size_bytes).await?;
        let image = bases.keep(file.path().to_owned()).await?;
        if made.len() >= KEPT_MAX {
            made.pop_front();
        }
        made.push_back((size_bytes, image.clone()));
        Ok(image)
    }

    /// Its name here goes when it is dropped.
    async fn make(&self, size_bytes: u64) -> Result<NamedTempFile, BlankError> {
        let file = self.scratch.file().map_err(BlankError::File)?;
        file.as_file().set_len(size_bytes).map_err(BlankError::File)?;
        let mut command = tokio::process::Command::new(MKE2FS);
        command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-E"]);
        // What is not written now stays holes, on the host as in the guest.
        command.arg("lazy_itable_init=1,lazy_journal_init=1,nodiscard").arg(file.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.kill_on_drop(true);
        let done = tokio::time::timeout(MKE2FS_TIMEOUT, command.output()).await;
        let done = done.map_err(|_late| BlankError::Late)?.map_err(BlankError::Run)?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
            return Err(BlankError::Failed { status: done.status.to_string(), said });
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn files_of_empty_disks_are_bounded() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("blank");
        fs::create_dir(&path).expect("made");
        fs::write(path.join("new-left"), "of a daemon that was killed").expect("written");
        let options = vmfork_disk::StoreOptions { floor_bytes: 0 };
        let store = vmfork_disk::DiskStore::open(&folder.path().join("store"), options);
        let bases = Bases::new(std::sync::Arc::new(store.expect("a store")));
        let blanks = Blanks::open(path.clone()).expect("room");
        let sizes = (1..=KEPT_MAX as u64 + 2).map(|mib| mib << 20);
        for size in sizes {
            let image = blanks.get(size, &bases).await.expect("made");
            assert_eq!(image.size_bytes(), size);
            let again = blanks.get(size, &bases).await.expect("kept");
            assert_eq!(again.id(), image.id());
        }
        assert_eq!(fs::read_dir(&path).expect("there").count(), 0);
        assert_eq!(blanks.made.lock().await.len(), KEPT_MAX);
    }
}
