//! A handle on a QEMU process: its end, its last words, and that nothing is left of it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_send_signal, waitid};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::watch;

use super::child::Child;

/// What is kept of QEMU's stderr: its end.
const STDERR_BYTES_MAX: usize = 16 << 10;
/// Lines of it in an error.
const STDERR_LINES: usize = 5;
/// After QEMU's end, its stderr may be held open by the shim's keeper: wait no longer than this for
/// its end.
const STDERR_DRAIN: Duration = Duration::from_millis(200);
/// How long a runtime that shuts down waits for a killed QEMU to be reaped.
const REAP_SECONDS: i64 = 5;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    Code(i32),
    Signal(i32),
    /// Somebody else has reaped it.
    Unknown,
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Unknown => f.write_str("unknown exit status"),
        }
    }
}

/// A running QEMU. Dropping it kills and reaps.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    exit: watch::Receiver<Option<ExitStatus>>,
    stderr: Arc<Mutex<Tail>>,
    stderr_done: watch::Receiver<bool>,
}

impl Process {
    /// Watch over a child. On a tokio runtime, which must have I/O enabled.
    pub(super) fn adopt(child: Child, stderr: OwnedFd) -> io::Result<Self> {
        let pidfd = Arc::new(child.pidfd);
        // From here on a failure leaves no process behind.
        let reaper = Reaper { pidfd: Arc::clone(&pidfd), reaped: false };
        let watched = watch_pidfd(pidfd.clone())?;
        let stderr = pipe::Receiver::from_owned_fd(stderr)?;
        let (exit_tx, exit) = watch::channel(None);
        let (done_tx, stderr_done) = watch::channel(false);
        let tail = Arc::new(Mutex::new(Tail::default()));
        tokio::spawn(wait_for_end(watched, reaper, exit_tx));
        tokio::spawn(keep_tail(stderr, tail.clone(), done_tx));
        Ok(Self { pid: child.pid, pidfd, exit, stderr: tail, stderr_done })
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Stays this process's, also after its end.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Wait for its end. As often as you like.
    pub async fn wait(&self) -> ExitStatus {
        self.exit().await
    }

    /// As [`Process::wait`], without holding on to the handle.
    pub fn exit(&self) -> impl Future<Output = ExitStatus> + Send + use<> {
        let mut exit = self.exit.clone();
        async move {
            let status = exit.wait_for(Option::is_some).await;
            status.ok().and_then(|status| *status).unwrap_or(ExitStatus::Unknown)
        }
    }

    /// How it ended, if it has.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        *self.exit.borrow()
    }

    pub fn is_alive(&self) -> bool {
        self.exit_status().is_none()
    }

    /// SIGKILL. That it is gone already is fine. [`Process::wait`] tells when it is done.
    pub fn kill(&self) {
        kill(&self.pidfd);
    }

    /// The end of what it wrote to stderr.
    pub fn stderr_tail(&self) -> String {
        self.stderr.lock().text()
    }

    /// The last few lines of stderr, complete once the process has ended; joined by `; `.
    pub async fn last_words(&self) -> String {
        if !self.is_alive() {
            let mut done = self.stderr_done.clone();
            let _ = tokio::time::timeout(STDERR_DRAIN, done.wait_for(|done| *done)).await;
        }
        last_lines(&self.stderr_tail())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.is_alive() {
            self.kill();
        }
    }
}

fn kill(pidfd: &OwnedFd) {
    // ESRCH: it has ended.
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let from = lines.len().saturating_sub(STDERR_LINES);
    lines.get(from..).unwrap_or_default().join("; ")
}

#[expect(unsafe_code, reason = "the fd has to stay open while it is registered")]
fn watch_pidfd(pidfd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the `AsyncFd` holds a reference to the `OwnedFd`, which stays open and keeps its
    // number until the last reference is dropped. No code takes it out of the `Arc`.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, tokio::io::Interest::READABLE) }?)
}

/// Sees to it that the child is reaped, even when the runtime drops the task that waits for it.
struct Reaper {
    pidfd: Arc<OwnedFd>,
    reaped: bool,
}

impl Reaper {
    fn reap(&mut self) -> Option<ExitStatus> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
            Ok(Some(status)) => exit_status(&status),
            Ok(None) => return None,
            Err(_) => ExitStatus::Unknown,
        };
        self.reaped = true;
        Some(status)
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        kill(&self.pidfd);
        let timeout = Timespec { tv_sec: REAP_SECONDS, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&*self.pidfd, PollFlags::IN)], Some(&timeout));
        let _ = self.reap();
    }
}

fn exit_status(status: &WaitIdStatus) -> ExitStatus {
    let code = status.exit_status().map(ExitStatus::Code);
    let signal = status.terminating_signal().map(ExitStatus::Signal);
    code.or(signal).unwrap_or(ExitStatus::Unknown)
}

async fn wait_for_end(
    pidfd: AsyncFd<Arc<OwnedFd>>,
    mut reaper: Reaper,
    exit: watch::Sender<Option<ExitStatus>>,
) {
    let status = loop {
        let Ok(mut ready) = pidfd.readable().await else { break ExitStatus::Unknown };
        if let Some(status) = reaper.reap() {
            break status;
        }
        ready.clear_ready();
    };
    exit.send_replace(Some(status));
}

async fn keep_tail(stderr: pipe::Receiver, tail: Arc<Mutex<Tail>>, done: watch::Sender<bool>) {
    let mut bytes = vec![0; 4096];
    while stderr.readable().await.is_ok() {
        match stderr.try_read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => {
                let text = bytes.get(..count).unwrap_or_default();
                tail.lock().push(text);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    done.send_replace(true);
}

/// The end of a stream.
#[derive(Debug, Default)]
struct Tail {
    bytes: VecDeque<u8>,
}

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let surplus = self.bytes.len().saturating_sub(STDERR_BYTES_MAX);
        self.bytes.drain(..surplus);
    }

    fn text(&self) -> String {
        let (front, back) = self.bytes.as_slices();
        String::from_utf8_lossy(&[front, back].concat()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_talkative_qemu_fills_no_memory() {
        let mut tail = Tail::default();
        for n in 0..10_000 {
            tail.push(format!("line {n}\n").as_bytes());
        }
        assert_eq!(tail.bytes.len(), STDERR_BYTES_MAX);
        assert!(tail.text().ends_with("line 9999\n"));
        assert_eq!(
            last_lines(&tail.text()),
            "line 9995; line 9996; line 9997; line 9998; line 9999"
        );
    }
}
