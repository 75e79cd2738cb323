//! A process all of whose threads stand still.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

/// How long a process may take to stop. It takes some 50 µs, more where processors are scarce.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to sleep between two looks.
const LOOK: Duration = Duration::from_micros(20);

/// Ends with the value: the process goes on.
#[derive(Debug)]
pub(crate) struct Stillness<'a> {
    pidfd: &'a OwnedFd,
}

impl<'a> Stillness<'a> {
    /// Stop a child of ours, and wait until it stands still.
    ///
    /// # Errors
    /// It has ended, is none of ours, or does not stop.
    pub(crate) fn begin(pidfd: &'a OwnedFd) -> io::Result<Self> {
        pidfd_send_signal(pidfd, Signal::STOP)?;
        let still = Self { pidfd };
        let deadline = Instant::now() + STOP_TIMEOUT;
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        while waitid(WaitId::PidFd(pidfd.as_fd()), options)?.is_none() {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            #[expect(
                clippy::disallowed_methods,
                reason = "a process handle does not tell of stops"
            )]
            std::thread::sleep(LOOK);
        }
        Ok(still)
    }
}

impl Drop for Stillness<'_> {
    fn drop(&mut self) {
        if let Err(errno) = pidfd_send_signal(self.pidfd, Signal::CONT) {
            tracing::debug!(%errno, "a process that has ended can't go on");
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::tap::pidfd_of;

    fn state(pid: u32) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("there");
        stat.rsplit(") ").next().and_then(|rest| rest.chars().next()).expect("a state")
    }

    #[test]
    fn a_process_stands_still_for_as_long_as_asked() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let pidfd = pidfd_of(child.id()).expect("pidfd");
        for _ in 0..2 {
            let still = Stillness::begin(&pidfd).expect("stop");
            assert_eq!(state(child.id()), 'T');
            drop(still);
            assert_ne!(state(child.id()), 'T');
        }
        child.kill().expect("kill");
        child.wait().expect("wait");
        assert!(Stillness::begin(&pidfd).is_err(), "it has ended");
    }
}
