use std::collections::BTreeMap;

use proptest::prelude::*;
use vmfork_image::{PageTable, Source};

use super::*;
use crate::lower::OwnPages;
use crate::merging::LAYERS_MAX;
use crate::space::DiskSet;
use crate::store::{DiskSpec, DiskStore, StoreOptions};

const PAGES: u64 = 40;
/// The last page is there in part.
const SIZE: u64 = PAGES * 4096 - 1536;

/// Each page has its number. From page 20 on, they are far away.
#[derive(Debug)]
struct Numbers;

impl OwnPages for Numbers {
    fn is_here(&self, range: PageRange) -> bool {
        range.pages().all(|page| page.0 < 20)
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        for (page, bytes) in range.pages().zip(bytes.chunks_mut(4096)) {
            assert!(!page.0.is_multiple_of(3), "zeros are not read");
            bytes.fill(u8::try_from(page.0).expect("small"));
        }
        Ok(())
    }
}

/// Every third page is zeros.
fn image() -> DiskImage {
    let id = ImageId::new(7).expect("not 0");
    let all = PageRange::first(PAGES);
    let own = all.pages().filter(|page| !page.0.is_multiple_of(3));
    let table = PageTable::uniform(PAGES, Source::Zero)
        .derive(own.map(|page| (page.range(), Source::Image(id))))
        .expect("it fits");
    let numbers: Arc<dyn OwnPages> = Arc::new(Numbers);
    DiskImage::from_table(id, SIZE, table, BTreeMap::from([(id, numbers)])).expect("an image")
}

fn model() -> Vec<u8> {
    let byte = |page: u64| match page.is_multiple_of(3) {
        true => 0,
        false => u8::try_from(page).expect("small"),
    };
    (0..SIZE).map(|at| byte(at / 4096)).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Write(Span, u8),
    Zero(Span),
    Trim(Span),
    Freeze,
}

fn span() -> impl Strategy<Value = Span> {
    let sectors = SIZE / 512;
    (0..sectors, 1_u64..160).prop_map(move |(at, len)| {
        let len_bytes = u32::try_from(len.min(sectors - at) * 512).expect("small");
        Span { offset_bytes: at * 512, len_bytes }
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (span(), 1_u8..255).prop_map(|(span, byte)| Step::Write(span, byte)),
        1 => span().prop_map(Step::Zero),
        1 => span().prop_map(Step::Trim),
        1 => Just(Step::Freeze),
    ];
    proptest::collection::vec(step, 0..30)
}

fn at(span: Span) -> std::ops::Range<usize> {
    let small = |bytes| usize::try_from(bytes).expect("small");
    small(span.offset_bytes)..small(span.end())
}

fn store() -> (tempfile::TempDir, DiskStore) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = DiskStore::open(folder.path(), StoreOptions { floor_bytes: 0 }).expect("a store");
    (folder, store)
}

fn create(store: &DiskStore, on: &DiskImage) -> Disk {
    let (name, vm) = ("data".to_owned(), "a".to_owned());
    let spec = DiskSpec { name, vm, size_bytes: on.size_bytes(), set: DiskSet::new(None) };
    store.create(&spec, on).expect("a disk")
}

/// All of it, also by what its extents say.
fn content(disk: &Disk) -> Vec<u8> {
    let all = Span { offset_bytes: 0, len_bytes: u32::try_from(SIZE).expect("small") };
    let mut bytes = vec![0xaa; at(all).len()];
    disk.read(all, &mut bytes).expect("read");
    let mut from = 0;
    for Extent { len_bytes, zero } in disk.extents(all) {
        let to = from + usize::try_from(len_bytes).expect("small");
        assert!(!zero || bytes[from..to].iter().all(|byte| *byte == 0), "{from}..{to}");
        let len_bytes = u32::try_from(len_bytes).expect("small");
        let part = Span { offset_bytes: from as u64, len_bytes };
        if let Some(sent) = (!zero).then(|| from_files(disk, part)).flatten() {
            assert_eq!(sent, bytes[from..to]);
        }
        from = to;
    }
    assert_eq!(from, bytes.len());
    bytes
}

