//! What all disks of a store did and hold, for metrics.

use std::io;
use std::sync::Weak;

use vmfork_image::PAGE_BYTES;

use super::DiskStore;
use crate::counters::DiskTotals;
use crate::layer::PageState;

impl DiskStore {
    /// What its disks did since it was opened, those that have ended too.
    pub fn totals(&self) -> DiskTotals {
        self.shared.totals.sum()
    }

    /// Bytes that are free to us on the medium of the layers.
    ///
    /// # Errors
    /// The medium's.
    pub fn free_bytes(&self) -> io::Result<u64> {
        let found = rustix::fs::statvfs(&self.shared.layers)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// What layers hold that are in use, in bytes: each once, whichever disks need it.
    pub fn layer_bytes(&self) -> u64 {
        let layers: Vec<_> = self.shared.live().values().filter_map(Weak::upgrade).collect();
        layers.iter().map(|layer| layer.map().count(PageState::Written) * PAGE_BYTES).sum()
    }
}
