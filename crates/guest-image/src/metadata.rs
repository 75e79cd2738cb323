//! `image.json`: what is known about an image besides its bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the layout of `image.json` and of the folder around it.
pub(crate) const SCHEMA: &str = "vmfork-guest-image/1";
/// The files that an image may have beside `image.json`.
pub const KERNEL_FILE: &str = "kernel";
pub const INITRD_FILE: &str = "initrd";
pub const ROOT_FILE: &str = "root.img";

/// Of the hash that goes into the name of an image whose own is taken.
const HASH_WORD: usize = 12;

/// The contents of `image.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// Layout version.
    pub schema: String,
    /// The image's name, equal to its folder's.
    pub name: String,
    /// When the build ended, milliseconds since 1970.
    pub created_unix_ms: u64,
    /// `debian bookworm`, `imported`.
    pub origin: String,
    /// As `uname -r` says it in the guest; empty where it could not be told.
    pub kernel_version: String,
    /// The kernel's command line. A start of a VM may append to it.
    pub cmdline: String,
    /// Packages that were asked for beyond the minimal system.
    pub packages: Vec<String>,
    /// Whether the vmfork agent runs in it: without one a VM can be forked, but not `exec`ed in.
    pub agent: bool,
    /// Default guest memory, in MiB.
    pub default_memory_mib: u32,
    /// Whether the kernel has a driver for the vmgenid device; absent where it could not be told.
    /// Without one the device does nothing but have every clone interpret ACPI code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmgenid: Option<bool>,
    /// Whether its initrd's agent knows `vmfork.upper=DEVICE`: what is written to the root goes to
    /// that disk. Absent in images that were built before it did.
    #[serde(default, skip_serializing_if = "is_false")]
    pub root_overlay: bool,
    /// Whether its initrd's agent knows `vmfork.rw=DEVICE`: the root is a disk that is written
    /// itself. Absent in images that were built before it did, and in imported ones.
    #[serde(default, skip_serializing_if = "is_false")]
    pub root_disk: bool,
    /// Whether its initrd's agent knows `vmfork.pmem=DEVICE`, and its kernel that device: the root
    /// is persistent memory. Absent in images that were built before it did, and in imported ones.
    #[serde(default, skip_serializing_if = "is_false")]
    pub root_pmem: bool,
    /// Hash over everything that went in; equal hashes mean that a build has nothing to do.
    /// Absent in imported images.
    pub input_hash: Option<String>,
    /// Hash over the root file system's tree: names, modes, owners, contents. Two builds of one
    /// state of the archive have it in common even where the file system's bytes differ.
    pub tree_hash: Option<String>,
    /// The root is not here as a file: it is a disk of the host's store of snapshots, by this name
    /// there. It may still be on its way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_stored: Option<String>,
    /// The root is not here as a file: it is a raw object of an object store, `s3://BUCKET/KEY`.
    /// Each VM has what the object holds when it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_object: Option<String>,
    /// A copy of it, as other hosts of a cluster pull it, is in the host's store of snapshots, by
    /// this name there. Only of images whose root is a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seeded: Option<String>,
    /// Size and hash of `kernel`, `initrd`, `root.img`, as far as present.
    pub files: BTreeMap<String, FileInfo>,
}

/// Where an image's root is that is no file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootElsewhere {
    /// A disk of the host's store of snapshots, by the image's name there.
    Stored(String),
    /// A raw object of an object store, `s3://BUCKET/KEY`.
    Object(String),
}

/// One file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Its length. A sparse file takes less of the disk.
    pub size_bytes: u64,
    /// BLAKE3 of its contents, in hex.
    pub blake3: String,
}

/// For `serde`, which gives a reference.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_false(value: &bool) -> bool {
    !*value
}

impl Metadata {
    /// Length of all files together.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.files.values().fold(0, |sum: u64, file| sum.saturating_add(file.size_bytes))
    }

    /// BLAKE3 of its root disk, in hex, if it has one.
    #[must_use]
    pub fn root_blake3(&self) -> Option<&str> {
        self.files.get(ROOT_FILE).map(|file| file.blake3.as_str())
    }

    /// What it may be called where its name is taken, the first choice first.
    pub fn names(&self) -> impl Iterator<Item = String> + use<> {
        let own = self.name.clone();
        let with_hash = self.root_blake3().map(|hash| {
            let word = hash.get(..HASH_WORD).unwrap_or(hash);
            let room = vmfork_api::NAME_BYTES_MAX - 1 - word.len();
            let stem: String = own.chars().take(room).collect();
            format!("{stem}-{word}")
        });
        std::iter::once(own).chain(with_hash)
    }

    /// What the host's store of snapshots has of it, by its name there.
    #[must_use]
    pub fn stored(&self) -> Option<&String> {
        self.root_stored.as_ref().or(self.seeded.as_ref())
    }

    /// Where its root is, if that is no file.
    #[must_use]
    pub fn root_elsewhere(&self) -> Option<RootElsewhere> {
        let stored = self.root_stored.clone().map(RootElsewhere::Stored);
        stored.or_else(|| self.root_object.clone().map(RootElsewhere::Object))
    }

    /// Length of its root disk, if it has one whose length is known.
    #[must_use]
    pub fn root_bytes(&self) -> Option<u64> {
        self.files.get(ROOT_FILE).map(|file| file.size_bytes)
    }

    /// The names of the files that its folder has.
    pub(crate) fn here(&self) -> impl Iterator<Item = &String> {
        self.files.keys().filter(|name| *name != ROOT_FILE || self.root_stored.is_none())
    }

    /// Whether it has what a VM boots from: a kernel, or a disk and nothing else.
    pub(crate) fn boots(&self) -> bool {
        let has = |name| self.files.contains_key(name);
        let has_root = has(ROOT_FILE) || self.root_object.is_some();
        has(KERNEL_FILE) || (has_root && !has(INITRD_FILE))
    }

    /// Whether its kernel mounts a root of the VM's own for writing. Those who import an image
    /// answer for it: its own initrd follows the kernel's command line, or does not.
    #[must_use]
    pub fn takes_root_disk(&self) -> bool {
        self.root_disk || self.input_hash.is_none()
    }

    /// The form in which the REST API lists it; `vms` is for the daemon to fill in.
    #[must_use]
    pub fn to_api(&self) -> vmfork_api::Image {
        vmfork_api::Image {
            name: self.name.clone(),
            size_bytes: self.size_bytes(),
            created_unix_ms: self.created_unix_ms,
            origin: self.origin.clone(),
            kernel: self.kernel_version.clone(),
            agent: self.agent,
            vms: 0,
            remote: None,
            seeded: self.stored().is_some(),
        }
    }
}
