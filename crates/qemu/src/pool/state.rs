//! What the pool wants: pure decisions. No clock, no processes: time comes as an argument (any
//! origin, never backwards), orders go out as [`Order`]s.
//!
//! ```text
//!   want(shape) ─┐                    ┌─► Order::Start ──► started / failed
//!   claim(shape) ┼─► PoolState::plan ─┤
//!   lost(item)   ┘                    └─► Order::Discard
//! ```
//!
//! How many of each: shapes get places in the order of their last use, newest first. Each gets up
//! to its target, until the total is used up. What a shape has beyond that is discarded. So a
//! family in use takes places from one that isn't, and never the other way round.
//!
//! In which order: by turns, so a shape that is used up as fast as it is refilled doesn't keep the
//! others waiting.
//!
//! When: at once, but while somebody holds the pool ([`PoolState::hold`]) only for shapes that have
//! lacked something for [`HOLD_MAX`]. However holds follow each other, no refill begins later for
//! them than that.

use std::collections::VecDeque;
use std::time::Duration;

/// Bounds of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Waiting and starting ones of all shapes together; 0 turns the pool off.
    pub total_max: usize,
    /// Started at the same time. Two at a time cost 22 ms each on 2 cores.
    pub starting_max: usize,
    /// A shape that was neither wanted nor claimed for this time loses its items.
    pub idle_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let idle_after = Duration::from_secs(600);
        Self { total_max: 32, starting_max: 2, idle_after }
    }
}

/// After a failed start: this long, doubled with each further failure.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Shapes remembered; the least recently used is forgotten first.
const SHAPES_MAX: usize = 256;

/// Names one item for its whole life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ItemId(u64);

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order<K> {
    /// Start one, then say [`PoolState::started`] or [`PoolState::failed`].
    Start(ItemId, K),
    /// End one that waits. It is forgotten here already.
    Discard(ItemId),
}

/// Counts for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub waiting: usize,
    pub starting: usize,
    pub target: usize,
}

#[derive(Debug)]
struct Entry<K> {
    shape: K,
    target: usize,
    /// Oldest first.
    waiting: VecDeque<ItemId>,
    starting: Vec<ItemId>,
    /// Order of last use: higher is newer.
    used: u64,
    used_at: Duration,
    failures: u32,
    not_before: Duration,
    /// Since when it has had fewer than it should.
    lacks_since: Option<Duration>,
    /// The one that was started last, of all that ever were.
    last_start: Option<ItemId>,
}

impl<K> Entry<K> {
    fn live(&self) -> usize {
        self.waiting.len() + self.starting.len()
    }

    /// Until when a hold keeps it from being refilled.
    fn held_until(&self) -> Duration {
        self.lacks_since.map_or(Duration::ZERO, |since| since.saturating_add(HOLD_MAX))
    }
}

/// How long a shape's refill may be put off: those who hold the pool all the time get theirs from
/// it, too.
pub const HOLD_MAX: Duration = Duration::from_secs(2);

/// The pool's mind. Entries are kept newest last.
#[derive(Debug)]
pub struct PoolState<K> {
    limits: Limits,
    entries: Vec<Entry<K>>,
    next_item: u64,
    next_use: u64,
    /// How many hold the pool.
    holds: usize,
}

impl<K> PoolState<K> {
    /// Start nothing for a shape that has lacked something for less than [`HOLD_MAX`], until as
    /// many [`PoolState::release`].
    pub fn hold(&mut self) {
        self.holds += 1;
    }

    /// The end of one [`PoolState::hold`].
    pub fn release(&mut self) {
        self.holds = self.holds.saturating_sub(1);
    }
}

impl<K: Clone + Eq> PoolState<K> {
    pub fn new(limits: Limits) -> Self {
        Self { limits, entries: Vec::new(), next_item: 0, next_use: 0, holds: 0 }
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Takes effect with the next [`PoolState::plan`].
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Keep `target` of this shape waiting from now on; 0: none. Counts as use.
    pub fn want(&mut self, shape: &K, target: usize, now: Duration) {
        let used = self.next_use();
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.shape == *shape) {
            entry.target = target;
            (entry.used, entry.used_at) = (used, now);
            return;
        }
        if self.entries.len() >= SHAPES_MAX {
            // Its items go with the next plan: a shape without items is forgotten there.
            let kept = self.entries.iter_mut().filter(|entry| entry.target > 0);
            let oldest = kept.min_by_key(|entry| entry.used);
            if let Some(oldest) = oldest {
                oldest.target = 0;
            }
        }
        self.entries.push(Entry {
            shape: shape.clone(),
            target,
            waiting: VecDeque::new(),
            starting: Vec::new(),
            used,
            used_at: now,
            failures: 0,
            not_before: now,
            lacks_since: None,
            last_start: None,
        });
    }

