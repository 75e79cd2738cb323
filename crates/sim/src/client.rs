//! What brings pages to a host from others, as a daemon does it: fetchers, each with one read, and
//! rounds of asking what others hold.
//!
//! ```text
//!   submit ──► queues ──► 20 reads at a time, each a Read ──Ask, Compare──► messages ──► replies ──► settled
//!                                                         ──Hear──────────► the host's Receiver
//! ```
//!
//! What a read does is decided in [`vmfork_policy::transfer::read`], which the daemon drives, too.
//! What is here carries it out with messages in place of sockets; the rounds follow
//! `vmfork_transfer`'s `Swarm`, and the queues the engine's `Fetchers`.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use vmfork_image::{ImageName, PageIdx, PageRange};
use vmfork_policy::transfer::bounds::{
    ANSWER, AVOID, FETCHERS_AHEAD_MAX, FETCHERS_MAX, HEAR_AHEAD, HEAR_DEMAND, PATIENCE,
};
use vmfork_policy::transfer::multicast::{Trust, TrustConfig};
use vmfork_policy::transfer::read::{
    Action, Event, Hosts, Read, ReplyError, Request, SumRequests, Verdict,
};
use vmfork_policy::transfer::swarm::{Picked, Swarm, SwarmConfig};
use vmfork_policy::transfer::{HostId, Urgency};

use crate::cache::Cache;
use crate::network::{Message, Refused};

const ORIGIN: usize = 0;

const IMAGE: ImageName = ImageName { host: 0, image: 1 };

/// What came of all that was done.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) messages: Vec<(usize, Message)>,
    /// Reads that came to their end, and whether the pages are here.
    pub(crate) settled: Vec<(PageRange, bool)>,
    /// Pages that were requested, and for which no read waits any more.
    pub(crate) gave_up: Vec<PageRange>,
    /// Reads that wait for their pages in the group.
    pub(crate) hear: Vec<Hear>,
}

/// A read waits for its pages in the group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hear {
    pub(crate) read: u64,
    pub(crate) pages: PageRange,
    pub(crate) urgency: Urgency,
}

/// A read that is in progress.
#[derive(Debug)]
struct Active {
    read: Read,
    does: Does,
    /// Pages have come, and were not used yet.
    has_come: bool,
}

/// What is being done for a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    /// It waits for a reply, for hosts, or for time to pass.
    Waits,
    Hears,
    /// Of its pages the origin's sums are missing. It has asked for `asked`, or another read has
    /// asked for them.
    Compares {
        asked: Option<PageRange>,
    },
}

#[derive(Debug)]
struct Round {
    left: VecDeque<HostId>,
    all: bool,
    /// The host that is being asked, and until when.
    asked: Option<(HostId, Duration)>,
}

/// What is known of other hosts.
#[derive(Debug)]
struct Known {
    swarm: Option<Swarm>,
    /// Hosts that gave no reply, asked after others until then.
    avoided: BTreeMap<usize, Duration>,
    now: Duration,
}

impl Known {
    fn avoids(&self, host: usize) -> bool {
        self.avoided.get(&host).is_some_and(|until| *until > self.now)
    }
}

impl Hosts for Known {
    fn swarm(&mut self) -> Option<&mut Swarm> {
        self.swarm.as_mut()
    }

    /// The host that announced the image, which froze it.
    fn named(&mut self) -> Vec<HostId> {
        vec![id(ORIGIN)]
    }

    fn named_version(&self) -> u64 {
        0
    }

    fn origin(&self) -> Option<HostId> {
        Some(id(ORIGIN))
    }

    fn is_avoided(&self, host: HostId) -> bool {
        self.avoids(number(host))
    }
}

#[derive(Debug)]
pub(crate) struct Client {
    pages: u64,
    known: Known,
    round: Option<Round>,
    /// Those of the origin's sums that are known here.
    sums: Cache,
    /// Those that prefetches have asked for.
    sum_requests: SumRequests,
    demand: VecDeque<PageRange>,
    ahead: VecDeque<PageRange>,
    reads: BTreeMap<u64, Active>,
    next: u64,
    /// Whether reads are for the group, if there is one.
    group: Option<Trust>,
}

