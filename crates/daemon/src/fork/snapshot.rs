//! What a freeze yields: the device state and the memory image. Anonymous: it goes with
//! the last clone that is being started from it; the image lives as long as it has views.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmfork_engine::Engine;

use crate::admission::Lease;
use crate::vm::machine::Lead;
use crate::vm::{Provenance, Vm};
use vmfork_guest_link::agent::Inheritance;

#[derive(Debug)]
pub(crate) struct Snapshot {
    /// The device state, as QEMU reads it.
    pub(crate) state: OwnedFd,
    /// What the stream of each clone's own state begins with, too.
    pub(crate) lead: Option<Lead>,
    pub(crate) engine: Arc<Engine>,
    /// What the clones' links must know of the parent's; `None` without an agent.
    pub(crate) inheritance: Option<Inheritance>,
    /// The number by which the guest's agent knows the fork.
    pub(crate) fork: u64,
    /// Memory for the pages that the parent overwrites.
    pub(crate) lease: Option<Lease>,
    /// What it may still need pages of, and what else its clones came of.
    pub(crate) provenance: Provenance,
    pub(crate) on_run: OnRun,
    /// What its VMs touch is to be told page by page.
    pub(crate) is_watched: bool,
}

/// What is done with each VM that begins to run.
#[derive(Default)]
pub(crate) struct OnRun(Option<Run>);

type Run = Box<dyn Fn(&Arc<Vm>) + Send + Sync>;

impl OnRun {
    pub(crate) fn new(run: impl Fn(&Arc<Vm>) + Send + Sync + 'static) -> Self {
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
