//! VMs that boot from the disks of a stored snapshot, which has no memory.
//!
//! ```text
//!   prepare (image, root, accelerator) ─► names ─► admit all ─► boot, a few at a time
//! ```
//!
//! Promises: each VM has a copy-on-write view of its own of the stored disks, and an identity of
//! its own. Its root is what it was when the snapshot was taken. All VMs of a start have the same
//! kernel. A start that is given up leaves no VM.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use vmfork_api::disk::{ROOT_NAME, RootDisk};
use vmfork_api::{CloneResult, ErrorBody, StartReply, StartRequest};
use vmfork_fork::facts::host;
use vmfork_fork::{Error as ForkError, Names, NotStarted, ms, name_taken, start_message};
use vmfork_guest_image::ImageFiles;
use vmfork_host::admission::{BootAsk, Lease};
use vmfork_host::core::accel_word;
use vmfork_host::error::Error as HostError;
use vmfork_host::metrics::Stage;
use vmfork_host::quotas::User;
use vmfork_host::vm::{Inherited, MachineSpec, Vm, now_unix_ms, random_hex};
use vmfork_qemu::AccelChoice;
use vmfork_snapshots::StoredDisks;

use super::Hub;
use super::boot::{self, EndOnDrop, Order};
use super::error::RunError;
use super::{boot_disks, root_device};

/// A start under way.
struct Start<'a> {
    hub: &'a Hub,
    user: User,
    /// What the snapshot is called now.
    snapshot: &'a str,
    stored: StoredDisks,
    files: ImageFiles,
    choice: AccelChoice,
    root: Option<RootDisk>,
    inherited: Inherited,
    ttl: Option<Duration>,
    began: Instant,
    deadline: Instant,
}

/// A VM of it that there is room for.
struct Place {
    number: u32,
    name: String,
    /// Its own, and its family's.
    id: String,
    lease: Lease,
}

/// Start VMs. What fits is started; the rest is an error each. If this future is dropped, what was
/// started is ended.
///
/// # Errors
/// None was started.
pub(super) async fn start(
    hub: &Hub,
    user: User,
    snapshot: &str,
    request: StartRequest,
    (stored, open): (StoredDisks, Duration),
) -> Result<StartReply, ErrorBody> {
    let now = Instant::now();
    let began = now.checked_sub(open).unwrap_or(now);
    let began_unix_ms = now_unix_ms().saturating_sub(u64::try_from(open.as_millis()).unwrap_or(0));
    hub.core.metrics.observe_stage(Stage::Open, open);
    let message = format!("start snapshot `{snapshot}`");
    let failed = |error: ForkError| error.to_body(message.as_str());
    let (requested, all_or_nothing) = (request.count, request.all_or_nothing);
    let limit = vmfork_fork::check(requested, request.names.as_deref(), request.timeout_ms);
    let deadline = began + limit.map_err(failed)?;
    let start = Start::prepare(hub, user, snapshot, &request, stored, (began, deadline));
    let start = start.map_err(|error| error.to_body(message.as_str()))?;
    let taken = hub.forker.remote.names().await;
    let names = Names {
        wanted: request.names.as_deref(),
        stem: snapshot,
        count: requested,
        taken: taken.as_ref(),
    };
    // The names are kept until the VMs have them.
    let (_reservation, names) =
        vmfork_fork::reserve(&hub.core, names, all_or_nothing).map_err(failed)?;
    let (places, mut vms) = start.admit(names, all_or_nothing).await?;
    let mut started = EndOnDrop::new(&hub.core);
    let boots = stream::iter(places).map(|place| start.one(place));
    let mut boots = std::pin::pin!(boots.buffer_unordered(hub.core.cores.max(1)));
    while let Some(outcome) = boots.next().await {
        match outcome {
            Ok((result, vm)) => {
                started.add(vm);
                vms.push(result);
            }
            Err(CloneResult { error: Some(error), .. }) if all_or_nothing => return Err(error),
            Err(failed) => vms.push(failed),
        }
    }
    vms.sort_by_key(|result| result.vmid);
    started.disarm();
    let granted = vms.iter().filter(|result| result.error.is_none()).count();
    let total_ms = ms(began.elapsed());
    tracing::info!(snapshot, requested, granted, total_ms, "booted");
    Ok(StartReply {
        schema: vmfork_api::SCHEMA.to_owned(),
        snapshot: snapshot.to_owned(),
        requested,
        granted: u32::try_from(granted).unwrap_or(u32::MAX),
        began_unix_ms,
        open_ms: ms(open),
        total_ms,
        vms,
    })
}

