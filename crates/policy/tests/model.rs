//! The scheduler against a model: any order of faults, fetches, fills, failures and departures.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use proptest::prelude::*;
use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};
use vmfork_policy::{
    Config, Drain, Faults, Fetch, Fetched, Outcome, Reason, Scheduler, Tally, ViewId,
};

const PAGES: usize = 96;

fn own() -> ImageId {
    ImageId::new(7).expect("not 0")
}

/// Runs of zero pages, own pages and an ancestor's.
fn table(lens: &[(u64, u8)]) -> PageTable {
    let mut at = 0;
    let mut changes = Vec::new();
    for (len, kind) in lens {
        let len = (*len).min(PAGES as u64 - at);
        let source = match kind {
            0 => Source::Zero,
            1 => Source::Image(ImageId::new(3).expect("not 0")),
            _ => Source::Image(own()),
        };
        changes.push((PageRange::new(PageIdx(at), len).expect("small"), source));
        at += len;
    }
    PageTable::uniform(PAGES as u64, Source::Image(own())).derive(changes).expect("within")
}

#[derive(Debug, Clone)]
enum Step {
    Fault {
        view: u64,
        page: u64,
    },
    Next {
        background_pages: u64,
    },
    /// Report a part of a fetch that is in flight: which, from where (in 1/8), to where.
    Filled {
        which: prop::sample::Index,
        from: u64,
        to: u64,
    },
    Failed {
        which: prop::sample::Index,
        from: u64,
        to: u64,
    },
    /// Another part brought in pages.
    Heard {
        page: u64,
        len: u64,
    },
    RemoveView {
        view: u64,
    },
    Pass {
        ms: u64,
    },
    /// The kernel has mapped pages for a view by itself.
    Touched {
        page: u64,
        len: u64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let page = 0..PAGES as u64 + 1;
    let part = || (any::<prop::sample::Index>(), 0..8u64, 1..9u64);
    let step = prop_oneof![
        5 => (0..5u64, page.clone()).prop_map(|(view, page)| Step::Fault { view, page }),
        5 => prop_oneof![Just(0), 1..64u64]
            .prop_map(|background_pages| Step::Next { background_pages }),
        3 => part().prop_map(|(which, from, to)| Step::Filled { which, from, to }),
        2 => part().prop_map(|(which, from, to)| Step::Failed { which, from, to }),
        1 => (page.clone(), 1..6u64).prop_map(|(page, len)| Step::Heard { page, len }),
        1 => (page, 0..30u64).prop_map(|(page, len)| Step::Touched { page, len }),
        1 => (0..5u64).prop_map(|view| Step::RemoveView { view }),
        2 => (0..600u64).prop_map(|ms| Step::Pass { ms }),
    ];
    prop::collection::vec(step, 1..120)
}

/// The scheduler, and beside it what must be true of it.
struct Pair {
    scheduler: Scheduler<Rc<RefCell<Vec<bool>>>>,
    present: Rc<RefCell<Vec<bool>>>,
    config: Config,
    table: PageTable,
    /// Waiting views, by page, with the page's place in the order of arrival.
    waits: BTreeMap<u64, (u64, BTreeSet<u64>)>,
    arrivals: u64,
    /// With why, and since when.
    under_way: BTreeMap<u64, (Reason, u64)>,
    /// Those of them that were requested again, and are in flight so.
    tried: BTreeSet<u64>,
    again: BTreeSet<u64>,
    now_ms: u64,
    /// Pages that must be fetched alone if they are demanded.
    alone: BTreeSet<u64>,
    /// Each with whether it was for the second time.
    fetches: Vec<(PageRange, bool)>,
    /// How often each page was filled upon a fetch.
    fills: BTreeMap<u64, u32>,
    tally: Counts,
}

/// What the tally must say.
#[derive(Default)]
struct Counts {
    faults: Faults,
    /// Why each page is in flight, or came in.
    reasons: BTreeMap<u64, Reason>,
    brought: BTreeSet<u64>,
    touched: BTreeSet<u64>,
}

impl Counts {
    fn on_fault(&mut self, page: u64, here: bool, queued: bool) {
        self.touched.insert(page);
        let count = match self.reasons.get(&page) {
            Some(Reason::Background(_)) => &mut self.faults.predicted,
            Some(Reason::Demand) => &mut self.faults.shared,
            None if here || queued => &mut self.faults.shared,
            None => &mut self.faults.remote,
        };
        *count += 1;
    }

