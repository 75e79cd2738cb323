//! The disks of a VM, as the API shows them.

use vmfork_api::{Disk, DiskActivity};
use vmfork_disk::DiskCounts;

use super::Core;
use crate::disks::MachineDisks;
use crate::vm::Vm;

impl Core {
    /// The disks of a VM, in the order of the guest's devices. Nothing is written once it has
    /// ended.
    pub fn disks_of(&self, vm: &Vm) -> Vec<Disk> {
        let machine = vm.machine();
        let served = machine.as_ref().and_then(|machine| machine.disks());
        let mut counts = served.map(MachineDisks::counts).unwrap_or_default().into_iter();
        let stall = vm.stall().filter(|_| served.is_some());
        let stalled = |drive| {
            let stall = stall.as_ref().filter(|stall| stall.drive == Some(drive))?;
            u64::try_from(stall.since.elapsed().as_millis()).ok()
        };
        let mut now = served.map(MachineDisks::written).unwrap_or_default().into_iter();
        let disks =
            vm.identity.spec().disks().map(|(drive, at_start)| {
                (drive, now.next().unwrap_or_else(|| (at_start.clone(), 0)))
            });
        disks
            .map(|(drive, (spec, written_bytes))| Disk {
                size_bytes: if spec.empty { 0 } else { spec.size_bytes },
                written_bytes,
                device: device(drive),
                read_only: spec.is_shared(),
                empty: spec.empty,
                activity: activity(&counts.next().unwrap_or_default()),
                stalled_ms: stalled(drive),
                volume: spec.volume.map(|volume| volume.name),
                name: spec.name,
            })
            .collect()
    }
}

fn activity(counts: &DiskCounts) -> DiskActivity {
    DiskActivity {
        reads: counts.reads,
        read_bytes: counts.read_bytes,
        writes: counts.writes,
        written_bytes: counts.written_bytes,
        flushes: counts.flushes,
        trims: counts.trims,
        errors: counts.errors,
    }
}

/// The name that Linux gives the drive of that number.
pub(super) fn device(drive: usize) -> String {
    let letter = u8::try_from(drive).map_or('?', |drive| char::from(b'a'.saturating_add(drive)));
    format!("/dev/vd{letter}")
}
