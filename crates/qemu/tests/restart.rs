//! A guest writes all the time, and the process that serves its disk is killed at random instants.
//! Another one takes its place, on the same state folder. Its socket is the same one: the holder's
//! loop keeps it, in a process of its own.
//!
//! ```text
//!   QEMU ──NBD──► server (this program again) ──Hello, Get──► holder (this program again)
//!                  killed ─► started again
//! ```
//!
//! How long the guest waits:
//!
//! ```text
//!   cargo test --workspace --test restart -- --ignored --nocapture waits
//! ```

mod support;

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use support::disks::PAGE_BYTES;
use support::{Counter, SOON, binary, boot_sector, millis, spread, unprivileged};
use vmfork_disk::{
    Disk, DiskExport, DiskImage, DiskServer, DiskSet, DiskSpec, DiskStore, Durability, StoreOptions,
};
use vmfork_holder::{Kind, Name, Owner};
use vmfork_nbd::Span;
use vmfork_qemu::{
    Accel, Boot, DiskSlot, DriveContent, DriveSlot, Drives, GuestKind, Launch, NbdSocket, Qemu,
    Shape, spawn,
};

const FOLDER: &str = "VMFORK_RESTART_TEST_FOLDER";
const WAY: &str = "VMFORK_RESTART_TEST_WAY";
const ACKNOWLEDGED: &str = "VMFORK_RESTART_TEST_ACKNOWLEDGED";
const SEED: u64 = 18;
const KILLS: u32 = 8;
/// Longest time between a start and a kill.
const RUNS_MS: u64 = 400;
const SOCKET: &str = "disk";
const EXPORT: &str = "data";
/// 2 MiB: the firmware boots from no less than a cylinder of 516,096 bytes.
const PAGES: u64 = 512;
/// Record N is on page 1 + N % SLOTS.
const SLOTS: u64 = 64;
/// Records that the guest may have written, though their numbers were not read yet.
const IN_FLIGHT: u64 = 3;
/// How often the server freezes its disk.
const FREEZE_EVERY: Duration = Duration::from_millis(15);
/// In this time a number that was printed is read.
const SETTLES: Duration = Duration::from_millis(50);
const LINGER: Duration = Duration::from_secs(60);
/// Without a socket QEMU tries after 0, 1, 3 and 7 s. So it would wait 3.5 s more after this …
const AWAY: Duration = Duration::from_millis(3_500);
/// … and it does not.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Where a server's socket comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From the holder.
    Held,
    /// It makes one, in the place of the last one.
    Own,
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).expect("run by another test"))
}

fn qemu_uid() -> u32 {
    let own = rustix::process::geteuid().as_raw();
    unprivileged().map_or(own, |user| user.uid)
}

/// Says that it is ready, and ends when its parent is gone.
fn ready_until_the_end() {
    eprintln!("ready");
    let _end = std::io::stdin().read(&mut [0]);
}

#[test]
#[ignore = "the work of another test"]
fn child_holds() {
    let (ready, is_ready) = std::sync::mpsc::channel();
    let state = folder().join("state");
    std::thread::spawn(move || {
        let told = || ready.send(()).expect("it waits");
        vmfork_holder::serve(&state, LINGER, told).expect("it serves");
    });
    is_ready.recv_timeout(SOON).expect("it listens");
    ready_until_the_end();
}

#[test]
#[ignore = "the work of another test"]
fn child_serves() {
    let folder = folder();
    let acknowledged = std::env::var(ACKNOWLEDGED).expect("told").parse().expect("a number");
    let store = open_store(&folder);
    let disk = Arc::new(open_disk(&store).unwrap_or_else(|| new_disk(&store, &folder)));
    check_records(&disk, acknowledged);
    let way = std::env::var(WAY).expect("told");
    let (listener, _owner) = match way.as_str() {
        "Held" => held(&folder),
        _ => (listen(&folder), None),
    };
    let export = DiskExport::new(Arc::clone(&disk), Durability::Host);
    let disks = [(EXPORT.to_owned(), export)];
    let _server = DiskServer::start_with(listener, qemu_uid(), disks).expect("threads left");
    // Kills come in the middle of freezes, too.
    std::thread::spawn(move || {
        let (_never, wait) = std::sync::mpsc::channel::<()>();
        loop {
            let _timeout = wait.recv_timeout(FREEZE_EVERY);
            drop(disk.freeze().expect("room"));
        }
    });
    ready_until_the_end();
}

