//! Programs that the daemon runs: streams, exit codes, signals, terminals, and what goes wrong.

mod support;

use std::time::{Duration, Instant};

use support::{Daemon, WINDOW, exec, sh, wait_until};
use vmfork_agent_proto::{Kind, TerminalSize, ToGuest, ToHost};

#[test]
fn a_program_gets_its_input_and_gives_both_outputs_and_its_exit_code() {
    let mut daemon = Daemon::start();
    daemon.exec(2, &["sh", "-c", "cat; echo oops >&2; exit 7"]);
    daemon.stream(Kind::Stdin, 2, false, b"hello ");
    daemon.stream(Kind::Stdin, 2, true, b"world");
    let done = daemon.finish(2);
    assert_eq!(done.text(), "hello world");
    assert_eq!(done.stderr, b"oops\n");
    assert_eq!((done.exit_code, done.signal), (7, None));
    assert_eq!(done.streams_ended, 2, "both streams end before `Exited`");
}

#[test]
fn a_program_that_cannot_start_says_why() {
    let mut daemon = Daemon::start();
    let failing = [
        (exec(&["/no/such/program"]), libc::ENOENT),
        (exec(&["/etc/passwd"]), libc::EACCES),
        (exec(&[]), libc::EINVAL),
        (exec(&["a\0b"]), libc::EINVAL),
        (with(exec(&["true"]), |_, cwd, _| *cwd = Some("/no/such/folder".into())), libc::ENOENT),
        (with(exec(&["true"]), |_, _, user| *user = Some("no-such-user".into())), libc::ENOENT),
    ];
    for (request, errno) in failing {
        daemon.send(2, &request);
        match daemon.message_on(2) {
            ToHost::Failed(error) => assert_eq!(error.errno, errno, "{request:?}: {error:?}"),
            other => panic!("{other:?}"),
        }
    }
    daemon.send(3, &exec(&["true"]));
    assert!(matches!(daemon.message_on(3), ToHost::Failed(e) if e.errno == libc::EINVAL));
    daemon.exec(2, &["sleep", "100"]);
    daemon.send(2, &exec(&["true"]));
    assert!(matches!(daemon.message_on(2), ToHost::Failed(e) if e.errno == libc::EEXIST));
}

/// Change the environment, the folder or the user of an `Exec`.
fn with(
    mut request: ToGuest,
    change: impl FnOnce(&mut Vec<(String, String)>, &mut Option<String>, &mut Option<String>),
) -> ToGuest {
    if let ToGuest::Exec { env, cwd, user, .. } = &mut request {
        change(env, cwd, user);
    }
    request
}

#[test]
fn environment_folder_and_user_are_as_asked() {
    let mut daemon = Daemon::start();
    let request = with(
        sh("echo $FOO; pwd; id -u; id -g; id -un; echo $HOME; echo $PATH"),
        |env, cwd, user| {
            env.push(("FOO".into(), "a b".into()));
            env.push(("PATH".into(), "/usr/bin:/bin".into()));
            *cwd = Some("/usr".into());
            *user = Some("daemon".into());
        },
    );
    daemon.send(2, &request);
    daemon.message_on(2);
    let done = daemon.finish(2);
    assert_eq!(done.text(), "a b\n/usr\n1\n1\ndaemon\n/usr/sbin\n/usr/bin:/bin\n");
}

#[test]
fn a_signal_reaches_the_whole_group_and_shows_in_the_exit() {
    let mut daemon = Daemon::start();
    daemon.exec(2, &["sh", "-c", "sleep 1000 & echo ready; wait; echo not reached"]);
    assert_eq!(daemon.text_until("ready\n"), "ready\n");
    daemon.send(2, &ToGuest::Signal { signal: libc::SIGKILL });
    let done = daemon.finish(2);
    assert_eq!((done.exit_code, done.signal), (128 + 9, Some(9)));
    assert_eq!(done.text(), "", "the sleep is dead too, or the streams would not have ended");
    for signal in [-1, 0, 9999] {
        daemon.send(2, &ToGuest::Signal { signal });
    }
    daemon.send(0, &ToGuest::Ping { token: 1 });
    assert_eq!(daemon.message_on(0), ToHost::Pong { token: 1 });
}

