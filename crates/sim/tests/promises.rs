//! Promises 4 and 5 under everything that can go wrong, by seed; and what each way of travelling is
//! for.

use std::rc::Rc;
use std::time::Duration;

use vmfork_image::PageRange;
use vmfork_sim::{
    Death, Link, Mode, Outcome, Partition, RECORDED, Report, Scenario, Slow, Trace, simulate,
};

/// A number below `bound` that follows from a seed: what varies from scenario to scenario.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn host(&mut self, hosts: usize) -> usize {
        usize::try_from(self.below(hosts as u64 + 1)).expect("few")
    }
}

/// Small, and as bad as networks get.
fn random(seed: u64) -> Scenario {
    let mut dice = Dice(seed);
    dice.below(2);
    let mode = Mode::ALL[usize::try_from(seed % 3).expect("three")];
    let pages = 32 + dice.below(480);
    let hosts = usize::try_from(1 + dice.below(6)).expect("few");
    let compute = Duration::from_millis(dice.below(2000));
    let database = dice.one_in(2);
    let trace = |clone| match database {
        true => Trace::database(pages, compute),
        false => Trace::clone_like(pages, pages / 3, compute, seed, clone),
    };
    let mut scenario = Scenario::new(mode, pages, hosts, &Rc::new(Trace::default()));
    scenario.seed = seed;
    scenario.traces = (1..=hosts as u64).map(|clone| Rc::new(trace(clone))).collect();
    match dice.below(3) {
        0 => {}
        1 => scenario.ahead = trace(0).working_set(pages),
        _ => scenario.ahead = vec![PageRange::first(pages)],
    }
    scenario.link.bytes_per_s = 1_000_000 << dice.below(8);
    if dice.one_in(2) {
        let per_million = [1_000, 20_000, 200_000];
        scenario.link = Link {
            latency: Duration::from_micros(20 + dice.below(2000)),
            jitter: Duration::from_micros(dice.below(4000)),
            loss_per_million: per_million[usize::try_from(dice.below(3)).expect("three")],
            duplicates_per_million: if dice.one_in(2) { 50_000 } else { 0 },
            ..scenario.link
        };
    }
    if dice.one_in(4) {
        scenario.slow.push(Slow { host: dice.host(hosts), times: 2 + dice.below(8) });
    }
    while dice.one_in(4) {
        let at = Duration::from_millis(dice.below(1500));
        scenario.deaths.push(Death { host: dice.host(hosts), at, silent: dice.one_in(2) });
    }
    if dice.one_in(4) {
        let from = Duration::from_millis(dice.below(500));
        let until = from + Duration::from_millis(dice.below(60_000));
        scenario.partition = Some(Partition { first: 1 + dice.host(hosts - 1), from, until });
    }
    scenario
}

fn run(scenario: &Scenario) -> Report {
    let report = simulate(scenario).expect("valid");
    let Scenario { seed, mode, link, slow, deaths, partition, .. } = scenario;
    assert_eq!(
        report.violations, [""; 0],
        "seed {seed}: {mode}, {link:?}, {slow:?}, {deaths:?}, {partition:?}"
    );
    report
}

#[test]
fn promises_hold_in_thousands_of_small_clusters_in_which_everything_goes_wrong() {
    let (mut done, mut stopped, mut duplicates, mut given_up) = (0, 0, 0, 0);
    for seed in 0..3000 {
        let scenario = random(seed);
        let report = run(&scenario);
        for outcome in &report.outcomes {
            match outcome {
                Outcome::Done { .. } => done += 1,
                Outcome::Stopped { .. } => stopped += 1,
                Outcome::Died | Outcome::Waits { .. } => {}
            }
        }
        let can_lose =
            !scenario.deaths.is_empty() || scenario.partition.is_some() || scenario.is_narrow();
        let lost = report.outcomes.iter().any(|outcome| matches!(outcome, Outcome::Stopped { .. }));
        assert!(can_lose || !lost, "seed {seed}: a clone was stopped, and everybody lives");
        duplicates += report.duplicate_pages;
        given_up += report.given_up_pages;
    }
    // The seeds must reach what they are for.
    assert!(
        done > 3000 && stopped > 60 && duplicates > 100 && given_up > 100,
        "{done} {stopped} {duplicates} {given_up}"
    );
}

#[test]
fn the_same_seed_gives_the_same_report() {
    for seed in 0..30 {
        assert_eq!(run(&random(seed)), run(&random(seed)));
    }
}

