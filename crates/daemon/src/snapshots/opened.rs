//! A stored snapshot that VMs are started from: its image with an engine, its device state in memory.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use vmfork_image::PageTable;
use vmfork_memory::{Engine, EngineOptions, HostImage, StoredRun};
use vmfork_store::{Blobs, Extent, SnapshotId, SourceOptions, Stored};

use super::facts::Facts;
use super::transfer::blobs_at;
use super::{SnapshotError, Snapshots};
use crate::fork::Lead;
use crate::hub::Core;

/// Open as long as a VM may need its pages.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Its name may become another one's while this is open.
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

    /// What the next snapshot of a VM that descends from this one is a delta of. `name` is what it is called now.
    pub(super) fn base(&self, name: &str) -> Option<Base> {
        let table = self.engine.image().table()?.clone();
        Some(Base { name: name.to_owned(), id: self.id, table })
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
    /// Stores that chunks come from, by location.
    remotes: HashMap<String, Weak<dyn Blobs>>,
}

/// Those that chunks of a chain come from, by location.
type Remotes = HashMap<String, Arc<dyn Blobs>>;

impl OpenOnes {
    /// All that are open.
    fn all(&self) -> Vec<Arc<Opened>> {
        self.snapshots.values().filter_map(Weak::upgrade).collect()
    }

    fn retain(&mut self) {
        self.snapshots.retain(|_, opened| opened.strong_count() > 0);
        self.images.retain(|_, image| image.strong_count() > 0);
        self.remotes.retain(|_, blobs| blobs.strong_count() > 0);
    }
}

impl Snapshots {
    /// Open a snapshot, or find it open. Blocks as long as this host's store takes to read a few files: where its
    /// chunks come from is not asked for anything before a VM touches what isn't here.
    ///
    /// # Errors
    /// There is none of that name, it is damaged, or the host lacks memory, fds or threads.
    pub(super) fn open(&self, core: &Core, name: &str) -> Result<Arc<Opened>, SnapshotError> {
        let chain = self.store.open_chain(name)?;
        let stored = top(&chain)?;
        let id = stored.descriptor().id;
        if let Some(opened) = self.open_ones().snapshots.get(&id).and_then(Weak::upgrade) {
            return Ok(opened);
        }
        let facts = self.facts(stored)?;
        let remotes = self.remotes(&chain)?;
        let state = stored.state()?;
        let (lead, state) =
            (crate::fork::state::lead_of(&state), crate::fork::state::write(&state)?);

        // From here on nothing is read: others that start wait no longer than building a page table takes.
        let mut open = self.open_ones();
        if let Some(opened) = open.snapshots.get(&id).and_then(Weak::upgrade) {
            return Ok(opened);
        }
        let image = self.open_images(core, &chain, &remotes, &mut open)?;
        let options = EngineOptions { fill_unit_pages: core.config.fill_unit_pages.into() };
        let engine = Engine::serve(image, &options, core.event_sink())?;
        let engine = Arc::new(engine);
        core.add_engine(&engine);
        let opened = Arc::new(Opened {
            id,
            facts,
            engine,
            lead,
            state,
            disk: OnceLock::new(),
            working_set: AtomicBool::new(false),
            prediction: AtomicBool::new(false),
        });
        open.snapshots.insert(id, Arc::downgrade(&opened));
        Ok(opened)
    }

    pub(super) fn all_opened(&self) -> Vec<Arc<Opened>> {
        self.open_ones().all()
    }

    /// What is open. Not to be held while anything is read: who starts a VM waits for it.
    fn open_ones(&self) -> MutexGuard<'_, OpenOnes> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain();
        open
    }

    /// Where chunks of a chain come from that aren't here.
    fn remotes(&self, chain: &[Arc<Stored>]) -> Result<Remotes, SnapshotError> {
        let mut remotes = Remotes::new();
        for origin in chain.iter().filter_map(|stored| stored.origin()) {
            if remotes.contains_key(origin) {
                continue;
            }
            let known = self.open_ones().remotes.get(origin).and_then(Weak::upgrade);
            let blobs = match known {
                Some(blobs) => blobs,
                None => {
                    let blobs = blobs_at(origin, &self.runtime)?;
                    let known = Arc::downgrade(&blobs);
                    self.open_ones().remotes.insert(origin.to_owned(), known);
                    blobs
                }
            };
            remotes.insert(origin.to_owned(), blobs);
        }
        Ok(remotes)
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
        let chain = self.store.open_chain(name)?;
        let remotes = self.remotes(&chain)?;
        self.open_images(core, &chain, &remotes, &mut self.open_ones())
    }

    /// The image of the first of a chain, each a delta on the next.
    fn open_images(
        &self,
        core: &Core,
        chain: &[Arc<Stored>],
        remotes: &Remotes,
        open: &mut OpenOnes,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let mut below: Option<Arc<HostImage>> = None;
        for stored in chain.iter().rev() {
            let id = stored.descriptor().id;
            let image = match open.images.get(&id).and_then(Weak::upgrade) {
                Some(image) => image,
                None => self.open_one(core, stored, remotes, below.as_ref())?,
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
        remotes: &Remotes,
        base: Option<&Arc<HostImage>>,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let remote = stored.origin().and_then(|origin| remotes.get(origin)).cloned();
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
