//! Everything that happens, in order of time.

use std::rc::Rc;
use std::time::Duration;

use vmfork_image::PageRange;
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::bounds::{ANSWER, PATIENCE};
use vmfork_policy::transfer::multicast::{Sender, SenderConfig};

use crate::client::Outbox;
use crate::events::Events;
use crate::host::{Host, Wishes};
use crate::ledger::Ledger;
use crate::network::{Message, Network, Parcel, Receivers, Refused};
use crate::random::Random;
use crate::report::{Outcome, Report};
use crate::scenario::{Mode, Scenario, ScenarioError, wire_bytes};
use crate::service::{Asking, Reply, Service};

/// The parent's host.
const ORIGIN: usize = 0;

/// A request, a refusal, with headers.
const SMALL_BYTES: u64 = 150;

/// Of the sum of a page, in an answer.
const SUM_BYTES: u64 = 16;

/// A VM that still waits by then waits forever.
const TIME_MAX: Duration = Duration::from_secs(8 * 3600);

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
    /// A host sees that pages have come for which another waits.
    Looks {
        host: usize,
        asking: Asking,
    },
    /// Requests of others have waited for long enough for what has not come to a host.
    Late {
        host: usize,
    },
    /// A host tells the others that it has the image.
    Tells {
        host: usize,
    },
    Dies {
        host: usize,
        silent: bool,
    },
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
    /// Of all hosts, the parent's first.
    services: Vec<Service>,
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
        let within = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut some = |time: Duration| Duration::from_nanos(random.below(within(time)));
        let hosts = (1..=count).map(|at| Host::new(scenario, at, some(scenario.start_within)));
        let hosts: Vec<_> = hosts.collect();
        let tells: Vec<_> = (0..=count).map(|_| some(scenario.heard_within)).collect();
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
            services: (0..=count)
                .map(|host| {
                    Service::new(scenario.pages, host == ORIGIN, scenario.mode != Mode::Unicast)
                })
                .collect(),
            ledger: Ledger::new(scenario.pages, count),
            running: count,
        };
        for death in scenario.deaths.iter().filter(|death| death.host <= count) {
            world.events.push(death.at, Event::Dies { host: death.host, silent: death.silent });
        }
        if scenario.mode != Mode::Unicast {
            for (host, at) in tells.into_iter().enumerate() {
                world.events.push(at, Event::Tells { host });
            }
        }
        for host in 1..=count {
            world.pump(host, Outbox::default());
        }
        world
    }

    fn on(&mut self, event: Event) {
        match event {
            Event::Timer { host } => {
                if self.hosts[host - 1].timer_at == Some(self.now) {
                    self.hosts[host - 1].timer_at = None;
                    self.pump(host, Outbox::default());
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
            Event::Looks { host, asking } => self.answer(host, asking),
            Event::Late { host } => self.late(host),
            Event::Tells { host } => self.tells(host),
        }
    }

    /// Others wait here for what may not come.
    fn late(&mut self, host: usize) {
        let Some(client) = host.checked_sub(1).and_then(|at| self.hosts.get(at)) else { return };
        let client = &client.client;
        let (late, again) = self.services[host].late(|pages| client.is_coming(pages), self.now);
        for asking in late {
            self.refuse(host, asking, Refused::NotHere);
        }
        if let Some(at) = again {
            self.events.push(at, Event::Late { host });
        }
    }

    fn tells(&mut self, from: usize) {
        if !self.network.is_alive(from) {
            return;
        }
        self.events.push(self.now + self.scenario.heard_within, Event::Tells { host: from });
        if from != ORIGIN && self.now < self.hosts[from - 1].starts_at {
            return;
        }
        for to in 1..=self.hosts.len() {
            if self.network.can_reach(from, to, self.now) {
                self.hosts[to - 1].client.heard(from, self.now);
            }
        }
    }

    /// A host does what it can.
    fn pump(&mut self, number: usize, out: Outbox) {
        if !self.network.is_alive(number) {
            return;
        }
        let mut wishes = Wishes::default();
        let host = &mut self.hosts[number - 1];
        let before = host.outcome();
        host.pump(self.now, out, &mut wishes);
        let (after, wake_at) = (host.outcome(), host.wake_at(self.now));
        for (asking, at) in self.services[number].came(&host.cache, self.now) {
            self.events.push(at, Event::Looks { host: number, asking });
        }
        for pages in wishes.gave_up {
            self.ledger.gave_up(number, pages);
        }
        for (to, message) in wishes.messages {
            self.send(number, to, message);
        }
        if before.is_none() && after.is_some() {
            self.running -= 1;
            if let Some(Outcome::Stopped { page, .. }) = after {
                // A host that asked while it could not be reached is notified after a while.
                let healed =
                    self.scenario.partition.map_or(Duration::ZERO, |partition| partition.until);
                let origin = self.network.is_alive(ORIGIN)
                    && self.network.can_reach(ORIGIN, number, self.now);
                if origin
                    && !self.scenario.is_narrow()
                    && (healed.is_zero() || self.now > healed + PATIENCE + ANSWER * 2)
                {
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
            sends |= self.network.enqueue(ORIGIN, parcel);
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

    /// A message sets out: past what waits in line if it is small, or last in it.
    fn send(&mut self, from: usize, to: usize, message: Message) {
        if !self.network.can_reach(from, to, self.now) {
            return;
        }
        let (bytes, is_small) = match &message {
            Message::Answer { pages, .. } => (wire_bytes(pages.len()), false),
            Message::Summed { pages, .. } => (SMALL_BYTES + SUM_BYTES * pages.len(), false),
            Message::Refuse { why: Refused::Elsewhere { summed, .. }, .. } => {
                (SMALL_BYTES + SUM_BYTES * summed, true)
            }
            Message::Held { runs: Some(_) } => (SMALL_BYTES + self.scenario.pages / 8, false),
            _ => (SMALL_BYTES, true),
        };
        if matches!(message, Message::Request(_) | Message::Feedback { .. }) {
            self.network.adapters[from].sent_bytes += bytes;
            for delay in self.network.datagram_delays().into_iter().flatten() {
                self.events
                    .push(self.now + delay, Event::Arrives { from, to, message: message.clone() });
            }
            return;
        }
        if is_small && !self.scenario.link.one_line {
            self.network.adapters[from].sent_bytes += bytes;
            let delay = self.network.tcp_delay(bytes);
            self.events.push(self.now + delay, Event::Arrives { from, to, message });
            return;
        }
        self.network.enqueue(from, Parcel { to: Receivers::One(to), message, bytes });
        self.start_sending(from);
    }

    fn start_sending(&mut self, host: usize) {
        if self.network.adapters[host].is_sending {
            return;
        }
        while let Some((parcel, time)) = self.network.dequeue(host) {
            // A reader that gives up closes its connection.
            if let (Receivers::One(to), Message::Answer { read, .. }) = (parcel.to, &parcel.message)
                && !self.hosts[to - 1].client.waits_for(*read)
            {
                continue;
            }
            let adapter = &mut self.network.adapters[host];
            adapter.sent_bytes += parcel.bytes;
            adapter.is_sending = true;
            self.events.push(self.now + time, Event::Left { host, parcel });
            return;
        }
    }

    fn left(&mut self, host: usize, parcel: Parcel) {
        self.network.adapters[host].is_sending = false;
        if let (Receivers::One(to), Message::Answer { pages, .. }) = (parcel.to, &parcel.message) {
            self.services[host].served(to, *pages);
        }
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
            // No program listens there: its kernel reports that.
            let answer = match message {
                Message::Ask { read, .. } | Message::Sums { read, .. } => {
                    Some(Message::Refuse { read, why: Refused::Gone })
                }
                Message::AskHeld => Some(Message::HeldGone),
                _ => None,
            };
            if let Some(answer) = answer.filter(|_| !self.network.adapters[to].silent) {
                self.send(to, from, answer);
            }
            return;
        }
        let (bytes, datagram) = match &message {
            Message::Answer { pages, .. } => (wire_bytes(pages.len()), false),
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
        let mut out = Outbox::default();
        match message {
            Message::Ask { read, pages, demand, route } => {
                return self.serve(to, Asking { from, read, pages, demand, route });
            }
            Message::AskHeld => return self.tell_held(to, from),
            Message::Sums { read, pages } => {
                return self.send(to, from, Message::Summed { read, pages });
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
            Message::Answer { read, pages } => {
                self.ledger.arrived(to, pages, false);
                self.hosts[to - 1].client.on_answer(from, read, now, &mut out);
            }
            Message::Refuse { read, why } => {
                self.hosts[to - 1].client.on_refused(from, read, why, now, &mut out);
            }
            Message::Summed { read, pages } => {
                self.hosts[to - 1].client.on_sums(read, pages, now, &mut out);
            }
            Message::Held { runs } => {
                let (held, refused) = (runs.as_ref().map(|runs| &runs[..]), runs.is_none());
                self.hosts[to - 1].client.on_held(from, held, refused, now, &mut out);
            }
            Message::HeldGone => self.hosts[to - 1].client.on_held_gone(from, now, &mut out),
            Message::Pages { pages, copy } => {
                self.ledger.arrived(to, pages, copy);
                let host = &mut self.hosts[to - 1];
                if !host.on_heard(pages, now) {
                    let wake_at = host.wake_at(now);
                    return self.arm(to, wake_at);
                }
            }
        }
        self.pump(to, out);
    }

    /// A host is asked for pages by unicast.
    fn serve(&mut self, host: usize, asking: Asking) {
        let cache = match host {
            ORIGIN => None,
            _ if self.now < self.hosts[host - 1].starts_at => {
                return self.refuse(host, asking, Refused::NotHere);
            }
            _ => Some(&self.hosts[host - 1].cache),
        };
        match self.services[host].ask(asking, cache, self.now) {
            Reply::Pages => self.answer(host, asking),
            Reply::Refuse(why) => self.refuse(host, asking, why),
            Reply::Waits(until) => self.events.push(until, Event::Late { host }),
        }
    }

    fn tell_held(&mut self, host: usize, asker: usize) {
        let runs = match host {
            ORIGIN => Some(vec![PageRange::first(self.scenario.pages)]),
            _ if self.now < self.hosts[host - 1].starts_at => None,
            _ => Some(self.hosts[host - 1].cache.runs()),
        };
        self.send(host, asker, Message::Held { runs: runs.map(Rc::new) });
    }

    fn answer(&mut self, host: usize, asking: Asking) {
        let Asking { from, read, pages, .. } = asking;
        self.send(host, from, Message::Answer { read, pages });
    }

    fn refuse(&mut self, host: usize, asking: Asking, why: Refused) {
        self.send(host, asking.from, Message::Refuse { read: asking.read, why });
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
        // What hosts ask for one by one is in the same line, and makes pages of the group late.
        let is_clean = self.scenario.is_clean() && self.ledger.given_up_pages == 0;
        if let Some(sent) = multicast.filter(|sent| is_clean && sent.resent > 0) {
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
            received_bytes_by_slice: self.network.received_bytes_by_slice,
            played: self.hosts.first().map(|host| host.played.clone()).unwrap_or_default(),
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

/// For the scenario's links: no faster than they are, and in runs and bursts that take a
/// millisecond or two. So what was sent has arrived within the lockstep window.
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
