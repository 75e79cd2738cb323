//! The real program, over its socket.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with, sockopt,
};
use vmfork_holder::proto::{MESSAGE_BYTES_MAX, Refusal, Reply, Request};
use vmfork_holder::{HolderError, Kind, Name, Owner, SOCKET, kill_other, list, start};

const LONG: Duration = Duration::from_secs(3600);
/// Far more than anything here takes.
const BOUND: Duration = Duration::from_secs(30);

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_vmfork-holder"))
}

/// A holder that does not outlive its test.
struct Holder(Child);

impl Holder {
    fn start(state: &Path) -> Self {
        Self(start(program(), state).expect("a holder"))
    }

    fn ends(&mut self) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < BOUND {
            if self.0.try_wait().expect("wait").is_some() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn name(text: &str) -> Name {
    Name::new(text).expect("a name")
}

fn names(state: &Path) -> Vec<String> {
    list(state).expect("a list").iter().map(|held| held.name.to_string()).collect()
}

#[test]
fn a_successor_gets_the_very_socket_and_the_holder_ends_when_told() {
    let folder = tempfile::tempdir().expect("temp dir");
    let state = folder.path();
    let mut holder = Holder::start(state);
    let mode = fs::symlink_metadata(state.join(SOCKET)).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);

    let mut first = Owner::hello(state, LONG).expect("hello");
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    first.put(&name("pair"), Kind(7), b"a note", ours.as_fd()).expect("put");
    drop((first, ours));
    theirs.write_all(b"who is there").expect("the holder has the other end");

    let mut second = Owner::hello(state, LONG).expect("hello");
    assert_eq!(second.generation(), 2);
    assert!(second.get(&name("other")).expect("an answer").is_none());
    let held = second.get(&name("pair")).expect("an answer").expect("it was put");
    assert_eq!((held.kind, &held.note[..], held.generation), (Kind(7), &b"a note"[..], 2));
    let mut stream = UnixStream::from(held.fd);
    let mut bytes = [0; 12];
    stream.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"who is there");
    drop(stream);

    second.end().expect("end");
    assert!(holder.ends());
    assert!(!state.join(SOCKET).exists());
    assert_eq!(theirs.read(&mut bytes).expect("the end"), 0, "what it kept is closed");
}

#[test]
fn what_is_released_is_closed_and_the_rest_stays() {
    let folder = tempfile::tempdir().expect("temp dir");
    let _holder = Holder::start(folder.path());
    let mut owner = Owner::hello(folder.path(), LONG).expect("hello");
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    owner.put(&name("pair"), Kind(1), b"", ours.as_fd()).expect("put");
    owner.put(&name("a"), Kind(1), b"", theirs.as_fd()).expect("put");
    drop(ours);
    assert_eq!(names(folder.path()), ["a", "pair"]);
    owner.release(&name("pair")).expect("release");
    owner.release(&name("pair")).expect("again is fine");
    assert_eq!(theirs.read(&mut [0]).expect("the end"), 0);
    assert_eq!(names(folder.path()), ["a"]);
}

#[test]
fn it_ends_when_no_daemon_came_in_time() {
    let folder = tempfile::tempdir().expect("temp dir");
    let mut holder = Holder::start(folder.path());
    let owner = Owner::hello(folder.path(), Duration::from_millis(50)).expect("hello");
    assert!(holder.0.try_wait().expect("wait").is_none());
    drop(owner);
    assert!(holder.ends());
    assert!(Owner::hello(folder.path(), LONG).expect_err("gone").is_absent());
}

#[test]
fn a_folder_has_one_holder_and_a_dead_ones_socket_is_replaced() {
    let folder = tempfile::tempdir().expect("temp dir");
    let first = Holder::start(folder.path());
    let error = start(program(), folder.path()).expect_err("taken");
    assert!(matches!(error, HolderError::NotReady { .. }), "{error}");
    drop(first);
    assert!(folder.path().join(SOCKET).exists());
    let _second = Holder::start(folder.path());
    Owner::hello(folder.path(), LONG).expect("hello");
}

#[test]
fn a_holder_that_does_not_answer_is_killed() {
    let folder = tempfile::tempdir().expect("temp dir");
    let mut holder = Holder::start(folder.path());
    let pid = i32::try_from(holder.0.id()).ok().and_then(rustix::process::Pid::from_raw);
    let pid = pid.expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("stop");
    let error = Owner::hello(folder.path(), LONG).expect_err("it hangs");
    assert!(matches!(error, HolderError::Io { .. }), "{error}");
    kill_other(folder.path()).expect("kill");
    assert!(holder.ends());
    kill_other(folder.path()).expect("none is fine");
}

#[test]
fn the_path_of_a_state_folder_may_be_long() {
    let folder = tempfile::tempdir().expect("temp dir");
    let state = folder.path().join("x".repeat(100)).join("y".repeat(100));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&state).expect("folder");
    let _holder = Holder::start(&state);
    let mut owner = Owner::hello(&state, LONG).expect("hello");
    let null = File::open("/dev/null").expect("open");
    owner.put(&name("null"), Kind(1), b"", null.as_fd()).expect("put");
    assert_eq!(names(&state), ["null"]);
}

fn raw(state: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("socket");
    connect(&socket, &SocketAddrUnix::new(state.join(SOCKET)).expect("address")).expect("connect");
    socket
}

#[test]
fn wrong_input_is_answered_and_harms_no_one() {
    let folder = tempfile::tempdir().expect("temp dir");
    let _holder = Holder::start(folder.path());
    let mut owner = Owner::hello(folder.path(), LONG).expect("hello");
    let null = File::open("/dev/null").expect("open");
    owner.put(&name("null"), Kind(1), b"", null.as_fd()).expect("put");

    let socket = raw(folder.path());
    let said = |bytes: &[u8]| {
        send(&socket, bytes, SendFlags::NOSIGNAL).expect("send");
        let mut reply = [0; MESSAGE_BYTES_MAX];
        let (length, _) = recv(&socket, &mut reply, RecvFlags::empty()).expect("a reply");
        Reply::parse(&reply[..length])
    };
    let refused = |refusal| Some(Reply::Refused(refusal));
    assert_eq!(said(b"\x02\0"), refused(Refusal::Version));
    assert_eq!(said(b"\x01\0\x01"), refused(Refusal::Malformed));
    let mut long = Request::End.to_bytes();
    long.resize(100_000, 0);
    assert_eq!(said(&long), refused(Refusal::Malformed));
    assert_eq!(said(&Request::End.to_bytes()), refused(Refusal::NotOwner));
    let put = Request::Put { name: name("null"), kind: Kind(1), note: Vec::new() };
    assert_eq!(said(&put.to_bytes()), refused(Refusal::WrongFd));
    // Connections that say nothing do not keep a daemon out, nor throw the owner out.
    let idle: Vec<_> = (0..40).map(|_| raw(folder.path())).collect();
    assert_eq!(names(folder.path()), ["null"]);
    sockopt::set_socket_timeout(&idle[0], sockopt::Timeout::Recv, Some(BOUND)).expect("a bound");
    let (length, _) = recv(&idle[0], &mut [0; 1][..], RecvFlags::empty()).expect("the end");
    assert_eq!(length, 0, "the oldest gives way");
    owner.get(&name("null")).expect("still the owner").expect("still there");
}
