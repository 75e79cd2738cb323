//! One program's connection to `fork.sock`; [`crate::local`] draws its states.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vmfork_agent_proto::{Kind, TicketClone, ToGuest, ToHost, Worker};

use crate::exec::CHUNK_BYTES;
use crate::pipe::{Overrun, Window};
use crate::port::Port;
use crate::wire::{Op, REQUEST_BYTES, Reply, Request};

/// Most descriptors that one message may carry (`SCM_MAX_FD` of the kernel).
const SOCKETS_MAX: usize = 253;

/// Whether a connection lives on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Open,
    Closed,
}

/// What a connection's program is in this VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Plain,
    /// A worker of the ticket that made this clone.
    Worker {
        vmid: u32,
        exited: bool,
    },
    /// A worker of the VM that this one was forked from.
    Bystander,
}

/// Which worker, if any, this VM's programs may speak for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VmRole {
    /// It booted.
    Root,
    /// A clone with `workers` workers, numbered from `vmid` on.
    Clone { vmid: u32, workers: u32 },
}

/// Hands out the agent's channel numbers.
#[derive(Debug)]
pub(crate) struct Channels(u32);

impl Channels {
    /// From the first odd one on.
    pub(crate) fn new() -> Self {
        Self(1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        let channel = self.0;
        self.0 = self.0.checked_add(2).unwrap_or(1);
        channel
    }
}

#[derive(Debug)]
enum State {
    Idle,
    /// Bytes of an `sf_send` go from the program to the daemon.
    Sending {
        channel: u32,
        left_bytes: u64,
        window: Window,
    },
    /// The daemon's turn.
    Waiting {
        channel: u32,
        request: Request,
    },
    /// Bytes of an `sf_recv` come from the daemon.
    Receiving {
        channel: u32,
        left_bytes: u64,
    },
    /// The rest of a failed `sf_send` is read and dropped.
    Discarding {
        left_bytes: u64,
    },
}

#[derive(Debug)]
pub(crate) struct Connection {
    fd: OwnedFd,
    role: Role,
    /// Made for this clone, by its identity.
    fresh: bool,
    state: State,
    request: [u8; REQUEST_BYTES],
    request_bytes: usize,
    out: Vec<u8>,
    written: usize,
    /// How many of the bytes at the end of `out` the daemon wants credit for.
    uncredited_bytes: usize,
}

impl Connection {
    pub(crate) fn new(fd: OwnedFd, role: Role) -> Self {
        Self {
            fd,
            role,
            fresh: false,
            state: State::Idle,
            request: [0; REQUEST_BYTES],
            request_bytes: 0,
            out: Vec::new(),
            written: 0,
            uncredited_bytes: 0,
        }
    }

