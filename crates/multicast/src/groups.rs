//! The side that has the pages: for each image that hosts listen for, a group, a queue, and a
//! thread that sends.
//!
//! ```text
//!   invite (over TLS) ──► Session: group, keys, who listens
//!   requests, by UDP ──► the thread of all ──► Session ──► its thread: Sender::next ─► Pages ─► cut, sealed, sent to the group
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use vmfork_image::{ImageName, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::multicast::{Sender, SenderConfig};
use vmfork_transfer::Pages;
use vmfork_transfer::proto::{Invitation, Key, Refusal, RefusalKind, Urgency, local_group};

use super::counters::GroupCounters;
use super::datagram::{
    Asking, Cutter, DATAGRAM_BYTES_MAX, From, HEAD_BYTES, Head, PARTS_MAX, Record,
};
use super::seal::{Seal, Window, random, random_key};
use super::socket;
use crate::lock;

/// Longer than policy would have it: a host that has little processor time asks again for what it
/// has received and not read yet.
const LOCKSTEP: Duration = Duration::from_millis(25);

/// Each has a number of its own.
const LISTENERS_MAX: usize = 1 << u16::BITS;

/// Bounds and times of [`Groups`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupsConfig {
    pub sender: SenderConfig,
    /// Images that are sent at a time, each with a thread.
    pub groups_max: usize,
    /// How often all listeners receive their number. The message also shows them that they hear the
    /// group.
    pub tell_every: Duration,
    /// A listener that is silent for this time listens no more.
    pub silent: Duration,
    /// A group without listeners ends after this long.
    pub alone: Duration,
}

impl Default for GroupsConfig {
    fn default() -> Self {
        Self {
            sender: SenderConfig { lockstep: LOCKSTEP, ..SenderConfig::default() },
            groups_max: 64,
            tell_every: Duration::from_millis(500),
            silent: Duration::from_secs(2),
            alone: Duration::from_secs(10),
        }
    }
}

/// The groups of one host, one for each image that it sends.
#[derive(Debug)]
pub struct Groups {
    shared: Arc<Shared>,
    stop_bell: OwnedFd,
    receiving: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    config: GroupsConfig,
    pages: Arc<dyn Pages>,
    socket: UdpSocket,
    address: SocketAddrV4,
    began: Instant,
    sessions: Mutex<HashMap<u64, Arc<Session>>>,
    stopped: AtomicBool,
    counters: Arc<GroupCounters>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("address", &self.address).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Session {
    image: ImageName,
    number: u64,
    group: SocketAddrV4,
    key: Key,
    seal: Seal,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    sender: Sender,
    /// One for each member at most. A silent listener stays: it may hear the group all the same,
    /// and then asks for no other invitation.
    listeners: BTreeMap<u16, Listener>,
    /// Members that have the key, whether they listen or not.
    invited: BTreeSet<u64>,
    next_listener: u16,
    /// Of the next datagram.
    counter: u64,
    tell_at: Duration,
    /// When a listener was heard of last.
    heard_at: Duration,
    ended: bool,
}

#[derive(Debug)]
struct Listener {
    member: u64,
    seal: Seal,
    window: Window,
    heard_at: Duration,
    /// It has said that it listens: before, no message reaches it for certain.
    is_there: bool,
}

/// What a session's thread does next.
enum Step {
    Send(PageRange, u64),
    Tell(u64, u64),
    End,
}

impl Groups {
    /// Send from `address`, and take requests there; a port of 0 is any. `pages` are asked for as
    /// if by this host itself.
    ///
    /// # Errors
    /// The port is taken, or no fds or threads are left.
    pub fn start(
        address: SocketAddrV4,
        config: GroupsConfig,
        pages: Arc<dyn Pages>,
    ) -> io::Result<Self> {
        let socket = socket::unicast(address)?;
        let port = socket.local_addr()?.port();
        let stop_bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop_bell.try_clone()?;
        let shared = Arc::new(Shared {
            config,
            pages,
            socket,
            address: SocketAddrV4::new(*address.ip(), port),
            began: Instant::now(),
            sessions: Mutex::default(),
            stopped: AtomicBool::new(false),
            counters: Arc::default(),
        });
        let receiving = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("mcast-asked".to_owned())
                .spawn(move || shared.receive_until(&stopped))?
        };
        Ok(Self { shared, stop_bell, receiving: Mutex::new(Some(receiving)) })
    }

    /// Where requests go.
    pub fn address(&self) -> SocketAddrV4 {
        self.shared.address
    }

    pub fn counters(&self) -> &Arc<GroupCounters> {
        &self.shared.counters
    }

