//! The byte stream to the daemon: opening it, whole frames in, whole frames out.
//!
//! ```text
//!            open                poll: HUP                  epoll edge, or 1 s
//!   Absent ─────────► Connected ───────────► HungUp ─────────────────────────► Connected
//!      ▲                  │ (a socket, or a malformed frame: closed)
//!      └──────────────────┘
//! ```
//!
//! A virtio port reports POLLHUP for as long as its host side is not connected. A plain `poll`
//! would spin, so such a port is watched edge-triggered instead.
//!
//! Output waits in one buffer of whole frames. Senders of streams ask [`Port::has_room`] first, so
//! that it stays short: everything in it goes out before a fork. When the port is *held*, what is
//! queued already goes out, and nothing after it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use vmfork_agent_proto::{Decoder, Frame, Kind, PORT_NAME, ToHost, encode, encode_message};

use crate::console::log;

/// Above this many waiting bytes no stream adds to them.
const ROOM_BYTES: usize = 64 * 1024;
/// Above this many nothing more is read either: a daemon that asks and never listens.
const BACKLOG_BYTES_MAX: usize = 1 << 20;
/// What one read takes.
const READ_BYTES: usize = 64 * 1024;
/// How often an absent port is looked for; at first, and after a while.
const ABSENT_RETRY: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// How many of the quick ones.
const QUICK_RETRIES: u32 = 250;
/// How often a hung-up port is looked at beside its edge; the first is while a fork is under way.
const HUNG_RETRY: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// Where the daemon is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PortPath {
    /// The virtio-serial port, wherever the guest shows it.
    Virtio,
    Path(PathBuf),
}

/// The daemon can't be talked to; all of its channels are void.
#[derive(Debug)]
pub(crate) struct Lost(pub(crate) String);

#[derive(Debug)]
enum State {
    Absent { tries: u32, retry_at: Option<Instant> },
    Connected(OwnedFd),
    HungUp { fd: OwnedFd, edge: OwnedFd, retry_at: Instant },
}

#[derive(Debug)]
pub(crate) struct Port {
    path: PortPath,
    state: State,
    decoder: Decoder,
    read_buffer: Vec<u8>,
    out: Vec<u8>,
    sent: usize,
    /// Nothing of `out` from here on is written.
    held_at: Option<usize>,
}

