use std::fs::{self, File};
use vmfork_disk::StoreError;

use super::*;

struct Setup {
    folder: tempfile::TempDir,
    disks: Arc<HostDisks>,
}

fn setup() -> Setup {
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = folder.path().join("sockets");
    fs::create_dir(&sockets).expect("made");
    // What an earlier daemon could not remove.
    fs::create_dir(sockets.join("7")).expect("made");
    let disks = HostDisks::open(&folder.path().join("disks"), sockets).expect("room");
    Setup { folder, disks: Arc::new(disks) }
}

impl Setup {
    /// A disk on a file of that size.
    async fn of_size(&self, bytes: u64) -> Result<Vec<DiskContent>, DiskError> {
        let path = self.folder.path().join("base");
        File::create(&path).expect("made").set_len(bytes).expect("sized");
        self.of_file(&path).await
    }

    async fn of_file(&self, path: &Path) -> Result<Vec<DiskContent>, DiskError> {
        let disk = format!("data=file:{}", path.display()).parse().expect("a disk");
        self.disks.contents(&[disk], |_| -> Result<PathBuf, DiskError> { panic!() }).await
    }
}

#[tokio::test]
async fn files_that_are_no_disks_are_refused_with_what_to_do() {
    let setup = setup();
    let (min, max) = (DISK_BYTES_MIN, 2_u64 << 40);
    for (bytes, cause, remedy) in [
        (0, "is empty", "NAME=blank:SIZE"),
        (512, "has 512 bytes: a disk has 1 MiB to 2 TiB", "truncate -s 1M"),
        (min + 1, "a multiple of 512", "truncate -s %4096"),
        (max + 4096, "1 MiB to 2 TiB", ""),
    ] {
        let error = setup.of_size(bytes).await.expect_err("refused");
        assert!(error.to_string().contains(cause), "{error}");
        assert!(error.remedy().unwrap_or_default().contains(remedy), "{error}");
        assert_eq!(error.code(), ErrorCode::BadRequest);
    }
    let there = setup.of_size(min + 512).await.expect("a disk");
    assert_eq!(there.first().expect("one").spec.size_bytes, min + 512);
    let missing = setup.of_file(Path::new("/nonexistent/disk")).await.expect_err("refused");
    assert_eq!(missing.code(), ErrorCode::NotFound);
    assert_eq!(missing.remedy(), Some("the path is one of the daemon's host"));
}

#[test]
fn what_the_host_lacks_is_not_taken_for_a_wrong_path() {
    let source = || io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
    let file = ImageError::Raw(RawError::File { path: "/x".into(), source: source() });
    for error in [DiskError::File(file), DiskError::Serve(source())] {
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("open files")), "{error}");
    }
}

