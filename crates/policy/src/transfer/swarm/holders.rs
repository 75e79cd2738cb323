//! Which host has what, and which one to ask.

use std::time::Duration;

use vmfork_image::PageRange;

use super::Pieces;
use super::hosts::{Best, Holder, Hosts};
use crate::page_set::PageSet;
use crate::transfer::HostId;
use crate::transfer::run_map::RunMap;

/// A pause is doubled at most this often.
const DOUBLINGS_MAX: u32 = 16;

/// Sizes, times and bounds of [`Holders`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldersConfig {
    /// The pages of one piece: holders are distinguished by piece. A power of two, 1 to 512.
    pub piece_pages: u64,
    /// Another on each host, such as its id: so that of holders which are all the same, not all
    /// askers take the same.
    pub salt: u64,
    /// Most hosts that are known.
    pub hosts_max: usize,
    /// Most requests in flight to one host, at least 1.
    pub in_flight_max: usize,
    /// Most background reads of those.
    pub ahead_in_flight_max: usize,
    /// The same at an origin, which all others ask, too.
    pub origin_ahead_in_flight_max: usize,
    /// What an answer is thought to take before one was measured.
    pub answer_start: Duration,
    /// An answer that takes longer has timed out: mean + 4 deviations of that host's answers, times
    /// four, but between these.
    pub deadline_min: Duration,
    pub deadline_max: Duration,
    /// A host that failed is left alone for this time, and twice as long with each failure that
    /// follows, up to `avoid_max`.
    pub avoid_min: Duration,
    pub avoid_max: Duration,
    /// After this many failures in a row it is not asked any more, until it is heard of; at least
    /// 1.
    pub failures_max: u32,
}

impl Default for HoldersConfig {
    fn default() -> Self {
        Self {
            piece_pages: 16,
            salt: 0,
            hosts_max: 4096,
            in_flight_max: 32,
            ahead_in_flight_max: 8,
            origin_ahead_in_flight_max: 4,
            answer_start: Duration::from_millis(2),
            deadline_min: Duration::from_millis(500),
            deadline_max: Duration::from_secs(5),
            avoid_min: Duration::from_millis(50),
            avoid_max: Duration::from_secs(2),
            failures_max: 6,
        }
    }
}

/// What [`Holders::choose`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Ask this host for all of it. It is in flight from now on.
    Ask(HostId),
    /// Some of it is in flight already.
    UnderWay,
    /// The hosts that have it have too much to do, or failed a moment ago: choose again then, or
    /// after the next event.
    Later(Duration),
    /// No host that has it is worth asking. The read fails, unless a host is heard of.
    NoHolder,
}

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It has too much to do: asked again a little later, and no fault of its.
    Busy,
    /// It does not have these pages, whatever it announced.
    Lacks,
    /// It could not be reached, broke off, or sent what makes no sense.
    Broken,
    /// It sent other pages than the origin has. It is not asked any more until it joins again.
    Forged,
}

/// Decides for one image on one host which host to ask, and keeps what is in flight.
#[derive(Debug)]
pub struct Holders {
    config: HoldersConfig,
    pieces: Pieces,
    hosts: Hosts,
    flights: RunMap<Flight>,
    /// Requested where an origin sent us, which failed.
    insist: PageSet,
    /// No flight's deadline is before.
    deadline: Duration,
    /// For each piece, how many peers have it that are not lost: no origins.
    copies: Vec<u16>,
}

#[derive(Debug, Clone, Copy)]
struct Flight {
    host: HostId,
    demand: bool,
    /// An origin said to ask there.
    redirected: bool,
    asked_at: Duration,
    deadline: Duration,
}

impl Holders {
    /// For an image of `pages` pages.
    pub fn new(pages: u64, config: HoldersConfig) -> Self {
        let pieces = Pieces::new(pages, config.piece_pages);
        let config = HoldersConfig {
            in_flight_max: config.in_flight_max.max(1),
            failures_max: config.failures_max.max(1),
            deadline_max: config.deadline_max.max(config.deadline_min),
            ..config
        };
        let copies = vec![0; usize::try_from(pieces.count()).unwrap_or(0)];
        Self {
            config,
            pieces,
            hosts: Hosts::new(pieces.count(), config),
            flights: RunMap::default(),
            insist: PageSet::default(),
            deadline: Duration::MAX,
            copies,
        }
    }

    /// A host is there that can be asked: an `origin`, which has the whole image, or a peer, which
    /// has what it announces. `distance`: the less, the nearer. Of one that is known, this is a
    /// sign of life. `false`: there is no room for it.
    pub fn joined(&mut self, host: HostId, origin: bool, distance: u32) -> bool {
        if self.hosts.knows(host) {
            self.heard_of(host);
            return true;
        }
        if self.hosts.len() >= self.config.hosts_max {
            return false;
        }
        self.hosts.insert(host, Holder { origin, distance, ..Holder::default() });
        true
    }

