//! The side that needs the pages: hears the group of one image, gives reads what they wait for and
//! the host's cache all else.
//!
//! ```text
//!   group ──mcast-hear──► Reads ──► read ──────┐
//!                           └──► mcast-check ──┴─ sums of the sender, over TLS ──► used
//! ```
//!
//! A host that hears a group has its key and can send, too. So only pages are used that the sender
//! confirms as its own, to each host alone.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use vmfork_image::{BLOCK_PAGES, ImageName, PageIdx, PageRange};
use vmfork_policy::transfer::read::sums_wait;
use vmfork_transfer::proto::{Invitation, PAGE, RefusalKind, Urgency};
use vmfork_transfer::{Comparison, PageGroup, Peer, PeerError, Verifier};

use super::config::ListenerConfig;
use super::counters::ListenerCounters;
use super::datagram::{
    Asking, Assembler, DATAGRAM_BYTES_MAX, From, HEAD_BYTES, Head, Record, decode_records,
};
use super::reads::{Read, Reads};
use super::seal::{Seal, Window};
use super::socket;
use crate::lock;

/// Between two attempts to hear a group that is not heard, at most.
const REST_MAX: Duration = Duration::from_secs(60);
/// The sender is asked at most this often what it has of background pages …
const CHECKS_MAX: u32 = 4;
/// … with a pause between.
const CHECK_PAUSE: Duration = Duration::from_millis(50);
/// Datagrams that are read before anything else is looked after.
const RECEIVED_MAX: usize = 256;

/// This host's cache of the image.
pub trait HeardPages: Send + Sync {
    /// Pages were heard that were not requested here. Those that are not needed, that are present,
    /// or for which there is no room are left out. → how many were taken.
    fn take(&self, range: PageRange, bytes: &[u8]) -> u64;

    /// Whether any are needed still. Asked twice a second or so.
    fn lacks(&self) -> bool;
}

/// Hears one image's group, from the start until it is dropped or the cache lacks nothing.
pub struct Listener {
    shared: Arc<Shared>,
}

struct Shared {
    image: ImageName,
    pages: u64,
    config: ListenerConfig,
    own: Ipv4Addr,
    peer: Arc<Peer>,
    cache: Arc<dyn HeardPages>,
    verifier: Verifier,
    began: Instant,
    state: Mutex<State>,
    changed: Condvar,
    bell: OwnedFd,
    counters: Arc<ListenerCounters>,
}

struct State {
    reads: Reads,
    stopped: bool,
}

/// Pages that were heard.
type Run = (PageRange, Vec<u8>);

/// An invitation that is in use.
struct Tuned {
    session: u64,
    listener: u16,
    group: UdpSocket,
    own: UdpSocket,
    to: SocketAddrV4,
    seal: Seal,
    own_seal: Seal,
    window: Window,
    /// Of the next datagram to the sender.
    counter: u64,
    since: Duration,
    tell_at: Duration,
    assembler: Assembler,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("image", &self.shared.image).finish_non_exhaustive()
    }
}

impl Listener {
    /// Listen for `image` of `pages` pages, which `peer` sends, at the interface that has the
    /// address `own`. What becomes of them is added to `counters`, which may be those of others,
    /// too.
    ///
    /// # Errors
    /// No fds or threads left.
    pub fn start(
        image: ImageName,
        pages: u64,
        own: Ipv4Addr,
        peer: Arc<Peer>,
        cache: Arc<dyn HeardPages>,
        config: ListenerConfig,
        counters: Arc<ListenerCounters>,
    ) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let shared = Arc::new(Shared {
            image,
            pages,
            config,
            own,
            peer,
            cache,
            verifier: Verifier::new(image),
            began: Instant::now(),
            state: Mutex::new(State { reads: Reads::new(config), stopped: false }),
            changed: Condvar::new(),
            bell: rustix::event::eventfd(0, flags)?,
            counters,
        });
        let (heard, to_check) = channel();
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let its = Arc::clone(&shared);
        // Ends with the other.
        thread("mcast-check").spawn(move || its.check(&to_check))?;
        let its = Arc::clone(&shared);
        thread("mcast-hear").spawn(move || its.listen(&heard))?;
        Ok(Self { shared })
    }

    /// Whether pages are best asked for here, now.
    pub fn is_heard(&self) -> bool {
        let now = self.shared.now();
        lock(&self.shared.state).reads.is_heard(now)
    }

    /// It listens no more: the cache lacked nothing, or the host sends to no groups.
    pub fn is_over(&self) -> bool {
        lock(&self.shared.state).stopped
    }

    pub fn counters(&self) -> &ListenerCounters {
        &self.shared.counters
    }
}

