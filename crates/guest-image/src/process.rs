//! Runs other programs: output line by line, a bound in time, and an end that takes their children
//! too.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

/// How long a look for cancellation and exit may be late.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// From the polite signal to the other one. mmdebstrap ends its own children in well under a
/// second.
const GRACE: Duration = Duration::from_secs(5);
/// After the kill, for the kernel to hand over the status.
const REAP_MAX: Duration = Duration::from_secs(5);
/// Lines of output kept for an error's text.
const TAIL_LINES_MAX: usize = 30;
/// A line longer than this is cut into several.
const LINE_BYTES_MAX: usize = 4096;

/// Ends a build or an import from another thread or from a signal handler's helper. Clones share
/// the flag.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Ask for the end. What is under way stops within about a tenth of a second, children within
    /// some seconds.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the end was asked for.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A program did not do what it was run for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    #[error("`{program}` is not installed")]
    NotFound { program: String },
    #[error("start `{program}`")]
    Start {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("read the output of `{program}`")]
    Output {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("`{program}` ended with {}{}", describe(*status), indent(tail))]
    Failed { program: String, status: ExitStatus, tail: Vec<String> },
    #[error("`{program}` did not exit within {} s{}", limit.as_secs(), indent(tail))]
    TimedOut { program: String, limit: Duration, tail: Vec<String> },
    #[error("cancelled")]
    Cancelled,
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn indent(tail: &[String]) -> String {
    tail.iter().map(|line| format!("\n    {line}")).collect()
}

/// Run `command` to its end, handing each line of its stdout and stderr, mixed as they come, to
/// `on_line`. The program gets a process group of its own. All of it is ended when `cancel` says
/// so, when `limit` has passed, or when this function fails. If this thread dies, the program gets
/// a signal.
///
/// # Errors
/// See [`RunError`]; an exit code other than 0 is one.
pub(crate) fn run(
    command: Command,
    cancel: &Cancel,
    limit: Duration,
    on_line: &mut dyn FnMut(&str),
) -> Result<(), RunError> {
    start(command, &[], cancel, limit, on_line)
}

/// The same for a program that starts many others and mounts things. It gets process and mount
/// namespaces of its own, so that nothing of it continues when it ends or we die. Needs root.
///
/// # Errors
/// See [`run`].
pub(crate) fn run_sealed(
    command: Command,
    cancel: &Cancel,
    limit: Duration,
    on_line: &mut dyn FnMut(&str),
) -> Result<(), RunError> {
    let seal = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"];
    start(command, &seal, cancel, limit, on_line)
}

fn start(
    command: Command,
    wrapper: &[&str],
    cancel: &Cancel,
    limit: Duration,
    on_line: &mut dyn FnMut(&str),
) -> Result<(), RunError> {
    let program = command.get_program().to_string_lossy().into_owned();
    if cancel.is_cancelled() {
        return Err(RunError::Cancelled);
    }
    if !on_path(&program) {
        return Err(RunError::NotFound { program });
    }
    let not_started = |source| RunError::Start { program: program.clone(), source };
    let (reader, writer) = io::pipe().map_err(not_started)?;
    let second = writer.try_clone().map_err(not_started)?;
    let mut command = dies_with_us(command, wrapper);
    let child = command
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(second)
        .process_group(0)
        .spawn()
        .map_err(not_started)?;
    drop(command); // it holds the writing ends, without which we would never see the end of file
    let mut group = Group { child, done: false };
    rustix::io::ioctl_fionbio(&reader, true).map_err(|e| not_started(e.into()))?;

    let mut lines = Lines::default();
    let deadline = Instant::now() + limit;
    let status = loop {
        let exited = group.try_wait().map_err(not_started)?;
        let open = lines
            .drain(&reader, on_line)
            .map_err(|source| RunError::Output { program: program.clone(), source })?;
        if let Some(status) = exited {
            break status;
        }
        if cancel.is_cancelled() {
            return Err(RunError::Cancelled);
        }
        if Instant::now() > deadline {
            return Err(RunError::TimedOut { program, limit, tail: lines.tail() });
        }
        // With the pipe closed but the program alive there is only time to wait for.
        let fd = reader.as_fd();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let polled = rustix::event::poll(if open { &mut fds } else { &mut [] }, Some(&TICK));
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(RunError::Output { program, source: e.into() }),
        }
    };
    lines.finish(on_line);
    if status.success() {
        Ok(())
    } else {
        Err(RunError::Failed { program, status, tail: lines.tail() })
    }
}

/// Run `command` and return what it wrote to stdout and stderr.
///
/// # Errors
/// See [`run`].
pub(crate) fn output(
    command: Command,
    cancel: &Cancel,
    limit: Duration,
) -> Result<String, RunError> {
    let mut text = String::new();
    run(command, cancel, limit, &mut |line| {
        text.push_str(line);
        text.push('\n');
    })?;
    Ok(text)
}

