//! One read of pages from other hosts: what it asks for in turn, and that its promises hold
//! whatever hosts do.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use vmfork_image::{ImageName, PageIdx, PageRange};
use vmfork_policy::transfer::bounds::{
    ANSWER, DEMAND_WAIT, HEAR_AHEAD, HEAR_DEMAND, PATIENCE, PAUSE_MAX,
};
use vmfork_policy::transfer::read::{
    Action, Done, Event, Giver, Hosts, Read, ReplyError, Request, Verdict,
};
use vmfork_policy::transfer::swarm::{Route, Swarm, SwarmConfig, UNIT_PAGES};
use vmfork_policy::transfer::{HostId, Urgency};

const IMAGE: ImageName = ImageName { host: 100, image: 7 };
const PAGES: u64 = 64 * UNIT_PAGES;
const OWN: HostId = HostId(1);
const ORIGIN: HostId = HostId(100);
/// Named, and no member.
const STRANGER: HostId = HostId(u64::MAX);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn unit(at: u64) -> PageRange {
    PageRange::new(PageIdx(at * UNIT_PAGES), UNIT_PAGES).expect("small")
}

#[derive(Debug, Default)]
struct Known {
    swarm: Option<Swarm>,
    named: Vec<HostId>,
    version: u64,
    origin: Option<HostId>,
    avoided: BTreeSet<HostId>,
}

impl Known {
    /// The origin, named too, and peers, of which each holds the whole image.
    fn swarm(peers: impl IntoIterator<Item = u64>) -> Self {
        let mut swarm = Swarm::new(PAGES, OWN, SwarmConfig::default());
        let peers: Vec<_> = peers.into_iter().map(HostId).collect();
        let members = peers.iter().map(|peer| (*peer, false));
        swarm.set_members(members.chain([(ORIGIN, true)]));
        for peer in peers {
            swarm.heard(peer, true, ms(0));
            swarm.told(peer, &[PageRange::first(PAGES)], ms(0));
        }
        Self { swarm: Some(swarm), named: vec![ORIGIN], ..Self::default() }
    }
}

impl Hosts for Known {
    fn swarm(&mut self) -> Option<&mut Swarm> {
        self.swarm.as_mut()
    }

    fn named(&mut self) -> Vec<HostId> {
        self.named.clone()
    }

    fn named_version(&self) -> u64 {
        self.version
    }

    fn origin(&self) -> Option<HostId> {
        self.origin
    }

    fn is_avoided(&self, host: HostId) -> bool {
        self.avoided.contains(&host)
    }
}

fn request(pages: PageRange, urgency: Urgency, now: Duration) -> Request {
    Request { image: IMAGE, pages, urgency, give_up: now + PATIENCE, hear_until: None }
}

/// The host that is asked.
fn asked(action: &Action) -> (HostId, Route) {
    match action {
        Action::Ask { host, route, .. } => (*host, *route),
        action => panic!("{action:?} asks no host"),
    }
}

#[test]
fn what_a_peer_gives_is_compared_before_it_is_handed_on() {
    let mut known = Known::swarm([2]);
    let (mut read, action) =
        Read::begin(request(unit(3), Urgency::Ahead, ms(0)), &mut known, ms(0));
    let (peer, route) = asked(&action);
    assert_eq!((peer, route), (HostId(2), Route::Direct));
    let reply = Event::Reply { from: peer };
    let action = read.on(reply, &mut known, ms(1)).expect("it was asked");
    let compare = Action::Compare { giver: peer, origin: Some(ORIGIN), within: ANSWER };
    assert_eq!(action, compare);
    let action = read.on(Event::Compared(Verdict::Undecided), &mut known, ms(2));
    let action = action.expect("it was to be compared");
    assert_eq!(asked(&action), (ORIGIN, Route::Insist), "it cannot be compared");
    assert_eq!(read.on(reply, &mut known, ms(3)), None, "the peer was asked before");
    let done = read.on(Event::Reply { from: ORIGIN }, &mut known, ms(3));
    assert_eq!(done, Some(Action::Done(Done { giver: Giver::Origin, resourced: false })));
    assert_eq!(read.on(Event::Tick, &mut known, ms(900_000)), None, "it is over");
}

