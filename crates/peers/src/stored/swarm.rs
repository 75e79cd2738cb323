//! The chunks of one stored image, from whichever hosts have them.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blake3::Hash;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, join_all};
use tokio::sync::Semaphore;
use vmfork_cluster::HostId;
use vmfork_store::{SnapshotId, VerifiedChunk, is_profile};

use super::choice::{Ask, Holder, order};
use super::connections::Connections;
use super::{Images, STORED, Served, Told, Wanted};
use crate::client::WORD_WAIT;
use crate::error::{CallError, Missing};
use crate::hosts::{Hosts, There};

/// How long what is known of the holders counts.
const HOLDERS_FOR: Duration = Duration::from_secs(3);
/// How long what hosts have learnt counts.
const LEARNT_FOR: Duration = Duration::from_secs(1);
/// How long a host counts as one that pulls the image after it asked who has it.
const HEARD_FOR: Duration = Duration::from_secs(6);
/// How long a host may take for a file that it has.
const FILE_WAIT: Duration = Duration::from_secs(10);
/// How long a host may take for a chunk that it brings. It asks no further host after `FILE_WAIT`,
/// and waits no longer than that for the last: it answers before it is given up.
const RELAY_WAIT: Duration = Duration::from_secs(21);
/// How many chunks are remembered: 16 MiB at most, if none could be compressed.
const RECENT_MAX: usize = 64;
/// How many chunks are written at a time that were brought for other hosts.
const KEEPING_MAX: usize = 32;
/// How long a chunk that has come is remembered: the store has written it by then.
const RECENT_FOR: Duration = Duration::from_secs(10);
/// How long a host that failed is asked last: longer than it is waited for.
const SHUN_FOR: Duration = Duration::from_secs(30);

/// What is common to all images.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) connections: Connections,
    /// One permit for each chunk that is being kept for another host.
    keeping: Arc<Semaphore>,
    /// Chunks that came, that were given to other hosts, and that were brought for that.
    pub(super) came: AtomicU64,
    pub(super) given: AtomicU64,
    pub(super) relayed: AtomicU64,
}

impl Default for Common {
    fn default() -> Self {
        let (came, given, relayed) = Default::default();
        let (connections, keeping) = (Connections::default(), Semaphore::new(KEEPING_MAX));
        Self { connections, keeping: Arc::new(keeping), came, given, relayed }
    }
}

type Coming = BoxFuture<'static, Result<Bytes, Arc<Missing>>>;

/// A chunk that comes, or has come.
#[derive(Debug)]
struct Recent {
    hash: Hash,
    /// When it came; `None`: it did not.
    landed: Arc<OnceLock<Option<Instant>>>,
    coming: Shared<Coming>,
}

impl Recent {
    /// Whether it comes, or has come a moment ago.
    fn is_useful(&self) -> bool {
        match self.landed.get() {
            // It comes, or its task has panicked.
            None => !self.coming.peek().is_some_and(Result::is_err),
            Some(came) => came.is_some_and(|at| at.elapsed() < RECENT_FOR),
        }
    }
}

/// What a member says of a stored image.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) host: HostId,
    pub(super) name: String,
    pub(super) told: Result<Option<Told>, CallError>,
}

/// A stored image that other hosts have.
#[derive(Debug)]
pub(crate) struct ImageSwarm {
    pub(super) id: SnapshotId,
    here: Arc<dyn Images>,
    common: Arc<Common>,
    known: Mutex<Option<(Instant, Vec<Holder>)>>,
    heard: Mutex<HashMap<HostId, Instant>>,
    /// That is being asked again.
    looks: AtomicBool,
    /// Hosts that have failed, and until when they are asked last.
    shunned: Mutex<HashMap<HostId, Instant>>,
    recent: Mutex<VecDeque<Recent>>,
    readers: AtomicUsize,
}

/// Something on this host that reads the image: as long as it is there, the host pulls the image.
#[derive(Debug)]
pub(crate) struct Reader(Arc<ImageSwarm>);

impl Reader {
    pub(super) fn new(swarm: Arc<ImageSwarm>) -> Self {
        swarm.readers.fetch_add(1, Ordering::AcqRel);
        Self(swarm)
    }

