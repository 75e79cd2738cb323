//! The VMs of this host, and what all of them share.
//!
//! ```text
//!   Core ──┬── registry: VMs by name
//!          ├── launcher, pool: QEMUs
//!          ├── admission, quotas, state, metrics
//!          └── events of page engines and QEMUs ──► the VM concerned ends
//! ```
//!
//! Promises: a VM ends once, and the first reason stands; a name is one VM's. Left to others: where
//! VMs come from (an image, a fork, a stored snapshot, another host).

mod accounts;
pub mod agents;
mod disks;
pub mod events;
mod family;
mod images;
mod lifetimes;
mod machines;
mod quotas;
mod registry;
mod resize;
mod stalls;
mod tally;
mod tell;
mod volumes;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use vmfork_api::LostVm;
use vmfork_control::Events;
use vmfork_engine::{Engine, EngineEvent, EventSink};
use vmfork_guest_image::Store;
use vmfork_image::ImageId;
use vmfork_qemu::pool::{self, Limits, Pool};
use vmfork_qemu::{Accel, Shape};

pub use self::family::KILL_TIMEOUT;
pub use self::images::open_image;
pub use self::machines::{PendingMachine, start_machines};
pub use self::quotas::{Keeper, Quotas, TOLD_WITHIN};
pub use self::registry::{Registry, Reservation};
use self::tally::Tally;
use crate::admission::{self, Admission, Lease};
use crate::cgroup::Cgroups;
use crate::config::Config;
use crate::disks::HostDisks;
use crate::error::chain;
pub use crate::error::store_code;
use crate::lifetime::Lifetimes;
use crate::metrics::Metrics;
use crate::state::State;
use crate::vm::launch::{LaunchError, Launcher};
use crate::vm::log::Log;
use crate::vm::machine::Machine;
use crate::vm::{End, Identity, Origin, Vm};
use vmfork_guest_link::agent::HostMail;

/// What a host that is short of memory must have free, on top of its reserve, before it prefetches
/// anything.
const SPARE_BYTES: u64 = 256 << 20;
/// Shapes that have waiting QEMUs at a time, those used last. VMs with disks of another size make
/// another shape.
const POOL_SHAPES_MAX: usize = 8;
/// Most waiting QEMUs over all shapes.
const POOL_MAX: usize = 1024;
/// A shape that was not used for this long gives its waiting QEMUs back.
const POOL_IDLE: Duration = Duration::from_secs(600);
/// How long QEMUs that were killed may take to leave their cgroups: one with much memory takes a
/// second.
const CGROUP_WAIT: Duration = Duration::from_secs(10);

/// What all parts of the control plane share.
pub struct Core {
    pub config: Arc<Config>,
    pub metrics: Arc<Metrics>,
    pub state: Arc<State>,
    pub registry: Arc<Registry>,
    /// When VMs end by themselves.
    pub lifetimes: Arc<Lifetimes>,
    pub admission: Admission,
    pub quotas: Quotas,
    keeper: Arc<dyn Keeper>,
    /// What has happened here, for those that want to know.
    pub events: Arc<Events>,
    /// Messages that no parent has received yet.
    pub mail: HostMail,
    /// Where the host has cgroup v2 with the memory controller.
    pub cgroups: Option<Arc<Cgroups>>,
    pub images: Store,
    /// The writable disks of VMs.
    pub disks: Arc<HostDisks>,
    pub launcher: Arc<Launcher>,
    pub pool: Pool<Shape, Machine, LaunchError>,
    pub cores: usize,
    /// Device states that are loaded at the same time.
    pub loading: Semaphore,
    engine_events: mpsc::UnboundedSender<EngineEvent>,
    next_image: AtomicU64,
    /// The engines of all images that someone holds, also of snapshots whose clones have not
    /// attached yet.
    engines: Mutex<Vec<Weak<Engine>>>,
    next_book: AtomicU64,
    pool_hits: AtomicU64,
    pool_misses: AtomicU64,
    garbage: tokio::sync::Notify,
    pub tally: Tally,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

impl vmfork_qemu::pool::Pooled for Machine {
    fn is_alive(&self) -> bool {
        Self::is_alive(self)
    }
}

/// What the control plane of one host is made of.
pub struct Parts {
    pub config: Arc<Config>,
    pub state: Arc<State>,
    pub metrics: Arc<Metrics>,
    pub admission: Admission,
    pub cgroups: Option<Arc<Cgroups>>,
    pub disks: Arc<HostDisks>,
    pub keeper: Arc<dyn Keeper>,
    /// By which this life of the daemon is told from others.
    pub life: u32,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").finish_non_exhaustive()
    }
}

