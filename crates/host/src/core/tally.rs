//! What page engines count, added up for the metrics: their counters end with the VM or the image
//! that they belong to, those of the metrics don't.
//!
//! Read when a client asks for the metrics, and before a VM ends or gets another image.
//! Each figure is remembered as last seen, and its growth since is added.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vmfork_engine::{HostImage, Times};
use vmfork_image::ImageId;

use crate::metrics::{
    FaultKind, ImageChunk, Metrics, Multicast, Place, Role, Side, Source, Sourced, Traffic,
};
use crate::vm::Vm;

#[derive(Debug, Default)]
pub struct Tally {
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// By id, as long as the VM lives: faults as in [`FAULTS`].
    vms: HashMap<String, [u64; FAULTS.len()]>,
    images: HashMap<ImageId, (Weak<HostImage>, OfImage)>,
    traffic: HashMap<(Side, Role), Traffic>,
    sourced: HashMap<Sourced, u64>,
    multicast: HashMap<Multicast, u64>,
    image_chunks: HashMap<ImageChunk, u64>,
}

const FAULTS: [FaultKind; 4] =
    [FaultKind::Zero, FaultKind::Fetch, FaultKind::Present, FaultKind::Mapped];

#[derive(Debug, Default)]
struct OfImage {
    bytes: ImageBytes,
    waited: [Waited; 3],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ImageBytes {
    frozen: u64,
    image: u64,
    peer: u64,
    chunk: u64,
    drained: u64,
    prefetched: u64,
}

#[derive(Debug, Default)]
struct Waited {
    steps: Vec<u64>,
    sum_us: u64,
}

impl Waited {
    fn add(&mut self, place: Place, times: &Times, metrics: &Metrics) {
        let steps: Vec<u64> = times.steps().collect();
        let sum_us = grown(times.sum_us(), &mut self.sum_us);
        self.steps.resize(steps.len(), 0);
        let grown = steps.iter().zip(&mut self.steps).map(|(now, before)| grown(*now, before));
        metrics.add_waited(place, grown, sum_us);
    }
}

impl Tally {
    /// Add what has come since of one VM, its image and that image's ancestors.
    pub(super) fn look_at(&self, vm: &Vm, metrics: &Metrics) {
        let Some(machine) = vm.machine() else { return };
        let engine = machine.engine();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let counters = machine.counters();
            let now = [&counters.zero, &counters.fetch, &counters.present, &counters.mapped]
                .map(vmfork_engine::Counter::get);
            let before = seen.vms.entry(vm.identity.id.clone()).or_default();
            for (kind, (now, before)) in FAULTS.into_iter().zip(now.into_iter().zip(&mut *before)) {
                metrics.add_faults(kind, grown(now, before));
            }
        }
        for image in engine.iter().flat_map(|engine| engine.image().with_ancestors()) {
            let counters = image.counters();
            let now = ImageBytes {
                frozen: counters.from_frozen_bytes.get(),
                image: counters.from_image_bytes.get(),
                peer: counters.from_peer_bytes.get(),
                chunk: counters.from_stored_bytes.get(),
                drained: counters.drained_bytes.get(),
                prefetched: counters.prefetched_bytes.get(),
            };
            let (_, OfImage { bytes: before, waited }) = seen
                .images
                .entry(image.id())
                .or_insert_with(|| (Arc::downgrade(&image), OfImage::default()));
            let [here, peer, chunk] = waited;
            here.add(Place::Here, &counters.waited_here, metrics);
            peer.add(Place::Peer, &counters.waited_for_peer, metrics);
            chunk.add(Place::Chunk, &counters.waited_for_stored, metrics);
            metrics.add_cache_filled(Source::Frozen, grown(now.frozen, &mut before.frozen));
            metrics.add_cache_filled(Source::Image, grown(now.image, &mut before.image));
            metrics.add_cache_filled(Source::Peer, grown(now.peer, &mut before.peer));
            metrics.add_cache_filled(Source::Chunk, grown(now.chunk, &mut before.chunk));
            metrics.add_prefetched(grown(now.prefetched, &mut before.prefetched));
            metrics.add_drained(grown(now.drained, &mut before.drained));
        }
    }

    /// So much has gone between this host and others by now.
    pub fn look_at_traffic(&self, side: Side, role: Role, now: Traffic, metrics: &Metrics) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let before = seen.traffic.entry((side, role)).or_default();
        let grown = Traffic {
            requests: grown(now.requests, &mut before.requests),
            pages: grown(now.pages, &mut before.pages),
            bytes: grown(now.bytes, &mut before.bytes),
        };
        metrics.add_transferred(side, role, grown);
    }

    /// So often has it happened by now that pages of other hosts were had in this way.
    pub fn look_at_sourced(&self, what: Sourced, now: u64, metrics: &Metrics) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        metrics.add_sourced(what, grown(now, seen.sourced.entry(what).or_default()));
    }

    /// This many chunks of guest images have come or been given by now.
    pub fn look_at_image_chunks(&self, what: ImageChunk, now: u64, metrics: &Metrics) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        metrics.add_image_chunks(what, grown(now, seen.image_chunks.entry(what).or_default()));
    }

    /// So much has become of what is sent and heard by multicast by now.
    pub fn look_at_multicast(&self, what: Multicast, now: u64, metrics: &Metrics) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        metrics.add_multicast(what, grown(now, seen.multicast.entry(what).or_default()));
    }

    /// A VM has ended; and images may have.
    pub(super) fn forget(&self, vm: &Vm) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.vms.remove(&vm.identity.id);
        seen.images.retain(|_, (image, _)| image.strong_count() > 0);
    }
}

/// How much a figure has grown since it was `before`, which becomes `now`.
fn grown(now: u64, before: &mut u64) -> u64 {
    now.saturating_sub(std::mem::replace(before, now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_added_once() {
        let mut before = 0;
        let steps = [3, 3, 10, 10].map(|now| grown(now, &mut before));
        assert_eq!(steps, [3, 0, 7, 0]);
        // One that went back is a figure's own mistake, and takes nothing away.
        assert_eq!(grown(4, &mut before), 0);
    }
}
