//! Hosts that all want an image, and serve each other what they have of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, NextAhead, PageRange, PageSource as _};
use vmfork_transfer::{
    Holders, HostId, PageService, Pages, Peer, PeerConfig, PeerSource, Refusal, RefusalKind,
    ServiceLimits, Swarm, SwarmConfig, SwarmMember, Urgency, Wanted,
};

use crate::common::*;
use crate::keys::{Cluster, Host, name_of};

/// 16 MiB.
pub(crate) const WHOLE: u64 = 4096;
pub(crate) const UNIT: u64 = 16;
pub(crate) const ORIGIN: u64 = 100;
/// As the engine does.
const FETCHERS: usize = 12;

/// What a host has of the image.
pub(crate) struct Cache {
    pub(crate) has: Mutex<BTreeSet<u64>>,
    /// It says that it has everything.
    pub(crate) boasts: AtomicBool,
    /// Which member has which certificate.
    pub(crate) members: Mutex<BTreeMap<Vec<u8>, u64>>,
    /// It froze the image.
    pub(crate) is_origin: AtomicBool,
    /// It is an origin that has not read its own pages.
    pub(crate) knows_no_sums: AtomicBool,
    /// It says that all it is asked for is at this host; 0: it does not.
    pub(crate) names: AtomicU64,
    /// This page it gives with a wrong byte.
    pub(crate) lies_about: AtomicU64,
    pub(crate) gate: Gate,
    pub(crate) ahead_gate: Gate,
    /// What is not here is about to be.
    pub(crate) expects_more: AtomicBool,
}

impl Cache {
    pub(crate) fn of(pages: impl IntoIterator<Item = u64>) -> Arc<Self> {
        Arc::new(Self {
            has: Mutex::new(pages.into_iter().collect()),
            boasts: AtomicBool::new(false),
            expects_more: AtomicBool::new(false),
            members: Mutex::default(),
            is_origin: AtomicBool::new(false),
            knows_no_sums: AtomicBool::new(false),
            names: AtomicU64::new(0),
            lies_about: AtomicU64::new(u64::MAX),
            gate: Gate::default(),
            ahead_gate: Gate::default(),
        })
    }

    pub(crate) fn has(&self, range: PageRange) -> bool {
        let has = self.has.lock().expect("no panic");
        range.pages().all(|page| has.contains(&page.0))
    }

    pub(crate) fn put(&self, range: PageRange) {
        self.has.lock().expect("no panic").extend(range.pages().map(|page| page.0));
    }
}

impl Pages for Cache {
    fn admit(&self, certificate: &[u8], _: SocketAddr) -> Result<u64, Refusal> {
        Ok(self.members.lock().expect("no panic")[certificate])
    }

    fn asked(&self, _: u64, _: ImageName, _: PageRange, _: Urgency) -> Option<Wanted> {
        Some(Wanted { pages: WHOLE, is_own: self.is_origin.load(Ordering::Relaxed) })
    }

    fn is_member(&self, _: u64) -> bool {
        true
    }

    fn read(
        &self,
        _: u64,
        _: ImageName,
        range: PageRange,
        urgency: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        match urgency {
            Urgency::Demand => self.gate.pass(),
            Urgency::Ahead => self.ahead_gate.pass(),
        }
        let named = self.names.load(Ordering::Relaxed);
        if named > 0 {
            return Err(Refusal::elsewhere(named));
        }
        if !self.has(range) {
            return Err(Refusal::new(RefusalKind::NotHere, "not here"));
        }
        for (page, bytes) in range.pages().zip(bytes.as_chunks_mut::<PAGE>().0) {
            fill(page, bytes);
            bytes[9] ^= u8::from(page.0 == self.lies_about.load(Ordering::Relaxed));
        }
        Ok(())
    }

    fn is_coming(&self, _: ImageName, _: PageRange) -> bool {
        self.expects_more.load(Ordering::Relaxed)
    }

