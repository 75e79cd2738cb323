//! Which ticket made a VM, and what is notified of its fate.

use std::fmt;
use std::sync::Arc;

use super::Vm;
use vmfork_guest_link::agent::{GuestRequest, MailRoom};

/// Of a VM that a ticket made.
#[derive(Debug, Clone)]
pub struct Origin {
    pub ticket: u64,
    /// The parent's.
    pub fate: Arc<dyn Fate>,
    /// Where what its workers send lies until the parent receives it.
    pub room: MailRoom,
}

/// Is notified of the fate of a ticket's clones. Once the ticket has closed, notices are dropped.
pub trait Fate: fmt::Debug + Send + Sync {
    /// A clone is being started.
    fn born(&self, ticket: u64, vm: Arc<Vm>);

    /// A clone has ended.
    fn ended(&self, ticket: u64, vmid: u32, reason: String);

    /// A clone's program asks something that is for the parent to answer.
    ///
    /// # Errors
    /// It has closed: the request, unanswered.
    fn asked(&self, ticket: u64, vmid: u32, request: GuestRequest) -> Result<(), GuestRequest>;
}
