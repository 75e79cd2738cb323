use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use proptest::prelude::*;
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};

use super::*;
use crate::transfer::HostId;

const A: HostId = HostId(1);
const B: HostId = HostId(2);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn demand(start: u64, len: u64) -> Request {
    Request { pages: range(start, len), demand: true, repeat: false }
}

fn ahead(start: u64, len: u64) -> Request {
    Request { demand: false, ..demand(start, len) }
}

fn repeat(start: u64, len: u64) -> Request {
    Request { repeat: true, ..demand(start, len) }
}

/// So fast that nothing is held back.
fn fast() -> SenderConfig {
    let rate = 1 << 50;
    SenderConfig {
        rate_start_bytes_per_s: rate,
        rate_max_bytes_per_s: rate,
        ..SenderConfig::default()
    }
}

fn all(sender: &mut Sender, now: Duration) -> Vec<PageRange> {
    std::iter::from_fn(|| sender.next(now)).take(10_000).collect()
}

#[test]
fn requests_in_lockstep_are_served_once() {
    let mut sender = Sender::new(1000, fast());
    sender.request(A, demand(0, 16), ms(1));
    sender.request(B, demand(0, 16), ms(1)); // queued
    assert_eq!(all(&mut sender, ms(2)), [range(0, 16)]);
    sender.request(B, demand(8, 16), ms(5)); // half of it just sent
    assert_eq!(all(&mut sender, ms(5)), [range(16, 8)]);
    sender.request(B, demand(0, 8), ms(11)); // still within 10 ms
    assert_eq!(all(&mut sender, ms(11)), []);
    sender.request(B, demand(0, 8), ms(12)); // not any more: it was lost there, or B has just joined
    assert_eq!(all(&mut sender, ms(12)), [range(0, 8)]);
    let counts = sender.counts();
    assert_eq!((counts.requests, counts.requested, counts.served, counts.resent), (5, 64, 32, 8));
    assert_eq!((counts.lockstep, counts.repeats, counts.refused), (32, 0, 0));
}

#[test]
fn demand_overtakes_background_reads_and_is_first_come_first_served() {
    let mut sender = Sender::new(1000, fast());
    sender.request(A, ahead(0, 64), ms(1));
    sender.request(A, demand(500, 1), ms(1));
    sender.request(B, demand(400, 1), ms(1));
    sender.request(B, demand(32, 8), ms(1)); // is queued, and moves up
    sender.request(B, ahead(400, 2), ms(1)); // of which one is queued
    let sent = all(&mut sender, ms(2));
    let expected = [
        range(500, 1),
        range(400, 1),
        range(32, 8),
        range(0, 16),
        range(16, 16),
        range(40, 16),
        range(56, 8),
        range(401, 1),
    ];
    assert_eq!(sent, expected);
    assert_eq!((sender.wake_at(), sender.queued_pages()), (None, 0));
    assert_eq!(sender.counts().lockstep, 1, "moving up is no copy");
}

#[test]
fn pages_that_there_are_not_and_more_than_fits_are_left_out() {
    let mut sender = Sender::new(100, SenderConfig { queue_runs_max: 2, ..fast() });
    sender.request(A, demand(90, 50), ms(1));
    for at in [0, 10, 20] {
        sender.request(A, demand(at, 1), ms(1));
        sender.request(A, ahead(at + 5, 1), ms(1));
    }
    assert_eq!(sender.counts().refused, 3);
    assert_eq!(all(&mut sender, ms(1)), [range(90, 10), range(0, 1), range(5, 1), range(15, 1)]);
}

/// Keeps the sender busy for this time.
fn busy(sender: &mut Sender, from: Duration, to: Duration) -> u64 {
    let mut now = from;
    let mut pages = 0;
    while now < to {
        if sender.queued_pages() < 1000 {
            let start = u64::try_from(now.as_micros()).expect("small") % 900_000;
            sender.request(A, ahead(start, 4000), now);
        }
        pages += all(sender, now).iter().map(PageRange::len).sum::<u64>();
        now += ms(1);
    }
    pages
}

#[test]
fn the_rate_rises_by_steps_while_there_is_more_to_send_and_no_further_than_the_maximum() {
    let config = SenderConfig::default();
    let mut sender = Sender::new(1 << 20, config);
    busy(&mut sender, ms(1000), ms(1100));
    let after = sender.rate_bytes_per_s();
    let steps = (after - config.rate_start_bytes_per_s) / config.raise_bytes_per_s;
    assert!((9..=11).contains(&steps), "{after}");
    sender.next(ms(5000));
    assert!(
        sender.rate_bytes_per_s() - after <= 9 * config.raise_bytes_per_s,
        "idle time is no reason"
    );
    busy(&mut sender, ms(5000), ms(8000));
    assert_eq!(sender.rate_bytes_per_s(), config.rate_max_bytes_per_s);
}

