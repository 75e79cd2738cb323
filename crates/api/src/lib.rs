//! The wire types of vmfork's REST API (JSON over HTTP, version 1).
//!
//! A leaf crate: the daemon serves these, the CLI reads them, the OpenAPI document is made from
//! them. Everything that counts bytes ends in `_bytes`, every duration in `_ms` or `_us`, every
//! instant in `_unix_ms` (milliseconds since 1970, the host's clock).
//!
//! | route | does |
//! |---|---|
//! | `GET /v1/version` | [`Version`] |
//! | `GET /v1/doctor` | [`DoctorReport`], as the daemon sees the host |
//! | `GET /v1/host` | [`HostInfo`]: memory, pool, what an earlier daemon lost |
//! | `GET /v1/images` | `Vec<`[`Image`]`>` |
//! | `DELETE /v1/images/{name}` | 204; 409 while a VM uses it |
//! | `POST /v1/images/{name}/pull` | [`ImagePullRequest`] → [`Image`] |
//! | `POST /v1/images/{name}/seed` | → [`Image`]; `DELETE` → 204 |
//! | `GET /v1/vms` | `Vec<`[`Vm`]`>` (`?all=true` with the ended ones; `?label=KEY=VALUE`) |
//! | `POST /v1/vms` | [`RunRequest`] → 201 [`Vm`] |
//! | `GET /v1/vms/{vm}` | [`VmDetail`]; `{vm}` is a name or an id, everywhere |
//! | `DELETE /v1/vms/{vm}` | forget an ended VM (`?force=true`: kill it first) → 204 |
//! | `POST /v1/vms/{vm}/kill` | [`KillRequest`] → [`Vm`] |
//! | `POST /v1/vms/{vm}/fork` | [`ForkRequest`] → [`ForkReply`] |
//! | `POST /v1/vms/{vm}/pause`, `resume` | [`Vm`]: its vCPUs stop, and continue |
//! | `PUT /v1/vms/{vm}/ttl` | [`TtlRequest`] → [`TtlReply`]: when it ends by itself |
//! | `GET /v1/tree` | `Vec<`[`TreeNode`]`>`: the families |
//! | `POST /v1/vms/{vm}/exec` | [`ExecRequest`] → [`ExecReply`]: whole output at once |
//! | `GET /v1/vms/{vm}/exec/stream` | WebSocket, see [`ExecClientMessage`], [`ExecServerMessage`] |
//! | `GET /v1/vms/{vm}/files?path=` | the bytes of a file; `x-vmfork-mode` carries the mode (octal) |
//! | `PUT /v1/vms/{vm}/files?path=&mode=` | store the body; 204 |
//! | `GET /v1/vms/{vm}/logs?follow=` | text: console output and what detached programs printed |
//! | `GET /v1/vms/{vm}/console` | WebSocket, binary both ways: the serial console |
//! | `GET /v1/snapshots` | `Vec<`[`Snapshot`]`>` |
//! | `POST /v1/snapshots` | [`SnapshotRequest`] → 201 [`Snapshot`]: keep a running VM |
//! | `GET /v1/snapshots/{name}` | [`SnapshotDetail`] |
//! | `DELETE /v1/snapshots/{name}` | [`RemovedSnapshots`] (`?cascade=true` with its deltas); 409 while something depends on it |
//! | `POST /v1/snapshots/{name}/start` | [`StartRequest`] → [`StartReply`] |
//! | `POST /v1/snapshots/{name}/verify` | [`VerifyReply`]: every byte read and checked |
//! | `POST /v1/snapshots/{name}/flatten` | [`Snapshot`]: a delta becomes whole |
//! | `GET /v1/snapshots/{name}/export` | one stream of bytes, with what it depends on |
//! | `POST /v1/import?name=` | such a stream → `Vec<`[`Snapshot`]`>` |
//! | `POST /v1/snapshots/{name}/push` | [`TransferRequest`] → [`TransferReply`] |
//! | `POST /v1/snapshots/{name}/pull` | [`TransferRequest`] → [`Snapshot`] |
//! | `GET /v1/snapshots/{name}/profile` | [`ProfileInfo`] |
//! | `DELETE /v1/snapshots/{name}/profile` | forget it; 204 |
//! | `GET /v1/volumes` | `Vec<`[`Volume`]`>` |
//! | `POST /v1/volumes` | [`VolumeRequest`] → 201 [`Volume`] |
//! | `GET /v1/volumes/{name}` | [`Volume`] |
//! | `DELETE /v1/volumes/{name}` | 204, with all that it holds; 409 while a VM has it |
//! | `PUT /v1/volumes/{name}/on-fork` | [`OnForkRequest`] → [`Volume`] |
//! | `POST /v1/volumes/{name}/attach` | [`AttachRequest`] → [`Disk`] of a running VM |
//! | `POST /v1/volumes/{name}/detach` | [`DetachRequest`] → [`Volume`] |
//! | `POST /v1/volumes/{name}/resize` | [`ResizeRequest`] → [`Volume`] |
//! | `GET /v1/cluster` | [`ClusterInfo`]: the hosts |
//! | `POST /v1/cluster` | [`ClusterInitRequest`] → 201 [`ClusterInfo`]: make one |
//! | `POST /v1/cluster/join` | [`ClusterJoinRequest`] → [`ClusterInfo`] |
//! | `POST /v1/cluster/token` | [`ClusterTokenRequest`] → [`ClusterToken`] |
//! | `POST /v1/cluster/leave`, `drain`, `activate` | [`ClusterHostRequest`] → [`ClusterInfo`] |
//! | `GET /v1/events?after=&kind=&vm=&follow=` | server-sent events, each an [`Event`] |
//! | `GET /v1/openapi.json`, `GET /metrics` | the document, Prometheus text |
//!
//! Every error is an [`ErrorBody`] with a fitting HTTP status.

