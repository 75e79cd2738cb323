//! Carries out one read: the decisions are [`machine::Read`]'s, the threads, sockets and sums are
//! here.
//!
//! ```text
//!   PeerSource ──► Read::run ──Ask──────► Peer ────────────┐
//!                     ▲      ──Compare──► Verifier ────────┤
//!                     │      ──Hear─────► PageGroup ───────┤
//!                     │      ──Refresh──► Swarm ───────────┤
//!                     └──────────────────event─────────────┘
//! ```

use std::fmt;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use vmfork_image::{ImageName, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::read::{self as machine, Action, Done, Event, Giver, ReplyError};
use vmfork_policy::transfer::swarm::{Route, Swarm as Known};

use super::peer::{Early, Peer, PeerError};
use super::source::PeerSource;
use super::swarm;
use super::verify::Comparison;
use crate::proto::{RefusalKind, Urgency};

/// No host gave the pages.
#[derive(Debug)]
pub(super) struct FailedRead {
    image: ImageName,
    range: PageRange,
    /// Each host that was asked in the last round, and what it said.
    replies: Vec<String>,
}

impl fmt::Display for FailedRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { image, range, replies } = self;
        match replies.as_slice() {
            [] => write!(f, "no other host has pages {range} of image {image}"),
            replies => {
                write!(f, "pages {range} of image {image} from no host: {}", replies.join("; "))
            }
        }
    }
}

impl std::error::Error for FailedRead {}

/// What the source knows of hosts, for one step of a read.
struct Hosts<'a> {
    source: &'a PeerSource,
    swarm: Option<MutexGuard<'a, swarm::State>>,
}

impl machine::Hosts for Hosts<'_> {
    fn swarm(&mut self) -> Option<&mut Known> {
        self.swarm.as_mut().map(|state| &mut state.known)
    }

    fn named(&mut self) -> Vec<HostId> {
        let swarm = self.swarm.as_deref();
        self.source.holders().in_order(|peer| swarm?.id_of(peer))
    }

    fn named_version(&self) -> u64 {
        self.source.holders().version()
    }

    fn origin(&self) -> Option<HostId> {
        self.source.origin_id()
    }

    fn is_avoided(&self, host: HostId) -> bool {
        let peer = self.swarm.as_deref().and_then(|state| state.peers.get(&host));
        peer.is_none_or(|peer| peer.is_avoided())
    }
}

/// One read.
#[derive(Debug)]
pub(super) struct Read<'a> {
    source: &'a PeerSource,
    machine: machine::Read,
    next: Action,
    /// What hosts said that gave no pages, for people.
    errors: Vec<(HostId, String)>,
}

impl<'a> Read<'a> {
    /// Of pages of one request at most. Hosts that all failed are asked again until `give_up`, by
    /// the source's clock.
    pub(super) fn begin(
        source: &'a PeerSource,
        urgency: Urgency,
        pages: PageRange,
        give_up: Duration,
    ) -> Self {
        let group = source.group().filter(|group| group.is_heard());
        let hear_for = group.map(|group| group.wait(urgency));
        let mut hosts = Self::hosts(source);
        let now = source.now();
        let request = machine::Request {
            image: source.image(),
            pages,
            urgency,
            give_up,
            hear_until: hear_for.map(|wait| now + wait),
        };
        let (machine, next) = machine::Read::begin(request, &mut hosts, now);
        drop(hosts);
        Self { source, machine, next, errors: Vec::new() }
    }

