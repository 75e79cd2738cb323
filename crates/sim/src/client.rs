//! What brings pages to a host from others, as a daemon does it: fetchers, each with one read, which goes from host to host until one gives
//! the pages; and rounds of asking what others hold.
//!
//! ```text
//!   submit ──► queues ──► 20 reads at a time: swarm ──► named hosts ──► ask all what they hold ──► pause ─┐
//!                                    ▲──────────────────────────────────────────────────────────────────────┘ for 10 s
//! ```
//!
//! Whom to ask is [`Swarm`]'s decision; what is here follows `vmfork_transfer`'s `PeerSource`, `Verifier` and `Swarm`, and the engine's
//! `Fetchers`, whose blocking threads are states here.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use vmfork_image::{BLOCK_PAGES, PageIdx, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::bounds::{
    ANSWER, AVOID, DEMAND_WAIT, FETCHERS_AHEAD_MAX, FETCHERS_MAX, LATER_MAX, LATER_MIN, PATIENCE,
    PAUSE_MAX, PAUSE_MIN, REFRESH_WAIT,
};
use vmfork_policy::transfer::swarm::{Asked, Chosen, Failure, Picked, Route, Swarm, SwarmConfig};

use crate::cache::Cache;
use crate::network::{Message, Refused};

const ORIGIN: usize = 0;

/// What came of all that was done.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) messages: Vec<(usize, Message)>,
    /// Reads that came to their end, and whether the pages are here.
    pub(crate) settled: Vec<(PageRange, bool)>,
    /// Pages that were asked for, and are not waited for any more.
    pub(crate) gave_up: Vec<PageRange>,
}

#[derive(Debug)]
struct Read {
    pages: PageRange,
    demand: bool,
    give_up: Duration,
    /// Of this round, and whether it may be otherwise in a moment.
    failed: Vec<(usize, bool)>,
    all_were_asked: bool,
    /// Its time is over: once more, and no more.
    is_late: bool,
    pause: Duration,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// A host has been asked for the pages, out of the swarm or since it was named.
    Asked {
        host: usize,
        origin: bool,
        in_swarm: bool,
        route: Route,
        until: Duration,
    },
    /// The pages are here, the origin's sums are not: it has been asked for `asked`, or another read has asked for them.
    Sums {
        host: usize,
        in_swarm: bool,
        asked: Option<PageRange>,
        until: Duration,
    },
    /// They can't be compared, so that the origin has been asked for them.
    Undecided {
        host: usize,
        in_swarm: bool,
        until: Duration,
    },
    /// Those that have them are busy.
    Later {
        until: Duration,
    },
    Refreshes {
        until: Duration,
    },
    Pauses {
        until: Duration,
    },
}

impl State {
    fn until(self) -> Duration {
        match self {
            Self::Asked { until, .. }
            | Self::Sums { until, .. }
            | Self::Undecided { until, .. }
            | Self::Later { until }
            | Self::Refreshes { until }
            | Self::Pauses { until } => until,
        }
    }
}

#[derive(Debug)]
struct Round {
    left: VecDeque<HostId>,
    all: bool,
    /// Who is being asked, and until when.
    asked: Option<(HostId, Duration)>,
}