impl Port {
    pub(crate) fn new(path: PortPath) -> Self {
        Self {
            path,
            state: State::Absent { tries: 0, retry_at: None },
            decoder: Decoder::new(),
            read_buffer: vec![0; READ_BYTES],
            out: Vec::new(),
            sent: 0,
            held_at: None,
        }
    }

    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.state, State::Connected(_))
    }

    /// Whether a stream may add a frame.
    pub(crate) fn has_room(&self) -> bool {
        self.out.len() - self.sent < ROOM_BYTES
    }

    /// Write what is queued by now, and nothing that comes later until [`Port::release`].
    pub(crate) fn hold(&mut self) {
        self.held_at = Some(self.out.len());
    }

    pub(crate) fn release(&mut self) {
        self.held_at = None;
    }

    /// What may be written now.
    fn writable(&self) -> &[u8] {
        self.out.get(self.sent..self.held_at.unwrap_or(self.out.len())).unwrap_or_default()
    }

    pub(crate) fn send(&mut self, channel: u32, message: &ToHost) {
        match encode_message(channel, message) {
            Ok(frame) => self.push(&frame),
            Err(error) => log!("message for channel {channel} dropped: {error}"),
        }
    }

    /// One frame of a stream; `payload` is at most `PAYLOAD_BYTES_MAX` long.
    pub(crate) fn send_stream(&mut self, kind: Kind, channel: u32, end: bool, payload: &[u8]) {
        self.push(&encode(kind, channel, end, payload));
    }

    fn push(&mut self, frame: &[u8]) {
        if self.sent == self.out.len() {
            self.forget_sent();
        }
        self.out.extend_from_slice(frame);
    }

    fn forget_sent(&mut self) {
        self.out.drain(..self.sent);
        self.held_at = self.held_at.map(|at| at.saturating_sub(self.sent));
        self.sent = 0;
    }

    /// Take back the frame that was queued last before [`Port::hold`], unless part of it has gone
    /// out.
    pub(crate) fn take_back(&mut self, channel: u32, message: &ToHost) {
        let Ok(frame) = encode_message(channel, message) else { return };
        if self.writable().ends_with(&frame)
            && let Some(end) = self.held_at
        {
            self.out.drain(end - frame.len()..end);
            self.held_at = Some(end - frame.len());
        }
    }

    /// Drop what was queued while the port was held: whole frames, for another daemon side.
    pub(crate) fn drop_held(&mut self) {
        if let Some(at) = self.held_at {
            self.out.truncate(at);
        }
    }

    /// What to poll, if anything.
    pub(crate) fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match &self.state {
            State::Absent { .. } => None,
            State::HungUp { edge, .. } => Some((edge.as_fd(), PollFlags::IN)),
            State::Connected(fd) => {
                let mut flags = PollFlags::empty();
                if self.out.len() - self.sent < BACKLOG_BYTES_MAX {
                    flags |= PollFlags::IN;
                }
                if !self.writable().is_empty() {
                    flags |= PollFlags::OUT;
                }
                Some((fd.as_fd(), flags))
            }
        }
    }

    /// When [`Port::refresh`] wants to be called at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Absent { retry_at, .. } => *retry_at,
            State::HungUp { retry_at, .. } => Some(*retry_at),
            State::Connected(_) => None,
        }
    }

    /// Open an absent port, look after a hung-up one; `hurry` while a fork is under way.
    pub(crate) fn refresh(&mut self, now: Instant, hurry: bool) {
        match &mut self.state {
            State::Connected(_) => {}
            State::Absent { tries, retry_at } => {
                if retry_at.is_some_and(|at| now < at) {
                    return;
                }
                let tries = tries.saturating_add(1);
                match open(&self.path) {
                    Ok(fd) => {
                        self.clear();
                        self.state = State::Connected(fd);
                    }
                    Err(error) => {
                        if tries == QUICK_RETRIES {
                            log!("no port to the host yet, still trying: {error}");
                        }
                        let wait = ABSENT_RETRY[usize::from(tries >= QUICK_RETRIES)];
                        self.state = State::Absent { tries, retry_at: Some(now + wait) };
                    }
                }
            }
            State::HungUp { fd, edge, retry_at } => {
                let mut events = Vec::with_capacity(1);
                // Consumes the edge. An error shows as a port that stays hung up.
                let _ =
                    epoll::wait(&*edge, rustix::buffer::spare_capacity(&mut events), Some(&ZERO));
                if is_hung_up(fd) {
                    *retry_at = now + HUNG_RETRY[usize::from(!hurry)];
                } else if let State::HungUp { fd, .. } = self.take_state() {
                    self.state = State::Connected(fd);
                }
            }
        }
    }

    /// The host side has gone (`POLLHUP`).
    ///
    /// # Errors
    /// A socket's other end won't come back: the port is closed, and opened again later.
    pub(crate) fn hang_up(&mut self, now: Instant) -> Result<(), Lost> {
        let State::Connected(fd) = self.take_state() else { return Ok(()) };
        let edge = if is_socket(&fd) { Err(Errno::NOTCONN) } else { edge_of(&fd) };
        match edge {
            Ok(edge) => {
                self.state = State::HungUp { fd, edge, retry_at: now + HUNG_RETRY[0] };
                Ok(())
            }
            Err(error) => Err(self.close(&format!("the host has disconnected: {error}"))),
        }
    }

    /// Close the port; it is opened again a moment later.
    pub(crate) fn close(&mut self, why: &str) -> Lost {
        self.state = State::Absent { tries: 1, retry_at: Some(Instant::now() + ABSENT_RETRY[0]) };
        self.clear();
        Lost(why.to_owned())
    }

    /// Forget what was half read and not yet written.
    pub(crate) fn clear(&mut self) {
        self.decoder = Decoder::new();
        self.out.clear();
        self.sent = 0;
        self.held_at = None;
    }

    fn take_state(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Absent { tries: 0, retry_at: None })
    }

    /// Read once and append whole frames to `frames`.
    ///
    /// # Errors
    /// The stream is broken or its bytes are not frames; the port is closed.
    pub(crate) fn read(&mut self, frames: &mut Vec<Frame>) -> Result<(), Lost> {
        let State::Connected(fd) = &self.state else { return Ok(()) };
        match rustix::io::read(fd, &mut self.read_buffer) {
            // The end of a socket; of a virtio port, that the host is not there.
            Ok(0) if is_socket(fd) || is_hung_up(fd) => return self.hang_up(Instant::now()),
            Ok(0) => return Ok(()),
            Ok(n) => self.decoder.push(self.read_buffer.get(..n).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(error) => return Err(self.close(&format!("reading from the host: {error}"))),
        }
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => return Ok(()),
                Err(error) => return Err(self.close(&format!("the host sent nonsense: {error}"))),
            }
        }
    }

    /// Write as much as the port takes.
    ///
    /// # Errors
    /// As [`Port::read`].
    pub(crate) fn flush(&mut self) -> Result<(), Lost> {
        while !self.writable().is_empty() {
            let State::Connected(fd) = &self.state else { return Ok(()) };
            match rustix::io::write(fd, self.writable()) {
                Ok(n) => self.sent += n,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE) if is_hung_up(fd) => return self.hang_up(Instant::now()),
                Err(error) => return Err(self.close(&format!("writing to the host: {error}"))),
            }
        }
        if self.sent > ROOM_BYTES {
            self.forget_sent();
        }
        Ok(())
    }
}

