//! What programs leave behind when their channel is closed. That is processes that have not ended
//! yet after their hang-up, and outputs that a background process holds open.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::exec::Exec;
use crate::sys;

/// How long a program has after SIGHUP.
const KILL_AFTER: Duration = Duration::from_secs(2);
/// Most outputs that are kept open; the oldest is closed for another one.
const OUTPUTS_MAX: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// By process id, with the time of the SIGKILL; `None` once it was sent.
    processes: BTreeMap<i32, Option<Instant>>,
    outputs: BTreeMap<u64, OwnedFd>,
    next_id: u64,
}

impl Leftovers {
    /// The daemon does not listen to `exec` any more: hang it up. Its descriptors are the caller's
    /// to close.
    pub(crate) fn hang_up(&mut self, exec: &Exec, now: Instant) {
        if exec.has_ended() {
            return;
        }
        exec.signal(libc::SIGHUP);
        for signal in [libc::SIGHUP, libc::SIGCONT] {
            // Ended meanwhile: its reaping will say so.
            let _ = sys::kill(-exec.pid(), signal);
        }
        self.processes.insert(exec.pid(), Some(now + KILL_AFTER));
    }

    /// Keep reading these, so that their writers don't die of SIGPIPE.
    pub(crate) fn add_outputs(&mut self, outputs: impl Iterator<Item = OwnedFd>) {
        for fd in outputs {
            if self.outputs.len() >= OUTPUTS_MAX {
                self.outputs.pop_first();
            }
            self.outputs.insert(self.next_id, fd);
            self.next_id += 1;
        }
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
        self.outputs.iter().map(|(id, fd)| (*id, fd.as_fd()))
    }

    /// Read and drop; at the end, close.
    pub(crate) fn drain(&mut self, id: u64, scratch: &mut [u8]) {
        let Some(fd) = self.outputs.get(&id) else { return };
        match rustix::io::read(fd, scratch) {
            Ok(n) if n > 0 => {}
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(_) | Err(_) => {
                self.outputs.remove(&id);
            }
        }
    }

    pub(crate) fn reaped(&mut self, pid: i32) {
        self.processes.remove(&pid);
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.processes.values().flatten().min().copied()
    }

    pub(crate) fn tick(&mut self, now: Instant) {
        for (pid, kill_at) in &mut self.processes {
            if kill_at.take_if(|at| now >= *at).is_some() {
                // The group lives as long as its leader has not been reaped.
                let _ = sys::kill(-*pid, libc::SIGKILL);
            }
        }
    }
}
