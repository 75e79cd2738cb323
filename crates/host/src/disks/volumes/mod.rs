//! Volumes: disks that outlive their VMs and this daemon.
//!
//! ```text
//!   create ─► NAME.json ─► Volume (its Disk stays open) ──take──► VolumeLease, of one VM
//!                                        ▲                             │
//!                                        └──── sync, then give back ───┘
//! ```
//!
//! A volume is a disk on zeros: all that it holds is in its own layers. Its disk is open for as
//! long as the daemon runs, so a layer that it needs is never removed. The next daemon finds it by
//! the disk's ID, which the record has and each layer's note.
//!
//! Promises: one VM can write to a volume at a time. A lease ends after the last request of its VM
//! has been carried out, and what was written is on the medium then. A record is durable before a
//! volume can be used, and gone before its layers are.
//!
//! Left to others: which VM has ended; QEMU's drives.

mod error;
mod fill;
mod record;
mod uses;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use vmfork_api::{OnFork, VOLUMES_MAX, Volume as Shown, VolumeRequest};
use vmfork_disk::{Disk, DiskImage, DiskSet, DiskSpec, DiskStore};
use vmfork_image::ImageId;

pub use self::error::VolumeError;
use self::record::Record;
use self::uses::{Taken, Uses};
use crate::error::chain;

/// How long a VM that has ended may take to give a volume back: the medium may be slow.
const GIVE_BACK_WAIT: Duration = Duration::from_secs(30);
/// What the notes of its layers say of its VM.
pub(super) const NO_VM: &str = "(a volume)";

/// What a VM's disk is, if it is a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfVolume {
    pub name: String,
    pub on_fork: OnFork,
}

impl OfVolume {
    /// Many VMs may have it, and none can write to it.
    pub fn is_shared(&self) -> bool {
        self.on_fork == OnFork::ReadOnly
    }
}

#[derive(Debug)]
struct Volume {
    /// `None`: see `Now::reason`.
    disk: Option<Arc<Disk>>,
    set: Arc<DiskSet>,
    /// Held while its record is changed, for as long as the medium takes.
    turn: Mutex<()>,
    /// Never held while the medium is waited for: an async thread may want it.
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    record: Record,
    /// The record on the medium is being changed: no VM gets it meanwhile.
    changes: bool,
    uses: Uses,
    /// Why no VM can have it.
    reason: Option<String>,
    removed: bool,
}

impl Volume {
    fn new(record: Record, disk: Result<Arc<Disk>, String>, set: Arc<DiskSet>) -> Arc<Self> {
        let (disk, reason) = match disk {
            Ok(disk) => (Some(disk), None),
            Err(reason) => (None, Some(reason)),
        };
        let uses = Uses::default();
        let now = Mutex::new(Now { record, changes: false, uses, reason, removed: false });
        Arc::new(Self { disk, set, turn: Mutex::default(), now })
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No VM gets it until what is returned is dropped.
    ///
    /// # Errors
    /// A VM has it.
    fn close<'a>(&'a self, _turn: &MutexGuard<'a, ()>) -> Result<Closed<'a>, VolumeError> {
        let mut now = self.now();
        now.uses.free(false).map_err(|taken| now.taken(taken))?;
        now.changes = true;
        Ok(Closed(self))
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self) -> Shown {
        let data_bytes = self.disk.as_ref().map_or(0, |disk| disk.data_bytes());
        let now = self.now();
        let Record { name, on_fork, created_unix_ms, labels, .. } = now.record.clone();
        Shown {
            name,
            disk_id: now.record.disk_id().map_or_else(String::new, |id| id.to_string()),
            size_bytes: match &self.disk {
                Some(disk) => disk.size_bytes(),
                None => now.record.size_bytes,
            },
            data_bytes,
            on_fork,
            vms: now.uses.vms(),
            created_unix_ms,
            labels,
            reason: now.reason.clone(),
        }
    }
}

/// A volume that no VM gets.
struct Closed<'a>(&'a Volume);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.now().changes = false;
    }
}

impl Now {
    /// Its disk, if a VM can have it as a volume of that kind.
    fn usable(&self, disk: Option<&Arc<Disk>>) -> Result<Arc<Disk>, VolumeError> {
        let name = || self.record.name.clone();
        match (disk, &self.reason) {
            _ if self.removed => Err(VolumeError::Missing { name: name() }),
            _ if self.changes => Err(VolumeError::Changes { name: name() }),
            (Some(disk), None) => Ok(Arc::clone(disk)),
            (_, reason) => {
                let reason = reason.clone().unwrap_or_default();
                Err(VolumeError::Broken { name: name(), reason })
            }
        }
    }

