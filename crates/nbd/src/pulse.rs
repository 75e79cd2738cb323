//! What a thread that waits in `poll` hears: that it is to end, and whether it is alive.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

/// A bell for one thread.
#[derive(Debug)]
pub struct Pulse {
    bell: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stop: bool,
    ended: bool,
    asked: u64,
    answered: u64,
}

impl Pulse {
    /// # Errors
    /// There are no more descriptors.
    pub fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { bell, state: Mutex::default(), changed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // It can only be full of rings that were not heard yet.
        let _rung = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// The thread is to end.
    pub fn stop(&self) {
        self.state().stop = true;
        self.ring();
    }

    /// Whether the thread answers before `until`, or has ended.
    pub fn ping(&self, until: Instant) -> bool {
        let mut state = self.state();
        state.asked += 1;
        let mine = state.asked;
        self.ring();
        self.wait(state, until, |state| state.answered >= mine || state.ended)
    }

    /// Whether the thread ends before `until`.
    pub fn ends(&self, until: Instant) -> bool {
        self.wait(self.state(), until, |state| state.ended)
    }

    fn wait(
        &self,
        mut state: MutexGuard<'_, State>,
        until: Instant,
        is_so: impl Fn(&State) -> bool,
    ) -> bool {
        while !is_so(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// The thread's own: what it polls for reading.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The thread's own, when the fd is readable: it is alive. → whether it is to end.
    pub fn answer(&self) -> bool {
        let _heard = rustix::io::read(&self.bell, &mut [0; 8]);
        let mut state = self.state();
        state.answered = state.asked;
        self.changed.notify_all();
        state.stop
    }

    /// The thread's own: it has ended, and does nothing any more.
    pub fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }
}
