//! Pages that a freeze moved aside: where an image's own pages are until the drain has copied them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmfork_image::{PageIdx, PageRange};
use vmfork_tap_proto::Op;

use crate::pagemap::{Held, Pagemap};
use crate::tap::{Tap, pidfd_of};

/// A process in whose address space the pages lie: the keeper, or QEMU.
#[derive(Debug)]
struct Holder {
    pid: libc::pid_t,
    pidfd: OwnedFd,
}

impl Holder {
    fn is_alive(&self) -> bool {
        let mut waiting = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut waiting, Some(&now)) == Ok(0)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &mut bytes[done..];
            let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            let from = address + done as u64;
            let remote = libc::iovec {
                iov_base: std::ptr::without_provenance_mut(usize::try_from(from).unwrap_or(0)),
                iov_len: rest.len(),
            };
            // SAFETY:
            // - `local` is one iovec over a live, exclusively borrowed buffer.
            // - `remote` names another process's memory, which the kernel checks.
            let read = unsafe {
                libc::process_vm_readv(self.pid, &raw const local, 1, &raw const remote, 1, 0)
            };
            match usize::try_from(read) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        // The pid could be another process's by now, had ours ended.
        if self.is_alive() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    }
}

/// The range that a freeze moved aside.
#[derive(Debug)]
pub(crate) struct FrozenRange {
    address: u64,
    tap: Arc<Tap>,
    holders: Vec<Holder>,
    pages: u64,
    /// Pages from the start on that were given back. Their addresses may be QEMU's again for something else.
    released_pages: AtomicU64,
}

impl FrozenRange {
    /// `pids`: the processes that share the address space, the keeper first.
    ///
    /// # Errors
    /// None of them is there.
    pub(crate) fn new(address: u64, pages: u64, tap: Arc<Tap>, pids: &[u32]) -> io::Result<Self> {
        let holders: Vec<_> = pids
            .iter()
            .filter_map(|pid| {
                Some(Holder { pid: libc::pid_t::try_from(*pid).ok()?, pidfd: pidfd_of(*pid).ok()? })
            })
            .collect();
        if holders.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(Self { address, tap, holders, pages, released_pages: AtomicU64::new(0) })
    }

    /// Read pages that are private there. A page whose stretch has been released gives an error or zeros: the
    /// caller tests presence afterwards (see [`crate::presence`]).
    ///
    /// # Errors
    /// No process holds the pages any more, or they were released.
    pub(crate) fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let address = self.address + range.byte_offset();
        let mut last = io::Error::from_raw_os_error(libc::ESRCH);
        for holder in &self.holders {
            match holder.read(address, bytes) {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Runs of pages in `range` that the VM had written, or that were zero in it.
    ///
    /// # Errors
    /// No process holds the pages any more.
    pub(crate) fn scan(
        &self,
        range: PageRange,
        mut found: impl FnMut(PageRange, Held),
    ) -> io::Result<()> {
        let mut last = io::Error::from_raw_os_error(libc::ESRCH);
        for holder in &self.holders {
            let pid = holder.pid.cast_unsigned();
            match Pagemap::open(pid).and_then(|map| map.scan(self.address, range, &mut found)) {
                Ok(()) if holder.is_alive() => return Ok(()),
                Ok(()) => {}
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Give everything before `page` back to the host. If the keeper has gone, the memory goes with QEMU.
    pub(crate) fn release_until(&self, page: PageIdx) {
        let from = self.released_pages.fetch_max(page.0, Ordering::Relaxed);
        let range = PageRange::between(PageIdx(from), page);
        if range.is_empty() {
            return;
        }
        let args = [self.address + range.byte_offset(), range.byte_len(), 0, 0];
        if let Err(error) = self.tap.call(Op::Release, args, None) {
            tracing::debug!(%error, %range, "release frozen pages");
        }
    }

    /// Where a page lies, for messages.
    pub(crate) fn address_of(&self, page: PageIdx) -> u64 {
        self.address + page.byte_offset()
    }
}

impl Drop for FrozenRange {
    fn drop(&mut self) {
        self.release_until(PageIdx(self.pages));
    }
}
