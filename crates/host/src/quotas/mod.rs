//! What users may have on all hosts together: who they are, the settings, and what a quota leaves
//! of what is asked for.
//!
//! Left to others: which request is next (`core`), and what is counted.

mod parse;

use std::collections::BTreeMap;

use vmfork_cluster::allocate::Amount;

pub use self::parse::{QuotaError, bounds, size};
use crate::error::{Error, Refusal};
pub use vmfork_control::User;

/// What the disks of each user's VMs may hold on this host, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskBounds {
    /// Of all that are not in `users`. `None`: no bound.
    pub default_bytes: Option<u64>,
    pub users: BTreeMap<User, Option<u64>>,
}

impl DiskBounds {
    pub fn of(&self, user: User) -> Option<u64> {
        self.users.get(&user).copied().unwrap_or(self.default_bytes)
    }
}

/// What a quota leaves of what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowed {
    /// At most this many VMs.
    pub count: u32,
    pub user: User,
    /// What the user has on all hosts without those.
    pub has: Amount,
    pub may: Amount,
}

impl Allowed {
    /// Why there are no more.
    pub fn refused(&self) -> Refusal {
        let Self { user, has, may, .. } = *self;
        Refusal::Quota { user, has, may }
    }

    /// Why fewer than `asked` fit.
    pub fn few(&self, asked: u32) -> Error {
        Error::Few { granted: self.count, asked, why: self.refused() }
    }
}