impl<'a> Start<'a> {
    /// What all VMs have in common.
    fn prepare(
        hub: &'a Hub,
        user: User,
        snapshot: &'a str,
        request: &StartRequest,
        stored: StoredDisks,
        (began, deadline): (Instant, Instant),
    ) -> Result<Self, RunError> {
        let (facts, core) = (&stored.facts, &hub.core);
        facts.check_devices().map_err(ForkError::from)?;
        let mut files = tokio::task::block_in_place(|| match request.force {
            true => host::image_files(core, facts),
            false => host::same_image_files(core, facts),
        })?;
        let spec = facts.spec();
        if spec.root_blake3().is_none() {
            // All that it has of a root is on its disks.
            files.root = None;
        }
        let root = root_of(spec);
        boot_disks::check_root(root, &files.metadata, &spec.image)?;
        let choice = boot::choose_accel(Some(spec.accel)).or_else(|_| boot::choose_accel(None))?;
        let inherited = facts.inherited.with_labels(&request.labels).map_err(HostError::from)?;
        let chosen = root_device::choose_again(spec, &files);
        let spec = MachineSpec {
            drives: boot_disks::drives(&files, chosen.pmem_bytes, &stored.contents),
            root_device_reason: chosen.reason,
            accel: accel_word(choice.accel),
            accel_reason: match accel_word(choice.accel) == spec.accel {
                true => spec.accel_reason.clone(),
                false => choice.reason.clone(),
            },
            ..inherited.spec
        };
        Ok(Self {
            hub,
            user,
            snapshot,
            files,
            choice,
            root,
            inherited: Inherited { spec, ..inherited },
            ttl: request.ttl_ms.map(Duration::from_millis),
            stored,
            began,
            deadline,
        })
    }

    /// Memory for all before the first boots. → those that have it, and a line for each other.
    ///
    /// # Errors
    /// There is memory for none; or not for all, if that is as bad.
    async fn admit(
        &self,
        names: Vec<(String, bool)>,
        all_or_nothing: bool,
    ) -> Result<(Vec<Place>, Vec<CloneResult>), ErrorBody> {
        let (mut places, mut refused) = (Vec::new(), Vec::new());
        for (number, (name, is_kept)) in (1..).zip(names) {
            if !is_kept {
                refused.push(name_taken(number, name));
                continue;
            }
            let (spec, id) = (&self.inherited.spec, random_hex::<8>());
            let ask = BootAsk {
                name: &name,
                family: &id,
                user: self.user,
                ram_bytes: spec.memory_bytes,
                cpus: spec.cpus,
            };
            match boot::admit(&self.hub.core, ask, &start_message(&name)).await {
                Ok(lease) => places.push(Place { number, name, id, lease }),
                Err(error) if all_or_nothing || places.is_empty() => return Err(error),
                Err(error) => refused.push(vmfork_fork::failed(number, name, error)),
            }
        }
        Ok((places, refused))
    }

