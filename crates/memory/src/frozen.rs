//! Pages that a freeze moved aside: where an image's own pages are until the drain has copied them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use vmfork_engine::{Change, Originals, Release};
use vmfork_image::{PageIdx, PageRange};
use vmfork_tap_proto::Op;

use crate::pagemap::{Held, Pagemap};
use crate::tap::{Posted, Tap, TapError, pidfd_of};

/// Originals are given back in stretches of at most 8 MiB: each is one `munmap` in the keeper, 150
/// µs at most, behind which a request to map a run may have to wait.
const RELEASE_PAGES_MAX: u64 = 2048;

/// A process in whose address space the pages lie: the keeper, or QEMU.
#[derive(Debug)]
struct Holder {
    pid: libc::pid_t,
    pidfd: OwnedFd,
    /// Opened when first needed, then kept: a derivation asks it hundreds of times.
    pagemap: OnceLock<Pagemap>,
}

impl Holder {
    fn is_alive(&self) -> bool {
        let mut waiting = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut waiting, Some(&now)) == Ok(0)
    }

    fn pagemap(&self) -> io::Result<&Pagemap> {
        if let Some(pagemap) = self.pagemap.get() {
            return Ok(pagemap);
        }
        let pagemap = Pagemap::open(self.pid.cast_unsigned())?;
        Ok(self.pagemap.get_or_init(|| pagemap))
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
    /// Of a word that can be read for as long as the address space is there.
    witness: u64,
    tap: Arc<Tap>,
    holders: Vec<Holder>,
    pages: u64,
    /// Pages from the start on that were given back. Their addresses may be QEMU's again for
    /// something else.
    released_pages: AtomicU64,
}

impl FrozenRange {
    /// `pids`: the processes that share the address space, the keeper first.
    ///
    /// # Errors
    /// None of them is there.
    pub(crate) fn new(
        address: u64,
        witness: u64,
        pages: u64,
        tap: Arc<Tap>,
        pids: &[u32],
    ) -> io::Result<Self> {
        let holders: Vec<_> = pids
            .iter()
            .filter_map(|pid| {
                Some(Holder {
                    pid: libc::pid_t::try_from(*pid).ok()?,
                    pidfd: pidfd_of(*pid).ok()?,
                    pagemap: OnceLock::new(),
                })
            })
            .collect();
        if holders.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(Self { address, witness, tap, holders, pages, released_pages: AtomicU64::new(0) })
    }
}

impl Originals for FrozenRange {
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
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

    fn scan(&self, range: PageRange, found: &mut dyn FnMut(PageRange, Change)) -> io::Result<()> {
        let mut changed = |run, held| {
            let change = match held {
                Held::Private => Change::Written,
                Held::Zero => Change::Zero,
            };
            found(run, change);
        };
        let mut last = io::Error::from_raw_os_error(libc::ESRCH);
        for holder in &self.holders {
            let pagemap = holder.pagemap();
            match pagemap.and_then(|map| map.scan(self.address, range, &mut changed)) {
                // A scan of an address space that is being torn down finds nothing and says so
                // without an error. Who can still be read from afterwards had all of its memory.
                Ok(()) => match holder.read(self.witness, &mut [0; 8]) {
                    Ok(()) => return Ok(()),
                    Err(error) => last = error,
                },
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// If the keeper has gone, the memory goes with QEMU.
    fn release_some(&self, limit: PageIdx) -> Release {
        let from = PageIdx(self.released_pages.load(Ordering::Relaxed));
        let range = PageRange::between(from, limit.min(PageIdx(self.pages)));
        let range = range.truncate(RELEASE_PAGES_MAX);
        if range.is_empty() {
            return Release::Nothing;
        }
        let args = [self.address + range.byte_offset(), range.byte_len(), 0, 0];
        match self.tap.post(Op::Release, args) {
            Ok(Posted::Sent) => {}
            Ok(Posted::Busy) => return Release::Busy,
            // Its address space goes with it.
            Err(error @ TapError::Gone { .. }) => tracing::debug!(%error, "release frozen pages"),
            Err(error) => {
                tracing::warn!(%error, %range, "frozen pages stay until their VM has ended");
            }
        }
        self.released_pages.store(range.end().0, Ordering::Relaxed);
        Release::Begun
    }

    /// Whether a process that holds the pages still runs.
    fn is_held(&self) -> bool {
        self.holders.iter().any(Holder::is_alive)
    }

    fn place_of(&self, page: PageIdx) -> String {
        format!("frozen at {:#x}", self.address + page.byte_offset())
    }
}

impl Drop for FrozenRange {
    fn drop(&mut self) {
        let from = self.released_pages.load(Ordering::Relaxed);
        let range = PageRange::between(PageIdx(from), PageIdx(self.pages));
        if !range.is_empty() {
            let args = [self.address + range.byte_offset(), range.byte_len(), 0, 0];
            if let Err(error) = self.tap.call(Op::Release, args, None) {
                tracing::debug!(%error, %range, "release frozen pages");
            }
        }
    }
}
