//! An image in a file: right bytes for readers, holes where it is zero, an error where a source
//! fails.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::SeekFrom;
use tempfile::TempDir;
use vmfork_engine::{Engine, EngineEvent, EngineOptions, HostImage, SparseFile, StoredRun};
use vmfork_image::{BLOCK_PAGES, ImageId, PAGE_BYTES, PageIdx, PageRange};

use crate::common::{Events, Fake, FileReader, LONG, PAGE_LEN, bytes_of, events};

const PAGES: u64 = 2 * BLOCK_PAGES;

fn id(number: u64) -> ImageId {
    ImageId::new(number).expect("not 0")
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

/// Pages 64 to 191 are in `source`, all others are zero; the cache is a file.
struct Disk {
    folder: TempDir,
    engine: Arc<Engine>,
    events: Events,
}

const OWN: (u64, u64) = (64, 128);

fn disk(source: &Arc<Fake>) -> Disk {
    let folder = tempfile::tempdir().expect("a folder");
    let file = SparseFile::create(&folder.path().join("cache"), PAGES).expect("a file");
    let own = [StoredRun::Own(range(OWN.0, OWN.1))];
    let source = Arc::<Fake>::clone(source);
    let image = HostImage::stored_on(Box::new(file), id(1), PAGES, own, None, source);
    let (sink, events) = events();
    let options = EngineOptions::default();
    let engine = Engine::serve(image.expect("opened"), &options, sink).expect("an engine");
    Disk { folder, engine: Arc::new(engine), events }
}

impl Disk {
    fn file(&self) -> File {
        File::open(self.folder.path().join("cache")).expect("there")
    }

    /// Runs of the file that are no hole, by the file system.
    fn data(&self) -> Vec<PageRange> {
        let (file, mut at, mut data) = (self.file(), 0, Vec::new());
        while let Ok(start) = rustix::fs::seek(&file, SeekFrom::Data(at)) {
            let end = rustix::fs::seek(&file, SeekFrom::Hole(start)).expect("a hole at the end");
            data.push(range(start / PAGE_BYTES, (end - start).div_ceil(PAGE_BYTES)));
            at = end;
        }
        data
    }

    fn lost(&self) -> Vec<EngineEvent> {
        let events = self.events.lock().expect("not poisoned");
        events.iter().filter(|it| matches!(it, EngineEvent::ViewLost { .. })).cloned().collect()
    }
}

#[test]
fn readers_get_the_sources_bytes_and_the_file_has_them() {
    let source = Arc::new(Fake::default());
    let disk = disk(&source);
    let readers = [FileReader::of(&disk.engine), FileReader::of(&disk.engine)];
    std::thread::scope(|scope| {
        for (reader, offset) in readers.iter().flat_map(|reader| [(reader, 0), (reader, 37)]) {
            scope.spawn(move || {
                for at in 0..OWN.1 {
                    let page = PageIdx(OWN.0 + (at + offset) % OWN.1);
                    assert_eq!(reader.read(page), Ok(bytes_of(page)), "page {page}");
                }
            });
        }
    });
    let (file, mut bytes) = (disk.file(), vec![0; PAGE_LEN]);
    for page in range(OWN.0, OWN.1).pages() {
        file.read_exact_at(&mut bytes, page.byte_offset()).expect("as long as the image");
        assert_eq!(bytes, bytes_of(page), "page {page} of the file");
    }
    assert_eq!(source.pages_read(), OWN.1, "each page is read once, however many wait");
    assert!(disk.lost().is_empty());
}

#[test]
fn zero_pages_stay_holes() {
    let source = Arc::new(Fake::default());
    let disk = disk(&source);
    let reader = FileReader::of(&disk.engine);
    let zeros = vec![0; PAGE_LEN];
    for page in (0..PAGES).map(PageIdx).filter(|page| !range(OWN.0, OWN.1).contains(*page)) {
        assert_eq!(reader.read(page).as_ref(), Ok(&zeros), "page {page}");
    }
    assert_eq!(disk.data(), [], "nothing was read but zeros");
    assert_eq!(reader.read(PageIdx(OWN.0)), Ok(bytes_of(PageIdx(OWN.0))));
    assert_eq!(disk.data(), [range(OWN.0, 16)], "the unit of the source, and no more");
    assert_eq!(disk.file().metadata().expect("there").size(), PAGES * PAGE_BYTES);
    let resident = disk.engine.image().cache().resident_bytes();
    assert!((1..PAGES * PAGE_BYTES / 4).contains(&resident), "{resident} bytes");
}

#[test]
fn a_page_that_fails_is_an_error_to_who_reads_it_and_costs_nothing_else() {
    let bad = PageIdx(OWN.0 + 5);
    let source = Arc::new(Fake { fails_at: Some(bad), ..Fake::default() });
    let disk = disk(&source);
    let reader = FileReader::of(&disk.engine);
    for _ in 0..2 {
        let reason = reader.read(bad).expect_err("it can't be had");
        assert!(reason.contains("a bad sector") && reason.contains(&bad.to_string()), "{reason}");
    }
    for page in range(OWN.0, OWN.1).pages().filter(|page| *page != bad) {
        assert_eq!(reader.read(page), Ok(bytes_of(page)), "a neighbour, {page}");
    }
    assert!(!disk.engine.image().cache().presence().is_present(bad));
    assert!(disk.lost().is_empty(), "the reader goes on");
}

#[test]
fn a_source_that_panics_is_an_error_too() {
    let bad = PageIdx(OWN.0 + 20);
    let source = Arc::new(Fake { panics_at: Some(bad), ..Fake::default() });
    let disk = disk(&source);
    let reader = FileReader::of(&disk.engine);
    let reason = reader.read(bad).expect_err("it can't be had");
    assert!(reason.contains("panicked"), "{reason}");
    assert_eq!(reader.read(PageIdx(OWN.0)), Ok(bytes_of(PageIdx(OWN.0))));
}

#[test]
fn a_reader_that_cannot_be_told_of_one_page_is_lost_and_hears_of_it() {
    let bad = PageIdx(OWN.0);
    let source = Arc::new(Fake { fails_at: Some(bad), ..Fake::default() });
    let disk = disk(&source);
    let reader = FileReader::that_cannot_refuse(&disk.engine);
    let other = FileReader::of(&disk.engine);
    assert!(reader.read(bad).expect_err("it can't be had").contains("a bad sector"));
    assert!(reader.read(PageIdx(OWN.0 + 100)).is_err(), "it is answered no more");
    // The reader hears of it first. A page that the engine brings later comes after the event.
    assert_eq!(other.read(PageIdx(OWN.0 + 100)), Ok(bytes_of(PageIdx(OWN.0 + 100))));
    let [EngineEvent::ViewLost { view, .. }] = &disk.lost()[..] else { panic!("one view is") };
    assert_eq!(*view, reader.id());
}

#[test]
fn the_page_that_is_waited_for_wakes_its_reader_before_its_neighbours_come() {
    let source = Arc::new(Fake { holds_back: true, ..Fake::default() });
    let disk = disk(&source);
    let reader = FileReader::of(&disk.engine);
    let page = PageIdx(OWN.0 + 3);
    assert_eq!(reader.read(page), Ok(bytes_of(page)), "while the source holds back the rest");
    assert_eq!(source.pages_read(), 0);
    source.go_on();
    let next = PageIdx(OWN.0 + 4);
    assert_eq!(reader.read(next), Ok(bytes_of(next)));
}

#[test]
fn an_engine_that_ends_leaves_no_reader_waiting() {
    let source = Arc::new(Fake { holds_back: true, ..Fake::default() });
    let disk = disk(&source);
    let reader = FileReader::of(&disk.engine);
    assert!(reader.read(PageIdx(OWN.0)).is_ok());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| reader.read(PageIdx(OWN.0 + 1)));
        disk.engine.inject_panic();
        let reason = waits.join().expect("no panic").expect_err("no page comes any more");
        assert!(reason.contains("served no more"), "{reason}");
    });
    source.go_on();
}