impl Core {
    /// On a tokio runtime. Without a QEMU it starts as well: `doctor` reports that, and each
    /// request for a VM fails with it.
    pub async fn start(parts: Parts) -> Arc<Self> {
        let Parts { config, state, metrics, admission, cgroups, disks, keeper, life } = parts;
        match vmfork_qemu::probe::find(Some(&config.qemu)).await {
            Ok(binary) => {
                if let Some(warning) = binary.version.warning() {
                    tracing::warn!(warning, "QEMU");
                }
                tracing::info!(path = %binary.path.display(), version = %binary.version, "QEMU");
            }
            Err(error) => tracing::error!("no VM can be started: {}", chain(&error)),
        }
        let launcher = Arc::new(Launcher::new(
            config.qemu.clone(),
            config.shim(),
            config.qemu_uid_base,
            Arc::clone(&state),
            Arc::clone(&disks),
        ));
        let cores = admission::cores();
        let total_max = (config.pool as usize).saturating_mul(POOL_SHAPES_MAX).min(POOL_MAX);
        let limits = Limits { total_max, starting_max: cores, idle_after: POOL_IDLE };
        let pool = {
            let launcher = Arc::clone(&launcher);
            let admission = admission.clone();
            Pool::new(limits, move |shape: Shape| {
                let launcher = Arc::clone(&launcher);
                // Refused is "not now": the pool asks again, after longer and longer pauses.
                let lease = admission.waiting();
                Box::pin(async move {
                    let lease = lease.map_err(LaunchError::NoRoom)?;
                    let machine = launcher.wait(shape).await?;
                    machine.waits(lease);
                    Ok(machine)
                })
            })
        };
        let (engine_events, events) = mpsc::unbounded_channel();
        let images = Store::new(state.images());
        sweep(images.clone());
        let core = Arc::new(Self {
            images,
            disks,
            quotas: Quotas::new(config.quotas.clone(), life),
            keeper,
            events: Arc::new(Events::new(tell::epoch())),
            admission,
            mail: HostMail::default(),
            cgroups,
            registry: Arc::new(Registry::default()),
            lifetimes: Arc::default(),
            config,
            metrics,
            state,
            launcher,
            pool,
            cores,
            loading: Semaphore::new(cores),
            engine_events,
            next_image: AtomicU64::new(1),
            engines: Mutex::default(),
            next_book: AtomicU64::new(0),
            pool_hits: AtomicU64::new(0),
            pool_misses: AtomicU64::new(0),
            garbage: tokio::sync::Notify::new(),
            tally: Tally::default(),
        });
        events::start(&core, events);
        lifetimes::start(&core);
        core
    }

    /// End all VMs, in no particular order.
    pub async fn stop(self: &Arc<Self>) {
        let live = self.registry.live();
        if !live.is_empty() {
            tracing::info!(vms = live.len(), "stopping: all VMs end");
        }
        for vm in live {
            self.end(&vm, End::killed("the daemon was stopped"));
        }
        if let Some(cgroups) = &self.cgroups
            && timeout(CGROUP_WAIT, cgroups.all_removed()).await.is_err()
        {
            tracing::warn!("cgroups of VMs are left; the next daemon removes them");
        }
        self.disks.all_given_back().await;
    }

