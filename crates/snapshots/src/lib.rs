//! Stored snapshots: taken from running VMs, kept in a store, started any number of times.
//!
//! ```text
//!   create: freeze (as a fork) ─► VM runs on ─► store written in the background ─► Ready ─► record what it touches
//!   start:  open (descriptor, table, state) ─► engine, prefetch ─► QEMUs attach, load, run, take identities
//! ```
//!
//! [`Snapshots`] knows the store and what is open of it. A snapshot is open as long as a VM may
//! need its pages; if it is removed meanwhile, its VMs go on, and what they may need stays in the
//! store until they have ended. What is being written is listed from the first moment, and nothing
//! of it is left if that fails.

mod collect;
pub mod create;
mod error;
pub mod keep;
mod opened;
pub mod prefetch;
mod query;
mod record;
pub mod start;
mod tell;
#[cfg(test)]
mod tests;
pub mod transfer;
mod turns;
mod under_way;
mod work;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use tokio::runtime::Handle;
use vmfork_store::{HotChunks, SnapshotId, Store, StoreError, Stored, Work};

use self::collect::Collector;
pub use self::error::SnapshotError;
use self::opened::Open;
pub use self::opened::{Base, Opened};
use self::tell::Tell;
use self::turns::Turns;
use self::under_way::{AllUnderWay, Pulls};
use self::work::Works;
use vmfork_fork::Forker;
use vmfork_fork::facts::Facts;
use vmfork_host::core::Core;

/// Decompressed chunks that are kept, over all snapshots: what faults come back to within moments.
const HOT_BYTES: u64 = 64 << 20;

// What the API takes as a name, the store does, too, and the other way round.
const _: () = assert!(vmfork_store::NAME_BYTES_MAX == vmfork_api::NAME_BYTES_MAX);

/// Stored snapshots, with the host that they are taken and started on.
#[derive(Debug)]
pub struct Library {
    pub core: Arc<Core>,
    pub forker: Arc<Forker>,
    pub snapshots: Arc<Snapshots>,
}

/// The store of one host, and what is open of it.
#[derive(Debug)]
pub struct Snapshots {
    store: Store,
    hot: Arc<HotChunks>,
    open: Open,
    under_way: AllUnderWay,
    pulls: Pulls,
    recordings: Arc<Recordings>,
    works: Works,
    turns: Turns,
    collector: Arc<Collector>,
    /// For stores that are reached over a network.
    runtime: Handle,
}

/// How many VMs of each snapshot are being recorded.
type Recordings = Mutex<BTreeMap<SnapshotId, usize>>;

impl Library {
    /// For readers of events.
    fn tell(&self) -> Tell<'_> {
        Tell { events: &self.core.events, vm: None }
    }
}

impl Snapshots {
    /// The store in this folder. What an earlier daemon had begun to write and not finished is
    /// cleared away.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The folder belongs to another user, or cannot be written to.
    pub fn new(folder: &Path) -> Result<Self, StoreError> {
        let store = Store::folder(folder)?;
        match store.collect() {
            Ok(cleared) => tracing::debug!(?cleared, "store of snapshots"),
            // It can be read all the same.
            Err(error) => tracing::warn!(%error, "clear away what is left of snapshots"),
        }
        let hot = HotChunks::new(HOT_BYTES);
        let runtime = Handle::current();
        Ok(Self {
            hot,
            open: Open::default(),
            under_way: AllUnderWay::default(),
            pulls: Pulls::default(),
            recordings: Arc::default(),
            works: Works::default(),
            turns: Turns::default(),
            collector: Collector::new(&store, &runtime),
            runtime,
            store,
        })
    }

    fn facts(&self, stored: &Stored) -> Result<Facts, SnapshotError> {
        let descriptor = stored.descriptor();
        let name = &descriptor.name;
        let facts: Facts = serde_json::from_value(descriptor.vm.clone())
            .map_err(|source| SnapshotError::Facts { name: name.clone(), source })?;
        let pages = descriptor.pages;
        if facts.spec().memory_bytes != pages * vmfork_image::PAGE_BYTES {
            let said = facts.spec().memory_bytes;
            return Err(SnapshotError::Size { name: name.clone(), said, pages });
        }
        Ok(facts)
    }

    /// Something that takes a while begins, on as many threads as the host has cores; ended by
    /// [`Snapshots::stop`].
    pub(crate) fn work(&self) -> Arc<Work> {
        self.works.begin(Work::default())
    }

    /// The same with a number of threads.
    pub(crate) fn work_on(&self, threads: usize) -> Arc<Work> {
        self.works.begin(Work::new(threads))
    }

    /// End all that takes a while: the daemon stops.
    pub fn stop(&self) {
        self.works.stop();
    }
}
