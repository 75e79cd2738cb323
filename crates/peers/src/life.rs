//! A membership while it lasts: the port for other hosts, the page service, heartbeats.

use std::collections::BTreeSet;
use std::net::TcpListener as StdListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use vmfork_cluster::allocate::Tally;
use vmfork_cluster::{Authority, Folder, HostId, Merged, Opened, Room, Roster, Tls, Tokens};
use vmfork_multicast::Groups;
use vmfork_transfer::{AheadCounters, Counter, PageService, Pages, ServiceLimits};

use super::client::WORD_WAIT;
use super::connection_cache::ConnectionCache;
use super::connection_slots::Callers;
use super::error::BeginError;
use super::hosts::Hosts;
use super::jobs;
use super::member::{Beat, HEARTBEAT, Member, Served, pages_address};
use super::multicast;
use super::records::Records;
use super::server::{self, API_PROTOCOL, Bounds, Port, Routes};
use super::this_host::ThisHost;
use super::watched::Watched;
use vmfork_host::core::Core;
use vmfork_host::error::chain;
use vmfork_host::metrics::{Multicast, Role, Side, Sourced, Traffic};

/// What members speak at the page service's port.
const PAGES_PROTOCOL: &[u8] = b"vmfork-pages/1";
/// Heartbeat tick.
const TICK: Duration = Duration::from_millis(250);
/// Every this many ticks, the memory for pending pages is checked.
const MEMORY_TICKS: u64 = 8;
/// Heartbeats in flight at a time.
const BEATS_MAX: usize = 64;
/// How long who leaves tries to tell the others.
const FAREWELL: Duration = Duration::from_secs(5);