    fn check(&self, tally: &Tally) {
        assert_eq!(tally.faults(), self.faults);
        for reason in [Reason::Demand, Reason::Background("drain"), Reason::Background("none")] {
            let of = |page: &&u64| self.reasons[*page] == reason;
            let touched = |page: &&u64| self.touched.contains(*page);
            let expected = Fetched {
                pages: self.brought.iter().filter(of).count() as u64,
                touched_pages: self.brought.iter().filter(of).filter(touched).count() as u64,
            };
            assert_eq!(tally.fetched(reason), expected, "{reason:?}");
            let listed = tally.by_reason().find(|(listed, _)| *listed == reason);
            assert_eq!(listed.map_or(Fetched::default(), |(_, fetched)| fetched), expected);
        }
    }
}

impl Pair {
    fn new(table: PageTable, config: Config) -> Self {
        let present = Rc::new(RefCell::new(vec![false; PAGES]));
        let mut scheduler =
            Scheduler::new(table.clone(), Rc::clone(&present), config).expect("valid");
        scheduler.add_background(Box::new(Drain::new(own(), 24))).expect("room");
        Self {
            scheduler,
            present,
            config,
            table,
            waits: BTreeMap::new(),
            arrivals: 0,
            under_way: BTreeMap::new(),
            tried: BTreeSet::new(),
            again: BTreeSet::new(),
            now_ms: 0,
            alone: BTreeSet::new(),
            fetches: Vec::new(),
            fills: BTreeMap::new(),
            tally: Counts::default(),
        }
    }

    fn is_present(&self, page: u64) -> bool {
        self.present.borrow()[usize::try_from(page).expect("small")]
    }

    fn wait_count(&self) -> usize {
        self.waits.values().map(|(_, views)| views.len()).sum()
    }

    fn fault(&mut self, view: u64, page: u64) {
        let outcome = self.scheduler.on_fault(ViewId(view), PageIdx(page));
        if page >= PAGES as u64 {
            assert!(matches!(outcome, Outcome::Refused(_)));
        } else if self.table.lookup(PageIdx(page)) == Source::Zero {
            assert_eq!(outcome, Outcome::Zero);
            self.tally.faults.zero += 1;
        } else if self.is_present(page) {
            assert_eq!(outcome, Outcome::Present);
            self.tally.on_fault(page, true, false);
        } else if self.waits.get(&page).is_some_and(|(_, views)| views.contains(&view)) {
            assert_eq!(outcome, Outcome::Waits);
        } else if self.wait_count() >= self.config.waits_max {
            assert!(matches!(outcome, Outcome::Refused(_)));
        } else {
            assert_eq!(outcome, Outcome::Waits);
            self.tally.on_fault(page, false, self.waits.contains_key(&page));
            let arrivals = &mut self.arrivals;
            let (_, views) = self.waits.entry(page).or_insert_with(|| {
                *arrivals += 1;
                (*arrivals, BTreeSet::new())
            });
            views.insert(view);
        }
    }

    fn next(&mut self, background_pages: u64) -> Option<Fetch> {
        let queued = self.waits.iter().filter(|(page, _)| !self.under_way.contains_key(page));
        let first = queued.min_by_key(|(_, (arrival, _))| *arrival).map(|(page, _)| *page);
        let room = self.scheduler.fetches() < self.config.fetches_max;
        let fetch = self.scheduler.next(background_pages);
        let Some(fetch) = fetch else {
            assert!(first.is_none() || !room, "page {first:?} is waited for, nothing is fetched");
            return None;
        };
        assert!(room, "more fetches than allowed");
        assert!(!fetch.range.is_empty());
        assert_ne!(fetch.source, Source::Zero);
        if fetch.again {
            self.set_out_again(fetch);
            return Some(fetch);
        }
        for page in fetch.range.pages() {
            assert_eq!(self.table.lookup(page), fetch.source);
            assert!(!self.is_present(page.0), "page {page} is fetched twice");
            let before = self.under_way.insert(page.0, (fetch.reason, self.now_ms));
            assert_eq!(before, None, "page {page} is under way twice");
            self.tally.reasons.insert(page.0, fetch.reason);
        }
        match first {
            Some(first) => {
                assert_eq!(fetch.reason, Reason::Demand);
                assert!(fetch.range.contains(PageIdx(first)), "{first} came first: {fetch:?}");
                let is_own = self.scheduler.table().lookup(PageIdx(first)) == Source::Image(own());
                let unit = match self.alone.contains(&first) {
                    true => 1,
                    false if is_own => self.config.unit_pages,
                    false => self.config.copy_unit_pages,
                };
                let window = PageRange::new(PageIdx(first / unit * unit), unit).expect("small");
                assert!(window.covers(&fetch.range), "{fetch:?} for page {first}");
                // As long as it can be.
                for outside in [fetch.range.start().0.checked_sub(1), Some(fetch.range.end().0)] {
                    if let Some(page) = outside.filter(|page| window.contains(PageIdx(*page))) {
                        assert!(
                            self.table.get(PageIdx(page)) != Some(fetch.source)
                                || self.is_present(page)
                                || self.under_way.contains_key(&page),
                            "page {page} should be part of {fetch:?}"
                        );
                    }
                }
            }
            None => {
                assert_eq!(fetch.reason, Reason::Background("drain"));
                assert_eq!(fetch.source, Source::Image(own()));
                assert!(fetch.range.len() <= background_pages.min(24));
            }
        }
        self.fetches.push((fetch.range, false));
        Some(fetch)
    }

