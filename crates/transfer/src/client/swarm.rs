//! The hosts that serve each other one image: who they are, what each has, whom to ask. Asks them what they hold while pages
//! are fetched; the decisions are [`vmfork_policy::transfer::swarm`]'s.
//!
//! ```text
//!   set_members, heard ──► members ──held?──► what each has ──► choose ──► PeerSource
//!                             ▲        every 250 ms at most, while pages are fetched
//!                             └── who says that the image is not there is left out for a while
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, NextAhead, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::swarm::{
    Choice, Failure, Holders, HoldersConfig, Pick, PickConfig, Picked,
};

use super::peer::{Peer, PeerError};
use super::source::{READS_AHEAD, UNIT_PAGES};
use crate::lock;
use crate::proto::{HELD_PAGES_MAX, RefusalKind, Route, Urgency};

/// Times and bounds of a [`Swarm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwarmConfig {
    /// Between two rounds of asking what others hold, at least.
    pub every: Duration,
    /// Most that are asked in a round.
    pub asked_max: usize,
    /// How long one is left alone that has all, or does not know the image.
    pub settled: Duration,
    pub pick: PickConfig,
}

impl Default for SwarmConfig {
    fn default() -> Self {
        Self {
            every: Duration::from_millis(250),
            asked_max: 16,
            settled: Duration::from_secs(2),
            pick: PickConfig::default(),
        }
    }
}

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
    config: SwarmConfig,
    began: Instant,
    state: Mutex<State>,
    round_ended: Condvar,
}

#[derive(Debug)]
struct State {
    known: Holders,
    pick: Pick,
    members: BTreeMap<HostId, Member>,
    round: Round,
}

#[derive(Debug)]
struct Member {
    peer: Arc<Peer>,
    origin: bool,
    /// The image is there.
    holds: bool,
    /// Not to be asked what it holds before.
    ask_at: Duration,
}

#[derive(Debug, Default)]
struct Round {
    is_running: bool,
    /// The earliest time of the next.
    next_at: Duration,
    /// Who was asked last in the last.
    last: Option<HostId>,
}

/// What [`Swarm::choose`] says.
#[derive(Debug)]
pub(super) enum Chosen {
    Ask(Asked),
    /// Those that have them are busy for so long.
    Later(Duration),
    /// No host here is known to have them that is worth asking, or they are under way.
    Nobody,
}

/// Who is asked, and what for.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) host: HostId,
    pub(super) peer: Arc<Peer>,
    pub(super) origin: bool,
    pub(super) route: Route,
}

impl Swarm {
    /// For an image of `pages` pages, on host `own`. Knows nobody yet.
    pub fn new(image: ImageName, pages: u64, own: HostId, config: SwarmConfig) -> Self {
        let known = HoldersConfig {
            piece_pages: UNIT_PAGES,
            salt: own.0,
            // As many as the engine has under way: a host that is alone is no slower for it.
            ahead_in_flight_max: READS_AHEAD,
            origin_ahead_in_flight_max: READS_AHEAD,
            ..HoldersConfig::default()
        };
        let state = State {
            known: Holders::new(pages, known),
            pick: Pick::new(config.pick),
            members: BTreeMap::new(),
            round: Round::default(),
        };
        Self {
            image,
            pages,
            own,
            config,
            began: Instant::now(),
            state: Mutex::new(state),
            round_ended: Condvar::new(),
        }
    }

    /// From now on these are all that can be asked. Of those that are not origins nothing is known until they say what they hold.
    pub fn set_members(&self, members: impl IntoIterator<Item = SwarmMember>) {
        let mut state = lock(&self.state);
        let State { known, members: kept, .. } = &mut *state;
        let mut before = std::mem::take(kept);
        for SwarmMember { id, peer, origin } in members.into_iter().filter(|m| m.id != self.own) {
            let old = before.remove(&id).filter(|old| old.origin == origin);
            if old.is_none() {
                known.left(id);
            }
            if origin {
                known.joined(id, true, 2);
            }
            let (holds, ask_at) = old.map_or((origin, Duration::ZERO), |m| (m.holds, m.ask_at));
            kept.insert(id, Member { peer, origin, holds, ask_at });
        }
        for gone in before.keys() {
            known.left(*gone);
        }
        drop(state);
        drop(before); // not under the lock: connections are closed with the last of a peer
    }

