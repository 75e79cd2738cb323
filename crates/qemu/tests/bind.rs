//! What a clone's QEMU gets: content of drives, and taps of network cards. With a real QEMU under
//! TCG, as an unprivileged user (when run as root), in its sandbox.

mod support;

use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use support::{Bare, Counter, SOON, binary, boot_sector, clone, memfd, skip, unprivileged};
use vmfork_qemu::pool::{Limits, Origin, Pool, Starting};
use vmfork_qemu::qmp::reopen_from_start;
use vmfork_qemu::{
    Accel, Binary, Boot, DriveContent, DriveSlot, Drives, GuestKind, Launch, Qemu, Shape,
    StartError, spawn,
};

const MIB: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 512;
/// What the guest's first disk is padded to has this many sectors at least.
const DISK_BYTES: u64 = 2 * MIB;

fn as_user(launch: Launch) -> Launch {
    match unprivileged() {
        Some(user) => launch.run_as(user),
        None => launch,
    }
}

/// A disk with the boot sector that prints what sector 1 holds, and these 8 bytes there. Only its
/// owner may open it.
fn disk(boot: &OwnedFd, content: &[u8; 8]) -> OwnedFd {
    let disk = tempfile::tempfile().expect("temp file");
    let mut sector = [0; 512];
    fs::File::from(clone(boot)).read_exact_at(&mut sector, 0).expect("assembled");
    disk.set_len(DISK_BYTES).expect("room");
    disk.write_all_at(&sector, 0).expect("room");
    disk.write_all_at(content, SECTOR_BYTES).expect("room");
    disk.into()
}

fn private(disk: &OwnedFd) {
    rustix::fs::fchmod(disk, rustix::fs::Mode::from_raw_mode(0o600)).expect("ours");
}

fn public(disk: &OwnedFd) {
    rustix::fs::fchmod(disk, rustix::fs::Mode::from_raw_mode(0o644)).expect("ours");
}

fn drives(files: impl IntoIterator<Item = OwnedFd>) -> Drives {
    let files = files.into_iter().map(DriveContent::ReadOnly).collect();
    Drives::new(GuestKind::Bare, files).expect("readable")
}

/// Read lines of the console until one is `line`; `false` after a while.
fn prints(qemu: &Qemu, line: &str) -> bool {
    let mut serial = UnixStream::from(clone(&qemu.serial));
    serial.set_read_timeout(Some(Duration::from_millis(100))).expect("a socket");
    let (began, mut text, mut bytes) = (Instant::now(), String::new(), [0; 4096]);
    while began.elapsed() < 2 * SOON {
        if text.lines().any(|printed| printed == line) {
            return true;
        }
        if let Ok(count) = serial.read(&mut bytes) {
            text += &String::from_utf8_lossy(bytes.get(..count).unwrap_or_default());
        }
    }
    eprintln!("not {line:?} but {text:?}");
    false
}

struct Reader {
    binary: Binary,
    shape: Shape,
    ram: OwnedFd,
    boot: OwnedFd,
    _folder: tempfile::TempDir,
}

impl Reader {
    async fn new(disks: usize) -> Option<Self> {
        let folder = tempfile::tempdir().expect("temp dir");
        let boot = boot_sector(folder.path(), "disk")?;
        let binary = binary().await?;
        let slots = vec![DriveSlot::ReadOnly; disks];
        let shape = Shape::new(64 * MIB, 1, Accel::Tcg, GuestKind::Bare, slots);
        let shape = shape.expect("possible");
        let ram = spawn::ram_file(&shape).expect("memfd");
        Some(Self { binary, shape, ram, boot, _folder: folder })
    }

    fn wait(&self) -> Launch {
        as_user(Launch::wait(self.binary.clone(), self.shape.clone(), clone(&self.ram)))
    }

    /// A VM that has read its disk, stopped. → it, and its state.
    async fn saved(&self, drives: Drives, line: &str) -> (Qemu, OwnedFd) {
        let ram = clone(&self.ram);
        let launch = Launch::boot(self.binary.clone(), self.shape.clone(), ram, Boot::Disk);
        let parent = as_user(launch.drives(drives)).start().await.expect("starts");
        assert!(prints(&parent, line), "it reads its own disk");
        parent.qmp.stop().await.expect("stop");
        let state = memfd();
        parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
        (parent, state)
    }
}

