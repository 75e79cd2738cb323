//! Images that are in a store: served from there, on top of one another, forked, and brought in
//! before anyone asks.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use vmfork_engine::{Engine, EngineEvent, EngineOptions, HostImage, StoredRun};
use vmfork_image::{
    AheadOrder, BLOCK_PAGES, ImageId, NextAhead, Origin, PageIdx, PageRange, PageSource, Source,
};
use vmfork_tap_proto::Role;

use crate::common::{
    Events, FakeVm, PAGE_BYTES, await_event, clone_of, freeze, needs_userfaultfd, watched_clone_of,
};

const SECONDS: Duration = Duration::from_secs(20);
const PAGES: u64 = 4 * BLOCK_PAGES;

/// What a read does besides reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    Well,
    /// Waits, 20 s at most, until this many reads are in flight at once.
    Together(usize),
    /// Reads that touch this page fail.
    FailsAt(u64),
    PanicsAt(u64),
    /// Reads of more than one page fail.
    FailsTogether,
    /// Each read takes so long.
    Takes(Duration),
}

/// A store in memory.
#[derive(Debug)]
struct Fake {
    content: Vec<u8>,
    mood: Mood,
    under_way: Mutex<usize>,
    changed: Condvar,
    pages_read: AtomicU64,
}

impl Fake {
    fn new(content: Vec<u8>, mood: Mood) -> Arc<Self> {
        let (under_way, changed) = (Mutex::new(0), Condvar::new());
        Arc::new(Self { content, mood, under_way, changed, pages_read: AtomicU64::new(0) })
    }

    /// Until a read of it is in flight.
    fn await_read(&self) {
        let under_way = self.under_way.lock().expect("not poisoned");
        let outcome = self.changed.wait_timeout_while(under_way, SECONDS, |count| *count == 0);
        assert!(!outcome.expect("not poisoned").1.timed_out(), "the fault leads to a read");
    }

    fn pages_read(&self) -> u64 {
        self.pages_read.load(Ordering::Relaxed)
    }
}

impl PageSource for Fake {
    fn origin(&self) -> Origin {
        Origin::Chunk
    }

    fn unit_pages(&self) -> u64 {
        32
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        match self.mood {
            Mood::Well => {}
            Mood::Together(count) => {
                let mut under_way = self.under_way.lock().expect("not poisoned");
                *under_way += 1;
                self.changed.notify_all();
                let outcome = self.changed.wait_timeout_while(under_way, SECONDS, |n| *n < count);
                assert!(!outcome.expect("not poisoned").1.timed_out(), "reads go one by one");
            }
            Mood::FailsAt(page) if range.contains(PageIdx(page)) => {
                return Err(io::Error::other("chunk 77 has been flipped"));
            }
            Mood::PanicsAt(page) => assert!(!range.contains(PageIdx(page)), "in this test"),
            Mood::FailsTogether if range.len() > 1 => return Err(io::Error::other("a bad day")),
            Mood::Takes(time) => std::thread::park_timeout(time),
            Mood::FailsAt(_) | Mood::FailsTogether => {}
        }
        self.pages_read.fetch_add(range.len(), Ordering::Relaxed);
        let from = usize::try_from(range.byte_offset()).expect("small");
        bytes.copy_from_slice(&self.content[from..from + bytes.len()]);
        Ok(())
    }
}

/// All bytes of an image, and the runs by which it differs from `base`.
fn copy_of(engine: &Engine, base: Option<&HostImage>) -> (Vec<u8>, Vec<StoredRun>) {
    assert!(engine.wait_sealed(SECONDS), "sealed");
    let image = engine.image();
    let all = PageRange::first(image.pages());
    let mut content = vec![0; usize::try_from(all.byte_len()).expect("small")];
    image.read(all, &mut content).expect("all there");
    let table = image.table().expect("sealed");
    let zeros = vmfork_image::PageTable::uniform(image.pages(), Source::Zero);
    let before = base.map_or(&zeros, |base| base.table().expect("sealed"));
    let differs = |page: &PageIdx| table.get(*page) != before.get(*page);
    let runs = all.pages().filter(differs).map(|page| match table.lookup(page) {
        Source::Zero => StoredRun::Zero(page.range()),
        Source::Image(_) => StoredRun::Own(page.range()),
    });
    (content, runs.collect())
}

