//! Disks that grow, over freezes and restarts of their daemon.

use proptest::prelude::*;

use super::*;
use crate::space::DiskSet;
use crate::store::{DiskSpec, DiskStore, StoreOptions};

const SECTOR: u64 = 512;
/// Its last page is there in part.
const SIZE: u64 = 20 * 4096 - 3 * SECTOR;
const SECTORS_MAX: u64 = 4 * SIZE / SECTOR;

#[derive(Debug, Clone)]
enum Step {
    /// Where, in sectors of the largest disk; how many; which byte.
    Write(u64, u64, u8),
    Trim(u64, u64),
    Freeze,
    /// By this number of sectors.
    Grow(u64),
    /// The daemon ends without removing anything, and the next one opens the disk.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = || (0..SECTORS_MAX, 1_u64..40);
    let step = prop_oneof![
        4 => (place(), 1_u8..255).prop_map(|((at, len), byte)| Step::Write(at, len, byte)),
        1 => place().prop_map(|(at, len)| Step::Trim(at, len)),
        2 => Just(Step::Freeze),
        2 => (0_u64..60).prop_map(Step::Grow),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 0..30)
}

fn open(folder: &std::path::Path) -> DiskStore {
    DiskStore::open(folder, StoreOptions { floor_bytes: 0 }).expect("a store")
}

fn create(store: &DiskStore, on: &DiskImage) -> Disk {
    let (name, vm) = ("data".to_owned(), "a".to_owned());
    let spec = DiskSpec { name, vm, size_bytes: on.size_bytes(), set: DiskSet::new(None) };
    store.create(&spec, on).expect("a disk")
}

/// The part of a place that is within the disk. `None`: nothing.
fn span(disk: &Disk, at: u64, len: u64) -> Option<Span> {
    let sectors = disk.size_bytes() / SECTOR;
    let len = len.min(sectors.checked_sub(at)?);
    let len_bytes = u32::try_from(len * SECTOR).expect("small");
    (len > 0).then_some(Span { offset_bytes: at * SECTOR, len_bytes })
}

fn at(span: Span) -> std::ops::Range<usize> {
    let small = |bytes| usize::try_from(bytes).expect("small");
    small(span.offset_bytes)..small(span.end())
}

fn content(disk: &Disk) -> Vec<u8> {
    let all = span(disk, 0, u64::MAX).expect("it has bytes");
    let mut bytes = vec![0xaa; at(all).len()];
    disk.read(all, &mut bytes).expect("read");
    bytes
}

/// The only disk of the store, as the next daemon finds it.
fn found(store: &DiskStore) -> Disk {
    let listing = store.list().expect("a list");
    assert!(listing.bad.is_empty(), "{:?}", listing.bad);
    let disks = listing.disks();
    assert_eq!(disks.len(), 1, "{disks:?}");
    let (id, noted) = (disks[0].id, disks[0].note.size_bytes);
    let by_volume = listing.newest_of(disks[0].note.disk_id).map(|newest| newest.id);
    assert_eq!(by_volume, Some(id));
    let disk = store.reopen(id, &DiskSet::new(None), &|_| None).expect("the disk");
    assert_eq!(disk.size_bytes(), noted, "note and disk agree");
    disk
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Against an array of bytes. Images keep the size and the bytes that they were frozen with.
    #[test]
    fn a_disk_that_grows_has_what_was_written_and_zeros_beyond(steps in steps()) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut store = open(folder.path());
        let blank = DiskImage::blank(SIZE).expect("an image");
        let mut disk = create(&store, &blank);
        let mut model = content(&disk);
        let mut frozen: Vec<(DiskImage, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Write(place, len, byte) => {
                    if let Some(span) = span(&disk, place, len) {
                        disk.write(span, &vec![byte; at(span).len()]).expect("written");
                        model[at(span)].fill(byte);
                    }
                }
                Step::Trim(place, len) => {
                    if let Some(span) = span(&disk, place, len) {
                        disk.trim(span).expect("trimmed");
                        let whole = at(span).start.next_multiple_of(4096)..at(span).end / 4096 * 4096;
                        if whole.start < whole.end {
                            model[whole].fill(0);
                        }
                    }
                }
                Step::Freeze => frozen.push((disk.freeze().expect("frozen"), model.clone())),
                Step::Grow(sectors) => {
                    let size_bytes = disk.size_bytes() + sectors * SECTOR;
                    disk.grow(size_bytes).expect("grown");
                    model.resize(usize::try_from(size_bytes).expect("small"), 0);
                }
                Step::Restart => {
                    store.keep_all();
                    frozen.clear();
                    drop((disk, store));
                    store = open(folder.path());
                    disk = found(&store);
                }
            }
            prop_assert_eq!(disk.size_bytes(), model.len() as u64);
        }
        prop_assert_eq!(content(&disk), &model[..]);
        for (image, model) in &frozen {
            prop_assert_eq!(content(&create(&store, image)), &model[..]);
        }
        // The same after everything was derived and merged.
        store.drain();
        prop_assert_eq!(content(&disk), model);
        for (image, model) in frozen {
            prop_assert_eq!(content(&create(&store, &image)), model);
        }
    }
}

