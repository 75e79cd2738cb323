//! Disks: writable block devices of a VM, beside its read-only root.
//!
//! A fork gives each clone the disks of its parent, as they are in the instant of the fork. What a
//! VM writes is its own.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema::{Closed, DiskId, DiskName, HostPath, Name, ObjectLocation};

/// Most disks of one VM, beside its root. That of an overlay is one of them.
pub const DISKS_MAX: usize = 7;
/// Smallest and largest disk, in bytes.
pub const DISK_BYTES_MIN: u64 = 1 << 20;
pub const DISK_BYTES_MAX: u64 = 2 << 40;
/// Size of the disk that takes the writes to a root file system, in bytes.
pub const ROOT_BYTES_DEFAULT: u64 = 10 << 30;
/// Its smallest size: a journal, and room for a few files.
pub const ROOT_BYTES_MIN: u64 = 64 << 20;
/// The name of that disk.
pub const ROOT_NAME: &str = "root";
/// Longest name of a disk, in bytes.
pub const DISK_NAME_BYTES_MAX: usize = 32;

/// A disk that a VM is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDisk {
    /// Unique in its VM.
    #[schema(value_type = DiskName)]
    pub name: String,
    /// What it holds when the VM boots.
    #[schema(value_type = ClosedDiskSource)]
    pub source: DiskSource,
}

/// What a disk holds when its VM boots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskSource {
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
    /// A file on the daemon's host. A raw one must not change while a VM uses it.
    File {
        #[schema(value_type = HostPath)]
        path: String,
        /// Default: `raw`.
        #[serde(default, skip_serializing_if = "DiskFormat::is_raw")]
        format: DiskFormat,
    },
    /// A disk of a stored snapshot.
    Snapshot {
        #[schema(value_type = Name)]
        snapshot: String,
        #[schema(value_type = DiskName)]
        disk: String,
    },
    /// A raw disk in an object store, at `s3://BUCKET/KEY`. It is fetched as it is read.
    Object {
        #[schema(value_type = ObjectLocation)]
        location: String,
    },
    /// Nothing yet: a volume can be attached while the VM runs.
    Empty {},
    /// A volume. What the VM writes to it stays when the VM ends.
    Volume {
        #[schema(value_type = Name)]
        volume: String,
    },
}

/// What a file with a disk looks like. It is never guessed: a guest writes what it likes to a raw
/// disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskFormat {
    /// The bytes of the disk. The disk reads them from the file.
    #[default]
    Raw,
    /// QEMU's. It is converted before the disk is there, and not needed later. One with a backing
    /// file, an external data file or encryption is refused.
    Qcow2,
}

impl DiskFormat {
    /// For `serde`, which gives a reference.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
    pub(crate) fn is_raw(&self) -> bool {
        *self == Self::Raw
    }
}

/// For the API's document.
type ClosedDiskSource = Closed<DiskSource>;

/// What a guest's flush waits for. No request or reply has it: it follows from what the disk is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// The daemon: of disks that end with their VM.
    #[default]
    Host,
    /// The host's medium: of volumes.
    Medium,
}

/// What takes the writes to a VM's root file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// A disk named `root`, over the image's root, which is read-only and shared.
    Overlay,
    /// The same with the guest's memory: quick, and bounded by it.
    Tmpfs,
    /// The root itself: a disk named `root`, which begins with the image's.
    Disk,
}

/// How a guest reads the root file system of its image, which it can't write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RootDevice {
    /// Persistent memory (NVDIMM), by DAX: without a page cache of the guest's. All VMs of the host
    /// share one copy.
    Pmem,
    /// A block device, through the guest's page cache.
    Block,
}

/// The disk that a VM's root file system has of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootDisk {
    /// Takes what is written.
    Overlay { size_bytes: u64 },
    /// Is the root. `None`: as large as the image's.
    Whole { size_bytes: Option<u64> },
}