fn next_id() -> ImageId {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 32);
    ImageId::new(NEXT.fetch_add(1, Ordering::Relaxed)).expect("not 0")
}

fn open(runs: &[StoredRun], base: Option<&Arc<HostImage>>, source: &Arc<Fake>) -> Arc<HostImage> {
    let source: Arc<dyn PageSource> = Arc::<Fake>::clone(source);
    let pages = base.map_or(PAGES, |base| base.pages());
    HostImage::stored(next_id(), pages, runs.iter().copied(), base, source).expect("opened")
}

fn serve(image: &Arc<HostImage>) -> (Arc<Engine>, Events) {
    let events = Events::default();
    let sink = Arc::clone(&events);
    let engine = Engine::serve(
        Arc::clone(image),
        &EngineOptions::default(),
        Arc::new(move |event| sink.lock().expect("not poisoned").push_back(event)),
    );
    (Arc::new(engine.expect("engine")), events)
}

/// A VM with something in half of its memory, and a store that has it.
fn stored(mood: Mood) -> (Vec<u64>, Arc<Fake>, Arc<HostImage>) {
    let mut parent = FakeVm::start(PAGES, Role::Boot);
    parent.ask("fill 100 1024 1");
    let engine = freeze(&mut parent, 16);
    let expected = parent.sums(0, PAGES);
    let (content, runs) = copy_of(&engine, None);
    let source = Fake::new(content, mood);
    let image = open(&runs, None, &source);
    (expected, source, image)
}

#[test]
fn vms_of_a_stored_image_read_what_was_stored_and_share_it() {
    needs_userfaultfd!();
    let (expected, source, image) = stored(Mood::Well);
    let (engine, _) = serve(&image);
    let (mut one, mut two) = (clone_of(&engine), clone_of(&engine));
    one.ask("poke 200 9");
    assert_eq!(two.sums(0, PAGES), expected);
    let after = one.sums(0, PAGES);
    assert_ne!(after[200], expected[200], "what a VM writes is its own");
    assert_eq!(after[..200], expected[..200]);
    assert_eq!(source.pages_read(), 1024, "each page once, and no zeros");
    let counters = image.counters();
    assert_eq!(counters.from_stored_bytes.get(), 1024 * PAGE_BYTES);
    assert_eq!(counters.from_frozen_bytes.get(), 0);
}

#[test]
fn what_is_slow_to_read_is_read_side_by_side() {
    needs_userfaultfd!();
    let (expected, _, image) = stored(Mood::Together(3));
    let (engine, _) = serve(&image);
    let mut vms: Vec<_> = (0..3).map(|_| clone_of(&engine)).collect();
    for (vm, page) in vms.iter_mut().zip([128, 256, 384]) {
        vm.send(&format!("sum {page} 1"));
    }
    for (vm, page) in vms.iter_mut().zip([128, 256, 384]) {
        assert_eq!(u64::from_str_radix(&vm.receive(), 16), Ok(expected[page]));
    }
}

#[test]
fn a_page_that_can_not_be_read_costs_the_vms_that_touch_it_and_no_others() {
    needs_userfaultfd!();
    for mood in [Mood::FailsAt(300), Mood::PanicsAt(300)] {
        let (expected, _, image) = stored(mood);
        let (engine, events) = serve(&image);
        let (mut lost, mut well) = (clone_of(&engine), clone_of(&engine));
        let id = lost.memory().attachment().view_id().expect("attached");
        lost.send("sum 300 1");
        let (view, reason) = await_event(&events, |event| match event {
            EngineEvent::ViewLost { view, reason, .. } => Some((*view, reason.clone())),
            _ => None,
        });
        assert_eq!(view, id);
        let words = if mood == Mood::FailsAt(300) { "has been flipped" } else { "in this test" };
        assert!(reason.contains("page 300 of image") && reason.contains(words), "{reason}");
        // Neighbours of the same unit can be had.
        assert_eq!(well.sums(299, 1), expected[299..300]);
        assert_eq!(well.sums(301, 400), expected[301..701]);
    }
}

