//! What a QEMU is like, as far as a device state cares: two QEMUs of equal [`Shape`] can exchange
//! states.
//!
//! The shape is also the pool's key. It says how many drives and network cards there are. What
//! they hold is bound when a clone gets the QEMU (decision 0027). A QEMU that waits is connected to
//! the server of its disks (decision 0056). So what a server tells of them is part of the shape.

use std::fmt;

use vmfork_tap_proto::{BLOCK_BYTES, RAM_BYTES_MAX};

/// More vCPUs than `pc` takes without x2APIC remapping.
pub const CPUS_MAX: u32 = 255;

/// How guest code runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Accel {
    Tcg,
    Kvm,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
        })
    }
}

/// QEMU's machine type.
///
/// Only `pc`: it boots a stock kernel in 26 of 26 tries and its state is 12 kB of devices beside
/// the ROMs. `microvm` would save 1 ms per save and load (37 kB of state). But it hangs in 2 to 4
/// of 10 boots under TCG unless the kernel is told the TSC's rate. It also has no IDE, PCI or ACPI
/// power button. `q35` brings a larger state (AHCI, PCIe root) and nothing that is used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[non_exhaustive]
pub enum Machine {
    #[default]
    Pc,
}

impl Machine {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pc => "pc",
        }
    }
}

/// What runs in the VM, as far as its devices differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GuestKind {
    /// A kernel and an agent behind a virtio-serial port, balloon, random numbers, vmgenid.
    Linux,
    /// A boot sector and nothing else: no agent, no devices but the disk it boots from.
    Bare,
}

/// The kind of a drive, as far as QEMU must know it when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DriveSlot {
    /// The guest can't write to it: a root file system, or what a bare guest boots from.
    ReadOnly,
    /// A disk that an NBD server serves. The VM stops when a request fails, and
    /// [`Qmp::cont`](crate::Qmp::cont) repeats the request.
    Disk(DiskSlot),
}

/// What the server of a disk tells QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskSlot {
    pub size_bytes: u64,
    /// The guest can only read it, and several guests may. Otherwise it writes to it.
    pub read_only: bool,
    /// A flush makes writes more durable.
    pub flushes: bool,
}

/// Most drives of one machine: as many PCI slots and fds are set aside.
pub const DRIVES_MAX: u8 = 8;
/// Most network cards of one machine: as many PCI slots and fds are set aside.
pub const NICS_MAX: u8 = 8;

/// Machine shape. Build it with [`Shape::new`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Shape {
    pub memory_bytes: u64,
    pub cpus: u32,
    pub accel: Accel,
    pub machine: Machine,
    pub guest: GuestKind,
    /// The first is the root file system, or what a bare guest boots from.
    pub drives: Vec<DriveSlot>,
    /// Network cards, each with a tap of its own.
    pub nics: u8,
    /// Whether a Linux guest gets a vmgenid device.
    pub vmgenid: bool,
    /// Size of its persistent memory, if it has some: an NVDIMM that it can only read.
    pub pmem_bytes: Option<u64>,
}

/// A shape that can't be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error(
        "memory of {memory_bytes} bytes is not a multiple of {BLOCK_BYTES} between {MEMORY_BYTES_MIN} and {RAM_BYTES_MAX}"
    )]
    Memory { memory_bytes: u64 },
    #[error("{cpus} vCPUs are not between 1 and {CPUS_MAX}")]
    Cpus { cpus: u32 },
    #[error("a bare guest has no disk to boot from")]
    NoBootDisk,
    #[error("{count} drives are more than {DRIVES_MAX}")]
    Drives { count: usize },
    #[error("{count} network cards are more than {NICS_MAX}")]
    Nics { count: u8 },
    #[error(
        "persistent memory of {pmem_bytes} bytes is not a multiple of {BLOCK_BYTES} between {PMEM_BYTES_MIN} and {PMEM_BYTES_MAX}"
    )]
    Pmem { pmem_bytes: u64 },
}

/// What SeaBIOS and a boot sector need.
pub const MEMORY_BYTES_MIN: u64 = 16 << 20;
/// Least persistent memory: a block is in front of what it shows.
pub const PMEM_BYTES_MIN: u64 = 2 * BLOCK_BYTES;
/// Most persistent memory: QEMU's default processor has 40 bits of physical addresses.
pub const PMEM_BYTES_MAX: u64 = 512 << 30;

