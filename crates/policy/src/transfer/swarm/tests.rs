use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use vmfork_image::{PageIdx, PageRange};

use super::*;
use crate::transfer::HostId;

const ORIGIN: HostId = HostId(100);
const NEAR: HostId = HostId(1);
const FAR: HostId = HostId(2);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn piece(at: u64) -> PageRange {
    range(at * 16, 16)
}

/// An origin and two peers, which hold the first half.
fn three(config: HoldersConfig) -> Holders {
    let mut holders = Holders::new(1024, config);
    assert!(
        holders.joined(ORIGIN, true, 5)
            && holders.joined(NEAR, false, 1)
            && holders.joined(FAR, false, 9)
    );
    holders.announced(NEAR, range(0, 512));
    holders.announced(FAR, range(0, 512));
    holders
}

#[test]
fn demand_goes_to_who_will_answer_first_and_of_equals_to_the_nearest() {
    let mut holders = three(HoldersConfig::default());
    assert_eq!(holders.choose(piece(0), true, ms(0)), Choice::Ask(NEAR));
    assert_eq!(holders.choose(piece(0), true, ms(0)), Choice::UnderWay);
    assert_eq!(holders.choose(range(8, 1), true, ms(0)), Choice::UnderWay);
    assert_eq!(
        holders.choose(piece(1), true, ms(0)),
        Choice::Ask(ORIGIN),
        "NEAR has something to do"
    );
    assert_eq!(holders.choose(piece(2), true, ms(0)), Choice::Ask(FAR));
    assert_eq!(holders.choose(piece(40), true, ms(0)), Choice::Ask(ORIGIN), "no other host has it");
    for (host, at, took) in [(NEAR, 0, 9), (ORIGIN, 1, 9), (ORIGIN, 40, 9), (FAR, 2, 1)] {
        holders.answered(host, piece(at), ms(took));
    }
    assert_eq!(holders.under_way(), 0);
    for at in 3..6 {
        assert_eq!(holders.choose(piece(at), true, ms(10)), Choice::Ask(FAR), "FAR is quick");
    }
}

#[test]
fn what_takes_too_long_is_asked_of_another_or_of_the_same_again() {
    let mut holders = three(HoldersConfig::default());
    assert_eq!(holders.choose_unwaited(piece(0), ms(0)), Choice::Ask(NEAR));
    assert_eq!(holders.choose(piece(0), true, ms(60)), Choice::UnderWay);
    assert_eq!(holders.choose_again(piece(0), ms(60)), Choice::Ask(ORIGIN));
    assert_eq!((holders.under_way(), holders.ahead_under_way()), (1, 0), "the first is dropped");
    holders.answered(NEAR, piece(0), ms(70));
    assert!(holders.is_under_way(piece(0)), "what it says does not count");
    holders.answered(ORIGIN, piece(0), ms(70));
    assert_eq!(holders.under_way(), 0);
    // No other host has it.
    assert_eq!(holders.choose(piece(40), true, ms(80)), Choice::Ask(ORIGIN));
    assert_eq!(holders.choose_again(piece(40), ms(90)), Choice::Ask(ORIGIN));
    assert_eq!(holders.under_way(), 1);
}

#[test]
fn who_fails_is_left_alone_for_a_while_and_then_for_longer() {
    let mut holders = three(HoldersConfig::default());
    holders.left(FAR);
    holders.left(ORIGIN);
    let mut now = ms(0);
    for pause in [50, 100, 200, 400, 800] {
        assert_eq!(holders.choose(piece(0), true, now), Choice::Ask(NEAR));
        assert_eq!(holders.choose(piece(63), true, now), Choice::NoHolder);
        holders.failed(NEAR, piece(0), Failure::Broken, now);
        assert_eq!(holders.choose(piece(0), true, now), Choice::Later(now + ms(pause)));
        now += ms(pause);
    }
    assert_eq!(holders.choose(piece(0), true, now), Choice::Ask(NEAR));
    holders.failed(NEAR, piece(0), Failure::Broken, now);
    assert_eq!(holders.choose(piece(0), true, now + ms(1_000_000)), Choice::NoHolder, "given up");
    assert_eq!(holders.copies(range(0, 1)), 0);
    holders.announced(NEAR, piece(63));
    assert!(holders.copies(range(0, 1)) > 0 && holders.copies(piece(63)) > 0);
    assert_eq!(holders.choose(piece(0), true, now), Choice::Ask(NEAR), "heard of again");
}

