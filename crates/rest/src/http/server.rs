//! Connections: accepted, served, and ended in good order.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::listen::{Listeners, Socket, keep_alive};
use super::{App, router, router_with_token, stopped};
use vmfork_control::User;

/// More wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 1024;
/// A request's head must come within this; also how long an idle connection is kept.
const HEAD_WAIT: Duration = Duration::from_secs(30);
/// How long requests in progress may take once the daemon is asked to end.
const DRAIN_WAIT: Duration = Duration::from_secs(5);
/// When accepting fails (out of fds, mostly): how long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serve until `stop` becomes true; then finish what is in progress, for at most five seconds.
/// The socket's file is removed.
///
/// A connection whose client goes away is dropped at once, with what its handler awaits: HTTP/1 here
/// knows no half-closed clients.
pub async fn serve(listeners: Listeners, app: App, stop: watch::Receiver<bool>) {
    let Listeners { unix, tcp, file: _file } = listeners;
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let open = router(app.clone());
    let over_tcp = tcp.map(|(listener, token)| (listener, router_with_token(app, token)));
    tokio::join!(accept(unix, open, Arc::clone(&places), stop.clone()), async {
        if let Some((listener, guarded)) = over_tcp {
            accept(listener, guarded, places, stop).await;
        }
    });
}

/// What differs between the two kinds of sockets.
trait Accept {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;
    /// A connection, and whose it is.
    async fn next(&self) -> std::io::Result<(Self::Stream, Peer)>;
}

impl Accept for UnixListener {
    type Stream = tokio::net::UnixStream;
    async fn next(&self) -> std::io::Result<(Self::Stream, Peer)> {
        let (stream, _) = self.accept().await?;
        let user = stream.peer_cred().ok().map(|peer| User::Uid(peer.uid()));
        Ok((stream, Peer { user, socket: None }))
    }
}

impl Accept for TcpListener {
    type Stream = tokio::net::TcpStream;
    async fn next(&self) -> std::io::Result<(Self::Stream, Peer)> {
        let (stream, _) = self.accept().await?;
        keep_alive(&stream);
        let socket = Socket::of(&stream);
        Ok((stream, Peer { user: Some(User::Token), socket }))
    }
}

async fn accept<L: Accept>(
    listener: L,
    router: Router,
    places: Arc<Semaphore>,
    mut stop: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.next().await)
        };
        let (place, stream) = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = connections.join_next() => continue,
            () = stopped(&mut stop) => break,
        };
        let (stream, peer) = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!("can't accept a connection: {error}");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (router, stop) = (router.clone(), stop.clone());
        connections.spawn(async move {
            serve_one(stream, peer, router, stop).await;
            drop(place);
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Serve one connection, in good order until the daemon ends. `user`: whose it is, if that is a user's.
pub async fn connection<S>(
    stream: S,
    user: Option<User>,
    router: Router,
    stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    serve_one(stream, Peer { user, socket: None }, router, stop).await;
}

/// What each request of a connection is told of it.
#[derive(Debug)]
struct Peer {
    user: Option<User>,
    /// A TCP connection's.
    socket: Option<Socket>,
}

async fn serve_one<S>(stream: S, peer: Peer, router: Router, mut stop: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        if let Some(user) = peer.user {
            request.extensions_mut().insert(user);
        }
        if let Some(socket) = &peer.socket {
            request.extensions_mut().insert(socket.clone());
        }
        service.call(request)
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_WAIT)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
    );
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            timeout(DRAIN_WAIT, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = served {
        tracing::debug!("a connection broke off: {error}");
    }
}
