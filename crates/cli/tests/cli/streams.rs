//! The real `vmfork` against a fake daemon: `exec` and `cp`, closed pipes, signals.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::support::{FakeDaemon, finish, run, send, wait_until};
use rustix::process::Signal;

const BIG_BYTES: usize = 50 << 20;

/// Bytes that no chunking error leaves as they are.
fn big() -> Vec<u8> {
    let mut state = 1_u32;
    (0..BIG_BYTES)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_le_bytes()[3]
        })
        .collect()
}

#[test]
fn exec_passes_streams_and_exit_code_through() {
    let daemon = FakeDaemon::start();
    let script = "cat; echo out; echo err >&2; exit 7";
    let ran = run(daemon.command(&["exec", "web", "-i", "--", "sh", "-c", script]), b"in\n");
    assert_eq!(ran.code, Some(7), "{ran:?}");
    assert_eq!((ran.text().as_str(), ran.stderr.as_str()), ("in\nout\n", "err\n"));
    // Without -i the program sees the end of its input at once.
    let ran = run(daemon.command(&["exec", "web", "-e", "A=b", "sh", "-c", "cat; echo $A"]), b"in");
    assert_eq!((ran.code, ran.text().as_str()), (Some(0), "b\n"), "{ran:?}");
    let ran = daemon.run(&["exec", "web", "sh", "-c", "kill -9 $$"]);
    assert_eq!(ran.code, Some(137), "{ran:?}");
    let ran = daemon.run(&["exec", "web", "no-such-program"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("caused by: no such program"), "{ran:?}");
    let ran = daemon.run(&["exec", "nope", "true"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("no VM named `nope`"), "{ran:?}");
}

#[test]
fn exec_streams_more_than_any_buffer_both_ways_at_once() {
    let daemon = FakeDaemon::start();
    let input = &big()[..8 << 20];
    let ran = run(daemon.command(&["exec", "web", "-i", "cat"]), input);
    assert_eq!(ran.code, Some(0));
    assert!(ran.stdout == input, "{} bytes came back", ran.stdout.len());
}

#[test]
fn exec_as_a_document_holds_the_output_and_ends_with_the_programs_code() {
    let daemon = FakeDaemon::start();
    let command = daemon.command(&["exec", "--json", "web", "-i", "sh", "-c", "cat; exit 3"]);
    let ran = run(command, b"hello");
    assert_eq!(ran.code, Some(3), "{ran:?}");
    let reply: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(reply["stdout_base64"], "aGVsbG8=");
    assert_eq!(reply["exit_code"], 3);
}

#[test]
fn the_first_ctrl_c_goes_to_the_program_the_second_leaves_it() {
    let daemon = FakeDaemon::start();
    // The agent's programs begin with all signals at their default; this daemon's as the tests do.
    let script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.05; done";
    let mut child = daemon
        .command(&["exec", "web", "env", "--default-signal", "sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    send(child.id(), Signal::INT);
    let ran = finish(child);
    assert_eq!((ran.code, ran.text().as_str()), (Some(5), "caught\n"), "{ran:?}");

    let script = "trap '' INT; echo ready; while :; do sleep 0.05; done";
    let mut child = daemon
        .command(&["exec", "web", "env", "--default-signal", "sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    daemon.seen.requests.lock().unwrap().clear();
    send(child.id(), Signal::INT);
    wait_until("the first has arrived", || daemon.seen.has("signal 2"));
    let before = daemon.seen.abandoned.load(Ordering::SeqCst);
    send(child.id(), Signal::INT);
    assert_eq!(finish(child).code, Some(130));
    wait_until("the program is left", || daemon.seen.abandoned.load(Ordering::SeqCst) > before);
}

#[test]
fn ctrl_c_ends_a_fork_and_a_run_at_once_and_drops_the_request() {
    let daemon = FakeDaemon::start();
    for (i, args) in [["fork", "slow"], ["run", "slow"]].into_iter().enumerate() {
        let child = daemon
            .command(&args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_until("the request has arrived", || daemon.seen.has(args[0]));
        let sent = Instant::now();
        send(child.id(), Signal::INT);
        let ran = finish(child);
        assert_eq!((ran.code, ran.text().as_str()), (Some(130), ""), "{ran:?}");
        assert!(sent.elapsed() < Duration::from_secs(5), "took {:?}", sent.elapsed());
        wait_until("the daemon has noticed", || {
            daemon.seen.abandoned.load(Ordering::SeqCst) == u64::try_from(i).unwrap() + 1
        });
    }
    let child = daemon.command(&["logs", "-f", "web"]).stdout(Stdio::null()).spawn().unwrap();
    send_when_running(&child);
    assert_eq!(finish(child).code, Some(143));
}

/// Until its handlers are in place a signal simply kills it, which is fine but not the point here.
fn send_when_running(child: &std::process::Child) {
    let path = format!("/proc/{}/status", child.id());
    wait_until("it catches SIGTERM", || {
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0) & 0x4000 != 0
    });
    send(child.id(), Signal::TERM);
}

#[test]
fn ctrl_c_is_heard_while_standard_output_is_stuck() {
    let daemon = FakeDaemon::start();
    std::fs::write(daemon.guest().join("big"), big()).unwrap();
    // Somewhere between the first bytes and a full pipe, where `vmfork` waits in write(2).
    for after_ms in [0, 0, 1, 2, 5, 10, 50] {
        let mut child =
            daemon.command(&["cp", "web:/big", "-"]).stdout(Stdio::piped()).spawn().unwrap();
        // The test reads no more than this.
        let mut first = [0; 1];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        pause(Duration::from_millis(after_ms));
        send(child.id(), Signal::INT);
        let status = ended(&mut child, &format!("stopped {after_ms} ms after its first byte"));
        assert_eq!(status.code(), Some(130));
    }
}

#[test]
fn a_program_whose_output_is_stuck_is_left_like_any_other() {
    let daemon = FakeDaemon::start();
    let mut child = daemon
        .command(&["exec", "web", "yes"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    pause(Duration::from_millis(200)); // the pipe fills
    send(child.id(), Signal::INT);
    pause(Duration::from_millis(200)); // two of a kind at once would be one
    send(child.id(), Signal::INT);
    assert_eq!(ended(&mut child, "interrupted twice").code(), Some(130));
}

/// How a child ends whose output is not read.
fn ended(child: &mut std::process::Child, after: &str) -> std::process::ExitStatus {
    let since = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if since.elapsed() > Duration::from_secs(10) {
            child.kill().unwrap();
            panic!("still there, {after}");
        }
        pause(Duration::from_millis(5));
    }
}

fn pause(length: Duration) {
    let _ = rustix::event::poll(&mut [], Some(&length.try_into().unwrap()));
}

#[test]
fn a_reader_who_leaves_is_not_an_error() {
    let daemon = FakeDaemon::start();
    for args in [
        &["ps"][..],
        &["ps", "--json"],
        &["logs", "-f", "web"],
        &["exec", "web", "yes"],
        &["completion", "bash"],
    ] {
        let mut child = daemon
            .command(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let ran = finish(child);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn a_large_file_goes_in_and_comes_out_as_it_was() {
    let daemon = FakeDaemon::start();
    let here = tempfile::tempdir().unwrap();
    let (from, back) = (here.path().join("from"), here.path().join("back"));
    let content = big();
    std::fs::write(&from, &content).unwrap();
    std::fs::set_permissions(&from, std::fs::Permissions::from_mode(0o750)).unwrap();
    let ran = daemon.run(&["cp", from.to_str().unwrap(), "web:/big"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stderr.starts_with("Copied 50 MiB from "), "{ran:?}");
    assert!(daemon.seen.has("put /big 750"));
    assert!(std::fs::read(daemon.guest().join("big")).unwrap() == content);
    let guest = daemon.guest().join("big");
    std::fs::set_permissions(guest, std::fs::Permissions::from_mode(0o4710)).unwrap();
    let copied = daemon.json(&["cp", "web:/big", back.to_str().unwrap()]);
    assert_eq!(copied["size_bytes"], BIG_BYTES);
    assert!(std::fs::read(&back).unwrap() == content);
    let mode = std::fs::metadata(&back).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o710, "{mode:o}");
    // Into a folder, under its own name; and through the standard streams.
    let ran = daemon.run(&["cp", "web:/big", here.path().to_str().unwrap()]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(std::fs::read(here.path().join("big")).unwrap() == content);
    let ran = daemon.run(&["cp", "web:/big", "-"]);
    assert!(ran.stdout == content, "{} bytes", ran.stdout.len());
    let ran = run(daemon.command(&["cp", "-", "web:/stdin"]), &content);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(std::fs::read(daemon.guest().join("stdin")).unwrap() == content);
}

#[test]
fn a_transfer_that_fails_says_so_and_leaves_the_old_file() {
    let daemon = FakeDaemon::start();
    let here = tempfile::tempdir().unwrap();
    let old = here.path().join("old");
    std::fs::write(&old, "old").unwrap();
    std::fs::write(daemon.guest().join("torn"), "new").unwrap();
    let ran = daemon.run(&["cp", "web:/torn", old.to_str().unwrap()]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.starts_with("error: read `web:/torn`\n"), "{ran:?}");
    assert_eq!(std::fs::read_to_string(&old).unwrap(), "old");
    assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 1, "nothing is left behind");
    let ran = daemon.run(&["cp", "web:/missing", old.to_str().unwrap()]);
    assert!(ran.stderr.contains("no such file"), "{ran:?}");
    let ran = daemon.run(&["cp", "/no/such/file", "web:/x"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.starts_with("error: read /no/such/file\n"), "{ran:?}");
    let ran = daemon.run(&["cp", old.to_str().unwrap(), "nope:/x"]);
    assert!(ran.stderr.contains("no VM named `nope`"), "{ran:?}");
}

#[test]
fn an_early_no_to_a_large_upload_is_what_the_user_reads() {
    let daemon = FakeDaemon::start();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&big()).unwrap();
    // Our next write races with the daemon's answer; either may win.
    for _ in 0..10 {
        let ran = daemon.run(&["cp", file.path().to_str().unwrap(), "web:/no/such/folder"]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains("caused by: no such file or directory"), "{ran:?}");
    }
}

#[test]
fn an_interrupted_upload_is_broken_off_not_ended() {
    let daemon = FakeDaemon::start();
    let mut child = daemon
        .command(&["cp", "-", "web:/part"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Kept open: its end would be that of the file.
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"half").unwrap();
    let part = daemon.guest().join("part");
    wait_until("it has begun", || std::fs::read(&part).is_ok_and(|bytes| bytes == b"half"));
    send(child.id(), Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    wait_until("the daemon has noticed", || daemon.seen.has("put broken off"));
}

#[test]
fn a_folder_goes_in_and_comes_out_with_all_that_is_in_it() {
    let daemon = FakeDaemon::start();
    let here = tempfile::tempdir().unwrap();
    let from = here.path().join("from");
    std::fs::create_dir_all(from.join("sub")).unwrap();
    std::fs::write(from.join("sub/big"), &big()[..5 << 20]).unwrap();
    std::os::unix::fs::symlink("sub/big", from.join("link")).unwrap();
    let guest = daemon.guest().join("guest");
    std::fs::create_dir(&guest).unwrap();
    let ran = daemon.run(&["cp", from.to_str().unwrap(), "web:/guest/new"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(std::fs::read(guest.join("new/sub/big")).unwrap() == big()[..5 << 20]);
    // A folder that is there gets it inside.
    let ran = daemon.run(&["cp", from.to_str().unwrap(), "web:/guest/new"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(guest.join("new/from/sub/big").is_file());
    let back = here.path().join("back");
    let ran = daemon.run(&["cp", "web:/guest/new", back.to_str().unwrap()]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(std::fs::read(back.join("sub/big")).unwrap() == big()[..5 << 20]);
    assert_eq!(std::fs::read_link(back.join("link")).unwrap().to_str(), Some("sub/big"));
    let ran = daemon.run(&["cp", "web:/guest/new", "-"]);
    assert!(ran.stderr.contains("is a folder"), "{ran:?}");
}
