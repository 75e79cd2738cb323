//! Reads of a disk into RAM that a clone does not have yet: QEMU, the shim, the page engine and an
//! NBD server together.

mod support;

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::disks::{SECTOR_BYTES, TestDisk};
use support::{SOON, binary, boot_sector, clone, memfd, skip, unprivileged};
use vmfork_engine::{Engine, EngineOptions, HostImage, Layout};
use vmfork_image::{ImageId, Origin, PageRange, PageSource, PageTable, Source};
use vmfork_memory::{GuestMemory, Tap, USERFAULTFD_DEVICE};
use vmfork_qemu::qmp::reopen_from_start;
use vmfork_qemu::{
    Accel, Binary, Boot, DriveSlot, Drives, GuestKind, Launch, Qemu, Shape, ShimFds,
};

const MEMORY_BYTES: u64 = 64 << 20;
const PAGE_BYTES: u64 = 4096;
/// Where the guest reads to: 15 pages from each multiple of 64 KiB on, 8 times.
const BUFFERS: std::ops::Range<u64> = 0x10..0x90;
/// What it reads: sectors from here on.
const READ_FROM: u64 = 128 * SECTOR_BYTES;
const READ_WORDS: u32 = 8 * 15360;

/// The image on another host, of which each page that is asked for is known.
#[derive(Debug)]
struct Lender {
    image: Arc<HostImage>,
    lent: Mutex<Vec<PageRange>>,
}

impl PageSource for Lender {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        1
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.lent.lock().expect("not poisoned").push(range);
        self.image.lend(range, bytes).map_err(io::Error::other)
    }
}

impl Lender {
    /// How many pages of the guest's buffers, and how many others.
    fn lent(&self) -> (u64, u64) {
        let lent = self.lent.lock().expect("not poisoned");
        let pages = lent.iter().flat_map(|range| range.start().0..range.end().0);
        let (buffers, others): (Vec<_>, Vec<_>) = pages.partition(|page| BUFFERS.contains(page));
        (buffers.len() as u64, others.len() as u64)
    }
}

fn options() -> EngineOptions {
    EngineOptions { fill_unit_pages: 1 }
}

/// An image of here, as another host has it.
fn elsewhere(image: &Arc<HostImage>) -> (Arc<Engine>, Arc<Lender>) {
    let id = ImageId::new(2).expect("not 0");
    let layout = image.layout().expect("sealed");
    let runs = layout.table.runs(layout.table.range());
    let changes = runs.filter_map(|(run, source)| match source {
        Source::Zero => None,
        Source::Image(_) => Some((run, Source::Image(id))),
    });
    let zeros = PageTable::uniform(layout.table.pages(), Source::Zero);
    let table = zeros.derive(changes).expect("fits");
    let homes = layout.homes.iter().map(|home| home.map(|_| id)).collect();
    let lender = Arc::new(Lender { image: Arc::clone(image), lent: Mutex::default() });
    let source = Arc::clone(&lender) as Arc<dyn PageSource>;
    let image = HostImage::remote(id, Layout { table, homes }, &[], source).expect("opened");
    let engine = Engine::serve(image, &options(), Arc::new(|_| ())).expect("engine");
    (Arc::new(engine), lender)
}

/// The shim, built by cargo under its own profile, where the tests of the memory crate build it.
fn shim() -> PathBuf {
    let exe = std::env::current_exe().expect("own path");
    let target = exe.ancestors().nth(3).expect("a target folder");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "-q", "--profile", "tap", "-p", "vmfork-tap", "--target-dir"]);
    assert!(cargo.arg(target).status().expect("cargo").success(), "build the shim");
    target.join("tap/libvmfork_tap.so")
}

fn userfaultfd() -> io::Result<OwnedFd> {
    Ok(fs::OpenOptions::new().read(true).write(true).open(USERFAULTFD_DEVICE)?.into())
}

/// A QEMU whose RAM can be a view.
async fn start(launch: impl FnOnce(OwnedFd) -> Launch, shim: PathBuf) -> (Qemu, GuestMemory) {
    let (tap, ends) = Tap::new(MEMORY_BYTES, None).expect("socket");
    let userfaultfd = userfaultfd().expect("checked");
    let fds = ShimFds { library: shim, control: ends.control, userfaultfd, kvm: None, pmem: None };
    let launch = launch(ends.ram).shim(fds);
    let launch = match unprivileged() {
        Some(user) => launch.run_as(user),
        None => launch,
    };
    let qemu = launch.start().await.expect("starts");
    let pid = qemu.process.pid().unsigned_abs();
    let memory = tokio::task::block_in_place(|| GuestMemory::connect(tap, pid, MEMORY_BYTES));
    (qemu, memory.expect("connected"))
}

struct Console {
    serial: UnixStream,
}

impl Console {
    fn new(qemu: &Qemu) -> Self {
        let serial = UnixStream::from(clone(&qemu.serial));
        serial.set_read_timeout(Some(Duration::from_millis(200))).expect("a socket");
        Self { serial }
    }