#[test]
fn who_is_named_by_the_origin_is_asked_and_then_the_origin_has_to_give_it() {
    let mut known = Known::swarm([]);
    let swarm = known.swarm.as_mut().expect("a swarm");
    swarm.set_members([(ORIGIN, true), (HostId(2), false)]);
    let (mut read, action) =
        Read::begin(request(unit(0), Urgency::Demand, ms(0)), &mut known, ms(0));
    assert_eq!(asked(&action), (ORIGIN, Route::Direct));
    let elsewhere = Event::Elsewhere { from: ORIGIN, at: HostId(2) };
    let action = read.on(elsewhere, &mut known, ms(1)).expect("asked");
    assert_eq!(asked(&action), (HostId(2), Route::Redirected));
    assert_eq!(read.until(), ms(1) + DEMAND_WAIT, "a VM waits");
    let lacks = Event::Failed { from: HostId(2), why: ReplyError::Lacks };
    let action = read.on(lacks, &mut known, ms(2)).expect("asked");
    assert_eq!(asked(&action), (ORIGIN, Route::Insist));
    let action = read.on(elsewhere, &mut known, ms(3)).expect("asked");
    assert_eq!(action, Action::Refresh { until: ms(3) + ms(1000) }, "it had to give it");
}

#[test]
fn who_gave_a_forged_page_is_not_asked_again_though_it_is_named() {
    let mut known =
        Known { named: vec![HostId(2), HostId(3)], origin: Some(HostId(3)), ..Known::default() };
    let mut now = ms(0);
    let (mut read, action) = Read::begin(request(unit(0), Urgency::Demand, now), &mut known, now);
    assert_eq!(asked(&action).0, HostId(2));
    read.on(Event::Reply { from: HostId(2) }, &mut known, now).expect("asked");
    let mut action = read.on(Event::Compared(Verdict::Wrong), &mut known, now).expect("compared");
    for _ in 0..3 {
        assert_eq!(asked(&action).0, HostId(3));
        let busy = Event::Failed { from: HostId(3), why: ReplyError::Busy };
        let wait = read.on(busy, &mut known, now).expect("asked");
        assert!(matches!(wait, Action::Wait { .. }), "{wait:?}");
        assert_eq!(read.on(Event::Tick, &mut known, now), None, "it is too early");
        now = read.until();
        action = read.on(Event::Tick, &mut known, now).expect("it is time");
    }
}

#[test]
fn a_read_that_failed_names_image_pages_and_hosts_and_begins_anew_with_other_hosts() {
    let mut known = Known { named: vec![HostId(2)], ..Known::default() };
    let (mut read, _) = Read::begin(request(unit(1), Urgency::Demand, ms(0)), &mut known, ms(0));
    known.version = 1;
    known.named.push(HostId(3));
    let lacks = |host| Event::Failed { from: HostId(host), why: ReplyError::Lacks };
    let action = read.on(lacks(2), &mut known, ms(1)).expect("asked");
    assert_eq!(asked(&action).0, HostId(3));
    let action = read.on(lacks(3), &mut known, ms(1)).expect("asked");
    assert_eq!(asked(&action).0, HostId(2), "others are named than when it began");
    read.on(lacks(2), &mut known, ms(2)).expect("asked");
    let Some(Action::GiveUp(failed)) = read.on(lacks(3), &mut known, ms(2)) else {
        panic!("none of them will have it")
    };
    assert_eq!(
        failed.to_string(),
        "pages 16+16 of image 0000000000000064/7 from no host: host 0000000000000002: it does not have them; host \
         0000000000000003: it does not have them"
    );
}

#[test]
fn a_demand_read_asks_the_origin_where_a_prefetch_waits() {
    let mut known = Known::swarm([]);
    let mut prefetches = Vec::new();
    for at in 0..63 {
        let request = request(unit(at), Urgency::Ahead, ms(0));
        let (read, action) = Read::begin(request, &mut known, ms(0));
        match action {
            Action::Ask { .. } => prefetches.push(read),
            Action::Wait { .. } => break,
            action => panic!("{action:?}"),
        }
    }
    assert!((1..63).contains(&prefetches.len()), "the origin is never full");
    let (_, action) = Read::begin(request(unit(63), Urgency::Demand, ms(0)), &mut known, ms(0));
    assert_eq!(asked(&action).0, ORIGIN);
}

