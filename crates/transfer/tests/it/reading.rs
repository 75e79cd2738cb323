use std::sync::Arc;
use std::time::Duration;

use vmfork_image::{ImageName, Origin, PageSource as _};
use vmfork_transfer::{PeerError, PeerLimits, RefusalKind, ServiceLimits, Urgency};

use crate::common::*;

#[test]
fn every_page_is_right_for_many_readers_at_a_time() {
    let world = World::new();
    let servers = [2, 3].map(|number| world.serve(number, ServiceLimits::default()));
    let limits = PeerLimits { connections_max: 4, ..PeerLimits::default() };
    let peers = servers.each_ref().map(|server| world.peer(server, limits));
    let sources = [source(peers.clone()), source([Arc::clone(&peers[1])])];
    std::thread::scope(|scope| {
        for reader in 0..12u64 {
            let source = &sources[usize::from(reader % 3 == 0)];
            scope.spawn(move || {
                let mut at = reader * 31;
                for step in 0..25u64 {
                    let len = match (step + reader) % 4 {
                        0 => 1,
                        1 => 40,
                        _ => 16,
                    };
                    let range = range(at % (PAGES - 600), len);
                    let mut bytes = buffer(range);
                    source.read(range, &mut bytes).expect("pages");
                    check(range, &bytes);
                    at += 397;
                }
            });
        }
    });
    for (peer, server) in peers.iter().zip(&servers) {
        let (idle, in_use) = peer.connections();
        assert!((1..=4).contains(&idle) && in_use == 0, "{idle} idle, {in_use} in use");
        assert_eq!(peer.counters().connections.get(), idle as u64);
        assert_eq!(peer.counters().failures.get() + peer.counters().retries.get(), 0);
        let (asked, served) = (peer.counters(), server.service.counters());
        wait_until("all is counted", || asked.requests.get() == served.requests.get());
        assert_eq!(asked.pages.get(), served.pages.get());
        assert_eq!(asked.zero_pages.get(), served.zero_pages.get());
        assert_eq!(asked.raw_bytes.get(), served.raw_bytes.get());
        assert_eq!(asked.wire_bytes.get(), served.wire_bytes.get());
        assert_eq!(asked.latency.count(), asked.requests.get());
        assert!(asked.zero_pages.get() > 0 && asked.last_rtt_us() > 0);
        let sent = (asked.pages.get() - asked.zero_pages.get()) * PAGE as u64;
        assert_eq!(asked.raw_bytes.get(), sent);
    }
    let all = sources.iter().map(|source| source.counters().reads.get()).sum::<u64>();
    assert_eq!(all, 12 * 25);
}

#[test]
fn a_long_range_is_read_in_pieces() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let peer = world.peer(&server, PeerLimits::default());
    let source = source([Arc::clone(&peer)]);
    assert_eq!((source.origin(), source.unit_pages()), (Origin::Peer, 16));
    let long = range(17, 1300);
    let mut bytes = buffer(long);
    source.read(long, &mut bytes).expect("pages");
    check(long, &bytes);
    assert_eq!(peer.counters().requests.get(), 3);
    assert_eq!((source.counters().reads.get(), source.counters().pages.get()), (1, 1300));
    assert_eq!(peer.counters().connections.get(), 1, "one after the other on one connection");
    source.read(range(3, 0), &mut []).expect("nothing to read");
    let error = source.read(range(3, 2), &mut [0; PAGE]).expect_err("one page for two");
    assert_eq!(error.to_string(), "4096 bytes for pages 3+2");
}

#[test]
fn pages_that_compress_come_compressed_when_that_is_tried() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let peer = world.peer(&server, PeerLimits::default());
    // Each 7th page from 2 on is of one word, those around it are zero or do not compress.
    for round in 0..40u64 {
        let range = range(2 + round * 7, 1);
        let mut bytes = buffer(range);
        peer.read(IMAGE, range, Urgency::Demand, &mut bytes).expect("a page");
        check(range, &bytes);
    }
    let (raw, wire) = (peer.counters().raw_bytes.get(), peer.counters().wire_bytes.get());
    assert_eq!(raw, 40 * PAGE as u64);
    // Either way is tried eight times at least.
    assert!(wire <= 32 * PAGE as u64 + 8 * 100, "{wire} bytes");
    assert!(wire >= 8 * PAGE as u64, "{wire} bytes");
    let served = server.service.counters();
    wait_until("all is counted", || served.requests.get() == 40);
    assert_eq!((served.raw_bytes.get(), served.wire_bytes.get()), (raw, wire));
}

#[test]
fn background_reads_are_counted_apart() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let peer = world.peer(&server, PeerLimits::default());
    for (urgency, pages) in [(Urgency::Ahead, 16), (Urgency::Demand, 3), (Urgency::Ahead, 4)] {
        let range = range(16, pages);
        peer.read(IMAGE, range, urgency, &mut buffer(range)).expect("pages");
    }
    let (asked, served) = (peer.counters(), server.service.counters());
    wait_until("all is counted", || served.requests.get() == 3);
    assert_eq!((asked.requests.get(), asked.pages.get()), (3, 23));
    for ahead in [&asked.ahead, &served.ahead] {
        assert_eq!((ahead.requests.get(), ahead.pages.get()), (2, 20));
    }
    assert_eq!(asked.ahead.wire_bytes.get(), served.ahead.wire_bytes.get());
    assert!(asked.ahead.wire_bytes.get() < asked.wire_bytes.get());
}

