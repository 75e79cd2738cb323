//! Where the pages of other hosts' images come from: which members hold each image that is open
//! here.
//!
//! ```text
//!   a descriptor ──► source ──► a PeerSource ──► its Swarm: any that has the page      } of all members,
//!   heartbeats ────► heard ──► who has it open ──►┘                                 } as tend has them
//!                                            ├──► Holders: who told of it, who froze it
//!                                            └──► its group, if pages are sent to all
//! ```

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmfork_cluster::HostId;
use vmfork_image::{ImageName, PageRange, PageSource};
use vmfork_multicast::Listener;
use vmfork_transfer::{Holders, Peer, PeerSource, SourceCounters, Swarm, SwarmConfig, SwarmMember};

use super::multicast::GroupListeners;
use crate::PageTransfer;

/// A member's page service.
pub(super) type PagePeer = (HostId, Arc<Peer>);

/// Of each image of another host that is open here.
#[derive(Debug)]
pub(super) struct Sources {
    own: HostId,
    listeners: GroupListeners,
    known: Mutex<HashMap<ImageName, Known>>,
    /// Of all of them.
    counters: Arc<SourceCounters>,
}

#[derive(Debug)]
struct Known {
    /// Who told of it, and who froze it.
    holders: Arc<Holders>,
    swarm: Arc<Swarm>,
    /// While pages are sent to all who need them, and some lack here.
    group: Option<Arc<Listener>>,
}

impl Sources {
    pub(super) fn new(own: HostId, listeners: GroupListeners) -> Self {
        Self { own, listeners, known: Mutex::default(), counters: Arc::default() }
    }

    /// Those whose image is still open.
    fn known(&self) -> MutexGuard<'_, HashMap<ImageName, Known>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, known| Arc::strong_count(&known.swarm) > 1);
        known
    }

    /// The source of an image of `pages` pages: the hosts of `members` that hold them.
    /// `first`, which announced it, and the host that froze it may be asked for any page. A read
    /// fails after `patience` and a round through all that may be asked.
    pub(super) fn source(
        &self,
        image: ImageName,
        pages: u64,
        first: HostId,
        members: &[PagePeer],
        patience: Duration,
    ) -> Arc<dyn PageSource> {
        let is_named = |host: HostId| host == first || host.get() == image.host;
        let mut named: Vec<_> = members.iter().filter(|(host, _)| is_named(*host)).collect();
        let is_unicast = self.listeners.form() == PageTransfer::Unicast;
        named.sort_by_key(|(host, _)| match is_unicast {
            true => host.get() != image.host,
            false => *host != first,
        });
        let named = named.into_iter().map(|(_, peer)| Arc::clone(peer));
        let mut known = self.known();
        let own = vmfork_transfer::HostId(self.own.get());
        let known = known.entry(image).or_insert_with(|| Known {
            holders: Arc::new(Holders::new([])),
            swarm: Arc::new(Swarm::new(image, pages, own, SwarmConfig::default())),
            group: None,
        });
        let mut all = known.holders.peers();
        for peer in named {
            if !all.iter().any(|known| Arc::ptr_eq(known, &peer)) {
                all.push(peer);
            }
        }
        known.holders.set(all);
        known.swarm.set_members(swarm_members(image, members));
        known.swarm.heard(vmfork_transfer::HostId(first.get()), true);
        let source = PeerSource::new(image, Arc::clone(&known.holders))
            .with_patience(patience)
            .with_counters(Arc::clone(&self.counters));
        let origin = members.iter().find(|(host, _)| host.get() == image.host);
        if is_unicast {
            return Arc::new(match origin {
                Some((_, origin)) => source.with_origin(Arc::clone(origin)),
                None => source,
            });
        }
        let source = source.with_swarm(Arc::clone(&known.swarm));
        if known.group.as_ref().is_none_or(|group| group.is_over()) {
            known.group =
                origin.and_then(|(_, origin)| self.listeners.listen(image, pages, origin));
        }
        match &known.group {
            Some(group) => Arc::new(source.with_group(Arc::clone(group))),
            None => Arc::new(source),
        }
    }

    pub(super) fn counters(&self) -> &SourceCounters {
        &self.counters
    }

    pub(super) fn listeners(&self) -> &GroupListeners {
        &self.listeners
    }

    /// Whether pages are being fetched.
    pub(super) fn is_under_way(&self, image: ImageName, range: PageRange) -> bool {
        let known = self.known();
        let swarm = known.get(&image).map(|known| Arc::clone(&known.swarm));
        drop(known);
        swarm.is_some_and(|swarm| swarm.is_under_way(range))
    }

    /// A member has said which images it has open.
    pub(super) fn heard(&self, from: HostId, open: &BTreeSet<ImageName>) {
        for (image, known) in self.known().iter() {
            known.swarm.heard(vmfork_transfer::HostId(from.get()), open.contains(image));
        }
    }

    /// These are the members now.
    pub(super) fn tend(&self, members: impl FnOnce() -> Vec<PagePeer>) {
        let known = self.known();
        if known.is_empty() {
            return;
        }
        let swarms: Vec<_> =
            known.iter().map(|(image, known)| (*image, Arc::clone(&known.swarm))).collect();
        drop(known);
        let members = members();
        for (image, swarm) in swarms {
            swarm.set_members(swarm_members(image, &members));
        }
    }
}

fn swarm_members(image: ImageName, members: &[PagePeer]) -> impl Iterator<Item = SwarmMember> {
    members.iter().map(move |(host, peer)| SwarmMember {
        id: vmfork_transfer::HostId(host.get()),
        peer: Arc::clone(peer),
        origin: host.get() == image.host,
    })
}