    fn taken(&self, Taken { vm, ends }: Taken) -> VolumeError {
        let volume = self.record.name.clone();
        match ends {
            true => VolumeError::GivenBack { volume, vm },
            false => VolumeError::InUse { volume, vm },
        }
    }
}

/// A volume that a VM has. It is given back when this is dropped. Dropping it waits for the medium.
#[derive(Debug)]
pub struct VolumeLease {
    volume: Arc<Volume>,
    disk: Arc<Disk>,
    is_shared: bool,
    number: u64,
    changed: Arc<Notify>,
}

impl VolumeLease {
    pub(super) fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    pub(super) fn set(&self) -> &Arc<DiskSet> {
        &self.volume.set
    }
}

impl Drop for VolumeLease {
    fn drop(&mut self) {
        let synced = if self.is_shared { Ok(()) } else { self.disk.sync() };
        let mut now = self.volume.now();
        if let Err(error) = synced {
            tracing::error!(volume = now.record.name, %error, "what was written to a volume last may be lost");
            now.reason = Some(format!("what was written last may not be on the medium: {error}"));
        }
        now.uses.give_back(self.number);
        drop(now);
        self.changed.notify_waiters();
    }
}

/// Its name is taken while a volume is being made.
struct Making<'a> {
    volumes: &'a Volumes,
    name: String,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.volumes.state().making.remove(&self.name);
    }
}

/// A volume that is whole, and that no VM and no daemon knows of yet. If it is dropped, nothing is
/// left of it.
pub(super) struct Filled<'a> {
    making: Making<'a>,
    record: Record,
    disk: Disk,
    set: Arc<DiskSet>,
}

impl Filled<'_> {
    /// From now on it is there. Blocking.
    ///
    /// # Errors
    /// Its record can't be written.
    pub(super) fn publish(self) -> Result<Shown, VolumeError> {
        let Self { making, record, disk, set } = self;
        making.volumes.write(&record)?;
        let volume = Volume::new(record, Ok(Arc::new(disk)), set);
        making.volumes.state().all.insert(making.name.clone(), Arc::clone(&volume));
        Ok(volume.show())
    }
}

#[derive(Debug, Default)]
struct State {
    all: BTreeMap<String, Arc<Volume>>,
    making: BTreeSet<String>,
}

impl State {
    fn check_new(&self, name: &str) -> Result<(), VolumeError> {
        if self.all.contains_key(name) || self.making.contains(name) {
            return Err(VolumeError::NameTaken { name: name.to_owned() });
        }
        if self.all.len() + self.making.len() >= VOLUMES_MAX {
            return Err(VolumeError::Many);
        }
        Ok(())
    }
}

/// The volumes of a host.
#[derive(Debug)]
pub(super) struct Volumes {
    folder: PathBuf,
    state: Mutex<State>,
    changed: Arc<Notify>,
}

