//! All disks of this host: those that VMs have, and those that VMs of earlier daemons left.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use vmfork_api::disk::DISK_BYTES_MIN;
use vmfork_api::{DiskState, Durability, HostDisk, Volume};
use vmfork_disk::{BadLayer, Disk, DiskImage, DiskSet, DiskStore, FoundDisk, Lower, StoreError};
use vmfork_image::{ImageId, PAGE_BYTES, PageIdx, PageRange};

use super::volumes::NO_VM;
use super::{DiskContent, DiskError, DiskSpec, HostDisks};

/// What is read at a time, in bytes.
const PIECE_BYTES: u64 = 1 << 20;

/// The disks that VMs have, by ID.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<BTreeMap<ImageId, Weak<Disk>>>);

impl Live {
    pub(super) fn add(&self, disks: &[Arc<Disk>]) {
        let mut live = self.live();
        live.retain(|_, disk| disk.strong_count() > 0);
        live.extend(disks.iter().map(|disk| (disk.id(), Arc::downgrade(disk))));
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<ImageId, Weak<Disk>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, id: ImageId) -> Option<Arc<Disk>> {
        self.live().get(&id).and_then(Weak::upgrade)
    }
}

/// Removes what nothing needs, and says what earlier daemons left.
pub(super) fn report(store: &DiskStore) -> Result<(), StoreError> {
    let removed = store.remove_unneeded()?;
    let mut left = store.disks()?;
    left.retain(|disk| !disk.in_use);
    // Places for volumes, and volumes that were not finished: those that are have been opened.
    let nothing = |disk: &mut FoundDisk| disk.size_bytes < DISK_BYTES_MIN || disk.vm == NO_VM;
    for disk in left.extract_if(.., nothing) {
        match store.remove_disk(disk.id) {
            // They take next to no space, and a later daemon tries again.
            Err(error @ StoreError::Unread { .. }) => {
                tracing::warn!(disk = %disk.id, %error, "what is left of an empty disk stays");
            }
            removed => removed?,
        }
    }
    if !left.is_empty() || removed > 0 {
        let written_bytes: u64 = left.iter().map(|disk| disk.written_bytes).sum();
        tracing::info!(
            disks = left.len(),
            written_bytes,
            removed_layers = removed,
            "VMs of earlier daemons left disks: `vmfork disk ls`"
        );
    }
    Ok(())
}

impl HostDisks {
    /// All, those of VMs first, then volumes.
    ///
    /// # Errors
    /// Their folder can't be read.
    pub fn list(&self) -> Result<Vec<HostDisk>, DiskError> {
        let listing = self.store.list().map_err(DiskError::Left)?;
        let disks = self.store.disks_in(&listing);
        // Places for volumes have nothing on them.
        let disks = disks.iter().filter(|disk| disk.size_bytes >= DISK_BYTES_MIN);
        let mut all: Vec<HostDisk> = disks.map(shown).collect();
        all.extend(listing.bad.iter().map(shown_bad));
        all.sort_by(|a, b| order(a).cmp(&order(b)));
        Ok(all)
    }

    /// # Errors
    /// There is none of that ID.
    pub fn find(&self, id: &str) -> Result<HostDisk, DiskError> {
        let all = self.list()?;
        let found = all.into_iter().find(|disk| disk.id == id);
        found.ok_or_else(|| DiskError::Unknown { id: id.to_owned() })
    }

    /// What a disk holds now. One that a VM has is frozen: that is as after a power cut.
    ///
    /// # Errors
    /// There is none of that ID, or it can't be read.
    pub fn content_of(&self, id: &str) -> Result<DiskContent, DiskError> {
        let unknown = || DiskError::Unknown { id: id.to_owned() };
        let disk_id: ImageId = id.parse().map_err(|_no_id| unknown())?;
        let found = self.store.disks().map_err(DiskError::Left)?;
        let found = found.into_iter().find(|disk| disk.id == disk_id).ok_or_else(unknown)?;
        let open = self.live.get(disk_id).or_else(|| self.volumes.with_id(disk_id));
        let image = match open {
            Some(disk) => disk.freeze().map_err(|error| DiskError::Left(error.into()))?,
            None => {
                let stored = |id| self.stored.image(id).or_else(|| self.objects.image(id));
                self.store.image(found.newest, &stored).map_err(DiskError::Left)?
            }
        };
        let (name, size_bytes) = (found.name, image.size_bytes());
        let durability = Durability::default();
        let (empty, read_only) = (false, false);
        let spec = DiskSpec { name, size_bytes, durability, volume: None, empty, read_only };
        let set = DiskSet::new(None);
        Ok(DiskContent { spec, image, set, on_clients_file: false, lease: None })
    }

