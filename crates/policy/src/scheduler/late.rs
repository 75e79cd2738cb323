//! Pages that were requested as background reads, and for which a VM waits now. A waiter joins the
//! request in flight while that is young. An answer that takes several times as long as others may
//! never come, so the pages are then requested once more.

use std::collections::BTreeSet;
use std::time::Duration;

use vmfork_image::{PageIdx, PageRange};

use super::Reason;
use super::flights::Flights;
use crate::page_set::PageSet;
use crate::transfer::AnswerTimes;

/// How long to wait for an answer before one was measured, and at least, and at most.
const START: Duration = Duration::from_millis(250);
const MIN: Duration = Duration::from_millis(100);
const MAX: Duration = Duration::from_secs(1);
/// This many times what nearly all answers take.
const TIMES: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Late {
    /// Of background reads.
    took: AnswerTimes,
    /// Demanded pages, by the time at which their request has taken too long.
    due: BTreeSet<(Duration, PageIdx)>,
    /// In flight for the second time.
    again: Flights,
    /// Asked for a second time, whatever became of that: not a third time.
    tried: PageSet,
}

impl Late {
    fn patience(&self) -> Duration {
        self.took.bound(START / TIMES).saturating_mul(TIMES).clamp(MIN, MAX)
    }

    /// How many fetches are in flight for the second time.
    pub(super) fn len(&self) -> usize {
        self.again.len()
    }

    /// A VM waits for a page that was requested as a background read.
    pub(super) fn joined(&mut self, page: PageIdx, set_out: Duration) {
        if !self.tried.contains(page) {
            self.due.insert((set_out.saturating_add(self.patience()), page));
        }
    }

    /// When a page has to be looked at next.
    pub(super) fn due_at(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    /// The next page that has taken too long, if a view still waits for it.
    pub(super) fn next(&mut self, now: Duration) -> Option<PageIdx> {
        loop {
            let (_, page) = *self.due.first().filter(|(at, _)| *at <= now)?;
            self.due.pop_first();
            if !self.tried.contains(page) {
                return Some(page);
            }
        }
    }

    /// Whether it was asked for a second time.
    pub(super) fn was_tried(&self, page: PageIdx) -> bool {
        self.tried.contains(page)
    }

    /// `range` sets out for the second time.
    pub(super) fn set_out(&mut self, range: PageRange, now: Duration) {
        self.tried.insert(range);
        self.again.insert(range, Reason::Demand, now);
    }

    /// What was in flight in `range` since `set_out` has come, and it began as a background read.
    pub(super) fn came(&mut self, range: PageRange, set_out: Duration, now: Duration) {
        // Of what was requested twice it is unknown which request was answered. A host that hangs
        // does not make others slow.
        if self.tried.count(range) == 0 {
            self.took.sample(now.saturating_sub(set_out).min(self.patience()));
        }
    }

    /// Nothing of `range` counts as in flight any more. → what was in flight for the second time.
    pub(super) fn over(&mut self, range: PageRange) -> Vec<PageRange> {
        self.tried.remove(range);
        self.given_up(range)
    }

    /// The second request failed. → what of it was in flight.
    pub(super) fn given_up(&mut self, range: PageRange) -> Vec<PageRange> {
        self.again.remove(range).into_iter().map(|(run, _)| run).collect()
    }
}