/// QEMUs that waited before any image was known serve VMs of two. Each guest continues and reads
/// its own disk, which only the daemon may open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_pool_serves_vms_of_different_images() {
    let Some(reader) = Reader::new(1).await else { return };
    let (binary, ram) = (reader.binary.clone(), clone(&reader.ram));
    let pool = Pool::new(Limits::default(), move |shape: Shape| -> Starting<Qemu, StartError> {
        Box::pin(as_user(Launch::wait(binary.clone(), shape, clone(&ram))).start())
    });
    pool.want(&reader.shape, 2);
    let began = Instant::now();
    while pool.counts().iter().map(|(_, c)| c.waiting).sum::<usize>() < 2 {
        assert!(began.elapsed() < SOON, "the pool fills");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for content in [b"image--A", b"image--B"] {
        let line = std::str::from_utf8(content).expect("ASCII");
        let disk = disk(&reader.boot, content);
        public(&disk);
        let (parent, state) = reader.saved(drives([clone(&disk)]), line).await;
        parent.process.kill();
        parent.process.wait().await;
        private(&disk);

        let (qemu, origin) = pool.take(&reader.shape).await.expect("there");
        assert_eq!(origin, Origin::Pooled);
        qemu.qmp.bind_files(&drives([disk])).await.expect("bound");
        let file = reopen_from_start(&state).expect("open");
        if let Err(error) = qemu.qmp.load_state(file.as_fd(), SOON).await {
            panic!("{}", qemu.explain(error).await);
        }
        qemu.qmp.cont().await.expect("cont");
        assert!(prints(&qemu, line), "the clone reads the disk that was bound");
        qemu.process.kill();
        qemu.process.wait().await;
    }
}

/// A guest reads what was bound, and not what its parent had. Each of several drives has its own
/// content. The same holds for a clone of a clone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_drive_holds_what_was_bound_to_it() {
    let Some(reader) = Reader::new(2).await else { return };
    let two = |first: &[u8; 8], second: &[u8; 8]| {
        let disks = [disk(&reader.boot, first), disk(&reader.boot, second)];
        disks.iter().for_each(public);
        drives(disks)
    };
    let (parent, state) = reader.saved(two(b"parent-1", b"parent-2"), "parent-1").await;
    drop(parent);
    let first = reader.wait().start().await.expect("starts");
    first.qmp.bind_files(&two(b"clone--1", b"clone--2")).await.expect("bound");
    let nodes = first.qmp.execute("query-named-block-nodes", None, SOON).await.expect("asked");
    let bound = |index: u32| {
        let name = format!("bound{index}");
        nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name.as_str())
    };
    for index in 0..2 {
        let node = bound(index).unwrap_or_else(|| panic!("no {index}: {nodes}"));
        assert_eq!((&node["ro"], &node["drv"]), (&true.into(), &"file".into()));
        assert_eq!(node["image"]["virtual-size"], DISK_BYTES);
    }
    let file = reopen_from_start(&state).expect("open");
    first.qmp.load_state(file.as_fd(), SOON).await.expect("loaded");
    first.qmp.cont().await.expect("cont");
    assert!(prints(&first, "clone--1"), "not the parent's disk");
    first.qmp.stop().await.expect("stop");
    let state = memfd();
    first.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    drop(first);

    let second = reader.wait().start().await.expect("starts");
    second.qmp.bind_files(&two(b"again--1", b"again--2")).await.expect("bound");
    let file = reopen_from_start(&state).expect("open");
    second.qmp.load_state(file.as_fd(), SOON).await.expect("loaded");
    second.qmp.cont().await.expect("cont");
    assert!(prints(&second, "again--1"), "a clone of a clone is bound, too");
}

/// Content that QEMU can't have is an error with QEMU's words.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drive_that_is_not_in_the_shape_cannot_be_bound() {
    let Some(reader) = Reader::new(1).await else { return };
    let waiting = reader.wait().start().await.expect("starts");
    let disk = || disk(&reader.boot, b"surplus-");
    let error = waiting.qmp.bind_files(&drives([disk(), disk()])).await;
    let error = error.expect_err("there is one").to_string();
    assert!(error.starts_with("QEMU refused `qom-set`"), "{error}");
    assert!(error.contains("disk1"), "{error}");
}

/// A tap in a network namespace of its own. It lives as long as the thread or the fd.
struct Tap {
    fd: OwnedFd,
    /// Asks the thread in the namespace for the frames that came from QEMU.
    ask: mpsc::Sender<mpsc::Sender<u64>>,
}

const TAP: &str = "vmf0";

impl Tap {
    /// `None`, said loudly, where it can't be made.
    fn new() -> Option<Self> {
        if unprivileged().is_none() {
            skip("not root: no tap can be made");
            return None;
        }
        let (made, tap) = mpsc::channel();
        let (ask, asked) = mpsc::channel::<mpsc::Sender<u64>>();
        std::thread::spawn(move || {
            made.send(open_tap()).expect("it waits");
            for answer in asked {
                let _gone = answer.send(frames());
            }
        });
        match tap.recv().expect("the thread answers") {
            Ok(fd) => Some(Self { fd, ask }),
            Err(why) => {
                skip(&why);
                None
            }
        }
    }

    fn frames(&self) -> u64 {
        let (answer, frames) = mpsc::channel();
        self.ask.send(answer).expect("the thread lives");
        frames.recv().expect("the thread lives")
    }
}

