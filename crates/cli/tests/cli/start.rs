//! Starting a daemon on demand, or not, with a fake `vmforkd` beside a copy of the real `vmfork`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{Ran, answers, command, finish, isolate, run};
use tempfile::TempDir;

/// Answers `GET /v1/version` and `/v1/vms`, and counts its starts.
const GOOD: &str = r#"#!/usr/bin/python3
import http.server, os, socketserver, sys
state, path = sys.argv[2], sys.argv[4]
assert sys.argv[1] == "--state" and sys.argv[3] == "--socket", sys.argv
with open(state + "/starts", "a") as starts:
    starts.write(f"{os.getpid()} {os.getsid(0)} {sys.stdin.read()}\n")
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def address_string(self): return "client"
    def do_GET(self):
        body = b"[]" if self.path.startswith("/v1/vms") else (
            b'{"schema":"vmfork/1","vmforkd":"0.1.0","api":"1","qemu":null,"kernel":"6"}')
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
if os.path.exists(path): os.unlink(path)
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 16
Server(path, Handler).serve_forever()
"#;

const BAD: &str =
    "#!/bin/sh\necho 'starting'\necho 'no userfaultfd: permission denied' >&2\nexit 3\n";

struct Install {
    dir: TempDir,
}

impl Install {
    fn new(vmforkd: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        let text = dir.path().join("text");
        std::fs::write(&text, vmforkd).unwrap();
        // Not by ourselves: a program that another test starts meanwhile would inherit the fd for a
        // moment, and a file that is open for writing can't be run.
        let install = |from: &Path, name: &str| {
            let mut command = Command::new("install");
            assert!(
                command
                    .args(["-m", "755"])
                    .arg(from)
                    .arg(bin.join(name))
                    .status()
                    .unwrap()
                    .success()
            );
        };
        install(Path::new(env!("CARGO_BIN_EXE_vmfork")), "vmfork");
        install(&text, "vmforkd");
        Self { dir }
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.dir.path().join("bin/vmfork"));
        isolate(&mut command, &self.state()).args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        run(self.command(args), b"")
    }
}

fn socket(state: &Path) -> PathBuf {
    state.join("vmforkd.sock")
}

#[test]
fn without_a_daemon_and_leave_to_start_one_the_command_fails() {
    let state = tempfile::tempdir().unwrap();
    let ran = run(command(state.path(), &["ps", "--no-start"]), b"");
    assert_eq!(ran.code, Some(1));
    let socket = socket(state.path()).display().to_string();
    assert!(ran.stderr.starts_with(&format!("error: no daemon answers at {socket}\n")), "{ran:?}");
    assert!(ran.stderr.contains("  caused by: No such file or directory"), "{ran:?}");
    assert!(ran.stderr.contains("\nhint: start it with `vmfork daemon start`, "), "{ran:?}");
    // A socket on which no process listens any more is the same.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let ran = run(command(state.path(), &["ps", "--no-start"]), b"");
    assert!(ran.stderr.contains("Connection refused"), "{ran:?}");
}

#[test]
fn status_and_stop_and_version_start_nothing() {
    let install = Install::new(GOOD);
    assert_eq!(install.run(&["daemon", "status"]).code, Some(1));
    assert_eq!(install.run(&["daemon", "stop"]).code, Some(0));
    assert_eq!(install.run(&["version"]).code, Some(0));
    assert!(!answers(&socket(&install.state())));
}

