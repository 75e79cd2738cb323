use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema::{HostAddress, JoinToken, Name};

/// Make a cluster of this host alone, which others can join.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterInitRequest {
    /// `HOST:PORT` at which other hosts reach this one; pages are served at the next port.
    #[schema(value_type = HostAddress)]
    pub address: String,
    /// What the others call this host; default: its host name.
    #[serde(default)]
    #[schema(value_type = Option<Name>)]
    pub name: Option<String>,
}

/// Become a member of the cluster whose host made the token.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterJoinRequest {
    #[schema(value_type = JoinToken)]
    pub token: String,
    /// As in [`ClusterInitRequest`].
    #[schema(value_type = HostAddress)]
    pub address: String,
    #[serde(default)]
    #[schema(value_type = Option<Name>)]
    pub name: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterTokenRequest {
    /// Its lifetime, in s; default 3600.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 604_800)]
    pub ttl_s: Option<u64>,
}

/// Lets one host join: any host that has it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterToken {
    pub schema: String,
    pub token: String,
    pub expires_unix_ms: u64,
}

/// A host, by name or id; absent: the one that is asked.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterHostRequest {
    #[serde(default)]
    #[schema(value_type = Option<Name>)]
    pub host: Option<String>,
}

/// The cluster as this host knows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterInfo {
    pub schema: String,
    /// The id of the host that answers; absent if it is in no cluster. Then there are no hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub here: Option<String>,
    pub hosts: Vec<ClusterHost>,
    /// What is left for the user to do after a call, as a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterHost {
    /// 16 hex digits.
    pub id: String,
    pub name: String,
    pub address: String,
    pub state: HostState,
    pub liveness: HostLiveness,
    /// What it has left for VMs, by its last word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_admissible_bytes: Option<u64>,
    /// The same of virtual CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus_admissible: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    Active,
    /// It gets nothing new.
    Draining,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostLiveness {
    /// It is the one that answers.
    Here,
    Alive,
    /// Silent for a while: it gets nothing new, and loses nothing.
    Suspect,
    /// Silent for so long that what runs there counts as lost.
    Gone,
}
