//! Promises of the scheduler, one by one.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};
use vmfork_policy::{
    Config, ConfigError, Drain, Listed, Outcome, Priority, Reason, Refusal, Scheduler, Segments,
    SegmentsConfig, ViewId,
};

const VIEW: ViewId = ViewId(1);
const OTHER: ViewId = ViewId(2);

type Presence = Rc<RefCell<Vec<bool>>>;

fn own() -> ImageId {
    ImageId::new(7).expect("not 0")
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn scheduler(pages: u64, config: Config) -> (Scheduler<Presence>, Presence) {
    let present = Rc::new(RefCell::new(vec![false; usize::try_from(pages).expect("small")]));
    let table = PageTable::uniform(pages, Source::Image(own()));
    (Scheduler::new(table, Rc::clone(&present), config).expect("valid"), present)
}

fn fill(
    scheduler: &mut Scheduler<Presence>,
    present: &Presence,
    range: PageRange,
) -> Vec<(ViewId, PageIdx)> {
    for page in range.pages() {
        present.borrow_mut()[usize::try_from(page.0).expect("small")] = true;
    }
    scheduler.on_filled(range)
}

#[test]
fn several_views_on_one_page_cause_one_fetch_and_are_all_woken() {
    let (mut scheduler, present) = scheduler(64, Config::default());
    for view in [VIEW, OTHER, VIEW] {
        assert_eq!(scheduler.on_fault(view, PageIdx(20)), Outcome::Waits);
    }
    let fetch = scheduler.next(0).expect("demand");
    assert_eq!((fetch.range, fetch.reason), (range(16, 16), Reason::Demand));
    // A neighbour that is in flight needs no fetch of its own.
    assert_eq!(scheduler.on_fault(OTHER, PageIdx(31)), Outcome::Waits);
    assert_eq!(scheduler.next(0), None);
    let woken = fill(&mut scheduler, &present, fetch.range);
    assert_eq!(woken, [(VIEW, PageIdx(20)), (OTHER, PageIdx(20)), (OTHER, PageIdx(31))]);
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(17)), Outcome::Present);
    assert!(scheduler.is_idle());
}

#[test]
fn demand_goes_first_and_finds_room() {
    let config =
        Config { unit_pages: 1, fetches_max: 3, background_fetches_max: 2, ..Config::default() };
    let (mut scheduler, _) = scheduler(4096, config);
    scheduler.add_background(Box::new(Drain::new(own(), 512))).expect("room");
    for _ in 0..2 {
        let fetch = scheduler.next(512).expect("drain");
        assert_eq!(fetch.reason, Reason::Background("drain"));
    }
    assert_eq!(scheduler.next(512), None);
    scheduler.on_fault(VIEW, PageIdx(4000));
    scheduler.on_fault(VIEW, PageIdx(3000));
    assert_eq!(scheduler.next(512).expect("demand").range, range(4000, 1));
    assert_eq!(scheduler.next(512), None, "no room");
    scheduler.on_filled(range(4000, 1));
    assert_eq!(scheduler.next(512).expect("demand").range, range(3000, 1));
}

/// Else the drain would take pages for copied that are not, and give their originals back.
#[test]
fn that_there_is_no_room_does_not_mean_that_there_is_nothing_left() {
    let config = Config { unit_pages: 1, fetches_max: 2, ..Config::default() };
    let config = Config { background_fetches_max: 1, ..config };
    let (mut scheduler, present) = scheduler(64, config);
    scheduler.add_background(Box::new(Drain::new(own(), 64))).expect("room");
    assert!(scheduler.has_room_ahead() && !scheduler.background_done());
    for page in [5, 9] {
        scheduler.on_fault(VIEW, PageIdx(page));
        scheduler.next(0).expect("demand");
    }
    assert_eq!(scheduler.next(64), None);
    assert!(!scheduler.has_room_ahead() && !scheduler.background_done());
    for page in [5, 9] {
        fill(&mut scheduler, &present, range(page, 1));
    }
    while let Some(fetch) = scheduler.next(64) {
        assert!(!scheduler.background_done(), "{:?} is under way", fetch.range);
        fill(&mut scheduler, &present, fetch.range);
    }
    assert!(scheduler.has_room_ahead() && scheduler.background_done());
}

