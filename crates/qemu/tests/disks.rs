//! Writable disks that an NBD server serves, with a real QEMU under TCG, as an unprivileged user
//! (when run as root), in its sandbox.

mod support;

use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use support::disks::{PAGE_BYTES, SECTOR_BYTES, TestDisk};
use support::{Counter, SOON, binary, boot_sector, clone, memfd, unprivileged};
use vmfork_nbd::Span;
use vmfork_qemu::qmp::{IoError, IoOperation, RunState, reopen_from_start};
use vmfork_qemu::{
    Accel, Binary, Boot, DiskSlot, DriveContent, DriveSlot, Drives, GuestKind, Launch, NotReplaced,
    Qemu, QmpError, Shape, StartError, spawn,
};

/// 2 MiB: the firmware boots from no less than a cylinder of 516,096 bytes.
const PAGES: u64 = 512;
/// Of a disk that becomes full.
const QUOTA_PAGES: u64 = 8;

/// The guest that counts on its disk.
struct Writer {
    binary: Binary,
    shape: Shape,
    ram: OwnedFd,
    boot: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Writer {
    async fn new() -> Option<Self> {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut boot = Vec::new();
        let sector = boot_sector(folder.path(), "write")?;
        fs::File::from(sector).read_to_end(&mut boot).expect("assembled");
        let binary = binary().await?;
        let slot = DiskSlot { size_bytes: PAGES * PAGE_BYTES, read_only: false, flushes: false };
        let slots = vec![DriveSlot::Disk(slot)];
        let shape = Shape::new(64 << 20, 1, Accel::Tcg, GuestKind::Bare, slots).expect("possible");
        let ram = spawn::ram_file(&shape).expect("memfd");
        Some(Self { binary, shape, ram, boot, _folder: folder })
    }

    fn disk(&self) -> TestDisk {
        TestDisk::new(PAGES, &self.boot)
    }

    fn launch(&self, disk: &TestDisk, boots: bool) -> Launch {
        let (binary, shape, ram) = (self.binary.clone(), self.shape.clone(), clone(&self.ram));
        let launch = match boots {
            true => Launch::boot(binary, shape, ram, Boot::Disk),
            false => Launch::wait(binary, shape, ram),
        };
        let launch = launch.drives(drives(disk));
        match unprivileged() {
            Some(user) => launch.run_as(user),
            None => launch,
        }
    }

    async fn boot(&self, disk: &TestDisk) -> Qemu {
        self.launch(disk, true).start().await.expect("starts")
    }
}

fn drives(disk: &TestDisk) -> Drives {
    Drives::new(GuestKind::Bare, vec![disk.content()]).expect("fds left")
}

/// The count that a guest has written to its disk.
fn count_on(disk: &TestDisk) -> u64 {
    let digits = disk.read(SECTOR_BYTES, 8);
    let text = std::str::from_utf8(&digits).expect("ASCII");
    u64::from_str_radix(text, 16).unwrap_or_else(|_| panic!("the disk has {text:?}"))
}

/// How long a disk has no server. QEMU tries again after 1, 2, 4, … s.
const AWAY: Duration = Duration::from_millis(300);

/// Bytes of a sector that the guest does not count in.
const MARK: u64 = 9 * SECTOR_BYTES;

/// A guest boots from a disk and writes to it. The QEMU of its clone is connected to another disk
/// while it waits, and the clone continues its count there. No write of one reaches the other's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_continues_on_the_disk_that_its_qemu_has() {
    let Some(writer) = Writer::new().await else { return };
    let disk = writer.disk();
    let server = disk.serve();
    let parent = writer.boot(&disk).await;
    let mut counter = Counter::new(&parent);
    let first = counter.next().expect("the guest boots from its disk and writes to it");
    assert!(counter.next().expect("it goes on") > first);
    parent.qmp.stop().await.expect("stop");
    let state = memfd();
    parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    let at_fork = count_on(&disk);
    assert!(at_fork > first, "{at_fork} on the disk, {first} was printed before");
    parent.process.kill();
    parent.process.wait().await;