    /// Take one that waits, the oldest. Counts as use, also when there is none.
    pub fn claim(&mut self, shape: &K, now: Duration) -> Option<ItemId> {
        let used = self.next_use();
        let entry = self.entries.iter_mut().find(|entry| entry.shape == *shape)?;
        (entry.used, entry.used_at) = (used, now);
        entry.waiting.pop_front()
    }

    /// A start succeeded. `false`: it isn't wanted any more, end it.
    #[must_use]
    pub fn started(&mut self, item: ItemId) -> bool {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.starting.contains(&item))
        else {
            return false;
        };
        entry.starting.retain(|other| *other != item);
        entry.failures = 0;
        entry.waiting.push_back(item);
        true
    }

    /// A start failed; how long the shape is left alone now.
    pub fn failed(&mut self, item: ItemId, now: Duration) -> Duration {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.starting.contains(&item))
        else {
            return Duration::ZERO;
        };
        entry.starting.retain(|other| *other != item);
        let pause = RETRY_FIRST.saturating_mul(1 << entry.failures.min(16)).min(RETRY_MAX);
        entry.failures = entry.failures.saturating_add(1);
        entry.not_before = now + pause;
        pause
    }

    /// One that waited has died by itself. Replaced like one that was claimed, but after a pause: a
    /// shape whose QEMUs die while they wait mustn't be started over and over.
    pub fn lost(&mut self, item: ItemId, now: Duration) {
        for entry in &mut self.entries {
            if entry.waiting.contains(&item) {
                entry.waiting.retain(|other| *other != item);
                entry.not_before = entry.not_before.max(now + RETRY_FIRST);
            }
        }
    }

    /// What is to be done now. Each order is given once.
    pub fn plan(&mut self, now: Duration) -> Vec<Order<K>> {
        let Limits { total_max, starting_max, idle_after } = self.limits;
        self.entries.sort_by_key(|entry| entry.used);
        let mut orders = Vec::new();
        let mut rest = total_max;
        let mut desired = vec![0; self.entries.len()];
        for (entry, desired) in self.entries.iter_mut().zip(&mut desired).rev() {
            let idle = now.saturating_sub(entry.used_at) >= idle_after;
            *desired = if idle { 0 } else { entry.target.min(rest) };
            rest -= *desired;
            while entry.live() > *desired {
                // The newest: the oldest is claimed next, and its pages are warm.
                let Some(item) = entry.waiting.pop_back() else { break };
                orders.push(Order::Discard(item));
            }
            let lacks = entry.live() < *desired;
            entry.lacks_since = lacks.then(|| entry.lacks_since.unwrap_or(now));
        }
        let mut starting: usize = self.entries.iter().map(|entry| entry.starting.len()).sum();
        let mut live: usize = self.entries.iter().map(Entry::live).sum();
        let free = self.holds == 0;
        while starting < starting_max && live < total_max {
            let lacking = self.entries.iter_mut().zip(&desired).rev().filter(|(entry, desired)| {
                let may = now >= entry.not_before && (free || now >= entry.held_until());
                may && entry.live() < **desired
            });
            let Some((entry, _)) = lacking.min_by_key(|(entry, _)| entry.last_start) else { break };
            let item = ItemId(self.next_item);
            self.next_item += 1;
            entry.starting.push(item);
            entry.last_start = Some(item);
            (starting, live) = (starting + 1, live + 1);
            orders.push(Order::Start(item, entry.shape.clone()));
        }
        let idle = |entry: &Entry<K>| now.saturating_sub(entry.used_at) >= idle_after;
        self.entries.retain(|entry| entry.live() > 0 || !(entry.target == 0 || idle(entry)));
        orders
    }

    /// When [`PoolState::plan`] may have something to do even if nothing happens before.
    pub fn next_plan_at(&self, now: Duration) -> Option<Duration> {
        let times = |entry: &Entry<K>| {
            let expires = Some(entry.used_at.saturating_add(self.limits.idle_after));
            let retries = (entry.live() < entry.target).then_some(entry.not_before);
            let let_go = (self.holds > 0).then(|| entry.held_until());
            [expires, retries, let_go]
        };
        self.entries.iter().flat_map(times).flatten().filter(|at| *at > now).min()
    }

    /// By shape.
    pub fn counts(&self) -> Vec<(K, Counts)> {
        let counts = |entry: &Entry<K>| Counts {
            waiting: entry.waiting.len(),
            starting: entry.starting.len(),
            target: entry.target,
        };
        self.entries.iter().map(|entry| (entry.shape.clone(), counts(entry))).collect()
    }

    /// All that wait.
    pub fn waiting(&self) -> impl Iterator<Item = ItemId> {
        self.entries.iter().flat_map(|entry| entry.waiting.iter().copied())
    }

    fn next_use(&mut self) -> u64 {
        self.next_use += 1;
        self.next_use
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