fn id(host: usize) -> HostId {
    HostId(host as u64)
}

fn number(host: HostId) -> usize {
    usize::try_from(host.0).unwrap_or(usize::MAX)
}

impl Client {
    /// Of host `own`; `hosts`: how many there are besides the parent's, if they serve each other.
    pub(crate) fn new(pages: u64, own: usize, hosts: Option<usize>, hears_group: bool) -> Self {
        let swarm = hosts.map(|hosts| {
            let mut swarm = Swarm::new(pages, id(own), SwarmConfig::default());
            swarm.set_members((0..=hosts).map(|host| (id(host), host == ORIGIN)));
            swarm
        });
        Self {
            pages,
            known: Known { swarm, avoided: BTreeMap::new(), now: Duration::ZERO },
            round: None,
            sums: Cache::new(pages),
            sum_requests: SumRequests::default(),
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            reads: BTreeMap::new(),
            next: 0,
            group: hears_group.then(|| Trust::new(TrustConfig::default())),
        }
    }

    /// A host has said that it has the image.
    pub(crate) fn heard(&mut self, host: usize, now: Duration) {
        if let Some(swarm) = &mut self.known.swarm {
            swarm.heard(id(host), true, now);
        }
    }

    /// A place of a piece in the order in which this host brings all of them.
    pub(crate) fn place(&self, piece: PageRange) -> u64 {
        self.known.swarm.as_ref().map_or(piece.start().0, |swarm| swarm.place(piece))
    }

    /// The same where there is an order in which they are wanted, and this one is number `at`.
    pub(crate) fn place_near(&self, at: u64, piece: PageRange) -> u64 {
        self.known.swarm.as_ref().map_or(at, |swarm| swarm.place_near(at, piece))
    }

    /// Which piece to prefetch next. As `PeerSource` has it.
    pub(crate) fn next_ahead(
        &mut self,
        pieces: &[PageRange],
        now: Duration,
        out: &mut Outbox,
    ) -> Picked {
        if self.group.is_some() {
            return Picked::Piece(0); // if one asks for it, all get it
        }
        self.refresh_soon(now, out);
        self.known.swarm.as_mut().map_or(Picked::Piece(0), |swarm| swarm.next_ahead(pieces, now))
    }

    /// Have pages brought.
    pub(crate) fn submit(&mut self, pages: PageRange, urgency: Urgency) {
        self.queue(urgency).push_back(pages);
    }

    fn queue(&mut self, urgency: Urgency) -> &mut VecDeque<PageRange> {
        match urgency {
            Urgency::Demand => &mut self.demand,
            Urgency::Ahead => &mut self.ahead,
        }
    }

    /// Whether they come from one host, or are about to.
    pub(crate) fn brings_by_unicast(&self, page: PageIdx) -> bool {
        let is_its = |active: &Active| {
            active.does != Does::Hears && active.read.request().pages.contains(page)
        };
        self.demand.iter().chain(&self.ahead).any(|pages| pages.contains(page))
            || self.reads.values().any(is_its)
    }

    /// Whether any of these is being brought.
    pub(crate) fn is_coming(&self, pages: PageRange) -> bool {
        self.known.swarm.as_ref().is_some_and(|swarm| swarm.is_under_way(pages))
    }

    /// Whether an answer to this is still taken.
    pub(crate) fn waits_for(&self, read: u64) -> bool {
        self.reads.get(&read).is_some_and(|active| active.read.asked().is_some())
    }

    pub(crate) fn wake_at(&self) -> Option<Duration> {
        let reads = self.reads.values().map(|active| active.read.until());
        let round = self.round.as_ref().and_then(|round| round.asked).map(|(_, until)| until);
        reads.chain(round).min()
    }

    /// The reads of which this is so.
    fn numbers(&self, is_so: impl Fn(&Active) -> bool) -> Vec<u64> {
        self.reads.iter().filter(|(_, active)| is_so(active)).map(|(number, _)| *number).collect()
    }

