//! The disks of one VM, on one unix socket.
//!
//! ```text
//!   listener ──► accept thread ──uid──► connection thread ──name──► the disk, if it is free
//! ```
//!
//! **One writer per disk.** A client that asks for a disk which another connection has ends that
//! connection. QEMU connects again only after it gave up the old one, so the newest one wins.
//! It gets its answer after the old one has carried out or dropped all its requests. So no write of
//! an old connection comes after one of the new. If the old one does not end within
//! [`CLAIM_TIMEOUT`], the new connection is closed, and QEMU tries again.
//!
//! A client may come before the disk that it asks for (`late`): QEMU connects while it waits for
//! what it is to run.
//!
//! Promises: a client of another user gets nothing. A client gets disks by their exact names only.
//! Connections are bounded by [`CONNECTIONS_MAX`]. When the server was dropped, all its threads
//! have ended, and nothing is read or written any more. A request that takes longer than
//! [`END_TIMEOUT`] is the exception. The log says so, and it may still be carried out. Its threads
//! own what they use, and end after it. No new client is served.
//!
//! Left to others: the socket's file; who holds the listening socket while no daemon runs.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::counters::Counter;
use crate::export::DiskExport;
use crate::late::LateExport;
use vmfork_nbd::{Export, Exports, Pulse, ServeError, Target, serve};

/// Most connections of a VM at a time: QEMU has one per disk, and as many while it connects again.
const CONNECTIONS_MAX: usize = 64;
/// How long a connection waits for the one before to end.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a drop of the server waits for requests that are being carried out.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// After a failed accept: other threads may give descriptors back.
const ACCEPT_BACKOFF_MS: u32 = 100;

/// What a server did since it was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerCounts {
    pub connections: u64,
    /// Connections of another user.
    pub strangers: u64,
    /// Connections beyond the bound.
    pub refused: u64,
    /// Connections that were ended for a newer one.
    pub replaced: u64,
    /// Connections that ended by an error.
    pub failed: u64,
}

#[derive(Debug, Default)]
struct Counters {
    connections: Counter,
    strangers: Counter,
    refused: Counter,
    replaced: Counter,
    failed: Counter,
}

/// A disk, and the connection that has it.
#[derive(Debug)]
struct Served {
    export: Arc<LateExport>,
    holder: Mutex<Option<Arc<Pulse>>>,
    freed: Condvar,
    /// A connection has it or had it.
    was_claimed: AtomicBool,
}

impl Served {
    fn new(export: LateExport) -> Self {
        Self {
            export: Arc::new(export),
            holder: Mutex::default(),
            freed: Condvar::new(),
            was_claimed: AtomicBool::new(false),
        }
    }

    fn holder(&self) -> MutexGuard<'_, Option<Arc<Pulse>>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection that has the disk. → the lock, once it is free; `None`: too late.
    fn free(
        &self,
        until: Instant,
        gives_up: impl Fn() -> bool,
        mut stopped: impl FnMut(),
    ) -> Option<MutexGuard<'_, Option<Arc<Pulse>>>> {
        let mut holder = self.holder();
        let mut told: Option<Arc<Pulse>> = None;
        while let Some(old) = &*holder {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || gives_up() {
                return None;
            }
            if !told.as_ref().is_some_and(|told| Arc::ptr_eq(told, old)) {
                old.stop();
                stopped();
                told = Some(Arc::clone(old));
            }
            let waited = self.freed.wait_timeout(holder, left);
            holder = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(holder)
    }
}

#[derive(Debug)]
struct Shared {
    uid: u32,
    disks: Mutex<BTreeMap<String, Arc<Served>>>,
    ends: AtomicBool,
    pulse: Pulse,
    counters: Counters,
}

