//! What is asked of the accounts, and what is granted.

use std::sync::{Arc, Mutex, PoisonError};

use vmfork_api::ErrorBody;

use super::Lease;
use crate::quotas::{Allowed, User};

/// A VM that boots asks for memory and virtual CPUs.
#[derive(Debug, Clone, Copy)]
pub struct BootAsk<'a> {
    /// For the error's text.
    pub name: &'a str,
    /// The id of the family whose root it is.
    pub family: &'a str,
    pub user: User,
    pub ram_bytes: u64,
    pub cpus: u32,
}

/// A fork, or a start from a stored snapshot, that asks for memory and virtual CPUs.
#[derive(Debug, Clone, Copy)]
pub struct ForkAsk<'a> {
    /// What is asked for, for the error's text.
    pub message: &'a str,
    /// The id of its family's root.
    pub family: &'a str,
    pub user: User,
    pub ram_bytes: u64,
    pub cpus: u32,
    /// How many clones.
    pub count: u32,
    /// Whether a guest asks, by a ticket: then what its family may have bounds what it gets.
    pub by_guest: bool,
    /// What the user's quota leaves of it.
    pub allowed: Option<Allowed>,
}

/// What of a fork fits.
#[derive(Debug)]
pub struct ForkGrant {
    /// Until the last clone runs.
    pub snapshot: Lease,
    /// One for each clone that may be started: as many as were asked for, or fewer.
    pub clones: Vec<Lease>,
    /// Why the others may not.
    pub refused: Option<ErrorBody>,
}

/// A grant of earlier, lent to the fork that it was made for. If that comes to nothing it is here
/// again.
#[derive(Debug, Clone)]
pub struct Loan(Arc<Mutex<Option<ForkGrant>>>);

impl Loan {
    pub fn new(grant: ForkGrant) -> Self {
        Self(Arc::new(Mutex::new(Some(grant))))
    }

    /// What is lent, once.
    pub fn take(&self) -> Option<ForkGrant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// It was not used.
    pub fn give_back(&self, grant: ForkGrant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(grant);
    }
}
