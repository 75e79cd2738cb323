//! What the tickets of a VM hear of the clones that they made.

use std::fmt;
use std::sync::Arc;

use tokio::sync::mpsc::{self, error::SendError};
use vmfork_guest_link::agent::{GuestRequest, MailRoom};
use vmfork_guest_link::tickets::Refusal;
use vmfork_host::admission::ForkGrant;
use vmfork_host::vm::{Fate, Origin, Vm};

use crate::places::{Allotted, Hold, Reserved};

/// What the task of one VM hears.
#[derive(Debug)]
pub enum Event {
    /// A worker of this VM's tickets asks, in clone `vm`. The parent answers `sf_exit` and
    /// `sf_send`.
    Worker { ticket: u64, vm: u32, request: GuestRequest },
    /// How many places there are for a ticket's clones, on all hosts.
    Allocated { ticket: u64, allotted: Allotted },
    /// A clone is being started.
    Born { ticket: u64, vm: Arc<Vm> },
    /// The same on another host.
    Sent { ticket: u64, vm: u32, to: Arc<dyn Abroad> },
    /// A clone runs.
    Running { ticket: u64, vmid: u32 },
    /// A clone has ended.
    Ended { ticket: u64, vmid: u32, reason: String },
    /// The fork behind an `sf_clone` is over. `unused`: its places, if nothing was forked.
    Forked { ticket: u64, outcome: Result<(), Refusal>, unused: Places },
}

/// Which ticket makes clones, and what is notified of their fate.
#[derive(Debug, Clone)]
pub struct TicketOrigin {
    pub ticket: u64,
    pub parent: mpsc::UnboundedSender<Event>,
    /// Where what its workers send lies until the parent receives it.
    pub room: MailRoom,
}

impl From<TicketOrigin> for Origin {
    fn from(TicketOrigin { ticket, parent, room }: TicketOrigin) -> Self {
        Self { ticket, fate: Arc::new(ParentTask(parent)), room }
    }
}

/// The task of the parent's tickets.
#[derive(Debug)]
struct ParentTask(mpsc::UnboundedSender<Event>);

impl Fate for ParentTask {
    fn born(&self, ticket: u64, vm: Arc<Vm>) {
        let _desk_closed = self.0.send(Event::Born { ticket, vm });
    }

    fn ended(&self, ticket: u64, vmid: u32, reason: String) {
        let _desk_closed = self.0.send(Event::Ended { ticket, vmid, reason });
    }

    fn asked(&self, ticket: u64, vm: u32, request: GuestRequest) -> Result<(), GuestRequest> {
        match self.0.send(Event::Worker { ticket, vm, request }) {
            Err(SendError(Event::Worker { request, .. })) => Err(request),
            _ => Ok(()),
        }
    }
}

/// Places of a ticket that is granted and not used.
#[derive(Debug, Default)]
pub struct Places {
    pub(crate) here: Option<ForkGrant>,
    pub(crate) away: Arc<[Reserved]>,
    pub(crate) hold: Option<Hold>,
}

/// Clones of a ticket on another host.
pub trait Abroad: fmt::Debug + Send + Sync {
    /// Have a clone ended.
    fn kill(&self, vm: u32);
}
