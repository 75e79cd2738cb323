//! A raw file as a base: whole disks as `qemu-img` writes them.
//!
//! Promises: it is opened read-only. Holes are zeros without a read. Bytes are read from the file
//! that was opened. If it has changed since then, as far as `stat` tells, a read fails and gives
//! nothing. Whether the path names another file by now, [`RawFile::is_unchanged`] says.
//!
//! Left to others: what happens to VMs on a file that has changed.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};

use crate::holes::next_data;
use crate::lower::OwnPages;

/// What tells one content of a file from another, as `stat` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub size_bytes: u64,
    pub mtime_s: i64,
    pub mtime_ns: i64,
    pub inode: u64,
}

impl Stamp {
    fn of(found: &std::fs::Metadata) -> Self {
        Self {
            size_bytes: found.size(),
            mtime_s: found.mtime(),
            mtime_ns: found.mtime_nsec(),
            inode: found.ino(),
        }
    }
}

/// A file that is no base.
#[derive(Debug, thiserror::Error)]
pub enum RawError {
    #[error("`{}`", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("`{}` is no regular file", path.display())]
    Kind { path: PathBuf },
    #[error(
        "`{}` has changed since a disk was made on it: restore its bytes, its size and its time",
        path.display()
    )]
    Changed { path: PathBuf },
}

/// A raw file, open for reading.
#[derive(Debug)]
pub struct RawFile {
    file: File,
    path: PathBuf,
    stamp: Stamp,
    /// Dropped with this.
    _held: Option<Arc<dyn Debug + Send + Sync>>,
}

impl RawFile {
    /// # Errors
    /// It can't be opened, or is no regular file.
    pub fn open(path: &Path) -> Result<Self, RawError> {
        let failed = |source| RawError::File { path: path.to_owned(), source };
        // A FIFO would wait for a writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let file = File::from(fd);
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() {
            return Err(RawError::Kind { path: path.to_owned() });
        }
        Ok(Self { file, path: path.to_owned(), stamp: Stamp::of(&found), _held: None })
    }

    /// The same, with what is to be dropped after its last reader.
    pub(crate) fn holding(self, held: Arc<dyn Debug + Send + Sync>) -> Self {
        Self { _held: Some(held), ..self }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Whether the path still names this file, with its size and time.
    pub fn is_unchanged(&self) -> bool {
        let same = |found: io::Result<std::fs::Metadata>| {
            found.is_ok_and(|found| Stamp::of(&found) == self.stamp)
        };
        same(self.file.metadata()) && same(std::fs::metadata(&self.path))
    }

    /// The runs of pages that are not holes.
    ///
    /// # Errors
    /// The medium's.
    pub(crate) fn data(&self) -> io::Result<Vec<PageRange>> {
        let mut runs: Vec<PageRange> = Vec::new();
        let size = self.stamp.size_bytes;
        let mut at = 0;
        while let Some(found) = next_data(&self.file, at, size)? {
            let first =
                PageIdx::of_byte(found.start).max(runs.last().map_or(PageIdx(0), PageRange::end));
            let run = PageRange::between(first, PageIdx(found.end.div_ceil(PAGE_BYTES)));
            if !run.is_empty() {
                runs.push(run);
            }
            at = found.end;
        }
        Ok(runs)
    }
}

impl OwnPages for RawFile {
    fn is_here(&self, _: PageRange) -> bool {
        true
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        // The last page may lie beyond the end in part.
        let there = self.stamp.size_bytes.saturating_sub(range.byte_offset());
        let there = usize::try_from(there).unwrap_or(usize::MAX).min(bytes.len());
        let (data, beyond) = bytes.split_at_mut(there);
        beyond.fill(0);
        let read = self.file.read_exact_at(data, range.byte_offset());
        // The kernel sets the time before it writes: what was written before the read is noticed.
        if Stamp::of(&self.file.metadata()?) != self.stamp {
            return Err(io::Error::other(RawError::Changed { path: self.path.clone() }));
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_not_data_and_a_file_that_changed_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("raw");
        let file = File::create_new(&path).expect("a file");
        file.set_len(64 * PAGE_BYTES + 700).expect("sized");
        file.write_all_at(&[7; 9000], 16 * PAGE_BYTES).expect("written");
        let raw = RawFile::open(&path).expect("a base");
        let data = raw.data().expect("read");
        let written = PageRange::between(PageIdx(16), PageIdx(19));
        assert!(data.iter().any(|run| run.covers(&written)), "{data:?}");
        assert!(data.iter().map(PageRange::len).sum::<u64>() < 64, "{data:?}");
        let mut last = [1; 4096];
        raw.read(PageIdx(64).range(), &mut last).expect("read");
        assert_eq!(last, [0; 4096]);
        assert!(raw.is_unchanged());
        file.set_len(8).expect("cut");
        assert!(!raw.is_unchanged());
        assert!(raw.read(PageIdx(16).range(), &mut last).is_err(), "no zeros that were not there");
        assert!(matches!(RawFile::open(folder.path()), Err(RawError::Kind { .. })));
    }

    #[test]
    fn what_was_written_to_the_file_later_is_not_read_until_it_is_restored() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("raw");
        std::fs::write(&path, [7; 3 * 4096]).expect("written");
        let earlier = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
        let file = File::options().write(true).open(&path).expect("open");
        file.set_modified(earlier).expect("set");
        let raw = RawFile::open(&path).expect("a base");
        let mut page = [0; 4096];
        let read = |page: &mut [u8]| raw.read(PageIdx(1).range(), page);
        read(&mut page).expect("read");
        // Of the same size, and elsewhere.
        file.write_all_at(&[8], 2 * 4096).expect("written");
        let refused = read(&mut page).expect_err("changed");
        let text = refused.to_string();
        assert!(text.contains("restore") && text.contains(&path.display().to_string()), "{text}");
        file.write_all_at(&[7], 2 * 4096).expect("restored");
        read(&mut page).expect_err("its time differs");
        file.set_modified(earlier).expect("set");
        read(&mut page).expect("restored");
        // Another file of that name is not read at all.
        std::fs::remove_file(&path).expect("removed");
        std::fs::write(&path, [9; 3 * 4096]).expect("written");
        read(&mut page).expect("from the file that was opened");
        assert!(page == [7; 4096] && !raw.is_unchanged());
    }
}
