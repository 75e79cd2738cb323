//! What is said to who does not get what was asked for: the figures, and what to do.

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_cluster::allocate::Amount;

use super::accounts::Accounts;
use super::{Admission, MIB, Policy};
use crate::quotas::Allowed;

/// What keeps a fork from getting more clones.
#[derive(Debug, Clone, Copy)]
pub(super) enum Bound {
    Memory,
    Vcpus,
    Family { by: Figure, has: Amount, may: Amount },
    Quota(Allowed),
}

/// By what a family is as large as its guests may make it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Figure {
    Vms,
    Memory,
    Vcpus,
}

impl Admission {
    pub(super) fn refusal(
        &self,
        accounts: &Accounts,
        message: String,
        want: u64,
        admissible: u64,
    ) -> ErrorBody {
        let host = self.0.probe.host();
        let cause = format!(
            "{} needed, {} admissible: of {} the host has {} available, {} of that are promised to \
             VMs that have yet to use it ({} in all), {} are in reserve",
            mib(want),
            mib(admissible),
            mib(host.total_bytes),
            mib(host.available_bytes),
            mib(accounts.outstanding_bytes()),
            mib(accounts.committed_bytes()),
            mib(self.0.policy.reserve_bytes),
        );
        ErrorBody::new(ErrorCode::NoCapacity, message).cause(cause).remedy(
            "end VMs (`vmfork ps`, `vmfork kill`), ask for less memory, or lower vmforkd's \
             --memory-reserve-mib or --clone-growth-percent",
        )
    }

    pub(super) fn no_vcpus(&self, accounts: &Accounts, message: String, want: u32) -> ErrorBody {
        let Policy { cores, vcpus_per_core, .. } = self.0.policy;
        let cause = format!(
            "{want} virtual CPUs needed, {} admissible: VMs may have {} on this host \
             ({vcpus_per_core} for a core, of which it has {cores}), {} are promised",
            self.vcpus_left(accounts),
            self.vcpus_max(),
            accounts.vcpus(),
        );
        ErrorBody::new(ErrorCode::NoCapacity, message).cause(cause).remedy(
            "end VMs (`vmfork ps`, `vmfork kill`), ask for fewer, or raise vmforkd's --vcpus-per-core",
        )
    }
}

pub(super) fn family_is_large(message: String, by: Figure, has: Amount, may: Amount) -> ErrorBody {
    let (cause, setting) = match by {
        Figure::Vms => (
            format!("its family has {} VMs, and guests may make it {}", has.vms, may.vms),
            "--family-vms-max",
        ),
        Figure::Memory => {
            let [has, may] = [has, may].map(|it| mib(it.room.memory_bytes));
            (
                format!("its family was promised {has}, and guests may make that {may}"),
                "--family-memory-percent",
            )
        }
        Figure::Vcpus => {
            let [has, may] = [has, may].map(|it| it.room.vcpus);
            (
                format!("its family has {has} virtual CPUs, and guests may make that {may}"),
                "--family-vcpus-percent",
            )
        }
    };
    let remedy = format!(
        "end some of them (`vmfork tree`, `vmfork kill`), fork from outside, or raise vmforkd's {setting}"
    );
    ErrorBody::new(ErrorCode::NoCapacity, message).cause(cause).remedy(remedy)
}

pub(super) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / MIB)
}
