//! Threads that read pages from where it takes a while (a store, a network), so that the engine's own thread goes
//! on answering faults meanwhile.
//!
//! ```text
//!   engine ──submit──► demand ─┐
//!                  └─► ahead ──┴─► fetcher: read, verify, write the cache ──Fetched, bell──► engine
//! ```
//!
//! Promises: what is submitted is answered once, also if reading it panics; demand leaves the queue before what
//! nobody waits for. Threads come when there is work and go with the engine: one that is in the middle of a read
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
const THREADS_MAX: usize = 16;

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
    idle: usize,
    threads: usize,
    closed: bool,
}

impl Queue {
    fn len(&self) -> usize {
        self.demand.len() + self.ahead.len()
    }

    fn pop(&mut self) -> Option<(Job, Option<Demanded>)> {
        let demand = self.demand.pop_front().map(|(job, demanded)| (job, Some(demanded)));
        demand.or_else(|| Some((self.ahead.pop_front()?, None)))
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
        let waiting = queue.len();
        if queue.idle <= waiting && queue.threads < THREADS_MAX {
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
        while let Some((job, demanded)) = self.next() {
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

    fn next(&self) -> Option<(Job, Option<Demanded>)> {
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
