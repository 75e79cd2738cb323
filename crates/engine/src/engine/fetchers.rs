//! Threads that read pages from where it takes a while (a store, a network), so that the engine's
//! own thread goes on answering faults meanwhile.
//!
//! ```text
//!   engine ──submit──► demand ─┐
//!                  └─► ahead ──┴─► fetcher: read, verify, write the cache ──Fetched, bell──► engine
//!                   by owner, several at once where its source likes that
//!                                    └── the page that is waited for, first: cache, Wakers, Early, bell ──► engine
//! ```
//!
//! Promises: each submitted fetch is answered once, also if reading it panics.
//! The exception is a page that was present early.
//! Demand reads leave the queue before prefetches, and find a thread though all prefetches hang.
//! Threads start when there is work, and end with the engine.
//! One that is in the middle of a read then ends after it, and its result is dropped.

use std::collections::VecDeque;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmfork_image::{ImageId, Origin, PageIdx};
use vmfork_policy::transfer::bounds::{FETCHERS_AHEAD_MAX, FETCHERS_MAX};
use vmfork_policy::{Fetch, Reason};

use super::panic_text;
use super::poller::Bell;
use crate::fill;
use crate::host_image::{HostImage, PageLost};
use crate::reader::Waker;

/// At most this many threads per batching source: one waits for its reply while the next batch
/// fills.
const TOGETHER_MAX: usize = 2;

/// Counts the demand reads that are queued or in flight, so that other reads can stay out of their
/// way.
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
    /// Of those that wait for the page that is fetched first, if it comes before the others: they
    /// do not wait for the engine to hear of it.
    pub(super) wakers: Vec<Box<dyn Waker>>,
}

/// What a fetcher tells of.
#[derive(Debug)]
pub(super) enum Told {
    /// A page that is waited for is there since `at`, and what is fetched with it is yet to come.
    /// From: what kind of place it was in.
    Early {
        image: Arc<HostImage>,
        page: PageIdx,
        from: Option<Origin>,
        at: Instant,
    },
    Fetched(Fetched),
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
    done: Sender<Told>,
    bell: Bell,
}

#[derive(Debug, Default)]
struct Queue {
    demand: VecDeque<(Job, Demanded)>,
    /// Of each owner; the owner that was served longest ago is first.
    ahead: Vec<Line>,
    /// How many threads have some of that.
    ahead_running: usize,
    idle: usize,
    threads: usize,
    closed: bool,
}

/// The queued prefetches of one owner.
#[derive(Debug)]
struct Line {
    owner: Arc<HostImage>,
    jobs: VecDeque<Job>,
    /// How many threads have some of it.
    running: usize,
}

impl Line {
    fn together(&self) -> usize {
        self.owner.source().map_or(1, |source| source.together().max(1))
    }

    /// How many threads could begin some of it now.
    fn ready(&self) -> usize {
        match self.together() {
            1 => self.jobs.len(),
            _ => self.jobs.len().min(TOGETHER_MAX.saturating_sub(self.running)),
        }
    }
}

/// What a thread has to do.
#[derive(Debug)]
enum Work {
    Demand(Job, Demanded),
    /// All of one owner, and at least one.
    Ahead(Arc<HostImage>, Vec<Job>),
}

impl Queue {
    fn waiting_ahead(&self) -> usize {
        self.ahead.iter().map(|line| line.jobs.len()).sum()
    }

    /// How many pieces of work a thread could begin now.
    fn ready(&self) -> usize {
        let ahead: usize = self.ahead.iter().map(Line::ready).sum();
        self.demand.len() + ahead.min(FETCHERS_AHEAD_MAX.saturating_sub(self.ahead_running))
    }

    fn push_ahead(&mut self, job: Job) {
        match self.ahead.iter_mut().find(|line| Arc::ptr_eq(&line.owner, &job.owner)) {
            Some(line) => line.jobs.push_back(job),
            None => {
                let (owner, jobs) = (Arc::clone(&job.owner), VecDeque::from([job]));
                self.ahead.push(Line { owner, jobs, running: 0 });
            }
        }
    }

    /// Takes the prefetch of a page of an image out of the queue, if it is queued.
    fn take_ahead(&mut self, image: ImageId, page: PageIdx) -> Option<Job> {
        let brings = |job: &Job| job.image.id() == image && job.fetch.range.contains(page);
        let taken = self.ahead.iter_mut().find_map(|line| {
            let at = line.jobs.iter().position(brings)?;
            line.jobs.remove(at)
        });
        // Not the last of an image: the job has it, too.
        self.ahead.retain(|line| line.running > 0 || !line.jobs.is_empty());
        taken
    }

    fn pop(&mut self) -> Option<Work> {
        if let Some((job, demanded)) = self.demand.pop_front() {
            return Some(Work::Demand(job, demanded));
        }
        if self.ahead_running >= FETCHERS_AHEAD_MAX {
            return None;
        }
        let at = self.ahead.iter().position(|line| line.ready() > 0)?;
        let mut line = self.ahead.remove(at);
        let taken = line.together().min(line.jobs.len());
        let jobs = line.jobs.drain(..taken).collect();
        line.running += 1;
        self.ahead_running += 1;
        let owner = Arc::clone(&line.owner);
        self.ahead.push(line);
        Some(Work::Ahead(owner, jobs))
    }

    /// Whether a thread more could do what is about to be queued.
    fn has_room(&self, job: &Job) -> bool {
        let line = || self.ahead.iter().find(|line| Arc::ptr_eq(&line.owner, &job.owner));
        job.fetch.reason == Reason::Demand
            || self.ahead_running + self.waiting_ahead() < FETCHERS_AHEAD_MAX
                && line().is_none_or(|line| {
                    line.together() == 1 || line.running + line.jobs.len() < TOGETHER_MAX
                })
    }

