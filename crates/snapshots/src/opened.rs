//! A stored snapshot that VMs are started from: its image with an engine, its device state in
//! memory.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use vmfork_api::ErrorBody;
use vmfork_engine::{Engine, EngineOptions, HostImage, StoredRun};
use vmfork_image::{PAGE_BYTES, PageTable};
use vmfork_store::{Blobs, Extent, SnapshotId, SourceOptions, Stored};

use super::transfer::blobs_at;
use super::{SnapshotError, Snapshots};
use vmfork_fork::facts::Facts;
use vmfork_host::admission::{Admission, Lease};
use vmfork_host::core::Core;
use vmfork_host::vm::CameOf;
use vmfork_host::vm::machine::Lead;

/// Open as long as a VM may need its pages.
#[derive(Debug)]
pub struct Opened {
    /// Its name may become another one's while this is open.
    pub id: SnapshotId,
    /// Its own, and those of the snapshots that it is a delta on.
    chain: Vec<SnapshotId>,
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
    /// Bytes per second at which all of it is fetched; 0: no client has asked for that.
    hydration: AtomicU64,
    /// What is still to come, promised; `None` until a VM is to start.
    memory: Mutex<Option<Lease>>,
}

/// The right to load a working set. Its drop frees it for another caller, unless the set was loaded
/// whole.
#[derive(Debug)]
pub(super) struct WorkingSetClaim {
    opened: Weak<Opened>,
    is_loaded: bool,
}

impl WorkingSetClaim {
    /// What it is the working set of; `None`: all its VMs have ended.
    pub(super) fn opened(&self) -> Option<Arc<Opened>> {
        self.opened.upgrade()
    }

    /// All of it is there.
    pub(super) fn loaded(mut self) {
        self.is_loaded = true;
    }
}

impl Drop for WorkingSetClaim {
    fn drop(&mut self) {
        if let Some(opened) = self.opened.upgrade().filter(|_| !self.is_loaded) {
            opened.working_set.store(false, Ordering::Relaxed);
        }
    }
}

impl Opened {
    /// The caller must load the working set, unless another does, or has.
    pub(super) fn claim_working_set(self: &Arc<Self>) -> Option<WorkingSetClaim> {
        let is_mine = !self.working_set.swap(true, Ordering::Relaxed);
        is_mine.then(|| WorkingSetClaim { opened: Arc::downgrade(self), is_loaded: false })
    }

    /// All of it is to be fetched at this rate, or at a higher one that was asked for before.
    /// → whether the caller must start the hydration, because it has not started yet.
    pub(super) fn claim_hydration(&self, bytes_per_s: NonZeroU64) -> bool {
        let before = self.hydration.fetch_max(bytes_per_s.get(), Ordering::Relaxed);
        if before < bytes_per_s.get() {
            self.engine.hydrate(bytes_per_s);
        }
        before == 0
    }

    /// Try again to fetch what is left.
    pub(super) fn hydrate_again(&self) {
        if let Some(bytes_per_s) = NonZeroU64::new(self.hydration.load(Ordering::Relaxed)) {
            self.engine.hydrate(bytes_per_s);
        }
    }

    /// Have the host's memory for what its VMs may still touch, once for all of them. `message`:
    /// what is done.
    ///
    /// # Errors
    /// `no_capacity` with the figures.
    pub(super) fn promise_memory(
        &self,
        admission: &Admission,
        message: &str,
    ) -> Result<(), ErrorBody> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.is_none() {
            *memory = Some(admission.cache(message, self.missing_bytes())?);
        }
        Ok(())
    }

    /// What has come since is used, and needs no promise any more.
    pub(super) fn update_promise(&self) {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lease) = memory.as_ref().filter(|lease| lease.bytes() > 0) {
            lease.is_enough(self.missing_bytes());
        }
    }

    fn missing_bytes(&self) -> u64 {
        self.engine.image().missing_pages().saturating_mul(PAGE_BYTES)
    }

    /// Whether the caller must start to fetch what its faults predict, because that has not started
    /// yet.
    pub(super) fn claim_prediction(&self) -> bool {
        !self.prediction.swap(true, Ordering::Relaxed)
    }

    /// Whether its VMs may still need pages of the snapshot `id`, which it is or is a delta on.
    pub(super) fn needs(&self, id: SnapshotId) -> bool {
        self.chain.contains(&id) && self.engine.image().missing_pages() > 0
    }

    /// Keep the root disk open for as long as this is.
    pub(super) fn keep_disk(&self, disk: Option<Arc<OwnedFd>>) {
        if let Some(disk) = disk {
            let _first = self.disk.set(disk);
        }
    }

    /// What the next snapshot of a VM that descends from this one is a delta of. `name` is what it
    /// is called now.
    pub(super) fn base(&self, name: &str) -> Option<Base> {
        let table = self.engine.image().table()?.clone();
        Some(Base { name: name.to_owned(), id: self.id, table })
    }
}

/// A stored snapshot that a VM descends from.
#[derive(Debug)]
pub struct Base {
    pub(super) name: String,
    pub(super) id: SnapshotId,
    /// Of its image, while that was in memory: whose bytes it stored.
    pub(super) table: PageTable,
}

impl CameOf for Opened {}

