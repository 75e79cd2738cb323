use proptest::prelude::*;
use vmfork_image::PageRange;

use super::*;
use crate::lower::Lower;
use crate::nbd::Span;

const PAGES: u64 = 24;
const SIZE: u64 = PAGES * 4096;
const NO_FLOOR: StoreOptions = StoreOptions { floor_bytes: 0 };

fn open(folder: &Path) -> DiskStore {
    DiskStore::open(folder, NO_FLOOR).expect("a store")
}

fn spec(name: &str, size_bytes: u64) -> DiskSpec {
    let (name, vm) = (name.to_owned(), "vm 1".to_owned());
    DiskSpec { name, vm, size_bytes, set: DiskSet::new(None) }
}

fn span(page: u64, pages: u64) -> Span {
    Span { offset_bytes: page * 4096, len_bytes: u32::try_from(pages * 4096).expect("small") }
}

fn none(_: ImageId) -> Option<DiskImage> {
    None
}

fn content(image: &DiskImage) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(image.size_bytes()).expect("small")];
    image.read(PageRange::first(image.size_bytes() / 4096), &mut bytes).expect("read");
    bytes
}

/// What is on a disk now.
fn now(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(disk.size_bytes()).expect("small")];
    disk.read(span(0, disk.size_bytes() / 4096), &mut bytes).expect("read");
    bytes
}

/// A base whose pages have their numbers, except each fourth, which is a hole.
fn raw(folder: &Path) -> (PathBuf, Vec<u8>) {
    use std::os::unix::fs::FileExt;
    let path = folder.join("raw");
    let file = File::create_new(&path).expect("a file");
    file.set_len(SIZE).expect("sized");
    let mut model = vec![0; usize::try_from(SIZE).expect("small")];
    for page in (0..PAGES).filter(|page| page % 4 != 0) {
        let bytes = [u8::try_from(page).expect("small"); 4096];
        file.write_all_at(&bytes, page * 4096).expect("written");
        let at = usize::try_from(page * 4096).expect("small");
        model[at..at + 4096].copy_from_slice(&bytes);
    }
    (path, model)
}

#[derive(Debug, Clone)]
enum Step {
    Write(usize, Span, u8),
    Zero(usize, Span),
    Trim(usize, Span),
    /// Freeze a disk, and make another on the image.
    Clone(usize),
    /// One of the images becomes flat.
    Flatten(usize),
    /// A disk is dropped.
    Drop(usize),
    /// All that is done in the background is done.
    Drain,
    /// The daemon is killed, and the next one goes on with all disks.
    Restart,
}

fn spans() -> impl Strategy<Value = Span> {
    (0..SIZE / 512, 1_u64..40).prop_map(|(at, len)| {
        let len = len.min(SIZE / 512 - at);
        Span { offset_bytes: at * 512, len_bytes: u32::try_from(len * 512).expect("small") }
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0_usize..8, spans(), 1_u8..255).prop_map(|(disk, span, byte)| Step::Write(disk, span, byte)),
        2 => (0_usize..8, spans()).prop_map(|(disk, span)| Step::Zero(disk, span)),
        2 => (0_usize..8, spans()).prop_map(|(disk, span)| Step::Trim(disk, span)),
        4 => (0_usize..8).prop_map(Step::Clone),
        1 => (0_usize..8).prop_map(Step::Flatten),
        1 => (0_usize..8).prop_map(Step::Drop),
        1 => Just(Step::Drain),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 0..25)
}

fn place(span: Span) -> std::ops::Range<usize> {
    let small = |bytes| usize::try_from(bytes).expect("small");
    small(span.offset_bytes)..small(span.end())
}

/// Disks and images, each with what it is to have.
struct World {
    store: DiskStore,
    disks: Vec<(Disk, Vec<u8>)>,
    images: Vec<(DiskImage, Vec<u8>)>,
    made: u32,
}

impl World {
    fn step(&mut self, folder: &Path, step: Step) {
        let count = self.disks.len();
        match step {
            Step::Write(disk, span, byte) => {
                let (disk, model) = &mut self.disks[disk % count];
                model[place(span)].fill(byte);
                disk.write(span, &model[place(span)]).expect("written");
            }
            Step::Zero(disk, span) => {
                let (disk, model) = &mut self.disks[disk % count];
                disk.zero(span).expect("zeroed");
                model[place(span)].fill(0);
            }
            Step::Trim(disk, span) => {
                let (disk, model) = &mut self.disks[disk % count];
                disk.trim(span).expect("trimmed");
                let whole = place(span).start.next_multiple_of(4096)..place(span).end / 4096 * 4096;
                if whole.start < whole.end {
                    model[whole].fill(0);
                }
            }
            Step::Clone(disk) => {
                let (disk, model) = &self.disks[disk % count];
                let (image, model) = (disk.freeze().expect("frozen"), model.clone());
                self.made += 1;
                let mut spec = spec("data", SIZE);
                spec.vm = format!("vm {}", self.made);
                let clone = self.store.create(&spec, &image).expect("a clone");
                self.disks.push((clone, model.clone()));
                self.images.push((image, model));
            }
            Step::Flatten(image) => {
                if let Some((image, _)) = self.images.get(image) {
                    image.flatten();
                }
            }
            Step::Drop(disk) if count > 1 => drop(self.disks.swap_remove(disk % count)),
            Step::Drop(_) => {}
            Step::Drain => self.store.drain(),
            Step::Restart => self.restart(folder),
        }
    }

