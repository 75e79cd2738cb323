use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Shortest time to live of a VM, in ms: a second.
pub const TTL_MS_MIN: u64 = 1000;

/// Longest time to live of a VM, in ms: 365 days.
pub const TTL_MS_MAX: u64 = 365 * 86_400_000;

/// Change when a VM ends by itself.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TtlRequest {
    /// End it, and the clones that inherit its bound, this many ms from now; null: never.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required, minimum = 1000, maximum = 31_536_000_000_u64)]
    pub ttl_ms: Option<u64>,
}

/// When a VM ends by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ttl {
    pub expires_unix_ms: u64,
    /// Time left until then, by the clock of its host that never jumps.
    pub left_ms: u64,
    /// The id of the ancestor whose bound it inherits; absent: the bound is its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inherited_from: Option<String>,
}

/// The bound of a VM after a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TtlReply {
    pub schema: String,
    /// The VM's name.
    pub vm: String,
    /// Null: it does not end by itself.
    pub ttl: Option<Ttl>,
}