const ZERO: rustix::time::Timespec = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };

fn is_hung_up(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::empty())];
    poll(&mut fds, Some(&ZERO)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

fn is_socket(fd: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_type(fd).is_ok()
}

/// A descriptor that becomes readable when something about `fd` changes.
fn edge_of(fd: &OwnedFd) -> Result<OwnedFd, Errno> {
    let edge = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
    epoll::add(&edge, fd, epoll::EventData::new_u64(0), flags)?;
    Ok(edge)
}

fn open(path: &PortPath) -> io::Result<OwnedFd> {
    match path {
        PortPath::Path(path) => open_path(path),
        PortPath::Virtio => {
            let linked = Path::new("/dev/virtio-ports").join(PORT_NAME);
            if linked.exists() { open_path(&linked) } else { open_path(&find_virtio_port()?) }
        }
    }
}

/// Without udev there is no link: look for the name in sysfs.
fn find_virtio_port() -> io::Result<PathBuf> {
    for entry in std::fs::read_dir("/sys/class/virtio-ports")? {
        let entry = entry?;
        let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim_end() == PORT_NAME {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("no virtio port named {PORT_NAME}")))
}

fn open_path(path: &Path) -> io::Result<OwnedFd> {
    if std::fs::metadata(path)?.file_type().is_socket() {
        let stream = UnixStream::connect(path)?;
        stream.set_nonblocking(true)?;
        return Ok(stream.into());
    }
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pong(token: u64) -> ToHost {
        ToHost::Pong { token }
    }

    #[test]
    fn a_held_port_writes_what_came_before_and_nothing_after() {
        let (ours, mut theirs) = UnixStream::pair().expect("socket pair");
        ours.set_nonblocking(true).expect("non-blocking");
        theirs.set_nonblocking(true).expect("non-blocking");
        let mut port = Port::new(PortPath::Virtio);
        port.state = State::Connected(ours.into());
        let mut written = |port: &mut Port| {
            port.flush().expect("connected");
            let mut bytes = Vec::new();
            let _ = io::Read::read_to_end(&mut theirs, &mut bytes);
            bytes
        };
        let bytes = |token| encode_message(0, &pong(token)).expect("short");

        port.send(0, &pong(1));
        port.hold();
        port.send(0, &pong(2));
        assert_eq!(written(&mut port), bytes(1));
        port.send(0, &pong(3));
        assert_eq!(written(&mut port), b"");
        port.take_back(0, &pong(1));
        port.release();
        assert_eq!(written(&mut port), [bytes(2), bytes(3)].concat(), "1 had gone out");

        port.send(0, &pong(4));
        port.hold();
        port.send(0, &pong(5));
        port.take_back(0, &pong(4));
        port.drop_held();
        port.release();
        port.send(0, &pong(6));
        assert_eq!(written(&mut port), bytes(6), "4 was taken back, 5 was for another daemon");
    }
}