#[test]
fn a_connection_that_ends_is_one_failure_of_all_that_it_was_to_bring() {
    let mut holders = three(HoldersConfig::default());
    holders.left(FAR);
    holders.left(ORIGIN);
    let all: Vec<_> = (0..8).map(piece).collect();
    for piece in &all {
        assert_eq!(holders.choose_unwaited(*piece, ms(0)), Choice::Ask(NEAR));
    }
    holders.cut_off(NEAR, &all[2..], ms(1));
    assert_eq!(holders.under_way(), 2);
    assert_eq!(holders.choose(all[2], true, ms(1)), Choice::Later(ms(51)));
    assert_eq!(holders.choose(all[2], true, ms(51)), Choice::Ask(NEAR));
}

#[test]
fn an_answer_that_does_not_come_is_asked_for_elsewhere() {
    let mut holders = three(HoldersConfig::default());
    holders.left(ORIGIN);
    for at in 0..3 {
        assert!(matches!(holders.choose(piece(at), true, ms(at)), Choice::Ask(_)));
    }
    assert_eq!(holders.wake_at(), Some(ms(500)));
    assert_eq!(holders.expired(ms(499)), []);
    assert_eq!(holders.expired(ms(500)), [(NEAR, piece(0))]);
    assert_eq!(holders.choose(piece(0), true, ms(500)), Choice::Ask(FAR));
    holders.answered(NEAR, piece(0), ms(501)); // after all: that it lives is all it says
    assert_eq!(holders.choose(piece(0), true, ms(501)), Choice::UnderWay);
    assert_eq!(holders.choose(piece(5), true, ms(501)), Choice::Ask(NEAR));
    assert_eq!(holders.left(NEAR), [piece(2), piece(5)]);
    assert_eq!(holders.choose(piece(2), true, ms(501)), Choice::Ask(FAR));
}

#[test]
fn busy_and_lacking_hosts_are_not_at_fault() {
    let mut holders = three(HoldersConfig::default());
    holders.left(FAR);
    assert_eq!(holders.choose(piece(0), true, ms(0)), Choice::Ask(NEAR));
    holders.failed(NEAR, piece(0), Failure::Lacks, ms(0));
    assert_eq!(holders.choose(piece(0), true, ms(0)), Choice::Ask(ORIGIN));
    holders.failed(ORIGIN, piece(0), Failure::Lacks, ms(0));
    assert_eq!(holders.choose(piece(0), true, ms(0)), Choice::NoHolder);
    assert_eq!(holders.choose(piece(1), true, ms(0)), Choice::Ask(NEAR));
    holders.failed(NEAR, piece(1), Failure::Busy, ms(0));
    assert_eq!(holders.choose(piece(1), true, ms(0)), Choice::Ask(ORIGIN));
    holders.announced(ORIGIN, piece(0));
    assert_eq!(holders.choose(piece(0), true, ms(50)), Choice::Ask(ORIGIN), "it has it by now");
}

#[test]
fn as_much_is_under_way_as_allowed() {
    let config = HoldersConfig {
        in_flight_max: 3,
        ahead_in_flight_max: 2,
        origin_ahead_in_flight_max: 1,
        ..HoldersConfig::default()
    };
    let mut holders = three(config);
    holders.left(FAR);
    let ahead =
        (0..9).filter(|at| matches!(holders.choose(piece(*at), false, ms(0)), Choice::Ask(_)));
    assert_eq!(ahead.count(), 3, "two at NEAR, one at the origin");
    assert_eq!(holders.ahead_under_way(), 3);
    let demand =
        (10..20).filter(|at| matches!(holders.choose(piece(*at), true, ms(0)), Choice::Ask(_)));
    assert_eq!(demand.count(), 3, "demand has room left");
    assert_eq!(holders.choose(piece(30), true, ms(0)), Choice::Later(ms(500)));
}

