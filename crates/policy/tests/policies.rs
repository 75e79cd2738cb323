//! Background policies in a scheduler, with made-up orders of faults, fetches and failures.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use proptest::prelude::*;
use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};
use vmfork_policy::{
    Background, Config, Drain, Fetch, Listed, Outcome, Priority, Reason, Scheduler, Segments,
    SegmentsConfig, ViewId,
};

const PAGES: u64 = 1024;
const UNIT_PAGES: u64 = 8;

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn image(id: u64) -> Source {
    Source::Image(ImageId::new(id).expect("not 0"))
}

/// Runs of zero pages and of two images' pages; zero behind them.
fn tables() -> impl Strategy<Value = PageTable> {
    prop::collection::vec((1..90u64, 0..3u64), 0..24).prop_map(|runs| {
        let mut at = 0;
        let mut changes = Vec::new();
        for (len, id) in runs {
            let source = if id == 0 { Source::Zero } else { image(id) };
            let run = range(at, len).intersect(&PageRange::first(PAGES));
            changes.push((run, source));
            at = run.end().0;
        }
        PageTable::uniform(PAGES, Source::Zero).derive(changes).expect("within")
    })
}

#[derive(Debug, Clone)]
enum Step {
    Fault(u64),
    /// Choose a fetch, of at most this many pages if no view waits.
    Next(u64),
    Fill(prop::sample::Index),
    Fail(prop::sample::Index),
}

fn steps(failing: bool) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..PAGES).prop_map(Step::Fault),
        4 => (0..80u64).prop_map(Step::Next),
        3 => any::<prop::sample::Index>().prop_map(Step::Fill),
        u32::from(failing) => any::<prop::sample::Index>().prop_map(Step::Fail),
    ];
    prop::collection::vec(step, 0..150)
}

/// A host that does what the scheduler says, and checks what is true of every policy.
struct Host {
    table: PageTable,
    scheduler: Scheduler<Rc<RefCell<Vec<bool>>>>,
    present: Rc<RefCell<Vec<bool>>>,
    under_way: Vec<PageRange>,
    /// Pages that are demanded and not in flight.
    queued: BTreeSet<PageIdx>,
    failed_alone: BTreeSet<PageIdx>,
    fetches: Vec<Fetch>,
}

impl Host {
    fn new(table: &PageTable, policies: Vec<Box<dyn Background>>) -> Self {
        let pages = usize::try_from(table.pages()).expect("small");
        let present = Rc::new(RefCell::new(vec![false; pages]));
        let config =
            Config { unit_pages: UNIT_PAGES, copy_unit_pages: UNIT_PAGES, ..Config::default() };
        let mut scheduler =
            Scheduler::new(table.clone(), Rc::clone(&present), config).expect("valid");
        for policy in policies {
            scheduler.add_background(policy).expect("room");
        }
        Self {
            table: table.clone(),
            scheduler,
            present,
            under_way: Vec::new(),
            queued: BTreeSet::new(),
            failed_alone: BTreeSet::new(),
            fetches: Vec::new(),
        }
    }

    fn is_present(&self, page: PageIdx) -> bool {
        self.present.borrow()[usize::try_from(page.0).expect("small")]
    }

    fn is_under_way(&self, page: PageIdx) -> bool {
        self.under_way.iter().any(|run| run.contains(page))
    }

    fn fault(&mut self, page: u64) {
        let page = PageIdx(page);
        if self.scheduler.on_fault(ViewId(1), page) == Outcome::Waits && !self.is_under_way(page) {
            self.queued.insert(page);
        }
    }

