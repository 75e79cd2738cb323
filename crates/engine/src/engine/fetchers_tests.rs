use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use vmfork_image::{AheadRead, ImageId, PageIdx, PageRange, PageSource, Source};

use super::*;
use crate::host_image::StoredRun;

const LONG: Duration = Duration::from_secs(20);

/// Prefetches hang.
#[derive(Debug, Default)]
struct Hangs {
    ahead: AtomicUsize,
    goes_on: Mutex<bool>,
    changed: Condvar,
}

impl PageSource for Hangs {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        1
    }

    fn read(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(7);
        Ok(())
    }

    fn read_ahead(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.ahead.fetch_add(1, Ordering::Relaxed);
        let goes_on = self.goes_on.lock().expect("not poisoned");
        let waited = self.changed.wait_timeout_while(goes_on, LONG, |goes_on| !*goes_on);
        assert!(!waited.expect("not poisoned").1.timed_out(), "it is not released in time");
        bytes.fill(7);
        Ok(())
    }
}

/// The notices that an engine receives.
struct Heard(Receiver<Told>);

impl Heard {
    /// The next job that has ended.
    fn recv_timeout(&self, timeout: Duration) -> Result<Fetched, RecvTimeoutError> {
        loop {
            if let Told::Fetched(fetched) = self.0.recv_timeout(timeout)? {
                return Ok(fetched);
            }
        }
    }
}

/// An image of 64 pages that are all read from `source`, and who reads them.
fn of<S: PageSource + 'static>(source: &Arc<S>) -> (Fetchers, Arc<HostImage>, Heard) {
    let own = [StoredRun::Own(PageRange::first(64))];
    let id = ImageId::new(1).expect("not 0");
    let image = HostImage::stored(id, 64, own, None, Arc::<S>::clone(source)).expect("opened");
    let (done, fetched) = channel();
    let bell = Bell::new().expect("an eventfd");
    (Fetchers::new("fetch".to_owned(), Arc::default(), done, bell), image, Heard(fetched))
}

fn submit(fetchers: &Fetchers, image: &Arc<HostImage>, page: u64, reason: Reason) {
    let (range, source) = (PageIdx(page).range(), Source::Image(image.id()));
    let fetch = Fetch { range, source, reason, first: None, again: false };
    let (image, owner) = (Arc::clone(image), Arc::clone(image));
    fetchers.submit(Job { image, owner, fetch, wakers: Vec::new() }).expect("a thread");
}