/// Only a page that has failed makes the engine try again: no other fault, and no prefetch.
#[test]
fn what_fails_together_is_read_alone_at_once() {
    needs_userfaultfd!();
    let (expected, _, image) = stored(Mood::FailsTogether);
    let (engine, _) = serve(&image);
    engine.allow_prefetch(false);
    let mut vm = clone_of(&engine);
    assert_eq!(vm.sums(300, 2), expected[300..302]);
}

/// Asked once, at any rate: as fast as the store gives it.
#[test]
fn all_of_an_image_comes_when_it_is_told_to() {
    needs_userfaultfd!();
    let (expected, source, image) = stored(Mood::Takes(Duration::from_millis(20)));
    let (engine, _) = serve(&image);
    engine.hydrate(NonZeroU64::MAX);
    let deadline = Instant::now() + SECONDS;
    while image.missing_pages() > 0 {
        assert!(Instant::now() < deadline, "{} pages are missing", image.missing_pages());
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert_eq!(source.pages_read(), 1024, "each once");
    assert_eq!(clone_of(&engine).sums(0, PAGES), expected);
    assert_eq!(source.pages_read(), 1024);
}

/// A source that wants its pages read from the end on, and now and then not yet; or that does not
/// care.
#[derive(Debug, Default)]
struct Backwards {
    does_not_care: bool,
    read_ahead: Mutex<Vec<PageRange>>,
    asked: AtomicU64,
}

impl PageSource for Backwards {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn reads_ahead(&self) -> usize {
        1
    }

    fn read(&self, range: PageRange, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other(format!("{range}, and no view waits")))
    }

    fn read_ahead(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.read_ahead.lock().expect("not poisoned").push(range);
        bytes.fill(7);
        Ok(())
    }

    fn order(&self) -> Option<&dyn AheadOrder> {
        (!self.does_not_care).then_some(self as &dyn AheadOrder)
    }
}

impl AheadOrder for Backwards {
    fn place(&self, piece: PageRange) -> u64 {
        u64::MAX - piece.start().0
    }

    /// Each two change places.
    fn place_near(&self, at: u64, _: PageRange) -> u64 {
        at ^ 1
    }

    fn next(&self, pieces: &[PageRange]) -> NextAhead {
        match self.asked.fetch_add(1, Ordering::Relaxed) % 3 {
            0 => NextAhead::Later(Duration::from_millis(1)),
            _ if pieces.len() > 1 => NextAhead::Piece(1),
            _ => NextAhead::Piece(0),
        }
    }
}

impl Backwards {
    /// The pieces of an image, by their first pages, in the order in which they are read once the
    /// engine has been told to.
    fn read_all(self, tell: impl FnOnce(&Engine)) -> Vec<u64> {
        let source = Arc::new(self);
        let own = [StoredRun::Own(PageRange::first(PAGES))];
        let image = HostImage::stored(next_id(), PAGES, own, None, Arc::<Self>::clone(&source));
        let (engine, _) = serve(&image.expect("opened"));
        tell(&engine);
        let deadline = Instant::now() + SECONDS;
        while engine.image().missing_pages() > 0 {
            assert!(Instant::now() < deadline, "{} are missing", engine.image().missing_pages());
            std::thread::park_timeout(Duration::from_millis(1));
        }
        let read = source.read_ahead.lock().expect("not poisoned");
        read.iter().map(|range| range.start().0).collect()
    }
}

#[test]
fn a_working_set_comes_in_its_order_or_near_it_where_its_source_wants_that() {
    needs_userfaultfd!();
    let list: Vec<_> = (0..4).rev().map(block).collect();
    let in_order: Vec<u64> =
        list.iter().flat_map(|run| (0..32).map(|at| run.start().0 + at * 16)).collect();
    for does_not_care in [true, false] {
        let source = Backwards { does_not_care, ..Backwards::default() };
        let read = source.read_all(|engine| engine.fetch_first(list.clone()));
        let near = in_order.chunks(2).flat_map(|two| two.iter().rev());
        match does_not_care {
            true => assert_eq!(read, in_order),
            false => assert!(near.eq(&read), "{read:?}"),
        }
    }
}

