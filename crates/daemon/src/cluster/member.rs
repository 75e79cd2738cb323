//! This host as a member of a cluster: who the others are, how to call them, what is lent to them and what they hold.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_cluster::allocate::{Allocator, HostView, Tally};
use vmfork_cluster::{
    Entry, Fingerprint, Heartbeat, HostId, HostState, Liveness, Membership, Merged, Now, Room,
    Roster,
};
use vmfork_image::{ImageName, PageRange, PageSource};
use vmfork_transfer::{
    Invitation, Pages, PeerConfig, PeerLimits, Refusal, RefusalKind, SourceCounters, Urgency,
    Wanted,
};

use super::arrivals::Arrivals;
use super::client::Peer;
use super::finding::There;
use super::guest_images::GuestImages;
use super::images::{Images, NotRead};
use super::jobs::{JobNews, Jobs};
use super::multicast::Ears;
use super::orders::Orders;
use super::quotas::Keeper;
use super::receive::Engines;
use super::sources::{PagePeer, Sources};
use super::tickets::{Inbox, Leases, Lines};
use crate::config::PageTransfer;
use crate::core::Core;
use crate::error::chain;

/// How long another host may take to say something that it need not work for.
pub(super) const WORD_WAIT: Duration = Duration::from_secs(5);

/// What goes with a heartbeat besides who is a member.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Beat {
    pub(super) heartbeat: Heartbeat,
    /// The images of other hosts that are open at the sender.
    pub(super) holds: Vec<(u64, u64)>,
    /// The snapshots of other hosts that VMs of the sender came of.
    pub(super) came_of: Vec<(u64, u64)>,
    /// What users have at the sender.
    pub(super) quotas: Option<Tally>,
    pub(super) jobs: JobNews,
}

impl Beat {
    pub(super) fn held(&self) -> BTreeSet<ImageName> {
        names(&self.holds)
    }
}

/// One life of the daemon of a member.
pub(crate) struct Member {
    pub(super) id: HostId,
    pub(super) roster: Roster,
    began: Instant,
    /// For calls of others' REST API.
    api: Arc<ClientConfig>,
    /// For their page services.
    pages: Arc<ClientConfig>,
    pub(super) images: Arc<Images>,
    pub(super) engines: Engines,
    sources: Sources,
    pub(super) arrivals: Arc<Arrivals>,
    /// To the hosts of tickets' parents and clones.
    pub(super) lines: Lines,
    pub(super) inbox: Inbox,
    /// What is set aside for other hosts' tickets.
    pub(super) leases: Leases,
    orders: Mutex<Orders>,
    epoch: u64,
    orders_given: AtomicU64,
    pub(super) guest_images: GuestImages,
    /// Of what users have on all hosts.
    pub(super) keeper: Keeper,
    /// Says which hosts clones may have.
    pub(super) allocator: Arc<dyn Allocator>,
    pub(super) jobs: Jobs,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    page_peers: HashMap<HostId, Arc<vmfork_transfer::Peer>>,
    /// Where VMs of other hosts were seen last, by id: of a name another host may have one, too.
    seen: HashMap<String, HostId>,
    /// The images of others that each has open, by its last word, which told of its room, too.
    open: HashMap<HostId, BTreeSet<ImageName>>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").field("id", &self.id).finish_non_exhaustive()
    }
}

/// VMs that are remembered to be elsewhere.
const SEEN_MAX: usize = 65_536;