    /// A member wants to listen for an image of `pages` pages. → where, and its keys.
    ///
    /// # Errors
    /// Too many groups, or the host lacks threads or random numbers.
    pub fn invite(&self, member: u64, image: ImageName, pages: u64) -> Result<Invitation, Refusal> {
        let failed = |text: &str| Refusal::new(RefusalKind::Failed, text);
        let session = self.shared.session_of(image, pages)?;
        let key = random_key().ok_or_else(|| failed("no random numbers for a key"))?;
        let seal = Seal::new(&key, image).ok_or_else(|| failed("no key of that length"))?;
        let now = self.shared.now();
        let mut state = lock(&session.state);
        if state.ended {
            return Err(Refusal::new(RefusalKind::Busy, "the group has just ended"));
        }
        // It asks again since it was not heard any more, or has restarted.
        state.listeners.retain(|_, listener| listener.member != member);
        let mut number = state.next_listener;
        while state.listeners.contains_key(&number) && state.listeners.len() < LISTENERS_MAX {
            number = number.wrapping_add(1);
        }
        state.next_listener = number.wrapping_add(1);
        let window = Window::new(0);
        let listener = Listener { member, seal, window, heard_at: now, is_there: false };
        state.listeners.insert(number, listener);
        state.invited.insert(member);
        state.heard_at = now;
        Ok(Invitation {
            group: session.group,
            requests_port: self.shared.address.port(),
            session: session.number,
            listener: number,
            counter: state.counter,
            group_key: session.key.clone(),
            own_key: key,
        })
    }

    /// A group ends if a host that is no member any more has its key: its remaining listeners are
    /// invited to another.
    pub fn keep(&self, is_member: impl Fn(u64) -> bool) {
        for session in self.shared.sessions() {
            let mut state = lock(&session.state);
            if !state.invited.iter().all(|member| is_member(*member)) {
                state.ended = true;
                session.changed.notify_all();
            }
        }
    }

    /// Send no more, and take no requests. All threads end but one that waits for [`Pages`].
    pub fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        for session in self.shared.sessions() {
            lock(&session.state).ended = true;
            session.changed.notify_all();
        }
        let _full_is_rung = rustix::io::write(&self.stop_bell, &1u64.to_ne_bytes());
        if let Some(receiving) = lock(&self.receiving).take() {
            let _its_panic_was_told = receiving.join();
        }
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn sessions(&self) -> Vec<Arc<Session>> {
        lock(&self.sessions).values().map(Arc::clone).collect()
    }

    fn session_of(self: &Arc<Self>, image: ImageName, pages: u64) -> Result<Arc<Session>, Refusal> {
        let mut sessions = lock(&self.sessions);
        if self.stopped.load(Ordering::Relaxed) {
            return Err(Refusal::new(RefusalKind::Draining, "nothing is sent to groups any more"));
        }
        let is_its =
            |session: &&Arc<Session>| session.image == image && !lock(&session.state).ended;
        if let Some(session) = sessions.values().find(is_its) {
            return Ok(Arc::clone(session));
        }
        if sessions.len() >= self.config.groups_max {
            let text = format!("{} images are sent to groups already", sessions.len());
            return Err(Refusal::new(RefusalKind::Busy, text));
        }
        let new = self.new_session(image, pages);
        let session =
            Arc::new(new.ok_or_else(|| {
                Refusal::new(RefusalKind::Failed, "no random numbers for a group")
            })?);
        let (shared, its) = (Arc::clone(self), Arc::clone(&session));
        let run = move || {
            let ran = std::panic::catch_unwind(AssertUnwindSafe(|| shared.send_until_ended(&its)));
            if ran.is_err() {
                tracing::error!(image = %its.image, "sending an image to its group panicked");
            }
            lock(&its.state).ended = true;
            lock(&shared.sessions).remove(&its.number);
        };
        let thread = std::thread::Builder::new().name("mcast-send".to_owned()).spawn(run);
        thread.map_err(|_| Refusal::new(RefusalKind::Busy, "no thread for a group"))?;
        sessions.insert(session.number, Arc::clone(&session));
        tracing::debug!(%image, group = %session.group, "a group for an image");
        Ok(session)
    }