#[test]
fn output_stops_at_the_window_and_goes_on_with_credit() {
    let mut daemon = Daemon::start();
    daemon.exec(2, &["head", "-c", "1000000", "/dev/zero"]);
    let mut bytes = 0;
    while let Some(frame) = daemon.frame_within(Duration::from_millis(300)) {
        bytes += frame.payload.len();
        assert!(frame.kind == Kind::Stdout && bytes <= WINDOW || frame.kind == Kind::Stderr);
    }
    assert_eq!(bytes, WINDOW, "all of the window is used");
    let credit = u32::try_from(bytes).expect("a window");
    daemon.send(2, &ToGuest::Credit { kind: Kind::Stdout as u8, bytes: credit });
    assert_eq!(bytes + daemon.finish(2).stdout.len(), 1_000_000);
}

#[test]
fn a_program_that_never_reads_holds_up_no_other_and_takes_one_window() {
    let mut daemon = Daemon::start();
    daemon.exec(2, &["sleep", "1000"]);
    for _ in 0..WINDOW / 4096 {
        daemon.stream(Kind::Stdin, 2, false, &[b'x'; 4096]);
    }
    let mut credited = 0;
    daemon.send(0, &ToGuest::Ping { token: 5 });
    loop {
        match daemon.message() {
            (2, ToHost::Credit { bytes, .. }) => credited += bytes as usize,
            (0, ToHost::Pong { token: 5 }) => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(credited <= 64 * 1024, "a pipe's worth: {credited}");
    // Once it has gone, what is left is forgotten.
    daemon.send(2, &ToGuest::Signal { signal: libc::SIGTERM });
    assert_eq!(daemon.finish(2).signal, Some(libc::SIGTERM));
}

#[test]
fn programs_ignore_no_signal_and_the_agent_keeps_its_handlers() {
    fn mask(status: &str, name: &str) -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a mask");
        u64::from_str_radix(line.trim(), 16).expect("a number")
    }

    let mut daemon = Daemon::start();
    daemon.exec(2, &["cat", "/proc/self/status"]);
    // The C library keeps 32 to 34 to itself: the tests' parent process may have it ignore them.
    let ignored = mask(&daemon.finish(2).text(), "SigIgn:") & !(0b111 << 31);
    assert_eq!(ignored, 0, "{ignored:x}");
    // By these std tells that a stack overflowed.
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.agent.id()));
    let caught = mask(&status.expect("the agent's status"), "SigCgt:");
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        assert!(caught & (1 << (signal - 1)) != 0, "{signal} is not in {caught:x}");
    }
}

#[test]
fn input_without_credit_costs_the_connection() {
    let mut daemon = Daemon::start();
    daemon.exec(2, &["sleep", "1000"]);
    let frame = vmfork_agent_proto::encode(Kind::Stdin, 2, false, &[b'x'; 4096]);
    daemon.send_until_closed(&frame, WINDOW / 4096 + 32);
    daemon.expect_end_of_port();
    daemon.accept_again();
    daemon.send(0, &ToGuest::Ping { token: 2 });
    assert_eq!(daemon.message_on(0), ToHost::Pong { token: 2 });
}

#[test]
fn a_terminal_is_one() {
    let mut daemon = Daemon::start();
    let mut request =
        sh("tty <&0 >/dev/null && echo $TERM; stty size; trap 'stty size; exit 3' WINCH; \
         echo ready; while :; do sleep 0.05; done");
    if let ToGuest::Exec { tty, .. } = &mut request {
        *tty = Some(TerminalSize { rows: 33, cols: 101, term: "xterm".into() });
    }
    daemon.send(2, &request);
    daemon.message_on(2);
    assert_eq!(daemon.text_until("ready\r\n"), "xterm\r\n33 101\r\nready\r\n");
    daemon.send(2, &ToGuest::Resize { rows: 50, cols: 20 });
    let done = daemon.finish(2);
    assert_eq!((done.text().as_str(), done.exit_code), ("50 20\r\n", 3));
    assert_eq!(done.streams_ended, 1, "a terminal has one output");
}