    /// What is late fails, and what waits for a fetcher begins if there is one.
    pub(crate) fn pump(&mut self, now: Duration, out: &mut Outbox) {
        if let Some((host, until)) = self.round.as_ref().and_then(|round| round.asked)
            && until <= now
        {
            self.avoid(number(host), now);
            self.on_held(number(host), None, false, now, out);
        }
        for number in self.numbers(|active| active.read.until() <= now) {
            self.late(number, now, out);
        }
        while self.reads.len() < FETCHERS_MAX {
            let is_ahead = |active: &Active| active.read.request().urgency == Urgency::Ahead;
            let has_room = || self.numbers(is_ahead).len() < FETCHERS_AHEAD_MAX;
            let urgency = match self.demand.is_empty() {
                false => Urgency::Demand,
                true if has_room() => Urgency::Ahead,
                true => break,
            };
            let Some(pages) = self.queue(urgency).pop_front() else { break };
            self.begin(pages, urgency, now, out);
        }
    }

    fn begin(&mut self, pages: PageRange, urgency: Urgency, now: Duration, out: &mut Outbox) {
        let hear_for = match urgency {
            Urgency::Demand => HEAR_DEMAND,
            Urgency::Ahead => HEAR_AHEAD,
        };
        let group = self.group.as_mut();
        let is_for_group = group.is_some_and(|trust| trust.allows(urgency, now));
        let hear_until = is_for_group.then_some(now + hear_for);
        if self.group.is_some() && !is_for_group {
            out.gave_up.push(pages); // what another host asks for in the group comes here, too
        }
        if hear_until.is_none() {
            self.refresh_soon(now, out);
        }
        let give_up = now + PATIENCE;
        let request = Request { image: IMAGE, pages, urgency, give_up, hear_until };
        let number = self.next;
        self.next += 1;
        self.known.now = now;
        let (read, action) = Read::begin(request, &mut self.known, now);
        self.reads.insert(number, Active { read, does: Does::Waits, has_come: false });
        self.carry_out(number, action, now, out);
    }

    /// A read has waited for long enough.
    fn late(&mut self, number: u64, now: Duration, out: &mut Outbox) {
        let Some(Active { read, does, .. }) = self.reads.get(&number) else { return };
        if *does == Does::Hears {
            return self.not_heard(number, now, out);
        }
        if let Some(host) = read.asked() {
            out.gave_up.push(read.request().pages);
            self.avoid(self::number(host), now);
        }
        self.on(number, Event::Tick, now, out);
    }

    /// Something has happened to a read, which continues.
    fn on(&mut self, number: u64, event: Event, now: Duration, out: &mut Outbox) {
        self.known.now = now;
        let Some(active) = self.reads.get_mut(&number) else { return };
        let Some(action) = active.read.on(event, &mut self.known, now) else { return };
        let before = std::mem::replace(&mut active.does, Does::Waits);
        let is_ahead = active.read.request().urgency == Urgency::Ahead;
        self.carry_out(number, action, now, out);
        if let Does::Compares { asked: Some(asked) } = before
            && is_ahead
        {
            self.sum_requests.ended(asked);
            // Reads that waited for the same sums request them, if they have not come.
            for other in self.waiting_for(asked) {
                self.compare(other, Some(id(ORIGIN)), now, out);
            }
        }
    }

    fn carry_out(&mut self, number: u64, action: Action, now: Duration, out: &mut Outbox) {
        let Some(active) = self.reads.get_mut(&number) else { return };
        let Request { pages, urgency, .. } = *active.read.request();
        match action {
            Action::Hear { .. } => {
                active.does = Does::Hears;
                out.hear.push(Hear { read: number, pages, urgency });
            }
            Action::Ask { host, route, .. } => {
                if std::mem::take(&mut active.has_come) {
                    out.gave_up.push(pages); // they come twice
                }
                let demand = urgency == Urgency::Demand;
                let ask = Message::Ask { read: number, pages, demand, route };
                out.messages.push((self::number(host), ask));
            }
            Action::Compare { origin, .. } => self.compare(number, origin, now, out),
            Action::Refresh { .. } => {
                self.begin_round(true, now, out);
                if self.round.is_none() {
                    self.on(number, Event::Refreshed, now, out);
                }
            }
            Action::Wait { .. } => {}
            Action::Done(_) => self.settle(number, true, out),
            Action::GiveUp(_) => self.settle(number, false, out),
        }
    }

