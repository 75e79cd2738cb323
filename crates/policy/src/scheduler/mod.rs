mod flights;
mod late;
mod tally;
mod waits;

use std::fmt;
use std::time::Duration;

use vmfork_image::{BLOCK_PAGES, ImageId, PageIdx, PageRange, PageTable, Source};

pub use self::tally::{Faults, Fetched, Tally};

use self::flights::Flights;
use self::late::Late;
use self::waits::{First, Waits};
use crate::{Background, Presence, Priority, Proposal};

/// Most background policies of a scheduler.
pub const BACKGROUNDS_MAX: usize = 8;

/// The number of a view: one VM's sight of an image. Given by the engine, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ViewId(pub u64);

impl fmt::Display for ViewId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Sizes and bounds of a [`Scheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// A demanded page is fetched with its neighbours: those in the aligned window of this many
    /// pages. A power of two, 1 to 512.
    pub unit_pages: u64,
    /// The same for a page that the image does not own itself, if its owner is known. Such a page
    /// is copied, and its bytes are then on the host twice, so untouched neighbours cost memory.
    pub copy_unit_pages: u64,
    /// The image.
    pub image: Option<ImageId>,
    /// Most fetches in flight at a time, at least 1.
    pub fetches_max: usize,
    /// Most background fetches, so that demand always finds room: fewer than `fetches_max`. 0: no
    /// background.
    pub background_fetches_max: usize,
    /// Most pairs of a view and a page that wait at a time, at least 1. A view waits for as many
    /// pages at once as it has vCPUs and I/O threads. So the limit is far above what happens; it
    /// bounds memory.
    pub waits_max: usize,
}

impl Default for Config {
    /// 64 KiB units; bounds for a few hundred views.
    fn default() -> Self {
        Self {
            unit_pages: 16,
            copy_unit_pages: 16,
            image: None,
            fetches_max: 64,
            background_fetches_max: 4,
            waits_max: 65_536,
        }
    }
}

/// A configuration that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("fill unit of {unit_pages} pages; it must be a power of two from 1 to {BLOCK_PAGES}")]
    Unit { unit_pages: u64 },
    #[error("{background} background fetches of at most {total} must leave room for demand")]
    Fetches { background: usize, total: usize },
    #[error("no view may wait for a page (waits_max is 0)")]
    Waits,
}

/// More policies than [`BACKGROUNDS_MAX`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no room for background policy `{name}`: there are {BACKGROUNDS_MAX}")]
pub struct TooManyBackgrounds {
    pub name: &'static str,
}

/// What becomes of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The page is zero: give the view zeros.
    Zero,
    /// The page is in the cache by now: wake the view.
    Present,
    /// The view waits. `on_filled` or `on_failed` will name it, once for this page however often
    /// it faults there meanwhile.
    Waits,
    /// The view can't be served: stop it.
    Refused(Refusal),
}

/// Why a fault is not taken on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the image has no such page")]
    NoSuchPage,
    #[error("too many pages are waited for")]
    TooManyWaits,
}

/// Pages to bring into the cache: all absent, none in flight but `again`, all of one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetch {
    /// Never empty.
    pub range: PageRange,
    /// By the image's table; never zero.
    pub source: Source,
    pub reason: Reason,
    /// The demanded page that was first; the others are its neighbours.
    pub first: Option<PageIdx>,
    /// They are in flight already, as a background read that takes too long: the first answer
    /// counts.
    pub again: bool,
}

/// Why pages are fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A view waits for at least one of them.
    Demand,
    /// The policy of this name proposed them.
    Background(&'static str),
}

/// Decides for one image on one host which pages come into its cache next.
///
/// Serves whatever non-zero pages it is asked for, whichever images own them. The engine sends
/// blocks that are better mapped from an ancestor's cache to that ancestor's scheduler.
///
/// Each call takes time for the pages it names and a logarithm of those that wait. `next` also
/// passes over what the background finds present, once per page and pass.
#[derive(Debug)]
pub struct Scheduler<P> {
    table: PageTable,
    presence: P,
    config: Config,
    waits: Waits,
    flights: Flights,
    late: Late,
    now: Duration,
    /// By priority; earlier ones go first.
    backgrounds: Vec<Running>,
    tally: Tally,
}

#[derive(Debug)]
struct Running {
    /// What the policy said when it was added.
    priority: Priority,
    policy: Box<dyn Background>,
    /// What is left of its last proposal.
    rest: Option<Proposal>,
}

impl<P: Presence> Scheduler<P> {
    /// # Errors
    /// If `config` makes no sense.
    pub fn new(table: PageTable, presence: P, config: Config) -> Result<Self, ConfigError> {
        let Config { fetches_max, background_fetches_max, waits_max, .. } = config;
        for unit_pages in [config.unit_pages, config.copy_unit_pages] {
            if !unit_pages.is_power_of_two() || unit_pages > BLOCK_PAGES {
                return Err(ConfigError::Unit { unit_pages });
            }
        }
        if background_fetches_max >= fetches_max {
            return Err(ConfigError::Fetches {
                background: background_fetches_max,
                total: fetches_max,
            });
        }
        if waits_max == 0 {
            return Err(ConfigError::Waits);
        }
        Ok(Self {
            table,
            presence,
            config,
            waits: Waits::default(),
            flights: Flights::default(),
            late: Late::default(),
            now: Duration::ZERO,
            backgrounds: Vec::new(),
            tally: Tally::default(),
        })
    }

    /// The image's table.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// Replaces the table while it is still being derived. It must be right for a block before a
    /// fault in that block is reported, and for all blocks before a background policy is added.
    /// What is demanded or in flight must not change.
    ///
    /// # Panics
    /// If it is for another number of pages.
    pub fn set_table(&mut self, table: PageTable) {
        assert_eq!(table.pages(), self.table.pages(), "a table of another image");
        self.table = table;
    }

    /// The image's presence, as given.
    pub fn presence(&self) -> &P {
        &self.presence
    }

    /// Adds a background policy behind those that are present and as urgent. It takes the place of
    /// the one of the same name, if there is one. Whenever a fetch is chosen, the most urgent
    /// policies are asked first. So one that is added later takes over at once from what is less
    /// urgent.
    ///
    /// # Errors
    /// If there are [`BACKGROUNDS_MAX`].
    pub fn add_background(
        &mut self,
        policy: Box<dyn Background>,
    ) -> Result<(), TooManyBackgrounds> {
        let (name, priority) = (policy.name(), policy.priority());
        let namesake = self.backgrounds.iter().position(|other| other.policy.name() == name);
        if namesake.is_none() && self.backgrounds.len() >= BACKGROUNDS_MAX {
            return Err(TooManyBackgrounds { name });
        }
        let running = Running { priority, policy, rest: None };
        if let Some(at) = namesake {
            if self.backgrounds[at].priority == priority {
                self.backgrounds[at] = running;
                return Ok(());
            }
            self.backgrounds.remove(at);
        }
        let at = self.backgrounds.partition_point(|other| other.priority <= priority);
        self.backgrounds.insert(at, running);
        Ok(())
    }

    /// Ends a background policy; what it has in flight still arrives.
    pub fn remove_background(&mut self, name: &str) {
        self.backgrounds.retain(|running| running.policy.name() != name);
    }

    /// The time, of a clock of the caller's that does not go back. Without one, what is in flight
    /// has no time limit.
    pub fn set_now(&mut self, now: Duration) {
        self.now = now;
    }

    /// When [`Scheduler::next`] may have something although nothing has happened: what is in flight
    /// will have taken too long.
    pub fn late_at(&self) -> Option<Duration> {
        self.late.due_at().filter(|_| self.has_room())
    }

    /// A view touched a page that its mapping lacks.
    pub fn on_fault(&mut self, view: ViewId, page: PageIdx) -> Outcome {
        match self.table.get(page) {
            None => return Outcome::Refused(Refusal::NoSuchPage),
            Some(Source::Zero) => {
                self.tally.on_zero();
                return Outcome::Zero;
            }
            Some(Source::Image(_)) => {}
        }
        for running in &mut self.backgrounds {
            running.policy.on_fault(page, &self.table);
        }
        if self.waits.has(view, page) {
            return Outcome::Waits;
        }
        if self.presence.is_present(page) {
            self.tally.on_present(page);
            return Outcome::Present;
        }
        if self.waits.count() >= self.config.waits_max {
            return Outcome::Refused(Refusal::TooManyWaits);
        }
        let flight = self.flights.at(page);
        match flight {
            Some((_, reason)) => {
                self.tally.on_under_way(page, reason);
                if let Some(set_out) =
                    self.flights.set_out(page).filter(|_| reason != Reason::Demand)
                {
                    self.late.joined(page, set_out);
                }
            }
            None => self.tally.on_absent(page, self.waits.any(page)),
        }
        self.waits.add(view, page, flight.is_none());
        Outcome::Waits
    }

    /// What to fetch next. From then on it is in flight, until `on_filled` and `on_failed` have
    /// named all of it, in one piece or several. `None`: nothing now; ask again after the next
    /// event.
    ///
    /// `background_pages`: most pages to fetch in the background, 0 for none. Demand is not held
    /// back by it.
    pub fn next(&mut self, background_pages: u64) -> Option<Fetch> {
        if !self.has_room() {
            return None;
        }
        if let Some((page, range)) = self.next_late() {
            let (source, reason) = (self.table.lookup(page), Reason::Demand);
            return Some(Fetch { range, source, reason, first: Some(page), again: true });
        }
        let waited_for = self.waits.first();
        let (range, reason) = match waited_for {
            Some(first) => (self.around(first), Reason::Demand),
            None if self.flights.background() < self.config.background_fetches_max => {
                self.propose(background_pages)?
            }
            None => return None,
        };
        self.waits.set_out(range);
        self.flights.insert(range, reason, self.now);
        let (source, first) =
            (self.table.lookup(range.start()), waited_for.map(|first| first.page));
        Some(Fetch { range, source, reason, first, again: false })
    }

    fn has_room(&self) -> bool {
        self.fetches() < self.config.fetches_max
    }

    /// What to request once more: around a page for which a view has waited for too long, which is
    /// named.
    fn next_late(&mut self) -> Option<(PageIdx, PageRange)> {
        loop {
            let page = self.late.next(self.now)?;
            let flight = self.flights.at(page).filter(|(_, reason)| *reason != Reason::Demand);
            let Some((flight, _)) = flight.filter(|_| self.waits.any(page)) else { continue };
            let run = self.window(page, self.unit_of(page)).intersect(&flight);
            let range = around(page, run, |page| {
                self.presence.is_present(page) || self.late.was_tried(page)
            });
            self.late.set_out(range, self.now);
            return Some((page, range));
        }
    }

    /// These pages are present now (and [`Presence`] confirms it). They need not have been
    /// requested, nor be all of what was. Returns the views to wake, by page.
    pub fn on_filled(&mut self, range: PageRange) -> Vec<(ViewId, PageIdx)> {
        if let Some((flight, Reason::Background(_))) = self.flights.at(range.start())
            && let Some(set_out) = self.flights.set_out(range.start())
        {
            self.late.came(flight, set_out, self.now);
        }
        for (run, reason) in self.flights.remove(range) {
            self.tally.on_brought(run, reason);
        }
        self.late.over(range);
        for running in &mut self.backgrounds {
            running.policy.on_filled(range);
        }
        self.waits.take(range)
    }

    /// Another part than this scheduler brought these pages for `policy`, as far as they were not
    /// in flight. To be followed by `on_filled`. For [`Tally`] only.
    pub fn on_inserted(&mut self, range: PageRange, policy: &'static str) {
        for page in range.pages().filter(|page| self.flights.at(*page).is_none()) {
            self.tally.on_brought(page.range(), Reason::Background(policy));
        }
    }

    /// No source could serve these pages. Returns which views to stop, with the page of each.
    ///
    /// A failure is attributed to a page only if it is reported alone. Of several pages, the
    /// demanded ones are fetched again one by one, since one bad neighbour must not stop a view.
    /// The result is empty then.
    pub fn on_failed(&mut self, range: PageRange) -> Vec<(ViewId, PageIdx)> {
        for running in &mut self.backgrounds {
            running.policy.on_failed(range);
        }
        self.failed(range, range.len() == 1)
    }

    /// The same for what was requested [again](Fetch::again). A view whose page is also in flight
    /// otherwise is not stopped.
    pub fn on_failed_again(&mut self, range: PageRange) -> Vec<(ViewId, PageIdx)> {
        self.late.given_up(range);
        // Where the first has failed by now, this was the only one.
        let only = self.flights.demand_in(range);
        only.into_iter().flat_map(|run| self.failed(run, range.len() == 1)).collect()
    }

    fn failed(&mut self, range: PageRange, alone: bool) -> Vec<(ViewId, PageIdx)> {
        self.flights.remove(range);
        // What is in flight for the second time may come yet: it is the only one from now on.
        let again = self.late.over(range);
        let mut rest = range;
        for run in again {
            self.flights.insert(run, Reason::Demand, self.now);
            self.waits.retry_alone(rest.until_page(run.start()));
            rest = rest.from_page(run.end());
        }
        if alone {
            return self.waits.take(rest);
        }
        self.waits.retry_alone(rest);
        Vec::new()
    }

    /// Views have touched these pages without a fault, as the kernel tells: it maps what is present
    /// by itself. May say again what it said before. For [`Tally`] only: nothing is fetched, and no
    /// policy learns.
    pub fn on_touched(&mut self, range: PageRange) {
        self.tally.on_touched(range.intersect(&self.table.range()));
    }

    /// What faults found, and what became of the pages that were fetched.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The view has ended: it waits for nothing any more. What is in flight still arrives.
    pub fn remove_view(&mut self, view: ViewId) {
        self.waits.remove_view(view);
    }

    /// Whether no view waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.waits.count() == 0 && self.fetches() == 0
    }

    /// Whether no background policy has anything left to fetch, nor in flight. For the drain this
    /// means that it has tried everything; [`Presence`] tells whether all came in.
    pub fn background_done(&self) -> bool {
        self.flights.background() == 0
            && self
                .backgrounds
                .iter()
                .all(|running| running.rest.is_none() && running.policy.is_done())
    }

    /// Whether there is room for a background fetch. If there is, and [`Scheduler::next`] has none,
    /// no policy has anything to propose.
    pub fn has_room_ahead(&self) -> bool {
        self.has_room() && self.flights.background() < self.config.background_fetches_max
    }

    /// How many pairs of a view and a page wait.
    pub fn waits(&self) -> usize {
        self.waits.count()
    }

    /// How many fetches are in flight. One that is reported in pieces may count more than once.
    pub fn fetches(&self) -> usize {
        self.flights.len() + self.late.len()
    }

    /// The pages to fetch for a demanded one.
    fn around(&self, first: First) -> PageRange {
        let page = first.page;
        let unit = if first.alone { 1 } else { self.unit_of(page) };
        let run = self.flights.clip(page, self.window(page, unit));
        around(page, run, |page| self.presence.is_present(page))
    }

    /// How many pages are fetched with one.
    fn unit_of(&self, page: PageIdx) -> u64 {
        let image = self.config.image;
        let is_copy = image.is_some() && self.table.lookup(page).image() != image;
        if is_copy { self.config.copy_unit_pages } else { self.config.unit_pages }
    }

    /// The pages of the same source in the aligned window of a page.
    fn window(&self, page: PageIdx, unit: u64) -> PageRange {
        let start = PageIdx(page.0 / unit * unit);
        let end = self.table.range().end().min(PageIdx(start.0 + unit));
        self.table.run_at(page, PageRange::between(start, end)).0
    }

    /// The pages to fetch in the background.
    fn propose(&mut self, pages_max: u64) -> Option<(PageRange, Reason)> {
        if pages_max == 0 {
            return None;
        }
        for at in 0..self.backgrounds.len() {
            let running = &mut self.backgrounds[at];
            while let Some(proposal) =
                running.rest.take().or_else(|| running.policy.propose(&self.table))
            {
                let whole = proposal.range.intersect(&self.table.range());
                let piece_max = pages_max.min(proposal.pages_max.max(1));
                let Some(range) =
                    first_fetchable(&self.table, &self.presence, &self.flights, whole, piece_max)
                else {
                    continue;
                };
                let rest = whole.from_page(range.end());
                running.rest = (!rest.is_empty()).then_some(Proposal { range: rest, ..proposal });
                return Some((range, Reason::Background(running.policy.name())));
            }
        }
        None
    }
}

/// The longest part of `run` with `page` in it that has no other page that is `out`.
fn around(page: PageIdx, run: PageRange, out: impl Fn(PageIdx) -> bool) -> PageRange {
    let before = run.until_page(page).pages().rev().take_while(|page| !out(*page));
    let start = before.last().unwrap_or(page);
    let after = run.from_page(PageIdx(page.0 + 1)).pages();
    let last = after.take_while(|page| !out(*page)).last().unwrap_or(page);
    PageRange::between(start, PageIdx(last.0 + 1))
}

/// The first run in `whole`, of at most `pages_max` pages, that is neither zero nor present nor in
/// flight and has one source.
fn first_fetchable(
    table: &PageTable,
    presence: &impl Presence,
    flights: &Flights,
    whole: PageRange,
    pages_max: u64,
) -> Option<PageRange> {
    let mut rest = whole;
    while let Some(absent) = presence.next_absent(rest) {
        let page = absent.start();
        if let Some((flight, _)) = flights.at(page) {
            rest = rest.from_page(flight.end());
            continue;
        }
        let (run, source) = table.run_at(page, absent);
        if source == Source::Zero {
            rest = rest.from_page(run.end());
            continue;
        }
        return Some(flights.clip(page, run).truncate(pages_max));
    }
    None
}
