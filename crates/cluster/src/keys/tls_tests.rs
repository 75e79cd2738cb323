//! Handshakes in memory, both ends in one thread.

use std::io::Cursor;
use std::time::Duration;

use rustls::server::Acceptor;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

use super::*;
use crate::id::HostId;
use crate::join::{Cluster, Newcomer, admit};
use crate::membership::Now;
use crate::roster::Roster;
use crate::token::Tokens;

const CONTROL: &[u8] = b"vmfork-control/1";
const OTHER: &[u8] = b"vmfork-other/1";
/// Far more than a handshake has flights.
const FLIGHTS_MAX: usize = 20;

fn now() -> Now {
    Now { monotonic: Duration::from_secs(1), unix_s: 1000 }
}

struct Host {
    tls: Tls,
    roster: Roster,
    id: HostId,
}

fn host(cluster: Cluster) -> Host {
    let Cluster { authority, identity, members } = cluster;
    let (id, roster) = (identity.host(), Roster::new(members));
    let tls = Tls::new(identity, &authority, roster.clone()).expect("certified");
    Host { tls, roster, id }
}

/// A cluster of two, and the authority that both have.
fn pair() -> (Host, Host, Authority) {
    let mut first = Cluster::init("a", "10.0.0.1:7070").expect("good");
    let mut tokens = Tokens::default();
    let print = first.identity.fingerprint();
    let token = tokens.issue("10.0.0.1:7070", print, 60, 1000).expect("room");
    let newcomer = Newcomer::new(token, "b", "10.0.0.2:7070").expect("good");
    let answer =
        admit(newcomer.request(), &mut tokens, &mut first.members, &first.authority, now())
            .expect("admitted");
    let second = newcomer.finish(&answer, now()).expect("joined");
    let authority =
        Authority::from_pem(&first.authority.certificate_pem(), &first.authority.key_pem())
            .expect("its own");
    (host(first), host(second), authority)
}

/// Both ends after their handshake.
fn connect(
    client: &Arc<ClientConfig>,
    wanted: HostId,
    server: &Arc<ServerConfig>,
) -> Result<(ClientConnection, ServerConnection), rustls::Error> {
    let mut client = ClientConnection::new(Arc::clone(client), wanted.server_name())?;
    let mut server = ServerConnection::new(Arc::clone(server))?;
    for _ in 0..FLIGHTS_MAX {
        let mut flight = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut flight).expect("memory");
        }
        let mut read = Cursor::new(&flight);
        while read.position() < flight.len() as u64 {
            server.read_tls(&mut read).expect("memory");
            server.process_new_packets()?;
        }
        let mut flight = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut flight).expect("memory");
        }
        let mut read = Cursor::new(&flight);
        while read.position() < flight.len() as u64 {
            client.read_tls(&mut read).expect("memory");
            client.process_new_packets()?;
        }
        if !client.is_handshaking() && !server.is_handshaking() && !client.wants_write() {
            return Ok((client, server));
        }
    }
    panic!("the handshake does not end");
}

fn refusal(client: &Arc<ClientConfig>, wanted: HostId, server: &Arc<ServerConfig>) -> String {
    match connect(client, wanted, server) {
        Ok(_) => panic!("they should not talk"),
        Err(error) => PeerError::of(&error).map_or_else(|| error.to_string(), PeerError::to_string),
    }
}

