//! Work that no VM waits for: one thread, one queue.
//!
//! Promises: jobs are carried out in order, each once. A dropped queue first carries out what it
//! has. A job that panics ends alone.
//!
//! Left to others: how many jobs there are. A freeze puts two, a dropped layer one.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// What is done later.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    busy: bool,
    ends: bool,
    /// How many were put, and how many of them have ended.
    put: u64,
    ended: u64,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that carries out jobs.
pub(crate) struct Background {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").finish_non_exhaustive()
    }
}

impl Background {
    /// # Errors
    /// There are no more threads.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let queue = Arc::<Queue>::default();
        let theirs = Arc::clone(&queue);
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&theirs))?;
        Ok(Self { queue, thread: Mutex::new(Some(thread)) })
    }

    /// Carries it out later; at once, if the thread has ended.
    pub(crate) fn put(&self, job: Job) {
        let mut state = self.queue.state();
        if state.ends {
            drop(state);
            job();
            return;
        }
        state.jobs.push_back(job);
        state.put += 1;
        drop(state);
        self.queue.changed.notify_all();
    }

    /// Waits until all jobs so far have ended, and for none that is put later.
    pub(crate) fn drain(&self) {
        let mut state = self.queue.state();
        let until = state.put;
        while state.ended < until {
            state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Drops what is not begun, and waits for the rest: as far as a killed daemon has come.
    #[cfg(test)]
    pub(crate) fn abandon(&self) {
        let mut state = self.queue.state();
        let undone = std::mem::take(&mut state.jobs);
        state.ended += undone.len() as u64;
        while state.busy {
            state = self.queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop((state, undone));
    }

    /// Carries out what there is, and ends the thread.
    pub(crate) fn end(&self) {
        self.queue.state().ends = true;
        self.queue.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A job may hold the last reference to this queue: the thread can't wait for itself.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of a job is in the log.
            let _ended = thread.join();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.end();
    }
}

fn work(queue: &Queue) {
    let mut state = queue.state();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            state.busy = true;
            drop(state);
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).is_err() {
                tracing::error!("a background job of the disks panicked");
            }
            state = queue.state();
            state.busy = false;
            state.ended += 1;
            queue.changed.notify_all();
        } else if state.ends {
            return;
        } else {
            state = queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_drain_waits_for_what_there_is_and_not_for_what_comes() {
        let background = Arc::new(Background::start("test").expect("a thread"));
        let (done, is_done) = channel();
        let (go, goes) = channel::<()>();
        let (begun, is_begun) = channel();
        background.put(Box::new(move || done.send(()).expect("it waits")));
        let theirs = Arc::downgrade(&background);
        background.put(Box::new(move || {
            // The queue is never empty while this runs, and after it.
            let background = theirs.upgrade().expect("it lives");
            background.put(Box::new(move || {
                begun.send(()).expect("it waits");
                goes.recv_timeout(LONG).expect("told");
            }));
        }));
        background.drain();
        is_done.try_recv().expect("carried out");
        is_begun.recv_timeout(LONG).expect("the last one is under way");
        go.send(()).expect("it waits");
        background.drain();
        drop(background);
    }
}