#[test]
fn pages_of_the_group_that_are_not_heard_in_time_come_another_way() {
    let mut known = Known::swarm([2]);
    let hears =
        Request { hear_until: Some(HEAR_DEMAND), ..request(unit(0), Urgency::Demand, ms(0)) };
    let (mut read, action) = Read::begin(hears, &mut known, ms(0));
    assert_eq!(action, Action::Hear { until: HEAR_DEMAND });
    assert_eq!(read.on(Event::Tick, &mut known, HEAR_DEMAND / 2), None);
    let action = read.on(Event::Tick, &mut known, HEAR_DEMAND).expect("it is late");
    assert!(matches!(action, Action::Ask { .. }), "{action:?}");
    let (mut read, _) = Read::begin(hears, &mut known, ms(0));
    let done = read.on(Event::Heard, &mut known, ms(1));
    assert_eq!(done, Some(Action::Done(Done { giver: Giver::Group, resourced: false })));
}

/// What hosts do: a number below a bound each time, the same for the same choices.
#[derive(Debug)]
struct Dice {
    choices: Vec<u8>,
    at: usize,
}

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        let choice = self.choices[self.at % self.choices.len()];
        // Another one in each turn through the choices.
        let turn = u64::try_from(self.at / self.choices.len()).expect("few");
        self.at += 1;
        u64::from(choice).wrapping_add(turn.wrapping_mul(7)) % bound
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).expect("few")]
    }
}

/// A read and what is known of it besides.
struct Watched {
    read: Read,
    request: Request,
    /// The host that it asks now.
    asks: Option<HostId>,
    /// The host that replied with pages that are not handed on yet, and whether that is the origin.
    replied: Option<(HostId, bool)>,
    verdict: Option<(Verdict, bool)>,
    heard: bool,
    forged: BTreeSet<HostId>,
    /// Asked since the read waited last.
    asked_lately: BTreeSet<HostId>,
    ever_asked: BTreeSet<HostId>,
    asked_late: usize,
    is_over: bool,
}

struct World {
    known: Known,
    dice: Dice,
    now: Duration,
    watched: Vec<Watched>,
    events: BTreeMap<(Duration, u64), (usize, Event)>,
    sequence: u64,
}

/// The hosts that a world begins with.
#[derive(Debug, Clone)]
enum Shape {
    Swarm { peers: u64, with_origin: bool, stranger: bool },
    Named { hosts: u64, with_origin: bool },
}

impl World {
    fn new(shape: &Shape, dice: Dice) -> Self {
        let known = match *shape {
            Shape::Swarm { peers, with_origin, stranger } => {
                let mut known = Known::swarm(2..2 + peers);
                if !with_origin {
                    let members = (2..2 + peers).map(|peer| (HostId(peer), false));
                    known.swarm.as_mut().expect("a swarm").set_members(members);
                }
                known.named.extend(stranger.then_some(STRANGER));
                known
            }
            Shape::Named { hosts, with_origin } => Known {
                named: (2..2 + hosts).map(HostId).collect(),
                origin: with_origin.then_some(HostId(2)),
                ..Known::default()
            },
        };
        let (watched, events) = (Vec::new(), BTreeMap::new());
        Self { known, dice, now: ms(0), watched, events, sequence: 0 }
    }

    fn origin(&mut self) -> Option<HostId> {
        match &self.known.swarm {
            Some(swarm) => swarm.origin(),
            None => self.known.origin,
        }
    }

    fn push(&mut self, at: Duration, number: usize, event: Event) {
        self.sequence += 1;
        self.events.insert((at, self.sequence), (number, event));
    }

    fn begin(&mut self, pages: PageRange) {
        let urgency = self.dice.one_of(&[Urgency::Demand, Urgency::Ahead]);
        let wait = if urgency == Urgency::Demand { HEAR_DEMAND } else { HEAR_AHEAD };
        let hears = self.dice.below(4) == 0;
        let patience = self.dice.one_of(&[Duration::ZERO, ms(300), PATIENCE]);
        let request = Request {
            give_up: self.now + patience,
            hear_until: hears.then_some(self.now + wait),
            ..request(pages, urgency, self.now)
        };
        let (read, action) = Read::begin(request, &mut self.known, self.now);
        let number = self.watched.len();
        self.watched.push(Watched {
            read,
            request,
            asks: None,
            replied: None,
            verdict: None,
            heard: false,
            forged: BTreeSet::new(),
            asked_lately: BTreeSet::new(),
            ever_asked: BTreeSet::new(),
            asked_late: 0,
            is_over: false,
        });
        self.carry_out(number, action);
    }

    /// When the patience of a read is over.
    fn end(request: &Request) -> Duration {
        request.give_up.max(request.hear_until.unwrap_or_default())
    }

