//! A host with a clone: drives the state machines as a daemon does, with messages in place of sockets.

use std::rc::Rc;
use std::time::Duration;

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::multicast::{Receiver, ReceiverConfig};
use vmfork_policy::transfer::swarm::{
    Ahead, AheadConfig, Announcements, AnnouncementsConfig, Choice, Failure, Holders, HoldersConfig,
};
use vmfork_policy::{
    Config, Listed, Outcome as Fault, Presence as _, Priority, Reason, Scheduler, ViewId,
};

use crate::cache::Cache;
use crate::network::Message;
use crate::random::Random;
use crate::report::Outcome;
use crate::scenario::{Mode, Scenario};
use crate::trace::Trace;

const VIEW: ViewId = ViewId(1);

/// Demand brings the aligned window of so many pages; the swarm's pieces are as large.
pub(crate) const UNIT_PAGES: u64 = 16;

/// Most pages of a fetch that nobody waits for.
const AHEAD_PAGES_MAX: u64 = 64;

/// In a swarm, most pieces that nobody waits for under way at a time: more than a link holds.
const AHEAD_UNDER_WAY_MAX: usize = 8;

/// Having found nothing to fetch ahead, look again when something has changed, but not sooner than this,
const AHEAD_PAUSE: Duration = Duration::from_millis(2);

/// and when nothing has, after this.
const AHEAD_POLL: Duration = Duration::from_millis(50);

/// Rounds of finding that nobody has a page, and asking for its neighbours one by one.
const ROUNDS_MAX: usize = 4096;

/// Most requests that wait for pages which are on their way here themselves.
const DEFERRED_MAX: usize = 256;

/// What a host wants done.
#[derive(Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) messages: Vec<(usize, Message)>,
    /// Pages that it stopped waiting for.
    pub(crate) gave_up: Vec<PageRange>,
    /// Runs that it announces to its neighbours.
    pub(crate) announce: Option<Vec<PageRange>>,
    pub(crate) serve: Vec<Deferred>,
}

/// Somebody asked for pages that are on their way here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deferred {
    pub(crate) asker: usize,
    pub(crate) pages: PageRange,
    pub(crate) demand: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Waiting(PageIdx),
    Ended(Outcome),
}

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) cache: Cache,
    pub(crate) neighbours: Vec<usize>,
    /// When the world is going to call `pump`.
    pub(crate) timer_at: Option<Duration>,
    pub(crate) waits: u64,
    scheduler: Scheduler<Cache>,
    trace: Rc<Trace>,
    /// Which step, what of its pages is still to be touched, and when.
    step: usize,
    rest: Option<PageRange>,
    clock: Duration,
    touch_at: Option<Duration>,
    state: State,
    receiver: Option<Receiver>,
    holders: Holders,
    ahead: Option<Ahead>,
    announcements: Option<Announcements>,
    /// Fetches by unicast, until all of each is here, and whether somebody waited when it began.
    pending: Vec<(PageRange, bool)>,
    pending_at: Option<Duration>,
    deferred: Vec<Deferred>,
    random: Random,
    ahead_changed: bool,
    ahead_at: Duration,
}

/// What is known by its number in the cluster.
fn id(host: usize) -> HostId {
    HostId(host as u64)
}

fn number(host: HostId) -> usize {
    usize::try_from(host.0).unwrap_or(usize::MAX)
}