#[test]
fn loss_cuts_the_rate_to_three_quarters_of_the_mean_receive_rate() {
    let config = SenderConfig {
        loss_tolerated_permille: 0,
        raise_bytes_per_s: 0,
        ..SenderConfig::default()
    };
    let mut sender = Sender::new(1 << 20, config);
    busy(&mut sender, ms(1000), ms(1500));
    sender.feedback(A, 30_000_000, ms(1500));
    sender.feedback(B, 10_000_000, ms(1500));
    sender.request(A, repeat(500_000, 1), ms(1500));
    assert_eq!(sender.rate_bytes_per_s(), 30_000_000, "was never sent: the request got lost");
    sender.request(A, Request { pages: range(0, 1 << 20), ..repeat(0, 1) }, ms(1500));
    assert_eq!(sender.rate_bytes_per_s(), 30_000_000, "one of two");
    sender.request(B, Request { pages: range(0, 1 << 20), ..repeat(0, 1) }, ms(1500));
    let cut = sender.rate_bytes_per_s();
    assert!((14_900_000..=15_600_000).contains(&cut), "3/4 of 20 MB/s, not {cut}");
    sender.request(B, Request { pages: range(0, 1 << 20), ..repeat(0, 1) }, ms(1520));
    assert_eq!((sender.rate_bytes_per_s(), sender.counts().cuts), (cut, 1), "one loss, one cut");
}

#[test]
fn what_is_asked_for_again_and_still_to_be_sent_is_no_loss() {
    let config = SenderConfig {
        loss_tolerated_permille: 0,
        raise_bytes_per_s: 0,
        ..SenderConfig::default()
    };
    let mut sender = Sender::new(1 << 20, config);
    busy(&mut sender, ms(1000), ms(1500));
    let rate = sender.rate_bytes_per_s();
    // Another host comes for what the first has got, and waits longer than it should for a queue
    // that is long.
    sender.request(B, ahead(100_000, 512), ms(1600));
    sender.request(B, Request { demand: false, ..repeat(100_000, 512) }, ms(1700));
    sender.request(B, repeat(100_000, 256), ms(1800));
    let counts = sender.counts();
    assert_eq!((sender.rate_bytes_per_s(), counts.cuts), (rate, 0), "it is queued");
    assert_eq!((counts.repeats, counts.lost), (768, 0));
    let run = sender.next(ms(5000)).expect("queued");
    sender.request(B, Request { pages: run, ..repeat(0, 1) }, ms(5005));
    assert_eq!(sender.counts().cuts, 0, "it may be on its way, or not read yet");
    let counts = sender.counts();
    sender.request(B, Request { pages: run, ..repeat(0, 1) }, ms(5040));
    let since = sender.counts().since(counts);
    assert_eq!((since.cuts, since.requests), (1, 1), "that was lost");
    assert_eq!((since.repeats, since.lost), (run.len(), run.len()));
}

#[test]
fn what_is_asked_for_again_a_moment_after_it_was_sent_does_not_count_as_lost() {
    let mut sender = Sender::new(100, fast());
    sender.request(A, demand(0, 8), ms(1));
    assert_eq!(all(&mut sender, ms(1)), [range(0, 8)]);
    sender.request(A, repeat(0, 8), ms(5));
    assert_eq!((sender.counts().repeats, sender.counts().lost), (8, 0), "it may be on its way");
    for repeats in [16, 24] {
        sender.request(A, repeat(0, 8), ms(11));
        let counts = sender.counts();
        assert_eq!((counts.repeats, counts.lost, counts.lockstep), (repeats, 8, repeats - 8));
    }
    assert_eq!(all(&mut sender, ms(11)), [range(0, 8)]);
}