    fn own(
        &self,
        _: u64,
        _: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        match self.is_origin.load(Ordering::Relaxed) {
            true if !self.knows_no_sums.load(Ordering::Relaxed) => {
                let units = (range.start().0 / UNIT..range.end().0.div_ceil(UNIT))
                    .map(|at| self::range(at * UNIT, UNIT));
                units.for_each(|unit| each(unit.intersect(&range)));
            }
            true => {}
            false => return Err(Refusal::new(RefusalKind::UnknownImage, "another's")),
        }
        Ok(())
    }

    fn held(
        &self,
        _: u64,
        _: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        if self.boasts.load(Ordering::Relaxed) {
            each(range);
            return Ok(());
        }
        let has = self.has.lock().expect("no panic");
        has.range(range.start().0..range.end().0).for_each(|page| each(self::range(*page, 1)));
        Ok(())
    }
}

/// A host of the swarm.
pub(crate) struct Node {
    pub(crate) number: u64,
    pub(crate) keys: Host,
    pub(crate) cache: Arc<Cache>,
    pub(crate) service: PageService,
}

pub(crate) fn nodes(caches: impl IntoIterator<Item = (u64, Arc<Cache>)>) -> Vec<Node> {
    let cluster = Cluster::new();
    let node = |(number, cache): (u64, Arc<Cache>)| {
        let keys = cluster.host(number);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (tls, pages) = (Arc::clone(&keys.server), Arc::clone(&cache));
        let service = PageService::start(listener, tls, pages, ServiceLimits::default());
        Node { number, keys, cache, service: service.expect("a service") }
    };
    let nodes: Vec<_> = caches.into_iter().map(node).collect();
    let certificate = |node: &Node| (node.keys.certificate.to_vec(), node.number);
    for node in &nodes {
        *node.cache.members.lock().expect("no panic") = nodes.iter().map(certificate).collect();
        node.cache.is_origin.store(node.number == ORIGIN, Ordering::Relaxed);
    }
    nodes
}

pub(crate) fn quick() -> SwarmConfig {
    let mut config = SwarmConfig { every: Duration::from_millis(10), ..SwarmConfig::default() };
    config.pick.pause = Duration::from_millis(5);
    config
}

impl Node {
    pub(crate) fn peer(&self, other: &Self) -> Arc<Peer> {
        let config = PeerConfig {
            name: format!("host{}", other.number),
            address: other.service.address(),
            server_name: name_of(other.number),
            tls: Arc::clone(&self.keys.client),
            compress: false,
        };
        Arc::new(Peer::new(config, hasty()))
    }

    /// The image, from the others.
    pub(crate) fn source(&self, all: &[Node], config: SwarmConfig) -> (PeerSource, Arc<Swarm>) {
        let swarm = Arc::new(Swarm::new(IMAGE, WHOLE, HostId(self.number), config));
        let others = all.iter().filter(|node| node.number != self.number);
        let members: Vec<_> = others
            .map(|node| SwarmMember {
                id: HostId(node.number),
                peer: self.peer(node),
                origin: node.number == ORIGIN,
            })
            .collect();
        let origin = members.iter().filter(|member| member.origin);
        let origin: Vec<_> = origin.map(|member| Arc::clone(&member.peer)).collect();
        swarm.set_members(members);
        let source = PeerSource::new(IMAGE, Arc::new(Holders::new(origin)));
        let source = source.with_patience(Duration::from_secs(3)).with_swarm(Arc::clone(&swarm));
        (source, swarm)
    }

