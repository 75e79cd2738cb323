use std::sync::atomic::{AtomicBool, AtomicU8};

use vmfork_api::Durability;
use vmfork_disk::Lower;
use vmfork_engine::{Engine, EngineOptions};
use vmfork_host::vm::WorkingSet;
use vmfork_image::Origin;

use super::*;
use crate::images::{Images, Lender, NotRead};

const PAGES: u64 = 64;
const SIZE: u64 = PAGES * PAGE_BYTES;

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn id(number: u64) -> ImageId {
    ImageId::new(number).expect("not 0")
}

/// Each of its pages is full of this.
#[derive(Debug)]
struct Layer(AtomicU8, PageRange);

impl OwnPages for Layer {
    fn is_here(&self, _: PageRange) -> bool {
        true
    }

    fn owned(&self, range: PageRange, found: &mut dyn FnMut(PageRange)) {
        Some(range.intersect(&self.1)).filter(|own| !own.is_empty()).map(found);
    }

    fn read(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        match self.0.load(Ordering::Relaxed) {
            0 => Err(io::Error::other("the medium fails")),
            byte => {
                bytes.fill(byte);
                Ok(())
            }
        }
    }
}

/// Another host's pages, without a network. Counts what is asked for.
#[derive(Debug)]
struct Asked(Arc<Images>, ImageName, Arc<AtomicU64>);

impl PageSource for Asked {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.2.fetch_add(range.len(), Ordering::Relaxed);
        let read = self.0.read(self.1, range, bytes);
        read.map_err(|why| io::Error::other(format!("{why:?}")))
    }
}

/// A host with disks and other hosts' pages.
struct Host {
    images: Arc<Images>,
    disks: Arc<HostDisks>,
    asked: Arc<AtomicU64>,
    /// What other hosts ask for of the memory of its VMs.
    working_set: Arc<WorkingSet>,
    _folder: tempfile::TempDir,
}

impl Host {
    fn new(number: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let sockets = folder.path().join("sockets");
        std::fs::create_dir(&sockets).expect("made");
        let disks = HostDisks::open(&folder.path().join("disks"), sockets).expect("room");
        let images = Arc::new(Images::new(number, 1));
        Self {
            images,
            disks: Arc::new(disks),
            asked: Arc::default(),
            working_set: Arc::default(),
            _folder: folder,
        }
    }

