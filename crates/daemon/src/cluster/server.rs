//! The port for other hosts: TLS, members alone but for those who join, the REST API and what hosts ask each other.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use rustls::server::Acceptor;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::LazyConfigAcceptor;
use vmfork_cluster::HostId;
use vmfork_cluster::keys::Tls;

use crate::http::{connection, keep_alive};

/// What members speak at this port.
pub(super) const API_PROTOCOL: &[u8] = b"vmfork-api/1";
/// More wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 1024;
const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);
/// When accepting fails (out of fds, mostly): how long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Who is at the other end of a connection; an extension of each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Caller(pub(super) HostId);

/// What is served to whom.
pub(super) struct Routes {
    /// Of members; each request has a [`Caller`].
    pub(super) members: Router,
    /// Of who wants to join.
    pub(super) newcomers: Router,
}

/// Serve until `stop` becomes true.
pub(super) async fn serve(
    listener: TcpListener,
    tls: Arc<Tls>,
    routes: Routes,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let routes = Arc::new(routes);
    let mut connections = JoinSet::new();
    loop {
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = connections.join_next() => continue,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("can't accept another host's connection: {error}");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (tls, routes, stop) = (Arc::clone(&tls), Arc::clone(&routes), stop.clone());
        connections.spawn(async move {
            one(stream, &tls, &routes, stop).await;
            drop(place);
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn one(stream: TcpStream, tls: &Tls, routes: &Routes, stop: watch::Receiver<bool>) {
    let address = stream.peer_addr().ok();
    keep_alive(&stream);
    let _best_effort = stream.set_nodelay(true);
    let handshake = async {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let joins = Tls::wants_to_join(&start.client_hello());
        let config = if joins { tls.join_server() } else { tls.server(&[API_PROTOCOL]) };
        let config = config.map_err(std::io::Error::other)?;
        Ok::<_, std::io::Error>((joins, start.into_stream(config).await?))
    };
    let (joins, stream) = match timeout(HANDSHAKE_WAIT, handshake).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => return tracing::info!(?address, %error, "a host was turned away"),
        Err(_elapsed) => return tracing::debug!(?address, "a host did not shake hands"),
    };
    let router = match (joins, tls.peer(stream.get_ref().1.peer_certificates())) {
        (true, _) => routes.newcomers.clone(),
        (false, Some(host)) => routes.members.clone().layer(axum::Extension(Caller(host))),
        (false, None) => return tracing::info!(?address, "a host that is no member any more"),
    };
    connection(stream, router, stop).await;
}
