use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema::{ImageLocation, Name, NewVmNames, StoreLocation};
use crate::{Accel, CloneResult, ErrorBody, Labels};

/// Keep a running VM as a stored snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The VM, by name or id. It pauses as in a fork, and runs on.
    #[schema(value_type = Name)]
    pub vm: String,
    /// What to call the snapshot.
    #[schema(value_type = Name)]
    pub name: String,
    /// Answer when it is stored, not when the VM runs on.
    #[serde(default)]
    pub wait: bool,
    /// How pages are stored; default zstd.
    #[serde(default)]
    pub compression: Option<Compression>,
    /// Store all that is not zero, even if the VM was started from a stored snapshot.
    #[serde(default)]
    pub full: bool,
    /// Store the disks alone. VMs that are started from it boot. The guest writes back what it has
    /// of its disks in memory first, unless it is paused.
    #[serde(default)]
    pub disk_only: bool,
    /// Store zero pages of the memory like any others. Of use only to measure what leaving them out
    /// is worth.
    #[serde(default)]
    pub keep_zero_pages: bool,
    /// How long to record at most which pages the VM touches after the snapshot, in ms; default
    /// 300000. 0: not at all.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 86_400_000)]
    pub record_ms: Option<u64>,
    /// Added to those of the VM; of the same key, these count.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// How the pages of a snapshot are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    None,
    Zstd,
}

/// Which pages are prefetched, in the letters of Twinkle's figure 7. The letter `f` (zero pages are
/// never fetched) is a property of the snapshot: see `keep_zero_pages`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Prefetch {
    /// On demand only.
    None,
    /// `d`: what the faults so far predict.
    Demand,
    /// `w`: the recorded working set.
    WorkingSet,
    /// Both: `dw`.
    #[default]
    All,
}

/// Start VMs from a stored snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartRequest {
    /// How many.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 1024)]
    pub count: u32,
    /// Names for them, `count` of them; default `SNAPSHOT.N` with the next free numbers.
    #[serde(default)]
    #[schema(value_type = Option<NewVmNames>)]
    pub names: Option<Vec<String>>,
    /// If not all of them fit, start none.
    #[serde(default)]
    pub all_or_nothing: bool,
    /// Start although the snapshot was taken on another QEMU, machine or CPU, where QEMU itself
    /// would try. Of a snapshot of the disks alone: although its image is another one now.
    #[serde(default)]
    pub force: bool,
    #[serde(default)]
    pub prefetch: Prefetch,
    /// Fetch everything else in the background, at most this many MiB per second. Then the VM does
    /// not depend on the store any more. Default 0: never.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4_294_967_295_u32)]
    pub hydrate_mib_per_s: u32,
    /// Bound on the whole call, in ms; default 60000.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 86_400_000)]
    pub timeout_ms: Option<u64>,
    /// Added to those of the snapshot; of the same key, these count.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// End each VM this many ms after its start; default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1000, maximum = 31_536_000_000_u64)]
    pub ttl_ms: Option<u64>,
}

fn one() -> u32 {
    1
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct StartReply {
    pub schema: String,
    pub snapshot: String,
    pub requested: u32,
    /// How many VMs were started and are ready.
    pub granted: u32,
    pub began_unix_ms: u64,
    /// From the request until the snapshot was open: descriptor, page table and device state read.
    pub open_ms: f64,
    /// From the request until the last VM was ready, in ms.
    pub total_ms: f64,
    /// One each.
    pub vms: Vec<CloneResult>,
}

/// What a snapshot is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    /// Its pages are being written.
    Writing,
    Ready,
    /// It can be started; its pages are still coming from where it was pulled from.
    Pulling,
    /// It could not be written, or what is stored is damaged; `reason` says why.
    Failed,
}

/// A stored snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    pub name: String,
    /// Never used again, 32 hex digits; absent while it is being written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    pub state: SnapshotState,
    /// Why it failed, or why its pull does not go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub created_unix_ms: u64,
    /// The guest image that its VM booted from.
    pub image: String,
    pub memory_mib: u64,
    /// Whether it has no memory, so that its VMs boot.
    #[serde(default)]
    pub disk_only: bool,
    /// Size of its disks together, in bytes.
    #[serde(default)]
    pub disk_bytes: u64,
    pub cpus: u32,
    pub accel: Accel,
    /// The snapshot that it differs from, if it is a delta.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Memory and disks whose bytes are stored with it; the rest is its base's, or zero.
    pub own_bytes: u64,
    /// What that takes in the store, compressed; pages that others have stored already are not
    /// counted.
    pub stored_bytes: u64,
    /// What it has in common with others in the store, compressed.
    pub shared_bytes: u64,
    /// How far writing or pulling it is.
    pub progress: Progress,
    /// Live VMs that depend on it.
    pub vms: u32,
    /// Where it was pulled from, while it depends on that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// VMs that are started from it inherit them.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// How far something is that takes a while.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    pub done_bytes: u64,
    pub total_bytes: u64,
}

