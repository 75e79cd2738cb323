//! The functions that QEMU calls in libc's stead. Each decides, forwards, and keeps `errno`.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicI32, AtomicUsize};

use libc::{iovec, msghdr, off64_t, size_t, ssize_t};

use crate::ram::{self, PAGE_BYTES};
use crate::{pmem, receive, sys};

/// Addresses of the real functions, found once at load.
static MMAP: AtomicUsize = AtomicUsize::new(0);
static MADVISE: AtomicUsize = AtomicUsize::new(0);
static FALLOCATE: AtomicUsize = AtomicUsize::new(0);
static PREAD: AtomicUsize = AtomicUsize::new(0);
static PREADV: AtomicUsize = AtomicUsize::new(0);
static RECVMSG: AtomicUsize = AtomicUsize::new(0);
static OPEN: AtomicUsize = AtomicUsize::new(0);
static KVM: AtomicI32 = AtomicI32::new(-1);

type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, off64_t) -> *mut c_void;
type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Fallocate = unsafe extern "C" fn(c_int, c_int, off64_t, off64_t) -> c_int;
type Pread = unsafe extern "C" fn(c_int, *mut c_void, size_t, off64_t) -> ssize_t;
type Preadv = unsafe extern "C" fn(c_int, *const iovec, c_int, off64_t) -> ssize_t;
type Recvmsg = unsafe extern "C" fn(c_int, *mut msghdr, c_int) -> ssize_t;
type Open = unsafe extern "C" fn(*const c_char, c_int, libc::mode_t) -> c_int;

/// Look up the real functions.
pub(crate) fn resolve() {
    for (cell, name) in [
        (&MMAP, c"mmap64"),
        (&MADVISE, c"madvise"),
        (&FALLOCATE, c"fallocate64"),
        (&PREAD, c"pread64"),
        (&PREADV, c"preadv64"),
        (&RECVMSG, c"recvmsg"),
        (&OPEN, c"open64"),
    ] {
        real(cell, name);
    }
}

/// The real function's address: from the cell, or looked up now (a hook may run before the
/// constructor).
fn real(cell: &AtomicUsize, name: &CStr) -> usize {
    let known = cell.load(Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: dlsym takes a handle and a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }.expose_provenance();
    cell.store(found, Relaxed);
    found
}

/// Have `open("/dev/kvm")` answered with a duplicate of this fd.
pub(crate) fn offer_kvm(fd: c_int) {
    KVM.store(fd, Relaxed);
}

fn fail(errno: u32) -> c_int {
    // SAFETY: the calling thread's errno; a hook that fails has to set it as libc would.
    unsafe { *libc::__errno_location() = errno.cast_signed() };
    -1
}

/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    if flags & libc::MAP_SHARED != 0 && ram::is_ram_file(fd) {
        let ours = (flags & !libc::MAP_TYPE)
            | libc::MAP_PRIVATE
            | libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE;
        // SAFETY: QEMU asked for a mapping of this range; it gets another kind of one.
        return match unsafe { sys::mmap(at.expose_provenance(), len, prot, ours, -1, 0) } {
            Ok(start) => {
                ram::mapped(start, len);
                core::ptr::with_exposed_provenance_mut(start)
            }
            Err(errno) => {
                fail(errno);
                libc::MAP_FAILED
            }
        };
    }
    let address = real(&MMAP, c"mmap64");
    // SAFETY: `address` is libc's mmap64, which has this type; the arguments are the caller's.
    let mapped =
        unsafe { core::mem::transmute::<usize, Mmap>(address)(at, len, prot, flags, fd, offset) };
    if mapped != libc::MAP_FAILED && pmem::is_file(fd) {
        pmem::mapped(mapped.expose_provenance(), len);
    }
    mapped
}

/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    // SAFETY: on x86-64 the two are one; the caller's promise holds for both.
    unsafe { mmap64(at, len, prot, flags, fd, offset) }
}

