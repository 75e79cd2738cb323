//! Guest images are taken to hosts that lack the one that a VM booted from: its clones' disk is in
//! there.
//!
//! ```text
//!   fork, before the pause ──► give ═══ POST ═══► have ──┐
//!   a descriptor of clones ───────────────────► bring ──┴──► GuestImages ──► fetch ═══ GET, GET … ═══► the sender's store
//! ```
//!
//! | route | does |
//! |---|---|
//! | `POST /cluster/v1/guest-images` | [`Wanted`] → [`There`]: have it, taking it from who asks |
//! | `GET /cluster/v1/guest-images/ROOT` | what an image consists of: its `image.json` |
//! | `GET /cluster/v1/guest-images/ROOT/FILE` | the bytes of one of its files |
//!
//! `ROOT` is the hash of its root disk. Each host decides what an image is called.
//! Promises: an image is present exactly as on its source, or not at all. It replaces no other.
//! It is transferred once, however many forks wait for it, and the transfer continues when none
//! waits any more.
//! So a fork continues without a host that is slow to take it. The host then has it for a later
//! fork.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::Uri;
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use bytes::BytesMut;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use http_body_util::{BodyExt, Limited};
use serde::{Deserialize, Serialize};
use tokio::task::block_in_place;
use tokio::time::{sleep_until, timeout, timeout_at};
use tokio_util::io::ReaderStream;
use tokio_util::sync::CancellationToken;
use vmfork_api::ErrorBody;
use vmfork_cluster::HostId;
use vmfork_cluster::allocate::HostView;
use vmfork_guest_image::{ImageFiles, Metadata, Store};

use super::client::Peer;
use super::error::{CallError, FetchError, RemoteForkError};
use super::hosts::Hosts;
use super::remote_fork::Order;
use vmfork_host::core::Core;
use vmfork_host::error::chain;
use vmfork_host::vm::Identity;
use vmfork_rest::http::ApiError;

pub(super) const GUEST_IMAGES: &str = "/cluster/v1/guest-images";
/// How long the head of an answer may take: the host only has to open a file.
const HEAD_WAIT: Duration = Duration::from_secs(10);
/// Of what an image consists of, and of what a host says instead; each is a page.
const TEXT_BYTES_MAX: usize = 1 << 20;
/// Written at once where it arrives.
const BLOCK_BYTES: usize = 1 << 20;
/// Read at once where it comes from.
const READ_BYTES: usize = 256 << 10;
/// Most time that one gets, whatever who asks says.
const WAIT_MAX: Duration = Duration::from_secs(3600);
/// How much longer than the others a host may take at least, before a fork goes on without it.
const SLOWER_BY: Duration = Duration::from_secs(5);
/// Images that hosts are remembered to have.
const KNOWN_MAX: usize = 4096;

/// What hosts that ask for an image are answered about.
const GIVE: &str = "give a guest image";

/// Why a host gets no clones of a fork.
pub(crate) const TAKES_LONG: &str =
    "it takes far longer than others to take the guest image, which a later fork finds there";

/// An image that another host is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wanted {
    /// BLAKE3 of its root disk, in hex.
    root_blake3: String,
    /// What who asks calls it.
    name: String,
    /// How long it may take to come.
    timeout_ms: u64,
}

impl Wanted {
    /// What is done, for its error.
    fn message(&self, from: &str) -> String {
        format!("take guest image `{}` from host `{from}`", self.name)
    }
}

/// It is there.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct There {
    /// What the host calls it.
    pub(super) name: String,
}

/// A host that images are had from.
trait Giver: Clone + Send + Sync + 'static {
    fn name(&self) -> &str;

    /// Its answer to a GET.
    fn get(&self, path: String) -> BoxFuture<'_, Result<Response, CallError>>;
}

impl Giver for Peer {
    fn name(&self) -> &str {
        &self.name
    }

    fn get(&self, path: String) -> BoxFuture<'_, Result<Response, CallError>> {
        async move {
            let mut request = Request::new(Body::empty());
            *request.uri_mut() = path.parse::<Uri>().unwrap_or_default();
            Ok(self.send(request, HEAD_WAIT).await?.map(Body::new))
        }
        .boxed()
    }
}

type Fetch = BoxFuture<'static, Result<String, Arc<FetchError>>>;

