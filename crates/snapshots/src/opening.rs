//! Opening stored snapshots: what of them is open is found, and the rest is read from the store.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use vmfork_api::ErrorBody;
use vmfork_disk::{DiskImage, DiskSet};
use vmfork_engine::{Engine, EngineOptions, HostImage, StoredRun};
use vmfork_fork::facts::Facts;
use vmfork_host::core::Core;
use vmfork_host::disks::{DiskContent, StoredBases, StoredError};
use vmfork_image::ImageId;
use vmfork_store::{
    Blobs, Descriptor, Extent, Role, SnapshotId, SourceOptions, Stored, StoredImage, StoredPages,
};

use crate::bases::Bases;
use crate::disks;
use crate::error::SnapshotError;
use crate::library::{Library, Snapshots};
use crate::opened::{OpenOnes, Opened, tables};
use vmfork_host::vm::Provenance;

/// A stored snapshot without memory: what its VMs boot with.
#[derive(Debug)]
pub struct StoredDisks {
    /// Of the VM that it was taken of.
    pub facts: Facts,
    pub contents: Vec<DiskContent>,
    /// What VMs with these disks come of.
    pub came_of: Provenance,
}

impl Library {
    /// What VMs of this snapshot boot with; `None`: they need not boot, since it has their memory.
    /// Blocks as long as this host's store takes to read a few files.
    ///
    /// # Errors
    /// There is none of that name, it is damaged, or still being written.
    pub fn disks_to_boot(&self, name: &str) -> Result<Option<StoredDisks>, ErrorBody> {
        let opened = self.snapshots.open_disks_only(name);
        opened.map_err(|error| error.to_body(format!("start snapshot `{name}`")))
    }
}

/// Those that chunks of a chain come from, by location.
type Remotes = HashMap<String, Arc<dyn Blobs>>;

impl Snapshots {
    /// Open a snapshot, or find it open. Blocks as long as this host's store takes to read a few
    /// files. Another store is asked for chunks only when a VM touches what isn't here.
    ///
    /// # Errors
    /// There is none of that name, it is damaged, or the host lacks memory, fds or threads.
    pub(super) fn open(&self, core: &Core, name: &str) -> Result<Arc<Opened>, SnapshotError> {
        let chain = self.store.open_chain(name, &Role::Memory)?;
        let stored = top(&chain)?.stored();
        let id = stored.descriptor().id;
        if let Some(opened) = self.open_ones().snapshots.get(&id).and_then(Weak::upgrade) {
            return Ok(opened);
        }
        let facts = self.facts(stored)?;
        check_roles(stored.descriptor(), &facts)?;
        let kept = facts.spec().disks().next().map(|_| self.keep_for_disks());
        if kept.is_some() && self.store.descriptor(name)?.id != id {
            return Err(self.not_found(name));
        }
        let disks = self.open_disks(stored, &facts)?;
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
        let chain = chain.iter().map(|image| image.stored().descriptor().id).collect();
        let opened = Arc::new(Opened::new((id, chain), disks, facts, engine, (state, lead)));
        open.snapshots.insert(id, Arc::downgrade(&opened));
        drop((open, kept));
        Ok(opened)
    }

    /// Open the disks of a snapshot that has no memory; `None`: it has one.
    ///
    /// # Errors
    /// There is none of that name, it is damaged, or still being written.
    fn open_disks_only(&self, name: &str) -> Result<Option<StoredDisks>, SnapshotError> {
        self.check_written(name)?;
        if self.store.descriptor(name)?.image(&Role::Memory).is_some() {
            return Ok(None);
        }
        // Its disks are read from when this ends, so that it can't go any more.
        let _none_goes = self.keep_for_disks();
        let stored = self.store.open(name)?;
        let descriptor = stored.descriptor();
        if descriptor.image(&Role::Memory).is_some() {
            return Ok(None);
        }
        let facts = self.facts(&stored)?;
        check_roles(descriptor, &facts)?;
        let contents = self.open_disks(&stored, &facts)?;
        let bases = Bases::of((name, descriptor.id), tables(&contents));
        let came_of = Provenance::default().with(Arc::new(bases));
        Ok(Some(StoredDisks { facts, contents, came_of }))
    }

