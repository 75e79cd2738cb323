//! The one thread that starts every QEMU, and lives as long as the daemon.
//!
//! It has to be one and the same: a QEMU's parent-death signal comes when the *thread* that made it ends. It sits
//! in an empty network namespace of its own, made once, which all its children inherit: that costs a QEMU
//! nothing, where one namespace each would cost 0.3 ms, or 90 at worst, and its clean-up.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc;
use std::thread;

use rustix::thread::{UnshareFlags, unshare_unsafe};
use tokio::sync::oneshot;

use super::child::{Child, Plan, spawn};

struct Job {
    plan: Plan,
    answer: oneshot::Sender<io::Result<Child>>,
}

/// Queue length; the daemon starts a few at a time.
const JOBS_MAX: usize = 64;

/// Start QEMU on the spawner thread.
///
/// # Errors
/// From `clone` or from a step before `exec`, in words.
pub(super) async fn start(plan: Plan) -> io::Result<Child> {
    static SPAWNER: OnceLock<Result<mpsc::SyncSender<Job>, String>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| launch_thread().map_err(|e| e.to_string()));
    let jobs = spawner
        .as_ref()
        .map_err(|e| io::Error::other(format!("start the thread that starts QEMUs: {e}")))?;
    let (answer, child) = oneshot::channel();
    jobs.try_send(Job { plan, answer }).map_err(|error| {
        io::Error::other(match error {
            mpsc::TrySendError::Full(_) => "too many QEMUs are being started at once",
            mpsc::TrySendError::Disconnected(_) => "the thread that starts QEMUs has ended",
        })
    })?;
    child.await.map_err(|_| io::Error::other("the thread that starts QEMUs has ended"))?
}

fn launch_thread() -> io::Result<mpsc::SyncSender<Job>> {
    let (jobs, queue) = mpsc::sync_channel::<Job>(JOBS_MAX);
    thread::Builder::new().name("qemu-spawner".to_owned()).spawn(move || {
        leave_network();
        for Job { plan, answer } in queue {
            // Nobody waits any more: what comes of it is killed by the drop below.
            if let Err(Ok(child)) = answer.send(spawn(&plan)) {
                abandon(&child);
            }
        }
    })?;
    Ok(jobs)
}

/// Children need no network. Without the privilege they keep the daemon's; the sandbox still stands.
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