/// In a new network namespace, on this thread; up.
fn open_tap() -> Result<OwnedFd, String> {
    enter_new_network().map_err(|error| format!("no network namespace: {error}"))?;
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    let fd = rustix::fs::open("/dev/net/tun", flags, rustix::fs::Mode::empty())
        .map_err(|error| format!("/dev/net/tun: {error}"))?;
    attach(&fd).map_err(|error| format!("make a tap: {error}"))?;
    // No frames of the kernel's own disturb the count: they go the other way.
    let up = Command::new("ip").args(["link", "set", TAP, "up"]).status();
    match up {
        Ok(status) if status.success() => Ok(fd),
        other => Err(format!("ip link set up: {other:?}")),
    }
}

#[expect(unsafe_code, reason = "unshare is unsafe for the sake of CLONE_FILES, which is not given")]
fn enter_new_network() -> rustix::io::Result<()> {
    // SAFETY: NEWNET changes this thread's network namespace and no memory or fd table.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
}

#[expect(unsafe_code, reason = "an ioctl")]
fn attach(tun: &OwnedFd) -> std::io::Result<()> {
    // SAFETY: plain data, valid as zeros.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(TAP.bytes()) {
        *to = libc::c_char::try_from(from).expect("ASCII");
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("16 bits");
    // SAFETY: the request lives across the call, and is what TUNSETIFF takes.
    let made = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw const request) };
    if made == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// What the namespace of this thread has received from the tap.
fn frames() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/dev").expect("proc");
    let line = text.lines().find_map(|line| line.trim().strip_prefix(&format!("{TAP}:")));
    let packets = line.and_then(|line| line.split_whitespace().nth(1));
    packets.and_then(|packets| packets.parse().ok()).unwrap_or_else(|| panic!("no {TAP}: {text}"))
}

/// A VM with a network card is cloned into a QEMU that waits with a tap of its own. The guest
/// continues with the parent's MAC address, and the clone announces nothing by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_has_a_tap_of_its_own_and_sends_nothing_by_itself() {
    let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
    let (Some(parents), Some(clones)) = (Tap::new(), Tap::new()) else { return };
    let shape = bare.shape.clone().with_nics(1).expect("possible");
    let start = async |boot: bool, tap: &Tap| {
        let (binary, shape, ram) = (bare.binary.clone(), shape.clone(), clone(&bare.ram));
        let launch = match boot {
            true => Launch::boot(binary, shape, ram, Boot::Disk).drives(bare.drives.clone()),
            false => Launch::wait(binary, shape, ram),
        };
        as_user(launch.nic(clone(&tap.fd))).start().await.expect("starts")
    };
    let parent = start(true, &parents).await;
    assert!(Counter::new(&parent).next().is_some(), "the guest counts");
    parent.qmp.stop().await.expect("stop");
    let state = memfd();
    parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");

    let clone = start(false, &clones).await;
    if let Err(error) = bare.load(&clone, &state).await {
        panic!("{}", clone.explain(error).await);
    }
    let before = clones.frames();
    clone.qmp.cont().await.expect("cont");
    assert!(Counter::new(&clone).next().is_some(), "it goes on");
    let name = serde_json::json!({"name": "net0"});
    let filter = clone.qmp.execute("query-rx-filter", Some(name), SOON).await.expect("asked");
    assert_eq!(filter[0]["main-mac"], "52:54:00:00:00:01", "{filter}");
    // By default QEMU announces for half a second.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(clones.frames(), before, "a clone must not speak before its guest does");
    // The tap is connected all the same: an announcement that is asked for gets out.
    let now = serde_json::json!({"initial": 50, "max": 50, "rounds": 1, "step": 10});
    clone.qmp.execute("announce-self", Some(now), SOON).await.expect("asked");
    let began = Instant::now();
    while clones.frames() == before {
        assert!(began.elapsed() < SOON, "no frame comes through the tap");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(parents.frames(), 0, "and none through the parent's");
}

/// The state of a VM with a network card does not load in a QEMU without: they are two shapes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_card_makes_another_shape() {
    let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
    let Some(tap) = Tap::new() else { return };
    let shape = bare.shape.clone().with_nics(1).expect("possible");
    assert_ne!(bare.shape, shape);
    let launch = Launch::boot(bare.binary.clone(), shape, clone(&bare.ram), Boot::Disk);
    let launch = launch.drives(bare.drives.clone()).nic(tap.fd);
    let parent = as_user(launch).start().await.expect("starts");
    assert!(Counter::new(&parent).next().is_some(), "the guest counts");
    parent.qmp.stop().await.expect("stop");
    let state = memfd();
    parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    let other = bare.start(false).await;
    let error = bare.load(&other, &state).await.expect_err("it has no such device");
    let error = other.explain(error).await.to_string();
    assert!(error.contains("virtio-net"), "{error}");
}
