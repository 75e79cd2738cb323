use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_image::PageSource as _;
use vmfork_transfer::{Holders, Peer, PeerError, PeerLimits, PeerSource, ServiceLimits, Urgency};

use crate::common::*;

fn read_from(peer: &Arc<Peer>, start: u64, len: u64) -> Result<(), PeerError> {
    let range = range(start, len);
    let mut bytes = buffer(range);
    peer.read(IMAGE, range, Urgency::Demand, &mut bytes).map(|()| check(range, &bytes))
}

fn line(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    line
}

#[test]
fn pages_come_from_the_next_host_when_one_dies_in_the_middle() {
    let world = World::new();
    let servers = [2, 3].map(|number| world.serve(number, ServiceLimits::default()));
    let peers = servers.each_ref().map(|server| world.peer(server, PeerLimits::default()));
    let source = source(peers.clone());
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..6u64)
            .map(|reader| {
                let source = &source;
                scope.spawn(move || {
                    for step in 0..60 {
                        let range = range((reader * 700 + step * 11) % (PAGES - 16), 16);
                        let mut bytes = buffer(range);
                        source.read(range, &mut bytes).expect("pages, from whichever host");
                        check(range, &bytes);
                    }
                })
            })
            .collect();
        wait_until("reads are under way", || peers[0].counters().requests.get() > 20);
        assert_eq!(servers[0].service.stop(), 0);
        readers.into_iter().for_each(|reader| reader.join().expect("every read succeeds"));
    });
    assert_eq!(source.counters().reads.get(), 6 * 60);
    assert_eq!(source.counters().failures.get(), 0);
    assert!(peers[1].counters().requests.get() > 0);
    assert!(peers[0].is_avoided() && !peers[1].is_avoided());
}

#[test]
fn a_host_that_stalls_is_asked_last_from_then_on() {
    let world = World::new();
    let servers = [2, 3].map(|number| world.serve(number, ServiceLimits::default()));
    let peers = servers.each_ref().map(|server| world.peer(server, hasty()));
    let source = source(peers.clone());
    servers[0].images.gate.shut();
    for start in 0..5 {
        let range = range(start * 100, 16);
        let mut bytes = buffer(range);
        source.read(range, &mut bytes).expect("pages of the second");
        check(range, &bytes);
    }
    assert_eq!(peers[0].counters().failures.get(), 1, "asked once, and then no more");
    assert_eq!(source.counters().resourced.get(), 1);
    servers[0].images.gate.open();
    // As the last one it is asked again.
    servers[1].service.stop();
    let mut bytes = buffer(range(7, 2));
    source.read(range(7, 2), &mut bytes).expect("pages of the first");
    check(range(7, 2), &bytes);
}

#[test]
fn a_host_without_the_page_is_asked_last_too() {
    let world = World::new();
    let servers = [2, 3].map(|number| world.serve(number, ServiceLimits::default()));
    let peers = servers.each_ref().map(|server| world.peer(server, PeerLimits::default()));
    *servers[0].images.lost_from.lock().expect("no panic") = Some(0);
    let source = source(peers.clone());
    for start in 0..5 {
        let mut bytes = buffer(range(start, 3));
        source.read(range(start, 3), &mut bytes).expect("pages of the second");
        check(range(start, 3), &bytes);
    }
    assert_eq!(peers[0].counters().failures.get(), 1);
}