    /// Bring all that is missing, as the engine does.
    fn hydrate(&self, source: &PeerSource) {
        let order = source.order().expect("a swarm has one");
        let mut left: Vec<_> = (0..WHOLE / UNIT).map(|at| range(at * UNIT, UNIT)).collect();
        left.sort_by_key(|piece| order.place(*piece));
        let left = Mutex::new(left);
        let fetch = || {
            let mut bytes = buffer(range(0, UNIT));
            loop {
                let (piece, wait) = {
                    let mut left = left.lock().expect("no panic");
                    if left.is_empty() {
                        return;
                    }
                    match order.next(&left[..left.len().min(300)]) {
                        NextAhead::Piece(at) => (Some(left.remove(at)), Duration::ZERO),
                        NextAhead::Later(wait) => (None, wait),
                    }
                };
                let Some(piece) = piece else {
                    std::thread::park_timeout(wait);
                    continue;
                };
                source.read_ahead(piece, &mut bytes).expect("from a host that has it");
                check(piece, &bytes);
                self.cache.put(piece);
            }
        };
        std::thread::scope(|scope| (0..FETCHERS).for_each(|_| drop(scope.spawn(fetch))));
        assert!(self.cache.has(range(0, WHOLE)));
    }
}

pub(crate) fn receivers(count: u64) -> impl Iterator<Item = (u64, Arc<Cache>)> {
    std::iter::once((ORIGIN, Cache::of(0..WHOLE)))
        .chain((1..=count).map(|number| (number, Cache::of([]))))
}

#[test]
fn hosts_that_all_want_an_image_take_most_of_it_from_each_other() {
    let nodes = nodes(receivers(4));
    std::thread::scope(|scope| {
        for node in &nodes[1..] {
            let (source, swarm) = node.source(&nodes, quick());
            scope.spawn(move || {
                node.hydrate(&source);
                let counters = source.counters();
                let (origin, holders) = (counters.origin_pages.get(), counters.holder_pages.get());
                assert_eq!(origin + holders, WHOLE);
                assert_eq!(swarm.holders(), 3);
            });
        }
    });
    // More, if an answer was late and another asked.
    wait_until("all is counted", || {
        nodes.iter().map(|node| node.service.counters().pages.get()).sum::<u64>() >= 4 * WHOLE
    });
    let sent: Vec<_> = nodes.iter().map(|node| node.service.counters().pages.get()).collect();
    assert!(sent[0] >= WHOLE, "somebody had to send all of it: {sent:?}");
    assert!(sent[0] <= WHOLE * 5 / 4, "the origin sent much of it again: {sent:?}");
}

/// All read the same at nearly the same time, so that no host has heard yet which one has it.
#[test]
fn what_hosts_wait_for_in_lockstep_leaves_the_origin_once() {
    let nodes = nodes(receivers(6));
    let step = std::sync::Barrier::new(6);
    std::thread::scope(|scope| {
        for node in &nodes[1..] {
            let (source, _) = node.source(&nodes, SwarmConfig::default());
            let step = &step;
            scope.spawn(move || {
                for at in 0..64 {
                    step.wait();
                    let unit = range(at * UNIT, UNIT);
                    let mut bytes = buffer(unit);
                    source.read(unit, &mut bytes).expect("from a host that has it");
                    check(unit, &bytes);
                    node.cache.put(unit);
                }
                assert_eq!(source.counters().pages.get(), 64 * UNIT);
            });
        }
    });
    let sent = || nodes.iter().map(|node| node.service.counters().pages.get()).collect::<Vec<_>>();
    wait_until("all is counted", || sent().iter().sum::<u64>() >= 6 * 64 * UNIT);
    // A few times more, where a host was so late that another asked again. Else all six would ask.
    assert!(sent()[0] <= 96 * UNIT, "the origin sent what others had: {:?}", sent());
}

#[test]
fn who_is_named_and_has_nothing_costs_one_more_question() {
    let nodes = nodes(receivers(2));
    let (source, _) = nodes[1].source(&nodes, SwarmConfig::default());
    let (other, _) = nodes[2].source(&nodes, SwarmConfig::default());
    let unit = range(0, UNIT);
    // Host 2 gets it, and does not keep it.
    other.read(unit, &mut buffer(unit)).expect("from the origin");
    let mut bytes = buffer(unit);
    source.read(unit, &mut bytes).expect("from the origin after all");
    check(unit, &bytes);
    assert_eq!((source.counters().redirected.get(), source.counters().failures.get()), (1, 0));
    let sent = &nodes[0].service.counters().pages;
    wait_until("all is counted", || sent.get() == 2 * UNIT);
    // One that has no image any more is not named.
    nodes[0].service.heard(2, &BTreeSet::new());
    let unit = range(UNIT, UNIT);
    other.read(unit, &mut buffer(unit)).expect("from the origin");
    nodes[0].service.heard(2, &BTreeSet::new());
    source.read(unit, &mut buffer(unit)).expect("from the origin");
    assert_eq!(source.counters().redirected.get(), 1);
}