/// All clones read all of an image of 8 MiB.
fn database(mode: Mode, hosts: usize) -> Scenario {
    let trace = Rc::new(Trace::database(2048, Duration::from_millis(20)));
    let mut scenario = Scenario::new(mode, 2048, hosts, &trace);
    scenario.ahead = trace.working_set(2048);
    scenario
}

#[test]
fn multicast_sends_each_page_once_for_all_and_ignores_lockstep() {
    let report = run(&database(Mode::Multicast, 12));
    assert!(report.all_done());
    let sent = report.multicast.expect("multicast");
    assert_eq!((sent.served, sent.resent, report.duplicate_pages), (2048, 0, 0));
    assert!(sent.requested > 6 * sent.served, "{sent:?}: not in lockstep");
}

#[test]
fn a_swarm_takes_the_load_off_the_parents_host_and_unicast_does_not() {
    let [unicast, swarm] = [Mode::Unicast, Mode::Swarm].map(|mode| run(&database(mode, 8)));
    assert!(unicast.all_done() && swarm.all_done());
    let over_one = |report: &Report| report.sent_bytes[0] * 100 / report.mean_received_bytes();
    assert!(over_one(&unicast) >= 790, "{}", over_one(&unicast));
    // All bring the same list, and their VMs wait for what is on it. A host whose VM waits is not
    // sent to one whose VM does not.
    assert!(over_one(&swarm) <= 175, "{}", over_one(&swarm));
    assert!(swarm.completion() < unicast.completion());
    assert_eq!((unicast.duplicate_pages, swarm.duplicate_pages), (0, 0));
}

#[test]
fn a_clone_is_stopped_when_the_only_host_with_its_pages_has_died_and_not_before() {
    for (mode, silent) in Mode::ALL.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mut scenario = database(mode, 1);
        scenario.ahead.clear();
        scenario.deaths.push(Death { host: 0, at: Duration::from_millis(30), silent });
        let report = run(&scenario);
        let [Outcome::Stopped { at, .. }] = report.outcomes[..] else {
            panic!("{mode} {:?}", report.outcomes)
        };
        assert!(at < Duration::from_secs(60), "{mode}: {at:?}");
    }
}

#[test]
fn what_others_hold_survives_the_parents_host() {
    for mode in [Mode::Multicast, Mode::Swarm] {
        let mut scenario = database(mode, 4);
        // The first has all by then, the others have hardly begun.
        for late in 2..=4 {
            scenario.traces[late - 1] = Rc::new(Trace::database(2048, Duration::from_secs(100)));
        }
        scenario.ahead.clear();
        scenario.deaths.push(Death { host: 0, at: Duration::from_secs(5), silent: true });
        let report = run(&scenario);
        assert!(report.all_done(), "{mode}: {:?}", report.outcomes);
    }
}

#[test]
fn a_partition_that_heals_in_time_stops_no_clone() {
    for mode in Mode::ALL {
        let mut scenario = database(mode, 4);
        scenario.ahead.clear();
        scenario.partition = Some(Partition {
            first: 3,
            from: Duration::from_millis(10),
            until: Duration::from_millis(900),
        });
        let report = run(&scenario);
        assert!(report.all_done(), "{mode}: {:?}", report.outcomes);
    }
}

#[test]
fn no_host_waits_for_a_slow_host_to_get_everything() {
    for mode in [Mode::Multicast, Mode::Swarm] {
        let normal = run(&database(mode, 8));
        let mut scenario = database(mode, 8);
        scenario.slow.push(Slow { host: 3, times: 20 });
        let report = run(&scenario);
        assert!(report.all_done(), "{mode}: {:?}", report.outcomes);
        let mut ends: Vec<_> = report
            .outcomes
            .iter()
            .map(|outcome| match outcome {
                Outcome::Done { at } => *at,
                other => panic!("{other:?}"),
            })
            .collect();
        ends.sort();
        // In a swarm, what it was to bring in first comes late; a multicast continues as if it was
        // not present.
        let by = if mode == Mode::Swarm { ends[7] / 2 } else { normal.completion() * 2 };
        assert!(ends[6] < by, "{mode}: {ends:?} and {:?}", normal.completion());
    }
}

