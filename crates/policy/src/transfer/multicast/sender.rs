//! The side that has the pages.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use vmfork_image::{PAGE_BYTES, PageRange};

use super::Request;
use crate::page_set::PageSet;
use crate::transfer::HostId;
use crate::transfer::meter::Meter;

/// A receive rate that was reported longer ago says nothing any more, and nor does a listener that
/// has fallen silent.
const FEEDBACK_KEPT: Duration = Duration::from_secs(1);

/// Loss is measured over about the last slots of 10 ms, this many: counts are halved each time this
/// many have passed.
const LOSS_SLOTS: u64 = 16;

/// A rate is raised for at most this many slots at once, if it was not polled for long.
const RAISED_SLOTS_MAX: u64 = 8;

/// Sizes, rates and bounds of a [`Sender`]. Bytes are of pages, without headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SenderConfig {
    /// Never slower, at least 1.
    pub rate_min_bytes_per_s: u64,
    /// At first.
    pub rate_start_bytes_per_s: u64,
    /// Never faster.
    pub rate_max_bytes_per_s: u64,
    /// Rate increase after each 10 ms in which there was more to send than the rate allowed.
    pub raise_bytes_per_s: u64,
    /// After a pause, this many pages may leave at once: they cover the lateness of a driver's
    /// timer.
    pub burst_pages: u64,
    /// Most pages of a run, at least 1: of a datagram, or a few that leave together.
    pub run_pages_max: u64,
    /// How long after a page was sent requests for it are taken for copies of the one that was
    /// answered. More than a round trip, less than
    /// [`ReceiverConfig::timeout_min`](super::ReceiverConfig::timeout_min).
    pub lockstep: Duration,
    /// After a cut, how long until the next: the time it takes to be seen at the receivers.
    pub settle: Duration,
    /// What a listener may lose without being counted. If more than half of them lose more, the
    /// sender slows down. 0: any loss counts.
    pub loss_tolerated_permille: u64,
    /// Most runs that wait to be sent, for demand and for the rest each.
    pub queue_runs_max: usize,
    /// Most listeners whose feedback is kept.
    pub listeners_max: usize,
}

impl Default for SenderConfig {
    /// For 1 Gbit/s: from a quarter of it to as much as Ethernet carries, reached in a second.
    fn default() -> Self {
        Self {
            rate_min_bytes_per_s: 1_000_000,
            rate_start_bytes_per_s: 30_000_000,
            rate_max_bytes_per_s: 115_000_000,
            raise_bytes_per_s: 1_000_000,
            burst_pages: 64,
            run_pages_max: 16,
            lockstep: Duration::from_millis(10),
            settle: Duration::from_millis(50),
            loss_tolerated_permille: 20,
            queue_runs_max: 65_536,
            listeners_max: 4096,
        }
    }
}

/// What a [`Sender`] has done, in pages unless it says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Requests, not pages.
    pub requests: u64,
    /// Asked for, in all requests.
    pub requested: u64,
    /// Sent, once for all listeners.
    pub served: u64,
    /// Of these, sent before.
    pub resent: u64,
    /// Not queued, since they were queued already or had just been sent.
    pub lockstep: u64,
    /// Asked for again by a host that had asked before.
    pub repeats: u64,
    /// Of these, sent before and now to be sent again: lost in the network, or not read in time.
    pub lost: u64,
    /// Not queued, since the queue was full; receivers ask again.
    pub refused: u64,
    /// Times that the rate was cut.
    pub cuts: u64,
}

impl Sent {
    /// What has come since it was `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            requests: self.requests - before.requests,
            requested: self.requested - before.requested,
            served: self.served - before.served,
            resent: self.resent - before.resent,
            lockstep: self.lockstep - before.lockstep,
            repeats: self.repeats - before.repeats,
            lost: self.lost - before.lost,
            refused: self.refused - before.refused,
            cuts: self.cuts - before.cuts,
        }
    }
}

/// Decides which pages of one image are sent to its group next, and when.
#[derive(Debug)]
pub struct Sender {
    config: SenderConfig,
    image: PageRange,
    demand: Queue,
    ahead: Queue,
    /// Sent within the lockstep window, the oldest first, each page once.
    recent: VecDeque<(Duration, PageRange)>,
    recent_pages: PageSet,
    /// Queued since a receiver requested them, and not requested again. A receiver that does so now
    /// has not lost them, but waits.
    unanswered: PageSet,
    /// Ever sent.
    sent: PageSet,
    rate_bytes_per_s: u64,
    /// When what was sent is paid for at the rate.
    free_at: Duration,
    /// There was more to send than the rate allowed, in this slot.
    held_back: bool,
    meter: Meter,
    listeners: BTreeMap<HostId, Listener>,
    /// Pages sent of late.
    sent_lately: u64,
    slots: u64,
    settled_at: Duration,
    counts: Sent,
}

#[derive(Debug, Clone, Copy, Default)]
struct Listener {
    received_bytes_per_s: u64,
    heard_of_at: Duration,
    /// Pages that it has asked for again, of late.
    lost: u64,
}

