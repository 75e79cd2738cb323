//! Threads that read pages from where it takes a while (a store, a network), so that the engine's own thread goes
//! on answering faults meanwhile.
//!
//! ```text
//!   engine ──submit──► demand ─┐
//!                  └─► ahead ──┴─► fetcher: read, verify, write the cache ──Fetched, bell──► engine
//! ```
//!
//! Promises: what is submitted is answered once, also if reading it panics; demand leaves the queue before what
//! nobody waits for, and finds a thread though all of that hangs. Threads come when there is work and go with the engine: one that is in the middle of a read
//! then ends after it, unseen.

use std::collections::VecDeque;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmfork_image::Origin;
use vmfork_policy::{Fetch, Reason};

use super::drain;
use super::panic_text;
use super::poller::Bell;
use crate::host_image::{HostImage, PageLost};

/// Most threads of one engine: so many reads are under way at a time. They sleep in a read, or decompress.
const THREADS_MAX: usize = 20;
/// Most of those with what nobody waits for: if all of that hangs, demand still finds a thread.
const AHEAD_MAX: usize = 16;

/// How many fetches that views wait for are queued or under way, for who would get in their way.
#[derive(Debug, Default)]
pub(super) struct Demand {
    fetches: Mutex<usize>,
    settled: Condvar,
}

impl Demand {
    /// Wait until there are none. → whether there are.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let fetches = self.fetches.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.settled.wait_timeout_while(fetches, timeout, |fetches| *fetches > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }

    fn begin(self: &Arc<Self>) -> Demanded {
        *self.fetches.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Demanded(Arc::clone(self))
    }
}

/// One of them.
#[derive(Debug)]
struct Demanded(Arc<Demand>);

impl Drop for Demanded {
    fn drop(&mut self) {
        *self.0.fetches.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.settled.notify_all();
    }
}

/// Pages to bring into the cache of `image`, from `owner`.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) image: Arc<HostImage>,
    pub(super) owner: Arc<HostImage>,
    pub(super) fetch: Fetch,
}

/// What became of a job.
#[derive(Debug)]
pub(super) struct Fetched {
    pub(super) image: Arc<HostImage>,
    pub(super) fetch: Fetch,
    /// What kind of place the pages were in, if not on this host.
    pub(super) from: Option<Origin>,
    pub(super) outcome: Result<(), PageLost>,
}

#[derive(Debug)]
pub(super) struct Fetchers {
    name: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    demand: Arc<Demand>,
    done: Sender<Fetched>,
    bell: Bell,
}

#[derive(Debug, Default)]
struct Queue {
    demand: VecDeque<(Job, Demanded)>,
    ahead: VecDeque<Job>,
    /// How many threads have some of that.
    ahead_running: usize,
    idle: usize,
    threads: usize,
    closed: bool,
}

impl Queue {
    /// How many jobs a thread could begin now.
    fn ready(&self) -> usize {
        self.demand.len() + self.ahead.len().min(AHEAD_MAX.saturating_sub(self.ahead_running))
    }

    fn pop(&mut self) -> Option<(Job, Option<Demanded>)> {
        if let Some((job, demanded)) = self.demand.pop_front() {
            return Some((job, Some(demanded)));
        }
        if self.ahead_running >= AHEAD_MAX {
            return None;
        }
        let job = self.ahead.pop_front()?;
        self.ahead_running += 1;
        Some((job, None))
    }
}

impl Fetchers {
    pub(super) fn new(
        name: String,
        demand: Arc<Demand>,
        done: Sender<Fetched>,
        bell: Bell,
    ) -> Self {
        let (queue, work) = (Mutex::default(), Condvar::new());
        let shared = Shared { queue, work, demand, done, bell };
        Self { name, shared: Arc::new(shared) }
    }

    /// Have a job done.
    ///
    /// # Errors
    /// There is no thread, and none can be started: the job comes back.
    pub(super) fn submit(&self, job: Job) -> Result<(), (Job, io::Error)> {
        let mut queue = self.shared.queue();
        let is_ahead = job.fetch.reason != Reason::Demand;
        let has_room = !is_ahead || queue.ahead_running + queue.ahead.len() < AHEAD_MAX;
        if has_room && queue.idle <= queue.ready() && queue.threads < THREADS_MAX {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new()
                .name(self.name.clone())
                .spawn(move || shared.work_until_closed());
            match spawned {
                Ok(_detached) => queue.threads += 1,
                Err(error) if queue.threads == 0 => return Err((job, error)),
                Err(error) => tracing::debug!(%error, "another thread to fetch pages"),
            }
        }
        match job.fetch.reason {
            Reason::Demand => queue.demand.push_back((job, self.shared.demand.begin())),
            Reason::Background(_) => queue.ahead.push_back(job),
        }
        drop(queue);
        self.shared.work.notify_one();
        Ok(())
    }
}

