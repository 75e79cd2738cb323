//! What a freeze yields: the device state and the memory image. Anonymous: it goes with
//! the last clone that is being started from it; the image lives as long as it has views.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmfork_engine::Engine;
use vmfork_qemu::Drives;

use vmfork_guest_link::agent::Inheritance;
use vmfork_host::admission::Lease;
use vmfork_host::disks::DiskContent;
use vmfork_host::vm::machine::Lead;
use vmfork_host::vm::{Provenance, Vm};

#[derive(Debug)]
pub struct Snapshot {
    /// The device state, as QEMU reads it.
    pub state: OwnedFd,
    /// What the stream of each clone's own state begins with, too.
    pub lead: Option<Lead>,
    pub engine: Arc<Engine>,
    /// What the read-only drives of its VMs hold.
    pub drives: Drives,
    /// What their disks hold, at first.
    pub disks: Vec<DiskContent>,
    /// What the clones' links must know of the parent's; `None` without an agent.
    pub inheritance: Option<Inheritance>,
    /// The number by which the guest's agent knows the fork.
    pub fork: u64,
    /// Memory for the pages that the parent overwrites.
    pub lease: Option<Lease>,
    /// What it may still need pages of, and what else its clones came of.
    pub provenance: Provenance,
    pub on_run: OnRun,
    /// What its VMs touch is to be told page by page.
    pub is_watched: bool,
}

/// What is done with each VM that begins to run.
#[derive(Default)]
pub struct OnRun(Option<Run>);

type Run = Box<dyn Fn(&Arc<Vm>) + Send + Sync>;

impl OnRun {
    pub fn new(run: impl Fn(&Arc<Vm>) + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(run)))
    }

    pub(super) fn runs(&self, vm: &Arc<Vm>) {
        if let Some(run) = &self.0 {
            run(vm);
        }
    }
}

impl fmt::Debug for OnRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnRun").finish_non_exhaustive()
    }
}