/// A disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    pub name: String,
    pub size_bytes: u64,
    /// What was written since the VM's start or its last fork.
    pub written_bytes: u64,
    /// The guest's device: `/dev/vdb` is the first one beside the root.
    pub device: String,
    /// The volume that it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The guest can't write to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// A volume can be attached to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub empty: bool,
    /// What the VM has asked of it. All 0 once the VM has ended.
    #[serde(default)]
    pub activity: DiskActivity,
    /// How long it has kept the VM from running, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled_ms: Option<u64>,
}

/// What a VM has asked of a disk since it has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DiskActivity {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    /// Of a volume. QEMU carries out those of other disks: there is nothing to wait for.
    pub flushes: u64,
    /// Trims and writes of zeros.
    pub trims: u64,
    /// Requests that failed, each time that they were tried.
    pub errors: u64,
}

/// How large a disk or a volume is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeRequest {
    /// A multiple of 4096, and not less than it has.
    #[schema(minimum = 1_048_576, maximum = 2_199_023_255_552_u64, multiple_of = 4096)]
    pub size_bytes: u64,
}

impl ResizeRequest {
    /// Whether a disk can be that large.
    ///
    /// # Errors
    /// It can't.
    pub fn check(self) -> Result<(), DiskError> {
        let Self { size_bytes } = self;
        let fits = (DISK_BYTES_MIN..=DISK_BYTES_MAX).contains(&size_bytes);
        if fits && size_bytes.is_multiple_of(4096) { Ok(()) } else { Err(DiskError::NewRange) }
    }
}

/// A disk on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostDisk {
    /// 1 to 16 hex digits. Stays the same as long as the disk exists.
    #[schema(value_type = DiskId)]
    pub id: String,
    /// Unique in its VM; empty if it is damaged.
    pub name: String,
    /// The VM that has it or had it; empty if the disk is damaged or a volume.
    pub vm: String,
    pub state: DiskState,
    pub size_bytes: u64,
    /// What was written to it and still takes space. It may lie on what was written to others.
    pub written_bytes: u64,
    /// Why it is damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What a disk on a host is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskState {
    /// A VM has it.
    InUse,
    /// Its VM ended with an earlier daemon: the disk can be exported and removed.
    Left,
    /// Its files can't be read: it can be removed.
    Damaged,
    /// It is a volume: `vmfork volume` says more of it, and removes it.
    Volume,
}

/// A disk that can't be, as typed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    #[error(
        "disk `{text}`: it has the form NAME=blank:SIZE, NAME=image:IMAGE, NAME=file:PATH, NAME=qcow2:PATH, NAME=snapshot:SNAPSHOT/DISK, NAME=s3://BUCKET/KEY, NAME=volume:VOLUME or NAME=empty"
    )]
    Form { text: String },
    #[error(
        "disk `{name}`: a name has 1 to {DISK_NAME_BYTES_MAX} of a-z 0-9 -, starting with a letter"
    )]
    Name { name: String },
    #[error("disk `{ROOT_NAME}`: that is the root's own; use another name")]
    Reserved,
    #[error("the root's disk: use a size of 64 MiB to 2 TiB, in steps of 4096 bytes")]
    RootRange,
    #[error("a size of the root's disk is for root `overlay` and `disk` only")]
    NoOverlay,
    #[error("disk `{name}`: there are two of that name")]
    Twice { name: String },
    #[error("disk `{name}`: another disk is the volume `{volume}` already")]
    VolumeTwice { name: String, volume: String },
    #[error("disk `{name}`: `{size}` is no size; write it as 512M, 10G or 1T")]
    Size { name: String, size: String },
    #[error("disk `{name}`: use a size of 1 MiB to 2 TiB, in steps of 4096 bytes")]
    Range { name: String },
    #[error("use a size of 1 MiB to 2 TiB, in steps of 4096 bytes")]
    NewRange,
    #[error("disk `{name}`: `{path}` is no absolute path")]
    Path { name: String, path: String },
    #[error("disk `{name}`: `{location}` is no object: write s3://BUCKET/KEY")]
    Location { name: String, location: String },
    #[error("{count} disks: a VM can have {max} beside its root{}", overlay(*max))]
    Many { count: usize, max: usize },
}