impl Shape {
    /// # Errors
    /// [`ShapeError`] if QEMU or the shim couldn't have it.
    pub fn new(
        memory_bytes: u64,
        cpus: u32,
        accel: Accel,
        guest: GuestKind,
        drives: Vec<DriveSlot>,
    ) -> Result<Self, ShapeError> {
        if !(MEMORY_BYTES_MIN..=RAM_BYTES_MAX).contains(&memory_bytes)
            || !memory_bytes.is_multiple_of(BLOCK_BYTES)
        {
            return Err(ShapeError::Memory { memory_bytes });
        }
        if !(1..=CPUS_MAX).contains(&cpus) {
            return Err(ShapeError::Cpus { cpus });
        }
        if guest == GuestKind::Bare && drives.is_empty() {
            return Err(ShapeError::NoBootDisk);
        }
        if drives.len() > usize::from(DRIVES_MAX) {
            return Err(ShapeError::Drives { count: drives.len() });
        }
        let (machine, nics, vmgenid, pmem_bytes) = (Machine::Pc, 0, true, None);
        Ok(Self { memory_bytes, cpus, accel, machine, guest, drives, nics, vmgenid, pmem_bytes })
    }

    /// With this many network cards.
    ///
    /// # Errors
    /// [`ShapeError::Nics`].
    pub fn with_nics(self, count: u8) -> Result<Self, ShapeError> {
        match count {
            0..=NICS_MAX => Ok(Self { nics: count, ..self }),
            _ => Err(ShapeError::Nics { count }),
        }
    }

    /// With persistent memory of that size.
    ///
    /// # Errors
    /// [`ShapeError::Pmem`].
    pub fn with_pmem(self, pmem_bytes: Option<u64>) -> Result<Self, ShapeError> {
        match pmem_bytes {
            Some(bytes) if !bytes.is_multiple_of(BLOCK_BYTES) => {
                Err(ShapeError::Pmem { pmem_bytes: bytes })
            }
            Some(bytes) if !(PMEM_BYTES_MIN..=PMEM_BYTES_MAX).contains(&bytes) => {
                Err(ShapeError::Pmem { pmem_bytes: bytes })
            }
            _ => Ok(Self { pmem_bytes, ..self }),
        }
    }

    /// Leave the vmgenid device out: a guest without a driver for it would still interpret ACPI
    /// code at the start of every clone.
    #[must_use]
    pub fn without_vmgenid(mut self) -> Self {
        self.vmgenid = false;
        self
    }
}

impl Shape {
    /// The same with these disks, in the order of the others.
    #[must_use]
    pub fn with_disks(mut self, disks: impl IntoIterator<Item = DiskSlot>) -> Self {
        let slots = self.drives.iter_mut().filter_map(|slot| match slot {
            DriveSlot::ReadOnly => None,
            DriveSlot::Disk(disk) => Some(disk),
        });
        for (slot, disk) in slots.zip(disks) {
            *slot = disk;
        }
        self
    }

    /// Its disks.
    pub fn disks(&self) -> impl Iterator<Item = DiskSlot> {
        self.drives.iter().filter_map(|slot| match slot {
            DriveSlot::ReadOnly => None,
            DriveSlot::Disk(disk) => Some(*disk),
        })
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { memory_bytes, cpus, accel, .. } = self;
        write!(f, "{} MiB, {cpus} vCPU, {accel}", memory_bytes >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_shapes_are_named() {
        let shape =
            |memory, cpus| Shape::new(memory, cpus, Accel::Tcg, GuestKind::Linux, Vec::new());
        assert!(shape(512 << 20, 2).is_ok());
        assert_eq!(
            shape((512 << 20) + 4096, 1).expect_err("odd").to_string(),
            "memory of 536875008 bytes is not a multiple of 2097152 between 16777216 and 274877906944"
        );
        assert_eq!(shape(512 << 20, 0), Err(ShapeError::Cpus { cpus: 0 }));
        assert_eq!(shape(512 << 30, 1), Err(ShapeError::Memory { memory_bytes: 512 << 30 }));
        let bare = |drives| Shape::new(64 << 20, 1, Accel::Tcg, GuestKind::Bare, drives);
        assert_eq!(bare(Vec::new()), Err(ShapeError::NoBootDisk));
        assert_eq!(bare(vec![DriveSlot::ReadOnly; 9]), Err(ShapeError::Drives { count: 9 }));
        let bare = bare(vec![DriveSlot::ReadOnly; 8]).expect("room for each");
        assert_eq!(bare.clone().with_nics(9), Err(ShapeError::Nics { count: 9 }));
        assert_ne!(bare.clone().with_nics(1).expect("room"), bare, "a shape of its own");
        for odd in [0, 4096, 2 << 20, 1 << 40] {
            let refused = bare.clone().with_pmem(Some(odd));
            assert_eq!(refused, Err(ShapeError::Pmem { pmem_bytes: odd }));
        }
        assert_ne!(bare.clone().with_pmem(Some(4 << 20)).expect("possible"), bare);
        assert_eq!(bare.clone().with_pmem(None), Ok(bare));
    }
}
