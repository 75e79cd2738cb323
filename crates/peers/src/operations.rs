//! What users do with a cluster: make one, join, look at it, drain, leave.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use vmfork_api::{
    ClusterHost, ClusterHostRequest, ClusterInfo, ClusterInitRequest, ClusterJoinRequest,
    ClusterToken, ClusterTokenRequest, ErrorBody, ErrorCode, HostLiveness, HostState, SCHEMA,
};
use vmfork_cluster::membership::HostState as Stands;
use vmfork_cluster::{
    Cluster as Keys, Entry, Folder, HostId, JoinAnswer, JoinError, JoinToken, Liveness,
    MemberError, Membership, Newcomer, Opened, Tokens,
};

use super::client::Peer;
use super::cluster::Cluster;
use super::life::{BeginError, Life};
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
        let hindered = |cause: String, remedy: Option<String>| ErrorBody {
            code: ErrorCode::Host,
            message: "be a member of the cluster".to_owned(),
            cause: Some(cause),
            remedy: Some(remedy.unwrap_or_else(|| {
                "put that right: it is tried again every few seconds; or `vmfork cluster leave`"
                    .to_owned()
            })),
        };
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
                    Err(error) => Some(hindered(chain(&error), None)),
                }
            }
            Err(error) => Some(hindered(chain(&error), error.remedy())),
        };
        let before = std::mem::replace(&mut *self.hindrance(), hindrance.clone());
        let Some(hindrance) = hindrance else { return true };
        if before.is_none_or(|before| before.cause != hindrance.cause) {
            let (cause, remedy) = (hindrance.cause, hindrance.remedy);
            let (cause, remedy) = (cause.unwrap_or_default(), remedy.unwrap_or_default());
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

    async fn become_member(
        self: &Arc<Self>,
        keys: Keys,
        message: &str,
    ) -> Result<ClusterInfo, ErrorBody> {
        let folder = Folder::create(&self.folder, &keys).map_err(|error| ErrorBody {
            code: ErrorCode::Host,
            message: message.to_owned(),
            cause: Some(chain(&error)),
            remedy: error.remedy(),
        })?;
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
                Err(ErrorBody::new(ErrorCode::Host, message).cause(chain(&error)).remedy(
                    "name an address of this host with two free ports, `--address IP:PORT`",
                ))
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
    fn unhindered(&self, message: &str) -> Result<(), ErrorBody> {
        match self.hindrance().clone() {
            None => Ok(()),
            Some(hindrance) => Err(ErrorBody { message: message.to_owned(), ..hindrance }),
        }
    }

    fn in_one(&self, message: &str) -> Result<Arc<Life>, ErrorBody> {
        self.unhindered(message)?;
        self.life().ok_or_else(|| {
            ErrorBody::new(ErrorCode::Conflict, message)
                .cause("this host is in no cluster")
                .remedy("`vmfork cluster init` makes one, `vmfork cluster join` joins one")
        })
    }

    fn in_none(&self, message: &str) -> Result<(), ErrorBody> {
        match self.life() {
            None if !Folder::is_used(&self.folder) => Ok(()),
            _ => Err(ErrorBody::new(ErrorCode::Conflict, message)
                .cause("this host is in a cluster already")
                .remedy("`vmfork cluster leave` first")),
        }
    }

    async fn init(self: Arc<Self>, request: ClusterInitRequest) -> Result<ClusterInfo, ErrorBody> {
        let _turn = self.turn.lock().await;
        self.in_none(INIT)?;
        let name = request.name.unwrap_or_else(host_name);
        let keys = Keys::init(&name, &request.address).map_err(|error| refused(INIT, &error))?;
        self.become_member(keys, INIT).await
    }

    async fn join(self: Arc<Self>, request: ClusterJoinRequest) -> Result<ClusterInfo, ErrorBody> {
        let _turn = self.turn.lock().await;
        self.in_none(JOINING)?;
        let bad = |error: &dyn std::error::Error| {
            ErrorBody::new(ErrorCode::BadRequest, JOINING).cause(chain(error))
        };
        let token: JoinToken = request.token.parse().map_err(|error| {
            bad(&error).remedy("`vmfork cluster token` on a member prints one, for one host")
        })?;
        let name = request.name.unwrap_or_else(host_name);
        let newcomer = Newcomer::new(token, &name, &request.address)
            .map_err(|error| refused(JOINING, &error))?;
        let peer = Peer {
            name: newcomer.address().to_owned(),
            address: newcomer.address().to_owned(),
            server_name: Newcomer::server_name(),
            tls: newcomer.client().map_err(|error| bad(&error))?,
        };
        let answer = peer.ask::<_, JoinAnswer>(JOIN, newcomer.request(), JOIN_WAIT).await;
        let answer = answer.map_err(|error| error.to_body(JOINING))?;
        let now = vmfork_cluster::Now { monotonic: Duration::ZERO, unix_s: 0 };
        let keys = newcomer.finish(&answer, now).map_err(|error| bad(&error))?;
        self.become_member(keys, JOINING).await
    }

    async fn leave(self: Arc<Self>, request: ClusterHostRequest) -> Result<ClusterInfo, ErrorBody> {
        let _turn = self.turn.lock().await;
        if let Err(hindrance) = self.unhindered(LEAVE) {
            return self.leave_untold(&request, hindrance);
        }
        let life = self.in_one(LEAVE)?;
        let id = found(&life, &request).map_err(|error| no_host(LEAVE, &error))?;
        if id != life.member.hosts.id {
            life.say_removed(id).await;
        }
        let now = life.member.hosts.now();
        let left = life.member.hosts.roster.change(|book| match book.member(id) {
            Some(_) => book.leave(id, now),
            // Another caller was faster.
            None => Ok(()),
        });
        left.map_err(|error| no_host(LEAVE, &error))?;
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
        hindrance: ErrorBody,
    ) -> Result<ClusterInfo, ErrorBody> {
        if request.host.is_some() {
            return Err(hindrance);
        }
        let opened = Folder::open(&self.folder).ok().flatten();
        let name = opened.map(|opened| opened.cluster.members.own_entry().name.clone());
        Folder::forget(&self.folder).map_err(|error| {
            let body = ErrorBody::new(ErrorCode::Host, LEAVE).cause(chain(&error));
            body.remedy(format!("remove {} by hand", self.folder.display()))
        })?;
        *self.hindrance() = None;
        let note = format!(
            "The other hosts were not told: `vmfork cluster leave {}` on one of them",
            name.as_deref().unwrap_or("HOST")
        );
        tracing::warn!(note, "this host has left its cluster, as which it could not begin");
        Ok(ClusterInfo { note: Some(note), ..self.info() })
    }
}

/// The host that is named, this one if none is.
fn found(life: &Life, request: &ClusterHostRequest) -> Result<HostId, MemberError> {
    life.member.hosts.roster.read(|book| match &request.host {
        Some(host) => book.find(host).map(|entry| entry.id),
        None => Ok(book.own()),
    })
}

fn refused(message: &str, error: &JoinError) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::BadRequest,
        message: message.to_owned(),
        cause: Some(chain(error)),
        remedy: error.remedy().map(ToOwned::to_owned),
    }
}

