use proptest::prelude::*;
use vmfork_image::PageRange;

use super::*;
use crate::lower::Lower;
use crate::merging::LAYERS_MAX;
use crate::raw::RawError;
use vmfork_nbd::Span;

const PAGES: u64 = 24;
const SIZE: u64 = PAGES * 4096;
const NO_FLOOR: StoreOptions = StoreOptions { floor_bytes: 0 };

/// Layers are merged all the time.
const FEW: MergeLimits = MergeLimits { own: 1, in_all: 2, waste_pages: 0 };

fn open(folder: &Path) -> DiskStore {
    DiskStore::open(folder, NO_FLOOR).expect("a store")
}

fn open_few(folder: &Path) -> DiskStore {
    DiskStore::open_with(folder, NO_FLOOR, FEW).expect("a store")
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
    /// Of all disks.
    set: Arc<DiskSet>,
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
                spec.set = Arc::clone(&self.set);
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
            Step::Drain => self.check_account(),
            Step::Restart => {
                self.restart(folder);
                self.check_account();
            }
        }
    }

    /// The set's account has what is in the files of all layers that are open. Those that an
    /// earlier daemon left stay when they are not.
    fn check_account(&self) {
        self.store.drain();
        let listing = self.store.list().expect("a list");
        let open = |layer: &&FoundLayer| self.store.shared.live_layer(layer.id).is_some();
        let layers = listing.layers.values().filter(open);
        assert_eq!(self.set.used_bytes(), layers.map(|layer| layer.written_bytes).sum::<u64>());
    }

    /// A killed daemon removes nothing, and does nothing of what it had put off.
    fn restart(&mut self, folder: &Path) {
        self.store.keep_all();
        let old: Vec<_> = self.disks.drain(..).map(|(disk, model)| (disk.layer(), model)).collect();
        self.images.clear();
        // Its lock goes with it.
        self.store = replaced(&self.store, folder);
        self.set = DiskSet::new(None);
        let listing = self.store.list().expect("a list");
        let found: BTreeSet<_> =
            listing.disks().into_iter().map(|disk| disk.note.vm.clone()).collect();
        assert_eq!(found.len(), listing.disks().len(), "each disk is found once");
        for (layer, model) in old {
            let vm = &listing.layers[&layer].note.vm;
            assert!(found.contains(vm), "{vm} is not in {found:?}");
            let disk = self.store.reopen(layer, &self.set, &none).expect("the disk");
            assert_eq!(now(&disk), model, "after a restart");
            self.disks.push((disk, model));
        }
        self.store.remove_unneeded().expect("removed");
    }
}

