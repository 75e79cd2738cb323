//! Stored guest images that hosts of a cluster pull from each other: a swarm.
//!
//! ```text
//!   pull cluster:// ─► find ══ POST ══► which image is that?           } of each member
//!   a read, or the rest ─► stored_blobs ─► ImageSwarm ─► choice ══ GET ══► stored_routes
//!                             of the chunk's host, which may ask one with the whole image ─┘
//! ```
//!
//! A pulled image is in the host's store, without its chunks. The store gets a chunk from here when
//! it is read, verifies it and keeps it. So it is there for other hosts, also after a restart.
//!
//! Promises: a chunk that is given has the content that its name says. It leaves the hosts with the
//! whole image about once, however many pull it. A host that is away costs a wait and no chunk, as
//! long as another one has it.
//!
//! Left to others: the store ([`Images`]), when chunks are read.

mod choice;
mod connections;
mod swarm;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vmfork_api::ErrorBody;
use vmfork_cluster::HostId;
use vmfork_store::{BlobError, SnapshotId, VerifiedChunk};

use self::swarm::{Answer, Common, ImageSwarm, ask_all};
use crate::error::{CallError, StoredError};
use crate::hosts::Hosts;
use vmfork_host::metrics::ImageChunk;

pub(crate) use self::swarm::Reader;

/// Where hosts ask each other for stored images.
pub(super) const STORED: &str = "/cluster/v1/stored-images";

/// A stored image that a host is asked about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// The name of an image.
    Name(String),
    /// What is stored of one.
    Id(SnapshotId),
}

/// What a host has of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// What its store calls it.
    pub name: String,
    pub id: SnapshotId,
    /// All of it is there.
    pub is_whole: bool,
    /// How many runs its profiles there were learnt from.
    #[serde(default)]
    pub runs: u32,
}

/// What this host has of stored guest images. Calls block.
pub trait Images: Debug + Send + Sync {
    /// What it has of one.
    fn find(&self, wanted: &Wanted) -> Option<Told>;

    /// A file of one, or a chunk.
    ///
    /// # Errors
    /// There is none, or it can't be read.
    fn give(&self, key: &str) -> Result<Vec<u8>, BlobError>;

    /// Keep a chunk that was brought for another host.
    ///
    /// # Errors
    /// It can't be written.
    fn keep(&self, chunk: &VerifiedChunk<Bytes>) -> Result<(), ErrorBody>;
}

/// Which files a host is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Served {
    /// That it has.
    IfHere,
    /// Chunks that it brings, too, from hosts that have all of the image.
    OrBrought,
}

impl Served {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::IfHere => "here",
            Self::OrBrought => "brought",
        }
    }
}

/// How long is kept what is known of an image that this host only brings for others.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// A swarm, and when it was needed last.
#[derive(Debug)]
struct Kept {
    swarm: Arc<ImageSwarm>,
    used: Instant,
}

/// Of this host: one per daemon.
#[derive(Debug, Default)]
pub(super) struct Stored {
    here: OnceLock<Arc<dyn Images>>,
    swarms: Mutex<HashMap<SnapshotId, Kept>>,
    common: Arc<Common>,
}

impl Stored {
    pub(super) fn set_here(&self, here: Arc<dyn Images>) {
        let _first = self.here.set(here);
    }

    /// Nothing is served before it is set.
    pub(super) fn here(&self) -> Option<&Arc<dyn Images>> {
        self.here.get()
    }

    fn swarms(&self) -> MutexGuard<'_, HashMap<SnapshotId, Kept>> {
        self.swarms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn swarm(&self, id: SnapshotId) -> Option<Arc<ImageSwarm>> {
        let here = self.here()?;
        let make = || Arc::new(ImageSwarm::new(id, Arc::clone(here), Arc::clone(&self.common)));
        let mut swarms = self.swarms();
        let kept = swarms.entry(id).or_insert_with(|| Kept { swarm: make(), used: Instant::now() });
        kept.used = Instant::now();
        Some(Arc::clone(&kept.swarm))
    }

