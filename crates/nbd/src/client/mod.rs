//! A client of one export, which many threads share, and which outlives its connection.
//!
//! ```text
//!   callers ──request──► socket ──► server
//!      ▲                               │
//!      └──answer── reader's thread ◄───┘    lost: connect again, and ask again
//! ```
//!
//! Promises: a request is answered once: by the server, or by [`NbdError::Shutdown`] when there is
//! no server any more. An answer of a read has all its bytes. What a server says is bounded by
//! what it was asked.
//!
//! Left to others: where the server is ([`Connect`]).

mod greet;
mod replies;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::{self, BufReader, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use self::greet::GreetError;
use self::replies::{Got, Part, ReplyError};
use crate::handshake::{BLOCK_BYTES_MAX, Export};
use crate::request::{Command, Extent, NbdError, Span};

/// How long a client looks for a server that was lost.
const LOST_FOR: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Read from the socket at a time.
const READ_BYTES: usize = 256 << 10;

/// Makes a connection to the server. It blocks, but within a bound.
pub type Connect = Box<dyn FnMut() -> io::Result<UnixStream> + Send>;

/// A client that can't begin.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("connect to the server")]
    Connect(#[source] io::Error),
    #[error("the server's greeting")]
    Greeting(#[from] GreetError),
    #[error("start a thread that reads replies")]
    Thread(#[source] io::Error),
}

/// What a request found.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Of a read: all its bytes.
    pub bytes: Vec<u8>,
    /// Of a block status: what it told, from the span's start on. At least one.
    pub extents: Vec<Extent>,
}

/// Gets the answer, in the thread that reads replies. It does not block.
pub type Done = Box<dyn FnOnce(Result<Answer, NbdError>) + Send>;

struct Pending {
    command: Command,
    payload: Vec<u8>,
    got: Got,
    done: Done,
}

#[derive(Default)]
struct Requests {
    pending: BTreeMap<u64, Pending>,
    next: u64,
    /// There is no server any more.
    ended: bool,
    /// For it has another export by that name now.
    replaced: bool,
    /// The client is dropped.
    ends: bool,
}

struct Shared {
    /// Who sends holds it for a whole request. `None`: there is no connection now.
    socket: Mutex<Option<UnixStream>>,
    requests: Mutex<Requests>,
    wakes: Condvar,
}

impl Shared {
    fn socket(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that waits fails, and all that comes.
    fn end(&self) {
        let mut requests = self.requests();
        requests.ended = true;
        let pending = std::mem::take(&mut requests.pending);
        drop(requests);
        *self.socket() = None;
        for (_, pending) in pending {
            (pending.done)(Err(NbdError::Shutdown));
        }
    }

    /// → whether the client is dropped before the time is over.
    fn ends_within(&self, time: Duration) -> bool {
        let (until, mut requests) = (Instant::now() + time, self.requests());
        while !requests.ends {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.wakes.wait_timeout(requests, left);
            requests = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// A client of one export.
pub struct Client {
    shared: Arc<Shared>,
    export: Export,
    thread: Option<JoinHandle<()>>,
}

impl Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("export", &self.export).finish_non_exhaustive()
    }
}

impl Client {
    /// Connect, and take the export of that name. A connection that is lost is made again for up to
    /// 60 s, as long as the export is the same.
    ///
    /// # Errors
    /// There is no server, or it has no such export.
    pub fn start(mut connect: Connect, name: &str) -> Result<Self, ClientError> {
        let socket = connect().map_err(ClientError::Connect)?;
        let export = greet::greet(&socket, name)?;
        let theirs = socket.try_clone().map_err(ClientError::Connect)?;
        let shared = Arc::new(Shared {
            socket: Mutex::new(Some(socket)),
            requests: Mutex::default(),
            wakes: Condvar::new(),
        });
        let reader = Reader { shared: Arc::clone(&shared), connect, export: export.clone() };
        let named = std::thread::Builder::new().name("nbd-replies".to_owned());
        let thread = named.spawn(move || reader.run(theirs)).map_err(ClientError::Thread)?;
        Ok(Self { shared, export, thread: Some(thread) })
    }

    /// What the server said of it.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// The server was lost, and the one that came had something else by the same name. Nothing
    /// is answered any more.
    pub fn is_replaced(&self) -> bool {
        self.shared.requests().replaced
    }

    /// Ask, and go on. `payload` is what a write writes. `done` is called once.
    pub fn ask(&self, command: Command, payload: Vec<u8>, done: Done) {
        let mut socket = self.shared.socket();
        let mut requests = self.shared.requests();
        if requests.ended {
            drop((requests, socket));
            return done(Err(NbdError::Shutdown));
        }
        let cookie = requests.next;
        requests.next += 1;
        let pending = Pending { got: Got::of(&command), command, payload, done };
        let bytes = encoded(cookie, &pending);
        requests.pending.insert(cookie, pending);
        drop(requests);
        // A request that could not be sent is sent again after the reader has connected.
        if let Some(socket) = socket.as_mut()
            && socket.write_all(&bytes).is_err()
        {
            let _told = socket.shutdown(Shutdown::Both);
        }
    }

    /// Ask, and wait for the answer.
    ///
    /// # Errors
    /// The server's, or there is none.
    pub fn wait_for(&self, command: Command, payload: Vec<u8>) -> Result<Answer, NbdError> {
        let (tx, rx) = mpsc::sync_channel(1);
        self.ask(command, payload, Box::new(move |answer| drop(tx.send(answer))));
        rx.recv().unwrap_or(Err(NbdError::Shutdown))
    }

    /// Read all of `bytes`. Offset and length are multiples of 512, within the export.
    ///
    /// # Errors
    /// As [`Client::wait_for`].
    pub fn read(&self, mut offset_bytes: u64, bytes: &mut [u8]) -> Result<(), NbdError> {
        for part in bytes.chunks_mut(BLOCK_BYTES_MAX as usize) {
            let len_bytes = u32::try_from(part.len()).unwrap_or(BLOCK_BYTES_MAX);
            let span = Span { offset_bytes, len_bytes };
            let answer = self.wait_for(Command::Read { span, whole: false }, Vec::new())?;
            part.copy_from_slice(answer.bytes.get(..part.len()).ok_or(NbdError::Io)?);
            offset_bytes += u64::from(len_bytes);
        }
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.requests().ends = true;
        self.shared.wakes.notify_all();
        if let Some(socket) = self.shared.socket().take() {
            // The reader's end of it ends, too.
            let _told = socket.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// A server of an earlier version describes nothing.
fn is_same(found: &Export, before: &Export) -> bool {
    let is_silent = found.description.is_empty() || before.description.is_empty();
    let description = if is_silent { &before.description } else { &found.description };
    Export { description: description.clone(), ..found.clone() } == *before
}

fn encoded(cookie: u64, pending: &Pending) -> Vec<u8> {
    let head = pending.command.encode(cookie);
    [&head[..], &pending.payload].concat()
}

/// The thread that reads replies.
struct Reader {
    shared: Arc<Shared>,
    connect: Connect,
    export: Export,
}

impl Reader {
    fn run(mut self, socket: UnixStream) {
        let mut socket = Some(socket);
        while let Some(connected) = socket.take() {
            let error = self.replies(connected);
            let ends = self.shared.requests().ends;
            if ends {
                break;
            }
            match error {
                ReplyError::Socket(error) => tracing::debug!(%error, "an NBD server went away"),
                error => tracing::warn!(%error, "an NBD server breaks the protocol"),
            }
            socket = self.again();
        }
        self.shared.end();
    }

    /// Reads replies for as long as the connection lasts.
    fn replies(&self, socket: UnixStream) -> ReplyError {
        let mut from = BufReader::with_capacity(READ_BYTES, socket);
        loop {
            match self.reply(&mut from) {
                Ok(()) => {}
                Err(error) => {
                    // A caller that sends gives its lock back.
                    let _told = from.get_ref().shutdown(Shutdown::Both);
                    return error;
                }
            }
        }
    }

    fn reply(&self, from: &mut BufReader<UnixStream>) -> Result<(), ReplyError> {
        let head = replies::head(from)?;
        let cookie = head.cookie();
        // Its bytes are read without the lock. No other thread ends a request.
        let taken = self.shared.requests().pending.remove(&cookie);
        let mut pending = taken.ok_or(ReplyError::Unasked { cookie })?;
        let part = pending.got.take(&head, from);
        if let Ok(Part::Last(result)) = part {
            (pending.done)(result);
            return Ok(());
        }
        self.shared.requests().pending.insert(cookie, pending);
        part.map(drop)
    }

    /// A new connection to the same export, on which all that waits was asked again. `None`: there
    /// is none, or the client ends.
    fn again(&mut self) -> Option<UnixStream> {
        *self.shared.socket() = None;
        let until = Instant::now() + LOST_FOR;
        while Instant::now() < until {
            let connected = (self.connect)();
            match connected.map_err(ClientError::Connect).and_then(|socket| {
                let found = greet::greet(&socket, &self.export.name)?;
                Ok((socket, found))
            }) {
                Ok((_, found)) if !is_same(&found, &self.export) => {
                    tracing::debug!(export = found.name, "an NBD export is another one now");
                    self.shared.requests().replaced = true;
                    return None;
                }
                Ok((socket, _)) => {
                    if let Some(reads) = self.ask_again(socket) {
                        return Some(reads);
                    }
                }
                Err(ClientError::Connect(error))
                    if error.kind() == io::ErrorKind::PermissionDenied =>
                {
                    return None;
                }
                Err(error) => tracing::debug!(%error, "an NBD server is not there"),
            }
            if self.shared.ends_within(LOOK_AGAIN) {
                return None;
            }
        }
        None
    }

    fn ask_again(&self, mut new: UnixStream) -> Option<UnixStream> {
        let reads = new.try_clone().ok()?;
        let mut socket = self.shared.socket();
        let mut requests = self.shared.requests();
        if requests.ends {
            return None;
        }
        let mut bytes = Vec::new();
        for (cookie, pending) in &mut requests.pending {
            pending.got = Got::of(&pending.command);
            bytes.push(encoded(*cookie, pending));
        }
        drop(requests);
        // Reads are short requests: the socket takes all of them before an answer is read.
        let all = bytes.concat();
        let sent = new.set_write_timeout(Some(LOST_FOR)).and_then(|()| new.write_all(&all));
        sent.and_then(|()| new.set_write_timeout(None)).ok()?;
        *socket = Some(new);
        Some(reads)
    }
}

#[cfg(test)]
mod tests;
