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
    Cluster as Keys, Entry, Folder, HostId, JoinAnswer, JoinToken, Liveness, Membership, Newcomer,
    Opened, Tokens,
};

use super::Cluster;
use super::client::Peer;
use super::life::{Life, room};
use super::routes::JOIN;
use crate::control::{Answer, ClusterControl};
use crate::hub::chain;

const TTL_S_DEFAULT: u64 = 3600;
const TTL_S_MAX: u64 = 7 * 24 * 3600;
/// How long a member may take to let this host in.
const JOIN_WAIT: Duration = Duration::from_secs(20);

impl Cluster {
    /// Be what this host was before, if it was a member of a cluster. It goes on without if that can't be, and says so.
    pub async fn begin(self: &Arc<Self>, api: axum::Router) {
        let _first = self.api.set(api);
        let _turn = self.turn.lock().await;
        match Folder::open(&self.folder) {
            Ok(None) => {}
            Ok(Some(opened)) if opened.cluster.members.has_left() => self.let_go(opened.folder),
            Ok(Some(opened)) => match Life::begin(self, opened).await {
                Ok(life) => self.set_life(Some(life)),
                Err(error) => {
                    tracing::error!("this host goes on without its cluster: {}", chain(&error));
                }
            },
            Err(error) => {
                let remedy = error.remedy().unwrap_or_default();
                tracing::error!(remedy, "this host goes on without its cluster: {}", chain(&error));
            }
        }
    }

    /// Serve other hosts no more: the daemon ends. It stays a member.
    pub async fn stop(&self) {
        let _turn = self.turn.lock().await;
        if let Some(life) = self.life() {
            self.set_life(None);
            life.end().await;
        }
    }

    /// Another member has removed this host.
    pub(super) fn was_removed(self: Arc<Self>) {
        tokio::spawn(async move {
            tracing::warn!("this host was removed from the cluster");
            let _turn = self.turn.lock().await;
            if let Some(life) =
                self.life().filter(|life| life.member.roster.read(Membership::has_left))
            {
                self.end(life).await;
            }
        });
    }

    async fn end(&self, life: Arc<Life>) {
        self.set_life(None);
        life.end().await;
        match Folder::open(&self.folder) {
            Ok(Some(opened)) => self.let_go(opened.folder),
            Ok(None) => {}
            Err(error) => tracing::warn!("forget the cluster: {}", chain(&error)),
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
        match Life::begin(self, opened).await {
            Ok(life) => {
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
            return ClusterInfo { schema: SCHEMA.to_owned(), here: None, hosts: Vec::new() };
        };
        let member = &life.member;
        let now = member.now();
        let own_room = self.core().map(|core| room(&core));
        let hosts = member.roster.read(|book| {
            let host = |entry: &Entry| {
                let is_here = entry.id == member.id;
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
                }
            };
            book.members().map(host).collect()
        });
        ClusterInfo { schema: SCHEMA.to_owned(), here: Some(member.id.to_string()), hosts }
    }

    fn in_one(&self, message: &str) -> Result<Arc<Life>, ErrorBody> {
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

    /// Change what is said of a host, this one if none is named.
    fn change(
        &self,
        message: &str,
        request: &ClusterHostRequest,
        change: impl FnOnce(
            &mut Membership,
            HostId,
            vmfork_cluster::Now,
        ) -> Result<(), vmfork_cluster::MemberError>,
    ) -> Result<(Arc<Life>, HostId), ErrorBody> {
        let life = self.in_one(message)?;
        let now = life.member.now();
        let changed = life.member.roster.change(|book| {
            let id = match &request.host {
                Some(host) => book.find(host)?.id,
                None => book.own(),
            };
            change(book, id, now).map(|()| id)
        });
        let id = changed.map_err(|error: vmfork_cluster::MemberError| ErrorBody {
            code: ErrorCode::NotFound,
            message: message.to_owned(),
            cause: Some(chain(&error)),
            remedy: error.remedy().map(ToOwned::to_owned),
        })?;
        life.save();
        Ok((life, id))
    }
}

impl ClusterControl for Arc<Cluster> {
    fn cluster(&self) -> Answer<'_, ClusterInfo> {
        async { Ok(self.info()) }.boxed()
    }

    fn init_cluster(&self, request: ClusterInitRequest) -> Answer<'_, ClusterInfo> {
        async move {
            let message = "make a cluster";
            let _turn = self.turn.lock().await;
            self.in_none(message)?;
            let name = request.name.unwrap_or_else(host_name);
            let keys = Keys::init(&name, &request.address).map_err(|error| {
                ErrorBody::new(ErrorCode::BadRequest, message).cause(chain(&error))
            })?;
            self.become_member(keys, message).await
        }
        .boxed()
    }