#[test]
fn a_host_that_is_alone_takes_all_from_the_origin_at_once() {
    let nodes = nodes(receivers(1));
    let (source, _) = nodes[1].source(&nodes, SwarmConfig::default());
    nodes[1].hydrate(&source);
    assert_eq!(source.counters().origin_pages.get(), WHOLE);
}

#[test]
fn others_that_fetch_nothing_are_not_waited_for() {
    let nodes = nodes(receivers(3));
    let (source, swarm) = nodes[1].source(&nodes, quick());
    nodes[1].hydrate(&source);
    assert_eq!((swarm.holders(), source.counters().origin_pages.get()), (2, WHOLE));
}

#[test]
fn pages_of_a_holder_that_dies_come_from_another() {
    let all = [
        (ORIGIN, Cache::of(0..WHOLE)),
        (1, Cache::of([])),
        (2, Cache::of(0..WHOLE)),
        (3, Cache::of(0..WHOLE)),
    ];
    let nodes = nodes(all);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    wait_until("both are known to have it", || {
        swarm.refresh_within(Duration::from_secs(20));
        swarm.holders() == 2
    });
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| nodes[1].hydrate(&source));
        let served = &nodes[2].service;
        wait_until("it serves", || served.counters().requests.get() > 10);
        served.stop();
        reading.join().expect("every read succeeds");
    });
    assert_eq!(source.counters().failures.get(), 0);
    assert!(nodes[3].service.counters().pages.get() > 0);
}

#[test]
fn a_page_whose_origin_is_gone_comes_from_any_host_that_has_it() {
    let nodes = nodes([(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(32..64))]);
    let (source, _) = nodes[1].source(&nodes, SwarmConfig::default());
    nodes[0].service.stop();
    let mut bytes = buffer(range(32, 16));
    source.read(range(32, 16), &mut bytes).expect("host 2 has it");
    check(range(32, 16), &bytes);
    let began = Instant::now();
    let error = source.read(range(96, 1), &mut buffer(range(96, 1))).expect_err("no host has it");
    assert!(error.to_string().contains("host100"), "{error}");
    assert!(began.elapsed() < LONG);
}

#[test]
fn who_has_less_than_it_says_is_passed_over() {
    let nodes = nodes([(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..16))]);
    nodes[2].cache.boasts.store(true, Ordering::Relaxed);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    nodes[1].hydrate(&source);
    let counters = source.counters();
    assert_eq!((counters.failures.get(), counters.holder_pages.get()), (0, 16));
    assert!(counters.resourced.get() > 0);
}

/// A host that gives other bytes than it got: its memory is broken, or it lies.
#[test]
fn what_is_not_what_the_origin_has_is_not_taken() {
    let all = [
        (ORIGIN, Cache::of(0..WHOLE)),
        (1, Cache::of([])),
        (2, Cache::of(0..WHOLE)),
        (3, Cache::of(1024..1040)),
    ];
    let nodes = nodes(all);
    nodes[2].cache.lies_about.store(100, Ordering::Relaxed);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    for urgency in [Urgency::Demand, Urgency::Ahead] {
        for at in 0..10 {
            let unit = range(at * UNIT, UNIT);
            let mut bytes = buffer(unit);
            source.read_for(urgency, unit, &mut bytes).expect("from a host that has it");
            check(unit, &bytes);
        }
    }
    let counters = source.counters();
    assert_eq!(counters.forged.get(), 1, "it is asked no more");
    assert_eq!((counters.failures.get(), counters.unverified_pages.get()), (0, 0));
    // Without its origin, no host can tell.
    nodes[0].service.stop();
    let unit = range(1024, UNIT);
    source.read(unit, &mut buffer(unit)).expect("host 3 has it");
    assert_eq!(counters.unverified_pages.get(), UNIT);
}