/// # Safety
/// As madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(at: *mut c_void, len: size_t, advice: c_int) -> c_int {
    let address = real(&MADVISE, c"madvise");
    let start = at.expose_provenance();
    if ram::contains(start, len) {
        match advice {
            // The moved pages must be where they are after a fork, too.
            libc::MADV_DONTFORK | libc::MADV_DOFORK | libc::MADV_UNMERGEABLE => return 0,
            // Moving a mergeable range walks every page of it.
            libc::MADV_MERGEABLE => {
                ram::note_mergeable();
                return 0;
            }
            // A clone is to hold what it touches, not the 2 MiB around it.
            libc::MADV_HUGEPAGE if ram::waits() => return 0,
            // Balloon and free page reports: the guest wants zeros, or what was there; not the
            // cache's page.
            libc::MADV_DONTNEED | libc::MADV_REMOVE | libc::MADV_FREE => {
                // SAFETY: QEMU asked for these pages to be dropped.
                if let Err(errno) = unsafe { sys::madvise(start, len, libc::MADV_DONTNEED) } {
                    return fail(errno);
                }
                if ram::is_view() {
                    ram::zero_dropped(start, len);
                }
                return 0;
            }
            _ => {}
        }
    }
    // SAFETY: `address` is libc's madvise, which has this type; the arguments are the caller's.
    unsafe { core::mem::transmute::<usize, Madvise>(address)(at, len, advice) }
}

/// Holes in RAM are made by the `madvise` that QEMU always calls beside this; the file is a
/// placeholder.
///
/// # Safety
/// As fallocate(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fallocate64(
    fd: c_int,
    mode: c_int,
    offset: off64_t,
    len: off64_t,
) -> c_int {
    if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 && ram::is_ram_file(fd) {
        return 0;
    }
    let address = real(&FALLOCATE, c"fallocate64");
    // SAFETY: `address` is libc's fallocate64, which has this type; the arguments are the caller's.
    unsafe { core::mem::transmute::<usize, Fallocate>(address)(fd, mode, offset, len) }
}

/// Whole pages of a view that a read is about to overwrite need no fetch.
fn expect_overwrite(at: usize, len: usize) {
    if len < PAGE_BYTES || !ram::is_view() || !ram::contains(at, len) {
        return;
    }
    let first = at.next_multiple_of(PAGE_BYTES);
    let end = (at + len) & !(PAGE_BYTES - 1);
    if end > first {
        ram::zero_missing(first, end - first);
    }
}

/// # Safety
/// As pread(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    offset: off64_t,
) -> ssize_t {
    expect_overwrite(buffer.expose_provenance(), len);
    let address = real(&PREAD, c"pread64");
    // SAFETY: `address` is libc's pread64, which has this type; the arguments are the caller's.
    unsafe { core::mem::transmute::<usize, Pread>(address)(fd, buffer, len, offset) }
}

/// # Safety
/// As preadv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv64(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    offset: off64_t,
) -> ssize_t {
    if ram::is_view() && (1..=1024).contains(&count) && !vector.is_null() {
        // SAFETY: the caller promises `count` iovecs at `vector`; they are only read.
        for part in unsafe { core::slice::from_raw_parts(vector, count.unsigned_abs() as usize) } {
            expect_overwrite(part.iov_base.expose_provenance(), part.iov_len);
        }
    }
    let address = real(&PREADV, c"preadv64");
    // SAFETY: `address` is libc's preadv64, which has this type; the arguments are the caller's.
    unsafe { core::mem::transmute::<usize, Preadv>(address)(fd, vector, count, offset) }
}

/// # Safety
/// As recvmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let into_view = |part: &iovec| {
        part.iov_len >= PAGE_BYTES && ram::contains(part.iov_base.expose_provenance(), part.iov_len)
    };
    if ram::is_view()
        // SAFETY: the caller's promise.
        && let Some(parts) = unsafe { receive::parts(message, flags) }
        && parts.iter().any(into_view)
        && let Some(bytes) = receive::available(fd)
    {
        // SAFETY: the caller's promise; `parts` are those of this message.
        return unsafe { receive_what_is_there(fd, message, flags, parts, bytes) };
    }
    // SAFETY: the caller's promise.
    unsafe { real_recvmsg(fd, message, flags) }
}