#[test]
fn all_of_an_image_comes_in_the_order_that_its_source_wants_and_gives_way() {
    needs_userfaultfd!();
    let starts = Backwards::default().read_all(|engine| engine.hydrate(NonZeroU64::MAX));
    // Always the second; the one before it took its place.
    let mut expected: Vec<_> = (0..PAGES / 16 - 1).rev().map(|at| at * 16).collect();
    expected.push(PAGES - 16);
    assert_eq!(starts, expected);
}

/// A host that hangs with prefetches, until it may continue.
#[derive(Debug, Default)]
struct Hangs {
    ahead: Mutex<usize>,
    goes_on: Mutex<bool>,
    changed: Condvar,
    pages_read: AtomicU64,
    /// This many prefetches are taken at once.
    together: usize,
}

impl Hangs {
    fn go_on(&self) {
        *self.goes_on.lock().expect("not poisoned") = true;
        self.changed.notify_all();
    }
}

impl PageSource for Hangs {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn reads_ahead(&self) -> usize {
        8
    }

    fn together(&self) -> usize {
        self.together
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.pages_read.fetch_add(range.len(), Ordering::Relaxed);
        bytes.fill(7);
        Ok(())
    }

    fn read_ahead(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        *self.ahead.lock().expect("not poisoned") += 1;
        let goes_on = self.goes_on.lock().expect("not poisoned");
        let waited = self.changed.wait_timeout_while(goes_on, SECONDS, |goes_on| !*goes_on);
        assert!(!waited.expect("not poisoned").1.timed_out(), "it is not released in time");
        bytes.fill(7);
        Ok(())
    }
}