#[test]
fn on_a_terminal_control_c_interrupts_and_end_of_input_is_seen() {
    let mut daemon = Daemon::start();
    for (input, end, exit_code) in [(&b"\x03"[..], false, 130), (b"", true, 5)] {
        // The program that prints `ready` is ended by the signal, wherever the outer shell is by
        // then.
        let mut request =
            sh("trap 'exit 130' INT; sh -c 'trap - INT; echo ready; exec cat'; exit 5");
        if let ToGuest::Exec { tty, .. } = &mut request {
            *tty = Some(TerminalSize { rows: 24, cols: 80, term: String::new() });
        }
        daemon.send(2, &request);
        daemon.message_on(2);
        assert_eq!(daemon.text_until("ready\r\n"), "ready\r\n");
        daemon.stream(Kind::Stdin, 2, end, input);
        assert_eq!(daemon.finish(2).exit_code, exit_code);
    }
}

#[test]
fn what_a_program_leaves_running_does_not_keep_its_channel_open() {
    let mut daemon = Daemon::start();
    let marker = daemon.folder().join("survived");
    let script = format!("(sleep 1; echo late; echo later; touch {}) & echo now", marker.display());
    daemon.exec(2, &["sh", "-c", &script]);
    let began = Instant::now();
    assert_eq!(daemon.finish(2).text(), "now\n");
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    wait_until("it lives on and may write", || marker.exists());
}

#[test]
fn cancel_hangs_up_then_kills_and_silences_the_channel() {
    let mut daemon = Daemon::start();
    let pid_file = daemon.folder().join("pid");
    let script =
        format!("trap '' HUP; echo $$ > {}; while :; do echo noise; done", pid_file.display());
    daemon.exec(2, &["sh", "-c", &script]);
    wait_until("it has begun", || {
        std::fs::read_to_string(&pid_file).is_ok_and(|s| s.ends_with('\n'))
    });
    daemon.send(2, &ToGuest::Cancel);
    daemon.send(0, &ToGuest::Ping { token: 9 });
    loop {
        let frame = daemon.frame();
        if frame.channel == 0 {
            break;
        }
    }
    assert_eq!(daemon.frame_within(Duration::from_millis(300)), None, "nothing more on channel 2");
    let pid = std::fs::read_to_string(&pid_file).expect("is there");
    let process = format!("/proc/{}", pid.trim());
    wait_until("killed after 2 s, and reaped", || !std::path::Path::new(&process).exists());
    daemon.exec(2, &["true"]);
    assert_eq!(daemon.finish(2).exit_code, 0, "the number is free again");
}

#[test]
fn many_programs_at_a_time_and_too_many() {
    let mut daemon = Daemon::start();
    for channel in (2..=100).step_by(2) {
        daemon.exec(channel, &["sh", "-c", "read x; echo $x"]);
    }
    for channel in (2..=100).step_by(2) {
        daemon.stream(Kind::Stdin, channel, true, format!("{channel}\n").as_bytes());
        assert_eq!(daemon.finish(channel).text(), format!("{channel}\n"));
    }
}

#[test]
fn without_descriptors_a_program_fails_and_the_agent_lives() {
    let mut daemon = Daemon::start();
    let pid = rustix_pid(&daemon);
    let limit = rustix::process::Rlimit { current: Some(24), maximum: Some(24) };
    rustix::process::prlimit(Some(pid), rustix::process::Resource::Nofile, limit).expect("ours");
    let mut failed = 0;
    for channel in (2..=40).step_by(2) {
        daemon.send(channel, &exec(&["sleep", "1000"]));
        match daemon.message_on(channel) {
            ToHost::Started { .. } => {}
            ToHost::Failed(error) => {
                assert_eq!(error.errno, libc::EMFILE, "{error:?}");
                failed += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(failed > 0, "24 descriptors are not enough for 20 programs");
    for channel in (2..=40).step_by(2) {
        daemon.send(channel, &ToGuest::Cancel);
    }
    daemon.exec(2, &["true"]);
    assert_eq!(daemon.finish(2).exit_code, 0);
}

fn rustix_pid(daemon: &Daemon) -> rustix::process::Pid {
    let raw = i32::try_from(daemon.agent.id()).expect("a pid");
    rustix::process::Pid::from_raw(raw).expect("not 0")
}