/// A store over a copy of the folder as it is now, with what is still to do left undone. Nothing
/// changes while it is copied: a copy of two moments is no state that a killed daemon leaves.
fn replaced(old: &DiskStore, folder: &Path) -> DiskStore {
    // Each puts jobs into those after it.
    old.shared.spares.abandon();
    old.shared.work.abandon();
    old.shared.rubbish.abandon();
    let next = tempfile::tempdir_in(folder).expect("a folder").keep();
    copy(&old.shared.layers, &next.join("layers"));
    open_few(&next)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).into_iter().flatten().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            // It may have gone: then it is copied again.
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
        let store = open_few(&folder.path().join("first"));
        let base = DiskImage::raw(&path).expect("a base");
        let spec = spec("data", SIZE);
        let disk = store.create(&spec, &base).expect("a disk");
        let (set, disks) = (spec.set, vec![(disk, model)]);
        let mut world = World { store, set, disks, images: Vec::new(), made: 1 };
        for step in steps {
            world.step(folder.path(), step);
        }
        for (disk, model) in &world.disks {
            prop_assert_eq!(&now(disk), model);
        }
        for (image, model) in &world.images {
            prop_assert_eq!(&content(image), model);
        }
        world.check_account();
        for (image, model) in &world.images {
            prop_assert!(image.table().is_some(), "the background made it flat");
            prop_assert_eq!(&content(image), model);
        }
        let World { store, set, disks, images, .. } = world;
        drop((disks, images));
        store.drain();
        // What a daemon opened again stays.
        for disk in store.disks().expect("a list") {
            prop_assert!(!disk.in_use);
            store.remove_disk(disk.id).expect("removed");
        }
        store.remove_unneeded().expect("removed");
        prop_assert_eq!(set.used_bytes(), 0);
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
    let [found] = &store.disks().expect("a list")[..] else { panic!("one disk") };
    assert_eq!((found.newest, found.written_bytes, found.in_use), (head, 3 * 4096, false));
    assert!(matches!(store.remove_disk(found.id), Err(StoreError::Busy(_))), "it is read");
    drop(left);
    store.drain();
    assert_eq!(store.list().expect("a list").layers.len(), 3, "the caller decides");
    let refused = store.reopen(first, &DiskSet::new(None), &none).expect_err("it is frozen");
    assert!(matches!(refused, StoreError::Under { by, .. } if by == second));
    assert_eq!(store.remove_unneeded().expect("removed"), 1, "what was made in advance");
    store.remove_disk(found.id).expect("removed");
    assert!(matches!(store.remove_disk(found.id), Err(StoreError::NoDisk(_))));
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
        std::fs::remove_dir_all(store.shared.folder(layer)).expect("removed");
    }
    let listing = store.list().expect("a list");
    let newest = listing.newest_of(id).expect("the disk").id;
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
fn a_full_quota_stops_writes_until_it_is_raised_or_space_is_given_back_and_no_freeze() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open_few(folder.path());
    let mut spec = spec("data", SIZE);
    spec.set = DiskSet::new(Some(2 * 4096));
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec, &blank).expect("a disk");
    let write = |page| disk.write(span(page, 1), &[7; 4096]);
    let full = |page| write(page).expect_err("full").kind() == io::ErrorKind::StorageFull;
    (0..2).for_each(|page| write(page).expect("it fits"));
    assert!(full(2));
    spec.set.set_quota_bytes(Some(3 * 4096));
    write(2).expect("it was raised");
    assert!(full(3));
    disk.trim(span(0, 1)).expect("trimmed");
    write(3).expect("a trim gave it back");
    assert!(full(4));
    // Freezes, clones and merges need nothing of it, with a layer made in advance or without.
    let mut images = Vec::new();
    for page in 4..10 {
        images.push(disk.freeze().expect("frozen"));
        // A merge that is not done yet would change what is used.
        store.drain();
        spec.set.set_quota_bytes(Some(spec.set.used_bytes()));
        assert!(full(page));
        spec.set.set_quota_bytes(Some(spec.set.used_bytes() + 4096));
        write(page).expect("it was raised");
        drop(store.create(&spec, &disk.freeze().expect("frozen")).expect("a clone"));
    }
    spec.set.set_quota_bytes(Some(0));
    store.drain();
    assert_eq!(spec.set.quota_bytes(), Some(0));
    assert!(store.counts().merges > 0);
    let mut clone = spec.clone();
    clone.set = DiskSet::new(None);
    let other = store.create(&clone, &images[0]).expect("a clone");
    other.write(span(1, 2), &[8; 8192]).expect("it is of another set");
    assert_eq!(clone.set.used_bytes(), 2 * 4096);
    drop((images, other));
    store.drain();
    // What its newest image shows, and nothing of what was merged.
    assert_eq!(spec.set.used_bytes(), 9 * 4096);
    assert!(now(&disk)[4096..10 * 4096].iter().all(|byte| *byte == 7));
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

