//! Starts the daemon on demand.
//!
//! A lock in the state folder sees to it that two commands at once start one daemon. The daemon
//! gets a session of its own, so that neither Ctrl-C nor the end of the terminal reaches it.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use rustix::fs::{FlockOperation, flock};
use tokio::time::{Instant, sleep, timeout_at};
use vmfork_api::Version;

use crate::client::{Client, ConnectError, Query, find, find_now, unreachable};
use crate::config::{Endpoint, Global};
use crate::failure::HintExt as _;

/// From the start of the daemon to its first answer.
const START_BOUND: Duration = Duration::from_secs(10);

/// For another command that is starting the daemon: its bound, and a little.
const LOCK_BOUND: Duration = Duration::from_secs(12);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The part of the log's end that an error shows when the daemon exits during its start.
const LOG_TAIL_BYTES: u64 = 8 << 10;
const LOG_TAIL_LINES: usize = 5;

pub(crate) const DAEMON: &str = "vmforkd";

/// The first argument that makes this program [`become_detached`].
pub(crate) const DETACHED: &str = "__detached";

/// What had to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Started {
    WasThere,
    Now { pid: u32 },
}

/// Returns once a daemon answers.
pub(crate) async fn ensure(global: &Global) -> anyhow::Result<Started> {
    match find(&global.endpoint).await {
        Ok(_) => Ok(Started::WasThere),
        Err(ConnectError::Absent(error)) => match &global.endpoint {
            Endpoint::Unix(socket) if global.may_start => start(global, socket).await,
            _ => Err(unreachable(global, error)),
        },
        Err(ConnectError::Other(error)) => Err(unreachable(global, error)),
    }
}

/// A client of the daemon, which is started first if that is needed and allowed.
pub(crate) async fn reach(global: &Global) -> anyhow::Result<Client<'_>> {
    ensure(global).await?;
    Ok(Client::unchecked(global))
}

async fn start(global: &Global, socket: &Path) -> anyhow::Result<Started> {
    let program = find_daemon().with_context(|| format!("start {DAEMON}"))?;
    let lock = lock(global).await?;
    if find_now(&global.endpoint).await.is_ok() {
        return Ok(Started::WasThere);
    }
    let mut args: Vec<OsString> = vec!["--state".into(), global.state_dir.clone().into()];
    args.extend(["--socket".into(), socket.into()]);
    let log = global.state_dir.join("vmforkd.log");
    let how = Launch { program, args, environment: None, folder: "/".into(), log: log.clone() };
    let pid = launch(global, how).await?;
    drop(lock);
    global.printer.note(&format!("Started {DAEMON}; its log is {}", log.display()));
    Ok(Started::Now { pid })
}

/// How a daemon is started.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    /// `None`: the environment of this program.
    pub(crate) environment: Option<Vec<(OsString, OsString)>>,
    pub(crate) folder: PathBuf,
    /// Where its output goes.
    pub(crate) log: PathBuf,
}

/// Returns the process once the daemon answers. The lock must be held.
pub(crate) async fn launch(global: &Global, launch: Launch) -> anyhow::Result<u32> {
    let Launch { program, args, environment, folder, log: log_path } = launch;
    let spinner = global.printer.spinner(format!("Starting {DAEMON}"));
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .with_context(|| format!("open {}", log_path.display()))
        .hint("use sudo, or set --state or VMFORK_STATE to a folder that you own")?;
    let log_start = log.metadata().map(|metadata| metadata.len()).unwrap_or_default();
    // This program, even if its file has been replaced.
    let mut command = tokio::process::Command::new("/proc/self/exe");
    if let Some(environment) = environment {
        command.env_clear().envs(environment);
    }
    let mut child = command
        .arg(DETACHED)
        .arg(&program)
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("duplicate the descriptor of the log")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {}", program.display()))?;
    let pid = child.id().unwrap_or_default();
    let deadline = Instant::now() + START_BOUND;
    let client = Client::unchecked(global);
    let answer = async {
        loop {
            // If an earlier daemon's socket waits for this daemon, so does this request.
            if client.get::<Version>(Query::new("/v1/version")).await.is_ok() {
                return;
            }
            sleep(POLL_INTERVAL).await;
        }
    };
    let answered = tokio::select! {
        status = child.wait() => {
            let status = status.with_context(|| format!("wait for {DAEMON}"))?;
            return Err(anyhow!("{}", log_tail(&log_path, log_start)))
                .with_context(|| format!("{DAEMON} exited during its start ({status})"))
                .hint(format!("see the whole log in {}", log_path.display()));
        }
        answered = timeout_at(deadline, answer) => answered,
    };
    if answered.is_err() {
        // This command started it, and it serves no request.
        if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok())
            && let Some(pid) = rustix::process::Pid::from_raw(pid)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        return Err(anyhow!("{}", log_tail(&log_path, log_start)))
            .with_context(|| format!("{DAEMON} did not answer within {} s", START_BOUND.as_secs()))
            .hint(format!("see the whole log in {}", log_path.display()));
    }
    spinner.finish_and_clear();
    Ok(pid)
}

