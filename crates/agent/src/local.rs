//! The fork API: programs' connections on one side, the agent's odd channels on the other.
//!
//! ```text
//!                request             last byte sent
//!        Idle ───────────► Sending ─────────────────► Waiting ──Incoming──► Receiving
//!         ▲                   │ error                    │ answer               │ last byte
//!         │                   ▼                          │                      │ written
//!         └────────────── Discarding ◄───────────────────┴──────────────────────┘
//! ```
//!
//! A connection has one request under way; its next one is not read before. The number of
//! connections is bounded, and nothing is buffered beyond one stream window each.
//!
//! In a clone ([`Local::become_clone`]) every request under way fails with `ECANCELED`, except for
//! the `Clone` that made it. Connections that were workers of the parent's VM are *bystanders*:
//! they may ask for tickets of their own, but are no workers here.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmfork_agent_proto::{ForkIdentity, ToGuest, ToHost};

use crate::connection::{Channels, Connection, Outcome, Role, VmRole};
use crate::console::log;
use crate::pipe::Overrun;
use crate::port::Port;

/// Most connections at a time; more wait in the listener's queue.
const CONNECTIONS_MAX: usize = 1024;
const BACKLOG: i32 = 128;
/// How long no connection is accepted after `EMFILE`.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Why a worker failed whose connection closed.
const NO_EXIT: &str = "its process ended without sf_exit";

#[derive(Debug)]
pub(crate) struct Local {
    listener: OwnedFd,
    accept_after: Option<Instant>,
    connections: BTreeMap<u64, Connection>,
    next_id: u64,
    channels: Channels,
    vm: VmRole,
}

/// A clone's answer to the program that made it, ready to be given.
#[derive(Debug)]
pub(crate) struct CloneAnswer {
    vmid: u32,
    workers: u32,
    /// The connection that asked, and the others' sockets.
    asked: Option<(u64, Vec<OwnedFd>)>,
}

