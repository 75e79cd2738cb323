//! userfaultfd, thin: read faults, install the zero page, wake.
//!
//! On `linux-raw-sys` structs, since the `userfaultfd` crate scrambles `EAGAIN`, closes what it hands
//! out, and lacks newer requests (house-style.md §4).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general::{UFFD_EVENT_PAGEFAULT, uffd_msg, uffdio_range, uffdio_zeropage};
use linux_raw_sys::ioctl::{UFFDIO_WAKE, UFFDIO_ZEROPAGE};

const _: () = assert!(size_of::<uffd_msg>() == 32);
const _: () = assert!(size_of::<uffdio_range>() == 16);
const _: () = assert!(size_of::<uffdio_zeropage>() == 32);

/// Messages read at once. One vCPU has one fault outstanding; 32 are plenty for a VM.
const BATCH: usize = 32;

/// What became of an attempt to install zero pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZeroOutcome {
    /// So many bytes from the start were installed; whoever waited there has been woken.
    Installed(u64),
    /// The first page has something installed already: its waiters still need a wake.
    AlreadyThere,
    /// The address space is changing: try again.
    Retry,
    /// That part is not registered (any more), or its process has gone.
    Gone,
}

/// One VM's userfaultfd, duplicated into this process.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Calls `found` with the address of each fault that waits.
    ///
    /// # Errors
    /// Anything but "nothing there".
    pub(crate) fn read_faults(&self, mut found: impl FnMut(u64)) -> io::Result<()> {
        let mut bytes = [0u8; BATCH * size_of::<uffd_msg>()];
        loop {
            let read = match rustix::io::read(&self.fd, &mut bytes) {
                Ok(read) => read,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            for message in bytes[..read].chunks_exact(size_of::<uffd_msg>()) {
                // Layout of `uffd_msg`: event at 0, for a page fault flags at 8, address at 16.
                if u32::from(message[0]) == UFFD_EVENT_PAGEFAULT {
                    let mut address = [0; 8];
                    address.copy_from_slice(&message[16..24]);
                    found(u64::from_ne_bytes(address));
                }
            }
            if read < bytes.len() {
                return Ok(());
            }
        }
    }

    /// Install the zero page in all of a range where nothing is installed, and wake who waits there.
    pub(crate) fn zeropage(&self, start: u64, len: u64) -> ZeroOutcome {
        let mut request =
            uffdio_zeropage { range: uffdio_range { start, len }, mode: 0, zeropage: 0 };
        // SAFETY:
        // - `fd` is open: we own it.
        // - The argument is a live, exclusively borrowed `uffdio_zeropage`.
        // - The range is in another process; a wrong one is an error there, not unsoundness here.
        let done =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_ZEROPAGE.into(), &raw mut request) };
        if done == 0 {
            return ZeroOutcome::Installed(len);
        }
        match u64::try_from(request.zeropage) {
            Ok(installed) if installed > 0 => ZeroOutcome::Installed(installed),
            _ => match io::Error::last_os_error().raw_os_error() {
                Some(libc::EEXIST) => ZeroOutcome::AlreadyThere,
                Some(libc::EAGAIN) => ZeroOutcome::Retry,
                _ => ZeroOutcome::Gone,
            },
        }
    }

    /// Wake every thread that waits for a page in the range. A process that has gone needs none.
    pub(crate) fn wake(&self, start: u64, len: u64) {
        let mut range = uffdio_range { start, len };
        // SAFETY: as in `zeropage`, with a `uffdio_range`.
        let woken = unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_WAKE.into(), &raw mut range) };
        if woken != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, start, len, "wake");
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