#[test]
fn answers_that_are_none_are_refused_and_the_next_host_is_asked() {
    let world = World::new();
    let good = world.serve(9, ServiceLimits::default());
    let good = world.peer(&good, PeerLimits::default());
    let page = [1u8; PAGE];
    type Answer = Box<dyn Fn(u16) -> Vec<u8> + Send>;
    let bad: [(&str, Answer); 8] = [
        ("the connection ended", Box::new(|_| Vec::new())),
        ("the connection ended", Box::new(|n| head(n, 0, 1, 0)[..9].to_vec())),
        (
            "the connection ended",
            Box::new(move |n| {
                [&head(n, 0, 1, 2 * 4096)[..], &[2, 0][..], &page, &page[..99]].concat()
            }),
        ),
        (
            "runs of 1 pages in answer to 2",
            Box::new(move |n| [&head(n, 0, 1, 4096)[..], &[1, 0][..], &page].concat()),
        ),
        (
            "runs of 3 pages in answer to 2",
            Box::new(move |n| [&head(n, 0, 1, 4096)[..], &[3, 0x80][..], &page].concat()),
        ),
        (
            "4096 bytes, where those of 2 pages were to come",
            Box::new(move |n| [&head(n, 0, 1, 4096)[..], &[2, 0][..], &page].concat()),
        ),
        ("an answer to request 7, and 0 was asked", Box::new(|_| head(7, 0, 1, 0))),
        (
            "status 83, which is not known here",
            Box::new(|n| [&n.to_le_bytes()[..], b"SSH-2.0-OpenSSH_9.2"].concat()),
        ),
    ];
    for (expected, answer) in bad {
        let address = world.fake(2, move |request| answer(request.sequence));
        let peer = world.peer_at(2, address, PeerLimits::default());
        let error = line(&read_from(&peer, 14, 2).expect_err(expected));
        assert!(error.contains(expected), "{error}, and not {expected}");
        let source = source([peer, Arc::clone(&good)]);
        let mut bytes = buffer(range(14, 2));
        source.read(range(14, 2), &mut bytes).expect("pages of the other host");
        check(range(14, 2), &bytes);
    }
}

#[test]
fn when_no_host_has_a_page_the_error_names_it_and_what_each_host_said() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    *server.images.lost_from.lock().expect("no panic") = Some(40);
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let peers = [world.peer(&server, hasty()), world.peer_at(3, closed, hasty())];
    let source = source(peers.clone());
    let mut bytes = buffer(range(39, 2));
    let error = source.read(range(39, 2), &mut bytes).expect_err("no host has it").to_string();
    let expected = format!(
        "pages 39+2 of image 0000000000000abc/100000007 from no host: host2 ({}): refused: page 40 went with its VM \
         (page-lost); host3 ({closed}): connect to {closed}: Connection refused (os error 111)",
        server.service.address()
    );
    assert_eq!(error, expected);
    assert_eq!(source.counters().failures.get(), 1);
    source.holders().set([]);
    let error = source.read(range(39, 2), &mut bytes).expect_err("no host").to_string();
    assert_eq!(error, "no other host has pages 39+2 of image 0000000000000abc/100000007");
}

/// Else one that is busy would be taken for one that has gone, and what others say of its pages be
/// believed.
#[test]
fn who_has_little_time_to_connect_does_not_say_that_a_host_is_not_there() {
    let world = World::new();
    // The kernel takes the connection, but no program takes the handshake.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let (short, long) = (Duration::from_millis(100), Duration::from_millis(200));
    let limits = PeerLimits { connect: long, answer: short, ..PeerLimits::default() };
    let error = read_from(&world.peer_at(2, address, limits), 0, 1).expect_err("no handshake");
    assert!(matches!(error, PeerError::Timeout { timeout } if timeout == short), "{error}");
    let limits = PeerLimits { connect: short, answer: long, ..limits };
    let error = read_from(&world.peer_at(2, address, limits), 0, 1).expect_err("no handshake");
    assert!(matches!(error, PeerError::Connect { .. }), "{error}");
}

#[test]
fn a_host_that_can_not_be_connected_to_is_left_alone_for_a_while() {
    let world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    drop(listener);
    let peer = world.peer_at(2, address, PeerLimits::default());
    let error = read_from(&peer, 0, 1).expect_err("no host listens");
    assert!(matches!(error, PeerError::Connect { .. }), "{error}");
    // Not within 100 ms of the first: nothing between them takes as long, or else it is tried
    // again.
    let errors: Vec<_> = (0..50).map(|_| read_from(&peer, 0, 1).expect_err("no one")).collect();
    let backed_off = errors.iter().filter(|e| matches!(e, PeerError::BackingOff { .. })).count();
    assert!(backed_off >= 40, "{backed_off} of 50");
    // It is back, and a read that has patience finds it.
    let listener = TcpListener::bind(address).expect("the same port");
    let server = world.serve_on(listener, 2, ServiceLimits::default());
    let source = source([peer]).with_patience(LONG);
    let mut bytes = buffer(range(3, 5));
    source.read(range(3, 5), &mut bytes).expect("pages");
    check(range(3, 5), &bytes);
    drop(server);
}

