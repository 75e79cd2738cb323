//! What goes in and out of the multiplexer.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vmfork_agent_proto::{FileInfo, Firstboot, Kind, RequestError, Worker};

use crate::agent::room::{ROOM_BYTES, Share};

/// Bounds on what a guest may leave with its host. Over all guests,
/// [`MailRoom`](crate::agent::MailRoom) bounds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MailLimits {
    /// Undelivered bytes of one worker; a single longer message is let through if it is the only
    /// one.
    pub undelivered_bytes_max: u64,
    /// Longest single message.
    pub message_bytes_max: u64,
}

impl Default for MailLimits {
    fn default() -> Self {
        Self { undelivered_bytes_max: 64 * 1024 * 1024, message_bytes_max: ROOM_BYTES }
    }
}

/// What a clone's link has to know of its parent's: taken while the parent is held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inheritance {
    /// The clone's channels start here, as the guest knows the parent's.
    pub(super) next_channel: u32,
}

/// Something that came from the guest.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Hello {
        protocol: u32,
        agent_version: String,
        kernel: String,
        cpus: u32,
        firstboot: Option<Firstboot>,
        pmem_root: bool,
    },
    Pong {
        token: u64,
    },
    Started {
        channel: u32,
        pid: u32,
    },
    File {
        channel: u32,
        info: FileInfo,
    },
    Data {
        channel: u32,
        kind: Kind,
        bytes: Vec<u8>,
        end: bool,
    },
    // The last of their channels:
    Exited {
        channel: u32,
        exit_code: i32,
        signal: Option<i32>,
    },
    Failed {
        channel: u32,
        error: RequestError,
    },
    Written {
        channel: u32,
        bytes: u64,
    },

    /// This many bytes of what was pushed have left.
    Sent {
        channel: u32,
        bytes: usize,
    },
    /// The answer to a request, with its stream, has left (or is not waited for any more).
    AnswerGone {
        channel: u32,
    },
    /// Output of a program that this link did not start.
    Foreign {
        bytes: Vec<u8>,
    },

    Prepared,
    /// The guest spoke while it was held (it does after 30 s). A freeze from now on is worth
    /// nothing.
    HoldBroken,
    Confirmed,
    Refused {
        message: String,
    },

    Request {
        channel: u32,
        request: Request,
    },
    /// No program waits for the answer to this request, which was announced before.
    Abandoned {
        channel: u32,
    },
}

/// What a program in the guest asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Ticket {
        count: u32,
        hierarchical: bool,
    },
    Clone {
        ticket: u64,
    },
    Join {
        ticket: u64,
    },
    Kill {
        ticket: u64,
    },
    Exit {
        vmid: u32,
        error: Option<String>,
    },
    /// A whole message; `cost` is to be released when it has been delivered or dropped.
    Send {
        vmid: u32,
        pieces: Vec<Vec<u8>>,
        cost: u64,
        share: Share,
    },
    Receive {
        ticket: u64,
        vmid: Option<u32>,
    },
}

/// The answer to a program's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Ok { value: u64 },
    Ticket { ticket: u64, granted: u32 },
    Ended { workers: Vec<Worker> },
    Incoming { vmid: u32, length_bytes: u64, pieces: Vec<Bytes> },
    Error(RequestError),
}