#[test]
fn one_bad_neighbour_stops_no_view() {
    let (mut scheduler, present) = scheduler(64, Config::default());
    scheduler.add_background(Box::new(Drain::new(own(), 512))).expect("room");
    scheduler.on_fault(VIEW, PageIdx(3));
    scheduler.on_fault(OTHER, PageIdx(5));
    let fetch = scheduler.next(0).expect("demand");
    assert_eq!(scheduler.on_failed(fetch.range), [], "tried again, one by one");
    assert_eq!(scheduler.next(0).expect("demand").range, range(3, 1));
    assert_eq!(scheduler.next(0).expect("demand").range, range(5, 1));
    assert_eq!(fill(&mut scheduler, &present, range(3, 1)), [(VIEW, PageIdx(3))]);
    assert_eq!(scheduler.on_failed(range(5, 1)), [(OTHER, PageIdx(5))]);
    // The drain brings in the rest, though it is notified of a failure.
    let mut steps = 0;
    while let Some(fetch) = scheduler.next(512) {
        if fetch.range.contains(PageIdx(5)) {
            scheduler.on_failed(fetch.range);
        } else {
            fill(&mut scheduler, &present, fetch.range);
        }
        steps += 1;
        assert!(steps < 200, "it does not end");
    }
    assert!(scheduler.background_done());
    let absent = |page: &u64| !present.borrow()[usize::try_from(*page).expect("small")];
    assert_eq!((0..64).filter(absent).collect::<Vec<_>>(), [5]);
}

#[test]
fn a_fill_in_pieces_wakes_piece_by_piece() {
    let (mut scheduler, present) = scheduler(64, Config::default());
    scheduler.on_fault(VIEW, PageIdx(0));
    scheduler.on_fault(OTHER, PageIdx(15));
    let fetch = scheduler.next(0).expect("demand");
    assert_eq!(fill(&mut scheduler, &present, range(0, 4)), [(VIEW, PageIdx(0))]);
    assert!(!scheduler.is_idle());
    let rest = fetch.range.from_page(PageIdx(4));
    assert_eq!(fill(&mut scheduler, &present, rest), [(OTHER, PageIdx(15))]);
    assert!(scheduler.is_idle());
}

#[test]
fn a_view_that_is_gone_is_not_fetched_for() {
    let (mut scheduler, _) = scheduler(64, Config::default());
    scheduler.on_fault(VIEW, PageIdx(0));
    scheduler.on_fault(VIEW, PageIdx(40));
    scheduler.on_fault(OTHER, PageIdx(40));
    scheduler.remove_view(VIEW);
    assert_eq!(scheduler.next(0).expect("demand").range, range(32, 16));
    assert_eq!(scheduler.next(0), None);
    assert_eq!(scheduler.on_filled(range(32, 16)), [(OTHER, PageIdx(40))]);
}

#[test]
fn a_table_may_become_known_block_by_block() {
    let parent = Source::Image(ImageId::new(3).expect("not 0"));
    let table = PageTable::uniform(1024, parent);
    let present: Presence = Rc::new(RefCell::new(vec![false; 1024]));
    let config = Config { unit_pages: 512, ..Config::default() };
    let mut scheduler = Scheduler::new(table.clone(), present, config).expect("valid");
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(5)), Outcome::Waits);
    assert_eq!(scheduler.next(0).expect("demand").source, parent);

    let own = Source::Image(own());
    let derived = table.derive([(range(600, 8), own), (range(608, 416), Source::Zero)]);
    scheduler.set_table(derived.expect("within"));
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(700)), Outcome::Zero);
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(601)), Outcome::Waits);
    let fetch = scheduler.next(0).expect("demand");
    assert_eq!((fetch.range, fetch.source), (range(600, 8), own));
    assert_eq!(scheduler.on_filled(range(0, 512)), [(VIEW, PageIdx(5))]);
}

#[test]
fn waits_are_bounded() {
    let (mut scheduler, _) = scheduler(64, Config { waits_max: 2, ..Config::default() });
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(0)), Outcome::Waits);
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(1)), Outcome::Waits);
    assert_eq!(scheduler.on_fault(OTHER, PageIdx(1)), Outcome::Refused(Refusal::TooManyWaits));
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(1)), Outcome::Waits, "waits already");
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(64)), Outcome::Refused(Refusal::NoSuchPage));
}