/// Guest images that go from host to host.
pub(super) struct GuestImages {
    hosts: Arc<Hosts>,
    fetches: Fetches,
}

/// The images that are on their way to this host, and those that others are known to have.
#[derive(Default)]
struct Fetches {
    /// By root disk; each is gone when it has ended.
    under_way: Mutex<HashMap<String, WeakShared<Fetch>>>,
    known: Mutex<HashSet<(HostId, String)>>,
}

impl Fetches {
    /// Have an image here, from `giver` if it is not here yet. → what it is called here.
    ///
    /// # Errors
    /// It can't be had, or not until `deadline`.
    async fn ensure(
        &self,
        store: &Store,
        wanted: &Wanted,
        giver: impl Giver,
        deadline: Instant,
    ) -> Result<String, FetchError> {
        let make = || fetch(store.clone(), wanted.clone(), giver.clone()).boxed();
        loop {
            let (fetch, is_own) = self.join(&wanted.root_blake3, make);
            let had = timeout_at(deadline.into(), fetch).await;
            let had = had.map_err(|_elapsed| FetchError::Late)?;
            // What another host did not give, this one may.
            if had.is_ok() || is_own {
                return had.map_err(FetchError::Shared);
            }
        }
    }

    /// The fetch in progress; if there is none, a new one, and whether it is new.
    fn join(&self, root_blake3: &str, make: impl FnOnce() -> Fetch) -> (Shared<Fetch>, bool) {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.retain(|_, fetch| fetch.upgrade().is_some());
        let there = under_way.get(root_blake3).and_then(WeakShared::upgrade);
        if let Some(fetch) = there.filter(|fetch| fetch.peek().is_none()) {
            return (fetch, false);
        }
        let fetch = make().shared();
        // It continues without its waiters.
        tokio::spawn(timeout(WAIT_MAX, fetch.clone()));
        under_way.extend(fetch.downgrade().map(|weak| (root_blake3.to_owned(), weak)));
        (fetch, true)
    }

    fn is_known(&self, host: HostId, root_blake3: &str) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.contains(&(host, root_blake3.to_owned()))
    }

    fn has(&self, host: HostId, root_blake3: &str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert((host, root_blake3.to_owned()));
    }
}

async fn fetch(store: Store, wanted: Wanted, giver: impl Giver) -> Result<String, Arc<FetchError>> {
    let fetched = try_fetch(&store, &wanted, &giver, Instant::now()).await;
    fetched.map_err(|error| {
        tracing::warn!("{}: {}", wanted.message(giver.name()), chain(&error));
        Arc::new(error)
    })
}

async fn try_fetch(
    store: &Store,
    wanted: &Wanted,
    giver: &impl Giver,
    began: Instant,
) -> Result<String, FetchError> {
    let root = &wanted.root_blake3;
    // Who looked before may have looked while it came.
    if let Some(there) = store.open_root(&wanted.name, root)? {
        return Ok(there.metadata.name);
    }
    let path = format!("{GUEST_IMAGES}/{root}");
    let described = text(giver, answer(giver, path.clone()).await?).await?;
    let wrong = |why: String| FetchError::Description { host: giver.name().to_owned(), why };
    let metadata: Metadata =
        serde_json::from_slice(&described).map_err(|error| wrong(error.to_string()))?;
    if metadata.root_blake3() != Some(root) {
        return Err(wrong("its root disk is another one than was asked for".to_owned()));
    }
    let bytes = metadata.size_bytes();
    let mut arrival = block_in_place(|| store.arrive(metadata))?;
    for file in arrival.files() {
        let mut content = answer(giver, format!("{path}/{file}")).await?.into_data_stream();
        let mut arriving = arrival.begin(&file)?;
        let mut block = BytesMut::new();
        loop {
            let next = tokio::time::timeout(HEAD_WAIT, content.next()).await;
            let broken = |source| FetchError::Broken { file: file.clone(), source };
            let silent =
                || broken(axum::Error::new(std::io::Error::from(std::io::ErrorKind::TimedOut)));
            let Some(piece) = next.map_err(|_elapsed| silent())? else { break };
            let piece = piece.map_err(broken)?;
            block.extend_from_slice(&piece);
            if block.len() >= BLOCK_BYTES {
                block_in_place(|| arriving.write(&block))?;
                block.clear();
            }
        }
        block_in_place(|| arriving.write(&block).and_then(|()| arrival.end(arriving)))?;
    }
    let name = block_in_place(|| arrival.commit())?;
    let ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(image = name, from = giver.name(), bytes, ms, "a guest image has come");
    Ok(name)
}

