use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema::{Name, NewVmNames};
use crate::{ErrorBody, Labels, VmState};

/// Fork a running VM into `count` clones.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    #[schema(minimum = 1, maximum = 1024)]
    pub count: u32,
    /// Names for the clones, `count` of them; default `PARENT.N` with the next free numbers.
    #[serde(default)]
    #[schema(value_type = Option<NewVmNames>)]
    pub names: Option<Vec<String>>,
    /// If not all of them fit, start none.
    #[serde(default)]
    pub all_or_nothing: bool,
    /// Bound on the whole call, in ms; default 60000. Clones that are not ready by then are killed
    /// and reported as errors.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 86_400_000)]
    pub timeout_ms: Option<u64>,
    /// Where the clones go, in a cluster; default `spread`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// Of those hosts alone, by name or id; default: all that take clones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Name>>)]
    pub hosts: Option<Vec<String>>,
    /// How fast clones on other hosts get all of their memory without asking for it, in MiB per
    /// second; default 0: only on demand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 4_294_967_295_u32)]
    pub hydrate_mib_per_s: Option<u64>,
    /// Added to those that the clones inherit; of the same key, these count.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// End each clone this many ms after its start; default: when the bound of its nearest ancestor
    /// that has one ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1000, maximum = 31_536_000_000_u64)]
    pub ttl_ms: Option<u64>,
}

/// How a fork's clones are put on the hosts of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// On the parent's host alone.
    Here,
    /// As many on each.
    Spread,
    /// On as few hosts as they fit on, the parent's first.
    Pack,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ForkReply {
    pub schema: String,
    pub parent: String,
    pub requested: u32,
    /// How many clones were started and are ready.
    pub granted: u32,
    /// When the request came, which the times below count from.
    #[serde(default)]
    pub began_unix_ms: u64,
    /// How long the parent's vCPUs stood still, in ms: from before `stop` to after `cont`.
    pub pause_ms: f64,
    /// From the request until the last clone was ready, in ms.
    pub total_ms: f64,
    pub stages: ForkStages,
    /// One each, by vmid.
    pub clones: Vec<CloneResult>,
}

/// Where the parent's pause went, and the steps around it, each in ms.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ForkStages {
    /// Admission, names, new cache, claims from the pool (before the pause).
    pub prepare_ms: f64,
    /// The agent stopped talking between frames (before the pause).
    pub quiesce_ms: f64,
    /// QMP `stop`.
    pub stop_ms: f64,
    /// Each disk's layer frozen, and the next one its own. 0 without disks.
    #[serde(default)]
    pub disks_ms: f64,
    /// RAM moved aside and mapped again.
    pub freeze_ms: f64,
    /// The device state written.
    pub state_ms: f64,
    /// QMP `cont`.
    pub cont_ms: f64,
    /// Finding what the parent had written, and deriving the page table (after the pause).
    pub derive_ms: Option<f64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CloneResult {
    /// The id of the VM; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    pub vmid: u32,
    pub name: String,
    pub state: VmState,
    /// From the request until this clone's vCPUs ran, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_ms: Option<f64>,
    /// From the request until this clone's agent had confirmed its identity, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_ms: Option<f64>,
    /// Whether it was started in a QEMU that had waited in the pool.
    #[serde(default)]
    pub pooled: bool,
    /// The host that it was started on, in a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}