impl NewDisk {
    /// Whether a VM with this root can have these.
    ///
    /// # Errors
    /// It can't.
    pub fn check(disks: &[Self], root: Option<Root>) -> Result<(), DiskError> {
        let max = if root == Some(Root::Overlay) { DISKS_MAX - 1 } else { DISKS_MAX };
        if disks.len() > max {
            return Err(DiskError::Many { count: disks.len(), max });
        }
        for (index, disk) in disks.iter().enumerate() {
            let name = || disk.name.clone();
            if !disk_name_is_valid(&disk.name) {
                return Err(DiskError::Name { name: name() });
            }
            if disk.name == ROOT_NAME {
                return Err(DiskError::Reserved);
            }
            if disks.iter().take(index).any(|earlier| earlier.name == disk.name) {
                return Err(DiskError::Twice { name: name() });
            }
            match &disk.source {
                DiskSource::Blank { size_bytes } => {
                    let fits = (DISK_BYTES_MIN..=DISK_BYTES_MAX).contains(size_bytes);
                    if !fits || !size_bytes.is_multiple_of(4096) {
                        return Err(DiskError::Range { name: name() });
                    }
                }
                DiskSource::File { path, .. } if !path.starts_with('/') => {
                    return Err(DiskError::Path { name: name(), path: path.clone() });
                }
                DiskSource::Volume { volume } => {
                    let earlier = disks.iter().take(index);
                    if earlier.map(|disk| &disk.source).any(|source| *source == disk.source) {
                        let volume = volume.clone();
                        return Err(DiskError::VolumeTwice { name: name(), volume });
                    }
                }
                DiskSource::Snapshot { disk, .. } if !disk_name_is_valid(disk) => {
                    return Err(DiskError::Name { name: disk.clone() });
                }
                DiskSource::Object { location } if !object_location_is_valid(location) => {
                    return Err(DiskError::Location { name: name(), location: location.clone() });
                }
                DiskSource::File { .. }
                | DiskSource::Object { .. }
                | DiskSource::Image { .. }
                | DiskSource::Snapshot { .. }
                | DiskSource::Empty {} => {}
            }
        }
        Ok(())
    }
}

/// Whether it names a bucket and a key. What these may be, the object store says.
pub fn object_location_is_valid(location: &str) -> bool {
    let rest = location.strip_prefix("s3://").filter(|_| location.len() <= 600);
    let parts = rest.and_then(|rest| rest.split_once('/'));
    parts.is_some_and(|(bucket, key)| !bucket.is_empty() && !key.is_empty())
}

fn overlay(max: usize) -> &'static str {
    if max < DISKS_MAX { " and its overlay" } else { "" }
}

/// As typed: `data=blank:10G`.
impl FromStr for NewDisk {
    type Err = DiskError;

    fn from_str(text: &str) -> Result<Self, DiskError> {
        let form = || DiskError::Form { text: text.to_owned() };
        let (name, source) = text.split_once('=').ok_or_else(form)?;
        if source == "empty" {
            return Ok(Self { name: name.to_owned(), source: DiskSource::Empty {} });
        }
        let (kind, value) = source.split_once(':').ok_or_else(form)?;
        if value.is_empty() {
            return Err(form());
        }
        let source = match kind {
            "blank" => {
                let size = || DiskError::Size { name: name.to_owned(), size: value.to_owned() };
                DiskSource::Blank { size_bytes: parse_size(value).ok_or_else(size)? }
            }
            "image" => DiskSource::Image { image: value.to_owned() },
            "file" => DiskSource::File { path: value.to_owned(), format: DiskFormat::Raw },
            "qcow2" => DiskSource::File { path: value.to_owned(), format: DiskFormat::Qcow2 },
            "s3" => DiskSource::Object { location: format!("s3:{value}") },
            "volume" => DiskSource::Volume { volume: value.to_owned() },
            "snapshot" => {
                let (snapshot, disk) = value.split_once('/').unwrap_or((value, name));
                DiskSource::Snapshot { snapshot: snapshot.to_owned(), disk: disk.to_owned() }
            }
            _ => return Err(form()),
        };
        Ok(Self { name: name.to_owned(), source })
    }
}

