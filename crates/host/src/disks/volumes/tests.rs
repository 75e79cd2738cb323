use std::path::Path;

use vmfork_api::{Labels, VolumeSource};
use vmfork_disk::StoreOptions;
use vmfork_nbd::Span;

use super::*;

const SIZE: u64 = 1 << 20;

fn page(number: u64) -> Span {
    Span { offset_bytes: number * 4096, len_bytes: 4096 }
}

fn read(disk: &Disk, number: u64) -> u8 {
    let mut bytes = [0xaa; 4096];
    disk.read(page(number), &mut bytes).expect("read");
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "one write");
    bytes[0]
}

fn write(disk: &Disk, number: u64, byte: u8) {
    disk.write(page(number), &[byte; 4096]).expect("written");
}

fn request(name: &str, on_fork: OnFork) -> VolumeRequest {
    let source = VolumeSource::Blank { size_bytes: SIZE };
    VolumeRequest { name: name.to_owned(), source, on_fork, labels: Labels::default() }
}

fn of(name: &str, on_fork: OnFork) -> OfVolume {
    OfVolume { name: name.to_owned(), on_fork }
}

/// One life of a daemon.
struct Life {
    store: DiskStore,
    volumes: Volumes,
    is_whole: bool,
}

impl Life {
    fn begin(folder: &Path) -> Self {
        let store = DiskStore::open(folder, StoreOptions { floor_bytes: 0 }).expect("the folder");
        let (volumes, is_whole) =
            Volumes::open(folder.join("volumes"), &store, &|| DiskSet::new(None)).expect("room");
        if is_whole {
            store.remove_unneeded().expect("removed");
        }
        Self { store, volumes, is_whole }
    }

    /// As when it is killed: no layer is removed.
    fn killed(self) {
        self.store.keep_all();
    }

    fn create(&self, name: &str, on_fork: OnFork, content: &DiskImage) -> Shown {
        let go_on = AtomicBool::new(false);
        let request = request(name, on_fork);
        let content = (content, DiskSet::new(None));
        let filled = self.volumes.fill(&self.store, &request, 7, content, &go_on).expect("room");
        filled.publish().expect("room")
    }

    fn layers(&self) -> usize {
        self.store.drain();
        self.store.list().expect("a list").layers.len()
    }
}

fn zeros() -> DiskImage {
    DiskImage::blank(SIZE).expect("zeros")
}

#[test]
fn a_volume_has_a_copy_of_its_source_and_outlives_daemons() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("source");
    let mut bytes = vec![0; usize::try_from(SIZE).expect("small") + 512];
    bytes[4096..8192].fill(1);
    bytes[usize::try_from(SIZE).expect("small")..].fill(9);
    std::fs::write(&source, &bytes).expect("written");
    let root = folder.path().join("disks");
    std::fs::create_dir(&root).expect("made");
    let life = Life::begin(&root);
    let made = life.create("db", OnFork::Fork, &DiskImage::raw(&source).expect("open"));
    assert_eq!((made.size_bytes, made.data_bytes), (SIZE + 512, 2 * 4096));
    std::fs::remove_file(&source).expect("needed by nothing");
    life.killed();
    for round in 2..6 {
        let life = Life::begin(&root);
        assert!(life.is_whole && life.volumes.list().len() == 1, "round {round}");
        let lease = life.volumes.take("web", &of("db", OnFork::Fork)).expect("free");
        let mut last = [0; 512];
        let span = Span { offset_bytes: SIZE, len_bytes: 512 };
        lease.disk().read(span, &mut last).expect("read");
        assert_eq!((read(lease.disk(), 1), last), (round - 1, [9; 512]));
        write(lease.disk(), 1, round);
        drop(lease);
        life.killed();
    }
}

