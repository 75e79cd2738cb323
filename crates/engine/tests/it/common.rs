//! A reader of pages that is no VM: threads that wait on a condition variable, as a disk's server
//! would.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use vmfork_engine::{Engine, EngineEvent, EventSink, HostImage, Reader, View, Waker, next_view_id};
use vmfork_image::{Origin, PAGE_BYTES, PageIdx, PageRange, PageSource};
use vmfork_policy::ViewId;

/// No wait of these tests takes as long, unless something is never woken.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Of a page.
pub(crate) const PAGE_LEN: usize = 4096;
const _: () = assert!(PAGE_LEN as u64 == PAGE_BYTES);

/// The bytes of a page in these tests.
pub(crate) fn bytes_of(page: PageIdx) -> Vec<u8> {
    let word = (page.0 * 0x9E37_79B9 + 1).to_le_bytes();
    word.iter().copied().cycle().take(PAGE_LEN).collect()
}

/// What the engine and the reading threads share.
#[derive(Debug)]
struct Shared {
    /// Readable while `asked` has pages.
    bell: OwnedFd,
    told: Mutex<Told>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Told {
    asked: Vec<PageIdx>,
    zeros: BTreeSet<PageIdx>,
    refused: Vec<(PageIdx, String)>,
    /// How often something was woken.
    wakes: u64,
    ended: Option<String>,
}

impl Shared {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().expect("not poisoned")
    }

    fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told());
        self.changed.notify_all();
    }
}

/// The engine's end.
#[derive(Debug)]
struct Served {
    shared: Arc<Shared>,
    can_refuse: bool,
}

#[derive(Debug)]
struct Wakes(Arc<Shared>);

impl Waker for Wakes {
    fn wake(&self) {
        self.0.tell(|told| told.wakes += 1);
    }
}

impl Reader for Served {
    fn faults_fd(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }

    fn read_faults(&self, found: &mut dyn FnMut(PageIdx, bool)) -> io::Result<()> {
        let _empty = rustix::io::read(&self.shared.bell, &mut [0; 8]);
        let asked = std::mem::take(&mut self.shared.told().asked);
        asked.into_iter().for_each(|page| found(page, false));
        Ok(())
    }

    fn wake(&self, _: PageRange) {
        self.shared.tell(|told| told.wakes += 1);
    }

    fn waker(&self, _: PageRange) -> Box<dyn Waker> {
        Box::new(Wakes(Arc::clone(&self.shared)))
    }

    fn install_zeros(&self, range: PageRange) {
        self.shared.tell(|told| told.zeros.extend(range.pages()));
    }

    fn install_private(&self, range: PageRange, _: &[u8]) {
        panic!("{range}: this reader writes nothing");
    }

    fn refuse(&self, page: PageIdx, reason: &str) -> bool {
        if self.can_refuse {
            self.shared.tell(|told| told.refused.push((page, reason.to_owned())));
        }
        self.can_refuse
    }

    fn lost(&self, reason: &str) {
        self.shared.tell(|told| told.ended = Some(reason.to_owned()));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.shared.tell(|told| {
            told.ended.get_or_insert_with(|| "served no more".to_owned());
        });
    }
}

/// Reads pages of an image from its cache, and waits for those that are absent.
#[derive(Debug)]
pub(crate) struct FileReader {
    shared: Arc<Shared>,
    image: Arc<HostImage>,
    engine: Arc<Engine>,
    id: ViewId,
}

impl FileReader {
    pub(crate) fn of(engine: &Arc<Engine>) -> Self {
        Self::new(engine, true)
    }

    /// One that can't tell of a page alone that it can't be had, like a VM.
    pub(crate) fn that_cannot_refuse(engine: &Arc<Engine>) -> Self {
        Self::new(engine, false)
    }