#[test]
fn demand_finds_a_thread_while_all_background_reads_hang() {
    let source = Arc::new(Hangs::default());
    let (fetchers, image, fetched) = of(&source);
    let submit = |page, reason| submit(&fetchers, &image, page, reason);
    let ahead = FETCHERS_MAX as u64 + 10;
    (0..ahead).for_each(|page| submit(page, Reason::Background("hydrate")));
    let deadline = Instant::now() + LONG;
    while source.ahead.load(Ordering::Relaxed) < FETCHERS_AHEAD_MAX {
        assert!(Instant::now() < deadline, "not all that may be is under way");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    (ahead..ahead + 8).for_each(|page| submit(page, Reason::Demand));
    for _ in 0..8 {
        let came = fetched.recv_timeout(LONG).expect("while the others hang");
        came.outcome.expect("read");
        assert_eq!(came.fetch.reason, Reason::Demand);
    }
    assert_eq!(source.ahead.load(Ordering::Relaxed), FETCHERS_AHEAD_MAX);
    *source.goes_on.lock().expect("not poisoned") = true;
    source.changed.notify_all();
    for _ in 0..ahead {
        fetched.recv_timeout(LONG).expect("and then the rest").outcome.expect("read");
    }
}

/// Has several reads asked for at once. Who asks waits until it may go on.
#[derive(Debug, Default)]
struct Together {
    /// How many reads there were in each.
    asked: Mutex<Vec<usize>>,
    goes_on: AtomicBool,
    /// From this page on it panics, and before that, of this page it says nothing.
    panics_from: Option<u64>,
    keeps_quiet_of: Option<u64>,
}

impl Together {
    fn asked(&self) -> Vec<usize> {
        self.asked.lock().expect("not poisoned").clone()
    }

    fn wait_for(&self, what: impl Fn(&[usize]) -> bool) {
        let deadline = Instant::now() + LONG;
        while !what(&self.asked()) {
            assert!(Instant::now() < deadline, "asked only {:?}", self.asked());
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

impl PageSource for Together {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        1
    }

    fn together(&self) -> usize {
        8
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        assert!(self.panics_from.is_none_or(|from| range.end().0 <= from), "a bug");
        bytes.fill(u8::try_from(range.start().0).expect("few"));
        Ok(())
    }

    fn read_ahead(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let mut answer = Err(io::ErrorKind::UnexpectedEof.into());
        self.read_ahead_all(&mut [AheadRead { range, bytes }], &mut |_, came| {
            answer = came.map(|_| ());
        });
        answer
    }

    fn read_ahead_all(
        &self,
        reads: &mut [AheadRead<'_>],
        done: &mut dyn FnMut(usize, io::Result<&[u8]>),
    ) {
        self.asked.lock().expect("not poisoned").push(reads.len());
        let deadline = Instant::now() + LONG;
        while !self.goes_on.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "it is not released in time");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        // The last first: answers may come in any order.
        for (place, read) in reads.iter_mut().enumerate().rev() {
            if Some(read.range.start().0) == self.keeps_quiet_of {
                continue;
            }
            let outcome = self.read(read.range, read.bytes);
            done(place, outcome.map(|()| &*read.bytes));
        }
    }
}

const BACKGROUND: Reason = Reason::Background("hydrate");

#[test]
fn background_reads_are_batched_by_two_threads_at_most() {
    let source = Arc::new(Together::default());
    let (fetchers, image, fetched) = of(&source);
    (0..2).for_each(|page| {
        submit(&fetchers, &image, page, BACKGROUND);
        source.wait_for(|asked| asked.len() > usize::try_from(page).expect("few"));
    });
    (2..22).for_each(|page| submit(&fetchers, &image, page, BACKGROUND));
    submit(&fetchers, &image, 40, Reason::Demand);
    let came = fetched.recv_timeout(LONG).expect("while the others wait");
    assert_eq!((came.fetch.reason, came.outcome.is_ok()), (Reason::Demand, true));
    assert_eq!(source.asked(), [1, 1]);
    source.goes_on.store(true, Ordering::Relaxed);
    let mut pages: Vec<u64> = (0..22)
        .map(|_| {
            let came = fetched.recv_timeout(LONG).expect("and then the rest");
            came.outcome.expect("read");
            came.fetch.range.start().0
        })
        .collect();
    pages.sort_unstable();
    assert_eq!(pages, (0..22).collect::<Vec<_>>(), "each once");
    let mut asked = source.asked();
    asked.sort_unstable();
    assert_eq!(asked, [1, 1, 4, 8, 8]);
    for page in 0..22_u8 {
        let mut bytes = vec![0; 4096];
        image.cache().read(PageIdx(page.into()).range(), &mut bytes).expect("in the cache");
        assert!(bytes.iter().all(|byte| *byte == page), "page {page} has another's bytes");
    }
}

#[test]
fn each_is_answered_once_though_its_source_panics_or_keeps_quiet() {
    let source = Together { panics_from: Some(5), keeps_quiet_of: Some(3), ..Together::default() };
    let source = Arc::new(source);
    let (fetchers, image, fetched) = of(&source);
    let answers = |pages: std::ops::Range<u64>| {
        source.goes_on.store(false, Ordering::Relaxed);
        let asked = source.asked().len();
        // Both threads have some; the rest comes together.
        for page in 60..62_u64 {
            submit(&fetchers, &image, page, BACKGROUND);
            let calls = asked + usize::try_from(page).expect("few") - 59;
            source.wait_for(|now| now.len() >= calls);
        }
        let count = pages.end - pages.start;
        pages.for_each(|page| submit(&fetchers, &image, page, BACKGROUND));
        source.goes_on.store(true, Ordering::Relaxed);
        let mut answers = Vec::new();
        for _ in 0..count + 2 {
            let came = fetched.recv_timeout(LONG).expect("answered");
            let why = came.outcome.err().map(|lost| lost.reason);
            answers.push((came.fetch.range.start().0, why));
        }
        assert!(fetched.0.try_recv().is_err(), "once");
        answers.retain(|(page, _)| *page < 60);
        answers.sort();
        answers
    };
    let panicked = answers(6..8);
    let why = "reading it panicked: a bug";
    assert!(panicked.iter().all(|(_, reason)| reason.as_deref() == Some(why)), "{panicked:?}");
    let quiet = answers(0..5);
    let failed: Vec<_> = quiet.iter().filter(|(_, why)| why.is_some()).collect();
    assert_eq!(failed, [&(3, Some("its source did not say".to_owned()))]);
}

#[test]
fn a_demand_read_leaves_the_queue_of_background_reads() {
    let source = Arc::new(Together::default());
    let (fetchers, image, fetched) = of(&source);
    (0..2).for_each(|page| {
        submit(&fetchers, &image, page, BACKGROUND);
        source.wait_for(|asked| asked.len() > usize::try_from(page).expect("few"));
    });
    (2..6).for_each(|page| submit(&fetchers, &image, page, BACKGROUND));
    // One in flight, one that was not submitted, and one that waits for its turn.
    for page in [1, 50, 4] {
        fetchers.hurry(image.id(), PageIdx(page));
    }
    let came = fetched.recv_timeout(LONG / 2).expect("while the others wait");
    assert_eq!((came.fetch.range, came.fetch.reason), (PageIdx(4).range(), Reason::Demand));
    came.outcome.expect("read");
    assert_eq!(source.asked(), [1, 1]);
    source.goes_on.store(true, Ordering::Relaxed);
    for _ in 0..5 {
        let came = fetched.recv_timeout(LONG).expect("and then the rest");
        assert_eq!((came.fetch.reason, came.outcome.is_ok()), (BACKGROUND, true));
    }
    assert!(fetched.0.try_recv().is_err(), "each once");
}

#[test]
fn what_another_engine_brings_is_waited_for_and_holds_nothing_up() {
    let source = Arc::new(Together::default());
    let (fetchers, image, fetched) = of(&source);
    let (done, fetched_by_other) = channel();
    let fetched_by_other = Heard(fetched_by_other);
    let bell = Bell::new().expect("an eventfd");
    let other = Fetchers::new("fetch".to_owned(), Arc::default(), done, bell);
    (0..2).for_each(|page| {
        submit(&fetchers, &image, page, BACKGROUND);
        source.wait_for(|asked| asked.len() > usize::try_from(page).expect("few"));
    });
    // Both threads of the other have one of its own; then come those of both.
    (10..12).for_each(|page| {
        submit(&other, &image, page, BACKGROUND);
        source.wait_for(|asked| asked.len() > usize::try_from(page - 8).expect("few"));
    });
    (0..4).for_each(|page| submit(&other, &image, page, BACKGROUND));
    source.goes_on.store(true, Ordering::Relaxed);
    for fetched in std::iter::repeat_n(&fetched, 2).chain(std::iter::repeat_n(&fetched_by_other, 6))
    {
        fetched.recv_timeout(LONG).expect("answered").outcome.expect("read");
    }
    assert_eq!(source.asked().iter().sum::<usize>(), 6, "each once");
}

/// Gives the page that is waited for, and the others when it may.
#[derive(Debug, Default)]
struct First {
    asked: AtomicUsize,
    goes_on: AtomicBool,
    fails: AtomicBool,
    /// Says otherwise of all of them in the end.
    lies: AtomicBool,
}

impl PageSource for First {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        numbered(range, bytes);
        Ok(())
    }

    fn read_first(
        &self,
        range: PageRange,
        page: PageIdx,
        bytes: &mut [u8],
        came: &mut dyn FnMut(&[u8]),
    ) -> io::Result<()> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut first = vec![0; 4096];
        numbered(page.range(), &mut first);
        came(&first);
        let deadline = Instant::now() + LONG;
        while !self.goes_on.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "it is not released in time");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        match self.fails.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the others are lost")),
            false => {
                numbered(range, bytes);
                if self.lies.load(Ordering::Relaxed) {
                    bytes.fill(99);
                }
                Ok(())
            }
        }
    }
}

