use std::net::SocketAddr;

use axum::routing::{get, post};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vmfork_cluster::{Cluster, JoinToken, Newcomer, Now, Roster, Tokens, admit};

use super::super::client::Peer;
use super::*;

const LONG: Duration = Duration::from_secs(10);

fn now() -> Now {
    Now { monotonic: Duration::from_secs(1), unix_s: 1000 }
}

fn token(of: &Cluster, tokens: &mut Tokens) -> JoinToken {
    tokens.issue("10.0.0.1:7070", of.identity.fingerprint(), 60, 1000).expect("room")
}

/// A port of one host, as another member of its cluster calls it.
struct World {
    address: SocketAddr,
    member: Peer,
    callers: Arc<Callers>,
    /// For a host that wants to join.
    newcomer: Newcomer,
    stop: watch::Sender<bool>,
}

async fn world(bounds: Bounds) -> World {
    let mut first = Cluster::init("a", "10.0.0.1:7070").expect("good");
    let mut tokens = Tokens::default();
    let newcomer = Newcomer::new(token(&first, &mut tokens), "b", "10.0.0.2:7070").expect("good");
    let request = newcomer.request();
    let admitted = admit(request, &mut tokens, &mut first.members, &first.authority, now());
    let second = newcomer.finish(&admitted.expect("admitted"), now()).expect("joined");
    let newcomer = token(&first, &mut tokens);
    let newcomer = Newcomer::new(newcomer, "c", "10.0.0.3:7070").expect("good");
    let id = first.identity.host();
    let tls = |of: Cluster| {
        Tls::new(of.identity, &of.authority, Roster::new(of.members)).expect("certified")
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let of_members =
        |axum::Extension(Caller(host)): axum::Extension<Caller>| async move { host.to_string() };
    let routes = Routes {
        members: Router::new()
            .route("/", get(of_members))
            .route("/again", post(async |axum::Json(said): axum::Json<u64>| axum::Json(said))),
        newcomers: Router::new().route("/", get(|| async { "join" })),
    };
    let callers = Arc::new(Callers::default());
    let (stop, stopped) = watch::channel(false);
    let port = Port { tls: Arc::new(tls(first)), routes, callers: Arc::clone(&callers), bounds };
    tokio::spawn(serve(listener, port, stopped));
    let member = Peer {
        name: "a".to_owned(),
        address: address.to_string(),
        server_name: id.server_name(),
        tls: tls(second).client(API_PROTOCOL).expect("set up"),
    };
    World { address, member, callers, newcomer, stop }
}

/// One who says nothing.
async fn silent(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.expect("a connection")
}

/// How long a connection is kept open.
async fn kept(mut stream: impl tokio::io::AsyncRead + Unpin) -> Duration {
    let began = Instant::now();
    let _end_or_reset = timeout(LONG, stream.read_to_end(&mut Vec::new())).await.expect("dropped");
    began.elapsed()
}

#[tokio::test]
async fn strangers_are_dropped_in_time() {
    let bounds = Bounds {
        handshake: Duration::from_millis(300),
        join: Duration::from_millis(600),
        ..Bounds::default()
    };
    let world = world(bounds).await;
    assert!(kept(silent(world.address).await).await >= Duration::from_millis(200));
    // A newcomer has shaken hands, and says something now and then.
    let tls = tokio_rustls::TlsConnector::from(world.newcomer.client().expect("set up"));
    let stream = silent(world.address).await;
    let mut joins = tls.connect(Newcomer::server_name(), stream).await.expect("it may");
    joins.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("open");
    let (read, mut write) = tokio::io::split(joins);
    let talks = tokio::spawn(async move {
        while write.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    });
    let kept = kept(read).await;
    assert!((400..3000).contains(&kept.as_millis()), "{kept:?}");
    talks.abort();
}

#[tokio::test]
async fn members_get_in_while_strangers_have_all_their_places() {
    let bounds = Bounds {
        members: 1,
        strangers: 2,
        patience: Duration::from_millis(100),
        handshake: LONG * 10,
        ..Bounds::default()
    };
    let world = world(bounds).await;
    let mut strangers = Vec::new();
    for _ in 0..6 {
        strangers.push(silent(world.address).await);
    }
    for _ in 0..3 {
        world.member.get("/", LONG).await.expect("a member gets in");
    }
    assert!(kept(strangers.remove(0)).await < LONG, "the first had to make room");
    world.stop.send_replace(true);
}

#[tokio::test]
async fn a_members_connection_ends_when_it_is_none_any_more() {
    let world = world(Bounds::default()).await;
    let tls = tokio_rustls::TlsConnector::from(Arc::clone(&world.member.tls));
    let stream = silent(world.address).await;
    let server_name = world.member.server_name.clone();
    let mut idle = tls.connect(server_name, stream).await.expect("a member");
    idle.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("open");
    let mut head = [0; 12];
    idle.read_exact(&mut head).await.expect("an answer");
    assert_eq!(&head, b"HTTP/1.1 200");
    world.callers.keep(|_| true);
    world.callers.keep(|_| false);
    let mut rest = Vec::new();
    let early = timeout(Duration::from_millis(100), idle.read_to_end(&mut rest)).await;
    assert!(early.is_err(), "not at the first look");
    world.callers.keep(|_| false);
    assert!(kept(idle).await < Duration::from_secs(5));
}

/// What is said again and again goes over one connection, and over another once that has ended.
#[tokio::test]
async fn a_connection_is_kept_until_its_end() {
    let world = world(Bounds { members: 1, ..Bounds::default() }).await;
    let mut kept = None;
    let say = async |kept: &mut _| {
        world.member.ask_again::<_, u64>(kept, "/again", &7, LONG).await.expect("said")
    };
    for _ in 0..3 {
        assert_eq!(say(&mut kept).await, 7);
        // It has the only place: no other connection gets in.
        assert!(world.member.get("/", Duration::from_millis(50)).await.is_err());
    }
    world.callers.keep(|_| false);
    world.callers.keep(|_| false);
    assert_eq!(say(&mut kept).await, 7);
    drop(kept);
    world.member.get("/", LONG).await.expect("there is room again");
}

#[tokio::test]
async fn a_request_arrives_with_its_head_however_long_its_body_takes() {
    const TAKES: Duration = Duration::from_millis(100);
    let waited = |Arrived(at): Arrived, _body: axum::body::Bytes| async move {
        (at.elapsed() >= TAKES).to_string()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let serving =
        tokio::spawn(
            async move { axum::serve(listener, Router::new().route("/", post(waited))).await },
        );
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 4\r\n\r\n";
    stream.write_all(head).await.expect("sent");
    sleep(2 * TAKES).await;
    stream.write_all(b"body").await.expect("sent");
    let mut answer = String::new();
    timeout(LONG, stream.read_to_string(&mut answer)).await.expect("in time").expect("answered");
    assert!(answer.ends_with("true"), "{answer}");
    serving.abort();
}
