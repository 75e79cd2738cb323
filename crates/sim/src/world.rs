//! Everything that happens, in order of time.

use std::rc::Rc;
use std::time::Duration;

use vmfork_image::PageRange;
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::multicast::{Sender, SenderConfig};
use vmfork_policy::transfer::swarm::{Failure, Serve, Spread, SpreadConfig};

use crate::events::Events;
use crate::host::{Deferred, Host, UNIT_PAGES, Wishes};
use crate::ledger::Ledger;
use crate::network::{Message, Network, Parcel, Receivers, wire_bytes};
use crate::random::Random;
use crate::report::{Outcome, Report};
use crate::scenario::{Mode, Scenario, ScenarioError};

/// The parent's host.
const ORIGIN: usize = 0;

/// A request, a refusal, with headers.
const SMALL_BYTES: u64 = 150;

/// If what waits to be sent takes longer, requests that nobody waits for are refused,
const AHEAD_BACKLOG_MAX: Duration = Duration::from_millis(250);

/// and here all are.
const DEMAND_BACKLOG_MAX: Duration = Duration::from_secs(2);

/// Whoever still waits by then waits for ever.
const TIME_MAX: Duration = Duration::from_secs(3600);

#[derive(Debug)]
enum Event {
    /// The host's time to go on has come.
    Timer {
        host: usize,
    },
    /// The multicast sender may send.
    SenderTimer,
    /// A parcel has left its host.
    Left {
        host: usize,
        parcel: Parcel,
    },
    /// A message begins to come in.
    Arrives {
        from: usize,
        to: usize,
        message: Message,
    },
    /// The same at all hosts but the parent's.
    ArrivesAtAll {
        pages: PageRange,
    },
    /// A message is in.
    In {
        from: usize,
        to: usize,
        message: Message,
    },
    Dies {
        host: usize,
        silent: bool,
    },
    /// A partition ends.
    Heals,
}

struct World<'a> {
    scenario: &'a Scenario,
    now: Duration,
    events: Events<Event>,
    network: Network,
    /// By number, from 1 on.
    hosts: Vec<Host>,
    sender: Option<Sender>,
    sender_timer_at: Option<Duration>,
    /// Of the parent's host, in a swarm.
    spread: Option<Spread>,
    ledger: Ledger,
    running: usize,
}

