//! What users do with a cluster: make one, join, look at it, drain, leave.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use vmfork_api::{
    ClusterHost, ClusterHostRequest, ClusterInfo, ClusterInitRequest, ClusterJoinRequest,
    ClusterToken, ClusterTokenRequest, HostLiveness, HostState, SCHEMA,
};
use vmfork_cluster::membership::HostState as Stands;
use vmfork_cluster::{
    Cluster as Keys, Entry, Folder, HostId, JoinAnswer, JoinToken, Liveness, MemberError,
    Membership, Newcomer, Opened, Tokens,
};

use super::client::Peer;
use super::cluster::Cluster;
use super::error::{BeginError, ClusterError, Hindrance};
use super::life::Life;
use super::routes::{self, JOIN};
use super::watched::Watched;
use vmfork_control::{Answer, ClusterControl};
use vmfork_host::error::{chain, outcome};

const TTL_S_DEFAULT: u64 = 3600;
const TTL_S_MAX: u64 = 7 * 24 * 3600;
/// How long a member may take to let this host in.
const JOIN_WAIT: Duration = Duration::from_secs(20);
/// While a membership can't begin: how long until the next try.
const BEGIN_AGAIN: Duration = Duration::from_secs(3);

const INIT: &str = "make a cluster";
const JOINING: &str = "join a cluster";
const LEAVE: &str = "leave the cluster";

impl Cluster {
    /// Be what this host was before, if it was a member of a cluster. While that can't be, it goes
    /// on without, says why, and tries again.
    pub async fn begin(self: &Arc<Self>, api: axum::Router) {
        let _first = self.this.api.set(api);
        self.begin_every(BEGIN_AGAIN).await;
    }

