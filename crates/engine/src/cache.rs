//! What this host holds of one image: a file with holes ([`Backing`]) and its presence bitmap.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::FallocateFlags;
use vmfork_image::PageRange;

use crate::backing::Backing;
use crate::presence::Presence;

/// The cache of one image. Its engine fills it, and so do engines of images that descend from it,
/// in blocks that are at home here. All bring the same bytes. Readers of all of them read it, or
/// map it privately.
#[derive(Debug)]
pub struct Cache {
    backing: Box<dyn Backing>,
    presence: Presence,
}

impl Cache {
    /// An empty cache. `backing` is one hole.
    ///
    /// # Errors
    /// `backing` has another size.
    pub(crate) fn new(backing: Box<dyn Backing>, pages: u64) -> io::Result<Self> {
        let bytes = rustix::fs::fstat(backing.file())?.st_size.cast_unsigned();
        let expected = PageRange::first(pages).byte_len();
        if bytes != expected {
            let error = format!("a file of {bytes} bytes for a cache of {expected}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, error));
        }
        Ok(Self { backing, presence: Presence::new(pages) })
    }

    pub fn presence(&self) -> &Presence {
        &self.presence
    }

    /// What a reader reads or maps, read-only.
    pub fn for_readers(&self) -> BorrowedFd<'_> {
        self.backing.for_readers()
    }

    /// Have these pages, present. Those that are there already stay as they are: VMs may have read
    /// them.
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
            match rustix::io::pwrite(self.backing.file(), rest, offset) {
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

    /// Put pages into the cache that another one has present, without a way through user space. As
    /// for [`Cache::write`], presence is the caller's to set.
    ///
    /// # Errors
    /// The host is out of memory, or the kernel can't (before Linux 5.19, or between file systems).
    pub(crate) fn copy_from(&self, other: &Cache, range: PageRange) -> io::Result<()> {
        let (mut from, mut to) = (range.byte_offset(), range.byte_offset());
        let end = from + range.byte_len();
        while to < end {
            let len = usize::try_from(end - to).unwrap_or(usize::MAX);
            match rustix::fs::copy_file_range(
                other.backing.file(),
                Some(&mut from),
                self.backing.file(),
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
    /// As pread(2): on a memfd never, in practice; on a disk's file, the disk's.
    pub(crate) fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        debug_assert_eq!(bytes.len() as u64, range.byte_len());
        let (mut offset, mut rest) = (range.byte_offset(), bytes);
        while !rest.is_empty() {
            match rustix::io::pread(self.backing.file(), &mut *rest, offset) {
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
        let (start, len) = (range.byte_offset(), range.byte_len());
        Ok(rustix::fs::fallocate(self.backing.file(), flags, start, len)?)
    }

    /// Bytes of host memory, or of a disk, that the cache takes.
    pub fn resident_bytes(&self) -> u64 {
        rustix::fs::fstat(self.backing.file())
            .map_or(0, |stat| stat.st_blocks.cast_unsigned() * 512)
    }
}
