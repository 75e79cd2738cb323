//! What the disks of this host did and hold.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};
use vmfork_disk::{DiskTotals, Operation, RequestTimes};

use super::Metrics;

/// Why a disk has stopped a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StallReason {
    /// The host is full, or the quota is reached.
    NoSpace,
    /// The disk can't be read or written.
    Error,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StallLabel {
    reason: StallReason,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    op: &'static str,
}

fn operation_word(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Write => "write",
        Operation::Flush => "flush",
        Operation::Trim => "trim",
    }
}

/// A histogram that disks have filled in already.
#[derive(Debug, Clone, Default)]
struct Took(Arc<Mutex<RequestTimes>>);

impl TypedMetric for Took {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Took {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let times = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bounds = RequestTimes::bounds_us().map(|us| us as f64 / 1e6).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(times.steps()).collect();
        let count = buckets.iter().map(|(_, n)| n).sum();
        encoder.encode_histogram::<NoLabelSet>(times.sum().as_secs_f64(), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[derive(Debug, Default)]
pub(super) struct Disks {
    reads: Counter,
    writes: Counter,
    flushes: Counter,
    trims: Counter,
    partial_writes: Counter,
    read_bytes: Counter,
    written_bytes: Counter,
    trimmed_bytes: Counter,
    errors: Family<StallLabel, Counter>,
    reconnects: Counter,
    late_layers: Counter,
    request: Family<OperationLabel, Took>,
    layer_bytes: Gauge<u64, AtomicU64>,
    stalled: Family<StallLabel, Gauge>,
}

impl Disks {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let all = Self::default();
        let counters = [
            ("disk_reads", "Reads of VMs' disks", &all.reads),
            ("disk_writes", "Writes to VMs' disks", &all.writes),
            ("disk_flushes", "Flushes of VMs' disks", &all.flushes),
            ("disk_trims", "Trims of VMs' disks, and writes of zeros", &all.trims),
            (
                "disk_partial_writes",
                "Those writes that covered a page in part",
                &all.partial_writes,
            ),
            (
                "disk_reconnects",
                "Connections of QEMUs that had been connected to that disk before",
                &all.reconnects,
            ),
            (
                "disk_late_layers",
                "Freezes of disks that had to make a layer in the pause",
                &all.late_layers,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let bytes = [
            ("disk_read", "Read from VMs' disks", &all.read_bytes),
            ("disk_written", "Written to VMs' disks", &all.written_bytes),
            ("disk_trimmed", "Trimmed on VMs' disks, or made zeros", &all.trimmed_bytes),
        ];
        for (name, help, counter) in bytes {
            registry.register_with_unit(name, help, Unit::Bytes, counter.clone());
        }
        let help = "Requests of VMs' disks that failed, by reason";
        registry.register("disk_errors", help, all.errors.clone());
        let help = "From when a request had come until its reply was made, by operation";
        registry.register_with_unit("disk_request", help, Unit::Seconds, all.request.clone());
        let help = "In the layers of disks that are in use";
        registry.register_with_unit("disk_layer", help, Unit::Bytes, all.layer_bytes.clone());
        let help = "VMs that a disk has stopped, by reason";
        registry.register("disk_stalled_vms", help, all.stalled.clone());
        all
    }
}

impl Metrics {
    /// What all disks did since the daemon started, and what their layers hold now.
    pub fn set_disks(&self, totals: &DiskTotals, layer_bytes: u64) {
        let (disks, counts) = (&self.disks, &totals.counts);
        let set = |counter: &Counter, now: u64| counter.inner().store(now, Ordering::Relaxed);
        set(&disks.reads, counts.reads);
        set(&disks.writes, counts.writes);
        set(&disks.flushes, counts.flushes);
        set(&disks.trims, counts.trims);
        set(&disks.partial_writes, counts.partial_writes);
        set(&disks.read_bytes, counts.read_bytes);
        set(&disks.written_bytes, counts.written_bytes);
        set(&disks.trimmed_bytes, counts.trimmed_bytes);
        set(&disks.reconnects, counts.reconnects);
        set(&disks.late_layers, counts.late_layers);
        for (reason, now) in [
            (StallReason::NoSpace, counts.no_space),
            (StallReason::Error, counts.errors.saturating_sub(counts.no_space)),
        ] {
            set(&disks.errors.get_or_create(&StallLabel { reason }), now);
        }
        for operation in Operation::ALL {
            let op = operation_word(operation);
            let took = disks.request.get_or_create_owned(&OperationLabel { op });
            *took.0.lock().unwrap_or_else(PoisonError::into_inner) = totals.took(operation);
        }
        disks.layer_bytes.set(layer_bytes);
    }

    /// VMs that a disk has stopped.
    pub fn set_stalled(&self, reason: StallReason, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.disks.stalled.get_or_create(&StallLabel { reason }).set(count);
    }
}
