//! The side that needs the pages.

use std::collections::VecDeque;
use std::time::Duration;

use vmfork_image::PageRange;

use super::Request;
use crate::page_set::PageSet;
use crate::transfer::answer_times::AnswerTimes;
use crate::transfer::meter::Meter;
use crate::transfer::run_map::RunMap;

/// A timeout is doubled at most this often.
const DOUBLINGS_MAX: u32 = 16;

/// Sizes, times and bounds of a [`Receiver`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiverConfig {
    /// Nothing came for this time: ask again. Used until an answer was measured; afterwards mean +
    /// 4 deviations of the answers' times, and doubled with each attempt.
    pub timeout_start: Duration,
    /// Never sooner: more than the sender's lockstep window, within which it would take the second
    /// request for a copy of the first.
    pub timeout_min: Duration,
    pub timeout_max: Duration,
    /// How often a run is asked for before the receiver gives up; at least 1.
    pub attempts_max: u32,
    /// Most runs that are wanted at a time.
    pub wants_max: usize,
    /// Pages are handed on in batches of this many.
    pub batch_pages: u64,
    /// Or after this time, if no more come.
    pub batch_age: Duration,
    /// How often the receiver reports to the sender what comes in.
    pub feedback_every: Duration,
}

impl Default for ReceiverConfig {
    /// Batches of 1024 pages, as SnowFlock's.
    fn default() -> Self {
        Self {
            timeout_start: Duration::from_millis(50),
            timeout_min: Duration::from_millis(20),
            timeout_max: Duration::from_secs(1),
            attempts_max: 8,
            wants_max: 4096,
            batch_pages: 1024,
            batch_age: Duration::from_millis(5),
            feedback_every: Duration::from_millis(100),
        }
    }
}

/// There is no room for another want ([`ReceiverConfig::wants_max`]).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{pages} are not asked for: {wants_max} runs of pages are wanted already")]
pub struct TooManyWants {
    pub pages: PageRange,
    pub wants_max: usize,
}

/// Pages that did not come by multicast: available from another host by unicast, if at all. They
/// are wanted no more, but heard if they come after all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GaveUp {
    pub pages: PageRange,
    /// A VM waits for at least one of them.
    pub demand: bool,
    /// How often they were asked for.
    pub attempts: u32,
}

/// What a [`Receiver`] has done, in pages unless it says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heard {
    /// Came in, needed or not.
    pub pages: u64,
    /// Of these, had come before.
    pub duplicates: u64,
    /// Asked for.
    pub requested: u64,
    /// Asked for again.
    pub repeats: u64,
    pub gave_up: u64,
    /// Batches, not pages.
    pub batches: u64,
}

impl Heard {
    /// What has come since it was `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            pages: self.pages - before.pages,
            duplicates: self.duplicates - before.duplicates,
            requested: self.requested - before.requested,
            repeats: self.repeats - before.repeats,
            gave_up: self.gave_up - before.gave_up,
            batches: self.batches - before.batches,
        }
    }
}

/// Decides for one image on one host what to ask the sender for, and when to put in the cache what
/// was heard.
///
/// The caller keeps the bytes that [`Receiver::heard`] calls new until [`Receiver::batch`] names
/// them.
#[derive(Debug)]
pub struct Receiver {
    config: ReceiverConfig,
    /// Heard, or here otherwise.
    have: PageSet,
    wants: RunMap<Want>,
    /// No want is due before.
    due_at: Duration,
    given_up: VecDeque<GaveUp>,
    demand_times: AnswerTimes,
    ahead_times: AnswerTimes,
    batch: Batch,
    meter: Meter,
    heard_since_feedback: bool,
    feedback_at: Duration,
    counts: Heard,
}

#[derive(Debug, Clone, Copy)]
struct Want {
    demand: bool,
    attempts: u32,
    asked_at: Duration,
    /// When to ask, or ask again.
    due_at: Duration,
}

/// Heard and not handed on yet.
#[derive(Debug, Default)]
struct Batch {
    runs: Vec<PageRange>,
    pages: u64,
    since: Duration,
    /// A VM waits for one of them.
    urgent: bool,
}

impl Receiver {
    pub fn new(config: ReceiverConfig) -> Self {
        Self {
            config: ReceiverConfig { attempts_max: config.attempts_max.max(1), ..config },
            have: PageSet::default(),
            wants: RunMap::default(),
            due_at: Duration::MAX,
            given_up: VecDeque::new(),
            demand_times: AnswerTimes::default(),
            ahead_times: AnswerTimes::default(),
            batch: Batch::default(),
            meter: Meter::default(),
            heard_since_feedback: false,
            feedback_at: Duration::ZERO,
            counts: Heard::default(),
        }
    }

    /// These pages are needed; with `demand`, a VM waits for one of them. What is here or wanted
    /// already is not requested again, unless it was wanted in the background so far and is now
    /// demanded.
    ///
    /// # Errors
    /// If too much is wanted: of `pages`, a part may be wanted then.
    pub fn want(
        &mut self,
        pages: PageRange,
        demand: bool,
        now: Duration,
    ) -> Result<(), TooManyWants> {
        let new = Want { demand, attempts: 0, asked_at: now, due_at: now };
        for run in self.have.absent(pages) {
            for (part, want) in self.wants.within(run).collect::<Vec<_>>() {
                if demand && !want.demand {
                    // The sender lets it overtake: another request, no repetition.
                    self.wants.remove(part);
                    self.wants.insert(part, new);
                    self.due_at = now;
                }
            }
            for free in self.wants.free(run) {
                if self.wants.len() >= self.config.wants_max {
                    return Err(TooManyWants { pages: free, wants_max: self.config.wants_max });
                }
                self.wants.insert(free, new);
                self.due_at = now;
            }
        }
        let waiting = |run: &PageRange| !run.intersect(&pages).is_empty();
        self.batch.urgent |= demand && self.batch.runs.iter().any(waiting);
        Ok(())
    }

