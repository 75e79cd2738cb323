//! Links between hosts.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use vmfork_image::PageRange;
use vmfork_policy::transfer::multicast::Request;
use vmfork_policy::transfer::swarm::Route;

use crate::random::Random;
use crate::report::SLICE;
use crate::scenario::{Link, Scenario};

/// What waits in an adapter or a switch for longer than this is dropped, if it is a datagram.
const DATAGRAM_WAIT_MAX: Duration = Duration::from_millis(20);

/// TCP notices a loss by what follows, or after about this time.
const TCP_REPAIR: Duration = Duration::from_millis(10);

/// What one host tells another.
#[derive(Debug, Clone)]
pub(crate) enum Message {
    /// Unicast: a read's question, by the asker's number of it, and its answers.
    Ask {
        read: u64,
        pages: PageRange,
        demand: bool,
        route: Route,
    },
    Answer {
        read: u64,
        pages: PageRange,
    },
    Refuse {
        read: u64,
        why: Refused,
    },
    /// The same of the sums of pages.
    Sums {
        read: u64,
        pages: PageRange,
    },
    Summed {
        read: u64,
        pages: PageRange,
    },
    /// What is held; nothing: there is no such image.
    AskHeld,
    Held {
        runs: Option<Rc<Vec<PageRange>>>,
    },
    HeldGone,
    /// To the multicast sender.
    Request(Request),
    Feedback {
        bytes_per_s: u64,
    },
    /// Pages by multicast.
    Pages {
        pages: PageRange,
        copy: bool,
    },
}

/// Why there are no pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// That host has them, or is about to; and the sums of this many of them.
    Elsewhere {
        to: usize,
        summed: u64,
    },
    NotHere,
    /// No program listens.
    Gone,
}

/// What a host's adapter is about to send.
#[derive(Debug, Clone)]
pub(crate) struct Parcel {
    pub(crate) to: Receivers,
    pub(crate) message: Message,
    pub(crate) bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receivers {
    One(usize),
    Group,
}

/// A host's end of its link.
#[derive(Debug)]
pub(crate) struct Adapter {
    bytes_per_s: u64,
    /// To be sent, in order.
    queue: VecDeque<Parcel>,
    queued_bytes: u64,
    pub(crate) is_sending: bool,
    /// When what is coming in is in.
    in_until: Duration,
    pub(crate) dead_since: Option<Duration>,
    pub(crate) silent: bool,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Network {
    link: Link,
    partition: Option<crate::scenario::Partition>,
    pub(crate) adapters: Vec<Adapter>,
    random: Random,
    /// What all hosts but the parent's took in, by slice of time.
    pub(crate) received_bytes_by_slice: Vec<u64>,
    /// Bytes that TCP sent again.
    pub(crate) resent_bytes: u64,
    /// Datagrams, counted at each receiver, that got lost.
    pub(crate) lost_datagrams: u64,
}

impl Network {
    pub(crate) fn new(scenario: &Scenario, random: Random) -> Self {
        let adapter = |host: usize| {
            let slow = scenario.slow.iter().find(|slow| slow.host == host);
            Adapter {
                bytes_per_s: (scenario.link.bytes_per_s / slow.map_or(1, |slow| slow.times.max(1)))
                    .max(1),
                queue: VecDeque::new(),
                queued_bytes: 0,
                is_sending: false,
                in_until: Duration::ZERO,
                dead_since: None,
                silent: false,
                sent_bytes: 0,
                received_bytes: 0,
            }
        };
        Self {
            link: scenario.link,
            partition: scenario.partition,
            adapters: (0..=scenario.traces.len()).map(adapter).collect(),
            random,
            received_bytes_by_slice: Vec::new(),
            resent_bytes: 0,
            lost_datagrams: 0,
        }
    }

    pub(crate) fn is_alive(&self, host: usize) -> bool {
        self.adapters[host].dead_since.is_none()
    }

    pub(crate) fn can_reach(&self, a: usize, b: usize, now: Duration) -> bool {
        let apart = self.partition.is_some_and(|partition| {
            (a < partition.first) != (b < partition.first)
                && partition.from <= now
                && now < partition.until
        });
        !apart
    }