fn no_host(message: &str, error: &MemberError) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::NotFound,
        message: message.to_owned(),
        cause: Some(chain(error)),
        remedy: error.remedy().map(ToOwned::to_owned),
    }
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
            self.0.unhindered("list the hosts of the cluster")?;
            Ok(self.0.info())
        }
        .boxed()
    }

    // Tasks of their own: half a change would leave this host a member of nothing, or others with
    // one that is none.

    fn init_cluster(&self, request: ClusterInitRequest) -> Answer<'_, ClusterInfo> {
        outcome(tokio::spawn(Arc::clone(&self.0).init(request)), INIT).boxed()
    }

    fn join_cluster(&self, request: ClusterJoinRequest) -> Answer<'_, ClusterInfo> {
        outcome(tokio::spawn(Arc::clone(&self.0).join(request)), JOINING).boxed()
    }

    fn leave_cluster(&self, request: ClusterHostRequest) -> Answer<'_, ClusterInfo> {
        outcome(tokio::spawn(Arc::clone(&self.0).leave(request)), LEAVE).boxed()
    }

    fn cluster_token(&self, request: ClusterTokenRequest) -> Answer<'_, ClusterToken> {
        async move {
            let message = "make a token";
            let life = self.0.in_one(message)?;
            let ttl_s = request.ttl_s.unwrap_or(TTL_S_DEFAULT);
            if !(1..=TTL_S_MAX).contains(&ttl_s) {
                return Err(ErrorBody::new(ErrorCode::BadRequest, message)
                    .cause(format!("{ttl_s} s are not in 1 to {TTL_S_MAX}")));
            }
            let (address, issuer) = life.member.hosts.roster.read(|book| {
                let own = book.own_entry();
                (own.address.clone(), own.fingerprint)
            });
            let failed = |error: &dyn std::error::Error| {
                ErrorBody::new(ErrorCode::Host, message).cause(chain(error))
            };
            let mut tokens = life.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            let unix_s = life.member.hosts.now().unix_s;
            let token = tokens.issue(&address, issuer, ttl_s, unix_s);
            let token = token.map_err(|error| failed(&error))?;
            life.records.save_tokens(&tokens).map_err(|error| failed(&error))?;
            Ok(ClusterToken {
                schema: SCHEMA.to_owned(),
                token: token.to_text(),
                expires_unix_ms: token.expires_unix_s.saturating_mul(1000),
            })
        }
        .boxed()
    }

    fn drain_cluster_host(
        &self,
        request: ClusterHostRequest,
        drain: bool,
    ) -> Answer<'_, ClusterInfo> {
        async move {
            let message = if drain { "drain a host" } else { "take a host back into use" };
            let life = self.0.in_one(message)?;
            let now = life.member.hosts.now();
            let changed = found(&life, &request).and_then(|id| {
                life.member.hosts.roster.change(|book| match drain {
                    true => book.drain(id, now),
                    false => book.activate(id, now),
                })
            });
            changed.map_err(|error| no_host(message, &error))?;
            life.save();
            Ok(self.0.info())
        }
        .boxed()
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
