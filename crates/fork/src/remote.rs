//! What a fork asks of other hosts. Without any, all clones stay here.
//!
//! ```text
//!   plan (before the pause) ─► Away ─► start (when the VM is frozen) ─► each clone's outcome
//!                                └───► end: what was started goes again
//!   reserve: places for a ticket's clones, which a plan then uses
//! ```

use std::collections::HashSet;
use std::fmt;
use std::time::Instant;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody};

use crate::freeze;
use crate::names::Wanted;
use crate::origin::TicketOrigin;
use crate::places::{Allotted, Hold, Placement};
use crate::snapshot::Snapshot;
use vmfork_host::core::Core;
use vmfork_host::lifetime::{HeldLine, Lifetime};
use vmfork_host::vm::machine::Machine;
use vmfork_host::vm::{Inherited, Job, Vm};

/// The other hosts that clones may go to.
pub trait Remote: fmt::Debug + Send + Sync {
    /// What this host is called among them; `None`: it is on its own.
    fn here(&self) -> Option<String>;

    /// The names that VMs of other hosts have; `None`: it is on its own.
    fn names(&self) -> BoxFuture<'_, Option<HashSet<String>>>;

    /// Decide what goes elsewhere; `None`: nothing does.
    ///
    /// # Errors
    /// Hosts are named that there are not, or not all fit and all are insisted on.
    fn plan<'a>(
        &'a self,
        ask: PlanAsk<'a>,
    ) -> BoxFuture<'a, Result<Option<Box<dyn Away>>, ErrorBody>>;

    /// Places for `vms` clones of a VM, for a ticket, on this and other hosts: as many as there
    /// are. `None`: this host alone decides.
    fn reserve<'a>(
        &'a self,
        core: &'a Core,
        parent: &'a Vm,
        vms: u32,
        message: &'a str,
    ) -> BoxFuture<'a, Option<Allotted>>;
}

/// What a plan is for.
#[derive(Debug, Clone, Copy)]
pub struct PlanAsk<'a> {
    pub core: &'a Core,
    pub parent: &'a Vm,
    pub machine: &'a Machine,
    pub placement: &'a Placement,
    /// How many clones.
    pub count: u32,
    pub all_or_nothing: bool,
    /// A ticket's, which has its places already.
    pub by_ticket: bool,
    pub wanted: freeze::Wanted<'a>,
}

/// The part of a fork that goes to other hosts, decided before the pause.
pub trait Away: fmt::Debug + Send + Sync {
    /// How many stay here.
    fn here(&self) -> u32;

    /// What an engine holds for it.
    fn hold(&self) -> Option<&Hold>;

    /// Have the clones started that go elsewhere. → what became of each.
    fn start<'a>(
        &'a self,
        what: Departure<'a>,
        wanted: Vec<Wanted>,
    ) -> BoxFuture<'a, Vec<CloneResult>>;

    /// End what was started. Hosts that cannot be reached are notified later.
    fn end(&self) -> BoxFuture<'_, ()>;
}

/// What goes away of a fork.
#[derive(Debug)]
pub struct Departure<'a> {
    pub core: &'a Core,
    pub parent: &'a Vm,
    pub machine: &'a Machine,
    pub snapshot: &'a Snapshot,
    /// What the clones inherit.
    pub inherited: &'a Inherited,
    pub pause_ms: f64,
    pub all_or_nothing: bool,
    pub deadline: Instant,
    pub given_up: &'a CancellationToken,
    /// The ticket behind it.
    pub origin: Option<&'a TicketOrigin>,
    /// The engine's job that holds the clones.
    pub job: Option<Job>,
    /// How long each clone may live, as of the freeze.
    pub lifetime: &'a Lifetime,
    /// What is known of the parent's bound since then.
    pub bounds: &'a HeldLine,
}
