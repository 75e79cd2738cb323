use std::fs;
use std::io::{Read, Write};
use std::path::Path;

use vmfork_image::{ImageId, PageRange, PageTable, Source};

use super::*;
use crate::disk::Disk;
use crate::export::Durability;
use crate::image::DiskImage;
use crate::lower::OwnPages;
use crate::space::DiskSet;
use crate::store::{DiskSpec, DiskStore, StoreOptions};

/// No wait of these tests takes as long, unless something is never answered.
const LONG: Duration = Duration::from_secs(20);
const SIZE: u64 = 1 << 20;

struct Setup {
    folder: tempfile::TempDir,
    server: DiskServer,
    disks: Vec<Arc<Disk>>,
    store: DiskStore,
}

impl Setup {
    /// A VM of user `uid` with these disks.
    fn new(uid: u32, names: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let options = StoreOptions { floor_bytes: 0 };
        let store = DiskStore::open(&folder.path().join("store"), options).expect("a store");
        let listener = UnixListener::bind(folder.path().join("s")).expect("a socket");
        let server = DiskServer::start(listener, uid).expect("a server");
        let blank = DiskImage::blank(SIZE).expect("an image");
        let disk = |name: &&str| {
            let (name, vm, set) = ((*name).to_owned(), "a".to_owned(), DiskSet::new(None));
            let spec = DiskSpec { name, vm, size_bytes: SIZE, set };
            let disk = Arc::new(store.create(&spec, &blank).expect("a disk"));
            let export = DiskExport::new(Arc::clone(&disk), Durability::Host);
            assert!(server.add(&spec.name, export));
            disk
        };
        let disks = names.iter().map(disk).collect();
        Self { folder, server, disks, store }
    }

    fn client(&self) -> UnixStream {
        client(&self.folder.path().join("s"))
    }

    /// A client that has this disk; `None`: it was refused.
    fn has(&self, name: &str) -> Option<UnixStream> {
        let mut socket = self.client();
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).ok()?;
        let len = u32::try_from(name.len()).expect("short").to_be_bytes();
        let ask =
            [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &1_u32.to_be_bytes(), &len, name.as_bytes()];
        socket.write_all(&ask.concat()).ok()?;
        let mut told = [0; 10];
        socket.read_exact(&mut told).ok()?;
        assert_eq!(told[..8], SIZE.to_be_bytes());
        Some(socket)
    }
}

fn client(path: &Path) -> UnixStream {
    let socket = UnixStream::connect(path).expect("a server");
    socket.set_read_timeout(Some(LONG)).expect("a timeout");
    socket
}

fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn write(socket: &mut UnixStream, byte: u8) -> io::Result<()> {
    let head =
        [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0, 0, 1], &[0; 16], &512_u32.to_be_bytes()];
    socket.write_all(&[&head.concat()[..], &[byte; 512]].concat())?;
    let mut reply = [1; 16];
    socket.read_exact(&mut reply)?;
    assert_eq!(reply[4..8], [0; 4]);
    Ok(())
}

fn first(disk: &Disk) -> u8 {
    let mut bytes = [0; 512];
    let span = vmfork_nbd::Span { offset_bytes: 0, len_bytes: 512 };
    disk.read(span, &mut bytes).expect("read");
    bytes[0]
}

#[test]
fn a_vm_gets_its_own_disks_by_name_and_its_server_answers() {
    let setup = Setup::new(me(), &["root", "data"]);
    assert!(setup.server.ping(LONG));
    let mut root = setup.has("root").expect("a disk");
    let mut data = setup.has("data").expect("a disk");
    write(&mut root, 1).expect("written");
    write(&mut data, 2).expect("written");
    assert_eq!((first(&setup.disks[0]), first(&setup.disks[1])), (1, 2));
    assert!(setup.has("other").is_none() && setup.has("").is_none());
    assert!(setup.server.is_connected("root") && !setup.server.is_connected("other"));
    assert!(setup.server.ping(LONG), "both connections answer");
    assert_eq!(setup.disks[1].counts().written_bytes, 512);
    assert!(
        !setup.server.add("root", DiskExport::new(Arc::clone(&setup.disks[0]), Durability::Host))
    );
    assert!(setup.server.remove("root", LONG));
    assert!(write(&mut root, 3).is_err());
    assert!(setup.has("root").is_none());
}