/// A host as a member, with all that runs for that.
pub(super) struct Life {
    pub(super) member: Arc<Member>,
    pub(super) authority: Authority,
    pub(super) records: Records,
    pub(super) tokens: Mutex<Tokens>,
    service: PageService,
    /// Where pages are sent to all who need them.
    groups: Option<Arc<Groups>>,
    pub(super) callers: Arc<Callers>,
    connections: ConnectionCache,
    /// The hosts as readers of events know them.
    watched: Mutex<Watched>,
    stop: watch::Sender<bool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Life {
    /// Begin to be a member: listen, serve, tell the others. `watched`: the members that readers of
    /// events know. `routes`: what others are answered.
    ///
    /// # Errors
    /// A port is taken, or the keys are of no use.
    pub(super) async fn begin(
        this: &Arc<ThisHost>,
        opened: Opened,
        watched: Watched,
        routes: impl FnOnce(&Arc<Self>) -> Routes,
    ) -> Result<Arc<Self>, BeginError> {
        let Opened { folder, cluster: of, tokens } = opened;
        let id = of.identity.host();
        let address = of.members.own_entry().address.clone();
        let no_address = || BeginError::Address { address: address.clone() };
        let pages_at = pages_address(&address).ok_or_else(no_address)?;
        let api_at = std::net::SocketAddr::new(pages_at.ip(), pages_at.port() - 1);
        let roster = Roster::new(of.members);
        let tls = Arc::new(Tls::new(of.identity, &of.authority, roster.clone())?);
        let (api, pages) = (tls.client(API_PROTOCOL)?, tls.client(PAGES_PROTOCOL)?);
        let form = this.settings.page_transfer;
        let (by, allocator) =
            ((form, pages_at.ip()), jobs::allocator(this.settings.slurm.clone(), id));
        let pace = this.settings.pace;
        let hosts = Hosts::new(id, roster, api, pace);
        let member = Arc::new(Member::new(hosts, this.epoch, pages, allocator, by));
        member.hosts.roster.change(|book| {
            book.set_timing(pace.timing());
            book.begin(member.hosts.now());
        });
        let listener = TcpListener::bind(api_at)
            .await
            .map_err(|source| BeginError::Listen { address: api_at, source })?;
        let refused = |source| BeginError::Pages { address: pages_at, source };
        let for_pages = StdListener::bind(pages_at).map_err(refused)?;
        let served = Arc::new(Served(Arc::clone(&member)));
        let pages: Arc<dyn Pages> = Arc::clone(&served) as Arc<dyn Pages>;
        let groups = member.listeners().send_from(pages_at, pages);
        let service = PageService::start(
            for_pages,
            tls.server(&[PAGES_PROTOCOL])?,
            served,
            ServiceLimits::default(),
        )
        .map_err(refused)?;
        let (stop, stopped) = watch::channel(false);
        let life = Arc::new(Self {
            member,
            authority: of.authority,
            records: Records::new(folder),
            tokens: Mutex::new(tokens),
            service,
            groups,
            callers: Arc::default(),
            connections: ConnectionCache::default(),
            watched: Mutex::new(watched),
            stop,
            tasks: Mutex::default(),
        });
        let routes = routes(&life);
        let callers = Arc::clone(&life.callers);
        let port = Port { tls, routes, callers, bounds: Bounds::default() };
        let serving = tokio::spawn(server::serve(listener, port, stopped.clone()));
        let beating = tokio::spawn(beat(Arc::downgrade(&life), Arc::clone(this), stopped));
        *life.tasks.lock().unwrap_or_else(PoisonError::into_inner) = vec![serving, beating];
        life.member.jobs.look();
        tracing::info!(%id, name = life.member.hosts.name(), %address, "member of a cluster");
        Ok(life)
    }

    /// Stop serving and telling, end all connections, and write nothing more down. → the folder,
    /// for the first who asks.
    pub(super) async fn end(&self) -> Option<Folder> {
        self.stop.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        for task in tasks {
            let _panicked = task.await;
        }
        tokio::task::block_in_place(|| {
            self.groups.iter().for_each(|groups| groups.stop());
            self.service.stop()
        });
        self.records.close()
    }

    /// What has gone between this host and others.
    pub(super) fn traffic(&self) -> Vec<(Side, Role, Traffic)> {
        let of = |requests: &Counter, pages: &Counter, bytes: &Counter| Traffic {
            requests: requests.get(),
            pages: pages.get(),
            bytes: bytes.get(),
        };
        let of_ahead = |ahead: &AheadCounters| of(&ahead.requests, &ahead.pages, &ahead.wire_bytes);
        let served = self.service.counters();
        let all_served = of(&served.requests, &served.pages, &served.wire_bytes);
        let (mut all_asked, mut ahead_asked) = (Traffic::default(), Traffic::default());
        for peer in self.member.asked_peers() {
            let asked = peer.counters();
            all_asked.add(of(&asked.requests, &asked.pages, &asked.wire_bytes));
            ahead_asked.add(of_ahead(&asked.ahead));
        }
        let sides = [
            (Side::Served, all_served, of_ahead(&served.ahead)),
            (Side::Asked, all_asked, ahead_asked),
        ];
        let roles = sides.map(|(side, all, ahead)| {
            [(side, Role::Demand, all.less(ahead)), (side, Role::Ahead, ahead)]
        });
        let to_all = self.groups.iter().map(|groups| {
            let sent = groups.counters();
            (Side::Served, Role::All, of(&sent.datagrams, &sent.pages, &sent.bytes))
        });
        roles.into_iter().flatten().chain(to_all).collect()
    }

    /// What became of the pages that this host asked others for.
    pub(super) fn sourced(&self) -> Vec<(Sourced, u64)> {
        let came = self.member.sourced();
        let of_disks = (Sourced::Disk, self.member.images.disks().came_pages());
        let others = [
            (Sourced::Origin, &came.origin_pages),
            (Sourced::Holder, &came.holder_pages),
            (Sourced::Group, &came.group_pages),
            (Sourced::Unverified, &came.unverified_pages),
            (Sourced::Redirected, &came.redirected),
            (Sourced::Resourced, &came.resourced),
            (Sourced::Forged, &came.forged),
            (Sourced::Failed, &came.failures),
        ]
        .map(|(what, counter)| (what, counter.get()));
        others.into_iter().chain([of_disks]).collect()
    }

    /// What became of what was sent, and heard, by multicast.
    pub(super) fn multicast(&self) -> Vec<(Multicast, u64)> {
        let sent = self.groups.iter().flat_map(|groups| multicast::sent(groups.counters()));
        sent.chain(self.member.listeners().heard().into_iter().flatten()).collect()
    }

    /// Say nothing of its own accord any more.
    #[cfg(test)]
    pub(super) fn beat_no_more(&self) {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.last().expect("both run").abort();
    }

    /// Write down who is a member, if that has changed.
    pub(super) fn settle(&self, merged: &Merged) {
        if let Some(name) = &merged.renamed {
            tracing::warn!(name, "another host had this one's name: renamed");
        }
        if !merged.changed.is_empty() {
            self.save();
        }
    }

    /// Tell readers of events what has changed of the hosts. At each tick, and before the end.
    pub(super) fn tell_hosts(&self, core: &Core) {
        let hosts = &self.member.hosts;
        // Locked until all is told: two callers would tell it in another order.
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let told = hosts.roster.read(|book| watched.look(book, hosts.now()));
        told.into_iter().for_each(|what| core.events.tell(what));
    }

    /// Write down who is a member.
    pub(super) fn save(&self) {
        if let Err(error) = self.records.save_members(&self.member.hosts.roster) {
            tracing::error!("write down the members of the cluster: {}", chain(&error));
        }
    }

    /// Tell all others at once that this host has left, as far as they answer soon.
    pub(super) async fn say_farewell(&self) {
        let told = async {
            let mut told = FuturesUnordered::new();
            loop {
                let now = self.member.hosts.now();
                let due = self.member.hosts.roster.change(|book| book.due(now, usize::MAX));
                told.extend(due.into_iter().map(|host| self.tell(host, Room::default(), None)));
                if told.next().await.is_none() {
                    break;
                }
            }
        };
        let _those_that_are_silent_hear_it_from_others = tokio::time::timeout(FAREWELL, told).await;
    }

    /// Tell a host that it is removed, while it still listens to this one: before that is so in the
    /// book.
    pub(super) async fn say_removed(&self, host: HostId) {
        let now = self.member.hosts.now();
        let member = &self.member;
        let heartbeat = member.hosts.roster.read(|book| book.heartbeat_of_removal(host, now));
        let (Ok(heartbeat), Ok(peer)) = (heartbeat, member.hosts.peer_of(host)) else {
            return;
        };
        let beat = member.beat(heartbeat, None);
        if let Err(error) = peer.ask::<Beat, Beat>(HEARTBEAT, &beat, WORD_WAIT).await {
            tracing::warn!(
                host = peer.name,
                "it is removed without having been told: {}",
                chain(&error)
            );
        }
    }

    /// A member has said which images of others it has open.
    pub(super) fn heard(&self, host: HostId, beat: &Beat) {
        self.service.heard(host.get(), &beat.held());
    }

    /// A heartbeat, and its answer.
    async fn tell(&self, host: HostId, room: Room, quotas: Option<Tally>) {
        let member = &self.member;
        let Ok(peer) = member.hosts.peer_of(host) else { return };
        let beat = member.beat_to(host, room, quotas);
        let mut kept = self.connections.take(host, &peer);
        let answer = peer.ask_again::<Beat, Beat>(&mut kept, HEARTBEAT, &beat, WORD_WAIT).await;
        if let Some(connection) = kept {
            self.connections.put(host, &peer, connection);
        }
        match answer {
            Ok(answer) => match member.on_answer(host, &answer) {
                Ok(merged) => {
                    self.settle(&merged);
                    self.heard(host, &answer);
                }
                Err(error) => {
                    tracing::warn!(
                        host = peer.name,
                        "take the answer to a heartbeat: {}",
                        chain(&error)
                    );
                }
            },
            Err(error) => tracing::debug!(host = peer.name, "{}", chain(&error)),
        }
    }
}

/// Sends the heartbeats that are due, and ends what no host needs any more.
async fn beat(life: std::sync::Weak<Life>, this: Arc<ThisHost>, mut stop: watch::Receiver<bool>) {
    let under_way = Arc::new(Semaphore::new(BEATS_MAX));
    for tick in 1_u64.. {
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let (Some(life), Some(core)) = (life.upgrade(), this.core()) else { return };
        life.tell_hosts(&core);
        let roster = &life.member.hosts.roster;
        let is_host = |id| roster.read(|book| book.member(id).is_some());
        let is_member = |host| HostId::new(host).is_some_and(is_host);
        life.callers.keep(is_host);
        life.connections.keep(is_host);
        this.stored.keep(is_host);
        life.service.keep(is_member);
        life.groups.iter().for_each(|groups| groups.keep(is_member));
        // Ends engines, and looks up addresses.
        tokio::task::block_in_place(|| {
            life.member.images.expire(Instant::now(), is_member);
            life.member.tend_sources();
        });
        life.member.leases.expire(Instant::now());
        life.member.keeper.tend(Instant::now());
        life.member.jobs.tend(&core, &life.member.hosts);
        if tick.is_multiple_of(MEMORY_TICKS) {
            for host in life.member.hosts.gone() {
                life.service.heard(host.get(), &BTreeSet::new());
            }
            let arrivals = &life.member.arrivals;
            tokio::task::block_in_place(|| {
                arrivals.look();
                let has_room = !core.is_short_of_memory();
                arrivals.allow_prefetch(has_room);
                life.member.listeners().allow(has_room);
            });
        }
        let (now, room) = (life.member.hosts.now(), core.admission.room());
        let mut due = life.member.hosts.roster.change(|book| match book.has_left() {
            // The farewell's.
            true => Vec::new(),
            false => book.due(now, BEATS_MAX),
        });
        // The hosts that count users' quotas are notified at once of what has ended.
        let shrunk = core.quotas.shrunk(&core.admission);
        let keepers =
            shrunk.iter().filter_map(|user| life.member.keeper.keeper_of(&user.to_string()));
        due.extend(keepers.filter(|host| *host != life.member.hosts.id()));
        due.sort_unstable();
        due.dedup();
        let quotas = (!due.is_empty()).then(|| core.quotas.tally(&core.admission));
        for host in due {
            // One that takes long must not hold up the others.
            let Ok(place) = Arc::clone(&under_way).try_acquire_owned() else { break };
            let (life, quotas) = (Arc::clone(&life), quotas.clone());
            tokio::spawn(async move {
                life.tell(host, room, quotas).await;
                drop(place);
            });
        }
    }
}