#[test]
fn a_read_that_found_no_host_begins_again_with_another_list() {
    let world = World::new();
    let server = world.serve(3, ServiceLimits::default());
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let dead = world.peer_at(2, closed, hasty());
    let holders = Arc::new(Holders::new([Arc::clone(&dead)]));
    let source = PeerSource::new(IMAGE, Arc::clone(&holders)).with_patience(LONG);
    std::thread::scope(|scope| {
        let read = scope.spawn(|| {
            let mut bytes = buffer(range(3, 5));
            source.read(range(3, 5), &mut bytes).map(|()| check(range(3, 5), &bytes))
        });
        wait_until("it was tried", || dead.counters().failures.get() > 0);
        holders.set([Arc::clone(&dead), world.peer(&server, PeerLimits::default())]);
        read.join().expect("no panic").expect("pages of the new one");
    });
    assert_eq!(holders.peers().len(), 2);
}

#[test]
fn a_connection_that_ended_while_it_was_unused_is_made_again() {
    let world = World::new();
    let idle = Duration::from_millis(500);
    let server = world.serve(2, ServiceLimits { idle, ..ServiceLimits::default() });
    let peer = world.peer(&server, PeerLimits::default());
    read_from(&peer, 0, 3).expect("pages");
    wait_until("the service ends it", || server.service.connections() == 0);
    assert_eq!(peer.connections(), (1, 0), "of which this side knows nothing yet");
    read_from(&peer, 3, 3).expect("pages");
    let counters = peer.counters();
    assert_eq!((counters.retries.get(), counters.connections.get()), (1, 2));
    assert_eq!(counters.failures.get(), 0);
}

#[test]
fn a_connection_that_was_idle_for_long_is_not_used_again() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let idle = Duration::from_millis(50);
    let peer = world.peer(&server, PeerLimits { idle, ..PeerLimits::default() });
    read_from(&peer, 0, 3).expect("pages");
    let used = Instant::now();
    wait_until("it is too old", || used.elapsed() > idle);
    read_from(&peer, 3, 3).expect("pages");
    let counters = peer.counters();
    assert_eq!((counters.retries.get(), counters.connections.get()), (0, 2));
    wait_until("the old one is gone there too", || server.service.connections() == 1);
}

#[test]
fn stopping_ends_reads_that_are_under_way_and_leaves_no_connection() {
    let world = World::new();
    let stop = Duration::from_millis(50);
    let server = world.serve(2, ServiceLimits { stop, ..ServiceLimits::default() });
    let address = server.service.address();
    let peer = world.peer(&server, PeerLimits::default());
    read_from(&peer, 0, 3).expect("pages");
    server.images.gate.shut();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|n| {
                scope.spawn({
                    let peer = &peer;
                    move || read_from(peer, n * 50, 8)
                })
            })
            .collect();
        server.images.gate.wait_for(4);
        // Their threads wait for pages that do not come: `stop` reports them, and they end later.
        assert_eq!(server.service.stop(), 4);
        for reader in readers {
            let error = reader.join().expect("no panic").expect_err("the service stopped");
            assert!(error.is_passing(), "{}", line(&error));
        }
        server.images.gate.open();
    });
    wait_until("they have ended", || server.service.connections() == 0);
    assert_eq!(server.service.stop(), 0, "again, and nothing is left");
    let error = read_from(&peer, 0, 3).expect_err("no host listens");
    assert!(error.is_passing(), "{}", line(&error));
    drop(server);
    TcpListener::bind(address).expect("the port is free");
}
