//! How much of what was written to a unix socket its other end has not read.

use std::ffi::c_int;
use std::io;
use std::os::fd::AsFd;

use rustix::ioctl::{self, Getter, Opcode};

/// `SIOCOUTQ`, which Linux has under the number of the terminals' `TIOCOUTQ`.
const SIOCOUTQ: Opcode = 0x5411;

/// Bytes (with the kernel's overhead for each write) that the other end has not read; 0: none.
///
/// # Errors
/// `fd` is not a socket.
pub(super) fn unread_bytes(fd: impl AsFd) -> io::Result<u32> {
    // SAFETY:
    // - SIOCOUTQ stores one `int` where its argument points, and nothing else.
    // - `Getter` passes a pointer to a `MaybeUninit<c_int>` of its own.
    let bytes = unsafe { ioctl::ioctl(fd, Getter::<SIOCOUTQ, c_int>::new()) }?;
    Ok(u32::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_unread_counts_until_it_is_read() {
        let (mut here, mut there) = UnixStream::pair().expect("socketpair");
        assert_eq!(unread_bytes(&here).expect("ioctl"), 0);
        here.write_all(b"abc").expect("write");
        assert_ne!(unread_bytes(&here).expect("ioctl"), 0);
        there.read_exact(&mut [0; 2]).expect("read");
        assert_ne!(unread_bytes(&here).expect("ioctl"), 0);
        there.read_exact(&mut [0; 1]).expect("read");
        assert_eq!(unread_bytes(&here).expect("ioctl"), 0);
    }
}