#[test]
fn a_volume_whose_clones_were_killed_with_the_daemon_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    life.create("db", OnFork::Fork, &zeros());
    let lease = life.volumes.take("web", &of("db", OnFork::Fork)).expect("free");
    write(lease.disk(), 1, 1);
    let image = lease.disk().freeze().expect("frozen");
    let spec = DiskSpec {
        name: "data".to_owned(),
        vm: "web.1".to_owned(),
        size_bytes: SIZE,
        set: DiskSet::new(None),
    };
    let clone = life.store.create(&spec, &image).expect("a clone's disk");
    write(&clone, 1, 7);
    write(&clone, 2, 7);
    // Nothing is written to the volume after the fork: its newest layer that is in use is frozen.
    life.store.keep_all();
    drop((lease, clone, image));
    life.killed();
    for _ in 0..2 {
        let life = Life::begin(folder.path());
        assert!(life.is_whole);
        let lease = life.volumes.take("db", &of("db", OnFork::Fork)).expect("free");
        assert_eq!((read(lease.disk(), 1), read(lease.disk(), 2)), (1, 0), "not the clone's");
        drop(lease);
        assert!(life.layers() <= 4, "the clone's layers are gone");
        life.killed();
    }
}

#[test]
fn a_removed_volume_gives_its_space_back_and_one_in_use_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    life.create("db", OnFork::Fork, &zeros());
    let lease = life.volumes.take("web", &of("db", OnFork::Fork)).expect("free");
    let refused = life.volumes.remove("db").expect_err("in use");
    assert_eq!(refused.to_string(), "VM `web` has the volume `db`");
    let refused = life.volumes.set_on_fork("db", OnFork::Refuse).expect_err("in use");
    assert!(matches!(refused, VolumeError::InUse { .. }), "{refused}");
    let refused = life.volumes.take("other", &of("db", OnFork::Fork)).expect_err("in use");
    assert!(refused.remedy().contains("end that VM first"));
    assert_eq!(life.volumes.show("db").expect("there").vms, ["web"]);
    drop(lease);
    assert!(life.layers() > 0);
    life.volumes.remove("db").expect("removed");
    assert_eq!(life.layers(), 0);
    assert!(matches!(life.volumes.remove("db"), Err(VolumeError::Missing { .. })));
    assert_eq!(life.volumes.count(), 0);
    life.create("db", OnFork::Fork, &zeros());
    assert_eq!(life.volumes.list().len(), 1, "the name is free");
}

#[test]
fn no_name_is_taken_twice_and_what_is_given_up_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    life.create("db", OnFork::Fork, &zeros());
    let create = |name: &str, given_up: bool| {
        let given_up = AtomicBool::new(given_up);
        let request = request(name, OnFork::Fork);
        let content = (&zeros(), DiskSet::new(None));
        let filled = life.volumes.fill(&life.store, &request, 7, content, &given_up);
        filled.and_then(Filled::publish)
    };
    assert!(matches!(create("db", false), Err(VolumeError::NameTaken { .. })));
    let layers = life.layers();
    assert!(matches!(create("late", true), Err(VolumeError::Fill { .. })));
    assert_eq!(life.layers(), layers);
    assert_eq!(life.volumes.list().len(), 1);
    create("late", false).expect("its name is free");
}

#[test]
fn a_read_only_volume_is_had_by_many_and_keeps_its_kind_meanwhile() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    life.create("set", OnFork::Fork, &zeros());
    let shown = life.volumes.set_on_fork("set", OnFork::ReadOnly).expect("free");
    assert_eq!(shown.on_fork, OnFork::ReadOnly);
    let changed = life.volumes.take("web", &of("set", OnFork::Fork)).expect_err("it has changed");
    assert!(matches!(changed, VolumeError::Changed { .. }), "{changed}");
    let shared = of("set", OnFork::ReadOnly);
    let leases = ["web", "web.1"].map(|vm| life.volumes.take(vm, &shared).expect("shared"));
    assert_eq!(life.volumes.show("set").expect("there").vms, ["web", "web.1"]);
    assert!(life.volumes.set_on_fork("set", OnFork::Fork).is_err());
    life.volumes.set_on_fork("set", OnFork::ReadOnly).expect("as it is");
    drop(leases);
    life.killed();
    let life = Life::begin(folder.path());
    assert_eq!(life.volumes.show("set").expect("there").on_fork, OnFork::ReadOnly);
}

