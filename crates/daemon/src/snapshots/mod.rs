//! Stored snapshots: taken from running VMs, kept in a store, started any number of times.
//!
//! ```text
//!   create: freeze (as a fork) ─► VM runs on ─► store written in the background ─► Ready ─► record what it touches
//!   start:  open (descriptor, table, state) ─► engine, prefetch ─► QEMUs attach, load, run, take identities
//! ```
//!
//! [`Snapshots`] knows the store and what is open of it. A snapshot is open as long as a VM may need its pages; then
//! it can't be removed. What is being written is listed from the first moment, and nothing of it is left if that fails.

mod control;
mod create;
mod error;
mod facts;
mod keep;
mod opened;
pub(crate) mod prefetch;
mod query;
mod record;
mod start;
mod transfer;
mod work;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use vmfork_api::{ErrorBody, ErrorCode, Progress, SnapshotState};
use vmfork_store::{HotChunks, SnapshotId, Store, StoreError, Stored, Work};

pub(crate) use self::error::SnapshotError;
use self::facts::Facts;
use self::opened::Open;
pub(crate) use self::opened::{Base, Opened};
use self::work::Works;
use crate::vm::machine::Machine;
use crate::vm::now_unix_ms;

/// Decompressed chunks that are kept, over all snapshots: what faults come back to within moments.
const HOT_BYTES: u64 = 64 << 20;

/// The store of one host, and what is open of it.
#[derive(Debug)]
pub struct Snapshots {
    store: Store,
    hot: Arc<HotChunks>,
    open: Open,
    under_way: Mutex<BTreeMap<String, Arc<UnderWay>>>,
    recordings: Arc<Recordings>,
    works: Works,
    /// For stores that are reached over a network.
    runtime: Handle,
    /// Held by who changes a profile.
    learning: Mutex<()>,
}

/// How many VMs of each snapshot are being recorded.
type Recordings = Mutex<BTreeMap<SnapshotId, usize>>;

/// A snapshot that is being written, or could not be.
#[derive(Debug)]
pub(crate) struct UnderWay {
    name: String,
    created_unix_ms: u64,
    /// What it is of, and the name of its base; once the VM has stood still for it.
    listed: OnceLock<(Facts, Option<String>)>,
    work: Arc<Work>,
    failed: Mutex<Option<String>>,
    /// Cancelled when the writing has ended, well or not.
    over: CancellationToken,
}

impl UnderWay {
    fn new(name: &str, work: Arc<Work>) -> Self {
        Self {
            name: name.to_owned(),
            created_unix_ms: now_unix_ms(),
            listed: OnceLock::new(),
            work,
            failed: Mutex::default(),
            over: CancellationToken::new(),
        }
    }

    fn state(&self) -> SnapshotState {
        match self.reason() {
            Some(_) => SnapshotState::Failed,
            None => SnapshotState::Writing,
        }
    }

    fn reason(&self) -> Option<String> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn fail(&self, reason: String) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
    }

    fn progress(&self) -> Progress {
        Progress {
            done_bytes: self.work.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.work.total_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Snapshots {
    /// The store in this folder. What an earlier daemon had begun to write and not finished is cleared away.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The folder is somebody else's, or can't be written to.
    pub fn new(folder: &Path) -> Result<Self, StoreError> {
        let store = Store::folder(folder)?;
        match store.collect() {
            Ok(cleared) => tracing::debug!(?cleared, "store of snapshots"),
            // It can be read all the same.
            Err(error) => tracing::warn!(%error, "clear away what is left of snapshots"),
        }
        let hot = HotChunks::new(HOT_BYTES);
        Ok(Self {
            store,
            hot,
            open: Open::default(),
            under_way: Mutex::default(),
            recordings: Arc::default(),
            works: Works::default(),
            runtime: Handle::current(),
            learning: Mutex::default(),
        })
    }

    fn under_way(&self) -> MutexGuard<'_, BTreeMap<String, Arc<UnderWay>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn facts(&self, stored: &Stored) -> Result<Facts, SnapshotError> {
        let descriptor = stored.descriptor();
        let name = &descriptor.name;
        let facts: Facts = serde_json::from_value(descriptor.vm.clone())
            .map_err(|source| SnapshotError::Facts { name: name.clone(), source })?;
        let pages = descriptor.pages;
        if facts.memory_bytes != pages * vmfork_image::PAGE_BYTES {
            let said = facts.memory_bytes;
            return Err(SnapshotError::Size { name: name.clone(), said, pages });
        }
        Ok(facts)
    }

    /// Whether a snapshot can be worked with: not while it is being written.
    ///
    /// # Errors
    /// It is.
    fn check_written(&self, name: &str, message: &str) -> Result<(), ErrorBody> {
        let is_writing = self.under_way().get(name).is_some_and(|one| one.reason().is_none());
        // One that is being pulled is there.
        if !is_writing || self.store.descriptor(name).is_ok() {
            return Ok(());
        }
        Err(ErrorBody {
            code: ErrorCode::Conflict,
            message: message.to_owned(),
            cause: Some(format!("`{name}` is still being written")),
            remedy: Some(format!("wait until `vmfork snapshot ls` shows `{name}` ready")),
        })
    }

    /// Wait until a snapshot is not being written (any more).
    async fn until_written(&self, name: &str) {
        let under_way = self.under_way().get(name).cloned();
        if let Some(under_way) = under_way {
            under_way.over.cancelled().await;
        }
    }

    /// Something that takes a while begins, on as many threads as the host has cores; ended by [`Snapshots::stop`].
    pub(super) fn work(&self) -> Arc<Work> {
        self.works.begin(Work::default())
    }

    /// The same with a number of threads.
    pub(super) fn work_on(&self, threads: usize) -> Arc<Work> {
        self.works.begin(Work::new(threads))
    }

    /// End all that takes a while: the daemon stops.
    pub(crate) fn stop(&self) {
        self.works.stop();
    }
}

/// The machine type of a QEMU, with its version.
async fn machine_type(machine: &Machine) -> Result<String, SnapshotError> {
    let answer = machine.qmp.qom_get("/machine", "type").await?;
    let name = answer.as_str().unwrap_or_default();
    Ok(name.strip_suffix("-machine").unwrap_or(name).to_owned())
}

fn name_is_taken(name: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message: format!("take snapshot `{name}`"),
        cause: Some(format!("there is a snapshot named `{name}` already")),
        remedy: Some(format!("choose another name, or `vmfork snapshot rm {name}`")),
    }
}
