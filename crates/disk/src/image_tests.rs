use vmfork_image::PageIdx;

use super::*;
use crate::space::DiskSet;
use crate::store::{DiskSpec, DiskStore, StoreOptions};

/// Deeper than any stack that recurses.
const DEEP: usize = 10_000;

fn page(number: u64) -> PageRange {
    PageIdx(number).range()
}

/// A layer with pages 1 and 2 written and page 3 zeros.
fn layer(store: &DiskStore, on: &DiskImage) -> Arc<StoredLayer> {
    let (name, vm) = ("data".to_owned(), "a".to_owned());
    let spec = DiskSpec { name, vm, size_bytes: on.size_bytes(), set: DiskSet::new(None) };
    let disk = store.create(&spec, on).expect("a disk");
    let span = |page: u64, pages: u32| vmfork_nbd::Span {
        offset_bytes: page * 4096,
        len_bytes: pages * 4096,
    };
    disk.write(span(1, 2), &[7; 2 * 4096]).expect("written");
    disk.zero(span(3, 1)).expect("zeroed");
    let frozen = disk.freeze().expect("frozen");
    Arc::clone(frozen.own().expect("its layer"))
}

fn store() -> (tempfile::TempDir, DiskStore) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = DiskStore::open(folder.path(), StoreOptions { floor_bytes: 0 }).expect("a store");
    (folder, store)
}

#[test]
fn a_chain_of_thousands_is_read_made_flat_and_dropped_without_recursion() {
    let (_folder, store) = store();
    let blank = DiskImage::blank(8 * 4096).expect("an image");
    let own = layer(&store, &blank);
    let chain = || {
        (0..DEEP)
            .fold(blank.clone(), |lower, _| DiskImage::frozen(Arc::clone(&own), lower, 8 * 4096))
    };
    let read = |image: &DiskImage| {
        let mut bytes = vec![1; 8 * 4096];
        image.read(PageRange::first(8), &mut bytes).expect("read");
        [bytes[0], bytes[4096], bytes[3 * 4096], bytes[7 * 4096]]
    };
    // A small stack: recursion would end the test's process.
    std::thread::scope(|scope| {
        let small = std::thread::Builder::new().stack_size(128 << 10);
        let run = || {
            drop(chain());
            let image = chain();
            assert_eq!(read(&image), [0, 7, 0, 0]);
            image.flatten();
            assert_eq!(read(&image), [0, 7, 0, 0]);
            let table = image.table().expect("flat");
            assert_eq!(table.lookup(PageIdx(2)), Source::Image(image.id()));
            assert_eq!(image.owners().count(), 1);
            drop(image);
        };
        small.spawn_scoped(scope, run).expect("a thread").join().expect("no panic");
    });
}

#[test]
fn a_flat_image_says_what_the_chain_said_and_keeps_the_owners_of_pages_alone() {
    let (_folder, store) = store();
    let blank = DiskImage::blank(8 * 4096).expect("an image");
    let first = DiskImage::frozen(layer(&store, &blank), blank.clone(), 8 * 4096);
    let second = DiskImage::frozen(layer(&store, &blank), first.clone(), 8 * 4096);
    let mut before = Vec::new();
    second.runs(PageRange::first(8), &mut |run, zero| before.extend(run.pages().map(|_| zero)));
    second.flatten();
    let mut after = Vec::new();
    second.runs(PageRange::first(8), &mut |run, zero| after.extend(run.pages().map(|_| zero)));
    assert_eq!(before, after);
    assert_eq!(before, [true, false, false, true, true, true, true, true]);
    // All that the first had written was written again.
    assert_eq!(second.owners().map(|(id, _)| id).collect::<Vec<_>>(), [second.id()]);
    let weak = first.weak();
    drop(first);
    assert!(weak.get().is_some(), "its table is not stored yet");
    second.settle();
    assert!(weak.get().is_none());
}

#[test]
fn a_table_that_names_an_image_without_pages_is_refused() {
    let id = ImageId::new(5).expect("not 0");
    let table = PageTable::uniform(2, Source::Image(id));
    let refused = DiskImage::from_table(id, 8192, table.clone(), Owners::new());
    assert!(matches!(refused, Err(ImageError::Owner(owner)) if owner == id));
    let refused = DiskImage::from_table(id, 4096, table, Owners::new());
    assert!(matches!(refused, Err(ImageError::Size { pages: 2, size_bytes: 4096 })));
}

#[test]
fn beyond_an_image_are_zeros() {
    let blank = DiskImage::blank(4096).expect("an image");
    let mut found = Vec::new();
    blank.runs(PageRange::first(3), &mut |run, zero| found.push((run, zero)));
    assert_eq!(found.iter().map(|(run, _)| run.len()).sum::<u64>(), 3);
    let mut bytes = [1; 4096];
    blank.read(page(2), &mut bytes).expect("read");
    assert_eq!(bytes, [0; 4096]);
}