/// Otherwise, an attacker that keeps the origin busy could have its own pages believed.
#[test]
fn an_origin_that_was_slow_a_moment_ago_is_asked_all_the_same() {
    let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..1024))];
    let nodes = nodes(all);
    nodes[2].cache.lies_about.store(100, Ordering::Relaxed);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    nodes[0].cache.gate.shut();
    let only_there = range(1024, UNIT);
    source.read(only_there, &mut buffer(only_there)).expect_err("it takes too long");
    let unit = range(96, UNIT);
    let counters = source.counters();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // It is found out which host gave it, so the origin is asked for it.
            wait_until("it was compared", || counters.forged.get() > 0);
            nodes[0].cache.gate.open();
        });
        let mut bytes = buffer(unit);
        source.read(unit, &mut bytes).expect("from the origin at last");
        check(unit, &bytes);
    });
    assert_eq!((counters.forged.get(), counters.unverified_pages.get()), (1, 0));
}

#[test]
fn who_is_sent_elsewhere_knows_what_is_there() {
    for urgency in [Urgency::Demand, Urgency::Ahead] {
        let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..WHOLE))];
        let nodes = nodes(all);
        let unit = range(UNIT, UNIT);
        let (before, _) = nodes[2].source(&nodes, quick());
        before.read_for(urgency, unit, &mut buffer(unit)).expect("from the origin");
        let gate = match urgency {
            Urgency::Demand => &nodes[2].cache.gate,
            Urgency::Ahead => &nodes[2].cache.ahead_gate,
        };
        gate.shut();
        let (source, _) = nodes[1].source(&nodes, quick());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut bytes = buffer(unit);
                source.read_for(urgency, unit, &mut bytes).expect("from host 2");
                check(unit, &bytes);
            });
            gate.wait_for(1);
            // No host is left to be asked.
            nodes[0].service.stop();
            gate.open();
            reader.join().expect("no panic");
        });
        let counters = source.counters();
        assert_eq!((counters.holder_pages.get(), counters.unverified_pages.get()), (UNIT, 0));
    }
}

/// The origin has not read them itself, as of a stored image.
#[test]
fn what_can_not_be_compared_is_asked_of_the_origin() {
    let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..WHOLE))];
    let nodes = nodes(all);
    nodes[0].cache.knows_no_sums.store(true, Ordering::Relaxed);
    nodes[2].cache.lies_about.store(100, Ordering::Relaxed);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    for at in 0..10 {
        let unit = range(at * UNIT, UNIT);
        let mut bytes = buffer(unit);
        source.read(unit, &mut bytes).expect("from the origin");
        check(unit, &bytes);
    }
    let counters = source.counters();
    assert_eq!((counters.holder_pages.get(), counters.unverified_pages.get()), (0, 0));
    assert!(nodes[2].service.counters().pages.get() > 0, "only the origin was asked");
}

/// Sums are requested by the block: pages of it may have been lost, or given back since no VM needs
/// them.
#[test]
fn what_the_origin_can_not_read_makes_nothing_else_undecided() {
    let origin = Cache::of((0..WHOLE).filter(|page| page / UNIT != 3));
    let nodes = nodes([(ORIGIN, origin), (1, Cache::of([])), (2, Cache::of(0..WHOLE))]);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    for at in (0..10).filter(|at| *at != 3) {
        let unit = range(at * UNIT, UNIT);
        let mut bytes = buffer(unit);
        source.read_for(Urgency::Ahead, unit, &mut bytes).expect("from whom it was asked of");
        check(unit, &bytes);
    }
    let (counters, given) = (source.counters(), nodes[2].service.counters().pages.get());
    assert!(given > 0, "only the origin was asked");
    assert_eq!(counters.holder_pages.get(), given, "some of it was not believed");
}