impl PageGroup for Listener {
    fn is_heard(&self) -> bool {
        Self::is_heard(self)
    }

    fn wait(&self, urgency: Urgency) -> Duration {
        let config = &self.shared.config;
        match urgency {
            Urgency::Demand => config.demand_wait,
            Urgency::Ahead => config.ahead_wait,
        }
    }

    fn read(&self, urgency: Urgency, range: PageRange, out: &mut [u8], wait: Duration) -> bool {
        let counters = &*self.shared.counters;
        let (began, demand) = (self.shared.now(), urgency == Urgency::Demand);
        let mut state = lock(&self.shared.state);
        if state.stopped {
            return false;
        }
        let Some(read) = state.reads.begin(range, demand, began) else { return false };
        self.shared.ring();
        drop(state);
        let sums_within = self.shared.sums_wait(urgency);
        self.shared.verifier.prepare(urgency, range, &self.shared.peer, sums_within);
        let mut state = lock(&self.shared.state);
        let end = began + wait;
        loop {
            match state.reads.look(read) {
                Read::Done(bytes) if bytes.len() == out.len() => {
                    drop(state);
                    let is_right = self.shared.is_right(urgency, range, &bytes);
                    if is_right {
                        out.copy_from_slice(&bytes);
                        counters.read_pages.add(range.len());
                    }
                    return is_right;
                }
                Read::Waits => {}
                Read::Done(_) | Read::Failed => break,
            }
            let now = self.shared.now();
            if now >= end || state.stopped {
                break;
            }
            let waited = self.shared.changed.wait_timeout(state, end - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = self.shared.now();
        state.reads.give_up(read, demand, now);
        counters.in_vain.add(1);
        false
    }

    fn filled(&self, range: PageRange) {
        if lock(&self.shared.state).reads.filled(range) {
            self.shared.changed.notify_all();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        lock(&self.shared.state).stopped = true;
        self.shared.ring();
    }
}

impl Shared {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn ring(&self) {
        let _full_is_rung = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn is_stopped(&self) -> bool {
        let stopped = lock(&self.state).stopped;
        // Not under the lock: what it lets go may be this listener's own handle.
        stopped || !self.cache.lacks()
    }

    fn listen(&self, heard: &Sender<Run>) {
        let mut rest = self.config.lost;
        while !self.is_stopped() {
            let tuned = match self.peer.invitation(self.image) {
                Ok(invitation) => self.tune(&invitation),
                Err(PeerError::Refused(refusal)) if refusal.kind == RefusalKind::BadRequest => {
                    tracing::debug!(image = %self.image, %refusal, "no group to hear");
                    break;
                }
                Err(error) => {
                    tracing::debug!(image = %self.image, %error, "no group to hear yet");
                    None
                }
            };
            if tuned.is_some_and(|tuned| self.hear(tuned, heard)) {
                rest = self.config.lost;
                continue;
            }
            // No way for it to here, maybe forever.
            self.rest(rest);
            rest = (rest * 2).min(REST_MAX);
        }
        // The readers that wait ask another host.
        lock(&self.state).stopped = true;
        self.changed.notify_all();
    }

    /// Wait, unless it ends.
    fn rest(&self, wait: Duration) {
        let end = self.now() + wait;
        while self.now() < end && !lock(&self.state).stopped {
            self.wait_for(&[], end - self.now());
        }
    }

    fn tune(&self, invitation: &Invitation) -> Option<Tuned> {
        let SocketAddr::V4(peer) = self.peer.address() else { return None };
        let any_port = SocketAddrV4::new(self.own, 0);
        let sockets = socket::of_group(invitation.group, self.own)
            .and_then(|group| Ok((group, socket::unicast(any_port)?)));
        let (group, own) = sockets
            .inspect_err(|error| {
                tracing::warn!(image = %self.image, group = %invitation.group, %error, "hear a group");
            })
            .ok()?;
        let now = self.now();
        Some(Tuned {
            session: invitation.session,
            listener: invitation.listener,
            group,
            own,
            to: SocketAddrV4::new(*peer.ip(), invitation.requests_port),
            seal: Seal::new(&invitation.group_key, self.image)?,
            own_seal: Seal::new(&invitation.own_key, self.image)?,
            window: Window::new(invitation.counter),
            counter: 0,
            since: now,
            tell_at: now,
            assembler: Assembler::default(),
        })
    }

    /// Until the sender is heard no more, or it ends. → whether it was heard.
    fn hear(&self, mut tuned: Tuned, heard: &Sender<Run>) -> bool {
        let mut buffer = [0; DATAGRAM_BYTES_MAX + 1];
        loop {
            let mut came = 0;
            while came < RECEIVED_MAX
                && let Ok(datagram) = socket::receive(&tuned.group, &mut buffer)
            {
                came += 1;
                self.take(&mut tuned, datagram);
            }
            self.hand_on(heard);
            let now = self.now();
            let (asking, has_failed, wake_at, silence, stopped) = {
                let mut state = lock(&self.state);
                let (asking, has_failed) = state.reads.asking(now);
                state.reads.count(&self.counters);
                let silence = state.reads.silence(tuned.since, now);
                (asking, has_failed, state.reads.wake_at(), silence, state.stopped)
            };
            if has_failed {
                self.changed.notify_all();
            }
            let was_heard = silence < now.saturating_sub(tuned.since);
            if stopped || silence >= self.config.lost {
                return was_heard;
            }
            let is_due = now >= tuned.tell_at;
            if is_due || !asking.is_empty() {
                let every = match was_heard && silence < self.config.heard_within {
                    true => self.config.tell_every,
                    false => self.config.tell_unheard_every,
                };
                tuned.tell_at = now + every;
                if is_due && !self.cache.lacks() {
                    return true;
                }
                self.ask(&mut tuned, asking);
            }
            if came == RECEIVED_MAX {
                continue;
            }
            let until = wake_at.unwrap_or(Duration::MAX).min(tuned.tell_at);
            self.wait_for(&[&tuned.group], until.saturating_sub(now));
        }
    }

    /// Until something comes, or another thread rings the bell.
    fn wait_for(&self, sockets: &[&UdpSocket], wait: Duration) {
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        fds.extend(sockets.iter().map(|socket| PollFd::new(*socket, PollFlags::IN)));
        let wait = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        // The reader of the socket handles an error.
        let _ready = rustix::event::poll(&mut fds, Some(&wait));
        let _none_rang = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    fn ask(&self, tuned: &mut Tuned, asking: Vec<Asking>) {
        let all = if asking.is_empty() { vec![Asking::default()] } else { asking };
        for one in all {
            let from = From::Listener(tuned.listener);
            let head = Head { from, session: tuned.session, counter: tuned.counter };
            tuned.counter += 1;
            if let Some(datagram) = tuned.own_seal.seal(&head, &one.encode())
                && let Err(error) = socket::send(&tuned.own, &datagram, tuned.to)
            {
                tracing::trace!(to = %tuned.to, %error, "ask for pages");
            }
        }
    }

    /// A datagram that has come.
    fn take(&self, tuned: &mut Tuned, datagram: &mut [u8]) {
        let counters = &self.counters;
        let head = datagram.first_chunk::<HEAD_BYTES>().and_then(Head::decode);
        let is_its = |head: &Head| head.session == tuned.session && head.from == From::Sender;
        let opened = head.filter(is_its).and_then(|head| {
            let body = tuned.seal.open(&head, datagram)?;
            Some((head, body))
        });
        let Some((head, body)) = opened else { return counters.forged.add(1) };
        if !tuned.window.accept(head.counter) {
            return counters.replayed.add(1);
        }
        counters.datagrams.add(1);
        let now = self.now();
        lock(&self.state).reads.heard(now);
        let Ok(records) = decode_records(body) else { return counters.wrong.add(1) };
        for record in records {
            match record {
                Record::Listeners(count) => lock(&self.state).reads.listeners(count),
                Record::Zeros(run) => {
                    let run = run.intersect(&PageRange::first(self.pages));
                    run.pages().for_each(|page| self.heard(page, Box::new([0; PAGE]), now));
                }
                Record::Part { page, .. } if page.0 >= self.pages => counters.wrong.add(1),
                Record::Part { page, at, .. }
                    if lock(&self.state).reads.has(page, at == 0, now) => {}
                Record::Part { page, form, total, at, bytes } => {
                    match tuned.assembler.add(page, form, total, at, bytes) {
                        Ok(Some(bytes)) => self.heard(page, bytes, now),
                        Ok(None) => {}
                        Err(_) => counters.wrong.add(1),
                    }
                }
            }
        }
    }

    fn heard(&self, page: PageIdx, bytes: Box<[u8; PAGE]>, now: Duration) {
        if lock(&self.state).reads.page(page, bytes, now) {
            self.changed.notify_all();
        }
    }

    /// To be compared, and for the cache, what no read waits for here. Not in this thread: while it
    /// asks the sender, datagrams would be lost.
    fn hand_on(&self, heard: &Sender<Run>) {
        let now = self.now();
        for run in lock(&self.state).reads.batch(now) {
            // It cannot have ended: it ends last.
            let _ended = heard.send(run);
        }
    }

    fn check(&self, heard: &Receiver<Run>) {
        while let Ok((run, bytes)) = heard.recv() {
            let (mut rest, mut bytes) = (run, bytes.as_slice());
            while !rest.is_empty() && !lock(&self.state).stopped {
                // The sender is asked for whole blocks.
                let part = rest.truncate(BLOCK_PAGES - rest.start().0 % BLOCK_PAGES);
                let len = usize::try_from(part.byte_len()).unwrap_or(usize::MAX);
                let (its, after) = bytes.split_at(len.min(bytes.len()));
                if self.is_right_at_last(part, its) {
                    self.counters.kept_pages.add(self.cache.take(part, its));
                }
                (rest, bytes) = (rest.from_page(part.end()), after);
            }
            lock(&self.state).reads.taken(run);
        }
    }

    /// Whether these are the sender's pages; asks it, so not under the lock.
    fn compare(&self, urgency: Urgency, range: PageRange, bytes: &[u8]) -> Comparison {
        let sender = (Some(&*self.peer), self.sums_wait(urgency));
        self.verifier.verify(urgency, range, bytes, "a member in its group", sender)
    }

    /// How long to wait for the sender's sums: on demand, no longer than for its pages.
    fn sums_wait(&self, urgency: Urgency) -> Duration {
        match urgency {
            Urgency::Demand => self.config.demand_wait,
            Urgency::Ahead => sums_wait(urgency),
        }
    }

    fn is_right(&self, urgency: Urgency, range: PageRange, bytes: &[u8]) -> bool {
        self.is_good(self.compare(urgency, range, bytes), range)
    }

    /// The same for background pages: while hosts wait for pages of the sender, it may have no time
    /// to answer.
    fn is_right_at_last(&self, range: PageRange, bytes: &[u8]) -> bool {
        for _ in 1..CHECKS_MAX {
            match self.compare(Urgency::Ahead, range, bytes) {
                Comparison::Undecided => std::thread::park_timeout(CHECK_PAUSE),
                comparison => return self.is_good(comparison, range),
            }
        }
        self.is_right(Urgency::Ahead, range, bytes)
    }

    fn is_good(&self, comparison: Comparison, range: PageRange) -> bool {
        match comparison {
            Comparison::Right | Comparison::Believed => return true,
            Comparison::Wrong(_) => self.counters.false_pages.add(range.len()),
            Comparison::Undecided => self.counters.undecided_pages.add(range.len()),
        }
        false
    }
}
