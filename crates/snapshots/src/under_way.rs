//! What is being written, imported or pulled, as it is listed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;
use vmfork_api::{ErrorBody, Progress, SnapshotState};
use vmfork_store::{Missing, SnapshotId, Work};

use crate::error::SnapshotError;
use crate::work;
use vmfork_fork::facts::Facts;
use vmfork_host::vm::now_unix_ms;

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doing {
    Write,
    Import,
    Pull,
}

impl Doing {
    pub(super) fn participle(self) -> &'static str {
        match self {
            Self::Write => "written",
            Self::Import => "imported",
            Self::Pull => "pulled",
        }
    }
}

/// What it is of.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    pub(super) facts: Facts,
    /// The name of its base.
    pub(super) base: Option<String>,
    /// It has no memory.
    pub(super) disk_only: bool,
}

/// A snapshot that is not all here yet, or could not be had.
#[derive(Debug)]
pub(super) struct UnderWay {
    pub(super) name: String,
    pub(super) created_unix_ms: u64,
    pub(super) doing: Doing,
    /// Once its VM has stood still for it.
    listed: Mutex<Option<Listed>>,
    pub(super) work: Arc<Work>,
    failed: Mutex<Option<ErrorBody>>,
    /// Cancelled when it has ended, well or not.
    pub(super) over: CancellationToken,
    /// Clients that wait for it, and those that want it without waiting.
    wanted_by: AtomicUsize,
    /// What a pull is to fetch, as long as it goes on.
    missing: Mutex<Option<Arc<Missing>>>,
    /// Another attempt would fail as well, or no client wants one.
    is_final: AtomicBool,
}

/// A client that wants something only as long as it waits for it.
#[derive(Debug)]
pub(super) struct Waiter(Arc<UnderWay>);

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.0.wanted_by.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.give_up();
        }
    }
}

impl UnderWay {
    pub(super) fn new(name: &str, doing: Doing, work: Arc<Work>) -> Self {
        Self {
            name: name.to_owned(),
            created_unix_ms: now_unix_ms(),
            doing,
            listed: Mutex::default(),
            work,
            failed: Mutex::default(),
            over: CancellationToken::new(),
            wanted_by: AtomicUsize::new(0),
            missing: Mutex::default(),
            is_final: AtomicBool::new(false),
        }
    }

    /// What a pull is to fetch, and in which order. `None`: it has ended, and keeps nothing open.
    pub(super) fn plan(&self, missing: Option<Missing>) {
        *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = missing.map(Arc::new);
    }

    pub(super) fn missing(&self) -> Option<Arc<Missing>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Only a client begins it again.
    pub(super) fn is_final(&self) -> bool {
        self.is_final.load(Ordering::Relaxed)
    }

    pub(super) fn be_final(&self) {
        self.is_final.store(true, Ordering::Relaxed);
    }

    /// A client wants it, whether it stays connected or not.
    pub(super) fn want(&self) {
        self.wanted_by.fetch_add(1, Ordering::AcqRel);
    }

    /// A client wants it while it waits. When the last such client has gone, it is given up.
    pub(super) fn wait(self: &Arc<Self>) -> Waiter {
        self.want();
        Waiter(Arc::clone(self))
    }

    /// Whether it goes on, and has not failed.
    pub(super) fn goes_on(&self) -> bool {
        !self.over.is_cancelled()
            && !self.work.cancelled.load(Ordering::Relaxed)
            && self.error().is_none()
    }

    pub(super) fn is_pull(&self) -> bool {
        self.doing == Doing::Pull
    }

    pub(super) fn state(&self) -> SnapshotState {
        match self.error() {
            Some(_) => SnapshotState::Failed,
            None => SnapshotState::Writing,
        }
    }

    /// What it failed with, as it is listed.
    pub(super) fn error(&self) -> Option<ErrorBody> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn reason(&self) -> Option<String> {
        self.error().map(|error| error.cause.unwrap_or(error.message))
    }

    pub(super) fn fail(&self, error: ErrorBody) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// If the task that does it has panicked, the work fails with that. Called while the task's
    /// guard is dropped.
    pub(super) fn fail_if_panicking(&self) {
        if std::thread::panicking() && self.error().is_none() {
            let message = format!("snapshot `{}` is not {}", self.name, self.doing.participle());
            self.fail(SnapshotError::Broken.to_body(message));
        }
    }

    pub(super) fn progress(&self) -> Progress {
        Progress {
            done_bytes: self.work.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.work.total_bytes.load(Ordering::Relaxed),
        }
    }

    /// What it is of, once it is listed.
    pub(super) fn listed(&self) -> Option<Listed> {
        self.listed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its VM stood still for it: from now on it is listed.
    pub(super) fn list(&self, listed: Listed) {
        *self.listed.lock().unwrap_or_else(PoisonError::into_inner) = Some(listed);
    }

    /// It is written once more, from the beginning.
    pub(super) fn begin_anew(&self) {
        self.work.done_bytes.store(0, Ordering::Relaxed);
        self.work.total_bytes.store(0, Ordering::Relaxed);
    }

    pub(super) fn give_up(&self) {
        work::cancel(&self.work);
    }
}

/// By name.
pub(super) type AllUnderWay = Mutex<BTreeMap<String, Arc<UnderWay>>>;
/// Those that can be started already: by id, also those that others are deltas of.
pub(super) type Pulls = Mutex<BTreeMap<SnapshotId, Arc<UnderWay>>>;