    fn hosts(source: &PeerSource) -> Hosts<'_> {
        Hosts { source, swarm: source.swarm().map(|swarm| swarm.lock()) }
    }

    pub(super) fn pages(&self) -> PageRange {
        self.machine.request().pages
    }

    /// The host that is to be asked next, and how.
    pub(super) fn next_host(&self) -> Option<(HostId, Route)> {
        match self.next {
            Action::Ask { host, route, .. } => Some((host, route)),
            _ => None,
        }
    }

    /// Until it is over. One page may come early.
    ///
    /// # Errors
    /// No host gave the pages.
    pub(super) fn run(
        &mut self,
        bytes: &mut [u8],
        early: Option<&mut Early<'_>>,
    ) -> Result<(), FailedRead> {
        let mut early = early;
        loop {
            let event = match self.next.clone() {
                Action::Done(_) => return Ok(()),
                Action::GiveUp(failed) => return Err(self.failed(&failed)),
                Action::Hear { until } => self.hear(until, bytes),
                Action::Ask { host, route, within, believed } => {
                    self.ask(host, (route, within), believed, bytes, early.as_deref_mut())
                }
                Action::Compare { giver, origin, within } => {
                    self.compare(giver, (origin, within), bytes)
                }
                Action::Refresh { until } => {
                    let left = until.saturating_sub(self.source.now());
                    self.source.swarm().inspect(|swarm| swarm.refresh_within(left));
                    Event::Refreshed
                }
                Action::Wait { until, version } => {
                    let left = until.saturating_sub(self.source.now());
                    match version {
                        Some(version) => self.source.holders().wait_changed(version, left),
                        None => std::thread::park_timeout(left),
                    }
                    Event::Tick
                }
            };
            self.on(event);
        }
    }

    /// What is to be done next follows from `event`.
    fn on(&mut self, event: Event) {
        let mut hosts = Self::hosts(self.source);
        let next = self.machine.on(event, &mut hosts, self.source.now());
        drop(hosts);
        self.next = next.unwrap_or_else(|| self.next.clone());
        if let Action::Done(done) = self.next {
            self.count(done);
        }
    }

    fn count(&self, Done { giver, resourced }: Done) {
        let (counters, pages) = (self.source.counters(), self.pages());
        counters.resourced.add(u64::from(resourced));
        let of_giver = match giver {
            Giver::Group => return counters.group_pages.add(pages.len()),
            Giver::Origin => Some(&counters.origin_pages),
            Giver::Holder | Giver::Believed => Some(&counters.holder_pages),
            Giver::Named => None,
        };
        of_giver.inspect(|counter| counter.add(pages.len()));
        if giver == Giver::Believed {
            counters.unverified_pages.add(pages.len());
        }
        if let Some(group) = self.source.group() {
            group.filled(pages);
        }
    }

    fn hear(&self, until: Duration, bytes: &mut [u8]) -> Event {
        let machine::Request { urgency, pages, .. } = *self.machine.request();
        let left = until.saturating_sub(self.source.now());
        let group = self.source.group();
        match group.is_some_and(|group| group.read(urgency, pages, bytes, left)) {
            true => Event::Heard,
            false => Event::NotHeard,
        }
    }

    fn ask(
        &mut self,
        host: HostId,
        (route, within): (Route, Duration),
        believed: bool,
        bytes: &mut [u8],
        early: Option<&mut Early<'_>>,
    ) -> Event {
        let machine::Request { image, urgency, pages, .. } = *self.machine.request();
        let Some(peer) = self.source.peer(host) else {
            // It has left in this moment.
            return Event::Failed { from: host, why: ReplyError::Lacks };
        };
        let verifier = self.source.verifier();
        let reply = match early {
            Some(Early { page, came }) => {
                let mut came = |bytes: &[u8]| {
                    if believed || verifier.is_right(*page, bytes) {
                        came(bytes);
                    }
                };
                let mut early = Early { page: *page, came: &mut came };
                peer.read_by((route, within), image, pages, urgency, bytes, Some(&mut early))
            }
            None => peer.read_by((route, within), image, pages, urgency, bytes, None),
        };
        match reply {
            Ok(()) => Event::Reply { from: host },
            Err(error) => self.no_pages(host, &peer, route, &error),
        }
    }

    /// A host that was asked gave no pages.
    fn no_pages(
        &mut self,
        host: HostId,
        peer: &Arc<Peer>,
        route: Route,
        error: &PeerError,
    ) -> Event {
        if let Some(at) = error.elsewhere().filter(|_| route == Route::Direct) {
            self.source.counters().redirected.add(1);
            if let Action::Ask { believed: true, .. } = self.next {
                self.source.verifier().told(self.pages(), &at.sums);
            }
            return Event::Elsewhere { from: host, at: HostId(at.host) };
        }
        self.note(host, peer, error);
        Event::Failed { from: host, why: ReplyError::from(error) }
    }

    /// Keep why a host gave nothing that can be used.
    fn note(&mut self, host: HostId, peer: &Arc<Peer>, error: &PeerError) {
        let (image, pages) = (self.source.image(), self.pages());
        tracing::debug!(%image, %pages, host = peer.name(), %error, "no pages");
        self.source.holders().on_failed(peer, error);
        let line = format!("{} ({}): {}", peer.name(), peer.address(), error.to_line());
        self.errors.retain(|(its, _)| *its != host);
        self.errors.push((host, line));
    }

    fn compare(
        &mut self,
        giver: HostId,
        (origin, within): (Option<HostId>, Duration),
        bytes: &[u8],
    ) -> Event {
        let machine::Request { urgency, pages, .. } = *self.machine.request();
        let (peer, origin) =
            (self.source.peer(giver), origin.and_then(|host| self.source.peer(host)));
        let name = peer.as_ref().map_or("a host that has left", |peer| peer.name());
        let origin = (origin.as_deref(), within);
        let comparison = self.source.verifier().verify(urgency, pages, bytes, name, origin);
        let error = match comparison {
            Comparison::Wrong(page) => {
                self.source.counters().forged.add(1);
                Some(PeerError::Forged { page })
            }
            Comparison::Undecided => Some(PeerError::Undecided),
            Comparison::Right | Comparison::Believed => None,
        };
        if let (Some(peer), Some(error)) = (&peer, &error) {
            self.note(giver, peer, error);
        }
        Event::Compared(comparison.verdict())
    }

    /// The host that was asked, with others of its kind, gave the pages or not. → whether the pages
    /// are to be used.
    pub(super) fn replied(&mut self, peer: &Arc<Peer>, reply: Result<&[u8], &PeerError>) -> bool {
        let Some((host, route)) = self.next_host() else { return false };
        let event = match reply {
            Ok(_) => Event::Reply { from: host },
            Err(error) => self.no_pages(host, peer, route, error),
        };
        self.on(event);
        if let (Action::Compare { giver, origin, within }, Ok(bytes)) = (self.next.clone(), reply) {
            let event = self.compare(giver, (origin, within), bytes);
            self.on(event);
        }
        matches!(self.next, Action::Done(_))
    }

    /// The connection ended on which the host was to reply to this request and others.
    pub(super) fn cut_off(&mut self, peer: &Arc<Peer>, error: &PeerError) {
        let Some((host, _)) = self.next_host() else { return };
        self.note(host, peer, error);
        let why = match ReplyError::from(error) {
            ReplyError::Broken => ReplyError::CutOff,
            why => why,
        };
        self.on(Event::Failed { from: host, why });
    }

    fn failed(&self, failed: &machine::FailedRead) -> FailedRead {
        self.source.counters().failures.add(1);
        let machine::FailedRead { image, pages, tried } = failed;
        let was_tried = |host: &HostId| tried.iter().any(|(tried, _)| tried == host);
        let lines = self.errors.iter().filter(|(host, _)| was_tried(host));
        let replies = lines.map(|(_, line)| line.clone()).collect();
        FailedRead { image: *image, range: *pages, replies }
    }
}

impl From<&PeerError> for ReplyError {
    fn from(error: &PeerError) -> Self {
        match error {
            PeerError::Refused(refusal) => match refusal.kind {
                RefusalKind::Busy | RefusalKind::Draining => Self::Busy,
                RefusalKind::NotMember | RefusalKind::BadRequest => Self::Rejected,
                _ => Self::Lacks,
            },
            PeerError::AllInUse { .. } => Self::Busy,
            PeerError::Undecided => Self::Undecided,
            PeerError::Forged { .. } => Self::Forged,
            PeerError::Wrong(_) | PeerError::Misuse { .. } => Self::Rejected,
            PeerError::Connect { .. }
            | PeerError::BackingOff { .. }
            | PeerError::Timeout { .. }
            | PeerError::Lost(_) => Self::Broken,
        }
    }
}