/// The one next to this program, else the one in `PATH`.
pub(crate) fn find_daemon() -> anyhow::Result<PathBuf> {
    let beside = env::current_exe().ok().and_then(|path| Some(path.parent()?.join(DAEMON)));
    let in_path = env::var_os("PATH").unwrap_or_default();
    beside
        .into_iter()
        .chain(env::split_paths(&in_path).map(|folder| folder.join(DAEMON)))
        .filter(|path| path.is_absolute())
        .find(|path| {
            fs::metadata(path)
                .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        })
        .ok_or_else(|| anyhow!("{DAEMON} is neither next to this program nor in PATH"))
        .hint("install vmforkd next to vmfork, or set VMFORK_HOST to a remote daemon")
}

/// Taken until it is dropped, by each command that starts a daemon of this state folder. Never
/// waits in the kernel, so that Ctrl-C is heard.
pub(crate) async fn lock(global: &Global) -> anyhow::Result<File> {
    let state = &global.state_dir;
    fs::create_dir_all(state)
        .with_context(|| format!("create the state folder {}", state.display()))
        .hint("use sudo, or set --state or VMFORK_STATE to a folder that you own")?;
    let path = state.join("vmfork-start.lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))
        .hint("use sudo, or set --state or VMFORK_STATE to a folder that you own")?;
    let deadline = Instant::now() + LOCK_BOUND;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).with_context(|| format!("lock {}", path.display())),
        }
        if Instant::now() >= deadline {
            return Err(anyhow!("another command still holds it after {} s", LOCK_BOUND.as_secs()))
                .with_context(|| format!("lock {}", path.display()))
                .hint(format!("another `vmfork` command is starting {DAEMON}; try again"));
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// The last lines that were written after `start`.
fn log_tail(path: &Path, start: u64) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(start.max(len.saturating_sub(LOG_TAIL_BYTES))))?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<String> =
        text.lines().filter(|line| !line.trim().is_empty()).map(crate::format::printable).collect();
    if lines.is_empty() {
        return format!("it wrote nothing to {}", path.display());
    }
    lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n")
}

/// `vmfork __detached PROGRAM ARGS…`: a new session, then `PROGRAM`. Returns only if that fails.
pub(crate) fn become_detached(argv: &[OsString]) -> anyhow::Error {
    let Some((program, args)) = argv.split_first() else {
        return anyhow!("no program is named");
    };
    if let Err(error) = rustix::process::setsid() {
        return anyhow::Error::new(error).context("leave the session");
    }
    let error = std::process::Command::new(program).args(args).exec();
    anyhow::Error::new(error).context(format!("run {}", Path::new(program).display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_tail_of_the_log_is_what_this_start_wrote() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "old").unwrap();
        let start = file.as_file().metadata().unwrap().len();
        assert!(log_tail(file.path(), start).starts_with("it wrote nothing"));
        for i in 0..8 {
            writeln!(file, "line {i}\n").unwrap();
        }
        assert_eq!(log_tail(file.path(), start), "line 3\nline 4\nline 5\nline 6\nline 7");
    }
}
