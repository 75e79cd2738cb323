//! The host's end of the agent protocol as a state machine: channels, windows, forks. No I/O, no
//! clock.
//!
//! ```text
//!   bytes read ──► on_bytes ──► Mux ──► poll_event ──► what came, for the driver to pass on
//!   operations ──► open_*, push, answer, prepare … ──► next_frame ──► bytes to write
//! ```
//!
//! Forks decide what may leave ([`Hold`]); everything else waits in its queue, in order:
//!
//! ```text
//!            prepare            next_frame              Prepared
//!   Open ───────────► Asked ──────────────► Preparing ──────────► Held
//!    ▲                  │ release               │ release          │ release
//!    └──────────────────┴──────◄─ Continue ─────┴──────────────────┘
//!               identity               next_frame              Confirmed
//!   Nameless ──────────────► Named ────────────────► Identifying ─────────► Open      (a clone)
//! ```
//!
//! Promises: nothing that a guest sends makes this panic or hold more than its bounds (a window for
//! each stream, [`REQUESTS_MAX`] requests, what [`mail`] admits, [`UNREAD_BYTES_MAX`] of answers).
//! What cannot be understood is a [`ProtocolError`](super::error::ProtocolError), after which the
//! link must be closed.

#[cfg(test)]
mod hostile_tests;
mod mail;
mod receive;
#[cfg(test)]
mod tests;
mod types;
mod window;

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::watch;
use vmfork_agent_proto::{
    Decoder, ForkIdentity, Kind, MessageInfo, RequestError, ToGuest, Worker, encode, encode_message,
};

use self::mail::Mail;
pub(crate) use self::types::{Event, Reply, Request};
pub use self::types::{Inheritance, MailLimits};
use self::window::{Rx, Tx};
use super::error::LinkError;
use super::room::{MailRoom, Share};

/// Requests of programs that may be open at a time, per guest.
pub(crate) const REQUESTS_MAX: usize = 1024;

/// Of them, messages on their way to the parent; each holds up to one window before it is admitted.
pub(crate) const SENDS_MAX: usize = 64;

/// Programs and transfers of the host that may be open at a time, per guest.
pub(crate) const CHANNELS_MAX: usize = 1024;

/// Nothing more is read from a guest that has this many bytes of answers to fetch.
const UNREAD_BYTES_PAUSE: usize = 1024 * 1024;

/// The link to a guest that has this many bytes of answers to fetch is closed.
pub(crate) const UNREAD_BYTES_MAX: usize = 16 * 1024 * 1024;

/// What may leave.
#[derive(Debug)]
enum Hold {
    Open,
    Asked { fork: u64 },
    Preparing { fork: u64 },
    Held { fork: u64, broken: bool },
    Nameless,
    Named { fork: u64, frame: Vec<u8> },
    Identifying { fork: u64 },
}

/// One exec, transfer or request.
#[derive(Debug)]
struct Channel {
    role: Role,
    tx: Option<Tx>,
}

#[derive(Debug)]
enum Role {
    Exec {
        started: bool,
        stdout: Rx,
        stderr: Rx,
    },
    Read {
        opened: bool,
        file: Rx,
    },
    Write,
    /// A program waits for the answer.
    Request,
    /// A program is being handed its message.
    Incoming,
    Send(Box<Sending>),
}

/// A message that is being collected.
#[derive(Debug)]
struct Sending {
    vmid: u32,
    length_bytes: u64,
    received_bytes: u64,
    pieces: Vec<Vec<u8>>,
    /// Once it is admitted.
    share: Option<Share>,
    data: Rx,
}

/// A message frame that waits to leave.
#[derive(Debug)]
struct Queued {
    channel: u32,
    frame: Vec<u8>,
    weight: Weight,
}

/// What bounds the number of queued messages of a sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weight {
    /// The guest brought it about: counted in `answer_bytes`.
    Answer,
    /// Opens one of this side's channels, which are counted.
    Opens,
    /// Its sender waits until this many bytes were reported as sent.
    Reported(usize),
    /// One for each channel.
    Cancel,
}

/// The state of one link.
#[derive(Debug)]
pub(crate) struct Mux {
    decoder: Decoder,
    events: VecDeque<Event>,
    hold: Hold,
    /// `Continue` goes before anything else, whatever the state.
    resume: Option<u64>,
    /// The first channel of this link's; lower ones are a parent's.
    first_channel: u32,
    next_channel: u32,
    channels: BTreeMap<u32, Channel>,
    hosts_channels: usize,
    sends: usize,
    queue: VecDeque<Queued>,
    /// Bytes of [`Weight::Answer`] in `queue`.
    answer_bytes: usize,
    /// Streams that have credit to announce.
    credits: VecDeque<(u32, Kind)>,
    /// Channels whose streams have something to send, in turn.
    round: VecDeque<u32>,
    mail: Mail,
    message_bytes_max: u64,
}