/// The size of the root's own disk, if a VM is to have one.
///
/// # Errors
/// It can't have that.
pub fn root_disk(root: Option<Root>, bytes: Option<u64>) -> Result<Option<RootDisk>, DiskError> {
    let range = ROOT_BYTES_MIN..=DISK_BYTES_MAX;
    let fits = |bytes: u64| range.contains(&bytes) && bytes.is_multiple_of(4096);
    let disk = match root.unwrap_or(Root::Tmpfs) {
        Root::Tmpfs if bytes.is_some() => return Err(DiskError::NoOverlay),
        Root::Tmpfs => None,
        Root::Overlay => {
            Some(RootDisk::Overlay { size_bytes: bytes.unwrap_or(ROOT_BYTES_DEFAULT) })
        }
        Root::Disk => Some(RootDisk::Whole { size_bytes: bytes }),
    };
    if bytes.is_none_or(fits) { Ok(disk) } else { Err(DiskError::RootRange) }
}

/// Whether `name` may name a disk of a VM.
pub fn disk_name_is_valid(name: &str) -> bool {
    let bytes = name.as_bytes();
    bytes.first().is_some_and(u8::is_ascii_lowercase)
        && bytes.len() <= DISK_NAME_BYTES_MAX
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
}

/// Bytes of `512M`, `10G`, `10GiB`, `1T`, or of a plain number of bytes.
pub fn parse_size(text: &str) -> Option<u64> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    // `+1G` is more than there is, elsewhere: not here.
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| digits)?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json, to_value};

    use super::*;

    fn disk(text: &str) -> Result<NewDisk, DiskError> {
        let disk: NewDisk = text.parse()?;
        NewDisk::check(std::slice::from_ref(&disk), None)?;
        Ok(disk)
    }

    #[test]
    fn disks_are_read_as_they_are_typed() {
        let source = |text: &str| disk(text).expect("a disk").source;
        assert_eq!(source("a=blank:1M"), DiskSource::Blank { size_bytes: 1 << 20 });
        assert_eq!(source("a=blank:10GiB"), DiskSource::Blank { size_bytes: 10 << 30 });
        assert_eq!(source("a=blank:2t"), DiskSource::Blank { size_bytes: 2 << 40 });
        assert_eq!(source("a=blank:2097152"), DiskSource::Blank { size_bytes: 2 << 20 });
        assert_eq!(source("a=image:default"), DiskSource::Image { image: "default".to_owned() });
        let file = |format| DiskSource::File { path: "/a=b:c".to_owned(), format };
        assert_eq!(source("a=file:/a=b:c"), file(DiskFormat::Raw));
        assert_eq!(source("a=qcow2:/a=b:c"), file(DiskFormat::Qcow2));
        assert_eq!(source("a=volume:db"), DiskSource::Volume { volume: "db".to_owned() });
        assert_eq!(source("a=empty"), DiskSource::Empty {});
        let stored = |disk: &str| DiskSource::Snapshot {
            snapshot: "warm".to_owned(),
            disk: disk.to_owned(),
        };
        assert_eq!(source("a=snapshot:warm/data"), stored("data"));
        assert_eq!(source("a=snapshot:warm"), stored("a"), "of the same name");
    }

    #[test]
    fn what_is_no_disk_is_refused_with_its_cause() {
        let refused = |text: &str| disk(text).expect_err("refused").to_string();
        for text in ["", "a", "a=", "a=blank", "a=blank:", "a=tape:1G"] {
            assert!(refused(text).contains("has the form NAME=blank:SIZE"), "{text}");
        }
        for name in ["", "A", "1a", "a b", "a_b", &"a".repeat(33)] {
            assert!(refused(&format!("{name}=blank:1G")).contains("a name has 1 to 32"), "{name}");
        }
        for size in ["x", "1X", "-1G", "+1G", "1.5G", "99999999999G"] {
            assert!(refused(&format!("a=blank:{size}")).contains("is no size"), "{size}");
        }
        for size in ["0", "512K", "3T", "1048577"] {
            assert!(refused(&format!("a=blank:{size}")).contains("1 MiB to 2 TiB"), "{size}");
        }
        assert!(refused("a=snapshot:warm/").contains("a name has 1 to 32"));
        assert!(refused("a=file:disk.raw").contains("`disk.raw` is no absolute path"));
    }

    #[test]
    fn a_vm_has_a_few_disks_with_different_names() {
        let disk = |name: &str| format!("{name}=blank:1M").parse::<NewDisk>().expect("a disk");
        let many: Vec<_> = (0..8).map(|index| disk(&format!("d{index}"))).collect();
        assert_eq!(NewDisk::check(&many, None), Err(DiskError::Many { count: 8, max: 7 }));
        assert_eq!(NewDisk::check(&many[..7], Some(Root::Tmpfs)), Ok(()));
        assert_eq!(NewDisk::check(&many[..7], Some(Root::Disk)), Ok(()), "in the root's place");
        let refused = NewDisk::check(&many[..7], Some(Root::Overlay)).expect_err("one too many");
        let says = "7 disks: a VM can have 6 beside its root and its overlay";
        assert_eq!(refused.to_string(), says);
        assert_eq!(NewDisk::check(&many[..6], Some(Root::Overlay)), Ok(()));
        let twice = [disk("a"), disk("b"), disk("a")];
        assert_eq!(NewDisk::check(&twice, None), Err(DiskError::Twice { name: "a".to_owned() }));
        let volume = |name: &str| format!("{name}=volume:db").parse::<NewDisk>().expect("a disk");
        let refused = NewDisk::check(&[volume("a"), disk("b"), volume("c")], None);
        assert!(refused.expect_err("one VM").to_string().contains("is the volume `db` already"));
    }

    #[test]
    fn a_tmpfs_has_no_disk_of_its_own() {
        assert_eq!(root_disk(None, None), Ok(None));
        let overlay = |size_bytes| Ok(Some(RootDisk::Overlay { size_bytes }));
        assert_eq!(root_disk(Some(Root::Overlay), None), overlay(10 << 30));
        assert_eq!(root_disk(Some(Root::Overlay), Some(64 << 20)), overlay(64 << 20));
        for size_bytes in [None, Some(64 << 20)] {
            let whole = Ok(Some(RootDisk::Whole { size_bytes }));
            assert_eq!(root_disk(Some(Root::Disk), size_bytes), whole);
        }
        assert_eq!(root_disk(None, Some(1 << 30)), Err(DiskError::NoOverlay));
        for odd in [1 << 20, (1 << 30) + 1, 3 << 40] {
            for root in [Root::Overlay, Root::Disk] {
                assert_eq!(root_disk(Some(root), Some(odd)), Err(DiskError::RootRange));
            }
        }
        let root: NewDisk = "root=blank:1G".parse().expect("a disk");
        assert_eq!(NewDisk::check(&[root], None), Err(DiskError::Reserved));
    }

    #[test]
    fn a_new_size_is_one_that_a_disk_can_have() {
        let check = |size_bytes| ResizeRequest { size_bytes }.check();
        assert_eq!((check(1 << 20), check(2 << 40), check(4096 * 257)), (Ok(()), Ok(()), Ok(())));
        for odd in [0, 4096, (1 << 20) + 512, (2 << 40) + 4096, u64::MAX] {
            assert_eq!(check(odd), Err(DiskError::NewRange), "{odd}");
        }
    }

    #[test]
    fn requests_name_the_source_by_its_type() {
        let request = json!({"name": "data", "source": {"type": "blank", "size_bytes": 1_048_576}});
        let disk: NewDisk = from_value(request).expect("a disk");
        assert_eq!(disk, "data=blank:1M".parse().expect("a disk"));
        assert_eq!(from_value::<NewDisk>(to_value(&disk).expect("plain")).expect("a disk"), disk);
        let odd = json!({"name": "data", "source": {"type": "blank", "size_bytes": 1, "x": 1}});
        assert!(from_value::<NewDisk>(odd).is_err());
    }
}
