use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use vmfork_disk::Lower as _;
use vmfork_image::{PageIdx, PageRange};
use vmfork_store::Failure;
use vmfork_store_s3::ObjectVersion;

use super::*;
use crate::cached::{UNIT_BYTES, UNKEPT_MAX};

const SIZE: u64 = 5 * UNIT_BYTES + 700;

/// An object in memory that counts what is asked of it.
#[derive(Debug)]
struct Fake {
    bytes: Mutex<Vec<u8>>,
    etag: Mutex<String>,
    reads: AtomicUsize,
    asked: Mutex<BTreeSet<u64>>,
    panics: AtomicBool,
    size_bytes: AtomicU64,
}

fn content(seed: u64) -> Vec<u8> {
    let byte = |at: u64| ((at / 512).wrapping_mul(seed) >> 3).to_le_bytes()[0];
    (0..SIZE).map(byte).collect()
}

impl Fake {
    fn new() -> Arc<Self> {
        let (bytes, etag) = (Mutex::new(content(37)), Mutex::new("one".to_owned()));
        let (reads, asked) = (AtomicUsize::new(0), Mutex::default());
        let (panics, size_bytes) = (AtomicBool::new(false), AtomicU64::new(SIZE));
        Arc::new(Self { bytes, etag, reads, asked, panics, size_bytes })
    }

    fn replace(&self) {
        *self.bytes.lock() = content(41);
        "two".clone_into(&mut self.etag.lock());
    }

    fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

impl Reader for Fake {
    fn version(&self) -> Result<ObjectVersion, BlobError> {
        let etag = self.etag.lock().clone();
        let size_bytes = self.size_bytes.load(Ordering::SeqCst);
        Ok(ObjectVersion { size_bytes, etag, version: None })
    }

    fn read(&self, of: &ObjectVersion, range: std::ops::Range<u64>) -> Result<Bytes, BlobError> {
        if of.etag != *self.etag.lock() {
            let (key, place) = ("base.raw".to_owned(), "memory".to_owned());
            let (action, why, source) = ("get", Failure::Changed, "it was replaced".into());
            return Err(BlobError::Failed { action, key, place, why, source });
        }
        assert!(!self.panics.load(Ordering::SeqCst), "the test says so");
        if range.end == 1 {
            return Ok(Bytes::from_static(b"x"));
        }
        self.reads.fetch_add(1, Ordering::SeqCst);
        assert!(self.asked.lock().insert(range.start), "{range:?} again");
        std::thread::park_timeout(std::time::Duration::from_millis(5));
        let at = |offset: u64| usize::try_from(offset).expect("small");
        let bytes = self.bytes.lock();
        Ok(Bytes::copy_from_slice(&bytes[at(range.start)..at(range.end)]))
    }
}

fn objects(folder: &Path, fake: &Arc<Fake>, floor_bytes: u64) -> Objects {
    let fake = Arc::clone(fake);
    let readers: Readers = Arc::new(move |_| Ok(Arc::<Fake>::clone(&fake)));
    Objects::with_readers(folder, floor_bytes, readers).expect("a folder")
}

fn read(image: &DiskImage, first: u64, pages: u64) -> io::Result<Vec<u8>> {
    let range = PageRange::new(PageIdx(first), pages).expect("small");
    let mut bytes = vec![7; usize::try_from(pages * PAGE_BYTES).expect("small")];
    image.read(range, &mut bytes).map(|()| bytes)
}

/// An earlier daemon has read these pages of the object. → its ID.
fn fetched(folder: &Path, fake: &Arc<Fake>, pages: &[u64]) -> ImageId {
    let objects = objects(folder, fake, 0);
    let image = objects.disk("s3://bucket/base.raw").expect("a disk");
    for page in pages {
        assert_eq!(read(&image, *page, 1).expect("read"), wanted(37, *page, 1));
    }
    image.id()
}

fn wanted(seed: u64, first: u64, pages: u64) -> Vec<u8> {
    let at = |page: u64| usize::try_from(page * PAGE_BYTES).expect("small");
    let mut all = content(seed);
    all.resize(at(SIZE.div_ceil(PAGE_BYTES)), 0);
    all[at(first)..at(first + pages)].to_vec()
}

#[test]
fn each_unit_is_fetched_once_by_whoever_reads_it_and_stays_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let all_pages = SIZE.div_ceil(PAGE_BYTES);
    let id = {
        let objects = objects(folder.path(), &fake, 0);
        let image = objects.disk("s3://bucket/base.raw").expect("a disk");
        assert_eq!(image.size_bytes(), SIZE.next_multiple_of(512));
        assert_eq!(fake.reads(), 0, "nothing is read before it is wanted");
        // Eight threads want what lies over the border of two units.
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(read(&image, 60, 10).expect("read"), wanted(37, 60, 10)));
            }
        });
        let same = objects.disk("s3://bucket/base.raw").expect("a disk");
        assert_eq!(same.id(), image.id());
        assert_eq!(read(&same, 60, 10).expect("read"), wanted(37, 60, 10));
        image.id()
    };
    let before = fake.reads();
    let again = objects(folder.path(), &fake, 0);
    let image = again.image(id).expect("it is known");
    assert_eq!(read(&image, 60, 10).expect("read"), wanted(37, 60, 10));
    assert_eq!(fake.reads(), before, "it is here");
    // The end, which is no whole page, is followed by zeros.
    assert_eq!(read(&image, 0, all_pages).expect("read"), wanted(37, 0, all_pages));
    assert_eq!(fake.reads(), 6);
    assert!(again.image(ImageId::new(5).expect("not 0")).is_none());
}