/// What is sent of a span by its files.
fn from_files(disk: &Disk, span: Span) -> Option<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let mut all = Vec::new();
    for FilePart { file, offset_bytes, len_bytes } in disk.files(span)? {
        let mut bytes = vec![0; len_bytes];
        file.read_exact_at(&mut bytes, offset_bytes).expect("read");
        all.extend(bytes);
    }
    Some(all)
}

#[test]
fn large_reads_of_the_stores_own_layers_are_sent_from_their_files() {
    let (_folder, store) = store();
    let pages = |from: u64, count: u64| {
        let len_bytes = u32::try_from(count * 4096).expect("small");
        Span { offset_bytes: from * 4096, len_bytes }
    };
    let disk = create(&store, &DiskImage::blank(SIZE).expect("an image"));
    disk.write(pages(0, 32), &[1; 32 * 4096]).expect("written");
    drop(disk.freeze().expect("frozen"));
    disk.write(pages(16, 8), &[2; 8 * 4096]).expect("written");
    let mut model = [1; 32 * 4096];
    model[16 * 4096..24 * 4096].fill(2);
    let parts = |disk: &Disk, span| disk.files(span).map(|parts| parts.len());
    assert_eq!(parts(&disk, pages(0, 32)), Some(3));
    assert_eq!(from_files(&disk, pages(0, 32)).expect("files"), model);
    let within = Span { offset_bytes: 512, len_bytes: 32 * 4096 - 1024 };
    assert_eq!(from_files(&disk, within).expect("files"), model[512..32 * 4096 - 512]);
    assert_eq!(parts(&disk, pages(0, 7)), None, "too short");
    assert_eq!(parts(&disk, pages(12, 12)), None, "too short on average");
    assert_eq!(parts(&disk, pages(24, 16)), None, "zeros are in no file");
    let other = create(&store, &image());
    assert_eq!(parts(&other, pages(4, 8)), None, "files of others may be cut");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Against an array of bytes, over freezes; what was frozen stays what it was.
    #[test]
    fn it_has_what_was_written_last_or_what_lies_under(steps in steps(), some in span()) {
        let (_folder, store) = store();
        let disk = create(&store, &image());
        let mut model = model();
        let mut frozen: Vec<(DiskImage, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Write(span, byte) => {
                    disk.write(span, &vec![byte; at(span).len()]).expect("written");
                    model[at(span)].fill(byte);
                }
                Step::Zero(span) => {
                    disk.zero(span).expect("zeroed");
                    model[at(span)].fill(0);
                }
                Step::Trim(span) => {
                    disk.trim(span).expect("trimmed");
                    let whole = at(span).start.next_multiple_of(4096)..at(span).end / 4096 * 4096;
                    if whole.start < whole.end {
                        model[whole].fill(0);
                    }
                }
                Step::Freeze => frozen.push((disk.freeze().expect("frozen"), model.clone())),
            }
        }
        prop_assert_eq!(content(&disk), &model[..]);
        let mut part = vec![0; at(some).len()];
        disk.read(some, &mut part).expect("read");
        prop_assert_eq!(&part[..], &model[at(some)]);
        for (image, model) in frozen {
            prop_assert_eq!(content(&create(&store, &image)), &model[..]);
        }
    }
}

#[test]
fn whole_pages_are_written_without_a_read_and_a_part_waits_for_what_is_not_here() {
    let (_folder, store) = store();
    let disk = create(&store, &image());
    let far = Span { offset_bytes: 30 * 4096, len_bytes: 2 * 4096 };
    assert!(!disk.is_here(far));
    assert!(disk.is_here_for_write(far));
    let part = Span { offset_bytes: 30 * 4096 + 512, len_bytes: 4096 };
    assert!(!disk.is_here_for_write(part));
    disk.write(far, &[7; 2 * 4096]).expect("written");
    assert!(disk.is_here(far) && disk.is_here_for_write(part));
    assert_eq!(disk.counts().partial_writes, 0);
    disk.write(part, &[8; 4096]).expect("written");
    assert_eq!(disk.counts().partial_writes, 1);
}