/// What an image of a snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageRole {
    /// The guest's memory.
    Memory,
    /// The content of a disk.
    Disk,
}

/// One image of a stored snapshot. Each has its own page table, base and working set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotImage {
    pub role: ImageRole,
    /// Of a disk, the name of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages whose bytes are stored with it.
    pub own_pages: u64,
    /// Pages of zeros; of a delta, those that became zero since the base.
    pub zero_pages: u64,
    /// Bytes that were written to the store for it, compressed.
    pub stored_bytes: u64,
    /// Bytes that it has in common with others in the store, compressed.
    pub shared_bytes: u64,
    /// The snapshot whose image it is a delta on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Hash of its page table, which names each chunk by hash; 64 hex digits.
    pub root: String,
}

/// All that is known of one snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SnapshotDetail {
    pub schema: String,
    #[serde(flatten)]
    pub snapshot: Snapshot,
    /// What it was taken on; a host that differs refuses it.
    pub qemu_version: String,
    pub machine: String,
    pub cpu: String,
    pub guest_kernel: Option<String>,
    /// How long the VM's vCPUs stood still for it, in ms.
    pub pause_ms: f64,
    pub compression: Compression,
    pub chunk_pages: u64,
    /// Of all its images.
    pub own_pages: u64,
    /// Of all its images.
    pub zero_pages: u64,
    /// What it consists of, the memory first; empty while it is being written.
    #[serde(default)]
    pub images: Vec<SnapshotImage>,
    /// Snapshots that are deltas of this one.
    pub dependants: Vec<String>,
    /// Names of the live VMs that depend on it.
    pub vm_names: Vec<String>,
    pub profile: ProfileInfo,
}

/// What is known of the pages that VMs of a snapshot touch first.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ProfileInfo {
    /// How many runs it was learnt from.
    pub runs: u32,
    /// Pages that are loaded before anyone asks.
    pub working_set_pages: u64,
    /// What they take in the store, compressed.
    pub working_set_bytes: u64,
    /// Whether a run is being recorded now.
    pub recording: bool,
    /// The most urgent runs of pages, the first touched first; at most 1000.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clusters: Vec<ProfileCluster>,
}

/// Pages that are touched together.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ProfileCluster {
    pub first_page: u64,
    pub pages: u64,
    /// In how many of the runs, 0 to 1, recent ones counting more.
    pub frequency: f64,
    /// When it is touched first, on average, in ms after the start.
    pub first_access_ms: f64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RemovedSnapshots {
    /// It, and those that depended on it.
    pub names: Vec<String>,
    pub freed_bytes: u64,
}

/// What reading all of a snapshot, and of what it depends on, has shown.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VerifyReply {
    pub schema: String,
    pub snapshot: String,
    pub chunks: u64,
    /// Those that are still where the snapshot is pulled from, and were not read.
    #[serde(default)]
    pub chunks_elsewhere: u64,
    pub read_bytes: u64,
    /// What is damaged, and where; empty if all is well.
    pub damage: Vec<ErrorBody>,
}

/// Copy a snapshot, with what it depends on, between this host's store and another.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TransferRequest {
    /// The other store: `s3://BUCKET/PREFIX`, or a folder of the daemon's host.
    #[schema(value_type = StoreLocation)]
    pub location: String,
    /// Pulling: answer when all pages are here, not when it can be started.
    #[serde(default)]
    pub wait: bool,
}

/// Bring a guest image from a store, or from other hosts of the cluster.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImagePullRequest {
    /// `s3://BUCKET/PREFIX`, a folder of the daemon's host, or `cluster://[HOST]`.
    #[schema(value_type = ImageLocation)]
    pub location: String,
    /// Answer when all of it is here, not when VMs can boot from it.
    #[serde(default)]
    pub wait: bool,
}

impl From<ImagePullRequest> for TransferRequest {
    fn from(ImagePullRequest { location, wait }: ImagePullRequest) -> Self {
        Self { location, wait }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TransferReply {
    pub schema: String,
    /// The snapshots that were copied; what was there already is left out.
    pub names: Vec<String>,
    pub sent_bytes: u64,
    pub total_ms: f64,
}
