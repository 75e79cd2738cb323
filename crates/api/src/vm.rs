use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::disk::RootDevice;
use crate::schema::{Name, NewVmName};
use crate::{Disk, ForkReply, Labels, MemoryInfo, NewDisk, Root, Ttl, VmState};

/// How the guest's instructions are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accel {
    Kvm,
    Tcg,
}

/// Start a VM from an image. Everything but `image` has a default.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    #[schema(value_type = Name)]
    pub image: String,
    /// Default: made from the image's name and a number.
    #[serde(default)]
    #[schema(value_type = Option<NewVmName>)]
    pub name: Option<String>,
    /// Guest memory in MiB; default 512.
    #[serde(default)]
    #[schema(minimum = 64, maximum = 262_144, multiple_of = 2)]
    pub memory_mib: Option<u64>,
    /// vCPUs; default 1.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 64)]
    pub cpus: Option<u32>,
    /// Insist on one; default: KVM where it runs stock kernels, else TCG.
    #[serde(default)]
    pub accel: Option<Accel>,
    /// How long to wait until the guest is ready, in ms: its agent has answered, and the image's
    /// first-boot command has ended. Default 120000 for the answer, and 600000 more for the
    /// command. 0: don't wait.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 86_400_000)]
    pub boot_timeout_ms: Option<u64>,
    /// Clones inherit them.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// End the VM, and the clones that inherit its bound, this many ms after its start; default:
    /// never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1000, maximum = 31_536_000_000_u64)]
    pub ttl_ms: Option<u64>,
    /// Writable disks beside the root: up to 7, 6 with an overlay. Clones get them as of the fork.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 7)]
    pub disks: Vec<NewDisk>,
    /// What takes the writes to the root file system; default: `tmpfs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Root>,
    /// Size of the disk of `overlay`, by default 10 GiB, or of `disk`, by default that of the
    /// image's root and no less. Only what is written takes space on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 67_108_864, maximum = 2_199_023_255_552_u64, multiple_of = 4096)]
    pub root_bytes: Option<u64>,
    /// Insist on one; default: `pmem` where the image and the VM's memory allow it, else `block`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_device: Option<RootDevice>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Never used again, 16 hex digits.
    pub id: String,
    pub name: String,
    pub image: String,
    /// The id of the VM at the root of the family.
    pub family: String,
    /// The name of the VM that this one was forked from.
    pub parent: Option<String>,
    /// Its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_id: Option<String>,
    /// The host that it runs on, in a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The name of the stored snapshot that it, or the root of its family, was started from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// 0 in a VM that booted, 1..m in the clones of a ticket.
    pub vmid: u32,
    pub state: VmState,
    /// Why it failed or is stalled, or how it ended.
    pub reason: Option<String>,
    pub accel: Accel,
    pub cpus: u32,
    pub memory_mib: u64,
    pub created_unix_ms: u64,
    /// How long until the agent had answered, in ms since the request.
    pub ready_ms: Option<f64>,
    /// QEMU's process id, while there is one.
    pub pid: Option<u32>,
    /// How many live VMs were forked from this one.
    pub clones: u32,
    /// Guest memory that only this VM holds; a sample that `GET /v1/vms` refreshes.
    pub private_bytes: u64,
    /// Guest memory mapped from caches that the family shares.
    pub shared_bytes: u64,
    /// Page faults answered by the page engine for this VM.
    pub faults: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmDetail {
    pub schema: String,
    #[serde(flatten)]
    pub vm: Vm,
    pub memory: MemoryInfo,
    /// The QEMU it runs in, as the binary reports it; empty once it has ended.
    pub qemu_version: String,
    /// What the agent said when it first answered.
    pub agent_version: Option<String>,
    pub guest_kernel: Option<String>,
    /// Names of live clones, by vmid.
    pub clone_names: Vec<String>,
    /// Why the accelerator was chosen.
    pub accel_reason: String,
    /// How the guest reads the root of its image; absent without such a root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_device: Option<RootDevice>,
    /// Why it reads it so.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub root_device_reason: String,
    /// Whose quota it counts against: a user's number, or `token`.
    #[serde(default)]
    pub user: String,
    /// The job of the site's scheduler that holds its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// When it ends by itself; absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Ttl>,
    /// Its writable disks, in the order of the guest's devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// The process that keeps frozen pages beside QEMU, while there is one.
    pub keeper_pid: Option<u32>,
    /// The last fork of this VM that ended. It may have been asked for by a program in the guest
    /// (`sf_clone`), which has no other way to tell the host. Clones' states are those of that
    /// moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_fork: Option<ForkReply>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KillRequest {
    /// First ask the guest to power off, and wait this long, in ms; 0 or absent: at once.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 86_400_000)]
    pub grace_ms: u64,
    /// With all VMs that descend from it.
    #[serde(default)]
    pub family: bool,
}

/// A VM and what was forked from it; ended VMs appear while a live descendant has them as ancestor.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TreeNode {
    pub vm: Vm,
    #[schema(no_recursion)]
    pub children: Vec<TreeNode>,
}
