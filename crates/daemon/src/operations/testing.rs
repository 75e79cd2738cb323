//! A host without QEMU, and guests that a test plays.

use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use vmfork_cluster::allocate::Bounds;

pub(crate) use vmfork_guest_link::testing::{Guest, SOON, link};

use super::Hub;
use crate::admission::{Admission, HostMemory, Policy, Probe};
use crate::config::{Config, TicketPlace};
use crate::core::Core;
use crate::fork::tickets::TicketOrigin;
use crate::lifecycle::Parts;
use crate::metrics::Metrics;
use crate::snapshots::Snapshots;
use crate::state::State;
use crate::vm::{Identity, Vm, test_identity};

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

pub(crate) struct Host {
    pub(crate) hub: Arc<Hub>,
    pub(crate) core: Arc<Core>,
    _folder: TempDir,
}

impl Host {
    pub(crate) async fn start() -> Self {
        Self::with(|_| ()).await
    }

    /// With settings of the test's own.
    pub(crate) async fn with(set: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let (state, _) = State::open(folder.path()).expect("the folder is free");
        let mut config = config(folder.path());
        set(&mut config);
        let policy = Policy::of(&config, CORES);
        let parts = Parts {
            config: Arc::new(config),
            state: Arc::new(state),
            metrics: Arc::new(Metrics::new()),
            admission: Admission::new(policy, Box::new(Roomy)),
            cgroups: Err("a test has none".to_owned()),
            snapshots: Arc::new(Snapshots::new(&folder.path().join("snapshots")).expect("made")),
        };
        let hub = Hub::start(parts).await;
        Self { core: Arc::clone(&hub.core), hub, _folder: folder }
    }

    /// A VM without a QEMU.
    pub(crate) fn vm(&self, name: &str, origin: Option<TicketOrigin>) -> Arc<Vm> {
        let vmid = u32::from(origin.is_some());
        let identity = Identity { vmid, ..test_identity(name, None) };
        self.core.add_vm(identity, None, origin.map(Into::into)).expect("a folder for it")
    }
}

fn config(folder: &Path) -> Config {
    Config {
        state: folder.to_owned(),
        socket: folder.join("socket"),
        socket_gid: None,
        tcp: None,
        holder_linger: std::time::Duration::ZERO,
        pool: 0,
        fill_unit_pages: 16,
        page_transfer: crate::config::PageTransfer::default(),
        qemu: folder.join("no-qemu"),
        qemu_uid_base: 1_879_100_000,
        memory_reserve_bytes: 0,
        clone_growth_percent: 10,
        family_vms_max: 100,
        family_memory_percent: 100,
        family_vcpus_percent: 100,
        vcpus_per_core: 64,
        ticket_place: TicketPlace::default(),
        quotas: Bounds::default(),
        slurm: None,
        log_filter: "info".to_owned(),
        libdir: folder.to_owned(),
        debug_faults: false,
    }
}
