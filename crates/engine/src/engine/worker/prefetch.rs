//! What is brought in before anyone asks, and pages that take a while to come.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_image::{ImageId, NextAhead, Origin, PageIdx, PageRange, Source};
use vmfork_policy::transfer::bounds::{PICK_AMONG, PREDICT_PERCENT};
use vmfork_policy::{
    Background, Fetch, Listed, Priority, Rate, Reason, Scheduler, Segments, SegmentsConfig,
};

use super::super::drain;
use super::super::fetchers::{Fetched, Job, Told};
use super::{CachePresence, Phase, Worker, touches};
use crate::host_image::{HostImage, PageLost};
use crate::reader::Waker;

/// Pages fetched ahead in one go, where the source has no unit of its own.
const AHEAD_PAGES: u64 = 64;

/// The name of what fetches all the rest.
const HYDRATE: &str = "hydrate";

/// The name of the prefetch that comes before all others.
const WORKING_SET: &str = "working set";

/// The name of what was put in as a whole, a working set.
const INSERTED: &str = "inserted";

/// Bytes that hydration may bring at once after a rest, at any rate.
const HYDRATE_BURST: u64 = 1 << 20;

/// How it stands with what is fetched before anyone asks.
#[derive(Debug)]
pub(super) struct Ahead {
    /// A policy may have something to propose.
    pub(super) may_have_more: bool,
    /// The host has memory for it.
    pub(super) is_allowed: bool,
    /// Faults predict what else is fetched.
    predicts: bool,
    hydration: Option<Hydration>,
    /// As much is in flight as is allowed: hydration continues when some of it has arrived.
    is_held_up: bool,
    /// The source of what is missing had rather wait.
    not_before: Option<Instant>,
}

impl Ahead {
    pub(super) fn new() -> Self {
        Self {
            may_have_more: false,
            is_allowed: true,
            predicts: false,
            hydration: None,
            is_held_up: false,
            not_before: None,
        }
    }
}

/// All that views may still need, and how fast it may come.
#[derive(Debug)]
struct Hydration {
    began: Instant,
    rate: Rate,
    left: VecDeque<Piece>,
}

/// A unit of a source, or a part of one.
#[derive(Debug, Clone, Copy)]
struct Piece {
    /// In whose cache views look for it.
    home: ImageId,
    /// Whose its first page is.
    owner: ImageId,
    pages: PageRange,
}

impl Hydration {
    /// How long until another piece may come.
    fn wait(&self, now: Instant) -> Duration {
        self.rate.ready_at(HYDRATE_BURST).saturating_sub(now - self.began)
    }
}

impl Worker {
    /// From now on fetch what faults predict, of this image and of those whose pages its views look
    /// for elsewhere.
    pub(super) fn predict(&mut self) {
        self.ahead.predicts = true;
        for scheduler in self.others.values_mut().chain([&mut self.scheduler]) {
            add_prediction(scheduler);
        }
    }

    /// A scheduler of another image, from now on asked as well.
    pub(super) fn predict_in(&self, scheduler: &mut Scheduler<CachePresence>) {
        if self.ahead.predicts {
            add_prediction(scheduler);
        }
    }

    /// Fetch these in their order, or in one near to it that their source has, each where views
    /// look for it.
    pub(super) fn fetch_first(&mut self, runs: &[PageRange]) {
        let mut lists: BTreeMap<ImageId, Vec<(u64, PageRange)>> = BTreeMap::new();
        for run in runs.iter().map(|run| run.intersect(&PageRange::first(self.image.pages()))) {
            for Piece { home, owner, pages } in self.missing(run) {
                let list = lists.entry(home).or_default();
                let (at, owner) = (list.len() as u64, self.known(owner));
                let order = owner.as_ref().and_then(|image| image.source()?.order());
                list.push((order.map_or(at, |order| order.place_near(at, pages)), pages));
            }
        }
        for (image, mut list) in lists {
            list.sort_by_key(|(place, _)| *place);
            let list = list.into_iter().map(|(_, pages)| pages).collect();
            let Some(scheduler) = self.scheduler_of(image) else { continue };
            let unit_pages = unit_of(&scheduler.presence().0);
            add(
                scheduler,
                Box::new(Listed::new(WORKING_SET, Priority::WorkingSet, list, unit_pages)),
            );
            self.ahead.may_have_more = true;
        }
    }