/// As if the daemon had died before it wrote down that the disk's own layer is in use.
fn unnote(folder: &std::path::Path, disk: &Disk) {
    let note = folder.join("layers").join(disk.layer().to_string()).join("note");
    let text = std::fs::read_to_string(&note).expect("a note");
    let spare = text.replace("\"spare\": false", "\"spare\": true");
    assert_ne!(spare, text, "it was written down");
    std::fs::write(&note, spare).expect("written");
}

#[test]
fn a_growth_right_after_a_freeze_is_found_after_a_crash() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let disk = create(&store, &DiskImage::blank(SIZE).expect("an image"));
    store.drain();
    let sector = span(&disk, 0, 1).expect("within");
    disk.write(sector, &[3; 512]).expect("written");
    let image = disk.freeze().expect("frozen");
    store.drain();
    unnote(folder.path(), &disk);
    disk.grow(SIZE + 4096).expect("grown");
    store.keep_all();
    drop((image, disk, store));
    let store = open(folder.path());
    assert_eq!(found(&store).size_bytes(), SIZE + 4096);
}

#[test]
fn a_next_layer_from_before_a_growth_is_not_taken_for_the_newest() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let disk = create(&store, &DiskImage::blank(SIZE).expect("an image"));
    store.drain();
    // The crash comes before what is not needed is removed.
    store.keep_all();
    disk.grow(SIZE + 4096).expect("grown");
    store.drain();
    let image = disk.freeze().expect("frozen");
    let clone = create(&store, &image);
    clone.write(span(&clone, 0, 1).expect("within"), &[3; 512]).expect("written");
    store.drain();
    unnote(folder.path(), &disk);
    let (own, id) = (disk.layer(), disk.id());
    let layers = store.list().expect("a list").layers;
    let on = |layer: &crate::FoundLayer| layer.note.on == Some(image.id());
    let of_disk = layers.values().filter(|layer| layer.note.disk_id == id && on(layer));
    let sizes: Vec<u64> = of_disk.map(|layer| layer.note.size_bytes).collect();
    assert!(sizes.contains(&SIZE) && sizes.contains(&(SIZE + 4096)), "{sizes:?}");
    drop((image, clone, disk, store));
    let store = open(folder.path());
    let newest = store.list().expect("a list").newest_of(id).map(|layer| layer.id);
    assert_eq!(newest, Some(own));
}

#[test]
fn what_can_not_grow_stays_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let disk = create(&store, &DiskImage::blank(SIZE).expect("an image"));
    for odd in [SIZE - SECTOR, SIZE + 1, 0] {
        let refused = disk.grow(odd).expect_err("refused");
        assert!(matches!(refused, LayerError::Size { now: SIZE, .. }), "{refused}");
    }
    disk.grow(SIZE).expect("nothing to do");
    assert_eq!(disk.size_bytes(), SIZE);
}