/// Runs to send, first in, first out.
#[derive(Debug, Default)]
struct Queue {
    runs: VecDeque<PageRange>,
    /// Those of `runs` that are still to be sent; the others have gone to the other queue.
    pages: PageSet,
    count: u64,
}

impl Queue {
    fn push(&mut self, run: PageRange) {
        self.count += self.pages.insert(run);
        match self.runs.back_mut() {
            Some(last) if last.end() == run.start() => {
                *last = PageRange::between(last.start(), run.end());
            }
            _ => self.runs.push_back(run),
        }
    }

    fn remove(&mut self, run: PageRange) {
        self.count -= self.pages.count(run);
        self.pages.remove(run);
    }

    fn pop(&mut self, pages_max: u64) -> Option<PageRange> {
        while let Some(front) = self.runs.front_mut() {
            let Some(run) = self.pages.present(*front).next() else {
                self.runs.pop_front();
                continue;
            };
            let run = run.truncate(pages_max);
            *front = front.from_page(run.end());
            self.remove(run);
            return Some(run);
        }
        None
    }
}

impl Sender {
    /// For an image of `pages` pages. Rates that contradict each other are put in order: min,
    /// start, max.
    pub fn new(pages: u64, config: SenderConfig) -> Self {
        let rate_min_bytes_per_s = config.rate_min_bytes_per_s.max(1);
        let rate_max_bytes_per_s = config.rate_max_bytes_per_s.max(rate_min_bytes_per_s);
        let rate = config.rate_start_bytes_per_s.clamp(rate_min_bytes_per_s, rate_max_bytes_per_s);
        let run_pages_max = config.run_pages_max.max(1);
        Self {
            config: SenderConfig {
                rate_min_bytes_per_s,
                rate_max_bytes_per_s,
                run_pages_max,
                ..config
            },
            image: PageRange::first(pages.min(vmfork_image::PAGES_MAX)),
            demand: Queue::default(),
            ahead: Queue::default(),
            recent: VecDeque::new(),
            recent_pages: PageSet::default(),
            unanswered: PageSet::default(),
            sent: PageSet::default(),
            rate_bytes_per_s: rate,
            free_at: Duration::ZERO,
            held_back: false,
            meter: Meter::default(),
            listeners: BTreeMap::new(),
            sent_lately: 0,
            slots: 0,
            settled_at: Duration::ZERO,
            counts: Sent::default(),
        }
    }

    /// A host asks for pages. Those that the image does not have are left out.
    pub fn request(&mut self, from: HostId, request: Request, now: Duration) {
        self.pass(now);
        let pages = request.pages.intersect(&self.image);
        self.counts.requests += 1;
        self.counts.requested += pages.len();
        if request.repeat {
            self.counts.repeats += pages.len();
            // What was never sent was not lost in the network: the request was, or the queue is
            // long. Nor is what has just been sent: a busy receiver reads it later.
            let answered = self.unanswered.absent(pages);
            let lost = answered.flat_map(|run| self.recent_pages.absent(run));
            let lost = lost.map(|run| self.sent.count(run)).sum();
            if let Some(listener) = self.listener(from, now) {
                listener.lost = listener.lost.saturating_add(lost);
            }
            self.slow_down(now);
        }
        let mut taken = 0;
        for run in self.recent_pages.absent(pages).collect::<Vec<_>>() {
            for run in self.demand.pages.absent(run).collect::<Vec<_>>() {
                if request.demand {
                    if self.demand.runs.len() >= self.config.queue_runs_max {
                        self.counts.refused += run.len();
                        taken += run.len();
                        continue;
                    }
                    taken += run.len();
                    for run in self.ahead.pages.absent(run) {
                        match request.repeat {
                            true => self.counts.lost += self.sent.count(run),
                            false => _ = self.unanswered.insert(run),
                        }
                    }
                    self.ahead.remove(run);
                    self.demand.push(run);
                    continue;
                }
                for run in self.ahead.pages.absent(run).collect::<Vec<_>>() {
                    taken += run.len();
                    if self.ahead.runs.len() >= self.config.queue_runs_max {
                        self.counts.refused += run.len();
                        continue;
                    }
                    match request.repeat {
                        true => self.counts.lost += self.sent.count(run),
                        false => _ = self.unanswered.insert(run),
                    }
                    self.ahead.push(run);
                }
            }
        }
        self.counts.lockstep += pages.len() - taken;
    }

    /// This many bytes per second came in at a listener, on average over the last slots of 10 ms.
    pub fn feedback(&mut self, from: HostId, received_bytes_per_s: u64, now: Duration) {
        if let Some(listener) = self.listener(from, now) {
            listener.received_bytes_per_s = received_bytes_per_s;
        }
    }

    /// A host listens no longer.
    pub fn leave(&mut self, host: HostId) {
        self.listeners.remove(&host);
    }