impl Volumes {
    /// Those that earlier daemons left, each on a set that `set` makes. → and whether all that is
    /// in their layers is known: if not, none may be removed.
    ///
    /// # Errors
    /// The folder can't be read or made.
    pub(super) fn open(
        folder: PathBuf,
        store: &DiskStore,
        set: &dyn Fn() -> Arc<DiskSet>,
    ) -> io::Result<(Self, bool)> {
        std::fs::create_dir_all(&folder)?;
        let (records, bad) = record::read_all(&folder)?;
        let mut is_whole = bad.is_empty();
        for bad in bad {
            let path = bad.path.display();
            tracing::error!(%path, reason = bad.reason, "the record of a volume can't be read");
        }
        let mut state = State::default();
        // None is the rule, and the list is a look at each layer.
        let listing = match records.is_empty() {
            true => None,
            false => Some(store.list().map_err(io::Error::other)?),
        };
        for record in records {
            let set = set();
            let newest = listing.as_ref().zip(record.disk_id());
            let newest = newest.and_then(|(listing, id)| listing.newest_of(id));
            let disk = match newest {
                Some(layer) if listing.as_ref().is_some_and(|all| all.is_suspect(layer)) => {
                    Err("a layer that can't be read may be its newest".to_owned())
                }
                Some(layer) => {
                    let opened = store.reopen(layer.id, &set, &|_| None);
                    opened.map(Arc::new).map_err(|error| chain(&error))
                }
                None => Err("none of its layers is there".to_owned()),
            };
            if let Err(reason) = &disk {
                is_whole = false;
                tracing::error!(volume = record.name, reason, "a volume can't be opened");
            }
            let name = record.name.clone();
            state.all.insert(name, Volume::new(record, disk, set));
        }
        let (state, changed) = (Mutex::new(state), Arc::default());
        Ok((Self { folder, state, changed }, is_whole))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk of that ID, if it is a volume's and open.
    pub(super) fn with_id(&self, id: ImageId) -> Option<Arc<Disk>> {
        let state = self.state();
        let mut disks = state.all.values().filter_map(|volume| volume.disk.as_ref());
        disks.find(|disk| disk.id() == id).cloned()
    }

    fn find(&self, name: &str) -> Result<Arc<Volume>, VolumeError> {
        let found = self.state().all.get(name).cloned();
        found.ok_or_else(|| VolumeError::Missing { name: name.to_owned() })
    }

    pub(super) fn count(&self) -> usize {
        self.state().all.len()
    }

    /// All, by name. Blocking.
    pub(super) fn list(&self) -> Vec<Shown> {
        let all: Vec<_> = self.state().all.values().cloned().collect();
        all.iter().map(|volume| volume.show()).collect()
    }

    /// Blocking.
    ///
    /// # Errors
    /// There is none of that name.
    pub(super) fn show(&self, name: &str) -> Result<Shown, VolumeError> {
        Ok(self.find(name)?.show())
    }

    /// Whether there may be one more, of that name.
    ///
    /// # Errors
    /// There may not.
    pub(super) fn check_new(&self, name: &str) -> Result<(), VolumeError> {
        self.state().check_new(name)
    }

    fn begin(&self, name: &str) -> Result<Making<'_>, VolumeError> {
        let mut state = self.state();
        state.check_new(name)?;
        state.making.insert(name.to_owned());
        Ok(Making { volumes: self, name: name.to_owned() })
    }