#[test]
fn a_file_over_an_image_in_memory_has_what_it_inherits() {
    let (old, new) = (Arc::new(Fake::default()), Arc::new(Fake::default()));
    let own = [StoredRun::Own(range(0, 32))];
    let base = HostImage::stored(id(1), PAGES, own, None, Arc::<Fake>::clone(&old));
    let base = base.expect("opened");
    let folder = tempfile::tempdir().expect("a folder");
    let file = SparseFile::create(&folder.path().join("cache"), PAGES).expect("a file");
    let runs = [StoredRun::Own(range(16, 8)), StoredRun::Zero(range(24, 4))];
    let source = Arc::<Fake>::clone(&new);
    let image = HostImage::stored_on(Box::new(file), id(2), PAGES, runs, Some(&base), source);
    let (sink, _events) = events();
    let engine = Engine::serve(image.expect("opened"), &EngineOptions::default(), sink);
    let reader = FileReader::of(&Arc::new(engine.expect("an engine")));
    for page in (0..64).map(PageIdx) {
        let is_zero = (24..28).contains(&page.0) || page.0 >= 32;
        let expected = if is_zero { vec![0; PAGE_LEN] } else { bytes_of(page) };
        assert_eq!(reader.read(page), Ok(expected), "page {page}");
    }
    let inherited = |range: &PageRange| range.pages().all(|page| !(16..28).contains(&page.0));
    assert!(old.reads.lock().expect("not poisoned").iter().all(inherited));
    assert_eq!(new.pages_read(), 8);
}

#[test]
fn all_of_an_image_can_be_brought_into_its_file_ahead() {
    let source = Arc::new(Fake::default());
    let disk = disk(&source);
    disk.engine.hydrate(NonZeroU64::MAX);
    let deadline = Instant::now() + LONG;
    while disk.engine.image().missing_pages() > 0 {
        assert!(Instant::now() < deadline, "{} missing", disk.engine.image().missing_pages());
        std::thread::park_timeout(std::time::Duration::from_millis(1));
    }
    assert_eq!(disk.data(), [range(OWN.0, OWN.1)]);
    let reader = FileReader::of(&disk.engine);
    assert_eq!(reader.read(PageIdx(OWN.0 + 9)), Ok(bytes_of(PageIdx(OWN.0 + 9))));
    assert_eq!(source.pages_read(), OWN.1, "read ahead, and not again");
}

#[test]
fn a_file_of_another_size_or_at_a_path_that_exists_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path: &Path = &folder.path().join("cache");
    let file = SparseFile::create(path, PAGES / 2).expect("a file");
    let source = Arc::new(Fake::default());
    assert!(HostImage::stored_on(Box::new(file), id(1), PAGES, [], None, source).is_err());
    assert!(SparseFile::create(path, PAGES).is_err(), "never another's file");
}
