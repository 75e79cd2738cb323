//! Where QEMU has mapped its persistent memory, which the keeper maps files over.
//!
//! No page of it is moved by a freeze, and none is registered: the kernel serves it from files.

use core::ffi::c_int;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use crate::ram::PAGE_BYTES;
use crate::sys;

static FILE_DEV: AtomicU64 = AtomicU64::new(0);
static FILE_INO: AtomicU64 = AtomicU64::new(0);
static START: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
static MAPPINGS: AtomicU32 = AtomicU32::new(0);

/// Remember the file that QEMU believes to be its persistent memory.
pub(crate) fn init(file: c_int) {
    if let Some((dev, ino)) = sys::identity(file) {
        FILE_DEV.store(dev, Relaxed);
        FILE_INO.store(ino, Release);
    }
}

/// Whether `fd` is that file.
pub(crate) fn is_file(fd: c_int) -> bool {
    let ino = FILE_INO.load(Acquire);
    ino != 0 && fd >= 0 && sys::identity(fd) == Some((FILE_DEV.load(Relaxed), ino))
}

/// QEMU has mapped it.
pub(crate) fn mapped(start: usize, bytes: usize) {
    if MAPPINGS.fetch_add(1, Relaxed) == 0 {
        BYTES.store(bytes, Relaxed);
        START.store(start, Release);
    }
}

/// Map a file over a part of it, shared and read-only.
pub(crate) fn map(offset: u64, len: u64, file: c_int) -> Result<(), u32> {
    let (start, bytes) = (START.load(Acquire), BYTES.load(Relaxed));
    if start == 0 || MAPPINGS.load(Relaxed) != 1 {
        return Err(libc::ENODEV.unsigned_abs());
    }
    let page = PAGE_BYTES as u64;
    let fits = offset.checked_add(len).is_some_and(|end| end <= bytes as u64);
    if len == 0 || !offset.is_multiple_of(page) || !len.is_multiple_of(page) || !fits {
        return Err(libc::EINVAL.unsigned_abs());
    }
    if file < 0 {
        return Err(libc::EBADF.unsigned_abs());
    }
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range lies in the guest's persistent memory. QEMU knows it as a mapping of a file
    // that it can only read, which this one is, too.
    unsafe { sys::mmap(start + offset as usize, len as usize, libc::PROT_READ, flags, file, 0) }
        .map(|_| ())
}