    /// Whether prefetch must pause because memory is short.
    pub fn is_short_of_memory(&self) -> bool {
        let available = self.admission.host().available_bytes;
        available < self.config.memory_reserve_bytes.saturating_add(SPARE_BYTES)
    }

    /// An id for an image, never used before by this daemon.
    pub fn next_image(&self) -> ImageId {
        let number = self.next_image.fetch_add(1, Ordering::Relaxed);
        ImageId::new(number.max(1)).unwrap_or_else(|| unreachable!("at least 1"))
    }

    /// The number of a VM's first ticket: 2³² apart, so that no two VMs have tickets of one number.
    pub fn first_ticket(&self) -> u64 {
        (self.next_book.fetch_add(1, Ordering::Relaxed) << 32) + 1
    }

    /// How many books of tickets have begun.
    pub fn books(&self) -> u64 {
        self.next_book.load(Ordering::Relaxed)
    }

    /// VMs arrive that descend from one of a host with this many books: theirs get higher numbers.
    pub fn begin_books_after(&self, books: u64) {
        let _before = self.next_book.fetch_max(books, Ordering::Relaxed);
    }

    /// An engine that is in use from now on, until its last holder drops it.
    pub fn add_engine(&self, engine: &Arc<Engine>) {
        let mut engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.retain(|engine| engine.strong_count() > 0);
        engines.push(Arc::downgrade(engine));
    }

    /// All engines that someone holds.
    pub fn engines(&self) -> Vec<Arc<Engine>> {
        let engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.iter().filter_map(Weak::upgrade).collect()
    }

    /// Where page engines send their events.
    pub fn event_sink(&self) -> EventSink {
        let events = self.engine_events.clone();
        Arc::new(move |event| {
            let _daemon_ends = events.send(event);
        })
    }

    /// A QEMU for a clone, if one waits.
    pub fn claim(&self, shape: &Shape) -> Option<Machine> {
        let claimed = self.pool.claim(shape);
        match &claimed {
            Some(machine) => {
                machine.claimed();
                self.metrics.pool_hit();
                self.pool_hits.fetch_add(1, Ordering::Relaxed);
            }
            None => {
                self.metrics.pool_missed();
                self.pool_misses.fetch_add(1, Ordering::Relaxed);
            }
        }
        claimed
    }

    /// One for a clone whose lease is for the QEMU, too: one that has come to wait meanwhile, or
    /// one that is started now.
    ///
    /// # Errors
    /// It can't be started.
    pub async fn take(&self, shape: &Shape) -> Result<(Machine, pool::Origin), LaunchError> {
        if let Some(machine) = self.pool.claim(shape) {
            machine.claimed();
            return Ok((machine, pool::Origin::Pooled));
        }
        let machine = self.launcher.wait(shape.clone()).await?;
        Ok((machine, pool::Origin::StartedNow))
    }

    /// List a VM that is about to start.
    pub fn add_vm(
        self: &Arc<Self>,
        identity: Identity,
        lease: Option<Lease>,
        origin: Option<Origin>,
    ) -> io::Result<Arc<Vm>> {
        let folder = self.state.create_vm_folder(&identity.id)?;
        let lost = LostVm {
            name: identity.name.clone(),
            id: identity.id.clone(),
            image: identity.spec().image.clone(),
            parent: identity.parent.as_ref().map(|(_, name)| name.clone()),
            created_unix_ms: identity.created_unix_ms,
        };
        let log = Log::create(&folder).and_then(|log| {
            self.state.vm_created(lost)?;
            Ok(log)
        });
        let log = log.inspect_err(|_| {
            // It never was: nothing of it is to stay, nor to be told as lost.
            self.state.vm_ended(&identity.id);
            self.forget_folder(&identity.id);
        })?;
        let vm = Vm::new(identity, log, lease, origin);
        let listed = || {
            self.tell_started(&vm);
            // Not later: what ends the VM, or sets its bound, can find it after this.
            self.lifetimes.begin(vm.identity.line(), &vm.identity.lifetime);
        };
        for forgotten in self.registry.add_then(Arc::clone(&vm), listed) {
            self.forget_folder(&forgotten);
        }
        self.metrics.vm_started();
        if let Some(origin) = &vm.origin {
            origin.fate.born(origin.ticket, Arc::clone(&vm));
        }
        Ok(vm)
    }