impl Local {
    /// Listen at `path`, for everybody: the VM is the boundary, not its users.
    ///
    /// # Errors
    /// Of `bind`.
    pub(crate) fn listen(path: &std::path::Path) -> io::Result<Self> {
        let _ = std::fs::remove_file(path);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(0o666))?;
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(Self {
            listener,
            accept_after: None,
            connections: BTreeMap::new(),
            next_id: 0,
            channels: Channels::new(),
            vm: VmRole::Root,
        })
    }

    pub(crate) fn listener(&self) -> Option<BorrowedFd<'_>> {
        let ready = self.accept_after.is_none() && self.connections.len() < CONNECTIONS_MAX;
        ready.then_some(self.listener.as_fd())
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.accept_after
    }

    pub(crate) fn tick(&mut self, now: Instant) {
        if self.accept_after.is_some_and(|at| now >= at) {
            self.accept_after = None;
        }
    }

    /// The connections to poll. `room`: whether `Sending` ones may be read.
    pub(crate) fn interest(
        &self,
        room: bool,
    ) -> impl Iterator<Item = (u64, BorrowedFd<'_>, rustix::event::PollFlags)> {
        self.connections.iter().map(move |(id, c)| (*id, c.fd(), c.interest(room)))
    }

    pub(crate) fn accept(&mut self, now: Instant) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.listener, flags) {
            Ok(fd) => {
                self.connections.insert(self.next_id, Connection::new(fd, Role::Plain));
                self.next_id += 1;
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                log!("fork.sock: no more connections for a moment: {error}");
                self.accept_after = Some(now + ACCEPT_PAUSE);
            }
        }
    }

    /// A connection is ready: carry it on, and end it if it is over.
    pub(crate) fn serve(&mut self, id: u64, hung: bool, port: &mut Port, scratch: &mut [u8]) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let outcome = connection.serve(hung, self.vm, &mut self.channels, port, scratch);
        self.settle(id, outcome, port);
    }

    fn settle(&mut self, id: u64, outcome: Outcome, port: &mut Port) {
        if outcome == Outcome::Open {
            return;
        }
        let Some(connection) = self.connections.remove(&id) else { return };
        if let Some(channel) = connection.channel() {
            port.send(channel, &ToHost::Abandon);
        }
        if let Role::Worker { vmid, exited: false } = connection.role() {
            self.worker_failed(vmid, NO_EXIT, port);
        }
    }

    fn worker_failed(&mut self, vmid: u32, why: &str, port: &mut Port) {
        if port.is_connected() {
            let message = ToHost::ExitClone { vmid, error: Some(why.to_owned()) };
            port.send(self.channels.next(), &message);
        }
    }

    fn with_channel(&mut self, channel: u32) -> Option<(u64, &mut Connection)> {
        let mut all = self.connections.iter_mut();
        all.find(|(_, c)| c.channel() == Some(channel)).map(|(id, c)| (*id, c))
    }

    /// The daemon's answer on one of our channels. For one that is not open any more it is dropped.
    pub(crate) fn answer(&mut self, channel: u32, message: &ToGuest, port: &mut Port) {
        if let Some((id, connection)) = self.with_channel(channel) {
            let outcome = connection.answer(message, port);
            self.settle(id, outcome, port);
        }
    }

    pub(crate) fn credit(&mut self, channel: u32, bytes: u32) {
        if let Some((_, connection)) = self.with_channel(channel) {
            connection.credit(bytes);
        }
    }

    /// A frame of a message that a program receives.
    ///
    /// # Errors
    /// [`Overrun`].
    pub(crate) fn data(
        &mut self,
        channel: u32,
        bytes: &[u8],
        end: bool,
        port: &mut Port,
    ) -> Result<(), Overrun> {
        if let Some((id, connection)) = self.with_channel(channel) {
            let outcome = connection.data(bytes, end, port)?;
            self.settle(id, outcome, port);
        }
        Ok(())
    }

    /// The daemon has gone: everything under way fails.
    pub(crate) fn disconnected(&mut self) {
        self.connections.retain(|_, connection| connection.fail(libc::ECONNRESET) == Outcome::Open);
    }

    /// Take a clone's place: find who asked for it, make the other workers' sockets, cancel the
    /// rest.
    ///
    /// # Errors
    /// A sentence; `EMFILE` is the likely one. The clone must not be released.
    pub(crate) fn become_clone(&mut self, identity: &ForkIdentity) -> Result<CloneAnswer, String> {
        let (vmid, workers) = (identity.vmid, identity.ticket.as_ref().map_or(1, |t| t.workers));
        if workers == 0 || u64::from(vmid) + u64::from(workers) > u64::from(u32::MAX) {
            return Err(format!("{workers} workers from number {vmid} on"));
        }
        let mut asked = None;
        if let Some(ticket) = &identity.ticket {
            let mut all = self.connections.iter();
            let id = all.find(|(_, c)| c.asks_for_clone(ticket)).map(|(id, _)| *id);
            if let Some(id) = id {
                asked = Some((id, self.worker_sockets(vmid, workers)?));
            }
        }
        let keep = asked.as_ref().map(|(id, _)| *id);
        self.connections.retain(|id, connection| {
            if Some(*id) == keep || connection.is_new_worker(vmid, workers) {
                return true;
            }
            connection.become_bystander();
            connection.fail(libc::ECANCELED) == Outcome::Open
        });
        self.vm = VmRole::Clone { vmid, workers };
        Ok(CloneAnswer { vmid, workers, asked })
    }

    /// Sockets for the workers after the first; our ends become their connections.
    fn worker_sockets(&mut self, vmid: u32, workers: u32) -> Result<Vec<OwnedFd>, String> {
        // They are told from connections of the parent's workers by being `fresh`.
        let mut theirs = Vec::new();
        for worker in 1..workers {
            let (ours, other) = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            )
            .and_then(|(ours, other)| {
                rustix::io::ioctl_fionbio(&ours, true)?;
                Ok((ours, other))
            })
            .map_err(|error| format!("make a socket for worker {}: {error}", vmid + worker))?;
            let role = Role::Worker { vmid: vmid + worker, exited: false };
            self.connections.insert(self.next_id, Connection::new_worker(ours, role));
            self.next_id += 1;
            theirs.push(other);
        }
        Ok(theirs)
    }

    /// Let the program that asked go on; if it has gone, say that its workers failed.
    pub(crate) fn answer_clone(&mut self, answer: CloneAnswer, has_ticket: bool, port: &mut Port) {
        let CloneAnswer { vmid, workers, asked } = answer;
        if let Some((id, sockets)) = asked
            && let Some(connection) = self.connections.get_mut(&id)
        {
            let outcome = connection.answer_clone(vmid, workers, sockets);
            self.settle(id, outcome, port);
        } else if has_ticket {
            for worker in 0..workers {
                self.worker_failed(
                    vmid + worker,
                    "the program that called sf_clone has gone",
                    port,
                );
            }
        }
        for connection in self.connections.values_mut() {
            connection.settle_in();
        }
    }
}