#[derive(Debug, Clone)]
enum Step {
    Join { host: u64, origin: bool },
    Leave { host: u64 },
    Announce { host: u64, start: u64, len: u64 },
    Choose { start: u64, len: u64, demand: bool },
    Answer { which: prop::sample::Index, part: bool },
    Fail { which: prop::sample::Index, how: u8 },
    Pass { ms: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let host = 0..5u64;
    let step = prop_oneof![
        2 => (host.clone(), any::<bool>()).prop_map(|(host, origin)| Step::Join { host, origin }),
        1 => host.clone().prop_map(|host| Step::Leave { host }),
        4 => (host, 0..100u64, 1..80u64).prop_map(|(host, start, len)| Step::Announce { host, start, len }),
        8 => (0..100u64, 1..20u64, any::<bool>()).prop_map(|(start, len, demand)| Step::Choose { start, len, demand }),
        4 => (any::<prop::sample::Index>(), any::<bool>()).prop_map(|(which, part)| Step::Answer { which, part }),
        3 => (any::<prop::sample::Index>(), 0..3u8).prop_map(|(which, how)| Step::Fail { which, how }),
        3 => (1..700u64).prop_map(|ms| Step::Pass { ms }),
    ];
    prop::collection::vec(step, 1..150)
}

/// Pages of an image of 100 pages with pieces of 8; the last has four.
const PAGES: u64 = 100;

#[derive(Default)]
struct Model {
    /// What each host has, in pieces, and whether it is an origin.
    hosts: BTreeMap<u64, (bool, BTreeSet<u64>)>,
    under_way: Vec<(u64, PageRange)>,
    now: Duration,
}

impl Model {
    fn has(&self, host: u64, pages: PageRange) -> bool {
        let Some((origin, pieces)) = self.hosts.get(&host) else { return false };
        pages.pages().all(|page| pieces.contains(&(page.0 / 8)) != *origin)
    }

    /// Does a step, and checks what `holders` make of it.
    fn step(&mut self, holders: &mut Holders, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Join { host, origin } => {
                prop_assert!(holders.joined(HostId(host), origin, 0));
                self.hosts.entry(host).or_insert((origin, BTreeSet::new()));
            }
            Step::Leave { host } => {
                let lost = holders.left(HostId(host));
                let its = self.under_way.iter().filter(|(of, _)| *of == host);
                let mut its: Vec<_> = its.map(|(_, run)| *run).collect();
                its.sort_by_key(PageRange::start);
                prop_assert_eq!(lost, its);
                self.under_way.retain(|(of, _)| *of != host);
                self.hosts.remove(&host);
            }
            Step::Announce { host, start, len } => {
                let pages = range(start, len).intersect(&PageRange::first(PAGES));
                holders.announced(HostId(host), pages);
                self.announced(host, pages);
            }
            Step::Choose { start, len, demand } => {
                let pages = range(start, len).intersect(&PageRange::first(PAGES));
                self.choose(holders, pages, demand)?;
            }
            Step::Answer { .. } | Step::Fail { .. } if self.under_way.is_empty() => {}
            Step::Answer { which, part } => {
                let at = which.index(self.under_way.len());
                let (host, pages) = self.under_way[at];
                let piece = if part { pages.truncate(pages.len().div_ceil(2)) } else { pages };
                holders.answered(HostId(host), piece, self.now);
                self.under_way.remove(at);
                let rest = pages.from_page(piece.end());
                if !rest.is_empty() {
                    self.under_way.push((host, rest));
                }
            }
            Step::Fail { which, how } => {
                let (host, pages) = self.under_way.remove(which.index(self.under_way.len()));
                let why = [Failure::Busy, Failure::Lacks, Failure::Broken][usize::from(how)];
                holders.failed(HostId(host), pages, why, self.now);
                if why == Failure::Lacks {
                    self.lacks(host, pages);
                }
            }
            Step::Pass { ms: passed } => {
                self.now += ms(passed);
                for (host, pages) in holders.expired(self.now) {
                    let at = self.under_way.iter().position(|known| *known == (host.0, pages));
                    prop_assert!(at.is_some(), "{} at {} was not under way", pages, host);
                    self.under_way.remove(at.expect("just seen"));
                }
            }
        }
        Ok(())
    }