    /// Boot one VM. → its line in the reply; the VM, if it is ready.
    async fn one(&self, place: Place) -> Result<(CloneResult, Arc<Vm>), CloneResult> {
        let (number, name) = (place.number, place.name.clone());
        let message = start_message(&name);
        // One that comes too late gets no QEMU.
        let booted = tokio::time::timeout_at(self.deadline.into(), async {
            match Instant::now() < self.deadline {
                true => Some(self.boot(place, message.clone()).await),
                false => None,
            }
        });
        let late = || {
            let after = self.deadline.saturating_duration_since(self.began);
            Err(ForkError::from(NotStarted::Late { after }).to_body(message.as_str()))
        };
        match booted.await.ok().flatten().unwrap_or_else(late) {
            Ok(vm) => {
                let result = CloneResult {
                    id: Some(vm.identity.id.clone()),
                    vmid: number,
                    name,
                    state: vm.state(),
                    running_ms: None,
                    ready_ms: Some(ms(self.began.elapsed())),
                    pooled: false,
                    host: None,
                    error: None,
                };
                Ok((result, vm))
            }
            Err(error) => Err(vmfork_fork::failed(number, name, error)),
        }
    }

    async fn boot(&self, place: Place, message: String) -> Result<Arc<Vm>, ErrorBody> {
        let files = self.files.try_clone().map_err(RunError::Drives);
        let order = Order {
            files: files.map_err(|error| error.to_body(message.as_str()))?,
            message,
            id: place.id,
            name: place.name,
            user: self.user,
            choice: self.choice.clone(),
            root: self.root,
            disks: self.stored.contents.clone(),
            inherited: self.inherited.clone(),
            snapshot: Some((self.snapshot.to_owned(), self.stored.came_of.clone())),
            lease: place.lease,
            ttl: self.ttl,
            timeout: Some(self.deadline.saturating_duration_since(Instant::now())),
        };
        boot::boot(self.hub, order).await
    }
}

/// What the root of the VM was that had these drives.
fn root_of(spec: &MachineSpec) -> Option<RootDisk> {
    let (_, disk) = spec.disks().find(|(_, disk)| disk.name == ROOT_NAME)?;
    let size_bytes = disk.size_bytes;
    Some(match boot_disks::shares_root_disk(spec) || spec.root_blake3().is_some() {
        true => RootDisk::Overlay { size_bytes },
        false => RootDisk::Whole { size_bytes: Some(size_bytes) },
    })
}

#[cfg(test)]
mod tests {
    use vmfork_api::Durability;
    use vmfork_host::disks::DiskSpec;
    use vmfork_host::vm::DriveSpec;

    use super::*;

    #[test]
    fn the_root_is_what_it_was() {
        let spec = |name: &str| {
            let (name, durability) = (name.to_owned(), Durability::Host);
            let (size_bytes, volume, empty, read_only) = (1 << 30, None, false, false);
            DiskSpec { name, size_bytes, durability, volume, empty, read_only }
        };
        let disk = |name: &str| DriveSpec::Disk(spec(name));
        let root = || DriveSpec::Root { blake3: "ab".to_owned(), pmem_bytes: None };
        let of = |drives: Vec<DriveSpec>| {
            root_of(&MachineSpec { drives, ..Inherited::of_a_test(64 << 20).spec })
        };
        let size_bytes = 1 << 30;
        assert_eq!(of(vec![root(), disk("data")]), None);
        let overlay = of(vec![root(), disk("root"), disk("data")]);
        assert_eq!(overlay, Some(RootDisk::Overlay { size_bytes }));
        let shared = DiskSpec { read_only: true, ..spec("image") };
        let stored = of(vec![DriveSpec::Disk(shared), disk("root"), disk("data")]);
        assert_eq!(stored, Some(RootDisk::Overlay { size_bytes }));
        let volume = DiskSpec { read_only: true, ..spec("image") };
        let volume = of(vec![disk("root"), DriveSpec::Disk(volume)]);
        assert_eq!(volume, Some(RootDisk::Whole { size_bytes: Some(size_bytes) }));
        let whole = of(vec![disk("root"), disk("data")]);
        assert_eq!(whole, Some(RootDisk::Whole { size_bytes: Some(size_bytes) }));
    }
}
