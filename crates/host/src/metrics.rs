//! What the daemon counts, for Prometheus (`GET /metrics`).
//!
//! Code that does a thing counts it by a method of [`Metrics`].
//! The closure given to [`Metrics::on_scrape`] sets what is better looked up than kept: VMs by
//! state, cache sizes.
//! It runs just before the text is made. No method blocks or fails.

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    EncodeLabelSet, EncodeLabelValue, EncodeMetric, LabelValueEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};
use vmfork_api::{ErrorCode, VmState};
use vmfork_engine::Times;

use self::disks::Disks;
pub use self::disks::StallReason;
pub use self::multicast::{GroupEvent, GroupPages, Multicast};
use self::multicast::{GroupEventLabel, GroupPagesLabel};

/// A duration in milliseconds, as replies and logs have it.
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// A part of a fork. The first six make up the parent's side, as in `ForkStages`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    Prepare,
    Quiesce,
    Stop,
    Disks,
    Freeze,
    State,
    Cont,
    /// After the pause: what the parent had written, and the new page table.
    Derive,
    /// Of each clone: a QEMU had, its memory mapped to the image.
    CloneAttach,
    /// Of each clone: its drives given to the QEMU.
    CloneBind,
    /// Of each clone: device state loaded and running.
    CloneLoad,
    /// Of each clone: the agent has confirmed the new identity.
    CloneIdentity,
    /// Of a stored snapshot: descriptor, page table and device state read.
    Open,
    /// Of a fork onto other hosts: from the end of the pause until all that they receive was ready.
    Describe,
    /// From there until a host had answered, of each.
    Away,
    /// On a host that others' clones are started on: until their memory was open.
    Arrive,
    /// From the request until the last clone was ready.
    Total,
    /// How long the parent's vCPUs stood still.
    Pause,
}

/// How a page fault that reached user space was answered; as in `FaultCounts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultKind {
    Zero,
    Fetch,
    Present,
    Mapped,
}

/// Where bytes brought into a cache came from; as in `BytesBySource`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    Frozen,
    Image,
    Peer,
    Chunk,
}

/// Where a page was that a VM waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// On this host.
    Here,
    Peer,
    Chunk,
}

/// Who of two hosts counts pages that go from one to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Who asked for them, and has got them.
    Asked,
    /// Who gave them.
    Served,
}

/// What pages go to another host for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// A VM waits for them.
    Demand,
    /// Prefetch: no VM waits for them.
    Ahead,
    /// All who need them get them at once.
    All,
}

/// What went between hosts for one [`Role`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub requests: u64,
    pub pages: u64,
    /// On the wire, compressed as they were; without TLS's own.
    pub bytes: u64,
}

impl Traffic {
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.pages += other.pages;
        self.bytes += other.bytes;
    }

    /// What is left of it without a part of it.
    #[must_use]
    pub fn less(self, part: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(part.requests),
            pages: self.pages.saturating_sub(part.pages),
            bytes: self.bytes.saturating_sub(part.bytes),
        }
    }
}

/// What became of pages that this host asked others for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sourced {
    /// Pages that came from a host that has all of their image, where others may have some.
    Origin,
    /// Pages from another one that has them.
    Holder,
    /// Pages that were sent to all who need them.
    Group,
    /// Pages of disks.
    Disk,
    /// Pages that could not be compared with those of their origin.
    Unverified,
    /// Answers that another host has them.
    Redirected,
    /// Reads that another host answered than the one asked first.
    Resourced,
    /// Answers with other pages than their origin has: none was used.
    Forged,
    /// Reads that no host answered.
    Failed,
}

/// What happened to a chunk of a guest image that hosts pull from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImageChunk {
    /// It came from another host.
    Came,
    /// It was given to another host.
    Given,
    /// Of these, it was brought from a third host for that.
    Relayed,
}

/// Why a chunk came from the store that a snapshot or a guest image is pulled from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PulledChunk {
    /// Something read it.
    Waited,
    /// Nothing had read it yet.
    Ahead,
}

/// How a VM came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EndReason {
    /// Powered off, or `sf_exit`.
    Exited,
    /// On request.
    Killed,
    /// Its time to live was over.
    Expired,
    /// QEMU died by itself, or by another's hand.
    QemuDied,
    /// No source had a page.
    PageLost,
    /// The agent did not answer in time, or refused.
    Guest,
    /// Killed by its memory limit.
    OutOfMemory,
    /// Anything else.
    Fault,
}

