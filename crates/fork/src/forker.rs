//! What forks are carried out with.

use std::fmt;
use std::sync::Arc;

use tokio::sync::mpsc;
use vmfork_guest_link::agent::GuestRequest;
use vmfork_host::core::Core;
use vmfork_host::vm::Vm;

use crate::remote::Remote;

/// Requests of one guest that wait to be looked at.
pub(crate) const REQUESTS_MAX: usize = 1024;

/// What forks are carried out with.
#[derive(Debug)]
pub struct Forker {
    pub core: Arc<Core>,
    pub remote: Arc<dyn Remote>,
    /// Serves the fork API of programs in guests: forks that start forks.
    pub tickets: Arc<dyn TicketService>,
}

/// Serves the fork API of programs in guests.
pub trait TicketService: fmt::Debug + Send + Sync {
    /// Answer the requests of one VM until it ends.
    fn serve(&self, forker: &Arc<Forker>, vm: &Arc<Vm>, requests: mpsc::Receiver<GuestRequest>);
}