#[test]
fn a_freeze_uses_the_layer_made_before_and_one_that_finds_none_makes_it() {
    let (folder, store) = store();
    let disk = create(&store, &image());
    store.drain();
    let files = || std::fs::read_dir(folder.path().join("layers")).expect("a folder").count();
    assert_eq!(files(), 2, "its own and the next");
    disk.freeze().expect("frozen");
    store.drain();
    assert_eq!(disk.counts().late_layers, 0);
    // Nothing is made in advance any more, nor later.
    lock(&disk.spare).layer = None;
    let frozen = disk.freeze().expect("frozen");
    assert_eq!((disk.counts().late_layers, disk.counts().freezes), (1, 2));
    assert_eq!(frozen.size_bytes(), SIZE);
}

#[test]
fn a_disk_grows_with_zeros_and_its_images_keep_their_size() {
    let (_folder, store) = store();
    let disk = create(&store, &image());
    let last = Span { offset_bytes: SIZE - 512, len_bytes: 512 };
    disk.write(last, &[9; 512]).expect("written");
    let small = disk.freeze().expect("frozen");
    assert!(disk.grow(SIZE - 512).is_err());
    let large = 3000 * 4096 + 512;
    disk.grow(large).expect("grown");
    assert_eq!((disk.size_bytes(), small.size_bytes()), (large, SIZE));
    let mut bytes = [1; 1024];
    let read = |disk: &Disk, offset_bytes, bytes: &mut [u8]| {
        let len_bytes = u32::try_from(bytes.len()).expect("small");
        disk.read(Span { offset_bytes, len_bytes }, bytes).expect("read");
    };
    read(&disk, SIZE - 512, &mut bytes);
    assert_eq!((bytes[511], bytes[512], bytes[1023]), (9, 0, 0));
    let end = Span { offset_bytes: large - 1024, len_bytes: 1024 };
    disk.write(end, &[5; 1024]).expect("written");
    let image = disk.freeze().expect("frozen");
    let clone = create(&store, &image);
    for _ in ["not flat", "flat"] {
        read(&clone, large - 1024, &mut bytes);
        assert_eq!(bytes, [5; 1024]);
        read(&clone, SIZE - 512, &mut bytes);
        assert_eq!((bytes[511], bytes[512], bytes[1023]), (9, 0, 0));
        image.flatten();
    }
    assert_eq!(image.table().map(PageTable::pages), Some(3001));
}

#[test]
fn a_flush_after_a_freeze_makes_durable_what_was_written_before_it() {
    let (_folder, store) = store();
    let disk = create(&store, &image());
    disk.write(Span { offset_bytes: 0, len_bytes: 4096 }, &[1; 4096]).expect("written");
    let images = [disk.freeze().expect("frozen"), disk.freeze().expect("frozen")];
    let durable = |image: &DiskImage| image.own().is_some_and(|layer| layer.is_durable());
    assert!(!images.iter().any(durable), "nothing waits for the medium unasked");
    disk.sync().expect("synced");
    assert!(images.iter().all(durable) && disk.now().layer.is_durable());
    assert!(disk.unsynced().is_empty());
}

#[test]
fn fifty_freezes_deep_a_read_is_one_lookup() {
    let (_folder, store) = store();
    let disk = create(&store, &DiskImage::blank(64 * 4096).expect("an image"));
    let span = |page: u64| Span { offset_bytes: page * 4096, len_bytes: 4096 };
    for page in 0..50 {
        let byte = u8::try_from(page + 1).expect("small");
        disk.write(span(page), &[byte; 4096]).expect("written");
        disk.freeze().expect("frozen");
    }
    store.drain();
    assert_eq!(store.counts().tables_stored, 50);
    let image = disk.image();
    // All 50 layers have pages that the one table shows, some of them in a layer of several.
    let owners = image.owners().count();
    assert_eq!(image.table().expect("flat").owners().len(), owners);
    assert!((2..=LAYERS_MAX + 1).contains(&owners), "{owners} layers");
    let mut bytes = [0; 4096];
    for page in 0..50 {
        disk.read(span(page), &mut bytes).expect("read");
        assert_eq!(bytes, [u8::try_from(page + 1).expect("small"); 4096]);
    }
    // Written again as a whole: the old layers are not needed any more.
    disk.write(Span { offset_bytes: 0, len_bytes: 64 * 4096 }, &[9; 64 * 4096]).expect("written");
    drop((image, disk.freeze().expect("frozen")));
    store.drain();
    assert_eq!(store.list().expect("a list").layers.len(), 3, "the last, its own, the next");
}

