//! Pages that other hosts send to all hosts that need them: which pages this host's caches take, and
//! when it listens at all.
//!
//! ```text
//!   source ──► GroupListeners::listen ──► a Listener, if the setting allows
//!                                            └──► Shelf: engines of VMs here that lack the pages
//!   Served ──► Member::invite ──► Groups, while this host is a member
//! ```
//!
//! Promises: a page enters a cache only if VMs here came of its image, look for it there, and lack
//! it. Its memory was promised when they came ([`super::arrivals`]).

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use vmfork_engine::{Engine, HostImage};
use vmfork_image::{ImageName, PageRange};
use vmfork_multicast::{
    GroupCounters, Groups, GroupsConfig, HeardPages, Listener, ListenerConfig, ListenerCounters,
};
use vmfork_transfer::{Invitation, Pages, Peer, Refusal, RefusalKind};

use super::arrivals::Arrivals;
use super::images::Images;
use crate::PageTransfer;
use vmfork_host::metrics::{GroupEvent, GroupPages, Multicast, Side};

/// How long after its source an image may be opened, and an engine have it.
const OPENED_WITHIN: Duration = Duration::from_secs(30);

/// Of one host.
#[derive(Debug)]
pub(super) struct GroupListeners {
    form: PageTransfer,
    /// At which interface; `None`: there is no multicast here.
    own: Option<Ipv4Addr>,
    images: Arc<Images>,
    arrivals: Arc<Arrivals>,
    /// The host has memory for prefetched pages.
    has_room: Arc<AtomicBool>,
    groups: OnceLock<Weak<Groups>>,
    /// Of all groups that were heard.
    heard: Arc<ListenerCounters>,
}

impl GroupListeners {
    pub(super) fn new(
        form: PageTransfer,
        own: IpAddr,
        images: &Arc<Images>,
        arrivals: &Arc<Arrivals>,
    ) -> Self {
        let own = match own {
            IpAddr::V4(own) if form == PageTransfer::Multicast => Some(own),
            _ => None,
        };
        Self {
            form,
            own,
            images: Arc::clone(images),
            arrivals: Arc::clone(arrivals),
            has_room: Arc::new(AtomicBool::new(true)),
            groups: OnceLock::new(),
            heard: Arc::default(),
        }
    }

    pub(super) fn form(&self) -> PageTransfer {
        self.form
    }

    /// Send to groups from `at`, by UDP. `None`: that is not to be, or can't.
    pub(super) fn send_from(&self, at: SocketAddr, pages: Arc<dyn Pages>) -> Option<Arc<Groups>> {
        let own = self.own?;
        let at = SocketAddrV4::new(own, at.port());
        match Groups::start(at, GroupsConfig::default(), pages) {
            Ok(groups) => {
                let groups = Arc::new(groups);
                let _first = self.groups.set(Arc::downgrade(&groups));
                Some(groups)
            }
            Err(error) => {
                tracing::warn!(%at, %error, "no pages are sent by multicast");
                None
            }
        }
    }

    /// A member wants to hear the group of an image that this host froze.
    ///
    /// # Errors
    /// There is none, and there won't be.
    pub(super) fn invite(&self, member: u64, image: ImageName) -> Result<Invitation, Refusal> {
        let no_groups =
            || Refusal::new(RefusalKind::BadRequest, "this host does not send by multicast");
        let groups = self.groups.get().and_then(Weak::upgrade).ok_or_else(no_groups)?;
        let unknown =
            || Refusal::new(RefusalKind::UnknownImage, "it was not frozen here, or is gone");
        let known = self.images.asked(image, PageRange::first(0), false);
        let known = known.filter(|image| image.is_own).ok_or_else(unknown)?;
        groups.invite(member, image, known.pages)
    }

    /// Hear the group of an image, which `origin` froze.
    pub(super) fn listen(
        &self,
        image: ImageName,
        pages: u64,
        origin: &Arc<Peer>,
    ) -> Option<Arc<Listener>> {
        let own = self.own?;
        let shelf = Arc::new(Shelf {
            name: image,
            images: Arc::clone(&self.images),
            arrivals: Arc::clone(&self.arrivals),
            has_room: Arc::clone(&self.has_room),
            began: Instant::now(),
        });
        let config = ListenerConfig::default();
        let (origin, heard) = (Arc::clone(origin), Arc::clone(&self.heard));
        let listener = Listener::start(image, pages, own, origin, shelf, config, heard);
        let unheard = |error: &std::io::Error| {
            tracing::warn!(%image, %error, "what is sent by multicast is not heard");
        };
        listener.inspect_err(unheard).ok().map(Arc::new)
    }