    pub(super) async fn begin_every(self: &Arc<Self>, pause: Duration) {
        if self.has_begun().await {
            return;
        }
        let (cluster, stopped) = (Arc::downgrade(self), self.stopped.clone());
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = stopped.cancelled() => return,
                }
                let Some(cluster) = cluster.upgrade() else { return };
                if cluster.has_begun().await {
                    return;
                }
            }
        });
    }

    /// Try. → whether there is nothing to try any more.
    async fn has_begun(self: &Arc<Self>) -> bool {
        let _turn = self.turn.lock().await;
        if self.life().is_some() || self.stopped.is_cancelled() {
            return true;
        }
        let hindrance = match Folder::open(&self.folder) {
            Ok(None) => None,
            Ok(Some(opened)) if opened.cluster.members.has_left() => {
                self.let_go(opened.folder);
                None
            }
            Ok(Some(opened)) => {
                let watched = Watched::begin(&opened.cluster.members);
                match self.begin_life(opened, watched).await {
                    Ok(life) => {
                        self.set_life(Some(life));
                        None
                    }
                    Err(error) => Some(Hindrance::Begin(error)),
                }
            }
            Err(error) => Some(Hindrance::Folder(error)),
        };
        let hindrance = hindrance.map(Arc::new);
        let before = std::mem::replace(&mut *self.hindrance(), hindrance.clone());
        let Some(hindrance) = hindrance else { return true };
        let cause = chain(&hindrance);
        if before.is_none_or(|before| chain(&before) != cause) {
            let remedy = hindrance.remedy();
            tracing::error!(remedy, "this host goes on without its cluster: {cause}");
        }
        false
    }

    async fn begin_life(
        self: &Arc<Self>,
        opened: Opened,
        watched: Watched,
    ) -> Result<Arc<Life>, BeginError> {
        let cluster = Arc::downgrade(self);
        let removed = move || {
            if let Some(cluster) = cluster.upgrade() {
                cluster.was_removed();
            }
        };
        let routes = |life: &Arc<Life>| routes::of(&self.this, life, removed);
        Life::begin(&self.this, opened, watched, routes).await
    }

    /// Serve other hosts no more: the daemon ends. It stays a member.
    pub async fn stop(&self) {
        self.stopped.cancel();
        let _turn = self.turn.lock().await;
        if let Some(life) = self.life() {
            self.set_life(None);
            let _it_stays = life.end().await;
        }
    }

    /// Another member has removed this host.
    pub(super) fn was_removed(self: Arc<Self>) {
        tokio::spawn(async move {
            let _turn = self.turn.lock().await;
            if let Some(life) =
                self.life().filter(|life| life.member.hosts.roster.read(Membership::has_left))
            {
                tracing::warn!("this host was removed from the cluster by another member");
                self.end(life).await;
            }
        });
    }

    async fn end(&self, life: Arc<Life>) {
        self.set_life(None);
        if let Some(core) = self.this.core() {
            life.tell_hosts(&core);
        }
        life.member.lines.leave();
        life.member.jobs.release_all().await;
        if let Some(folder) = life.end().await {
            self.let_go(folder);
        }
    }

    fn let_go(&self, folder: Folder) {
        if let Err(error) = folder.remove() {
            tracing::warn!("remove the keys of the cluster: {}", chain(&error));
        }
    }

    async fn become_member(self: &Arc<Self>, keys: Keys) -> Result<ClusterInfo, ClusterError> {
        let folder = Folder::create(&self.folder, &keys)?;
        let opened = Opened { folder, cluster: keys, tokens: Tokens::default() };
        match self.begin_life(opened, Watched::default()).await {
            Ok(life) => {
                if let Some(core) = self.this.core() {
                    life.tell_hosts(&core);
                }
                self.set_life(Some(life));
                Ok(self.info())
            }
            Err(error) => {
                if let Ok(Some(opened)) = Folder::open(&self.folder) {
                    self.let_go(opened.folder);
                }
                Err(error.into())
            }
        }
    }

    fn info(&self) -> ClusterInfo {
        let Some(life) = self.life() else {
            let schema = SCHEMA.to_owned();
            return ClusterInfo { schema, here: None, hosts: Vec::new(), note: None };
        };
        let member = &life.member;
        let now = member.hosts.now();
        let own_room = self.this.core().map(|core| core.admission.room());
        let hosts = member.hosts.roster.read(|book| {
            let host = |entry: &Entry| {
                let is_here = entry.id == member.hosts.id;
                let room = if is_here { own_room } else { book.room(entry.id) };
                ClusterHost {
                    id: entry.id.to_string(),
                    name: entry.name.clone(),
                    address: entry.address.clone(),
                    state: match entry.state {
                        Stands::Draining => HostState::Draining,
                        _ => HostState::Active,
                    },
                    liveness: match book.liveness(entry.id, now) {
                        _ if is_here => HostLiveness::Here,
                        Liveness::Alive => HostLiveness::Alive,
                        Liveness::Suspect => HostLiveness::Suspect,
                        Liveness::Gone => HostLiveness::Gone,
                    },
                    memory_admissible_bytes: room.map(|room| room.memory_bytes),
                    vcpus_admissible: room.map(|room| room.vcpus),
                }
            };
            book.members().map(host).collect()
        });
        let (schema, here) = (SCHEMA.to_owned(), Some(member.hosts.id.to_string()));
        ClusterInfo { schema, here, hosts, note: None }
    }

    /// # Errors
    /// This host is not the member that it should be.
    fn unhindered(&self) -> Result<(), ClusterError> {
        match self.hindrance().clone() {
            None => Ok(()),
            Some(hindrance) => Err(ClusterError::Hindered(hindrance)),
        }
    }

    fn in_one(&self) -> Result<Arc<Life>, ClusterError> {
        self.unhindered()?;
        self.life().ok_or(ClusterError::InNone)
    }

    fn in_none(&self) -> Result<(), ClusterError> {
        match self.life() {
            None if !Folder::is_used(&self.folder) => Ok(()),
            _ => Err(ClusterError::InOne),
        }
    }

    async fn init(
        self: Arc<Self>,
        request: ClusterInitRequest,
    ) -> Result<ClusterInfo, ClusterError> {
        let _turn = self.turn.lock().await;
        self.in_none()?;
        let name = request.name.unwrap_or_else(host_name);
        let keys = Keys::init(&name, &request.address)?;
        self.become_member(keys).await
    }

    async fn join(
        self: Arc<Self>,
        request: ClusterJoinRequest,
    ) -> Result<ClusterInfo, ClusterError> {
        let _turn = self.turn.lock().await;
        self.in_none()?;
        let token: JoinToken = request.token.parse()?;
        let name = request.name.unwrap_or_else(host_name);
        let newcomer = Newcomer::new(token, &name, &request.address)?;
        let peer = Peer {
            name: newcomer.address().to_owned(),
            address: newcomer.address().to_owned(),
            server_name: Newcomer::server_name(),
            tls: newcomer.client().map_err(ClusterError::JoinKeys)?,
        };
        let answer = peer.ask::<_, JoinAnswer>(JOIN, newcomer.request(), JOIN_WAIT).await?;
        let now = vmfork_cluster::Now { monotonic: Duration::ZERO, unix_s: 0 };
        let keys = newcomer.finish(&answer, now)?;
        self.become_member(keys).await
    }

    async fn leave(
        self: Arc<Self>,
        request: ClusterHostRequest,
    ) -> Result<ClusterInfo, ClusterError> {
        let _turn = self.turn.lock().await;
        if let Err(hindrance) = self.unhindered() {
            return self.leave_untold(&request, hindrance);
        }
        let life = self.in_one()?;
        let id = found(&life, &request)?;
        if id != life.member.hosts.id {
            life.say_removed(id).await;
        }
        let now = life.member.hosts.now();
        life.member.hosts.roster.change(|book| match book.member(id) {
            Some(_) => book.leave(id, now),
            // Another caller was faster.
            None => Ok(()),
        })?;
        life.save();
        if id != life.member.hosts.id {
            return Ok(self.info());
        }
        life.say_farewell().await;
        self.end(life).await;
        Ok(ClusterInfo { note: Some("This host has left the cluster".to_owned()), ..self.info() })
    }

    /// Give up a membership that can't begin.
    fn leave_untold(
        &self,
        request: &ClusterHostRequest,
        hindrance: ClusterError,
    ) -> Result<ClusterInfo, ClusterError> {
        if request.host.is_some() {
            return Err(hindrance);
        }
        let opened = Folder::open(&self.folder).ok().flatten();
        let name = opened.map(|opened| opened.cluster.members.own_entry().name.clone());
        Folder::forget(&self.folder)
            .map_err(Box::new)
            .map_err(|error| ClusterError::Forget { folder: self.folder.clone(), error })?;
        *self.hindrance() = None;
        let note = format!(
            "The other hosts were not told: `vmfork cluster leave {}` on one of them",
            name.as_deref().unwrap_or("HOST")
        );
        tracing::warn!(note, "this host has left its cluster, as which it could not begin");
        Ok(ClusterInfo { note: Some(note), ..self.info() })
    }

    fn token(&self, request: &ClusterTokenRequest) -> Result<ClusterToken, ClusterError> {
        let life = self.in_one()?;
        let ttl_s = request.ttl_s.unwrap_or(TTL_S_DEFAULT);
        if !(1..=TTL_S_MAX).contains(&ttl_s) {
            return Err(ClusterError::TokenLife { ttl_s, max_s: TTL_S_MAX });
        }
        let (address, issuer) = life.member.hosts.roster.read(|book| {
            let own = book.own_entry();
            (own.address.clone(), own.fingerprint)
        });
        let mut tokens = life.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let unix_s = life.member.hosts.now().unix_s;
        let token = tokens.issue(&address, issuer, ttl_s, unix_s)?;
        life.records.save_tokens(&tokens)?;
        Ok(ClusterToken {
            schema: SCHEMA.to_owned(),
            token: token.to_text(),
            expires_unix_ms: token.expires_unix_s.saturating_mul(1000),
        })
    }

    /// Take no more clones on a host, or take it back into use.
    fn drain(
        &self,
        request: &ClusterHostRequest,
        drain: bool,
    ) -> Result<ClusterInfo, ClusterError> {
        let life = self.in_one()?;
        let now = life.member.hosts.now();
        let id = found(&life, request)?;
        life.member.hosts.roster.change(|book| match drain {
            true => book.drain(id, now),
            false => book.activate(id, now),
        })?;
        life.save();
        Ok(self.info())
    }
}