mod cluster;
pub mod disk;
mod error;
mod event;
mod fork;
mod host;
pub mod labels;
mod memory;
pub mod schema;
mod session;
mod snapshot;
mod ttl;
mod vm;
mod vm_state;
mod volume;

pub use cluster::{
    ClusterHost, ClusterHostRequest, ClusterInfo, ClusterInitRequest, ClusterJoinRequest,
    ClusterToken, ClusterTokenRequest, HostLiveness, HostState,
};
pub use disk::{
    Disk, DiskActivity, DiskError, DiskFormat, DiskSource, DiskState, Durability, HostDisk,
    NewDisk, ResizeRequest, Root,
};
pub use error::{ErrorBody, ErrorCode};
pub use event::{
    Event, EventClone, EventFilter, EventHost, EventKind, EventSnapshot, EventVm, GapCause,
    Happening, HostGoneCause, VmEnd,
};
pub use fork::{CloneResult, ForkReply, ForkRequest, ForkStages, Place};
pub use host::{
    Check, CheckStatus, DoctorReport, HostInfo, Image, ImageProfile, LostVm, PoolInfo, Version,
    WorkloadProfile,
};
pub use labels::{LabelError, LabelFilter, Labels};
pub use memory::{
    BytesBetweenHosts, BytesBySource, CacheInfo, FaultCounts, MemoryInfo, StoreFaults,
};
pub use session::{
    ExecClientMessage, ExecReply, ExecRequest, ExecServerMessage, ExecWithoutTerminal, TerminalSize,
};
pub use snapshot::{
    Compression, ImagePullRequest, ImageRole, Prefetch, ProfileCluster, ProfileInfo, Progress,
    RemovedSnapshots, Snapshot, SnapshotDetail, SnapshotImage, SnapshotRequest, SnapshotState,
    StartReply, StartRequest, TransferReply, TransferRequest, VerifyReply,
};
pub use ttl::{TTL_MS_MAX, TTL_MS_MIN, Ttl, TtlReply, TtlRequest};
pub use vm::{Accel, KillRequest, RunRequest, TreeNode, Vm, VmDetail};
pub use vm_state::VmState;
pub use volume::{
    AttachRequest, DetachRequest, OnFork, OnForkRequest, VOLUMES_MAX, Volume, VolumeRequest,
    VolumeSource,
};

/// The value of every top-level document's `schema` field under `--json`.
pub const SCHEMA: &str = "vmfork/1";

/// Longest VM or image name, in bytes.
pub const NAME_BYTES_MAX: usize = 63;

/// Whether `name` may name a VM or an image: 1 to 63 of `a-z A-Z 0-9 . _ -`, the first a letter
/// or digit. The one check of names; done at the edge (REST and CLI), relied on below it.
pub fn name_is_valid(name: &str) -> bool {
    let bytes = name.as_bytes();
    !bytes.is_empty()
        && bytes.len() <= NAME_BYTES_MAX
        && bytes[0].is_ascii_alphanumeric()
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_a_folder_are_refused() {
        for bad in ["", ".", "..", "../x", "a/b", ".hidden", "-x", "a b", "é", &"a".repeat(64)] {
            assert!(!name_is_valid(bad), "{bad:?}");
        }
        for good in ["web", "web.1", "a-b_c", "0", &"a".repeat(63)] {
            assert!(name_is_valid(good), "{good:?}");
        }
    }
}
