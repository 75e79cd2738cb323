//! This host as a member of a cluster: who the others are, how to call them, what is lent to them
//! and what they hold.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use vmfork_cluster::allocate::{Allocator, Tally};
use vmfork_cluster::{Fingerprint, Heartbeat, HostId, Liveness, Merged, Room};
use vmfork_image::{ImageName, PageRange, PageSource};
use vmfork_transfer::{
    Invitation, Pages, PeerConfig, PeerLimits, Refusal, RefusalKind, SourceCounters, Urgency,
    Wanted,
};

use super::arrivals::Arrivals;
use super::guest_images::GuestImages;
use super::hosts::{Hosts, There};
use super::images::{Images, NotRead};
use super::jobs::{JobNews, Jobs};
use super::locate::Locate;
use super::multicast::GroupListeners;
use super::quotas::Keeper;
use super::remote_fork::Orders;
use super::remote_fork::receive::Engines;
use super::sources::{PagePeer, Sources};
use super::tickets::{Inbox, Leases, Lines};
use super::transfer_estimate::Estimates;
use crate::PageTransfer;
use crate::error::ClusterError;
use vmfork_host::error::chain;
use vmfork_policy::transfer::bounds::PATIENCE;

/// Where heartbeats are sent.
pub(super) const HEARTBEAT: &str = "/cluster/v1/heartbeat";

/// What goes with a heartbeat besides who is a member.
/// How long hosts that fail are asked for pages of a disk. A VM that is stopped meanwhile waits for
/// that, and QEMU must answer within 10 s.
const DISK_PATIENCE: Duration = Duration::from_secs(3);

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
pub struct Member {
    pub(super) hosts: Arc<Hosts>,
    /// Where VMs of other hosts are.
    pub locate: Locate,
    /// Of what has to come to other hosts.
    pub(super) estimates: Estimates,
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
    pub(super) jobs: Arc<Jobs>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    page_peers: HashMap<HostId, Arc<vmfork_transfer::Peer>>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").field("id", &self.hosts.id).finish_non_exhaustive()
    }
}

impl Member {
    pub(super) fn new(
        hosts: Hosts,
        epoch: u32,
        pages: Arc<ClientConfig>,
        allocator: Arc<dyn Allocator>,
        (form, address): (PageTransfer, IpAddr),
    ) -> Self {
        let (id, hosts) = (hosts.id, Arc::new(hosts));
        let images = Arc::new(Images::new(id.get(), epoch));
        let arrivals = Arc::new(Arrivals::default());
        let listeners = GroupListeners::new(form, address, &images, &arrivals);
        Self {
            locate: Locate::new(&hosts),
            estimates: Estimates::new(id, &images),
            pages,
            images,
            engines: Engines::default(),
            sources: Sources::new(id, listeners),
            arrivals,
            lines: Lines::default(),
            inbox: Inbox::default(),
            leases: Leases::default(),
            orders: Mutex::default(),
            epoch: epoch.into(),
            orders_given: AtomicU64::new(0),
            guest_images: GuestImages::new(&hosts),
            keeper: Keeper::new(&hosts),
            jobs: Jobs::new(id, allocator, hosts.pace),
            hosts,
            inner: Mutex::default(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A member's page service. Its connections are kept for all who ask it.
    fn page_peer(&self, id: HostId) -> Option<Arc<vmfork_transfer::Peer>> {
        let entry = self.hosts.roster.read(|book| book.member(id).cloned())?;
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
        let There { alive, suspect, gone: _ } = self.hosts.there();
        let others = alive.into_iter().chain(suspect);
        others.filter_map(|entry| Some((entry.id, self.page_peer(entry.id)?))).collect()
    }

    /// Where the pages of an image come from, of which `first` told: from whichever member has
    /// them.
    pub(super) fn source(
        &self,
        image: ImageName,
        pages: u64,
        first: HostId,
    ) -> Arc<dyn PageSource> {
        self.sources.source(image, pages, first, &self.page_peers(), PATIENCE)
    }

    /// The same for pages of a disk. QEMU waits for a read before it stops its VM, for a fork too.
    pub(super) fn disk_source(
        &self,
        owner: ImageName,
        pages: u64,
        first: HostId,
    ) -> Arc<dyn PageSource> {
        self.sources.source(owner, pages, first, &self.page_peers(), DISK_PATIENCE)
    }

    /// What became of the pages that this host asked others for.
    pub(super) fn sourced(&self) -> &SourceCounters {
        self.sources.counters()
    }

    pub(super) fn listeners(&self) -> &GroupListeners {
        self.sources.listeners()
    }

    /// Pages come from members alone, and from new ones, too.
    pub(super) fn tend_sources(&self) {
        self.sources.tend(|| self.page_peers());
    }

    /// A number for the next order to another host: one that no life of this daemon has given
    /// before.
    pub fn next_order(&self) -> u64 {
        self.epoch << 32 | self.orders_given.fetch_add(1, Ordering::Relaxed)
    }

    /// What to tell a member now.
    pub(super) fn beat_to(&self, peer: HostId, room: Room, quotas: Option<Tally>) -> Beat {
        let heartbeat = self.hosts.roster.read(|book| book.heartbeat_to(peer, Some(room)));
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
    ) -> Result<(Beat, Merged), ClusterError> {
        let now = self.hosts.now();
        let (answer, merged) = self
            .hosts
            .roster
            .change(|book| book.on_heartbeat(from, &beat.heartbeat, Some(room), now))?;
        self.heard(from, beat);
        Ok((self.beat(answer, quotas), merged))
    }

    /// A member has answered.
    ///
    /// # Errors
    /// As [`Member::on_beat`].
    pub(super) fn on_answer(&self, from: HostId, beat: &Beat) -> Result<Merged, ClusterError> {
        let now = self.hosts.now();
        let merged = self.hosts.roster.change(|book| book.on_answer(from, &beat.heartbeat, now))?;
        self.heard(from, beat);
        Ok(merged)
    }

    fn heard(&self, from: HostId, beat: &Beat) {
        self.images.heard(Instant::now(), from.get(), names(&beat.came_of));
        let open = beat.held();
        self.sources.heard(from, &open);
        self.estimates.heard(from, open);
        self.jobs.heard(from, &beat.jobs);
        if let Some(tally) = &beat.quotas {
            self.keeper.heard(from, tally);
        }
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
        let member = self.0.hosts.roster.member_by_fingerprint(shown);
        member.map(HostId::get).ok_or_else(|| {
            Refusal::new(RefusalKind::NotMember, "no member of this cluster has that certificate")
        })
    }

    fn is_member(&self, member: u64) -> bool {
        let id = HostId::new(member);
        id.is_some_and(|id| self.0.hosts.roster.read(|book| book.member(id).is_some()))
    }

    fn is_alive(&self, member: u64) -> bool {
        let now = self.0.hosts.now();
        let id = HostId::new(member);
        id.is_some_and(|id| {
            self.0.hosts.roster.read(|book| book.liveness(id, now)) == Liveness::Alive
        })
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
            NotRead::Disk(error) => Refusal::new(RefusalKind::PageLost, chain(&error)),
        })
    }

    fn invite(&self, member: u64, image: ImageName) -> Result<Invitation, Refusal> {
        self.0.listeners().invite(member, image)
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
