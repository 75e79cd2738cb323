use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use crate::image::DiskImage;
use crate::lower::Lower as _;
use crate::space::DiskSet;
use crate::store::{DiskSpec, StoreOptions};
use vmfork_nbd::Span;

const SIZE: u64 = 8 * 4096;
const FIRST: Span = Span { offset_bytes: 0, len_bytes: 4096 };
const ROUNDS: u8 = 200;

fn open(folder: &std::path::Path) -> DiskStore {
    DiskStore::open(folder, StoreOptions { floor_bytes: 0 }).expect("a store")
}

fn spec(name: &str) -> DiskSpec {
    let (name, vm) = (name.to_owned(), "vm 1".to_owned());
    DiskSpec { name, vm, size_bytes: SIZE, set: DiskSet::new(None) }
}

#[test]
fn neither_a_freeze_nor_a_new_disk_waits_for_a_removal() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Arc::new(open(folder.path()));
    let forks = {
        let store = Arc::clone(&store);
        move || {
            let blank = DiskImage::blank(SIZE).expect("an image");
            let disk = store.create(&spec("data"), &blank).expect("a disk");
            // The second needs a layer that is not there yet.
            (0..3).for_each(|_| drop(disk.freeze().expect("frozen")));
        }
    };
    let _removing = store.shared.removing();
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        forks();
        let _ = done.send(());
    });
    is_done.recv_timeout(Duration::from_secs(30)).expect("none waits");
}

#[test]
fn a_layer_that_is_being_made_is_not_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let disk = store.create(&spec("data"), &DiskImage::blank(SIZE).expect("an image"));
    let disk = disk.expect("a disk");
    drop(disk.freeze().expect("frozen"));
    store.drain();
    store.keep_all();
    drop((disk, store));

    let store = open(folder.path());
    let layers = || store.list().expect("a list").layers;
    // That was made in advance, and nothing needs it.
    let newest = *layers().keys().max_by_key(|id| layers()[*id].note.number).expect("some");
    let making = store.shared.being_made(newest);
    store.remove_unneeded().expect("removed");
    assert!(layers().contains_key(&newest));
    drop(making);
    store.remove_unneeded().expect("removed");
    assert!(!layers().contains_key(&newest));
}

/// Disks are made, written, frozen, cloned and dropped, while all that is not needed is removed.
#[test]
fn what_is_made_during_a_removal_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(folder.path());
    let blank = DiskImage::blank(SIZE).expect("an image");
    let left = store.create(&spec("left"), &blank).expect("a disk");
    left.write(FIRST, &[0xee; 4096]).expect("written");
    let left_id = left.id();
    store.keep_all();
    drop((left, blank, store));

    let store = open(folder.path());
    let is_over = AtomicBool::new(false);
    let read = |disk: &crate::Disk| {
        let mut bytes = vec![0; 4096];
        disk.read(FIRST, &mut bytes).expect("read");
        bytes[4095]
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                store.remove_unneeded().expect("removed");
            }
        });
        let blank = DiskImage::blank(SIZE).expect("an image");
        let mut kept: Vec<(crate::Disk, u8)> = Vec::new();
        for round in 1..=ROUNDS {
            let disk = store.create(&spec("data"), &blank).expect("a disk");
            disk.write(FIRST, &[round; 4096]).expect("written");
            let clone = store.create(&spec("clone"), &disk.freeze().expect("frozen"));
            let clone = clone.expect("a clone");
            assert_eq!((read(&disk), read(&clone)), (round, round));
            kept.push((clone, round));
            if kept.len() > 20 {
                kept.drain(..15);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        store.drain();
        let listing = store.list().expect("a list");
        assert!(listing.bad.is_empty(), "{:?}", listing.bad);
        for (clone, round) in &kept {
            assert_eq!(read(clone), *round);
            assert!(listing.layers.contains_key(&clone.layer()), "its folder is there");
        }
    });
    let left = store.disks().expect("a list").into_iter().find(|disk| disk.id == left_id);
    let image = store.image(left.expect("it is left").newest, &|_| None).expect("what it had");
    let mut bytes = vec![0; 4096];
    image.read(vmfork_image::PageRange::first(1), &mut bytes).expect("read");
    assert_eq!(bytes[0], 0xee);
}
