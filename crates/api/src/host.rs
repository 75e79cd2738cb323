use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Accel;

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Version {
    pub schema: String,
    /// The daemon's version.
    pub vmforkd: String,
    pub api: String,
    /// The QEMU that new VMs get, as it reports itself.
    pub qemu: Option<String>,
    pub kernel: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckStatus {
    Ok,
    /// Works, with something missing; the detail says what.
    Warning,
    Failed,
}

/// One line of `vmfork doctor`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Check {
    /// A short stable word: `userfaultfd`, `qemu`, `shim`, `kvm`, `memory`, `cgroup`, `disk` …
    pub name: String,
    pub status: CheckStatus,
    /// What was seen.
    pub detail: String,
    /// One line; present unless `status` is `ok`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DoctorReport {
    pub schema: String,
    pub checks: Vec<Check>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostInfo {
    pub schema: String,
    pub memory_total_bytes: u64,
    /// What the kernel could still give out.
    pub memory_available_bytes: u64,
    /// What vmfork may still hand out by its own accounts.
    pub memory_admissible_bytes: u64,
    /// Virtual CPUs that all VMs may have together; 0 of a daemon that does not say.
    #[serde(default)]
    pub vcpus_max: u32,
    /// What of that may still be handed out.
    #[serde(default)]
    pub vcpus_admissible: u32,
    /// Bytes in the caches of all images on this host.
    pub cache_bytes: u64,
    pub cpus: u32,
    pub accel_default: Accel,
    pub accel_reason: String,
    pub vms: u32,
    pub snapshots: u32,
    pub pool: PoolInfo,
    /// VMs that were there when an earlier daemon ended without stopping them.
    pub lost: Vec<LostVm>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct PoolInfo {
    /// How many waiting QEMUs the setting asks for, per machine shape in use.
    pub target: u32,
    /// How many wait now, over all shapes.
    pub waiting: u32,
    /// Clones that were started in a waiting QEMU, and those that had to wait for a new one.
    pub hits: u64,
    pub misses: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LostVm {
    pub name: String,
    pub id: String,
    pub image: String,
    pub parent: Option<String>,
    pub created_unix_ms: u64,
}

/// What is known of how VMs use a guest image.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ImageProfile {
    /// By name. A VM's label `workload` says which is its own; `default` is that of the others.
    pub workloads: Vec<WorkloadProfile>,
}

/// What VMs of one workload read of an image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WorkloadProfile {
    pub workload: String,
    /// How many runs it was learnt from.
    pub runs: u32,
    /// What at least half of the runs read, in whole clusters.
    pub read_bytes: u64,
    /// What any run read that is not forgotten.
    pub read_bytes_any: u64,
    /// When, on average, half of `read_bytes` was read, in ms after the start.
    pub half_ms: f64,
}

/// A guest image in the store.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Image {
    pub name: String,
    /// Bytes on disk: kernel, initrd, root file system.
    pub size_bytes: u64,
    pub created_unix_ms: u64,
    /// "debian bookworm", "imported" …
    pub origin: String,
    pub kernel: String,
    /// Whether it was built with an agent in it (imported ones may have none).
    pub agent: bool,
    /// VMs that use it now.
    #[serde(default)]
    pub vms: u32,
    /// Where it was pulled from, while its root depends on that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// Whether other hosts of the cluster can pull it from this one.
    #[serde(default)]
    pub seeded: bool,
}