/// The newest stored snapshot that a VM descends from is the base of its next one.
impl CameOf for Base {}

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
    /// Open a snapshot, or find it open. Blocks as long as this host's store takes to read a few
    /// files: where its chunks come from is not asked for anything before a VM touches what isn't
    /// here.
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
            (vmfork_fork::state::lead_of(&state), vmfork_fork::state::write(&state)?);

        // From here on nothing is read: others that start wait no longer than building a page table
        // takes.
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
            chain: chain.iter().map(|stored| stored.descriptor().id).collect(),
            facts,
            engine,
            lead,
            state,
            disk: OnceLock::new(),
            working_set: AtomicBool::new(false),
            prediction: AtomicBool::new(false),
            hydration: AtomicU64::new(0),
            memory: Mutex::new(None),
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

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use vmfork_image::{PageIdx, PageRange};
    use vmfork_store::{BaseRef, Compression, Draft, Store, Work};

    use super::*;
    use vmfork_host::testing::Host;

    const PAGES: u64 = 512;

    /// In `store`: `base`, with pages 0 to 100, and `top`, a delta on it with pages 200 to 210.
    fn store(folder: &Path) -> Store {
        let store = Store::folder(folder.join("elsewhere")).expect("made");
        let mut base = None;
        for (name, first, pages) in [("base", 0, 100), ("top", 200, 10)] {
            let own = PageRange::new(PageIdx(first), pages).expect("small");
            let draft = Draft {
                name: name.to_owned(),
                id: None,
                base: base.take(),
                pages: PAGES,
                extents: vec![(own, Extent::Own)],
                state: b"state".to_vec(),
                vm: serde_json::to_value(Facts::of_a_test(PAGES * PAGE_BYTES)).expect("plain"),
                compression: Compression::None,
                chunk_pages: 64,
                keep_zero_pages: false,
            };
            let read = |_: PageRange, bytes: &mut [u8]| -> io::Result<()> {
                bytes.fill(7);
                Ok(())
            };
            let made = store.create(draft, &read, &Work::new(1)).expect("created");
            base = Some(BaseRef { name: name.to_owned(), id: made.id });
        }
        store
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_pulled_opens_without_asking_for_the_rest() {
        let (host, folder) = (Host::start().await, tempfile::tempdir().expect("folder"));
        let snapshots = &Snapshots::new(&host.folder().join("snapshots")).expect("made");
        // Who asks this one for anything makes a store of it, or says that it is none.
        let origin = folder.path().join("nothing");
        std::fs::create_dir(&origin).expect("made");
        let location = origin.to_str().expect("plain");
        snapshots
            .store
            .adopt_from("top", &store(folder.path()), location, &Work::new(1))
            .expect("adopted");
        let opened = snapshots.open(&host.core, "top").expect("opens");
        assert_eq!(opened.engine.image().missing_pages(), 110);
        assert_eq!(std::fs::read_dir(&origin).expect("there").count(), 0);
        assert_eq!(snapshots.open_ones().remotes.len(), 1, "one for all layers");
        let again = snapshots.open(&host.core, "top").expect("opens");
        assert!(Arc::ptr_eq(&opened, &again));
        drop((opened, again));
        assert!(snapshots.all_opened().is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn vms_need_all_of_a_chain_until_nothing_of_it_is_missing() {
        let (host, folder) = (Host::start().await, tempfile::tempdir().expect("folder"));
        let snapshots = &Snapshots::new(&host.folder().join("snapshots")).expect("made");
        let (there, work) = (store(folder.path()), Work::new(1));
        there.copy_to("top", &snapshots.store, &work).expect("copied");
        let opened = snapshots.open(&host.core, "top").expect("opens");
        let id = |name| snapshots.store.descriptor(name).expect("there").id;
        let other = snapshots.open(&host.core, "base").expect("opens");
        assert!(opened.needs(id("top")) && opened.needs(id("base")));
        assert!(other.needs(id("base")) && !other.needs(id("top")));
        let all = PageRange::first(PAGES);
        let bytes = vec![7; usize::try_from(all.byte_len()).expect("small")];
        assert_eq!(opened.engine.insert(all, &bytes).expect("memory"), 110);
        assert!(!opened.needs(id("top")) && !opened.needs(id("base")));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_done_once_for_all_vms_is_claimed_by_one() {
        let (host, folder) = (Host::start().await, tempfile::tempdir().expect("folder"));
        let snapshots = &Snapshots::new(&host.folder().join("snapshots")).expect("made");
        let (there, work) = (store(folder.path()), Work::new(1));
        there.copy_to("base", &snapshots.store, &work).expect("copied");
        let opened = snapshots.open(&host.core, "base").expect("opens");
        let claim = opened.claim_working_set().expect("the first");
        assert!(opened.claim_working_set().is_none());
        // It was cut short.
        drop(claim);
        opened.claim_working_set().expect("the next").loaded();
        assert!(opened.claim_working_set().is_none(), "it is there");
        let rate = |mib: u64| NonZeroU64::new(mib << 20).expect("not 0");
        assert!(opened.claim_hydration(rate(4)));
        assert!(!opened.claim_hydration(rate(2)) && !opened.claim_hydration(rate(8)));
        assert_eq!(opened.hydration.load(Ordering::Relaxed), 8 << 20, "the highest counts");
        // A claim keeps nothing open.
        opened.working_set.store(false, Ordering::Relaxed);
        let claim = opened.claim_working_set().expect("the next");
        drop(opened);
        assert!(claim.opened().is_none());
    }
}
