//! A machine for tests, without QEMU: a script that speaks QMP, and a keeper that says who it is
//! and no more.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use vmfork_memory::{GuestMemory, Tap};
use vmfork_qemu::{Accel, Binary, GuestKind, Launch, Shape, Version};
use vmfork_tap_proto::{REQUEST_BYTES, Reply, Request, VERSION};

use super::launch::Kept;
use super::machine::Machine;
use super::users::Users;
use crate::state::State;

const MEMORY_BYTES: u64 = 64 << 20;
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake-qemu.sh");

/// It keeps what it writes down in `folder`.
pub async fn machine(folder: &std::path::Path) -> Arc<Machine> {
    let (tap, ends) = Tap::new(MEMORY_BYTES, None).expect("a socket");
    let shape = Shape::new(MEMORY_BYTES, 1, Accel::Tcg, GuestKind::Linux, Vec::new())
        .expect("a possible shape");
    let version = Version { major: 7, minor: 2, micro: 0 };
    let binary = Binary { path: SCRIPT.into(), version, firmware: Vec::new() };
    let qemu = Launch::wait(binary, shape.clone(), ends.ram).start().await.expect("it starts");
    let pid = qemu.process.pid().unsigned_abs();
    let control = ends.control;
    let keeper = std::thread::Builder::new()
        .name("fake-keeper".to_owned())
        .spawn(move || say_status(&control, pid))
        .expect("a thread");
    let memory = GuestMemory::connect(tap, pid, MEMORY_BYTES).expect("the keeper answers");
    keeper.join().expect("it has answered");
    let (state, _) = State::open(folder).expect("a state folder");
    let user = Users::new(0, 1).take().expect("the first");
    let kept = Kept { user, processes: Vec::new(), state: Arc::new(state) };
    Arc::new(Machine::new(qemu, memory, shape, version, kept))
}

/// Answer one request, with a process that is there and something that stands for a userfaultfd.
fn say_status(control: &OwnedFd, pid: u32) {
    let mut bytes = [0; REQUEST_BYTES];
    recv(control, &mut bytes, RecvFlags::empty()).expect("a request");
    let sequence = Request::from_bytes(&bytes).sequence;
    let values = [u64::from(VERSION), u64::from(pid), 1 << 30, MEMORY_BYTES, 1, 0];
    let reply = Reply { errno: 0, sequence, values }.to_bytes();
    let fds = [control.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(control, &[IoSlice::new(&reply)], &mut ancillary, SendFlags::empty()).expect("sent");
}
