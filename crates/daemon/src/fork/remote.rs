//! What a fork asks of other hosts. Without any, all clones stay here.
//!
//! ```text
//!   plan (before the pause) ─► Away ─► start (when the VM is frozen) ─► each clone's outcome
//!                                └───► end: what was started goes again
//!   reserve: places for a ticket's clones, which a plan then uses
//! ```

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody, Place};
use vmfork_cluster::HostId;
use vmfork_cluster::allocate::Held;

use super::brood::Wanted;
use super::freeze;
use super::snapshot::Snapshot;
use super::tickets::TicketOrigin;
use crate::admission::ForkGrant;
use crate::core::Core;
use crate::vm::machine::Machine;
use crate::vm::{Job, Vm};

/// What forks are carried out with.
pub(crate) struct Forker {
    pub(crate) core: Arc<Core>,
    pub(crate) remote: Arc<dyn Remote>,
}

/// The other hosts that clones may go to.
pub(crate) trait Remote: Send + Sync {
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
#[derive(Clone, Copy)]
pub(crate) struct PlanAsk<'a> {
    pub(crate) core: &'a Core,
    pub(crate) parent: &'a Vm,
    pub(crate) machine: &'a Machine,
    pub(crate) placement: &'a Placement,
    /// How many clones.
    pub(crate) count: u32,
    pub(crate) all_or_nothing: bool,
    /// A ticket's, which has its places already.
    pub(crate) by_ticket: bool,
    pub(crate) wanted: freeze::Wanted<'a>,
}

/// The part of a fork that goes to other hosts, decided before the pause.
pub(crate) trait Away: Send + Sync {
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
pub(crate) struct Departure<'a> {
    pub(crate) core: &'a Core,
    pub(crate) parent: &'a Vm,
    pub(crate) machine: &'a Machine,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) pause_ms: f64,
    pub(crate) all_or_nothing: bool,
    pub(crate) deadline: Instant,
    pub(crate) given_up: &'a CancellationToken,
    /// The ticket behind it.
    pub(crate) origin: Option<&'a TicketOrigin>,
    /// The engine's job that holds the clones.
    pub(crate) job: Option<Job>,
}

/// Where clones may go.
#[derive(Debug, Clone, Default)]
pub(crate) struct Placement {
    /// Default: spread in a cluster, else here.
    pub(crate) place: Option<Place>,
    pub(crate) hosts: Option<Vec<String>>,
    /// How fast other hosts get all of the memory; 0: as it is asked for.
    pub(crate) hydrate_bytes_per_s: u64,
    /// Of a ticket: the places that it has on other hosts.
    pub(crate) reserved: Arc<[Reserved]>,
    /// Of a ticket: what an engine holds for it.
    pub(crate) hold: Option<Hold>,
}

/// Clones of a ticket on another host.
pub(crate) trait Abroad: fmt::Debug + Send + Sync {
    /// Have a clone ended.
    fn kill(&self, vm: u32);
}

/// A job is needed as long as this lives.
#[derive(Debug, Clone)]
pub(crate) struct Hold {
    pub(crate) job: Job,
    /// How many clones each host may have.
    pub(crate) held: Arc<Held>,
}

/// Places on another host, given back on drop.
pub(crate) struct Reserved {
    pub(crate) host: HostId,
    pub(crate) count: u32,
    /// For the order that is to use it.
    pub(crate) number: u64,
    is_used: AtomicBool,
    give_back: Box<dyn Fn(HostId, u64) + Send + Sync>,
}

impl Reserved {
    /// None yet. `give_back` receives host and number.
    pub(crate) fn new(
        host: HostId,
        number: u64,
        give_back: impl Fn(HostId, u64) + Send + Sync + 'static,
    ) -> Self {
        let give_back = Box::new(give_back);
        Self { host, count: 0, number, is_used: AtomicBool::new(false), give_back }
    }

    /// The order is sent now: the host takes it from there.
    pub(crate) fn sent(&self) {
        self.is_used.store(true, Ordering::Relaxed);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if !*self.is_used.get_mut() {
            (self.give_back)(self.host, self.number);
        }
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, count, number, is_used, give_back: _ } = self;
        let mut text = f.debug_struct("Reserved");
        text.field("host", host).field("count", count).field("number", number);
        text.field("is_used", is_used).finish_non_exhaustive()
    }
}

/// Places for the clones of a ticket.
#[derive(Debug, Default)]
pub(crate) struct Allotted {
    pub(crate) here: Option<ForkGrant>,
    pub(crate) away: Vec<Reserved>,
    /// What an engine holds for them.
    pub(crate) hold: Option<Hold>,
    /// Why there are not as many as were asked for.
    pub(crate) refused: Option<ErrorBody>,
}

impl Allotted {
    pub(crate) fn places(&self) -> u32 {
        let here = self.here.as_ref().map_or(0, |grant| grant.clones.len());
        let away = self.away.iter().map(|it| it.count).fold(0, u32::saturating_add);
        away.saturating_add(u32::try_from(here).unwrap_or(u32::MAX))
    }

    pub(crate) fn add_here(&mut self, mut grant: ForkGrant) {
        self.refused = grant.refused.take().or(self.refused.take());
        match &mut self.here {
            Some(here) => here.clones.append(&mut grant.clones),
            here => *here = Some(grant),
        }
    }
}
