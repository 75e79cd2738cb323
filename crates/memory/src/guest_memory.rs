//! The RAM of one running QEMU, by way of the shim's keeper.
//!
//! ```text
//!   connect ──► Booted ──freeze──► View of the new image ──freeze──► View of the next …
//!          └──► (waiting) ──attach──► View of the snapshot's image
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use vmfork_engine::{Engine, EngineError, View, ViewCounters, next_view_id};
use vmfork_image::{PAGE_BYTES, PageRange};
use vmfork_policy::ViewId;
use vmfork_tap_proto::{ATTACH_BY_PAGE, BLOCK_BYTES, Op, STATUS_MERGEABLE, VERSION};

use crate::frozen::FrozenRange;
use crate::pagemap::{Held, Pagemap};
use crate::pmem::PMEM_FILE_OFFSET;
use crate::stillness::Stillness;
use crate::tap::{Tap, TapError, pidfd_of};
use crate::uffd::Uffd;
use crate::view::UffdView;

/// What the daemon opens for the shim.
pub const USERFAULTFD_DEVICE: &str = "/dev/userfaultfd";

/// A QEMU's RAM can't be taken hold of.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(
        "the shim does not answer: QEMU was started without it, or the kernel refused it userfaultfd"
    )]
    NoShim(#[source] TapError),
    #[error("the shim is of version {found}, this daemon needs {VERSION}")]
    Version { found: u64 },
    #[error("QEMU made {mappings} mappings of its RAM; exactly 1 can be forked")]
    Mappings { mappings: u64 },
    #[error("QEMU mapped {found} bytes of RAM, {expected} were asked for")]
    Size { found: u64, expected: u64 },
    #[error("QEMU's RAM at {start:#x} is not aligned to {BLOCK_BYTES} bytes")]
    Alignment { start: u64 },
    #[error("QEMU marks RAM mergeable in spite of mem-merge=off; a freeze would walk every page")]
    Mergeable,
    #[error("the shim handed over no userfaultfd")]
    NoUserfaultfd,
    #[error("look into process {pid}")]
    Process {
        pid: u64,
        #[source]
        source: io::Error,
    },
}

/// A freeze, or an attach, failed.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("find the moved pages' process")]
    Process(#[source] io::Error),
    #[error("QEMU can't be stopped")]
    Still(#[source] io::Error),
}

impl FreezeError {
    /// The keeper, and mostly QEMU too, is gone, rather than unwilling.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Tap(TapError::Gone { .. } | TapError::Socket { .. }))
    }

    /// Whether RAM is in an unknown state and QEMU must be killed. Else the VM can go on as it was.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Tap(error) => error.is_fatal(),
            Self::Engine(EngineError::Size { .. }) | Self::Still(_) => false,
            Self::Engine(_) | Self::Process(_) => true,
        }
    }
}

/// Where the time of a freeze went.
#[derive(Debug, Clone, Copy, Default)]
pub struct FreezeTimes {
    /// Moving the pages aside.
    pub moving: Duration,
    /// Mapping the new cache and registering it.
    pub mapping: Duration,
    /// All of it, with the way to the keeper and the engines.
    pub total: Duration,
    /// How many mappings RAM consisted of.
    pub mappings: u64,
}

/// How much of RAM is the VM's own.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemorySample {
    pub private_pages: u64,
    pub zero_pages: u64,
}

/// What image a VM's RAM is a view of, to be looked at without [`GuestMemory`], whose owner may be
/// waiting for a keeper. A freeze shows the image before it until its view of the new one may be
/// reported lost.
#[derive(Debug, Clone, Default)]
pub struct Attachment(Arc<Mutex<Option<Attached>>>);

type Attached = (Arc<Engine>, ViewId);

impl Attachment {
    /// The engine of the image; `None` in a VM that booted and was never forked.
    pub fn engine(&self) -> Option<Arc<Engine>> {
        let now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        now.as_ref().map(|(engine, _)| Arc::clone(engine))
    }

    /// The number by which [`vmfork_engine::EngineEvent::ViewLost`] names the VM.
    pub fn view_id(&self) -> Option<ViewId> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(_, id)| *id)
    }

    fn set(&self, now: Option<Attached>) {
        let before =
            std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), now);
        // Outside the lock: it may be an engine's last holder.
        drop(before);
    }
}

/// Tells what a VM has touched, without slowing it down and without its owner.
#[derive(Debug)]
pub struct TouchScan {
    pagemap: Pagemap,
    hva: u64,
    pages: u64,
}

impl TouchScan {
    /// Runs of pages that the VM has touched, read or written, to a precision of 16 pages (of one
    /// page after [`GuestMemory::attach_by_page`]); what was zero and was only read is left out.
    /// Takes 1 ms per GiB.
    ///
    /// # Errors
    /// The VM has gone.
    pub fn touched(&self) -> io::Result<Vec<PageRange>> {
        let mut touched = Vec::new();
        self.pagemap
            .scan_touched(self.hva, PageRange::first(self.pages), |run| touched.push(run))?;
        Ok(touched)
    }
}