#[test]
fn commands_at_once_start_one_daemon_and_stop_ends_it() {
    let install = Install::new(GOOD);
    let children: Vec<_> = (0..4)
        .map(|_| {
            install
                .command(&["ps"])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let ran: Vec<Ran> = children.into_iter().map(finish).collect();
    assert!(ran.iter().all(|ran| ran.code == Some(0)), "{ran:?}");
    let told = ran.iter().filter(|ran| ran.stderr.contains("Started vmforkd")).count();
    let starts = std::fs::read_to_string(install.state().join("starts")).unwrap();
    let stopped = install.run(&["daemon", "stop"]);
    assert_eq!((told, starts.lines().count()), (1, 1), "{starts}");
    // It leads a session of its own, and has no terminal.
    let words: Vec<&str> = starts.split_whitespace().collect();
    assert_eq!(words.len(), 2);
    assert_eq!(words[0], words[1], "{starts}");
    assert_eq!((stopped.code, stopped.stderr.as_str()), (Some(0), "Stopped vmforkd\n"));
    assert!(!answers(&socket(&install.state())));
    // Gone, or at most waiting for its new parent to take note.
    let cmdline = std::fs::read(format!("/proc/{}/cmdline", words[0])).unwrap_or_default();
    assert!(cmdline.is_empty());
}

#[test]
fn restart_ends_the_daemon_and_starts_it_with_the_same_flags() {
    let install = Install::new(GOOD);
    assert_eq!(install.run(&["daemon", "start"]).code, Some(0));
    let restarted = install.run(&["daemon", "restart", "--force"]);
    assert_eq!(restarted.code, Some(0), "{restarted:?}");
    assert!(restarted.stderr.starts_with("Restarted vmforkd; its log is "), "{restarted:?}");
    let starts = std::fs::read_to_string(install.state().join("starts")).unwrap();
    let started: Vec<&str> = starts.split_whitespace().collect();
    install.run(&["daemon", "stop"]);
    // Another process, of a session of its own as the first.
    assert_eq!(started.len(), 4, "{starts}");
    assert_ne!(started[0], started[2]);
    assert_eq!(started[2], started[3]);
    assert!(!answers(&socket(&install.state())));
}

#[test]
fn stop_and_restart_want_force_while_vms_run() {
    let daemon = crate::support::FakeDaemon::start();
    for action in ["stop", "restart"] {
        // Or this test would end: it is what listens.
        let ran = daemon.run(&["daemon", action]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(
            ran.stderr.starts_with(&format!(
                "error: {action} vmforkd\n  caused by: these VMs are running: web"
            )),
            "{ran:?}"
        );
        assert!(ran.stderr.contains(&format!("`vmfork daemon {action} --force`")), "{ran:?}");
    }
}

#[test]
fn a_daemon_that_ends_at_once_is_told_by_its_last_words() {
    let install = Install::new(BAD);
    let ran = install.run(&["ps"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(
        ran.stderr.starts_with(
            "error: vmforkd exited during its start (exit status: 3)\n  caused by: starting\n             \
             no userfaultfd: permission denied\n\nhint: see the whole log in "
        ),
        "{ran:?}"
    );
    // The doctor has this as a check, and looks on.
    let ran = install.run(&["doctor"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.text().contains("starting; no userfaultfd: permission denied"), "{ran:?}");
    assert!(ran.text().contains("image-build"), "{ran:?}");
}

#[test]
fn images_are_listed_without_a_daemon() {
    let install = Install::new(BAD);
    let ran = install.run(&["image", "ls", "--json"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let document: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(document["images"], serde_json::json!([]));
    let ran = install.run(&["image", "rm", "nope"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let ran = install.run(&["image", "build", "--spec", "/no/such.json"]);
    assert!(ran.stderr.starts_with("error: read the image spec /no/such.json\n"), "{ran:?}");
}

#[test]
fn a_daemon_over_tcp_gets_the_token() {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let served = std::thread::spawn(move || {
        let mut requests = String::new();
        // The first connection only looks whether somebody is there.
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = [0; 4096];
            let len = stream.read(&mut buffer).unwrap();
            requests.push_str(&String::from_utf8_lossy(&buffer[..len]));
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]");
        }
        requests
    });
    let state = tempfile::tempdir().unwrap();
    let mut ps = command(state.path(), &["ps"]);
    ps.env("VMFORK_HOST", format!("tcp://{address}")).env("VMFORK_TOKEN", "s3cret");
    let ran = run(ps, b"");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let requests = served.join().unwrap();
    assert!(requests.contains("authorization: Bearer s3cret\r\n"), "{requests}");
    assert!(requests.contains(&format!("host: {address}\r\n")), "{requests}");
}
