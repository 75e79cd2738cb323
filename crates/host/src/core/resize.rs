//! Disks that get larger, also while their VM runs.
//!
//! The disk grows first. Then QEMU connects to it again, sees the new size, and tells the guest. If
//! that fails, the disk is as large as was asked, and the same request tells the guest again.

use std::sync::Arc;

use tokio::task::block_in_place;
use tokio::time::timeout;
use vmfork_api::{DiskState, ErrorBody};
use vmfork_image::ImageId;

use super::Core;
use super::volumes::{Error, TURN_TIMEOUT, replace, running};
use crate::disks::{DiskError, MachineDisks};
use crate::error::outcome;
use crate::vm::Vm;

impl Core {
    /// Makes the disk of a running VM larger, or a volume. What has begun ends in order, also if
    /// this future is dropped. Clones that are made afterwards have the new size.
    ///
    /// # Errors
    /// It would be smaller, several VMs may read it, or its VM does not run.
    pub async fn resize_disk(
        self: &Arc<Self>,
        id: String,
        size_bytes: u64,
    ) -> Result<(), ErrorBody> {
        let message = format!("resize disk {id}");
        let (core, failed) = (Arc::clone(self), message.clone());
        let task = tokio::spawn(async move {
            let resized = core.resize(&id, size_bytes).await;
            resized.map_err(|error| error.to_body(failed))
        });
        outcome(task, message).await
    }

    /// The same of a volume.
    ///
    /// # Errors
    /// There is none of that name; or as [`Core::resize_disk`].
    pub async fn resize_volume(
        self: &Arc<Self>,
        name: &str,
        size_bytes: u64,
    ) -> Result<(), ErrorBody> {
        let message = || format!("resize the volume `{name}`");
        let volume = block_in_place(|| self.disks.volume(name));
        let volume = volume.map_err(|error| error.to_body(message()))?;
        let resized = self.resize_disk(volume.disk_id, size_bytes).await;
        resized.map_err(|error| ErrorBody { message: message(), ..error })
    }

    async fn resize(&self, id: &str, size_bytes: u64) -> Result<(), Error> {
        let unknown = || DiskError::Unknown { id: id.to_owned() };
        let disk_id: ImageId = id.parse().map_err(|_no_id| unknown())?;
        if let Some(vm) = self.vm_with_disk(disk_id) {
            return self.resize_of(&vm, disk_id, size_bytes).await;
        }
        let grow = || match self.disks.find(id)?.state {
            DiskState::Volume => self.disks.grow_volume(id, size_bytes),
            // Its VM may just have ended.
            DiskState::InUse | DiskState::Left | DiskState::Damaged => Err(DiskError::NoVm),
        };
        block_in_place(grow)?;
        tracing::info!(disk = id, size_bytes, "volume resized");
        Ok(())
    }

    async fn resize_of(&self, vm: &Arc<Vm>, id: ImageId, size_bytes: u64) -> Result<(), Error> {
        let turn = timeout(TURN_TIMEOUT, vm.forking.lock()).await;
        let _between_freezes = turn.map_err(|_late| Error::NoTurn)?;
        let machine = running(vm)?;
        let not_here = || Error::NotHere { vm: vm.name().to_owned() };
        let disks = machine.disks().ok_or_else(not_here)?;
        let (index, name) = disks.with_id(id).ok_or_else(not_here)?;
        let larger = block_in_place(|| disks.grow(index, size_bytes))?;
        replace(&machine, index, larger, || {}).await?;
        tracing::info!(vm = vm.name(), disk = name, size_bytes, "disk resized");
        Ok(())
    }

    fn vm_with_disk(&self, id: ImageId) -> Option<Arc<Vm>> {
        let has = |disks: &MachineDisks| disks.with_id(id).is_some();
        let has = |vm: &Arc<Vm>| vm.machine().is_some_and(|it| it.disks().is_some_and(has));
        self.registry.live().into_iter().find(has)
    }
}
