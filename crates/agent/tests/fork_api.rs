//! The fork API end to end: the C library and the Python module, the real agent, a made-up daemon.
//!
//! Each promise is checked in both languages, by programs that print the same.

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use support::{Daemon, WINDOW, identity, wait_until};
use vmfork_agent_proto::{Kind, MessageInfo, RequestError, TicketClone, ToGuest, ToHost, Worker};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    C,
    Python,
}

const BOTH: [Language; 2] = [Language::C, Language::Python];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The C probe, built once per test program.
fn c_probe() -> &'static Path {
    static PROBE: OnceLock<PathBuf> = OnceLock::new();
    PROBE.get_or_init(|| {
        let c = repository().join("guest/c");
        let probe = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe");
        let status = Command::new("cc")
            .args(["-std=gnu99", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
            .arg(&c)
            .arg("-o")
            .arg(&probe)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/probe.c"))
            .arg(c.join("vmfork.c"))
            .status()
            .expect("cc is installed");
        assert!(status.success());
        probe
    })
}

struct Probe {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Probe {
    fn start(daemon: &Daemon, language: Language, args: &str) -> Self {
        let mut command = match language {
            Language::C => Command::new(c_probe()),
            Language::Python => {
                let mut command = Command::new("/usr/bin/python3");
                command.args(["-B", "-S"]);
                command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/probe.py"));
                command
            }
        };
        let mut child = command
            .args(args.split(' '))
            .env("PYTHONPATH", repository().join("guest/python"))
            .env("VMFORK_RUN_DIR", daemon.folder().join("run"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("start the probe");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, out }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).expect("read");
        line.trim_end().to_owned()
    }

    /// All that is left, once all of its processes have ended.
    fn rest(mut self) -> (String, i32) {
        let mut text = String::new();
        self.out.read_to_string(&mut text).expect("read");
        let code = self.child.wait().expect("wait").code().unwrap_or(-1);
        (text, code)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn error(errno: i32) -> ToGuest {
    ToGuest::Error(RequestError { errno, message: "because".to_owned() })
}

/// Answer a probe's request for a ticket and wait for its `Clone`, whose channel is returned.
fn until_clone(daemon: &mut Daemon, granted: u32) -> u32 {
    let (channel, message) = daemon.message();
    assert!(matches!(message, ToHost::RequestTicket { .. }), "{message:?}");
    assert_eq!(channel % 2, 1, "the agent's channels are odd");
    daemon.send(channel, &ToGuest::Ticket { ticket: 9, granted });
    let (channel, message) = daemon.message();
    assert_eq!(message, ToHost::Clone { ticket: 9 });
    channel
}

/// Take the message of a `Send` on `channel`.
fn stream_of(daemon: &mut Daemon, channel: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let frame = daemon.frame();
        assert_eq!((frame.channel, frame.kind), (channel, Kind::Data), "{frame:?}");
        bytes.extend_from_slice(&frame.payload);
        if frame.end {
            return bytes;
        }
        let credit = u32::try_from(frame.payload.len()).expect("short");
        daemon.send(channel, &ToGuest::Credit { kind: Kind::Data as u8, bytes: credit });
    }
}

#[test]
fn a_parent_clones_receives_and_joins() {
    for language in BOTH {
        let mut daemon = Daemon::start();
        let mut probe = Probe::start(&daemon, language, "whole 5 1 0 0");
        let clone = until_clone(&mut daemon, 3);
        assert_eq!(probe.line(), "granted 3");
        daemon.prepare(1);
        daemon.send(0, &ToGuest::Continue { fork: 1 });
        daemon.send(clone, &ToGuest::Ok { value: 2 });

        let length = 1_000_000;
        let (channel, message) = daemon.message();
        assert_eq!(message, ToHost::Recv { ticket: 9, vmid: None });
        let info = MessageInfo { vmid: 2, length_bytes: length as u64 };
        daemon.send(channel, &ToGuest::Incoming(info));
        let (mut sent, mut window) = (0, WINDOW);
        while sent < length {
            let chunk = 50_000.min(length - sent);
            if window < chunk {
                match daemon.message_on(channel) {
                    ToHost::Credit { bytes, .. } => window += bytes as usize,
                    other => panic!("{other:?}"),
                }
                continue;
            }
            sent += chunk;
            window -= chunk;
            daemon.stream(Kind::Data, channel, sent == length, &vec![3; chunk]);
        }
        let mut next = daemon.message();
        while matches!(next.1, ToHost::Credit { .. }) {
            next = daemon.message();
        }
        let (channel, message) = next;
        assert_eq!(message, ToHost::Recv { ticket: 9, vmid: None });
        daemon.send(channel, &ToGuest::Incoming(MessageInfo { vmid: 1, length_bytes: 0 }));
        daemon.stream(Kind::Data, channel, true, b"");
        let (channel, _) = daemon.message();
        daemon.send(channel, &error(libc::EPIPE));

        let (channel, message) = daemon.message();
        assert_eq!(message, ToHost::Join { ticket: 9 });
        let worker = |vmid, error: Option<&str>| Worker { vmid, error: error.map(str::to_owned) };
        let workers = vec![worker(1, None), worker(2, None), worker(3, Some("QEMU died"))];
        daemon.send(channel, &ToGuest::Ended { workers });
        let (text, code) = probe.rest();
        assert_eq!(
            text,
            "from 2: 1000000 bytes, sum 3000000\nfrom 1: 0 bytes, sum 0\nrecv -32\n\
             worker 1: done\nworker 2: done\nworker 3: QEMU died\n1 failed\n",
            "{language:?}"
        );
        assert_eq!(code, 0);
    }
}

#[test]
fn in_a_clone_each_worker_speaks_for_itself_after_the_identity() {
    for language in BOTH {
        let mut daemon = Daemon::start();
        let mut probe = Probe::start(&daemon, language, "whole 6 1 400000 0");
        until_clone(&mut daemon, 6);
        probe.line();
        daemon.prepare(1);
        let ticket = TicketClone { ticket: 9, workers: 3, channel: None };
        daemon.send(0, &ToGuest::Identity(identity(1, 4, Some(ticket))));
        assert_eq!(daemon.message_on(0), ToHost::Confirmed { fork: 1 });
        let lines = workers_send_and_exit(&mut daemon, 4..=6, 400_000);
        assert_eq!(lines, 3);
        let (text, code) = probe.rest();
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            ["worker 4 of 4 sends 0", "worker 5 of 5 sends 0", "worker 6 of 6 sends 0"]
        );
        assert_eq!(code, 0, "{language:?}");
        assert_eq!(daemon.effect("run/vmid"), "4\n");
    }
}

/// Play the daemon for workers that send one message each and exit. Returns how many did.
fn workers_send_and_exit(
    daemon: &mut Daemon,
    vmids: std::ops::RangeInclusive<u32>,
    bytes: usize,
) -> usize {
    let mut sending = BTreeMap::new();
    let mut exited = 0;
    let mut sent = 0;
    let all = vmids.clone().count();
    while exited < all {
        let frame = daemon.frame();
        if frame.kind == Kind::Data {
            let (vmid, data): &mut (u32, Vec<u8>) = sending.get_mut(&frame.channel).expect("known");
            data.extend_from_slice(&frame.payload);
            let credit = u32::try_from(frame.payload.len()).expect("short");
            let letter = b'a' + u8::try_from(*vmid).expect("small");
            if frame.end {
                assert!(data.len() == bytes && data.iter().all(|byte| *byte == letter));
                sent += 1;
                daemon.send(frame.channel, &ToGuest::Ok { value: 0 });
            } else {
                let credit = ToGuest::Credit { kind: Kind::Data as u8, bytes: credit };
                daemon.send(frame.channel, &credit);
            }
            continue;
        }
        match serde_json::from_slice(&frame.payload).expect("a message") {
            ToHost::Send { vmid, length_bytes } => {
                assert!(vmids.contains(&vmid) && length_bytes == bytes as u64);
                sending.insert(frame.channel, (vmid, Vec::new()));
            }
            ToHost::ExitClone { vmid, error: None } => {
                assert!(vmids.contains(&vmid));
                exited += 1;
                daemon.send(frame.channel, &ToGuest::Ok { value: 0 });
            }
            other => panic!("{other:?}"),
        }
    }
    sent
}

#[test]
fn a_worker_that_dies_without_exit_has_failed() {
    for language in BOTH {
        let mut daemon = Daemon::start();
        let mut probe = Probe::start(&daemon, language, "whole 2 1 10 2");
        until_clone(&mut daemon, 2);
        probe.line();
        daemon.prepare(1);
        let ticket = TicketClone { ticket: 9, workers: 2, channel: None };
        daemon.send(0, &ToGuest::Identity(identity(1, 1, Some(ticket))));
        assert_eq!(daemon.message_on(0), ToHost::Confirmed { fork: 1 });
        let (mut died, mut exited) = (false, false);
        while !(died && exited) {
            let frame = daemon.frame();
            if frame.kind == Kind::Data {
                daemon.send(frame.channel, &ToGuest::Ok { value: 0 });
                continue;
            }
            match serde_json::from_slice(&frame.payload).expect("a message") {
                ToHost::Send { vmid: 1, .. } => {}
                ToHost::ExitClone { vmid: 1, error: None } => {
                    exited = true;
                    daemon.send(frame.channel, &ToGuest::Ok { value: 0 });
                }
                ToHost::ExitClone { vmid: 2, error: Some(why) } => {
                    assert!(why.contains("without sf_exit"), "{why}");
                    died = true;
                }
                other => panic!("{language:?}: {other:?}"),
            }
        }
        probe.rest();
    }
}

#[test]
fn a_clone_whose_program_has_gone_reports_all_of_its_workers() {
    let mut daemon = Daemon::start();
    let mut probe = Probe::start(&daemon, Language::C, "whole 3 1 10 0");
    until_clone(&mut daemon, 3);
    daemon.prepare(1);
    probe.child.kill().expect("ours");
    probe.child.wait().expect("wait");
    let ticket = TicketClone { ticket: 9, workers: 3, channel: None };
    daemon.send(0, &ToGuest::Identity(identity(1, 1, Some(ticket))));
    assert_eq!(daemon.message_on(0), ToHost::Confirmed { fork: 1 });
    let mut failed = Vec::new();
    while failed.len() < 3 {
        match daemon.message().1 {
            ToHost::ExitClone { vmid, error: Some(_) } => failed.push(vmid),
            other => panic!("{other:?}"),
        }
    }
    failed.sort_unstable();
    assert_eq!(failed, [1, 2, 3]);
}

#[test]
fn what_waits_while_the_vm_is_forked_is_cancelled_in_the_clone_only() {
    for language in BOTH {
        for (call, in_clone) in [("join", true), ("recv", true), ("kill", false)] {
            let mut daemon = Daemon::start();
            let probe = Probe::start(&daemon, language, call);
            let (channel, _) = daemon.message();
            daemon.prepare(1);
            if in_clone {
                daemon.send(0, &ToGuest::Identity(identity(1, 1, None)));
                assert_eq!(daemon.message_on(0), ToHost::Confirmed { fork: 1 });
                assert_eq!(probe.rest().0, format!("{call} -{}\n", libc::ECANCELED));
            } else {
                daemon.send(0, &ToGuest::Continue { fork: 1 });
                daemon.send(channel, &ToGuest::Ended { workers: Vec::new() });
                assert_eq!(probe.rest().0, format!("{call} 0\n"));
            }
        }
    }
}

#[test]
fn a_program_that_goes_away_abandons_its_request() {
    let mut daemon = Daemon::start();
    let mut probe = Probe::start(&daemon, Language::C, "recv");
    let (channel, message) = daemon.message();
    assert_eq!(message, ToHost::Recv { ticket: 77, vmid: Some(3) });
    probe.child.kill().expect("ours");
    assert_eq!(daemon.message_on(channel), ToHost::Abandon);
    // A late answer finds no receiver, and does no harm.
    daemon.send(channel, &ToGuest::Incoming(MessageInfo { vmid: 3, length_bytes: 1 }));
    daemon.stream(Kind::Data, channel, true, b"x");
    daemon.send(0, &ToGuest::Ping { token: 1 });
    assert_eq!(daemon.message_on(0), ToHost::Pong { token: 1 });
}

#[test]
fn the_hosts_errors_and_the_loss_of_the_host_reach_the_program() {
    for language in BOTH {
        let mut daemon = Daemon::start();
        let probe = Probe::start(&daemon, language, "whole 4 0 0 0");
        let (channel, _) = daemon.message();
        daemon.send(channel, &error(libc::EAGAIN));
        assert_eq!(probe.rest(), (format!("granted -{}\n", libc::EAGAIN), 1));

        let mut probe = Probe::start(&daemon, language, "whole 4 0 0 0");
        let clone = until_clone(&mut daemon, 4);
        probe.line();
        daemon.prepare(1);
        daemon.send(0, &ToGuest::Continue { fork: 1 });
        daemon.send(clone, &error(libc::EIO));
        assert_eq!(probe.rest(), (format!("clone -{}\n", libc::EIO), 1));

        let probe = Probe::start(&daemon, language, "join");
        daemon.message();
        daemon.reconnect();
        assert_eq!(probe.rest().0, format!("join -{}\n", libc::ECONNRESET));

        // In a parent there is no receiver, however much is sent.
        for call in ["exit", "send"] {
            let probe = Probe::start(&daemon, language, call);
            assert_eq!(probe.rest().0, format!("{call} -{}\n", libc::EPERM));
        }
        let probe = Probe::start(&daemon, language, "ticket 0");
        assert_eq!(probe.rest().0, format!("ticket -{}\n", libc::EINVAL));
        // An answer to another question is no success.
        let probe = Probe::start(&daemon, language, "join");
        let (channel, _) = daemon.message();
        daemon.send(channel, &ToGuest::Ok { value: 0 });
        assert_eq!(probe.rest().0, format!("join -{}\n", libc::EPROTO));
        assert_eq!(daemon.frame_within(Duration::from_millis(50)), None);
    }
}

#[test]
fn a_message_that_the_host_turns_down_leaves_the_worker_in_step() {
    for language in BOTH {
        let mut daemon = Daemon::start();
        daemon.prepare(1);
        daemon.send(0, &ToGuest::Identity(identity(1, 1, None)));
        daemon.message_on(0);
        let probe = Probe::start(&daemon, language, "send");
        let (channel, message) = daemon.message();
        assert_eq!(message, ToHost::Send { vmid: 1, length_bytes: 3_000_000 });
        daemon.send(channel, &error(libc::ENOSPC));
        assert_eq!(probe.rest().0, format!("send -{}\n", libc::ENOSPC));
        while daemon.frame_within(Duration::from_millis(50)).is_some() {}
        let probe = Probe::start(&daemon, language, "send");
        let (channel, _) = daemon.message();
        assert_eq!(stream_of(&mut daemon, channel).len(), 3_000_000);
        daemon.send(channel, &ToGuest::Ok { value: 0 });
        assert_eq!(probe.rest().0, "send 0\n");
    }
}

#[test]
fn a_sender_that_dies_in_the_middle_abandons_without_a_busy_loop() {
    let mut daemon = Daemon::start();
    daemon.prepare(1);
    daemon.send(0, &ToGuest::Identity(identity(1, 1, None)));
    daemon.message_on(0);
    let mut probe = Probe::start(&daemon, Language::C, "send");
    let (channel, _) = daemon.message();
    // It stands at the end of its window.
    let mut bytes = 0;
    while let Some(frame) = daemon.frame_within(Duration::from_millis(200)) {
        bytes += frame.payload.len();
    }
    assert_eq!(bytes, WINDOW);
    probe.child.kill().expect("ours");
    assert_eq!(daemon.message_on(channel), ToHost::Abandon);
}

#[test]
fn garbage_on_the_socket_ends_that_connection_alone() {
    let mut daemon = Daemon::start();
    let mut stream = UnixStream::connect(daemon.fork_socket()).expect("connect");
    stream.set_read_timeout(Some(support::PATIENCE)).expect("timeout");
    stream.write_all(&[0xff; 24]).expect("write");
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).expect("an answer, then the end");
    assert_eq!(reply[..4], (-libc::EPROTO).to_ne_bytes());
    let idle: Vec<UnixStream> =
        (0..300).map(|_| UnixStream::connect(daemon.fork_socket()).expect("connect")).collect();
    let probe = Probe::start(&daemon, Language::C, "kill");
    let (channel, _) = daemon.message();
    daemon.send(channel, &ToGuest::Ended { workers: Vec::new() });
    assert_eq!(probe.rest().0, "kill 0\n");
    drop(idle);
    wait_until("the descriptors are given back", || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", daemon.agent.id())).expect("it runs");
        fds.count() < 40
    });
}

/// Two programs ask for the clones of one ticket; one is granted, the other refused without having
/// heard of it when the VM is forked.
#[test]
fn the_program_whose_request_was_granted_becomes_the_worker() {
    let mut daemon = Daemon::start();
    let mut refused = Probe::start(&daemon, Language::C, "whole 1 0 10 0");
    until_clone(&mut daemon, 1);
    let mut granted = Probe::start(&daemon, Language::C, "whole 1 0 10 0");
    let channel = until_clone(&mut daemon, 1);
    assert_eq!((refused.line(), granted.line()), ("granted 1".into(), "granted 1".into()));
    daemon.prepare(1);
    let ticket = TicketClone { ticket: 9, workers: 1, channel: Some(channel) };
    daemon.send(0, &ToGuest::Identity(identity(1, 1, Some(ticket))));
    assert_eq!(daemon.message_on(0), ToHost::Confirmed { fork: 1 });
    assert_eq!(workers_send_and_exit(&mut daemon, 1..=1, 10), 1);
    assert_eq!(granted.rest().0, "worker 1 of 1 sends 0\n");
    assert_eq!(refused.rest().0, format!("clone -{}\n", libc::ECANCELED));
}
