//! One packet, perhaps with an fd, over the holder's socket; and where that socket is.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::cmsg_space;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, recvmsg, sendmsg,
};

use crate::SOCKET;
use crate::proto::MESSAGE_BYTES_MAX;

#[derive(Debug)]
pub(crate) struct Packet {
    /// Empty: the peer has closed the connection, or wants it closed.
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    /// There were more fds than that; the kernel has closed them.
    pub(crate) fds_cut: bool,
}

/// The next packet. Of one that is too long there is one byte more than any message has.
pub(crate) fn receive(socket: &OwnedFd, flags: RecvFlags) -> Result<Packet> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX + 1];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    bytes.truncate(received.bytes);
    Ok(Packet { bytes, fds, fds_cut: received.flags.contains(ReturnFlags::CTRUNC) })
}

pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
    let fds: Vec<_> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
    }
}

pub(crate) fn open_folder(state: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(state, flags, Mode::empty())
}

/// `folder` is `state`, opened. A path of a socket has at most 107 bytes; a longer one goes by
/// the open folder.
pub(crate) fn address(state: &Path, folder: &OwnedFd) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new(state.join(SOCKET)).or_else(|_| {
        SocketAddrUnix::new(format!("/proc/self/fd/{}/{SOCKET}", folder.as_fd().as_raw_fd()))
    })
}
