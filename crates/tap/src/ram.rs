//! What the shim knows of the guest's RAM, shared between QEMU's threads (hooks) and the keeper.
//!
//! Everything is an atomic in static memory. The keeper changes it only while the VM is stopped, or
//! for parts of RAM that no guest access can reach.

use core::ffi::c_int;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use linux_raw_sys::general::{
    UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFDIO_REGISTER_MODE_MISSING,
    UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_range, uffdio_register, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_ZEROPAGE};
use vmfork_tap_proto::BLOCK_BYTES;

use crate::{blocks, sys};

pub(crate) const PAGE_BYTES: usize = 4096;

/// `_IO(0xAA, 0)`: a new userfaultfd from `/dev/userfaultfd`; linux-raw-sys lacks it.
const USERFAULTFD_IOC_NEW: u32 = 0xAA00;
/// The bits in `uffdio_register.ioctls` that the page engine needs.
const IOCTLS_NEEDED: u64 = (1 << 2) | (1 << 3) | (1 << 4); // _UFFDIO_WAKE, _COPY, _ZEROPAGE
const _: () = assert!(size_of::<uffdio_register>() == 32);
const _: () = assert!(size_of::<uffdio_zeropage>() == 32);
const _: () = assert!(size_of::<uffdio_api>() == 24);

static FILE_DEV: AtomicU64 = AtomicU64::new(0);
static FILE_INO: AtomicU64 = AtomicU64::new(0);
static WAITS: AtomicBool = AtomicBool::new(false);
static USERFAULTFD: AtomicI32 = AtomicI32::new(-1);
static START: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static MAPPINGS: AtomicU32 = AtomicU32::new(0);
static MERGEABLE: AtomicBool = AtomicBool::new(false);
static IS_VIEW: AtomicBool = AtomicBool::new(false);
/// The kernel can register files in memory for write protection.
static CAN_BY_PAGE: AtomicBool = AtomicBool::new(false);
static BY_PAGE: AtomicBool = AtomicBool::new(false);

/// Remember the RAM file, and make the userfaultfd for this address space. False: something is
/// missing, and the shim stays out of QEMU's way.
pub(crate) fn init(userfaultfd_device: c_int, ram_file: c_int, waits: bool) -> bool {
    let Some((dev, ino)) = sys::identity(ram_file) else { return false };
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK).cast_unsigned() as usize;
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value.
    let Ok(fd) = (unsafe { sys::ioctl(userfaultfd_device, USERFAULTFD_IOC_NEW, flags) }) else {
        return false;
    };
    // Out of the way of the numbers that QEMU was given.
    let low = c_int::try_from(fd).unwrap_or(-1);
    let Some(fd) = sys::dup_from(low, 200).ok().and_then(|fd| c_int::try_from(fd).ok()) else {
        return false;
    };
    sys::close(low);
    // With it a registration moves along with its mapping; `vmforkd` is told, and the mover waits
    // until it has read so.
    let moves = u64::from(UFFD_FEATURE_EVENT_REMAP);
    if begin(fd, moves | u64::from(UFFD_FEATURE_WP_HUGETLBFS_SHMEM)).is_ok() {
        CAN_BY_PAGE.store(true, Relaxed);
    } else if begin(fd, moves).is_err() {
        return false;
    }
    USERFAULTFD.store(fd, Relaxed);
    WAITS.store(waits, Relaxed);
    FILE_DEV.store(dev, Relaxed);
    FILE_INO.store(ino, Release);
    true
}

/// The handshake of a new userfaultfd. One that fails changes nothing.
fn begin(userfaultfd: c_int, features: u64) -> Result<(), u32> {
    let mut api = uffdio_api { api: 0xAA, features, ioctls: 0 };
    let argument: *mut uffdio_api = &raw mut api;
    // SAFETY: UFFDIO_API takes a `uffdio_api`, alive here.
    unsafe { sys::ioctl(userfaultfd, UFFDIO_API, argument.expose_provenance()) }.map(|_| ())
}

/// Whether `fd` is the file that QEMU believes to be its RAM.
pub(crate) fn is_ram_file(fd: c_int) -> bool {
    let ino = FILE_INO.load(Acquire);
    ino != 0 && fd >= 0 && sys::identity(fd) == Some((FILE_DEV.load(Relaxed), ino))
}

pub(crate) fn userfaultfd() -> c_int {
    USERFAULTFD.load(Relaxed)
}

/// Whether this QEMU waits for a snapshot (else a VM boots in it).
pub(crate) fn waits() -> bool {
    WAITS.load(Relaxed)
}

/// QEMU has mapped its RAM. Only the first mapping counts as RAM; a second makes the VM unforkable.
pub(crate) fn mapped(start: usize, bytes: usize) {
    if MAPPINGS.fetch_add(1, Relaxed) == 0 {
        BYTES.store(bytes as u64, Relaxed);
        START.store(start as u64, Release);
    }
}

pub(crate) fn mappings() -> u32 {
    MAPPINGS.load(Relaxed)
}

pub(crate) fn note_mergeable() {
    MERGEABLE.store(true, Relaxed);
}

pub(crate) fn mergeable() -> bool {
    MERGEABLE.load(Relaxed)
}

/// RAM's start and size in bytes; (0, 0) before it is mapped.
pub(crate) fn range() -> (usize, usize) {
    let start = START.load(Acquire);
    (start as usize, BYTES.load(Relaxed) as usize)
}

