//! What is brought in before anyone asks, and pages that take a while to come.

use std::sync::Arc;

use vmfork_image::PageRange;
use vmfork_policy::{Background, Fetch, Reason};

use super::super::drain;
use super::super::fetchers::{Fetched, Job};
use super::{Phase, Worker};
use crate::host_image::{HostImage, PageLost};

/// Pages fetched ahead in one go, where the source has no unit of its own.
const AHEAD_PAGES: u64 = 64;

impl Worker {
    pub(super) fn add_policy(&mut self, policy: Box<dyn Background>) {
        let name = policy.name();
        match self.scheduler.add_background(policy) {
            Ok(()) => self.ahead.may_have_more = true,
            Err(error) => tracing::warn!(image = %self.image.id(), name, %error, "no prefetch"),
        }
    }

    /// Somebody has put pages of an image into its cache: whoever waits for them goes on.
    pub(super) fn pages_came(&mut self, image: &Arc<HostImage>, range: PageRange) {
        let is_served = image.id() == self.image.id() || self.others.contains_key(&image.id());
        if !is_served {
            return;
        }
        self.wake_waiting(image, range);
    }

    /// One fetch of what nobody waits for.
    pub(super) fn prefetch_step(&mut self) {
        let unit = self.image.source().map_or(AHEAD_PAGES, |source| source.unit_pages());
        match self.scheduler.next(unit) {
            Some(fetch) => self.carry_out(&Arc::clone(&self.image), fetch),
            // Until a fault teaches a policy something, or what is under way has arrived.
            None => self.ahead.may_have_more = false,
        }
    }

    /// Have a fetch done by another thread, if reading takes a while. → whether it is.
    pub(super) fn send_for(&mut self, image: &Arc<HostImage>, fetch: Fetch) -> bool {
        let Some(owner) = self.owner_of(image, fetch).filter(|owner| owner.is_far(fetch.range))
        else {
            return false;
        };
        let job = Job { image: Arc::clone(image), owner, fetch };
        match self.fetchers.submit(job) {
            Ok(()) => true,
            Err((_job, error)) => {
                tracing::debug!(%error, "no thread to fetch pages: the engine does it");
                false
            }
        }
    }

    /// Fetches that other threads have done.
    pub(super) fn take_fetched(&mut self) {
        while let Ok(Fetched { image, fetch, outcome }) = self.fetched.try_recv() {
            self.settle(&image, fetch, outcome);
        }
    }

    /// A fetch has come to its end: tell who waits.
    pub(super) fn settle(
        &mut self,
        image: &Arc<HostImage>,
        fetch: Fetch,
        outcome: Result<(), PageLost>,
    ) {
        let range = fetch.range;
        self.ahead.may_have_more = true;
        match outcome {
            Ok(()) => {
                self.wake_waiting(image, range);
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
            }
            Err(lost) => {
                let Some(scheduler) = self.scheduler_of(image.id()) else { return };
                for (id, _) in scheduler.on_failed(range) {
                    self.report_lost(id, lost.to_string());
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

    fn wake_waiting(&mut self, image: &Arc<HostImage>, range: PageRange) {
        let Some(scheduler) = self.scheduler_of(image.id()) else { return };
        let mut waited = scheduler.on_filled(range);
        waited.sort_unstable();
        waited.dedup_by_key(|(view, _)| *view);
        for (id, _) in waited {
            self.wake(id, range);
        }
    }

    /// Whether there may be something to fetch ahead, and it may be fetched.
    pub(super) fn has_prefetch(&self) -> bool {
        matches!(self.phase, Phase::Sealed) && self.ahead.may_have_more && self.ahead.is_allowed
    }
}