impl Mux {
    /// The link of a VM that boots.
    pub(crate) fn new(limits: MailLimits) -> Self {
        Self {
            decoder: Decoder::new(),
            events: VecDeque::new(),
            hold: Hold::Open,
            resume: None,
            first_channel: 2,
            next_channel: 2,
            channels: BTreeMap::new(),
            hosts_channels: 0,
            sends: 0,
            queue: VecDeque::new(),
            answer_bytes: 0,
            credits: VecDeque::new(),
            round: VecDeque::new(),
            mail: Mail::new(limits.undelivered_bytes_max),
            message_bytes_max: limits.message_bytes_max,
        }
    }

    /// The link of a clone: nothing leaves before [`Mux::identity`] was confirmed.
    pub(crate) fn new_clone(limits: MailLimits, inheritance: &Inheritance) -> Self {
        let mut mux = Self::new(limits);
        mux.hold = Hold::Nameless;
        mux.first_channel = inheritance.next_channel.max(2);
        mux.next_channel = mux.first_channel;
        mux
    }

    /// The room that its workers' messages share with those of their siblings.
    pub(crate) fn in_room(mut self, room: MailRoom) -> Self {
        self.mail.room = room;
        self
    }

    /// Changes when [`Mux::admit_mail`] may admit what waits.
    pub(crate) fn room_changes(&self) -> watch::Receiver<()> {
        self.mail.room.changes()
    }

    /// Whether a message waits to be admitted.
    pub(crate) fn mail_waits(&self) -> bool {
        self.mail.waits()
    }

    /// The link has ended: let go of the messages that were on their way, in either direction.
    pub(crate) fn forget_mail(&mut self) {
        let on_its_way = |role: &Role| matches!(role, Role::Send(_) | Role::Incoming);
        self.channels.retain(|_, channel| !on_its_way(&channel.role));
    }