    pub(crate) fn swarm(&self) -> &Arc<ImageSwarm> {
        &self.0
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ImageSwarm {
    pub(super) fn new(id: SnapshotId, here: Arc<dyn Images>, common: Arc<Common>) -> Self {
        Self {
            id,
            here,
            common,
            known: Mutex::default(),
            heard: Mutex::default(),
            looks: AtomicBool::new(false),
            shunned: Mutex::default(),
            recent: Mutex::default(),
            readers: AtomicUsize::new(0),
        }
    }

    /// Whether something on this host reads the image.
    pub(super) fn is_read(&self) -> bool {
        self.readers.load(Ordering::Acquire) > 0
    }

    /// Forget chunks that have come a while ago.
    pub(super) fn tidy(&self) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(Recent::is_useful);
    }

    /// Who has the image or pulls it, this host too: as was known last, while that is asked again.
    async fn holders(self: &Arc<Self>, hosts: &Arc<Hosts>) -> Vec<Holder> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut holders = match known {
            None => self.look(hosts).await,
            Some((at, holders)) => {
                if at.elapsed() > HOLDERS_FOR && !self.looks.swap(true, Ordering::AcqRel) {
                    let (this, hosts) = (Arc::clone(self), Arc::clone(hosts));
                    tokio::spawn(async move {
                        this.look(&hosts).await;
                        this.looks.store(false, Ordering::Release);
                    });
                }
                holders
            }
        };
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.retain(|_, at| at.elapsed() < HEARD_FOR);
        for host in heard.keys() {
            if !holders.iter().any(|holder| holder.host == *host) {
                holders.push(Holder { host: *host, is_whole: false, runs: 0 });
            }
        }
        holders
    }