    /// Of an origin, what it lacks counts; of others, whole pieces that they have.
    fn announced(&mut self, host: u64, pages: PageRange) {
        let Some((origin, pieces)) = self.hosts.get_mut(&host) else { return };
        for piece in 0..13u64 {
            let whole = PageRange::first(PAGES).from_page(PageIdx(piece * 8)).truncate(8);
            if pages.covers(&whole) {
                match origin {
                    true => pieces.remove(&piece),
                    false => pieces.insert(piece),
                };
            }
        }
    }

    fn lacks(&mut self, host: u64, pages: PageRange) {
        let Some((origin, pieces)) = self.hosts.get_mut(&host) else { return };
        for page in pages.pages() {
            match origin {
                true => pieces.insert(page.0 / 8),
                false => pieces.remove(&(page.0 / 8)),
            };
        }
    }

    fn choose(
        &mut self,
        holders: &mut Holders,
        pages: PageRange,
        demand: bool,
    ) -> Result<(), TestCaseError> {
        let overlaps = self.under_way.iter().any(|(_, run)| !run.intersect(&pages).is_empty());
        match holders.choose(pages, demand, self.now) {
            Choice::Ask(host) => {
                prop_assert!(!overlaps && self.has(host.0, pages));
                self.under_way.push((host.0, pages));
            }
            Choice::UnderWay => prop_assert!(overlaps),
            Choice::Later(_) => {
                prop_assert!(self.hosts.keys().any(|host| self.has(*host, pages)));
            }
            Choice::NoHolder => prop_assert!(!overlaps),
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn who_is_asked_has_it_and_nothing_is_asked_for_twice(steps in steps()) {
        let config = HoldersConfig { piece_pages: 8, in_flight_max: 3, failures_max: 3, ..HoldersConfig::default() };
        let mut holders = Holders::new(PAGES, config);
        let mut model = Model::default();
        for step in steps {
            model.step(&mut holders, step)?;
            prop_assert_eq!(holders.under_way(), model.under_way.len());
            let under_way = |host: &u64| model.under_way.iter().filter(|(of, _)| of == host).count();
            prop_assert!(model.hosts.keys().all(|host| under_way(host) <= 3), "more than allowed");
            for piece in 0..13 {
                let pages = PageRange::first(PAGES).from_page(PageIdx(piece * 8)).truncate(8);
                let held = model.hosts.iter().any(|(host, (origin, _))| !origin && model.has(*host, pages));
                prop_assert!(held || holders.copies(pages) == 0, "piece {} is at no peer", piece);
            }
        }
        // After all hosts have given signs of life, it is known exactly which host has what.
        for host in model.hosts.keys() {
            holders.heard_of(HostId(*host));
        }
        for piece in 0..13 {
            let pages = PageRange::first(PAGES).from_page(PageIdx(piece * 8)).truncate(8);
            let held = model.hosts.iter().any(|(host, (origin, _))| !origin && model.has(*host, pages));
            prop_assert_eq!(holders.copies(pages) > 0, held);
        }
    }
}

#[test]
fn a_piece_spreads_in_a_tree_and_who_was_sent_away_in_vain_is_served() {
    let mut spread = Spread::new(100, SpreadConfig { fanout: 2, ..SpreadConfig::default() });
    let host = HostId;
    let asked: Vec<_> = (1..=7).map(|from| spread.ask(host(from), piece(1), false, true)).collect();
    let at = |parent| Serve::At(host(parent));
    assert_eq!(asked, [Serve::Here, at(1), at(1), at(2), at(2), at(3), at(3)]);
    assert_eq!(spread.ask(host(9), range(8, 16), false, true), Serve::Here, "two pieces");
    assert_eq!(spread.ask(host(5), piece(1), true, true), Serve::Here);
    assert_eq!(
        spread.ask(host(6), piece(1), false, true),
        Serve::Here,
        "has forgotten that it asked"
    );
    spread.left(host(4));
    assert!(spread.hosts().all(|known| known != host(4)));
    assert_eq!(spread.ask(host(8), piece(1), false, true), at(5));
    assert_eq!(
        spread.ask(host(8), piece(2), false, true),
        Serve::Here,
        "another piece, another tree"
    );
}

/// Requests end where pages are another image's, or there already: two hosts may ask for different
/// parts of a piece.
#[test]
fn no_host_is_sent_to_one_that_asked_for_other_pages_or_for_what_no_vm_waits_for() {
    let (mut spread, host) = (Spread::new(100, SpreadConfig::default()), HostId);
    assert_eq!(spread.ask(host(1), range(16, 4), false, true), Serve::Here);
    assert_eq!(spread.ask(host(2), range(24, 8), false, true), Serve::Here, "not what 1 has");
    assert_eq!(spread.ask(host(3), range(26, 2), false, true), Serve::At(host(2)));
    assert_eq!(spread.ask(host(1), range(24, 8), false, true), Serve::At(host(2)));
    assert_eq!(spread.ask(host(1), range(16, 4), false, true), Serve::Here, "asked before");

    assert_eq!(spread.ask(host(1), piece(3), false, false), Serve::Here);
    assert_eq!(spread.ask(host(2), piece(3), false, true), Serve::Here, "1 is in no hurry");
    assert_eq!(spread.ask(host(3), piece(3), false, false), Serve::At(host(1)));
    assert_eq!(spread.ask(host(4), piece(4), false, false), Serve::Here);
    spread.served(host(4), piece(4));
    assert_eq!(spread.ask(host(2), piece(4), false, true), Serve::At(host(4)), "and has it");
}

#[test]
fn a_full_list_makes_room_and_who_is_named_is_still_there() {
    let config = SpreadConfig { hosts_max: 4, fanout: 2, ..SpreadConfig::default() };
    let (mut spread, mut at_origin) = (Spread::new(16, config), 0);
    for from in 1..200 {
        match spread.ask(HostId(from), piece(0), false, true) {
            Serve::Here => at_origin += 1,
            Serve::At(host) => assert!(host.0 < from),
        }
        assert!(spread.hosts().count() <= 4);
    }
    assert_eq!(at_origin, 1);
}

#[test]
fn who_gave_another_page_than_the_origin_has_is_asked_no_more() {
    let mut holders = three(HoldersConfig::default());
    holders.announced(NEAR, piece(40));
    assert_eq!(holders.copies(piece(40)), 1);
    holders.failed(NEAR, piece(40), Failure::Forged, ms(0));
    holders.announced(NEAR, piece(41));
    holders.heard_of(NEAR);
    assert!(holders.joined(NEAR, false, 1));
    assert_eq!((holders.copies(piece(40)), holders.copies(piece(41))), (0, 0));
    assert_eq!(holders.choose(piece(40), true, ms(9000)), Choice::Ask(ORIGIN));
}

#[test]
fn who_is_sent_elsewhere_asks_there_and_insists_if_that_was_in_vain() {
    let mut holders = three(HoldersConfig::default());
    assert_eq!(holders.choose(piece(40), true, ms(0)), Choice::Ask(ORIGIN));
    assert_eq!(holders.redirected(ORIGIN, piece(40), HostId(77), ms(1)), Some((HostId(77), false)));
    assert_eq!(holders.choose(piece(40), true, ms(1)), Choice::UnderWay);
    assert_eq!(holders.redirected(ORIGIN, piece(40), FAR, ms(1)), None, "a copy");
    holders.failed(HostId(77), piece(40), Failure::Lacks, ms(2));
    assert_eq!(holders.choose(piece(40), true, ms(2)), Choice::Ask(ORIGIN));
    assert!(holders.insists(piece(40)) && !holders.insists(piece(41)));
    holders.answered(ORIGIN, piece(40), ms(3));
    assert!(!holders.insists(piece(40)));

    assert_eq!(holders.choose(piece(50), true, ms(3)), Choice::Ask(ORIGIN));
    assert_eq!(holders.redirected(ORIGIN, piece(50), NEAR, ms(3)), Some((NEAR, false)));
    assert_eq!(holders.expired(ms(5003)), [(NEAR, piece(50))]);
    assert_eq!(holders.choose(piece(50), true, ms(5003)), Choice::Ask(ORIGIN));
    assert!(holders.insists(piece(50)));
    assert_eq!(
        holders.redirected(ORIGIN, piece(50), NEAR, ms(5004)),
        Some((ORIGIN, true)),
        "NEAR has just failed"
    );
    holders.answered(ORIGIN, piece(50), ms(5005));
    assert_eq!(holders.under_way(), 0);
}
