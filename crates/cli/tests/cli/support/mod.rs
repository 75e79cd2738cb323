//! A daemon that is not one, and the real `vmfork` run against it.
//!
//! [`FakeDaemon`] serves the routes of `vmfork-api` with made-up VMs. Its "guest" is this host:
//! `exec` runs the program here, files lie in a folder.

mod events;
mod lifetime;
mod routes;
mod snapshots;

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::runtime::Runtime;

pub(crate) use routes::Seen;
pub(crate) use snapshots::exported;

/// No command of these tests may take longer.
const BOUND: Duration = Duration::from_secs(30);

pub(crate) struct FakeDaemon {
    pub(crate) dir: TempDir,
    pub(crate) seen: Arc<Seen>,
    _runtime: Runtime,
}

impl FakeDaemon {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let runtime = Runtime::new().expect("a runtime");
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(dir.path().join("vmforkd.sock")).expect("a socket")
        };
        let seen = Arc::new(Seen::new(dir.path().join("guest")));
        let router = routes::router(Arc::clone(&seen));
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { dir, seen, _runtime: runtime }
    }

    /// The folder that stands for the guests' root.
    pub(crate) fn guest(&self) -> PathBuf {
        self.dir.path().join("guest")
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        command(self.dir.path(), args)
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        run(self.command(args), b"")
    }

    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        let ran = self.run(&[&["--json"], args].concat());
        let document: serde_json::Value =
            serde_json::from_slice(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
        assert_eq!(document["schema"], "vmfork/1", "{args:?}");
        document
    }
}

/// `vmfork` with `state` as its state folder, and none of our own environment's settings.
pub(crate) fn command(state: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmfork"));
    isolate(&mut command, state).args(args);
    command
}

pub(crate) fn isolate<'a>(command: &'a mut Command, state: &Path) -> &'a mut Command {
    for name in ["VMFORK_SOCKET", "VMFORK_HOST", "VMFORK_TOKEN", "NO_COLOR", "VMFORK_NO_PROGRESS"] {
        command.env_remove(name);
    }
    command.env("VMFORK_STATE", state)
}

/// What came of a command.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl std::fmt::Debug for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = self.stdout.len().min(2000);
        write!(
            f,
            "status {:?}\nstdout: {}\nstderr: {}",
            self.code,
            String::from_utf8_lossy(&self.stdout[..end]),
            self.stderr
        )
    }
}

impl Ran {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).expect("text")
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Runs a command to its end with `input` for its standard input.
pub(crate) fn run(mut command: Command, input: &[u8]) -> Ran {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("vmfork starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || {
        // Who doesn't read it to the end may leave.
        let _ = stdin.write_all(&input);
    });
    let ran = finish(child);
    feeder.join().expect("fed");
    ran
}

/// Waits for the end, within [`BOUND`].
pub(crate) fn finish(child: Child) -> Ran {
    let pid = child.id();
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || tx.send(child.wait_with_output()));
    match rx.recv_timeout(BOUND) {
        Ok(output) => output.expect("its output").into(),
        Err(_) => {
            send(pid, rustix::process::Signal::KILL);
            panic!("vmfork did not end within {} s", BOUND.as_secs());
        }
    }
}

pub(crate) fn send(pid: u32, signal: rustix::process::Signal) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a pid");
    rustix::process::kill_process(pid, signal).expect("a signal");
}

/// Polls until `done`, and fails if that takes too long.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + BOUND;
    while !done() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let _ = rustix::event::poll(&mut [], Some(&pause));
    }
}

pub(crate) fn answers(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}
