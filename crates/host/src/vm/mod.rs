//! One VM: who it is, what it runs in, and how it ends.
//!
//! ```text
//!   Starting ──agent answered──► Running ◄──► Frozen (a fork's pause)
//!       │                           ├──► Paused (on request; a fork freezes it there, too)
//!       └───────────────────────────┴── end() ──► Exited | Failed   (once; the first caller gives the reason)
//! ```
//!
//! [`Vm`] outlives its QEMU: an ended one stays listed until it is removed. The `Machine` is
//! dropped at the end, and with it the process, the keeper and the view.

pub mod console;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod inherited;
mod job;
pub mod launch;
pub mod log;
pub mod machine;
mod origin;
mod pause;
mod program;
mod provenance;
mod told;
mod users;
mod working_set;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use vmfork_api::{ForkReply, VmState};
use vmfork_policy::ViewId;

use self::console::Console;
pub use self::inherited::{DriveSpec, Inherited, MachineSpec};
pub use self::job::Job;
use self::log::Log;
use self::machine::Machine;
pub use self::origin::{Fate, Origin};
pub use self::pause::{DeviceState, Pause, SavedState, Standstill};
pub use self::program::NotRun;
pub use self::provenance::{CameOf, Provenance};
pub(crate) use self::told::{Step, ToldOf};
pub use self::working_set::WorkingSet;
use crate::admission::{ForkAsk, Lease};
use crate::cgroup::VmCgroup;
use crate::error::VmError;
use crate::lifetime::Lifetime;
use crate::metrics::EndReason;
use crate::quotas::User;
use vmfork_guest_link::agent::{AgentInfo, AgentLink};
pub use vmfork_memory::{pmem_bytes, pmem_cost_bytes};

/// What never changes.
#[derive(Debug, Clone)]
pub struct Identity {
    /// 16 hex digits.
    pub id: String,
    pub name: String,
    pub inherited: Inherited,
    /// The stored snapshot that it, or the root of its family, was started from.
    pub snapshot: Option<String>,
    /// The id of the root of its family.
    pub family: String,
    /// Who began its family.
    pub user: User,
    /// The engine's job that holds its place.
    pub job: Option<Job>,
    /// How long it may live, as it was when it began.
    pub lifetime: Lifetime,
    /// Id and name of the VM that it was forked from.
    pub parent: Option<(String, String)>,
    /// Ids of all that it descends from, the root first: a VM in between may be forgotten.
    pub ancestors: Arc<[String]>,
    /// 0 in a VM that booted.
    pub vmid: u32,
    /// Whether an agent is expected in the guest.
    pub has_agent: bool,
    pub created_unix_ms: u64,
}

impl Identity {
    pub fn spec(&self) -> &MachineSpec {
        &self.inherited.spec
    }

    /// The ancestors of its clones.
    pub fn line(&self) -> Arc<[String]> {
        self.ancestors.iter().chain([&self.id]).cloned().collect()
    }

    /// For memory for `count` clones of it; `message` is for the error's text.
    pub fn ask<'a>(&'a self, message: &'a str, count: u32, by_guest: bool) -> ForkAsk<'a> {
        ForkAsk {
            message,
            family: &self.family,
            user: self.user,
            ram_bytes: self.spec().memory_bytes,
            cpus: self.spec().cpus,
            count,
            by_guest,
            allowed: None,
        }
    }

    /// Whether this is the VM `id`, or a clone of it, or of a clone of it …
    pub fn descends_from(&self, id: &str) -> bool {
        self.id == id || self.ancestors.iter().any(|ancestor| ancestor == id)
    }
}

/// How a VM ended.
#[derive(Debug, Clone)]
pub struct End {
    pub state: VmState,
    pub reason: String,
    pub kind: EndReason,
}

impl End {
    /// In good order.
    pub fn exited(reason: impl Into<String>) -> Self {
        Self { state: VmState::Exited, reason: reason.into(), kind: EndReason::Exited }
    }

