//! The daemon's side of a fork: silence after `Prepared`, identity in order, inherited channels.

mod support;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use support::{Daemon, hello, identity, pause, wait_until};
use vmfork_agent_proto::{Firstboot, HEADER_BYTES, Kind, PROTOCOL_VERSION, ToGuest, ToHost};

const SILENCE: Duration = Duration::from_millis(400);

#[test]
fn hello_gives_a_booting_vm_its_identity() {
    let mut daemon = Daemon::start();
    daemon.send(0, &hello());
    match daemon.message_on(0) {
        ToHost::Hello { protocol, cpus, kernel, .. } => {
            assert_eq!(protocol, PROTOCOL_VERSION);
            assert!(cpus > 0 && !kernel.is_empty());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(daemon.effect("hostname"), "web");
    assert_eq!(daemon.effect("clock"), "1234567890123456789");
    assert_eq!(daemon.effect("etc/machine-id"), "0123456789abcdef0123456789abcdef\n");
    assert_eq!(daemon.effect("run/vmid"), "0\n");
}

/// A first-boot command, and an agent that runs it.
fn booting(script: &str) -> (Daemon, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("temp dir");
    let program = folder.path().join("firstboot");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("write");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    let daemon = Daemon::start_with(&["--firstboot", program.to_str().expect("UTF-8")]);
    (daemon, folder)
}

fn firstboot(daemon: &mut Daemon) -> Option<Firstboot> {
    match daemon.message_on(0) {
        ToHost::Hello { firstboot, .. } => firstboot,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_host_is_told_that_the_first_boot_command_runs_and_how_it_ended() {
    let (mut daemon, folder) =
        booting("cd $(dirname $0); until [ -e go ]; do sleep 0.02; done; exit 3");
    daemon.send(0, &hello());
    assert_eq!(firstboot(&mut daemon), Some(Firstboot::Running));
    assert_eq!(daemon.frame_within(SILENCE), None, "told before it has ended");
    std::fs::write(folder.path().join("go"), "").expect("write");
    assert_eq!(firstboot(&mut daemon), Some(Firstboot::Ended { exit_code: 3 }), "unasked");
    daemon.send(0, &hello());
    assert_eq!(firstboot(&mut daemon), Some(Firstboot::Ended { exit_code: 3 }));
}

#[test]
fn a_first_boot_command_that_ends_before_the_host_comes_is_told_in_the_answer() {
    let (mut daemon, folder) = booting("touch $(dirname $0)/done");
    wait_until("the command's end", || folder.path().join("done").exists());
    pause(SILENCE);
    assert_eq!(daemon.frame_within(Duration::ZERO), None, "it was not asked");
    daemon.send(0, &hello());
    assert_eq!(firstboot(&mut daemon), Some(Firstboot::Ended { exit_code: 0 }));
}

#[test]
fn a_first_boot_command_that_cannot_run_has_failed() {
    let (mut daemon, folder) = booting("");
    drop(daemon);
    let program = folder.path().join("firstboot");
    std::fs::write(&program, "#!/no/such/interpreter\n").expect("write");
    daemon = Daemon::start_with(&["--firstboot", program.to_str().expect("UTF-8")]);
    daemon.send(0, &hello());
    assert_eq!(firstboot(&mut daemon), Some(Firstboot::Ended { exit_code: 126 }));
}

#[test]
fn between_prepared_and_continue_nothing_is_written() {
    let mut daemon = Daemon::start();
    daemon.exec(2, &["sh", "-c", "while :; do echo noise; sleep 0.01; done"]);
    daemon.exec(4, &["sleep", "0.3"]);
    let file = daemon.folder().join("file");
    std::fs::write(&file, vec![7; 200_000]).expect("write");
    daemon.send(6, &ToGuest::ReadFile { path: file.display().to_string() });
    daemon.send(0, &ToGuest::Prepare { fork: 11 });
    let (mut noise, mut exited, mut file_bytes) = (false, false, 0);
    loop {
        let frame = daemon.frame();
        match (frame.channel, frame.kind) {
            (0, _) => {
                let message: ToHost = serde_json::from_slice(&frame.payload).expect("a message");
                break assert_eq!(message, ToHost::Prepared { fork: 11 });
            }
            // Where the host is slow, before the silence.
            (4, Kind::Message) => exited = true,
            (6, Kind::File) => file_bytes += frame.payload.len(),
            _ => {}
        }
    }
    assert_eq!(daemon.frame_within(SILENCE), None, "noise, an exit and a file, all held back");
    daemon.send(0, &ToGuest::Continue { fork: 10 });
    assert_eq!(daemon.frame_within(SILENCE), None, "another fork's Continue is none");
    daemon.send(0, &ToGuest::Continue { fork: 11 });
    while !(noise && exited && file_bytes == 200_000) {
        let frame = daemon.frame();
        match (frame.channel, frame.kind) {
            (2, Kind::Stdout) => noise = true,
            (4, Kind::Message) => exited = true,
            (6, Kind::File) => file_bytes += frame.payload.len(),
            _ => {}
        }
    }
    assert!(daemon.effect("effects").is_empty(), "a parent keeps its identity");
}

#[test]
fn a_fork_that_is_not_ended_ends_by_itself() {
    let mut daemon = Daemon::start_with(&["--fork-limit-ms", "3000"]);
    daemon.prepare(7);
    daemon.send(0, &ToGuest::Ping { token: 4 });
    assert_eq!(daemon.frame_within(SILENCE), None);
    assert_eq!(daemon.message_on(0), ToHost::Pong { token: 4 });
    daemon.send(0, &ToGuest::Continue { fork: 7 });
    daemon.prepare(8);
    daemon.send(0, &ToGuest::Continue { fork: 8 });
    daemon.exec(2, &["true"]);
    assert_eq!(daemon.finish(2).exit_code, 0);
}

#[test]
fn a_clone_takes_its_identity_in_order_then_confirms() {
    let mut daemon = Daemon::start();
    daemon.prepare(3);
    daemon.send(0, &ToGuest::Identity(identity(3, 5, None)));
    assert_eq!(daemon.message_on(0), ToHost::Confirmed { fork: 3 });
    let order: Vec<String> = daemon.effect("effects").lines().map(str::to_owned).collect();
    let wanted = [
        "entropy",
        "clock",
        "hostname",
        "/etc/machine-id",
        "/run/machine-id",
        "vmid",
        "identity.json",
    ];
    assert_eq!(order, wanted);
    assert_eq!(daemon.effect("entropy"), "05".repeat(64));
    assert_eq!(daemon.effect("hostname"), "web.5");
    assert_eq!(daemon.effect("run/vmid"), "5\n");
    let json: serde_json::Value =
        serde_json::from_str(&daemon.effect("run/identity.json")).expect("JSON");
    assert_eq!((json["vmid"].as_u64(), json["fork"].as_u64()), (Some(5), Some(3)));
    assert!(json.get("entropy").is_none(), "the entropy must not be readable");
}

#[test]
fn an_identity_that_cannot_be_applied_is_refused() {
    let mut daemon = Daemon::start();
    let mut bad = [identity(3, 1, None), identity(3, 1, None), identity(4, 1, None)];
    bad[0].entropy = "5a".repeat(8);
    bad[1].machine_id = "short".to_owned();
    for identity in bad {
        daemon.prepare(3);
        let fork = identity.fork;
        daemon.send(0, &ToGuest::Identity(identity));
        match daemon.message_on(0) {
            ToHost::Refused { fork: refused, message } => {
                assert_eq!(refused, fork);
                assert!(!message.is_empty());
            }
            other => panic!("{other:?}"),
        }
    }
    // An effect that fails: the host name's file is a folder.
    std::fs::create_dir(daemon.folder().join("hostname")).expect("mkdir");
    daemon.prepare(5);
    daemon.send(0, &ToGuest::Identity(identity(5, 1, None)));
    match daemon.message_on(0) {
        ToHost::Refused { message, .. } => assert!(message.contains("host name"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn in_a_clone_inherited_programs_run_on_without_input_and_with_new_windows() {
    let mut daemon = Daemon::start();
    daemon.exec(2, &["sh", "-c", "cat; head -c 600000 /dev/zero; echo end"]);
    daemon.exec(4, &["sh", "-c", "head -c 300000 /dev/zero; sleep 1000"]);
    daemon.stream(Kind::Stdin, 2, false, b"typed");
    // The window of channel 4 is used up and never credited: it was the parent's daemon's.
    let mut bytes = 0;
    while let Some(frame) = daemon.frame_within(SILENCE) {
        bytes += if frame.channel == 4 { frame.payload.len() } else { 0 };
    }
    assert_eq!(bytes, support::WINDOW);
    let target = daemon.folder().join("half");
    daemon.send(6, &ToGuest::WriteFile { path: target.display().to_string(), mode: 0o600 });
    daemon.stream(Kind::File, 6, false, b"half");
    daemon.prepare(1);
    daemon.send(0, &ToGuest::Identity(identity(1, 1, None)));
    assert_eq!(daemon.message_on(0), ToHost::Confirmed { fork: 1 });
    let (mut two, mut four, mut exited) = (0, bytes, false);
    while !(exited && four == 300_000) {
        let frame = daemon.frame();
        match (frame.channel, frame.kind) {
            (2, Kind::Stdout) => two += frame.payload.len(),
            (4, Kind::Stdout) => four += frame.payload.len(),
            (2, Kind::Message) => exited = true,
            _ => {}
        }
        let bytes = u32::try_from(frame.payload.len()).expect("short");
        daemon.send(frame.channel, &ToGuest::Credit { kind: frame.kind as u8, bytes });
    }
    assert_eq!(two, 600_004, "`cat` saw the end of its input");
    let names = std::fs::read_dir(daemon.folder()).expect("read dir");
    for name in names.map(|entry| entry.expect("entry").file_name()) {
        assert!(!name.to_string_lossy().starts_with(".vmfork"), "the transfer was given up");
    }
}

#[test]
fn a_daemon_that_goes_away_takes_its_channels_with_it() {
    let mut daemon = Daemon::start();
    daemon.send(2, &support::sh("echo $$ && exec sleep 1000"));
    daemon.message_on(2);
    let pid = daemon.text_until("\n").trim().to_owned();
    daemon.prepare(8);
    daemon.reconnect();
    wait_until("hung up", || !std::path::Path::new(&format!("/proc/{pid}")).exists());
    daemon.send(0, &ToGuest::Ping { token: 3 });
    assert_eq!(daemon.message_on(0), ToHost::Pong { token: 3 }, "and not quiet any more");
    daemon.exec(2, &["echo", "hi"]);
    assert_eq!(daemon.finish(2).text(), "hi\n");
}

#[test]
fn nonsense_costs_the_connection_and_nothing_else() {
    let mut daemon = Daemon::start();
    let mut frames: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; HEADER_BYTES],
        vmfork_agent_proto::encode(Kind::Message, 0, false, b"{\"type\":\"no_such_thing\"}"),
        vmfork_agent_proto::encode(Kind::Message, 0, false, b"\xff\xfe"),
    ];
    frames[0].resize(64, b' ');
    for bytes in frames {
        daemon.send_raw(&bytes);
        daemon.expect_end_of_port();
        daemon.accept_again();
        daemon.send(0, &ToGuest::Ping { token: 1 });
        assert_eq!(daemon.message_on(0), ToHost::Pong { token: 1 });
    }
    // Half a frame, then the end.
    daemon.send_raw(&[1, 0, 0]);
    daemon.reconnect();
    // Frames of channels that were not opened are old news.
    for kind in [Kind::Stdin, Kind::Stdout, Kind::File, Kind::Data] {
        daemon.stream(kind, 77, true, b"x");
    }
    daemon.send(0, &ToGuest::Ping { token: 2 });
    assert_eq!(daemon.message_on(0), ToHost::Pong { token: 2 });
}

#[test]
fn an_idle_agent_sleeps_also_without_a_daemon() {
    let mut daemon = Daemon::start();
    let ticks = |daemon: &Daemon| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.agent.id()));
        let stat = stat.expect("it runs");
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime")
    };
    daemon.exec(2, &["sleep", "1000"]);
    let mut program =
        std::os::unix::net::UnixStream::connect(daemon.fork_socket()).expect("connect");
    program.write_all(&[1]).expect("part of a request");
    for connected in [true, false] {
        if !connected {
            daemon.reconnect();
        }
        pause(Duration::from_millis(200));
        let before = ticks(&daemon);
        pause(Duration::from_millis(1000));
        assert!(ticks(&daemon) - before <= 5, "connected: {connected}");
    }
}

#[test]
fn power_off_and_sigterm_end_it() {
    let mut daemon = Daemon::start();
    daemon.send(0, &ToGuest::Poweroff);
    assert!(daemon.agent.wait().expect("wait").success());
    assert!(daemon.folder().join("poweroff").exists());
    let mut daemon = Daemon::start();
    daemon.send(0, &ToGuest::Ping { token: 1 });
    daemon.message();
    let pid = i32::try_from(daemon.agent.id()).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.expect("a pid"), rustix::process::Signal::TERM)
        .expect("ours");
    assert!(daemon.agent.wait().expect("wait").success());
}
