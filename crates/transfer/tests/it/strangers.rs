//! A client that is no member gets nothing, and costs little.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustls::{ClientConfig, ClientConnection, StreamOwned};
use vmfork_transfer::proto::{Op, PREAMBLE, Request, Route};
use vmfork_transfer::{
    Peer, PeerConfig, PeerError, PeerLimits, RefusalKind, ServiceLimits, Urgency,
};

use crate::common::*;
use crate::keys::{Cluster, name_of};

fn peer_with(server: &Server, tls: &Arc<ClientConfig>) -> Peer {
    let config = PeerConfig {
        name: "host2".to_owned(),
        address: server.service.address(),
        server_name: name_of(2),
        tls: Arc::clone(tls),
        compress: false,
    };
    Peer::new(config, PeerLimits::default())
}

fn read(peer: &Peer) -> Result<(), PeerError> {
    let mut bytes = buffer(range(5, 1));
    peer.read(IMAGE, range(5, 1), Urgency::Demand, &mut bytes).map(|()| check(range(5, 1), &bytes))
}

#[test]
fn another_clusters_host_a_nameless_one_and_one_that_is_no_member_get_nothing() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let stranger = Cluster::new().host(1);
    // That one does not believe the server either; what counts here is that nothing is read.
    let error = read(&peer_with(&server, &stranger.client)).expect_err("another cluster");
    assert!(matches!(error, PeerError::Connect { .. }), "{error}");
    let error = read(&peer_with(&server, &world.client.nameless)).expect_err("no certificate");
    assert!(matches!(error, PeerError::Lost(_) | PeerError::Connect { .. }), "{error}");
    // Signed by this cluster's authority, but of no member.
    let left = world.cluster.host(7);
    let error = read(&peer_with(&server, &left.client)).expect_err("no member");
    assert_eq!(error.to_string(), "refused: no member has this key (not-member)");
    assert_eq!(server.service.counters().requests.get(), 0);
    assert_eq!(server.service.counters().connections.get(), 0);
    read(&peer_with(&server, &world.client.client)).expect("a member's page");
}

#[test]
fn a_member_that_is_removed_is_cut_off_in_the_middle() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let peer = peer_with(&server, &world.client.client);
    read(&peer).expect("a page");
    server.images.gone.lock().expect("no panic").push(1);
    let error = read(&peer).expect_err("not a member any more");
    let PeerError::Refused(refusal) = error else { panic!("{error}") };
    assert_eq!(refusal.kind, RefusalKind::NotMember);
    wait_until("its connection is closed", || server.service.connections() == 0);
}

#[test]
fn idle_connections_of_who_left_are_closed_and_others_stay() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let (peer, other) = (peer_with(&server, &world.client.client), member(&world, &server));
    read(&peer).expect("a page");
    let idle = || server.service.connections();
    assert_eq!(idle(), 2);
    server.service.keep(|member| member == 1);
    read(&peer).expect("a member's connection stays");
    drop(other);
    wait_until("the other end of it was closed", || idle() == 1);
    server.service.keep(|member| member != 1);
    wait_until("it is closed without a request", || idle() == 0);
}

#[test]
fn a_host_that_answers_in_anothers_name_is_not_believed() {
    let world = World::new();
    let server = world.serve(3, ServiceLimits::default());
    let error = read(&peer_with(&server, &world.client.client)).expect_err("host 3, not 2");
    let PeerError::Connect { source, .. } = error else { panic!("{error}") };
    assert!(source.to_string().contains("certificate not valid for name"), "{source}");
}

#[test]
fn garbage_ends_a_connection_and_the_service_serves_on() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 2000], &[0xff; 70_000], &[0x16, 3, 1]] {
        let mut tcp = TcpStream::connect(server.service.address()).expect("a connection");
        let _reset = tcp.write_all(garbage);
        let _reset = tcp.shutdown(std::net::Shutdown::Write);
        // An alert at most.
        assert!(end_of(tcp) < 50);
    }
    wait_until("they have ended", || server.service.connections() == 0);
    assert_eq!(server.service.counters().handshakes_failed.get(), 4);
    read(&peer_with(&server, &world.client.client)).expect("a page");
}