    /// Pages came in. Returns those that are new here; of the others the bytes are not needed.
    pub fn heard(&mut self, pages: PageRange, now: Duration) -> Vec<PageRange> {
        self.meter.add(pages.byte_len(), now);
        self.heard_since_feedback = true;
        self.counts.pages += pages.len();
        let new: Vec<_> = self.have.absent(pages).collect();
        for run in &new {
            for (_, want) in self.wants.remove(*run) {
                self.batch.urgent |= want.demand;
                if want.attempts == 1 {
                    let took = now.saturating_sub(want.asked_at);
                    self.times(want.demand).sample(took);
                }
            }
            self.have.insert(*run);
            if self.batch.runs.is_empty() {
                self.batch.since = now;
            }
            match self.batch.runs.last_mut() {
                Some(last) if last.end() == run.start() => {
                    *last = PageRange::between(last.start(), run.end());
                }
                _ => self.batch.runs.push(*run),
            }
            self.batch.pages += run.len();
        }
        self.counts.duplicates += pages.len() - new.iter().map(PageRange::len).sum::<u64>();
        new
    }

    /// Pages are in the cache that came another way.
    pub fn filled(&mut self, pages: PageRange) {
        self.have.insert(pages);
        self.wants.remove(pages);
    }

    /// What to put in the cache now: a full batch, one with a demanded page, or one that is old.
    /// Its pages are in the order in which they came.
    pub fn batch(&mut self, now: Duration) -> Option<Vec<PageRange>> {
        if self.batch.runs.is_empty() || now < self.batch_at() {
            return None;
        }
        self.counts.batches += 1;
        Some(std::mem::take(&mut self.batch).runs)
    }

    /// What to ask the sender for now: demand first. To be called until there is nothing.
    pub fn next_request(&mut self, now: Duration) -> Option<Request> {
        if now < self.due_at {
            return None;
        }
        self.give_up(now);
        let due = self.wants.iter().filter(|(_, want)| want.due_at <= now);
        let Some((pages, want)) = due.min_by_key(|(_, want)| (!want.demand, want.due_at)) else {
            self.due_at =
                self.wants.iter().map(|(_, want)| want.due_at).min().unwrap_or(Duration::MAX);
            return None;
        };
        let times = if want.demand { &self.demand_times } else { &self.ahead_times };
        let timeout = times.bound(self.config.timeout_start);
        let timeout = timeout
            .clamp(self.config.timeout_min, self.config.timeout_max.max(self.config.timeout_min));
        let timeout = timeout.saturating_mul(1 << want.attempts.min(DOUBLINGS_MAX));
        let timeout = timeout.min(self.config.timeout_max.max(self.config.timeout_min));
        let asked = Want {
            attempts: want.attempts + 1,
            asked_at: now,
            due_at: now.saturating_add(timeout),
            ..want
        };
        self.wants.remove(pages);
        self.wants.insert(pages, asked);
        let repeat = want.attempts > 0;
        self.counts.requested += pages.len();
        self.counts.repeats += if repeat { pages.len() } else { 0 };
        Some(Request { pages, demand: want.demand, repeat })
    }

    /// What did not come, attempt after attempt. To be called until there is nothing, after
    /// [`Receiver::next_request`].
    pub fn gave_up(&mut self) -> Option<GaveUp> {
        self.given_up.pop_front()
    }

    /// What to tell the sender of what comes in, in bytes per second, if it is time to.
    pub fn feedback(&mut self, now: Duration) -> Option<u64> {
        if !self.heard_since_feedback || now < self.feedback_at {
            return None;
        }
        self.meter.roll(now);
        self.heard_since_feedback = false;
        self.feedback_at = now.saturating_add(self.config.feedback_every);
        Some(self.meter.bytes_per_s())
    }

    /// When there is something to ask, to hand on or to tell, unless something happens before.
    pub fn wake_at(&self) -> Option<Duration> {
        let due = (!self.wants.is_empty()).then_some(self.due_at);
        let batch = (!self.batch.runs.is_empty()).then(|| self.batch_at());
        let feedback = self.heard_since_feedback.then_some(self.feedback_at);
        [due, batch, feedback].into_iter().flatten().min()
    }

    /// Whether the page was heard or is here otherwise.
    pub fn has(&self, page: vmfork_image::PageIdx) -> bool {
        self.have.contains(page)
    }

    /// How many runs are wanted.
    pub fn wants(&self) -> usize {
        self.wants.len()
    }

    /// What it has done.
    pub fn counts(&self) -> Heard {
        self.counts
    }

    fn give_up(&mut self, now: Duration) {
        let spent = |want: &Want| want.attempts >= self.config.attempts_max && want.due_at <= now;
        let spent: Vec<_> = self.wants.iter().filter(|(_, want)| spent(want)).collect();
        for (pages, Want { demand, attempts, .. }) in spent {
            self.wants.remove(pages);
            self.counts.gave_up += pages.len();
            self.given_up.push_back(GaveUp { pages, demand, attempts });
        }
    }

    /// When the batch is handed on.
    fn batch_at(&self) -> Duration {
        match self.batch.urgent || self.batch.pages >= self.config.batch_pages {
            true => self.batch.since,
            false => self.batch.since.saturating_add(self.config.batch_age),
        }
    }

    fn times(&mut self, demand: bool) -> &mut AnswerTimes {
        if demand { &mut self.demand_times } else { &mut self.ahead_times }
    }
}