#[test]
fn a_little_loss_and_a_loss_of_few_do_not_slow_all_down() {
    let config = SenderConfig { raise_bytes_per_s: 0, ..SenderConfig::default() };
    let mut sender = Sender::new(1 << 20, config);
    let sent = busy(&mut sender, ms(1000), ms(1100));
    for host in 0..10 {
        sender.feedback(HostId(host), 25_000_000, ms(1100));
    }
    let mut lost = |host, pages| {
        // The pages that `busy` asks for first are surely sent.
        for start in (100_000..).take(usize::try_from(pages).expect("small")) {
            sender.request(HostId(host), repeat(start, 1), ms(1100));
        }
        sender.counts().cuts
    };
    for host in 0..10 {
        assert_eq!(lost(host, sent / 100), 0, "one in a hundred is no congestion");
    }
    for host in 0..5 {
        assert_eq!(lost(host, sent / 10), 0, "{host} and those before it are not most");
    }
    assert_eq!(lost(5, sent / 10), 1);
}

#[test]
fn a_receiver_asks_again_later_and_later_and_gives_up() {
    let config = ReceiverConfig { attempts_max: 4, ..ReceiverConfig::default() };
    let mut receiver = Receiver::new(config);
    receiver.want(range(0, 16), true, ms(0)).expect("room");
    let (mut asked, mut now) = (Vec::new(), ms(0));
    let given_up = loop {
        while let Some(request) = receiver.next_request(now) {
            assert_eq!(
                request,
                Request { pages: range(0, 16), demand: true, repeat: !asked.is_empty() }
            );
            asked.push(now);
        }
        if let Some(given_up) = receiver.gave_up() {
            break given_up;
        }
        now = receiver.wake_at().expect("it waits");
    };
    assert_eq!(asked, [ms(0), ms(50), ms(150), ms(350)]);
    assert_eq!(
        (given_up, now),
        (GaveUp { pages: range(0, 16), demand: true, attempts: 4 }, ms(750))
    );
    assert_eq!((receiver.wants(), receiver.wake_at()), (0, None));
    assert_eq!(receiver.heard(range(0, 2), ms(900)), [range(0, 2)], "heard all the same");
}

#[test]
fn timeouts_follow_what_answers_take() {
    let mut receiver = Receiver::new(ReceiverConfig::default());
    for at in 0..40 {
        let now = ms(at * 1000);
        receiver.want(range(at, 1), false, now).expect("room");
        assert!(receiver.next_request(now).is_some());
        receiver.heard(range(at, 1), now + ms(200));
    }
    receiver.want(range(100, 1), false, ms(50_000)).expect("room");
    receiver.want(range(200, 1), true, ms(50_000)).expect("room");
    assert_eq!(std::iter::from_fn(|| receiver.next_request(ms(50_000))).take(9).count(), 2);
    let mut due = BTreeMap::new();
    for at in 0..400 {
        while let Some(request) = receiver.next_request(ms(50_000 + at)) {
            due.entry(request.demand).or_insert(at);
        }
    }
    assert!((200..=230).contains(&due[&false]), "{due:?}");
    assert_eq!(due[&true], 50, "demand is answered before, so it has times of its own");
}

#[test]
fn a_batch_is_handed_on_when_it_is_full_old_or_waited_for() {
    let mut receiver =
        Receiver::new(ReceiverConfig { batch_pages: 32, ..ReceiverConfig::default() });
    assert_eq!(receiver.heard(range(0, 16), ms(0)), [range(0, 16)]);
    assert_eq!(
        (receiver.batch(ms(4)), receiver.wake_at()),
        (None, Some(ms(0))),
        "feedback is due, no batch"
    );
    assert!(receiver.feedback(ms(4)).is_some());
    assert_eq!(receiver.wake_at(), Some(ms(5)));
    assert_eq!(receiver.batch(ms(5)), Some(vec![range(0, 16)]), "old");
    assert_eq!(receiver.heard(range(8, 40), ms(6)), [range(16, 32)], "the first half is not new");
    assert_eq!(receiver.batch(ms(6)), Some(vec![range(16, 32)]), "full");
    receiver.want(range(100, 1), true, ms(7)).expect("room");
    assert!(receiver.next_request(ms(7)).is_some());
    receiver.heard(range(60, 2), ms(7));
    assert_eq!(receiver.batch(ms(7)), None);
    receiver.heard(range(100, 1), ms(8));
    assert_eq!(receiver.batch(ms(8)), Some(vec![range(60, 2), range(100, 1)]), "waited for");
    receiver.heard(range(200, 4), ms(9));
    receiver.want(range(202, 1), true, ms(9)).expect("room");
    assert_eq!(receiver.batch(ms(9)), Some(vec![range(200, 4)]), "waited for only now");
    assert_eq!(receiver.next_request(ms(9)), None, "it is here");
    assert_eq!((receiver.counts().pages, receiver.counts().duplicates), (63, 8));
}