    fn next(&mut self, background_pages: u64) -> Option<Fetch> {
        let Some(fetch) = self.scheduler.next(background_pages) else {
            assert!(self.queued.is_empty(), "{:?} wait", self.queued);
            return None;
        };
        let is_demand = fetch.reason == Reason::Demand;
        assert_eq!(is_demand, !self.queued.is_empty(), "demand goes first: {fetch:?}");
        assert!(is_demand || fetch.range.len() <= background_pages);
        for page in fetch.range.pages() {
            assert_ne!(self.table.lookup(page), Source::Zero, "{page} is zero");
            assert!(!self.is_present(page), "{page} is fetched twice");
            assert!(!self.is_under_way(page), "{page} is under way twice");
            self.queued.remove(&page);
        }
        self.under_way.push(fetch.range);
        self.fetches.push(fetch);
        Some(fetch)
    }

    fn fill(&mut self, range: PageRange) {
        for page in range.pages() {
            self.present.borrow_mut()[usize::try_from(page.0).expect("small")] = true;
        }
        self.scheduler.on_filled(range);
    }

    fn fail(&mut self, range: PageRange, waited: &BTreeSet<PageIdx>) {
        self.scheduler.on_failed(range);
        if range.len() == 1 {
            self.failed_alone.insert(range.start());
        } else {
            self.queued.extend(range.pages().filter(|page| waited.contains(page)));
        }
    }

    fn run(&mut self, steps: &[Step]) {
        let mut waited = BTreeSet::new();
        for step in steps {
            match *step {
                Step::Fault(page) => {
                    self.fault(page);
                    waited.extend((!self.is_present(PageIdx(page))).then_some(PageIdx(page)));
                }
                Step::Next(pages) => {
                    self.next(pages);
                }
                Step::Fill(which) | Step::Fail(which) if !self.under_way.is_empty() => {
                    let run = self.under_way.swap_remove(which.index(self.under_way.len()));
                    match step {
                        Step::Fill(_) => self.fill(run),
                        _ => self.fail(run, &waited),
                    }
                    if run.len() == 1 || matches!(step, Step::Fill(_)) {
                        waited.retain(|page| !run.contains(*page));
                    }
                }
                Step::Fill(_) | Step::Fail(_) => {}
            }
        }
    }

    /// From now on everything is readable, and no view faults.
    fn run_out(&mut self) {
        for round in 0.. {
            assert!(round < 10 * PAGES, "it does not end");
            for run in std::mem::take(&mut self.under_way) {
                self.fill(run);
            }
            if self.next(64).is_none() {
                break;
            }
        }
        assert!(self.scheduler.background_done());
        assert!(self.scheduler.is_idle());
    }

    /// The non-zero pages of `range` that are absent.
    fn absent(&self, range: PageRange) -> Vec<PageIdx> {
        let wanted = |page: &PageIdx| {
            self.table.get(*page).is_some_and(|source| source != Source::Zero)
                && !self.is_present(*page)
        };
        range.pages().filter(wanted).collect()
    }