/// Label values are the variant's name in snake case.
macro_rules! label_value {
    ($($label:ty),*) => {$(
        impl EncodeLabelValue for $label {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
                EncodeLabelValue::encode(&snake_case(self).as_str(), encoder)
            }
        }
    )*};
}
label_value!(Stage, FaultKind, Source, Sourced, Place, Side, Role, EndReason);
label_value!(GroupPages, GroupEvent, StallReason, ImageChunk, PulledChunk);

fn snake_case(variant: &impl Debug) -> String {
    let mut out = String::new();
    for c in format!("{variant:?}").chars() {
        if c.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: Stage,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: EndReason,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultLabel {
    kind: FaultKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabel {
    source: Source,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlaceLabel {
    place: Place,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TrafficLabel {
    side: Side,
    role: Role,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FromLabel {
    from: Sourced,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabel {
    event: Sourced,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ImageChunkLabel {
    what: ImageChunk,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PulledChunkLabel {
    why: PulledChunk,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabel {
    method: String,
    route: String,
    status: u16,
}

/// 50 µs to 52 s, a factor of 2 apart: `stop` takes 0.5 ms, a boot takes seconds.
const BUCKET_FIRST_S: f64 = 50e-6;
const BUCKET_COUNT: u16 = 21;

fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(BUCKET_FIRST_S, 2.0, BUCKET_COUNT))
}

/// A histogram that engines have filled in already.
#[derive(Debug, Clone)]
struct Waited {
    steps: Arc<[AtomicU64]>,
    sum_us: Arc<AtomicU64>,
}

impl Default for Waited {
    fn default() -> Self {
        let steps = Times::bounds_us().map(|_| AtomicU64::new(0)).chain([AtomicU64::new(0)]);
        Self { steps: steps.collect(), sum_us: Arc::default() }
    }
}

impl TypedMetric for Waited {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Waited {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = Times::bounds_us().map(|us| us as f64 / 1e6).chain([f64::INFINITY]);
        let steps = self.steps.iter().map(|n| n.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(steps).collect();
        let count = buckets.iter().map(|(_, n)| n).sum();
        let sum_s = self.sum_us.load(Ordering::Relaxed) as f64 / 1e6;
        encoder.encode_histogram::<NoLabelSet>(sum_s, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

type Refresh = Box<dyn Fn(&Metrics) + Send + Sync>;

/// All metrics of a daemon. One per process, shared by `Arc`.
pub struct Metrics {
    registry: Registry,
    refresh: OnceLock<Refresh>,
    stages: Family<StageLabel, Histogram, fn() -> Histogram>,
    boot: Histogram,
    forks: Counter,
    clones_started: Counter,
    clones_failed: Family<CodeLabel, Counter>,
    vms_started: Counter,
    vms_ended: Family<ReasonLabel, Counter>,
    pool_hits: Counter,
    pool_misses: Counter,
    faults: Family<FaultLabel, Counter>,
    waited: Family<PlaceLabel, Waited>,
    transfer_requests: Family<TrafficLabel, Counter>,
    transfer_pages: Family<TrafficLabel, Counter>,
    transfer_bytes: Family<TrafficLabel, Counter>,
    came: Family<FromLabel, Counter>,
    disk_pages: Counter,
    unverified: Counter,
    sourced: Family<EventLabel, Counter>,
    image_chunks: Family<ImageChunkLabel, Counter>,
    pulled_chunks: Family<PulledChunkLabel, Counter>,
    group_pages: Family<GroupPagesLabel, Counter>,
    group_events: Family<GroupEventLabel, Counter>,
    fetched: Family<SourceLabel, Counter>,
    drained: Counter,
    prefetched: Counter,
    requests: Family<RequestLabel, Counter>,
    vms: Family<StateLabel, Gauge>,
    snapshots: Gauge,
    volumes: Gauge,
    disks: Disks,
    cache: Gauge<u64, AtomicU64>,
    pool_waiting: Gauge,
    admissible: Gauge<u64, AtomicU64>,
    vcpus: Gauge,
    vcpus_max: Gauge,
}

impl Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("vmfork");
        macro_rules! metric {
            ($name:literal, $help:literal) => {
                metric!($name, $help, Default::default())
            };
            ($name:literal, $help:literal, $unit:ident) => {
                metric!($name, $help, Default::default(), $unit)
            };
            ($name:literal, $help:literal, $make:expr) => {{
                let metric = $make;
                registry.register($name, $help, Clone::clone(&metric));
                metric
            }};
            ($name:literal, $help:literal, $make:expr, $unit:ident) => {{
                let metric = $make;
                registry.register_with_unit($name, $help, Unit::$unit, Clone::clone(&metric));
                metric
            }};
        }
        let stages: Family<StageLabel, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(histogram);
        Self {
            stages: metric!("fork_stage", "How long a part of a fork took", stages, Seconds),
            boot: metric!(
                "vm_boot",
                "From the request until a booted VM's agent had answered",
                histogram(),
                Seconds
            ),
            forks: metric!("forks", "Forks whose freeze was done"),
            clones_started: metric!("clones_started", "Clones that became ready"),
            clones_failed: metric!("clones_failed", "Clones that did not, by error code"),
            vms_started: metric!("vms_started", "VMs that were started, clones too"),
            vms_ended: metric!("vms_ended", "VMs that came to their end, by reason"),
            pool_hits: metric!("pool_hits", "Clones started in a QEMU that had waited"),
            pool_misses: metric!("pool_misses", "Clones that had to wait for a new QEMU"),
            faults: metric!("faults", "Page faults that reached user space, by answer"),
            waited: metric!(
                "fault_wait",
                "How long VMs waited for pages that had to be brought into a cache",
                Seconds
            ),
            transfer_requests: metric!("transfer_requests", "Answered requests between hosts"),
            transfer_pages: metric!("transfer_pages", "Pages that went between hosts"),
            transfer_bytes: metric!(
                "transfer",
                "What these took on the wire, without TLS's own",
                Bytes
            ),
            came: metric!("transfer_came_pages", "Pages of other hosts, by who gave them"),
            disk_pages: metric!("transfer_disk_pages", "Pages of other hosts' disks"),
            unverified: metric!("transfer_unverified_pages", "Pages that nothing vouched for"),
            sourced: metric!(
                "transfer_events",
                "What happened to reads of other hosts' pages besides that they came"
            ),
            image_chunks: metric!("image_chunks", "Chunks of guest images between hosts"),
            pulled_chunks: metric!("pulled_chunks", "Chunks of what is pulled from another store"),
            group_pages: metric!("multicast_pages", "What became of pages by multicast"),
            group_events: metric!("multicast_events", "What else happened by multicast"),
            fetched: metric!("cache_filled", "Brought into caches, by where it was", Bytes),
            drained: metric!(
                "drained",
                "Moved from frozen ranges into caches in the background",
                Bytes
            ),
            prefetched: metric!("prefetched", "Brought from stores before anyone asked", Bytes),
            requests: metric!("http_requests", "REST requests, by route and status"),
            vms: metric!("vms", "VMs, by state"),
            snapshots: metric!("snapshots", "Snapshots that are held"),
            volumes: metric!("volumes", "Volumes of this host"),
            disks: Disks::register(&mut registry),
            cache: metric!("cache", "In the caches of all images", Bytes),
            pool_waiting: metric!("pool_waiting", "QEMUs that wait, over all shapes"),
            admissible: metric!("memory_admissible", "What may still be handed out to VMs", Bytes),
            vcpus: metric!("vcpus", "Virtual CPUs that VMs have or were promised"),
            vcpus_max: metric!("vcpus_max", "Virtual CPUs that VMs may have together"),
            registry,
            refresh: OnceLock::new(),
        }
    }

    /// `refresh` is called at each scrape and sets the gauges. Only the first one counts. It must
    /// not block, and should hold no `Arc` of what holds these metrics (take a `Weak`).
    pub fn on_scrape(&self, refresh: impl Fn(&Self) + Send + Sync + 'static) {
        let _already_set = self.refresh.set(Box::new(refresh));
    }

    /// The OpenMetrics text.
    pub fn text(&self) -> String {
        if let Some(refresh) = self.refresh.get() {
            refresh(self);
        }
        let mut text = String::new();
        // Writing to a String can't fail.
        let _ = encode(&mut text, &self.registry);
        text
    }

    pub fn observe_stage(&self, stage: Stage, took: Duration) {
        self.stages.get_or_create(&StageLabel { stage }).observe(took.as_secs_f64());
    }

    pub fn observe_boot(&self, took: Duration) {
        self.boot.observe(took.as_secs_f64());
    }

    pub fn forked(&self) {
        self.forks.inc();
    }

    pub fn clone_started(&self) {
        self.clones_started.inc();
    }

    pub fn clone_failed(&self, code: ErrorCode) {
        let code = snake_case(&code);
        self.clones_failed.get_or_create(&CodeLabel { code }).inc();
    }

    pub fn vm_started(&self) {
        self.vms_started.inc();
    }

    pub fn vm_ended(&self, reason: EndReason) {
        self.vms_ended.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub fn pool_hit(&self) {
        self.pool_hits.inc();
    }

    pub fn pool_missed(&self) {
        self.pool_misses.inc();
    }

    /// `count` more faults than when this was last called for `kind`.
    pub fn add_faults(&self, kind: FaultKind, count: u64) {
        self.faults.get_or_create(&FaultLabel { kind }).inc_by(count);
    }

    /// Adds what each step of [`Times`], and the sum of µs, grew by since the last call for
    /// `place`.
    pub fn add_waited(&self, place: Place, steps: impl Iterator<Item = u64>, sum_us: u64) {
        let waited = self.waited.get_or_create(&PlaceLabel { place });
        for (step, n) in waited.steps.iter().zip(steps) {
            step.fetch_add(n, Ordering::Relaxed);
        }
        waited.sum_us.fetch_add(sum_us, Ordering::Relaxed);
    }

    /// So much more than when this was last called for these.
    pub fn add_transferred(&self, side: Side, role: Role, traffic: Traffic) {
        let label = TrafficLabel { side, role };
        self.transfer_requests.get_or_create(&label).inc_by(traffic.requests);
        self.transfer_pages.get_or_create(&label).inc_by(traffic.pages);
        self.transfer_bytes.get_or_create(&label).inc_by(traffic.bytes);
    }

    /// Adds the increase since the last call for `what`.
    pub fn add_sourced(&self, what: Sourced, count: u64) {
        match what {
            Sourced::Origin | Sourced::Holder | Sourced::Group => {
                self.came.get_or_create(&FromLabel { from: what }).inc_by(count)
            }
            Sourced::Disk => self.disk_pages.inc_by(count),
            Sourced::Unverified => self.unverified.inc_by(count),
            Sourced::Redirected | Sourced::Resourced | Sourced::Forged | Sourced::Failed => {
                self.sourced.get_or_create(&EventLabel { event: what }).inc_by(count)
            }
        };
    }

    /// Adds the increase since the last call for `what`.
    pub fn add_image_chunks(&self, what: ImageChunk, count: u64) {
        self.image_chunks.get_or_create(&ImageChunkLabel { what }).inc_by(count);
    }

    /// `count` more chunks came from the stores that something is pulled from.
    pub fn add_pulled_chunks(&self, why: PulledChunk, count: u64) {
        self.pulled_chunks.get_or_create(&PulledChunkLabel { why }).inc_by(count);
    }

    /// Adds the increase since the last call for `what`.
    pub fn add_multicast(&self, what: Multicast, count: u64) {
        match what {
            Multicast::Pages(side, what) => {
                self.group_pages.get_or_create(&GroupPagesLabel { side, what }).inc_by(count)
            }
            Multicast::Event(side, what) => {
                self.group_events.get_or_create(&GroupEventLabel { side, what }).inc_by(count)
            }
        };
    }

    /// Adds the bytes since the last call for `source`.
    pub fn add_cache_filled(&self, source: Source, bytes: u64) {
        self.fetched.get_or_create(&SourceLabel { source }).inc_by(bytes);
    }

    pub fn add_drained(&self, bytes: u64) {
        self.drained.inc_by(bytes);
    }

    pub fn add_prefetched(&self, bytes: u64) {
        self.prefetched.inc_by(bytes);
    }

    /// `route` is the pattern (`/v1/vms/{vm}`), never the path as sent: there must be few of them.
    pub fn request(&self, method: &str, route: &str, status: u16) {
        let label = RequestLabel { method: method.into(), route: route.into(), status };
        self.requests.get_or_create(&label).inc();
    }

    pub fn set_vms(&self, state: VmState, count: usize) {
        let state = snake_case(&state);
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.vms.get_or_create(&StateLabel { state }).set(count);
    }

    pub fn set_volumes(&self, count: usize) {
        self.volumes.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub fn set_snapshots(&self, count: usize) {
        self.snapshots.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub fn set_cache_bytes(&self, bytes: u64) {
        self.cache.set(bytes);
    }

    pub fn set_pool_waiting(&self, count: usize) {
        self.pool_waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub fn set_admissible_bytes(&self, bytes: u64) {
        self.admissible.set(bytes);
    }

    pub fn set_vcpus(&self, promised: u32, max: u32) {
        self.vcpus.set(promised.into());
        self.vcpus_max.set(max.into());
    }
}

mod disks;
mod multicast;
#[cfg(test)]
mod tests;
