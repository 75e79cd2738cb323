//! The hosts that serve each other one image. Asks them what they hold while pages are fetched.
//! [`vmfork_policy::transfer::swarm::Swarm`], which the simulation drives, too, knows which hosts
//! they are, what each has, and which one to ask.
//!
//! ```text
//!   set_members, heard ──► members ──held?──► what each has ──► choose ──► Read
//!                             ▲        every 250 ms at most, while pages are fetched
//!                             └── who says that the image is not there is left out for a while
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, NextAhead, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::read::ReplyError;
use vmfork_policy::transfer::swarm::{Picked, Swarm as Known, SwarmConfig};

use super::peer::{Peer, PeerError};
use crate::lock;
use crate::proto::HELD_PAGES_MAX;

/// A host that can be asked for pages of the image.
#[derive(Debug)]
pub struct SwarmMember {
    pub id: HostId,
    pub peer: Arc<Peer>,
    /// It has all of it.
    pub origin: bool,
}

/// Of one image on one host.
#[derive(Debug)]
pub struct Swarm {
    image: ImageName,
    pages: u64,
    own: HostId,
    began: Instant,
    state: Mutex<State>,
    round_ended: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) known: Known,
    /// Of all members.
    pub(super) peers: HashMap<HostId, Arc<Peer>>,
}

impl State {
    /// Which member this is.
    pub(super) fn id_of(&self, peer: &Arc<Peer>) -> Option<HostId> {
        let found = self.peers.iter().find(|(_, its)| Arc::ptr_eq(its, peer));
        found.map(|(host, _)| *host)
    }
}

impl Swarm {
    /// For an image of `pages` pages, on host `own`. Knows no host yet.
    pub fn new(image: ImageName, pages: u64, own: HostId, config: SwarmConfig) -> Self {
        let state = State { known: Known::new(pages, own, config), peers: HashMap::new() };
        let (began, state, round_ended) = (Instant::now(), Mutex::new(state), Condvar::new());
        Self { image, pages, own, began, state, round_ended }
    }

    /// From now on these are all that can be asked. Of those that are not origins nothing is known
    /// until they say what they hold.
    pub fn set_members(&self, members: impl IntoIterator<Item = SwarmMember>) {
        let members: Vec<_> = members.into_iter().filter(|m| m.id != self.own).collect();
        let mut state = lock(&self.state);
        let origins = members.iter().map(|member| (member.id, member.origin));
        state.known.set_members(origins);
        let peers = members.into_iter().map(|member| (member.id, member.peer)).collect();
        let before = std::mem::replace(&mut state.peers, peers);
        drop(state);
        drop(before); // not under the lock: connections are closed with the last of a peer
    }

    /// A member has reported which images it has; `holds`: this one is among them.
    pub fn heard(&self, host: HostId, holds: bool) {
        let now = self.now();
        lock(&self.state).known.heard(host, holds, now);
    }

    /// How many hosts besides the origin are known to have pages of the image, or to be about to.
    pub fn holders(&self) -> usize {
        lock(&self.state).known.holders()
    }

    /// For one step of a read.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn peer(&self, host: HostId) -> Option<Arc<Peer>> {
        lock(&self.state).peers.get(&host).map(Arc::clone)
    }

    /// Whether any of these is being fetched.
    pub fn is_under_way(&self, pages: PageRange) -> bool {
        lock(&self.state).known.is_under_way(pages)
    }

    /// A connection ended on which a host was to give all of these: that is one failure.
    pub(super) fn cut_off(&self, host: HostId, all: &[PageRange], error: &PeerError) {
        if ReplyError::from(error) == ReplyError::Broken {
            let now = self.now();
            lock(&self.state).known.cut_off(host, all, now);
        }
    }

    /// The place of a piece in this host's own order.
    pub(super) fn place(&self, piece: PageRange) -> u64 {
        lock(&self.state).known.place(piece)
    }

    /// The same where there is an order in which they are wanted, and this one is number `at`.
    pub(super) fn place_near(&self, at: u64, piece: PageRange) -> u64 {
        lock(&self.state).known.place_near(at, piece)
    }

    /// Which of `pieces` to fetch in the background now.
    pub(super) fn next_ahead(&self, pieces: &[PageRange]) -> NextAhead {
        let now = self.now();
        match lock(&self.state).known.next_ahead(pieces, now) {
            Picked::Piece(at) => NextAhead::Piece(at),
            Picked::Later(wait) => NextAhead::Later(wait),
        }
    }

    /// Pages are being fetched: ask others what they hold, in a thread of its own, if it is time.
    pub(super) fn refresh_soon(self: &Arc<Self>) {
        let now = self.now();
        let state = lock(&self.state);
        if state.known.is_round_due(now) {
            self.start_round(state, false);
        }
    }

    /// Ask others what they hold, unless that is in progress, and wait until they have answered,
    /// but no longer than `wait`.
    pub fn refresh_within(self: &Arc<Self>, wait: Duration) {
        let state = lock(&self.state);
        match state.known.is_round_running() {
            true => drop(state),
            false => self.start_round(state, true),
        }
        let is_running = |state: &mut State| state.known.is_round_running();
        let _late = self.round_ended.wait_timeout_while(lock(&self.state), wait, is_running);
    }

    fn start_round(self: &Arc<Self>, mut state: MutexGuard<'_, State>, all: bool) {
        let now = self.now();
        let State { known, peers } = &mut *state;
        let is_avoided = |host| peers.get(&host).is_none_or(|peer| peer.is_avoided());
        let (asked, all) = known.begin_round(all, is_avoided, now);
        drop(state);
        let swarm = Arc::clone(self);
        let run = move || swarm.ask_round(&asked, all);
        if let Err(error) = std::thread::Builder::new().name("pages-held".to_owned()).spawn(run) {
            tracing::debug!(%error, "no thread to ask others what they hold");
            self.end_round(None, false);
        }
    }

    fn ask_round(&self, asked: &[HostId], all: bool) {
        for host in asked {
            let peer = lock(&self.state).peers.get(host).map(Arc::clone);
            if let Some(peer) = peer {
                self.ask(*host, &peer);
            }
        }
        self.end_round(asked.last().copied(), all);
    }

    fn end_round(&self, last: Option<HostId>, all: bool) {
        let now = self.now();
        lock(&self.state).known.end_round(last, all, now);
        self.round_ended.notify_all();
    }

    /// What does it hold?
    fn ask(&self, host: HostId, peer: &Peer) {
        let mut held = Vec::new();
        let mut rest = PageRange::first(self.pages);
        let answer = loop {
            if rest.is_empty() {
                break Ok(());
            }
            let part = rest.truncate(HELD_PAGES_MAX);
            match peer.held(self.image, part) {
                Ok(runs) => held.extend(runs),
                Err(error) => break Err(error),
            }
            rest = rest.from_page(part.end());
        };
        let now = self.now();
        let known = &mut lock(&self.state).known;
        match answer {
            Ok(()) => known.told(host, &held, now),
            Err(error) => {
                tracing::debug!(image = %self.image, host = peer.name(), %error, "what it holds");
                known.silent(host, matches!(&error, PeerError::Refused(_)), now);
            }
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }
}
