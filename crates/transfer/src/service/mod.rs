//! Serves pages of this host's images to other hosts.
//!
//! ```text
//!   listener ──► accept thread ──► a thread for each connection:
//!                    │               handshake ─► admit ─► preamble ─► [ request ─► Pages ─► answer ]*
//!                    └── Connections: who is connected, how many, all of them ended by `stop`
//! ```
//!
//! Promises:
//! - A connection serves a member of this cluster that still is one at each request, or ends.
//! - A connection that stands still (in the handshake, within a request, while its answer is taken)
//!   ends after [`ServiceLimits::io`], an idle one after [`ServiceLimits::idle`].
//! - A host that requests what another was sent is redirected there
//!   ([`Spread`](vmfork_policy::transfer::swarm::Spread)).
//! - Background reads take turns ([`ServiceLimits::ahead_max`]); demand reads do not wait for them.
//! - A [`Pages`] that panics costs one answer.
//!
//! Left to others: the images ([`Pages`]), and which hosts are members.

mod connections;
mod serve;
mod spreads;
mod turns;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustls::ServerConfig;
use vmfork_image::{ImageName, PageRange};
use vmfork_policy::transfer::bounds;

use self::connections::Connections;
use self::spreads::Spreads;
use self::turns::Turns;
use crate::counters::ServiceCounters;
use crate::lock;
use crate::proto::{Invitation, Refusal, RefusalKind, Urgency};

/// After a connection could not be accepted (no fds left, say) until the next is tried.
const ACCEPT_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The images of this host, to which others put questions. Asked by many threads at a time.
pub trait Pages: Send + Sync {
    /// Which member of the cluster has this certificate (DER), whose key the client at `address`
    /// has shown to have. Once for each connection.
    ///
    /// # Errors
    /// None.
    fn admit(&self, certificate: &[u8], address: SocketAddr) -> Result<u64, Refusal>;

    /// Whether it is one still. Before each answer.
    fn is_member(&self, member: u64) -> bool;

    /// A member requests these pages. → what that image is, if it is known here. Hosts that request
    /// the same are sent to each other then, and each page leaves its origin about once.
    fn asked(
        &self,
        _member: u64,
        _image: ImageName,
        _range: PageRange,
        _urgency: Urgency,
    ) -> Option<Wanted> {
        None
    }

    /// Whether pages of an image of another host are being fetched here, or have just come.
    fn is_coming(&self, _image: ImageName, _range: PageRange) -> bool {
        false
    }

    /// Whether all of `range` can be read here at once. Then a demanded page of it is sent before
    /// the others are read.
    fn has(&self, _image: ImageName, _range: PageRange) -> bool {
        false
    }

    /// Whether this member is likely to answer, so that others may be sent there.
    fn is_alive(&self, member: u64) -> bool {
        self.is_member(member)
    }

    /// Read `range`, which is 1 to 512 pages, into `bytes`, which is as long. May take a while, but
    /// has a bound.
    ///
    /// # Errors
    /// The pages are not available here.
    fn read(
        &self,
        member: u64,
        image: ImageName,
        range: PageRange,
        urgency: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal>;

    /// Reports which pages of `range`, of an image that this host froze, are its own and need not
    /// be fetched to be read. Each run of them is given to `each`. Only these have sums here.
    ///
    /// # Errors
    /// There is no such image here.
    fn own(
        &self,
        member: u64,
        image: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal>;

    /// Which pages of `range` can be read here at once: each run of them is given to `each`. Pages
    /// beyond the image are not.
    ///
    /// # Errors
    /// There is no such image here.
    fn held(
        &self,
        member: u64,
        image: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal>;

    /// To hear the group to which an image is sent (`Groups::invite`).
    ///
    /// # Errors
    /// It is sent to none.
    fn invite(&self, _member: u64, _image: ImageName) -> Result<Invitation, Refusal> {
        Err(Refusal::new(RefusalKind::BadRequest, "pages are not sent to groups here"))
    }
}

/// An image that several hosts may want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub pages: u64,
    /// This host froze it.
    pub is_own: bool,
}

/// Bounds of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceLimits {
    /// Connections in all, those in their handshake among them: a thread and, while it answers, the
    /// pages' bytes each.
    pub connections_max: usize,
    /// Connections of one member: a few more than a `Peer` makes, since ends are not heard of at
    /// once.
    pub connections_per_member_max: usize,
    /// Connections in their handshake: the most that clients other than members can take up.
    pub handshakes_max: usize,
    /// Background requests, read at a time.
    pub ahead_max: usize,
    /// A connection without a request. More than a `Peer` keeps one for.
    pub idle: Duration,
    /// A handshake; a request, from its first byte; an answer, until it is taken; and waiting for
    /// one's turn.
    pub io: Duration,
    /// A host that did not freeze an image redirects demand reads only while it answers more than
    /// this many.
    pub demand_max: usize,
    /// How long a demand read waits here for pages, if the host that froze the image has said that
    /// they are in flight …
    pub arrival: Duration,
    /// … and those of background reads.
    pub arrival_ahead: Duration,
    /// What [`PageService::stop`] waits for its threads.
    pub stop: Duration,
}

impl Default for ServiceLimits {
    fn default() -> Self {
        Self {
            connections_max: 1024,
            connections_per_member_max: 40,
            handshakes_max: 64,
            ahead_max: 8,
            idle: Duration::from_secs(90),
            io: Duration::from_secs(5),
            demand_max: 4,
            arrival: bounds::ARRIVAL,
            arrival_ahead: bounds::ARRIVAL_AHEAD,
            stop: Duration::from_secs(6),
        }
    }
}

/// Threads that serve pages. Dropping it stops them.
pub struct PageService {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop_bell: OwnedFd,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

/// What all threads of a service have.
struct Shared {
    pages: Arc<dyn Pages>,
    tls: Arc<ServerConfig>,
    limits: ServiceLimits,
    connections: Arc<Connections>,
    turns: Turns,
    spreads: Spreads,
    /// Requests that VMs wait for, being read.
    answering: AtomicUsize,
    counters: ServiceCounters,
}

impl fmt::Debug for PageService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageService").field("address", &self.address).finish_non_exhaustive()
    }
}