/// The RAM of one QEMU. Dropping it ends that QEMU, if it still runs.
#[derive(Debug)]
pub struct GuestMemory {
    tap: Arc<Tap>,
    uffd: Arc<Uffd>,
    pagemap: Pagemap,
    keeper_pid: u32,
    qemu_pid: u32,
    qemu: OwnedFd,
    hva: u64,
    pages: u64,
    view: Option<Attached>,
    attachment: Attachment,
    counters: Arc<ViewCounters>,
    freeze_fails: bool,
}

impl GuestMemory {
    /// Take hold of the RAM of a QEMU that has come up, and check that it can be forked.
    ///
    /// # Errors
    /// [`ConnectError`]: it can't.
    pub fn connect(tap: Tap, qemu_pid: u32, memory_bytes: u64) -> Result<Self, ConnectError> {
        let (values, fd) = tap.call(Op::Status, [0; 4], None).map_err(ConnectError::NoShim)?;
        let [version, keeper, hva, bytes, mappings, flags] = values;
        if version != u64::from(VERSION) {
            return Err(ConnectError::Version { found: version });
        }
        let in_process = |source| ConnectError::Process { pid: keeper, source };
        let keeper_pid =
            u32::try_from(keeper).map_err(|_| in_process(io::ErrorKind::InvalidData.into()))?;
        tap.set_keeper(pidfd_of(keeper_pid).map_err(in_process)?);
        if mappings != 1 {
            return Err(ConnectError::Mappings { mappings });
        }
        if bytes != memory_bytes {
            return Err(ConnectError::Size { found: bytes, expected: memory_bytes });
        }
        if hva % BLOCK_BYTES != 0 || bytes % BLOCK_BYTES != 0 {
            return Err(ConnectError::Alignment { start: hva });
        }
        if flags & STATUS_MERGEABLE != 0 {
            return Err(ConnectError::Mergeable);
        }
        let uffd = Arc::new(Uffd::new(fd.ok_or(ConnectError::NoUserfaultfd)?));
        let pagemap = Pagemap::open(keeper_pid).map_err(in_process)?;
        let qemu = pidfd_of(qemu_pid)
            .map_err(|source| ConnectError::Process { pid: qemu_pid.into(), source })?;
        Ok(Self {
            tap: Arc::new(tap),
            uffd,
            pagemap,
            keeper_pid,
            qemu_pid,
            qemu,
            hva,
            pages: bytes / PAGE_BYTES,
            view: None,
            attachment: Attachment::default(),
            counters: Arc::default(),
            freeze_fails: false,
        })
    }