    /// What of `range` is absent where views look for it, in pieces of a source's unit.
    fn missing(&self, range: PageRange) -> VecDeque<Piece> {
        let mut pieces = VecDeque::new();
        for (image, run) in self.image.places(range) {
            let unit = unit_of(&image);
            let mut rest = run;
            while !rest.is_empty() {
                let piece = rest.truncate(unit - rest.start().0 % unit);
                rest = rest.from_page(piece.end());
                let owner = image.table().and_then(|table| table.get(piece.start()));
                let owner = owner.and_then(Source::image).unwrap_or(image.id());
                pieces.push_back(Piece { home: image.id(), owner, pages: piece });
            }
        }
        pieces
    }

    /// Fetch all that is missing, at a rate.
    pub(super) fn hydrate(&mut self, bytes_per_s: NonZeroU64) {
        let mut left = self.missing(PageRange::first(self.image.pages()));
        left.make_contiguous().sort_by_cached_key(|piece| {
            let owner = self.known(piece.owner);
            let order = owner.as_ref().and_then(|image| image.source()?.order());
            order.map_or(piece.pages.start().0, |order| order.place(piece.pages))
        });
        let rate = Rate::new(bytes_per_s, HYDRATE_BURST);
        self.ahead.hydration = Some(Hydration { began: Instant::now(), rate, left });
    }

    /// Pages of an image were put into its cache from outside: wakes the views that wait for them.
    pub(super) fn pages_came(&mut self, image: &Arc<HostImage>, range: PageRange) {
        // Of a store: faults that will find its pages there are counted as predicted.
        let is_served = image.id() == self.image.id()
            || self.others.contains_key(&image.id())
            || image.is_stored() && self.ancestors.contains_key(&image.id());
        if !is_served {
            return;
        }
        if let Some(scheduler) = self.scheduler_of(image.id()) {
            scheduler.on_inserted(range, INSERTED);
        }
        let from = image.source().map(|source| source.origin());
        self.wake_waiting(image, range, from, None);
    }

    /// One prefetch.
    pub(super) fn prefetch_step(&mut self) {
        if let Some(fetch) = self.scheduler.next(unit_of(&self.image)) {
            return self.carry_out(&Arc::clone(&self.image), fetch);
        }
        let other = self.others.values_mut().find_map(|other| {
            let image = Arc::clone(&other.presence().0);
            Some((other.next(unit_of(&image))?, image))
        });
        if let Some((fetch, image)) = other {
            return self.carry_out(&image, fetch);
        }
        // Until a fault teaches a policy something, or a fetch in flight has arrived.
        self.ahead.may_have_more = false;
        self.hydrate_some();
    }

    /// Propose the next piece of what is missing, if it is time, and nothing else is to be proposed
    /// first.
    fn hydrate_some(&mut self) {
        let now = Instant::now();
        let Some(hydration) = &self.ahead.hydration else { return };
        if !hydration.wait(now).is_zero() {
            return;
        }
        let Some(first) = hydration.left.front() else {
            self.ahead.hydration = None;
            return;
        };
        let home = first.home;
        if self.scheduler_of(home).is_some_and(|scheduler| !scheduler.has_room_ahead()) {
            self.ahead.is_held_up = true;
            return;
        }
        self.ahead.not_before = None;
        let at = match self.pick() {
            NextAhead::Piece(at) => at,
            NextAhead::Later(wait) => {
                self.ahead.not_before = Some(now + wait);
                return;
            }
        };
        let left = self.ahead.hydration.as_mut().map(|hydration| &mut hydration.left);
        let Some(Piece { home, pages: piece, .. }) =
            left.and_then(|left| left.swap_remove_front(at))
        else {
            return;
        };
        let scheduler = self.scheduler_of(home);
        if scheduler.as_ref().is_some_and(|scheduler| !scheduler.has_room_ahead()) {
            self.ahead.is_held_up = true;
            return;
        }
        if let Some(scheduler) = scheduler
            && vmfork_policy::Presence::next_absent(scheduler.presence(), piece).is_some()
        {
            add(
                scheduler,
                Box::new(Listed::new(HYDRATE, Priority::Rest, vec![piece], piece.len())),
            );
            self.ahead.may_have_more = true;
            if let Some(hydration) = &mut self.ahead.hydration {
                hydration.rate.spend(now - hydration.began, piece.byte_len());
            }
        }
    }