    fn line(&mut self) -> String {
        let (began, mut line) = (Instant::now(), String::new());
        while began.elapsed() < 2 * SOON {
            let mut byte = [0];
            match self.serial.read(&mut byte) {
                Ok(1) if byte == *b"\n" => return line,
                Ok(1) => line.push(char::from(byte[0])),
                Ok(_) => panic!("QEMU ended after {line:?}"),
                Err(_) => {}
            }
        }
        panic!("the guest says only {line:?}");
    }

    /// Have the guest read its disk. → the sum of what it read.
    fn read(&mut self) -> u32 {
        self.serial.write_all(b"r").expect("QEMU reads");
        let line = self.line();
        u32::from_str_radix(&line, 16).unwrap_or_else(|_| panic!("the guest says {line:?}"))
    }
}

/// A disk with the guest's boot sector, on which each word that it reads is `word`.
fn disk(boot: &[u8], word: u32) -> TestDisk {
    let disk = TestDisk::new(512, boot);
    disk.write(READ_FROM, &word.to_le_bytes().repeat(512 << 10 >> 2));
    disk
}

fn drives(disk: &TestDisk) -> Drives {
    Drives::new(GuestKind::Bare, vec![disk.content()]).expect("fds left")
}

struct Machine {
    binary: Binary,
    shape: Shape,
    boot: Vec<u8>,
    shim: PathBuf,
    _folder: tempfile::TempDir,
}

impl Machine {
    async fn new() -> Option<Self> {
        let folder = tempfile::tempdir().expect("temp dir");
        if let Err(error) = userfaultfd() {
            skip(&format!("{USERFAULTFD_DEVICE}: {error}"));
            return None;
        }
        let (binary, mut boot) = (binary().await?, Vec::new());
        let sector = boot_sector(folder.path(), "read")?;
        fs::File::from(sector).read_to_end(&mut boot).expect("assembled");
        let slots = vec![DriveSlot::Disk(disk(&boot, 0).slot())];
        let shape = Shape::new(MEMORY_BYTES, 1, Accel::Tcg, GuestKind::Bare, slots);
        let (shape, shim) = (shape.expect("possible"), shim());
        Some(Self { binary, shape, boot, shim, _folder: folder })
    }

    async fn boot(&self, disk: &TestDisk) -> (Qemu, GuestMemory) {
        let launch = |ram| {
            let launch = Launch::boot(self.binary.clone(), self.shape.clone(), ram, Boot::Disk);
            launch.drives(drives(disk))
        };
        start(launch, self.shim.clone()).await
    }

    async fn wait(&self, disk: &TestDisk) -> (Qemu, GuestMemory) {
        let launch =
            |ram| Launch::wait(self.binary.clone(), self.shape.clone(), ram).drives(drives(disk));
        start(launch, self.shim.clone()).await
    }
}

/// A clone that has none of its pages reads its disk into memory that its parent used. The pages
/// that are overwritten are not fetched, and the guest gets the disk's bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_that_reads_its_disk_fetches_no_page_to_overwrite_it() {
    let Some(machine) = Machine::new().await else { return };
    let (of_parent, of_clone) = (disk(&machine.boot, 3), disk(&machine.boot, 0x0101_0107));
    let _servers = (of_parent.serve(), of_clone.serve());
    let (parent, mut memory) = machine.boot(&of_parent).await;
    let mut console = Console::new(&parent);
    assert_eq!(console.line(), "R");
    assert_eq!(console.read(), 3 * READ_WORDS);

    parent.qmp.stop().await.expect("stop");
    let id = ImageId::new(1).expect("not 0");
    let pages = MEMORY_BYTES / PAGE_BYTES;
    let engine = Engine::prepare(id, pages, None, &options(), Arc::new(|_| ()));
    let engine = Arc::new(engine.expect("engine"));
    memory.freeze(&engine).expect("frozen");
    let state = memfd();
    parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    assert!(engine.wait_sealed(SOON));

    let (remote, lender) = elsewhere(engine.image());
    let (qemu, mut view) = machine.wait(&of_clone).await;
    view.attach(&remote).expect("attached");
    let file = reopen_from_start(&state).expect("open");
    if let Err(error) = qemu.qmp.load_state(file.as_fd(), SOON).await {
        panic!("{}", qemu.explain(error).await);
    }
    qemu.qmp.cont().await.expect("cont");
    let read = Console::new(&qemu).read();
    let (buffers, others) = lender.lent();
    eprintln!("fetched: {buffers} of 120 pages that were read to, {others} others");
    assert_eq!(read, 0x0101_0107_u32.wrapping_mul(READ_WORDS), "the clone's own disk");
    assert!(others > 0, "the clone has no page but those that it fetches");
    assert!(buffers <= BUFFERS_MAX, "{buffers} pages were fetched to be overwritten");
}

/// A page that arrives between a look at the socket and the receive is fetched: one in each of the
/// 8 reads at most.
const BUFFERS_MAX: u64 = 8;