#[test]
fn a_trim_of_what_is_zeros_costs_nothing() {
    let (_folder, store) = store();
    // 1 TiB.
    let disk = create(&store, &DiskImage::blank(1 << 40).expect("an image"));
    let span = Span { offset_bytes: 0, len_bytes: 1 << 30 };
    let zeros = |disk: &Disk| disk.now().layer.map().count(PageState::Zero);
    disk.trim(span).expect("trimmed");
    disk.zero(span).expect("zeroed");
    assert_eq!(zeros(&disk), 0);
    disk.write(Span { offset_bytes: 4096, len_bytes: 4096 }, &[1; 4096]).expect("written");
    disk.trim(span).expect("trimmed");
    assert!((1..1 << 18).contains(&zeros(&disk)), "{} pages", zeros(&disk));
    let mut bytes = [9; 4096];
    disk.read(Span { offset_bytes: 4096, len_bytes: 4096 }, &mut bytes).expect("read");
    assert_eq!(bytes, [0; 4096]);
}

#[test]
fn a_sync_ends_after_the_layers_that_another_one_took_are_synced() {
    use std::time::Duration;
    let (_folder, store) = store();
    let disk = create(&store, &image());
    let image = disk.freeze().expect("frozen");
    let durable = || image.own().is_some_and(|layer| layer.is_durable());
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        // Another sync has taken the frozen layer, and is not done with it.
        let syncing = disk.syncing.lock().expect("free");
        let taken = std::mem::take(&mut *disk.unsynced());
        let (disk, durable) = (&disk, &durable);
        scope.spawn(move || {
            disk.sync().expect("synced");
            ended.send(durable()).expect("heard");
        });
        end.recv_timeout(Duration::from_millis(200)).expect_err("it waits for the other one");
        taken.iter().filter_map(Weak::upgrade).for_each(|layer| layer.sync().expect("synced"));
        drop(syncing);
        assert!(end.recv_timeout(Duration::from_secs(10)).expect("it ends"), "durable");
    });
}