    fn carry_out(&mut self, number: usize, action: Action) {
        let now = self.now;
        let late = |wait: u64| now + ms(wait);
        let it = &mut self.watched[number];
        it.asks = None;
        match action {
            Action::Hear { until } => match self.dice.below(3) {
                0 => self.push(until, number, Event::Tick),
                1 => self.push(until.min(late(3)), number, Event::NotHeard),
                _ => self.push(until.min(late(3)), number, Event::Heard),
            },
            Action::Ask { host, within, believed, .. } => self.ask(number, host, within, believed),
            Action::Compare { giver, origin, within } => {
                assert_eq!(it.replied, Some((giver, false)), "compared without pages");
                assert_eq!(origin, self.origin());
                self.compare(number, self.now + within);
            }
            Action::Refresh { until } => self.refresh(number, until),
            Action::Wait { until, version } => {
                assert!(until > self.now && until <= self.now + PAUSE_MAX);
                self.wait(number, until, version.is_some());
            }
            Action::Done(Done { giver, .. }) => self.done(number, giver),
            Action::GiveUp(failed) => {
                assert_eq!((failed.image, failed.pages), (IMAGE, it.request.pages));
                assert!(failed.tried.iter().all(|(host, _)| it.ever_asked.contains(host)));
                it.is_over = true;
            }
        }
    }

    fn ask(&mut self, number: usize, host: HostId, within: Duration, believed: bool) {
        let (now, origin) = (self.now, self.origin());
        let it = &mut self.watched[number];
        assert!(!it.forged.contains(&host), "{host} gave a forged page before");
        assert!(within > ms(0) && within <= ANSWER);
        let unchecked = self.known.swarm.is_none() && origin.is_none();
        assert!(!believed || unchecked || origin == Some(host), "{host} is believed");
        (it.asks, it.replied, it.verdict) = (Some(host), None, None);
        it.asked_lately.insert(host);
        it.ever_asked.insert(host);
        it.asked_late += usize::from(now >= Self::end(&it.request));
        let pages = it.request.pages;
        for (other, its) in self.watched.iter().enumerate().filter(|it| it.0 != number) {
            let twice = its.asks.is_some() && !its.request.pages.intersect(&pages).is_empty();
            assert!(!twice, "{pages} are asked for by {number} and {other}");
        }
        self.answer(number, host, now + within);
    }

    /// What a host that was asked says, if anything before `until`.
    fn answer(&mut self, number: usize, from: HostId, until: Duration) {
        let hosts: Vec<HostId> = (2..8).map(HostId).chain([ORIGIN, STRANGER, OWN]).collect();
        let (now, pages) = (self.now, self.watched[number].request.pages);
        let late = |wait: u64| now + ms(wait);
        let wait = self.dice.below(40);
        let at = self.dice.one_of(&hosts);
        let event = match self.dice.below(12) {
            0 => None,
            1 => Some(Event::Elsewhere { from, at }),
            2 => Some(Event::Failed { from, why: ReplyError::Busy }),
            3 | 4 => Some(Event::Failed { from, why: ReplyError::Lacks }),
            5 => Some(Event::Failed { from, why: ReplyError::Broken }),
            6 => Some(Event::Failed { from, why: ReplyError::Rejected }),
            7 => Some(Event::Failed { from, why: ReplyError::CutOff }),
            _ => Some(Event::Reply { from }),
        };
        if event == Some(Event::Failed { from, why: ReplyError::CutOff })
            && let Some(swarm) = &mut self.known.swarm
        {
            swarm.cut_off(from, &[pages], now);
        }
        match event {
            Some(event) => self.push(late(wait), number, event),
            None => self.push(until, number, Event::Tick),
        }
        // A reply of a host that was asked before, and one that comes twice.
        if at != from {
            self.push(late(wait / 2), number, Event::Reply { from: at });
        }
    }

    fn compare(&mut self, number: usize, until: Duration) {
        let verdict = match self.dice.below(6) {
            0 => None,
            1 => Some(Verdict::Undecided),
            2 => Some(Verdict::Wrong),
            3 => Some(Verdict::Believed),
            _ => Some(Verdict::Right),
        };
        match verdict {
            Some(verdict) => self.push(self.now + ms(2), number, Event::Compared(verdict)),
            None => self.push(until, number, Event::Tick),
        }
    }