    /// A new volume on `set`, with the content of an image. Blocking, for as long as copying takes.
    ///
    /// # Errors
    /// The name is taken; the host has no room. Nothing is left of it then.
    pub(super) fn fill(
        &self,
        store: &DiskStore,
        request: &VolumeRequest,
        created_unix_ms: u64,
        (content, set): (&DiskImage, Arc<DiskSet>),
        given_up: &AtomicBool,
    ) -> Result<Filled<'_>, VolumeError> {
        let name = &request.name;
        let making = self.begin(name)?;
        let fill = |source| VolumeError::Fill { name: name.clone(), source };
        let size_bytes = content.size_bytes();
        let zeros = DiskImage::blank(size_bytes).map_err(|error| fill(io::Error::other(error)))?;
        let (vm, set_of_disk) = (NO_VM.to_owned(), Arc::clone(&set));
        let spec = DiskSpec { name: name.clone(), vm, size_bytes, set: set_of_disk };
        let disk = store.create(&spec, &zeros).map_err(|error| fill(io::Error::other(error)))?;
        fill::copy(content, &disk, given_up).and_then(|()| disk.sync()).map_err(fill)?;
        if given_up.load(Ordering::Relaxed) {
            return Err(fill(io::ErrorKind::Interrupted.into()));
        }
        // A disk has the ID of its first layer.
        let record = Record {
            on_fork: request.on_fork,
            created_unix_ms,
            labels: request.labels.clone(),
            ..Record::new(name.clone(), disk.layer(), size_bytes)
        };
        Ok(Filled { making, record, disk, set })
    }

    fn write(&self, record: &Record) -> Result<(), VolumeError> {
        let failed = |source| VolumeError::Record { name: record.name.clone(), source };
        record::write(&self.folder, record).map_err(failed)
    }

    /// Removes a volume that no VM has. Blocking.
    ///
    /// # Errors
    /// A VM has it, or its record can't be removed.
    pub(super) fn remove(&self, name: &str) -> Result<(), VolumeError> {
        let volume = self.find(name)?;
        let turn = volume.turn();
        if volume.now().removed {
            return Err(VolumeError::Missing { name: name.to_owned() });
        }
        let _closed = volume.close(&turn)?;
        // First: without its record, the next daemon removes what is left of its layers.
        record::remove(&self.folder, name)
            .map_err(|source| VolumeError::Record { name: name.to_owned(), source })?;
        volume.now().removed = true;
        self.state().all.remove(name);
        Ok(())
    }

    /// What forks do with it from now on. Blocking.
    ///
    /// # Errors
    /// A VM has it, or it can't be written down.
    pub(super) fn set_on_fork(&self, name: &str, on_fork: OnFork) -> Result<Shown, VolumeError> {
        let volume = self.find(name)?;
        let turn = volume.turn();
        if self.on_fork(name)? != on_fork {
            let _closed = volume.close(&turn)?;
            let record = Record { on_fork, ..volume.now().record.clone() };
            self.write(&record)?;
            volume.now().record = record;
        }
        drop(turn);
        Ok(volume.show())
    }

    /// What forks do with it.
    ///
    /// # Errors
    /// It can't be used.
    pub(super) fn on_fork(&self, name: &str) -> Result<OnFork, VolumeError> {
        let volume = self.find(name)?;
        let now = volume.now();
        now.usable(volume.disk.as_ref())?;
        Ok(now.record.on_fork)
    }

    /// Makes the volume with that disk larger by `grow`, while no VM has it. `None`: there is none.
    /// Blocking.
    pub(super) fn grow<E: From<VolumeError>>(
        &self,
        id: ImageId,
        grow: impl FnOnce(&Disk) -> Result<(), E>,
    ) -> Option<Result<(), E>> {
        let all: Vec<_> = self.state().all.values().cloned().collect();
        let has = |volume: &Arc<Volume>| volume.now().record.disk_id() == Some(id);
        let volume = all.into_iter().find(has)?;
        let grown = || {
            let turn = volume.turn();
            let disk = volume.now().usable(volume.disk.as_ref())?;
            let _closed = volume.close(&turn)?;
            grow(&disk)
        };
        Some(grown())
    }

    /// What it is, once a VM may have it. Waits for one that has ended to give it back.
    ///
    /// # Errors
    /// A VM has it, or it can't be used.
    pub(super) async fn ready(&self, name: &str) -> Result<OfVolume, VolumeError> {
        let until = Instant::now() + GIVE_BACK_WAIT;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let error = {
                let volume = self.find(name)?;
                let now = volume.now();
                now.usable(volume.disk.as_ref())?;
                let of = OfVolume { name: name.to_owned(), on_fork: now.record.on_fork };
                match now.uses.free(of.is_shared()) {
                    Ok(()) => return Ok(of),
                    Err(taken) => now.taken(taken),
                }
            };
            let is_soon = matches!(error, VolumeError::GivenBack { .. });
            if !is_soon || timeout_at(until, changed).await.is_err() {
                return Err(error);
            }
        }
    }

    /// Its disk.
    ///
    /// # Errors
    /// It can't be used.
    pub(super) fn disk(&self, name: &str) -> Result<Arc<Disk>, VolumeError> {
        let volume = self.find(name)?;
        volume.now().usable(volume.disk.as_ref())
    }

    /// A VM gives it back soon, and goes on.
    pub(super) fn goes(&self, vm: &str, name: &str) {
        if let Ok(volume) = self.find(name) {
            volume.now().uses.vm_ends(vm);
        }
    }

    /// A VM gets it.
    ///
    /// # Errors
    /// Another has it, it can't be used, or it is not `of` that kind any more.
    pub(super) fn take(&self, vm: &str, of: &OfVolume) -> Result<VolumeLease, VolumeError> {
        let volume = self.find(&of.name)?;
        let mut now = volume.now();
        let disk = now.usable(volume.disk.as_ref())?;
        if now.record.on_fork != of.on_fork {
            return Err(VolumeError::Changed { name: of.name.clone() });
        }
        let is_shared = of.is_shared();
        let number = match now.uses.take(vm, is_shared) {
            Ok(number) => number,
            Err(taken) => return Err(now.taken(taken)),
        };
        drop(now);
        Ok(VolumeLease { volume, disk, is_shared, number, changed: Arc::clone(&self.changed) })
    }

    /// A VM has ended: what it had is given back soon.
    pub(super) fn vm_ends(&self, vm: &str) {
        for volume in self.state().all.values() {
            volume.now().uses.vm_ends(vm);
        }
    }

    /// Waits until those VMs that have ended have given back what they had.
    pub(super) async fn given_back(&self, is_one: impl Fn(&str) -> bool) {
        let until = Instant::now() + GIVE_BACK_WAIT;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let ending = {
                let state = self.state();
                state.all.values().any(|volume| volume.now().uses.is_ending(&is_one))
            };
            if !ending || timeout_at(until, changed).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
