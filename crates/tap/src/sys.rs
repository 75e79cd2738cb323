//! System calls without libc: the keeper shares thread-local storage (and so `errno`) with QEMU's
//! main thread, and hooks must leave `errno` alone.

use core::arch::asm;
use core::ffi::{c_int, c_ulong};

/// `ioctl` for the number of bytes that can be read; libc has it in another type.
const FIONREAD: u32 = 0x541B;

/// What a call answers: a value, or an errno.
pub(crate) type Result = core::result::Result<usize, u32>;

/// # Safety
/// As the system call `nr` demands of its arguments.
#[inline]
#[allow(clippy::many_single_char_names)]
unsafe fn syscall6(
    nr: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> Result {
    let ret: isize;
    // SAFETY: the x86-64 Linux convention: number in rax, arguments in these registers, rcx and r11
    // clobbered. The caller answers for what the call does to memory (see above).
    unsafe {
        asm!("syscall", inlateout("rax") nr => ret, in("rdi") a, in("rsi") b, in("rdx") c,
             in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _,
             options(nostack));
    }
    if (-4095..0).contains(&ret) {
        Err(u32::try_from(-ret).unwrap_or(libc::EINVAL.unsigned_abs()))
    } else {
        Ok(ret.cast_unsigned())
    }
}

fn nr(number: libc::c_long) -> usize {
    number.cast_unsigned() as usize
}

fn arg(value: c_int) -> usize {
    (value as isize).cast_unsigned()
}

/// # Safety
/// Replaces whatever is mapped in the range when `flags` has MAP_FIXED: no code may rely on it.
pub(crate) unsafe fn mmap(
    at: usize,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: usize,
) -> Result {
    // SAFETY: the caller's promise.
    unsafe { syscall6(nr(libc::SYS_mmap), at, len, arg(prot), arg(flags), arg(fd), offset) }
}

/// # Safety
/// As `mmap`, for both ranges.
pub(crate) unsafe fn mremap(from: usize, len: usize, flags: u32, to: usize) -> Result {
    // SAFETY: the caller's promise.
    unsafe { syscall6(nr(libc::SYS_mremap), from, len, len, flags as usize, to, 0) }
}

/// # Safety
/// No code may use the range any more.
pub(crate) unsafe fn munmap(at: usize, len: usize) -> Result {
    // SAFETY: the caller's promise.
    unsafe { syscall6(nr(libc::SYS_munmap), at, len, 0, 0, 0, 0) }
}

/// # Safety
/// MADV_DONTNEED discards what is in the range.
pub(crate) unsafe fn madvise(at: usize, len: usize, advice: c_int) -> Result {
    // SAFETY: the caller's promise.
    unsafe { syscall6(nr(libc::SYS_madvise), at, len, arg(advice), 0, 0, 0) }
}

/// # Safety
/// `argument` must be what the request expects.
pub(crate) unsafe fn ioctl(fd: c_int, request: u32, argument: usize) -> Result {
    // SAFETY: the caller's promise.
    unsafe { syscall6(nr(libc::SYS_ioctl), arg(fd), request as usize, argument, 0, 0, 0) }
}

/// # Safety
/// `message` and all that it points to must be valid for the call.
pub(crate) unsafe fn recvmsg(fd: c_int, message: &mut libc::msghdr, flags: c_int) -> Result {
    let message: *mut libc::msghdr = message;
    // SAFETY: the caller's promise.
    unsafe {
        syscall6(nr(libc::SYS_recvmsg), arg(fd), message.expose_provenance(), arg(flags), 0, 0, 0)
    }
}

/// # Safety
/// `message` and all that it points to must be valid for the call.
pub(crate) unsafe fn sendmsg(fd: c_int, message: &libc::msghdr, flags: c_int) -> Result {
    let message: *const libc::msghdr = message;
    // SAFETY: the caller's promise.
    unsafe {
        syscall6(nr(libc::SYS_sendmsg), arg(fd), message.expose_provenance(), arg(flags), 0, 0, 0)
    }
}

/// # Safety
/// As the option demands of its arguments.
pub(crate) unsafe fn prctl(option: c_int, a: usize, b: usize) -> Result {
    // SAFETY: the caller's promise.
    unsafe { syscall6(nr(libc::SYS_prctl), arg(option), a, b, 0, 0, 0) }
}

/// Have this process killed when the thread that started it ends. Without that, the death of
/// `vmforkd` can leave the keeper in an `mremap` that never returns. The kernel waits there until
/// somebody reads the event, and the keeper itself holds the userfaultfd open.
pub(crate) fn die_with_parent() -> bool {
    // SAFETY: the option takes a number.
    unsafe { prctl(libc::PR_SET_PDEATHSIG, arg(libc::SIGKILL), 0) }.is_ok()
}

pub(crate) fn close(fd: c_int) {
    // SAFETY: closing an fd that this module's caller owns touches no memory; the outcome does not
    // matter.
    let _closed = unsafe { syscall6(nr(libc::SYS_close), arg(fd), 0, 0, 0, 0, 0) };
}

/// Close all fds from `first` to `last`, both included.
pub(crate) fn close_range(first: u32, last: u32) {
    // SAFETY: only ever called in the keeper, whose fd table is its own; touches no memory.
    let _closed =
        unsafe { syscall6(nr(libc::SYS_close_range), first as usize, last as usize, 0, 0, 0, 0) };
}

/// A duplicate of `fd` numbered `least` or higher, close-on-exec.
pub(crate) fn dup_from(fd: c_int, least: c_int) -> Result {
    // SAFETY: touches no memory.
    unsafe {
        syscall6(nr(libc::SYS_fcntl), arg(fd), arg(libc::F_DUPFD_CLOEXEC), arg(least), 0, 0, 0)
    }
}

/// Device and inode of an open file.
pub(crate) fn identity(fd: c_int) -> Option<(u64, u64)> {
    // SAFETY: all-zero is a value of this plain C struct.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    let out: *mut libc::stat = &raw mut stat;
    // SAFETY: `out` is a live struct of the size that the call fills.
    let done =
        unsafe { syscall6(nr(libc::SYS_fstat), arg(fd), out.expose_provenance(), 0, 0, 0, 0) };
    done.ok().map(|_| (stat.st_dev, stat.st_ino))
}

/// What kind of socket it is, as `SOCK_STREAM`.
pub(crate) fn socket_type(fd: c_int) -> core::result::Result<c_int, u32> {
    let mut kind: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    let (out, out_len): (*mut c_int, *mut libc::socklen_t) = (&raw mut kind, &raw mut len);
    // SAFETY: `out` is a live int, of which `out_len` tells the size.
    unsafe {
        syscall6(
            nr(libc::SYS_getsockopt),
            arg(fd),
            arg(libc::SOL_SOCKET),
            arg(libc::SO_TYPE),
            out.expose_provenance(),
            out_len.expose_provenance(),
            0,
        )
    }
    .map(|_| kind)
}

/// How many bytes can be read at once.
pub(crate) fn readable_bytes(fd: c_int) -> core::result::Result<c_int, u32> {
    let mut bytes: c_int = 0;
    let out: *mut c_int = &raw mut bytes;
    // SAFETY: FIONREAD fills an int, alive here.
    unsafe { ioctl(fd, FIONREAD, out.expose_provenance()) }.map(|_| bytes)
}

/// The calling process.
pub(crate) fn getpid() -> u64 {
    // SAFETY: touches no memory.
    unsafe { syscall6(nr(libc::SYS_getpid), 0, 0, 0, 0, 0, 0) }.unwrap_or(0) as u64
}

/// A pidfd of process `pid`.
pub(crate) fn pidfd_open(pid: u64) -> Result {
    // SAFETY: touches no memory.
    unsafe { syscall6(nr(libc::SYS_pidfd_open), pid as usize, 0, 0, 0, 0, 0) }
}

/// Send a signal to the process behind a pidfd.
pub(crate) fn pidfd_kill(pidfd: c_int) {
    // SAFETY: touches no memory; a null siginfo is allowed.
    let _sent = unsafe {
        syscall6(nr(libc::SYS_pidfd_send_signal), arg(pidfd), arg(libc::SIGKILL), 0, 0, 0, 0)
    };
}

/// Block every signal for the calling process.
pub(crate) fn block_signals() {
    let all: c_ulong = c_ulong::MAX;
    let set: *const c_ulong = &raw const all;
    // SAFETY: `set` is a live kernel signal set of 8 bytes, which is only read.
    let _blocked = unsafe {
        syscall6(
            nr(libc::SYS_rt_sigprocmask),
            arg(libc::SIG_BLOCK),
            set.expose_provenance(),
            0,
            8,
            0,
            0,
        )
    };
}

/// CLOCK_MONOTONIC, in ns.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let out: *mut libc::timespec = &raw mut time;
    // SAFETY: `out` is a live struct of the size that the call fills.
    let _got = unsafe {
        syscall6(
            nr(libc::SYS_clock_gettime),
            arg(libc::CLOCK_MONOTONIC),
            out.expose_provenance(),
            0,
            0,
            0,
            0,
        )
    };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// End the calling process.
pub(crate) fn exit_group(status: c_int) -> ! {
    loop {
        // SAFETY: does not return.
        let _never = unsafe { syscall6(nr(libc::SYS_exit_group), arg(status), 0, 0, 0, 0, 0) };
    }
}
