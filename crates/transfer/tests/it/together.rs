//! Background reads, several in one request.

use std::io::{self, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};
use vmfork_image::{AheadRead, BLOCK_PAGES, PageRange, PageSource as _};
use vmfork_transfer::proto::{Op, PREAMBLE, Request, Route};
use vmfork_transfer::{
    Holders, HostId, PageService, Peer, PeerLimits, PeerSource, ServiceLimits, Swarm, SwarmConfig,
    SwarmMember, Urgency,
};

use crate::common::*;
use crate::keys::name_of;
use crate::swarm::*;

/// Half of what is sent at once is enough to see it.
const COUNT: u64 = 4;

fn pieces(count: u64) -> Vec<PageRange> {
    (0..count).map(|at| range(at * UNIT, UNIT)).collect()
}

/// Read these. `each` is called for each.
fn read_each(
    source: &PeerSource,
    pieces: &[PageRange],
    mut each: impl FnMut(usize, io::Result<&[u8]>),
) {
    let mut bytes: Vec<_> = pieces.iter().map(|piece| buffer(*piece)).collect();
    let mut reads = Vec::new();
    for (range, bytes) in pieces.iter().zip(&mut bytes) {
        reads.push(AheadRead { range: *range, bytes });
    }
    source.read_ahead_all(&mut reads, &mut each);
}

/// Read these, and see that each is answered once and with its own bytes. → those that were not
/// available.
fn read_all(source: &PeerSource, pieces: &[PageRange]) -> Vec<PageRange> {
    let (mut answered, mut failed) = (vec![0; pieces.len()], Vec::new());
    read_each(source, pieces, |at, came| {
        answered[at] += 1;
        match came {
            Ok(bytes) => check(pieces[at], bytes),
            Err(_) => failed.push(pieces[at]),
        }
    });
    assert!(answered.iter().all(|times| *times == 1), "{answered:?}");
    failed
}

/// The right answer to a request.
fn answer(request: &Request) -> Vec<u8> {
    let mut bytes = buffer(request.range);
    let pages = request.range.pages().zip(bytes.as_chunks_mut::<PAGE>().0);
    pages.for_each(|(page, bytes)| fill(page, bytes));
    let (len, pages) = (u32::try_from(bytes.len()), u16::try_from(request.range.len()));
    let head = head(request.sequence, 0, 1, len.expect("small"));
    [&head[..], &pages.expect("few").to_le_bytes(), &bytes].concat()
}

#[test]
fn they_go_out_together() {
    let world = World::new();
    let all = pieces(COUNT);
    let patient = |requests: &[Request]| requests.iter().flat_map(answer).collect();
    let address = world.fake_together(2, all.len(), patient);
    let peer = world.peer_at(2, address, PeerLimits::default());
    let source = source([peer.clone()]);
    assert_eq!(read_all(&source, &all), []);
    let (requests, pages) = (peer.counters().requests.get(), peer.counters().ahead.pages.get());
    assert_eq!((requests, pages), (COUNT, COUNT * UNIT));
    let counters = source.counters();
    assert_eq!((counters.reads.get(), counters.pages.get()), (COUNT, COUNT * UNIT));
    assert_eq!((counters.failures.get(), counters.resourced.get()), (0, 0));
}

#[test]
fn what_a_host_that_ends_in_the_middle_has_not_answered_comes_from_the_next() {
    let world = World::new();
    let all = pieces(COUNT);
    let ends = |requests: &[Request]| {
        let mut answers = [answer(&requests[0]), answer(&requests[1])].concat();
        answers.truncate(answers.len() - 100);
        answers
    };
    let dying = world.peer_at(2, world.fake_together(2, all.len(), ends), PeerLimits::default());
    let server = world.serve(3, ServiceLimits::default());
    let next = world.peer(&server, PeerLimits::default());
    let source = source([dying.clone(), next.clone()]);
    assert_eq!(read_all(&source, &all), []);
    assert_eq!((dying.counters().requests.get(), dying.counters().failures.get()), (1, 1));
    assert_eq!(next.counters().requests.get(), COUNT - 1);
    assert_eq!(source.counters().resourced.get(), COUNT - 1);
    assert!(dying.is_avoided());
}