    /// How many pages RAM has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    pub fn keeper_pid(&self) -> u32 {
        self.keeper_pid
    }

    /// The engine of the image that RAM is a view of; `None` in a VM that booted and was never
    /// forked.
    pub fn engine(&self) -> Option<&Arc<Engine>> {
        self.view.as_ref().map(|(engine, _)| engine)
    }

    /// The same, and the view's number, for who can't wait for what is done to RAM.
    pub fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    /// Faults that the page engines answered for this VM.
    pub fn counters(&self) -> &Arc<ViewCounters> {
        &self.counters
    }

    /// Make RAM a view of a snapshot's image. QEMU waits for its device state; nothing in RAM
    /// counts.
    ///
    /// # Errors
    /// The keeper or the engine has gone, or refuses.
    pub fn attach(&mut self, engine: &Arc<Engine>) -> Result<(), FreezeError> {
        self.attach_as(engine, 0)
    }

    /// As [`GuestMemory::attach`], for a VM of which [`TouchScan::touched`] is to tell single
    /// pages. The kernel then maps each page by itself that the VM reads, about 1 µs each.
    ///
    /// # Errors
    /// As [`GuestMemory::attach`].
    pub fn attach_by_page(&mut self, engine: &Arc<Engine>) -> Result<(), FreezeError> {
        self.attach_as(engine, ATTACH_BY_PAGE)
    }

    /// Show a file of `file_bytes` in the guest's persistent memory, from [`PMEM_FILE_OFFSET`] on.
    /// The file must not become shorter while the VM runs: what reads beyond its end ends QEMU.
    ///
    /// # Errors
    /// The keeper has gone; or the guest has no persistent memory, or too little. The file is open
    /// for writing: a QEMU that was taken over could write to it then.
    pub fn show_file(&self, file: BorrowedFd<'_>, file_bytes: u64) -> Result<(), TapError> {
        let refused = |source| TapError::Refused { op: Op::MapPmem, source };
        let flags = rustix::fs::fcntl_getfl(file).map_err(|errno| refused(errno.into()))?;
        if flags.intersects(OFlags::RDWR | OFlags::WRONLY) {
            return Err(refused(io::ErrorKind::PermissionDenied.into()));
        }
        let len = file_bytes.next_multiple_of(PAGE_BYTES);
        self.tap.call(Op::MapPmem, [PMEM_FILE_OFFSET, len, 0, 0], Some(file)).map(drop)
    }

    fn attach_as(&mut self, engine: &Arc<Engine>, how: u64) -> Result<(), FreezeError> {
        self.check_size(engine)?;
        self.tap.call(Op::Attach, [how, 0, 0, 0], Some(engine.image().cache().for_readers()))?;
        self.join(engine, self.new_view())?;
        Ok(())
    }

    fn check_size(&self, engine: &Engine) -> Result<(), EngineError> {
        let image = engine.image();
        if image.pages() == self.pages {
            return Ok(());
        }
        Err(EngineError::Size { image: image.id(), pages: image.pages(), vm_pages: self.pages })
    }

    /// Freeze the stopped VM's RAM into the image of `next`, and go on as its first view. Takes
    /// well under a millisecond, whatever the size of RAM.
    ///
    /// # Errors
    /// If not [`FreezeError::is_fatal`], RAM is as before.
    pub fn freeze(&mut self, next: &Arc<Engine>) -> Result<FreezeTimes, FreezeError> {
        let began = Instant::now();
        self.check_size(next)?;
        // Kept until its pages have moved: it holds on to the caches that it maps.
        let before = match self.view.take() {
            Some((engine, id)) => Some((engine.remove_view(id)?, engine)),
            None => None,
        };
        let values = match self.call_freeze(next) {
            Ok(values) => values,
            Err(error) => {
                if let Some((view, engine)) = before {
                    self.join(&engine, view)?;
                }
                return Err(error);
            }
        };
        let [address, moving_ns, mapping_ns, mappings, witness, _] = values;
        let pids = [self.keeper_pid, self.qemu_pid];
        let frozen = FrozenRange::new(address, witness, self.pages, Arc::clone(&self.tap), &pids)
            .map_err(FreezeError::Process)?;
        next.begin(Arc::new(frozen))?;
        self.join(next, self.new_view())?;
        Ok(FreezeTimes {
            moving: Duration::from_nanos(moving_ns),
            mapping: Duration::from_nanos(mapping_ns),
            total: began.elapsed(),
            mappings,
        })
    }

    /// Leave the image's engine: the VM has ended.
    pub fn detach(&mut self) {
        self.attachment.set(None);
        if let Some((engine, id)) = self.view.take()
            && let Err(error) = engine.remove_view(id)
        {
            tracing::debug!(%error, "detach");
        }
    }

    /// Count the pages that this VM alone holds. Takes 1 ms per GiB.
    ///
    /// # Errors
    /// The VM has gone.
    pub fn sample(&self) -> io::Result<MemorySample> {
        let mut sample = MemorySample::default();
        self.pagemap.scan(self.hva, PageRange::first(self.pages), |run, held| match held {
            Held::Private => sample.private_pages += run.len(),
            Held::Zero => sample.zero_pages += run.len(),
        })?;
        Ok(sample)
    }

    /// A scan of what the VM has touched since its RAM was last made a view. Any process may have
    /// made that view.
    /// The scan is valid for as long as the VM runs.
    ///
    /// # Errors
    /// The VM has gone.
    pub fn touch_scan(&self) -> io::Result<TouchScan> {
        let pagemap = Pagemap::open(self.keeper_pid)?;
        Ok(TouchScan { pagemap, hva: self.hva, pages: self.pages })
    }

    /// Make the next freeze fail half-way, after the pages have moved, to test that they find their
    /// way back.
    pub fn inject_freeze_failure(&mut self) {
        self.freeze_fails = true;
    }

    /// QEMU's own threads look into RAM even when its vCPUs stand still (a pass of its main loop
    /// asks whether the guest has room in a queue). In the middle of a freeze they would find
    /// holes. So all of QEMU is stopped for it.
    fn call_freeze(&mut self, next: &Engine) -> Result<[u64; 6], FreezeError> {
        let _still = Stillness::begin(&self.qemu).map_err(FreezeError::Still)?;
        let cache = if std::mem::take(&mut self.freeze_fails) {
            self.uffd.as_fd() // can't be mapped
        } else {
            next.image().cache().for_readers()
        };
        Ok(self.tap.call(Op::Freeze, [0; 4], Some(cache)).map(|(values, _)| values)?)
    }

    fn join(&mut self, engine: &Arc<Engine>, view: View) -> Result<(), EngineError> {
        let id = next_view_id();
        // Before the engine can report the view lost, or the report would match no VM.
        self.attachment.set(Some((Arc::clone(engine), id)));
        engine.add_view(id, view).inspect_err(|_| self.attachment.set(None))?;
        self.view = Some((Arc::clone(engine), id));
        Ok(())
    }

    fn new_view(&self) -> View {
        let (uffd, tap) = (Arc::clone(&self.uffd), Arc::clone(&self.tap));
        let reader = UffdView::new(uffd, tap, self.hva, self.pages);
        View::new(Box::new(reader), self.pages, Arc::clone(&self.counters))
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        self.detach();
    }
}