impl Host {
    pub(crate) fn new(
        scenario: &Scenario,
        number: usize,
        neighbours: Vec<usize>,
        random: Random,
    ) -> Self {
        let pages = scenario.pages;
        let cache = Cache::new(pages);
        let own = ImageId::new(1);
        let table = PageTable::uniform(pages, own.map_or(Source::Zero, Source::Image));
        let config =
            Config { unit_pages: UNIT_PAGES, background_fetches_max: 8, ..Config::default() };
        let scheduler = Scheduler::new(table, cache.clone(), config);
        let mut scheduler =
            scheduler.unwrap_or_else(|error| unreachable!("a valid configuration: {error}"));
        let swarm = scenario.mode == Mode::Swarm;
        let mut ahead = None;
        if swarm && !scenario.ahead.is_empty() {
            let mut policy = Ahead::new(pages, UNIT_PAGES, &scenario.ahead, AheadConfig::default());
            policy.set_share(number as u64 - 1, scenario.traces.len() as u64);
            ahead = Some(policy);
        } else if !scenario.ahead.is_empty() {
            let listed = Listed::new(
                "working-set",
                Priority::WorkingSet,
                scenario.ahead.clone(),
                AHEAD_PAGES_MAX,
            );
            // There is room: it is the only one.
            let _ = scheduler.add_background(Box::new(listed));
        }
        let mut holders = Holders::new(
            pages,
            HoldersConfig {
                piece_pages: UNIT_PAGES,
                salt: (number as u64) << 32,
                ..HoldersConfig::default()
            },
        );
        holders.joined(id(0), true, 1);
        for neighbour in &neighbours {
            holders.joined(id(*neighbour), false, 1);
        }
        let announces = !neighbours.is_empty();
        Self {
            cache,
            neighbours,
            timer_at: None,
            waits: 0,
            scheduler,
            trace: Rc::clone(&scenario.traces[number - 1]),
            step: 0,
            rest: None,
            clock: Duration::ZERO,
            touch_at: None,
            state: State::Running,
            receiver: (scenario.mode == Mode::Multicast)
                .then(|| Receiver::new(ReceiverConfig::default())),
            holders,
            ahead,
            announcements: announces
                .then(|| Announcements::new(pages, AnnouncementsConfig::default())),
            pending: Vec::new(),
            pending_at: None,
            deferred: Vec::new(),
            random,
            ahead_changed: true,
            ahead_at: Duration::ZERO,
        }
    }

