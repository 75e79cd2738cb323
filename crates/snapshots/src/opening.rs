//! Opening stored snapshots: what of them is open is found, and the rest is read from the store.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use vmfork_engine::{Engine, EngineOptions, HostImage, StoredRun};
use vmfork_host::core::Core;
use vmfork_store::{Blobs, Extent, SourceOptions, Stored};

use crate::error::SnapshotError;
use crate::library::Snapshots;
use crate::location::blobs_at;
use crate::opened::{OpenOnes, Opened};

/// Those that chunks of a chain come from, by location.
type Remotes = HashMap<String, Arc<dyn Blobs>>;

impl Snapshots {
    /// Open a snapshot, or find it open. Blocks as long as this host's store takes to read a few
    /// files. Another store is asked for chunks only when a VM touches what isn't here.
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
        let chain = chain.iter().map(|stored| stored.descriptor().id).collect();
        let opened = Arc::new(Opened::new((id, chain), facts, engine, (state, lead)));
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

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use vmfork_image::{PageIdx, PageRange};
    use vmfork_store::{BaseRef, Compression, Draft, Store, Work};

    use std::num::NonZeroU64;
    use std::sync::atomic::Ordering;

    use vmfork_fork::facts::Facts;
    use vmfork_image::PAGE_BYTES;

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
