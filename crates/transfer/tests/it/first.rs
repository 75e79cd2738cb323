//! A demanded page, before its neighbours.

use std::cell::RefCell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustls::{ClientConnection, StreamOwned};
use vmfork_image::{PageIdx, PageSource as _};
use vmfork_transfer::proto::{HEAD_BYTES, Op, PREAMBLE, Request, Route};
use vmfork_transfer::{PeerLimits, ServiceLimits, Urgency};

use crate::chaos;
use crate::common::*;
use crate::keys::name_of;
use crate::swarm::{Cache, ORIGIN, UNIT, WHOLE, nodes, quick};

#[test]
fn all_come_as_they_are_whichever_is_first() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let source = source([world.peer(&server, PeerLimits::default())]);
    let wanted = range(3, 16);
    for page in wanted.pages() {
        let mut bytes = buffer(wanted);
        let mut came = |bytes: &[u8]| check(page.range(), bytes);
        source.read_first(wanted, page, &mut bytes, &mut came).expect("pages");
        check(wanted, &bytes);
    }
    assert_eq!(source.counters().pages.get(), 16 * 16);
    assert_eq!(server.service.counters().pages.get(), 16 * 16, "each is sent once");
}

#[test]
fn it_is_there_although_its_neighbours_never_come() {
    let world = World::new();
    let (wanted, page) = (range(32, UNIT), PageIdx(36));
    let address = world.fake_in_turn(2, |request, _, _| {
        let mut both = chaos::right(request);
        both.truncate(HEAD_BYTES + 2 + PAGE);
        Some(both)
    });
    let limits = PeerLimits { answer: Duration::from_millis(300), ..PeerLimits::default() };
    let source = source([world.peer_at(2, address, limits)]);
    let told = RefCell::new(Vec::new());
    let mut came = |bytes: &[u8]| {
        check(page.range(), bytes);
        told.borrow_mut().push(page);
    };
    let error = source.read_first(wanted, page, &mut buffer(wanted), &mut came);
    error.expect_err("the others are cut off");
    assert_eq!(*told.borrow(), [page]);
}

#[test]
fn it_is_sent_before_its_neighbours_are_read() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    server.images.has_all.store(true, Ordering::Relaxed);
    server.images.several_gate.shut();
    let source = source([world.peer(&server, PeerLimits::default())]);
    let wanted = range(32, UNIT);
    for page in wanted.pages() {
        let mut bytes = buffer(wanted);
        let mut told = false;
        let mut came = |bytes: &[u8]| {
            check(page.range(), bytes);
            told = true;
            server.images.several_gate.open();
        };
        source.read_first(wanted, page, &mut bytes, &mut came).expect("pages");
        check(wanted, &bytes);
        assert!(told, "page {page} comes alone");
        server.images.several_gate.shut();
    }
    server.images.several_gate.open();
    assert_eq!(server.service.counters().pages.get(), UNIT * UNIT, "each is sent once");
}

/// Whether they are there is looked up before; by the time they are read they may be gone.
#[test]
fn neighbours_that_are_gone_by_then_end_the_connection() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    server.images.has_all.store(true, Ordering::Relaxed);
    let (wanted, page) = (range(32, UNIT), PageIdx(36));
    for lost_from in [wanted.end().0 - 1, wanted.end().0] {
        *server.images.lost_from.lock().expect("no panic") = Some(lost_from);
        let peer = world.peer(&server, PeerLimits::default());
        let source = source([Arc::clone(&peer)]).with_patience(Duration::ZERO);
        let mut told = 0;
        let mut came = |bytes: &[u8]| {
            check(page.range(), bytes);
            told += 1;
        };
        let error = source.read_first(wanted, page, &mut buffer(wanted), &mut came);
        let error = error.expect_err("the others are lost").to_string();
        assert!(error.contains("the connection ended before there was an answer"), "{error}");
        assert!(told > 0 && peer.connections() == (0, 0), "{told}");
    }
    *server.images.lost_from.lock().expect("no panic") = None;
    let source = source([world.peer(&server, PeerLimits::default())]);
    let mut bytes = buffer(wanted);
    source.read_first(wanted, page, &mut bytes, &mut |_| ()).expect("they are back");
    check(wanted, &bytes);
}

/// A redirected host waits there for pages that are in flight; not once some are sent.
#[test]
fn what_has_been_sent_is_not_sent_again_when_the_others_come_later() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    server.images.has_all.store(true, Ordering::Relaxed);
    server.images.several_absent.store(1, Ordering::Relaxed);
    let tls = ClientConnection::new(Arc::clone(&world.client.client), name_of(2));
    let tcp = TcpStream::connect(server.service.address()).expect("a connection");
    let mut asking = StreamOwned::new(tls.expect("a configuration"), tcp);
    let request = Request {
        image: IMAGE,
        range: range(32, UNIT),
        op: Op::Read,
        urgency: Urgency::Demand,
        route: Route::Redirected,
        may_compress: false,
        first: Some(PageIdx(37)),
        sequence: 0,
    };
    asking.write_all(&[&PREAMBLE[..], &request.encode()].concat()).expect("sent");
    let mut answers = Vec::new();
    let _ended_without_a_word = asking.read_to_end(&mut answers);
    assert_eq!(answers.len(), HEAD_BYTES + 2 + PAGE, "the page, and nothing else");
    check(PageIdx(37).range(), &answers[HEAD_BYTES + 2..]);
}

/// What a host that is not the image's origin gives is used only if it is what the origin has; also
/// early.
#[test]
fn a_forged_one_is_not_told_of() {
    let all = [(ORIGIN, Cache::of(0..WHOLE)), (1, Cache::of([])), (2, Cache::of(0..WHOLE))];
    let nodes = nodes(all);
    nodes[2].cache.lies_about.store(100, Ordering::Relaxed);
    let (source, swarm) = nodes[1].source(&nodes, quick());
    swarm.refresh_within(Duration::from_secs(20));
    for at in 0..10 {
        let unit = range(at * UNIT, UNIT);
        let page = if unit.contains(PageIdx(100)) { PageIdx(100) } else { unit.start() };
        let mut bytes = buffer(unit);
        let mut came = |bytes: &[u8]| check(page.range(), bytes);
        source.read_first(unit, page, &mut bytes, &mut came).expect("from a host that has it");
        check(unit, &bytes);
    }
    assert_eq!(source.counters().forged.get(), 1);
}

#[test]
fn a_refusal_behind_it_is_no_answer() {
    let world = World::new();
    let (wanted, page) = (range(32, UNIT), PageIdx(36));
    let elsewhere = [&9_u64.to_le_bytes()[..], &[7; 16 * 15]].concat();
    for (status, text) in [(3, b"no".to_vec()), (9, elsewhere)] {
        let address = world.fake_in_turn(2, move |request, _, _| {
            let mut both = chaos::right(request);
            both.truncate(HEAD_BYTES + 2 + PAGE);
            let len = u32::try_from(text.len()).expect("short");
            Some([&both, &head(request.sequence, status, 0, len)[..], &text].concat())
        });
        let peer = world.peer_at(2, address, PeerLimits::default());
        let source = source([Arc::clone(&peer)]);
        let mut came = |bytes: &[u8]| check(page.range(), bytes);
        let error = source.read_first(wanted, page, &mut buffer(wanted), &mut came);
        let error = error.expect_err("the others do not come").to_string();
        assert!(error.contains("an answer that makes no sense"), "{error}");
        assert_eq!(peer.connections(), (0, 0), "it is closed");
    }
}