#[test]
fn a_client_may_come_before_its_disk() {
    let mut setup = Setup::new(me(), &["root"]);
    let path = setup.folder.path().join("late");
    let listener = UnixListener::bind(&path).expect("a socket");
    let promised = |size_bytes| Export {
        name: "0.".to_owned(),
        description: String::new(),
        size_bytes,
        read_only: false,
        flushes: false,
    };
    let waiting = [promised(SIZE), Export { name: "1.".to_owned(), ..promised(2 * SIZE) }];
    setup.server = DiskServer::start_waiting(listener, me(), waiting).expect("a server");
    fs::rename(&path, setup.folder.path().join("s")).expect("moved");
    let mut client = setup.has("0.").expect("it may connect");
    assert!(setup.server.ping(LONG));
    // Nothing is written anywhere before.
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| write(&mut client, 1)));
    assert!(refused.is_err(), "it is told that it can't");
    let export = || DiskExport::new(Arc::clone(&setup.disks[0]), Durability::Host);
    assert!(!setup.server.fill("1.", export()), "clients were told another size");
    assert!(!setup.server.fill("2.", export()), "none waits for it");
    assert!(setup.server.fill("0.", export()) && !setup.server.is_filled());
    assert!(!setup.server.fill("0.", export()), "it has come");
    write(&mut client, 2).expect("written");
    assert_eq!(first(&setup.disks[0]), 2);
}

#[test]
fn a_client_of_another_user_gets_nothing() {
    let setup = Setup::new(me() + 1, &["root"]);
    let mut byte = [0];
    // It is closed at once, perhaps before all was read.
    assert!(!matches!(setup.client().read(&mut byte), Ok(1..)));
    assert!(setup.server.ping(LONG));
    assert_eq!(setup.server.counts().strangers, 1);
}

#[test]
fn the_newest_connection_has_the_disk_and_the_old_one_has_ended_before() {
    let setup = Setup::new(me(), &["root"]);
    let mut old = setup.has("root").expect("a disk");
    write(&mut old, 1).expect("written");
    // It never noticed that QEMU has gone, and QEMU comes again.
    let mut new = setup.has("root").expect("a disk");
    assert!(write(&mut old, 2).is_err(), "it has ended");
    assert_eq!(first(&setup.disks[0]), 1);
    write(&mut new, 3).expect("written");
    assert_eq!(first(&setup.disks[0]), 3);
    assert_eq!(setup.server.counts().replaced, 1);
}

#[test]
fn connections_are_bounded_and_all_have_ended_when_the_server_is_dropped() {
    let setup = Setup::new(me(), &["root"]);
    let waiting: Vec<_> = (0..CONNECTIONS_MAX + 5)
        .map(|_| {
            let mut socket = setup.client();
            let served = socket.read_exact(&mut [0; 18]).is_ok();
            (socket, served)
        })
        .collect();
    assert_eq!(waiting.iter().filter(|(_, served)| *served).count(), CONNECTIONS_MAX);
    assert_eq!(setup.server.counts().refused, 5);
    let Setup { server, folder, disks, .. } = setup;
    drop(server);
    for (mut socket, _) in waiting {
        assert!(!matches!(socket.read(&mut [0]), Ok(1..)), "it has ended");
    }
    assert!(UnixStream::connect(folder.path().join("s")).is_err());
    assert_eq!(Arc::strong_count(&disks[0]), 1, "no thread has the disk");
}

/// Pages that come when the sender of the channel is dropped.
#[derive(Debug)]
struct Hangs(Mutex<std::sync::mpsc::Receiver<()>>);