/// Whether `program` can be found the way `execvp` would.
pub(crate) fn on_path(program: &str) -> bool {
    if program.contains('/') {
        return std::path::Path::new(program).is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// The same command behind `wrapper`, killed by the kernel when we die. `setpriv` and `unshare` are
/// in util-linux, which every Debian has.
fn dies_with_us(command: Command, wrapper: &[&str]) -> Command {
    let mut wrapped = Command::new("setpriv");
    wrapped.args(["--pdeathsig", "KILL", "--"]).args(wrapper);
    wrapped.arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(key, value),
            None => wrapped.env_remove(key),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        wrapped.current_dir(dir);
    }
    wrapped
}

/// A child that leads a process group; dropping it ends the group.
struct Group {
    child: Child,
    done: bool,
}

impl Group {
    fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        self.done |= status.is_some();
        Ok(status)
    }

    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    /// Wait until the leader has ended, without reaping it: that would free its number, which is
    /// the group's name.
    fn leader_ended_within(&self, pid: Pid, limit: Duration) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        within(limit, || !matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(None)))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(pid) = self.pid().filter(|_| !self.done) else {
            return; // the leader is reaped: another process may have its pid
        };
        // Any of these may fail because the group has ended, which is the goal.
        let _ = rustix::process::kill_process_group(pid, Signal::TERM);
        self.leader_ended_within(pid, GRACE);
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        if self.leader_ended_within(pid, REAP_MAX) {
            let _ = self.child.wait();
        }
        // What was killed may still be on its way out of a system call that writes.
        within(REAP_MAX, || rustix::process::test_kill_process_group(pid).is_err());
    }
}

/// Whether `done` came true in time, looked at every tick.
fn within(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !done() {
        if Instant::now() > deadline {
            return false;
        }
        let _ = rustix::event::poll(&mut [], Some(&TICK));
    }
    true
}

/// Cuts bytes into lines and keeps the last of them. A carriage return ends a line too.
#[derive(Default)]
struct Lines {
    partial: Vec<u8>,
    tail: VecDeque<String>,
}

impl Lines {
    /// Take what is there; false at the end of file.
    fn drain(
        &mut self,
        mut reader: &io::PipeReader,
        on_line: &mut dyn FnMut(&str),
    ) -> io::Result<bool> {
        let mut buffer = [0_u8; 8192];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(n) => self.push(&buffer[..n], on_line),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn push(&mut self, bytes: &[u8], on_line: &mut dyn FnMut(&str)) {
        for &byte in bytes {
            if byte == b'\n' || byte == b'\r' {
                self.finish(on_line);
            } else {
                self.partial.push(byte);
                if self.partial.len() >= LINE_BYTES_MAX {
                    self.finish(on_line);
                }
            }
        }
    }

    fn finish(&mut self, on_line: &mut dyn FnMut(&str)) {
        if self.partial.is_empty() {
            return;
        }
        let line = String::from_utf8_lossy(&self.partial).trim_end().to_owned();
        self.partial.clear();
        on_line(&line);
        if self.tail.len() == TAIL_LINES_MAX {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    fn tail(&self) -> Vec<String> {
        self.tail.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn both_streams_come_as_lines() {
        let text = output(sh("echo one; echo two >&2; printf three"), &Cancel::default(), LIMIT);
        assert_eq!(text.unwrap(), "one\ntwo\nthree\n");
    }

    #[test]
    fn a_failure_carries_code_and_last_words() {
        let error =
            output(sh("echo it broke; exit 3"), &Cancel::default(), LIMIT).unwrap_err().to_string();
        assert_eq!(error, "`sh` ended with exit code 3\n    it broke");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = output(Command::new("no-such-program"), &Cancel::default(), LIMIT);
        assert_eq!(error.unwrap_err().to_string(), "`no-such-program` is not installed");
    }

    #[test]
    fn a_cancelled_program_takes_its_children_with_it() {
        let cancel = Cancel::default();
        let mut grandchild = None;
        let began = Instant::now();
        let result = run(sh("sleep 60 & echo $!; wait"), &cancel, LIMIT, &mut |line| {
            grandchild = line.parse::<u32>().ok();
            cancel.cancel();
        });
        assert!(matches!(result, Err(RunError::Cancelled)));
        assert!(began.elapsed() < LIMIT);
        let stat = format!("/proc/{}/stat", grandchild.expect("the shell told its child's pid"));
        // An orphan that is a zombie for init to collect is dead enough.
        let state = std::fs::read_to_string(stat).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "still alive: {state}");
    }

    #[test]
    fn a_program_that_hangs_is_ended_at_the_limit() {
        let result = output(sh("echo start; sleep 60"), &Cancel::default(), Duration::from_secs(1));
        let Err(RunError::TimedOut { tail, .. }) = result else { panic!("{result:?}") };
        assert_eq!(tail, ["start"]);
    }

    #[test]
    fn a_grandchild_that_keeps_the_pipe_open_does_not_keep_us() {
        let began = Instant::now();
        output(sh("sleep 30 & echo done"), &Cancel::default(), LIMIT).unwrap();
        assert!(began.elapsed() < Duration::from_secs(15));
    }
}