/// Runs a scenario until all clones have ended.
///
/// # Errors
/// If it makes no sense.
pub fn simulate(scenario: &Scenario) -> Result<Report, ScenarioError> {
    scenario.check()?;
    let mut world = World::new(scenario);
    while world.running > 0 {
        let Some((at, event)) = world.events.pop() else { break };
        if at > TIME_MAX {
            break;
        }
        world.now = at;
        world.on(event);
    }
    Ok(world.report())
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let mut random = Random::new(scenario.seed);
        let count = scenario.traces.len();
        let neighbours = neighbours(count, scenario.neighbours, &mut random);
        let hosts = neighbours.into_iter().enumerate();
        let hosts: Vec<_> = hosts
            .map(|(at, neighbours)| Host::new(scenario, at + 1, neighbours, random.fork()))
            .collect();
        let sender = (scenario.mode == Mode::Multicast)
            .then(|| Sender::new(scenario.pages, sender_config(scenario)));
        let mut world = Self {
            scenario,
            now: Duration::ZERO,
            events: Events::new(),
            network: Network::new(scenario, random.fork()),
            hosts,
            sender,
            sender_timer_at: None,
            spread: (scenario.mode == Mode::Swarm).then(|| {
                Spread::new(
                    scenario.pages,
                    SpreadConfig { piece_pages: UNIT_PAGES, ..SpreadConfig::default() },
                )
            }),
            ledger: Ledger::new(scenario.pages, count),
            running: count,
        };
        for death in scenario.deaths.iter().filter(|death| death.host <= count) {
            world.events.push(death.at, Event::Dies { host: death.host, silent: death.silent });
        }
        if let Some(partition) = scenario.partition {
            world.events.push(partition.until, Event::Heals);
        }
        for host in 1..=count {
            world.pump(host);
        }
        world
    }

    fn on(&mut self, event: Event) {
        match event {
            Event::Timer { host } => {
                if self.hosts[host - 1].timer_at == Some(self.now) {
                    self.hosts[host - 1].timer_at = None;
                    self.pump(host);
                }
            }
            Event::SenderTimer => {
                if self.sender_timer_at == Some(self.now) {
                    self.sender_timer_at = None;
                    self.pump_sender();
                }
            }
            Event::Left { host, parcel } => self.left(host, parcel),
            Event::Arrives { from, to, message } => self.arrives(from, to, message),
            Event::ArrivesAtAll { pages } => {
                for to in 1..=self.hosts.len() {
                    if self.network.datagram_delays().iter().any(Option::is_some) {
                        self.arrives(ORIGIN, to, Message::Pages { pages, copy: false });
                    }
                }
            }
            Event::In { from, to, message } => self.is_in(from, to, message),
            Event::Dies { host, silent } => self.dies(host, silent),
            Event::Heals => {
                for host in 1..=self.hosts.len() {
                    for other in
                        (0..=self.hosts.len()).filter(|other| self.network.is_alive(*other))
                    {
                        self.hosts[host - 1].heard_of(other);
                    }
                    self.pump(host);
                }
            }
        }
    }

    /// A host does what it can.
    fn pump(&mut self, number: usize) {
        if !self.network.is_alive(number) {
            return;
        }
        let mut wishes = Wishes::default();
        let host = &mut self.hosts[number - 1];
        let before = host.outcome();
        host.pump(self.now, &mut wishes);
        let (after, wake_at) = (host.outcome(), host.wake_at(self.now));
        for pages in wishes.gave_up {
            self.ledger.gave_up(number, pages);
        }
        for (to, message) in wishes.messages {
            self.send(number, to, message);
        }
        for Deferred { asker, pages, demand } in wishes.serve {
            self.answer(number, asker, pages, demand);
        }
        if let Some(runs) = wishes.announce {
            let runs = Rc::new(runs);
            for to in self.hosts[number - 1].neighbours.clone() {
                self.send(number, to, Message::Announce { runs: Rc::clone(&runs) });
            }
        }
        if before.is_none() && after.is_some() {
            self.running -= 1;
            if let Some(Outcome::Stopped { page, .. }) = after {
                let origin = self.network.is_alive(ORIGIN)
                    && self.network.can_reach(ORIGIN, number, self.now);
                if origin {
                    let at = self.now;
                    self.ledger.violated(format!(
                        "promise 5: at {at:?} the clone on host {number} was stopped for want of page {page}, which the parent's host has"
                    ));
                }
            }
        }
        self.arm(number, wake_at);
    }

    fn arm(&mut self, number: usize, wake_at: Option<Duration>) {
        let host = &mut self.hosts[number - 1];
        if let Some(at) = wake_at
            && host.timer_at.is_none_or(|armed| at < armed)
        {
            host.timer_at = Some(at);
            self.events.push(at, Event::Timer { host: number });
        }
    }

    fn pump_sender(&mut self) {
        if !self.network.is_alive(ORIGIN) {
            return;
        }
        let Some(sender) = &mut self.sender else { return };
        let mut sends = false;
        while let Some(pages) = sender.next(self.now) {
            self.ledger.sent_to_group(pages);
            let message = Message::Pages { pages, copy: false };
            let parcel = Parcel { to: Receivers::Group, message, bytes: wire_bytes(pages.len()) };
            sends |= self.network.enqueue(ORIGIN, parcel, true);
        }
        if let Some(at) = sender.wake_at()
            && self.sender_timer_at.is_none_or(|armed| at < armed)
        {
            self.sender_timer_at = Some(at);
            self.events.push(at, Event::SenderTimer);
        }
        if sends {
            self.start_sending(ORIGIN);
        }
    }

    /// A small message sets out, past what waits in line.
    fn send(&mut self, from: usize, to: usize, message: Message) {
        if !self.network.can_reach(from, to, self.now) {
            return;
        }
        let bytes = match &message {
            Message::Announce { runs } => SMALL_BYTES + 4 * runs.len() as u64,
            _ => SMALL_BYTES,
        };
        self.network.adapters[from].sent_bytes += bytes;
        if matches!(message, Message::Request(_) | Message::Feedback { .. }) {
            for delay in self.network.datagram_delays().into_iter().flatten() {
                self.events
                    .push(self.now + delay, Event::Arrives { from, to, message: message.clone() });
            }
            return;
        }
        let delay = self.network.tcp_delay(bytes);
        self.events.push(self.now + delay, Event::Arrives { from, to, message });
    }

    fn start_sending(&mut self, host: usize) {
        if self.network.adapters[host].is_sending {
            return;
        }
        if let Some((parcel, time)) = self.network.dequeue(host) {
            self.network.adapters[host].is_sending = true;
            self.events.push(self.now + time, Event::Left { host, parcel });
        }
    }

    fn left(&mut self, host: usize, parcel: Parcel) {
        self.network.adapters[host].is_sending = false;
        if !self.network.is_alive(host) {
            return;
        }
        self.start_sending(host);
        match parcel.to {
            Receivers::One(to) => {
                if self.network.can_reach(host, to, self.now) {
                    let delay = self.network.tcp_delay(parcel.bytes);
                    self.events.push(
                        self.now + delay,
                        Event::Arrives { from: host, to, message: parcel.message },
                    );
                }
            }
            Receivers::Group => {
                let Message::Pages { pages, .. } = parcel.message else { return };
                if self.network.datagrams_are_alike() {
                    self.events
                        .push(self.now + self.network.latency(), Event::ArrivesAtAll { pages });
                    return;
                }
                for to in 1..=self.hosts.len() {
                    let delays = self.network.datagram_delays();
                    let copied = delays.iter().all(Option::is_some);
                    for delay in delays.into_iter().flatten() {
                        let message = Message::Pages { pages, copy: copied };
                        self.events
                            .push(self.now + delay, Event::Arrives { from: host, to, message });
                    }
                }
            }
        }
    }

    fn arrives(&mut self, from: usize, to: usize, message: Message) {
        if !self.network.can_reach(from, to, self.now) {
            return;
        }
        if !self.network.is_alive(to) {
            if let Message::Ask { pages, .. } = message
                && !self.network.adapters[to].silent
            {
                // Nobody listens there: its kernel says so.
                self.send(to, from, Message::Fail { pages, why: Failure::Broken });
            }
            return;
        }
        let (bytes, datagram) = match &message {
            Message::Answer { pages } => (wire_bytes(pages.len()), false),
            Message::Pages { pages, .. } => (wire_bytes(pages.len()), true),
            _ => return self.is_in(from, to, message),
        };
        match self.network.take_in(to, bytes, datagram, self.now) {
            Some(at) if at > self.now => self.events.push(at, Event::In { from, to, message }),
            Some(_) => self.is_in(from, to, message),
            None => {}
        }
    }

    fn is_in(&mut self, from: usize, to: usize, message: Message) {
        if !self.network.is_alive(to) {
            return;
        }
        let now = self.now;
        match message {
            Message::Ask { pages, demand, insist } => {
                return self.serve(to, from, pages, demand, insist);
            }
            Message::Request(request) => {
                if let Some(sender) = &mut self.sender {
                    sender.request(HostId(from as u64), request, now);
                    self.pump_sender();
                }
                return;
            }
            Message::Feedback { bytes_per_s } => {
                if let Some(sender) = &mut self.sender {
                    sender.feedback(HostId(from as u64), bytes_per_s, now);
                }
                return;
            }
            Message::Answer { pages } => {
                self.ledger.arrived(to, pages, false);
                self.hosts[to - 1].on_answer(from, pages, now);
            }
            Message::Fail { pages, why } => {
                if why == Failure::Broken {
                    self.ledger.gave_up(to, pages);
                }
                self.hosts[to - 1].on_failure(from, pages, why, now);
            }
            Message::Redirect { pages, demand, to: named } => {
                if let Some((host, insist)) = self.hosts[to - 1].on_redirect(pages, named, now) {
                    self.send(to, host, Message::Ask { pages, demand, insist });
                }
            }
            Message::Announce { runs } => self.hosts[to - 1].on_announcement(from, &runs),
            Message::Pages { pages, copy } => {
                self.ledger.arrived(to, pages, copy);
                let host = &mut self.hosts[to - 1];
                if !host.on_heard(pages, now) {
                    let wake_at = host.wake_at(now);
                    return self.arm(to, wake_at);
                }
            }
        }
        self.pump(to);
    }

    /// A host is asked for pages by unicast.
    fn serve(&mut self, host: usize, asker: usize, pages: PageRange, demand: bool, insist: bool) {
        if host != ORIGIN && !self.hosts[host - 1].cache.has_all(pages) {
            if !self.hosts[host - 1].defer(Deferred { asker, pages, demand }) {
                self.send(host, asker, Message::Fail { pages, why: Failure::Lacks });
            }
            return;
        }
        if host == ORIGIN
            && let Some(spread) = &mut self.spread
        {
            // Who waits is not sent elsewhere if there is nothing else to do here.
            let here = insist || demand && !self.network.adapters[ORIGIN].is_sending;
            if let Serve::At(HostId(to)) = spread.ask(HostId(asker as u64), pages, here, demand) {
                let to = usize::try_from(to).unwrap_or(ORIGIN);
                return self.send(host, asker, Message::Redirect { pages, demand, to });
            }
        }
        let backlog_max = if demand { DEMAND_BACKLOG_MAX } else { AHEAD_BACKLOG_MAX };
        if self.network.backlog(host) > backlog_max {
            return self.send(host, asker, Message::Fail { pages, why: Failure::Busy });
        }
        self.answer(host, asker, pages, demand);
    }

    fn answer(&mut self, host: usize, asker: usize, pages: PageRange, demand: bool) {
        let to = Receivers::One(asker);
        let parcel =
            Parcel { to, message: Message::Answer { pages }, bytes: wire_bytes(pages.len()) };
        self.network.enqueue(host, parcel, demand);
        self.start_sending(host);
    }

    fn dies(&mut self, host: usize, silent: bool) {
        self.network.die(host, self.now, silent);
        if host == ORIGIN {
            return;
        }
        if self.hosts[host - 1].outcome().is_none() {
            self.hosts[host - 1].die();
            self.running -= 1;
        }
    }

    fn report(mut self) -> Report {
        for (number, host) in (1..).zip(&self.hosts) {
            self.ledger.holds(number, self.scenario.pages, &host.cache);
            if host.outcome().is_none() {
                let (at, page) = (self.now, host.waits_for());
                let page = page.map_or("nothing".to_owned(), |page| format!("page {page}"));
                self.ledger.violated(format!(
                    "promise 5: at {at:?} the clone on host {number} still waits for {page}"
                ));
            }
        }
        let multicast = self.sender.as_ref().map(Sender::counts);
        if let Some(sent) = multicast.filter(|sent| self.scenario.is_clean() && sent.resent > 0) {
            self.ledger.violated(format!(
                "lockstep: {} pages were sent again though nothing got lost",
                sent.resent
            ));
        }
        let outcome = |host: &Host| {
            let waits = || host.waits_for().map(|page| Outcome::Waits { page });
            host.outcome().or_else(waits).unwrap_or(Outcome::Died)
        };
        let adapters = &self.network.adapters;
        Report {
            outcomes: self.hosts.iter().map(outcome).collect(),
            sent_bytes: adapters.iter().map(|adapter| adapter.sent_bytes).collect(),
            received_bytes: adapters.iter().map(|adapter| adapter.received_bytes).collect(),
            resent_bytes: self.network.resent_bytes,
            lost_datagrams: self.network.lost_datagrams,
            arrived_pages: self.ledger.arrived_pages,
            duplicate_pages: self.ledger.duplicate_pages,
            given_up_pages: self.ledger.given_up_pages,
            waits: self.hosts.iter().map(|host| host.waits).sum(),
            multicast,
            violations: self.ledger.violations,
            events: self.events.count(),
        }
    }
}