    /// A host has left for good. Returns what was in flight from it, to be requested elsewhere.
    pub fn left(&mut self, host: HostId) -> Vec<PageRange> {
        if self.hosts.get(host).is_some_and(|holder| holder.failures < self.config.failures_max) {
            self.count_copies(host, false);
        }
        self.hosts.remove(host);
        let flights: Vec<_> =
            self.flights.iter().filter(|(_, flight)| flight.host == host).collect();
        for (run, flight) in &flights {
            self.flights.remove(*run);
            self.lost_trail(*run, *flight);
        }
        flights.into_iter().map(|(run, _)| run).collect()
    }

    /// A host that is known has these pages. Pieces of which it has but a part don't count.
    pub fn announced(&mut self, host: HostId, pages: PageRange) {
        self.announced_all(host, &[pages]);
    }

    /// The same of many runs.
    pub fn announced_all(&mut self, host: HostId, runs: &[PageRange]) {
        self.heard_of(host);
        let failures_max = self.config.failures_max;
        let Self { hosts, pieces, copies, .. } = self;
        let Some(holder) = hosts.get(host) else { return };
        let counts = !holder.origin && holder.failures < failures_max;
        hosts.set_all(host, runs.iter().map(|run| pieces.inside(*run)), |piece| {
            let copies = usize::try_from(piece).ok().and_then(|at| copies.get_mut(at));
            if let Some(copies) = copies.filter(|_| counts) {
                *copies = copies.saturating_add(1);
            }
        });
    }

    /// Whether the host has joined.
    pub fn knows(&self, host: HostId) -> bool {
        self.hosts.knows(host)
    }

    /// Whether it gave what is wrong, so that it is asked no more.
    pub fn is_barred(&self, host: HostId) -> bool {
        self.hosts.get(host).is_some_and(|holder| holder.barred)
    }

    /// It lives: if it was given up, it is asked again.
    pub fn heard_of(&mut self, host: HostId) {
        let max = self.config.failures_max;
        let Some(holder) = self.hosts.get(host).filter(|holder| !holder.barred) else { return };
        if holder.failures == 0 && holder.avoid_until.is_zero() {
            return;
        }
        let lost = holder.failures >= max;
        self.hosts.change(host, |holder| {
            holder.failures = 0;
            holder.avoid_until = Duration::ZERO;
        });
        if lost {
            self.count_copies(host, true);
        }
    }

    /// Which host to ask for all of `pages`, which should lie in one piece or few: the holder that
    /// is expected to answer first; of equals the nearest. After [`Choice::Ask`], one of
    /// [`Holders::answered`] and [`Holders::failed`] must follow, or time until
    /// [`Holders::expired`] names it.
    pub fn choose(&mut self, pages: PageRange, demand: bool, now: Duration) -> Choice {
        self.choose_among(pages, demand, now, |_, _| true)
    }

    /// The same where they are in flight, and a waiter considers that too slow: another host, if
    /// one has them, or the same. The earlier request is not in flight any more, whatever comes of
    /// it.
    pub fn choose_again(&mut self, pages: PageRange, now: Duration) -> Choice {
        let before: Vec<_> = self.flights.within(pages).map(|(_, flight)| flight.host).collect();
        for host in &before {
            self.take(*host, pages);
        }
        match self.choose_among(pages, true, now, |host, _| !before.contains(&host)) {
            Choice::NoHolder | Choice::Later(_) => self.choose(pages, true, now),
            choice => choice,
        }
    }

    /// The same among peers or among origins only.
    fn choose_ahead(&mut self, pages: PageRange, origin: bool, now: Duration) -> Choice {
        self.choose_among(pages, false, now, |_, is_origin| is_origin == origin)
    }

    /// The same for background reads: a peer, and an origin if no peer that has it has room.
    pub fn choose_unwaited(&mut self, pages: PageRange, now: Duration) -> Choice {
        match self.choose_ahead(pages, false, now) {
            Choice::NoHolder | Choice::Later(_) => self.choose_ahead(pages, true, now),
            choice => choice,
        }
    }

    /// A host answered with these pages. Of an answer that comes too late: that it lives after all.
    pub fn answered(&mut self, host: HostId, pages: PageRange, now: Duration) {
        let flights = self.take(host, pages);
        self.heard_of(host);
        self.insist.remove(pages);
        // A host that an origin named may have had to wait for the pages itself.
        let measured = flights.iter().filter(|(_, flight)| !flight.redirected);
        let took = measured.map(|(_, flight)| now.saturating_sub(flight.asked_at));
        self.hosts.change(host, |holder| took.for_each(|took| holder.times.sample(took)));
    }