    /// While this is held, no snapshot with disks is removed, and none is opened by another.
    pub(super) fn keep_for_disks(&self) -> MutexGuard<'_, ()> {
        self.disk_gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the disks of its VMs hold.
    fn open_disks(
        &self,
        stored: &Arc<Stored>,
        facts: &Facts,
    ) -> Result<Vec<DiskContent>, SnapshotError> {
        let mut contents = Vec::new();
        for (_, spec) in facts.spec().disks() {
            let none = || SnapshotError::NoDisk {
                name: stored.descriptor().name.clone(),
                disk: spec.name.clone(),
                bytes: spec.size_bytes,
            };
            let role = Role::Disk(spec.name.parse().map_err(|_no_device| none())?);
            let chain = self.store.open_chain_of(stored.image(&role).map_err(|_none| none())?)?;
            let image = self.disk_of(&chain)?;
            if image.size_bytes() != spec.size_bytes || spec.volume.is_some() {
                return Err(none());
            }
            let (spec, set) = (spec.clone(), DiskSet::new(None));
            contents.push(DiskContent { spec, image, set, on_clients_file: false, lease: None });
        }
        Ok(contents)
    }

    /// The disk that is the first of a chain.
    fn disk_of(&self, chain: &[StoredImage]) -> Result<DiskImage, SnapshotError> {
        let remotes = self.remotes(chain)?;
        let layers = chain.iter().map(|stored| self.source_of(stored, &remotes)).collect();
        let (image, is_read) = disks::image_of(chain, layers)?;
        self.open_ones().disks.push(is_read);
        Ok(image)
    }

    /// The disks that something reads from, and that may need pages of the snapshot `id`.
    pub(super) fn read_disks(&self, id: SnapshotId) -> BTreeSet<ImageId> {
        let open = self.open_ones();
        let disks = open.disks.iter().filter_map(Weak::upgrade);
        disks.filter(|disk| disk.needs(id)).map(|disk| disk.id()).collect()
    }

    /// Whether something reads from a disk of one of these snapshots.
    pub(super) fn disk_is_read(&self, ids: &BTreeSet<SnapshotId>) -> bool {
        let open = self.open_ones();
        let mut disks = open.disks.iter().filter_map(Weak::upgrade);
        disks.any(|disk| ids.iter().any(|id| disk.is_of(*id)))
    }

    /// A disk of a stored snapshot, by what layers that lie on it say.
    fn disk_by_id(&self, id: ImageId) -> Result<Option<DiskImage>, SnapshotError> {
        for (name, descriptor) in self.store.list()? {
            let Ok(descriptor) = descriptor else { continue };
            let images = descriptor.images.iter();
            let mut roles = images.map(|image| &image.role).filter(|role| **role != Role::Memory);
            if let Some(role) = roles.find(|role| disks::image_id(descriptor.id, role) == id) {
                return Ok(Some(self.disk_of(&self.store.open_chain(&name, role)?)?));
            }
        }
        Ok(None)
    }

    /// The IDs by which layers name the disks of these snapshots.
    pub(super) fn disk_ids(
        &self,
        snapshots: &BTreeSet<SnapshotId>,
    ) -> Result<BTreeSet<ImageId>, SnapshotError> {
        let all = self.store.list()?.into_iter().filter_map(|(_, descriptor)| descriptor.ok());
        let these = all.filter(|descriptor| snapshots.contains(&descriptor.id));
        let ids = these.flat_map(|descriptor| {
            let roles = descriptor.images.into_iter().map(|image| image.role);
            let disks = roles.filter(|role| *role != Role::Memory);
            disks.map(move |role| disks::image_id(descriptor.id, &role))
        });
        Ok(ids.collect())
    }

    pub(super) fn all_opened(&self) -> Vec<Arc<Opened>> {
        self.open_ones().all()
    }