fn open_store(folder: &Path) -> DiskStore {
    DiskStore::open(&folder.join("disks"), StoreOptions { floor_bytes: 0 }).expect("a store")
}

fn new_disk(store: &DiskStore, folder: &Path) -> Disk {
    let (name, vm, set) = (EXPORT.to_owned(), "test".to_owned(), DiskSet::new(None));
    let size_bytes = PAGES * PAGE_BYTES;
    let spec = DiskSpec { name, vm, size_bytes, set };
    let blank = DiskImage::blank(size_bytes).expect("possible");
    let disk = store.create(&spec, &blank).expect("room");
    let boot = fs::read(folder.join("boot")).expect("assembled");
    let len_bytes = u32::try_from(boot.len()).expect("a sector");
    disk.write(Span { offset_bytes: 0, len_bytes }, &boot).expect("room");
    disk
}

/// The disk that a killed server left. `None`: there was none yet.
fn open_disk(store: &DiskStore) -> Option<Disk> {
    let listing = store.list().expect("a list");
    assert!(listing.bad.is_empty(), "{:?}", listing.bad);
    let newest: Vec<_> = listing.disks().iter().map(|newest| newest.id).collect();
    assert!(newest.len() <= 1, "one disk: {newest:?}");
    let disk = store.reopen(*newest.first()?, &DiskSet::new(None), &|_| None).expect("the disk");
    store.remove_unneeded().expect("removed");
    Some(disk)
}

/// The socket of the server before, or the first one. It can be had as long as the owner lives.
fn held(folder: &Path) -> (OwnedFd, Option<Owner>) {
    let mut owner = Owner::hello(&folder.join("state"), LINGER).expect("a holder");
    let name = Name::new("disks.1").expect("a name");
    let listener = match owner.get(&name).expect("it answers") {
        Some(held) => held.fd,
        None => {
            let listener = listen(folder);
            let note = qemu_uid().to_string();
            owner.put(&name, Kind::LISTENER, note.as_bytes(), listener.as_fd()).expect("room");
            listener
        }
    };
    (listener, Some(owner))
}

/// A socket of QEMU's user, in the place of another.
fn listen(folder: &Path) -> OwnedFd {
    let path = folder.join("sockets").join(SOCKET);
    let _was_there = fs::remove_file(&path);
    let listener = UnixListener::bind(&path).expect("free");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("ours");
    chown(&path, Some(qemu_uid()), None).expect("ours");
    listener.into()
}

/// All records up to `acknowledged` are there, but for those that a later one has replaced.
fn check_records(disk: &Disk, acknowledged: u64) {
    for slot in 0..SLOTS {
        let mut page = [0; 4096];
        let span = Span { offset_bytes: (1 + slot) * PAGE_BYTES, len_bytes: 4096 };
        disk.read(span, &mut page).expect("here");
        let words: Vec<u32> =
            page.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("4"))).collect();
        let number = u64::from(words[0]);
        let next = |word: u32| word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let whole = words.windows(2).all(|two| two[1] == next(two[0]));
        // The newest record of this page that was acknowledged; 0: none was.
        let newest = (acknowledged + SLOTS - slot) / SLOTS * SLOTS + slot;
        let newest = newest.saturating_sub(SLOTS);
        let may_be_torn = (1..=IN_FLIGHT).any(|more| (acknowledged + more) % SLOTS == slot);
        let told = format!("record {number} of page {slot}, after {acknowledged}");
        assert!(number >= newest, "lost: {newest} is older: {told}");
        assert!(number <= acknowledged + IN_FLIGHT, "from nowhere: {told}");
        let empty = words.iter().all(|word| *word == 0);
        assert!(empty || number % SLOTS == slot, "of another page: {told}");
        assert!(whole || may_be_torn || (empty && newest == 0), "torn: {told}");
    }
}

