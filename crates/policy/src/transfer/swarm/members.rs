//! The hosts that serve each other one image, as one of them knows them.

use std::collections::BTreeMap;
use std::time::Duration;

use vmfork_image::PageRange;

use super::{Choice, Failure, Holders, HoldersConfig, Pick, PickConfig, Picked};
use crate::transfer::HostId;

/// What is asked of other hosts at a time: 64 KiB, half a millisecond at 1 Gbit/s.
pub const UNIT_PAGES: u64 = 16;

/// Background reads in flight. They fill a link of 1 Gbit/s at a round trip of some milliseconds:
/// one half is requested while the other comes.
pub const READS_AHEAD: usize = 12;

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
            asked_max: 4,
            settled: Duration::from_secs(2),
            pick: PickConfig::default(),
        }
    }
}

/// How a host is asked for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Route {
    /// It may name another host that has the pages ([`Serve::At`](super::Serve::At)).
    #[default]
    Direct,
    /// It was asked before, and the host that it named had nothing: it has to give them itself.
    Insist,
    /// It was named by the host that froze the image: pages not present yet are in flight to it.
    Redirected,
}

/// Which host is asked, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    pub host: HostId,
    /// It has all of the image.
    pub origin: bool,
    pub route: Route,
}

/// What [`Swarm::choose`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    Ask(Asked),
    /// Those that have them are busy for this time.
    Later(Duration),
    /// No host is known to have them that is worth asking, or they are in flight.
    NoHolder,
}

/// Decides for one image on one host which host to ask for pages, and which to ask what they hold.
///
/// ```text
///   set_members, heard ──► members ──begin_round──► who is asked what it holds ──told, silent──► Holders ──► choose, next_ahead
///                                                         at most once in `every`, one after the other, until end_round
/// ```
#[derive(Debug)]
pub struct Swarm {
    own: HostId,
    config: SwarmConfig,
    pages: u64,
    known: Holders,
    pick: Pick,
    members: BTreeMap<HostId, Member>,
    /// Whether those that hold the image have changed since `pick` got its share.
    is_share_new: bool,
    round: Round,
}

#[derive(Debug, Clone, Copy)]
struct Member {
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
    /// The host that was asked last, if not all were.
    last: Option<HostId>,
}

impl Swarm {
    /// For an image of `pages` pages, on host `own`. Knows no host yet.
    pub fn new(pages: u64, own: HostId, config: SwarmConfig) -> Self {
        let known = HoldersConfig {
            piece_pages: UNIT_PAGES,
            salt: own.0,
            // As many as the engine has in flight: a host that is alone is no slower for it.
            ahead_in_flight_max: READS_AHEAD,
            origin_ahead_in_flight_max: READS_AHEAD,
            ..HoldersConfig::default()
        };
        Self {
            own,
            config,
            pages,
            known: Holders::new(pages, known),
            pick: Pick::new(config.pick),
            members: BTreeMap::new(),
            is_share_new: false,
            round: Round::default(),
        }
    }

    /// From now on these are all that can be asked, and whether each has all of the image. Of the
    /// others nothing is known until they say what they hold.
    pub fn set_members(&mut self, members: impl IntoIterator<Item = (HostId, bool)>) {
        self.is_share_new = true;
        let mut before = std::mem::take(&mut self.members);
        for (host, origin) in members.into_iter().filter(|(host, _)| *host != self.own) {
            let old = before.remove(&host).filter(|old| old.origin == origin);
            if old.is_none() {
                self.known.left(host);
            }
            if origin {
                self.known.joined(host, true, 2);
            }
            let new = Member { origin, holds: origin, ask_at: Duration::ZERO };
            self.members.insert(host, old.unwrap_or(new));
        }
        for gone in before.keys() {
            self.known.left(*gone);
        }
    }