    /// A thread has done what it had of an owner.
    fn end_ahead(&mut self, owner: &Arc<HostImage>) {
        self.ahead_running -= 1;
        if let Some(line) = self.ahead.iter_mut().find(|line| Arc::ptr_eq(&line.owner, owner)) {
            line.running -= 1;
        }
        // Not the last of an image: `owner` is another.
        self.ahead.retain(|line| line.running > 0 || !line.jobs.is_empty());
    }
}

impl Fetchers {
    pub(super) fn new(name: String, demand: Arc<Demand>, done: Sender<Told>, bell: Bell) -> Self {
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
        if let Err(error) = self.have_thread(&mut queue, &job) {
            return Err((job, error));
        }
        match job.fetch.reason {
            Reason::Demand => queue.demand.push_back((job, self.shared.demand.begin())),
            Reason::Background(_) => queue.push_ahead(job),
        }
        let is_ready = queue.ready() > 0;
        drop(queue);
        if is_ready {
            self.shared.work.notify_one();
        }
        Ok(())
    }

    /// A view waits for a page of an image now. A prefetch of it that is still queued becomes a
    /// demand read.
    pub(super) fn hurry(&self, image: ImageId, page: PageIdx) {
        let mut queue = self.shared.queue();
        let Some(mut job) = queue.take_ahead(image, page) else { return };
        job.fetch.reason = Reason::Demand;
        job.fetch.first = Some(page);
        if let Err(error) = self.have_thread(&mut queue, &job) {
            tracing::debug!(%error, "no thread to fetch pages, though some are queued");
        }
        queue.demand.push_back((job, self.shared.demand.begin()));
        drop(queue);
        self.shared.work.notify_one();
    }

    /// One thread more, if there is room for it and a job that is about to be queued would wait
    /// without.
    ///
    /// # Errors
    /// There is none at all, and none can be started.
    fn have_thread(&self, queue: &mut Queue, job: &Job) -> io::Result<()> {
        let is_wanted = queue.has_room(job) && queue.idle <= queue.ready();
        if !is_wanted || queue.threads >= FETCHERS_MAX {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let spawned = std::thread::Builder::new()
            .name(self.name.clone())
            .spawn(move || shared.work_until_closed());
        match spawned {
            Ok(_detached) => queue.threads += 1,
            Err(error) if queue.threads == 0 => return Err(error),
            Err(error) => tracing::debug!(%error, "another thread to fetch pages"),
        }
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
        while let Some(work) = self.next() {
            match work {
                Work::Demand(job, demanded) => {
                    self.fill(job, &mut buffer);
                    drop(demanded);
                }
                Work::Ahead(owner, jobs) => {
                    self.fill_ahead(&owner, jobs, &mut buffer);
                    self.end_ahead(&owner);
                }
            }
        }
    }

    fn fill(&self, job: Job, buffer: &mut Vec<u8>) {
        let mut early = |page| {
            job.wakers.iter().for_each(|waker| waker.wake());
            let (image, from) = (Arc::clone(&job.image), origin_of(&job.owner));
            self.tell(Told::Early { image, page, from, at: Instant::now() });
        };
        let outcome = unpanicked(&job.owner, || {
            fill::fill(&job.image, &job.owner, job.fetch, buffer, &mut early)
        });
        let page = job.fetch.range.start();
        let outcome = outcome.unwrap_or_else(|reason| Err(job.owner.lost(page, reason)));
        self.answer(job, outcome);
    }

    fn fill_ahead(&self, owner: &HostImage, mut jobs: Vec<Job>, buffer: &mut Vec<u8>) {
        if jobs.len() == 1 {
            return jobs.into_iter().for_each(|job| self.fill(job, buffer));
        }
        let wanted: Vec<_> = jobs.iter().map(|job| (Arc::clone(&job.image), job.fetch)).collect();
        let mut left: Vec<Option<Job>> = jobs.drain(..).map(Some).collect();
        let panicked = unpanicked(owner, || {
            fill::fill_together(owner, &wanted, buffer, &mut |place, outcome| {
                if let Some(job) = left.get_mut(place).and_then(Option::take) {
                    self.answer(job, outcome);
                }
            });
        });
        let reason = panicked.err().unwrap_or_else(|| "its source did not say".to_owned());
        for job in left.into_iter().flatten() {
            let lost = owner.lost(job.fetch.range.start(), reason.clone());
            self.answer(job, Err(lost));
        }
    }

    fn answer(&self, job: Job, outcome: Result<(), PageLost>) {
        let Job { image, owner, fetch, .. } = job;
        let from = origin_of(&owner);
        self.tell(Told::Fetched(Fetched { image, fetch, from, outcome }));
    }

    fn tell(&self, told: Told) {
        let _engine_ended = self.done.send(told);
        self.bell.ring();
    }

    fn end_ahead(&self, owner: &Arc<HostImage>) {
        let mut queue = self.queue();
        queue.end_ahead(owner);
        // One is for the thread that calls this.
        if queue.ready() > 1 {
            self.work.notify_one();
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.queue();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(next) = queue.pop() {
                return Some(next);
            }
            queue.idle += 1;
            queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }
}

fn origin_of(owner: &HostImage) -> Option<Origin> {
    owner.source().map(|source| source.origin())
}

/// What `work` says, or why it panicked.
fn unpanicked<T>(owner: &HostImage, work: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let reason = format!("reading it panicked: {}", panic_text(&*panic));
        tracing::error!(image = %owner.id(), reason, "a source has a bug");
        reason
    })
}

#[cfg(all(test, not(loom)))]
#[path = "fetchers_tests.rs"]
mod tests;