    /// A killed daemon removes nothing, and does nothing of what it had put off.
    fn restart(&mut self, folder: &Path) {
        self.store.keep_all();
        let old: Vec<_> = self.disks.drain(..).map(|(disk, model)| (disk.layer(), model)).collect();
        self.images.clear();
        // Its lock goes with it.
        self.store = replaced(&self.store, folder);
        let set = DiskSet::new(None);
        let listing = self.store.list().expect("a list");
        let found: BTreeSet<_> =
            listing.disks().into_iter().map(|disk| disk.note.vm.clone()).collect();
        assert_eq!(found.len(), listing.disks().len(), "each disk is found once");
        for (layer, model) in old {
            let vm = &listing.layers[&layer].note.vm;
            assert!(found.contains(vm), "{vm} is not in {found:?}");
            let disk = self.store.reopen(layer, &set, &none).expect("the disk");
            assert_eq!(now(&disk), model, "after a restart");
            self.disks.push((disk, model));
        }
        self.store.remove_unused().expect("removed");
    }
}

/// A store over a copy of the folder as it is now, with what is still to do left undone.
fn replaced(old: &DiskStore, folder: &Path) -> DiskStore {
    let next = tempfile::tempdir_in(folder).expect("a folder").keep();
    copy(&old.shared.layers, &next.join("layers"));
    open(&next)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    // A layer may be removed meanwhile.
    let Ok(entries) = std::fs::read_dir(from) else { return };
    for entry in entries.flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            // A note that is being replaced may have gone meanwhile.
            let _gone = std::fs::copy(entry.path(), target);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Against byte arrays: disks, clones of clones, tables in any order, restarts.
    #[test]
    fn every_disk_and_image_has_what_was_written_there(steps in steps()) {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, model) = raw(folder.path());
        let store = open(&folder.path().join("first"));
        let base = DiskImage::raw(&path).expect("a base");
        let disk = store.create(&spec("data", SIZE), &base).expect("a disk");
        let mut world = World { store, disks: vec![(disk, model)], images: Vec::new(), made: 1 };
        for step in steps {
            world.step(folder.path(), step);
        }
        for (disk, model) in &world.disks {
            prop_assert_eq!(&now(disk), model);
        }
        for (image, model) in &world.images {
            prop_assert_eq!(&content(image), model);
        }
        world.store.drain();
        for (image, model) in &world.images {
            prop_assert!(image.table().is_some(), "the background made it flat");
            prop_assert_eq!(&content(image), model);
        }
        let World { store, disks, images, .. } = world;
        drop((disks, images));
        store.drain();
        let listing = store.list().expect("a list");
        prop_assert!(listing.layers.is_empty() && listing.bad.is_empty(), "{:?}", listing);
    }
}

#[test]
fn what_a_killed_daemon_left_is_found_exported_and_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec("data", SIZE), &blank).expect("a disk");
    store.drain();
    disk.write(span(1, 2), &[1; 8192]).expect("written");
    let image = disk.freeze().expect("frozen");
    disk.write(span(2, 1), &[2; 4096]).expect("written");
    let (first, second) = (image.id(), disk.layer());
    store.drain();
    assert!(matches!(DiskStore::open(folder.path(), NO_FLOOR), Err(StoreError::Locked { .. })));
    assert!(matches!(store.image(second, &none), Err(StoreError::Busy(_))));
    store.keep_all();
    drop((image, disk, blank, store));

    let store = open(folder.path());
    let listing = store.list().expect("a list");
    let heads: Vec<_> = listing.disks().iter().map(|layer| layer.id).collect();
    let [head] = heads[..] else { panic!("{heads:?}") };
    assert_eq!(head, second, "not the layer made in advance, which is empty");
    let note = &listing.layers[&second].note;
    assert_eq!((note.disk.as_str(), note.vm.as_str(), note.on), ("data", "vm 1", Some(first)));
    assert!(listing.layers[&first].note.frozen && !note.frozen && !note.spare);
    let left = store.image(head, &none).expect("what it had");
    let bytes = content(&left);
    assert_eq!([bytes[0], bytes[4096], bytes[8192], bytes[12288]], [0, 1, 2, 0]);
    assert!(matches!(store.remove(head), Err(StoreError::Busy(_))));
    drop(left);
    store.drain();
    assert_eq!(store.list().expect("a list").layers.len(), 3, "the caller decides");
    let refused = store.reopen(first, &DiskSet::new(None), &none).expect_err("it is frozen");
    assert!(matches!(refused, StoreError::Under { by, .. } if by == second));
    assert!(matches!(store.remove(first), Err(StoreError::Under { .. })));
    let spare = listing.layers.values().find(|layer| layer.note.spare).expect("made in advance");
    store.remove(spare.id).expect("removed");
    store.remove(head).expect("removed");
    assert!(matches!(store.remove(head), Err(StoreError::Missing(_))));
    assert_eq!(store.remove_unused().expect("removed"), [first]);
    assert!(store.list().expect("a list").layers.is_empty());
}

