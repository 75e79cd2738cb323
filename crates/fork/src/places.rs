//! Places for clones: where they may go, and what is set aside for them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmfork_api::{ErrorBody, Place};
use vmfork_cluster::HostId;
use vmfork_cluster::allocate::Held;
use vmfork_host::admission::ForkGrant;
use vmfork_host::vm::Job;

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
