//! VMs that boot from the disks of a stored snapshot, which has no memory.
//!
//! Promises: each VM has a copy-on-write view of its own of the stored disks, and an identity of
//! its own. Its root is what it was when the snapshot was taken. A start that is given up leaves no
//! VM.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use vmfork_api::disk::{ROOT_NAME, RootDisk};
use vmfork_api::{CloneResult, ErrorBody, StartReply, StartRequest};
use vmfork_fork::facts::host;
use vmfork_fork::{Error as ForkError, Names, ms, name_taken, start_message};
use vmfork_host::admission::BootAsk;
use vmfork_host::core::accel_word;
use vmfork_host::error::Error as HostError;
use vmfork_host::quotas::User;
use vmfork_host::vm::{Inherited, MachineSpec, Vm, now_unix_ms, random_hex};
use vmfork_snapshots::StoredDisks;

use super::Hub;
use super::boot::{self, EndOnDrop, Order};
use super::error::RunError;

/// A start under way.
struct Start<'a> {
    hub: &'a Hub,
    user: User,
    /// What the snapshot is called now.
    snapshot: &'a str,
    request: StartRequest,
    stored: StoredDisks,
    began: Instant,
    /// For all of it.
    limit: Duration,
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
    let (began, began_unix_ms) = (Instant::now() - open, now_unix_ms());
    let message = format!("start snapshot `{snapshot}`");
    let failed = |error: ForkError| error.to_body(message.as_str());
    let (requested, all_or_nothing) = (request.count, request.all_or_nothing);
    let limit = vmfork_fork::check(requested, request.names.as_deref(), request.timeout_ms);
    let limit = limit.map_err(failed)?;
    let taken = hub.forker.remote.names().await;
    let wanted = request.names.clone();
    let names = Names {
        wanted: wanted.as_deref(),
        stem: snapshot,
        count: requested,
        taken: taken.as_ref(),
    };
    // The names are kept until the VMs have them.
    let (_reservation, names) =
        vmfork_fork::reserve(&hub.core, names, all_or_nothing).map_err(failed)?;
    let start = Start { hub, user, snapshot, request, stored, began, limit };
    let mut started = EndOnDrop::new(&hub.core);
    let mut vms = Vec::new();
    let boots = stream::iter((1..).zip(names)).map(|(number, (name, is_kept))| {
        let start = &start;
        async move {
            match is_kept {
                true => start.one(number, name).await,
                false => Err(name_taken(number, name)),
            }
        }
    });
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

impl Start<'_> {
    /// Boot one VM. → its line in the reply; the VM, if it is ready.
    async fn one(&self, number: u32, name: String) -> Result<(CloneResult, Arc<Vm>), CloneResult> {
        match self.boot(name.clone()).await {
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

    async fn boot(&self, name: String) -> Result<Arc<Vm>, ErrorBody> {
        let Self { hub, user, request, stored, .. } = self;
        let (core, message) = (&hub.core, start_message(&name));
        let failed = |error: RunError| error.to_body(message.as_str());
        let facts = &stored.facts;
        let files = tokio::task::block_in_place(|| match request.force {
            true => host::image_files(core, facts),
            false => host::same_image_files(core, facts),
        });
        let files = files.map_err(|error| error.to_body(message.as_str()))?;
        let spec = facts.spec();
        let root = root_of(spec);
        boot::check_root(root, &files.metadata, &spec.image).map_err(failed)?;
        let choice = boot::choose_accel(Some(spec.accel)).or_else(|_| boot::choose_accel(None));
        let choice = choice.map_err(failed)?;
        let id = random_hex::<8>();
        let ask = BootAsk {
            name: &name,
            family: &id,
            user: *user,
            ram_bytes: spec.memory_bytes,
            cpus: spec.cpus,
        };
        let lease = boot::admit(core, ask, &message).await?;
        let disks = stored.contents.clone();
        let inherited = facts.inherited.with_labels(&request.labels);
        let inherited = inherited.map_err(|error| failed(HostError::from(error).into()))?;
        let spec = MachineSpec {
            drives: boot::drives(&files.metadata, root, &disks),
            accel: accel_word(choice.accel),
            accel_reason: choice.reason.clone(),
            ..inherited.spec
        };
        let order = Order {
            id,
            name,
            user: *user,
            files,
            choice,
            root,
            disks,
            inherited: Inherited { spec, ..inherited },
            snapshot: Some((self.snapshot.to_owned(), stored.came_of.clone())),
            lease,
            ttl: request.ttl_ms.map(Duration::from_millis),
            timeout: Some(left(self.limit, self.began)),
            message,
        };
        boot::boot(hub, order).await
    }
}

/// What is left of a limit; never 0, which would be a boot that no client waits for.
fn left(limit: Duration, began: Instant) -> Duration {
    limit.saturating_sub(began.elapsed()).max(Duration::from_millis(1))
}

/// What the root of the VM was that had these drives.
fn root_of(spec: &MachineSpec) -> Option<RootDisk> {
    let (_, disk) = spec.disks().find(|(_, disk)| disk.name == ROOT_NAME)?;
    let size_bytes = disk.size_bytes;
    Some(match spec.root_blake3() {
        Some(_) => RootDisk::Overlay { size_bytes },
        None => RootDisk::Whole { size_bytes: Some(size_bytes) },
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
        let disk = |name: &str| {
            let (name, durability) = (name.to_owned(), Durability::Host);
            let (size_bytes, volume, empty, read_only) = (1 << 30, None, false, false);
            DriveSpec::Disk(DiskSpec { name, size_bytes, durability, volume, empty, read_only })
        };
        let root = || DriveSpec::Root { blake3: "ab".to_owned() };
        let of = |drives: Vec<DriveSpec>| {
            root_of(&MachineSpec { drives, ..Inherited::of_a_test(64 << 20).spec })
        };
        let size_bytes = 1 << 30;
        assert_eq!(of(vec![root(), disk("data")]), None);
        let overlay = of(vec![root(), disk("root"), disk("data")]);
        assert_eq!(overlay, Some(RootDisk::Overlay { size_bytes }));
        let whole = of(vec![disk("root"), disk("data")]);
        assert_eq!(whole, Some(RootDisk::Whole { size_bytes: Some(size_bytes) }));
    }

    #[test]
    fn a_boot_that_comes_late_is_waited_for_all_the_same() {
        let now = Instant::now();
        assert_eq!(left(Duration::ZERO, now), Duration::from_millis(1));
        assert!(left(Duration::from_secs(60), now) > Duration::from_secs(50));
    }
}