#[test]
fn what_others_need_of_a_removed_disk_stays_until_they_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let parent = store.create(&spec("data", SIZE), &blank).expect("a disk");
    parent.write(span(0, 1), &[1; 4096]).expect("written");
    let mut of_clone = spec("data", SIZE);
    of_clone.vm = "vm 2".to_owned();
    let clone = store.create(&of_clone, &parent.freeze().expect("frozen")).expect("a clone");
    clone.write(span(1, 1), &[2; 4096]).expect("written");
    let ids = [parent.id(), clone.id()];
    let other = store.create(&spec("other", SIZE), &blank).expect("a disk");
    other.write(span(0, 1), &[3; 4096]).expect("written");
    // It ends before its daemon.
    drop(other);
    store.drain();
    store.keep_all();
    drop((parent, clone, blank, store));

    let store = open(folder.path());
    store.remove_unneeded().expect("removed");
    let found: BTreeSet<ImageId> = store.disks().expect("a list").iter().map(|d| d.id).collect();
    assert_eq!(found, ids.into());
    store.remove_disk(ids[0]).expect("removed");
    let left = store.disks().expect("a list");
    let [clone] = &left[..] else { panic!("{left:?}") };
    assert_eq!((clone.id, clone.vm.as_str()), (ids[1], "vm 2"));
    let image = store.image(clone.newest, &none).expect("what it had");
    let bytes = content(&image);
    assert_eq!([bytes[0], bytes[4096], bytes[8192]], [1, 2, 0]);
    drop(image);
    store.remove_disk(ids[1]).expect("removed");
    assert_eq!(store.list().expect("a list"), Listing::default());
}

#[test]
fn a_disk_that_was_left_finds_its_base_when_the_file_has_gone() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, model) = raw(folder.path());
    let root = folder.path().join("store");
    let store = open(&root);
    let names = || std::fs::read_dir(root.join("bases")).expect("there").count();
    let base = store.base(&path).expect("a base");
    let disk = store.create(&spec("data", SIZE), &base).expect("a disk");
    std::fs::remove_file(&path).expect("gone");
    std::fs::write(&path, "another one").expect("written");
    let own = disk.layer();
    let of_another = store.base(&path).expect("a base");
    assert_eq!(names(), 2);
    drop(of_another);
    store.drain();
    assert_eq!(names(), 1, "a name goes with the last that needs it");
    store.keep_all();
    drop((disk, base, store));

    let store = open(&root);
    store.remove_unneeded().expect("removed");
    let image = store.image(own, &none).expect("what it had");
    assert_eq!(content(&image), model);
    drop(image);
    let [found] = &store.disks().expect("a list")[..] else { panic!("one disk") };
    store.remove_disk(found.id).expect("removed");
    assert_eq!(names(), 0);
}

/// A disk that has been frozen `times` times, each time with another page written, and what it has.
/// The pages go round a disk of `pages`.
fn frozen_often(store: &DiskStore, pages: u64, times: u64) -> (Disk, Vec<u8>) {
    let blank = DiskImage::blank(pages * 4096).expect("an image");
    let disk = store.create(&spec("data", pages * 4096), &blank).expect("a disk");
    let mut model = vec![0; usize::try_from(pages * 4096).expect("small")];
    for number in 0..times {
        let span = span(number % pages, 1);
        model[place(span)].fill(u8::try_from(number % 255 + 1).expect("small"));
        disk.write(span, &model[place(span)]).expect("written");
        drop(disk.freeze().expect("frozen"));
    }
    store.drain();
    (disk, model)
}

#[test]
fn a_disk_that_is_frozen_on_and_on_keeps_few_layers() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let (disk, model) = frozen_often(&store, 300, 299);
    let layers = || std::fs::read_dir(&store.shared.layers).expect("a folder").count();
    // Its own, the one before that, the next.
    let most = LAYERS_MAX + 3;
    assert!(layers() <= most, "{} layers", layers());
    assert!(store.counts().merges > 0);
    assert_eq!(now(&disk), model);
    // A clone keeps all that its image shows, as long as it exists.
    let image = disk.freeze().expect("frozen");
    let clone = store.create(&spec("data", 300 * 4096), &image).expect("a clone");
    drop(image);
    for number in 0..299 {
        disk.write(span(number, 1), &[0xee; 4096]).expect("written");
        drop(disk.freeze().expect("frozen"));
    }
    store.drain();
    assert_eq!(now(&clone), model);
    assert_eq!(now(&disk)[..299 * 4096], [0xee; 299 * 4096]);
    assert!((most..=2 * most + 2).contains(&layers()), "{} layers of both", layers());
    drop(clone);
    store.drain();
    assert!(layers() <= most, "{} layers", layers());
}