    /// A member has reported which images it has; `holds`: this one is among them.
    pub fn heard(&mut self, host: HostId, holds: bool, now: Duration) {
        let Some(member) = self.members.get_mut(&host) else { return };
        if member.origin {
            return self.known.heard_of(host);
        }
        match holds {
            true if !member.holds => member.ask_at = now,
            false if member.holds => {
                member.holds = false;
                self.is_share_new = true;
                self.known.left(host);
            }
            _ => {}
        }
    }

    /// How many hosts besides the origin are known to have pages of the image, or to be about to.
    pub fn holders(&self) -> usize {
        self.members.values().filter(|member| member.holds && !member.origin).count()
    }

    /// The host that froze the image.
    pub fn origin(&self) -> Option<HostId> {
        self.members.iter().find(|(_, member)| member.origin).map(|(host, _)| *host)
    }

    /// Which host to ask for all of `pages`.
    pub fn choose(&mut self, pages: PageRange, demand: bool, now: Duration) -> Chosen {
        // The read that requested them still waits for them, and will report.
        let _late = self.known.expired(now);
        let choice = match demand {
            true => match self.known.choose(pages, true, now) {
                // The caller knows that.
                Choice::UnderWay => self.known.choose_again(pages, now),
                choice => choice,
            },
            false => self.known.choose_unwaited(pages, now),
        };
        let host = match choice {
            Choice::Ask(host) => host,
            Choice::Later(at) => return Chosen::Later(at.saturating_sub(now)),
            Choice::UnderWay | Choice::NoHolder => return Chosen::NoHolder,
        };
        let insists = self.known.insists(pages);
        let Some(Member { origin, .. }) = self.members.get(&host).copied() else {
            self.known.left(host);
            return Chosen::NoHolder;
        };
        let route = if insists { Route::Insist } else { Route::Direct };
        Chosen::Ask(Asked { host, origin, route })
    }

    /// The hosts that have some of the image, and are no origin. What each holds is known by the
    /// piece of [`UNIT_PAGES`]; of an incomplete piece it may have a part.
    pub fn with_some(&self) -> impl Iterator<Item = HostId> {
        let members = self.members.iter().filter(|(_, member)| member.holds && !member.origin);
        members.map(|(host, _)| *host).filter(|host| !self.known.is_barred(*host))
    }

    /// Whether a host gave a page other than the origin's, so that it is asked no more.
    pub fn is_barred(&self, host: HostId) -> bool {
        self.known.is_barred(host)
    }

    /// Whether any of these is being fetched.
    pub fn is_under_way(&self, pages: PageRange) -> bool {
        self.known.is_under_way(pages)
    }

    /// It answered that they are at host `to`, or about to be. → the host to ask now. `is_avoided`:
    /// `to` has given no answer lately.
    pub fn redirected(
        &mut self,
        host: HostId,
        pages: PageRange,
        (to, is_avoided): (HostId, bool),
        now: Duration,
    ) -> Option<Asked> {
        let can_be_asked = to != self.own && !is_avoided && self.members.contains_key(&to);
        if can_be_asked && !self.known.knows(to) {
            self.known.joined(to, false, 1);
        }
        let to = if can_be_asked { to } else { host };
        let (asked, in_vain) = self.known.redirected(host, pages, to, now)?;
        let Member { origin, .. } = *self.members.get(&asked)?;
        let insists = in_vain || !can_be_asked;
        let route = if insists { Route::Insist } else { Route::Redirected };
        Some(Asked { host: asked, origin, route })
    }

    /// It gave them.
    pub fn answered(&mut self, host: HostId, pages: PageRange, now: Duration) {
        self.known.answered(host, pages, now);
    }

    /// It did not.
    pub fn failed(&mut self, host: HostId, pages: PageRange, why: Failure, now: Duration) {
        self.known.failed(host, pages, why, now);
    }

    /// It was to give all of these on one connection, which has ended.
    pub fn cut_off(&mut self, host: HostId, all: &[PageRange], now: Duration) {
        self.known.cut_off(host, all, now);
    }