impl Shared {
    fn disks(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Served>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the disks of one VM until it is dropped. A drop takes at most 5 s.
#[derive(Debug)]
pub struct DiskServer {
    shared: Arc<Shared>,
    end_timeout: Duration,
    thread: Option<JoinHandle<()>>,
}

impl DiskServer {
    /// Serves on a bound and listening unix socket. Only clients of user `uid` are served.
    ///
    /// # Errors
    /// The socket, or there are no more threads or descriptors.
    pub fn start(listener: impl Into<OwnedFd>, uid: u32) -> io::Result<Self> {
        Self::start_with(listener, uid, [])
    }

    /// The same, with disks from the first client on; of two with one name, the last. Clients of
    /// an earlier server may be waiting in the socket's backlog. One that does not find its disk
    /// gives up for a second or more.
    ///
    /// # Errors
    /// As [`DiskServer::start`].
    pub fn start_with(
        listener: impl Into<OwnedFd>,
        uid: u32,
        disks: impl IntoIterator<Item = (String, DiskExport)>,
    ) -> io::Result<Self> {
        let late = |(name, export)| (name, LateExport::new(export));
        Self::start_late(listener.into(), uid, disks.into_iter().map(late))
    }

    /// The same, with disks that come later: what clients are told of them until then.
    ///
    /// # Errors
    /// As [`DiskServer::start`].
    pub fn start_waiting(
        listener: impl Into<OwnedFd>,
        uid: u32,
        disks: impl IntoIterator<Item = Export>,
    ) -> io::Result<Self> {
        let late = |promised: Export| (promised.name.clone(), LateExport::waiting(promised));
        Self::start_late(listener.into(), uid, disks.into_iter().map(late))
    }

    fn start_late(
        listener: OwnedFd,
        uid: u32,
        disks: impl Iterator<Item = (String, LateExport)>,
    ) -> io::Result<Self> {
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        let disks = disks.map(|(name, export)| (name, Arc::new(Served::new(export))));
        let shared = Arc::new(Shared {
            uid,
            disks: Mutex::new(disks.collect()),
            ends: AtomicBool::new(false),
            pulse: Pulse::new()?,
            counters: Counters::default(),
        });
        let theirs = Arc::clone(&shared);
        let named = std::thread::Builder::new().name("disk-accept".to_owned());
        let thread = named.spawn(move || {
            accept(&theirs, listener);
            theirs.pulse.end();
        })?;
        Ok(Self { shared, end_timeout: END_TIMEOUT, thread: Some(thread) })
    }

    /// The disk of that name has come. → whether it was waited for, and is as clients were told.
    pub fn fill(&self, name: &str, export: DiskExport) -> bool {
        let served = self.shared.disks().get(name).cloned();
        served.is_some_and(|served| served.export.fill(export))
    }

    /// Whether all disks have come.
    pub fn is_filled(&self) -> bool {
        self.shared.disks().values().all(|served| served.export.is_filled())
    }

    /// Clients may get this disk by this name from now on. → whether there was none of that name.
    pub fn add(&self, name: &str, export: DiskExport) -> bool {
        match self.shared.disks().entry(name.to_owned()) {
            std::collections::btree_map::Entry::Vacant(free) => {
                free.insert(Arc::new(Served::new(LateExport::new(export))));
                true
            }
            std::collections::btree_map::Entry::Occupied(_) => false,
        }
    }

    /// No client gets the disk any more, and the connection that has it is ended. → whether that
    /// has ended within `timeout`, and nothing is read or written any more.
    pub fn remove(&self, name: &str, timeout: Duration) -> bool {
        let served = self.shared.disks().remove(name);
        served.is_none_or(|served| served.free(Instant::now() + timeout, || false, || {}).is_some())
    }

    /// Whether the server answers: the thread that accepts, and that of each disk's connection.
    /// While it does not, QEMU's `stop` may not answer either.
    pub fn ping(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let served: Vec<_> = self.shared.disks().values().cloned().collect();
        let holders: Vec<_> = served.iter().filter_map(|served| served.holder().clone()).collect();
        !self.thread.as_ref().is_none_or(JoinHandle::is_finished)
            && self.shared.pulse.ping(until)
            && holders.iter().all(|holder| holder.ping(until))
    }

    /// Whether a client has the disk.
    pub fn is_connected(&self, name: &str) -> bool {
        let served = self.shared.disks().get(name).cloned();
        served.is_some_and(|served| served.holder().is_some())
    }

    /// What it did since it was started. A disk's own counts are [`crate::Disk::counts`].
    pub fn counts(&self) -> ServerCounts {
        let counters = &self.shared.counters;
        ServerCounts {
            connections: counters.connections.get(),
            strangers: counters.strangers.get(),
            refused: counters.refused.get(),
            replaced: counters.replaced.get(),
            failed: counters.failed.get(),
        }
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        self.shared.pulse.stop();
        let Some(thread) = self.thread.take() else { return };
        if self.shared.pulse.ends(Instant::now() + self.end_timeout) {
            // It catches panics of targets.
            let _ended = thread.join();
        } else {
            // A page may come from a host that hangs. The threads own all that they use.
            let waited_s = self.end_timeout.as_secs();
            tracing::warn!(waited_s, "a request of a disk still waits; its threads end after it");
        }
    }
}

/// A connection's thread.
struct Connection {
    pulse: Arc<Pulse>,
    thread: JoinHandle<()>,
}

fn accept(shared: &Arc<Shared>, listener: UnixListener) {
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        match next(shared, &listener) {
            Ok(Some(socket)) => {
                connections.retain(|connection| !connection.thread.is_finished());
                if connections.len() < CONNECTIONS_MAX {
                    connections.extend(begin(shared, socket));
                } else {
                    shared.counters.refused.add(1);
                }
            }
            Ok(None) => {}
            Err(Ended) => break,
        }
    }
    // Before threads that may take long: no client waits for a server that has ended.
    drop(listener);
    for connection in &connections {
        connection.pulse.stop();
    }
    let disks = std::mem::take(&mut *shared.disks());
    for served in disks.into_values() {
        // Who waits for a disk looks whether the server ends.
        let _holder = served.holder();
        served.freed.notify_all();
    }
    for connection in connections {
        let _ended = connection.thread.join();
    }
}

/// The server ends.
struct Ended;

/// Wait for the next client of the right user. `None`: there is none, try again.
fn next(shared: &Shared, listener: &UnixListener) -> Result<Option<UnixStream>, Ended> {
    let mut fds = [
        PollFd::from_borrowed_fd(shared.pulse.fd(), PollFlags::IN),
        PollFd::new(listener, PollFlags::IN),
    ];
    let polled = poll(&mut fds, None);
    if polled.is_ok() && !fds[0].revents().is_empty() && shared.pulse.answer() {
        return Err(Ended);
    }
    if polled.is_err() || fds[1].revents().is_empty() {
        return Ok(None);
    }
    match listener.accept() {
        Ok((socket, _)) => {
            shared.counters.connections.add(1);
            if is_of(&socket, shared.uid) {
                return Ok(Some(socket));
            }
            shared.counters.strangers.add(1);
            Ok(None)
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => {
            tracing::warn!(%error, "a disk's client can't be accepted");
            let mut bell = [PollFd::from_borrowed_fd(shared.pulse.fd(), PollFlags::IN)];
            let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(ACCEPT_BACKOFF_MS) * 1_000_000 };
            let _rung = poll(&mut bell, Some(&wait));
            Ok(None)
        }
    }
}

fn is_of(socket: &UnixStream, uid: u32) -> bool {
    match rustix::net::sockopt::socket_peercred(socket) {
        Ok(peer) if peer.uid.as_raw() == uid => true,
        Ok(peer) => {
            tracing::warn!(wanted = uid, found = peer.uid.as_raw(), "a stranger asks for a disk");
            false
        }
        Err(error) => {
            tracing::warn!(%error, "a disk's client has no user");
            false
        }
    }
}

fn begin(shared: &Arc<Shared>, socket: UnixStream) -> Option<Connection> {
    let pulse = Arc::new(Pulse::new().ok()?);
    let (theirs, shared) = (Arc::clone(&pulse), Arc::clone(shared));
    let named = std::thread::Builder::new().name("disk-client".to_owned());
    let spawned = named.spawn(move || {
        let client = Client { shared, pulse: theirs, has: Mutex::default() };
        match serve(&socket, &client, &client.pulse) {
            Ok(()) => {}
            // The end of a QEMU that is killed is none of its wishes, and no news.
            Err(ServeError::Socket(error)) => tracing::debug!(%error, "a disk's client went"),
            Err(error) => {
                client.shared.counters.failed.add(1);
                tracing::warn!(%error, "a disk's connection ended");
            }
        }
        client.release();
        client.pulse.end();
    });
    let thread =
        spawned.inspect_err(|error| tracing::warn!(%error, "no thread for a disk")).ok()?;
    Some(Connection { pulse, thread })
}

/// A client, and the disk that it has.
#[derive(Debug)]
struct Client {
    shared: Arc<Shared>,
    pulse: Arc<Pulse>,
    has: Mutex<Option<Arc<Served>>>,
}

impl Client {
    fn has(&self) -> MutexGuard<'_, Option<Arc<Served>>> {
        self.has.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(&self) {
        if let Some(served) = self.has().take() {
            *served.holder() = None;
            served.freed.notify_all();
        }
    }
}

impl Exports for Client {
    fn list(&self) -> Vec<Export> {
        let disks = self.shared.disks();
        disks.iter().map(|(name, served)| served.export.described(name)).collect()
    }

    fn claim(&self, export: &Export) -> Option<Arc<dyn Target>> {
        let served = self.shared.disks().get(&export.name).cloned()?;
        let ends = || self.shared.ends.load(Ordering::Acquire);
        let stopped = || self.shared.counters.replaced.add(1);
        let mut holder = served.free(Instant::now() + CLAIM_TIMEOUT, ends, stopped)?;
        *holder = Some(Arc::clone(&self.pulse));
        drop(holder);
        if served.was_claimed.swap(true, Ordering::Relaxed) {
            served.export.reconnected();
        }
        let target = Arc::clone(&served.export);
        *self.has() = Some(served);
        Some(target)
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
