//! One VM's RAM as a reader of an image: faults and wakes by userfaultfd, mappings by way of the
//! keeper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use vmfork_engine::{Cache, MapError, Reader, Waker};
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};
use vmfork_tap_proto::Op;

use crate::tap::{MAP_TIMEOUT, Tap, TapError};
use crate::uffd::{Installed, Uffd};

/// How often a busy address space is tried again.
const RETRIES_MAX: u32 = 1000;

#[derive(Debug)]
pub(crate) struct UffdView {
    uffd: Arc<Uffd>,
    hva: u64,
    pages: u64,
    tap: Arc<Tap>,
}

/// Wakes what waits for some pages of a view, from any thread, for as long as there is the view.
#[derive(Debug)]
struct UffdWaker {
    uffd: Weak<Uffd>,
    hva: u64,
    bytes: u64,
}

impl Waker for UffdWaker {
    fn wake(&self) {
        if let Some(uffd) = self.uffd.upgrade() {
            uffd.wake(self.hva, self.bytes);
        }
    }
}

impl UffdView {
    pub(crate) fn new(uffd: Arc<Uffd>, tap: Arc<Tap>, hva: u64, pages: u64) -> Self {
        Self { uffd, hva, pages, tap }
    }

    /// The page at an address of QEMU's, if it is in RAM.
    fn page_at(&self, address: u64) -> Option<PageIdx> {
        let offset = address.checked_sub(self.hva)?;
        let page = PageIdx::of_byte(offset);
        (page.0 < self.pages).then_some(page)
    }

    /// Install pages from the start of `range` on, as far as nothing is there, and wake what waits
    /// in it.
    fn install(&self, range: PageRange, some: impl Fn(&Uffd, PageRange) -> Installed) {
        let mut rest = range;
        let mut retries = 0;
        while !rest.is_empty() {
            match some(&self.uffd, rest) {
                Installed::Bytes(bytes) => {
                    rest = rest.from_page(PageIdx(rest.start().0 + bytes / PAGE_BYTES));
                }
                Installed::AlreadyThere => break,
                Installed::Retry if retries < RETRIES_MAX => retries += 1,
                Installed::Retry | Installed::Gone => {
                    // Either the VM has ended, which its owner notices by itself, or its address
                    // space changes without end.
                    tracing::debug!(%rest, "pages refused");
                    break;
                }
            }
        }
        if !rest.is_empty() {
            self.wake(rest);
        }
    }

    /// The keeper moves the new mapping into its place, and waits until that is read from the
    /// userfaultfd.
    fn map_cache(
        &self,
        args: [u64; 4],
        cache: &Cache,
        found: &mut dyn FnMut(PageIdx, bool),
    ) -> Result<([u64; 6], Option<OwnedFd>), TapError> {
        self.tap.call_beside(Op::MapCache, args, Some(cache.for_readers()), |socket| {
            self.uffd.read_faults_until(socket, MAP_TIMEOUT, |address, is_write| {
                if let Some(page) = self.page_at(address) {
                    found(page, is_write);
                }
            })
        })
    }
}

impl Reader for UffdView {
    fn faults_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    fn read_faults(&self, found: &mut dyn FnMut(PageIdx, bool)) -> io::Result<()> {
        self.uffd.read_faults(|address, is_write| {
            if let Some(page) = self.page_at(address) {
                found(page, is_write);
            }
        })
    }

    fn wake(&self, range: PageRange) {
        self.uffd.wake(self.hva + range.byte_offset(), range.byte_len());
    }

    fn waker(&self, range: PageRange) -> Box<dyn Waker> {
        let (hva, bytes) = (self.hva + range.byte_offset(), range.byte_len());
        Box::new(UffdWaker { uffd: Arc::downgrade(&self.uffd), hva, bytes })
    }

    fn install_zeros(&self, range: PageRange) {
        let hva = self.hva;
        self.install(range, |uffd, rest| uffd.zeropage(hva + rest.byte_offset(), rest.byte_len()));
    }

    fn install_private(&self, range: PageRange, bytes: &[u8]) {
        let hva = self.hva;
        self.install(range, |uffd, rest| {
            let from = usize::try_from(rest.byte_offset() - range.byte_offset()).unwrap_or(0);
            uffd.copy(hva + rest.byte_offset(), &bytes[from..])
        });
    }

    fn can_map(&self) -> bool {
        true
    }

    fn map(
        &mut self,
        run: PageRange,
        cache: Option<&Cache>,
        found: &mut dyn FnMut(PageIdx, bool),
    ) -> Result<(), MapError> {
        let args = [run.byte_offset(), run.byte_len(), 0, 0];
        let mapped = match cache {
            Some(cache) => self.map_cache(args, cache, found),
            None => self.tap.call(Op::MapZero, args, None),
        };
        mapped.map(|_| ()).map_err(|error| match error {
            error if error.is_fatal() => MapError::Lost(error.to_string()),
            TapError::Busy { block, .. } => MapError::Busy { block },
            error => MapError::Refused(error.to_string()),
        })
    }
}