#[test]
fn senseless_configurations_are_refused() {
    let new = |config| Scheduler::new(PageTable::uniform(1, Source::Zero), present(), config).err();
    let present_config = Config::default();
    for unit_pages in [0, 3, 1024] {
        let error = new(Config { unit_pages, ..present_config }).expect("refused");
        assert_eq!(
            error.to_string(),
            format!("fill unit of {unit_pages} pages; it must be a power of two from 1 to 512")
        );
    }
    let full = Config { fetches_max: 4, background_fetches_max: 4, ..present_config };
    assert_eq!(new(full), Some(ConfigError::Fetches { background: 4, total: 4 }));
    assert_eq!(new(Config { waits_max: 0, ..present_config }), Some(ConfigError::Waits));
    assert_eq!(new(present_config), None);

    fn present() -> Presence {
        Rc::default()
    }
}

#[test]
fn a_predictor_fits_and_goes_before_the_drain() {
    let config = Config { unit_pages: 1, ..Config::default() };
    let (mut scheduler, present) = scheduler(4096, config);
    let segments = SegmentsConfig { segment_pages: 64, percent: 4, unit_pages: 1, pages_max: 32 };
    scheduler.add_background(Box::new(Segments::new(segments).expect("valid"))).expect("room");
    scheduler.add_background(Box::new(Drain::new(own(), 8))).expect("room");
    assert_eq!(scheduler.next(512).expect("drain").range, range(0, 8));
    for page in [640, 650, 660] {
        scheduler.on_fault(VIEW, PageIdx(page));
        let fetch = scheduler.next(512).expect("demand");
        assert_eq!(fetch.reason, Reason::Demand);
        fill(&mut scheduler, &present, fetch.range);
    }
    let mut predicted = 0;
    loop {
        let fetch = scheduler.next(512).expect("there is the drain");
        fill(&mut scheduler, &present, fetch.range);
        if fetch.reason != Reason::Background("segments") {
            break;
        }
        assert!(range(640, 64).covers(&fetch.range));
        predicted += fetch.range.len();
    }
    assert_eq!(predicted, 61);
    scheduler.remove_background("drain");
    fill(&mut scheduler, &present, range(0, 8));
    assert!(scheduler.background_done());
}

#[test]
fn what_somebody_else_put_in_counts_as_predicted() {
    let config = Config { unit_pages: 1, ..Config::default() };
    let (mut scheduler, present) = scheduler(64, config);
    scheduler.on_fault(VIEW, PageIdx(3));
    assert_eq!(scheduler.next(0).expect("demand").range, range(3, 1));
    scheduler.on_inserted(range(0, 8), "inserted");
    fill(&mut scheduler, &present, range(0, 8));
    let inserted = scheduler.tally().fetched(Reason::Background("inserted"));
    assert_eq!(inserted.pages, 7, "page 3 was under way for a fault");
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(5)), Outcome::Present);
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(3)), Outcome::Present);
    let faults = scheduler.tally().faults();
    assert_eq!((faults.predicted, faults.shared, faults.remote), (1, 1, 1));
}

fn listed(name: &'static str, priority: Priority, runs: &[PageRange]) -> Box<Listed> {
    Box::new(Listed::new(name, priority, runs.to_vec(), 512))
}

#[test]
fn what_is_zero_present_or_beyond_the_image_is_left_out_of_a_list() {
    let other = Source::Image(ImageId::new(3).expect("not 0"));
    let table = PageTable::uniform(64, Source::Zero)
        .derive([(range(10, 6), other), (range(16, 4), Source::Image(own()))])
        .expect("within");
    let present: Presence = Rc::new(RefCell::new(vec![false; 64]));
    let mut scheduler =
        Scheduler::new(table, Rc::clone(&present), Config::default()).expect("valid");
    fill(&mut scheduler, &present, range(12, 1));
    let list = listed("list", Priority::WorkingSet, &[range(0, 64), range(60, 100)]);
    scheduler.add_background(list).expect("room");
    let mut fetched = Vec::new();
    while let Some(fetch) = scheduler.next(512) {
        fetched.push((fetch.range, fetch.source));
    }
    let own = Source::Image(own());
    assert_eq!(fetched, [(range(10, 2), other), (range(13, 3), other), (range(16, 4), own)]);
}