    /// Only a background read is requested again, once, when it is not young any more and a view
    /// waits.
    fn set_out_again(&mut self, fetch: Fetch) {
        assert_eq!(fetch.reason, Reason::Demand);
        assert!(fetch.range.pages().any(|page| self.waits.contains_key(&page.0)), "{fetch:?}");
        for page in fetch.range.pages() {
            assert_eq!(self.table.lookup(page), fetch.source);
            assert!(!self.is_present(page.0), "page {page} is fetched twice");
            let (reason, since) = self.under_way[&page.0];
            assert_eq!(reason, Reason::Background("drain"));
            assert!(self.now_ms >= since + 100, "{page} is young");
            assert!(self.tried.insert(page.0) && self.again.insert(page.0), "a third time");
        }
        self.fetches.push((fetch.range, true));
    }

    /// What the model says of the waits for `range`, which end.
    fn take(&mut self, range: PageRange) -> Vec<(ViewId, PageIdx)> {
        let mut taken = Vec::new();
        for page in range.pages() {
            self.alone.remove(&page.0);
            for view in self.waits.remove(&page.0).map(|(_, views)| views).unwrap_or_default() {
                taken.push((ViewId(view), page));
            }
        }
        taken
    }

    fn filled(&mut self, range: PageRange) {
        for page in range.pages() {
            self.present.borrow_mut()[usize::try_from(page.0).expect("small")] = true;
            self.tried.remove(&page.0);
            self.again.remove(&page.0);
            if self.under_way.remove(&page.0).is_some() {
                *self.fills.entry(page.0).or_insert(0) += 1;
                self.tally.brought.insert(page.0);
            }
        }
        let mut woken = self.scheduler.on_filled(range);
        woken.sort_by_key(|(view, page)| (*page, *view));
        assert_eq!(woken, self.take(range));
    }

    fn failed(&mut self, range: PageRange, again: bool) {
        let outcome = match again {
            true => self.scheduler.on_failed_again(range),
            false => self.scheduler.on_failed(range),
        };
        let mut ended = Vec::new();
        for page in range.pages() {
            let was_second = again && self.again.remove(&page.0);
            let is_none = again
                && self.under_way.get(&page.0).is_none_or(|(reason, _)| *reason != Reason::Demand);
            if was_second || is_none {
                continue; // the first may come yet, or has come
            }
            self.under_way.remove(&page.0);
            self.tally.reasons.remove(&page.0);
            self.tried.remove(&page.0);
            if self.again.remove(&page.0) {
                self.under_way.insert(page.0, (Reason::Demand, self.now_ms));
                self.tally.reasons.insert(page.0, Reason::Demand);
            } else {
                ended.push(page);
            }
        }
        let mut stopped = outcome;
        stopped.sort_by_key(|(view, page)| (*page, *view));
        if range.len() == 1 {
            let taken: Vec<_> = ended.iter().flat_map(|page| self.take(page.range())).collect();
            assert_eq!(stopped, taken);
        } else {
            assert_eq!(stopped, []);
            let waited = ended.iter().filter(|page| self.waits.contains_key(&page.0));
            self.alone.extend(waited.map(|page| page.0));
        }
    }

