//! Receives into RAM: the part of a message that a socket can fill at once, and the pages that need
//! no fetch for it.
//!
//! QEMU's NBD client receives a disk's bytes by `recvmsg`, straight into the guest's pages. A page
//! of a view that is missing would be fetched, only to be overwritten. A file has all the bytes
//! that a `pread` asks for. A socket often has fewer: zeros in a page that the call does not reach
//! would hide what the guest has there. So the hook asks how many bytes are there, and receives no
//! more than these:
//!
//! ```text
//!   a part of the message     ├──── page ────┼──── page ────┼──── page ────┤
//!   bytes in the socket       ├──────────────────────┤
//!   zeros where it is missing ├──────────────┼──────────────┤
//!   received                  ├──────────────────────┤
//! ```
//!
//! Why no page reads wrong:
//!
//! - A page gets zeros only if it lies in a part of the message as a whole and bytes for it are in
//!   the socket. A stream socket hands them out in order. It returns no less than it has, or than
//!   was asked for, as long as nothing else reads it. QEMU reads a connection from one coroutine at
//!   a time. So pages that the call does not reach are not touched, whether it fails, would block,
//!   or meets the end of the stream.
//! - All bytes of such a page are there, but for the last page. Its rest stays zeros until the next
//!   call. QEMU receives a part as a whole (`qio_channel_readv_all`), or the guest's request
//!   fails or is sent again. Until a request has succeeded, the guest has lent the page to its
//!   device, which may have overwritten any of it. No freeze comes in between: `stop` waits for
//!   all requests.
//! - Fewer bytes than were asked for are a lawful answer of a stream socket. Where they are not
//!   (other sockets, `MSG_WAITALL`), or where the message asks for more than bytes, it passes
//!   through as it is.
//!
//! Receiving no more than was there is a part of it. Bytes that come during the call would go into
//! missing pages behind.

use core::ffi::c_int;

use libc::{iovec, msghdr};

use crate::ram::PAGE_BYTES;
use crate::sys;

/// Most parts of a message that one call fills: they are copied to the stack. More are left to the
/// next call.
pub(crate) const PARTS_MAX: usize = 256;
/// `UIO_MAXIOV`: the kernel refuses more.
const PARTS_ASKED_MAX: usize = 1024;
/// Flags under which fewer bytes are a lawful answer, and bytes are taken out of the socket.
const FLAGS_KNOWN: c_int = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC | libc::MSG_NOSIGNAL;

pub(crate) const NO_PART: iovec = iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };

/// The parts of a message that asks for bytes and nothing else, in a way that is known here.
///
/// # Safety
/// `message` is null or what recvmsg(2) takes.
pub(crate) unsafe fn parts<'a>(message: *const msghdr, flags: c_int) -> Option<&'a [iovec]> {
    if message.is_null() || flags & !FLAGS_KNOWN != 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let msghdr { msg_name, msg_iov, msg_iovlen, msg_control, .. } = unsafe { *message };
    let plain = msg_name.is_null() && msg_control.is_null() && !msg_iov.is_null();
    if !plain || !(1..=PARTS_ASKED_MAX).contains(&msg_iovlen) {
        return None;
    }
    // SAFETY: the caller promises this many iovecs; they are only read.
    Some(unsafe { core::slice::from_raw_parts(msg_iov, msg_iovlen) })
}

/// How many bytes a stream socket can hand out at once. `None`: it is something else.
pub(crate) fn available(fd: c_int) -> Option<usize> {
    if sys::socket_type(fd) != Ok(libc::SOCK_STREAM) {
        return None;
    }
    sys::readable_bytes(fd).ok().and_then(|bytes| usize::try_from(bytes).ok())
}

/// Copies the parts that `bytes` reach, the last one shortened to end with them. Calls
/// `overwritten` with where each begins, and how far it is overwritten: to the end of the last page
/// that it reaches, within the part. → how many there are.
pub(crate) fn reach(
    parts: &[iovec],
    bytes: usize,
    into: &mut [iovec; PARTS_MAX],
    mut overwritten: impl FnMut(usize, usize),
) -> usize {
    let (mut left, mut count) = (bytes, 0);
    for (part, copy) in parts.iter().zip(into) {
        if left == 0 {
            break;
        }
        let len = part.iov_len.min(left);
        *copy = iovec { iov_base: part.iov_base, iov_len: len };
        left -= len;
        count += 1;
        let at = part.iov_base.expose_provenance();
        let beyond_page = at.wrapping_add(len) % PAGE_BYTES;
        let rest_of_page = (PAGE_BYTES - beyond_page) % PAGE_BYTES;
        overwritten(at, len.saturating_add(rest_of_page).min(part.iov_len));
    }
    count
}

#[cfg(test)]
mod tests {
    use core::ptr::{null_mut, with_exposed_provenance_mut};

    use super::*;

    const PAGE: usize = PAGE_BYTES;