    fn refresh(&mut self, number: usize, until: Duration) {
        if let Some(swarm) = &mut self.known.swarm
            && self.dice.below(2) == 0
        {
            let peer = HostId(2 + self.dice.below(6));
            let at = self.dice.below(64);
            swarm.told(peer, &[unit(at)], self.now);
        }
        match self.dice.below(2) {
            0 => self.push(until, number, Event::Tick),
            _ => self.push(until.min(self.now + ms(5)), number, Event::Refreshed),
        }
    }

    fn wait(&mut self, number: usize, until: Duration, by_version: bool) {
        let it = &self.watched[number];
        let named = &self.known.named;
        let barred =
            |host: &HostId| self.known.swarm.as_ref().is_some_and(|swarm| swarm.is_barred(*host));
        if it.request.urgency == Urgency::Demand {
            let all = |host: &HostId| {
                it.asked_lately.contains(host) || it.forged.contains(host) || barred(host)
            };
            assert!(named.iter().all(all), "a VM waits, and {named:?} could be asked");
        }
        self.push(until, number, Event::Tick);
        if self.dice.below(8) == 0 && by_version {
            self.known.version += 1;
            self.known.named.rotate_left(1);
            self.push(self.now, number, Event::Tick);
        }
        self.watched[number].asked_lately.clear();
    }

    fn done(&mut self, number: usize, giver: Giver) {
        let origin = self.origin();
        let it = &mut self.watched[number];
        let replied = it.replied.map(|(_, origin)| origin);
        let is_right = match giver {
            Giver::Group => it.heard,
            Giver::Origin => replied == Some(true),
            Giver::Holder => it.verdict.is_some_and(|it| it.0 == Verdict::Right),
            Giver::Believed => it.verdict.is_some_and(|(verdict, has_origin)| {
                verdict == Verdict::Believed || verdict == Verdict::Undecided && !has_origin
            }),
            Giver::Named => self.known.swarm.is_none() && origin.is_none(),
        };
        assert!(is_right, "{giver:?}, {:?} {:?}", it.replied, it.verdict);
        it.is_over = true;
    }

    /// Until all reads are over.
    fn run(&mut self) {
        let mut steps = 0;
        while let Some(((at, _), (number, event))) = self.events.pop_first() {
            self.now = at;
            steps += 1;
            assert!(steps < 200_000, "it does not end");
            let origin = self.origin();
            let it = &mut self.watched[number];
            let asks = it.asks;
            let Some(action) = it.read.on(event, &mut self.known, at) else { continue };
            assert!(!it.is_over, "it was over");
            match event {
                Event::Heard => it.heard = true,
                Event::Reply { from } => {
                    assert_eq!(asks, Some(from), "it was not asked");
                    it.replied = Some((from, origin == Some(from)));
                }
                Event::Compared(verdict) => {
                    it.verdict = Some((verdict, origin.is_some()));
                    if let (Verdict::Wrong, Some((from, _))) = (verdict, it.replied) {
                        it.forged.insert(from);
                    }
                }
                // The sums have not come in time.
                Event::Tick if it.replied.is_some() => {
                    it.verdict = Some((Verdict::Undecided, origin.is_some()));
                }
                _ => {}
            }
            self.carry_out(number, action);
        }
        let named = self.known.named.len();
        for it in &self.watched {
            assert!(it.is_over, "a read of {} waits for ever", it.request.pages);
            // What was asked when the patience ended, and two rounds, with one named by a host
            // each.
            let most = 3 * (named + 3);
            assert!(it.asked_late <= most, "{} of {most} requests too late", it.asked_late);
        }
        let longest = ANSWER * 3 * u32::try_from(3 * (named + 3)).expect("few") + ms(5000);
        let end = self.watched.iter().map(|it| Self::end(&it.request)).max().unwrap_or_default();
        assert!(self.now <= end + longest, "{:?} after {end:?}", self.now);
    }
}

fn shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        (0..6u64, any::<bool>(), any::<bool>()).prop_map(|(peers, with_origin, stranger)| {
            Shape::Swarm { peers, with_origin, stranger }
        }),
        (0..4u64, any::<bool>())
            .prop_map(|(hosts, with_origin)| Shape::Named { hosts, with_origin }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_read_ends_and_hands_on_what_is_right(
        shape in shape(),
        choices in prop::collection::vec(any::<u8>(), 1..120),
        reads in prop::collection::btree_set(0..60u64, 1..24),
    ) {
        let mut world = World::new(&shape, Dice { choices, at: 0 });
        for at in reads {
            world.begin(unit(at));
        }
        world.run();
    }
}