/// Whether the range lies in RAM as a whole.
pub(crate) fn contains(at: usize, len: usize) -> bool {
    let (start, bytes) = range();
    start != 0 && at >= start && at.checked_add(len).is_some_and(|end| end <= start + bytes)
}

/// Whether RAM is a view of a cache (and so registered, but for runs of zeros).
pub(crate) fn is_view() -> bool {
    IS_VIEW.load(Acquire)
}

pub(crate) fn set_view() {
    IS_VIEW.store(true, Release);
}

/// From now on ranges are registered so that the kernel maps only pages that are touched, or as it
/// likes. Around a registration for write protection it maps none ahead; nothing is ever protected.
pub(crate) fn set_by_page(by_page: bool) {
    BY_PAGE.store(by_page && CAN_BY_PAGE.load(Relaxed), Relaxed);
}

/// The address of a word that can be read for as long as this address space is there.
pub(crate) fn witness() -> usize {
    (&raw const START).expose_provenance()
}

/// Register a range for missing faults. `userfaultfd` is the number in the calling process's own
/// table.
pub(crate) fn register(userfaultfd: c_int, at: usize, len: usize) -> Result<(), u32> {
    let more = if BY_PAGE.load(Relaxed) { UFFDIO_REGISTER_MODE_WP } else { 0 };
    let mut request = uffdio_register {
        range: uffdio_range { start: at as u64, len: len as u64 },
        mode: u64::from(UFFDIO_REGISTER_MODE_MISSING | more),
        ioctls: 0,
    };
    let argument: *mut uffdio_register = &raw mut request;
    // SAFETY: UFFDIO_REGISTER takes a `uffdio_register`, alive here.
    unsafe { sys::ioctl(userfaultfd, UFFDIO_REGISTER, argument.expose_provenance())? };
    if request.ioctls & IOCTLS_NEEDED == IOCTLS_NEEDED {
        Ok(())
    } else {
        Err(libc::EOPNOTSUPP.unsigned_abs())
    }
}

/// End the registration of a range, as far as it is registered.
pub(crate) fn unregister(userfaultfd: c_int, at: usize, len: usize) -> Result<(), u32> {
    let mut range = uffdio_range { start: at as u64, len: len as u64 };
    let argument: *mut uffdio_range = &raw mut range;
    // SAFETY: UFFDIO_UNREGISTER takes a `uffdio_range`, alive here.
    unsafe { sys::ioctl(userfaultfd, UFFDIO_UNREGISTER, argument.expose_provenance()) }.map(|_| ())
}

/// Zeros in a page-aligned range of a view whose pages were dropped just now. A page may not be
/// missing any more, since the kernel mapped it beside another, from the cache. Or it can't get the
/// zero page now, since a mapping is in progress. Such a page is overwritten. Otherwise it would
/// read as what the snapshot had.
pub(crate) fn zero_dropped(at: usize, len: usize) {
    install_zeros(at, len, |page| {
        let page: *mut u8 = core::ptr::with_exposed_provenance_mut(page);
        // SAFETY: a page of RAM that the guest has given away, so that nothing else uses it. If it
        // is missing, this waits for `vmforkd`, like any access of QEMU's.
        unsafe { page.write_bytes(0, PAGE_BYTES) };
    });
}

/// Zeros in a page-aligned range of a view that is about to be overwritten, wherever nothing is
/// installed yet, which spares a fetch. Pages that are present, or can't be given the zero page
/// now, stay as they are.
pub(crate) fn zero_missing(at: usize, len: usize) {
    install_zeros(at, len, |_| {});
}

/// Install the zero page wherever nothing is installed yet. `refused` is called for each page where
/// that failed, except where the kernel serves zeros by itself. Bounded: every
/// step advances.
fn install_zeros(at: usize, len: usize, refused: impl Fn(usize)) {
    let end = at + len;
    let (start, _) = range();
    let mut next = at;
    let mut retries = 0;
    while next < end {
        let block_end = (next | (BLOCK_BYTES as usize - 1)) + 1;
        let stop = block_end.min(end);
        if !blocks::RAM.touch((next - start) / BLOCK_BYTES as usize) {
            (next..stop).step_by(PAGE_BYTES).for_each(&refused);
            next = stop;
            continue;
        }
        let mut request = uffdio_zeropage {
            range: uffdio_range { start: next as u64, len: (stop - next) as u64 },
            mode: 0,
            zeropage: 0,
        };
        let argument: *mut uffdio_zeropage = &raw mut request;
        // SAFETY: UFFDIO_ZEROPAGE takes a `uffdio_zeropage`, alive here; it fills missing pages
        // only.
        let done =
            unsafe { sys::ioctl(userfaultfd(), UFFDIO_ZEROPAGE, argument.expose_provenance()) };
        let filled = usize::try_from(request.zeropage).unwrap_or(0);
        match done {
            Ok(_) => next = stop,
            Err(_) if filled > 0 => next += filled,
            Err(errno) if errno == libc::EAGAIN.unsigned_abs() && retries < 64 => retries += 1,
            // A run of zeros, which is not registered: anonymous memory.
            Err(errno) if errno == libc::ENOENT.unsigned_abs() => next = stop,
            Err(_) => {
                refused(next);
                next += PAGE_BYTES;
                retries = 0;
            }
        }
    }
}