    /// What is open. Not to be held while anything is read: who starts a VM waits for it.
    pub(super) fn open_ones(&self) -> MutexGuard<'_, OpenOnes> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain();
        open
    }

    /// Where chunks of a chain come from that aren't here.
    fn remotes(&self, chain: &[StoredImage]) -> Result<Remotes, SnapshotError> {
        let mut remotes = Remotes::new();
        for origin in chain.iter().filter_map(|image| image.stored().origin()) {
            if remotes.contains_key(origin) {
                continue;
            }
            let known = self.open_ones().remotes.get(origin).and_then(Weak::upgrade);
            let blobs = match known {
                Some(blobs) => blobs,
                None => {
                    let blobs = self.places.blobs_at(origin)?;
                    let known = Arc::downgrade(&blobs);
                    self.open_ones().remotes.insert(origin.to_owned(), known);
                    blobs
                }
            };
            remotes.insert(origin.to_owned(), blobs);
        }
        Ok(remotes)
    }

    /// The memory of a snapshot, without an engine: to read its pages.
    ///
    /// # Errors
    /// As [`Snapshots::open`].
    pub(super) fn image_of(
        &self,
        core: &Core,
        name: &str,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let chain = self.store.open_chain(name, &Role::Memory)?;
        let remotes = self.remotes(&chain)?;
        self.open_images(core, &chain, &remotes, &mut self.open_ones())
    }

    /// The image of the first of a chain, each a delta on the next.
    fn open_images(
        &self,
        core: &Core,
        chain: &[StoredImage],
        remotes: &Remotes,
        open: &mut OpenOnes,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let mut below: Option<Arc<HostImage>> = None;
        for stored in chain.iter().rev() {
            let id = stored.stored().descriptor().id;
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
        stored: &StoredImage,
        remotes: &Remotes,
        base: Option<&Arc<HostImage>>,
    ) -> Result<Arc<HostImage>, SnapshotError> {
        let source = self.source_of(stored, remotes);
        let runs = stored.extents().map(|(range, extent)| match extent {
            Extent::Own => StoredRun::Own(range),
            Extent::Zero => StoredRun::Zero(range),
        });
        let pages = stored.image().pages();
        Ok(HostImage::stored(core.next_image(), pages, runs, base, source)?)
    }

    fn source_of(&self, stored: &StoredImage, remotes: &Remotes) -> Arc<StoredPages> {
        let remote = stored.stored().origin().and_then(|origin| remotes.get(origin)).cloned();
        stored.source(SourceOptions { hot: Arc::clone(&self.hot), remote })
    }
}

impl Snapshots {
    /// The disk of that name of a snapshot.
    pub(super) fn disk_by_name(
        &self,
        snapshot: &str,
        disk: &str,
    ) -> Result<DiskImage, SnapshotError> {
        self.check_written(snapshot)?;
        // It is read from when this ends, so that the snapshot can't go any more.
        let _none_goes = self.keep_for_disks();
        let descriptor = self.store.descriptor(snapshot)?;
        let mut roles = descriptor.images.iter().map(|image| &image.role);
        let is_it = |role: &&Role| matches!(role, Role::Disk(name) if name.as_str() == disk);
        let role = roles.find(is_it).ok_or_else(|| SnapshotError::HasNoDisk {
            name: snapshot.to_owned(),
            disk: disk.to_owned(),
        })?;
        self.disk_of(&self.store.open_chain(snapshot, role)?)
    }
}

impl StoredBases for Snapshots {
    fn disk(&self, snapshot: &str, disk: &str) -> Result<DiskImage, StoredError> {
        self.disk_by_name(snapshot, disk).map_err(|error| {
            let ErrorBody { code, cause, remedy, message } = error.to_body(String::new());
            StoredError { code, cause: cause.unwrap_or(message), remedy }
        })
    }

    fn image(&self, id: ImageId) -> Option<DiskImage> {
        self.disk_by_id(id).unwrap_or_else(|error| {
            let error = vmfork_host::error::chain(&error);
            tracing::warn!(%id, error, "a stored disk that a disk lies on can't be opened");
            None
        })
    }
}

fn top(chain: &[StoredImage]) -> Result<&StoredImage, SnapshotError> {
    chain.first().ok_or(SnapshotError::Empty)
}