#[test]
fn who_waits_for_what_hangs_on_its_way_asks_for_it_again() {
    needs_userfaultfd!();
    let source = Arc::new(Hangs::default());
    let own = [StoredRun::Own(PageRange::first(PAGES))];
    let image = HostImage::stored(next_id(), PAGES, own, None, Arc::<Hangs>::clone(&source));
    let (engine, _) = serve(&image.expect("opened"));
    engine.hydrate(NonZeroU64::MAX);
    let deadline = Instant::now() + SECONDS;
    while *source.ahead.lock().expect("not poisoned") < 8 {
        assert!(Instant::now() < deadline, "nothing is brought ahead");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let mut vm = clone_of(&engine);
    let began = Instant::now();
    let first = vm.sums(5, 1);
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(source.pages_read.load(Ordering::Relaxed), 16, "its neighbours came, too");
    source.go_on();
    while engine.image().missing_pages() > 0 {
        assert!(Instant::now() < deadline, "{} are missing", engine.image().missing_pages());
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let whole = vm.sums(0, PAGES);
    assert!(whole.iter().all(|sum| *sum == first[0]));
    assert_eq!(source.pages_read.load(Ordering::Relaxed), 16, "nothing else was asked for again");
}

#[test]
fn a_demand_read_overtakes_background_reads_that_have_not_begun() {
    needs_userfaultfd!();
    let source = Arc::new(Hangs { together: 2, ..Hangs::default() });
    let own = [StoredRun::Own(PageRange::first(PAGES))];
    let image = HostImage::stored(next_id(), PAGES, own, None, Arc::<Hangs>::clone(&source));
    let (engine, _) = serve(&image.expect("opened"));
    engine.hydrate(NonZeroU64::MAX);
    let deadline = Instant::now() + SECONDS;
    // Two threads hang; eight pieces are in flight.
    while *source.ahead.lock().expect("not poisoned") < 2 {
        assert!(Instant::now() < deadline, "nothing is brought ahead");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let mut vm = clone_of(&engine);
    vm.sums(7 * 16, 1);
    source.go_on();
    while engine.image().missing_pages() > 0 {
        assert!(Instant::now() < deadline, "{} are missing", engine.image().missing_pages());
        std::thread::park_timeout(Duration::from_millis(1));
    }
    vm.sums(0, PAGES);
    let counters = engine.image().counters();
    let brought = (counters.demand_bytes.get(), counters.prefetched_bytes.get());
    assert_eq!(brought, (16 * 4096, (PAGES - 16) * 4096), "once");
}

#[test]
fn what_two_engines_prefetch_comes_once() {
    needs_userfaultfd!();
    let content = vec![7; usize::try_from(PAGES * 4096).expect("small")];
    let store = Fake::new(content, Mood::Takes(Duration::from_millis(5)));
    let base = open(&[StoredRun::Own(PageRange::first(PAGES))], None, &store);
    // The first block of each is its own.
    let own = Fake::new(vec![8; 4096], Mood::Well);
    let engines =
        [(); 2].map(|()| serve(&open(&[StoredRun::Own(PageRange::first(1))], Some(&base), &own)));
    engines.iter().for_each(|(engine, _)| engine.hydrate(NonZeroU64::MAX));
    let deadline = Instant::now() + SECONDS;
    while engines.iter().any(|(engine, _)| engine.image().missing_pages() > 0) {
        assert!(Instant::now() < deadline, "some are missing");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert_eq!(store.pages_read(), 2 * (BLOCK_PAGES - 1) + PAGES - BLOCK_PAGES);
}

#[test]
fn a_delta_is_served_from_both_stores() {
    needs_userfaultfd!();
    let (expected, base_source, base) = stored(Mood::Well);
    let (engine, _) = serve(&base);
    let mut vm = clone_of(&engine);
    vm.ask("poke 105 7");
    vm.ask("fill 1500 40 8");
    let next = freeze(&mut vm, 16);
    let changed = vm.sums(0, PAGES);
    assert_ne!(changed, expected);
    let (content, runs) = copy_of(&next, Some(&base));
    let own = runs.iter().filter(|run| matches!(run, StoredRun::Own(_))).count();
    assert_eq!(own, 41, "a delta holds what was written");
    // All who knew the base on this host go.
    drop((vm, next, engine));
    let base = open(&copy_runs(&base), None, &base_source);
    let source = Fake::new(content, Mood::Well);
    let delta = open(&runs, Some(&base), &source);
    let (engine, _) = serve(&delta);
    let mut vm = clone_of(&engine);
    assert_eq!(vm.sums(0, PAGES), changed);
    assert_eq!(source.pages_read(), 41);
    // Block 1 is as it was: its pages are in the base's cache, for VMs of either.
    assert_eq!(base.cache().presence().count(block(1)), BLOCK_PAGES);
    let (engine, _) = serve(&base);
    let before = base_source.pages_read();
    assert_eq!(clone_of(&engine).sums(512, 512), expected[512..1024]);
    assert_eq!(base_source.pages_read(), before);
}

fn copy_runs(image: &HostImage) -> Vec<StoredRun> {
    let table = image.table().expect("sealed");
    table.pages_of(image.id()).map(StoredRun::Own).collect()
}

fn block(number: u64) -> PageRange {
    PageRange::new(PageIdx(number * BLOCK_PAGES), BLOCK_PAGES).expect("small")
}

#[test]
fn a_vm_of_a_stored_image_is_forked_like_any_other() {
    needs_userfaultfd!();
    let (expected, _, image) = stored(Mood::Well);
    let (engine, _) = serve(&image);
    let mut vm = clone_of(&engine);
    vm.ask("poke 130 5"); // a write to a page that is still in the store
    let next = freeze(&mut vm, 16);
    drop(engine);
    let mut child = clone_of(&next);
    child.ask("poke 140 6"); // the same, of an ancestor's
    let ours = child.sums(0, PAGES);
    let parents = vm.sums(0, PAGES);
    for page in 0..expected.len() {
        assert_eq!(parents[page] != expected[page], page == 130, "page {page}");
        assert_eq!(ours[page] != parents[page], page == 140, "page {page}");
    }
}

#[test]
fn what_was_put_in_before_is_not_fetched() {
    needs_userfaultfd!();
    let (expected, source, image) = stored(Mood::Well);
    let (engine, _) = serve(&image);
    let range = PageRange::new(PageIdx(90), 300).expect("small");
    let mut bytes = vec![0; usize::try_from(range.byte_len()).expect("small")];
    image.read(range, &mut bytes).expect("there");
    let before = source.pages_read();
    assert_eq!(engine.insert(range, &bytes).expect("memory"), 290, "without the zero pages");
    assert_eq!(engine.insert(range, &bytes).expect("memory"), 0, "they are there");
    let mut vm = clone_of(&engine);
    assert_eq!(vm.sums(90, 300), expected[90..390]);
    assert_eq!(source.pages_read(), before);
    assert_eq!(vm.sums(0, PAGES), expected);
}

/// Also for threads that wait for them already.
#[test]
fn what_is_put_in_wakes_who_waits() {
    needs_userfaultfd!();
    let (expected, source, image) = stored(Mood::Together(2));
    let (engine, _) = serve(&image);
    let mut vm = clone_of(&engine);
    vm.send("sum 300 1");
    // Its read waits for another one.
    source.await_read();
    let range = PageRange::new(PageIdx(288), 32).expect("small");
    let from = usize::try_from(range.byte_offset()).expect("small");
    engine.insert(range, &source.content[from..from + 32 * 4096]).expect("memory");
    assert_eq!(u64::from_str_radix(&vm.receive(), 16), Ok(expected[300]));
    let _second = source.read(range, &mut vec![0; 32 * 4096]);
}

#[test]
fn who_would_get_in_the_way_of_demand_can_wait_for_it() {
    needs_userfaultfd!();
    let (expected, source, image) = stored(Mood::Together(2));
    let (engine, _) = serve(&image);
    assert!(engine.wait_for_demand(Duration::ZERO), "no view has touched a page");
    let mut vm = clone_of(&engine);
    vm.send("sum 300 1");
    source.await_read();
    assert!(!engine.wait_for_demand(Duration::from_millis(10)), "its read waits for another one");
    let _second = source.read(PageIdx(0).range(), &mut vec![0; 4096]);
    assert_eq!(u64::from_str_radix(&vm.receive(), 16), Ok(expected[300]));
    assert!(engine.wait_for_demand(SECONDS), "what it waited for has come");
}

#[test]
fn what_a_watched_vm_touches_is_told_page_by_page() {
    needs_userfaultfd!();
    let (_, _, image) = stored(Mood::Well);
    let (engine, _) = serve(&image);
    // All that it reads has come before, so that the kernel could map it at once.
    let mut before = clone_of(&engine);
    before.sums(300, 100);
    let mut vm = watched_clone_of(&engine);
    vm.sums(303, 2);
    vm.ask("poke 310 1");
    let touched = vm.memory().touch_scan().and_then(|scan| scan.touched()).expect("it runs");
    let one = |page, len| PageRange::new(PageIdx(page), len).expect("small");
    assert_eq!(touched, [one(303, 2), one(310, 1)]);
    let touched = before.memory().touch_scan().and_then(|scan| scan.touched()).expect("it runs");
    assert!(touched.iter().map(PageRange::len).sum::<u64>() >= 100, "{touched:?}");
}

#[test]
fn what_a_vm_touches_can_be_told() {
    needs_userfaultfd!();
    let (_, _, image) = stored(Mood::Well);
    let (engine, _) = serve(&image);
    let mut vm = clone_of(&engine);
    let scan = vm.memory().touch_scan().expect("it runs");
    assert_eq!(scan.touched().expect("it runs"), [], "nothing yet");
    vm.sums(300, 1);
    vm.sums(5, 1); // zero
    vm.ask("poke 900 1");
    let touched: VecDeque<_> = scan.touched().expect("it runs").into();
    let has = |page: u64| touched.iter().any(|run| run.contains(PageIdx(page)));
    assert!(has(300) && has(900));
    assert!(!has(5) && !has(320) && !has(287) && !has(700), "{touched:?}");
}
