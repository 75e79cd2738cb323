//! Serves one client of one of the exports that it may name.
//!
//! ```text
//!   socket ──► requests ──┬── at once: this thread ──────────────► out ──► socket
//!                         └── what must wait: a worker ──► bell ──► out
//! ```
//!
//! QEMU may stand in a page fault in the middle of a `sendmsg` or a `recvmsg`. So this thread never
//! blocks in `send`: what does not fit is queued. It waits for the socket and its bells alone.
//!
//! Promises: requests and replies in flight are bounded by [`REQUESTS_MAX`] and
//! [`QUEUED_BYTES_MAX`]: beyond, no more requests are read. A request that waits for a page delays
//! no other. When [`serve`] returns, no request is being carried out any more.
//!
//! A hit takes four system calls: `poll`, `recv`, `pread` or `pwrite`, `send`. Its bytes are read
//! into the reply, or written from where they came. Those of a large read go from the file to the
//! socket by `sendfile`, and are copied once, by the client.
//!
//! Left to others: who may connect; what is read and written ([`Target`](crate::Target)).

use std::fmt::Debug;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendFlags};

use crate::buffer::{FilePart, Inbox, Next, Out};
use crate::handshake::{Agreed, Export, Flaw, Handshake, Step};
use crate::pulse::Pulse;
use crate::request::{Command, Replies, Request};
use crate::wire::REQUEST_BYTES;
use crate::workers::{Asked, Job, Outbox, Target, Work, Workers};

/// Most requests of a client that wait. QEMU's client sends 16.
const REQUESTS_MAX: usize = 64;
/// Bytes of replies that a client has not taken, at which its requests are not read any more. One
/// reply may be longer.
const QUEUED_BYTES_MAX: usize = 8 << 20;
/// Bytes of replies that are sent before the next request is carried out.
const SENT_AT_ONCE: usize = 128 << 10;
/// How long a client may take for its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Read from the socket at a time.
const READ_BYTES: usize = 256 << 10;

/// What a client may connect to.
pub trait Exports: Debug {
    /// All of it, as the connection begins.
    fn list(&self) -> Vec<Export>;

    /// The client has chosen an export, and learns of that after this has returned. `None`: it is
    /// not available any more; the connection ends.
    fn claim(&self, export: &Export) -> Option<Arc<dyn Target>>;
}

/// A connection that ended otherwise than by the client's wish.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("the client breaks the NBD protocol")]
    Protocol(#[from] Flaw),
    #[error("the client did not say within {} s what it wants", HANDSHAKE_TIMEOUT.as_secs())]
    Slow,
    #[error("the export `{0}` is held by another connection")]
    Held(String),
    #[error("the connection")]
    Socket(#[from] io::Error),
}

/// Serve a client until it disconnects, or until `pulse` says that it is to end.
///
/// # Errors
/// [`ServeError`]. What was acknowledged has been done all the same.
pub fn serve(socket: &UnixStream, exports: &dyn Exports, pulse: &Pulse) -> Result<(), ServeError> {
    socket.set_nonblocking(true)?;
    let outbox = Arc::new(Outbox::new()?);
    let (inbox, out) = (Inbox::default(), Out::default());
    let mut connection = Connection { socket, pulse, outbox, inbox, out, target: None };
    let list = exports.list();
    let Some((reply, export, agreed)) = connection.handshake(&list)? else { return Ok(()) };
    let held = || ServeError::Held(export.name.clone());
    let target = exports.claim(export).ok_or_else(held)?;
    connection.out.put(&reply);
    connection.target = Some(Arc::clone(&target));
    let job = Job { target, replies: Replies(agreed) };
    let mut workers = Workers::new(job, Arc::clone(&connection.outbox));
    connection.requests(export, agreed, &mut workers)
}

struct Connection<'a> {
    socket: &'a UnixStream,
    pulse: &'a Pulse,
    outbox: Arc<Outbox>,
    inbox: Inbox,
    out: Out,
    /// Once it is chosen.
    target: Option<Arc<dyn Target>>,
}

/// The last reply of a handshake, which export, and what was agreed.
type Begun<'e> = (Vec<u8>, &'e Export, Agreed);

/// What a look at the socket found.
enum Look {
    Went,
    /// Workers have replies.
    Replies,
    Stop,
    /// The client has closed its end.
    End,
}