/// The body of an answer that is one.
async fn answer(giver: &impl Giver, path: String) -> Result<Body, CallError> {
    let response = giver.get(path).await?;
    let status = response.status();
    if status.is_success() {
        return Ok(response.into_body());
    }
    let host = giver.name().to_owned();
    let said = text(giver, response.into_body()).await?;
    Err(match serde_json::from_slice(&said) {
        Ok(source) => CallError::Refused { host, source },
        Err(_) => CallError::Answer { host, what: status.to_string() },
    })
}

async fn text(giver: &impl Giver, body: Body) -> Result<Bytes, CallError> {
    let whole = Limited::new(body, TEXT_BYTES_MAX).collect().await;
    let whole = whole.map_err(|error| CallError::Answer {
        host: giver.name().to_owned(),
        what: error.to_string(),
    })?;
    Ok(whole.to_bytes())
}

/// What a host gives of its images.
pub(super) fn giving(store: Store) -> Router {
    Router::new()
        .route(&format!("{GUEST_IMAGES}/{{root}}"), get(describe))
        .route(&format!("{GUEST_IMAGES}/{{root}}/{{file}}"), get(content))
        .with_state(store)
}

async fn describe(
    State(store): State<Store>,
    Path(root): Path<String>,
) -> Result<Json<Metadata>, ApiError> {
    let files = open(&store, &root).map_err(|error| error.to_body(GIVE))?;
    Ok(Json(files.metadata))
}

async fn content(
    State(store): State<Store>,
    Path((root, name)): Path<(String, String)>,
) -> Result<Body, ApiError> {
    let files = open(&store, &root).map_err(|error| error.to_body(GIVE))?;
    let message = || format!("give `{name}` of a guest image");
    let file = files.file(&name).ok_or_else(|| FetchError::NoFile.to_body(message()))?;
    let file = tokio::fs::File::from_std(file);
    Ok(Body::from_stream(ReaderStream::with_capacity(file, READ_BYTES)))
}

fn open(store: &Store, root_blake3: &str) -> Result<ImageFiles, FetchError> {
    let found = block_in_place(|| store.open_root("", root_blake3))?;
    found.ok_or_else(|| FetchError::NoImage { hash: word(root_blake3) })
}

/// Enough of a hash to tell it from others.
fn word(hash: &str) -> String {
    hash.chars().take(16).collect()
}