    /// The connection of a worker that is about to be forked.
    pub(crate) fn new_worker(fd: OwnedFd, role: Role) -> Self {
        Self { fresh: true, ..Self::new(fd, role) }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// The channel of the request under way.
    pub(crate) fn channel(&self) -> Option<u32> {
        match self.state {
            State::Sending { channel, .. }
            | State::Waiting { channel, .. }
            | State::Receiving { channel, .. } => Some(channel),
            State::Idle | State::Discarding { .. } => None,
        }
    }

    pub(crate) fn interest(&self, room: bool) -> PollFlags {
        // A hang-up is always reported; a half-closed connection counts as one.
        let mut flags = PollFlags::RDHUP;
        if self.written < self.out.len() {
            flags |= PollFlags::OUT;
        } else {
            let read = match &self.state {
                State::Idle | State::Discarding { .. } => true,
                State::Sending { window, .. } => room && window.left() > 0,
                State::Waiting { .. } | State::Receiving { .. } => false,
            };
            flags.set(PollFlags::IN, read);
        }
        flags
    }

    /// Whether it is the one that waits for this clone.
    pub(crate) fn asks_for_clone(&self, clone: &TicketClone) -> bool {
        let State::Waiting { channel, request } = &self.state else { return false };
        let granted = clone.channel.is_none_or(|granted| granted == *channel);
        granted && request.op == Op::Clone && request.a64 == clone.ticket
    }

    pub(crate) fn is_new_worker(&self, first: u32, workers: u32) -> bool {
        self.fresh
            && matches!(self.role, Role::Worker { vmid, .. } if vmid > first && vmid - first < workers)
    }

    /// From now on a worker like any other.
    pub(crate) fn settle_in(&mut self) {
        self.fresh = false;
    }

    pub(crate) fn become_bystander(&mut self) {
        if matches!(self.role, Role::Worker { .. }) {
            self.role = Role::Bystander;
        }
    }

    /// Carry on after `poll`: write what waits, then read what is wanted. `hung`: the program has
    /// closed its end.
    pub(crate) fn serve(
        &mut self,
        hung: bool,
        vm: VmRole,
        channels: &mut Channels,
        port: &mut Port,
        scratch: &mut [u8],
    ) -> Outcome {
        if self.flush(port) == Outcome::Closed {
            return Outcome::Closed;
        }
        if self.written < self.out.len() {
            return Outcome::Open;
        }
        match &mut self.state {
            State::Idle => self.read_request(vm, channels, port),
            State::Waiting { .. } | State::Receiving { .. } => closed_if(hung),
            State::Discarding { left_bytes } => {
                let want = usize::try_from(*left_bytes).unwrap_or(usize::MAX).min(scratch.len());
                match receive(&self.fd, &mut scratch[..want]) {
                    Received::Bytes(n) => {
                        *left_bytes -= n as u64;
                        if *left_bytes == 0 {
                            self.state = State::Idle;
                        }
                        Outcome::Open
                    }
                    Received::Nothing => Outcome::Open,
                    Received::End => Outcome::Closed,
                }
            }
            State::Sending { channel, left_bytes, window } => {
                let most = CHUNK_BYTES.min(window.left()).min(scratch.len());
                let want = usize::try_from(*left_bytes).unwrap_or(usize::MAX).min(most);
                if want == 0 || !port.has_room() {
                    return closed_if(hung);
                }
                match receive(&self.fd, &mut scratch[..want]) {
                    Received::Bytes(n) => {
                        window.spend(n);
                        *left_bytes -= n as u64;
                        let (channel, last) = (*channel, *left_bytes == 0);
                        port.send_stream(Kind::Data, channel, last, &scratch[..n]);
                        if last {
                            let request = Request { op: Op::Send, a32: 0, a64: 0, length_bytes: 0 };
                            self.state = State::Waiting { channel, request };
                        }
                        Outcome::Open
                    }
                    Received::Nothing => Outcome::Open,
                    Received::End => Outcome::Closed,
                }
            }
        }
    }

    fn read_request(&mut self, vm: VmRole, channels: &mut Channels, port: &mut Port) -> Outcome {
        match receive(&self.fd, &mut self.request[self.request_bytes..]) {
            Received::Nothing => return Outcome::Open,
            Received::End => return Outcome::Closed,
            Received::Bytes(n) => self.request_bytes += n,
        }
        if self.request_bytes < REQUEST_BYTES {
            return Outcome::Open;
        }
        self.request_bytes = 0;
        let Some(request) = Request::decode(&self.request) else {
            // There is no telling where its next request begins.
            let _ = self.reply(Reply::error(libc::EPROTO), &[]);
            return Outcome::Closed;
        };
        self.begin(request, vm, channels, port)
    }

    fn begin(
        &mut self,
        request: Request,
        vm: VmRole,
        channels: &mut Channels,
        port: &mut Port,
    ) -> Outcome {
        let message = match self.message(&request, vm) {
            Ok(message) if port.is_connected() => message,
            Ok(_) => return self.refuse(&request, libc::ENOTCONN),
            Err(errno) => return self.refuse(&request, errno),
        };
        let channel = channels.next();
        port.send(channel, &message);
        if let (Op::Exit, Role::Worker { exited, .. }) = (request.op, &mut self.role) {
            *exited = true;
        }
        self.state = if request.op == Op::Send && request.length_bytes > 0 {
            State::Sending { channel, left_bytes: request.length_bytes, window: Window::full() }
        } else {
            if request.op == Op::Send {
                port.send_stream(Kind::Data, channel, true, &[]);
            }
            State::Waiting { channel, request }
        };
        Outcome::Open
    }

    fn refuse(&mut self, request: &Request, errno: i32) -> Outcome {
        if request.op == Op::Send && request.length_bytes > 0 {
            self.state = State::Discarding { left_bytes: request.length_bytes };
        }
        self.reply(Reply::error(errno), &[])
    }

    /// What the daemon is asked, or an errno.
    fn message(&self, request: &Request, vm: VmRole) -> Result<ToHost, i32> {
        let ticket = request.a64;
        Ok(match request.op {
            Op::RequestTicket if request.a32 == 0 => return Err(libc::EINVAL),
            Op::RequestTicket => {
                ToHost::RequestTicket { count: request.a32, hierarchical: request.a64 != 0 }
            }
            Op::Clone => ToHost::Clone { ticket },
            Op::Join => ToHost::Join { ticket },
            Op::Kill => ToHost::KillTicket { ticket },
            Op::Exit => ToHost::ExitClone { vmid: self.worker(vm)?, error: None },
            Op::Send => ToHost::Send { vmid: self.worker(vm)?, length_bytes: request.length_bytes },
            Op::Recv => ToHost::Recv { ticket, vmid: (request.a32 != 0).then_some(request.a32) },
        })
    }

    /// As which worker this program speaks. Any program may in a clone with one worker.
    fn worker(&self, vm: VmRole) -> Result<u32, i32> {
        match (self.role, vm) {
            (Role::Worker { exited: true, .. }, _) => Err(libc::ESHUTDOWN),
            (Role::Worker { vmid, .. }, _) => Ok(vmid),
            (Role::Bystander, _) => Err(libc::ECANCELED),
            (Role::Plain, VmRole::Clone { vmid, workers: 1 }) => Ok(vmid),
            (Role::Plain, _) => Err(libc::EPERM),
        }
    }

    /// The daemon's answer to the request under way.
    pub(crate) fn answer(&mut self, message: &ToGuest, port: &mut Port) -> Outcome {
        let op = match &self.state {
            State::Waiting { request, .. } => request.op,
            State::Sending { .. } => Op::Send,
            State::Idle | State::Receiving { .. } | State::Discarding { .. } => {
                return Outcome::Open;
            }
        };
        match (message, op) {
            (ToGuest::Error(error), _) => self.fail(error.errno),
            (ToGuest::Ticket { ticket, granted }, Op::RequestTicket) => {
                self.done(Reply { a32: *granted, a64: *ticket, ..Reply::default() }, &[])
            }
            (ToGuest::Ended { workers }, Op::Join | Op::Kill) => {
                let (reply, payload) = ended(workers);
                self.done(reply, &payload)
            }
            (ToGuest::Ok { value }, Op::Clone | Op::Exit) => {
                self.done(Reply { a64: *value, ..Reply::default() }, &[])
            }
            (ToGuest::Ok { .. }, Op::Send) if matches!(self.state, State::Waiting { .. }) => {
                self.done(Reply::default(), &[])
            }
            (ToGuest::Incoming(info), Op::Recv) => {
                let channel = self.channel().unwrap_or(0);
                let (a32, length_bytes) = (info.vmid, info.length_bytes);
                self.state = State::Receiving { channel, left_bytes: length_bytes };
                let outcome = self.reply(Reply { a32, length_bytes, ..Reply::default() }, &[]);
                if outcome == Outcome::Open { self.flush(port) } else { outcome }
            }
            // An answer to something else: the program must not wait for the right one.
            _ => self.fail(libc::EPROTO),
        }
    }

    fn done(&mut self, reply: Reply, payload: &[u8]) -> Outcome {
        self.state = State::Idle;
        self.reply(reply, payload)
    }

    /// The request under way, if any, fails. A message that was promised and is cut short closes
    /// the connection: there is no other way to say so.
    pub(crate) fn fail(&mut self, errno: i32) -> Outcome {
        match self.state {
            State::Idle | State::Discarding { .. } => Outcome::Open,
            State::Receiving { .. } => Outcome::Closed,
            State::Waiting { request, .. } => {
                if let (Op::Exit, Role::Worker { exited, .. }) = (request.op, &mut self.role) {
                    *exited = false;
                }
                self.done(Reply::error(errno), &[])
            }
            State::Sending { left_bytes, .. } => {
                self.state = State::Discarding { left_bytes };
                self.reply(Reply::error(errno), &[])
            }
        }
    }

    pub(crate) fn credit(&mut self, bytes: u32) {
        if let State::Sending { window, .. } = &mut self.state {
            window.credit(bytes);
        }
    }

    /// A frame of the message that is received.
    ///
    /// # Errors
    /// [`Overrun`].
    pub(crate) fn data(
        &mut self,
        bytes: &[u8],
        end: bool,
        port: &mut Port,
    ) -> Result<Outcome, Overrun> {
        let State::Receiving { left_bytes, .. } = &mut self.state else { return Ok(Outcome::Open) };
        if self.uncredited_bytes + bytes.len() > Window::full().left() {
            return Err(Overrun);
        }
        let Some(left) = left_bytes.checked_sub(bytes.len() as u64) else {
            return Ok(Outcome::Closed);
        };
        if end && left > 0 {
            return Ok(Outcome::Closed);
        }
        *left_bytes = left;
        if self.written > self.out.len() / 2 {
            self.out.drain(..self.written);
            self.written = 0;
        }
        self.out.extend_from_slice(bytes);
        self.uncredited_bytes += bytes.len();
        Ok(self.flush(port))
    }

    /// A clone's answer: `sockets` are the other workers'.
    pub(crate) fn answer_clone(
        &mut self,
        vmid: u32,
        workers: u32,
        sockets: Vec<OwnedFd>,
    ) -> Outcome {
        self.state = State::Idle;
        self.role = Role::Worker { vmid, exited: false };
        let reply = Reply { a32: vmid, a64: u64::from(workers), ..Reply::default() }.encode();
        if sockets.is_empty() {
            return self.write_out(&reply);
        }
        let borrowed: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let fds = borrowed.get(..borrowed.len().min(SOCKETS_MAX)).unwrap_or_default();
        let mut space =
            vec![std::mem::MaybeUninit::uninit(); SendAncillaryMessage::ScmRights(fds).size()];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(fds));
        let slices = [std::io::IoSlice::new(&reply)];
        // Nothing waits in this socket, and a header always fits into an empty one.
        match rustix::net::sendmsg(&self.fd, &slices, &mut control, SendFlags::NOSIGNAL) {
            Ok(REQUEST_BYTES) => Outcome::Open,
            _ => Outcome::Closed,
        }
    }