    /// Fetches of a policy, in order.
    fn fetches_of(&self, name: &'static str) -> impl Iterator<Item = PageRange> + '_ {
        let is_its = move |fetch: &&Fetch| fetch.reason == Reason::Background(name);
        self.fetches.iter().filter(is_its).map(|fetch| fetch.range)
    }
}

/// The image that is drained.
fn own() -> ImageId {
    ImageId::new(1).expect("not 0")
}

fn absent_of_its_own(host: &Host, table: &PageTable) -> Vec<PageIdx> {
    let absent = host.absent(table.range()).into_iter();
    absent.filter(|page| table.lookup(*page) == Source::Image(own())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_drain_brings_in_everything_of_its_image_that_can_be_had(table in tables(), steps in steps(true)) {
        let mut host = Host::new(&table, vec![Box::new(Drain::new(own(), 24))]);
        host.run(&steps);
        host.run_out();
        for page in absent_of_its_own(&host, &table) {
            prop_assert!(host.failed_alone.contains(&page), "{} was left out", page);
        }
    }

    #[test]
    fn a_drain_goes_in_order_while_nothing_fails(table in tables(), steps in steps(false)) {
        let mut host = Host::new(&table, vec![Box::new(Drain::new(own(), 24))]);
        host.run(&steps);
        host.run_out();
        prop_assert_eq!(absent_of_its_own(&host, &table), []);
        let starts: Vec<_> = host.fetches_of("drain").map(|run| run.start()).collect();
        prop_assert!(starts.is_sorted(), "{:?}", starts);
    }

    #[test]
    fn a_list_comes_in_its_order_and_before_the_rest(
        table in tables(),
        runs in prop::collection::vec((0..PAGES + 50, 0..60u64), 0..30),
        steps in steps(false),
    ) {
        let runs: Vec<_> = runs.into_iter().map(|(start, len)| range(start, len)).collect();
        let list = Listed::new("set", Priority::WorkingSet, runs.clone(), 24);
        // The less urgent policy is there first.
        let rest = Listed::new("hydrate", Priority::Rest, vec![table.range()], 24);
        let mut host = Host::new(&table, vec![Box::new(rest), Box::new(list)]);
        host.run(&steps);
        host.run_out();
        prop_assert_eq!(host.absent(table.range()), []);
        let mut first_run = BTreeMap::new();
        for (at, page) in runs.iter().enumerate().flat_map(|(at, run)| run.pages().map(move |page| (at, page))) {
            first_run.entry(page).or_insert(at);
        }
        let order: Vec<_> = host.fetches_of("set").map(|run| (first_run[&run.start()], run.start())).collect();
        prop_assert!(order.is_sorted(), "{:?}", order);
        let reasons = host.fetches.iter().map(|fetch| fetch.reason);
        let hydrated = |reason: &Reason| *reason == Reason::Background("hydrate");
        prop_assert!(reasons.skip_while(|reason| !hydrated(reason)).all(|reason| reason != Reason::Background("set")));
    }

    #[test]
    fn a_segment_past_its_share_is_brought_in_wholly_and_the_fullest_first(
        table in tables(),
        steps in steps(false),
    ) {
        let config =
            SegmentsConfig { segment_pages: 64, percent: 30, unit_pages: UNIT_PAGES, pages_max: 16 };
        let policy = Segments::new(config).expect("valid");
        let mut host = Host::new(&table, vec![Box::new(policy)]);
        host.run(&steps);
        // No view faults any more: what is proposed from here on comes by fullness.
        let fetched = host.fetches.len();
        host.run_out();
        let is_zero = |page: PageIdx| table.lookup(page) == Source::Zero;
        let faulted = |page: PageIdx| {
            let window = range(page.0 / UNIT_PAGES * UNIT_PAGES, UNIT_PAGES);
            steps.iter().any(|step| matches!(step, Step::Fault(at) if window.contains(PageIdx(*at)) && !is_zero(PageIdx(*at))))
        };
        let share = |index: u64| {
            let pages: Vec<_> = range(index * 64, 64).pages().filter(|page| !is_zero(*page)).collect();
            let demanded = pages.iter().filter(|page| faulted(**page)).count();
            (demanded as u64, pages.len() as u64)
        };
        for index in 0..PAGES / 64 {
            let (demanded, pages) = share(index);
            if demanded * 100 > 30 * pages {
                prop_assert_eq!(host.absent(range(index * 64, 64)), []);
            } else {
                let mut predicted = host.fetches_of("segments");
                prop_assert!(predicted.all(|run| run.start().0 / 64 != index), "{} is not past it", index);
            }
        }
        let proposed = host.fetches[fetched..].iter().filter(|fetch| fetch.reason != Reason::Demand);
        let mut order: Vec<_> = proposed.map(|fetch| fetch.range.start().0 / 64).collect();
        order.dedup();
        // The first may have been proposed, and partly fetched, before the last faults.
        for pair in order.get(1..).unwrap_or_default().windows(2) {
            let ((a, b), (c, d)) = (share(pair[0]), share(pair[1]));
            prop_assert!(a * d >= c * b, "segment {} before {}: {a} of {b}, {c} of {d}", pair[0], pair[1]);
        }
    }
}