#[test]
fn what_a_host_holds_is_told() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let peer = world.peer(&server, PeerLimits::default());
    let held = peer.held(IMAGE, range(150, 200)).expect("what is held");
    assert_eq!(held, [range(150, 49), range(200, 99), range(300, 50)]);
    assert_eq!(peer.held(IMAGE, range(PAGES + 1, 9)).expect("nothing"), []);
    let other = ImageName { host: 1, image: 1 };
    let error = peer.held(other, range(0, 9)).expect_err("another image").to_string();
    assert_eq!(error, "refused: no image 0000000000000001/1 (unknown-image)");
    let error = peer.held(IMAGE, range(0, 1 << 19)).expect_err("too much").to_string();
    assert!(error.contains("at most 262144 are read at a time"), "{error}");
}

#[test]
fn a_refusal_says_why_and_the_connection_serves_on() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let peer = world.peer(&server, PeerLimits::default());
    let mut bytes = buffer(range(0, 4));
    let mut read = |range| peer.read(IMAGE, range, Urgency::Demand, &mut bytes);
    let error = read(range(PAGES - 2, 4)).expect_err("beyond the image");
    let PeerError::Refused(refusal) = error else { panic!("{error}") };
    assert_eq!(refusal.kind, RefusalKind::UnknownImage);
    *server.images.lost_from.lock().expect("no panic") = Some(100);
    let error = read(range(98, 4)).expect_err("lost").to_string();
    assert_eq!(error, "refused: page 100 went with its VM (page-lost)");
    let error = read(range(96, 4)).expect_err("a panic").to_string();
    assert_eq!(error, "refused: reading the pages failed: see the host's log (failed)");
    read(range(4, 4)).expect("pages");
    check(range(4, 4), &bytes);
    assert_eq!(peer.counters().connections.get(), 1);
    assert_eq!(peer.counters().failures.get(), 3);
    let refused: Vec<_> = server.service.counters().refusals().filter(|(_, n)| *n > 0).collect();
    let kinds = [RefusalKind::UnknownImage, RefusalKind::PageLost, RefusalKind::Failed];
    assert_eq!(refused, kinds.map(|kind| (kind, 1)));
}

#[test]
fn background_reads_take_turns_and_demand_does_not_wait_for_them() {
    let world = World::new();
    let io = Duration::from_secs(1);
    let server = world.serve(2, ServiceLimits { ahead_max: 1, io, ..ServiceLimits::default() });
    let peer = world.peer(&server, PeerLimits::default());
    server.images.ahead_gate.shut();
    let read = |urgency| {
        let range = range(8, 4);
        let mut bytes = buffer(range);
        peer.read(IMAGE, range, urgency, &mut bytes).map(|()| check(range, &bytes))
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| read(Urgency::Ahead));
        server.images.ahead_gate.wait_for(1);
        let error = read(Urgency::Ahead).expect_err("the turn is taken");
        assert!(error.is_passing(), "{error}");
        let text = "refused: many background reads are under way (busy)";
        assert_eq!(error.to_string(), text);
        read(Urgency::Demand).expect("pages");
        server.images.ahead_gate.open();
        first.join().expect("no panic").expect("pages");
    });
    read(Urgency::Ahead).expect("the turn came back");
}

#[test]
fn connections_are_no_more_than_allowed_and_who_gets_none_hears_it() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let limits = PeerLimits { connections_max: 2, ..hasty() };
    let peer = world.peer(&server, limits);
    let read = || {
        let range = range(9, 2);
        let mut bytes = buffer(range);
        peer.read(IMAGE, range, Urgency::Demand, &mut bytes).map(|()| check(range, &bytes))
    };
    read().expect("pages");
    server.images.gate.shut();
    std::thread::scope(|scope| {
        // Three at a time on two connections: two time out, and so does waiting for one of theirs.
        let readers: Vec<_> = (0..3).map(|_| scope.spawn(read)).collect();
        let errors = readers.into_iter().map(|reader| reader.join().expect("no panic"));
        for error in errors.map(|read| read.expect_err("the gate is shut")) {
            let is_either = matches!(error, PeerError::Timeout { .. } | PeerError::AllInUse { .. });
            assert!(is_either, "{error}");
        }
    });
    server.images.gate.open();
    assert!(peer.connections().0 + peer.connections().1 <= 2);
    read().expect("pages, again");
}

#[test]
fn a_member_has_a_limit_of_connections_and_is_told_of_it() {
    let world = World::new();
    let limits = ServiceLimits { connections_per_member_max: 1, ..ServiceLimits::default() };
    let server = world.serve(2, limits);
    let [first, second] = [(); 2].map(|()| world.peer(&server, PeerLimits::default()));
    let mut bytes = buffer(range(5, 1));
    first.read(IMAGE, range(5, 1), Urgency::Demand, &mut bytes).expect("a page");
    let error = second.read(IMAGE, range(5, 1), Urgency::Demand, &mut bytes).expect_err("one more");
    assert_eq!(error.to_string(), "refused: 1 connections are open already (busy)");
    drop(first);
    wait_until("the first connection has ended", || server.service.connections() == 0);
    second.read(IMAGE, range(5, 1), Urgency::Demand, &mut bytes).expect("a page");
    check(range(5, 1), &bytes);
}
