//! This host in a cluster, or in none.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use axum::extract::Request;
use axum::response::Response;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use tokio_util::sync::CancellationToken;
use vmfork_api::ErrorBody;

use vmfork_cluster::allocate::{QuotaAnswer, QuotaAsk};
use vmfork_host::core::{Core, Keeper};

use crate::away::plan;
use crate::client::WORD_WAIT;
use crate::error::{ClusterError, Hindrance};
use crate::life::Life;
use crate::member::Member;
use crate::reserve::reserve;
use crate::settings::Settings;
use crate::this_host::ThisHost;
use vmfork_control::Answer;
use vmfork_fork::{Allotted, Forker, PlanAsk, Remote};
use vmfork_host::metrics::{ImageChunk, Multicast, Role, Side, Sourced, Traffic};
use vmfork_host::vm::Vm;
use vmfork_rest::http::{Answered, Elsewhere};

/// One per daemon.
pub struct Cluster {
    pub(crate) folder: PathBuf,
    pub(crate) this: Arc<ThisHost>,
    life: RwLock<Option<Arc<Life>>>,
    /// One change of what this host is a member of at a time.
    pub(crate) turn: tokio::sync::Mutex<()>,
    /// Why this host is not the member that it should be, by its folder.
    hindrance: Mutex<Option<Arc<Hindrance>>>,
    /// The daemon ends: no membership begins any more.
    pub(crate) stopped: CancellationToken,
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
            this: Arc::new(ThisHost::new(settings, u32::from_ne_bytes(epoch))),
            life: RwLock::new(None),
            turn: tokio::sync::Mutex::default(),
            hindrance: Mutex::default(),
            stopped: CancellationToken::new(),
        }
    }

    /// What clones of other hosts' VMs are started with.
    pub fn set_forker(&self, forker: &Arc<Forker>) {
        self.this.set_forker(forker);
    }

    pub(crate) fn life(&self) -> Option<Arc<Life>> {
        self.life.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn hindrance(&self) -> MutexGuard<'_, Option<Arc<Hindrance>>> {
        self.hindrance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_life(&self, life: Option<Arc<Life>>) {
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

    /// What has happened to chunks of images that hosts pull from each other.
    pub fn image_chunks(&self) -> [(ImageChunk, u64); 3] {
        self.this.stored.counts()
    }

    /// By which this life of the daemon is told from others.
    pub fn epoch(&self) -> u32 {
        self.this.epoch
    }

    /// This host as a member; `None`: it is in no cluster.
    pub fn member(&self) -> Option<Arc<Member>> {
        self.life().map(|life| Arc::clone(&life.member))
    }
}

async fn pass_on(
    member: Option<Arc<Member>>,
    host: &str,
    request: Request,
) -> Result<Response, ClusterError> {
    let member = member.ok_or(ClusterError::NoMore)?;
    let id = host.parse().map_err(|_| ClusterError::NoMore)?;
    let peer = member.hosts.peer_of(id)?;
    Ok(peer.pass_on(request, member.hosts.until_gone(id)).await?)
}

impl Elsewhere for Cluster {
    fn host_of<'a>(&'a self, vm: &'a str) -> Answer<'a, Option<String>> {
        async move {
            let Some(member) = self.member() else { return Ok(None) };
            let found = member.locate.host_of(vm).await;
            let found = found.map_err(|error| error.to_body(format!("find VM `{vm}`")))?;
            Ok(found.map(|entry| entry.id.to_string()))
        }
        .boxed()
    }

    fn pass_on(&self, host: String, request: Request) -> Answer<'_, Response> {
        async move {
            let message = format!("{} {}", request.method(), request.uri().path());
            pass_on(self.member(), &host, request).await.map_err(|error| error.to_body(message))
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
            all.extend(
                there.gone.into_iter().map(|entry| {
                    (entry.name, Err(ClusterError::Gone.to_body(format!("GET {path}"))))
                }),
            );
            all
        }
        .boxed()
    }

    fn here(&self) -> Option<String> {
        self.member().map(|member| member.hosts.name())
    }
}

impl Keeper for Cluster {
    fn take<'a>(
        &'a self,
        core: &'a Core,
        ask: QuotaAsk,
        message: &'a str,
    ) -> BoxFuture<'a, Result<Option<QuotaAnswer>, ErrorBody>> {
        async move {
            match self.member() {
                Some(member) => {
                    let taken = member.keeper.take(core, ask).await;
                    taken.map(Some).map_err(|error| error.to_body(message))
                }
                None => Ok(None),
            }
        }
        .boxed()
    }
}

impl Remote for Cluster {
    fn here(&self) -> Option<String> {
        self.member().map(|member| member.hosts.name())
    }

    fn names(&self) -> BoxFuture<'_, Option<HashSet<String>>> {
        async {
            match self.member() {
                Some(member) => Some(member.locate.names_elsewhere().await),
                None => None,
            }
        }
        .boxed()
    }

    fn plan<'a>(
        &'a self,
        ask: PlanAsk<'a>,
    ) -> BoxFuture<'a, Result<Option<Box<dyn vmfork_fork::Away>>, ErrorBody>> {
        plan(self.member(), ask).boxed()
    }

    /// As `--ticket-place` says.
    fn reserve<'a>(
        &'a self,
        core: &'a Core,
        parent: &'a Vm,
        vms: u32,
        message: &'a str,
    ) -> BoxFuture<'a, Option<Allotted>> {
        async move {
            let member = self.member()?;
            match self.this.settings.ticket_place.policy() {
                Some(policy) => Some(reserve(core, &member, parent, (vms, policy), message).await),
                None => {
                    let refused = member.hosts.check_active().err();
                    let refused = refused.map(|error| error.to_body(message));
                    refused.map(|it| Allotted { refused: Some(it), ..Allotted::default() })
                }
            }
        }
        .boxed()
    }
}
