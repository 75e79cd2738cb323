//! A host with a clone: drives the state machines as a daemon does, with messages in place of
//! sockets.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};
use vmfork_policy::transfer::Urgency;
use vmfork_policy::transfer::bounds::PICK_AMONG;
use vmfork_policy::transfer::multicast::{Receiver, ReceiverConfig};
use vmfork_policy::transfer::swarm::{Picked, READS_AHEAD, UNIT_PAGES};
use vmfork_policy::{
    Config, Listed, Outcome as Fault, Presence as _, Priority, Reason, Scheduler, ViewId,
};

use crate::cache::Cache;
use crate::client::{Client, Hear, Outbox};
use crate::network::Message;
use crate::report::Outcome;
use crate::scenario::{Mode, Scenario};
use crate::trace::Trace;

const VIEW: ViewId = ViewId(1);

/// Rounds of finding that no host has a page, and asking for its neighbours one by one.
const ROUNDS_MAX: usize = 4096;

/// What a host wants done.
#[derive(Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) messages: Vec<(usize, Message)>,
    /// Pages that it stopped waiting for.
    pub(crate) gave_up: Vec<PageRange>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Waiting(PageIdx),
    /// The trace is through; hydration may not be.
    Through(Duration),
    Ended(Outcome),
}

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) cache: Cache,
    /// When the world is going to call `pump`.
    pub(crate) timer_at: Option<Duration>,
    pub(crate) waits: u64,
    /// When its clone was through with each step of its trace, since its start.
    pub(crate) played: Vec<Duration>,
    /// Its clone is there from then on.
    pub(crate) starts_at: Duration,
    pub(crate) client: Client,
    scheduler: Scheduler<Cache>,
    trace: Rc<Trace>,
    /// Which step, what of its pages is still to be touched, and when.
    step: usize,
    rest: Option<PageRange>,
    clock: Duration,
    touch_at: Option<Duration>,
    state: State,
    receiver: Option<Receiver>,
    /// What is left to hydrate, in the host's own order.
    left: Option<VecDeque<PageRange>>,
    /// Hydration had rather wait.
    not_before: Option<Duration>,
    pages: u64,
}

impl Host {
    pub(crate) fn new(scenario: &Scenario, number: usize, starts_at: Duration) -> Self {
        let pages = scenario.pages;
        let cache = Cache::new(pages);
        let own = ImageId::new(1);
        let table = PageTable::uniform(pages, own.map_or(Source::Zero, Source::Image));
        let config = Config {
            unit_pages: UNIT_PAGES,
            background_fetches_max: READS_AHEAD,
            ..Config::default()
        };
        let scheduler = Scheduler::new(table, cache.clone(), config);
        let mut scheduler =
            scheduler.unwrap_or_else(|error| unreachable!("a valid configuration: {error}"));
        let hosts = (scenario.mode != Mode::Unicast).then_some(scenario.traces.len());
        let hears_group = scenario.mode == Mode::Multicast;
        let client = Client::new(pages, number, hosts, hears_group);
        if !scenario.ahead.is_empty() {
            let pieces = scenario.ahead.iter().flat_map(|run| units_of(*run));
            let place = |(at, piece)| (client.place_near(at, piece), piece);
            let mut list: Vec<_> = (0..).zip(pieces).map(place).collect();
            list.sort_by_key(|(place, _)| *place);
            let list = list.into_iter().map(|(_, piece)| piece).collect();
            let listed = Listed::new("working set", Priority::WorkingSet, list, UNIT_PAGES);
            // There is room: it is the only one.
            let _ = scheduler.add_background(Box::new(listed));
        }
        let left = scenario.hydrates.then(|| {
            let image = PageRange::first(pages);
            let piece = |at: u64| image.from_page(PageIdx(at * UNIT_PAGES)).truncate(UNIT_PAGES);
            let mut left: Vec<_> = (0..pages.div_ceil(UNIT_PAGES)).map(piece).collect();
            left.sort_by_cached_key(|piece| client.place(*piece));
            left.into()
        });
        Self {
            cache,
            timer_at: None,
            waits: 0,
            played: Vec::new(),
            starts_at,
            client,
            scheduler,
            trace: Rc::clone(&scenario.traces[number - 1]),
            step: 0,
            rest: None,
            clock: starts_at,
            touch_at: None,
            state: State::Running,
            receiver: hears_group.then(|| Receiver::new(ReceiverConfig::default())),
            left,
            not_before: None,
            pages,
        }
    }

