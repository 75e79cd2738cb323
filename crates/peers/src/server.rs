//! The port for other hosts: TLS, only for members and hosts that join, the REST API and what hosts
//! ask each other.
//!
//! A new connection is a stranger. It has one of few places, for a handshake or to join.
//! A member's connection then takes one of the members' places. See [`Strangers`].

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use rustls::server::Acceptor;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::LazyConfigAcceptor;
use vmfork_cluster::HostId;
use vmfork_cluster::keys::Tls;

use super::connection_slots::{Callers, OfMember, Stranger, Strangers};
use vmfork_rest::http::{connection, keep_alive};

/// What members speak at this port.
pub(super) const API_PROTOCOL: &[u8] = b"vmfork-api/1";
/// When accepting fails (out of fds, mostly): how long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many, and for how long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Connections of members.
    members: usize,
    /// Those before the end of their handshake, and newcomers'. More wait in the kernel's backlog.
    strangers: usize,
    /// How long a stranger keeps a place that another wants: many times what a handshake takes.
    patience: Duration,
    /// A handshake, and waiting for a member's place.
    handshake: Duration,
    /// All of a newcomer's connection.
    join: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            members: 1024,
            strangers: 256,
            patience: Duration::from_millis(500),
            handshake: Duration::from_secs(5),
            join: Duration::from_secs(10),
        }
    }
}

/// Who is at the other end of a connection; an extension of each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Caller(pub(super) HostId);

/// When the head of a request came: before its body has, which may take long. Extracted first.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrived(pub(super) std::time::Instant);

impl<S: Send + Sync> FromRequestParts<S> for Arrived {
    type Rejection = Infallible;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(std::time::Instant::now()))
    }
}

/// What is served to whom.
pub(super) struct Routes {
    /// Of members; each request has a [`Caller`].
    pub(super) members: Router,
    /// Of who wants to join.
    pub(super) newcomers: Router,
}

/// What a port serves by.
pub(super) struct Port {
    pub(super) tls: Arc<Tls>,
    pub(super) routes: Routes,
    pub(super) callers: Arc<Callers>,
    pub(super) bounds: Bounds,
}

/// Serve until `stop` becomes true; then finish what is in progress, and end all connections.
pub(super) async fn serve(listener: TcpListener, port: Port, mut stop: watch::Receiver<bool>) {
    let Bounds { members, strangers, patience, .. } = port.bounds;
    let strangers = Strangers::new(strangers, patience);
    let members = Arc::new(Semaphore::new(members));
    let port = Arc::new(port);
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
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
        let place = tokio::select! {
            place = strangers.enter() => place,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let (port, members, stop) = (Arc::clone(&port), Arc::clone(&members), stop.clone());
        connections.spawn(async move { one(stream, place, members, &port, stop).await });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
    port.callers.end();
}

async fn one(
    stream: TcpStream,
    place: Stranger,
    members: Arc<Semaphore>,
    port: &Port,
    stop: watch::Receiver<bool>,
) {
    let Port { tls, routes, callers, bounds } = port;
    let began = Instant::now();
    let address = stream.peer_addr().ok();
    keep_alive(&stream);
    let _best_effort = stream.set_nodelay(true);
    let handshake = async {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let joins = Tls::wants_to_join(&start.client_hello());
        let config = if joins { tls.join_server() } else { tls.server(&[API_PROTOCOL]) };
        let config = config.map_err(std::io::Error::other)?;
        let stream = start.into_stream(config).await?;
        let members_place = match joins {
            true => None,
            false => Some(members.acquire_owned().await.map_err(std::io::Error::other)?),
        };
        Ok::<_, std::io::Error>((members_place, stream))
    };
    let shaken = tokio::select! {
        shaken = timeout(bounds.handshake, handshake) => shaken,
        () = place.put_out() => return tracing::debug!(?address, "a stranger made room"),
    };
    let (members_place, stream) = match shaken {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => return tracing::info!(?address, %error, "a host was turned away"),
        Err(_elapsed) => return tracing::debug!(?address, "a host did not shake hands"),
    };
    let Some(members_place) = members_place else {
        let joining = connection(stream, None, routes.newcomers.clone(), stop);
        tokio::select! {
            done = timeout_at(began + bounds.join, joining) => if done.is_err() {
                tracing::info!(?address, "a newcomer took too long");
            },
            () = place.put_out() => tracing::info!(?address, "a newcomer made room"),
        }
        return;
    };
    let Some(host) = tls.peer(stream.get_ref().1.peer_certificates()) else {
        return tracing::info!(?address, "a host that is no member any more");
    };
    drop(place);
    let end = callers.end_of(host);
    let stream = OfMember::new(stream, &end, members_place);
    let router = routes.members.clone().layer(axum::Extension(Caller(host)));
    tokio::select! {
        () = connection(stream, None, router, stop) => {}
        () = end.cancelled() => tracing::info!(?address, %host, "no member any more: disconnected"),
    }
}

#[cfg(test)]
mod tests;