#[test]
fn clones_share_the_layers_of_their_parent() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    // As many as a disk may have, and its image's own.
    let (disk, _) = frozen_often(&store, 300, LAYERS_MAX as u64 + 1);
    let (image, before) = (disk.image(), store.counts().merges);
    assert_eq!(image.owners().count(), LAYERS_MAX + 1);
    for byte in 0..5 {
        let clone = store.create(&spec("data", 300 * 4096), &image).expect("a clone");
        clone.write(span(200, 1), &[byte; 4096]).expect("written");
        drop(clone.freeze().expect("frozen"));
    }
    store.drain();
    assert_eq!(store.counts().merges, before, "no clone copies what they share");
}

#[test]
fn space_of_pages_that_do_not_show_is_given_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let pages = 6000;
    let blank = DiskImage::blank(pages * 4096).expect("an image");
    let (set, mut spec) = (DiskSet::new(None), spec("data", pages * 4096));
    spec.set = Arc::clone(&set);
    let disk = store.create(&spec, &blank).expect("a disk");
    let mut bytes = vec![0; usize::try_from(pages * 4096).expect("small")];
    for round in 1..6 {
        // One page of each round shows to the end.
        bytes[place(span(round, pages - round))].fill(u8::try_from(round).expect("small"));
        disk.write(span(round, pages - round), &bytes[place(span(round, pages - round))])
            .expect("written");
        drop(disk.freeze().expect("frozen"));
        store.drain();
        let used = set.used_bytes() / 4096;
        assert!(used <= 2 * pages + 4096 + pages, "{used} pages after {round} rounds");
    }
    assert_eq!(now(&disk), bytes);
    assert!(store.counts().merges > 0 && store.counts().merged_bytes < 100 * 4096);
}

#[test]
fn a_merged_layer_is_no_disk_and_without_it_no_table_is_stored() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let (disk, model) = frozen_often(&store, 300, 40);
    let own = disk.layer();
    store.keep_all();
    drop((disk, store));
    let store = open(folder.path());
    let listing = store.list().expect("a list");
    let merged: Vec<_> = listing.layers.values().filter(|layer| layer.note.merged).collect();
    assert_eq!(merged.len(), 1, "{merged:?}");
    let heads: Vec<_> = listing.disks().iter().map(|layer| layer.id).collect();
    assert_eq!(heads, [own]);
    let id = merged[0].id;
    let alone = Listing { layers: [(id, merged[0].clone())].into(), bad: Vec::new() };
    assert!(alone.disks().is_empty(), "it is left when the disk is gone, but a clone is not");
    assert!(matches!(store.image(id, &none), Err(StoreError::Merged(_))));
    let refused = store.reopen(id, &DiskSet::new(None), &none).expect_err("it has no content");
    assert!(matches!(refused, StoreError::Under { .. } | StoreError::Merged(_)));
    let disk = store.reopen(own, &DiskSet::new(None), &none).expect("the disk");
    assert_eq!(now(&disk), model);
    store.remove_unneeded().expect("removed");
    assert!(store.list().expect("a list").layers.contains_key(&id), "a table names it");
    assert_eq!(now(&disk), model);
    drop(disk);
    store.drain();
    assert!(store.list().expect("a list").layers.is_empty());
}

#[test]
fn an_export_that_needed_a_merge_stays_after_it_was_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let (disk, model) = frozen_often(&store, 300, 30);
    let own = disk.layer();
    store.keep_all();
    drop((disk, store));
    for round in 0..3 {
        // Its chain has more layers than that.
        let store = DiskStore::open_with(folder.path(), NO_FLOOR, FEW).expect("a store");
        let image = store.image(own, &none).expect("an export");
        assert_eq!(content(&image), model, "round {round}");
        store.drain();
        assert_eq!(store.counts().merges > 0, round == 0);
        assert_eq!(content(&image), model, "round {round}");
        drop(image);
        store.drain();
    }
}

