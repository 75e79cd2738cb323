//! How requests are carried out: at once, or by a thread that may wait for pages.
//!
//! Promises: a panic of a target fails its request alone. When [`Workers`] are dropped, those that
//! are carrying out a request have ended it, and no other is begun.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::buffer::{FilePart, Out};
use crate::request::{Command, Extent, NbdError, Replies, Span};

/// Most workers of one client: what QEMU can have in flight.
const WORKERS_MAX: usize = 16;

/// What an export is. Several threads call it at a time.
pub trait Target: Debug + Send + Sync {
    /// What the bytes of a span are, in order.
    fn extents(&self, span: Span) -> Vec<Extent>;

    /// A client reads a span: for counters.
    fn reads(&self, span: Span) {
        let _uncounted = span;
    }

    /// The reply to a command was made so long after the command had come: for counters.
    fn took(&self, command: &Command, took: Duration) {
        let _uncounted = (command, took);
    }

    /// Whether the command can be carried out at once.
    fn is_quick(&self, command: &Command) -> bool;

    /// Read bytes that are not zeros, all of them.
    ///
    /// # Errors
    /// What the client is told.
    fn read(&self, span: Span, bytes: &mut [u8]) -> Result<(), NbdError>;

    /// The files in which the bytes of a span are that are not zeros, if they are best sent from
    /// there. `None`: [`Target::read`] gives them.
    fn files(&self, span: Span) -> Option<Vec<FilePart>> {
        let _read = span;
        None
    }

    /// A part that [`Target::files`] gave can't be sent.
    fn file_failed(&self, error: &io::Error) {
        tracing::warn!(%error, "a file can't be sent");
    }

    /// Carry out what changes the export, or makes it durable. `bytes` is what a write writes.
    ///
    /// # Errors
    /// What the client is told.
    fn change(&self, command: &Command, bytes: &[u8]) -> Result<(), NbdError>;
}

/// Replies of workers, and the bell that tells the connection of them.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) bell: OwnedFd,
    done: Mutex<Vec<Out>>,
}

impl Outbox {
    pub(crate) fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { bell, done: Mutex::default() })
    }

    fn done(&self) -> MutexGuard<'_, Vec<Out>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, reply: Out) {
        self.done().push(reply);
        // It can only be full of rings that were not heard yet.
        let _rung = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> Vec<Out> {
        let _heard = rustix::io::read(&self.bell, &mut [0; 8]);
        std::mem::take(&mut self.done())
    }
}

/// A request that is carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) command: &'a Command,
    pub(crate) payload: &'a [u8],
    pub(crate) cookie: u64,
    /// When it had come as a whole.
    pub(crate) since: Instant,
}

/// How requests of one client are carried out.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) target: Arc<dyn Target>,
    pub(crate) replies: Replies,
}

impl Job {
    /// The reply goes to `out`.
    pub(crate) fn carry_out(&self, asked: Asked<'_>, out: &mut Out) {
        let Asked { command, payload, cookie, since } = asked;
        let reads = matches!(command, Command::Read { .. } | Command::BlockStatus { .. });
        let before = out.filled();
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            self.try_to(command, payload, cookie, out)
        }));
        // The panic's message is in the log.
        if let Err(error) = tried.unwrap_or(Err(NbdError::Io)) {
            out.cut(before);
            self.replies.failed(out, cookie, error, reads);
        }
        self.target.took(command, since.elapsed());
    }

    fn try_to(
        &self,
        command: &Command,
        payload: &[u8],
        cookie: u64,
        out: &mut Out,
    ) -> Result<(), NbdError> {
        match *command {
            Command::Read { span, whole } => {
                self.target.reads(span);
                let extents = self.target.extents(span);
                let fill = |span: Span, out: &mut Out| match self.target.files(span) {
                    Some(parts) => {
                        parts.into_iter().for_each(|part| out.put_file(part));
                        Ok(())
                    }
                    None => self.target.read(span, out.space(span.len_bytes as usize)),
                };
                self.replies.read(out, cookie, (span, whole), &extents, fill)
            }
            Command::BlockStatus { span, one } => {
                let mut extents = self.target.extents(span);
                if one {
                    extents.truncate(1);
                }
                Replies::status(out, cookie, &extents);
                Ok(())
            }
            _ => {
                self.target.change(command, payload)?;
                Replies::done(out, cookie);
                Ok(())
            }
        }
    }
}

/// A request that waits.
pub(crate) struct Work {
    pub(crate) command: Command,
    pub(crate) payload: Vec<u8>,
    pub(crate) cookie: u64,
    pub(crate) since: Instant,
}

/// Threads that may wait for pages, started when they are needed.
#[derive(Debug)]
pub(crate) struct Workers {
    pub(crate) job: Job,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    outbox: Arc<Outbox>,
}

#[derive(Default)]
struct QueueState {
    work: VecDeque<Work>,
    idle: usize,
    ends: bool,
}

impl Debug for QueueState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { work, idle, ends } = self;
        write!(f, "{} to do, {idle} idle, ends: {ends}", work.len())
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Workers {
    pub(crate) fn new(job: Job, outbox: Arc<Outbox>) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { job, queue: Arc::new(Queue { state, changed, outbox }), threads: Vec::new() }
    }

    /// Its reply comes by the outbox.
    pub(crate) fn put(&mut self, work: Work) {
        let mut state = self.queue.state();
        state.work.push_back(work);
        if state.idle >= state.work.len() || self.threads.len() >= WORKERS_MAX {
            drop(state);
            self.queue.changed.notify_one();
            return;
        }
        let (job, queue) = (self.job.clone(), Arc::clone(&self.queue));
        let named = std::thread::Builder::new().name("disk-worker".to_owned());
        match named.spawn(move || worker(&job, &queue)) {
            Ok(thread) => self.threads.push(thread),
            // Another one does it later; without any it is done here and now.
            Err(_no_thread) if !self.threads.is_empty() => {}
            Err(_no_thread) => {
                let late = state.work.pop_back();
                drop(state);
                if let Some(work) = late {
                    self.queue.outbox.put(carry_out(&self.job, &work));
                }
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.ends = true;
        state.work.clear();
        drop(state);
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            // It catches panics.
            let _ended = thread.join();
        }
    }
}

fn carry_out(job: &Job, work: &Work) -> Out {
    let mut out = Out::default();
    let Work { command, payload, cookie, since } = work;
    let asked = Asked { command, payload, cookie: *cookie, since: *since };
    job.carry_out(asked, &mut out);
    out
}

fn worker(job: &Job, queue: &Queue) {
    let mut state = queue.state();
    loop {
        if let Some(work) = state.work.pop_front() {
            drop(state);
            queue.outbox.put(carry_out(job, &work));
            state = queue.state();
        } else if state.ends {
            return;
        } else {
            state.idle += 1;
            state = queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}