    /// A part of a fetch in flight, which is in flight no more.
    fn part(
        &mut self,
        which: prop::sample::Index,
        from: u64,
        to: u64,
    ) -> Option<(PageRange, bool)> {
        if self.fetches.is_empty() {
            return None;
        }
        let (whole, again) = self.fetches.swap_remove(which.index(self.fetches.len()));
        let start = whole.start().0 + whole.len() * from / 8;
        let end = (whole.start().0 + (whole.len() * to).div_ceil(8)).max(start);
        let part = PageRange::between(PageIdx(start), PageIdx(end));
        for rest in [whole.until_page(part.start()), whole.from_page(part.end())] {
            if !rest.is_empty() {
                self.fetches.push((rest, again));
            }
        }
        // What was heard meanwhile is in flight no more, and must not be failed.
        let is_under_way = |page: PageIdx| self.under_way.contains_key(&page.0);
        (again || part.pages().all(is_under_way)).then_some((part, again))
    }

    fn remove_view(&mut self, view: u64) {
        self.scheduler.remove_view(ViewId(view));
        self.waits.retain(|page, (_, views)| {
            views.remove(&view);
            if views.is_empty() {
                self.alone.remove(page);
            }
            !views.is_empty()
        });
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Fault { view, page } => self.fault(view, page),
            Step::Next { background_pages } => {
                self.next(background_pages);
            }
            Step::Filled { which, from, to } => {
                if let Some((part, _)) = self.part(which, from, to) {
                    self.filled(part);
                }
            }
            Step::Failed { which, from, to } => {
                if let Some((part, again)) = self.part(which, from, to) {
                    self.failed(part, again);
                }
            }
            Step::Heard { page, len } => {
                let range = PageRange::new(PageIdx(page), len).expect("small");
                self.filled(range.intersect(&self.table.range()));
            }
            Step::RemoveView { view } => self.remove_view(view),
            Step::Pass { ms } => {
                self.now_ms += ms;
                self.scheduler.set_now(Duration::from_millis(self.now_ms));
            }
            Step::Touched { page, len } => {
                let range = PageRange::new(PageIdx(page), len).expect("small");
                self.scheduler.on_touched(range);
                let pages = range.pages().filter(|page| page.0 < PAGES as u64);
                self.tally.touched.extend(pages.map(|page| page.0));
            }
        }
        self.tally.check(self.scheduler.tally());
        assert_eq!(self.scheduler.waits(), self.wait_count());
        assert!(self.wait_count() <= self.config.waits_max);
        let idle = self.waits.is_empty() && self.under_way.is_empty();
        assert_eq!(self.scheduler.is_idle(), idle);
    }

    /// Everything is readable from now on: all waits end, and the drain brings in all own pages.
    fn run_out(&mut self) {
        for round in 0.. {
            assert!(round < 10 * PAGES, "it does not end");
            for page in self.under_way.keys().copied().collect::<Vec<_>>() {
                self.filled(PageIdx(page).range());
            }
            if self.next(64).is_none() {
                break;
            }
        }
        assert_eq!(self.waits, BTreeMap::new());
        assert!(self.scheduler.is_idle());
        assert!(self.scheduler.background_done());
        assert!(self.fills.values().all(|fills| *fills == 1), "a page was filled twice");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_fault_is_answered_once_whatever_the_order(
        lens in prop::collection::vec((1..40u64, 0..4u8), 0..8),
        (unit_log2, copy_unit_log2) in (0..7u32, 0..7u32),
        (fetches_max, background, waits_max) in (1..6usize, 0..4usize, 1..12usize),
        steps in steps(),
    ) {
        let config = Config {
            copy_unit_pages: 1 << copy_unit_log2,
            image: Some(own()),
            unit_pages: 1 << unit_log2,
            fetches_max,
            background_fetches_max: background.min(fetches_max - 1),
            waits_max,
        };
        let mut pair = Pair::new(table(&lens), config);
        let mut failed_alone = BTreeSet::new();
        for step in &steps {
            if let Step::Failed { which, from, to } = step {
                if let Some((part, again)) = pair.part(*which, *from, *to) {
                    pair.failed(part, again);
                    failed_alone.extend((part.len() == 1).then_some(part.start().0));
                }
            } else {
                pair.step(step);
            }
        }
        if config.background_fetches_max == 0 {
            return Ok(());
        }
        pair.run_out();
        // Own pages that did not come in failed alone, or beside others when the drain had
        // passed: never if nothing failed for good.
        for page in pair.table.pages_of(own()).flat_map(|run| run.pages()) {
            prop_assert!(
                pair.is_present(page.0) || failed_alone.contains(&page.0),
                "page {} was left out", page
            );
        }
    }
}
