use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a VM's guest memory is. All page counts are of 4 KiB pages.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct MemoryInfo {
    /// Guest memory, in pages.
    pub pages: u64,
    /// Pages that only this VM holds (it wrote them).
    pub private_pages: u64,
    /// Pages mapped in this VM as the zero page.
    pub zero_pages: u64,
    /// Pages of this VM's image that are present in the image's cache on this host.
    pub cache_present_pages: u64,
    /// Bytes brought into the image's cache since the freeze, by demand or drain.
    pub fetched_bytes: u64,
    /// The same on demand alone: what clones, and the parent, touched (with neighbours).
    pub demand_bytes: u64,
    /// Frozen pages of the image not yet drained.
    pub undrained_pages: u64,
    /// Pages of the image that are in no cache here yet: in a store, on another host, or not
    /// drained.
    #[serde(default)]
    pub missing_pages: u64,
    /// The id of the image that the VM is a view of; absent in a VM that booted.
    pub image: Option<String>,
    /// How many views (VMs) the image has.
    pub image_views: u32,
    pub faults: FaultCounts,
    /// Of the VM's image and those that it descends from.
    #[serde(default)]
    pub store_faults: StoreFaults,
    /// Bytes of those that came before anyone asked.
    #[serde(default)]
    pub prefetched_bytes: u64,
    pub source: BytesBySource,
    /// Of the VM's image and those that it descends from.
    #[serde(default)]
    pub hosts: BytesBetweenHosts,
    /// The caches that the bytes of the VM's image are in: its own, and those of the images that it
    /// descends from.
    #[serde(default)]
    pub caches: Vec<CacheInfo>,
}

/// What one image's cache holds on this host, and who needs it.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CacheInfo {
    /// The id of the image whose cache it is.
    pub image: String,
    /// Host memory that it takes.
    pub resident_bytes: u64,
    /// Pages of the asked VM's image that this image changed last; null while the page table is
    /// being derived.
    pub pages: Option<u64>,
    /// Names of the live VMs that may read from it: with the last of them it goes.
    pub vms: Vec<String>,
}

/// Faults of this VM that reached user space.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct FaultCounts {
    /// Answered with the zero page.
    pub zero: u64,
    /// The page was filled into the cache.
    pub fetch: u64,
    /// The page was in the cache by then: woken only.
    pub present: u64,
    /// A run of an ancestor's cache, or of zeros, was mapped into the view.
    pub mapped: u64,
}

/// Faults, of all VMs that share an image, on pages that are in a store or on another host.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct StoreFaults {
    /// The page was there, or on its way, because it was fetched ahead.
    pub predicted: u64,
    /// It had to be fetched.
    pub remote: u64,
}

/// Bytes of pages that went between this host and others, as they are in memory.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct BytesBetweenHosts {
    /// Came since a VM waited for them, with neighbours.
    pub demand: u64,
    /// Came before anyone asked.
    pub ahead: u64,
    /// Were given to other hosts.
    pub given: u64,
}

/// Bytes brought into the image's cache, by where they were.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct BytesBySource {
    /// Moved aside in a VM's process.
    pub frozen: u64,
    /// Copied from an ancestor's cache.
    pub image: u64,
    /// From another host.
    pub peer: u64,
    /// From a stored snapshot.
    pub chunk: u64,
}
