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
use vmfork_host::admission::ForkGrant;
use vmfork_host::core::Core;
use vmfork_host::vm::machine::Machine;
use vmfork_host::vm::{Job, Vm};

/// What forks are carried out with.
#[derive(Debug)]
pub struct Forker {
    pub core: Arc<Core>,
    pub remote: Arc<dyn Remote>,
}

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
    pub pause_ms: f64,
    pub all_or_nothing: bool,
    pub deadline: Instant,
    pub given_up: &'a CancellationToken,
    /// The ticket behind it.
    pub origin: Option<&'a TicketOrigin>,
    /// The engine's job that holds the clones.
    pub job: Option<Job>,
}

/// Where clones may go.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// Default: spread in a cluster, else here.
    pub place: Option<Place>,
    pub hosts: Option<Vec<String>>,
    /// How fast other hosts get all of the memory; 0: as it is asked for.
    pub hydrate_bytes_per_s: u64,
    /// Of a ticket: the places that it has on other hosts.
    pub reserved: Arc<[Reserved]>,
    /// Of a ticket: what an engine holds for it.
    pub hold: Option<Hold>,
}

/// Clones of a ticket on another host.
pub trait Abroad: fmt::Debug + Send + Sync {
    /// Have a clone ended.
    fn kill(&self, vm: u32);
}

/// A job is needed as long as this lives.
#[derive(Debug, Clone)]
pub struct Hold {
    pub job: Job,
    /// How many clones each host may have.
    pub held: Arc<Held>,
}

/// Places on another host, given back on drop.
pub struct Reserved {
    pub host: HostId,
    pub count: u32,
    /// For the order that is to use it.
    pub number: u64,
    is_used: AtomicBool,
    give_back: Box<dyn Fn(HostId, u64) + Send + Sync>,
}

impl Reserved {
    /// None yet. `give_back` receives host and number.
    pub fn new(
        host: HostId,
        number: u64,
        give_back: impl Fn(HostId, u64) + Send + Sync + 'static,
    ) -> Self {
        let give_back = Box::new(give_back);
        Self { host, count: 0, number, is_used: AtomicBool::new(false), give_back }
    }

    /// The order is sent now: the host takes it from there.
    pub fn sent(&self) {
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
pub struct Allotted {
    pub here: Option<ForkGrant>,
    pub away: Vec<Reserved>,
    /// What an engine holds for them.
    pub hold: Option<Hold>,
    /// Why there are not as many as were asked for.
    pub refused: Option<ErrorBody>,
}

impl Allotted {
    pub fn places(&self) -> u32 {
        let here = self.here.as_ref().map_or(0, |grant| grant.clones.len());
        let away = self.away.iter().map(|it| it.count).fold(0, u32::saturating_add);
        away.saturating_add(u32::try_from(here).unwrap_or(u32::MAX))
    }

    pub fn add_here(&mut self, mut grant: ForkGrant) {
        self.refused = grant.refused.take().or(self.refused.take());
        match &mut self.here {
            Some(here) => here.clones.append(&mut grant.clones),
            here => *here = Some(grant),
        }
    }
}