/// This program again, as one of the children. It is killed when this is dropped.
struct Process {
    child: Child,
    /// It ends with us.
    _stdin: Option<ChildStdin>,
}

impl Process {
    fn start(test: &str, folder: &Path, way: Way, acknowledged: u64) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", test, "--ignored", "--nocapture"]).env(FOLDER, folder);
        command.env(WAY, format!("{way:?}")).env(ACKNOWLEDGED, acknowledged.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("a child");
        let mut errors = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut said = String::new();
        let ready = errors.by_ref().map_while(Result::ok).any(|line| {
            said += &line;
            said += "\n";
            line == "ready"
        });
        assert!(ready, "{test} ended: {said}");
        // What it says later is for people.
        std::thread::spawn(move || {
            errors.map_while(Result::ok).for_each(|line| eprintln!("  {line}"));
        });
        let stdin = child.stdin.take();
        Self { child, _stdin: stdin }
    }

    fn kill(self) {
        drop(self);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// A guest that writes records, and what serves its disk.
struct Setup {
    folder: tempfile::TempDir,
    way: Way,
    server: Option<Process>,
    _holder: Process,
    qemu: Qemu,
    records: Records,
}

impl Setup {
    async fn new(way: Way) -> Option<Self> {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut boot = Vec::new();
        let sector = boot_sector(folder.path(), "records")?;
        File::from(sector).read_to_end(&mut boot).expect("assembled");
        fs::write(folder.path().join("boot"), boot).expect("room");
        let binary = binary().await?;
        // QEMU's user may search it, and not list it.
        for (name, mode) in [("sockets", 0o711), ("state", 0o700)] {
            fs::DirBuilder::new().mode(mode).create(folder.path().join(name)).expect("made");
        }
        let holder = Process::start("child_holds", folder.path(), way, 0);
        let server = Process::start("child_serves", folder.path(), way, 0);
        let sockets = File::open(folder.path().join("sockets")).expect("made");
        let slot = DiskSlot { size_bytes: PAGES * PAGE_BYTES, read_only: false, flushes: false };
        let socket = NbdSocket::new(sockets, SOCKET, EXPORT, slot).expect("possible");
        let drives = Drives::new(GuestKind::Bare, vec![DriveContent::Disk(socket)]);
        let drives = drives.expect("fds left");
        let slots = vec![DriveSlot::Disk(slot)];
        let shape = Shape::new(64 << 20, 1, Accel::Tcg, GuestKind::Bare, slots).expect("possible");
        let ram = spawn::ram_file(&shape).expect("memfd");
        let launch = Launch::boot(binary, shape, ram, Boot::Disk).drives(drives);
        let launch = match unprivileged() {
            Some(user) => launch.run_as(user),
            None => launch,
        };
        let qemu = launch.start().await.expect("starts");
        let records = Records::of(&qemu);
        records.after(Instant::now());
        Some(Self { folder, way, server: Some(server), _holder: holder, qemu, records })
    }

    /// The server is killed, and another one started after a while. → how long the guest waited
    /// after the new one served.
    async fn restart(&mut self, away: Duration) -> Duration {
        self.server.take().expect("it serves").kill();
        tokio::time::sleep(away).await;
        let acknowledged = self.records.settled().await;
        let server = Process::start("child_serves", self.folder.path(), self.way, acknowledged);
        let ready = Instant::now();
        self.server = Some(server);
        self.records.after(ready).duration_since(ready)
    }

    /// The guest has seen nothing. Its disk has all that it was told is there. → how much that is.
    async fn end(mut self) -> u64 {
        assert_eq!(*self.qemu.qmp.stall().borrow(), None, "no request has failed");
        assert!(self.qemu.qmp.query_status().await.expect("it answers").running);
        self.qemu.qmp.stop().await.expect("stop");
        self.server.take().expect("it serves").kill();
        self.qemu.process.kill();
        self.qemu.process.wait().await;
        let written = self.records.end();
        let store = open_store(self.folder.path());
        check_records(&open_disk(&store).expect("left"), written);
        written
    }
}

/// When the guest said that its disk has a record.
struct Records {
    seen: Arc<Mutex<Vec<(Instant, u64)>>>,
    reader: Option<JoinHandle<()>>,
}

impl Records {
    fn of(qemu: &Qemu) -> Self {
        let mut counter = Counter::new(qemu);
        let seen = Arc::<Mutex<Vec<(Instant, u64)>>>::default();
        let theirs = Arc::clone(&seen);
        let reader = std::thread::spawn(move || {
            let mut last = None;
            while let Some(number) = counter.next() {
                assert!(last.is_none_or(|last| number == last + 1), "{number} after {last:?}");
                last = Some(number);
                let mut seen = theirs.lock().unwrap_or_else(PoisonError::into_inner);
                seen.push((Instant::now(), number));
            }
        });
        Self { seen, reader: Some(reader) }
    }

    fn last(&self) -> u64 {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.last().map_or(0, |(_, number)| *number)
    }

    /// The last record, while the disk has no server: what was printed has been read by then.
    async fn settled(&self) -> u64 {
        let mut last = None;
        while last != Some(self.last()) {
            last = Some(self.last());
            tokio::time::sleep(SETTLES).await;
        }
        self.last()
    }

    /// When the first record came after that.
    fn after(&self, since: Instant) -> Instant {
        let began = Instant::now();
        loop {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let later = seen.iter().rev().take_while(|(at, _)| *at > since).last();
            if let Some((at, _)) = later {
                return *at;
            }
            drop(seen);
            assert!(began.elapsed() < 3 * SOON, "the guest does not go on");
            assert!(!self.reader.as_ref().is_none_or(JoinHandle::is_finished), "an error");
            std::thread::yield_now();
        }
    }

    /// QEMU has ended. → the last record.
    fn end(&mut self) -> u64 {
        self.reader.take().expect("once").join().expect("the guest saw no error");
        self.last()
    }
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_outlives_servers_that_are_killed() {
    let Some(mut setup) = Setup::new(Way::Held).await else { return };
    let mut random = Random(SEED);
    let mut waits = Vec::new();
    for _ in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(random.below(RUNS_MS))).await;
        let began = setup.restart(Duration::ZERO).await;
        waits.push(began.as_secs_f64() * 1e3);
    }
    // It is in the socket's backlog meanwhile.
    let waited = setup.restart(AWAY).await;
    assert!(waited < AT_ONCE, "QEMU had not connected: {waited:?}");
    eprintln!("the guest waits {} after the server is there", spread(waits));
    eprintln!("after {AWAY:?} without one: {:.1} ms", waited.as_secs_f64() * 1e3);
    let written = setup.end().await;
    eprintln!("{written} records, none lost");
    assert!(written > u64::from(KILLS), "it wrote");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn how_long_a_guest_waits_for_its_disk() {
    for way in [Way::Held, Way::Own] {
        let Some(mut setup) = Setup::new(way).await else { return };
        for (away_ms, rounds) in [(0, 10), (300, 10), (3_000, 5), (12_000, 3)] {
            let (mut waits, mut stood) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                tokio::time::sleep(Duration::from_millis(200)).await;
                let began = Instant::now();
                waits.push(setup.restart(Duration::from_millis(away_ms)).await.as_secs_f64() * 1e3);
                stood.push(millis(began));
            }
            eprintln!("{way:?}, {away_ms} ms without a server: {} more", spread(waits));
            eprintln!("  from the kill on: {}", spread(stood));
        }
        eprintln!("{} records, none lost", setup.end().await);
    }
}
