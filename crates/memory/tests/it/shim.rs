//! The shim's protocol: what a keeper refuses.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::common::{FakeVm, needs_userfaultfd};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, sockopt,
};
use vmfork_tap_proto::{
    BLOCK_BYTES, Op, REPLY_BYTES, REQUEST_BYTES, Reply, Request, Role, VERSION,
};

const RAM_BYTES: u64 = 16 * BLOCK_BYTES;
const EINVAL: u32 = libc::EINVAL.cast_unsigned();

struct Keeper {
    socket: OwnedFd,
    vm: FakeVm,
}

impl Keeper {
    fn start() -> Self {
        let (socket, control) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("sockets");
        let timeout = Some(Duration::from_secs(10));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, timeout).expect("timeout");
        let ram = memfd(RAM_BYTES);
        Self { socket, vm: FakeVm::spawn(RAM_BYTES, Role::Boot, control, ram, None) }
    }

    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )
        .expect("alive");
    }

    /// `None`: it has gone.
    fn receive(&self) -> Option<Reply> {
        let mut bytes = [0; REPLY_BYTES];
        let got = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut rustix::net::RecvAncillaryBuffer::default(),
            RecvFlags::CMSG_CLOEXEC,
        )
        .expect("an answer");
        (got.bytes == REPLY_BYTES).then(|| Reply::from_bytes(&bytes))
    }

    fn ask(&self, op: u32, args: [u64; 4], fd: Option<BorrowedFd<'_>>) -> Reply {
        self.send(&Request { op, sequence: 7, args }.to_bytes(), fd);
        let reply = self.receive().expect("alive");
        assert_eq!(reply.sequence, 7);
        reply
    }

    fn errno(&self, op: Op, args: [u64; 4], fd: Option<BorrowedFd<'_>>) -> u32 {
        self.ask(op as u32, args, fd).errno
    }
}

fn memfd(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&fd, bytes).expect("size");
    fd
}

#[test]
fn requests_that_make_no_sense_are_refused_and_change_nothing() {
    needs_userfaultfd!();
    let mut keeper = Keeper::start();
    assert_eq!(keeper.vm.ask("fill 0 8192 3"), "ok");
    let before = keeper.vm.sums(0, 8192);
    let status = keeper.ask(Op::Status as u32, [0; 4], None);
    let [version, pid, ram, bytes, mappings, flags] = status.values;
    assert_eq!((version, bytes, mappings, flags), (VERSION.into(), RAM_BYTES, 1, 0));
    assert_ne!(pid, u64::from(keeper.vm.pid()), "a process of its own");

    for op in [0, 9, u32::MAX] {
        assert_eq!(keeper.ask(op, [0; 4], None).errno, EINVAL, "op {op}");
    }
    for len in [1, REQUEST_BYTES - 1, REQUEST_BYTES + 1, 200] {
        keeper.send(&vec![1; len], None);
        assert_eq!(keeper.receive().expect("alive").errno, EINVAL, "{len} bytes");
    }

    let release = |address, len| keeper.errno(Op::Release, [address, len, 0, 0], None);
    assert_eq!(release(ram, BLOCK_BYTES), EINVAL, "RAM itself");
    assert_eq!(release(ram - 4096, 8192), EINVAL, "overlaps RAM's start");
    assert_eq!(release(ram + RAM_BYTES - 4096, 8192), EINVAL, "overlaps RAM's end");
    assert_eq!(release(0x1000_0001, 4096), EINVAL, "unaligned address");
    assert_eq!(release(0x1000_0000, 100), EINVAL, "unaligned length");
    assert_eq!(release(0x1000_0000, 0), EINVAL, "nothing");
    assert_eq!(release(u64::MAX - 4095, 8192), EINVAL, "beyond the end");

    let cache = memfd(RAM_BYTES);
    let pmem = keeper.errno(Op::MapPmem, [0, 4096, 0, 0], Some(cache.as_fd()));
    assert_eq!(pmem, libc::ENODEV.cast_unsigned(), "it has none");
    let map = |offset, len| keeper.errno(Op::MapCache, [offset, len, 0, 0], Some(cache.as_fd()));
    assert_eq!(map(0, BLOCK_BYTES), EINVAL, "not a view yet");
    assert_eq!(keeper.errno(Op::Freeze, [0; 4], None), libc::EBADF.cast_unsigned());
    assert_eq!(keeper.errno(Op::Attach, [0; 4], None), libc::EBADF.cast_unsigned());
    let unmappable = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("fd");
    let refused = keeper.errno(Op::Freeze, [0; 4], Some(unmappable.as_fd()));
    assert_eq!(refused, libc::ENODEV.cast_unsigned());
    assert_eq!(keeper.vm.sums(0, 8192), before);
}

#[test]
fn runs_are_mapped_only_in_ram_by_whole_untouched_blocks() {
    needs_userfaultfd!();
    let mut keeper = Keeper::start();
    let cache = memfd(RAM_BYTES);
    assert_eq!(keeper.errno(Op::Freeze, [0; 4], Some(cache.as_fd())), 0);
    let map = |offset, len| keeper.errno(Op::MapZero, [offset, len, 0, 0], None);
    assert_eq!(map(4096, BLOCK_BYTES), EINVAL, "unaligned offset");
    assert_eq!(map(0, 4096), EINVAL, "unaligned length");
    assert_eq!(map(0, 0), EINVAL, "nothing");
    assert_eq!(map(RAM_BYTES, BLOCK_BYTES), EINVAL, "beyond RAM");
    assert_eq!(map(u64::MAX - BLOCK_BYTES + 1, BLOCK_BYTES), EINVAL, "beyond everything");
    let no_fd = keeper.errno(Op::MapCache, [0, BLOCK_BYTES, 0, 0], None);
    assert_eq!(no_fd, libc::EBADF.cast_unsigned());
    assert_eq!(map(0, 2 * BLOCK_BYTES), 0);
    assert_eq!(map(BLOCK_BYTES, BLOCK_BYTES), libc::EBUSY.cast_unsigned(), "mapped before");
    // QEMU gives back pages of block 5, which installs zeros there.
    assert_eq!(keeper.vm.ask("drop 2570 3"), "ok");
    let map = |offset, len| keeper.errno(Op::MapZero, [offset, len, 0, 0], None);
    let over = |first: u64| {
        let args = [first * BLOCK_BYTES, 2 * BLOCK_BYTES, 0, 0];
        keeper.errno(Op::MapCache, args, Some(cache.as_fd()))
    };
    assert_eq!(over(4), libc::EBUSY.cast_unsigned());
    assert_eq!(map(4 * BLOCK_BYTES, BLOCK_BYTES), 0, "the block before it is still free");
    // Its own end it confirms.
    assert_eq!(keeper.errno(Op::Exit, [0; 4], None), 0);
    assert!(keeper.receive().is_none(), "gone");
}