    drop(server);
    let other = disk.fork();
    let _server = other.serve();
    disk.write(MARK, b"parent's");
    let waiting = writer.launch(&other, false).start().await.expect("starts");
    let nodes = waiting.qmp.execute("query-named-block-nodes", None, SOON).await.expect("asked");
    let nodes = nodes.as_array().expect("a list");
    let bound = nodes.iter().find(|node| node["node-name"] == "drive0").expect("it is open");
    assert_eq!((&bound["drv"], &bound["ro"]), (&"raw".into(), &false.into()));
    assert_eq!(bound["image"]["virtual-size"], other.disk.size_bytes());
    let file = reopen_from_start(&state).expect("open");
    if let Err(error) = waiting.qmp.load_state(file.as_fd(), SOON).await {
        panic!("{}", waiting.explain(error).await);
    }
    waiting.qmp.cont().await.expect("cont");
    let next = Counter::new(&waiting).next().expect("the clone counts");
    assert!(next > at_fork, "{next} after {at_fork}");
    waiting.qmp.stop().await.expect("stop");
    assert!(count_on(&other) >= next);
    assert_eq!(count_on(&disk), at_fork, "the parent's disk is as it was");
    assert_eq!(other.read(MARK, 8), [0; 8]);
}

/// The server ends while the guest writes, and another one takes its place. The guest's request
/// waits meanwhile. The VM does not stop and the guest sees no error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_outlives_the_server_of_its_disk() {
    let Some(writer) = Writer::new().await else { return };
    let disk = writer.disk();
    let mut server = Some(disk.serve());
    let qemu = writer.boot(&disk).await;
    let stall = qemu.qmp.stall();
    let mut counter = Counter::new(&qemu);
    assert!(counter.next().is_some(), "the guest counts");
    for _ in 0..2 {
        drop(server.take());
        let stuck = count_on(&disk);
        tokio::time::sleep(AWAY).await;
        assert_eq!(count_on(&disk), stuck, "no server, no write");
        assert!(qemu.qmp.query_status().await.expect("it answers").running);
        server = Some(disk.serve());
        counter.forget();
        assert!(counter.next().expect("it goes on") > stuck, "no count is left out");
        assert!(count_on(&disk) > stuck, "it writes");
    }
    assert_eq!(*stall.borrow(), None);
}

/// Writes to a disk that is full stop the VM, and a watcher learns why. Once there is room,
/// `cont` repeats them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_stalls_the_vm_until_it_has_room() {
    let Some(writer) = Writer::new().await else { return };
    let disk = TestDisk::with_quota(Some(QUOTA_PAGES), PAGES, &writer.boot);
    let _server = disk.serve();
    let qemu = writer.boot(&disk).await;
    let mut counter = Counter::new(&qemu);
    assert!(counter.next().is_some(), "the guest counts");
    let mut stall = qemu.qmp.stall();
    assert_eq!(*stall.borrow(), None);

    // After a freeze the guest's next write needs a page, which another disk has taken.
    let rest =
        (0..QUOTA_PAGES - 1).map(|page| Span { offset_bytes: page * PAGE_BYTES, len_bytes: 4096 });
    let other = disk.beside();
    for page in rest.clone() {
        other.disk.write(page, &[1; 4096]).expect("room");
    }
    qemu.qmp.stop().await.expect("stop");
    disk.disk.freeze().expect("room for files");
    qemu.qmp.cont().await.expect("cont");
    for _ in 0..2 {
        let found = tokio::time::timeout(SOON, stall.wait_for(Option::is_some)).await;
        let error = found.expect("it stalls soon").expect("QEMU lives").clone().expect("checked");
        let IoError { drive, operation, no_space, stops, .. } = error;
        assert_eq!((drive, operation), (Some(0), IoOperation::Write));
        assert!(no_space && stops, "{error:?}");
        wait_for_state(&qemu, RunState::IoError).await;
        // It is full still.
        qemu.qmp.cont().await.expect("cont");
    }
    tokio::time::timeout(SOON, stall.wait_for(Option::is_some))
        .await
        .expect("soon")
        .expect("lives");
    wait_for_state(&qemu, RunState::IoError).await;
    let stuck = count_on(&disk);
    for page in rest {
        other.disk.trim(page).expect("ours");
    }
    counter.forget();
    qemu.qmp.cont().await.expect("cont");
    assert!(counter.next().expect("it goes on") > stuck, "no count is left out");
    assert_eq!(*stall.borrow(), None);
}