#[test]
fn what_is_refused_says_nothing_about_the_others() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    // Of the last piece, one page is lost.
    *server.images.lost_from.lock().expect("no panic") = Some((COUNT - 1) * UNIT + 3);
    let all = pieces(COUNT);
    let source = source([world.peer(&server, PeerLimits::default())]);
    assert_eq!(read_all(&source, &all), all[all.len() - 1..]);
    // A piece that no host can answer is not sent at all.
    let mut bytes = [buffer(range(0, 1)), buffer(range(2, 2))];
    let [one, two] = &mut bytes;
    let mut reads = [
        AheadRead { range: range(0, 1), bytes: one },
        AheadRead { range: range(2, 1), bytes: two },
    ];
    let mut answers = Vec::new();
    source.read_ahead_all(&mut reads, &mut |at, came| answers.push((at, came.is_ok())));
    answers.sort_unstable();
    assert_eq!(answers, [(0, true), (1, false)]);
}

/// The first of two hosts has asked the origin for all of `pieces`, so that this sends the second
/// one there. → both, and what the second reads from.
fn second_of_two(pieces: &[PageRange]) -> (Vec<Node>, PeerSource) {
    let nodes = nodes(receivers(2));
    let (first, _) = nodes[1].source(&nodes, SwarmConfig::default());
    assert_eq!(read_all(&first, pieces), []);
    let (source, _) = nodes[2].source(&nodes, SwarmConfig::default());
    (nodes, source)
}

#[test]
fn who_waits_for_one_is_not_without_those_that_came_before_it() {
    let all = pieces(COUNT);
    let (nodes, source) = second_of_two(&all);
    let there = &nodes[1].cache;
    there.expects_more.store(true, Ordering::Relaxed);
    there.put(range(0, (COUNT - 1) * UNIT));
    let (came, heard) = channel();
    std::thread::scope(|scope| {
        let (source, all) = (&source, &all);
        scope.spawn(move || {
            read_each(source, all, |at, answer| {
                came.send((at, answer.is_ok())).expect("somebody listens");
            });
        });
        let next = || heard.recv_timeout(LONG).expect("an answer");
        let before: Vec<_> = (0..COUNT - 1).map(|_| next()).collect();
        assert_eq!(before, [(0, true), (1, true), (2, true)]);
        assert!(heard.recv_timeout(Duration::from_millis(20)).is_err(), "it is not there");
        there.put(all[all.len() - 1]);
        assert_eq!(next(), (3, true));
    });
    let counters = source.counters();
    assert_eq!((counters.redirected.get(), counters.failures.get()), (COUNT, 0));
    assert_eq!((counters.holder_pages.get(), counters.origin_pages.get()), (COUNT * UNIT, 0));
    assert_eq!(counters.unverified_pages.get(), 0);
}

#[test]
fn a_forged_page_among_them_is_not_used_and_comes_from_the_origin() {
    let all = pieces(COUNT);
    let (nodes, source) = second_of_two(&all);
    nodes[1].cache.put(range(0, COUNT * UNIT));
    nodes[1].cache.lies_about.store(UNIT + 5, Ordering::Relaxed);
    assert_eq!(read_all(&source, &all), []);
    let counters = source.counters();
    assert_eq!((counters.forged.get(), counters.origin_pages.get()), (1, UNIT));
}

#[test]
fn each_answer_has_its_own_time() {
    let world = World::new();
    let all = pieces(COUNT);
    // Together they take longer than one may.
    let slow = |request: &Request, _, _| {
        let until = Instant::now() + Duration::from_millis(400);
        wait_until("it answers", || Instant::now() >= until);
        Some(answer(request))
    };
    let peer = world.peer_at(2, world.fake_in_turn(2, slow), hasty());
    let source = source([Arc::clone(&peer)]);
    assert_eq!(read_all(&source, &all), []);
    assert_eq!((peer.counters().failures.get(), peer.counters().connections.get()), (0, 1));
}

#[test]
fn who_is_refused_and_sent_away_has_not_lost_the_host() {
    let world = World::new();
    let limits = ServiceLimits { connections_per_member_max: 0, ..ServiceLimits::default() };
    let server = world.serve(2, limits);
    let peer = world.peer(&server, PeerLimits::default());
    let all = pieces(COUNT);
    assert_eq!(read_all(&source([Arc::clone(&peer)]), &all).len(), all.len());
    assert!(!peer.is_avoided(), "it has answered");
}

