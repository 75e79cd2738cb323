//! What users may have on all hosts together: who they are, the settings, and what a quota leaves
//! of what is asked for.
//!
//! Left to others: which request is next (`core`), and what is counted.

mod parse;

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_cluster::allocate::Amount;

pub use self::parse::{QuotaError, bounds};
pub use vmfork_control::User;

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
    pub fn refusal(&self, message: String) -> ErrorBody {
        let Self { user, has, may, .. } = self;
        let mut figures = Vec::new();
        if may.vms < u32::MAX {
            figures.push(format!("{} of {} VMs", has.vms, may.vms));
        }
        if may.room.memory_bytes < u64::MAX {
            let mib = |amount: &Amount| amount.room.memory_bytes >> 20;
            figures.push(format!("{} of {} MiB", mib(has), mib(may)));
        }
        if may.room.vcpus < u32::MAX {
            figures.push(format!("{} of {} virtual CPUs", has.room.vcpus, may.room.vcpus));
        }
        let figures = figures.join(" and ");
        ErrorBody::new(ErrorCode::NoCapacity, message)
            .cause(format!(
                "user {user} has {figures} on all hosts: the quota leaves no room for more"
            ))
            .remedy("end some of them (`vmfork ps`, `vmfork kill`), or raise vmforkd's --quota")
    }
}