    /// What a clone of this instant has to know. Meant for a VM that is held.
    pub(crate) fn inheritance(&self) -> Inheritance {
        Inheritance { next_channel: self.next_channel }
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether more should be read. A guest that does not fetch its answers is not asked for more
    /// questions.
    /// But while a fork is in progress it must be heard.
    pub(crate) fn wants_bytes(&self) -> bool {
        self.answer_bytes < UNREAD_BYTES_PAUSE || !matches!(self.hold, Hold::Open)
    }

    /// The next frame to write, if one may leave.
    pub(crate) fn next_frame(&mut self) -> Option<Vec<u8>> {
        if let Some(fork) = self.resume.take() {
            return Some(plain(&ToGuest::Continue { fork }));
        }
        match &mut self.hold {
            Hold::Open => {}
            Hold::Asked { fork } => {
                let fork = *fork;
                self.hold = Hold::Preparing { fork };
                return Some(plain(&ToGuest::Prepare { fork }));
            }
            Hold::Named { fork, frame } => {
                let frame = std::mem::take(frame);
                self.hold = Hold::Identifying { fork: *fork };
                return Some(frame);
            }
            Hold::Preparing { .. }
            | Hold::Held { .. }
            | Hold::Nameless
            | Hold::Identifying { .. } => return None,
        }
        if let Some(queued) = self.queue.pop_front() {
            match queued.weight {
                Weight::Answer => self.answer_bytes -= queued.frame.len(),
                Weight::Reported(bytes) => {
                    self.events.push_back(Event::Sent { channel: queued.channel, bytes });
                }
                Weight::Opens | Weight::Cancel => {}
            }
            return Some(queued.frame);
        }
        while let Some((channel, kind)) = self.credits.pop_front() {
            let bytes = self.rx(channel, kind).map_or(0, Rx::take_due);
            if bytes > 0 {
                return Some(message(channel, &ToGuest::Credit { kind: kind as u8, bytes }));
            }
        }
        self.next_stream_frame()
    }

    fn next_stream_frame(&mut self) -> Option<Vec<u8>> {
        while let Some(number) = self.round.pop_front() {
            let Some(Channel { role, tx: Some(tx) }) = self.channels.get_mut(&number) else {
                continue;
            };
            tx.scheduled = false;
            let Some((payload, end)) = tx.next() else { continue };
            if tx.can_send() {
                tx.scheduled = true;
                self.round.push_back(number);
            }
            let frame = encode(tx.kind, number, end, &payload);
            if matches!(role, Role::Incoming) {
                if end {
                    self.channels.remove(&number);
                    self.events.push_back(Event::AnswerGone { channel: number });
                }
            } else if !payload.is_empty() {
                self.events.push_back(Event::Sent { channel: number, bytes: payload.len() });
            }
            return Some(frame);
        }
        None
    }

    /// A message that belongs to no channel.
    pub(crate) fn tell(&mut self, message: &ToGuest) -> Result<(), LinkError> {
        self.try_enqueue(0, message, Weight::Answer)
    }

    /// Open a channel with `Exec`, `ReadFile` or `WriteFile`.
    pub(crate) fn open(&mut self, message: &ToGuest) -> Result<u32, LinkError> {
        if self.hosts_channels >= CHANNELS_MAX || self.next_channel > u32::MAX - 2 {
            return Err(LinkError::TooManyChannels { limit: CHANNELS_MAX });
        }
        let (role, tx) = match message {
            ToGuest::Exec { .. } => (
                Role::Exec { started: false, stdout: Rx::default(), stderr: Rx::default() },
                Some(Tx::new(Kind::Stdin)),
            ),
            ToGuest::WriteFile { .. } => (Role::Write, Some(Tx::new(Kind::File))),
            _ => (Role::Read { opened: false, file: Rx::default() }, None),
        };
        let number = self.next_channel;
        self.try_enqueue(number, message, Weight::Opens)?;
        self.next_channel += 2;
        self.hosts_channels += 1;
        self.channels.insert(number, Channel { role, tx });
        Ok(number)
    }

    /// A message on a channel of ours; `bytes` come back as [`Event::Sent`] when it has left.
    pub(crate) fn signal(&mut self, channel: u32, message: &ToGuest, bytes: usize) {
        if self.channels.contains_key(&channel) {
            self.enqueue(channel, message, Weight::Reported(bytes));
        }
    }

    /// Stream bytes towards the guest.
    pub(crate) fn push(&mut self, channel: u32, bytes: Bytes, end: bool) {
        if let Some(Channel { tx: Some(tx), .. }) = self.channels.get_mut(&channel) {
            tx.push(bytes, end);
        }
        self.schedule(channel);
    }

    /// The consumer has taken stream bytes from the guest.
    pub(crate) fn taken(&mut self, channel: u32, kind: Kind, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if self.rx(channel, kind).is_some_and(|rx| rx.taken(bytes)) {
            self.credits.push_back((channel, kind));
        }
    }

    /// Closes a channel of the host's that no caller is interested in any more.
    pub(crate) fn cancel(&mut self, channel: u32) {
        if !self.close_own(channel) {
            return;
        }
        let told = !self.queue.iter().any(|q| q.channel == channel && q.weight == Weight::Opens);
        self.queue.retain(|q| q.channel != channel || q.weight == Weight::Answer);
        if told {
            self.enqueue(channel, &ToGuest::Cancel, Weight::Cancel);
        }
    }

    /// The answer to a request that [`Event::Request`] announced.
    pub(crate) fn reply(&mut self, channel: u32, reply: Reply) {
        if !matches!(self.channels.get(&channel), Some(Channel { role: Role::Request, .. })) {
            self.events.push_back(Event::AnswerGone { channel });
            return;
        }
        self.channels.remove(&channel);
        let incoming = match reply {
            Reply::Incoming { vmid, length_bytes, pieces } => {
                let info = MessageInfo { vmid, length_bytes };
                self.answer(channel, &ToGuest::Incoming(info));
                Some(pieces)
            }
            other => {
                self.enqueue_reply(channel, other);
                None
            }
        };
        match incoming {
            None => self.events.push_back(Event::AnswerGone { channel }),
            Some(pieces) => {
                let mut tx = Tx::new(Kind::Data);
                for piece in pieces {
                    tx.push(piece, false);
                }
                tx.push(Bytes::new(), true);
                self.channels.insert(channel, Channel { role: Role::Incoming, tx: Some(tx) });
                self.schedule(channel);
            }
        }
    }

    /// A message has been delivered or dropped: its worker may send more.
    pub(crate) fn mail_released(&mut self, vmid: u32, cost: u64) {
        self.mail.release(vmid, cost);
        self.admit_mail();
    }

    /// Say `Prepare` as the next frame, and nothing after it until [`Mux::release`].
    pub(crate) fn prepare(&mut self, fork: u64) -> Result<(), LinkError> {
        if !matches!(self.hold, Hold::Open) {
            return Err(LinkError::Busy);
        }
        self.hold = Hold::Asked { fork };
        Ok(())
    }

    /// End what `prepare(fork)` began, at whatever point it stands.
    pub(crate) fn release(&mut self, ended: u64) {
        match self.hold {
            Hold::Asked { fork } if fork == ended => self.hold = Hold::Open,
            Hold::Preparing { fork } | Hold::Held { fork, .. } if fork == ended => {
                self.hold = Hold::Open;
                self.resume = Some(fork);
            }
            _ => {}
        }
    }

    /// Tell a clone who it is. Only its confirmation opens the link.
    pub(crate) fn identity(&mut self, identity: &ForkIdentity) -> Result<(), LinkError> {
        if !matches!(self.hold, Hold::Nameless) {
            return Err(LinkError::Busy);
        }
        let frame = encode_message(0, &ToGuest::Identity(identity.clone()))
            .map_err(|_too_long| LinkError::TooLong)?;
        if let Some(ticket) = &identity.ticket {
            self.mail.ticket = ticket.ticket;
            self.mail.workers = identity.vmid..identity.vmid.saturating_add(ticket.workers);
        }
        self.hold = Hold::Named { fork: identity.fork, frame };
        Ok(())
    }

    /// A stream from the guest.
    fn rx(&mut self, channel: u32, kind: Kind) -> Option<&mut Rx> {
        match (&mut self.channels.get_mut(&channel)?.role, kind) {
            (Role::Exec { stdout, .. }, Kind::Stdout) => Some(stdout),
            (Role::Exec { stderr, .. }, Kind::Stderr) => Some(stderr),
            (Role::Read { file, .. }, Kind::File) => Some(file),
            (Role::Send(sending), Kind::Data) => Some(&mut sending.data),
            _ => None,
        }
    }

    fn schedule(&mut self, channel: u32) {
        if let Some(Channel { tx: Some(tx), .. }) = self.channels.get_mut(&channel)
            && tx.can_send()
            && !tx.scheduled
        {
            tx.scheduled = true;
            self.round.push_back(channel);
        }
    }

    /// Forget a channel that this side opened.
    fn close_own(&mut self, channel: u32) -> bool {
        let known = channel.is_multiple_of(2) && self.channels.remove(&channel).is_some();
        if known {
            self.hosts_channels -= 1;
            self.round.retain(|other| *other != channel);
            self.credits.retain(|(other, _)| *other != channel);
        }
        known
    }

    /// Something that the guest brought about.
    fn answer(&mut self, channel: u32, message: &ToGuest) {
        self.enqueue(channel, message, Weight::Answer);
    }

    fn enqueue(&mut self, channel: u32, message: &ToGuest, weight: Weight) {
        let queued = self.try_enqueue(channel, message, weight);
        debug_assert!(queued.is_ok(), "only what opens a channel or lists workers can be too long");
    }

    fn try_enqueue(
        &mut self,
        channel: u32,
        message: &ToGuest,
        weight: Weight,
    ) -> Result<(), LinkError> {
        let frame = encode_message(channel, message).map_err(|_too_long| LinkError::TooLong)?;
        if weight == Weight::Answer {
            self.answer_bytes += frame.len();
        }
        self.queue.push_back(Queued { channel, frame, weight });
        Ok(())
    }

    fn enqueue_reply(&mut self, channel: u32, reply: Reply) {
        let message = match reply {
            Reply::Ok { value } => ToGuest::Ok { value },
            Reply::Ticket { ticket, granted } => ToGuest::Ticket { ticket, granted },
            Reply::Ended { workers } => ToGuest::Ended { workers },
            Reply::Incoming { vmid, length_bytes, .. } => {
                ToGuest::Incoming(MessageInfo { vmid, length_bytes })
            }
            Reply::Error(error) => ToGuest::Error(error),
        };
        if self.try_enqueue(channel, &message, Weight::Answer).is_ok() {
            return;
        }
        let shorter = match message {
            ToGuest::Ended { workers } => ToGuest::Ended {
                workers: workers.into_iter().map(|worker| shortened(&worker)).collect(),
            },
            _ => request_error(rustix::io::Errno::MSGSIZE, "the answer is too long"),
        };
        if self.try_enqueue(channel, &shorter, Weight::Answer).is_err() {
            let error = request_error(rustix::io::Errno::MSGSIZE, "too many workers to list");
            self.answer(channel, &error);
        }
    }
}

fn shortened(worker: &Worker) -> Worker {
    let error = worker.error.as_ref().map(|_| "failed".to_owned());
    Worker { vmid: worker.vmid, error }
}

fn request_error(errno: rustix::io::Errno, message: &str) -> ToGuest {
    ToGuest::Error(RequestError { errno: errno.raw_os_error(), message: message.to_owned() })
}

/// The frame of a message that can't be too long.
fn message<M: Serialize>(channel: u32, message: &M) -> Vec<u8> {
    encode_message(channel, message)
        .unwrap_or_else(|error| unreachable!("a message of a few numbers: {error}"))
}

fn plain(of: &ToGuest) -> Vec<u8> {
    message(0, of)
}
