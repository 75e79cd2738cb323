//! `vmfork daemon start|stop|status`.

use std::io;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use tokio::task::spawn_blocking;
use vmfork_api::{HostInfo, Version};

use super::ps;
use crate::client::{Client, ConnectError, Query, Stream, connect, unreachable};
use crate::config::{DaemonAction, Endpoint, Global};
use crate::failure::{Exit, HintExt as _};
use crate::start::{self, DAEMON, Started};

/// The daemon ends its VMs before itself.
const STOP_BOUND: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct Status {
    running: bool,
    endpoint: String,
    state: String,
    pid: Option<i32>,
    version: Option<Version>,
    host: Option<HostInfo>,
}

pub(super) async fn run(global: &Global, action: DaemonAction) -> anyhow::Result<Exit> {
    match action {
        DaemonAction::Start => start(global).await,
        DaemonAction::Stop { force } => stop(global, force).await,
        DaemonAction::Status => status(global).await,
    }
}

async fn start(global: &Global) -> anyhow::Result<Exit> {
    let started = start::ensure(global).await?;
    if global.printer.json {
        return status(global).await;
    }
    if started == Started::WasThere {
        global.printer.note(&format!("{DAEMON} is already running at {}", global.endpoint));
    }
    Ok(Exit::Done)
}

async fn status(global: &Global) -> anyhow::Result<Exit> {
    let mut status = Status {
        running: false,
        endpoint: global.endpoint.to_string(),
        state: global.state_dir.display().to_string(),
        pid: None,
        version: None,
        host: None,
    };
    match connect(&global.endpoint).await {
        Err(ConnectError::Absent(_)) => {}
        Err(ConnectError::Other(error)) => return Err(unreachable(global, error)),
        Ok(stream) => {
            status.pid = peer(&stream).map(|pid| pid.as_raw_nonzero().get());
            drop(stream);
            let client = Client::unchecked(global);
            status.version = Some(client.get(Query::new("/v1/version")).await?);
            status.host = Some(client.get(Query::new("/v1/host")).await?);
            status.running = true;
        }
    }
    let exit = if status.running { Exit::Done } else { Exit::Failed };
    let printer = &global.printer;
    if printer.json {
        printer.with_schema(&status)?;
    } else if let (Some(version), Some(host)) = (&status.version, &status.host) {
        let pid = status.pid.map(|pid| format!(", pid {pid}")).unwrap_or_default();
        printer.line(&format!(
            "{DAEMON} {} is running at {}{pid}: {}, {} of {} memory admissible, {} of {} vCPUs",
            version.vmforkd,
            status.endpoint,
            crate::format::plural(u64::from(host.vms), "VM"),
            crate::format::size(host.memory_admissible_bytes),
            crate::format::size(host.memory_total_bytes),
            host.vcpus_admissible,
            host.vcpus_max,
        ))?;
        if !host.lost.is_empty() {
            let names: Vec<&str> = host.lost.iter().map(|vm| vm.name.as_str()).collect();
            printer.line(&format!("lost when the previous daemon ended: {}", names.join(" ")))?;
        }
    } else {
        printer.line(&format!("no daemon is running at {}", status.endpoint))?;
    }
    Ok(exit)
}

async fn stop(global: &Global, force: bool) -> anyhow::Result<Exit> {
    let stream = match connect(&global.endpoint).await {
        Err(ConnectError::Absent(_)) => {
            if global.printer.json {
                return status(global).await.map(|_| Exit::Done);
            }
            global.printer.note(&format!("No daemon is running at {}", global.endpoint));
            return Ok(Exit::Done);
        }
        Err(ConnectError::Other(error)) => return Err(unreachable(global, error)),
        Ok(stream) => stream,
    };
    if !matches!(global.endpoint, Endpoint::Unix(_)) {
        return Err(anyhow!(
            "the daemon at {} is remote, and a remote daemon cannot be stopped",
            global.endpoint
        ))
        .hint("run `vmfork daemon stop` or systemctl on its host");
    }
    let pid =
        peer(&stream).ok_or_else(|| anyhow!("the kernel does not report which process listens"))?;
    if pid == Pid::INIT {
        return Err(anyhow!("systemd owns the socket {}", global.endpoint)).hint(
            "find the unit with `systemctl list-sockets`, and stop it with `systemctl stop UNIT`",
        );
    }
    // Pinned before anything else is asked, so that no other process can get its number.
    let process = pidfd_open(pid, PidfdFlags::empty()).context("open the process of the daemon")?;
    drop(stream);
    if !force {
        let vms = ps::list(&Client::unchecked(global), false).await?;
        let names: Vec<String> =
            vms.into_iter().filter(|vm| !vm.state.has_ended()).map(|vm| vm.name).collect();
        if !names.is_empty() {
            return Err(anyhow!("these VMs are running: {}", names.join(" ")))
                .context(format!("stop {DAEMON}"))
                .hint("stop them with `vmfork kill`, or use `vmfork daemon stop --force`");
        }
    }
    pidfd_send_signal(&process, Signal::TERM)
        .context(format!("send SIGTERM to {DAEMON}"))
        .hint("use sudo if another user started it")?;
    let spinner = global.printer.spinner(format!("Stopping {DAEMON}"));
    let ended = spawn_blocking(move || wait(&process)).await.context("wait for the daemon")?;
    spinner.finish_and_clear();
    if !ended.context("wait for the daemon")? {
        bail!(
            "{DAEMON} (pid {}) did not exit within {} s; see its log",
            pid.as_raw_nonzero(),
            STOP_BOUND.as_secs()
        );
    }
    if global.printer.json {
        return status(global).await.map(|_| Exit::Done);
    }
    global.printer.note(&format!("Stopped {DAEMON}"));
    Ok(Exit::Done)
}

/// Whether the process has ended in time.
fn wait(process: &std::os::fd::OwnedFd) -> io::Result<bool> {
    let bound = Timespec { tv_sec: i64::try_from(STOP_BOUND.as_secs()).unwrap_or(60), tv_nsec: 0 };
    loop {
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut fds, Some(&bound)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The process that listens on the other side.
fn peer(stream: &Stream) -> Option<Pid> {
    let Stream::Unix(stream) = stream else { return None };
    let credentials = stream.peer_cred().ok()?;
    credentials.pid().and_then(Pid::from_raw)
}