/// The answers of hosts, as far as they come in time: once one has been had, or some `have` it
/// already, others may take as long again, and no less than `slower_by`.
async fn until_slow<H, E>(
    asked: impl IntoIterator<Item = impl Future<Output = (H, Result<(), E>)>>,
    have: bool,
    slower_by: Duration,
) -> Vec<(H, Result<(), E>)> {
    let began = Instant::now();
    let mut asked: FuturesUnordered<_> = asked.into_iter().collect();
    let mut answers = Vec::new();
    let mut until = have.then(|| began + slower_by);
    loop {
        let slow = async {
            match until {
                Some(until) => sleep_until(until.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            answer = asked.next() => match answer {
                Some(answer) => {
                    if answer.1.is_ok() {
                        let took = began.elapsed();
                        until = Some(began + took + took.max(slower_by));
                    }
                    answers.push(answer);
                }
                None => return answers,
            },
            () = slow => return answers,
        }
    }
}

impl GuestImages {
    pub(super) fn new(hosts: &Arc<Hosts>) -> Self {
        Self { hosts: Arc::clone(hosts), fetches: Fetches::default() }
    }

    /// Have an image here, from another host if need be. → what it is called here.
    pub(super) async fn take(
        &self,
        store: &Store,
        from: HostId,
        wanted: &Wanted,
    ) -> Result<String, ErrorBody> {
        let deadline = Instant::now() + Duration::from_millis(wanted.timeout_ms).min(WAIT_MAX);
        let message = || format!("take guest image `{}`", wanted.name);
        let there = block_in_place(|| store.open_root(&wanted.name, &wanted.root_blake3));
        match there.map_err(|error| FetchError::from(error).to_body(message()))? {
            Some(files) => Ok(files.metadata.name),
            None => {
                let giver = self.hosts.peer_of(from).map_err(|error| error.to_body(message()))?;
                let message = wanted.message(&giver.name);
                let had = self.fetches.ensure(store, wanted, giver, deadline).await;
                had.map_err(|error| error.to_body(message))
            }
        }
    }

    /// Have the image here that the clones of an order need, from the host that sent it. The order
    /// says then what the image is called here, and how much time is left.
    ///
    /// # Errors
    /// It does not arrive in time, or the clones are not wanted any more.
    pub(super) async fn bring(
        &self,
        core: &Core,
        from: HostId,
        order: &mut Order,
        given_up: &CancellationToken,
    ) -> Result<(), ErrorBody> {
        let Some(root_blake3) = order.facts.spec().root_blake3().map(ToOwned::to_owned) else {
            return Ok(());
        };
        let began = Instant::now();
        let (name, timeout_ms) = (order.facts.spec().image.clone(), order.timeout_ms);
        let wanted = Wanted { root_blake3, name, timeout_ms };
        order.facts.inherited.spec.image = tokio::select! {
            had = self.take(&core.images, from, &wanted) => had?,
            () = given_up.cancelled() => {
                let message = format!("take guest image `{}`", wanted.name);
                return Err(vmfork_fork::Error::GivenUp.to_body(message));
            }
        };
        let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        order.timeout_ms = timeout_ms.saturating_sub(took_ms);
        Ok(())
    }

    /// Have hosts take the image that a VM booted from, before it is paused. → whether there are
    /// some that can't, or take far longer than others, which are closed from now on: others are to
    /// be planned with.
    ///
    /// # Errors
    /// There is no time left, or no host to plan with.
    pub(crate) async fn give(
        &self,
        parent: &Identity,
        shares: &[(HostId, u32)],
        views: &mut [HostView],
        until: (Instant, &CancellationToken),
    ) -> Result<bool, RemoteForkError> {
        let Some(root_blake3) = parent.spec().root_blake3().map(ToOwned::to_owned) else {
            return Ok(false);
        };
        let (deadline, given_up) = until;
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let wanted = Wanted { root_blake3, name: parent.spec().image.clone(), timeout_ms };
        let message = format!("have a host take guest image `{}`", wanted.name);
        let root = &wanted.root_blake3;
        let others = shares.iter().map(|(host, _)| *host).filter(|host| *host != self.hosts.id);
        let (have, lack): (Vec<HostId>, Vec<HostId>) =
            others.partition(|host| self.fetches.is_known(*host, root));
        let asked = lack.iter().map(|host| {
            let (host, wanted) = (*host, &wanted);
            async move { (host, self.give_to(host, wanted, left).await) }
        });
        let answers = tokio::select! {
            answers = until_slow(asked, !have.is_empty(), SLOWER_BY) => answers,
            // Who is to freeze it finds out.
            () = given_up.cancelled() => return Ok(false),
        };
        let mut some_cant = false;
        let is_late = |host: &HostId| answers.iter().all(|(answered, _)| answered != host);
        for view in views.iter_mut().filter(|view| lack.contains(&view.id) && is_late(&view.id)) {
            tracing::warn!(host = view.name, "it gets no clones: {TAKES_LONG}");
            view.closed = Some(TAKES_LONG);
            some_cant = true;
        }
        for (host, answer) in answers {
            let Err(error) = answer else {
                self.fetches.has(host, root);
                continue;
            };
            let error = error.to_body(message.as_str());
            for view in views.iter_mut().filter(|view| view.id == host) {
                view.closed = Some("it can't take the guest image: the daemon's log says why");
                some_cant = true;
            }
            let is_open = |view: &HostView| view.id == self.hosts.id || view.closed.is_none();
            if Instant::now() >= deadline || !views.iter().any(is_open) {
                return Err(RemoteForkError::Image(error));
            }
            tracing::warn!("a host gets no clones: {error}");
        }
        Ok(some_cant)
    }

    async fn give_to(
        &self,
        host: HostId,
        wanted: &Wanted,
        wait: Duration,
    ) -> Result<(), FetchError> {
        let peer = self.hosts.peer_of(host)?;
        let there = peer.ask::<Wanted, There>(GUEST_IMAGES, wanted, wait).await?;
        tracing::debug!(host = peer.name, image = there.name, "it has the guest image");
        Ok(())
    }
}

#[cfg(test)]
mod tests;