    /// A member has told which images it has; `holds`: this one is among them.
    pub fn heard(&self, host: HostId, holds: bool) {
        let now = self.now();
        let mut state = lock(&self.state);
        let State { known, members, .. } = &mut *state;
        let Some(member) = members.get_mut(&host) else { return };
        if member.origin {
            return known.heard_of(host);
        }
        match holds {
            true if !member.holds => member.ask_at = now,
            false if member.holds => {
                member.holds = false;
                known.left(host);
            }
            _ => {}
        }
    }

    /// How many hosts besides the origin are known to have pages of the image, or to be about to.
    pub fn holders(&self) -> usize {
        let state = lock(&self.state);
        state.members.values().filter(|member| member.holds && !member.origin).count()
    }

    /// Whom to ask for all of `pages`.
    pub(super) fn choose(&self, urgency: Urgency, pages: PageRange) -> Chosen {
        let now = self.now();
        let mut state = lock(&self.state);
        let State { known, members, .. } = &mut *state;
        // Their threads still wait for them, and will tell.
        let _late = known.expired(now);
        let choice = match urgency {
            Urgency::Demand => match known.choose(pages, true, now) {
                // Who asks knows that.
                Choice::UnderWay => known.choose_again(pages, now),
                choice => choice,
            },
            Urgency::Ahead => known.choose_unwaited(pages, now),
        };
        let host = match choice {
            Choice::Ask(host) => host,
            Choice::Later(at) => return Chosen::Later(at.saturating_sub(now)),
            Choice::UnderWay | Choice::Nobody => return Chosen::Nobody,
        };
        let insists = known.insists(pages);
        let Some(Member { peer, origin, .. }) = members.get(&host) else {
            known.left(host);
            return Chosen::Nobody;
        };
        let route = if insists { Route::Insist } else { Route::Direct };
        Chosen::Ask(Asked { host, peer: Arc::clone(peer), origin: *origin, route })
    }

    /// Whether any of these is being fetched.
    pub fn is_under_way(&self, pages: PageRange) -> bool {
        lock(&self.state).known.is_under_way(pages)
    }

    /// The origin itself, to be asked for pages that another gave and that can't be compared.
    pub(super) fn ask_origin(&self) -> Option<Asked> {
        let state = lock(&self.state);
        let (host, member) = state.members.iter().find(|(_, member)| member.origin)?;
        let (peer, route) = (Arc::clone(&member.peer), Route::Insist);
        Some(Asked { host: *host, peer, origin: true, route })
    }

    /// It answered that they are at host `to`, or about to be. → whom to ask now.
    pub(super) fn redirected(&self, host: HostId, pages: PageRange, to: u64) -> Option<Asked> {
        let (now, to) = (self.now(), HostId(to));
        let mut state = lock(&self.state);
        let State { known, members, .. } = &mut *state;
        let named = members.get(&to).filter(|member| to != self.own && !member.peer.is_avoided());
        let can_be_asked = named.is_some();
        if can_be_asked && !known.knows(to) {
            known.joined(to, false, 1);
        }
        let to = if can_be_asked { to } else { host };
        let (asked, in_vain) = known.redirected(host, pages, to, now)?;
        let Member { peer, origin, .. } = members.get(&asked)?;
        let insists = in_vain || !can_be_asked;
        let route = if insists { Route::Insist } else { Route::Redirected };
        Some(Asked { host: asked, peer: Arc::clone(peer), origin: *origin, route })
    }

    /// It gave them.
    pub(super) fn answered(&self, host: HostId, pages: PageRange) {
        let now = self.now();
        lock(&self.state).known.answered(host, pages, now);
    }

    /// It did not.
    pub(super) fn failed(&self, host: HostId, pages: PageRange, error: &PeerError) {
        let why = match error {
            PeerError::Refused(refusal) => match refusal.kind {
                RefusalKind::Busy | RefusalKind::Draining => Failure::Busy,
                RefusalKind::NotMember | RefusalKind::BadRequest => Failure::Broken,
                _ => Failure::Lacks,
            },
            PeerError::AllInUse { .. } | PeerError::Undecided => Failure::Busy,
            PeerError::Forged { .. } => Failure::Forged,
            _ => Failure::Broken,
        };
        let now = self.now();
        lock(&self.state).known.failed(host, pages, why, now);
    }

    /// Whether a host has all of the image, and that it gave pages after all.
    pub(super) fn gave(&self, peer: &Arc<Peer>) -> bool {
        let mut state = lock(&self.state);
        let State { known, members, .. } = &mut *state;
        let found = members.iter().find(|(_, member)| Arc::ptr_eq(&member.peer, peer));
        let Some((host, member)) = found else { return false };
        known.heard_of(*host);
        member.origin
    }

