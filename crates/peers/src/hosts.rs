//! The members of the cluster as this host knows them: who is there, and how to call them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rustls::ClientConfig;
use vmfork_cluster::allocate::HostView;
use vmfork_cluster::{Entry, HostId, HostState, Liveness, Membership, Now, Roster};

use super::client::Peer;
use super::error::ClusterError;
use super::pace::Pace;
use vmfork_host::core::Core;

/// How often a task that waits for a host checks whether the host has left.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The other members, by when they were last heard.
#[derive(Debug, Default)]
pub(super) struct There {
    pub(super) alive: Vec<Entry>,
    pub(super) suspect: Vec<Entry>,
    pub(super) gone: Vec<Entry>,
}

/// All of one membership.
pub(crate) struct Hosts {
    /// This one.
    pub(super) id: HostId,
    pub(super) roster: Roster,
    /// Of waits for the others.
    pub(super) pace: Pace,
    began: Instant,
    /// For calls of others' REST API.
    api: Arc<ClientConfig>,
}

impl std::fmt::Debug for Hosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hosts").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Hosts {
    pub(super) fn new(id: HostId, roster: Roster, api: Arc<ClientConfig>, pace: Pace) -> Self {
        Self { id, roster, pace, began: Instant::now(), api }
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
    /// It is none any more.
    pub(super) fn peer_of(&self, id: HostId) -> Result<Peer, ClusterError> {
        let entry = self.roster.read(|book| book.member(id).cloned());
        entry.map(|entry| self.peer(&entry)).ok_or(ClusterError::NoMember { host: id })
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
    pub(crate) fn find_all(&self, hosts: &[String]) -> Result<Vec<HostId>, ClusterError> {
        let find =
            |host: &String| Ok(self.roster.read(|book| book.find(host).map(|entry| entry.id))?);
        hosts.iter().map(find).collect()
    }

    /// Whether this host takes clones.
    ///
    /// # Errors
    /// It drains.
    pub(crate) fn check_active(&self) -> Result<(), ClusterError> {
        match self.roster.read(|book| book.own_entry().state) {
            HostState::Active => Ok(()),
            _ => Err(ClusterError::Drains),
        }
    }

    /// Members that have been silent for so long that they count as gone.
    pub(super) fn gone(&self) -> Vec<HostId> {
        let now = self.now();
        let is_gone = |book: &Membership, id| book.liveness(id, now) == Liveness::Gone;
        self.roster
            .read(|book| book.members().map(|m| m.id).filter(|id| is_gone(book, *id)).collect())
    }

    pub(super) fn there(&self) -> There {
        let now = self.now();
        let mut there = There::default();
        self.roster.read(|book| {
            for entry in book.members().filter(|entry| entry.id != self.id) {
                let list = match book.liveness(entry.id, now) {
                    Liveness::Alive => &mut there.alive,
                    Liveness::Suspect => &mut there.suspect,
                    Liveness::Gone => &mut there.gone,
                };
                list.push(entry.clone());
            }
        });
        there
    }

    /// Until a host is gone, or this one is no member any more.
    pub(super) fn until_gone(self: &Arc<Self>, host: HostId) -> BoxFuture<'static, ()> {
        let weak = Arc::downgrade(self);
        async move {
            while let Some(hosts) = weak.upgrade() {
                let now = hosts.now();
                let is_gone = hosts.roster.read(|book| {
                    book.member(host).is_none() || book.liveness(host, now) == Liveness::Gone
                });
                if is_gone {
                    return;
                }
                drop(hosts);
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
        .boxed()
    }

    /// Those that are not gone, and this one.
    pub(super) fn candidates(&self) -> BTreeSet<HostId> {
        let now = self.now();
        self.roster.read(|book| {
            let is_there = |id| id == self.id || book.liveness(id, now) != Liveness::Gone;
            book.members().map(|entry| entry.id).filter(|id| is_there(*id)).collect()
        })
    }

    /// Whether a host is a member.
    pub(super) fn has(&self, host: HostId) -> bool {
        self.roster.read(|book| book.member(host).is_some())
    }
}