fn numbered(range: PageRange, bytes: &mut [u8]) {
    let whole = bytes.chunks_mut(4096).zip(range.pages());
    whole.for_each(|(bytes, page)| bytes.fill(u8::try_from(page.0).expect("few")));
}

fn first_of_sixteen(source: &Arc<First>) -> (Fetchers, Arc<HostImage>, Heard) {
    let (fetchers, image, heard) = of(source);
    let (range, first) = (PageRange::first(16), Some(PageIdx(5)));
    let from = Source::Image(image.id());
    let fetch = Fetch { range, source: from, reason: Reason::Demand, first, again: false };
    let (to, owner) = (Arc::clone(&image), Arc::clone(&image));
    fetchers.submit(Job { image: to, owner, fetch, wakers: Vec::new() }).expect("a thread");
    let told = heard.0.recv_timeout(LONG).expect("told early");
    let Told::Early { page, from, .. } = told else { panic!("not early: {told:?}") };
    assert_eq!((page, from), (PageIdx(5), Some(Origin::Peer)));
    assert_eq!(image.cache().presence().count(range), 1);
    let mut bytes = vec![0; 4096];
    image.cache().read(page.range(), &mut bytes).expect("there");
    assert!(bytes.iter().all(|byte| *byte == 5));
    (fetchers, image, heard)
}