    /// Pages here are what the origin has, which lies about none: but its sums have to come.
    fn compare(&mut self, number: u64, origin: Option<HostId>, now: Duration, out: &mut Outbox) {
        let Some(active) = self.reads.get_mut(&number) else { return };
        let Request { pages, urgency, .. } = *active.read.request();
        if self.sums.has_all(pages) {
            return self.on(number, Event::Compared(Verdict::Right), now, out);
        }
        // A daemon finds out when it connects next that a host which gave no reply is not there.
        if origin.is_none() || self.known.avoids(ORIGIN) {
            return self.on(number, Event::Compared(Verdict::Believed), now, out);
        }
        let wanted = SumRequests::wanted(pages, urgency).intersect(&PageRange::first(self.pages));
        if urgency == Urgency::Ahead && self.sum_requests.is_under_way(wanted) {
            active.does = Does::Compares { asked: None };
            return;
        }
        if urgency == Urgency::Ahead {
            self.sum_requests.began(wanted);
        }
        active.does = Does::Compares { asked: Some(wanted) };
        out.messages.push((ORIGIN, Message::Sums { read: number, pages: wanted }));
    }

    /// Reads that wait for these sums, for which another read has asked.
    fn waiting_for(&self, sums: PageRange) -> Vec<u64> {
        self.numbers(|active| {
            active.does == Does::Compares { asked: None }
                && sums.covers(&active.read.request().pages)
        })
    }

    fn settle(&mut self, number: u64, came: bool, out: &mut Outbox) {
        if let Some(active) = self.reads.remove(&number) {
            out.settled.push((active.read.request().pages, came));
        }
    }

    fn avoid(&mut self, host: usize, now: Duration) {
        self.known.avoided.insert(host, now + AVOID);
    }

    /// Pages have come to the cache. Reads that waited for them in the group are through.
    pub(crate) fn heard_pages(&mut self, cache: &Cache, now: Duration, out: &mut Outbox) {
        let is_heard =
            |it: &Active| it.does == Does::Hears && cache.has_all(it.read.request().pages);
        for number in self.numbers(is_heard) {
            if let Some((trust, active)) = self.group.as_mut().zip(self.reads.get(&number)) {
                trust.heard(active.read.request().urgency);
            }
            self.on(number, Event::Heard, now, out);
        }
    }

    /// A read's pages are not asked for in the group, or not any more. A part of them may have
    /// come, and comes twice.
    pub(crate) fn not_heard(&mut self, read: u64, now: Duration, out: &mut Outbox) {
        let Some(active) = self.reads.get(&read) else { return };
        let Request { pages, urgency, .. } = *active.read.request();
        out.gave_up.push(pages);
        if let Some(trust) = &mut self.group {
            trust.in_vain(urgency, now);
        }
        self.refresh_soon(now, out);
        self.on(read, Event::NotHeard, now, out);
    }

    /// The same of all reads that wait for some of these.
    pub(crate) fn not_heard_pages(&mut self, pages: PageRange, now: Duration, out: &mut Outbox) {
        let waits = |it: &Active| {
            it.does == Does::Hears && !it.read.request().pages.intersect(&pages).is_empty()
        };
        for number in self.numbers(waits) {
            self.not_heard(number, now, out);
        }
    }

    /// The pages of a read came.
    pub(crate) fn on_answer(&mut self, from: usize, read: u64, now: Duration, out: &mut Outbox) {
        let Some(active) = self.reads.get_mut(&read) else { return };
        if active.read.asked() != Some(id(from)) {
            return;
        }
        active.has_come = true;
        self.known.avoided.remove(&from);
        self.on(read, Event::Reply { from: id(from) }, now, out);
    }

