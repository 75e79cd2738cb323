//! Volumes: disks of a host that outlive the VMs that have them.
//!
//! A volume is never writable from two VMs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::disk::{
    DISK_BYTES_MAX, DISK_BYTES_MIN, DiskFormat, DiskSource, disk_name_is_valid,
    object_location_is_valid,
};
use crate::schema::{Closed, DiskName, HostPath, Name, ObjectLocation};
use crate::{DiskError, Labels};

/// Most volumes of one host. Each has a few open files.
pub const VOLUMES_MAX: usize = 512;

/// What a fork does with a volume that the parent has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnFork {
    /// The parent keeps it. Each clone gets a disk of its own with the same content, which ends
    /// with the clone.
    #[default]
    Fork,
    /// No VM can write to it. Several VMs may have it, and clones share it with their parent.
    ReadOnly,
    /// A VM that has it is not forked.
    Refuse,
}

/// For the API's document.
type ClosedVolumeSource = Closed<VolumeSource>;

/// A volume that is to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeRequest {
    #[schema(value_type = Name)]
    pub name: String,
    /// What it holds at first.
    #[schema(value_type = ClosedVolumeSource)]
    pub source: VolumeSource,
    /// Default: `fork`.
    #[serde(default)]
    pub on_fork: OnFork,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// What a volume holds at first. It is copied, so the volume needs nothing of it later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum VolumeSource {
    /// An empty ext4 file system.
    Blank {
        /// A multiple of 4096.
        #[schema(minimum = 1_048_576, maximum = 2_199_023_255_552_u64, multiple_of = 4096)]
        size_bytes: u64,
    },
    /// The root file system of a guest image.
    Image {
        #[schema(value_type = Name)]
        image: String,
    },
    /// A disk of a stored snapshot.
    Snapshot {
        #[schema(value_type = Name)]
        snapshot: String,
        #[schema(value_type = DiskName)]
        disk: String,
    },
    /// A raw disk in an object store, at `s3://BUCKET/KEY`. All of it is read.
    Object {
        #[schema(value_type = ObjectLocation)]
        location: String,
    },
    /// A file on the daemon's host.
    File {
        #[schema(value_type = HostPath)]
        path: String,
        /// Default: `raw`.
        #[serde(default, skip_serializing_if = "DiskFormat::is_raw")]
        format: DiskFormat,
    },
}

/// What a volume's forks do from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OnForkRequest {
    pub on_fork: OnFork,
}

/// A volume that a running VM is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// Its name or id.
    #[schema(value_type = Name)]
    pub vm: String,
    /// An empty disk of the VM; default: its first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<DiskName>)]
    pub disk: Option<String>,
}

/// A volume that a running VM is to give back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DetachRequest {
    /// Its name or id.
    #[schema(value_type = Name)]
    pub vm: String,
    /// Also if the guest uses it: its programs get errors then.
    #[serde(default)]
    pub force: bool,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    pub name: String,
    /// That of its disk, 16 hex digits.
    pub disk_id: String,
    pub size_bytes: u64,
    /// What it holds that is not zeros.
    pub data_bytes: u64,
    pub on_fork: OnFork,
    /// The names of the VMs that have it: one at most, unless it is read-only.
    pub vms: Vec<String>,
    pub created_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Why no VM can have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl From<VolumeSource> for DiskSource {
    fn from(source: VolumeSource) -> Self {
        match source {
            VolumeSource::Blank { size_bytes } => Self::Blank { size_bytes },
            VolumeSource::Image { image } => Self::Image { image },
            VolumeSource::File { path, format } => Self::File { path, format },
            VolumeSource::Snapshot { snapshot, disk } => Self::Snapshot { snapshot, disk },
            VolumeSource::Object { location } => Self::Object { location },
        }
    }
}

impl VolumeRequest {
    /// Whether there can be such a volume. The name is checked where all names are.
    ///
    /// # Errors
    /// There can't.
    pub fn check(&self) -> Result<(), DiskError> {
        let name = || self.name.clone();
        match &self.source {
            VolumeSource::Blank { size_bytes } => {
                let fits = (DISK_BYTES_MIN..=DISK_BYTES_MAX).contains(size_bytes);
                if !fits || !size_bytes.is_multiple_of(4096) {
                    return Err(DiskError::Range { name: name() });
                }
            }
            VolumeSource::File { path, .. } if !path.starts_with('/') => {
                return Err(DiskError::Path { name: name(), path: path.clone() });
            }
            VolumeSource::Snapshot { disk, .. } if !disk_name_is_valid(disk) => {
                return Err(DiskError::Name { name: disk.clone() });
            }
            VolumeSource::Object { location } if !object_location_is_valid(location) => {
                return Err(DiskError::Location { name: name(), location: location.clone() });
            }
            VolumeSource::File { .. }
            | VolumeSource::Object { .. }
            | VolumeSource::Image { .. }
            | VolumeSource::Snapshot { .. } => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn what_is_not_said_of_a_volume_has_a_default_and_what_can_not_be_is_refused() {
        let source = |source| {
            let request = json!({"name": "db", "source": source});
            from_value::<VolumeRequest>(request).expect("a request")
        };
        let plain = source(json!({"type": "blank", "size_bytes": 1 << 20}));
        assert_eq!((plain.on_fork, plain.check()), (OnFork::Fork, Ok(())));
        for bytes in [0, 4096, (1 << 20) + 512, (2_u64 << 40) + 4096] {
            let refused = source(json!({"type": "blank", "size_bytes": bytes})).check();
            assert_eq!(refused, Err(DiskError::Range { name: "db".to_owned() }), "{bytes}");
        }
        let file = |path: &str| source(json!({"type": "file", "path": path})).check();
        assert_eq!(file("/srv/db.raw"), Ok(()));
        assert!(matches!(file("db.raw"), Err(DiskError::Path { .. })));
        let odd = json!({"name": "db", "source": {"type": "image", "image": "x"}, "on_fork": "x"});
        assert!(from_value::<VolumeRequest>(odd).is_err());
    }
}
