//! The task that owns a guest's socket: reads, writes, and passes on what the [`Mux`] says.
//!
//! One turn: write what may leave until the socket is full, then wait for a command, for the socket
//! or for a consumer that has made room, and do all of what is there. There is no timer but one:
//! when the guest is prepared for a freeze and QEMU has not read all yet (it has, as a rule).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use vmfork_agent_proto::{Kind, PROTOCOL_VERSION, ToGuest};

use super::command::{Answer, Command, Key, Port, Side};
use super::error::{CloseReason, LinkError};
use super::link::AgentInfo;
use super::mux::{Event, Inheritance, Mux};
use super::outlet::{Flushed, Outlet};
use super::outq;
use super::request::{CommandSender, GuestRequest, Lease, RequestId};
use vmfork_control::ExecOutput;

/// Bytes asked for in one read; a socketpair holds about 200 KiB.
const READ_BYTES: usize = 64 * 1024;

/// Frames are gathered up to this size for one write. What is gathered leaves before a `Prepare`.
const WRITE_BYTES: usize = 32 * 1024;

/// Writes, and commands, in one turn: the other side gets its turn too.
const TURN: usize = 16;

/// How often to look whether QEMU has read all.
const UNREAD_POLL: Duration = Duration::from_millis(1);

/// A consumer has room, or has gone.
#[derive(Debug, Clone, Copy)]
enum Wake {
    Port(u32),
    Requests,
}

/// Where the driver says how it ended; `None` while it runs.
pub(super) type Closed = Option<CloseReason>;

pub(super) struct Driver {
    stream: UnixStream,
    mux: Mux,
    /// Room for messages that wait may have become free.
    mail_room: watch::Receiver<()>,
    out: Vec<u8>,
    written: usize,
    /// The other end reads no more; what it wrote before is still to be read.
    deaf: bool,
    commands: mpsc::UnboundedReceiver<Command>,
    /// For responders and leases.
    back: CommandSender,
    closed: watch::Sender<Closed>,
    channels: HashMap<Key, u32>,
    ports: HashMap<u32, (Key, Port)>,
    room: FuturesUnordered<BoxFuture<'static, Wake>>,
    requests: mpsc::Sender<GuestRequest>,
    pending_requests: VecDeque<GuestRequest>,
    requests_waiting: bool,
    leases: HashMap<u32, Lease>,
    log: mpsc::Sender<Bytes>,
    log_dropped_bytes: usize,
    hellos: Vec<Answer<AgentInfo>>,
    /// What the guest said last.
    guest: Option<AgentInfo>,
    readies: Vec<Answer<AgentInfo>>,
    pings: Vec<(u64, Answer<()>)>,
    identity: Option<Answer<()>>,
    prepare: Option<(u64, Answer<Inheritance>)>,
    /// Of the fork in progress: set when the guest speaks before it may.
    broken: Arc<AtomicBool>,
    /// The guest is prepared; QEMU may still have something to read.
    prepared: bool,
}

impl Driver {
    pub(super) fn new(
        stream: UnixStream,
        mux: Mux,
        commands: mpsc::UnboundedReceiver<Command>,
        back: CommandSender,
        closed: watch::Sender<Closed>,
        requests: mpsc::Sender<GuestRequest>,
        log: mpsc::Sender<Bytes>,
    ) -> Self {
        Self {
            stream,
            mail_room: mux.room_changes(),
            mux,
            out: Vec::with_capacity(2 * WRITE_BYTES),
            written: 0,
            deaf: false,
            commands,
            back,
            closed,
            channels: HashMap::new(),
            ports: HashMap::new(),
            room: FuturesUnordered::new(),
            requests,
            pending_requests: VecDeque::new(),
            requests_waiting: false,
            leases: HashMap::new(),
            log,
            log_dropped_bytes: 0,
            hellos: Vec::new(),
            guest: None,
            readies: Vec::new(),
            pings: Vec::new(),
            identity: None,
            prepare: None,
            broken: Arc::default(),
            prepared: false,
        }
    }

    /// Run until the link ends, and then until every session has learnt of it.
    pub(super) async fn run(mut self) {
        let mut buffer = vec![0; READ_BYTES];
        let reason = loop {
            match self.turn(&mut buffer).await {
                Ok(()) => {}
                Err(reason) => break reason,
            }
        };
        self.close(reason).await;
    }

