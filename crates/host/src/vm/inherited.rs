//! What all clones of a VM inherit, wherever they run and whenever they are started.
//!
//! It goes as a whole: from the VM to its clones, to other hosts in the descriptor of a fork, and
//! into stored snapshots. So a new property is a field here, and a value where VMs boot; what is
//! read from a store needs a default, since older snapshots lack it.

use serde::{Deserialize, Serialize};
use vmfork_api::labels::LabelError;
use vmfork_api::{Accel, Labels};
use vmfork_qemu::DriveSlot;

use crate::disks::DiskSpec;

/// What clones inherit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inherited {
    #[serde(flatten)]
    pub spec: MachineSpec,
    /// What users call it, besides its name.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl Inherited {
    /// The same with a request's own labels.
    ///
    /// # Errors
    /// There are too many labels then.
    pub fn with_labels(&self, own: &Labels) -> Result<Self, LabelError> {
        let labels = self.labels.with(own)?;
        Ok(Self { labels, ..self.clone() })
    }

    /// The same with these disks, in the order of the others: a clone's are not its parent's.
    #[must_use]
    pub fn with_disks(&self, disks: impl IntoIterator<Item = DiskSpec>) -> Self {
        let mut inherited = self.clone();
        let slots = inherited.spec.drives.iter_mut().filter_map(|drive| match drive {
            DriveSpec::Root { .. } => None,
            DriveSpec::Disk(disk) => Some(disk),
        });
        for (slot, disk) in slots.zip(disks) {
            *slot = disk;
        }
        inherited
    }
}

/// The machine that the guest knows, whichever QEMU plays it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct MachineSpec {
    /// The guest image that the VM booted from.
    pub image: String,
    /// In the order in which the guest has them.
    pub drives: Vec<DriveSpec>,
    /// How many network cards it has.
    pub nics: u8,
    pub memory_bytes: u64,
    pub cpus: u32,
    pub accel: Accel,
    /// Why that one was chosen, then.
    pub accel_reason: String,
    /// Why its root is persistent memory, or is not.
    pub root_device_reason: String,
}

/// A drive, and what it must hold wherever the guest goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum DriveSpec {
    /// The image's root disk, read-only. The guest has parts of it in its memory.
    Root {
        /// BLAKE3 of its bytes, in hex.
        blake3: String,
        /// The guest has it as persistent memory, too, of this size. Absent in what older daemons
        /// wrote.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pmem_bytes: Option<u64>,
    },
    /// A disk. Its bytes go with the VM, unless it is a volume.
    Disk(DiskSpec),
}

impl DriveSpec {
    /// The slot of a QEMU that it goes into.
    pub fn slot(&self) -> DriveSlot {
        match self {
            Self::Root { .. } => DriveSlot::ReadOnly,
            Self::Disk(disk) => DriveSlot::Disk(disk.slot()),
        }
    }
}

impl MachineSpec {
    /// BLAKE3 of the root disk, in hex, if there is one.
    pub fn root_blake3(&self) -> Option<&str> {
        self.drives.iter().find_map(|drive| match drive {
            DriveSpec::Root { blake3, .. } => Some(blake3.as_str()),
            DriveSpec::Disk(_) => None,
        })
    }

    /// Size of the persistent memory that shows the root, if the guest has it so.
    pub fn pmem_bytes(&self) -> Option<u64> {
        self.drives.iter().find_map(|drive| match drive {
            DriveSpec::Root { pmem_bytes, .. } => *pmem_bytes,
            DriveSpec::Disk(_) => None,
        })
    }

    /// The disks, each with the number of its drive.
    pub fn disks(&self) -> impl Iterator<Item = (usize, &DiskSpec)> {
        self.drives.iter().enumerate().filter_map(|(index, drive)| match drive {
            DriveSpec::Root { .. } => None,
            DriveSpec::Disk(disk) => Some((index, disk)),
        })
    }
}

/// The form in descriptors. `root_blake3` is all that older daemons write of drives, and all that
/// they read.
#[derive(Clone, Serialize, Deserialize)]
struct Written {
    image: String,
    root_blake3: Option<String>,
    drives: Option<Vec<DriveSpec>>,
    #[serde(default)]
    nics: u8,
    memory_bytes: u64,
    cpus: u32,
    accel: Accel,
    accel_reason: String,
    #[serde(default)]
    root_device_reason: String,
}

impl From<Written> for MachineSpec {
    fn from(written: Written) -> Self {
        let Written { image, root_blake3, drives, nics, memory_bytes, cpus, .. } = written;
        let Written { accel, accel_reason, root_device_reason, .. } = written;
        let root = root_blake3.map(|blake3| DriveSpec::Root { blake3, pmem_bytes: None });
        let drives = drives.unwrap_or_else(|| root.into_iter().collect());
        Self { image, drives, nics, memory_bytes, cpus, accel, accel_reason, root_device_reason }
    }
}

impl From<MachineSpec> for Written {
    fn from(spec: MachineSpec) -> Self {
        let root_blake3 = spec.root_blake3().map(ToOwned::to_owned);
        let MachineSpec { image, drives, nics, memory_bytes, cpus, .. } = spec;
        let MachineSpec { accel, accel_reason, root_device_reason, .. } = spec;
        let drives = Some(drives);
        Self {
            image,
            root_blake3,
            drives,
            nics,
            memory_bytes,
            cpus,
            accel,
            accel_reason,
            root_device_reason,
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl Inherited {
    /// Of a VM without a disk.
    pub fn of_a_test(memory_bytes: u64) -> Self {
        Self {
            spec: MachineSpec {
                image: "default".to_owned(),
                drives: Vec::new(),
                nics: 0,
                memory_bytes,
                cpus: 1,
                accel: Accel::Tcg,
                accel_reason: String::new(),
                root_device_reason: String::new(),
            },
            labels: Labels::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json, to_value};

    use super::*;

    fn old(root_blake3: Value) -> Value {
        json!({
            "image": "default", "root_blake3": root_blake3, "memory_bytes": 1 << 29, "cpus": 2,
            "accel": "tcg", "accel_reason": "no KVM",
        })
    }

    #[test]
    fn what_older_daemons_wrote_is_read() {
        let spec = |written| from_value::<Inherited>(written).expect("readable").spec;
        let with_root = spec(old("ab12".into()));
        let root = DriveSpec::Root { blake3: "ab12".to_owned(), pmem_bytes: None };
        assert_eq!(with_root.drives, [root]);
        assert_eq!((with_root.root_blake3(), with_root.nics), (Some("ab12"), 0));
        assert_eq!((with_root.memory_bytes, with_root.cpus), (1 << 29, 2));
        assert_eq!(spec(old(Value::Null)).drives, []);
    }

    #[test]
    fn drives_are_written_beside_what_older_daemons_read() {
        let spec = MachineSpec { nics: 1, ..from_value(old("ab12".into())).expect("readable") };
        let inherited = Inherited { spec, labels: Labels::default() };
        let written = to_value(&inherited).expect("plain");
        assert_eq!(written["drives"], json!([{"role": "root", "blake3": "ab12"}]));
        assert_eq!(written["root_blake3"], "ab12");
        assert_eq!(from_value::<Inherited>(written).expect("the same"), inherited);
    }
}