    /// An origin answered that another host has these pages, or is about to
    /// ([`Spread`](super::Spread)). Returns the host to ask now, and whether to insist: the origin
    /// again, if that host cannot be asked. `None`: nothing of it is in flight any more, so that no
    /// host need be asked.
    pub fn redirected(
        &mut self,
        origin: HostId,
        pages: PageRange,
        to: HostId,
        now: Duration,
    ) -> Option<(HostId, bool)> {
        let flights = self.take(origin, pages);
        let (_, flight) = *flights.first()?;
        self.heard_of(origin);
        let config = self.config;
        let vain = self.hosts.get(to).is_some_and(|holder| {
            holder.failures >= config.failures_max
                || holder.avoid_until > now
                || holder.in_flight >= config.in_flight_max
        });
        let host = if vain { origin } else { to };
        for (run, _) in &flights {
            self.set_out(*run, host, flight.demand, !vain, now);
        }
        if vain {
            self.insist.insert(pages);
        }
        Some((host, vain))
    }

    /// Whether to insist when these pages are requested: an origin sent us elsewhere before, and
    /// that failed.
    pub fn insists(&self, pages: PageRange) -> bool {
        self.insist.count(pages) > 0
    }

    /// A host did not answer with these pages. They are not in flight any more.
    pub fn failed(&mut self, host: HostId, pages: PageRange, why: Failure, now: Duration) {
        let flights = self.take(host, pages);
        for (run, flight) in &flights {
            self.lost_trail(*run, *flight);
        }
        match why {
            Failure::Broken => self.fault(host, now),
            Failure::Forged => {
                let max = self.config.failures_max;
                let counted = self.hosts.change(host, |holder| {
                    holder.barred = true;
                    std::mem::replace(&mut holder.failures, max) < max
                });
                if counted == Some(true) {
                    self.count_copies(host, false);
                }
            }
            Failure::Busy => {
                let until = now.saturating_add(self.config.avoid_min);
                self.hosts.change(host, |holder| {
                    holder.avoid_ahead_until = until;
                    // Demand may still find room where the rest did not.
                    if flights.iter().any(|(_, flight)| flight.demand) {
                        holder.avoid_until = until;
                    }
                });
            }
            Failure::Lacks => {
                for piece in self.pieces.touching(pages) {
                    let Some(holder) = self.hosts.get(host) else { return };
                    let counted = !holder.origin && holder.failures < self.config.failures_max;
                    let had = self.hosts.set(host, piece, false);
                    if counted && had {
                        self.copies_of(piece, false);
                    }
                }
            }
        }
    }

    /// A connection ended on which a host was to answer with all of these. That is one failure,
    /// however many they are.
    pub fn cut_off(&mut self, host: HostId, all: &[PageRange], now: Duration) {
        for pages in all {
            for (run, flight) in self.take(host, *pages) {
                self.lost_trail(run, flight);
            }
        }
        self.fault(host, now);
    }