#[test]
fn the_background_is_done_when_all_of_it_has_arrived() {
    let (mut scheduler, present) = scheduler(64, Config::default());
    scheduler.add_background(Box::new(Drain::new(own(), 40))).expect("room");
    assert!(!scheduler.background_done(), "nothing fetched");
    assert_eq!(scheduler.next(512).expect("drain").range, range(0, 40));
    assert_eq!(scheduler.next(512).expect("drain").range, range(40, 24));
    assert_eq!(scheduler.next(512), None);
    assert!(!scheduler.background_done(), "under way");
    fill(&mut scheduler, &present, range(40, 24));
    assert!(!scheduler.background_done(), "some under way");
    fill(&mut scheduler, &present, range(0, 40));
    assert!(scheduler.background_done());

    // A policy with something left of its proposal is not done, whatever it says itself.
    scheduler.add_background(listed("list", Priority::Rest, &[range(0, 64)])).expect("room");
    present.borrow_mut().fill(false);
    assert_eq!(scheduler.next(8).expect("list").range, range(0, 8));
    fill(&mut scheduler, &present, range(0, 8));
    assert!(!scheduler.background_done(), "56 pages left");
}

#[test]
fn a_policy_takes_the_place_of_its_namesake() {
    let (mut scheduler, present) = scheduler(64, Config::default());
    for _ in 0..100 {
        scheduler.add_background(Box::new(Drain::new(own(), 64))).expect("the same name");
    }
    let fetch = scheduler.next(512).expect("drain");
    assert_eq!(fetch.range, range(0, 64));
    fill(&mut scheduler, &present, fetch.range);
    assert_eq!(scheduler.next(512), None);
    assert!(scheduler.background_done());
}

#[test]
fn the_most_urgent_policy_goes_first_whenever_it_was_added() {
    use Priority::{Prediction, Rest, WorkingSet};
    let (mut scheduler, _) = scheduler(4096, Config { fetches_max: 64, ..Config::default() });
    let add = |scheduler: &mut Scheduler<Presence>, priority, name, start| {
        scheduler.add_background(listed(name, priority, &[range(start, 16)])).expect("room");
    };
    let next = |scheduler: &mut Scheduler<Presence>| {
        let fetch = scheduler.next(8).expect("something is left");
        scheduler.on_filled(fetch.range);
        fetch.range.start().0
    };
    add(&mut scheduler, Rest, "a", 0);
    assert_eq!(next(&mut scheduler), 0);
    add(&mut scheduler, WorkingSet, "b", 100);
    add(&mut scheduler, Prediction, "c", 200);
    add(&mut scheduler, WorkingSet, "d", 300);
    add(&mut scheduler, Rest, "e", 400);
    // A namesake of another urgency changes its place.
    add(&mut scheduler, Prediction, "e", 500);
    let order: Vec<_> = std::iter::repeat_with(|| next(&mut scheduler)).take(9).collect();
    assert_eq!(order, [100, 108, 300, 308, 200, 208, 500, 508, 8]);
    for name in ["f", "g", "h"] {
        add(&mut scheduler, Rest, name, 600);
    }
    add(&mut scheduler, WorkingSet, "h", 600);
    let refused = scheduler.add_background(listed("i", Rest, &[]));
    let error = refused.expect_err("eight are there").to_string();
    assert_eq!(error, "no room for background policy `i`: there are 8");
}

#[test]
fn pages_of_another_image_come_with_fewer_neighbours() {
    let other = ImageId::new(8).expect("not 0");
    let table = PageTable::uniform(64, Source::Image(own()))
        .derive([(range(32, 32), Source::Image(other))])
        .expect("within");
    let present = Rc::new(RefCell::new(vec![false; 64]));
    let config = Config { copy_unit_pages: 4, image: Some(own()), ..Config::default() };
    let mut scheduler = Scheduler::new(table, present, config).expect("valid");
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(5)), Outcome::Waits);
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(41)), Outcome::Waits);
    assert_eq!(scheduler.next(0).expect("demand").range, range(0, 16));
    assert_eq!(scheduler.next(0).expect("demand").range, range(40, 4));
    let config = Config { copy_unit_pages: 3, ..Config::default() };
    let table = PageTable::uniform(64, Source::Image(own()));
    let refused = Scheduler::new(table, Rc::new(RefCell::new(vec![false; 64])), config);
    assert_eq!(refused.expect_err("refused"), ConfigError::Unit { unit_pages: 3 });
}