    fn new(engine: &Arc<Engine>, can_refuse: bool) -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).expect("an eventfd");
        let (told, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { bell, told, changed });
        let image = Arc::clone(engine.image());
        let served = Served { shared: Arc::clone(&shared), can_refuse };
        let view = View::new(Box::new(served), image.pages(), Arc::default());
        let id = next_view_id();
        engine.add_view(id, view).expect("the engine runs");
        Self { shared, image, engine: Arc::clone(engine), id }
    }

    pub(crate) fn id(&self) -> ViewId {
        self.id
    }

    /// The bytes of a page, or why it can't be had. Panics if nothing answers.
    pub(crate) fn read(&self, page: PageIdx) -> Result<Vec<u8>, String> {
        let mut told = self.shared.told();
        told.asked.push(page);
        rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes()).expect("an eventfd");
        let cache = self.image.cache();
        loop {
            if cache.presence().is_present(page) {
                drop(told);
                let mut bytes = vec![0; PAGE_LEN];
                let offset = page.byte_offset();
                let read = rustix::io::pread(cache.for_readers(), &mut bytes, offset);
                assert_eq!(read, Ok(bytes.len()), "page {page}");
                return Ok(bytes);
            }
            if told.zeros.contains(&page) {
                return Ok(vec![0; PAGE_LEN]);
            }
            if let Some(at) = told.refused.iter().position(|(refused, _)| *refused == page) {
                return Err(told.refused.swap_remove(at).1);
            }
            if let Some(reason) = &told.ended {
                return Err(reason.clone());
            }
            // A wake is for no page in particular here: all that wait look again.
            let wakes = told.wakes;
            let (after, waited) = self
                .shared
                .changed
                .wait_timeout_while(told, LONG, |told| {
                    told.wakes == wakes
                        && told.ended.is_none()
                        && !told.zeros.contains(&page)
                        && !told.refused.iter().any(|(refused, _)| *refused == page)
                })
                .expect("not poisoned");
            told = after;
            if waited.timed_out() {
                drop(told); // not poisoned, so that the other tests go on
                panic!("nothing answers page {page}");
            }
        }
    }
}

impl Drop for FileReader {
    fn drop(&mut self) {
        let _ended = self.engine.remove_view(self.id);
    }
}

/// Has [`bytes_of`] each page, but for those that fail.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) fails_at: Option<PageIdx>,
    pub(crate) panics_at: Option<PageIdx>,
    /// Gives the page that is waited for at once, and the rest when [`Fake::go_on`] is called.
    pub(crate) holds_back: bool,
    pub(crate) reads: Mutex<Vec<PageRange>>,
    pub(crate) goes_on: AtomicBool,
}

impl Fake {
    pub(crate) fn go_on(&self) {
        self.goes_on.store(true, Ordering::Release);
    }

    pub(crate) fn pages_read(&self) -> u64 {
        self.reads.lock().expect("not poisoned").iter().map(PageRange::len).sum()
    }
}

impl PageSource for Fake {
    fn origin(&self) -> Origin {
        if self.holds_back { Origin::Peer } else { Origin::Chunk }
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.reads.lock().expect("not poisoned").push(range);
        let touches = |page: Option<PageIdx>| page.is_some_and(|page| range.contains(page));
        assert!(!touches(self.panics_at), "a bug at a page of {range}");
        if touches(self.fails_at) {
            return Err(io::Error::other("a bad sector"));
        }
        for (page, part) in range.pages().zip(bytes.chunks_exact_mut(PAGE_LEN)) {
            part.copy_from_slice(&bytes_of(page));
        }
        Ok(())
    }

    fn read_first(
        &self,
        range: PageRange,
        page: PageIdx,
        bytes: &mut [u8],
        came: &mut dyn FnMut(&[u8]),
    ) -> io::Result<()> {
        if self.holds_back {
            came(&bytes_of(page));
            let deadline = std::time::Instant::now() + LONG;
            while !self.goes_on.load(Ordering::Acquire) {
                assert!(std::time::Instant::now() < deadline, "the test lets it go on");
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
        self.read(range, bytes)
    }
}

/// What an engine told its owner.
pub(crate) type Events = Arc<Mutex<Vec<EngineEvent>>>;

pub(crate) fn events() -> (EventSink, Events) {
    let events = Events::default();
    let sink = Arc::clone(&events);
    (Arc::new(move |event| sink.lock().expect("not poisoned").push(event)), events)
}