#[test]
fn what_is_damaged_is_shown_and_nothing_of_it_is_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    let id = life.create("db", OnFork::Fork, &zeros()).disk_id;
    life.create("other", OnFork::Fork, &zeros());
    life.killed();
    let note = folder.path().join("layers").join(&id).join("note");
    let text = std::fs::read_to_string(&note).expect("a note");
    std::fs::write(&note, "{").expect("damaged");
    let life = Life::begin(folder.path());
    assert!(!life.is_whole);
    let reason = life.volumes.show("db").expect("listed").reason.expect("a reason");
    assert!(!reason.is_empty());
    let refused = life.volumes.take("web", &of("db", OnFork::Fork)).expect_err("broken");
    assert!(matches!(refused, VolumeError::Broken { .. }), "{refused}");
    assert!(life.volumes.take("web", &of("other", OnFork::Fork)).is_ok());
    life.killed();
    std::fs::write(&note, text).expect("repaired");
    let life = Life::begin(folder.path());
    assert!(life.is_whole && life.volumes.take("web", &of("db", OnFork::Fork)).is_ok());
}

#[tokio::test]
async fn a_vm_waits_for_one_that_ends_and_not_for_one_that_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    life.create("db", OnFork::Fork, &zeros());
    let volumes = &life.volumes;
    let lease = volumes.take("web", &of("db", OnFork::Fork)).expect("free");
    assert!(matches!(volumes.ready("db").await, Err(VolumeError::InUse { .. })));
    volumes.given_back(|_| true).await;
    volumes.vm_ends("web");
    // Of others, nothing is awaited.
    volumes.given_back(|vm| vm == "db").await;
    assert_eq!(volumes.show("db").expect("there").vms, ["web"]);
    let give_back = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(volumes.show("db").expect("there").vms, ["web"], "not yet");
        drop(lease);
    };
    let (ready, (), ()) =
        tokio::join!(volumes.ready("db"), volumes.given_back(|_| true), give_back);
    assert_eq!(ready.expect("free"), of("db", OnFork::Fork));
}

#[test]
fn a_volume_that_is_not_published_is_not_there_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    let (request, go_on) = (request("db", OnFork::Fork), AtomicBool::new(false));
    let content = (&zeros(), DiskSet::new(None));
    let filled = life.volumes.fill(&life.store, &request, 7, content, &go_on).expect("room");
    assert_eq!(life.volumes.list(), []);
    assert!(!folder.path().join("volumes/db.json").exists());
    let taken = life.volumes.check_new("db").expect_err("its name is taken");
    assert!(matches!(taken, VolumeError::NameTaken { .. }), "{taken}");
    drop(filled);
    assert_eq!(life.layers(), 0);
    life.create("db", OnFork::Fork, &zeros());
}

#[test]
fn a_vm_ends_while_a_record_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    life.create("db", OnFork::Fork, &zeros());
    let volume = life.volumes.find("db").expect("there");
    let turn = volume.turn();
    let closed = volume.close(&turn).expect("free");
    // The medium takes long, and the thread that says this must not wait.
    life.volumes.vm_ends("web");
    let refused = life.volumes.take("web", &of("db", OnFork::Fork)).expect_err("not now");
    assert!(matches!(refused, VolumeError::Changes { .. }), "{refused}");
    drop(closed);
    drop(turn);
    let lease = life.volumes.take("web", &of("db", OnFork::Fork)).expect("free");
    let refused = volume.close(&volume.turn()).map(drop).expect_err("a VM has it");
    assert!(matches!(refused, VolumeError::InUse { .. }), "{refused}");
    drop(lease);
}

#[test]
fn the_next_daemon_finds_a_volume_with_the_size_that_it_has_grown_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let life = Life::begin(folder.path());
    let made = life.create("db", OnFork::Fork, &zeros());
    let id = made.disk_id.parse().expect("an ID");
    let grown = life.volumes.grow(id, |disk| -> Result<(), VolumeError> {
        write(disk, 3, 7);
        disk.freeze().map(drop).expect("frozen");
        disk.grow(2 * SIZE).expect("grown");
        Ok(())
    });
    assert!(grown.is_some_and(|grown| grown.is_ok()));
    life.killed();
    let life = Life::begin(folder.path());
    let found = life.volumes.show("db").expect("there");
    assert_eq!((found.size_bytes, found.reason), (2 * SIZE, None));
    let disk = life.volumes.disk("db").expect("whole");
    assert_eq!((read(&disk, 3), read(&disk, SIZE / 4096 + 5)), (7, 0));
}