#[test]
fn members_reach_each_other_and_know_whom() {
    let (first, second, _) = pair();
    let server = first.tls.server(&[OTHER, CONTROL]).expect("set up");
    let client = second.tls.client(CONTROL).expect("set up");
    for _ in 0..2 {
        let (c, s) = connect(&client, first.id, &server).expect("members");
        assert_eq!(first.tls.peer(s.peer_certificates()), Some(second.id));
        assert_eq!(second.tls.peer(c.peer_certificates()), Some(first.id));
        assert_eq!(s.alpn_protocol(), Some(CONTROL));
        assert_eq!(s.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
        assert_eq!(s.handshake_kind(), Some(rustls::HandshakeKind::Full), "nothing is resumed");
    }
    let unknown = second.tls.client(b"else").expect("set up");
    connect(&unknown, first.id, &server).expect_err("no such protocol");
}

#[test]
fn who_left_is_refused_at_the_next_handshake_by_both_sides() {
    let (first, second, _) = pair();
    let server = first.tls.server(&[CONTROL]).expect("set up");
    let client = second.tls.client(CONTROL).expect("set up");
    let (_, s) = connect(&client, first.id, &server).expect("members");
    first.roster.change(|book| book.leave(second.id, now())).expect("a member");
    let error = refusal(&client, first.id, &server);
    assert!(error.contains("no member of this cluster has the certificate"), "{error}");
    assert_eq!(first.tls.peer(s.peer_certificates()), None, "known on old connections too");

    let server = second.tls.server(&[CONTROL]).expect("set up");
    let client = first.tls.client(CONTROL).expect("set up");
    let error = refusal(&client, second.id, &server);
    assert!(error.contains(&format!("host {} is no member", second.id)), "{error}");
}

#[test]
fn a_certificate_of_the_authority_alone_opens_nothing() {
    let (first, second, authority) = pair();
    // One that left has the authority's key and certifies itself, even for a member's id.
    for id in [HostId::random().expect("random"), second.id] {
        let forged = Identity::generate(id, &authority).expect("keys");
        let roster = second.roster.clone();
        let forger = Tls::new(forged, &authority, roster).expect("certified");
        let server = first.tls.server(&[CONTROL]).expect("set up");
        let client = forger.client(CONTROL).expect("set up");
        let error = refusal(&client, first.id, &server);
        assert!(error.contains("no member of this cluster has the certificate"), "{error}");
        let server = forger.server(&[CONTROL]).expect("set up");
        let client = first.tls.client(CONTROL).expect("set up");
        let error = refusal(&client, id, &server);
        assert!(error.contains("member") || error.contains("is not that of host"), "{error}");
    }
}

#[test]
fn a_listed_fingerprint_alone_opens_nothing() {
    let (first, _, _) = pair();
    // Another cluster's host, which a member took into the book by mistake.
    let stranger = Cluster::init("x", "10.0.0.9:7070").expect("good");
    let print = stranger.identity.fingerprint();
    let stranger = host(stranger);
    let listed = |book: &mut crate::Membership| {
        book.admit(stranger.id, "x", "10.0.0.9:7070", print, now()).expect("room");
    };
    first.roster.change(listed);
    let entry = first.roster.read(|book| book.own_entry().clone());
    stranger.roster.change(|book| book.merge(&[entry], now())).expect("good");

    // The stranger itself is content with the first; else it would be the one that refuses.
    let server = first.tls.server(&[CONTROL]).expect("set up");
    let own = stranger.tls.client(CONTROL).expect("set up");
    let mut client =
        ClientConfig::clone(&*join_client(first.tls.identity().fingerprint()).expect("set up"));
    client.alpn_protocols.clone_from(&own.alpn_protocols);
    client.client_auth_cert_resolver = Arc::clone(&own.client_auth_cert_resolver);
    refusal(&Arc::new(client), first.id, &server);
    // Where no certificate is asked for, for the same reason.
    let server = stranger.tls.join_server().expect("set up");
    let client = first.tls.client(JOIN_PROTOCOL).expect("set up");
    refusal(&client, stranger.id, &server);
}

#[test]
fn the_host_that_was_wanted_answers_or_none() {
    let (first, second, _) = pair();
    // The first's own connection to the second's address ends at the first.
    let server = first.tls.server(&[CONTROL]).expect("set up");
    let client = second.tls.client(CONTROL).expect("set up");
    let error = refusal(&client, second.id, &server);
    assert!(error.contains("is not that of host"), "{error}");
}

#[test]
fn only_who_joins_needs_no_certificate() {
    let (first, second, _) = pair();
    let print = first.tls.identity().fingerprint();
    let joining = join_client(print).expect("set up");
    let members = first.tls.server(&[CONTROL]).expect("set up");
    refusal(&joining, first.id, &members);
    let door = first.tls.join_server().expect("set up");
    let (_, s) = connect(&joining, first.id, &door).expect("anybody may ask");
    assert_eq!(first.tls.peer(s.peer_certificates()), None);
    assert_eq!(s.alpn_protocol(), Some(JOIN_PROTOCOL));
    // And nothing else is to be had there.
    let client = second.tls.client(CONTROL).expect("set up");
    refusal(&client, first.id, &door);
    // Nor from another host than the token's.
    let elsewhere = second.tls.join_server().expect("set up");
    let error = refusal(&joining, second.id, &elsewhere);
    assert!(error.contains("not that of the host that made the token"), "{error}");
}

#[test]
fn a_hello_tells_who_wants_to_join() {
    let (first, second, _) = pair();
    let print = first.tls.identity().fingerprint();
    let joining = join_client(print).expect("set up");
    let member = second.tls.client(CONTROL).expect("set up");
    for (config, wanted) in [(joining, true), (member, false)] {
        let mut client = ClientConnection::new(config, first.id.server_name()).expect("set up");
        let mut hello = Vec::new();
        client.write_tls(&mut hello).expect("memory");
        let mut acceptor = Acceptor::default();
        acceptor.read_tls(&mut Cursor::new(&hello)).expect("memory");
        let accepted = acceptor.accept().expect("a hello").expect("all of it");
        assert_eq!(Tls::wants_to_join(&accepted.client_hello()), wanted);
    }
}

#[test]
fn an_identity_of_another_authority_is_not_used() {
    let (first, _, _) = pair();
    let other = Authority::generate().expect("keys");
    let error = Tls::new(first.tls.identity().clone(), &other, first.roster.clone());
    let text = error.expect_err("another's").to_string();
    assert_eq!(text, format!("the certificate is not one of this cluster's for host {}", first.id));
}

#[test]
fn a_request_gets_a_plain_host_certificate_whatever_it_asks_for() {
    let authority = Authority::generate().expect("keys");
    let id = HostId::new(7).expect("not 0");
    let key = KeyPair::generate().expect("keys");
    let params = CertificateParams::new(vec!["other.example".to_owned()]).expect("a name");
    let request = params.serialize_request(&key).expect("made");
    let certificate = authority.certify(id, request.der()).expect("good");
    let identity = Identity::new(id, certificate, key.serialize_pem()).expect("its own");
    check_certified(&identity, &authority).expect("for the host, not for what it asked");
    let again = Identity::from_pem(id, &identity.certificate_pem(), identity.key_pem().to_owned())
        .expect("as written");
    assert_eq!(again.fingerprint(), identity.fingerprint());
    assert!(authority.certify(id, b"nonsense").is_err());
    assert!(authority.certify(id, &vec![0x30; 10_000]).is_err());
}