#[test]
fn the_page_that_is_waited_for_is_told_of_before_its_neighbours_are_there() {
    let source = Arc::new(First::default());
    let (_fetchers, image, heard) = first_of_sixteen(&source);
    source.goes_on.store(true, Ordering::Relaxed);
    let all = heard.recv_timeout(LONG).expect("told of all");
    all.outcome.expect("read");
    assert_eq!(all.fetch.range, PageRange::first(16));
    let mut bytes = vec![0; 16 * 4096];
    image.cache().read(all.fetch.range, &mut bytes).expect("there");
    for (page, bytes) in bytes.chunks(4096).enumerate() {
        assert!(bytes.iter().all(|byte| usize::from(*byte) == page), "page {page}");
    }
    assert_eq!(source.asked.load(Ordering::Relaxed), 1, "each crosses once");
    assert_eq!(image.counters().from_peer_bytes.get(), 16 * 4096, "each is counted once");
}

#[test]
fn neighbours_that_are_lost_leave_the_page_there() {
    let source = Arc::new(First::default());
    source.fails.store(true, Ordering::Relaxed);
    let (_fetchers, image, heard) = first_of_sixteen(&source);
    source.goes_on.store(true, Ordering::Relaxed);
    heard.recv_timeout(LONG).expect("told of all").outcome.expect_err("lost");
    assert_eq!(image.cache().presence().count(PageRange::first(16)), 1);
}

/// As of a host that is believed, since the origin that gave the page has gone.
#[test]
fn what_a_vm_may_have_read_stays_as_it_is() {
    let source = Arc::new(First::default());
    source.lies.store(true, Ordering::Relaxed);
    let (_fetchers, image, heard) = first_of_sixteen(&source);
    // And what another engine has brought meanwhile.
    image.keep(PageIdx(9).range(), &[9; 4096]);
    source.goes_on.store(true, Ordering::Relaxed);
    heard.recv_timeout(LONG).expect("told of all").outcome.expect("read");
    let mut bytes = vec![0; 16 * 4096];
    image.cache().read(PageRange::first(16), &mut bytes).expect("there");
    for (page, bytes) in (0..).zip(bytes.chunks(4096)) {
        let expected = if [5, 9].contains(&page) { page } else { 99 };
        assert!(bytes.iter().all(|byte| *byte == expected), "page {page}");
    }
}

#[test]
fn pages_that_are_here_already_are_not_counted_as_brought() {
    let source = Arc::new(Hangs::default());
    let (fetchers, image, heard) = of(&source);
    image.keep(PageRange::first(6), &[1; 6 * 4096]);
    let (range, from) = (PageRange::first(16), Source::Image(image.id()));
    let fetch = Fetch { range, source: from, reason: Reason::Demand, first: None, again: false };
    let (to, owner) = (Arc::clone(&image), Arc::clone(&image));
    fetchers.submit(Job { image: to, owner, fetch, wakers: Vec::new() }).expect("a thread");
    heard.recv_timeout(LONG).expect("told of all").outcome.expect("read");
    assert_eq!(image.cache().presence().count(range), 16);
    assert_eq!(image.counters().from_peer_bytes.get(), 10 * 4096);
    assert_eq!(image.counters().from_image_bytes.get(), 0);
}
