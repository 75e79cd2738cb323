//! The daemon's end of a keeper's control socket (`vmfork-tap-proto`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::{PidfdFlags, WaitId, WaitIdOptions};
use vmfork_tap_proto::{Op, REPLY_BYTES, Reply, Request};

use crate::pmem;

/// How long a keeper may take for one request. It needs microseconds; a QEMU whose address space is
/// held up for so long is lost.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to map a run, for which the engine of all views of an image waits.
pub(crate) const MAP_TIMEOUT: Duration = Duration::from_secs(2);

/// Most requests in flight whose answers no thread waits for.
const POSTED_MAX: u32 = 4;

/// What the shim must be handed before QEMU starts.
#[derive(Debug)]
pub struct ShimEnds {
    /// For `VMFORK_TAP_CONTROL`.
    pub control: OwnedFd,
    /// For `VMFORK_TAP_RAM` and `mem-path`.
    pub ram: OwnedFd,
    /// For `VMFORK_TAP_PMEM` and its own `mem-path`, if the guest has persistent memory.
    pub pmem: Option<OwnedFd>,
}

/// A request to a keeper failed.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// It had gone before it was asked: nothing has changed.
    #[error("keeper: {op:?}: the keeper has gone")]
    Gone { op: Op },
    #[error("keeper: {op:?}: no answer within {} s", REPLY_TIMEOUT.as_secs())]
    Timeout { op: Op },
    #[error("keeper: {op:?} refused")]
    Refused {
        op: Op,
        #[source]
        source: io::Error,
    },
    /// QEMU has touched this block of a run that was to be mapped: nothing has changed.
    #[error("keeper: {op:?}: block {block} is in use")]
    Busy { op: Op, block: u64 },
    #[error("keeper: {op:?}: answer of {len} bytes makes no sense")]
    BadReply { op: Op, len: usize },
    #[error("keeper: {op:?}: socket")]
    Socket {
        op: Op,
        #[source]
        source: io::Error,
    },
}

impl TapError {
    /// Whether RAM is in an unknown state and QEMU must be killed.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Refused { source, .. } => source.raw_os_error() == Some(libc::ENOTRECOVERABLE),
            Self::Gone { .. } | Self::Busy { .. } => false,
            _ => true,
        }
    }
}

/// The socket to one keeper. Requests are serialised: the control plane (attach, freeze) and an
/// engine (map a run, release) may both have some.
#[derive(Debug)]
pub struct Tap {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    socket: OwnedFd,
    sequence: u32,
    /// Requests whose answers no thread waits for, and which have not arrived yet.
    unanswered: u32,
    /// Known once the keeper has answered `Status`; a pidfd of a child of ours.
    keeper: Option<OwnedFd>,
}

impl Tap {
    /// A socket, and what the shim in a QEMU needs with `memory_bytes` of RAM and `pmem_bytes` of
    /// persistent memory.
    ///
    /// # Errors
    /// No fds or memory left.
    pub fn new(memory_bytes: u64, pmem_bytes: Option<u64>) -> io::Result<(Self, ShimEnds)> {
        let (ours, control) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::sockopt::set_socket_timeout(&ours, Timeout::Recv, Some(REPLY_TIMEOUT))?;
        rustix::net::sockopt::set_socket_timeout(&ours, Timeout::Send, Some(REPLY_TIMEOUT))?;
        let ram = rustix::fs::memfd_create("vmfork-ram", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&ram, memory_bytes)?;
        let pmem = pmem_bytes.map(pmem::placeholder).transpose()?;
        let inner = Inner { socket: ours, sequence: 0, unanswered: 0, keeper: None };
        Ok((Self { inner: Mutex::new(inner) }, ShimEnds { control, ram, pmem }))
    }

    /// Remember the keeper's process, to reap it at the end.
    pub(crate) fn set_keeper(&self, pidfd: OwnedFd) {
        self.lock().keeper = Some(pidfd);
    }