    fn part(at: usize, len: usize) -> iovec {
        iovec { iov_base: with_exposed_provenance_mut(at), iov_len: len }
    }

    type Ranges = Vec<(usize, usize)>;

    /// → (address, length) of what is received, and of what is overwritten.
    fn reached(parts: &[iovec], bytes: usize) -> (Ranges, Ranges) {
        let (mut into, mut pages) = ([NO_PART; PARTS_MAX], Vec::new());
        let count = reach(parts, bytes, &mut into, |at, len| pages.push((at, len)));
        let short =
            into[..count].iter().map(|part| (part.iov_base.expose_provenance(), part.iov_len));
        (short.collect(), pages)
    }

    #[test]
    fn no_more_is_received_than_was_there() {
        let parts = [part(0x10_000, 3 * PAGE), part(0x40_000, 2 * PAGE)];
        assert_eq!(reached(&parts, 0), (vec![], vec![]));
        // Half a page: the page as a whole, and no other.
        assert_eq!(reached(&parts, 100), (vec![(0x10_000, 100)], vec![(0x10_000, PAGE)]));
        let page = (vec![(0x10_000, PAGE)], vec![(0x10_000, PAGE)]);
        assert_eq!(reached(&parts, PAGE), page);
        let more = (vec![(0x10_000, PAGE + 1)], vec![(0x10_000, 2 * PAGE)]);
        assert_eq!(reached(&parts, PAGE + 1), more);
        // The second part's first byte.
        let both = (
            vec![(0x10_000, 3 * PAGE), (0x40_000, 1)],
            vec![(0x10_000, 3 * PAGE), (0x40_000, PAGE)],
        );
        assert_eq!(reached(&parts, 3 * PAGE + 1), both);
        let all = vec![(0x10_000, 3 * PAGE), (0x40_000, 2 * PAGE)];
        assert_eq!(reached(&parts, usize::MAX), (all.clone(), all));
    }

    #[test]
    fn nothing_behind_a_part_is_overwritten() {
        // It ends in the middle of a page.
        let parts = [part(0x10_000, PAGE + 100)];
        assert_eq!(reached(&parts, PAGE + 50).1, [(0x10_000, PAGE + 100)]);
        // It begins there, as after a call that ended there.
        let parts = [part(0x10_800, 2 * PAGE)];
        assert_eq!(reached(&parts, 10).1, [(0x10_800, 0x800)]);
        assert_eq!(reached(&parts, 0x801).1, [(0x10_800, 0x1800)]);
    }

    #[test]
    fn no_address_or_length_is_too_large() {
        let parts = [part(usize::MAX - 10, usize::MAX), part(usize::MAX, 1), part(0, 0)];
        for bytes in [1, PAGE, usize::MAX] {
            let (short, pages) = reached(&parts, bytes);
            assert_eq!(short.len(), pages.len());
        }
        let many = [part(0x10_000, 1); 2 * PARTS_MAX];
        assert_eq!(reached(&many, usize::MAX).0.len(), PARTS_MAX);
    }

    #[test]
    fn what_is_not_understood_is_left_alone() {
        let mut iov = [part(0x10_000, PAGE)];
        // SAFETY: plain data, valid as zeros.
        let mut message: msghdr = unsafe { core::mem::zeroed() };
        // SAFETY: null, or a message whose iovecs live.
        let known = |message: *const msghdr, flags| unsafe { parts(message, flags) }.is_some();
        assert!(!known(core::ptr::null(), 0));
        assert!(!known(&raw const message, 0), "no parts");
        message.msg_iov = iov.as_mut_ptr();
        message.msg_iovlen = 1;
        assert!(known(&raw const message, libc::MSG_DONTWAIT));
        for flag in [libc::MSG_PEEK, libc::MSG_WAITALL, libc::MSG_TRUNC, libc::MSG_ERRQUEUE] {
            assert!(!known(&raw const message, flag), "{flag:#x}");
        }
        message.msg_control = iov.as_mut_ptr().cast();
        assert!(!known(&raw const message, 0), "fds may come");
        message.msg_control = null_mut();
        message.msg_iovlen = PARTS_ASKED_MAX + 1;
        assert!(!known(&raw const message, 0), "the kernel refuses it");
    }

    #[test]
    fn only_a_stream_socket_says_what_it_has() {
        use std::io::Write;
        use std::os::fd::AsRawFd;
        use std::os::unix::net::{UnixDatagram, UnixStream};
        let (mut to, from) = UnixStream::pair().expect("socketpair");
        assert_eq!(available(from.as_raw_fd()), Some(0));
        to.write_all(&[7; 5000]).expect("room");
        to.write_all(&[7; 500]).expect("room");
        assert_eq!(available(from.as_raw_fd()), Some(5500));
        let (to, from) = UnixDatagram::pair().expect("socketpair");
        to.send(&[7; 100]).expect("room");
        assert_eq!(available(from.as_raw_fd()), None);
        assert_eq!(available(-1), None);
    }
}
