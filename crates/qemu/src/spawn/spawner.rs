//! The one thread that starts every QEMU, and lives as long as the daemon.
//!
//! It has to be one and the same: a QEMU's parent-death signal comes when the *thread* that made it
//! ends. It sits in an empty network namespace of its own, made once, which all its children
//! inherit. That costs a QEMU nothing. One namespace each would cost 0.3 ms, or 90 at worst, and
//! its clean-up.

use std::io;
use std::sync::OnceLock;
use std::thread;

use rustix::thread::{UnshareFlags, unshare_unsafe};
use tokio::sync::{mpsc, oneshot};

use super::child::{Child, Plan, spawn};

struct Job {
    plan: Plan,
    answer: oneshot::Sender<io::Result<Child>>,
}

/// Queue length. Who finds it full waits: a start takes about a millisecond.
const JOBS_MAX: usize = 64;

/// Start QEMU on the spawner thread.
///
/// # Errors
/// From `clone` or from a step before `exec`, in words.
pub(super) async fn start(plan: Plan) -> io::Result<Child> {
    static SPAWNER: OnceLock<Result<mpsc::Sender<Job>, String>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| launch_thread().map_err(|e| e.to_string()));
    let jobs = spawner
        .as_ref()
        .map_err(|e| io::Error::other(format!("start the thread that starts QEMUs: {e}")))?;
    let (answer, child) = oneshot::channel();
    let has_ended = || io::Error::other("the thread that starts QEMUs has ended");
    jobs.send(Job { plan, answer }).await.map_err(|_| has_ended())?;
    child.await.map_err(|_| has_ended())?
}

fn launch_thread() -> io::Result<mpsc::Sender<Job>> {
    let (jobs, mut queue) = mpsc::channel::<Job>(JOBS_MAX);
    thread::Builder::new().name("qemu-spawner".to_owned()).spawn(move || {
        leave_network();
        while let Some(Job { plan, answer }) = queue.blocking_recv() {
            if answer.is_closed() {
                continue; // given up while it waited
            }
            // The caller does not wait any more: the child is killed.
            if let Err(Ok(child)) = answer.send(spawn(&plan)) {
                abandon(&child);
            }
        }
    })?;
    Ok(jobs)
}

/// Children need no network. Without the privilege they keep the daemon's; the sandbox still
/// stands.
#[expect(unsafe_code, reason = "unshare is unsafe for the sake of CLONE_FILES, which is not given")]
fn leave_network() {
    // SAFETY: NEWNET changes this thread's network namespace and no memory or fd table.
    if let Err(error) = unsafe { unshare_unsafe(UnshareFlags::NEWNET) } {
        tracing::warn!(%error, "QEMU runs without a network namespace of its own");
    }
}

fn abandon(child: &Child) {
    use std::os::fd::AsFd;

    use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
    let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
    let _ = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED);
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn as_many_as_are_wanted_at_once_are_started() {
        let plan = || Plan {
            program: CString::from(c"/bin/true"),
            arguments: vec![CString::from(c"true")],
            environment: Vec::new(),
            fds: Vec::new(),
            run_as: None,
        };
        let mut starts: JoinSet<_> = (0..4 * JOBS_MAX).map(|_| start(plan())).collect();
        while let Some(child) = starts.join_next().await {
            abandon(&child.expect("no panic").expect("started"));
        }
    }
}