#[test]
fn a_disk_on_whose_newest_layer_clones_lie_goes_on_beside_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec("data", SIZE), &blank).expect("a disk");
    disk.write(span(1, 1), &[1; 4096]).expect("written");
    let id = disk.layer();
    let image = disk.freeze().expect("frozen");
    let clone = store.create(&spec("clone", SIZE), &image).expect("a clone");
    clone.write(span(1, 1), &[2; 4096]).expect("written");
    let of_clone = clone.layer();
    store.keep_all();
    drop((disk, image, clone, store));
    let store = open(folder.path());
    let listing = store.list().expect("a list");
    // As if it had been killed before it wrote down that the next layer is in use.
    let next = listing.layers.values().filter(|layer| layer.note.disk_id == id && layer.id != id);
    let mut next: Vec<_> = next.map(|layer| (layer.note.number, layer.id)).collect();
    next.sort_unstable();
    for (_, layer) in next.into_iter().rev() {
        store.remove(layer).expect("removed");
    }
    let listing = store.list().expect("a list");
    let newest = listing.disks().into_iter().find(|layer| layer.note.disk_id == id);
    let newest = newest.expect("the disk").id;
    assert_eq!(newest, id, "that on which the clone lies");
    let table = folder.path().join("layers").join(newest.to_string()).join("table");
    let _not_written_either = std::fs::remove_file(table);
    let disk = store.reopen(newest, &DiskSet::new(None), &none).expect("the disk");
    disk.write(span(2, 1), &[3; 4096]).expect("written");
    let clone = store.reopen(of_clone, &DiskSet::new(None), &none).expect("the clone");
    assert_eq!([now(&disk)[4096], now(&disk)[8192]], [1, 3]);
    assert_eq!([now(&clone)[4096], now(&clone)[8192]], [2, 0]);
    assert_eq!((disk.data_bytes(), clone.data_bytes()), (2 * 4096, 4096));
    store.drain();
    let listing = store.list().expect("a list");
    let own = listing.layers.get(&disk.layer()).expect("its layer");
    assert_eq!(own.note.disk_id, id, "the same disk");
}

#[test]
fn a_disk_that_was_exported_goes_on_and_its_table_is_not_out_of_date() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec("data", SIZE), &blank).expect("a disk");
    disk.write(span(1, 1), &[1; 4096]).expect("written");
    let mut own = disk.layer();
    store.keep_all();
    drop((disk, store));
    for round in 2..5 {
        let store = open(folder.path());
        drop(store.image(own, &none).expect("an export"));
        store.drain();
        let disk = store.reopen(own, &DiskSet::new(None), &none).expect("the disk");
        assert_ne!(disk.layer(), own);
        assert_eq!(now(&disk)[4096], round - 1);
        disk.write(span(1, 1), &[round; 4096]).expect("written");
        own = disk.layer();
        store.keep_all();
    }
    let store = open(folder.path());
    let image = store.image(own, &none).expect("an export");
    assert_eq!(content(&image)[4096], 4);
}