    /// How the clone ended, if it has.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        match self.state {
            State::Ended(outcome) => Some(outcome),
            State::Running | State::Waiting(_) => None,
        }
    }

    /// What it waits for.
    pub(crate) fn waits_for(&self) -> Option<PageIdx> {
        match self.state {
            State::Waiting(page) => Some(page),
            State::Running | State::Ended(_) => None,
        }
    }

    pub(crate) fn die(&mut self) {
        self.state = State::Ended(Outcome::Died);
    }

    /// Other hosts give signs of life.
    pub(crate) fn heard_of(&mut self, host: usize) {
        self.holders.heard_of(id(host));
    }

    /// Unicast: pages came.
    pub(crate) fn on_answer(&mut self, from: usize, pages: PageRange, now: Duration) {
        self.holders.answered(id(from), pages, now);
        if let Some(receiver) = &mut self.receiver {
            receiver.filled(pages);
        }
        self.insert(pages, now);
    }

    /// Unicast: pages will not come.
    pub(crate) fn on_failure(
        &mut self,
        from: usize,
        pages: PageRange,
        why: Failure,
        now: Duration,
    ) {
        self.holders.failed(id(from), pages, why, now);
        self.ahead_changed = true;
    }

    /// Unicast: another host is said to have these pages.
    pub(crate) fn on_redirect(
        &mut self,
        pages: PageRange,
        to: usize,
        now: Duration,
    ) -> Option<(usize, bool)> {
        self.holders
            .redirected(id(0), pages, id(to), now)
            .map(|(host, insist)| (number(host), insist))
    }

    /// Whether pages that somebody asks for are on their way: then they are sent on.
    pub(crate) fn defer(&mut self, request: Deferred) -> bool {
        let comes = self.holders.is_under_way(request.pages) && self.deferred.len() < DEFERRED_MAX;
        if comes {
            self.deferred.push(request);
        }
        comes
    }

    pub(crate) fn on_announcement(&mut self, from: usize, runs: &[PageRange]) {
        for run in runs {
            self.holders.announced(id(from), *run);
        }
        self.ahead_changed = true;
    }

    /// Multicast: pages came. Whether that changed anything but what is to be put in the cache later.
    pub(crate) fn on_heard(&mut self, pages: PageRange, now: Duration) -> bool {
        let Some(receiver) = &mut self.receiver else { return false };
        receiver.heard(pages, now);
        self.take_batch(now)
    }

    fn take_batch(&mut self, now: Duration) -> bool {
        let Some(batch) = self.receiver.as_mut().and_then(|receiver| receiver.batch(now)) else {
            return false;
        };
        for run in batch {
            self.insert(run, now);
        }
        true
    }

    fn insert(&mut self, pages: PageRange, now: Duration) {
        self.cache.insert(pages);
        self.scheduler.on_filled(pages);
        if let Some(announcements) = &mut self.announcements {
            announcements.came(pages, now);
        }
        self.ahead_changed = true;
    }

    /// Everything that can go on goes on. What of that others must know is in `wishes`.
    pub(crate) fn pump(&mut self, now: Duration, wishes: &mut Wishes) {
        if matches!(self.state, State::Ended(Outcome::Died | Outcome::Stopped { .. })) {
            return;
        }
        self.take_batch(now);
        for (_, pages) in self.holders.expired(now) {
            wishes.gave_up.push(pages);
            self.ahead_changed = true;
        }
        for _ in 0..ROUNDS_MAX {
            self.run(now);
            self.start_fetches(now);
            self.go_on_by_multicast(now, wishes);
            if !self.ask(now, wishes) {
                break;
            }
        }
        self.fetch_ahead(now, wishes);
        self.go_on_serving(wishes);
        let receiver = self.receiver.as_mut();
        if let Some(bytes_per_s) = receiver.and_then(|receiver| receiver.feedback(now)) {
            wishes.messages.push((0, Message::Feedback { bytes_per_s }));
        }
        wishes.announce =
            self.announcements.as_mut().and_then(|announcements| announcements.take(now));
    }

    /// When to call `pump` if nothing happens before.
    pub(crate) fn wake_at(&self, now: Duration) -> Option<Duration> {
        if matches!(self.state, State::Ended(Outcome::Died | Outcome::Stopped { .. })) {
            return None;
        }
        let ahead = self.ahead.as_ref().filter(|ahead| !ahead.is_done());
        let ahead = ahead.filter(|_| self.holders.ahead_under_way() < AHEAD_UNDER_WAY_MAX);
        let ahead = ahead
            .map(|_| if self.ahead_changed { self.ahead_at } else { self.ahead_at + AHEAD_POLL });
        let times = [
            self.touch_at,
            self.receiver.as_ref().and_then(Receiver::wake_at),
            self.holders.wake_at(),
            self.announcements.as_ref().and_then(Announcements::wake_at),
            self.pending_at,
            ahead,
        ];
        times.into_iter().flatten().min().map(|at| at.max(now))
    }

    /// The clone goes on until it needs a page that is not here, or time has not come so far.
    fn run(&mut self, now: Duration) {
        match self.state {
            State::Ended(_) => return,
            State::Waiting(page) if !self.cache.is_present(page) => return,
            State::Waiting(_) => (self.state, self.clock) = (State::Running, now),
            State::Running => {}
        }
        self.touch_at = None;
        while let Some(step) = self.trace.steps().get(self.step) {
            let rest = match self.rest {
                Some(rest) => rest,
                None => {
                    self.clock += step.compute;
                    step.pages
                }
            };
            let Some(absent) = self.cache.next_absent(rest) else {
                self.rest = None;
                self.step += 1;
                continue;
            };
            self.rest = Some(rest.from_page(absent.start()));
            if self.clock > now {
                self.touch_at = Some(self.clock);
                return;
            }
            let page = absent.start();
            match self.scheduler.on_fault(VIEW, page) {
                Fault::Waits => {
                    self.waits += 1;
                    self.state = State::Waiting(page);
                    let by_unicast = self.pending.iter().any(|(pages, _)| pages.contains(page));
                    if let Some(receiver) = self.receiver.as_mut().filter(|_| !by_unicast) {
                        // It may be wanted already, for nobody. If there is no room, its turn comes: nothing is lost.
                        let _ = receiver.want(page.range(), true, now);
                    }
                    return;
                }
                Fault::Zero | Fault::Present => {}
                Fault::Refused(_) => {
                    self.state = State::Ended(Outcome::Stopped { at: now, page });
                    return;
                }
            }
        }
        self.state = State::Ended(Outcome::Done { at: self.clock });
    }

    fn start_fetches(&mut self, now: Duration) {
        while let Some(fetch) = self.scheduler.next(AHEAD_PAGES_MAX) {
            let demand = fetch.reason == Reason::Demand;
            let wanted =
                self.receiver.as_mut().map(|receiver| receiver.want(fetch.range, demand, now));
            if !matches!(wanted, Some(Ok(()))) {
                self.pending.push((fetch.range, demand));
            }
        }
    }

    fn go_on_by_multicast(&mut self, now: Duration, wishes: &mut Wishes) {
        let Some(receiver) = &mut self.receiver else { return };
        while let Some(request) = receiver.next_request(now) {
            wishes.messages.push((0, Message::Request(request)));
        }
        while let Some(gave_up) = receiver.gave_up() {
            wishes.gave_up.push(gave_up.pages);
            if gave_up.demand {
                self.pending.push((gave_up.pages, true));
            } else {
                // A help that did not help: who needs them will say so.
                self.scheduler.on_failed(gave_up.pages);
            }
        }
    }

    /// Asks for what is fetched by unicast. Whether the scheduler has something else to say now.
    fn ask(&mut self, now: Duration, wishes: &mut Wishes) -> bool {
        let mut again = false;
        self.pending_at = None;
        let mut at = 0;
        while let Some((whole, demand)) = self.pending.get(at).copied() {
            let demand = demand || self.waits_for().is_some_and(|page| whole.contains(page));
            let (mut rest, mut nobody) = (whole, false);
            while let Some(absent) = self.cache.next_absent(rest) {
                rest = rest.from_page(absent.end());
                match self.holders.choose(absent, demand, now) {
                    Choice::Ask(host) => {
                        let insist = self.holders.insists(absent);
                        let ask = Message::Ask { pages: absent, demand, insist };
                        wishes.messages.push((number(host), ask));
                    }
                    Choice::UnderWay => {}
                    Choice::Later(later) => {
                        let later = later.max(now + Duration::from_millis(1));
                        self.pending_at = Some(self.pending_at.map_or(later, |at| at.min(later)));
                    }
                    Choice::Nobody => nobody = true,
                }
            }
            if self.cache.has_all(whole) {
                self.pending.swap_remove(at);
            } else if nobody {
                self.pending.swap_remove(at);
                again = true;
                if let Some((_, page)) = self.scheduler.on_failed(whole).first() {
                    self.state = State::Ended(Outcome::Stopped { at: now, page: *page });
                    return false;
                }
            } else {
                at += 1;
            }
        }
        again
    }

    fn fetch_ahead(&mut self, now: Duration, wishes: &mut Wishes) {
        let Some(ahead) = &mut self.ahead else { return };
        let polls = now >= self.ahead_at + AHEAD_POLL;
        if now < self.ahead_at || !self.ahead_changed && !polls {
            return;
        }
        while self.holders.ahead_under_way() < AHEAD_UNDER_WAY_MAX {
            let random = &mut |below: u64| self.random.below(below);
            let Some((host, pages)) = ahead.next(&mut self.holders, &self.cache, random, now)
            else {
                self.ahead_changed = false;
                self.ahead_at = now + AHEAD_PAUSE;
                return;
            };
            let insist = self.holders.insists(pages);
            wishes.messages.push((number(host), Message::Ask { pages, demand: false, insist }));
        }
    }

    /// What others asked for came, or will not.
    fn go_on_serving(&mut self, wishes: &mut Wishes) {
        let Self { deferred, cache, holders, .. } = self;
        deferred.retain(|request| {
            let Deferred { asker, pages, .. } = *request;
            let here = cache.has_all(pages);
            if here {
                wishes.serve.push(*request);
            } else if !holders.is_under_way(pages) {
                wishes.messages.push((asker, Message::Fail { pages, why: Failure::Lacks }));
            } else {
                return true;
            }
            false
        });
    }
}