/// A VM without its disks, or with others, is not the one that was stored.
fn check_roles(descriptor: &Descriptor, facts: &Facts) -> Result<(), SnapshotError> {
    let is_known = |role: &Role| match role {
        Role::Memory => true,
        Role::Disk(name) => facts.spec().disks().any(|(_, disk)| disk.name == name.as_str()),
    };
    match descriptor.images.iter().find(|image| !is_known(&image.role)) {
        None => Ok(()),
        Some(image) => Err(SnapshotError::OtherImage {
            name: descriptor.name.clone(),
            role: image.role.clone(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use vmfork_image::{PageIdx, PageRange};
    use vmfork_store::{BaseRef, Compression, Draft, ImageDraft, Store, Work};

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
                images: vec![ImageDraft {
                    role: Role::Memory,
                    bytes: PAGES * PAGE_BYTES,
                    base: base.take(),
                    extents: vec![(own, Extent::Own)],
                    compression: Compression::None,
                    chunk_pages: 64,
                    keep_zero_pages: false,
                }],
                state: b"state".to_vec(),
                vm: serde_json::to_value(Facts::of_a_test(PAGES * PAGE_BYTES)).expect("plain"),
            };
            let read = |_: &Role, _: PageRange, bytes: &mut [u8]| -> io::Result<()> {
                bytes.fill(7);
                Ok(())
            };
            let made = store.create(draft, &read, &Work::new(1)).expect("created");
            base = Some(BaseRef { name: name.to_owned(), id: made.id, role: Role::Memory });
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

    #[tokio::test(flavor = "multi_thread")]
    async fn what_no_vm_can_be_given_is_refused_with_a_remedy() {
        let host = Host::start().await;
        let snapshots = &Snapshots::new(&host.folder().join("snapshots")).expect("made");
        let image = |role: &str| ImageDraft {
            role: role.parse().expect("a role"),
            bytes: PAGES * PAGE_BYTES,
            base: None,
            extents: Vec::new(),
            compression: Compression::None,
            chunk_pages: 64,
            keep_zero_pages: false,
        };
        for (name, roles, says, remedy) in [
            ("disk", &["disk:data"][..], "has no image of role `memory`", "snapshot inspect disk"),
            ("both", &["memory", "disk:data"], "an image of role `disk:data`", "another snapshot"),
            ("less", &["memory"], "no image of 4096 bytes for its VM's disk `data`", "verify less"),
            ("size", &["memory", "disk:data"], "no image of 4096 bytes", "verify size"),
        ] {
            let mut facts = Facts::of_a_test(PAGES * PAGE_BYTES);
            if matches!(name, "less" | "size") {
                let disk = r#"{"role": "disk", "name": "data", "size_bytes": 4096}"#;
                let disk = serde_json::from_str(disk).expect("a disk");
                facts.inherited.spec.drives.push(disk);
            }
            let draft = Draft {
                name: name.to_owned(),
                id: None,
                images: roles.iter().copied().map(image).collect(),
                state: b"state".to_vec(),
                vm: serde_json::to_value(&facts).expect("plain"),
            };
            let none = |_: &Role, _: PageRange, _: &mut [u8]| Err(io::Error::other("no page"));
            snapshots.store.create(draft, &none, &Work::new(1)).expect("created");
            let error = snapshots.open(&host.core, name).expect_err("refused").to_body("start it");
            assert_eq!(error.code, vmfork_api::ErrorCode::Conflict, "{error:?}");
            assert!(error.cause.as_ref().is_some_and(|text| text.contains(says)), "{error:?}");
            assert!(error.remedy.as_ref().is_some_and(|text| text.contains(remedy)), "{error:?}");
            let detail = snapshots.detail(&host.core, name).expect("can be looked at");
            let images = detail.images.iter().map(|image| (image.role, image.device.as_deref()));
            let told: Vec<_> = images
                .map(|(role, device)| match role {
                    vmfork_api::ImageRole::Memory => "memory".to_owned(),
                    vmfork_api::ImageRole::Disk => format!("disk:{}", device.unwrap_or("")),
                })
                .collect();
            assert_eq!(told, roles);
            assert!(detail.images.iter().all(|image| image.bytes == PAGES * PAGE_BYTES));
        }
    }
}