    /// On request.
    pub fn killed(reason: impl Into<String>) -> Self {
        Self { state: VmState::Exited, reason: reason.into(), kind: EndReason::Killed }
    }

    /// By a fault.
    pub fn failed(kind: EndReason, reason: impl Into<String>) -> Self {
        Self { state: VmState::Failed, reason: reason.into(), kind }
    }
}

/// Looks at a VM once more before it is gone.
pub trait LastLook: std::fmt::Debug + Send + Sync {
    /// The VM's process is about to end. `view`: its memory's, at the end.
    fn last_look(&self, view: Option<ViewId>);
}

/// Why a disk keeps a VM from running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stall {
    /// For people.
    pub(crate) reason: String,
    /// Its host is full, or its quota is reached.
    pub(crate) no_space: bool,
    /// Of the disk, if QEMU named it.
    pub(crate) drive: Option<usize>,
    pub(crate) since: Instant,
}

/// What changes.
#[derive(Debug, Default)]
struct Live {
    machine: Option<Arc<Machine>>,
    link: Option<AgentLink>,
    console: Option<Arc<Console>>,
    agent: Option<AgentInfo>,
    lease: Option<Lease>,
    cgroup: Option<Arc<VmCgroup>>,
    provenance: Provenance,
    watch: Option<Arc<dyn LastLook>>,
    /// When a clone's vCPUs began to run.
    runs: Option<Instant>,
    ready: Option<Duration>,
    frozen: bool,
    stalled: Option<Stall>,
}

/// A VM of this host, running or ended.
#[derive(Debug)]
pub struct Vm {
    pub identity: Identity,
    pub log: Arc<Log>,
    /// The ticket that made it.
    pub origin: Option<Origin>,
    began: Instant,
    live: Mutex<Live>,
    ended: watch::Sender<Option<End>>,
    /// One fork at a time; a pause, too, begins and ends between forks.
    pub forking: tokio::sync::Mutex<()>,
    /// Whether its vCPUs stand still on request.
    pub pause: Pause,
    forks: AtomicU64,
    last_fork: Mutex<Option<ForkReply>>,
    /// Last counts before the end.
    faults: AtomicU64,
    /// What its clones on other hosts waited for, or touched.
    pub working_set: Arc<WorkingSet>,
    pub(crate) told: ToldOf,
}

