//! What is in the folder of layers and on no account.

use std::collections::BTreeSet;

use vmfork_image::ImageId;

use super::{DiskStore, StoreError};
use crate::space::DiskSet;

impl DiskStore {
    /// What layers hold that do not count on `set`, in bytes: those that earlier daemons left.
    /// Layers that were opened since for a disk of the set count there. Reads all maps.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn uncounted_bytes(&self, set: &DiskSet) -> Result<u64, StoreError> {
        // What ends meanwhile is listed, and lives no more.
        let before = self.counted(set);
        let listing = self.list()?;
        let after = self.counted(set);
        let others = listing.layers.values().filter(|layer| {
            let id = &layer.id;
            !before.contains(id) && !after.contains(id)
        });
        Ok(others.map(|layer| layer.written_bytes).sum())
    }

    fn counted(&self, set: &DiskSet) -> BTreeSet<ImageId> {
        let live = self.shared.live();
        let layers = live.values().filter_map(std::sync::Weak::upgrade);
        let layers: Vec<_> = layers.collect();
        // One that ends here must not find the lock taken.
        drop(live);
        let counted = layers.iter().filter(|layer| layer.charge().set().is_within(set));
        counted.map(|layer| layer.id()).collect()
    }
}
