//! The store of one host, what is open of it, and the host that it is used on.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use vmfork_store::{HotChunks, ImageDescriptor, Role, SnapshotId, Store, StoreError, Stored, Work};

use crate::collect::Collector;
use crate::error::SnapshotError;
use crate::kind::is_guest_image;
use crate::location::{ClusterImages, Places};
use crate::opened::Open;
use crate::turns::Turns;
use crate::under_way::{AllUnderWay, Pulls, UnderWay};
use crate::work::Works;
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
    pub(crate) store: Store,
    pub(crate) hot: Arc<HotChunks>,
    pub(crate) open: Open,
    pub(crate) under_way: AllUnderWay,
    pub(crate) pulls: Pulls,
    pub(crate) recordings: Arc<Recordings>,
    works: Works,
    pub(crate) turns: Turns,
    /// Held while a snapshot with disks is opened or removed: see `keep_for_disks`.
    pub(crate) disk_gate: Mutex<()>,
    pub(crate) collector: Arc<Collector>,
    /// Held while a guest image becomes one here, or goes.
    pub(crate) image_turn: tokio::sync::Mutex<()>,
    /// Names of stored guest images that are being brought, one for each client.
    coming: Mutex<Vec<String>>,
    /// The copies of images that are being stored, by the images' names.
    seeding: AllUnderWay,
    /// Held while the profiles of an image change.
    pub(crate) learning: Mutex<()>,
    /// How many runs the profiles of stored images were learnt from.
    profile_runs: Mutex<HashMap<SnapshotId, u32>>,
    /// Another number on each host: hosts fetch in different orders.
    pub(crate) salt: u64,
    pub(crate) places: Places,
    /// For clients that wait.
    pub(crate) runtime: Handle,
}

/// How many VMs of each snapshot are being recorded.
pub(crate) type Recordings = Mutex<BTreeMap<SnapshotId, usize>>;

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
            disk_gate: Mutex::default(),
            image_turn: tokio::sync::Mutex::default(),
            coming: Mutex::default(),
            seeding: AllUnderWay::default(),
            learning: Mutex::default(),
            profile_runs: Mutex::default(),
            salt: RandomState::new().hash_one(0),
            collector: Collector::new(&store, &runtime),
            places: Places::new(runtime.clone()),
            runtime,
            store,
        })
    }

    /// What a VM that is started from it needs of the host.
    pub(crate) fn facts(&self, stored: &Stored) -> Result<Facts, SnapshotError> {
        let descriptor = stored.descriptor();
        let name = &descriptor.name;
        if is_guest_image(descriptor) {
            return Err(self.not_found(name));
        }
        let facts: Facts = serde_json::from_value(descriptor.vm.clone())
            .map_err(|source| SnapshotError::Facts { name: name.clone(), source })?;
        let pages = descriptor.image(&Role::Memory).map(ImageDescriptor::pages);
        let said = facts.spec().memory_bytes;
        if let Some(pages) = pages.filter(|pages| said != pages * vmfork_image::PAGE_BYTES) {
            return Err(SnapshotError::Size { name: name.clone(), said, pages });
        }
        Ok(facts)
    }

    /// Images are pulled from hosts of this host's cluster, too.
    pub fn set_cluster(&self, cluster: Arc<dyn ClusterImages>) {
        self.places.set_cluster(cluster);
    }

    pub(crate) fn coming(&self) -> MutexGuard<'_, Vec<String>> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn profile_runs(&self) -> MutexGuard<'_, HashMap<SnapshotId, u32>> {
        self.profile_runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn seeding(&self) -> MutexGuard<'_, BTreeMap<String, Arc<UnderWay>>> {
        self.seeding.lock().unwrap_or_else(PoisonError::into_inner)
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