    /// For something on this host that reads an image.
    pub(super) fn reader(&self, id: SnapshotId) -> Option<Reader> {
        self.swarm(id).map(Reader::new)
    }

    /// Whether this host pulls an image, or reads one that it pulls.
    pub(super) fn pulls(&self, id: SnapshotId) -> bool {
        self.swarms().get(&id).is_some_and(|kept| kept.swarm.is_read())
    }

    /// A host pulls an image, which this one may pull, too.
    pub(super) fn heard(&self, id: SnapshotId, host: HostId) {
        let swarm = self.swarms().get(&id).map(|kept| Arc::clone(&kept.swarm));
        swarm.inspect(|swarm| swarm.heard(host));
    }

    /// A chunk was given to another host. `relayed`: it was brought for that.
    pub(super) fn given(&self, relayed: bool) {
        self.common.given.fetch_add(1, Ordering::Relaxed);
        self.common.relayed.fetch_add(relayed.into(), Ordering::Relaxed);
    }

    /// End connections to hosts that are no members, and forget what is not needed any more. Called
    /// now and then.
    pub(super) fn keep(&self, is_member: impl Fn(HostId) -> bool) {
        self.common.connections.keep(is_member);
        let mut swarms = self.swarms();
        swarms.retain(|_, kept| kept.swarm.is_read() || kept.used.elapsed() < IDLE_MAX);
        swarms.values().for_each(|kept| kept.swarm.tidy());
    }

    /// What has happened to chunks.
    pub(super) fn counts(&self) -> [(ImageChunk, u64); 3] {
        let Common { came, given, relayed, .. } = &*self.common;
        let counts =
            [(ImageChunk::Came, came), (ImageChunk::Given, given), (ImageChunk::Relayed, relayed)];
        counts.map(|(what, count)| (what, count.load(Ordering::Relaxed)))
    }

    /// The stored image that a name means on a host, or on any.
    ///
    /// # Errors
    /// No host has one, or several have different ones; the host that is named does not answer.
    pub(super) async fn find(
        &self,
        hosts: &Hosts,
        name: &str,
        host: Option<&str>,
    ) -> Result<Told, StoredError> {
        let only = host.map(|host| hosts.find_all(&[host.to_owned()])).transpose()?;
        if let Some(host) = host.filter(|_| only.as_ref().is_some_and(|it| it.contains(&hosts.id)))
        {
            return Err(StoredError::Own { host: host.to_owned() });
        }
        let wanted = Wanted::Name(name.to_owned());
        let answers = ask_all(hosts, &wanted, &self.common.connections).await;
        let is_asked = |it: &Answer| only.as_ref().is_none_or(|only| only.contains(&it.host));
        let (mut found, mut silent) = (Vec::new(), Vec::new());
        let mut was_asked = false;
        for Answer { name, told, .. } in answers.into_iter().filter(is_asked) {
            was_asked = true;
            match told {
                Ok(told) => found.extend(told.map(|told| (name, told))),
                Err(error) => silent.push((name, error)),
            }
        }
        let Some((first, told)) = found.first() else {
            let name = name.to_owned();
            return Err(match host.map(str::to_owned) {
                Some(host) if !was_asked => CallError::Gone { host }.into(),
                Some(host) => match silent.pop() {
                    Some((_, error)) => error.into(),
                    None => StoredError::NotThere { name, host },
                },
                None => {
                    let silent = silent.into_iter().map(|(name, _)| name).collect();
                    StoredError::NoHost { name, silent }
                }
            });
        };
        match found.iter().find(|(_, other)| other.id != told.id) {
            None => Ok(told.clone()),
            Some((second, _)) => Err(StoredError::Several {
                name: name.to_owned(),
                first: first.clone(),
                second: second.clone(),
            }),
        }
    }
}
