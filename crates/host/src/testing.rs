//! A host without QEMU, for tests.

use std::path::Path;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tempfile::TempDir;
use vmfork_api::ErrorBody;
use vmfork_cluster::allocate::{Bounds, QuotaAnswer, QuotaAsk};

pub use vmfork_guest_link::testing::{Guest, SOON, link};

use crate::admission::{Admission, HostMemory, Policy, Probe};
use crate::config::Config;
use crate::core::{Core, Keeper, Parts};
use crate::disks::HostDisks;
use crate::metrics::Metrics;
use crate::quotas::DiskBounds;
use crate::state::State;
pub use crate::vm::fake::machine;
use crate::vm::{Identity, Origin, Vm, test_identity};

/// Of the host, whatever the tests run on.
const CORES: usize = 4;

struct Roomy;

impl Probe for Roomy {
    fn host(&self) -> HostMemory {
        HostMemory { total_bytes: 8 << 30, available_bytes: 8 << 30 }
    }

    fn private_bytes(&self, _pid: u32) -> u64 {
        0
    }
}

/// A host in no cluster counts its users itself.
struct Alone;

impl Keeper for Alone {
    fn take<'a>(
        &'a self,
        _core: &'a Core,
        _ask: QuotaAsk,
        _message: &'a str,
    ) -> BoxFuture<'a, Result<Option<QuotaAnswer>, ErrorBody>> {
        async { Ok(None) }.boxed()
    }
}

/// A host, and the folder that holds its state.
#[derive(Debug)]
pub struct Host {
    pub core: Arc<Core>,
    folder: TempDir,
}

impl Host {
    /// With the settings of [`config`].
    pub async fn start() -> Self {
        Self::with(|_| ()).await
    }

    /// With settings of the test's own.
    pub async fn with(set: impl FnOnce(&mut Config)) -> Self {
        Self::kept_by(Arc::new(Alone), 0, set).await
    }

    /// With a keeper of the test's own; `life` is the daemon's.
    pub async fn kept_by(
        keeper: Arc<dyn Keeper>,
        life: u32,
        set: impl FnOnce(&mut Config),
    ) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let (state, _) = State::open(folder.path()).expect("the folder is free");
        let mut config = config(folder.path());
        set(&mut config);
        let admission = Admission::new(Policy::of(&config, CORES), Box::new(Roomy));
        let disks = HostDisks::open(&state.disks(), state.sockets()).expect("room");
        let parts = Parts {
            disks: Arc::new(disks),
            config: Arc::new(config),
            state: Arc::new(state),
            metrics: Arc::new(Metrics::new()),
            admission,
            cgroups: None,
            keeper,
            life,
        };
        Self { core: Core::start(parts).await, folder }
    }

    /// The state folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A VM without a QEMU.
    pub fn vm(&self, name: &str, origin: Option<Origin>) -> Arc<Vm> {
        let vmid = u32::from(origin.is_some());
        let identity = Identity { vmid, ..test_identity(name, None) };
        self.core.add_vm(identity, None, origin).expect("a folder for it")
    }
}

/// Settings that let tests have many VMs in little memory.
pub fn config(folder: &Path) -> Config {
    Config {
        state: folder.to_owned(),
        libdir: folder.to_owned(),
        pool: 0,
        root_device: None,
        fill_unit_pages: 16,
        qemu: folder.join("no-qemu"),
        qemu_uid_base: 1_879_100_000,
        memory_reserve_bytes: 0,
        clone_growth_percent: 10,
        family_vms_max: 100,
        family_memory_percent: 100,
        family_vcpus_percent: 100,
        vcpus_per_core: 64,
        quotas: Bounds::default(),
        disk_quota_bytes: None,
        disk_bounds: DiskBounds::default(),
    }
}