#[test]
fn merged_layers_are_durable_once_a_guest_relies_on_the_medium() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open_few(folder.path());
    let (disk, _) = frozen_often(&store, 40, 20);
    let merged = || {
        let image = disk.image();
        let ids: Vec<ImageId> = image.owners().map(|(id, _)| id).collect();
        let layers = ids.into_iter().filter_map(|id| store.shared.live_layer(id));
        let merged = layers.filter(|layer| {
            let note = found::read_note(layer.folder().path()).expect("a note").expect("a note");
            note.merged
        });
        merged.collect::<Vec<_>>()
    };
    assert!(!merged().is_empty());
    assert!(!merged().iter().any(|layer| layer.is_durable()), "no merge waits unasked");
    disk.sync().expect("synced");
    assert!(merged().iter().all(|layer| layer.is_durable()));
    let before = merged().iter().map(|layer| layer.id()).collect::<Vec<_>>();
    for number in 20..40 {
        disk.write(span(number, 1), &[1; 4096]).expect("written");
        drop(disk.freeze().expect("frozen"));
        store.drain();
        assert!(merged().iter().all(|layer| layer.is_durable()));
    }
    assert!(merged().iter().any(|layer| !before.contains(&layer.id())), "there is another one");
}

#[test]
fn a_merge_that_fails_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open_few(folder.path());
    let (disk, mut model) = frozen_often(&store, 40, 20);
    let before = store.counts().merges;
    // The pages of the layers that are to be merged can't be read for a while.
    let image = disk.image();
    let below: Vec<ImageId> =
        image.owners().map(|(id, _)| id).filter(|id| *id != image.id()).collect();
    let data = |id: &ImageId| store.shared.folder(*id).join("data");
    let cut: Vec<Vec<u8>> = below
        .iter()
        .map(|id| {
            let bytes = std::fs::read(data(id)).expect("read");
            File::options().write(true).open(data(id)).expect("a file").set_len(0).expect("cut");
            bytes
        })
        .collect();
    let layers = || std::fs::read_dir(&store.shared.layers).expect("a folder").count();
    drop(image);
    for number in 20..24 {
        disk.write(span(number, 1), &[1; 4096]).expect("written");
        model[place(span(number, 1))].fill(1);
        drop(disk.freeze().expect("frozen"));
        store.drain();
    }
    assert!(store.counts().merges <= before + 3, "{} merges", store.counts().merges - before);
    assert!(layers() < 12, "none is left of those that failed: {}", layers());
    for (id, bytes) in below.iter().zip(cut) {
        use std::os::unix::fs::FileExt;
        let file = File::options().write(true).open(data(id)).expect("a file");
        file.write_all_at(&bytes, 0).expect("written");
    }
    assert_eq!(now(&disk), model);
}

#[test]
fn a_disk_that_goes_on_keeps_what_one_that_was_left_needs_of_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let volume = store.create(&spec("volume", SIZE), &blank).expect("a disk");
    volume.write(span(0, 2), &[1; 8192]).expect("written");
    let clone = store.create(&spec("clone", SIZE), &volume.freeze().expect("frozen"));
    let clone = clone.expect("a clone");
    clone.write(span(1, 1), &[2; 4096]).expect("written");
    store.drain();
    let (own, of_clone) = (volume.layer(), clone.layer());
    store.keep_all();
    drop((volume, clone, blank, store));

    let store = open(folder.path());
    let volume = store.reopen(own, &DiskSet::new(None), &none).expect("the volume");
    store.remove_unneeded().expect("removed");
    // Nothing of what the clone lies on shows any more.
    volume.write(span(0, PAGES), &vec![3; 4096 * 24]).expect("written");
    drop(volume.freeze().expect("frozen"));
    store.drain();
    drop(volume);
    store.drain();
    let [left] = &store.disks().expect("a list")[..] else { panic!("one disk") };
    let image = store.image(of_clone, &none).expect("what the clone had");
    assert_eq!([content(&image)[0], content(&image)[4096]], [1, 2]);
    drop(image);
    store.remove_disk(left.id).expect("removed");
    assert_eq!(store.list().expect("a list"), Listing::default());
}