    /// End a VM, once: the first reason stands.
    pub fn end(self: &Arc<Self>, vm: &Arc<Vm>, end: End) {
        self.count(vm);
        let tell = |end: &End| {
            // Before a client learns of its end, and asks for its volumes.
            self.disks.vm_ends(vm.name());
            self.tell_ended(vm, end);
        };
        if !vm.end(end.clone(), tell) {
            return;
        }
        self.tally.forget(vm);
        self.lifetimes.ended(&vm.identity.id);
        tracing::info!(vm = vm.name(), id = vm.identity.id, state = ?end.state, reason = end.reason, "VM ended");
        self.metrics.vm_ended(end.kind);
        self.state.vm_ended(&vm.identity.id);
        if let Some(origin) = &vm.origin {
            origin.fate.ended(origin.ticket, vm.identity.vmid, end.reason);
        }
        for forgotten in self.registry.has_ended(&vm.identity.id) {
            self.forget_folder(&forgotten);
        }
        self.garbage.notify_one();
    }

    /// Remove what is kept on disk of a VM that is not listed any more.
    pub fn forget_folder(&self, id: &str) {
        if let Err(error) = self.state.remove_vm_folder(id) {
            tracing::warn!(%error, id, "remove a VM's folder");
        }
    }

    /// Have the metrics know what page engines have done for a VM, before that is forgotten.
    pub fn count(&self, vm: &Vm) {
        self.tally.look_at(vm, &self.metrics);
    }

    /// The parent's old pages are in its snapshot's cache now.
    pub fn parent_is_now_a_clone(&self, parent: &Vm) {
        parent.with_lease(|lease| lease.is_now_a_clone(parent.identity.spec().memory_bytes));
    }

    /// Nothing is started for the pool as long as this is kept: a pause, and clones that start,
    /// come first.
    pub fn hold_pool(&self) -> pool::Hold<Shape, Machine, LaunchError> {
        self.pool.hold()
    }

    /// How many QEMUs wait, over all shapes.
    pub fn pool_waiting(&self) -> usize {
        self.pool.counts().iter().map(|(_, counts)| counts.waiting).sum()
    }

    /// Have the metrics know how things are now.
    pub fn refresh(&self, metrics: &Metrics) {
        use vmfork_api::VmState;
        let all = self.registry.all();
        for vm in &all {
            self.count(vm);
        }
        for state in [
            VmState::Starting,
            VmState::Running,
            VmState::Frozen,
            VmState::Paused,
            VmState::Stalled,
            VmState::Exited,
            VmState::Failed,
        ] {
            metrics.set_vms(state, all.iter().filter(|vm| vm.state() == state).count());
        }
        metrics.set_snapshots(self.snapshots());
        metrics.set_volumes(self.disks.volume_count());
        self.disks.count(metrics);
        stalls::count(&all, metrics);
        metrics.set_cache_bytes(self.cache_bytes());
        metrics.set_pool_waiting(self.pool_waiting());
        metrics.set_admissible_bytes(self.admission.admissible_bytes());
        metrics.set_vcpus(self.admission.vcpus(), self.admission.vcpus_max());
    }
}

/// What came half-way when the last daemon ended.
fn sweep(images: Store) {
    // May wait for a build of the CLI.
    tokio::task::spawn_blocking(move || {
        if let Err(error) = images.sweep() {
            tracing::warn!("tidy the image store: {}", chain(&error));
        }
    });
}

/// The API's word for an accelerator.
pub fn accel_word(accel: Accel) -> vmfork_api::Accel {
    match accel {
        Accel::Tcg => vmfork_api::Accel::Tcg,
        Accel::Kvm => vmfork_api::Accel::Kvm,
    }
}