/// Each read of it begins with a word to the test, and waits for one from there.
#[derive(Debug)]
struct Slow {
    begun: Mutex<std::sync::mpsc::Sender<()>>,
    go_on: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl OwnPages for Slow {
    fn is_here(&self, _: PageRange) -> bool {
        false
    }

    fn read(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.begun.lock().expect("free").send(()).expect("heard");
        let go_on = self.go_on.lock().expect("free");
        go_on.recv_timeout(std::time::Duration::from_secs(20)).map_err(io::Error::other)?;
        bytes.fill(7);
        Ok(())
    }
}

#[test]
fn a_freeze_does_not_wait_for_a_write_that_reads_from_below() {
    use std::time::Duration;
    let (_folder, store) = store();
    let ((begun, begins), (go_on, gate)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let slow: Arc<dyn OwnPages> =
        Arc::new(Slow { begun: Mutex::new(begun), go_on: Mutex::new(gate) });
    let id = ImageId::new(7).expect("not 0");
    let table = PageTable::uniform(2, Source::Image(id));
    let image = DiskImage::from_table(id, 8192, table, BTreeMap::from([(id, slow)]));
    let disk = create(&store, &image.expect("an image"));
    let part = Span { offset_bytes: 512, len_bytes: 512 };
    let soon = Duration::from_secs(10);
    let image = std::thread::scope(|scope| {
        let (disk, zeros) = (&disk, [0; 512]);
        let write = scope.spawn(move || disk.write(part, &[9; 512]));
        begins.recv_timeout(soon).expect("it reads from below");
        let (frozen, freezes) = std::sync::mpsc::channel();
        scope.spawn(move || frozen.send(disk.freeze().expect("frozen")));
        let image = freezes.recv_timeout(Duration::from_secs(2));
        go_on.send(()).expect("heard");
        // Its layer is another one now, so what lies below is read again.
        let again = begins.recv_timeout(soon);
        go_on.send(()).expect("heard");
        write.join().expect("no panic").expect("written");
        again.expect("it reads what lies below the new layer");
        // The page is in the layer now: nothing is read.
        disk.write(Span { offset_bytes: 1024, len_bytes: 512 }, &zeros).expect("written");
        image.expect("the freeze returned while the write waited")
    });
    assert_eq!(disk.layer_bytes(), 4096, "it is in the new layer");
    assert_eq!(image.own().map(|own| own.map().count(PageState::Written)), Some(0));
    let mut bytes = [0; 4096];
    disk.read(Span { offset_bytes: 0, len_bytes: 4096 }, &mut bytes).expect("read");
    assert_eq!([bytes[0], bytes[512], bytes[1024], bytes[1536]], [7, 9, 0, 7]);
    go_on.send(()).expect("heard");
    image.read(PageIdx(0).range(), &mut bytes).expect("read");
    assert_eq!(bytes, [7; 4096], "the image has the old bytes");
}

#[test]
fn a_write_keeps_what_another_has_written_of_its_page_before_the_freeze() {
    let (_folder, store) = store();
    let disk = create(&store, &image());
    let page = |offset_bytes: u64| Span { offset_bytes: 4096 + offset_bytes, len_bytes: 512 };
    let (old, parts) = (disk.now().clone(), [PageIdx(1)]);
    let below = Below::read(&old, &parts).expect("read");
    assert!(!below.lacks(&disk.now(), PageIdx(1)));
    disk.write(page(0), &[5; 512]).expect("written");
    disk.freeze().expect("frozen");
    assert!(below.lacks(&disk.now(), PageIdx(1)), "what it read is out of date");
    disk.write(page(512), &[6; 512]).expect("written");
    let mut bytes = [0; 1536];
    disk.read(Span { offset_bytes: 4096, len_bytes: 1536 }, &mut bytes).expect("read");
    assert_eq!([bytes[0], bytes[512], bytes[1024]], [5, 6, 1]);
}

/// Pages that can't be had.
#[derive(Debug)]
struct Broken;

impl OwnPages for Broken {
    fn is_here(&self, _: PageRange) -> bool {
        false
    }

    fn read(&self, range: PageRange, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other(format!("pages {range} are damaged")))
    }
}

#[test]
fn a_request_that_failed_says_why_and_at_which_page_for_a_while() {
    use crate::export::{DiskExport, Durability};
    use vmfork_nbd::Target;
    let (_folder, store) = store();
    let id = ImageId::new(77).expect("not 0");
    let table = PageTable::uniform(64, Source::Image(id));
    let owners = [(id, Arc::new(Broken) as Arc<dyn OwnPages>)].into();
    let image = DiskImage::from_table(id, 64 * 4096, table, owners).expect("an image");
    let disk = Arc::new(create(&store, &image));
    let export = DiskExport::new(Arc::clone(&disk), Durability::Host);
    assert_eq!(disk.problem(Duration::MAX), None);
    let span = Span { offset_bytes: 5 * 4096, len_bytes: 4096 };
    export.read(span, &mut [0; 4096]).expect_err("damaged");
    let problem = disk.problem(Duration::MAX).expect("it failed");
    assert_eq!(problem, "a request at page 5: pages 5+1 are damaged");
    assert_eq!(disk.problem(Duration::ZERO), None, "too long ago");
}

#[test]
fn a_table_is_there_soon_after_a_freeze_and_is_the_images() {
    let (_folder, store) = store();
    let disk = create(&store, &image());
    let span = Span { offset_bytes: 3 * 4096, len_bytes: 4096 };
    disk.write(span, &[7; 4096]).expect("written");
    let frozen = disk.freeze().expect("frozen");
    let table = frozen.table_soon().expect("every page has an owner");
    assert_eq!(table.lookup(PageIdx(3)), Source::Image(frozen.id()));
}