/// As `recvmsg`, no more than `bytes`.
///
/// # Safety
/// As recvmsg(2); `parts` are those of `message`.
#[inline(never)]
unsafe fn receive_what_is_there(
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
    parts: &[iovec],
    bytes: usize,
) -> ssize_t {
    let mut short_parts = [receive::NO_PART; receive::PARTS_MAX];
    let count = match bytes {
        // It waits, ends or fails. If something comes just now, one page at most is fetched for it.
        0 => receive::reach(parts, PAGE_BYTES, &mut short_parts, |_, _| {}),
        _ => receive::reach(parts, bytes, &mut short_parts, expect_overwrite),
    };
    // SAFETY: the caller promises a message. It is copied as plain data.
    let mut short = unsafe { *message };
    short.msg_iov = short_parts.as_mut_ptr();
    short.msg_iovlen = count;
    // SAFETY: `count` parts, each within one of the caller's.
    let received = unsafe { real_recvmsg(fd, &raw mut short, flags) };
    // SAFETY: the caller's message, in which the kernel would have set these.
    unsafe {
        (*message).msg_flags = short.msg_flags;
        (*message).msg_namelen = short.msg_namelen;
        (*message).msg_controllen = short.msg_controllen;
    }
    received
}

/// # Safety
/// As recvmsg(2).
unsafe fn real_recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let address = real(&RECVMSG, c"recvmsg");
    // SAFETY: `address` is libc's recvmsg, which has this type; the arguments are the caller's.
    unsafe { core::mem::transmute::<usize, Recvmsg>(address)(fd, message, flags) }
}

/// # Safety
/// As open(2); the third argument is only looked at where open would.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    let kvm = KVM.load(Relaxed);
    // SAFETY: the caller promises a C string.
    if kvm >= 0 && !path.is_null() && unsafe { CStr::from_ptr(path) } == c"/dev/kvm" {
        return match sys::dup_from(kvm, 3) {
            Ok(fd) => c_int::try_from(fd).unwrap_or(-1),
            Err(errno) => fail(errno),
        };
    }
    let address = real(&OPEN, c"open64");
    // SAFETY: `address` is libc's open64. On x86-64 a call that always passes the third argument
    // looks like a variadic call with it. open64 ignores it where it is not wanted.
    unsafe { core::mem::transmute::<usize, Open>(address)(path, flags, mode) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// More has come since the look at the socket: it stays there for the next call.
    #[test]
    fn a_receive_takes_no_more_than_was_seen() {
        let (mut to, from) = UnixStream::pair().expect("socketpair");
        to.write_all(&[7; 3 * PAGE_BYTES]).expect("room");
        let mut pages = [0_u8; 3 * PAGE_BYTES];
        let mut parts = pages
            .chunks_mut(PAGE_BYTES)
            .map(|page| iovec { iov_base: page.as_mut_ptr().cast(), iov_len: PAGE_BYTES });
        let mut parts: [iovec; 3] = core::array::from_fn(|_| parts.next().expect("3 pages"));
        // SAFETY: plain data, valid as zeros.
        let mut message: msghdr = unsafe { core::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
        message.msg_flags = -1;
        let fd = from.as_raw_fd();
        for seen in [PAGE_BYTES + 10, 0] {
            // SAFETY: a message whose parts live, and these parts.
            let received = unsafe {
                receive_what_is_there(fd, &raw mut message, libc::MSG_DONTWAIT, &parts, seen)
            };
            // Without anything seen a page is tried.
            let expected = if seen == 0 { PAGE_BYTES } else { seen };
            assert_eq!(usize::try_from(received), Ok(expected));
            assert_eq!(message.msg_flags, 0, "the kernel's answer");
            assert_eq!((message.msg_iov, message.msg_iovlen), (parts.as_mut_ptr(), 3));
        }
        let filled = pages.iter().filter(|byte| **byte == 7).count();
        assert_eq!(filled, PAGE_BYTES + 10, "the second began where the first did");
    }
}