/// A member that says whatever it likes.
fn member(world: &World, server: &Server) -> StreamOwned<ClientConnection, TcpStream> {
    let tls = ClientConnection::new(Arc::clone(&world.client.client), name_of(2));
    let tcp = TcpStream::connect(server.service.address()).expect("a connection");
    tcp.set_read_timeout(Some(LONG)).expect("a socket");
    StreamOwned::new(tls.expect("a configuration"), tcp)
}

#[test]
fn a_member_that_speaks_otherwise_is_told_what_is_wrong() {
    let world = World::new();
    let server = world.serve(2, ServiceLimits::default());
    let request = Request {
        image: IMAGE,
        range: range(5, 1),
        op: Op::Read,
        urgency: Urgency::Demand,
        route: Route::Direct,
        may_compress: false,
        first: None,
        sequence: 0x1234,
    };
    let good = request.encode();
    let mut huge = good;
    huge[24..28].fill(0xff);
    let older = *b"VFPG\x09\0\0\0";
    let cases = [
        (&PREAMBLE, huge, "4294967295 pages at a time; it must be 1 to 512"),
        (&older, good, "version 9 of the protocol; here is 4"),
        (b"POST /v1", good, "no client for pages: it begins with `POST`"),
    ];
    for (preamble, request, expected) in cases {
        let mut stream = member(&world, &server);
        stream.write_all(&[&preamble[..], &request].concat()).expect("sent");
        let mut answer = Vec::new();
        // It ends without TLS's goodbye.
        let _cut = std::io::Read::read_to_end(&mut stream, &mut answer);
        let (head, text) = answer.split_at(16);
        assert_eq!(head[..3], [0x34, 0x12, 6], "the sequence, and a bad request");
        assert_eq!(String::from_utf8_lossy(text), expected);
    }
    let refused = server.service.counters().refusals();
    let bad = refused.filter(|(kind, _)| *kind == RefusalKind::BadRequest).map(|(_, n)| n);
    assert_eq!(bad.sum::<u64>(), 3);
}

#[test]
fn who_stands_still_is_cut_off() {
    let world = World::new();
    let io = Duration::from_secs(1);
    let server = world.serve(2, ServiceLimits { io, ..ServiceLimits::default() });
    // In the handshake.
    let silent = TcpStream::connect(server.service.address()).expect("a connection");
    assert_eq!(end_of(silent), 0);
    // Within a request.
    let mut half = member(&world, &server);
    half.write_all(&[&PREAMBLE[..], &[1, 2, 3]].concat()).expect("sent");
    wait_until("half a request is too old", || server.service.connections() == 0);
    // By not taking what it asked for: far more than sockets hold.
    let mut slow = member(&world, &server);
    slow.write_all(&PREAMBLE).expect("sent");
    for sequence in 0..64 {
        let ask = Request {
            image: IMAGE,
            range: range(0, 512),
            op: Op::Read,
            urgency: Urgency::Demand,
            route: Route::Direct,
            may_compress: false,
            first: None,
            sequence,
        };
        if slow.write_all(&ask.encode()).is_err() {
            break;
        }
    }
    wait_until("who takes nothing is cut off", || server.service.connections() == 0);
    read(&peer_with(&server, &world.client.client)).expect("a page");
}

#[test]
fn strangers_in_their_handshake_take_only_a_limited_number_of_places() {
    let world = World::new();
    let limits = ServiceLimits { handshakes_max: 2, ..ServiceLimits::default() };
    let server = world.serve(2, limits);
    let connect = || TcpStream::connect(server.service.address()).expect("a connection");
    let peer = peer_with(&server, &world.client.client);
    read(&peer).expect("a page");
    let waiting = [connect(), connect()];
    wait_until("both are in their handshake", || server.service.connections() == 3);
    assert_eq!(end_of(connect()), 0);
    let turned_away = || server.service.counters().turned_away.get();
    wait_until("it is counted", || turned_away() == 1);
    read(&peer).expect("who is connected already is served");
    drop(waiting);
    wait_until("the places are free", || server.service.connections() == 1);
    read(&peer_with(&server, &world.client.client)).expect("a page");
}