    fn new_session(&self, image: ImageName, pages: u64) -> Option<Session> {
        let (number, key) = (u64::from_le_bytes(random()?), random_key()?);
        let group = local_group(u16::from_le_bytes(random()?));
        let now = self.now();
        let state = State {
            sender: Sender::new(pages, self.config.sender),
            listeners: BTreeMap::new(),
            invited: BTreeSet::new(),
            next_listener: 1,
            counter: 0,
            tell_at: Duration::ZERO,
            heard_at: now,
            ended: false,
        };
        Some(Session {
            image,
            number,
            group: SocketAddrV4::new(group, self.address.port()),
            seal: Seal::new(&key, image)?,
            key,
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    fn receive_until(&self, stopped: &OwnedFd) {
        let mut buffer = [0; DATAGRAM_BYTES_MAX + 1];
        loop {
            let mut fds =
                [PollFd::new(stopped, PollFlags::IN), PollFd::new(&self.socket, PollFlags::IN)];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "groups are not asked any more"),
            }
            if !fds[0].revents().is_empty() {
                return;
            }
            // One that could not be sent shows here, too: receivers ask again.
            while let Ok(datagram) = socket::receive(&self.socket, &mut buffer) {
                if self.take(datagram).is_none() {
                    self.counters.dropped.add(1);
                }
            }
        }
    }

    /// A datagram that has come. `None`: it is from no listener.
    fn take(&self, datagram: &mut [u8]) -> Option<()> {
        let head = Head::decode(datagram.first_chunk::<HEAD_BYTES>()?)?;
        let From::Listener(number) = head.from else { return None };
        let session = lock(&self.sessions).get(&head.session).map(Arc::clone)?;
        let now = self.now();
        let mut state = lock(&session.state);
        let State { sender, listeners, tell_at, heard_at, .. } = &mut *state;
        let listener = listeners.get_mut(&number)?;
        let asking = Asking::decode(listener.seal.open(&head, datagram)?).ok()?;
        listener.window.accept(head.counter).then_some(())?;
        *heard_at = now;
        listener.heard_at = now;
        if !std::mem::replace(&mut listener.is_there, true) {
            *tell_at = now;
        }
        let host = HostId(listener.member);
        let before = sender.counts();
        for request in &asking.requests {
            sender.request(host, *request, now);
        }
        if let Some(received) = asking.received {
            sender.feedback(host, received, now);
        }
        self.counters.add(sender.counts().since(before));
        let member = listener.member;
        drop(state);
        session.changed.notify_all();
        let demanded = asking.requests.iter().filter(|request| request.demand && !request.repeat);
        for request in demanded {
            let _pages = self.pages.asked(member, session.image, request.pages, Urgency::Demand);
        }
        Some(())
    }

    fn send_until_ended(&self, session: &Session) {
        let (mut cutter, mut bytes) = (Cutter::default(), Vec::new());
        loop {
            match self.next_step(session) {
                Step::End => return,
                Step::Tell(listeners, counter) => {
                    let mut body = Vec::new();
                    Record::Listeners(listeners).encode_into(&mut body);
                    self.send(session, counter, &[body]);
                }
                Step::Send(run, counter) => {
                    bytes.resize(usize::try_from(run.byte_len()).unwrap_or(0), 0);
                    if self.read(session.image, run, &mut bytes) {
                        let bodies = cutter.cut(run, &bytes);
                        debug_assert!(bodies.len() as u64 <= run.len() * PARTS_MAX);
                        self.counters.pages.add(run.len());
                        self.send(session, counter, &bodies);
                    }
                }
            }
        }
    }

    /// Wait until there is something to do. Counters are given out here: as many as the step may
    /// need.
    fn next_step(&self, session: &Session) -> Step {
        let config = &self.config;
        let mut state = lock(&session.state);
        loop {
            let now = self.now();
            if state.ended || now.saturating_sub(state.heard_at) >= config.alone {
                state.ended = true;
                return Step::End;
            }
            if state.tell_at <= now {
                state.tell_at = now + config.tell_every;
                let hears =
                    |it: &&Listener| it.is_there && now.saturating_sub(it.heard_at) < config.silent;
                let count = state.listeners.values().filter(hears).count() as u64;
                let counter = state.counter;
                state.counter += 1;
                return Step::Tell(count, counter);
            }
            let before = state.sender.counts();
            if let Some(run) = state.sender.next(now) {
                self.counters.add(state.sender.counts().since(before));
                let counter = state.counter;
                state.counter += run.len() * PARTS_MAX;
                return Step::Send(run, counter);
            }
            let wake_at = state.sender.wake_at().unwrap_or(Duration::MAX).min(state.tell_at);
            let wait = wake_at.saturating_sub(now);
            let waited = session.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn read(&self, image: ImageName, run: PageRange, bytes: &mut [u8]) -> bool {
        let read = AssertUnwindSafe(|| {
            // That they are demanded was reported when they were requested.
            self.pages.read(0, image, run, Urgency::Ahead, bytes)
        });
        match std::panic::catch_unwind(read) {
            Ok(Ok(())) => true,
            Ok(Err(refusal)) => {
                tracing::debug!(%image, %run, %refusal, "pages that were to be sent to all");
                self.counters.lacking.add(run.len());
                false
            }
            Err(_panic) => {
                tracing::error!(%image, %run, "reading panicked");
                self.counters.lacking.add(run.len());
                false
            }
        }
    }

    fn send(&self, session: &Session, first: u64, bodies: &[Vec<u8>]) {
        for (counter, body) in (first..).zip(bodies) {
            let head = Head { from: From::Sender, session: session.number, counter };
            let Some(datagram) = session.seal.seal(&head, body) else { continue };
            match socket::send(&self.socket, &datagram, session.group) {
                Ok(()) => {
                    self.counters.datagrams.add(1);
                    self.counters.bytes.add(datagram.len() as u64);
                }
                // Lost, as others are in the network: receivers ask again.
                Err(error) => {
                    self.counters.unsent.add(1);
                    tracing::trace!(group = %session.group, %error, "send to a group");
                }
            }
        }
    }
}