#[test]
fn an_object_that_was_replaced_is_an_error_and_another_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let objects = objects(folder.path(), &fake, 0);
    let old = objects.disk("s3://bucket/base.raw").expect("a disk");
    assert_eq!(read(&old, 0, 1).expect("read"), wanted(37, 0, 1));
    fake.replace();
    fake.asked.lock().clear();
    // What is here is still read. What is not is never the new content.
    assert_eq!(read(&old, 1, 1).expect("read"), wanted(37, 1, 1));
    let error = read(&old, 300, 1).expect_err("it is gone").to_string();
    assert!(error.contains("s3://bucket/base.raw") && error.contains("restore"), "{error}");
    let new = objects.disk("s3://bucket/base.raw").expect("a disk");
    assert_ne!(new.id(), old.id());
    assert_eq!(read(&new, 300, 1).expect("read"), wanted(41, 300, 1));
}

#[test]
fn a_full_host_reads_and_keeps_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let objects = objects(folder.path(), &fake, u64::MAX);
    let image = objects.disk("s3://bucket/base.raw").expect("a disk");
    // The parts of a unit come with one fetch.
    for page in 0..64 {
        assert_eq!(read(&image, page, 1).expect("read"), wanted(37, page, 1));
    }
    assert_eq!(fake.reads(), 1);
    let others = u64::try_from(UNKEPT_MAX).expect("small");
    (1..=others).for_each(|unit| drop(read(&image, unit * 64, 1).expect("read")));
    fake.asked.lock().clear();
    assert_eq!(read(&image, 3, 2).expect("read"), wanted(37, 3, 2));
    assert_eq!(fake.reads(), UNKEPT_MAX + 2);
}

#[test]
fn marks_without_their_bytes_are_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let id = fetched(folder.path(), &fake, &[0]);
    let data = folder.path().join(id.to_string()).join("data");
    let cut = || fs::File::options().write(true).open(&data).and_then(|file| file.set_len(4096));
    for lose in [&(|| fs::remove_file(&data)) as &dyn Fn() -> io::Result<()>, &cut] {
        lose().expect("lost");
        fake.asked.lock().clear();
        let again = objects(folder.path(), &fake, 0);
        let image = again.image(id).expect("it is known");
        assert_eq!(read(&image, 0, 1).expect("read"), wanted(37, 0, 1));
    }
    assert_eq!(fake.reads(), 3);
}

