//! Whether the host that froze an image has gone: only then is believed what others have of it.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vmfork_image::{AheadRead, PageSource as _};
use vmfork_transfer::{Holders, PageService, PeerSource, ServiceLimits, Urgency};

use crate::common::*;
use crate::swarm::{Cache, ORIGIN, UNIT, WHOLE, nodes, quick};

/// Otherwise, an attacker that takes all places in the handshake could have a member's pages
/// believed.
#[test]
fn an_origin_that_has_no_place_for_one_more_is_not_gone() {
    let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..1024))];
    let nodes = nodes(all);
    nodes[2].cache.lies_about.store(100, Ordering::Relaxed);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    let origin = &nodes[0].service;
    let most = ServiceLimits::default().handshakes_max;
    let connect = || TcpStream::connect(origin.address()).expect("a connection");
    let waiting: Vec<_> = (0..most).map(|_| connect()).collect();
    wait_until("all places are taken", || origin.connections() == most);
    let unit = range(96, UNIT);
    let mut bytes = buffer(unit);
    if source.read(unit, &mut bytes).is_ok() {
        check(unit, &bytes);
    }
    assert_eq!(source.counters().unverified_pages.get(), 0);
    assert!(origin.counters().turned_away.get() > 0, "it was not asked");
    drop(waiting);
    wait_until("there are places", || origin.connections() < most);
    source.read(unit, &mut bytes).expect("from the origin");
    check(unit, &bytes);
}

#[test]
fn an_origin_that_refuses_is_there_again() {
    let all = [(ORIGIN, Cache::of([])), (1, Cache::of([])), (2, Cache::of(0..1024))];
    let mut nodes = nodes(all);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    let address = nodes[0].service.address();
    nodes[0].service.stop();
    let unit = range(0, UNIT);
    let mut bytes = buffer(unit);
    source.read(unit, &mut bytes).expect("from host 2");
    assert_eq!(source.counters().unverified_pages.get(), UNIT, "it is gone");
    let listener = TcpListener::bind(address).expect("the same port");
    let (tls, pages) = (Arc::clone(&nodes[0].keys.server), Arc::clone(&nodes[0].cache));
    let service = PageService::start(listener, tls, pages, ServiceLimits::default());
    nodes[0].service = service.expect("a service");
    let lost = range(2048, UNIT);
    let error = source.read(lost, &mut buffer(lost)).expect_err("no host has it").to_string();
    assert!(error.contains("not-here"), "{error}");
    nodes[0].cache.put(range(0, WHOLE));
    nodes[2].cache.lies_about.store(100, Ordering::Relaxed);
    let unit = range(96, UNIT);
    source.read(unit, &mut bytes).expect("from the origin");
    check(unit, &bytes);
    assert_eq!(source.counters().forged.get(), 1);
}

/// Of pages that a later image has changed in part, no host that needs that image brings the
/// others.
#[test]
fn who_has_a_part_of_a_unit_is_asked_for_that_when_the_origin_is_gone() {
    let nodes = nodes([(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(30..40))]);
    let (source, _) = nodes[1].source(&nodes, quick());
    nodes[0].service.stop();
    for (part, urgency) in [(range(30, 2), Urgency::Demand), (range(32, 8), Urgency::Ahead)] {
        let mut bytes = buffer(part);
        source.read_for(urgency, part, &mut bytes).expect("host 2 has it");
        check(part, &bytes);
    }
    let more = range(39, 2);
    let error = source.read(more, &mut buffer(more)).expect_err("not all of it").to_string();
    assert!(
        error.contains("host100") && error.contains("host2") && error.contains("not-here"),
        "{error}"
    );
}

#[test]
fn who_gave_what_is_wrong_is_asked_for_no_part_of_a_unit_either() {
    let nodes = nodes([(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..40))]);
    nodes[2].cache.lies_about.store(3, Ordering::Relaxed);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    let unit = range(0, UNIT);
    wait_until("it is asked, too", || {
        let mut bytes = buffer(unit);
        source.read(unit, &mut bytes).expect("from the origin");
        check(unit, &bytes);
        source.counters().forged.get() > 0
    });
    nodes[0].service.stop();
    let part = range(32, 8);
    let error = source.read(part, &mut buffer(part)).expect_err("no other host has it").to_string();
    assert!(!error.contains("host2"), "{error}");
}

#[test]
fn without_a_swarm_what_others_give_is_compared_too() {
    let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..WHOLE))];
    let nodes = nodes(all);
    nodes[2].cache.lies_about.store(100, Ordering::Relaxed);
    let [origin, other] = [&nodes[0], &nodes[2]].map(|node| nodes[1].peer(node));
    let source = || {
        let holders = Holders::new([Arc::clone(&other), Arc::clone(&origin)]);
        PeerSource::new(IMAGE, Arc::new(holders)).with_origin(Arc::clone(&origin))
    };
    let (one_by_one, together) = (source(), source());
    let units = [5, 6, 7].map(|at| range(at * UNIT, UNIT));
    for unit in units {
        let mut bytes = buffer(unit);
        for page in unit.pages() {
            let mut came = |bytes: &[u8]| check(page.range(), bytes);
            one_by_one.read_first(unit, page, &mut bytes, &mut came).expect("from one of them");
            check(unit, &bytes);
        }
    }
    let mut bytes = units.map(buffer);
    let reads = units.iter().zip(&mut bytes);
    let mut reads: Vec<_> =
        reads.map(|(range, bytes)| AheadRead { range: *range, bytes }).collect();
    together.read_ahead_all(&mut reads, &mut |at, came| {
        check(units[at], came.expect("from one of them"));
    });
    for source in [&one_by_one, &together] {
        let counters = source.counters();
        assert_eq!((counters.forged.get(), counters.unverified_pages.get()), (1, 0));
        assert!(counters.holder_pages.get() >= UNIT, "the other was not asked");
    }
}