#[test]
fn what_is_wanted_in_the_background_and_then_demanded_is_asked_for_again() {
    let mut receiver = Receiver::new(ReceiverConfig { wants_max: 3, ..ReceiverConfig::default() });
    receiver.want(range(0, 64), false, ms(0)).expect("room");
    assert_eq!(receiver.next_request(ms(0)), Some(ahead(0, 64)));
    receiver.want(range(16, 16), true, ms(1)).expect("room");
    assert_eq!(receiver.next_request(ms(1)), Some(demand(16, 16)));
    receiver.want(range(16, 16), true, ms(2)).expect("room");
    assert_eq!(receiver.next_request(ms(2)), None);
    let refused = receiver.want(range(500, 8), true, ms(2)).expect_err("three runs by now");
    assert_eq!(refused.to_string(), "500+8 are not asked for: 3 runs of pages are wanted already");
    receiver.filled(range(0, 64));
    assert_eq!(receiver.wants(), 0);
}

/// Messages in flight.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Message {
    Request { from: u64, start: u64, len: u64, demand: bool, repeat: bool },
    Pages { to: usize, start: u64, len: u64 },
    Feedback { from: u64, rate: u64 },
}

/// Pages that were heard, and those that were given up.
type Result = (BTreeSet<u64>, BTreeSet<u64>);

#[derive(Debug, Clone)]
struct Net {
    seed: u64,
    loss_permille: u64,
    duplicates_permille: u64,
    delay_us: u64,
    jitter_us: u64,
}

impl Net {
    fn random(&mut self, below: u64) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) % below.max(1)
    }

    /// When copies of a message arrive.
    fn arrivals(&mut self, now: Duration) -> Vec<Duration> {
        let copies = 1 + u64::from(self.random(1000) < self.duplicates_permille);
        let mut arrivals = Vec::new();
        for _ in 0..copies {
            if self.random(1000) >= self.loss_permille {
                arrivals
                    .push(now + Duration::from_micros(self.delay_us + self.random(self.jitter_us)));
            }
        }
        arrivals
    }

    /// Pages on their way to each host, and when they arrive.
    fn copies(
        &mut self,
        run: PageRange,
        hosts: usize,
        now: Duration,
    ) -> impl Iterator<Item = (Duration, Message)> + '_ {
        let (start, len) = (run.start().0, run.len());
        (0..hosts).flat_map(move |to| {
            let arrivals = self.arrivals(now).into_iter();
            arrivals.map(move |at| (at, Message::Pages { to, start, len }))
        })
    }
}

