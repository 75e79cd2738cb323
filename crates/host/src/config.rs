//! The settings of one host's VMs, checked. The daemon makes them of its flags.

use std::path::PathBuf;

use vmfork_api::disk::RootDevice;
use vmfork_cluster::allocate::Bounds;

use crate::quotas::DiskBounds;

/// Number of user ids from the base on, one per running VM.
pub const QEMU_UIDS: u32 = 65_536;

/// The settings. All paths are absolute.
#[derive(Debug, Clone)]
pub struct Config {
    /// The state folder.
    pub state: PathBuf,
    /// Folder of the shim and the guest agent.
    pub libdir: PathBuf,
    /// Ready QEMU processes per machine shape; 0: no pool.
    pub pool: u32,
    /// How guests read their image's root, where a request does not say. `None`: by persistent
    /// memory, where that is possible.
    pub root_device: Option<RootDevice>,
    /// 1 to 512.
    pub fill_unit_pages: u32,
    /// Absolute if found; otherwise the bare name, which `doctor` reports as missing.
    pub qemu: PathBuf,
    /// First of [`QEMU_UIDS`] ids for QEMU processes.
    pub qemu_uid_base: u32,
    /// Memory that stays free for the rest of the host.
    pub memory_reserve_bytes: u64,
    /// 1 to 100.
    pub clone_growth_percent: u8,
    /// Most VMs of a family that guests can reach by tickets.
    pub family_vms_max: u32,
    /// 1 to 100.
    pub family_memory_percent: u8,
    /// 1 to 100.
    pub family_vcpus_percent: u8,
    /// vCPUs per core of the host; at least 1.
    pub vcpus_per_core: u32,
    /// Limits of users over all hosts.
    pub quotas: Bounds,
    /// What all disks of this host may hold. `None`: as much as its file system.
    pub disk_quota_bytes: Option<u64>,
    /// What those of each user may hold, on this host.
    pub disk_bounds: DiskBounds,
}

impl Config {
    /// The library that is preloaded into QEMU.
    pub fn shim(&self) -> PathBuf {
        self.libdir.join("libvmfork_tap.so")
    }

    /// The agent that is put into guest images.
    pub fn agent(&self) -> PathBuf {
        self.libdir.join("vmfork-agent")
    }
}