impl Member {
    pub(super) fn new(
        id: HostId,
        epoch: u32,
        roster: Roster,
        api: Arc<ClientConfig>,
        pages: Arc<ClientConfig>,
        allocator: Arc<dyn Allocator>,
        (form, address): (PageTransfer, IpAddr),
    ) -> Self {
        let images = Arc::new(Images::new(id.get(), epoch));
        let arrivals = Arc::new(Arrivals::default());
        let ears = Ears::new(form, address, &images, &arrivals);
        Self {
            id,
            roster,
            began: Instant::now(),
            api,
            pages,
            images,
            engines: Engines::default(),
            sources: Sources::new(id, ears),
            arrivals,
            lines: Lines::default(),
            inbox: Inbox::default(),
            leases: Leases::default(),
            orders: Mutex::default(),
            epoch: epoch.into(),
            orders_given: AtomicU64::new(0),
            guest_images: GuestImages::default(),
            keeper: Keeper::default(),
            allocator,
            jobs: Jobs::default(),
            inner: Mutex::default(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Now {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        Now { monotonic: self.began.elapsed(), unix_s: unix.map_or(0, |unix| unix.as_secs()) }
    }

    /// This host's name.
    pub(crate) fn name(&self) -> String {
        self.roster.read(|book| book.own_entry().name.clone())
    }

    /// A host, to be called.
    pub(super) fn peer(&self, entry: &Entry) -> Peer {
        Peer {
            name: entry.name.clone(),
            address: entry.address.clone(),
            server_name: entry.id.server_name(),
            tls: Arc::clone(&self.api),
        }
    }

    /// A member by id.
    ///
    /// # Errors
    /// It is none any more; `message` says what was to be done.
    pub(super) fn peer_of(&self, id: HostId, message: &str) -> Result<Peer, ErrorBody> {
        let entry = self.roster.read(|book| book.member(id).cloned());
        entry.map(|entry| self.peer(&entry)).ok_or_else(|| {
            ErrorBody::new(ErrorCode::NotFound, message)
                .cause(format!("host {id} is no member of the cluster any more"))
        })
    }

    /// A member's page service. Its connections are kept for all who ask it.
    fn page_peer(&self, id: HostId) -> Option<Arc<vmfork_transfer::Peer>> {
        let entry = self.roster.read(|book| book.member(id).cloned())?;
        let address = pages_address(&entry.address)?;
        let mut inner = self.inner();
        if let Some(peer) = inner.page_peers.get(&id).filter(|peer| peer.address() == address) {
            return Some(Arc::clone(peer));
        }
        let config = PeerConfig {
            name: entry.name,
            address,
            server_name: id.server_name(),
            tls: Arc::clone(&self.pages),
            compress: true,
        };
        let peer = Arc::new(vmfork_transfer::Peer::new(config, PeerLimits::default()));
        inner.page_peers.insert(id, Arc::clone(&peer));
        Some(peer)
    }

    /// The page services that have been asked for pages.
    pub(super) fn asked_peers(&self) -> Vec<Arc<vmfork_transfer::Peer>> {
        self.inner().page_peers.values().map(Arc::clone).collect()
    }

    /// The page services of the other members that are there, as far as is known.
    fn page_peers(&self) -> Vec<PagePeer> {
        let There { alive, suspect, gone: _ } = self.there();
        let others = alive.into_iter().chain(suspect);
        others.filter_map(|entry| Some((entry.id, self.page_peer(entry.id)?))).collect()
    }

    /// Where the pages of an image come from, of which `first` told: from whichever member has them.
    pub(super) fn source(
        &self,
        image: ImageName,
        pages: u64,
        first: HostId,
    ) -> Arc<dyn PageSource> {
        self.sources.source(image, pages, first, &self.page_peers())
    }

    /// What became of the pages that this host asked others for.
    pub(super) fn sourced(&self) -> &SourceCounters {
        self.sources.counters()
    }

    pub(super) fn ears(&self) -> &Ears {
        self.sources.ears()
    }

    /// Pages come from members alone, and from new ones, too.
    pub(super) fn tend_sources(&self) {
        self.sources.tend(|| self.page_peers());
    }

    /// Remember where a VM is.
    pub(super) fn saw(&self, id: &str, host: HostId) {
        let mut inner = self.inner();
        if inner.seen.len() >= SEEN_MAX {
            inner.seen.clear();
        }
        inner.seen.insert(id.to_owned(), host);
    }

    /// Where a VM was seen last, by id.
    pub(super) fn seen(&self, id: &str) -> Option<Entry> {
        let host = self.inner().seen.get(id).copied();
        host.and_then(|host| self.roster.read(|book| book.member(host).cloned()))
    }

    /// A number for the next order to another host: one that no life of this daemon has given before.
    pub(crate) fn next_order(&self) -> u64 {
        self.epoch << 32 | self.orders_given.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn id(&self) -> HostId {
        self.id
    }

    /// All hosts as they were last heard of, this one too, for who places clones.
    pub(crate) fn views(&self, core: &Core) -> Vec<HostView> {
        let (now, own) = (self.now(), core.admission.room());
        self.roster.read(|book| {
            let view = |entry: &Entry| {
                let is_here = entry.id == self.id;
                let closed = match (entry.state, book.liveness(entry.id, now)) {
                    (HostState::Active, _) if is_here => None,
                    (HostState::Active, Liveness::Alive) => None,
                    (HostState::Active, _) => Some("it is silent"),
                    _ => Some("it takes no more clones"),
                };
                let free = if is_here { Some(own) } else { book.room(entry.id) };
                let (id, name) = (entry.id, entry.name.clone());
                let free = free.unwrap_or_default();
                HostView { id, name, closed, free, once_bytes: 0, has_family: false }
            };
            book.members().map(view).collect()
        })
    }

    /// Members by name or id.
    ///
    /// # Errors
    /// One of them is none.
    pub(crate) fn find_all(
        &self,
        hosts: &[String],
        message: &str,
    ) -> Result<Vec<HostId>, ErrorBody> {
        let find = |host: &String| {
            let found = self.roster.read(|book| book.find(host).map(|entry| entry.id));
            found.map_err(|error| ErrorBody {
                code: ErrorCode::NotFound,
                message: message.to_owned(),
                cause: Some(chain(&error)),
                remedy: error.remedy().map(ToOwned::to_owned),
            })
        };
        hosts.iter().map(find).collect()
    }

    /// What to tell a member now.
    pub(super) fn beat_to(&self, peer: HostId, room: Room, quotas: Option<Tally>) -> Beat {
        let heartbeat = self.roster.read(|book| book.heartbeat_to(peer, Some(room)));
        self.beat(heartbeat, quotas)
    }

    /// A heartbeat, and what goes with it.
    pub(super) fn beat(&self, heartbeat: Heartbeat, quotas: Option<Tally>) -> Beat {
        let pairs = |names: BTreeSet<ImageName>| {
            names.into_iter().map(|name| (name.host, name.image)).collect()
        };
        let (holds, came_of) = (pairs(self.images.held()), pairs(self.arrivals.names()));
        Beat { heartbeat, holds, came_of, quotas, jobs: self.jobs.news() }
    }

    /// A member has said something of its own accord. → what to answer, and what that changed.
    ///
    /// # Errors
    /// It is none, or what it says can't be.
    pub(super) fn on_beat(
        &self,
        from: HostId,
        beat: &Beat,
        room: Room,
        quotas: Option<Tally>,
    ) -> Result<(Beat, Merged), ErrorBody> {
        let now = self.now();
        let (answer, merged) = self
            .roster
            .change(|book| book.on_heartbeat(from, &beat.heartbeat, Some(room), now))
            .map_err(|error| {
                ErrorBody::new(ErrorCode::BadRequest, "take a heartbeat").cause(chain(&error))
            })?;
        self.heard(from, beat);
        Ok((self.beat(answer, quotas), merged))
    }

    /// A member has answered.
    ///
    /// # Errors
    /// As [`Member::on_beat`].
    pub(super) fn on_answer(&self, from: HostId, beat: &Beat) -> Result<Merged, ErrorBody> {
        let now = self.now();
        let merged = self.roster.change(|book| book.on_answer(from, &beat.heartbeat, now));
        let merged = merged.map_err(|error| {
            ErrorBody::new(ErrorCode::BadRequest, "take the answer to a heartbeat")
                .cause(chain(&error))
        })?;
        self.heard(from, beat);
        Ok(merged)
    }

    fn heard(&self, from: HostId, beat: &Beat) {
        self.images.heard(Instant::now(), from.get(), names(&beat.came_of));
        let open = beat.held();
        self.sources.heard(from, &open);
        self.inner().open.insert(from, open);
        self.jobs.heard(self.id, from, &beat.jobs);
        if let Some(tally) = &beat.quotas {
            self.heard_tally(from, tally);
        }
    }

    /// Whether this host takes clones.
    ///
    /// # Errors
    /// It drains.
    pub(crate) fn check_active(&self, message: &str) -> Result<(), ErrorBody> {
        if self.roster.read(|book| book.own_entry().state) == HostState::Active {
            return Ok(());
        }
        Err(ErrorBody::new(ErrorCode::NoCapacity, message)
            .cause("this host takes no more clones: it drains")
            .remedy("`vmfork cluster activate` takes it back into use"))
    }

    /// Look at the images of others that a host has open; `None`: it has not said.
    pub(super) fn with_open<R>(
        &self,
        host: HostId,
        look: impl FnOnce(Option<&BTreeSet<ImageName>>) -> R,
    ) -> R {
        look(self.inner().open.get(&host))
    }

    /// Members that have been silent for so long that they count as gone.
    pub(super) fn gone(&self) -> Vec<HostId> {
        let now = self.now();
        let is_gone = |book: &Membership, id| book.liveness(id, now) == Liveness::Gone;
        self.roster
            .read(|book| book.members().map(|m| m.id).filter(|id| is_gone(book, *id)).collect())
    }
}

fn names(pairs: &[(u64, u64)]) -> BTreeSet<ImageName> {
    pairs.iter().map(|(host, image)| ImageName { host: *host, image: *image }).collect()
}

/// Pages are served at the port after that of the API.
pub(super) fn pages_address(address: &str) -> Option<SocketAddr> {
    let mut address = address.to_socket_addrs().ok()?.next()?;
    address.set_port(address.port().checked_add(1)?);
    Some(address)
}

/// What the page service of this host asks.
#[derive(Debug)]
pub(super) struct Served(pub(super) Arc<Member>);

impl Pages for Served {
    fn admit(&self, certificate: &[u8], _: SocketAddr) -> Result<u64, Refusal> {
        let shown = Fingerprint::of(&CertificateDer::from(certificate));
        let member = self.0.roster.member_by_fingerprint(shown);
        member.map(HostId::get).ok_or_else(|| {
            Refusal::new(RefusalKind::NotMember, "no member of this cluster has that certificate")
        })
    }

    fn is_member(&self, member: u64) -> bool {
        let id = HostId::new(member);
        id.is_some_and(|id| self.0.roster.read(|book| book.member(id).is_some()))
    }

    fn is_alive(&self, member: u64) -> bool {
        let now = self.0.now();
        let id = HostId::new(member);
        id.is_some_and(|id| self.0.roster.read(|book| book.liveness(id, now)) == Liveness::Alive)
    }

    fn is_coming(&self, image: ImageName, range: PageRange) -> bool {
        self.0.sources.is_under_way(image, range)
    }

    fn has(&self, image: ImageName, range: PageRange) -> bool {
        self.0.images.has(image, range)
    }

    fn asked(
        &self,
        _member: u64,
        image: ImageName,
        range: PageRange,
        urgency: Urgency,
    ) -> Option<Wanted> {
        self.0.images.asked(image, range, urgency == Urgency::Demand)
    }

    fn read(
        &self,
        _member: u64,
        image: ImageName,
        range: PageRange,
        _urgency: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        let read = self.0.images.read(image, range, bytes);
        read.map_err(|not_read| match not_read {
            NotRead::Unknown => {
                Refusal::new(RefusalKind::UnknownImage, "it is not known here (any more)")
            }
            NotRead::Absent => Refusal::new(RefusalKind::NotHere, "they have not come here (yet)"),
            NotRead::Lost(lost) => Refusal::new(RefusalKind::PageLost, lost.to_string()),
        })
    }

    fn invite(&self, member: u64, image: ImageName) -> Result<Invitation, Refusal> {
        self.0.ears().invite(member, image)
    }

    fn own(
        &self,
        _member: u64,
        image: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        self.0.images.own(image, range, each).ok_or_else(|| {
            Refusal::new(RefusalKind::UnknownImage, "it was not frozen here, or is gone")
        })
    }

    fn held(
        &self,
        _member: u64,
        image: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        self.0.images.present(image, range, each).ok_or_else(|| {
            Refusal::new(RefusalKind::UnknownImage, "it is not known here (any more)")
        })
    }
}