impl Vm {
    pub fn new(
        identity: Identity,
        log: Arc<Log>,
        lease: Option<Lease>,
        origin: Option<Origin>,
    ) -> Arc<Self> {
        Arc::new(Self {
            identity,
            log,
            origin,
            began: Instant::now(),
            live: Mutex::new(Live { lease, ..Live::default() }),
            ended: watch::Sender::new(None),
            forking: tokio::sync::Mutex::new(()),
            pause: Pause::default(),
            forks: AtomicU64::new(0),
            last_fork: Mutex::new(None),
            faults: AtomicU64::new(0),
            working_set: Arc::default(),
            told: ToldOf::default(),
        })
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> &str {
        &self.identity.name
    }

    /// Give it its QEMU. If it was ended meanwhile, the QEMU goes at once.
    pub fn set_machine(&self, machine: Arc<Machine>) {
        self.put(|live| live.machine = Some(machine));
    }

    /// Give it something that goes with its end, be that over already.
    fn put(&self, put: impl FnOnce(&mut Live)) {
        put(&mut self.live());
        if self.end_now().is_some() {
            self.let_go();
        }
    }

    /// Its memory's account learns what it uses, and that it was forked.
    pub fn with_lease(&self, with: impl FnOnce(&Lease)) {
        if let Some(lease) = &self.live().lease {
            with(lease);
        }
    }

    pub fn set_link(&self, link: AgentLink) {
        self.put(|live| live.link = Some(link));
    }

    /// Its limit, and the QEMU in it.
    pub fn set_cgroup(&self, cgroup: VmCgroup, machine: &Machine) {
        let cgroup = Arc::new(cgroup);
        // It can be removed only when no process is in it any more.
        let (held, exit) = (Arc::clone(&cgroup), machine.process.exit());
        tokio::spawn(async move {
            exit.await;
            drop(held);
        });
        self.put(|live| live.cgroup = Some(cgroup));
    }

    /// How often its memory limit has killed something of it.
    pub fn oom_kills(&self) -> u64 {
        self.live().cgroup.as_ref().map_or(0, |cgroup| cgroup.oom_kills())
    }

    pub fn set_provenance(&self, provenance: Provenance) {
        self.put(|live| live.provenance = provenance);
    }

    /// From now on it came of this, too.
    pub fn add_provenance<T: CameOf>(&self, it: Arc<T>) {
        self.put(|live| live.provenance.set(it));
    }

    pub fn provenance(&self) -> Provenance {
        self.live().provenance.clone()
    }

    pub fn set_watch(&self, watch: Arc<dyn LastLook>) {
        self.put(|live| live.watch = Some(watch));
    }

    pub fn set_console(&self, console: Arc<Console>) {
        self.put(|live| live.console = Some(console));
    }

    /// Its agent has answered. → after which time.
    pub(crate) fn set_ready(&self, agent: Option<AgentInfo>) -> Duration {
        let ready = self.began.elapsed();
        let mut live = self.live();
        live.agent = agent;
        live.ready = Some(ready);
        ready
    }

    /// Its vCPUs run from now on.
    pub fn set_runs(&self) {
        self.live().runs = Some(Instant::now());
    }

    pub fn runs_since(&self) -> Option<Instant> {
        self.live().runs
    }

    pub fn set_frozen(&self, frozen: bool) {
        self.live().frozen = frozen;
    }

    pub fn ready(&self) -> Option<Duration> {
        self.live().ready
    }

    pub fn agent(&self) -> Option<AgentInfo> {
        self.live().agent.clone()
    }

    pub fn machine(&self) -> Option<Arc<Machine>> {
        self.live().machine.clone()
    }

    pub fn console(&self) -> Option<Arc<Console>> {
        self.live().console.clone()
    }

    /// The link to its agent.
    ///
    /// # Errors
    /// It has ended, or has none (yet).
    pub fn link(&self) -> Result<AgentLink, VmError> {
        let link = self.live().link.clone();
        let name = || self.name().to_owned();
        link.ok_or_else(|| match self.end_now() {
            Some(end) => self.has_ended(end),
            None if self.identity.has_agent => VmError::Starting { name: name() },
            None => VmError::NoAgent { name: name(), image: self.identity.spec().image.clone() },
        })
    }

    /// The link to its agent, for what the agent must answer.
    ///
    /// # Errors
    /// As [`Vm::link`]; or it is paused or stalled, and could not answer.
    pub fn awake_link(&self) -> Result<AgentLink, VmError> {
        let link = self.link()?;
        let name = || self.name().to_owned();
        if self.pause.is_paused() {
            return Err(VmError::Paused { name: name() });
        }
        match self.why_stalled() {
            Some(reason) => Err(VmError::Stalled { name: name(), reason }),
            None => Ok(link),
        }
    }

    /// That it has ended, and why.
    pub fn ended(&self) -> VmError {
        self.has_ended(self.end_now().unwrap_or_else(|| End::exited("")))
    }

    /// Its QEMU.
    ///
    /// # Errors
    /// It has ended, or is still being started.
    pub fn running_machine(&self) -> Result<Arc<Machine>, VmError> {
        if let Some(end) = self.end_now() {
            return Err(self.has_ended(end));
        }
        self.machine().ok_or_else(|| VmError::NoQemu { name: self.name().to_owned() })
    }

    fn has_ended(&self, end: End) -> VmError {
        VmError::Ended { name: self.name().to_owned(), reason: end.reason }
    }

    /// A number for a fork, not used before for this VM.
    pub fn next_fork(&self) -> u64 {
        self.forks.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Keep what became of its last fork, for `inspect`; also when it has ended.
    pub fn set_last_fork(&self, reply: ForkReply) {
        *self.last_fork.lock().unwrap_or_else(PoisonError::into_inner) = Some(reply);
    }

    pub fn last_fork(&self) -> Option<ForkReply> {
        self.last_fork.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn state(&self) -> VmState {
        if let Some(end) = self.end_now() {
            return end.state;
        }
        let live = self.live();
        match live.ready {
            _ if live.frozen => VmState::Frozen,
            _ if self.pause.is_paused() => VmState::Paused,
            Some(_) if live.stalled.is_some() => VmState::Stalled,
            Some(_) => VmState::Running,
            None => VmState::Starting,
        }
    }

    /// Which of its disks has stopped it, and why.
    pub fn why_stalled(&self) -> Option<String> {
        self.stall().map(|stall| stall.reason)
    }

    pub(crate) fn stall(&self) -> Option<Stall> {
        self.live().stalled.clone()
    }

    pub(crate) fn set_stalled(&self, stall: Option<Stall>) {
        self.live().stalled = stall;
    }

    /// How it ended, if it has.
    pub fn end_now(&self) -> Option<End> {
        self.ended.borrow().clone()
    }

    /// Wait for its end.
    pub async fn wait_end(&self) -> End {
        let mut ended = self.ended.subscribe();
        match ended.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or_else(|| End::exited("ended")),
            Err(_sender_is_ours) => End::exited("ended"),
        }
    }

    /// End it. The first reason stands. → whether this was the first. Waits for nothing that its
    /// QEMU may hold up. `tell` is called before a client can see the end.
    pub(crate) fn end(&self, end: End, tell: impl FnOnce(&End)) -> bool {
        let first = self.ended.send_if_modified(|slot| {
            let first = slot.is_none();
            if first {
                tell(slot.insert(end));
            }
            first
        });
        if first {
            // Before all else: it ends every wait for something of its QEMU's.
            if let Some(machine) = self.machine() {
                machine.process.kill();
            }
            self.faults.store(self.count_faults(), Ordering::Relaxed);
            self.let_go();
        }
        first
    }

    fn let_go(&self) {
        self.pause.end();
        let live = {
            let mut live = self.live();
            let kept = Live { agent: live.agent.clone(), ready: live.ready, ..Live::default() };
            std::mem::replace(&mut *live, kept)
        };
        if let (Some(watch), Some(machine)) = (&live.watch, &live.machine) {
            watch.last_look(machine.view_id());
        }
        // The process first: a thread that blocks in a fault of a view that is given up must not
        // wait forever.
        if let Some(machine) = &live.machine {
            machine.process.kill();
        }
        drop((live.link, live.console, live.machine, live.lease, live.cgroup, live.provenance));
        self.log.close();
    }

    fn count_faults(&self) -> u64 {
        self.machine().map_or(0, |machine| {
            let counters = machine.counters();
            counters.zero.get()
                + counters.fetch.get()
                + counters.present.get()
                + counters.mapped.get()
        })
    }

    /// What `ps` shows. `children`: how many live VMs were forked from it. `sample`: count its own
    /// memory, which takes 1 ms per GiB.
    pub fn summary(&self, children: u32, sample: bool) -> vmfork_api::Vm {
        let identity = &self.identity;
        let machine = self.machine();
        let memory = machine.as_ref().filter(|_| sample).map(|machine| machine.sample());
        let private_bytes = memory.map_or(0, |m| m.private_pages * vmfork_image::PAGE_BYTES);
        let shared_bytes = machine
            .as_ref()
            .and_then(|machine| machine.engine())
            .map_or(0, |engine| engine.image().cache().resident_bytes());
        let faults = if machine.is_some() {
            self.count_faults()
        } else {
            self.faults.load(Ordering::Relaxed)
        };
        vmfork_api::Vm {
            id: identity.id.clone(),
            name: identity.name.clone(),
            image: identity.spec().image.clone(),
            family: identity.family.clone(),
            parent: identity.parent.as_ref().map(|(_, name)| name.clone()),
            parent_id: identity.parent.as_ref().map(|(id, _)| id.clone()),
            host: None,
            snapshot: identity.snapshot.clone(),
            labels: identity.inherited.labels.clone(),
            vmid: identity.vmid,
            state: self.state(),
            reason: self.end_now().map(|end| end.reason).or_else(|| self.why_stalled()),
            accel: identity.spec().accel,
            cpus: identity.spec().cpus,
            memory_mib: identity.spec().memory_bytes >> 20,
            created_unix_ms: identity.created_unix_ms,
            ready_ms: self.ready().map(|ready| ready.as_secs_f64() * 1e3),
            pid: machine.map(|machine| machine.pid()),
            clones: children,
            private_bytes,
            shared_bytes,
            faults,
        }
    }
}

/// Who a VM of a test is.
#[cfg(any(test, feature = "testing"))]
pub fn test_identity(name: &str, parent: Option<&Vm>) -> Identity {
    Identity {
        id: format!("id-{name}"),
        name: name.to_owned(),
        inherited: Inherited::of_a_test(64 << 20),
        snapshot: None,
        family: "id-web".to_owned(),
        user: User::Uid(0),
        job: None,
        lifetime: Lifetime::default(),
        parent: parent.map(|parent| (parent.identity.id.clone(), parent.name().to_owned())),
        ancestors: parent.map(|parent| parent.identity.line()).unwrap_or_default(),
        vmid: 0,
        has_agent: true,
        created_unix_ms: 0,
    }
}

/// The wall clock, in ms since 1970.
pub fn now_unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// `N` random bytes from the host, as hex digits.
///
/// # Panics
/// If the kernel has no random numbers, which Linux always has once it is up.
pub fn random_hex<const N: usize>() -> String {
    let mut bytes = [0u8; N];
    if let Err(error) = getrandom::fill(&mut bytes) {
        unreachable!("getrandom(2) of a few bytes: {error}");
    }
    bytes.iter().fold(String::with_capacity(2 * N), |mut text, byte| {
        use std::fmt::Write;
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_vm_gets_after_its_end_goes_at_once() {
        let folder = tempfile::tempdir().expect("folder");
        let log = Log::create(folder.path()).expect("log");
        let vm = Vm::new(test_identity("web", None), log, None, None);
        vm.end(End::killed("in this test"), |_| ());
        std::fs::write(folder.path().join("cgroup.controllers"), "memory\n").expect("write");
        let cgroups = crate::cgroup::Cgroups::at(folder.path(), "").expect("as the kernel's");
        let machine = fake::machine(&folder.path().join("state")).await;
        let exit = machine.process.exit();
        let cgroup = cgroups.create(&vm.identity.id, 1 << 30).expect("made");
        vm.set_cgroup(cgroup, &machine);
        vm.set_machine(machine);
        tokio::time::timeout(SOON, exit).await.expect("killed");
        tokio::time::timeout(SOON, cgroups.all_removed()).await.expect("let go");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_stuck_vm_can_be_looked_at_and_ended() {
        let folder = tempfile::tempdir().expect("folder");
        let log = Log::create(folder.path()).expect("log");
        let vm = Vm::new(test_identity("web", None), log, None, None);
        let machine = fake::machine(&folder.path().join("state")).await;
        vm.set_machine(Arc::clone(&machine));
        // Another process waits for its keeper, and has its memory locked.
        let (locked_tx, locked) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let stuck = Arc::clone(&machine);
        let waits = std::thread::Builder::new().spawn(move || {
            let _memory = stuck.memory();
            locked_tx.send(()).expect("the test waits");
            let _dropped = released.recv();
        });
        locked.recv().expect("locked");
        let (exit, ending) = (machine.process.exit(), Arc::clone(&vm));
        let ended = tokio::task::spawn_blocking(move || {
            assert!(machine.view_id().is_none());
            assert!(machine.engine().is_none());
            ending.end(End::killed("in this test"), |_| ())
        });
        let ended = tokio::time::timeout(SOON, ended).await.expect("without its memory");
        assert!(ended.expect("no panic"));
        tokio::time::timeout(SOON, exit).await.expect("killed");
        drop(release);
        waits.expect("a thread").join().expect("released");
    }
}