    fn join_cluster(&self, request: ClusterJoinRequest) -> Answer<'_, ClusterInfo> {
        async move {
            let message = "join a cluster";
            let _turn = self.turn.lock().await;
            self.in_none(message)?;
            let bad = |error: &dyn std::error::Error| {
                ErrorBody::new(ErrorCode::BadRequest, message).cause(chain(error))
            };
            let token: JoinToken = request.token.parse().map_err(|error| bad(&error))?;
            let name = request.name.unwrap_or_else(host_name);
            let newcomer =
                Newcomer::new(token, &name, &request.address).map_err(|error| bad(&error))?;
            let peer = Peer {
                name: newcomer.address().to_owned(),
                address: newcomer.address().to_owned(),
                server_name: Newcomer::server_name(),
                tls: newcomer.client().map_err(|error| bad(&error))?,
            };
            let answer = peer.ask::<_, JoinAnswer>(JOIN, newcomer.request(), JOIN_WAIT).await;
            let answer = answer.map_err(|error| error.to_body(message))?;
            let now = vmfork_cluster::Now { monotonic: Duration::ZERO, unix_s: 0 };
            let keys = newcomer.finish(&answer, now).map_err(|error| bad(&error))?;
            self.become_member(keys, message).await
        }
        .boxed()
    }

    fn cluster_token(&self, request: ClusterTokenRequest) -> Answer<'_, ClusterToken> {
        async move {
            let message = "make a token";
            let life = self.in_one(message)?;
            let ttl_s = request.ttl_s.unwrap_or(TTL_S_DEFAULT);
            if !(1..=TTL_S_MAX).contains(&ttl_s) {
                return Err(ErrorBody::new(ErrorCode::BadRequest, message)
                    .cause(format!("{ttl_s} s are not in 1 to {TTL_S_MAX}")));
            }
            let (address, issuer) = life.member.roster.read(|book| {
                let own = book.own_entry();
                (own.address.clone(), own.fingerprint)
            });
            let failed = |error: &dyn std::error::Error| {
                ErrorBody::new(ErrorCode::Host, message).cause(chain(error))
            };
            let mut tokens = life.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            let unix_s = life.member.now().unix_s;
            let token = tokens.issue(&address, issuer, ttl_s, unix_s);
            let token = token.map_err(|error| failed(&error))?;
            life.folder.save_tokens(&tokens).map_err(|error| failed(&error))?;
            Ok(ClusterToken {
                schema: SCHEMA.to_owned(),
                token: token.to_text(),
                expires_unix_ms: token.expires_unix_s.saturating_mul(1000),
            })
        }
        .boxed()
    }

    fn leave_cluster(&self, request: ClusterHostRequest) -> Answer<'_, ClusterInfo> {
        async move {
            let _turn = self.turn.lock().await;
            let leave = |book: &mut Membership, id, now| book.leave(id, now);
            let (life, id) = self.change("leave the cluster", &request, leave)?;
            if id == life.member.id {
                life.say_farewell().await;
                self.end(life).await;
            }
            Ok(self.info())
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
            self.change(message, &request, |book, id, now| match drain {
                true => book.drain(id, now).map(drop),
                false => book.activate(id, now).map(drop),
            })?;
            Ok(self.info())
        }
        .boxed()
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
