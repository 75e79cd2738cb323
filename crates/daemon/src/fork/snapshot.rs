//! What a freeze yields: the device state and the memory image. Anonymous: it goes with
//! the last clone that is being started from it; the image lives as long as it has views.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmfork_engine::Engine;

use super::Lead;
use crate::admission::Lease;
use crate::agent::Inheritance;
use crate::cluster::Arrival;
use crate::snapshots::{Base, Opened};

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
    /// Memory for what the parent writes anew.
    pub(crate) lease: Option<Lease>,
    /// The stored snapshot whose pages it may still need.
    pub(crate) opened: Option<Arc<Opened>>,
    /// The snapshot of another host whose pages it may still need.
    pub(crate) arrival: Option<Arc<Arrival>>,
    /// The name of the stored snapshot that VMs are started from, for which what they touch is learnt.
    pub(crate) learn_as: Option<String>,
    /// What its VMs touch is to be told page by page.
    pub(crate) is_watched: bool,
    /// The newest stored snapshot that the VM descended from.
    pub(crate) base: Option<Arc<Base>>,
}