#[test]
fn a_layer_that_can_not_be_read_keeps_bases_and_moving_the_store_does_not_lose_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, model) = raw(folder.path());
    let root = folder.path().join("store");
    let store = open(&root);
    let base = store.base(&path).expect("a base");
    let disk = store.create(&spec("data", SIZE), &base).expect("a disk");
    let own = disk.layer();
    store.drain();
    let note = root.join("layers").join(own.to_string()).join("note");
    let text = std::fs::read(&note).expect("a note");
    std::fs::write(&note, "{").expect("damaged");
    assert!(matches!(store.remove_disk(own), Err(StoreError::Busy(_))), "it is in use");
    store.keep_all();
    drop((disk, base, store));
    std::fs::remove_file(&path).expect("gone");

    let store = open(&root);
    store.remove_unneeded().expect("removed");
    std::fs::write(&note, text).expect("repaired");
    drop(store);
    let moved = folder.path().join("moved");
    std::fs::rename(&root, &moved).expect("moved");
    let store = open(&moved);
    store.remove_unneeded().expect("removed");
    let image = store.image(own, &none).expect("what it had");
    assert_eq!(content(&image), model);
}

#[test]
fn a_disk_whose_newest_layer_can_not_be_read_is_suspect() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec("data", SIZE), &blank).expect("a disk");
    disk.write(span(0, 1), &[1; 4096]).expect("written");
    drop(disk.freeze().expect("frozen"));
    disk.write(span(0, 1), &[2; 4096]).expect("written");
    let own = disk.layer();
    store.drain();
    store.keep_all();
    drop((disk, store));
    let store = open(folder.path());
    assert!(!store.disks().expect("a list")[0].is_suspect);
    std::fs::write(store.shared.folder(own).join("note"), "{").expect("damaged");
    let [found] = &store.disks().expect("a list")[..] else { panic!("one disk") };
    assert!(found.is_suspect, "it has an older content");
}

#[test]
fn a_layer_that_can_not_be_read_now_is_no_reason_to_remove_anything() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec("data", SIZE), &blank).expect("a disk");
    disk.write(span(1, 1), &[1; 4096]).expect("room");
    let image = disk.freeze().expect("frozen");
    disk.write(span(1, 1), &[2; 4096]).expect("room");
    let clone = store.create(&spec("clone", SIZE), &image).expect("a clone");
    clone.write(span(2, 1), &[3; 4096]).expect("room");
    let wanted = now(&clone);
    let (of_disk, of_clone) = (disk.id(), clone.id());
    store.keep_all();
    drop((disk, image, clone, store));
    // As with EMFILE or EIO: it is there, and reading it fails.
    let note = folder.path().join("layers").join(of_clone.to_string()).join("note");
    let aside = folder.path().join("aside");
    std::fs::rename(&note, &aside).expect("renamed");
    std::fs::create_dir(&note).expect("made");
    let store = open(folder.path());
    let listing = store.list().expect("a list");
    let [bad] = &listing.bad[..] else { panic!("{:?}", listing.bad) };
    assert!(bad.unread && bad.reason.contains("could not be read now"), "{bad:?}");
    store.remove_unneeded().expect("nothing is");
    for id in [of_disk, of_clone] {
        let refused = store.remove_disk(id).expect_err("the clone may need it");
        assert!(matches!(refused, StoreError::Unread { .. }), "{refused}");
    }
    let opened = store.image(of_clone, &none).expect_err("not now");
    assert!(matches!(opened, StoreError::Unread { .. }), "{opened}");
    let newest = listing.newest_of(of_disk).expect("listed").id;
    assert!(store.reopen(newest, &DiskSet::new(None), &none).is_err(), "one may lie on it");
    assert_eq!(store.list().expect("a list"), listing, "nothing is removed");
    drop(store);
    std::fs::remove_dir(&note).expect("removed");
    std::fs::rename(&aside, &note).expect("renamed");
    let store = open(folder.path());
    assert_eq!(store.disks().expect("a list").len(), 2, "it is whole");
    store.remove_disk(of_disk).expect("removed");
    let left = store.disks().expect("a list");
    let image = store.image(left[0].newest, &none).expect("whole");
    assert!(content(&image) == wanted);
}