impl Drop for Fetchers {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.closed = true;
        let left = (std::mem::take(&mut queue.demand), std::mem::take(&mut queue.ahead));
        drop(queue);
        self.shared.work.notify_all();
        drop(left); // not under the lock: may be the last of an image
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work_until_closed(&self) {
        let mut buffer = Vec::new();
        let mut had_ahead = false;
        while let Some((job, demanded)) = self.next(had_ahead) {
            had_ahead = demanded.is_none();
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
                drain::fill(&job.image, &job.owner, job.fetch, &mut buffer)
            }));
            let outcome = outcome.unwrap_or_else(|panic| {
                let reason = format!("reading it panicked: {}", panic_text(&*panic));
                tracing::error!(image = %job.owner.id(), reason, "a source has a bug");
                let (page, image) = (job.fetch.range.start(), job.owner.id());
                Err(PageLost { page, image, reason })
            });
            let Job { image, owner, fetch } = job;
            let from = owner.source().map(|source| source.origin());
            let _engine_ended = self.done.send(Fetched { image, fetch, from, outcome });
            self.bell.ring();
            drop(demanded);
        }
    }

    /// `had_ahead`: the last one was for nobody who waits.
    fn next(&self, had_ahead: bool) -> Option<(Job, Option<Demanded>)> {
        let mut queue = self.queue();
        queue.ahead_running -= usize::from(had_ahead);
        loop {
            if queue.closed {
                return None;
            }
            if let Some(next) = queue.pop() {
                if had_ahead && queue.ready() > 0 {
                    self.work.notify_one();
                }
                return Some(next);
            }
            queue.idle += 1;
            queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use vmfork_image::{ImageId, PageIdx, PageRange, PageSource, Source};

    use super::*;
    use crate::host_image::StoredRun;

    const LONG: Duration = Duration::from_secs(20);

    /// What nobody waits for hangs.
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
            assert!(!waited.expect("not poisoned").1.timed_out(), "nobody lets it go on");
            bytes.fill(7);
            Ok(())
        }
    }

    #[test]
    fn demand_finds_a_thread_though_all_that_nobody_waits_for_hangs() {
        let source = Arc::new(Hangs::default());
        let own = [StoredRun::Own(PageRange::first(64))];
        let id = ImageId::new(1).expect("not 0");
        let image = HostImage::stored(id, 64, own, None, Arc::<Hangs>::clone(&source));
        let image = image.expect("opened");
        let (done, fetched) = channel();
        let bell = Bell::new().expect("an eventfd");
        let fetchers = Fetchers::new("fetch".to_owned(), Arc::default(), done, bell);
        let submit = |page: u64, reason| {
            let (range, source) = (PageIdx(page).range(), Source::Image(id));
            let fetch = Fetch { range, source, reason, again: false };
            let (image, owner) = (Arc::clone(&image), Arc::clone(&image));
            fetchers.submit(Job { image, owner, fetch }).expect("a thread");
        };
        let ahead = THREADS_MAX as u64 + 10;
        (0..ahead).for_each(|page| submit(page, Reason::Background("hydrate")));
        let deadline = Instant::now() + LONG;
        while source.ahead.load(Ordering::Relaxed) < AHEAD_MAX {
            assert!(Instant::now() < deadline, "not all that may be is under way");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        (ahead..ahead + 8).for_each(|page| submit(page, Reason::Demand));
        for _ in 0..8 {
            let came = fetched.recv_timeout(LONG).expect("while the others hang");
            came.outcome.expect("read");
            assert_eq!(came.fetch.reason, Reason::Demand);
        }
        assert_eq!(source.ahead.load(Ordering::Relaxed), AHEAD_MAX);
        *source.goes_on.lock().expect("not poisoned") = true;
        source.changed.notify_all();
        for _ in 0..ahead {
            fetched.recv_timeout(LONG).expect("and then the rest").outcome.expect("read");
        }
    }
}
