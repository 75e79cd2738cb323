//! `vmfork daemon start|stop|restart|status`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use tokio::task::spawn_blocking;
use vmfork_api::{HostInfo, Version};

use super::ps;
use crate::client::{Client, ConnectError, Query, find, unreachable};
use crate::config::{DaemonAction, Endpoint, Global};
use crate::failure::{Exit, HintExt as _};
use crate::start::{self, DAEMON, Launch, Started};

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
        DaemonAction::Restart { force } => restart(global, force).await,
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
    match find(&global.endpoint).await {
        Err(ConnectError::Absent(_)) => {}
        Err(ConnectError::Other(error)) => return Err(unreachable(global, error)),
        Ok(stream) => {
            status.pid = stream.peer().map(|pid| pid.as_raw_nonzero().get());
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
    let Some(daemon) = Running::find(global, "stop").await? else {
        if global.printer.json {
            return status(global).await.map(|_| Exit::Done);
        }
        global.printer.note(&format!("No daemon is running at {}", global.endpoint));
        return Ok(Exit::Done);
    };
    if !force {
        daemon.refuse_if_vms_run(global, "stop").await?;
    }
    daemon.end(global, Signal::TERM).await?;
    if global.printer.json {
        return status(global).await.map(|_| Exit::Done);
    }
    global.printer.note(&format!("Stopped {DAEMON}"));
    Ok(Exit::Done)
}

/// The sockets stay open, so a client that asks meanwhile waits.
async fn restart(global: &Global, force: bool) -> anyhow::Result<Exit> {
    let Some(daemon) = Running::find(global, "restart").await? else {
        return start(global).await;
    };
    if !force {
        daemon.refuse_if_vms_run(global, "restart").await?;
    }
    let launch = daemon.launch(global)?;
    let log = launch.log.clone();
    // So that no other command starts a daemon between the two.
    let lock = start::lock(global).await?;
    daemon.end(global, Signal::USR2).await?;
    start::launch(global, launch).await?;
    drop(lock);
    if global.printer.json {
        return status(global).await;
    }
    global.printer.note(&format!("Restarted {DAEMON}; its log is {}", log.display()));
    Ok(Exit::Done)
}

/// The daemon's process, pinned: no other process can get its number.
#[derive(Debug)]
struct Running {
    pid: Pid,
    process: OwnedFd,
}

impl Running {
    /// `None`: no daemon is running.
    async fn find(global: &Global, action: &str) -> anyhow::Result<Option<Self>> {
        let stream = match find(&global.endpoint).await {
            Err(ConnectError::Absent(_)) => return Ok(None),
            Err(ConnectError::Other(error)) => return Err(unreachable(global, error)),
            Ok(stream) => stream,
        };
        if !matches!(global.endpoint, Endpoint::Unix(_)) {
            return Err(anyhow!(
                "the daemon at {} is remote, and a remote daemon cannot be {}",
                global.endpoint,
                if action == "stop" { "stopped" } else { "restarted" },
            ))
            .hint(format!("run `vmfork daemon {action}` or systemctl on its host"));
        }
        let pid = stream
            .peer()
            .ok_or_else(|| anyhow!("the kernel does not report which process listens"))?;
        if pid == Pid::INIT {
            return Err(anyhow!("systemd owns the socket {}", global.endpoint)).hint(format!(
                "find the unit with `systemctl list-sockets`, and {action} it with \
                 `systemctl {action} UNIT`"
            ));
        }
        // Pinned before anything else is asked, so that no other process can get its number.
        let process =
            pidfd_open(pid, PidfdFlags::empty()).context("open the process of the daemon")?;
        Ok(Some(Self { pid, process }))
    }

    async fn refuse_if_vms_run(&self, global: &Global, action: &str) -> anyhow::Result<()> {
        let vms = ps::list(&Client::unchecked(global), false).await?;
        let names: Vec<String> =
            vms.into_iter().filter(|vm| !vm.state.has_ended()).map(|vm| vm.name).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(anyhow!("these VMs are running: {}", names.join(" ")))
            .context(format!("{action} {DAEMON}"))
            .hint(format!("stop them with `vmfork kill`, or use `vmfork daemon {action} --force`"))
    }

    /// Sends it `signal`, and waits until it has ended.
    async fn end(self, global: &Global, signal: Signal) -> anyhow::Result<()> {
        let Self { pid, process } = self;
        let name = if signal == Signal::USR2 { "SIGUSR2" } else { "SIGTERM" };
        pidfd_send_signal(&process, signal)
            .context(format!("send {name} to {DAEMON}"))
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
        Ok(())
    }

    /// How it was started, so that its successor gets the same flags and environment.
    fn launch(&self, global: &Global) -> anyhow::Result<Launch> {
        let process = PathBuf::from(format!("/proc/{}", self.pid.as_raw_nonzero()));
        let read = |name: &str| {
            fs::read(process.join(name))
                .with_context(|| format!("read how {DAEMON} was started"))
                .hint("use sudo if another user started it")
        };
        let environment = environment(&read("environ")?);
        let pid = self.pid.as_raw_nonzero().to_string();
        if environment.iter().any(|(key, value)| key == SYSTEMD_PID && *value == *pid) {
            return Err(anyhow!("systemd started {DAEMON}, and only systemd can restart it"))
                .hint("run `systemctl restart vmforkd`, which keeps the sockets too");
        }
        let program = fs::read_link(process.join("exe")).context("read which program it runs")?;
        let folder = fs::read_link(process.join("cwd")).context("read its working folder")?;
        Ok(Launch {
            program: not_deleted(program),
            args: arguments(&read("cmdline")?),
            environment: Some(environment),
            folder,
            log: log_of(&process).unwrap_or_else(|| global.state_dir.join("vmforkd.log")),
        })
    }
}

/// systemd sets this variable to the pid of the process that it starts.
const SYSTEMD_PID: &str = "SYSTEMD_EXEC_PID";

fn words(bytes: &[u8]) -> impl Iterator<Item = &OsStr> {
    bytes.strip_suffix(b"\0").unwrap_or(bytes).split(|byte| *byte == 0).map(OsStr::from_bytes)
}

/// Without the program's name.
fn arguments(cmdline: &[u8]) -> Vec<OsString> {
    words(cmdline).skip(1).map(OsStr::to_owned).collect()
}

fn environment(environ: &[u8]) -> Vec<(OsString, OsString)> {
    words(environ)
        .filter_map(|entry| {
            let entry = entry.as_bytes();
            let at = entry.iter().position(|byte| *byte == b'=')?;
            let (key, value) =
                (OsStr::from_bytes(&entry[..at]), OsStr::from_bytes(&entry[at + 1..]));
            Some((key.to_owned(), value.to_owned()))
        })
        .collect()
}

/// An upgrade replaces the program's file; the kernel then marks the old path as deleted.
fn not_deleted(program: PathBuf) -> PathBuf {
    let bytes = program.as_os_str().as_bytes();
    match bytes.strip_suffix(b" (deleted)") {
        Some(path) => PathBuf::from(OsStr::from_bytes(path)),
        None => program,
    }
}

/// The file that its errors go to; `None` if they go to a pipe or a terminal.
fn log_of(process: &Path) -> Option<PathBuf> {
    let path = fs::read_link(process.join("fd/2")).ok()?;
    let is_file = fs::metadata(&path).is_ok_and(|file| file.is_file());
    (path.is_absolute() && is_file).then_some(path)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_process_was_started_is_read_as_the_kernel_writes_it() {
        assert_eq!(arguments(b"vmforkd\0--state\0/a b\0"), ["--state", "/a b"]);
        assert_eq!(arguments(b"vmforkd\0--quota\0\0"), ["--quota", ""]);
        assert!(arguments(b"vmforkd\0").is_empty() && arguments(b"").is_empty());
        let read = environment(b"A=1=2\0EMPTY=\0odd\0");
        assert_eq!(read, [("A".into(), "1=2".into()), ("EMPTY".into(), "".into())]);
    }

    #[test]
    fn a_program_that_was_replaced_is_found_at_its_place() {
        let path = |text: &str| not_deleted(PathBuf::from(text));
        assert_eq!(path("/usr/bin/vmforkd (deleted)"), Path::new("/usr/bin/vmforkd"));
        assert_eq!(path("/usr/bin/vmforkd"), Path::new("/usr/bin/vmforkd"));
    }
}