impl PageService {
    /// Serve on `listener`. `tls` has to ask clients for a certificate and check it.
    ///
    /// # Errors
    /// No fds or threads left.
    pub fn start(
        listener: TcpListener,
        tls: Arc<ServerConfig>,
        pages: Arc<dyn Pages>,
        limits: ServiceLimits,
    ) -> io::Result<Self> {
        // A connection that ends before it is accepted must not make the thread wait for the next.
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop_bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop_bell.try_clone()?;
        let shared = Arc::new(Shared {
            pages,
            tls,
            limits,
            connections: Arc::new(Connections::new(limits)),
            turns: Turns::new(limits.ahead_max),
            spreads: Spreads::default(),
            answering: AtomicUsize::new(0),
            counters: ServiceCounters::default(),
        });
        let accepting = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("pages-accept".to_owned())
                .spawn(move || accept_until(&stopped, &listener, &shared))?
        };
        tracing::info!(%address, "serving pages");
        Ok(Self { shared, address, stop_bell, accepting: Mutex::new(Some(accepting)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn counters(&self) -> &ServiceCounters {
        &self.shared.counters
    }

    /// How many connections there are now.
    pub fn connections(&self) -> usize {
        self.shared.connections.count()
    }

    /// End the connections of those that are no members any more, and name them no more.
    pub fn keep(&self, is_member: impl Fn(u64) -> bool) {
        self.shared.connections.keep(&is_member);
        self.shared.spreads.keep(is_member);
    }

    /// A member has said which images of others it has open: for others' pages it is not named any
    /// more.
    pub fn heard(&self, member: u64, open: &BTreeSet<ImageName>) {
        self.shared.spreads.heard(member, open);
    }

    /// Accept no more, and end all connections, also those with an answer in progress. → how many
    /// are left after
    /// [`ServiceLimits::stop`]: those whose [`Pages`] has not come back yet. They end when it does.
    pub fn stop(&self) -> usize {
        self.shared.connections.close();
        self.shared.turns.close();
        let _full_is_rung = rustix::io::write(&self.stop_bell, &1u64.to_ne_bytes());
        if let Some(accepting) = lock(&self.accepting).take() {
            let _its_panic_was_told = accepting.join();
        }
        let left = self.shared.connections.wait_ended(self.shared.limits.stop);
        if left > 0 {
            tracing::warn!(left, "connections wait for pages and end when those have been read");
        }
        left
    }
}

impl Drop for PageService {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept_until(stopped: &OwnedFd, listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let mut fds = [PollFd::new(stopped, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return tracing::error!(%error, "no more connections are accepted"),
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        match listener.accept() {
            Ok((tcp, address)) => serve::spawn(tcp, address, shared),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(%error, "accept a connection");
                let mut fds = [PollFd::new(stopped, PollFlags::IN)];
                // Whatever it says is seen above.
                let _ = rustix::event::poll(&mut fds, Some(&ACCEPT_PAUSE));
            }
        }
    }
}
