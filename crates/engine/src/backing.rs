//! Where a cache keeps its bytes: a file with holes, in memory or on a disk.
//!
//! Promises: an absent page takes no room; a page that is given back is a hole again.
//!
//! Left to others: which pages are there ([`crate::presence`]). A file does not say: what a crash
//! leaves in a [`SparseFile`] counts as nothing.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use vmfork_image::PageRange;

/// A file with holes, as long as the image.
pub trait Backing: Debug + Send + Sync {
    /// For the cache alone, which reads and writes it.
    fn file(&self) -> BorrowedFd<'_>;

    /// The same file, for readers: enough to read it and to map it privately, not enough to change
    /// it.
    fn for_readers(&self) -> BorrowedFd<'_>;
}

/// Host memory. Its size is sealed.
#[derive(Debug)]
pub struct Memfd {
    memfd: OwnedFd,
    read_only: OwnedFd,
}

impl Memfd {
    /// `name` is what `/proc/PID/maps` shows.
    ///
    /// # Errors
    /// No memory or no fds left.
    pub fn new(name: &str, pages: u64) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&memfd, PageRange::first(pages).byte_len())?;
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        // QEMU is handed a read-only descriptor, and must not be able to reopen it for writing.
        rustix::fs::fchmod(&memfd, Mode::RUSR | Mode::WUSR)?;
        let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
        let read_only = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { memfd, read_only })
    }
}

impl Backing for Memfd {
    fn file(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    fn for_readers(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }
}

/// A file on a file system that knows holes. Its creator removes it.
#[derive(Debug)]
pub struct SparseFile {
    file: OwnedFd,
    read_only: OwnedFd,
}

impl SparseFile {
    /// A new file that is one hole.
    ///
    /// # Errors
    /// The path exists, or the file can't be created.
    pub fn create(path: &Path, pages: u64) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, PageRange::first(pages).byte_len())?;
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let read_only = rustix::fs::open(again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { file, read_only })
    }
}

impl Backing for SparseFile {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn for_readers(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }
}