    /// Removes a disk that no VM has.
    ///
    /// # Errors
    /// It is in use, there is none of that ID, or its files can't be removed.
    pub fn remove(&self, id: &str) -> Result<(), DiskError> {
        let unknown = || DiskError::Unknown { id: id.to_owned() };
        let disk_id: ImageId = id.parse().map_err(|_no_id| unknown())?;
        // Also one that can't be opened.
        let is_broken = |volume: &Volume| volume.reason.is_some();
        match self.find(id)?.state {
            DiskState::Volume => return Err(DiskError::IsVolume),
            DiskState::Damaged if self.volumes.list().iter().any(is_broken) => {
                return Err(DiskError::MayBeVolumes);
            }
            _ => {}
        }
        self.store.remove_disk(disk_id).map_err(|error| match error {
            StoreError::Busy(_) => DiskError::InUse,
            StoreError::NoDisk(_) => unknown(),
            error => DiskError::Left(error),
        })?;
        self.prune_objects();
        self.accounts.count_left(&self.store).map_err(DiskError::Left)
    }
}

impl DiskContent {
    /// All bytes, in order. `take` may end it.
    ///
    /// # Errors
    /// Of the medium, or of `take`.
    pub fn read_all(&self, mut take: impl FnMut(Bytes) -> io::Result<()>) -> io::Result<()> {
        let size_bytes = self.spec.size_bytes;
        let zeros = Bytes::from(vec![0; usize::try_from(PIECE_BYTES).unwrap_or(0)]);
        for (range, zero) in runs(&self.image) {
            let end = range.end().byte_offset().min(size_bytes);
            let mut rest = range;
            while rest.start().byte_offset() < end {
                let next = PageIdx(rest.start().0 + PIECE_BYTES / PAGE_BYTES);
                let piece = rest.until_page(next.min(rest.end()));
                rest = rest.from_page(piece.end());
                let len = end.min(piece.end().byte_offset()) - piece.start().byte_offset();
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                if zero {
                    take(zeros.slice(..len))?;
                    continue;
                }
                let mut bytes = vec![0; usize::try_from(piece.byte_len()).unwrap_or(0)];
                self.image.read(piece, &mut bytes)?;
                bytes.truncate(len);
                take(bytes.into())?;
            }
        }
        Ok(())
    }
}

/// The runs of pages of a disk, and whether each is zeros.
fn runs(image: &DiskImage) -> Vec<(PageRange, bool)> {
    let mut found = Vec::new();
    let all = PageRange::first(image.size_bytes().div_ceil(PAGE_BYTES));
    image.runs(all, &mut |run, zero| found.push((run, zero)));
    found
}

fn shown(disk: &FoundDisk) -> HostDisk {
    let is_volume = disk.vm == NO_VM;
    let suspect = disk.is_suspect && !disk.in_use;
    HostDisk {
        id: disk.id.to_string(),
        name: disk.name.clone(),
        vm: if is_volume { String::new() } else { disk.vm.clone() },
        state: match disk.in_use {
            _ if is_volume => DiskState::Volume,
            true => DiskState::InUse,
            false if disk.is_suspect => DiskState::Damaged,
            false => DiskState::Left,
        },
        size_bytes: disk.size_bytes,
        written_bytes: disk.written_bytes,
        reason: suspect.then(|| "a layer that can't be read may be its newest".to_owned()),
    }
}

fn shown_bad(layer: &BadLayer) -> HostDisk {
    let name = layer.folder.file_name().unwrap_or_default();
    HostDisk {
        id: name.to_string_lossy().into_owned(),
        name: String::new(),
        vm: String::new(),
        state: DiskState::Damaged,
        size_bytes: 0,
        written_bytes: 0,
        reason: Some(layer.reason.clone()),
    }
}

/// Those in use first; then by VM and name.
fn order(disk: &HostDisk) -> (u8, &str, &str, &str) {
    let rank = match disk.state {
        DiskState::InUse => 0,
        DiskState::Volume => 1,
        DiskState::Left => 2,
        DiskState::Damaged => 3,
    };
    (rank, &disk.vm, &disk.name, &disk.id)
}