    /// Whether the last look is longer ago.
    fn looked_before(&self, ago: Duration) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().is_none_or(|(at, _)| at.elapsed() > ago)
    }

    /// Ask all members. One that does not answer has what it had.
    async fn look(&self, hosts: &Hosts) -> Vec<Holder> {
        let answers = ask_all(hosts, &Wanted::Id(self.id), &self.common.connections).await;
        let own = tokio::task::block_in_place(|| self.here.find(&Wanted::Id(self.id)));
        // It pulls the image, or is about to.
        let is_whole = own.is_some_and(|told| told.is_whole);
        let own = Holder { host: hosts.id, is_whole, runs: 0 };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.as_ref().map_or(&[][..], |(_, holders)| holders);
        let others = answers.into_iter().filter_map(|Answer { host, told, .. }| match told {
            Ok(told) => told.map(|Told { is_whole, runs, .. }| Holder { host, is_whole, runs }),
            Err(_) => before.iter().find(|holder| holder.host == host).copied(),
        });
        let holders: Vec<_> = others.chain([own]).collect();
        *known = Some((Instant::now(), holders.clone()));
        holders
    }

    /// A host has asked who has the image: it pulls it. It is one of the holders before this host
    /// asks all of them again.
    pub(crate) fn heard(&self, host: HostId) {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.insert(host, Instant::now());
    }

    fn is_shunned(&self, host: HostId) -> bool {
        let mut shunned = self.shunned.lock().unwrap_or_else(PoisonError::into_inner);
        shunned.retain(|_, until| *until > Instant::now());
        shunned.contains_key(&host)
    }

    fn shun(&self, host: HostId) {
        let mut shunned = self.shunned.lock().unwrap_or_else(PoisonError::into_inner);
        shunned.insert(host, Instant::now() + SHUN_FOR);
    }

    /// A chunk's file, verified. `relays`: another host waits for it.
    pub(crate) async fn chunk(
        self: &Arc<Self>,
        hosts: &Arc<Hosts>,
        key: &str,
        hash: Hash,
        relays: bool,
    ) -> Result<Bytes, Arc<Missing>> {
        let holders = self.holders(hosts).await;
        let asks = order(&hash, hosts.id, &holders, relays);
        let may_wait = asks.iter().any(|ask| matches!(ask, Ask::Relay(_)));
        let make = || {
            let (this, hosts, key) = (Arc::clone(self), Arc::clone(hosts), key.to_owned());
            async move {
                let chunk = this.bring(&hosts, &key, hash, asks, relays).await?;
                let file = chunk.file().clone();
                // Once for all that wait for it, and none waits for this. What this host reads
                // itself, its store keeps. On a host whose disk is too slow, a chunk is not kept.
                if relays && let Ok(turn) = Arc::clone(&this.common.keeping).try_acquire_owned() {
                    drop(tokio::task::spawn_blocking(move || {
                        this.keep(&chunk);
                        drop(turn);
                    }));
                }
                Ok(file)
            }
        };
        // All that wait for a chunk of this host's own get the same one. Of two hosts that ask each
        // other to bring one, neither waits for what the other waits for.
        if may_wait { make().await } else { self.join(hash, make).await }
    }

    /// One of those that come, or have come a moment ago: until the store has written it, another
    /// host may ask for it.
    fn join<F>(&self, hash: Hash, make: impl FnOnce() -> F) -> Shared<Coming>
    where
        F: Future<Output = Result<Bytes, Arc<Missing>>> + Send + 'static,
    {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(Recent::is_useful);
        if let Some(one) = recent.iter().find(|one| one.hash == hash) {
            return one.coming.clone();
        }
        // A task of its own: it ends, also when all that waited for it have gone.
        let landed = Arc::new(OnceLock::new());
        let (lands, made) = (Arc::clone(&landed), make());
        let task = tokio::spawn(async move {
            let outcome = made.await;
            lands.get_or_init(|| outcome.is_ok().then(Instant::now));
            outcome
        });
        let coming = async { task.await.unwrap_or_else(|_| Err(Arc::new(Missing::Broken))) };
        let coming = coming.boxed().shared();
        recent.push_back(Recent { hash, landed, coming: coming.clone() });
        if recent.len() > RECENT_MAX {
            recent.pop_front();
        }
        coming
    }

    async fn bring(
        &self,
        hosts: &Hosts,
        key: &str,
        hash: Hash,
        mut asks: Vec<Ask>,
        relays: bool,
    ) -> Result<VerifiedChunk<Bytes>, Missing> {
        // The order stays among those that have not failed, and among those that have.
        asks.sort_by_key(|ask| self.is_shunned(ask.host()));
        if asks.is_empty() {
            return Err(Missing::NoHolder);
        }
        let (began, mut tried) = (Instant::now(), Vec::new());
        let (mut damaged, mut last) = (Vec::new(), None);
        for ask in asks {
            let host = ask.host();
            // What a host could not bring, it has not.
            if tried.contains(&host) {
                continue;
            }
            if relays && began.elapsed() > FILE_WAIT {
                break;
            }
            tried.push(host);
            match self.ask(hosts, ask, key).await {
                Ok(Some(file)) => {
                    if let Some(chunk) = VerifiedChunk::verify(hash, file) {
                        self.common.came.fetch_add(1, Ordering::Relaxed);
                        return Ok(chunk);
                    }
                    let name =
                        hosts.roster.read(|book| book.member(host).map(|it| it.name.clone()));
                    let name = name.unwrap_or_else(|| host.to_string());
                    tracing::warn!(host = name, key, "a host has a damaged chunk");
                    damaged.push(name);
                    self.shun(host);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%host, key, %error, "another host is asked");
                    // One that says why it brings nothing is there.
                    if !matches!(error, CallError::Refused { .. }) {
                        self.shun(host);
                    }
                    last = Some(error);
                }
            }
        }
        Err(Missing::Failed { asked: tried.len(), damaged, last })
    }

    /// The other host is given it, whether it is kept or not. Blocking.
    fn keep(&self, chunk: &VerifiedChunk<Bytes>) {
        if let Err(error) = self.here.keep(chunk) {
            tracing::warn!(%error, "a chunk that was brought for another host is not kept");
        }
    }

    /// A file from one host. `None`: it has none.
    async fn ask(&self, hosts: &Hosts, ask: Ask, key: &str) -> Result<Option<Bytes>, CallError> {
        let entry = hosts.roster.read(|book| book.member(ask.host()).cloned());
        let Some(entry) = entry else { return Ok(None) };
        let peer = hosts.peer(&entry);
        let (how, wait) = match ask {
            Ask::Relay(_) => (Served::OrBrought, RELAY_WAIT),
            Ask::Here(_) => (Served::IfHere, FILE_WAIT),
        };
        let path = format!("{STORED}/{}/{}/{key}", self.id, how.word());
        self.common.connections.get(entry.id, &peer, &path, wait).await
    }

    /// One of its small files, from any host that has it: those with all of it first. A profile
    /// comes from the host that learnt it from the most runs.
    pub(crate) async fn file(
        self: &Arc<Self>,
        hosts: &Arc<Hosts>,
        key: &str,
    ) -> Result<Option<Bytes>, Missing> {
        let holders = match is_profile(key) && self.looked_before(LEARNT_FOR) {
            true => self.look(hosts).await,
            false => self.holders(hosts).await,
        };
        let mut others: Vec<_> = holders.iter().filter(|it| it.host != hosts.id).collect();
        let runs =
            |holder: &Holder| if is_profile(key) { Reverse(holder.runs) } else { Reverse(0) };
        others.sort_by_key(|it| (self.is_shunned(it.host), runs(it), !it.is_whole));
        if others.is_empty() {
            return Err(Missing::NoHolder);
        }
        let (asked, mut last, mut whole_lacks) = (others.len(), None, false);
        for holder in others {
            match self.ask(hosts, Ask::Here(holder.host), key).await {
                Ok(Some(file)) => return Ok(Some(file)),
                Ok(None) => whole_lacks |= holder.is_whole,
                Err(error) => {
                    self.shun(holder.host);
                    last = Some(error);
                }
            }
        }
        // One that failed may have it, unless one that has all of the image has not.
        match last {
            Some(_) if !whole_lacks => Err(Missing::Failed { asked, damaged: Vec::new(), last }),
            _ => Ok(None),
        }
    }
}

/// What the other members say of a stored image, those that are not gone.
pub(super) async fn ask_all(
    hosts: &Hosts,
    wanted: &Wanted,
    connections: &Connections,
) -> Vec<Answer> {
    let There { alive, suspect, gone: _ } = hosts.there();
    let peers = alive.into_iter().chain(suspect).map(|entry| (entry.id, hosts.peer(&entry)));
    let asked = peers.map(|(host, peer)| async move {
        let told = connections.ask(host, &peer, STORED, wanted, WORD_WAIT).await;
        let told = told.inspect_err(|error| {
            tracing::debug!(host = peer.name, %error, "it does not tell which images it has");
        });
        Answer { host, name: peer.name.clone(), told }
    });
    join_all(asked).await
}