async fn wait_for_state(qemu: &Qemu, state: RunState) {
    let began = Instant::now();
    while qemu.qmp.query_status().await.expect("status").state != state {
        assert!(began.elapsed() < SOON, "it becomes {state:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A server that takes connections and says nothing is an error within a bound, with its cause.
/// QEMU answers afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_says_nothing_is_given_up() {
    let Some(writer) = Writer::new().await else { return };
    let (disk, silent, absent) = (writer.disk(), writer.disk(), writer.disk());
    let (_server, listener) = (disk.serve(), silent.listener());
    let qemu = writer.boot(&disk).await;
    let replace = async {
        let began = Instant::now();
        let DriveContent::Disk(socket) = silent.content() else { panic!("it is a disk") };
        let size_bytes = silent.disk.size_bytes();
        let refused = qemu.qmp.replace_disk(0, 1, &socket, size_bytes, None).await;
        (refused.expect_err("no server"), began.elapsed())
    };
    let boot = writer.launch(&absent, true).start();
    let ((refused, took), booted) = tokio::join!(replace, boot);
    assert!(took < Duration::from_secs(8), "{took:?}");
    let NotReplaced { error, has_old } = refused;
    assert!(matches!(error, QmpError::Disk { index: 0, .. }) && has_old, "{error}");
    let text = error.to_string();
    assert!(text.contains("timeout") && text.contains("the disk's server answers"), "{text}");
    assert!(qemu.qmp.query_status().await.expect("it answers").running);
    drop(listener);

    match booted.expect_err("no server") {
        StartError::Ended { words, .. } => {
            assert!(words.contains("Failed to connect"), "{words}");
        }
        other => panic!("{other}"),
    }
}

/// A guest that counts writes twice to this disk. It waits while nothing that it prints is read.
async fn goes_on(vm: &Qemu, counter: &mut Counter, disk: &TestDisk) {
    let now = || disk.read(SECTOR_BYTES, 8);
    for _ in 0..2 {
        let (before, began) = (now(), Instant::now());
        while now() == before {
            assert!(began.elapsed() < SOON, "nothing is written to the disk");
            if counter.next().is_none() {
                panic!("{:?}: {}", vm.qmp.query_status().await, vm.process.last_words().await);
            }
        }
    }
}

/// A drive of a VM gets another disk, and another. From then on all writes reach the new
/// one alone. A disk without a server leaves it the one that it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drive_gets_other_disks_during_the_life_of_its_vm() {
    let Some(writer) = Writer::new().await else { return };
    let disk = writer.disk();
    let _server = disk.serve();
    let vm = writer.boot(&disk).await;
    let mut counter = Counter::new(&vm);
    counter.next().expect("the guest boots from its disk and writes to it");

    let socket = |disk: &TestDisk| match disk.content() {
        DriveContent::Disk(socket) => socket,
        file => panic!("{file:?}"),
    };
    let size = disk.disk.size_bytes();
    let absent = writer.disk();
    let refused = vm.qmp.replace_disk(0, 1, &socket(&absent), size, None).await;
    let refused = refused.expect_err("no server");
    assert!(matches!(refused.error, QmpError::Disk { index: 0, .. }), "{refused:?}");
    assert!(refused.has_old, "QEMU said so: {refused:?}");
    goes_on(&vm, &mut counter, &disk).await;

    let mut earlier = None;
    let mut last = disk;
    let mut servers = Vec::new();
    for number in 2..5 {
        // The guest reads what it has written: both disks must have the same.
        vm.qmp.stop().await.expect("stop");
        let next = last.fork();
        servers.push(next.serve());
        let late = vm.qmp.replace_disk(0, number, &socket(&next), size, earlier).await;
        earlier = Some(late.expect("replaced"));
        let stays = count_on(&last);
        vm.qmp.cont().await.expect("cont");
        goes_on(&vm, &mut counter, &next).await;
        assert_eq!(count_on(&last), stays, "nothing is written to the old disk any more");
        assert!(count_on(&next) > stays, "it counts on");
        last = next;
    }
    let nodes = vm.qmp.execute("query-named-block-nodes", None, SOON).await.expect("asked");
    let nodes = nodes.as_array().expect("a list");
    let named = nodes.iter().filter_map(|node| node["node-name"].as_str());
    let ours: Vec<_> = named.filter(|name| !name.starts_with('#')).collect();
    assert_eq!(ours, ["bound0.4"], "QEMU has closed the others");
}

/// A folder that QEMU's user may not search is an error before QEMU starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_out_of_reach_is_found_at_the_start() {
    let Some(writer) = Writer::new().await else { return };
    if unprivileged().is_none() {
        return support::skip("not root: QEMU runs as the same user");
    }
    let disk = writer.disk();
    let _server = disk.serve();
    disk.close_folder();
    let error = writer.launch(&disk, true).start().await.expect_err("out of reach");
    assert!(matches!(error, StartError::Forbidden { access: "search", .. }), "{error}");
}