#[tokio::test]
async fn a_base_that_has_changed_is_refused_and_leftovers_are_in_no_ones_way() {
    let setup = setup();
    let uid = rustix::process::getuid().as_raw();
    let contents = setup.of_size(DISK_BYTES_MIN).await.expect("a disk");
    let first = setup.disks.attach("web", uid, &contents).expect("served");
    assert!(setup.folder.path().join("sockets/8").exists());
    let file = File::options().write(true).open(setup.folder.path().join("base"));
    file.expect("there").set_len(DISK_BYTES_MIN + 4096).expect("longer");
    let refused = setup.disks.attach("web-1", uid, &contents).expect_err("refused");
    assert!(matches!(refused, DiskError::Changed { .. }), "{refused}");
    let frozen = first.expect("disks").freeze().expect("frozen");
    let refused = setup.disks.attach("web-2", uid, &frozen).expect_err("refused, too");
    assert!(matches!(refused, DiskError::Changed { .. }), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_has_a_volume_until_it_is_dropped() {
    let setup = setup();
    let (disks, uid) = (&setup.disks, rustix::process::getuid().as_raw());
    let root_of = |_: &str| -> Result<PathBuf, DiskError> { panic!("no image is named") };
    let source = vmfork_api::VolumeSource::Blank { size_bytes: DISK_BYTES_MIN };
    let (on_fork, labels) = (OnFork::Fork, vmfork_api::Labels::default());
    let request = VolumeRequest { name: "db".to_owned(), source, on_fork, labels };
    let made = disks.create_volume(request.clone(), 7, root_of).await.expect("room");
    assert_eq!((made.size_bytes, made.created_unix_ms), (DISK_BYTES_MIN, 7));
    let twice = disks.create_volume(request, 7, root_of).await.expect_err("taken");
    assert_eq!(twice.code(), ErrorCode::Conflict);
    let wanted = ["data=volume:db", "late=empty"].map(|disk| disk.parse().expect("a disk"));
    let contents = disks.contents(&wanted, root_of).await.expect("free");
    let machine = disks.attach("web", uid, &contents).expect("served").expect("disks");
    assert_eq!(disks.volume("db").expect("there").vms, ["web"]);
    let [(data, _), (late, _)] = machine.written().try_into().expect("two");
    assert_eq!((data.durability, late.durability), (Durability::Medium, Durability::Host));
    assert_eq!(machine.of_volume("db"), Some((0, "data".to_owned())));
    assert_eq!(machine.empty(None), Some((1, "late".to_owned())));
    let refused = disks.attach("other", uid, &contents).expect_err("one VM has it");
    assert_eq!(refused.to_string(), "VM `web` has the volume `db`");

    let [of_clone, late] = machine.freeze().expect("frozen").try_into().expect("two");
    assert_eq!((of_clone.spec.volume.as_ref(), of_clone.spec.empty), (None, false));
    assert_eq!(of_clone.spec.durability, Durability::Host);
    assert!(late.spec.empty, "a clone may attach to it");
    let clone = disks.attach("web.1", uid, &[of_clone, late]).expect("served");
    assert_eq!(disks.volume("db").expect("there").vms, ["web"]);
    disks.vm_ends("web");
    drop(machine);
    disks.given_back(&["web"]).await;
    assert_eq!(disks.volume("db").expect("there").vms, [""; 0]);
    disks.remove_volume("db").expect("free");
    assert!(clone.is_some_and(|clone| clone.freeze().is_ok()), "it has what it needs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_has_grown_says_so_and_clones_have_its_new_size() {
    let setup = setup();
    let (disks, uid) = (&setup.disks, rustix::process::getuid().as_raw());
    let contents = setup.of_size(DISK_BYTES_MIN).await.expect("a disk");
    let machine = disks.attach("web", uid, &contents).expect("served").expect("disks");
    let id = disks.list().expect("a list").pop().expect("one").id;
    let (index, _) = machine.with_id(id.parse().expect("an ID")).expect("it has it");
    let larger = machine.grow(index, 2 * DISK_BYTES_MIN).expect("grown");
    let offer = machine.offer(index, larger).expect("fds");
    assert_eq!(offer.size_bytes(), 2 * DISK_BYTES_MIN);
    // QEMU does not take it: the disk has its new size all the same.
    offer.withdrawn();
    let sizes = |machine: &MachineDisks| {
        let written = machine.written().into_iter();
        written.map(|(spec, _)| spec.size_bytes).collect::<Vec<_>>()
    };
    assert_eq!(sizes(&machine), [2 * DISK_BYTES_MIN]);
    assert_eq!(disks.find(&id).expect("there").size_bytes, 2 * DISK_BYTES_MIN);
    drop(machine.grow(index, 2 * DISK_BYTES_MIN).expect("the same again"));
    let refused = machine.grow(index, DISK_BYTES_MIN).map(drop).expect_err("smaller");
    assert!(refused.to_string().contains("2097152 bytes, which are more than 1048576"));
    assert_eq!(refused.code(), ErrorCode::Conflict);
    assert!(refused.remedy().is_some_and(|remedy| remedy.contains("a smaller disk")));
    let frozen = machine.freeze().expect("frozen");
    let clone = disks.attach("web.1", uid, &frozen).expect("served").expect("disks");
    assert_eq!(sizes(&clone), [2 * DISK_BYTES_MIN]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_grows_while_no_vm_has_it_and_with_the_one_that_has_it() {
    let setup = setup();
    let (disks, uid) = (&setup.disks, rustix::process::getuid().as_raw());
    let root_of = |_: &str| -> Result<PathBuf, DiskError> { panic!("no image is named") };
    let make = async |name: &str, on_fork| {
        let source = vmfork_api::VolumeSource::Blank { size_bytes: DISK_BYTES_MIN };
        let (name, labels) = (name.to_owned(), vmfork_api::Labels::default());
        let request = VolumeRequest { name, source, on_fork, labels };
        disks.create_volume(request, 7, root_of).await.expect("room").disk_id
    };
    let (db, set) = (make("db", OnFork::Fork).await, make("set", OnFork::ReadOnly).await);
    let size = |name: &str| disks.volume(name).expect("there").size_bytes / DISK_BYTES_MIN;
    let wanted = ["data=volume:db", "set=volume:set"].map(|disk| disk.parse().expect("a disk"));
    let contents = disks.contents(&wanted, root_of).await.expect("free");
    disks.grow_volume(&db, 2 * DISK_BYTES_MIN).expect("no VM has it");
    let machine = disks.attach("web", uid, &contents).expect("served").expect("disks");
    let shown = machine.written().first().map(|(spec, _)| spec.size_bytes);
    assert_eq!((shown, size("db")), (Some(2 * DISK_BYTES_MIN), 2), "as it is served");
    for id in [&db, &set] {
        let refused = disks.grow_volume(id, 3 * DISK_BYTES_MIN).expect_err("a VM has it");
        assert!(refused.to_string().starts_with("VM `web` has the volume"), "{refused}");
    }
    drop(machine.grow(0, 3 * DISK_BYTES_MIN).expect("its own VM's"));
    let refused = machine.grow(1, 3 * DISK_BYTES_MIN).map(drop).expect_err("others may have it");
    assert!(matches!(refused, DiskError::Shared), "{refused}");
    assert_eq!((size("db"), size("set")), (3, 1));
    let unknown = disks.grow_volume("1f", 1 << 30).expect_err("no volume");
    assert_eq!(unknown.code(), ErrorCode::NotFound);
}

#[tokio::test]
async fn disks_of_a_user_and_of_the_host_have_bounds() {
    const MIB: u64 = 1 << 20;
    let folder = tempfile::tempdir().expect("a folder");
    let (root, sockets) = (folder.path().join("disks"), folder.path().join("sockets"));
    fs::create_dir(&sockets).expect("made");
    let bounds = DiskBounds { default_bytes: Some(2 * MIB), ..DiskBounds::default() };
    let open = || {
        // A thread that opened a file may hold the one before for a moment longer.
        let tries = (0..500).map_while(|_| match HostDisks::open(&root, sockets.clone()) {
            Err(DiskError::Layer(StoreError::Locked { .. })) => {
                std::thread::park_timeout(std::time::Duration::from_millis(10));
                Some(None)
            }
            opened => Some(Some(opened.expect("room"))),
        });
        let disks = tries.flatten().next().expect("its lock is free within 5 s");
        disks.limited(Some(3 * MIB), bounds.clone()).expect("counted")
    };
    let path = folder.path().join("base");
    File::create(&path).expect("made").set_len(8 * MIB).expect("sized");
    let uid = rustix::process::getuid().as_raw();
    let begin = async |disks: &HostDisks, user: u32, vm: &str| {
        let disk = format!("data=file:{}", path.display()).parse().expect("a disk");
        let root_of = |_: &str| -> Result<PathBuf, DiskError> { panic!("no image is named") };
        let mut contents = disks.contents(&[disk], root_of).await.expect("a disk");
        disks.count_on(User::Uid(user), &mut contents);
        disks.attach(vm, uid, &contents).expect("served").expect("disks")
    };
    // → how many MiB fit.
    let fill = |machine: &MachineDisks| {
        let [disk] = machine.all().try_into().expect("one");
        let span = |at: u64| vmfork_nbd::Span { offset_bytes: at * MIB, len_bytes: 1 << 20 };
        (0..8).take_while(|at| disk.write(span(*at), &vec![7; 1 << 20]).is_ok()).count()
    };
    let disks = open();
    let (one, two) = (begin(&disks, 7, "one").await, begin(&disks, 7, "two").await);
    assert_eq!((fill(&one), fill(&two)), (2, 0), "both are the user's");
    let says = two.refusal("data").unwrap_or_default();
    assert_eq!(says, "2097152 of 2097152 bytes of the disk quota of user 7 are used");
    let other = begin(&disks, 8, "other").await;
    assert_eq!(fill(&other), 1);
    let says = other.refusal("data").unwrap_or_default();
    assert_eq!(says, "3145728 of 3145728 bytes of the host's disk quota are used");
    disks.keep_all();
    // Not of the runtime: there it would go on in the background.
    let end = std::thread::spawn(move || drop((one, two, other, disks)));
    end.join().expect("ended");
    // What an earlier daemon left counts on the host, until it is removed.
    let disks = open();
    let late = begin(&disks, 7, "late").await;
    assert_eq!(fill(&late), 0);
    let left = disks.list().expect("a list").into_iter().find(|disk| disk.vm == "one");
    disks.remove(&left.expect("left").id).expect("removed");
    assert_eq!(fill(&late), 2);
}

#[tokio::test]
async fn other_files_may_be_replaced_and_need_no_name() {
    let setup = setup();
    let uid = rustix::process::getuid().as_raw();
    let root = setup.folder.path().join("root.img");
    File::create(&root).expect("made").set_len(DISK_BYTES_MIN).expect("sized");
    let disks = ["a=blank:1M", "b=image:default"].map(|disk| disk.parse().expect("a disk"));
    let root_of = |_: &str| Ok::<_, DiskError>(root.clone());
    let contents = setup.disks.contents(&disks, root_of).await.expect("made");
    fs::remove_file(&root).expect("replaced, in part");
    assert!(setup.disks.attach("web", uid, &contents).expect("served").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_counts_on_the_host_and_its_clones_on_their_user() {
    const MIB: u64 = 1 << 20;
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = folder.path().join("sockets");
    fs::create_dir(&sockets).expect("made");
    let disks = HostDisks::open(&folder.path().join("disks"), sockets).expect("room");
    let bounds = DiskBounds { default_bytes: Some(2 * MIB), ..DiskBounds::default() };
    let disks = Arc::new(disks.limited(None, bounds).expect("counted"));
    let uid = rustix::process::getuid().as_raw();
    let root_of = |_: &str| -> Result<PathBuf, DiskError> { panic!("no image is named") };
    let source = vmfork_api::VolumeSource::Blank { size_bytes: 8 * MIB };
    let (on_fork, labels) = (OnFork::Fork, vmfork_api::Labels::default());
    let request = VolumeRequest { name: "db".to_owned(), source, on_fork, labels };
    disks.create_volume(request, 7, root_of).await.expect("room");
    let wanted = ["data=volume:db".parse().expect("a disk")];
    let mut contents = disks.contents(&wanted, root_of).await.expect("free");
    disks.count_on(User::Uid(7), &mut contents);
    let machine = disks.attach("web", uid, &contents).expect("served").expect("disks");
    let fill = |machine: &MachineDisks| {
        let [disk] = machine.all().try_into().expect("one");
        let span = |at: u64| vmfork_nbd::Span { offset_bytes: at * MIB, len_bytes: 1 << 20 };
        (0..8).take_while(|at| disk.write(span(*at), &vec![7; 1 << 20]).is_ok()).count()
    };
    assert_eq!(fill(&machine), 8, "the volume is no user's");
    let frozen = machine.freeze().expect("frozen");
    let clone = disks.attach("web.1", uid, &frozen).expect("served").expect("disks");
    assert_eq!(fill(&clone), 2);
    let says = clone.refusal("data").unwrap_or_default();
    assert_eq!(says, "2097152 of 2097152 bytes of the disk quota of user 7 are used");
    assert_eq!(machine.refusal("data"), None, "the volume has room");
}
