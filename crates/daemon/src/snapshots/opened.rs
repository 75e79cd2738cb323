//! A stored snapshot that VMs are started from: its image with an engine, its device state in memory.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use vmfork_api::ErrorBody;
use vmfork_image::PageTable;
use vmfork_memory::{Engine, EngineOptions, HostImage, StoredRun};
use vmfork_store::{Extent, SnapshotId, SourceOptions, Stored};

use super::facts::{self, Facts};
use super::transfer::{For, store_at};
use super::{SnapshotError, Snapshots};
use crate::fork::Lead;
use crate::hub::Core;
use crate::vm::machine::Machine;

/// Open as long as a VM may need its pages.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) name: String,
    pub(crate) id: SnapshotId,
    pub(super) facts: Facts,
    pub(super) engine: Arc<Engine>,
    /// The device state, as QEMU reads it.
    pub(super) state: OwnedFd,
    pub(super) lead: Option<Lead>,
    /// The root disk of its VMs, for those of the pool, too.
    disk: OnceLock<Arc<OwnedFd>>,
    /// Whether its working set is loaded, or being loaded, and what else is done for it once.
    working_set: AtomicBool,
    prediction: AtomicBool,
}

impl Opened {
    /// Whether the caller is to load the working set: nobody has yet.
    pub(super) fn claim_working_set(&self) -> bool {
        !self.working_set.swap(true, Ordering::Relaxed)
    }

    /// The same of what its faults predict.
    pub(super) fn claim_prediction(&self) -> bool {
        !self.prediction.swap(true, Ordering::Relaxed)
    }

    /// Keep the root disk open for as long as this is.
    pub(super) fn keep_disk(&self, disk: Option<Arc<OwnedFd>>) {
        if let Some(disk) = disk {
            let _first = self.disk.set(disk);
        }
    }

    /// Whether a QEMU of this host is of the machine type that it was `taken` on.
    ///
    /// # Errors
    /// It is not, or QEMU does not say.
    pub(crate) async fn check_machine(
        &self,
        taken: &str,
        machine: &Machine,
    ) -> Result<(), ErrorBody> {
        let found = super::machine_type(machine).await;
        let message = format!("start snapshot `{}`", self.name);
        let found = found.map_err(|error| error.to_body(message))?;
        facts::check_machine(&self.name, taken, &found)
    }

    /// What the next snapshot of a VM that descends from this one is a delta of.
    pub(super) fn base(&self) -> Option<Base> {
        let table = self.engine.image().table()?.clone();
        Some(Base { name: self.name.clone(), id: self.id, table })
    }
}

/// A stored snapshot that a VM descends from.
#[derive(Debug)]
pub(crate) struct Base {
    pub(super) name: String,
    pub(super) id: SnapshotId,
    /// Of its image, while that was in memory: whose bytes it stored.
    pub(super) table: PageTable,
}

/// What is open, by id.
#[derive(Debug, Default)]
pub(super) struct OpenOnes {
    snapshots: HashMap<SnapshotId, Weak<Opened>>,
    /// Those that others are deltas of, too.
    images: HashMap<SnapshotId, Weak<HostImage>>,
}

impl OpenOnes {
    /// All that are open.
    fn all(&self) -> Vec<Arc<Opened>> {
        self.snapshots.values().filter_map(Weak::upgrade).collect()
    }

    fn retain(&mut self) {
        self.snapshots.retain(|_, opened| opened.strong_count() > 0);
        self.images.retain(|_, image| image.strong_count() > 0);
    }
}

impl Snapshots {
    /// Open a snapshot, or find it open. Blocks as long as a store takes to read a few files.
    ///
    /// # Errors
    /// There is none of that name, it is damaged, or the host lacks memory, fds or threads.
    pub(super) fn open(&self, core: &Core, name: &str) -> Result<Arc<Opened>, SnapshotError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain();
        let chain = self.store.open_chain(name)?;
        let stored = Arc::clone(top(&chain)?);
        let id = stored.descriptor().id;
        if let Some(opened) = open.snapshots.get(&id).and_then(Weak::upgrade) {
            return Ok(opened);
        }
        let facts = self.facts(&stored)?;
        let image = self.open_images(core, &chain, &mut open)?;
        let options = EngineOptions { fill_unit_pages: core.config.fill_unit_pages.into() };
        let engine = Engine::serve(image, &options, core.event_sink())?;
        let engine = Arc::new(engine);
        core.add_engine(&engine);
        let state = stored.state()?;
        let opened = Arc::new(Opened {
            name: name.to_owned(),
            id,
            facts,
            engine,
            lead: crate::fork::state::lead_of(&state),
            state: crate::fork::state::write(&state)?,
            disk: OnceLock::new(),
            working_set: AtomicBool::new(false),
            prediction: AtomicBool::new(false),
        });
        open.snapshots.insert(id, Arc::downgrade(&opened));
        Ok(opened)
    }

    pub(super) fn all_opened(&self) -> Vec<Arc<Opened>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).all()
    }

    /// The image of a snapshot, without an engine: to read its pages.
    ///
    /// # Errors
    /// As [`Snapshots::open`].
    pub(super) fn image_of(
        &self,
        core: &Core,
        name: &str,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let chain = self.store.open_chain(name)?;
        self.open_images(core, &chain, &mut open)
    }

    /// The image of the first of a chain, each a delta on the next.
    fn open_images(
        &self,
        core: &Core,
        chain: &[Arc<Stored>],
        open: &mut OpenOnes,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let mut below: Option<Arc<HostImage>> = None;
        for stored in chain.iter().rev() {
            let id = stored.descriptor().id;
            let image = match open.images.get(&id).and_then(Weak::upgrade) {
                Some(image) => image,
                None => self.open_one(core, stored, below.as_ref())?,
            };
            open.images.insert(id, Arc::downgrade(&image));
            below = Some(image);
        }
        below.ok_or(SnapshotError::Empty)
    }

    fn open_one(
        &self,
        core: &Core,
        stored: &Arc<Stored>,
        base: Option<&Arc<HostImage>>,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let remote = stored
            .origin()
            .map(|origin| store_at(origin, For::Reading, &self.runtime))
            .transpose()?;
        let source = stored.source(SourceOptions { hot: Arc::clone(&self.hot), remote });
        let runs = stored.extents().map(|(range, extent)| match extent {
            Extent::Own => StoredRun::Own(range),
            Extent::Zero => StoredRun::Zero(range),
        });
        let pages = stored.descriptor().pages;
        Ok(HostImage::stored(core.next_image(), pages, runs, base, source)?)
    }
}

fn top(chain: &[Arc<Stored>]) -> Result<&Arc<Stored>, SnapshotError> {
    chain.first().ok_or(SnapshotError::Empty)
}

/// What is open.
pub(super) type Open = Mutex<OpenOnes>;