#[test]
fn what_was_not_noted_is_fetched_again_and_no_credentials_are_needed_for_the_rest() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let id = fetched(folder.path(), &fake, &[0, 256]);
    // As if the daemon was killed before it noted the first unit.
    let of = folder.path().join(id.to_string());
    let units = fs::File::options().write(true).open(of.join("units")).expect("there");
    std::os::unix::fs::FileExt::write_all_at(&units, &[0], 0).expect("written");
    let readers: Readers =
        Arc::new(|_| Err(OpenError::NoCredentials { variable: "AWS_ACCESS_KEY_ID" }.into()));
    let again = Objects::with_readers(folder.path(), 0, readers).expect("a folder");
    let image = again.image(id).expect("it is known");
    assert_eq!(read(&image, 256, 1).expect("read"), wanted(37, 256, 1));
    let error = read(&image, 0, 1).expect_err("it can't be fetched").to_string();
    assert!(error.contains("credentials"), "{error}");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(of).expect("there").permissions());
    assert_eq!(mode & 0o077, 0, "others can't enter");
}

#[test]
fn after_a_crash_of_the_host_nothing_is_taken_for_fetched() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let id = fetched(folder.path(), &fake, &[0]);
    // The note is durable. What it speaks of may be lost.
    let of = folder.path().join(id.to_string());
    let note = fs::read_to_string(of.join("object.json")).expect("there");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("there");
    fs::write(of.join("object.json"), note.replace(boot.trim(), "an earlier one"))
        .expect("written");
    let data = fs::File::options().write(true).open(of.join("data")).expect("there");
    std::os::unix::fs::FileExt::write_all_at(&data, &[0; 4096], 0).expect("written");
    fake.asked.lock().clear();
    let again = objects(folder.path(), &fake, 0);
    let image = again.image(id).expect("it is known");
    assert_eq!(read(&image, 0, 1).expect("read"), wanted(37, 0, 1));
}

#[test]
fn a_fetch_that_panics_is_an_error_for_all_who_wait() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let objects = objects(folder.path(), &fake, u64::MAX);
    let image = objects.disk("s3://bucket/base.raw").expect("a disk");
    fake.panics.store(true, Ordering::SeqCst);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(&image, 3, 2)));
    assert!(caught.is_err());
    fake.panics.store(false, Ordering::SeqCst);
    assert_eq!(read(&image, 3, 2).expect("read"), wanted(37, 3, 2));
}

#[test]
fn what_is_too_small_or_too_large_is_no_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    for (size_bytes, fits) in [
        (0, false),
        ((1 << 20) - 1, false),
        (1 << 20, true),
        (2 << 40, true),
        ((2 << 40) + 1, false),
        (u64::MAX, false),
    ] {
        let fake = Fake::new();
        fake.size_bytes.store(size_bytes, Ordering::SeqCst);
        let disk = objects(folder.path(), &fake, u64::MAX).disk("s3://bucket/base.raw");
        assert_eq!(disk.is_ok(), fits, "{size_bytes}: {disk:?}");
    }
}

#[test]
fn only_what_a_disk_lies_on_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::new();
    let objects = objects(folder.path(), &fake, 0);
    let image = objects.disk("s3://bucket/base.raw").expect("a disk");
    let path = folder.path().join(image.id().to_string());
    let id = image.id();
    objects.prune(|_| false);
    assert!(path.exists(), "it is open");
    drop(image);
    objects.prune(|needed| needed == id);
    assert!(path.exists(), "a layer names it");
    objects.prune(|_| false);
    assert!(!path.exists() && objects.image(id).is_none());
}