    /// The place of a piece in this host's own order.
    pub(super) fn place(&self, piece: PageRange) -> u64 {
        Pick::place(piece, self.own.0)
    }

    /// Which of `pieces`, that nobody waits for, to fetch now.
    pub(super) fn next_ahead(&self, pieces: &[PageRange]) -> NextAhead {
        let now = self.now();
        let mut state = lock(&self.state);
        let State { known, pick, members, .. } = &mut *state;
        let holders = members.iter().filter(|(_, member)| member.holds && !member.origin);
        let (mut below, mut all) = (0, 1);
        for (host, _) in holders {
            all += 1;
            below += u64::from(*host < self.own);
        }
        pick.set_share(below, all);
        match pick.next(pieces, known, now) {
            Picked::Piece(at) => NextAhead::Piece(at),
            Picked::Later(wait) => NextAhead::Later(wait),
        }
    }

    /// Pages are being fetched: ask others what they hold, in a thread of its own, if it is time.
    pub(super) fn refresh_soon(self: &Arc<Self>) {
        let now = self.now();
        {
            let mut state = lock(&self.state);
            let State { members, round, .. } = &mut *state;
            let is_due = |member: &Member| !member.origin && member.ask_at <= now;
            if round.is_running || round.next_at > now || !members.values().any(is_due) {
                return;
            }
            round.is_running = true;
        }
        self.start_round(|member, now| member.ask_at <= now);
    }

    /// Ask others what they hold, unless that goes on, and wait until they have answered, but no longer than `wait`.
    pub fn refresh_within(self: &Arc<Self>, wait: Duration) {
        if !std::mem::replace(&mut lock(&self.state).round.is_running, true) {
            self.start_round(|_, _| true);
        }
        let is_running = |state: &mut State| state.round.is_running;
        let _late = self.round_ended.wait_timeout_while(lock(&self.state), wait, is_running);
    }

    fn start_round(self: &Arc<Self>, is_due: impl Fn(&Member, Duration) -> bool + Send + 'static) {
        let swarm = Arc::clone(self);
        let run = move || swarm.ask_round(is_due);
        if let Err(error) = std::thread::Builder::new().name("pages-held".to_owned()).spawn(run) {
            tracing::debug!(%error, "no thread to ask others what they hold");
            self.end_round(None, false);
        }
    }

    fn ask_round(&self, is_due: impl Fn(&Member, Duration) -> bool) {
        let now = self.now();
        let (asked, all) = {
            let state = lock(&self.state);
            let peers: Vec<_> = state
                .members
                .iter()
                .filter(|(_, m)| !m.origin && !m.peer.is_avoided() && is_due(m, now))
                .map(|(host, member)| (*host, Arc::clone(&member.peer)))
                .collect();
            // Go on behind the last of the round before.
            let at = peers.iter().position(|(host, _)| Some(*host) > state.round.last);
            let most = self.config.asked_max.max(1);
            let all = peers.len() <= most;
            let asked = peers.iter().cycle().skip(at.unwrap_or(0)).take(peers.len().min(most));
            (asked.cloned().collect::<Vec<_>>(), all)
        };
        let last = asked.last().map(|(host, _)| *host);
        for (host, peer) in asked {
            self.ask(host, &peer);
        }
        self.end_round(last, all);
    }

    fn end_round(&self, last: Option<HostId>, all: bool) {
        let now = self.now();
        let round = &mut lock(&self.state).round;
        round.is_running = false;
        round.next_at = now + self.config.every;
        round.last = last.filter(|_| !all);
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
        let mut state = lock(&self.state);
        let State { known, members, .. } = &mut *state;
        let Some(member) = members.get_mut(&host) else { return };
        match answer {
            Ok(()) => {
                let all = held.iter().map(PageRange::len).sum::<u64>() >= self.pages;
                member.holds = known.joined(host, false, 1);
                member.ask_at = now + if all { self.config.settled } else { Duration::ZERO };
                held.into_iter().for_each(|run| known.announced(host, run));
            }
            Err(error) => {
                tracing::debug!(image = %self.image, host = peer.name(), %error, "what it holds");
                // One that does not answer may still have what it had: who asks it for pages finds out.
                if matches!(&error, PeerError::Refused(_)) {
                    member.holds = false;
                    known.left(host);
                }
                member.ask_at = now + self.config.settled;
            }
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}
