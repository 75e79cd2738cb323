//! Who holds what: a VM's memory, the caches of its family, the host's.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use vmfork_api::{BytesBySource, CacheInfo, FaultCounts, HostInfo, MemoryInfo, PoolInfo, SCHEMA};
use vmfork_engine::HostImage;
use vmfork_image::ImageId;
use vmfork_qemu::probe::{self, KvmFacts};

use super::{Core, accel_word};
use crate::vm::Vm;

impl Core {
    /// Bytes in the caches of all images that live VMs are views of, and of their ancestors.
    pub fn cache_bytes(&self) -> u64 {
        let images: HashMap<_, _> = self
            .views()
            .iter()
            .flat_map(|(_, image)| image.with_ancestors())
            .map(|image| (image.id(), image))
            .collect();
        images.values().map(|image| image.cache().resident_bytes()).sum()
    }

    /// How many images live VMs are views of.
    pub(super) fn snapshots(&self) -> usize {
        self.views().iter().map(|(_, image)| image.id()).collect::<HashSet<_>>().len()
    }

    /// The live VMs that have an image, each with it.
    fn views(&self) -> Vec<(Arc<Vm>, Arc<HostImage>)> {
        let view = |vm: Arc<Vm>| {
            let engine = vm.machine()?.engine()?;
            Some((vm, Arc::clone(engine.image())))
        };
        self.registry.live().into_iter().filter_map(view).collect()
    }

    /// The caches that an image's bytes are in, and who needs each.
    fn caches_of(&self, image: &Arc<HostImage>) -> Vec<CacheInfo> {
        let mut needed_by: HashMap<ImageId, Vec<String>> = HashMap::new();
        for (vm, image) in self.views() {
            for cache in image.with_ancestors() {
                needed_by.entry(cache.id()).or_default().push(vm.name().to_owned());
            }
        }
        let row = |cache: Arc<HostImage>| CacheInfo {
            image: cache.id().to_string(),
            resident_bytes: cache.cache().resident_bytes(),
            pages: image.table().map(|table| table.owners().get(cache.id())),
            vms: needed_by.remove(&cache.id()).unwrap_or_default(),
        };
        image.with_ancestors().into_iter().map(row).collect()
    }

    /// Where a VM's memory is, and who else needs what of it.
    pub fn memory_info(&self, vm: &Arc<Vm>) -> MemoryInfo {
        let pages = vm.identity.spec().memory_bytes / vmfork_image::PAGE_BYTES;
        let Some(machine) = vm.machine() else {
            return MemoryInfo { pages, ..MemoryInfo::default() };
        };
        let sample = machine.sample();
        let faults = {
            let counters = machine.counters();
            FaultCounts {
                zero: counters.zero.get(),
                fetch: counters.fetch.get(),
                present: counters.present.get(),
                mapped: counters.mapped.get(),
            }
        };
        let mut info = MemoryInfo {
            pages,
            private_pages: sample.private_pages,
            zero_pages: sample.zero_pages,
            faults,
            ..MemoryInfo::default()
        };
        if let Some(engine) = machine.engine() {
            let image = engine.image();
            let counters = image.counters();
            let present = image.cache().presence();
            info.image = Some(image.id().to_string());
            info.cache_present_pages = present.count(vmfork_image::PageRange::first(pages));
            info.demand_bytes = counters.demand_bytes.get();
            info.fetched_bytes = info.demand_bytes + counters.drained_bytes.get();
            info.undrained_pages = if engine.is_drained() {
                0
            } else {
                image.table().map_or(0, |table| {
                    table.pages_of(image.id()).map(|run| run.len() - present.count(run)).sum()
                })
            };
            let views = self.views().iter().filter(|(_, other)| other.id() == image.id()).count();
            info.image_views = u32::try_from(views).unwrap_or(u32::MAX);
            info.missing_pages = image.missing_pages();
            info.caches = self.caches_of(image);
            info.source = BytesBySource {
                frozen: counters.from_frozen_bytes.get(),
                image: counters.from_image_bytes.get(),
                peer: counters.from_peer_bytes.get(),
                chunk: counters.from_stored_bytes.get(),
            };
            for image in image.with_ancestors() {
                let counters = image.counters();
                info.store_faults.predicted += counters.predicted_faults.get();
                info.store_faults.remote += counters.remote_faults.get();
                info.prefetched_bytes += counters.prefetched_bytes.get();
                let ahead = counters.from_peer_ahead_bytes.get();
                info.hosts.ahead += ahead;
                info.hosts.demand += counters.from_peer_bytes.get().saturating_sub(ahead);
                info.hosts.given += counters.lent_bytes.get();
            }
        }
        info
    }

    /// What the host has, and what is taken of it.
    pub fn host_info(&self) -> HostInfo {
        let (host, room) = (self.admission.host(), self.admission.room());
        let (accel, reason) = match probe::choose_accel(None, &KvmFacts::gather()) {
            Ok(choice) => (choice.accel, choice.reason),
            Err(error) => (vmfork_qemu::Accel::Tcg, error.to_string()),
        };
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        HostInfo {
            schema: SCHEMA.to_owned(),
            memory_total_bytes: host.total_bytes,
            memory_available_bytes: host.available_bytes,
            memory_admissible_bytes: room.memory_bytes,
            vcpus_max: self.admission.vcpus_max(),
            vcpus_admissible: room.vcpus,
            cache_bytes: self.cache_bytes(),
            cpus: count(self.cores),
            accel_default: accel_word(accel),
            accel_reason: reason,
            vms: count(self.registry.live().len()),
            snapshots: count(self.snapshots()),
            pool: PoolInfo {
                target: self.config.pool,
                waiting: count(self.pool_waiting()),
                hits: self.pool_hits.load(std::sync::atomic::Ordering::Relaxed),
                misses: self.pool_misses.load(std::sync::atomic::Ordering::Relaxed),
            },
            lost: self.state.lost(),
        }
    }

    /// What `ps` shows of a VM.
    pub fn summary(&self, vm: &Arc<Vm>, sample: bool) -> vmfork_api::Vm {
        let clones = self.registry.clones_of(&vm.identity.id).len();
        vm.summary(u32::try_from(clones).unwrap_or(u32::MAX), sample)
    }
}