    /// How long what waits to be sent takes.
    pub(crate) fn backlog(&self, host: usize) -> Duration {
        let adapter = &self.adapters[host];
        time_for(adapter.queued_bytes, adapter.bytes_per_s)
    }

    /// Puts a parcel in line. `false`: dropped, since it is a datagram and the line is long.
    pub(crate) fn enqueue(&mut self, host: usize, parcel: Parcel) -> bool {
        if parcel.to == Receivers::Group && self.backlog(host) > DATAGRAM_WAIT_MAX {
            return false;
        }
        let adapter = &mut self.adapters[host];
        adapter.queued_bytes += parcel.bytes;
        adapter.queue.push_back(parcel);
        true
    }

    /// The next parcel, and how long it takes to be sent.
    pub(crate) fn dequeue(&mut self, host: usize) -> Option<(Parcel, Duration)> {
        let adapter = &mut self.adapters[host];
        let parcel = adapter.queue.pop_front()?;
        adapter.queued_bytes -= parcel.bytes;
        let time = time_for(parcel.bytes, adapter.bytes_per_s);
        Some((parcel, time))
    }

    /// All that is in line is lost.
    pub(crate) fn die(&mut self, host: usize, now: Duration, silent: bool) {
        let adapter = &mut self.adapters[host];
        adapter.queue.clear();
        adapter.queued_bytes = 0;
        adapter.dead_since.get_or_insert(now);
        adapter.silent = silent;
    }

    /// How long a message by TCP is in flight, once sent: longer if something is lost.
    pub(crate) fn tcp_delay(&mut self, bytes: u64) -> Duration {
        let mut delay = self.one_way();
        while self.random.happens(self.link.loss_per_million) && delay < Duration::from_secs(1) {
            delay += TCP_REPAIR + self.link.latency * 2;
            self.resent_bytes += bytes;
        }
        delay
    }

    /// When copies of a datagram arrive at one host: none, one or two.
    pub(crate) fn datagram_delays(&mut self) -> [Option<Duration>; 2] {
        let first = self.datagram_delay();
        let copied = self.random.happens(self.link.duplicates_per_million);
        [first, if copied { self.datagram_delay() } else { None }]
    }

    /// Whether all copies of a datagram arrive at the same time, as far as they arrive: one event
    /// will do for all hosts.
    pub(crate) fn datagrams_are_alike(&self) -> bool {
        self.link.duplicates_per_million == 0 && self.link.jitter.is_zero()
    }

    pub(crate) fn latency(&self) -> Duration {
        self.link.latency
    }

    /// Takes bytes in, after what is coming in already. When they are in; `None`: too much is
    /// coming in already, for datagrams.
    pub(crate) fn take_in(
        &mut self,
        host: usize,
        bytes: u64,
        datagram: bool,
        now: Duration,
    ) -> Option<Duration> {
        let adapter = &mut self.adapters[host];
        // They came as quickly as they were sent, unless the link here is slower or shared.
        let until = now.max(adapter.in_until.saturating_add(time_for(bytes, adapter.bytes_per_s)));
        if datagram && until > now + DATAGRAM_WAIT_MAX {
            self.lost_datagrams += 1;
            return None;
        }
        adapter.in_until = until;
        adapter.received_bytes += bytes;
        if host > 0 {
            let slice = usize::try_from(until.as_millis() / SLICE.as_millis()).unwrap_or(0);
            let slices = &mut self.received_bytes_by_slice;
            slices.resize(slices.len().max(slice + 1), 0);
            slices[slice] += bytes;
        }
        Some(until)
    }

    fn one_way(&mut self) -> Duration {
        let jitter = u64::try_from(self.link.jitter.as_nanos()).unwrap_or(u64::MAX);
        self.link.latency
            + Duration::from_nanos(if jitter > 0 { self.random.below(jitter) } else { 0 })
    }

    fn datagram_delay(&mut self) -> Option<Duration> {
        if self.random.happens(self.link.loss_per_million) {
            self.lost_datagrams += 1;
            return None;
        }
        Some(self.one_way())
    }
}

fn time_for(bytes: u64, bytes_per_s: u64) -> Duration {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s);
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}