/// The host that is named, this one if none is.
fn found(life: &Life, request: &ClusterHostRequest) -> Result<HostId, MemberError> {
    life.member.hosts.roster.read(|book| match &request.host {
        Some(host) => book.find(host).map(|entry| entry.id),
        None => Ok(book.own()),
    })
}

/// A change in a task of its own. Half of it would leave this host a member of nothing, or others
/// with one that is none.
fn change<'a>(
    work: impl Future<Output = Result<ClusterInfo, ClusterError>> + Send + 'static,
    message: &'static str,
) -> Answer<'a, ClusterInfo> {
    let task = async move { work.await.map_err(|error| error.to_body(message)) };
    outcome(tokio::spawn(task), message).boxed()
}

/// [`ClusterControl`] of this host.
#[derive(Debug, Clone)]
pub struct Operations(Arc<Cluster>);

impl Operations {
    pub fn new(cluster: &Arc<Cluster>) -> Self {
        Self(Arc::clone(cluster))
    }
}

impl ClusterControl for Operations {
    fn cluster(&self) -> Answer<'_, ClusterInfo> {
        async {
            let known = self.0.unhindered().map(|()| self.0.info());
            known.map_err(|error| error.to_body("list the hosts of the cluster"))
        }
        .boxed()
    }

    fn init_cluster(&self, request: ClusterInitRequest) -> Answer<'_, ClusterInfo> {
        change(Arc::clone(&self.0).init(request), INIT)
    }

    fn join_cluster(&self, request: ClusterJoinRequest) -> Answer<'_, ClusterInfo> {
        change(Arc::clone(&self.0).join(request), JOINING)
    }

    fn leave_cluster(&self, request: ClusterHostRequest) -> Answer<'_, ClusterInfo> {
        change(Arc::clone(&self.0).leave(request), LEAVE)
    }

    fn cluster_token(&self, request: ClusterTokenRequest) -> Answer<'_, ClusterToken> {
        async move { self.0.token(&request).map_err(|error| error.to_body("make a token")) }.boxed()
    }

    fn drain_cluster_host(
        &self,
        request: ClusterHostRequest,
        drain: bool,
    ) -> Answer<'_, ClusterInfo> {
        async move {
            let message = if drain { "drain a host" } else { "take a host back into use" };
            self.0.drain(&request, drain).map_err(|error| error.to_body(message))
        }
        .boxed()
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