    async fn turn(&mut self, buffer: &mut [u8]) -> Result<(), CloseReason> {
        let full = self.write()?;
        self.pass_on();
        self.check_unread()?;
        let interest = match (self.deaf || self.mux.wants_bytes(), full) {
            (true, false) => Some(Interest::READABLE),
            (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
            (false, true) => Some(Interest::WRITABLE),
            (false, false) => None,
        };
        tokio::select! {
            command = self.commands.recv() => {
                self.obey(command.ok_or(CloseReason::Dropped)?)?;
                for _ in 1..TURN {
                    let Ok(command) = self.commands.try_recv() else { break };
                    self.obey(command)?;
                }
            }
            ready = self.stream.ready(interest.unwrap_or(Interest::READABLE)), if interest.is_some() => {
                if ready.map_err(|error| CloseReason::Io(error.to_string()))?.is_readable() {
                    self.read(buffer)?;
                }
            }
            _ = self.mail_room.changed(), if self.mux.mail_waits() => self.mux.admit_mail(),
            Some(wake) = self.room.next(), if !self.room.is_empty() => self.has_room(wake),
            () = tokio::time::sleep(UNREAD_POLL), if self.prepared => {}
        }
        self.pass_on();
        Ok(())
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<(), CloseReason> {
        match self.stream.try_read(buffer) {
            Ok(0) => Err(CloseReason::Eof),
            Ok(bytes) => {
                let heard = self.mux.on_bytes(&buffer[..bytes]);
                // What came before the guest went wrong still counts.
                self.pass_on();
                Ok(heard?)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(CloseReason::Eof),
            Err(error) => Err(CloseReason::Io(error.to_string())),
        }
    }

    /// Write what may leave. `true`: there is more than the socket takes now.
    fn write(&mut self) -> Result<bool, CloseReason> {
        if self.deaf {
            return Ok(false);
        }
        for _ in 0..TURN {
            if self.written == self.out.len() {
                self.out.clear();
                self.written = 0;
                while self.out.len() < WRITE_BYTES {
                    let Some(frame) = self.mux.next_frame() else { break };
                    self.out.extend_from_slice(&frame);
                }
                if self.out.is_empty() {
                    return Ok(false);
                }
            }
            match self.stream.try_write(&self.out[self.written..]) {
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return self.write_failed(&error),
            }
        }
        Ok(true)
    }

    fn write_failed(&mut self, error: &io::Error) -> Result<bool, CloseReason> {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                self.deaf = true;
                Ok(false)
            }
            _ => Err(CloseReason::Io(error.to_string())),
        }
    }

    fn obey(&mut self, command: Command) -> Result<(), CloseReason> {
        match command {
            Command::Hello { message, answer } => {
                self.hellos.retain(|answer| !answer.is_closed());
                match self.mux.tell(&message) {
                    Ok(()) => self.hellos.push(answer),
                    Err(error) => drop(answer.send(Err(error))),
                }
            }
            Command::Ready { answer } => {
                self.readies.retain(|answer| !answer.is_closed());
                self.readies.push(answer);
                self.tell_ready();
            }
            Command::Ping { token, answer } => {
                self.pings.retain(|(_, answer)| !answer.is_closed());
                match self.mux.tell(&ToGuest::Ping { token }) {
                    Ok(()) => self.pings.push((token, answer)),
                    Err(error) => drop(answer.send(Err(error))),
                }
            }
            Command::GiveUp { reason } => return Err(reason),
            Command::Poweroff => drop(self.mux.tell(&ToGuest::Poweroff)),
            Command::Open { key, message, mut port } => match self.mux.open(&message) {
                Ok(channel) => {
                    self.channels.insert(key, channel);
                    self.ports.insert(channel, (key, port));
                }
                Err(error) => port.end(Some(&error)),
            },
            Command::Push { key, bytes, end } => {
                if let Some(channel) = self.channels.get(&key) {
                    self.mux.push(*channel, bytes, end);
                }
            }
            Command::Signal { key, message, bytes } => {
                if let Some(channel) = self.channels.get(&key) {
                    self.mux.signal(*channel, &message, bytes);
                }
            }
            Command::Cancel { key } => {
                if let Some(channel) = self.channels.get(&key).copied() {
                    self.mux.cancel(channel);
                    self.finish(channel, Some(&LinkError::HungUp));
                }
            }
            Command::Reply { channel, reply, lease } => {
                if let Some(lease) = lease {
                    self.leases.insert(channel, lease);
                }
                self.mux.reply(channel, reply);
            }
            Command::MailReleased { vmid, cost } => self.mux.mail_released(vmid, cost),
            Command::Prepare { fork, broken, answer } => match self.mux.prepare(fork) {
                Ok(()) => {
                    self.prepare = Some((fork, answer));
                    self.broken = broken;
                }
                Err(error) => drop(answer.send(Err(error))),
            },
            Command::Release { fork } => {
                self.mux.release(fork);
                if self.prepare.as_ref().is_some_and(|(asked, _)| *asked == fork) {
                    self.prepare = None;
                    self.prepared = false;
                }
            }
            Command::Identity { identity, answer } => match self.mux.identity(&identity) {
                Ok(()) => self.identity = Some(answer),
                Err(error) => drop(answer.send(Err(error))),
            },
        }
        Ok(())
    }

    /// Carry out what the multiplexer says.
    fn pass_on(&mut self) {
        while let Some(event) = self.mux.poll_event() {
            match event {
                Event::Hello { protocol, agent_version, kernel, cpus, firstboot, pmem_root } => {
                    let info = if protocol == PROTOCOL_VERSION {
                        Ok(AgentInfo { agent_version, kernel, cpus, firstboot, pmem_root })
                    } else {
                        Err(LinkError::Version { agent: protocol })
                    };
                    self.guest = info.as_ref().ok().cloned();
                    self.tell_ready();
                    for answer in self.hellos.drain(..) {
                        let _ = answer.send(info.clone());
                    }
                }
                Event::Pong { token } => {
                    if let Some(place) = self.pings.iter().position(|(asked, _)| *asked == token) {
                        let _ = self.pings.swap_remove(place).1.send(Ok(()));
                    }
                }
                Event::Prepared => self.prepared = self.prepare.is_some(),
                Event::HoldBroken => self.broken.store(true, Ordering::Relaxed),
                Event::Confirmed => self.identified(Ok(())),
                Event::Refused { message } => self.identified(Err(LinkError::Refused { message })),
                Event::Foreign { bytes } => self.log(bytes),
                Event::Request { channel, request } => {
                    let request = GuestRequest::new(channel, request, &self.back);
                    self.pending_requests.push_back(request);
                    self.flush_requests();
                }
                Event::Abandoned { channel } => self.abandoned(RequestId(channel)),
                Event::AnswerGone { channel } => drop(self.leases.remove(&channel)),
                Event::Sent { channel, bytes } => {
                    if let Some((_, port)) = self.ports.get(&channel) {
                        port.permits.add_permits(bytes);
                    }
                }
                Event::Started { .. }
                | Event::File { .. }
                | Event::Data { .. }
                | Event::Exited { .. }
                | Event::Failed { .. }
                | Event::Written { .. } => self.port_event(event),
            }
        }
    }

    fn tell_ready(&mut self) {
        let Some(guest) = self.guest.as_ref().filter(|guest| guest.is_ready()) else { return };
        for answer in self.readies.drain(..) {
            let _ = answer.send(Ok(guest.clone()));
        }
    }

    /// What came on a channel that a handle opened.
    fn port_event(&mut self, event: Event) {
        match event {
            Event::Started { channel, pid } => {
                if let Some((_, Port { side: Side::Exec { started, .. }, .. })) =
                    self.ports.get_mut(&channel)
                    && let Some(started) = started.take()
                {
                    let _ = started.send(Ok(pid));
                }
            }
            Event::File { channel, info } => {
                if let Some((_, Port { side: Side::Read { opened, .. }, .. })) =
                    self.ports.get_mut(&channel)
                    && let Some(opened) = opened.take()
                {
                    let _ = opened.send(Ok(info));
                }
            }
            Event::Data { channel, kind, bytes, end } => {
                let Some((_, port)) = self.ports.get_mut(&channel) else { return };
                match &mut port.side {
                    Side::Exec { output, .. } => output.push(kind, bytes),
                    Side::Read { content, .. } => {
                        content.push(kind, bytes);
                        if end {
                            content.finish(None);
                        }
                    }
                    Side::Write { .. } => {}
                }
                self.flush_port(channel);
            }
            Event::Exited { channel, exit_code, signal } => {
                if let Some((_, Port { side: Side::Exec { output, .. }, .. })) =
                    self.ports.get_mut(&channel)
                {
                    output.finish(Some(ExecOutput::Exited { exit_code, signal }));
                }
                self.finish(channel, None);
            }
            Event::Failed { channel, error } => {
                self.finish(channel, Some(&LinkError::Guest(error)));
            }
            Event::Written { channel, bytes } => {
                if let Some((_, Port { side: Side::Write { written }, .. })) =
                    self.ports.get_mut(&channel)
                    && let Some(written) = written.take()
                {
                    let _ = written.send(Ok(bytes));
                }
                self.finish(channel, None);
            }
            _ => {}
        }
    }

    /// The guest is done with a channel; its port stays until the consumer has taken all.
    fn finish(&mut self, channel: u32, error: Option<&LinkError>) {
        if let Some((_, port)) = self.ports.get_mut(&channel) {
            port.end(error);
            self.flush_port(channel);
        }
    }

    fn flush_port(&mut self, channel: u32) {
        let Some((key, port)) = self.ports.get_mut(&channel) else { return };
        let mux = &mut self.mux;
        let taken = |kind, bytes| mux.taken(channel, kind, bytes);
        let flushed = match &mut port.side {
            Side::Exec { output, .. } => flush(output, channel, taken, &self.room),
            Side::Read { content, .. } => flush(content, channel, taken, &self.room),
            Side::Write { written } if written.is_none() => Flushed::Done,
            Side::Write { .. } => Flushed::Gone,
        };
        if flushed == Flushed::Gone {
            self.mux.cancel(channel);
        }
        if matches!(flushed, Flushed::Gone | Flushed::Done) {
            self.channels.remove(key);
            self.ports.remove(&channel);
        }
    }

    fn has_room(&mut self, wake: Wake) {
        match wake {
            Wake::Port(channel) => {
                if let Some((_, port)) = self.ports.get_mut(&channel) {
                    match &mut port.side {
                        Side::Exec { output, .. } => output.waiting = false,
                        Side::Read { content, .. } => content.waiting = false,
                        Side::Write { .. } => {}
                    }
                }
                self.flush_port(channel);
            }
            Wake::Requests => {
                self.requests_waiting = false;
                self.flush_requests();
            }
        }
    }

    /// Hands requests to the code that answers them. If it has ended, dropping the requests answers
    /// `EIO`.
    fn flush_requests(&mut self) {
        while let Some(request) = self.pending_requests.pop_front() {
            match self.requests.try_send(request) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Closed(request)) => drop(request),
                Err(mpsc::error::TrySendError::Full(request)) => {
                    self.pending_requests.push_front(request);
                    if !self.requests_waiting {
                        self.requests_waiting = true;
                        let requests = self.requests.clone();
                        self.room.push(Box::pin(async move {
                            drop(requests.reserve().await);
                            Wake::Requests
                        }));
                    }
                    return;
                }
            }
        }
    }

    fn abandoned(&mut self, request: RequestId) {
        let held = self.pending_requests.len();
        self.pending_requests.retain(|pending| pending.id() != request);
        if self.pending_requests.len() == held {
            self.pending_requests.push_back(GuestRequest::Abandon { request });
            self.flush_requests();
        }
    }

    fn identified(&mut self, outcome: Result<(), LinkError>) {
        if let Some(answer) = self.identity.take() {
            let _ = answer.send(outcome);
        }
    }

    /// The log is not worth stopping a program for; what it can't take is counted in it.
    fn log(&mut self, bytes: Vec<u8>) {
        let length = bytes.len();
        if self.log_dropped_bytes > 0 {
            let note = format!("[{} bytes of output were dropped here]\n", self.log_dropped_bytes);
            if self.log.try_send(Bytes::from(note)).is_ok() {
                self.log_dropped_bytes = 0;
            }
        }
        if self.log_dropped_bytes > 0 || self.log.try_send(Bytes::from(bytes)).is_err() {
            self.log_dropped_bytes = self.log_dropped_bytes.saturating_add(length);
        }
    }

    /// Answer `prepare` once the guest is prepared and QEMU has read all that was written.
    fn check_unread(&mut self) -> Result<(), CloseReason> {
        if !self.prepared {
            return Ok(());
        }
        let unread =
            outq::unread_bytes(&self.stream).map_err(|error| CloseReason::Io(error.to_string()))?;
        if unread == 0 {
            self.prepared = false;
            if let Some((_, answer)) = self.prepare.take() {
                // If the caller does not wait any more, its `Held` has sent a release already.
                let _ = answer.send(Ok(self.mux.inheritance()));
            }
        }
        Ok(())
    }

    /// Tell everybody, then wait until the sessions have taken what is left to them.
    async fn close(mut self, reason: CloseReason) {
        let error = LinkError::Closed(reason.clone());
        self.closed.send_replace(Some(reason));
        self.commands.close();
        let Self { stream, hellos, readies, pings, identity, prepare, .. } = &mut self;
        let _ = rustix::net::shutdown(&*stream, rustix::net::Shutdown::Both);
        hellos.clear();
        readies.clear();
        pings.clear();
        (*identity, *prepare) = (None, None);
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Open { mut port, .. } = command {
                port.end(Some(&error));
            }
        }
        self.pending_requests.clear();
        self.mux.forget_mail();
        self.leases.clear();
        let channels: Vec<u32> = self.ports.keys().copied().collect();
        for channel in channels {
            self.finish(channel, Some(&error));
        }
        while !self.ports.is_empty() {
            let Some(wake) = self.room.next().await else { break };
            self.has_room(wake);
        }
    }
}

fn flush<T: Send + 'static>(
    outlet: &mut Outlet<T>,
    channel: u32,
    taken: impl FnMut(Kind, usize),
    room: &FuturesUnordered<BoxFuture<'static, Wake>>,
) -> Flushed {
    let flushed = outlet.flush(taken);
    if flushed == Flushed::Full && !outlet.waiting {
        outlet.waiting = true;
        let tx = outlet.sender();
        room.push(Box::pin(async move {
            drop(tx.reserve().await);
            Wake::Port(channel)
        }));
    }
    flushed
}