    /// Which of the pieces that are left to bring next.
    fn pick(&self) -> NextAhead {
        let left = self.ahead.hydration.iter().flat_map(|hydration| &hydration.left);
        let Some(first) = left.clone().next() else { return NextAhead::Piece(0) };
        let owner = self.known(first.owner);
        let Some(order) = owner.as_ref().and_then(|image| image.source()?.order()) else {
            return NextAhead::Piece(0);
        };
        let home = self.known(first.home);
        let is_here = |pages: PageRange| {
            home.as_ref().is_some_and(|home| home.cache().presence().count(pages) == pages.len())
        };
        let (mut places, mut pieces) = (Vec::new(), Vec::new());
        for (at, piece) in left.enumerate().take(PICK_AMONG) {
            if (piece.owner, piece.home) == (first.owner, first.home) {
                if is_here(piece.pages) {
                    return NextAhead::Piece(at); // somebody asked for it meanwhile: it is done
                }
                places.push(at);
                pieces.push(piece.pages);
            }
        }
        match order.next(&pieces) {
            NextAhead::Piece(at) => NextAhead::Piece(places.get(at).copied().unwrap_or(0)),
            later => later,
        }
    }

    /// This image, or one that it names.
    fn known(&self, id: ImageId) -> Option<Arc<HostImage>> {
        let image = if id == self.image.id() { &self.image } else { self.ancestors.get(&id)? };
        Some(Arc::clone(image))
    }

    /// How long until something may be fetched ahead; `None`: nothing is to be.
    pub(super) fn prefetch_wait(&self) -> Option<Duration> {
        if !matches!(self.phase, Phase::Sealed) || !self.ahead.is_allowed {
            return None;
        }
        let hydration = self.ahead.hydration.as_ref();
        match self.ahead.may_have_more {
            true => Some(Duration::ZERO),
            false if self.ahead.is_held_up => None,
            false => {
                let now = Instant::now();
                let not_before = self.ahead.not_before.unwrap_or(now);
                hydration.map(|hydration| hydration.wait(now).max(not_before - now))
            }
        }
    }

    /// Have a fetch done by another thread, if reading takes a while. → whether it is.
    pub(super) fn send_for(&mut self, image: &Arc<HostImage>, fetch: Fetch) -> bool {
        let Some(owner) = self.owner_of(image, fetch).filter(|owner| owner.is_far(fetch.range))
        else {
            return false;
        };
        let wakers = fetch.first.map_or_else(Vec::new, |page| self.wakers(page));
        let job = Job { image: Arc::clone(image), owner, fetch, wakers };
        match self.fetchers.submit(job) {
            Ok(()) => true,
            Err((_job, error)) => {
                tracing::debug!(%error, "no thread to fetch pages: the engine does it");
                false
            }
        }
    }

    /// Of all views that wait for a page.
    fn wakers(&self, page: PageIdx) -> Vec<Box<dyn Waker>> {
        let waiting = self.waiting.keys().filter(|(_, waits_for)| *waits_for == page);
        let views = waiting.filter_map(|(id, _)| self.views.get(id));
        views.map(|view| view.waker(page.range())).collect()
    }

