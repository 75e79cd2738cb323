//! Files both ways: whole, atomic, flow-controlled, with the right error.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use support::{Daemon, WINDOW};
use vmfork_agent_proto::{FileInfo, Kind, ToGuest, ToHost};

const BIG_BYTES: usize = 120 << 20;

/// Bytes that differ at every place.
fn pattern(offset: usize, bytes: usize) -> Vec<u8> {
    (offset / 4..)
        .flat_map(|word| u32::try_from(word).unwrap_or(0).to_le_bytes())
        .take(bytes)
        .collect()
}

fn write(path: &Path, mode: u32) -> ToGuest {
    ToGuest::WriteFile { path: path.display().to_string(), mode }
}

fn read(path: &Path) -> ToGuest {
    ToGuest::ReadFile { path: path.display().to_string() }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .expect("read dir")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn a_big_file_comes_back_as_it_went_never_beyond_its_credit() {
    let mut daemon = Daemon::start();
    let path = daemon.folder().join("big");
    daemon.send(2, &write(&path, 0o640));
    let (mut sent, mut window) = (0, WINDOW);
    while sent < BIG_BYTES {
        if window < 65536 {
            match daemon.message_on(2) {
                ToHost::Credit { kind, bytes } if kind == Kind::File as u8 => {
                    window += bytes as usize
                }
                other => panic!("{other:?}"),
            }
            continue;
        }
        daemon.stream(Kind::File, 2, sent + 65536 == BIG_BYTES, &pattern(sent, 65536));
        sent += 65536;
        window -= 65536;
    }
    loop {
        match daemon.message_on(2) {
            ToHost::Credit { .. } => {}
            ToHost::Written { bytes } => break assert_eq!(bytes, BIG_BYTES as u64),
            other => panic!("{other:?}"),
        }
    }

    daemon.send(4, &read(&path));
    assert_eq!(
        daemon.message_on(4),
        ToHost::File(FileInfo { mode: 0o640, size_bytes: BIG_BYTES as u64 })
    );
    let (mut got, mut uncredited) = (0, 0);
    loop {
        let frame = daemon.frame();
        assert_eq!((frame.channel, frame.kind), (4, Kind::File));
        assert!(frame.payload == pattern(got, frame.payload.len()), "at {got}");
        got += frame.payload.len();
        uncredited += frame.payload.len();
        assert!(uncredited <= WINDOW);
        if frame.end {
            break;
        }
        if uncredited > WINDOW / 2 {
            let bytes = u32::try_from(uncredited).expect("a window");
            daemon.send(4, &ToGuest::Credit { kind: Kind::File as u8, bytes });
            uncredited = 0;
        }
    }
    assert_eq!(got, BIG_BYTES);
}

#[test]
fn the_old_file_stays_until_the_new_one_is_whole() {
    let mut daemon = Daemon::start();
    let folder = daemon.folder().join("files");
    std::fs::create_dir(&folder).expect("mkdir");
    let path = folder.join("config");
    std::fs::write(&path, "old").expect("write");
    daemon.send(2, &write(&path, 0o600));
    daemon.stream(Kind::File, 2, false, b"ne");
    assert!(matches!(daemon.message_on(2), ToHost::Credit { .. }));
    assert_eq!(std::fs::read(&path).expect("read"), b"old");
    daemon.send(2, &ToGuest::Cancel);
    daemon.send(0, &ToGuest::Ping { token: 1 });
    daemon.message_on(0);
    assert_eq!(names(&folder), ["config"], "nothing is left of an abandoned one");
    assert_eq!(std::fs::read(&path).expect("read"), b"old");

    std::os::unix::fs::symlink(&path, folder.join("link")).expect("symlink");
    daemon.send(2, &write(&folder.join("link"), 0o4755));
    daemon.stream(Kind::File, 2, true, b"new");
    assert_eq!(daemon.message_on(2), ToHost::Written { bytes: 3 });
    assert_eq!(std::fs::read(&path).expect("read"), b"new");
    assert!(folder.join("link").is_symlink(), "what a link points to is replaced, not the link");
    let mode = std::fs::metadata(&path).expect("stat").permissions().mode();
    assert_eq!(mode & 0o7777, 0o4755);
}

#[test]
fn an_empty_file_and_one_without_a_size_are_files_too() {
    let mut daemon = Daemon::start();
    let path = daemon.folder().join("empty");
    daemon.send(2, &write(&path, 0o644));
    daemon.stream(Kind::File, 2, true, b"");
    assert_eq!(daemon.message_on(2), ToHost::Written { bytes: 0 });
    for path in [path.as_path(), Path::new("/proc/self/status")] {
        daemon.send(4, &read(path));
        assert!(matches!(daemon.message_on(4), ToHost::File(FileInfo { size_bytes: 0, .. })));
        let mut bytes = 0;
        loop {
            let frame = daemon.frame();
            bytes += frame.payload.len();
            if frame.end {
                break;
            }
        }
        assert_eq!(bytes > 0, path.starts_with("/proc"));
    }
}

#[test]
fn what_cannot_be_moved_says_why() {
    let mut daemon = Daemon::start();
    let folder = daemon.folder().to_owned();
    let fifo = folder.join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .expect("mkfifo");
    let failing = [
        (read(&folder.join("none")), libc::ENOENT),
        (read(&folder), libc::EISDIR),
        (read(&fifo), libc::EINVAL),
        (read(Path::new("/dev/zero")), libc::EINVAL),
        (read(Path::new("relative")), libc::EINVAL),
        (write(&folder, 0o644), libc::EISDIR),
        (write(&folder.join("none/file"), 0o644), libc::ENOENT),
        (write(&fifo, 0o644), libc::EINVAL),
        (write(Path::new("/proc/none"), 0o644), libc::ENOENT),
        (write(&folder.join("x".repeat(300)), 0o644), libc::ENAMETOOLONG),
    ];
    for (request, errno) in failing {
        daemon.send(2, &request);
        match daemon.message_on(2) {
            ToHost::Failed(error) => assert_eq!(error.errno, errno, "{request:?}: {error:?}"),
            other => panic!("{request:?}: {other:?}"),
        }
    }
    // The stream that followed at once is dropped.
    daemon.stream(Kind::File, 2, true, b"late");
    assert_eq!(daemon.frame_within(Duration::from_millis(100)), None);
}

#[test]
fn a_full_disk_ends_the_transfer_with_its_errno() {
    let mut daemon = Daemon::start();
    let raw = i32::try_from(daemon.agent.id()).expect("a pid");
    let limit = rustix::process::Rlimit { current: Some(100_000), maximum: Some(100_000) };
    let pid = rustix::process::Pid::from_raw(raw);
    // The nearest thing to a full disk that needs no mount: a bound on the size of files.
    rustix::process::prlimit(pid, rustix::process::Resource::Fsize, limit).expect("ours");
    let path = daemon.folder().join("big");
    daemon.send(2, &write(&path, 0o644));
    daemon.stream(Kind::File, 2, false, &[1; 65536]);
    daemon.stream(Kind::File, 2, false, &[1; 65536]);
    daemon.stream(Kind::File, 2, true, &[1; 65536]);
    assert!(matches!(daemon.message_on(2), ToHost::Credit { .. }));
    match daemon.message_on(2) {
        ToHost::Failed(error) => assert_eq!(error.errno, libc::EFBIG, "{error:?}"),
        other => panic!("{other:?}"),
    }
    assert!(!path.exists());
    assert!(names(daemon.folder()).iter().all(|name| !name.starts_with(".vmfork")));
}
