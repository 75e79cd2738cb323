//! What programs in a guest ask of the host (the fork API), and how they are answered.

use std::fmt;

use bytes::Bytes;
use rustix::io::Errno;
use tokio::sync::mpsc;
use vmfork_agent_proto::{RequestError, Worker};

use super::command::Command;
use super::mux::{Reply, Request};
use super::room::Share;

/// One request of one guest. Numbers are not used twice by one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// A program's request. The field names follow `vmfork_agent_proto::ToHost`.
#[derive(Debug)]
pub enum GuestRequest {
    RequestTicket {
        count: u32,
        hierarchical: bool,
        reply: Responder,
    },
    Clone {
        ticket: u64,
        reply: Responder,
    },
    Join {
        ticket: u64,
        reply: Responder,
    },
    KillTicket {
        ticket: u64,
        reply: Responder,
    },
    /// `error`: the worker's process ended without `sf_exit`.
    ExitClone {
        vmid: u32,
        error: Option<String>,
        reply: Responder,
    },
    /// `vmid` is one that [`super::AgentLink::identity`] gave to this VM.
    Send {
        vmid: u32,
        message: Message,
        reply: Responder,
    },
    Recv {
        ticket: u64,
        vmid: Option<u32>,
        reply: Responder,
    },
    /// No program waits for the answer to this request any more. It was delivered before.
    Abandon {
        request: RequestId,
    },
}

impl GuestRequest {
    pub(super) fn new(channel: u32, request: Request, commands: &CommandSender) -> Self {
        let way = Way::Link { channel, commands: commands.clone() };
        let reply = Responder { way, answered: false };
        match request {
            Request::Ticket { count, hierarchical } => {
                Self::RequestTicket { count, hierarchical, reply }
            }
            Request::Clone { ticket } => Self::Clone { ticket, reply },
            Request::Join { ticket } => Self::Join { ticket, reply },
            Request::Kill { ticket } => Self::KillTicket { ticket, reply },
            Request::Exit { vmid, error } => Self::ExitClone { vmid, error, reply },
            Request::Send { vmid, pieces, cost, share } => {
                let lease = WorkerLease { vmid, cost, commands: commands.clone(), _share: share };
                let pieces: Vec<Bytes> = pieces.into_iter().map(Bytes::from).collect();
                Self::Send { vmid, message: Message::held(pieces, Box::new(lease)), reply }
            }
            Request::Receive { ticket, vmid } => Self::Recv { ticket, vmid, reply },
        }
    }

    /// Which request this is, or ends.
    pub fn id(&self) -> RequestId {
        match self {
            Self::RequestTicket { reply, .. }
            | Self::Clone { reply, .. }
            | Self::Join { reply, .. }
            | Self::KillTicket { reply, .. }
            | Self::ExitClone { reply, .. }
            | Self::Send { reply, .. }
            | Self::Recv { reply, .. } => reply.id(),
            Self::Abandon { request } => *request,
        }
    }
}

/// The way back to the driver. Weak: an unanswered request does not keep a link alive.
pub(super) type CommandSender = mpsc::WeakUnboundedSender<Command>;

/// Answers one request, once. Dropped without an answer it answers `EIO`. Answers to programs that
/// have gone, and to guests that have, go nowhere.
#[derive(Debug)]
pub struct Responder {
    way: Way,
    answered: bool,
}

#[derive(Debug)]
enum Way {
    /// To the guest of a link.
    Link { channel: u32, commands: CommandSender },
    /// To a clone on another host.
    Away(Box<dyn Asker>),
}

/// Who asked for a clone on another host: its `sf_exit` and `sf_send` are answered with a value or
/// an error.
pub trait Asker: fmt::Debug + Send + Sync {
    fn answered(&self, answer: Result<u64, RequestError>);
}

impl Responder {
    /// Answers a clone on another host.
    pub fn to(asker: Box<dyn Asker>) -> Self {
        Self { way: Way::Away(asker), answered: false }
    }

