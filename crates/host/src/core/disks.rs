//! The disks of a VM, as the API shows them.

use vmfork_api::Disk;

use super::Core;
use crate::vm::Vm;

impl Core {
    /// The disks of a VM, in the order of the guest's devices. Nothing is written once it has
    /// ended.
    pub fn disks_of(&self, vm: &Vm) -> Vec<Disk> {
        let machine = vm.machine();
        let served = machine.as_ref().and_then(|machine| machine.disks());
        let mut written = served.into_iter().flat_map(|disks| disks.written());
        let disks = vm.identity.spec().disks();
        disks
            .map(|(drive, spec)| Disk {
                name: spec.name.clone(),
                size_bytes: spec.size_bytes,
                written_bytes: written.next().map_or(0, |(_, bytes)| bytes),
                device: device(drive),
                volume: spec.volume.as_ref().map(|volume| volume.name.clone()),
                read_only: spec.is_shared(),
            })
            .collect()
    }
}

/// The name that Linux gives the drive of that number.
fn device(drive: usize) -> String {
    let letter = u8::try_from(drive).map_or('?', |drive| char::from(b'a'.saturating_add(drive)));
    format!("/dev/vd{letter}")
}