    fn reply(&mut self, reply: Reply, payload: &[u8]) -> Outcome {
        let mut bytes = reply.encode().to_vec();
        bytes.extend_from_slice(payload);
        self.write_out(&bytes)
    }

    fn write_out(&mut self, bytes: &[u8]) -> Outcome {
        self.out.extend_from_slice(bytes);
        self.write().map_or(Outcome::Closed, |_| Outcome::Open)
    }

    /// Write what waits, credit what was written of a message.
    fn flush(&mut self, port: &mut Port) -> Outcome {
        let Ok(()) = self.write() else { return Outcome::Closed };
        let unwritten = (self.out.len() - self.written).min(self.uncredited_bytes);
        let credited = self.uncredited_bytes - unwritten;
        self.uncredited_bytes = unwritten;
        let State::Receiving { channel, left_bytes } = self.state else { return Outcome::Open };
        if credited > 0 {
            let bytes = u32::try_from(credited).unwrap_or(u32::MAX);
            port.send(channel, &ToHost::Credit { kind: Kind::Data as u8, bytes });
        }
        if left_bytes == 0 && self.out.is_empty() {
            self.state = State::Idle;
        }
        Outcome::Open
    }

    fn write(&mut self) -> Result<(), Errno> {
        while let Some(waiting) = self.out.get(self.written..).filter(|bytes| !bytes.is_empty()) {
            match rustix::net::send(&self.fd, waiting, SendFlags::NOSIGNAL) {
                Ok(n) => self.written += n,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.written = 0;
        Ok(())
    }
}

fn closed_if(hung: bool) -> Outcome {
    if hung { Outcome::Closed } else { Outcome::Open }
}

enum Received {
    Bytes(usize),
    Nothing,
    End,
}

fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> Received {
    match rustix::io::read(fd, buffer) {
        Ok(0) => Received::End,
        Ok(n) => Received::Bytes(n),
        Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
        Err(_) => Received::End,
    }
}

/// `Ended` as a reply.
fn ended(workers: &[Worker]) -> (Reply, Vec<u8>) {
    let mut payload = Vec::new();
    let mut failed = 0;
    for worker in workers {
        let why = worker.error.as_deref().unwrap_or("");
        failed += u64::from(worker.error.is_some());
        payload.extend_from_slice(&worker.vmid.to_ne_bytes());
        payload.extend_from_slice(&u32::try_from(why.len()).unwrap_or(0).to_ne_bytes());
        payload.extend_from_slice(why.as_bytes());
    }
    let reply = Reply {
        a32: u32::try_from(workers.len()).unwrap_or(u32::MAX),
        a64: failed,
        length_bytes: payload.len() as u64,
        status: 0,
    };
    (reply, payload)
}