    /// On its link; what comes from other hosts never waits, and has no number.
    pub fn id(&self) -> RequestId {
        match &self.way {
            Way::Link { channel, .. } => RequestId(*channel),
            Way::Away(_) => RequestId(0),
        }
    }

    /// To `Clone` (the number of workers started), `ExitClone` and `Send` (0).
    pub fn ok(self, value: u64) {
        self.answer(Reply::Ok { value }, None);
    }

    /// To `RequestTicket`.
    pub fn ticket(self, ticket: u64, granted: u32) {
        self.answer(Reply::Ticket { ticket, granted }, None);
    }

    /// To `Join` and `KillTicket`.
    pub fn ended(self, workers: Vec<Worker>) {
        self.answer(Reply::Ended { workers }, None);
    }

    /// To `Recv`: the message of worker `vmid` is streamed as fast as the program takes it.
    pub fn incoming(self, vmid: u32, message: Message) {
        let length_bytes = message.length_bytes();
        let Message { pieces, lease } = message;
        self.answer(Reply::Incoming { vmid, length_bytes, pieces }, lease);
    }

    /// To any request.
    pub fn error(self, errno: Errno, message: impl Into<String>) {
        let error = RequestError { errno: errno.raw_os_error(), message: message.into() };
        self.answer(Reply::Error(error), None);
    }

    fn answer(mut self, reply: Reply, lease: Option<Lease>) {
        self.answered = true;
        self.send(reply, lease);
    }

    fn send(&self, reply: Reply, lease: Option<Lease>) {
        match &self.way {
            Way::Link { channel, commands } => {
                if let Some(commands) = commands.upgrade() {
                    // The link may have closed. Then no program waits.
                    let _ = commands.send(Command::Reply { channel: *channel, reply, lease });
                }
            }
            Way::Away(asker) => asker.answered(match reply {
                Reply::Ok { value } => Ok(value),
                Reply::Error(error) => Err(error),
                Reply::Ticket { .. } | Reply::Ended { .. } | Reply::Incoming { .. } => {
                    Err(no_answer())
                }
            }),
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.answered {
            self.send(Reply::Error(no_answer()), None);
        }
    }
}

fn no_answer() -> RequestError {
    RequestError { errno: Errno::IO.raw_os_error(), message: "the host gave no answer".to_owned() }
}

/// A message from a worker to its parent, whole. While it lives it counts against what its worker
/// may have undelivered.
#[derive(Debug)]
pub struct Message {
    pieces: Vec<Bytes>,
    lease: Option<Lease>,
}

impl Message {
    /// A message of the host's own, which counts against no guest's share.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self { pieces: vec![bytes.into()], lease: None }
    }

    /// A message that counts against a share as long as `lease` lives.
    pub fn held(pieces: Vec<Bytes>, lease: Lease) -> Self {
        Self { pieces, lease: Some(lease) }
    }

    /// Its bytes, and what it counts against.
    pub fn into_parts(self) -> (Vec<Bytes>, Option<Lease>) {
        (self.pieces, self.lease)
    }

    pub fn length_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }

    /// The bytes, in order.
    pub fn pieces(&self) -> &[Bytes] {
        &self.pieces
    }
}

/// What a message counts against; given back on drop.
pub type Lease = Box<dyn Counted>;

pub trait Counted: fmt::Debug + Send + Sync {}

/// A message's share of its worker's allowance, on the link it came from, and of its parent's room.
#[derive(Debug)]
struct WorkerLease {
    vmid: u32,
    cost: u64,
    commands: CommandSender,
    _share: Share,
}

impl Counted for WorkerLease {}

impl Drop for WorkerLease {
    fn drop(&mut self) {
        if let Some(commands) = self.commands.upgrade() {
            let _ = commands.send(Command::MailReleased { vmid: self.vmid, cost: self.cost });
        }
    }
}