    /// What was not answered in time, with the host that was asked: it counts as failed, and can be
    /// asked for elsewhere.
    pub fn expired(&mut self, now: Duration) -> Vec<(HostId, PageRange)> {
        if now < self.deadline {
            return Vec::new();
        }
        let late: Vec<_> =
            self.flights.iter().filter(|(_, flight)| flight.deadline <= now).collect();
        for (run, flight) in &late {
            self.take(flight.host, *run);
            self.lost_trail(*run, *flight);
        }
        let mut hosts: Vec<_> = late.iter().map(|(_, flight)| flight.host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        for host in hosts {
            self.fault(host, now); // one failure, however much it had to do
        }
        self.deadline =
            self.flights.iter().map(|(_, flight)| flight.deadline).min().unwrap_or(Duration::MAX);
        late.into_iter().map(|(run, flight)| (flight.host, run)).collect()
    }

    /// When something expires, unless it is answered before.
    pub fn wake_at(&self) -> Option<Duration> {
        (!self.flights.is_empty()).then_some(self.deadline)
    }

    /// Whether any of these pages is in flight.
    pub fn is_under_way(&self, pages: PageRange) -> bool {
        self.flights.within(pages).next().is_some()
    }

    /// How many requests are in flight.
    pub fn under_way(&self) -> usize {
        self.flights.len()
    }

    /// How many of them began as background reads.
    pub fn ahead_under_way(&self) -> usize {
        self.flights.iter().filter(|(_, flight)| !flight.demand).count()
    }

    /// How many pages a piece has.
    pub fn piece_pages(&self) -> u64 {
        self.pieces.piece_pages
    }

    /// How many peers that are worth asking have the piece in which `pages` begins.
    pub fn copies(&self, pages: PageRange) -> u16 {
        let copies = usize::try_from(self.piece_at(pages)).ok().and_then(|at| self.copies.get(at));
        copies.copied().unwrap_or(0)
    }

    /// Whether origins have all the background reads that they may have, or failed a moment ago. If
    /// no origin is worth asking: no.
    pub fn origins_are_full(&self, now: Duration) -> bool {
        let config = self.config;
        let mut origins = self.hosts.origins().peekable();
        let is_full = |holder: &Holder| {
            holder.ahead_in_flight >= config.origin_ahead_in_flight_max
                || holder.in_flight >= config.in_flight_max
                || holder.avoid_until.max(holder.avoid_ahead_until) > now
        };
        origins.peek().is_some() && origins.all(is_full)
    }

    /// The number of the piece in which `pages` begins.
    pub(super) fn piece_at(&self, pages: PageRange) -> u64 {
        pages.start().0 / self.pieces.piece_pages
    }

    fn choose_among(
        &mut self,
        pages: PageRange,
        demand: bool,
        now: Duration,
        among: impl Fn(HostId, bool) -> bool,
    ) -> Choice {
        if self.is_under_way(pages) {
            return Choice::UnderWay;
        }
        let wanted = self.pieces.touching(pages);
        let host = match self.hosts.best(wanted, demand, now, among) {
            Best::Host(host) => host,
            // Of one that has too much to do, something ends at its deadline at the latest.
            Best::Full => return Choice::Later(self.deadline),
            Best::Avoided { until, or_full: true } => {
                return Choice::Later(until.min(self.deadline));
            }
            Best::Avoided { until, .. } => return Choice::Later(until),
            Best::NoHolder => return Choice::NoHolder,
        };
        self.set_out(pages, host, demand, false, now);
        Choice::Ask(host)
    }

    /// `pages` are asked for from now on.
    fn set_out(
        &mut self,
        pages: PageRange,
        host: HostId,
        demand: bool,
        redirected: bool,
        now: Duration,
    ) {
        let config = self.config;
        let bound = self.hosts.change(host, |holder| {
            holder.in_flight += 1;
            holder.ahead_in_flight += usize::from(!demand);
            holder.times.bound(config.answer_start).saturating_mul(4)
        });
        let bound = bound.unwrap_or(config.deadline_min);
        // The named host may have to wait itself.
        let bound = if redirected { config.deadline_max } else { bound };
        let deadline = now.saturating_add(bound.clamp(config.deadline_min, config.deadline_max));
        self.flights.insert(pages, Flight { host, demand, redirected, asked_at: now, deadline });
        self.deadline = self.deadline.min(deadline);
    }

    /// These will not come.
    fn lost_trail(&mut self, pages: PageRange, flight: Flight) {
        if flight.redirected {
            self.insist.insert(pages);
        }
    }

    /// Takes out what is in flight from `host` in `pages`.
    fn take(&mut self, host: HostId, pages: PageRange) -> Vec<(PageRange, Flight)> {
        let its: Vec<_> =
            self.flights.within(pages).filter(|(_, flight)| flight.host == host).collect();
        let mut taken = Vec::new();
        for (run, flight) in its {
            let before = self.flights.len();
            taken.extend(self.flights.remove(run));
            // One less, or as many if a part is left, or one more if it was the middle.
            let after = self.flights.len();
            let count = |count: usize| (count + after).saturating_sub(before);
            self.hosts.change(host, |holder| {
                holder.in_flight = count(holder.in_flight);
                if !flight.demand {
                    holder.ahead_in_flight = count(holder.ahead_in_flight);
                }
            });
        }
        taken
    }

    fn fault(&mut self, host: HostId, now: Duration) {
        let config = self.config;
        let lost = self.hosts.change(host, |holder| {
            let before = holder.failures;
            holder.failures = before.saturating_add(1).min(config.failures_max);
            let pause = config.avoid_min.saturating_mul(1 << before.min(DOUBLINGS_MAX));
            holder.avoid_until = now.saturating_add(pause.min(config.avoid_max));
            before < config.failures_max && holder.failures >= config.failures_max
        });
        if lost == Some(true) {
            self.count_copies(host, false);
        }
    }

    /// A peer counts from now on, or does not any more.
    fn count_copies(&mut self, host: HostId, counts: bool) {
        if self.hosts.get(host).is_none_or(|holder| holder.origin) {
            return;
        }
        for piece in 0..self.pieces.count() {
            if self.hosts.has(host, piece) {
                self.copies_of(piece, counts);
            }
        }
    }

    fn copies_of(&mut self, piece: u64, more: bool) {
        let copies = usize::try_from(piece).ok().and_then(|at| self.copies.get_mut(at));
        if let Some(copies) = copies {
            *copies = if more { copies.saturating_add(1) } else { copies.saturating_sub(1) };
        }
    }
}

/// The finalizer of SplitMix64: every bit of the result depends on every bit of `x`.
pub(super) fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
