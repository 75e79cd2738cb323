//! What is known of stored snapshots.

use std::collections::BTreeSet;
use std::sync::Arc;

use vmfork_api::{
    ErrorBody, ImageRole, Labels, Progress, Snapshot, SnapshotDetail, SnapshotImage, SnapshotState,
};
use vmfork_image::PAGE_BYTES;
use vmfork_store::{Compression, Descriptor, ImageDescriptor, Role, SnapshotId, StoreError};

use crate::error::SnapshotError;
use crate::kind::is_guest_image;
use crate::library::Snapshots;
use crate::opened::Opened;
use crate::under_way::{Listed, UnderWay};
use vmfork_fork::facts::Facts;
use vmfork_host::core::Core;
use vmfork_host::error::chain;
use vmfork_host::vm::Vm;

impl Snapshots {
    /// All of them, by name. What is damaged is among them, with the reason.
    pub fn list(&self, core: &Core) -> Result<Vec<Snapshot>, ErrorBody> {
        let stored = self
            .store
            .list()
            .map_err(|error| SnapshotError::from(error).to_body("list the snapshots"))?;
        let mut all: Vec<Snapshot> = stored
            .into_iter()
            .filter(|(_, outcome)| !outcome.as_ref().is_ok_and(is_guest_image))
            .map(|(name, outcome)| match outcome {
                Ok(descriptor) => self.of_descriptor(core, &descriptor),
                Err(error) => {
                    Snapshot { reason: Some(chain(&error)), ..blank(&name, SnapshotState::Failed) }
                }
            })
            .collect();
        let under_way: Vec<_> = self.under_way().values().cloned().collect();
        for one in under_way {
            if one.listed().is_some() && !all.iter().any(|stored| stored.name == one.name) {
                all.push(self.listed_under_way(&one));
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// One of them, as in the list.
    ///
    /// # Errors
    /// There is none of that name, or it is damaged.
    pub fn listed(&self, core: &Core, name: &str) -> Result<Snapshot, ErrorBody> {
        let message = || format!("find snapshot `{name}`");
        match self.store.descriptor(name) {
            Ok(descriptor) if is_guest_image(&descriptor) => {
                Err(self.not_found(name).to_body(message()))
            }
            Ok(descriptor) => Ok(self.of_descriptor(core, &descriptor)),
            Err(StoreError::NotFound { .. }) => {
                let under_way = self.under_way().get(name).cloned();
                let listed = under_way.filter(|one| one.listed().is_some());
                let listed = listed.map(|one| self.listed_under_way(&one));
                listed.ok_or_else(|| self.not_found(name).to_body(message()))
            }
            Err(error) => Err(SnapshotError::from(error).to_body(message())),
        }
    }

    /// That there is no snapshot of that name.
    pub(super) fn not_found(&self, name: &str) -> SnapshotError {
        let place = self.store.describe();
        StoreError::NotFound { name: name.to_owned(), place }.into()
    }

    pub(super) fn listed_under_way(&self, under_way: &UnderWay) -> Snapshot {
        let of_it = Snapshot {
            created_unix_ms: under_way.created_unix_ms,
            reason: under_way.reason(),
            progress: under_way.progress(),
            ..blank(&under_way.name, under_way.state())
        };
        let Some(Listed { facts, base, disk_only }) = under_way.listed() else { return of_it };
        Snapshot {
            disk_only,
            image: facts.spec().image.clone(),
            memory_mib: facts.spec().memory_bytes >> 20,
            disk_bytes: facts.spec().disks().map(|(_, disk)| disk.size_bytes).sum(),
            cpus: facts.spec().cpus,
            accel: facts.spec().accel,
            labels: facts.inherited.labels.clone(),
            base,
            ..of_it
        }
    }

    fn of_descriptor(&self, core: &Core, descriptor: &Descriptor) -> Snapshot {
        let counts = descriptor.counts();
        let disks = descriptor.images.iter().filter(|image| image.role != Role::Memory);
        let remote = self.store.origin(&descriptor.name).ok().flatten();
        let facts: Option<Facts> = serde_json::from_value(descriptor.vm.clone()).ok();
        let (reason, progress) = self.pull_of(descriptor, remote.as_deref());
        let state = match &remote {
            Some(_) => SnapshotState::Pulling,
            None => SnapshotState::Ready,
        };
        Snapshot {
            id: Some(descriptor.id.to_string()),
            reason,
            created_unix_ms: descriptor.created_unix_ms,
            image: facts.as_ref().map(|facts| facts.spec().image.clone()).unwrap_or_default(),
            disk_only: descriptor.image(&Role::Memory).is_none(),
            memory_mib: facts.as_ref().map_or(0, |facts| facts.spec().memory_bytes >> 20),
            disk_bytes: disks.map(|image| image.bytes).sum(),
            cpus: facts.as_ref().map_or(0, |facts| facts.spec().cpus),
            accel: facts.as_ref().map_or(vmfork_api::Accel::Tcg, |facts| facts.spec().accel),
            labels: facts.as_ref().map(|facts| facts.inherited.labels.clone()).unwrap_or_default(),
            base: descriptor.bases().next().map(|base| base.name.clone()),
            own_bytes: counts.own_pages.saturating_mul(PAGE_BYTES),
            stored_bytes: counts.stored_bytes,
            shared_bytes: counts.shared_bytes,
            progress,
            remote,
            vms: u32::try_from(self.vms_of(core, descriptor.id).len()).unwrap_or(u32::MAX),
            ..blank(&descriptor.name, state)
        }
    }

    /// How far its pull is, and why that does not go on; of what is all here, all.
    fn pull_of(&self, descriptor: &Descriptor, remote: Option<&str>) -> (Option<String>, Progress) {
        let Some(remote) = remote else {
            let bytes = descriptor.counts().stored_bytes;
            return (None, Progress { done_bytes: bytes, total_bytes: bytes });
        };
        if let Some(pull) = self.pulls().get(&descriptor.id) {
            return (pull.reason(), pull.progress());
        }
        let total_bytes = descriptor.counts().own_pages.saturating_mul(PAGE_BYTES);
        let progress = Progress { done_bytes: 0, total_bytes };
        // One that is about to begin has its name, or that of what is a delta of this.
        if self.under_way().values().any(|one| one.is_pull()) {
            return (None, progress);
        }
        let reason = format!(
            "its pull was interrupted; pages come from {remote} as they are needed, or all if it is pulled again"
        );
        (Some(reason), progress)
    }

    /// All that is known of one.
    ///
    /// # Errors
    /// As [`Snapshots::listed`].
    pub fn detail(&self, core: &Core, name: &str) -> Result<SnapshotDetail, ErrorBody> {
        let snapshot = self.listed(core, name)?;
        let failed = |error: SnapshotError| error.to_body(format!("inspect snapshot `{name}`"));
        let descriptor = match self.store.descriptor(name) {
            Ok(descriptor) => Some(descriptor),
            Err(StoreError::NotFound { .. }) => None,
            Err(error) => return Err(failed(error.into())),
        };
        let facts = match &descriptor {
            Some(descriptor) => serde_json::from_value(descriptor.vm.clone()).ok(),
            None => {
                let under_way = self.under_way().get(name).cloned();
                under_way.and_then(|one| one.listed()).map(|listed| listed.facts)
            }
        };
        let facts: Option<Facts> = facts;
        let word = |get: fn(&Facts) -> &str| facts.as_ref().map(get).unwrap_or_default().to_owned();
        let all = self.store.list().map_err(|error| failed(error.into()))?;
        let is_dependant = |other: &Descriptor| {
            other.bases().any(|base| Some(base.id) == descriptor.as_ref().map(|d| d.id))
        };
        let first = descriptor.as_ref().and_then(|it| it.images.first());
        let counts = descriptor.as_ref().map(Descriptor::counts).unwrap_or_default();
        Ok(SnapshotDetail {
            schema: vmfork_api::SCHEMA.to_owned(),
            qemu_version: word(|facts| &facts.qemu_version),
            machine: word(|facts| &facts.machine),
            cpu: word(|facts| &facts.cpu),
            guest_kernel: facts
                .as_ref()
                .and_then(|facts| facts.agent.as_ref())
                .map(|agent| agent.kernel.clone()),
            pause_ms: facts.as_ref().map_or(0.0, |facts| facts.pause_ms),
            compression: match first.map(|image| image.compression) {
                Some(Compression::None) => vmfork_api::Compression::None,
                _ => vmfork_api::Compression::Zstd,
            },
            chunk_pages: first.map_or(0, |image| image.chunk_pages),
            own_pages: counts.own_pages,
            zero_pages: counts.zero_pages,
            images: descriptor.iter().flat_map(|it| &it.images).map(image_of).collect(),
            dependants: all
                .into_iter()
                .filter_map(|(name, other)| other.ok().filter(&is_dependant).map(|_| name))
                .collect(),
            vm_names: descriptor
                .as_ref()
                .map(|descriptor| self.vms_of(core, descriptor.id))
                .unwrap_or_default(),
            profile: self.profile_info(name).unwrap_or_default(),
            snapshot,
        })
    }

    /// Names of the live VMs that may need its pages.
    fn vms_of(&self, core: &Core, id: SnapshotId) -> Vec<String> {
        let disks = self.read_disks(id);
        let with_disks = match disks.is_empty() {
            true => Ok(BTreeSet::new()),
            false => core.disks.vms_on(&disks),
        };
        let with_disks = with_disks.unwrap_or_else(|error| {
            tracing::warn!(
                error = vmfork_host::error::chain(&error),
                "whose disks need a snapshot"
            );
            BTreeSet::new()
        });
        // Each is asked once, however many VMs share it.
        let needed: Vec<_> =
            self.all_opened().into_iter().filter(|opened| opened.needs(id)).collect();
        let needs = |vm: &Vm| {
            vm.provenance()
                .get::<Opened>()
                .is_some_and(|mine| needed.iter().any(|opened| Arc::ptr_eq(opened, &mine)))
        };
        let live = core.registry.live().into_iter();
        let these = live.filter(|vm| with_disks.contains(vm.name()) || needs(vm));
        these.map(|vm| vm.name().to_owned()).collect()
    }
}

/// An image in the words of the API.
fn image_of(image: &ImageDescriptor) -> SnapshotImage {
    let (role, device) = match &image.role {
        Role::Memory => (ImageRole::Memory, None),
        Role::Disk(device) => (ImageRole::Disk, Some(device.as_str().to_owned())),
    };
    SnapshotImage {
        role,
        device,
        bytes: image.bytes,
        page_bytes: image.page_bytes,
        own_pages: image.counts.own_pages,
        zero_pages: image.counts.zero_pages,
        stored_bytes: image.counts.stored_bytes,
        shared_bytes: image.counts.shared_bytes,
        base: image.base.as_ref().map(|base| base.name.clone()),
        root: image.table.blake3.to_hex().to_string(),
    }
}

/// One of which nothing else is known.
fn blank(name: &str, state: SnapshotState) -> Snapshot {
    Snapshot {
        name: name.to_owned(),
        id: None,
        state,
        reason: None,
        created_unix_ms: 0,
        image: String::new(),
        disk_only: false,
        memory_mib: 0,
        disk_bytes: 0,
        cpus: 0,
        accel: vmfork_api::Accel::Tcg,
        base: None,
        own_bytes: 0,
        stored_bytes: 0,
        shared_bytes: 0,
        progress: Progress::default(),
        vms: 0,
        remote: None,
        labels: Labels::default(),
    }
}
