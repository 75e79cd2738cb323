//! The programs under `examples/`, without VMs.
//!
//! A fork is played by running the program again. The second run is answered like the first up to
//! the fork in question. Then it gets a clone's identity. Its workers' messages go to the first
//! run. That works because the examples do the same every time.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use support::{Daemon, identity};
use vmfork_agent_proto::{Kind, MessageInfo, RequestError, TicketClone, ToGuest, ToHost, Worker};

/// What a fork's workers sent, in order.
type Messages = Vec<(u32, Vec<u8>)>;

/// A worker that says nothing for so long, and has spoken before, hangs.
const HANGS: Duration = Duration::from_millis(700);

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

struct Player {
    daemon: Daemon,
    program: Child,
}

impl Drop for Player {
    fn drop(&mut self) {
        // The whole group: workers that hang are children of the program.
        let group = i32::try_from(self.program.id()).ok().and_then(rustix::process::Pid::from_raw);
        let _ = rustix::process::kill_process_group(
            group.expect("a pid"),
            rustix::process::Signal::KILL,
        );
        let _ = self.program.wait();
    }
}

impl Player {
    fn start(argv: &[PathBuf]) -> Self {
        use std::os::unix::process::CommandExt;
        let daemon = Daemon::start();
        let program = Command::new(&argv[0])
            .args(&argv[1..])
            .env("PYTHONPATH", repository().join("guest/python"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("VMFORK_RUN_DIR", daemon.folder().join("run"))
            .env("TMPDIR", daemon.folder())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("start the example");
        Self { daemon, program }
    }

    /// Answer as a parent with `history`, until the fork after it. Returns its channel and how many
    /// workers were granted, or `None` if the program ended without one.
    fn play_to_next_fork(&mut self, history: &[Messages], most: u32) -> Option<(u32, u32)> {
        let (mut granted, mut fork) = (0, 0);
        let mut waiting: Messages = Vec::new();
        loop {
            let frame = loop {
                if let Some(frame) = self.daemon.frame_within(Duration::from_millis(20)) {
                    break frame;
                }
                if self.program.try_wait().expect("wait").is_some() {
                    return None;
                }
            };
            let channel = frame.channel;
            let ended = || ToGuest::Ended {
                workers: (1..=granted).map(|vmid| Worker { vmid, error: None }).collect(),
            };
            match serde_json::from_slice(&frame.payload).expect("a message") {
                ToHost::RequestTicket { count, .. } => {
                    granted = count.min(most);
                    self.daemon.send(channel, &ToGuest::Ticket { ticket: 1, granted });
                }
                ToHost::Clone { .. } if fork == history.len() => return Some((channel, granted)),
                ToHost::Clone { .. } => {
                    waiting.clone_from(&history[fork]);
                    waiting.reverse();
                    fork += 1;
                    self.daemon.send(channel, &ToGuest::Ok { value: u64::from(granted) });
                }
                ToHost::Recv { .. } => match waiting.pop() {
                    Some((vmid, bytes)) => {
                        let length_bytes = bytes.len() as u64;
                        let info = MessageInfo { vmid, length_bytes };
                        self.daemon.send(channel, &ToGuest::Incoming(info));
                        self.daemon.stream(Kind::Data, channel, true, &bytes);
                    }
                    None => {
                        let error = RequestError { errno: libc::EPIPE, message: String::new() };
                        self.daemon.send(channel, &ToGuest::Error(error));
                    }
                },
                ToHost::Join { .. } | ToHost::KillTicket { .. } => {
                    self.daemon.send(channel, &ended());
                }
                ToHost::Credit { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Make it a clone and collect what its workers send, until they have exited or hang.
    fn become_clone(mut self, workers: u32) -> Messages {
        self.daemon.prepare(1);
        let ticket = TicketClone { ticket: 1, workers, channel: None };
        self.daemon.send(0, &ToGuest::Identity(identity(1, 1, Some(ticket))));
        assert_eq!(self.daemon.message_on(0), ToHost::Confirmed { fork: 1 });
        let mut messages = Messages::new();
        let mut sending = BTreeMap::new();
        let mut exited = 0;
        while exited < workers {
            let patience = if messages.is_empty() { support::PATIENCE } else { HANGS };
            let Some(frame) = self.daemon.frame_within(patience) else { break };
            if frame.kind == Kind::Data {
                assert!(frame.end, "the examples' messages are short");
                messages.push((sending[&frame.channel], frame.payload));
                self.daemon.send(frame.channel, &ToGuest::Ok { value: 0 });
                continue;
            }
            match serde_json::from_slice(&frame.payload).expect("a message") {
                ToHost::Send { vmid, .. } => {
                    sending.insert(frame.channel, vmid);
                }
                ToHost::ExitClone { error: None, .. } => {
                    exited += 1;
                    self.daemon.send(frame.channel, &ToGuest::Ok { value: 0 });
                }
                other => panic!("{other:?}"),
            }
        }
        messages
    }
}

/// Run an example to its end; at most `most` workers are granted at a time.
fn play(argv: &[PathBuf], most: u32) {
    let mut history: Vec<Messages> = Vec::new();
    for _ in 0..20 {
        let mut player = Player::start(argv);
        let Some((_, granted)) = player.play_to_next_fork(&history, most) else {
            let status = player.program.wait().expect("wait");
            assert!(status.success() && !history.is_empty(), "{argv:?}: {status}");
            return;
        };
        history.push(player.become_clone(granted));
    }
    panic!("{argv:?} forks again and again");
}

fn in_c(name: &str) -> Vec<PathBuf> {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("example-{name}"));
    let (c, root) = (repository().join("guest/c"), repository());
    let status = Command::new("cc")
        .args(["-std=gnu99", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .args([&c, Path::new("-o"), &program, &root.join(format!("examples/c/{name}.c"))])
        .arg(c.join("vmfork.c"))
        .status();
    assert!(status.expect("cc is installed").success());
    vec![program]
}

fn in_python(name: &str) -> Vec<PathBuf> {
    let script = repository().join(format!("examples/python/{name}.py"));
    vec!["/usr/bin/python3".into(), "-S".into(), script]
}

#[test]
fn the_examples_in_c_find_what_they_should() {
    for name in ["parallel", "sandbox", "load", "opportunistic"] {
        play(&in_c(name), 8);
    }
    play(&in_c("load"), 1);
}

#[test]
fn the_examples_in_python_find_what_they_should() {
    for name in ["parallel", "sandbox", "load", "opportunistic"] {
        play(&in_python(name), 8);
    }
    play(&in_python("load"), 1);
}
