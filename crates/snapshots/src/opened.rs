//! A stored snapshot that VMs are started from: its image with an engine, its device state in
//! memory.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vmfork_engine::{Engine, HostImage};
use vmfork_image::{PAGE_BYTES, PageTable};
use vmfork_store::{Blobs, Role, SnapshotId};

use crate::bases::Bases;
use crate::disks::StoredDisk;
use vmfork_fork::facts::Facts;
use vmfork_host::admission::{Admission, Lease};
use vmfork_host::disks::DiskContent;
use vmfork_host::error::Refusal;
use vmfork_host::vm::CameOf;
use vmfork_host::vm::machine::Lead;

/// Open as long as a VM may need its pages.
#[derive(Debug)]
pub struct Opened {
    /// Its name may become another one's while this is open.
    pub id: SnapshotId,
    /// Its own, and those of the snapshots that its memory is a delta on.
    chain: Vec<SnapshotId>,
    /// What its VMs' disks hold at first.
    pub(super) disks: Vec<DiskContent>,
    pub(super) facts: Facts,
    pub(super) engine: Arc<Engine>,
    /// The device state, as QEMU reads it.
    pub(super) state: OwnedFd,
    pub(super) lead: Option<Lead>,
    /// Whether its working set is loaded, or being loaded, and what else is done for it once.
    pub(super) working_set: AtomicBool,
    prediction: AtomicBool,
    /// Bytes per second at which all of it is fetched; 0: no client has asked for that.
    pub(super) hydration: AtomicU64,
    /// What is still to come, promised; `None` until a VM is to start.
    memory: Mutex<Option<Lease>>,
}

/// The right to load a working set. Its drop frees it for another caller, unless the set was loaded
/// whole.
#[derive(Debug)]
pub(super) struct WorkingSetClaim {
    opened: Weak<Opened>,
    is_loaded: bool,
}

impl WorkingSetClaim {
    /// What it is the working set of; `None`: all its VMs have ended.
    pub(super) fn opened(&self) -> Option<Arc<Opened>> {
        self.opened.upgrade()
    }

    /// All of it is there.
    pub(super) fn loaded(mut self) {
        self.is_loaded = true;
    }
}

impl Drop for WorkingSetClaim {
    fn drop(&mut self) {
        if let Some(opened) = self.opened.upgrade().filter(|_| !self.is_loaded) {
            opened.working_set.store(false, Ordering::Relaxed);
        }
    }
}

impl Opened {
    /// Open from now on. `id` and `chain`: its own, and those of all that its memory is a delta on.
    /// `state`: the device state, and what its stream begins with.
    pub(super) fn new(
        (id, chain): (SnapshotId, Vec<SnapshotId>),
        disks: Vec<DiskContent>,
        facts: Facts,
        engine: Arc<Engine>,
        (state, lead): (OwnedFd, Option<Lead>),
    ) -> Self {
        Self {
            id,
            chain,
            disks,
            facts,
            engine,
            state,
            lead,
            working_set: AtomicBool::new(false),
            prediction: AtomicBool::new(false),
            hydration: AtomicU64::new(0),
            memory: Mutex::new(None),
        }
    }

    /// The caller must load the working set, unless another does, or has.
    pub(super) fn claim_working_set(self: &Arc<Self>) -> Option<WorkingSetClaim> {
        let is_mine = !self.working_set.swap(true, Ordering::Relaxed);
        is_mine.then(|| WorkingSetClaim { opened: Arc::downgrade(self), is_loaded: false })
    }

    /// All of it is to be fetched at this rate, or at a higher one that was asked for before.
    /// → whether the caller must start the hydration, because it has not started yet.
    pub(super) fn claim_hydration(&self, bytes_per_s: NonZeroU64) -> bool {
        let before = self.hydration.fetch_max(bytes_per_s.get(), Ordering::Relaxed);
        if before < bytes_per_s.get() {
            self.engine.hydrate(bytes_per_s);
        }
        before == 0
    }

    /// Try again to fetch what is left.
    pub(super) fn hydrate_again(&self) {
        if let Some(bytes_per_s) = NonZeroU64::new(self.hydration.load(Ordering::Relaxed)) {
            self.engine.hydrate(bytes_per_s);
        }
    }

    /// Have the host's memory for what its VMs may still touch, once for all of them.
    ///
    /// # Errors
    /// There is not enough: the figures.
    pub(super) fn promise_memory(&self, admission: &Admission) -> Result<(), Refusal> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.is_none() {
            *memory = Some(admission.cache(self.missing_bytes())?);
        }
        Ok(())
    }

    /// What has come since is used, and needs no promise any more.
    pub(super) fn update_promise(&self) {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lease) = memory.as_ref().filter(|lease| lease.bytes() > 0) {
            lease.is_enough(self.missing_bytes());
        }
    }

    fn missing_bytes(&self) -> u64 {
        self.engine.image().missing_pages().saturating_mul(PAGE_BYTES)
    }

    /// Whether the caller must start to fetch what its faults predict, because that has not started
    /// yet.
    pub(super) fn claim_prediction(&self) -> bool {
        !self.prediction.swap(true, Ordering::Relaxed)
    }

    /// Whether the memory of its VMs may still need pages of the snapshot `id`, which it is or is a
    /// delta on.
    pub(super) fn needs(&self, id: SnapshotId) -> bool {
        self.chain.contains(&id) && self.engine.image().missing_pages() > 0
    }

    /// What the next snapshot of a VM that descends from this one is a delta of. `name` is what it
    /// is called now.
    pub(super) fn bases(&self, name: &str) -> Bases {
        let memory = self.engine.image().table().map(|table| (Role::Memory, table.clone()));
        Bases::of((name, self.id), memory.into_iter().chain(tables(&self.disks)))
    }
}

/// The page tables of disks, by role.
pub(super) fn tables(disks: &[DiskContent]) -> impl Iterator<Item = (Role, PageTable)> {
    disks.iter().filter_map(|content| {
        let role = Role::Disk(content.spec.name.parse().ok()?);
        Some((role, content.image.table()?.clone()))
    })
}

impl CameOf for Opened {}

/// What is open, by id.
#[derive(Debug, Default)]
pub(super) struct OpenOnes {
    pub(super) snapshots: HashMap<SnapshotId, Weak<Opened>>,
    /// Those that others are deltas of, too.
    pub(super) images: HashMap<SnapshotId, Weak<HostImage>>,
    /// Disks of snapshots. Each is open as long as a disk reads from it.
    pub(super) disks: Vec<Weak<StoredDisk>>,
    /// Stores that chunks come from, by location.
    pub(super) remotes: HashMap<String, Weak<dyn Blobs>>,
}

impl OpenOnes {
    /// All that are open.
    pub(super) fn all(&self) -> Vec<Arc<Opened>> {
        self.snapshots.values().filter_map(Weak::upgrade).collect()
    }

    /// The disks that something reads from.
    pub(super) fn stored_disks(&self) -> Vec<Arc<StoredDisk>> {
        self.disks.iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn retain(&mut self) {
        self.snapshots.retain(|_, opened| opened.strong_count() > 0);
        self.images.retain(|_, image| image.strong_count() > 0);
        self.disks.retain(|disk| disk.strong_count() > 0);
        self.remotes.retain(|_, blobs| blobs.strong_count() > 0);
    }
}

/// What is open.
pub(super) type Open = Mutex<OpenOnes>;