#[test]
fn all_of_them_have_the_patience_of_one() {
    let world = World::new();
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let patience = Duration::from_millis(400);
    let source = source([world.peer_at(2, closed, hasty())]).with_patience(patience);
    let (all, began) = (pieces(COUNT), Instant::now());
    assert_eq!(read_all(&source, &all).len(), all.len());
    assert!((patience..patience * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
}

/// The origin of seven pieces that are read together fails on its first connection, and does well
/// on the next: another host is not asked.
fn is_asked_again(
    limits: PeerLimits,
    answers: impl Fn(&Request, usize, usize) -> Option<Vec<u8>> + Send + Sync + 'static,
) {
    let world = World::new();
    let all = pieces(7);
    let origin = world.peer_at(2, world.fake_in_turn(2, answers), limits);
    let server = world.serve(3, ServiceLimits::default());
    let other = world.peer(&server, PeerLimits::default());
    let swarm = Swarm::new(IMAGE, WHOLE, HostId(1), SwarmConfig::default());
    swarm.set_members([SwarmMember { id: HostId(2), peer: Arc::clone(&origin), origin: true }]);
    let holders = Holders::new([Arc::clone(&other)]);
    let source = PeerSource::new(IMAGE, Arc::new(holders)).with_swarm(Arc::new(swarm));
    assert_eq!(read_all(&source, &all), []);
    let asked = |peer: &Peer| peer.counters().requests.get();
    assert_eq!((asked(&origin), asked(&other)), (7, 0), "it is asked again a moment later");
}

#[test]
fn a_connection_that_ends_is_one_failure_however_many_are_not_answered() {
    is_asked_again(PeerLimits::default(), |request, connection, at| {
        (connection > 0 || at == 0).then(|| answer(request))
    });
}

#[test]
fn so_is_one_that_stands_still() {
    let limits = PeerLimits { answer: Duration::from_millis(300), ..PeerLimits::default() };
    is_asked_again(limits, |request, connection, at| {
        if connection == 0 && at > 0 {
            std::thread::park_timeout(LONG);
        }
        Some(answer(request))
    });
}

#[test]
fn who_takes_nothing_is_cut_off_also_while_it_is_to_wait() {
    let nodes = nodes(receivers(1));
    let [origin, node] = nodes.as_slice() else { panic!("two") };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let limits = ServiceLimits { io: Duration::from_millis(300), ..ServiceLimits::default() };
    let (tls, pages) = (Arc::clone(&origin.keys.server), Arc::clone(&origin.cache));
    origin.cache.has.lock().expect("no panic").retain(|page| *page < UNIT);
    let service = PageService::start(listener, tls, pages, limits).expect("a service");
    let tls = ClientConnection::new(Arc::clone(&node.keys.client), name_of(ORIGIN));
    let tcp = TcpStream::connect(service.address()).expect("a connection");
    let mut slow = StreamOwned::new(tls.expect("a configuration"), tcp);
    // What is there, of which less than is sent at once, and what is not: far more than sockets
    // hold.
    let ask = |range, route| Request {
        image: IMAGE,
        range,
        op: Op::Read,
        urgency: Urgency::Ahead,
        route,
        may_compress: false,
        first: None,
        sequence: 0,
    };
    let two = [ask(range(0, UNIT - 2), Route::Insist), ask(range(UNIT, 1), Route::Redirected)];
    let two = two.iter().flat_map(Request::encode).collect::<Vec<_>>();
    slow.write_all(&[&PREAMBLE[..], &two.repeat(600)].concat()).expect("sent");
    let began = Instant::now();
    wait_until("it is answered", || service.connections() == 1);
    wait_until("who takes nothing is cut off", || service.connections() == 0);
    assert!(began.elapsed() < LONG / 3, "as if nothing were to be sent: {:?}", began.elapsed());
}

/// What other hosts gave is compared with the origin's sums. Those of a block are requested once,
/// however many pieces of it come side by side.
#[test]
fn sums_of_a_block_are_asked_for_once() {
    let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..WHOLE))];
    let nodes = nodes(all);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    let [origin, _, holder] = &nodes[..] else { panic!("three") };
    origin.cache.ahead_gate.shut();
    std::thread::scope(|scope| {
        for unit in (0..4).map(|at| range(at * UNIT, UNIT)) {
            let source = &source;
            scope.spawn(move || {
                let mut bytes = buffer(unit);
                source.read_ahead(unit, &mut bytes).expect("from host 2");
                check(unit, &bytes);
            });
        }
        wait_until("all are there", || holder.service.counters().pages.get() == 4 * UNIT);
        origin.cache.ahead_gate.wait_for(1);
        origin.cache.ahead_gate.open();
    });
    assert_eq!(source.counters().holder_pages.get(), 4 * UNIT);
    let units = usize::try_from(BLOCK_PAGES / UNIT).expect("few");
    assert_eq!(origin.cache.ahead_gate.passed(), units, "each was read once to be summed up");
}