#[test]
fn half_made_layers_are_removed_and_damaged_ones_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disks = [(); 4].map(|()| store.create(&spec("data", SIZE), &blank).expect("a disk"));
    let ids = disks.each_ref().map(Disk::layer);
    store.keep_all();
    drop((disks, store));
    let path =
        |at: usize, name: &str| folder.path().join("layers").join(ids[at].to_string()).join(name);
    std::fs::remove_file(path(0, "note")).expect("removed");
    std::fs::write(path(1, "map"), [0; 10]).expect("torn");
    std::fs::write(path(2, "note"), b"{\"version\":1").expect("torn");
    std::fs::create_dir(folder.path().join("layers/other")).expect("a folder");
    let store = open(folder.path());
    let listing = store.list().expect("a list");
    let whole: Vec<_> = ids.iter().filter(|id| listing.layers.contains_key(id)).collect();
    assert_eq!(whole, [&ids[3]]);
    let mut bad: Vec<_> = listing.bad.iter().map(|bad| bad.folder.clone()).collect();
    bad.sort();
    let mut wanted = [path(1, ""), path(2, ""), folder.path().join("layers/other")];
    wanted.sort();
    assert_eq!(
        bad.iter().map(|path| path.join("")).collect::<Vec<_>>(),
        wanted.iter().map(|path| path.join("")).collect::<Vec<_>>()
    );
    assert!(matches!(store.image(ids[0], &none), Err(StoreError::Missing(_))));
    assert!(matches!(store.image(ids[1], &none), Err(StoreError::Layer(_))));
    assert!(matches!(store.image(ids[2], &none), Err(StoreError::Damaged { .. })));
    // A note that says that a layer lies on itself.
    let note = std::fs::read_to_string(path(3, "note")).expect("a note");
    let note = note.replace("\"on\": null", &format!("\"on\": \"{}\"", ids[3]));
    std::fs::write(path(3, "note"), note).expect("written");
    assert!(matches!(store.image(ids[3], &none), Err(StoreError::Damaged { .. })));
}

#[test]
fn a_base_that_changed_is_refused_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, model) = raw(folder.path());
    let store = open(&folder.path().join("store"));
    let base = DiskImage::raw(&path).expect("a base");
    let disk = store.create(&spec("data", SIZE), &base).expect("a disk");
    let id = disk.layer();
    store.keep_all();
    drop((disk, base, store));
    let store = open(&folder.path().join("store"));
    let disk = store.reopen(id, &DiskSet::new(None), &none).expect("the disk");
    assert_eq!(now(&disk), model);
    assert!(disk.image().is_unchanged());
    store.keep_all();
    drop((disk, store));
    let file = File::options().write(true).open(&path).expect("a file");
    file.set_len(SIZE + 512).expect("changed");
    let store = open(&folder.path().join("store"));
    let refused = store.reopen(id, &DiskSet::new(None), &none).expect_err("changed");
    assert!(matches!(refused, StoreError::Image(ImageError::Raw(RawError::Changed { .. }))));
}

#[test]
fn a_quota_is_for_all_layers_of_a_set_and_written_pages_need_nothing_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let set = DiskSet::new(Some(4 * 4096));
    let mut spec = spec("data", SIZE);
    spec.set = Arc::clone(&set);
    let disk = store.create(&spec, &blank).expect("a disk");
    disk.write(span(0, 3), &[1; 3 * 4096]).expect("written");
    let image = disk.freeze().expect("frozen");
    disk.write(span(0, 1), &[2; 4096]).expect("written");
    let full = disk.write(span(4, 1), &[2; 4096]).expect_err("full");
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    disk.write(span(0, 1), &[3; 4096]).expect("it is there already");
    disk.trim(span(0, 1)).expect("trimmed");
    disk.write(Span { offset_bytes: 20480, len_bytes: 512 }, &[4; 512]).expect("written");
    assert_eq!(set.used_bytes(), 4 * 4096);
    drop((image, disk));
    store.drain();
    assert_eq!(set.used_bytes(), 0);
}

#[test]
fn the_next_layer_does_not_wait_for_tables() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec("data", SIZE), &blank).expect("a disk");
    store.shared.spares.drain();
    // A table that takes long.
    let (done, wait) = std::sync::mpsc::channel::<()>();
    store.shared.work.put(Box::new(move || {
        let _done = wait.recv();
    }));
    for _ in 0..3 {
        disk.freeze().expect("frozen");
        store.shared.spares.drain();
    }
    assert_eq!((disk.counts().freezes, disk.counts().late_layers), (3, 0));
    assert_eq!(store.counts().tables_stored, 0);
    drop(done);
    store.drain();
    assert!(store.counts().tables_stored > 0);
}

#[test]
fn a_table_waits_for_the_medium_only_above_a_layer_that_is_durable() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec("data", SIZE), &blank).expect("a disk");
    let durable = |image: &DiskImage| image.own().is_some_and(|layer| layer.is_durable());
    let frozen = |byte: u8| {
        disk.write(span(1, 1), &[byte; 4096]).expect("written");
        let image = disk.freeze().expect("frozen");
        store.drain();
        image
    };
    let first = frozen(1);
    assert!(!durable(&first) && !durable(&frozen(2)));
    disk.sync().expect("synced");
    // What was the disk's own then is frozen now, and the next one replaces all of it.
    assert!(durable(&frozen(3)));
    assert!(durable(&frozen(4)), "before the layers below are removed");
}