/// For the scenario's links: no faster than they are, and in runs and bursts that take a millisecond or two, so that what was sent has
/// arrived within the lockstep window.
fn sender_config(scenario: &Scenario) -> SenderConfig {
    let defaults = SenderConfig::default();
    let rate_max_bytes_per_s = scenario.link.bytes_per_s / 100 * 93;
    let pages_per_ms = (rate_max_bytes_per_s / 1000 / vmfork_image::PAGE_BYTES).max(1);
    SenderConfig {
        rate_min_bytes_per_s: rate_max_bytes_per_s / 100,
        rate_start_bytes_per_s: rate_max_bytes_per_s / 4,
        rate_max_bytes_per_s,
        raise_bytes_per_s: (rate_max_bytes_per_s / 100).max(1),
        burst_pages: (2 * pages_per_ms).min(defaults.burst_pages),
        run_pages_max: pages_per_ms.min(defaults.run_pages_max),
        ..defaults
    }
}

/// Whom each host talks to, both ways: a random graph in which each has about so many, and which hangs together: it holds a ring.
fn neighbours(hosts: usize, wanted: usize, random: &mut Random) -> Vec<Vec<usize>> {
    let mut lists = vec![Vec::new(); hosts];
    if hosts < 2 || wanted == 0 {
        return lists;
    }
    if wanted >= hosts - 1 {
        return (1..=hosts)
            .map(|host| (1..=hosts).filter(|other| *other != host).collect())
            .collect();
    }
    let mut order: Vec<usize> = (0..hosts).collect();
    for _ in 0..wanted.div_ceil(2) {
        random.shuffle(&mut order);
        for (at, host) in order.iter().enumerate() {
            let other = order[(at + 1) % hosts];
            lists[*host].push(other + 1);
            lists[other].push(*host + 1);
        }
    }
    for list in &mut lists {
        list.sort_unstable();
        list.dedup();
    }
    lists
}