    /// One request, one answer.
    ///
    /// # Errors
    /// See [`TapError`].
    pub(crate) fn call(
        &self,
        op: Op,
        args: [u64; 4],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<([u64; 6], Option<OwnedFd>), TapError> {
        self.call_beside(op, args, fd, |_| Ok(()))
    }

    /// As [`Tap::call`]; before each wait for a packet `beside` has its turn, with the socket,
    /// which may be waited for together with something else that the keeper needs in order to
    /// answer.
    ///
    /// # Errors
    /// See [`TapError`].
    pub(crate) fn call_beside(
        &self,
        op: Op,
        args: [u64; 4],
        fd: Option<BorrowedFd<'_>>,
        mut beside: impl FnMut(BorrowedFd<'_>) -> io::Result<()>,
    ) -> Result<([u64; 6], Option<OwnedFd>), TapError> {
        let mut inner = self.lock();
        inner.send(op, args, fd)?;
        // The keeper answers in order: first what was posted before.
        loop {
            let ready = beside(inner.socket.as_fd());
            let received = ready.map_err(|source| TapError::Socket { op, source });
            match received.and_then(|()| inner.receive(op, RecvFlags::empty())) {
                Ok((reply, fd)) if reply.sequence == inner.sequence => {
                    if reply.errno == libc::EBUSY.cast_unsigned() {
                        return Err(TapError::Busy { op, block: reply.values[0] });
                    }
                    if reply.errno != 0 {
                        let source = io::Error::from_raw_os_error(reply.errno.cast_signed());
                        return Err(TapError::Refused { op, source });
                    }
                    return Ok((reply.values, fd));
                }
                Ok((reply, _)) if inner.unanswered > 0 => inner.forget(&reply),
                Ok(_) => return Err(TapError::BadReply { op, len: REPLY_BYTES }),
                Err(error) => {
                    // Should it come after all.
                    inner.unanswered += 1;
                    return Err(error);
                }
            }
        }
    }

    /// One request, whose answer is of no interest. Does not wait.
    ///
    /// # Errors
    /// See [`TapError`].
    pub(crate) fn post(&self, op: Op, args: [u64; 4]) -> Result<Posted, TapError> {
        let mut inner = self.lock();
        while inner.unanswered > 0 {
            match inner.receive(op, RecvFlags::DONTWAIT) {
                Ok((reply, _)) => inner.forget(&reply),
                Err(TapError::Timeout { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        if inner.unanswered >= POSTED_MAX {
            return Ok(Posted::Busy);
        }
        inner.send(op, args, None)?;
        inner.unanswered += 1;
        Ok(Posted::Sent)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What became of a request whose answer no thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Posted {
    Sent,
    /// The keeper has not caught up with earlier ones; nothing was sent.
    Busy,
}

impl Inner {
    fn send(&mut self, op: Op, args: [u64; 4], fd: Option<BorrowedFd<'_>>) -> Result<(), TapError> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = Request { op: op as u32, sequence: self.sequence, args };
        send(&self.socket, &request.to_bytes(), fd).map_err(|errno| socket_error(op, errno))
    }

    fn receive(&mut self, op: Op, flags: RecvFlags) -> Result<(Reply, Option<OwnedFd>), TapError> {
        let mut bytes = [0; REPLY_BYTES];
        let (len, fd) =
            receive(&self.socket, &mut bytes, flags).map_err(|errno| socket_error(op, errno))?;
        match len {
            // Gone after it was asked: who knows how far it had come.
            0 => Err(TapError::Socket { op, source: io::ErrorKind::UnexpectedEof.into() }),
            REPLY_BYTES => Ok((Reply::from_bytes(&bytes), fd)),
            len => Err(TapError::BadReply { op, len }),
        }
    }

    /// The answer to a request that was posted.
    fn forget(&mut self, reply: &Reply) {
        self.unanswered -= 1;
        if reply.errno != 0 {
            let error = io::Error::from_raw_os_error(reply.errno.cast_signed());
            tracing::debug!(%error, "keeper: a posted request failed");
        }
    }
}

impl Drop for Tap {
    /// Ends the keeper, and QEMU with it if that still runs, and reaps the keeper.
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _gone = rustix::net::shutdown(&inner.socket, rustix::net::Shutdown::Both);
        if let Some(pidfd) = inner.keeper.take() {
            // The keeper ends within microseconds of the shutdown.
            let mut waiting = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
            let second = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
            let ended = rustix::event::poll(&mut waiting, Some(&second));
            if ended != Ok(1) {
                let _killed =
                    rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
            }
            if let Err(errno) =
                rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)
            {
                tracing::debug!(%errno, "keeper: wait");
            }
        }
    }
}

/// A pidfd of a process.
pub(crate) fn pidfd_of(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

fn socket_error(op: Op, errno: rustix::io::Errno) -> TapError {
    use rustix::io::Errno;
    match errno {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => TapError::Gone { op },
        Errno::AGAIN => TapError::Timeout { op },
        errno => TapError::Socket { op, source: errno.into() },
    }
}

fn send(
    socket: &OwnedFd,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), rustix::io::Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let parts = [IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)
    })
    .map(|_| ())
}

fn receive(
    socket: &OwnedFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> Result<(usize, Option<OwnedFd>), rustix::io::Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut parts = [IoSliceMut::new(&mut *bytes)];
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(socket, &mut parts, &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fd = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            fd = fds.last().or(fd);
        }
    }
    Ok((got.bytes, fd))
}
