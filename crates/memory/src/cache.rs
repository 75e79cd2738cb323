//! What this host holds of one memory image: a memfd and its presence bitmap.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use vmfork_image::PageRange;

use crate::presence::Presence;

/// The cache of one image. Filled by the image's engine and, in blocks that are at home here, by those of images
/// that descend from it, always with the same bytes; mapped privately by views of all of them.
#[derive(Debug)]
pub struct Cache {
    memfd: OwnedFd,
    /// The same file, for views: enough for a private mapping, not enough to change the cache.
    read_only: OwnedFd,
    presence: Presence,
}

impl Cache {
    /// An empty cache.
    ///
    /// # Errors
    /// No memory or no fds left.
    pub(crate) fn new(name: &str, pages: u64) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&memfd, PageRange::first(pages).byte_len())?;
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        // QEMU is handed a read-only descriptor, and must not be able to reopen it for writing.
        rustix::fs::fchmod(&memfd, Mode::RUSR | Mode::WUSR)?;
        let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
        let read_only = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { memfd, read_only, presence: Presence::new(pages) })
    }

    pub fn presence(&self) -> &Presence {
        &self.presence
    }

    /// What a view maps.
    pub(crate) fn for_views(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }

    /// Have these pages, present. Those that are there already stay as they are: VMs may have read them.
    ///
    /// # Errors
    /// The host is out of memory.
    pub(crate) fn add(&self, range: PageRange, bytes: &[u8]) -> io::Result<()> {
        let (mut rest, mut bytes) = (range, bytes);
        while !rest.is_empty() {
            let (run, is_present) = self.presence.run(rest);
            let len = usize::try_from(run.byte_len()).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at_checked(len).ok_or(io::ErrorKind::InvalidInput)?;
            if !is_present {
                self.write(run, now)?;
                self.presence.set(run);
            }
            (rest, bytes) = (rest.from_page(run.end()), later);
        }
        Ok(())
    }

    /// Put pages into the cache. Their presence is the caller's to set, afterwards.
    ///
    /// # Errors
    /// The host is out of memory.
    pub(crate) fn write(&self, range: PageRange, bytes: &[u8]) -> io::Result<()> {
        debug_assert_eq!(bytes.len() as u64, range.byte_len());
        let (mut offset, mut rest) = (range.byte_offset(), bytes);
        while !rest.is_empty() {
            match rustix::io::pwrite(&self.memfd, rest, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    offset += written as u64;
                    rest = &rest[written..];
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Put pages into the cache that another one has present, without a way through user space. As for
    /// [`Cache::write`], presence is the caller's to set.
    ///
    /// # Errors
    /// The host is out of memory, or the kernel can't (before Linux 5.19).
    pub(crate) fn copy_from(&self, other: &Cache, range: PageRange) -> io::Result<()> {
        let (mut from, mut to) = (range.byte_offset(), range.byte_offset());
        let end = from + range.byte_len();
        while to < end {
            let len = usize::try_from(end - to).unwrap_or(usize::MAX);
            match rustix::fs::copy_file_range(
                &other.memfd,
                Some(&mut from),
                &self.memfd,
                Some(&mut to),
                len,
            ) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Take pages that are present.
    ///
    /// # Errors
    /// As pread(2) on a memfd: never, in practice.
    pub(crate) fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        debug_assert_eq!(bytes.len() as u64, range.byte_len());
        let (mut offset, mut rest) = (range.byte_offset(), bytes);
        while !rest.is_empty() {
            match rustix::io::pread(&self.memfd, &mut *rest, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    offset += read as u64;
                    rest = &mut rest[read..];
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Give pages back to the host, whose presence has been cleared.
    ///
    /// # Errors
    /// As fallocate(2).
    pub(crate) fn discard(&self, range: PageRange) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.memfd, flags, range.byte_offset(), range.byte_len())?)
    }

    /// Bytes of host memory that the cache takes.
    pub fn resident_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.memfd).map_or(0, |stat| stat.st_blocks.cast_unsigned() * 512)
    }
}