    /// What became of what was heard. `None`: there is no multicast here.
    pub(super) fn heard(&self) -> Option<Vec<(Multicast, u64)>> {
        self.own.map(|_| heard(&self.heard).into())
    }

    /// Whether pages that no VM here asked for are taken.
    pub(super) fn allow(&self, allow: bool) {
        self.has_room.store(allow, Ordering::Relaxed);
    }
}

/// What a host that sends to groups has done.
pub(super) fn sent(counters: &GroupCounters) -> [(Multicast, u64); 11] {
    let pages = |what| Multicast::Pages(Side::Served, what);
    let event = |what| Multicast::Event(Side::Served, what);
    [
        (pages(GroupPages::Requested), &counters.requested_pages),
        (pages(GroupPages::Repeated), &counters.repeated_pages),
        (pages(GroupPages::Lost), &counters.lost_pages),
        (pages(GroupPages::Lockstep), &counters.lockstep_pages),
        (pages(GroupPages::Refused), &counters.refused_pages),
        (pages(GroupPages::Lacking), &counters.lacking),
        (pages(GroupPages::Resent), &counters.resent_pages),
        (event(GroupEvent::Requests), &counters.requests),
        (event(GroupEvent::RateCuts), &counters.cuts),
        (event(GroupEvent::Unsent), &counters.unsent),
        (event(GroupEvent::Dropped), &counters.dropped),
    ]
    .map(|(what, counter)| (what, counter.get()))
}

fn heard(counters: &ListenerCounters) -> [(Multicast, u64); 16] {
    let pages = |what| Multicast::Pages(Side::Asked, what);
    let event = |what| Multicast::Event(Side::Asked, what);
    [
        (pages(GroupPages::Requested), &counters.requested_pages),
        (pages(GroupPages::Repeated), &counters.repeated_pages),
        (pages(GroupPages::GivenUp), &counters.given_up_pages),
        (pages(GroupPages::Heard), &counters.pages),
        (pages(GroupPages::Known), &counters.known_pages),
        (pages(GroupPages::Read), &counters.read_pages),
        (pages(GroupPages::Kept), &counters.kept_pages),
        (pages(GroupPages::NoRoom), &counters.no_room_pages),
        (pages(GroupPages::Forged), &counters.false_pages),
        (pages(GroupPages::Undecided), &counters.undecided_pages),
        (event(GroupEvent::Datagrams), &counters.datagrams),
        (event(GroupEvent::Forged), &counters.forged),
        (event(GroupEvent::Replayed), &counters.replayed),
        (event(GroupEvent::Wrong), &counters.wrong),
        (event(GroupEvent::Batches), &counters.batches),
        (event(GroupEvent::InVain), &counters.in_vain),
    ]
    .map(|(what, counter)| (what, counter.get()))
}

/// The caches that VMs here find pages of one image of another host in.
#[derive(Debug)]
struct Shelf {
    name: ImageName,
    images: Arc<Images>,
    arrivals: Arc<Arrivals>,
    has_room: Arc<AtomicBool>,
    began: Instant,
}

impl Shelf {
    /// The image, and the engines of VMs that may need its pages.
    fn needed(&self) -> Option<(Arc<HostImage>, Vec<Arc<Engine>>)> {
        let image = self.images.arrived(self.name)?;
        let names = |engine: &Arc<Engine>| {
            engine.image().table().is_some_and(|table| table.owners().get(image.id()) > 0)
        };
        let engines = self.arrivals.engines().into_iter().filter(names).collect();
        Some((image, engines))
    }
}

impl HeardPages for Shelf {
    fn take(&self, range: PageRange, bytes: &[u8]) -> u64 {
        if !self.has_room.load(Ordering::Relaxed) {
            return 0;
        }
        if let Some(pages) = self.images.disks().find(self.name) {
            return pages.take(range, bytes);
        }
        let Some((image, engines)) = self.needed() else { return 0 };
        let mut came = 0;
        for engine in engines {
            match engine.insert_from_peer(image.id(), range, bytes) {
                Ok(pages) => came += pages,
                Err(error) => tracing::warn!(image = %self.name, %error, "keep what was heard"),
            }
        }
        came
    }

    fn lacks(&self) -> bool {
        if let Some(pages) = self.images.disks().find(self.name) {
            return pages.lacks();
        }
        match self.needed() {
            Some((_, engines)) if !engines.is_empty() => {
                engines.iter().any(|engine| engine.image().missing_pages() > 0)
            }
            _ => self.began.elapsed() < OPENED_WITHIN,
        }
    }
}

#[cfg(test)]
mod tests;