impl OwnPages for Hangs {
    fn is_here(&self, _: PageRange) -> bool {
        false
    }

    fn read(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let _ended = self.0.lock().expect("one at a time").recv();
        bytes.fill(7);
        Ok(())
    }
}

/// An image all whose pages are these.
fn image_of(own: Arc<dyn OwnPages>) -> DiskImage {
    let id = ImageId::new(7).expect("not 0");
    let table = PageTable::uniform(SIZE / 4096, Source::Image(id));
    DiskImage::from_table(id, SIZE, table, BTreeMap::from([(id, own)])).expect("an image")
}

#[test]
fn a_request_that_hangs_does_not_hang_the_end_of_the_server() {
    let mut setup = Setup::new(me(), &["other"]);
    let (come, wait) = std::sync::mpsc::channel::<()>();
    let image = image_of(Arc::new(Hangs(Mutex::new(wait))));
    let (name, vm, set) = ("root".to_owned(), "a".to_owned(), DiskSet::new(None));
    let spec = DiskSpec { name, vm, size_bytes: SIZE, set };
    let disk = Arc::new(setup.store.create(&spec, &image).expect("a disk"));
    setup.server.add("root", DiskExport::new(Arc::clone(&disk), Durability::Host));
    setup.server.end_timeout = Duration::from_millis(300);
    let mut socket = setup.has("root").expect("a disk");
    // A read of the first page.
    let head = [&0x2560_9513_u32.to_be_bytes()[..], &[0; 20], &4096_u32.to_be_bytes()].concat();
    socket.write_all(&head).expect("sent");
    let begun = Instant::now();
    while disk.counts().reads == 0 {
        assert!(begun.elapsed() < LONG, "the read begins");
        std::thread::yield_now();
    }
    let Setup { server, folder, disks, .. } = &mut setup;
    let (ended, end) = std::sync::mpsc::channel();
    let server = std::mem::replace(server, other_server(folder.path()));
    std::thread::spawn(move || {
        drop(server);
        ended.send(()).expect("heard");
    });
    end.recv_timeout(LONG).expect("the drop has a bound");
    assert!(UnixStream::connect(folder.path().join("s")).is_err(), "no client waits for it");
    assert_eq!(Arc::strong_count(&disks[0]), 1, "a disk that does not hang is free");
    assert!(Arc::strong_count(&disk) > 1, "the thread owns what it uses");
    drop(come);
    let begun = Instant::now();
    while Arc::strong_count(&disk) > 1 {
        assert!(begun.elapsed() < LONG, "the threads end after the request");
        std::thread::yield_now();
    }
}

fn other_server(folder: &Path) -> DiskServer {
    let listener = UnixListener::bind(folder.join("other")).expect("a socket");
    DiskServer::start(listener, me()).expect("a server")
}

#[test]
fn a_client_that_waits_in_the_backlog_finds_its_disk() {
    let setup = Setup::new(me(), &["data"]);
    let path = setup.folder.path().join("held");
    let listener = UnixListener::bind(&path).expect("a socket");
    // The server before has ended, and the holder has its socket.
    let waiting = std::thread::spawn(move || {
        let mut socket = client(&path);
        let ask = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 4], b"data"];
        socket.write_all(&ask.concat()).expect("taken");
        let mut told = [0; 18 + 10];
        socket.read_exact(&mut told).map(|()| (told, socket))
    });
    let export = DiskExport::new(Arc::clone(&setup.disks[0]), Durability::Host);
    let server = DiskServer::start_with(listener, me(), [("data".to_owned(), export)]);
    let server = server.expect("a server");
    let waited = waiting.join().expect("no panic");
    let (told, _client) = waited.expect("it finds the disk");
    assert_eq!(told[18..26], SIZE.to_be_bytes());
    assert!(server.is_connected("data"));
    assert_eq!(setup.disks[0].counts().reconnects, 0, "the first one to this server");
}