/// Eight hosts with links of 1 Gbit/s that all need the same, and what the parent's host sends over
/// what one needs, in percent.
fn eight_hosts(mode: Mode, seed: u64, mib: u64, hydrates: bool) -> u64 {
    let pages = mib << 8;
    let touched = if hydrates { 0 } else { pages };
    let trace = Rc::new(Trace::database(touched, Duration::from_millis(200)));
    let mut scenario = Scenario::new(mode, pages, 8, &trace);
    (scenario.seed, scenario.hydrates) = (seed, hydrates);
    scenario.start_within = Duration::from_millis(if seed.is_multiple_of(2) { 0 } else { 400 });
    scenario.link.one_line = seed % 3 == 2;
    let report = run(&scenario);
    assert!(report.all_done(), "{mode} {seed}: {:?}", report.outcomes);
    report.sent_bytes[0] * 100 / report.mean_received_bytes()
}

#[test]
fn what_eight_hosts_need_leaves_the_parents_host_about_once() {
    for hydrates in [false, true] {
        for (mode, reach) in [(Mode::Swarm, 150), (Mode::Multicast, 120)] {
            for seed in 0..20 {
                let sent = eight_hosts(mode, seed, if seed == 0 { 256 } else { 16 }, hydrates);
                assert!(sent <= reach, "{mode}, seed {seed}, hydrates: {hydrates}: {sent} %");
            }
        }
        assert!(eight_hosts(Mode::Unicast, 0, 16, hydrates) >= 790);
    }
}

/// All clones do what a recorded one did, and have its working set brought ahead. → what they
/// compute, and what came of it.
fn with_a_working_set(mode: Mode, hosts: usize, name: &str) -> (Duration, Report) {
    const PAGES: u64 = 1 << 18;
    let recorded = RECORDED.iter().find(|recorded| recorded.name == name).expect("recorded");
    let trace = Rc::new(recorded.trace(PAGES).expect("a trace"));
    let mut scenario = Scenario::new(mode, PAGES, hosts, &trace);
    scenario.ahead = trace.working_set(PAGES);
    let report = run(&scenario);
    assert!(report.all_done() && report.duplicate_pages == 0, "{name}: {:?}", report.outcomes);
    (trace.compute(), report)
}

#[test]
fn a_list_that_all_bring_ahead_leaves_the_parents_host_about_once_and_clones_hardly_wait() {
    for (name, hosts) in [("python", 32), ("scan", 16)] {
        let (compute, report) = with_a_working_set(Mode::Swarm, hosts, name);
        let sent = report.sent_bytes[0] * 100 / report.mean_received_bytes();
        assert!(sent <= 130, "{name}: {sent} %");
        // In the order of the list all hosts request the same at once. That is 157 and 991 times,
        // and 8.7 s of which 5.5 are computing.
        let waits = report.waits / hosts as u64;
        assert!(waits <= 60, "{name}: a clone waits {waits} times");
        let took = report.completion();
        assert!(took <= compute * 6 / 5, "{name}: {took:?}, of which {compute:?} are computing");
    }
}

#[test]
fn a_host_alone_brings_a_list_as_it_stands() {
    let [unicast, swarm] = [Mode::Unicast, Mode::Swarm].map(|mode| {
        let (_, report) = with_a_working_set(mode, 1, "python");
        (report.completion(), report.waits)
    });
    assert_eq!(unicast, swarm);
}

#[test]
fn promises_hold_for_what_real_clones_touched() {
    const PAGES: u64 = 1 << 18;
    for recorded in RECORDED {
        let trace = Rc::new(recorded.trace(PAGES).expect("a trace"));
        let touched = trace.playback(1, PAGES, |pages| pages).bytes();
        assert!(touched > 500 && trace.compute() > Duration::from_millis(100), "{}", recorded.name);
        for mode in Mode::ALL {
            for seed in 0..4 {
                let mut scenario = Scenario::new(mode, PAGES, 5, &trace);
                scenario.seed = seed;
                scenario.start_within = Duration::from_millis(200 * (seed % 2));
                if seed > 1 {
                    scenario.ahead = trace.working_set(PAGES);
                    scenario.link.loss_per_million = 2000;
                }
                if seed == 3 {
                    let at = Duration::from_millis(50);
                    scenario.deaths.push(Death { host: 2, at, silent: true });
                }
                let report = run(&scenario);
                let ended = |outcome: &&Outcome| matches!(outcome, Outcome::Done { .. });
                let done = report.outcomes.iter().filter(ended).count();
                assert_eq!(
                    done,
                    5 - usize::from(seed == 3),
                    "{mode}, {}, seed {seed}",
                    recorded.name
                );
                assert!(
                    report.arrived_pages >= touched * 4,
                    "{mode}, {}, seed {seed}",
                    recorded.name
                );
            }
        }
    }
}