    /// Lends a disk beside the memory of a VM.
    fn lend(&self, content: &DiskContent) -> Vec<DiskEntry> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let next = id(NEXT.fetch_add(1, Ordering::Relaxed));
        let memory = HostImage::stored(next, 512, [], None, Arc::new(Nothing)).expect("room");
        let engine = Engine::serve(memory, &EngineOptions::default(), Arc::new(|_| ()));
        let engine = Arc::new(engine.expect("an engine"));
        let of = Lender::new(None, Arc::clone(&self.working_set));
        let contents = std::slice::from_ref(content);
        let (_, entries, sending) =
            self.images.lend(Instant::now(), &engine, contents, of).expect("complete");
        std::mem::forget(sending); // it is lent for as long as the test runs
        entries
    }

    fn open(&self, from: &Self, entries: &[DiskEntry]) -> (DiskContent, Needs) {
        let opened = self.try_open(from, entries, vec![spec(SIZE)]);
        let (mut contents, needs, _keeper) = opened.expect("opened");
        (contents.remove(0), needs)
    }

    fn try_open(
        &self,
        from: &Self,
        entries: &[DiskEntry],
        specs: Vec<DiskSpec>,
    ) -> Result<(Vec<DiskContent>, Needs, Keeper), ArrivalError> {
        let source = |name, _| {
            let asked = Asked(Arc::clone(&from.images), name, Arc::clone(&self.asked));
            Arc::new(asked) as Arc<dyn PageSource>
        };
        let own = |name| self.images.lent_owner(name);
        open(self.images.disks(), &self.disks, (specs, entries), own, source)
    }

    fn asked(&self) -> u64 {
        self.asked.swap(0, Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Nothing;

impl PageSource for Nothing {
    fn origin(&self) -> Origin {
        Origin::Chunk
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, _: PageRange, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
}

fn spec(size_bytes: u64) -> DiskSpec {
    let (name, durability) = ("data".to_owned(), Durability::Host);
    let (volume, empty, read_only) = (None, false, false);
    DiskSpec { name, size_bytes, durability, volume, empty, read_only }
}

/// A disk whose pages have these owners. All bytes of an owner are its number.
fn disk(number: u64, owners: &[(u8, PageRange)]) -> DiskContent {
    let table = PageTable::uniform(PAGES, Source::Zero);
    let runs = owners.iter().map(|(owner, run)| (*run, Source::Image(id(u64::from(*owner) << 40))));
    let table = table.derive(runs).expect("within");
    let layer = |owner: u8, own| Arc::new(Layer(AtomicU8::new(owner), own)) as Arc<dyn OwnPages>;
    let owners =
        owners.iter().map(|(owner, own)| (id(u64::from(*owner) << 40), layer(*owner, *own)));
    let image = DiskImage::from_table(id(number), SIZE, table, owners.collect()).expect("fits");
    DiskContent::from_elsewhere(spec(SIZE), image)
}

fn bytes(content: &DiskContent, range: PageRange) -> Vec<u8> {
    let mut bytes = vec![9; usize::try_from(range.byte_len()).expect("small")];
    content.image.read(range, &mut bytes).expect("there");
    assert!(bytes.chunks(4096).all(|page| page.iter().all(|byte| *byte == page[0])));
    bytes.chunks(4096).map(|page| page[0]).collect()
}

fn all() -> PageRange {
    PageRange::first(PAGES)
}

#[test]
fn a_page_comes_once_when_it_is_read_and_later_disks_share_it() {
    let (a, b) = (Host::new(1), Host::new(2));
    let first = disk(100, &[(3, range(0, 40)), (5, range(20, 4))]);
    let (there, needs) = b.open(&a, &a.lend(&first));
    assert!(b.asked() == 0 && !needs.are_here());
    assert!(!there.image.is_here(range(0, 1)) && there.image.is_here(range(40, 24)));
    // With its window, as far as that is the owner's.
    assert_eq!(bytes(&there, range(18, 1)), [3]);
    assert_eq!(b.asked(), 4, "16 to 20");
    assert_eq!(bytes(&there, range(22, 1)), [5]);
    assert_eq!(b.asked(), 4);
    assert_eq!(bytes(&there, all()), bytes(&first, all()));
    assert_eq!(b.asked(), 32);
    assert!(needs.are_here() && b.images.disks().came_pages() == 40);
    assert_eq!(bytes(&there, all()), bytes(&first, all()));
    assert_eq!(b.asked(), 0);
    // Of the next fork only what is new comes.
    let second = disk(101, &[(3, range(0, 40)), (5, range(20, 4)), (7, range(38, 10))]);
    let (there, needs) = b.open(&a, &a.lend(&second));
    assert_eq!(bytes(&there, all()), bytes(&second, all()));
    assert!(b.asked() == 10 && needs.are_here());
}

#[test]
fn a_host_lends_on_what_it_has_and_a_disk_that_comes_home_is_read_there() {
    let (a, b, c) = (Host::new(1), Host::new(2), Host::new(3));
    let first = disk(100, &[(3, range(0, 32))]);
    let (there, _needs) = b.open(&a, &a.lend(&first));
    bytes(&there, range(0, 16));
    let onward = b.lend(&there);
    assert_eq!(onward[0].table, a.lend(&first)[0].table, "the same names");
    let name = ImageName { host: 1, image: 3 << 40 };
    let mut page = vec![0; 4096];
    b.images.read(name, range(3, 1), &mut page).expect("it has come there");
    assert!(b.images.has(name, range(0, 16)) && !b.images.has(name, range(0, 17)));
    let absent = b.images.read(name, range(20, 1), &mut page).expect_err("it has not");
    assert!(matches!(absent, NotRead::Absent), "{absent:?}");
    let (third, _needs) = c.open(&a, &onward);
    assert_eq!(bytes(&third, all()), bytes(&first, all()));
    b.asked();
    let (home, needs) = a.open(&b, &onward);
    assert_eq!(bytes(&home, all()), bytes(&first, all()));
    assert!(a.asked() == 0 && b.asked() == 0 && needs.are_here());
    assert!(b.images.held().contains(&name) && !a.images.held().contains(&name));
}

#[test]
fn pages_that_are_not_an_owners_are_not_given() {
    let a = Host::new(1);
    a.lend(&disk(100, &[(3, range(0, 32)), (5, range(32, 4))]));
    let name = |owner: u64| ImageName { host: 1, image: owner << 40 };
    let mut bytes = vec![0; 8 * 4096];
    a.images.read(name(3), range(0, 8), &mut bytes).expect("its own");
    for (owner, run) in [(3, range(28, 8)), (5, range(28, 8)), (5, range(40, 8)), (6, range(0, 8))]
    {
        let refused = a.images.read(name(owner), run, &mut bytes).expect_err("not its own");
        assert!(matches!(refused, NotRead::Unknown), "{refused:?}");
    }
    assert_eq!(
        a.images.asked(name(3), range(0, 8), true).map(|it| (it.pages, it.is_own)),
        Some((PAGES, true))
    );
    assert!(a.images.asked(name(6), range(0, 8), true).is_none());
    assert!(a.working_set.runs().is_empty(), "those are no pages of memory");
}

#[test]
fn a_read_that_fails_is_tried_again() {
    let (a, b) = (Host::new(1), Host::new(2));
    let table = PageTable::uniform(PAGES, Source::Image(id(3 << 40)));
    let layer = Arc::new(Layer(AtomicU8::new(0), all()));
    let own: Arc<dyn OwnPages> = Arc::<Layer>::clone(&layer);
    let image = DiskImage::from_table(id(100), SIZE, table, [(id(3 << 40), own)].into());
    let content = DiskContent::from_elsewhere(spec(SIZE), image.expect("fits"));
    let (there, needs) = b.open(&a, &a.lend(&content));
    let mut page = vec![0; 4096];
    let failed = there.image.read(range(0, 1), &mut page).expect_err("it fails there");
    assert!(failed.to_string().contains("the medium fails"), "{failed}");
    layer.0.store(8, Ordering::Relaxed);
    assert_eq!(bytes(&there, range(0, 1)), [8]);
    // All of it comes by itself, and then the thread ends.
    let all = Arc::new(All { needs, is_over: AtomicBool::new(false) });
    hydrate(&all).expect("a thread");
    let until = Instant::now() + Duration::from_secs(20);
    while !all.is_over.load(Ordering::Relaxed) {
        assert!(Instant::now() < until, "it goes on");
        std::thread::park_timeout(Duration::from_millis(2));
    }
    assert!(all.needs.are_here());
}

struct All {
    needs: Needs,
    is_over: AtomicBool,
}

impl Hydrated for All {
    fn missing(&self) -> Vec<(Arc<ArrivedPages>, PageRange)> {
        self.needs.missing()
    }

    fn rate(&self) -> Option<NonZeroU64> {
        Some(NonZeroU64::MAX)
    }

    fn over(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Two VMs share a layer, and each has overwritten another page of it.
#[test]
fn siblings_have_what_each_of_them_overwrote() {
    let (a, b) = (Host::new(1), Host::new(2));
    let one = disk(100, &[(3, range(0, 32)), (5, range(7, 1))]);
    let two = disk(101, &[(3, range(0, 32)), (7, range(3, 1))]);
    let (one_there, _needs) = b.open(&a, &a.lend(&one));
    let (two_there, _needs) = b.open(&a, &a.lend(&two));
    // The window has pages that neither names by itself.
    assert_eq!(bytes(&one_there, range(1, 1)), [3]);
    assert_eq!(b.asked(), 16);
    assert_eq!(bytes(&one_there, all()), bytes(&one, all()));
    assert_eq!(bytes(&two_there, all()), bytes(&two, all()));
}

/// A layer whose other pages were given back since no disk there names them.
#[derive(Debug)]
struct Shrunk;

impl OwnPages for Shrunk {
    fn is_here(&self, _: PageRange) -> bool {
        true
    }

    fn owned(&self, range: PageRange, found: &mut dyn FnMut(PageRange)) {
        let own = range.intersect(&PageRange::first(4));
        if !own.is_empty() {
            found(own);
        }
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        assert!(range.end().0 <= 4, "those have gone");
        bytes.fill(3);
        Ok(())
    }
}

#[test]
fn a_page_comes_without_its_neighbours_if_those_have_gone() {
    let (a, b) = (Host::new(1), Host::new(2));
    let (_first, _needs) = b.open(&a, &a.lend(&disk(100, &[(3, range(0, 32))])));
    // Later the other host lends what is left of that layer.
    let c = Host::new(1);
    let table = PageTable::uniform(PAGES, Source::Zero);
    let table = table.derive([(range(0, 4), Source::Image(id(3 << 40)))]).expect("within");
    let own: Arc<dyn OwnPages> = Arc::new(Shrunk);
    let image = DiskImage::from_table(id(101), SIZE, table, [(id(3 << 40), own)].into());
    let content = DiskContent::from_elsewhere(spec(SIZE), image.expect("fits"));
    let entries = c.lend(&content);
    let d = Host::new(2);
    let (_first, _needs) = d.open(&c, &a.lend(&disk(100, &[(3, range(0, 32))])));
    let (there, _needs) = d.open(&c, &entries);
    assert_eq!(bytes(&there, range(2, 1)), [3]);
    assert_eq!(d.asked(), 16 + 1);
}

#[test]
fn a_later_disk_may_name_pages_beyond_those_of_earlier_ones() {
    const SIZE: u64 = 2048 * PAGE_BYTES;
    let (a, b) = (Host::new(1), Host::new(2));
    let disk = |number, runs: &[PageRange]| {
        let changes = runs.iter().map(|run| (*run, Source::Image(id(3 << 40))));
        let table = PageTable::uniform(2048, Source::Zero).derive(changes).expect("within");
        let layer = Layer(AtomicU8::new(3), PageRange::first(2048));
        let own: Arc<dyn OwnPages> = Arc::new(layer);
        let image = DiskImage::from_table(id(number), SIZE, table, [(id(3 << 40), own)].into());
        DiskContent::from_elsewhere(spec(SIZE), image.expect("fits"))
    };
    let open = |content: &DiskContent| {
        let opened = b.try_open(&a, &a.lend(content), vec![spec(SIZE)]);
        opened.expect("opened").0.remove(0)
    };
    let first = open(&disk(100, &[range(0, 10)]));
    assert_eq!(bytes(&first, range(0, 1)), [3]);
    let second = open(&disk(101, &[range(0, 10), range(1500, 10)]));
    assert_eq!(bytes(&second, range(1505, 1)), [3]);
    assert_eq!(bytes(&second, range(5, 1)), [3]);
    assert_eq!(bytes(&first, range(9, 2)), [3, 0]);
}

#[test]
fn who_reads_from_a_disk_keeps_what_it_came_by() {
    let (a, b) = (Host::new(1), Host::new(2));
    let entries = a.lend(&disk(100, &[(3, range(0, 32))]));
    let (contents, needs, keeper) = b.try_open(&a, &entries, vec![spec(SIZE)]).expect("opened");
    let loan: Arc<dyn Debug + Send + Sync> = Arc::new(());
    let told = Arc::downgrade(&loan);
    keeper.set(loan).expect("once");
    drop((needs, keeper));
    assert!(told.strong_count() == 1 && b.images.held().len() == 1);
    drop(contents);
    assert!(told.strong_count() == 0 && b.images.held().is_empty());
}

#[test]
fn what_does_not_fit_is_refused() {
    let (a, b) = (Host::new(1), Host::new(2));
    let entries = a.lend(&disk(100, &[(3, range(0, 32))]));
    let refused = |entries: &[DiskEntry], specs| {
        b.try_open(&a, entries, specs).map(drop).expect_err("refused")
    };
    assert!(matches!(refused(&entries, Vec::new()), ArrivalError::Disks { specs: 0, entries: 1 }));
    assert!(matches!(refused(&entries, vec![spec(2 * SIZE)]), ArrivalError::DiskSize { .. }));
    let huge = DiskEntry { size_bytes: 1 << 50, ..entries[0].clone() };
    assert!(matches!(refused(&[huge], vec![spec(1 << 50)]), ArrivalError::DiskSize { .. }));
    let larger = DiskEntry { size_bytes: 2 * SIZE, ..entries[0].clone() };
    assert!(matches!(refused(&[larger], vec![spec(2 * SIZE)]), ArrivalError::Size { .. }));
    let cut = DiskEntry { table: entries[0].table[..9].to_vec(), ..entries[0].clone() };
    assert!(matches!(refused(&[cut], vec![spec(SIZE)]), ArrivalError::Table { .. }));
}