    /// How the clone ended, if it has.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        match self.state {
            State::Ended(outcome) => Some(outcome),
            State::Running | State::Waiting(_) | State::Through(_) => None,
        }
    }

    /// What it waits for.
    pub(crate) fn waits_for(&self) -> Option<PageIdx> {
        match self.state {
            State::Waiting(page) => Some(page),
            State::Running | State::Through(_) | State::Ended(_) => None,
        }
    }

    pub(crate) fn die(&mut self) {
        self.state = State::Ended(Outcome::Died);
    }

    fn is_gone(&self) -> bool {
        matches!(self.state, State::Ended(Outcome::Died | Outcome::Stopped { .. }))
    }

    /// Multicast: pages came. Whether that changed anything but what is to be put in the cache
    /// later.
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
            self.insert(run);
        }
        true
    }

    fn insert(&mut self, pages: PageRange) {
        self.cache.insert(pages);
        self.scheduler.on_filled(pages);
        self.not_before = None;
    }

    /// Everything that can continue does, with the answers to questions in `out`. What others must
    /// know of that is in `wishes`.
    pub(crate) fn pump(&mut self, now: Duration, mut out: Outbox, wishes: &mut Wishes) {
        if self.is_gone() || now < self.starts_at {
            return;
        }
        self.take_batch(now);
        self.client.heard_pages(&self.cache, now, &mut out);
        self.client.pump(now, &mut out);
        for _ in 0..ROUNDS_MAX {
            let settled = self.settle(now, &mut out);
            self.run(now);
            let fetched = self.start_fetches(now, &mut out);
            self.client.pump(now, &mut out);
            self.hear(now, &mut out);
            self.go_on_by_multicast(now, &mut out, wishes);
            if !settled && !fetched && out.settled.is_empty() || self.is_gone() {
                break;
            }
        }
        wishes.messages.append(&mut out.messages);
        wishes.gave_up.append(&mut out.gave_up);
        let receiver = self.receiver.as_mut();
        if let Some(bytes_per_s) = receiver.and_then(|receiver| receiver.feedback(now)) {
            wishes.messages.push((0, Message::Feedback { bytes_per_s }));
        }
        if let State::Through(at) = self.state {
            let all = PageRange::first(self.pages);
            if self.left.is_none() || self.cache.has_all(all) {
                let at = if self.left.is_some() { now.max(at) } else { at };
                self.state = State::Ended(Outcome::Done { at });
            }
        }
    }

    /// When to call `pump` if nothing happens before.
    pub(crate) fn wake_at(&self, now: Duration) -> Option<Duration> {
        if self.is_gone() {
            return None;
        }
        if now < self.starts_at {
            return Some(self.starts_at);
        }
        let times = [
            self.touch_at,
            self.receiver.as_ref().and_then(Receiver::wake_at),
            self.client.wake_at(),
            self.not_before,
        ];
        times.into_iter().flatten().min().map(|at| at.max(now))
    }

    /// The clone continues until it needs a page that is not here, or until its time.
    fn run(&mut self, now: Duration) {
        match self.state {
            State::Through(_) | State::Ended(_) => return,
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
                self.played.push(self.clock.saturating_sub(self.starts_at));
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
                    let by_unicast = self.client.brings_by_unicast(page);
                    if let Some(receiver) = self.receiver.as_mut().filter(|_| !by_unicast) {
                        // It may be a prefetch already. If there is no room, its turn comes:
                        // nothing is lost.
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
        self.state = State::Through(self.clock);
    }

    /// Whether anything new is to be brought.
    fn start_fetches(&mut self, now: Duration, out: &mut Outbox) -> bool {
        let mut any = false;
        loop {
            while let Some(fetch) = self.scheduler.next(UNIT_PAGES) {
                any = true;
                let urgency = match fetch.reason {
                    Reason::Demand => Urgency::Demand,
                    Reason::Background(..) => Urgency::Ahead,
                };
                self.client.submit(fetch.range, urgency);
            }
            if !self.hydrate_some(now, out) {
                return any;
            }
        }
    }

    /// Propose the next piece of what is missing. Whether there is one.
    fn hydrate_some(&mut self, now: Duration, out: &mut Outbox) -> bool {
        if self.left.as_ref().is_none_or(VecDeque::is_empty)
            || !self.scheduler.has_room_ahead()
            || self.not_before.is_some_and(|not_before| now < not_before)
        {
            return false;
        }
        self.not_before = None;
        let at = match self.pick(now, out) {
            Picked::Piece(at) => at,
            Picked::Later(wait) => {
                self.not_before = Some(now + wait);
                return false;
            }
        };
        let Some(piece) = self.left.as_mut().and_then(|left| left.swap_remove_front(at)) else {
            return false;
        };
        if !self.cache.has_all(piece) {
            let listed = Listed::new("hydrate", Priority::Rest, vec![piece], piece.len());
            let _ = self.scheduler.add_background(Box::new(listed)); // the one before is done
        }
        true
    }

    fn pick(&mut self, now: Duration, out: &mut Outbox) -> Picked {
        let among = self.left.iter().flatten().take(PICK_AMONG);
        let mut pieces = Vec::with_capacity(PICK_AMONG);
        for (at, piece) in among.enumerate() {
            if self.cache.is_present(piece.start()) && self.cache.has_all(*piece) {
                return Picked::Piece(at); // it came meanwhile
            }
            pieces.push(*piece);
        }
        self.client.next_ahead(&pieces, now, out)
    }

    /// Reads begin to wait for their pages in the group.
    fn hear(&mut self, now: Duration, out: &mut Outbox) {
        for Hear { read, pages, urgency } in std::mem::take(&mut out.hear) {
            let demand = urgency == Urgency::Demand;
            let wanted = self.receiver.as_mut().map(|receiver| receiver.want(pages, demand, now));
            if !matches!(wanted, Some(Ok(()))) {
                self.client.not_heard(read, now, out);
            }
        }
    }

    fn go_on_by_multicast(&mut self, now: Duration, out: &mut Outbox, wishes: &mut Wishes) {
        let Some(receiver) = &mut self.receiver else { return };
        while let Some(request) = receiver.next_request(now) {
            wishes.messages.push((0, Message::Request(request)));
        }
        while let Some(gave_up) = receiver.gave_up() {
            wishes.gave_up.push(gave_up.pages);
            self.client.not_heard_pages(gave_up.pages, now, out);
        }
    }

    /// Reads have come to their end. Whether any had.
    fn settle(&mut self, now: Duration, out: &mut Outbox) -> bool {
        let settled = std::mem::take(&mut out.settled);
        let any = !settled.is_empty();
        for (pages, came) in settled {
            self.not_before = None;
            if came {
                if let Some(receiver) = &mut self.receiver {
                    receiver.filled(pages);
                }
                self.insert(pages);
            } else if let Some((_, page)) = self.scheduler.on_failed(pages).first() {
                self.state = State::Ended(Outcome::Stopped { at: now, page: *page });
            }
        }
        any
    }
}

/// A run in the pieces in which it is asked for.
fn units_of(run: PageRange) -> impl Iterator<Item = PageRange> {
    let units = run.start().0 / UNIT_PAGES..run.end().0.div_ceil(UNIT_PAGES);
    units.map(move |unit| {
        let start = PageIdx(unit * UNIT_PAGES).max(run.start());
        PageRange::between(start, PageIdx((unit + 1) * UNIT_PAGES).min(run.end()))
    })
}
