//! userfaultfd, thin: read faults, install pages, wake.
//!
//! On `linux-raw-sys` structs, since the `userfaultfd` crate scrambles `EAGAIN`, closes what it
//! hands out, and lacks newer requests.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use linux_raw_sys::general::{
    UFFD_EVENT_PAGEFAULT, UFFD_PAGEFAULT_FLAG_WRITE, uffd_msg, uffdio_copy, uffdio_range,
    uffdio_zeropage,
};
use linux_raw_sys::ioctl::{UFFDIO_COPY, UFFDIO_WAKE, UFFDIO_ZEROPAGE};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::ReadWriteFlags;

const _: () = assert!(size_of::<uffd_msg>() == 32);
const _: () = assert!(size_of::<uffdio_range>() == 16);
const _: () = assert!(size_of::<uffdio_zeropage>() == 32);
const _: () = assert!(size_of::<uffdio_copy>() == 40);

/// Messages read at once. One vCPU has one fault outstanding; 32 are plenty for a VM.
const BATCH: usize = 32;

/// What became of an attempt to install pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Installed {
    /// This many bytes from the start were installed, and threads that waited there were woken.
    Bytes(u64),
    /// The first page has something installed already: its waiters still need a wake.
    AlreadyThere,
    /// The address space is changing: try again.
    Retry,
    /// That part is not registered (any more), or its process has gone.
    Gone,
}

/// One VM's userfaultfd, duplicated into this process.
#[derive(Debug)]
pub(crate) struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Calls `found` with the address of each fault that waits, and whether it is an attempt to
    /// write.
    ///
    /// # Errors
    /// Anything but "nothing there".
    pub(crate) fn read_faults(&self, mut found: impl FnMut(u64, bool)) -> io::Result<()> {
        let mut bytes = [0u8; BATCH * size_of::<uffd_msg>()];
        loop {
            let read = match self.read(&mut bytes) {
                Ok(read) => read,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            for message in bytes[..read].chunks_exact(size_of::<uffd_msg>()) {
                // Layout of `uffd_msg`: event at 0, for a page fault flags at 8, address at 16.
                if u32::from(message[0]) == UFFD_EVENT_PAGEFAULT {
                    let word = |at: usize| {
                        let mut word = [0; 8];
                        word.copy_from_slice(&message[at..at + 8]);
                        u64::from_ne_bytes(word)
                    };
                    found(word(16), word(8) & u64::from(UFFD_PAGEFAULT_FLAG_WRITE) != 0);
                }
            }
            if read < bytes.len() {
                return Ok(());
            }
        }
    }

    /// Never waits. The flag O_NONBLOCK would not do alone: QEMU shares it, and a guest that has
    /// taken QEMU over could clear it. (Before Linux 6.10 there is nothing else.)
    fn read(&self, bytes: &mut [u8]) -> Result<usize, rustix::io::Errno> {
        let here = u64::MAX; // as read(2)
        let parts = &mut [io::IoSliceMut::new(bytes)];
        match rustix::io::preadv2(&self.fd, parts, here, ReadWriteFlags::NOWAIT) {
            Err(rustix::io::Errno::OPNOTSUPP) => rustix::io::read(&self.fd, bytes),
            read => read,
        }
    }

    /// As [`Uffd::read_faults`], again and again until there is something to read from `other`, or
    /// until `timeout` is over. Reads other events, too, which lets those go on who caused them.
    ///
    /// # Errors
    /// As [`Uffd::read_faults`]; the time is over.
    pub(crate) fn read_faults_until(
        &self,
        other: BorrowedFd<'_>,
        timeout: Duration,
        mut found: impl FnMut(u64, bool),
    ) -> io::Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut ready =
                [PollFd::new(&other, PollFlags::IN), PollFd::new(&self.fd, PollFlags::IN)];
            match rustix::event::poll(&mut ready, Some(&left)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let [other_has, faults] = ready.map(|one| !one.revents().is_empty());
            if faults {
                self.read_faults(&mut found)?;
            }
            if other_has {
                return Ok(());
            }
        }
    }

    /// Install the zero page in all of a range where nothing is installed, and wake its waiters.
    pub(crate) fn zeropage(&self, start: u64, len: u64) -> Installed {
        let mut request =
            uffdio_zeropage { range: uffdio_range { start, len }, mode: 0, zeropage: 0 };
        // SAFETY:
        // - `fd` is open: we own it.
        // - The argument is a live, exclusively borrowed `uffdio_zeropage`.
        // - The range is in another process; a wrong one is an error there, not unsoundness here.
        let done =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_ZEROPAGE.into(), &raw mut request) };
        installed(done, request.zeropage, len)
    }

    /// Install pages with these bytes, private to the view, where nothing is installed, and wake
    /// their waiters.
    pub(crate) fn copy(&self, start: u64, bytes: &[u8]) -> Installed {
        let len = bytes.len() as u64;
        let src = bytes.as_ptr().expose_provenance() as u64;
        let mut request = uffdio_copy { dst: start, src, len, mode: 0, copy: 0 };
        // SAFETY: as in `zeropage`, with a `uffdio_copy`; the kernel reads `bytes`, which are
        // borrowed here.
        let done =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_COPY.into(), &raw mut request) };
        installed(done, request.copy, len)
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

/// `installed`: bytes, or a negative errno, as the kernel wrote it into the request.
fn installed(done: libc::c_int, installed: i64, len: u64) -> Installed {
    if done == 0 {
        return Installed::Bytes(len);
    }
    match u64::try_from(installed) {
        Ok(bytes) if bytes > 0 => Installed::Bytes(bytes),
        _ => match io::Error::last_os_error().raw_os_error() {
            Some(libc::EEXIST) => Installed::AlreadyThere,
            Some(libc::EAGAIN) => Installed::Retry,
            _ => Installed::Gone,
        },
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
