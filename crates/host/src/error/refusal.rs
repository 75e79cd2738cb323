//! Why VMs are not admitted: the figures, and what to do.

use vmfork_cluster::allocate::Amount;
use vmfork_control::User;

pub(crate) const MIB: u64 = 1 << 20;

/// What keeps VMs from being admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The host's memory.
    #[error(
        "{} needed, {} admissible: of {} the host has {} available, {} of that are promised to \
         VMs that have yet to use it ({} in all), {} are in reserve",
        mib(*want_bytes),
        mib(*admissible_bytes),
        mib(*total_bytes),
        mib(*available_bytes),
        mib(*outstanding_bytes),
        mib(*committed_bytes),
        mib(*reserve_bytes)
    )]
    Memory {
        want_bytes: u64,
        admissible_bytes: u64,
        /// Of the host.
        total_bytes: u64,
        /// Of the host, by the kernel.
        available_bytes: u64,
        /// Promised to VMs that have yet to use it.
        outstanding_bytes: u64,
        /// Promised to VMs in all.
        committed_bytes: u64,
        /// What VMs never get.
        reserve_bytes: u64,
    },
    /// The virtual CPUs that VMs may have on the host.
    #[error(
        "{want} virtual CPUs needed, {admissible} admissible: VMs may have {max} on this host \
         (cores: {cores}, {per_core} each), {promised} are promised"
    )]
    Vcpus { want: u32, admissible: u32, max: u32, per_core: u32, cores: u32, promised: u32 },
    /// A family is as large as its guests may make it.
    #[error("{}", family(*by, *has, *may))]
    Family { by: Figure, has: Amount, may: Amount },
    /// The user's quota on all hosts.
    #[error(
        "user {user} has {} on all hosts: the quota leaves no room for more",
        of_quota(*has, *may)
    )]
    Quota { user: User, has: Amount, may: Amount },
}

/// By what a family is as large as its guests may make it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    Vms,
    Memory,
    Vcpus,
}

impl Figure {
    /// The daemon's setting that bounds it.
    fn setting(self) -> &'static str {
        match self {
            Self::Vms => "--family-vms-max",
            Self::Memory => "--family-memory-percent",
            Self::Vcpus => "--family-vcpus-percent",
        }
    }
}

impl Refusal {
    pub(super) fn remedy(&self) -> String {
        match self {
            Self::Memory { .. } => {
                "end VMs (`vmfork ps`, `vmfork kill`), ask for less memory, or lower vmforkd's \
                 --memory-reserve-mib or --clone-growth-percent"
                    .to_owned()
            }
            Self::Vcpus { .. } => "end VMs (`vmfork ps`, `vmfork kill`), ask for fewer, or raise \
                                   vmforkd's --vcpus-per-core"
                .to_owned(),
            Self::Family { by, .. } => format!(
                "end some of them (`vmfork tree`, `vmfork kill`), fork from outside, or raise \
                 vmforkd's {}",
                by.setting()
            ),
            Self::Quota { .. } => {
                "end some of them (`vmfork ps`, `vmfork kill`), or raise vmforkd's --quota"
                    .to_owned()
            }
        }
    }
}

fn family(by: Figure, has: Amount, may: Amount) -> String {
    match by {
        Figure::Vms => {
            format!("its family has {} VMs, and guests may make it {}", has.vms, may.vms)
        }
        Figure::Memory => {
            let [has, may] = [has, may].map(|it| mib(it.room.memory_bytes));
            format!("its family was promised {has}, and guests may make that {may}")
        }
        Figure::Vcpus => {
            let [has, may] = [has, may].map(|it| it.room.vcpus);
            format!("its family has {has} virtual CPUs, and guests may make that {may}")
        }
    }
}

/// What a user has of what the quota bounds.
fn of_quota(has: Amount, may: Amount) -> String {
    let mut figures = Vec::new();
    if may.vms < u32::MAX {
        figures.push(format!("{} of {} VMs", has.vms, may.vms));
    }
    if may.room.memory_bytes < u64::MAX {
        let of = |amount: Amount| amount.room.memory_bytes / MIB;
        figures.push(format!("{} of {} MiB", of(has), of(may)));
    }
    if may.room.vcpus < u32::MAX {
        figures.push(format!("{} of {} virtual CPUs", has.room.vcpus, may.room.vcpus));
    }
    figures.join(" and ")
}

pub(crate) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / MIB)
}
