//! This host in a cluster, or in none: members call each other's daemons, fork onto each other, and
//! lend each other pages.
//!
//! ```text
//!   init, join, leave ──► Cluster ── Member (of one life of the daemon) ──┬── life: heartbeats, what is lent ends
//!                            │                                           ├── server: TLS, REST API, routes
//!   fork ──► place ──► client ═══════ another host: routes ──► receive ──┴── page service ──► images
//! ```
//!
//! Promises: only members get anything. If two hosts ask for the same memory at once, its host
//! tells each whose it is.
//! A silent host costs a bounded wait.
//! Left to others: who is a member ([`vmfork_cluster`]), how pages travel ([`vmfork_transfer`]).

mod arrivals;
mod away;
mod client;
mod coming;
mod descriptor;
mod family;
mod finding;
mod guest_images;
mod hosts;
mod images;
mod jobs;
mod kept;
mod life;
mod loans;
mod member;
mod multicast;
mod operations;
mod orders;
mod place;
mod places;
mod quotas;
mod receive;
mod records;
mod relay;
mod routes;
mod server;
mod settings;
mod sources;
#[cfg(test)]
mod tests;
mod tickets;
mod touched;
mod watched;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use tokio_util::sync::CancellationToken;
use vmfork_api::{ErrorBody, ErrorCode};

pub use self::family::end_everywhere;
use self::life::Life;
pub use self::member::Member;
use self::member::WORD_WAIT;
pub use self::operations::Operations;
pub use self::settings::{PageTransfer, Settings, TicketPlace};
use vmfork_control::Answer;
use vmfork_fork::Forker;
use vmfork_host::core::Core;
use vmfork_host::metrics::{Multicast, Role, Side, Sourced, Traffic};
use vmfork_rest::http::{Answered, Elsewhere};

/// One per daemon.
pub struct Cluster {
    folder: PathBuf,
    settings: Settings,
    /// What members may ask of this host: its REST API. Set once, before anything is served.
    api: OnceLock<Router>,
    forker: OnceLock<Weak<Forker>>,
    life: RwLock<Option<Arc<Life>>>,
    /// One change of what this host is a member of at a time.
    turn: tokio::sync::Mutex<()>,
    /// Why this host is not the member that it should be, by its folder.
    hindrance: Mutex<Option<ErrorBody>>,
    /// The daemon ends: no membership begins any more.
    stopped: CancellationToken,
    epoch: u32,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Its keys are, or will be, in this folder. It does nothing until [`Cluster::begin`].
    ///
    /// # Panics
    /// If the kernel has no random numbers, which Linux always has once it is up.
    pub fn new(folder: PathBuf, settings: Settings) -> Self {
        let mut epoch = [0; 4];
        if let Err(error) = getrandom::fill(&mut epoch) {
            unreachable!("getrandom(2) of a few bytes: {error}");
        }
        Self {
            folder,
            settings,
            api: OnceLock::new(),
            forker: OnceLock::new(),
            life: RwLock::new(None),
            turn: tokio::sync::Mutex::default(),
            hindrance: Mutex::default(),
            stopped: CancellationToken::new(),
            epoch: u32::from_ne_bytes(epoch),
        }
    }

    /// What clones of other hosts' VMs are started with.
    pub fn set_forker(&self, forker: &Arc<Forker>) {
        let _first = self.forker.set(Arc::downgrade(forker));
    }

    fn forker(&self) -> Option<Arc<Forker>> {
        self.forker.get().and_then(Weak::upgrade)
    }

    fn core(&self) -> Option<Arc<Core>> {
        self.forker().map(|forker| Arc::clone(&forker.core))
    }

    fn life(&self) -> Option<Arc<Life>> {
        self.life.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn hindrance(&self) -> MutexGuard<'_, Option<ErrorBody>> {
        self.hindrance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_life(&self, life: Option<Arc<Life>>) {
        let before = std::mem::replace(
            &mut *self.life.write().unwrap_or_else(PoisonError::into_inner),
            life,
        );
        drop(before); // not under the lock
    }

    /// What has gone between this host and others since it is a member.
    pub fn traffic(&self) -> Vec<(Side, Role, Traffic)> {
        self.life().map(|life| life.traffic()).unwrap_or_default()
    }

    /// What became of the pages that this host asked others for, since it is a member.
    pub fn sourced(&self) -> Vec<(Sourced, u64)> {
        self.life().map(|life| life.sourced()).unwrap_or_default()
    }

    /// What became of what was sent, and heard, by multicast, since it is a member.
    pub fn multicast(&self) -> Vec<(Multicast, u64)> {
        self.life().map(|life| life.multicast()).unwrap_or_default()
    }

    /// By which this life of the daemon is told from others.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// This host as a member; `None`: it is in no cluster.
    pub fn member(&self) -> Option<Arc<Member>> {
        self.life().map(|life| Arc::clone(&life.member))
    }
}

impl Elsewhere for Cluster {
    fn host_of<'a>(&'a self, vm: &'a str) -> Answer<'a, Option<String>> {
        async move {
            let Some(member) = self.member() else { return Ok(None) };
            Ok(member.locate.host_of(vm).await?.map(|entry| entry.id.to_string()))
        }
        .boxed()
    }

    fn pass_on(&self, host: String, request: Request) -> Answer<'_, Response> {
        async move {
            let message = format!("{} {}", request.method(), request.uri().path());
            let gone = || {
                ErrorBody::new(ErrorCode::NotFound, message.clone())
                    .cause("this host is in no cluster any more")
            };
            let member = self.member().ok_or_else(gone)?;
            let id = host.parse().map_err(|_| gone())?;
            let peer = member.hosts.peer_of(id, &message)?;
            let gone = member.hosts.until_gone(id);
            peer.pass_on(request, gone).await.map_err(|error| error.to_body(message))
        }
        .boxed()
    }

    fn ask_all<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Vec<(String, Answered)>> {
        async move {
            let Some(member) = self.member() else { return Vec::new() };
            let there = member.hosts.there();
            let asked = there.alive.into_iter().chain(there.suspect).map(|entry| {
                let peer = member.hosts.peer(&entry);
                async move {
                    let answered = peer.get(path, WORD_WAIT).await;
                    (entry.name, answered.map_err(|error| error.to_body(format!("GET {path}"))))
                }
            });
            let mut all = join_all(asked).await;
            all.extend(there.gone.into_iter().map(|entry| {
                let error = ErrorBody::new(ErrorCode::Host, format!("GET {path}"));
                (entry.name, Err(error.cause("it is gone")))
            }));
            all
        }
        .boxed()
    }

    fn here(&self) -> Option<String> {
        self.member().map(|member| member.hosts.name())
    }
}