    /// What to send now, to all. `None`: nothing before [`Sender::wake_at`].
    pub fn next(&mut self, now: Duration) -> Option<PageRange> {
        self.pass(now);
        if self.free_at > now {
            self.held_back |= self.queued_pages() > 0;
            return None;
        }
        let pages_max = self.config.run_pages_max;
        let run = self.demand.pop(pages_max).or_else(|| self.ahead.pop(pages_max))?;
        self.unanswered.remove(run);
        self.counts.served += run.len();
        self.counts.resent += run.len() - self.sent.insert(run);
        self.sent_lately = self.sent_lately.saturating_add(run.len());
        self.recent_pages.insert(run);
        self.recent.push_back((now, run));
        self.meter.add(run.byte_len(), now);
        let burst = self.time_for(self.config.burst_pages.saturating_mul(PAGE_BYTES));
        let earliest = now.saturating_sub(burst);
        self.free_at = self.free_at.max(earliest).saturating_add(self.time_for(run.byte_len()));
        Some(run)
    }

    /// When there is something to send; `None` before a receiver asks.
    pub fn wake_at(&self) -> Option<Duration> {
        (self.queued_pages() > 0).then_some(self.free_at)
    }

    /// How many pages wait to be sent.
    pub fn queued_pages(&self) -> u64 {
        self.demand.count + self.ahead.count
    }

    /// How fast it sends at most, now.
    pub fn rate_bytes_per_s(&self) -> u64 {
        self.rate_bytes_per_s
    }

    /// What it has done.
    pub fn counts(&self) -> Sent {
        self.counts
    }

    /// A host that has just been heard of; `None` if there is no room: those that there are have to
    /// do.
    fn listener(&mut self, host: HostId, now: Duration) -> Option<&mut Listener> {
        let max = self.config.listeners_max;
        if self.listeners.len() >= max && !self.listeners.contains_key(&host) {
            self.listeners.retain(|_, listener| is_fresh(listener, now));
            if self.listeners.len() >= max {
                return None;
            }
        }
        let listener = self.listeners.entry(host).or_default();
        listener.heard_of_at = now;
        Some(listener)
    }

    /// Time passes: windows end, the rate goes up.
    fn pass(&mut self, now: Duration) {
        while let Some((at, run)) = self.recent.front() {
            if now.saturating_sub(*at) < self.config.lockstep {
                break;
            }
            self.recent_pages.remove(*run);
            self.recent.pop_front();
        }
        let slots = self.meter.roll(now);
        if slots == 0 {
            return;
        }
        if std::mem::take(&mut self.held_back) {
            let raise = self.config.raise_bytes_per_s.saturating_mul(slots.min(RAISED_SLOTS_MAX));
            let rate = self.rate_bytes_per_s.saturating_add(raise);
            self.rate_bytes_per_s = rate.min(self.config.rate_max_bytes_per_s);
        }
        self.slots = self.slots.saturating_add(slots);
        while self.slots >= LOSS_SLOTS {
            self.sent_lately /= 2;
            self.listeners.values_mut().for_each(|listener| listener.lost /= 2);
            // After a long time all is 0 anyway.
            self.slots = if self.sent_lately == 0 { 0 } else { self.slots - LOSS_SLOTS };
        }
    }

    /// Something was lost: to three quarters of the mean receive rate, if it was much, and at many.
    fn slow_down(&mut self, now: Duration) {
        let tolerated =
            u128::from(self.sent_lately) * u128::from(self.config.loss_tolerated_permille);
        let (mut listeners, mut losing, mut sum) = (0u64, 0u64, 0u128);
        for listener in self.listeners.values().filter(|listener| is_fresh(listener, now)) {
            listeners += 1;
            losing += u64::from(u128::from(listener.lost) * 1000 > tolerated);
            sum += u128::from(listener.received_bytes_per_s);
        }
        if now < self.settled_at || losing * 2 <= listeners {
            return;
        }
        let rate = u128::from(self.rate_bytes_per_s);
        let sent = u128::from(self.meter.bytes_per_s());
        let mean = sum.checked_div(listeners.into()).unwrap_or(sent).min(sent);
        // Of what is sent at the full rate, as much would arrive as did of what was sent.
        let arriving = (rate * mean).checked_div(sent).unwrap_or(rate);
        let cut = u64::try_from(arriving * 3 / 4).unwrap_or(u64::MAX);
        self.rate_bytes_per_s =
            cut.clamp(self.config.rate_min_bytes_per_s, self.config.rate_max_bytes_per_s);
        self.settled_at = now.saturating_add(self.config.settle);
        self.sent_lately = 0;
        self.listeners.values_mut().for_each(|listener| listener.lost = 0);
        self.held_back = false;
        self.counts.cuts += 1;
    }

    fn time_for(&self, bytes: u64) -> Duration {
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate_bytes_per_s);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

fn is_fresh(listener: &Listener, now: Duration) -> bool {
    now.saturating_sub(listener.heard_of_at) <= FEEDBACK_KEPT
}