impl Connection<'_> {
    /// `None`: the client went away.
    fn handshake<'e>(&mut self, exports: &'e [Export]) -> Result<Option<Begun<'e>>, ServeError> {
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        let (mut handshake, greeting) = Handshake::begin(exports);
        self.out.put(&greeting);
        loop {
            let needs = handshake.needs();
            while let Some(bytes) = self.inbox.front(handshake.needs()) {
                let len = bytes.len();
                let step = handshake.take(bytes)?;
                self.inbox.take(len);
                match step {
                    Step::More(reply) => self.out.put(&reply),
                    Step::Begin(reply, export, agreed) => return Ok(Some((reply, export, agreed))),
                    Step::End(reply) => {
                        self.out.put(&reply);
                        self.flush()?;
                        return Ok(None);
                    }
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ServeError::Slow);
            }
            self.flush()?;
            match self.look(Some(needs), Some(left))? {
                Look::Went | Look::Replies => {}
                Look::Stop | Look::End => return Ok(None),
            }
        }
    }

    fn requests(
        &mut self,
        export: &Export,
        agreed: Agreed,
        workers: &mut Workers,
    ) -> Result<(), ServeError> {
        let mut head: Option<Request> = None;
        let mut waiting = 0;
        loop {
            let since = Instant::now();
            while self.has_room(waiting) {
                let Some(request) = head else {
                    let Some(bytes) = self.inbox.front(REQUEST_BYTES) else { break };
                    let bytes = bytes.try_into().unwrap_or(&[0; REQUEST_BYTES]);
                    head = Some(Request::decode(bytes, export, agreed)?);
                    self.inbox.take(REQUEST_BYTES);
                    continue;
                };
                let len = request.payload_bytes as usize;
                let Some(payload) = self.inbox.front(len) else { break };
                head = None;
                let (job, cookie) = (&workers.job, request.cookie);
                match request.command {
                    Ok(Command::Disconnect) => return Ok(()),
                    Ok(command) if !job.target.is_quick(&command) => {
                        let payload = payload.to_vec();
                        workers.put(Work { command, payload, cookie, since });
                        waiting += 1;
                    }
                    Ok(command) => {
                        let asked = Asked { command: &command, payload, cookie, since };
                        job.carry_out(asked, &mut self.out);
                    }
                    Err(error) => job.replies.failed(&mut self.out, cookie, error, false),
                }
                self.inbox.take(len);
                if self.out.pending_bytes() >= SENT_AT_ONCE {
                    self.flush()?;
                }
            }
            self.flush()?;
            let wanted = self
                .has_room(waiting)
                .then(|| head.map_or(REQUEST_BYTES, |request| request.payload_bytes as usize));
            match self.look(wanted, None)? {
                Look::Went => {}
                Look::Replies => {
                    for reply in self.outbox.take() {
                        waiting -= 1;
                        self.out.append(reply);
                    }
                }
                Look::Stop | Look::End => return Ok(()),
            }
        }
    }

    fn has_room(&self, waiting: usize) -> bool {
        waiting < REQUESTS_MAX && self.out.pending_bytes() < QUEUED_BYTES_MAX
    }

    /// Wait until something can be done, and read what came if more is `wanted`.
    fn look(
        &mut self,
        wanted: Option<usize>,
        at_most: Option<Duration>,
    ) -> Result<Look, ServeError> {
        let mut flags = if wanted.is_some() { PollFlags::IN } else { PollFlags::empty() };
        flags.set(PollFlags::OUT, self.out.pending_bytes() > 0);
        let mut fds = [
            PollFd::from_borrowed_fd(self.pulse.fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.outbox.bell.as_fd(), PollFlags::IN),
            PollFd::new(self.socket, flags),
        ];
        let timeout = at_most.and_then(|wait| rustix::event::Timespec::try_from(wait).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Look::Went),
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if !fds[0].revents().is_empty() && self.pulse.answer() {
            return Ok(Look::Stop);
        }
        let found = fds[2].revents();
        let replies = !fds[1].revents().is_empty();
        if found.contains(PollFlags::OUT) {
            self.flush()?;
        }
        if let (true, Some(wanted)) = (found.contains(PollFlags::IN), wanted)
            && !self.receive(wanted)?
        {
            return Ok(Look::End);
        }
        if replies {
            return Ok(Look::Replies);
        }
        // Nothing comes any more, and nothing can be sent.
        let gone = found.intersects(PollFlags::HUP | PollFlags::ERR);
        Ok(if gone && !found.contains(PollFlags::IN) { Look::End } else { Look::Went })
    }

    /// → whether the client may say more.
    fn receive(&mut self, wanted: usize) -> io::Result<bool> {
        let into = self.inbox.space(READ_BYTES, wanted);
        match rustix::net::recv(self.socket, into, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Ok(false),
            Ok((_, len)) => {
                self.inbox.came(len);
                Ok(true)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Send what the socket takes. A part of a file goes from the host's page cache into the socket
    /// without a copy.
    fn flush(&mut self) -> io::Result<()> {
        loop {
            let sent = match self.out.next() {
                Next::Nothing => return Ok(()),
                Next::Bytes(bytes) => {
                    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                    let sent = rustix::net::send(self.socket, bytes, flags);
                    sent.map(|len| self.out.gone(len))
                }
                Next::File(part) => {
                    let FilePart { file, offset_bytes, len_bytes } = part;
                    match rustix::fs::sendfile(self.socket, file, Some(offset_bytes), *len_bytes) {
                        Ok(len) if len > 0 => {
                            *len_bytes = len_bytes.saturating_sub(len);
                            Ok(())
                        }
                        Err(errno) if is_of_socket(errno) => Err(errno),
                        // The reply has begun. The client makes a new connection, and asks again.
                        failed => return Err(self.file_failed(failed.err())),
                    }
                }
            };
            match sent {
                Ok(()) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn file_failed(&self, errno: Option<rustix::io::Errno>) -> io::Error {
        let error = errno.map_or(io::ErrorKind::UnexpectedEof.into(), io::Error::from);
        if let Some(target) = &self.target {
            target.file_failed(&error);
        }
        error
    }
}

/// Whether the error says something of the client's end, and not of a file.
fn is_of_socket(errno: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(errno, Errno::AGAIN | Errno::INTR | Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN)
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