/// One whose background has asked for pages 0 to 16, for which `VIEW` waits.
fn ahead_of(page: u64) -> (Scheduler<Presence>, Presence) {
    let (mut scheduler, present) = scheduler(64, Config::default());
    let list = Listed::new("hydrate", Priority::Rest, vec![range(0, 16)], 16);
    scheduler.add_background(Box::new(list)).expect("room");
    scheduler.set_now(ms(1000));
    let ahead = scheduler.next(16).expect("proposed");
    assert_eq!((ahead.range, ahead.again), (range(0, 16), false));
    scheduler.set_now(ms(1010));
    assert_eq!(scheduler.on_fault(VIEW, PageIdx(page)), Outcome::Waits);
    (scheduler, present)
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn who_waits_joins_what_is_under_way_while_that_is_young() {
    let (mut scheduler, present) = ahead_of(5);
    assert_eq!(scheduler.next(0), None, "it is on its way");
    let late = scheduler.late_at().expect("it may never come");
    assert_eq!(late, ms(1250), "before anything was measured");
    scheduler.set_now(late);
    let again = scheduler.next(0).expect("it takes too long");
    assert_eq!((again.range, again.reason, again.again), (range(0, 16), Reason::Demand, true));
    assert_eq!((scheduler.next(0), scheduler.late_at()), (None, None), "once");
    assert_eq!(scheduler.on_fault(OTHER, PageIdx(6)), Outcome::Waits);
    assert_eq!((scheduler.next(0), scheduler.late_at()), (None, None), "that may come soon");
    // The first answer wakes them, and the other does nothing.
    let woken = fill(&mut scheduler, &present, again.range);
    assert_eq!(woken, [(VIEW, PageIdx(5)), (OTHER, PageIdx(6))]);
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.on_failed(range(0, 16)), []);
    assert_eq!(scheduler.next(0), None);
}

#[test]
fn how_long_it_is_young_goes_by_what_others_took() {
    let (mut scheduler, present) = scheduler(4096, Config::default());
    let list = Listed::new("hydrate", Priority::Rest, vec![range(0, 4096)], 16);
    scheduler.add_background(Box::new(list)).expect("room");
    let mut now = 0;
    let mut joined = |took: u64| {
        for _ in 0..40 {
            let ahead = scheduler.next(16).expect("proposed");
            now += took;
            scheduler.set_now(ms(now));
            fill(&mut scheduler, &present, ahead.range);
        }
        let ahead = scheduler.next(16).expect("proposed");
        scheduler.on_fault(VIEW, ahead.range.start());
        let late = scheduler.late_at().expect("it may never come");
        fill(&mut scheduler, &present, ahead.range);
        scheduler.set_now(late);
        assert_eq!((scheduler.next(0), scheduler.late_at()), (None, None), "it has come");
        late - ms(std::mem::replace(&mut now, u64::try_from(late.as_millis()).expect("small")))
    };
    assert_eq!(joined(2), ms(100), "no less");
    let slow = joined(100);
    assert!((ms(200)..ms(400)).contains(&slow), "{slow:?}");
    assert_eq!(joined(5000), ms(1000), "no more");
}

#[test]
fn no_view_is_stopped_while_the_other_may_come() {
    for first_fails_first in [true, false] {
        let (mut scheduler, _) = twice_under_way();
        let failed = |scheduler: &mut Scheduler<Presence>, first: bool| match first {
            true => scheduler.on_failed(range(5, 1)),
            false => scheduler.on_failed_again(range(5, 1)),
        };
        assert_eq!(failed(&mut scheduler, first_fails_first), [], "the other is under way");
        assert_eq!(scheduler.next(0), None);
        assert!(!scheduler.is_idle());
        assert_eq!(failed(&mut scheduler, !first_fails_first), [(VIEW, PageIdx(5))]);
        assert!(scheduler.is_idle());
    }
}

/// Page 5 is in flight twice.
fn twice_under_way() -> (Scheduler<Presence>, Presence) {
    let config = Config { unit_pages: 1, ..Config::default() };
    let (mut scheduler, present) = scheduler(64, config);
    let list = Listed::new("hydrate", Priority::Rest, vec![range(5, 1)], 1);
    scheduler.add_background(Box::new(list)).expect("room");
    scheduler.next(16).expect("proposed");
    scheduler.on_fault(VIEW, PageIdx(5));
    scheduler.set_now(ms(2000));
    assert!(scheduler.next(0).expect("late").again);
    (scheduler, present)
}