#[derive(Debug)]
pub(crate) struct Client {
    pages: u64,
    swarm: Option<Swarm>,
    round: Option<Round>,
    /// Those of the origin's sums that are known here.
    sums: Cache,
    /// Gave no answer: asked after others until then.
    avoided: BTreeMap<usize, Duration>,
    demand: VecDeque<PageRange>,
    ahead: VecDeque<PageRange>,
    reads: BTreeMap<u64, Read>,
    next: u64,
    hears_group: bool,
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
            swarm,
            round: None,
            sums: Cache::new(pages),
            avoided: BTreeMap::new(),
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            reads: BTreeMap::new(),
            next: 0,
            hears_group,
        }
    }

    /// Somebody's daemon has said that it has the image.
    pub(crate) fn heard(&mut self, host: usize, now: Duration) {
        if let Some(swarm) = &mut self.swarm {
            swarm.heard(id(host), true, now);
        }
    }

    /// A place of a piece in the order in which this host brings all of them.
    pub(crate) fn place(&self, piece: PageRange) -> u64 {
        self.swarm.as_ref().map_or(piece.start().0, |swarm| swarm.place(piece))
    }

    /// The same where there is an order in which they are wanted, and this one is number `at`.
    pub(crate) fn place_near(&self, at: u64, piece: PageRange) -> u64 {
        self.swarm.as_ref().map_or(at, |swarm| swarm.place_near(at, piece))
    }

    /// Which piece to bring next that nobody waits for. As `PeerSource` has it.
    pub(crate) fn next_ahead(
        &mut self,
        pieces: &[PageRange],
        now: Duration,
        out: &mut Outbox,
    ) -> Picked {
        if self.hears_group {
            return Picked::Piece(0); // whoever asks for it, all get it
        }
        self.refresh_soon(now, out);
        self.swarm.as_mut().map_or(Picked::Piece(0), |swarm| swarm.next_ahead(pieces, now))
    }

    /// Have pages brought.
    pub(crate) fn submit(&mut self, pages: PageRange, demand: bool) {
        if demand { &mut self.demand } else { &mut self.ahead }.push_back(pages);
    }

    /// Whether they are, or are about to be.
    pub(crate) fn brings(&self, page: PageIdx) -> bool {
        self.demand.iter().chain(&self.ahead).any(|pages| pages.contains(page))
            || self.reads.values().any(|read| read.pages.contains(page))
    }

    /// Whether any of these is being brought.
    pub(crate) fn is_coming(&self, pages: PageRange) -> bool {
        self.swarm.as_ref().is_some_and(|swarm| swarm.is_under_way(pages))
    }

    /// Whether an answer to this is still taken.
    pub(crate) fn waits_for(&self, read: u64) -> bool {
        let state = self.reads.get(&read).map(|read| read.state);
        matches!(state, Some(State::Asked { .. } | State::Undecided { .. }))
    }

    pub(crate) fn wake_at(&self) -> Option<Duration> {
        let reads = self.reads.values().map(|read| read.state.until());
        let round = self.round.as_ref().and_then(|round| round.asked).map(|(_, until)| until);
        reads.chain(round).min()
    }

    /// What is late fails, and what waits for a fetcher begins if there is one.
    pub(crate) fn pump(&mut self, now: Duration, out: &mut Outbox) {
        if let Some((host, until)) = self.round.as_ref().and_then(|round| round.asked)
            && until <= now
        {
            self.avoid(number(host), now);
            self.on_held(number(host), None, false, now, out);
        }
        let late = self.reads.iter().filter(|(_, read)| read.state.until() <= now);
        for number in late.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.late(number, now, out);
        }
        while self.reads.len() < FETCHERS_MAX {
            let ahead = self.reads.values().filter(|read| !read.demand).count();
            let next = match self.demand.pop_front() {
                Some(pages) => Some((pages, true)),
                None if ahead < FETCHERS_AHEAD_MAX => {
                    self.ahead.pop_front().map(|pages| (pages, false))
                }
                None => None,
            };
            let Some((pages, demand)) = next else { break };
            self.refresh_soon(now, out);
            let number = self.next;
            self.next += 1;
            let state = State::Pauses { until: Duration::MAX };
            let read = Read {
                pages,
                demand,
                give_up: now + PATIENCE,
                failed: Vec::new(),
                all_were_asked: false,
                is_late: false,
                pause: PAUSE_MIN,
                state,
            };
            self.reads.insert(number, read);
            self.ask_in_swarm(number, now, out);
        }
    }

    fn late(&mut self, number: u64, now: Duration, out: &mut Outbox) {
        let Some(Read { state, pages, .. }) = self.reads.get(&number) else { return };
        match *state {
            State::Asked { host, .. } => {
                out.gave_up.push(*pages);
                self.avoid(host, now);
                self.failed(number, Failure::Broken, now, out);
            }
            State::Sums { host, in_swarm, .. } => {
                self.ask_undecided(number, host, in_swarm, now, out);
            }
            State::Undecided { .. } => {
                out.gave_up.push(*pages);
                self.avoid(ORIGIN, now);
                self.failed(number, Failure::Busy, now, out);
            }
            State::Later { .. } => self.ask_in_swarm(number, now, out),
            State::Refreshes { .. } => self.refreshed(number, now, out),
            State::Pauses { .. } => self.begin_again(number, now, out),
        }
    }

    /// Whoever is best of those that are known to have the pages.
    fn ask_in_swarm(&mut self, number: u64, now: Duration, out: &mut Outbox) {
        let Some(read) = self.reads.get_mut(&number) else { return };
        let Read { pages, demand, give_up, is_late, .. } = *read;
        read.is_late = now >= give_up;
        let chosen = match &mut self.swarm {
            Some(swarm) if !is_late => swarm.choose(pages, demand, now),
            _ => Chosen::Nobody,
        };
        match chosen {
            Chosen::Ask(asked) => self.ask(number, asked, true, now, out),
            Chosen::Later(wait) if !demand && now < give_up => {
                read.state = State::Later { until: now + wait.clamp(LATER_MIN, LATER_MAX) };
            }
            Chosen::Later(_) | Chosen::Nobody => self.ask_named(number, now, out),
        }
    }

    fn ask(&mut self, number: u64, asked: Asked, in_swarm: bool, now: Duration, out: &mut Outbox) {
        let Some(read) = self.reads.get_mut(&number) else { return };
        let Read { pages, demand, .. } = *read;
        let Asked { host, origin, route } = asked;
        let wait = if demand && in_swarm && !origin { DEMAND_WAIT } else { ANSWER };
        let host = self::number(host);
        read.state = State::Asked { host, origin, in_swarm, route, until: now + wait };
        out.messages.push((host, Message::Ask { read: number, pages, demand, route }));
    }

    /// Who told of the image, which is who froze it.
    fn ask_named(&mut self, number: u64, now: Duration, out: &mut Outbox) {
        let Some(read) = self.reads.get(&number) else { return };
        if !read.failed.iter().any(|(host, _)| *host == ORIGIN) {
            let asked = Asked { host: id(ORIGIN), origin: true, route: Route::Insist };
            return self.ask(number, asked, false, now, out);
        }
        let left = read.give_up.saturating_sub(now);
        if self.swarm.is_some() && !read.all_were_asked {
            // Somebody may have it of whom that is not known yet.
            self.begin_round(true, now, out);
            if self.round.is_none() {
                return self.refreshed(number, now, out);
            }
            let until = now + left.min(REFRESH_WAIT);
            if let Some(read) = self.reads.get_mut(&number) {
                read.state = State::Refreshes { until };
            }
            return;
        }
        let may_pass = read.failed.iter().any(|(_, passing)| *passing);
        if left.is_zero() || !may_pass {
            return self.settle(number, false, out);
        }
        let Some(read) = self.reads.get_mut(&number) else { return };
        read.state = State::Pauses { until: now + read.pause.min(left) };
        read.pause = (read.pause * 2).min(PAUSE_MAX);
        read.all_were_asked = false;
    }

    fn refreshed(&mut self, number: u64, now: Duration, out: &mut Outbox) {
        if let Some(read) = self.reads.get_mut(&number) {
            read.all_were_asked = true;
        }
        self.begin_again(number, now, out);
    }

    fn begin_again(&mut self, number: u64, now: Duration, out: &mut Outbox) {
        if let Some(read) = self.reads.get_mut(&number) {
            read.failed.clear();
            read.is_late = false;
        }
        self.ask_in_swarm(number, now, out);
    }

    fn settle(&mut self, number: u64, came: bool, out: &mut Outbox) {
        if let Some(Read { pages, .. }) = self.reads.remove(&number) {
            out.settled.push((pages, came));
        }
    }

    fn avoid(&mut self, host: usize, now: Duration) {
        self.avoided.insert(host, now + AVOID);
    }

    /// The pages of a read came. → whether it was waited for.
    pub(crate) fn on_answer(
        &mut self,
        from: usize,
        number: u64,
        now: Duration,
        out: &mut Outbox,
    ) -> bool {
        let Some(read) = self.reads.get_mut(&number) else { return false };
        let Read { pages, demand, .. } = *read;
        let (host, origin, in_swarm) = match read.state {
            State::Asked { host, origin, in_swarm, .. } if host == from => (host, origin, in_swarm),
            State::Undecided { .. } if from == ORIGIN => {
                self.settle(number, true, out);
                return true;
            }
            _ => return false,
        };
        self.avoided.remove(&from);
        let origin = match &mut self.swarm {
            Some(swarm) if in_swarm => {
                swarm.answered(id(host), pages, now);
                origin
            }
            Some(swarm) => swarm.gave(id(host)),
            None => true,
        };
        let is_origin_avoided = self.avoided.get(&ORIGIN).is_some_and(|until| *until > now);
        if origin || is_origin_avoided || self.sums.has_all(pages) {
            self.settle(number, true, out);
            return true;
        }
        let wanted = if demand { pages } else { block(pages, self.pages) };
        let is_asked = self.reads.values().any(|read| match read.state {
            State::Sums { asked: Some(asked), .. } => asked.covers(&wanted),
            _ => false,
        });
        let asked = (demand || !is_asked).then_some(wanted);
        if let Some(read) = self.reads.get_mut(&number) {
            read.state = State::Sums { host, in_swarm, asked, until: now + DEMAND_WAIT };
        }
        if let Some(pages) = asked {
            out.messages.push((ORIGIN, Message::Sums { read: number, pages }));
        }
        true
    }

    /// The origin told sums.
    pub(crate) fn on_sums(&mut self, number: u64, pages: PageRange, out: &mut Outbox) {
        self.avoided.remove(&ORIGIN);
        self.sums.insert(pages);
        self.summed(number, |of| pages.covers(of), out);
    }

    /// A read knows as much of sums as it will, and so do those for whose pages it had asked, too.
    fn summed(&mut self, number: u64, is_known: impl Fn(&PageRange) -> bool, out: &mut Outbox) {
        let knows = |(it, read): &(&u64, &Read)| match read.state {
            State::Sums { asked, .. } => **it == number || asked.is_none() && is_known(&read.pages),
            _ => false,
        };
        for number in self.reads.iter().filter(knows).map(|(it, _)| *it).collect::<Vec<_>>() {
            self.settle(number, true, out);
        }
    }

    fn ask_undecided(
        &mut self,
        number: u64,
        host: usize,
        in_swarm: bool,
        now: Duration,
        out: &mut Outbox,
    ) {
        let Some(read) = self.reads.get_mut(&number) else { return };
        let Read { pages, demand, .. } = *read;
        out.gave_up.push(pages); // come twice
        read.state = State::Undecided { host, in_swarm, until: now + ANSWER };
        let route = Route::Insist;
        out.messages.push((ORIGIN, Message::Ask { read: number, pages, demand, route }));
    }

    /// A host did not give the pages.
    pub(crate) fn on_refused(
        &mut self,
        from: usize,
        number: u64,
        why: Refused,
        now: Duration,
        out: &mut Outbox,
    ) {
        let Some(Read { pages, state, .. }) = self.reads.get(&number) else { return };
        match (*state, why) {
            (
                State::Asked { host, route: Route::Direct, .. },
                Refused::Elsewhere { to, summed },
            ) if host == from => {
                let pages = *pages;
                if summed > 0 {
                    self.sums.insert(pages);
                }
                let is_avoided = self.avoided.get(&to).is_some_and(|until| *until > now);
                let to = (id(to), is_avoided);
                let swarm = self.swarm.as_mut();
                match swarm.and_then(|swarm| swarm.redirected(id(host), pages, to, now)) {
                    Some(asked) => self.ask(number, asked, true, now, out),
                    None => self.ask_in_swarm(number, now, out),
                }
            }
            (State::Asked { host, .. }, Refused::NotHere | Refused::Elsewhere { .. })
                if host == from =>
            {
                self.failed(number, Failure::Lacks, now, out);
            }
            (State::Asked { host, .. }, Refused::Gone) if host == from => {
                out.gave_up.push(*pages);
                self.avoid(host, now);
                self.failed(number, Failure::Broken, now, out);
            }
            (State::Sums { .. }, Refused::Gone) if from == ORIGIN => {
                self.avoid(ORIGIN, now);
                self.summed(number, |_| true, out); // believed
            }
            (State::Undecided { .. }, _) if from == ORIGIN => {
                self.failed(number, Failure::Busy, now, out);
            }
            _ => {}
        }
    }

    fn failed(&mut self, number: u64, why: Failure, now: Duration, out: &mut Outbox) {
        let Some(read) = self.reads.get_mut(&number) else { return };
        let (State::Asked { host, in_swarm, .. } | State::Undecided { host, in_swarm, .. }) =
            read.state
        else {
            return;
        };
        read.failed.push((host, matches!(why, Failure::Broken | Failure::Busy)));
        if let Some(swarm) = self.swarm.as_mut().filter(|_| in_swarm) {
            swarm.failed(id(host), read.pages, why, now);
            return self.ask_in_swarm(number, now, out);
        }
        self.ask_named(number, now, out);
    }

    /// Pages are being brought: ask others what they hold, if it is time.
    fn refresh_soon(&mut self, now: Duration, out: &mut Outbox) {
        if self.swarm.as_ref().is_some_and(|swarm| swarm.is_round_due(now)) {
            self.begin_round(false, now, out);
        }
    }

    fn begin_round(&mut self, all: bool, now: Duration, out: &mut Outbox) {
        let Some(swarm) = self.swarm.as_mut().filter(|swarm| !swarm.is_round_running()) else {
            return;
        };
        let avoided = &self.avoided;
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
        if let Some(swarm) = &mut self.swarm {
            swarm.end_round(last, all, now);
        }
        let waiting = |read: &Read| matches!(read.state, State::Refreshes { .. });
        let waiting = self.reads.iter().filter(|(_, read)| waiting(read));
        for number in waiting.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.refreshed(number, now, out);
        }
    }

    /// A host told what it holds; `None`: nothing, or it gave no answer (`refused`: it said that there is no such image).
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
        if let Some(swarm) = &mut self.swarm {
            match runs {
                Some(runs) => swarm.told(host, runs, now),
                None => swarm.silent(host, refused, now),
            }
        }
        self.ask_next(Some(host), now, out);
    }

    /// Nobody listens where it was asked what is held there.
    pub(crate) fn on_held_gone(&mut self, from: usize, now: Duration, out: &mut Outbox) {
        self.avoid(from, now);
        self.on_held(from, None, false, now, out);
    }
}

/// The whole block of some pages.
fn block(pages: PageRange, image: u64) -> PageRange {
    let start = pages.start().0 / BLOCK_PAGES * BLOCK_PAGES;
    PageRange::first(image).from_page(PageIdx(start)).truncate(BLOCK_PAGES)
}