/// A member that says that it has everything, and that itself has it, or another that has nothing.
#[test]
fn no_host_is_sent_round_and_round() {
    for named in [2, 3] {
        let empty = |number| (number, Cache::of([]));
        let nodes = nodes([(ORIGIN, Cache::of(0..WHOLE)), empty(1), empty(2), empty(3)]);
        nodes[2].cache.boasts.store(true, Ordering::Relaxed);
        nodes[2].cache.names.store(named, Ordering::Relaxed);
        let (source, swarm) = nodes[1].source(&nodes, quick());
        swarm.refresh_within(Duration::from_secs(20));
        for (at, urgency) in [(0, Urgency::Demand), (1, Urgency::Ahead)] {
            let unit = range(at * UNIT, UNIT);
            let mut bytes = buffer(unit);
            source.read_for(urgency, unit, &mut bytes).expect("from the origin");
            check(unit, &bytes);
        }
        let redirected = source.counters().redirected.get();
        assert!((1..=2).contains(&redirected), "{redirected} times to {named}");
    }
}

#[test]
fn what_a_vm_waits_for_overtakes_hydration() {
    let nodes = nodes(receivers(1));
    let (source, _) = nodes[1].source(&nodes, quick());
    // No background read advances.
    nodes[0].cache.ahead_gate.shut();
    std::thread::scope(|scope| {
        let hydrating = scope.spawn(|| nodes[1].hydrate(&source));
        nodes[0].cache.ahead_gate.wait_for(1);
        let mut bytes = buffer(range(7, 2));
        source.read(range(7, 2), &mut bytes).expect("its page");
        check(range(7, 2), &bytes);
        assert!(!hydrating.is_finished());
        nodes[0].cache.ahead_gate.open();
        hydrating.join().expect("and then the rest");
    });
}

#[test]
fn what_a_vm_waits_for_is_asked_of_another_than_who_hangs_with_it() {
    let caches = receivers(1).chain([2, 3].map(|number| (number, Cache::of(0..WHOLE))));
    let nodes = nodes(caches);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    let holders = [&nodes[2].cache, &nodes[3].cache];
    holders.iter().for_each(|holder| holder.ahead_gate.shut());
    let unit = range(0, UNIT);
    std::thread::scope(|scope| {
        let ahead = scope.spawn(|| source.read_ahead(unit, &mut buffer(unit)));
        wait_until("one of them is asked", || holders.iter().any(|it| it.ahead_gate.waiting() > 0));
        let mut bytes = buffer(unit);
        source.read(unit, &mut bytes).expect("from the other");
        check(unit, &bytes);
        assert_eq!(source.counters().holder_pages.get(), UNIT);
        holders.iter().for_each(|holder| holder.ahead_gate.open());
        ahead.join().expect("no panic").expect("late");
    });
    assert_eq!(source.counters().origin_pages.get(), 0);
}

#[test]
fn demand_goes_to_a_holder_that_is_no_origin_and_if_that_stalls_to_the_origin() {
    let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..WHOLE))];
    let nodes = nodes(all);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    nodes[0].cache.gate.shut();
    for at in 0..20 {
        let mut bytes = buffer(range(at * UNIT, UNIT));
        source.read(range(at * UNIT, UNIT), &mut bytes).expect("a page");
        check(range(at * UNIT, UNIT), &bytes);
    }
    assert_eq!(source.counters().holder_pages.get(), 20 * UNIT);
    nodes[0].cache.gate.open();
    nodes[2].cache.gate.shut();
    for page in 800..803 {
        source.read(range(page, 1), &mut buffer(range(page, 1))).expect("a page");
    }
    assert_eq!(source.counters().origin_pages.get(), 3);
    assert!(source.counters().resourced.get() < 3, "it is left alone after that");
    nodes[2].cache.gate.open();
}