    /// A host gave pages after all. → whether it has all of the image.
    pub fn gave(&mut self, host: HostId) -> bool {
        self.known.heard_of(host);
        self.members.get(&host).is_some_and(|member| member.origin)
    }

    /// The place of a piece in this host's own order.
    pub fn place(&self, piece: PageRange) -> u64 {
        Pick::place(piece, self.own.0)
    }

    /// The same where there is an order in which they are wanted, and this one is number `at`. A
    /// host that can ask none but the origin keeps to that.
    pub fn place_near(&self, at: u64, piece: PageRange) -> u64 {
        let has_others = self.members.values().any(|member| !member.origin);
        if has_others { Pick::place_near(at, piece, self.own.0) } else { at }
    }

    /// Which of `pieces` to fetch in the background now.
    pub fn next_ahead(&mut self, pieces: &[PageRange], now: Duration) -> Picked {
        if std::mem::take(&mut self.is_share_new) {
            let holders = self.members.iter().filter(|(_, member)| member.holds && !member.origin);
            let (mut below, mut all) = (0, 1);
            for (host, _) in holders {
                all += 1;
                below += u64::from(*host < self.own);
            }
            self.pick.set_share(below, all);
        }
        self.pick.next(pieces, &self.known, now)
    }

    /// Whether to begin a round now.
    pub fn is_round_due(&self, now: Duration) -> bool {
        let is_due = |member: &Member| !member.origin && member.ask_at <= now;
        !self.round.is_running && self.round.next_at <= now && self.members.values().any(is_due)
    }

    pub fn is_round_running(&self) -> bool {
        self.round.is_running
    }

    /// Begins a round: of those that are due, or of `all`. → the hosts to ask what they hold, one
    /// after the other, and whether these are all that there are. [`Swarm::end_round`] must follow.
    pub fn begin_round(
        &mut self,
        all: bool,
        is_avoided: impl Fn(HostId) -> bool,
        now: Duration,
    ) -> (Vec<HostId>, bool) {
        self.round.is_running = true;
        let is_asked =
            |host: HostId, m: &Member| !m.origin && (all || m.ask_at <= now) && !is_avoided(host);
        let peers = self.members.iter().filter(|(host, member)| is_asked(**host, member));
        let peers: Vec<_> = peers.map(|(host, _)| *host).collect();
        // Go on behind the last of the round before.
        let at = peers.iter().position(|host| Some(*host) > self.round.last);
        let most = self.config.asked_max.max(1);
        let asked = peers.iter().cycle().skip(at.unwrap_or(0)).take(peers.len().min(most));
        (asked.copied().collect(), peers.len() <= most)
    }

    /// It said what it holds.
    pub fn told(&mut self, host: HostId, held: &[PageRange], now: Duration) {
        let Some(member) = self.members.get_mut(&host) else { return };
        let all = held.iter().map(PageRange::len).sum::<u64>() >= self.pages;
        let holds = self.known.joined(host, false, 1);
        self.is_share_new |= std::mem::replace(&mut member.holds, holds) != holds;
        member.ask_at = now + if all { self.config.settled } else { Duration::ZERO };
        self.known.announced_all(host, held);
    }

    /// It did not. `refused`: it answered that there is no such image. One that does not answer may
    /// still have what it had: a host that asks it for pages finds out.
    pub fn silent(&mut self, host: HostId, refused: bool, now: Duration) {
        let Some(member) = self.members.get_mut(&host) else { return };
        member.ask_at = now + self.config.settled;
        if refused {
            member.holds = false;
            self.is_share_new = true;
            self.known.left(host);
        }
    }

    /// `last`: the host that was asked last; `all`: all were.
    pub fn end_round(&mut self, last: Option<HostId>, all: bool, now: Duration) {
        self.round.is_running = false;
        self.round.next_at = now + self.config.every;
        self.round.last = last.filter(|_| !all);
    }
}