    /// The origin sent sums.
    pub(crate) fn on_sums(&mut self, read: u64, pages: PageRange, now: Duration, out: &mut Outbox) {
        self.known.avoided.remove(&ORIGIN);
        self.sums.insert(pages);
        self.on_sums_of(read, Verdict::Right, now, out);
    }

    fn on_sums_of(&mut self, number: u64, verdict: Verdict, now: Duration, out: &mut Outbox) {
        let does = self.reads.get(&number).map(|active| active.does);
        if matches!(does, Some(Does::Compares { .. })) {
            self.on(number, Event::Compared(verdict), now, out);
        }
    }

    /// A host did not give the pages.
    pub(crate) fn on_refused(
        &mut self,
        from: usize,
        read: u64,
        why: Refused,
        now: Duration,
        out: &mut Outbox,
    ) {
        let Some(active) = self.reads.get(&read) else { return };
        let (pages, asks) = (active.read.request().pages, active.read.asked());
        let compares = matches!(active.does, Does::Compares { .. });
        if compares && from == ORIGIN && why == Refused::Gone {
            self.avoid(ORIGIN, now);
            return self.on_sums_of(read, Verdict::Believed, now, out);
        }
        if asks != Some(id(from)) {
            return;
        }
        let from_id = id(from);
        let event = match why {
            Refused::Elsewhere { to, summed } => {
                if summed > 0 {
                    self.sums.insert(pages);
                }
                Event::Elsewhere { from: from_id, at: id(to) }
            }
            Refused::NotHere => Event::Failed { from: from_id, why: ReplyError::Lacks },
            Refused::Gone => {
                out.gave_up.push(pages);
                self.avoid(from, now);
                Event::Failed { from: from_id, why: ReplyError::Broken }
            }
        };
        self.on(read, event, now, out);
    }

    /// Pages are being brought: ask others what they hold, if it is time.
    fn refresh_soon(&mut self, now: Duration, out: &mut Outbox) {
        if self.known.swarm.as_ref().is_some_and(|swarm| swarm.is_round_due(now)) {
            self.begin_round(false, now, out);
        }
    }

    fn begin_round(&mut self, all: bool, now: Duration, out: &mut Outbox) {
        let Some(swarm) = self.known.swarm.as_mut().filter(|swarm| !swarm.is_round_running())
        else {
            return;
        };
        let avoided = &self.known.avoided;
        let is_avoided = |host| avoided.get(&number(host)).is_some_and(|until| *until > now);
        let (asked, all) = swarm.begin_round(all, is_avoided, now);
        self.round = Some(Round { left: asked.into(), all, asked: None });
        self.ask_next(None, now, out);
    }

    fn ask_next(&mut self, last: Option<HostId>, now: Duration, out: &mut Outbox) {
        let Some(round) = &mut self.round else { return };
        if let Some(host) = round.left.pop_front() {
            round.asked = Some((host, now + ANSWER));
            out.messages.push((number(host), Message::AskHeld));
            return;
        }
        let all = round.all;
        self.round = None;
        if let Some(swarm) = &mut self.known.swarm {
            swarm.end_round(last, all, now);
        }
        for number in self.numbers(|active| active.read.is_refreshing()) {
            self.on(number, Event::Refreshed, now, out);
        }
    }

    /// A host reported what it holds; `None`: nothing, or it gave no answer (`refused`: it answered
    /// that there is no such image).
    pub(crate) fn on_held(
        &mut self,
        from: usize,
        runs: Option<&[PageRange]>,
        refused: bool,
        now: Duration,
        out: &mut Outbox,
    ) {
        let Some((host, _)) = self.round.as_ref().and_then(|round| round.asked) else { return };
        if host != id(from) {
            return;
        }
        if let Some(swarm) = &mut self.known.swarm {
            match runs {
                Some(runs) => swarm.told(host, runs, now),
                None => swarm.silent(host, refused, now),
            }
        }
        self.ask_next(Some(host), now, out);
    }

    /// The host that was asked what it holds has gone.
    pub(crate) fn on_held_gone(&mut self, from: usize, now: Duration, out: &mut Outbox) {
        self.avoid(from, now);
        self.on_held(from, None, false, now, out);
    }
}