    /// Fetches that other threads have done.
    pub(super) fn take_fetched(&mut self) {
        while let Ok(told) = self.fetched.try_recv() {
            match told {
                Told::Early { image, page, from, at } => {
                    self.wake_waiting(&image, page.range(), from, Some(at));
                }
                Told::Fetched(Fetched { image, fetch, from, outcome }) => {
                    self.settle(&image, fetch, from, outcome);
                }
            }
        }
    }

    /// A fetch has ended: notify its waiters. `from`: where the pages were, if not on this host.
    pub(super) fn settle(
        &mut self,
        image: &Arc<HostImage>,
        fetch: Fetch,
        from: Option<Origin>,
        outcome: Result<(), PageLost>,
    ) {
        let range = fetch.range;
        self.ahead.may_have_more = true;
        self.ahead.is_held_up = false;
        self.ahead.not_before = None;
        self.drain.is_held_up = false;
        match outcome {
            Ok(()) => {
                // Before the waiters run: a VM that has read a page finds it counted.
                match fetch.reason {
                    Reason::Demand => image.counters.demand_bytes.add(range.byte_len()),
                    Reason::Background(drain::NAME) => {
                        image.counters.drained_bytes.add(range.byte_len());
                        self.drain.on_filled(range);
                    }
                    Reason::Background(_) => {
                        image.counters.prefetched_bytes.add(range.byte_len());
                    }
                }
                self.wake_waiting(image, range, from, None);
            }
            Err(lost) => {
                let Some(scheduler) = self.scheduler_of(image.id()) else { return };
                let stopped = match fetch.again {
                    true => scheduler.on_failed_again(range),
                    false => scheduler.on_failed(range),
                };
                for (id, page) in stopped {
                    self.refuse(id, page, lost.to_string());
                }
                match fetch.reason {
                    Reason::Demand => {}
                    Reason::Background(drain::NAME) => self.drain.on_failed(),
                    Reason::Background(policy) => {
                        tracing::warn!(image = %image.id(), policy, %lost, "fetch ahead");
                    }
                }
            }
        }
    }

    /// Pages are present: their waiters continue, or have done so since `at`.
    fn wake_waiting(
        &mut self,
        image: &Arc<HostImage>,
        range: PageRange,
        from: Option<Origin>,
        at: Option<Instant>,
    ) {
        let Some(scheduler) = self.scheduler_of(image.id()) else { return };
        let mut waited = scheduler.on_filled(range);
        waited.sort_unstable();
        let mut woken = None;
        for (id, _) in &waited {
            if woken.replace(*id) != Some(*id) {
                self.wake(*id, range);
            }
        }
        let times = image.counters.waited(from);
        let at = at.unwrap_or_else(Instant::now);
        for wait in waited {
            let Some(began) = self.waiting.remove(&wait) else { continue };
            times.add(at.saturating_duration_since(began));
            touches::came(wait, self.began.elapsed());
        }
    }
}

/// What is read from an image's source in one go.
fn unit_of(image: &HostImage) -> u64 {
    image.source().map_or(AHEAD_PAGES, |source| source.unit_pages())
}

fn add_prediction(scheduler: &mut Scheduler<CachePresence>) {
    let image = &scheduler.presence().0;
    if !image.is_stored() || touches::are_recorded() {
        return;
    }
    let unit_pages = unit_of(image);
    let mut config =
        SegmentsConfig { unit_pages, pages_max: unit_pages, ..SegmentsConfig::default() };
    if image.source().is_some_and(|source| source.origin() == Origin::Peer) {
        config.percent = PREDICT_PERCENT;
    }
    match Segments::new(config) {
        Ok(policy) => add(scheduler, Box::new(policy)),
        Err(error) => tracing::warn!(%error, "nothing is predicted"),
    }
}

fn add(scheduler: &mut Scheduler<CachePresence>, policy: Box<dyn Background>) {
    if let Err(error) = scheduler.add_background(policy) {
        tracing::warn!(image = %scheduler.presence().0.id(), %error, "no prefetch");
    }
}
