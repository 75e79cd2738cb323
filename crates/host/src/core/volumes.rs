//! Volumes that a running VM gets or gives back.
//!
//! The drive is there from the VM's start, with an empty disk. QEMU is given another disk for it,
//! and the guest is told the new size. A freeze waits for that, and it for a freeze.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::block_in_place;
use tokio::time::timeout;
use vmfork_api::{AttachRequest, DetachRequest, Disk, ErrorBody, ErrorCode, OnFork, VmState};
use vmfork_guest_link::agent::LinkError;
use vmfork_qemu::{NbdSocketError, NotReplaced, QmpError};

use super::Core;
use super::disks::device;
use crate::disks::{DiskError, MachineDisks, NewlyServed, VolumeError};
use crate::error::{DOCTOR, VmError, chain, outcome};
use crate::vm::machine::Machine;
use crate::vm::{NotRun, Vm};

/// How long a freeze in progress is waited for.
pub(super) const TURN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the guest may take to say whether it uses a disk.
const LOOK_TIMEOUT: Duration = Duration::from_secs(15);
/// Ends with 0 if the guest uses the block device `$1`: mounted, swapped to, or under another one.
const IN_USE: &str = r#"grep -qs "^$1" /proc/mounts /proc/swaps && exit 0
[ -n "$(ls "/sys/block/${1#/dev/}/holders" 2>/dev/null)" ]"#;

/// A running VM does not get another disk in the place of one, or does not give it back.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error("it is {}, not running", word(*state))]
    State { vm: String, state: VmState },
    #[error("it was being forked or paused for {} s", TURN_TIMEOUT.as_secs())]
    NoTurn,
    #[error("{}", no_slot(disk.as_deref()))]
    NoSlot { disk: Option<String> },
    #[error("the volume `{volume}` is read-only, and a drive keeps its kind while its VM runs")]
    ReadOnly { volume: String },
    #[error("VM `{vm}` does not have it")]
    NotHere { vm: String },
    #[error("its guest uses {device}: it is mounted, or used for swap or by another device")]
    InUse { device: String },
    #[error("its guest does not say whether it uses {device}")]
    Unknown { device: String },
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Socket(#[from] NbdSocketError),
    #[error("give QEMU another disk")]
    Qmp(#[from] QmpError),
}

fn word(state: VmState) -> String {
    serde_json::to_value(state)
        .ok()
        .and_then(|word| Some(word.as_str()?.to_owned()))
        .unwrap_or_default()
}

fn no_slot(disk: Option<&str>) -> String {
    match disk {
        Some(disk) => format!("it has no empty disk `{disk}`"),
        None => "it has no empty disk".to_owned(),
    }
}

impl Error {
    pub(super) fn to_body(&self, message: String) -> ErrorBody {
        let (code, remedy) = match self {
            Self::Vm(error) => return error.clone().into(),
            Self::State { vm, .. } => {
                (ErrorCode::Conflict, format!("wait, or `vmfork resume {vm}` if it is paused"))
            }
            Self::NoTurn => (ErrorCode::Timeout, "try again".to_owned()),
            Self::NoSlot { .. } => (
                ErrorCode::Conflict,
                "start VMs with `--disk NAME=empty` for volumes that come later".to_owned(),
            ),
            Self::ReadOnly { volume } => (
                ErrorCode::Conflict,
                format!("start a VM with it, `--disk NAME=volume:{volume}`, or end the VM"),
            ),
            Self::NotHere { .. } => {
                (ErrorCode::Conflict, "`vmfork volume ls` shows which VM has it".to_owned())
            }
            Self::InUse { device } => {
                (ErrorCode::Conflict, format!("in the guest: `umount {device}`"))
            }
            Self::Unknown { .. } | Self::Link(_) => {
                (ErrorCode::Guest, "see that it is unmounted, then use `--force`".to_owned())
            }
            Self::Volume(error) => (error.code(), error.remedy().to_owned()),
            Self::Disk(error) => (error.code(), error.remedy().unwrap_or(DOCTOR).to_owned()),
            Self::Socket(_) => (ErrorCode::Host, DOCTOR.to_owned()),
            Self::Qmp(_) => (ErrorCode::Qemu, DOCTOR.to_owned()),
        };
        ErrorBody::new(code, message).cause(chain(self)).remedy(remedy)
    }
}

impl Core {
    /// Gives a running VM a volume, in the place of an empty disk. What has begun ends in order,
    /// also if this future is dropped.
    ///
    /// # Errors
    /// The VM has the disks that it had.
    pub async fn attach_volume(
        self: &Arc<Self>,
        volume: String,
        request: AttachRequest,
    ) -> Result<Disk, ErrorBody> {
        let message = format!("attach the volume `{volume}` to `{}`", request.vm);
        let vm = self.registry.find("attach a volume to", &request.vm)?;
        let (core, failed) = (Arc::clone(self), message.clone());
        let task = tokio::spawn(async move {
            let attached = core.attach(&vm, &volume, request.disk).await;
            attached.map_err(|error| error.to_body(failed))
        });
        outcome(task, message).await
    }

    /// Has a running VM give a volume back, and an empty disk in its place. When this returns, what
    /// was written to the volume is on the medium. Goes on if this future is dropped.
    ///
    /// # Errors
    /// The guest uses it; or as [`Core::attach_volume`].
    pub async fn detach_volume(
        self: &Arc<Self>,
        volume: String,
        request: DetachRequest,
    ) -> Result<(), ErrorBody> {
        let message = format!("detach the volume `{volume}` from `{}`", request.vm);
        let vm = self.registry.find("detach a volume from", &request.vm)?;
        let (core, failed) = (Arc::clone(self), message.clone());
        let task = tokio::spawn(async move {
            let detached = core.detach(&vm, &volume, request.force).await;
            detached.map_err(|error| error.to_body(failed))
        });
        outcome(task, message).await
    }

    async fn attach(
        &self,
        vm: &Arc<Vm>,
        volume: &str,
        slot: Option<String>,
    ) -> Result<Disk, Error> {
        let of = self.disks.volume_ready(volume).await?;
        if of.is_shared() {
            return Err(Error::ReadOnly { volume: of.name });
        }
        let turn = timeout(TURN_TIMEOUT, vm.forking.lock()).await;
        let _between_freezes = turn.map_err(|_late| Error::NoTurn)?;
        let machine = running(vm)?;
        let empty = machine.disks().and_then(|disks| disks.empty(slot.as_deref()));
        let (index, name) = empty.ok_or(Error::NoSlot { disk: slot })?;
        let disk =
            block_in_place(|| self.disks.serve_volume((vm.identity.user, vm.name()), &name, &of))?;
        replace(&machine, index, disk, || {}).await?;
        tracing::info!(vm = vm.name(), volume, disk = name, "volume attached");
        let disk = self.disks_of(vm).into_iter().nth(index);
        disk.ok_or(Error::NotHere { vm: vm.name().to_owned() })
    }

    async fn detach(&self, vm: &Arc<Vm>, volume: &str, force: bool) -> Result<(), Error> {
        if self.disks.on_fork(volume)? == OnFork::ReadOnly {
            return Err(Error::ReadOnly { volume: volume.to_owned() });
        }
        let turn = timeout(TURN_TIMEOUT, vm.forking.lock()).await;
        let between_freezes = turn.map_err(|_late| Error::NoTurn)?;
        let machine = running(vm)?;
        let found = machine.disks().and_then(|disks| disks.of_volume(volume));
        let (index, name) = found.ok_or_else(|| Error::NotHere { vm: vm.name().to_owned() })?;
        if !force && vm.identity.has_agent {
            not_in_use(vm, device(drive(&machine, index))).await?;
        }
        let disk = block_in_place(|| self.disks.serve_empty(vm.name(), &name))?;
        let goes = || self.disks.volume_goes(vm.name(), volume);
        replace(&machine, index, disk, goes).await?;
        drop(between_freezes);
        self.disks.volume_ready(volume).await?;
        tracing::info!(vm = vm.name(), volume, disk = name, "volume detached");
        Ok(())
    }
}

/// Disks are the last drives.
fn drive(machine: &Machine, index: usize) -> usize {
    let disks = machine.disks().map_or(0, MachineDisks::count);
    machine.shape.drives.len().saturating_sub(disks).saturating_add(index)
}

pub(super) fn running(vm: &Vm) -> Result<Arc<Machine>, Error> {
    let machine = vm.running_machine()?;
    match vm.state() {
        VmState::Running => Ok(machine),
        state => Err(Error::State { vm: vm.name().to_owned(), state }),
    }
}

/// `replaced` is called when QEMU has let go of the old disk, before that ends.
pub(super) async fn replace(
    machine: &Machine,
    index: usize,
    disk: NewlyServed,
    replaced: impl FnOnce(),
) -> Result<(), Error> {
    let drive = drive(machine, index);
    let Some(disks) = machine.disks() else { return Err(Error::NoSlot { disk: None }) };
    let offer = block_in_place(|| disks.offer(index, disk))?;
    let (number, size_bytes, earlier) = (offer.number, offer.size_bytes(), offer.earlier.clone());
    let told = machine.qmp.replace_disk(drive, number, &offer.socket, size_bytes, earlier).await;
    block_in_place(|| match told {
        Ok(late) => {
            replaced();
            offer.accepted(late);
            Ok(())
        }
        Err(NotReplaced { error, has_old: true }) => {
            offer.withdrawn();
            Err(error.into())
        }
        Err(NotReplaced { error, has_old: false }) => {
            offer.undecided();
            Err(error.into())
        }
    })
}

/// # Errors
/// The guest uses it, or does not say.
async fn not_in_use(vm: &Vm, device: String) -> Result<(), Error> {
    match vm.exit_code(&["sh", "-c", IN_USE, "sh", &device], LOOK_TIMEOUT).await {
        Ok(0) => Err(Error::InUse { device }),
        Ok(1) => Ok(()),
        Err(NotRun::Vm(error)) => Err(error.into()),
        Err(NotRun::Link(error)) => Err(error.into()),
        Ok(_) | Err(NotRun::Late { .. } | NotRun::Lost { .. }) => Err(Error::Unknown { device }),
    }
}