/// Runs a sender and receivers that want the same pages at about the same time. Returns what was
/// sent, and what each receiver has in the end and has given up.
fn run(mut net: Net, wants: &[(u64, u64, bool)], hosts: usize) -> (Sent, Vec<Result>) {
    let mut sender = Sender::new(4096, SenderConfig::default());
    let config = ReceiverConfig::default();
    let mut receivers: Vec<_> = (0..hosts).map(|_| Receiver::new(config)).collect();
    let mut results = vec![(BTreeSet::new(), BTreeSet::new()); hosts];
    let mut inserted = vec![BTreeSet::new(); hosts];
    let mut queue = BinaryHeap::new();
    let mut now = ms(1000);
    for receiver in &mut receivers {
        for (start, len, demand) in wants {
            receiver.want(range(*start, *len), *demand, now).expect("room");
        }
    }
    let mut sent_ever = BTreeSet::new();
    for _ in 0..1_000_000 {
        while let Some(run) = sender.next(now) {
            sent_ever.extend(run.pages().map(|page| page.0));
            queue.extend(net.copies(run, hosts, now).map(Reverse));
        }
        for (at, receiver) in receivers.iter_mut().enumerate() {
            let from = at as u64;
            while let Some(Request { pages, demand, repeat }) = receiver.next_request(now) {
                let (start, len) = (pages.start().0, pages.len());
                for at in net.arrivals(now) {
                    let message = Message::Request { from, start, len, demand, repeat };
                    queue.push(Reverse((at, message)));
                }
            }
            while let Some(gave_up) = receiver.gave_up() {
                results[at].1.extend(gave_up.pages.pages().map(|page| page.0));
            }
            if let Some(rate) = receiver.feedback(now) {
                queue.extend(
                    net.arrivals(now)
                        .into_iter()
                        .map(|at| Reverse((at, Message::Feedback { from, rate }))),
                );
            }
            for page in receiver.batch(now).into_iter().flatten().flat_map(|run| run.pages()) {
                assert!(inserted[at].insert(page.0), "{page} is handed on twice");
            }
        }
        let timers = receivers.iter().filter_map(Receiver::wake_at).chain(sender.wake_at());
        let message = queue.peek().map(|Reverse((at, _))| *at);
        let Some(next) = timers.chain(message).min() else { break };
        now = now.max(next);
        while let Some(Reverse((at, _))) = queue.peek()
            && *at <= now
        {
            let Some(Reverse((_, message))) = queue.pop() else { break };
            match message {
                Message::Request { from, start, len, demand, repeat } => {
                    sender.request(
                        HostId(from),
                        Request { pages: range(start, len), demand, repeat },
                        now,
                    );
                }
                Message::Feedback { from, rate } => sender.feedback(HostId(from), rate, now),
                Message::Pages { to, start, len } => {
                    for page in range(start, len).pages() {
                        assert!(sent_ever.contains(&page.0));
                    }
                    let new = receivers[to].heard(range(start, len), now);
                    for page in new.iter().flat_map(PageRange::pages) {
                        assert!(results[to].0.insert(page.0), "{page} is new twice");
                    }
                }
            }
        }
    }
    for (result, inserted) in results.iter().zip(&inserted) {
        assert_eq!(&result.0, inserted, "heard and not handed on");
    }
    assert!(receivers.iter().all(|receiver| receiver.wants() == 0), "somebody waits for ever");
    (sender.counts(), results)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_want_ends_with_the_page_or_a_give_up(
        seed: u64,
        loss_permille in prop_oneof![Just(0u64), 1..300u64, Just(1000u64)],
        duplicates_permille in prop_oneof![Just(0u64), 1..200u64],
        jitter_us in prop_oneof![Just(1u64), 1..4000u64],
        wants in prop::collection::vec((0..4000u64, 1..64u64, any::<bool>()), 1..12),
        hosts in 1..6usize,
    ) {
        let net = Net { seed, loss_permille, duplicates_permille, delay_us: 100, jitter_us };
        let (sent, results) = run(net, &wants, hosts);
        let wanted: BTreeSet<_> = wants.iter().flat_map(|(start, len, _)| *start..start + len).collect();
        for (heard, given_up) in &results {
            prop_assert!(wanted.iter().all(|page| heard.contains(page) || given_up.contains(page)));
            if loss_permille < 100 {
                prop_assert!(given_up.is_empty(), "eight attempts are enough at {} permille", loss_permille);
            }
            if loss_permille == 1000 {
                prop_assert!(heard.is_empty());
            }
        }
        prop_assert!(sent.served + sent.lockstep + sent.refused <= sent.requested);
        if loss_permille == 0 {
            prop_assert_eq!(sent.resent, 0, "a page leaves once, for all");
            prop_assert_eq!(sent.served, wanted.len() as u64);
        }
    }

    #[test]
    fn no_stretch_of_time_sees_more_than_the_rate(
        rate in 1_000_000..1_000_000_000u64,
        burst_pages in 0..100u64,
        run_pages_max in 1..64u64,
        steps in prop::collection::vec((0..20_000u64, 0..4000u64, 1..500u64), 1..60),
    ) {
        let config = SenderConfig {
            rate_start_bytes_per_s: rate, rate_max_bytes_per_s: rate, burst_pages, run_pages_max,
            ..SenderConfig::default()
        };
        let mut sender = Sender::new(4096, config);
        let mut now = ms(1000);
        let mut sent: Vec<(Duration, u64)> = Vec::new();
        for (us, start, len) in steps {
            sender.request(A, demand(start, len), now);
            while let Some(run) = sender.next(now) {
                prop_assert!(run.len() <= run_pages_max);
                sent.push((now, run.byte_len()));
            }
            if let Some(at) = sender.wake_at() {
                prop_assert!(at > now, "it may send now");
            }
            now += Duration::from_micros(us);
        }
        for (from, (start, _)) in sent.iter().enumerate() {
            let mut sum = 0;
            for (end, bytes) in &sent[from..] {
                sum += u128::from(*bytes);
                let came = (*end - *start).as_nanos() * u128::from(rate) / 1_000_000_000;
                let burst = u128::from((burst_pages + run_pages_max) * PAGE_BYTES);
                prop_assert!(sum <= came + burst + sent.len() as u128, "{} in {:?}", sum, *end - *start);
            }
        }
    }
}
