//! What VMs read of guest images, and in which order images are fetched because of that.
//!
//! ```text
//!   a VM, or a client, begins to read a stored root ─► Watch ─► Recording ─► ImageProfiles
//!                  │                                                            │   │
//!                  └─► the rest of it comes, by the workload's profile ◄────────┘   └─► the store,
//!                                                                   for hosts that pull the image
//! ```
//!
//! After vmTorrent (CoNEXT 2012, §2.2.3): a profile belongs to an image and a workload, and each
//! run refines it. The label `workload` of a VM names its workload.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use vmfork_api::{ErrorBody, ImageProfile, Labels, WorkloadProfile};
use vmfork_guest_image::Metadata;
use vmfork_image::PageRange;
use vmfork_policy::{ImageProfiles, Profile, Recording};
use vmfork_store::{Missing, Role, SnapshotId, Store, StoreError};

use crate::disks::StoredDisk;
use crate::error::{GuestImageError, SnapshotError};
use crate::kind::{ROOT_DISK, is_guest_image};
use crate::library::{Library, Snapshots};
use crate::placing::Pulling;
use crate::transfer::resume;
use vmfork_host::disks::DiskContent;
use vmfork_host::error::chain;

/// The label that names what a VM does with its image.
const WORKLOAD_LABEL: &str = "workload";
/// What VMs without that label do.
const DEFAULT_WORKLOAD: &str = "default";
/// Pages whose reads count together: what the kernel reads ahead at least.
const CLUSTER_PAGES: u64 = 16;
/// A part of the image that at least this share of the runs read comes before the others that some
/// run read.
const FREQUENCY_MIN: f64 = 0.5;
/// How often is looked whether a recording is over.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Stored images whose runs are remembered.
const RUNS_KNOWN_MAX: usize = 1024;
/// A recording counts from this on: what a shorter one did not read is not unused.
const WORTH: Duration = Duration::from_secs(5);

/// What a VM with these labels does.
#[must_use]
pub fn workload_of(labels: &Labels) -> &str {
    labels.get(WORKLOAD_LABEL).filter(|name| !name.is_empty()).unwrap_or(DEFAULT_WORKLOAD)
}

impl Library {
    /// A VM is asked for whose disks hold `contents`, and that runs this workload of an image. If
    /// the root is in the store, what it reads of it is recorded. What is not here yet comes, first
    /// what the workload is known to read.
    pub fn image_is_used(self: &Arc<Self>, image: &str, workload: &str, contents: &[DiskContent]) {
        let Some((metadata, stored, id)) = tokio::task::block_in_place(|| self.stored_root(image))
        else {
            return;
        };
        self.record_use(metadata.clone(), id, workload, contents);
        self.fetch_rest(metadata, (stored, id), Some(workload.to_owned()));
    }

    /// A client reads the root of an image. What it reads says nothing of VMs.
    pub fn image_is_read(self: &Arc<Self>, image: &str) {
        if let Some((metadata, stored, id)) =
            tokio::task::block_in_place(|| self.stored_root(image))
        {
            self.fetch_rest(metadata, (stored, id), None);
        }
    }

    /// An image whose root is in the store: what it is there.
    fn stored_root(&self, image: &str) -> Option<(Metadata, String, SnapshotId)> {
        let metadata = self.core.images.metadata(image).ok()?;
        let stored = metadata.root_stored.clone()?;
        let id = self.snapshots.store.descriptor(&stored).ok()?.id;
        Some((metadata, stored, id))
    }

    /// Have the rest of it come, if it does not: first what the workload reads.
    fn fetch_rest(
        self: &Arc<Self>,
        metadata: Metadata,
        (stored, id): (String, SnapshotId),
        workload: Option<String>,
    ) {
        let library = Arc::clone(self);
        // Another store is asked, and a VM does not wait for that.
        drop(tokio::task::spawn_blocking(move || match resume(&library, (&stored, id)) {
            Ok(pull) => {
                if let Some(missing) = pull.and_then(|pull| pull.missing())
                    && let Some(workload) = workload
                {
                    prefer(&missing, id, &library.profiles(&metadata), &workload);
                }
            }
            Err(error) => {
                let (image, error) = (metadata.name, chain(&error));
                tracing::warn!(image, error, "the rest of it does not come");
            }
        }));
    }

    /// Record what a VM reads of the root, and learn from it.
    fn record_use(
        self: &Arc<Self>,
        metadata: Metadata,
        id: SnapshotId,
        workload: &str,
        contents: &[DiskContent],
    ) {
        let owners = contents.iter().flat_map(|content| content.image.owners());
        let owners: Vec<_> = owners.map(|(_, own)| Arc::as_ptr(own).cast::<()>()).collect();
        let disks = self.snapshots.open_ones().stored_disks();
        let is_its = |disk: &&Arc<StoredDisk>| {
            disk.is_of(id) && owners.contains(&Arc::as_ptr(disk).cast::<()>())
        };
        let Some(disk) = disks.iter().find(is_its) else { return };
        let Some(watch) = disk.watch() else { return };
        let (pages, disk) = (disk.pages(), Arc::downgrade(disk));
        let (weak, workload) = (Arc::downgrade(self), workload.to_owned());
        self.snapshots.runtime.spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                if !watch.saw(None) || disk.strong_count() == 0 {
                    break;
                }
            }
            let Some(library) = weak.upgrade() else { return };
            let learnt = tokio::task::spawn_blocking(move || {
                library.learn_use(&metadata, &workload, pages, &watch.finish())
            });
            if let Ok(Err(error)) = learnt.await {
                let error = chain(&error);
                tracing::warn!(error, "what a VM read of its image is not kept");
            }
        });
    }

    fn learn_use(
        &self,
        metadata: &Metadata,
        workload: &str,
        pages: u64,
        recording: &Recording,
    ) -> Result<(), SnapshotError> {
        let _turn = self.snapshots.learning.lock().unwrap_or_else(PoisonError::into_inner);
        let mut profiles = self.profiles(metadata);
        let is_whole = recording.end().is_some() || recording.until() >= WORTH;
        if recording.pages() == 0 || !(is_whole || profiles.get(workload).is_none()) {
            return Ok(());
        }
        let learnt = profiles.learn(workload, (pages, CLUSTER_PAGES), recording);
        learnt.map_err(SnapshotError::Profile)?;
        if self.keep_profiles(metadata, &profiles)? {
            tracing::info!(
                image = metadata.name,
                workload,
                runs = profiles.get(workload).map_or(0, Profile::runs),
                pages = recording.pages(),
                recorded_ms = recording.until().as_millis(),
                "image profile stored"
            );
        }
        Ok(())
    }

    /// Those that came with what is stored of an image: learnt from more runs, or none are here.
    pub(crate) fn take_profiles(&self, metadata: &Metadata, stored: &str) {
        let _turn = self.snapshots.learning.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(profiles) = self.snapshots.profiles_of(stored) else { return };
        if profiles.runs() <= self.profiles(metadata).runs() {
            return;
        }
        if let Err(error) = self.keep_profiles(metadata, &profiles) {
            let (image, error) = (&metadata.name, chain(&error));
            tracing::warn!(image, error, "the profiles that came with it are not kept");
        }
    }

    /// What is known of an image's use. Profiles that cannot be read begin again: they are a help
    /// and no more.
    pub(crate) fn profiles(&self, metadata: &Metadata) -> ImageProfiles {
        let (image, begun) = (&metadata.name, "its profiles begin again");
        let bytes = self.core.images.profiles(image).unwrap_or_else(|error| {
            tracing::warn!(image, error = chain(&error), "{begun}");
            Vec::new()
        });
        if bytes.is_empty() {
            return ImageProfiles::new();
        }
        ImageProfiles::decode(&bytes).unwrap_or_else(|error| {
            tracing::warn!(image, %error, "{begun}");
            ImageProfiles::new()
        })
    }

    /// Keep them with the image, and with the copy that other hosts pull. → whether the image is
    /// still that one.
    pub(crate) fn keep_profiles(
        &self,
        metadata: &Metadata,
        profiles: &ImageProfiles,
    ) -> Result<bool, SnapshotError> {
        let failed = |error| SnapshotError::from(GuestImageError::Images(Box::new(error)));
        let now = match self.core.images.metadata(&metadata.name) {
            // It was removed meanwhile.
            Err(vmfork_guest_image::StoreError::NotFound { .. }) => return Ok(false),
            now => now.map_err(failed)?,
        };
        if let Some(stored) = now.stored().filter(|_| now.files == metadata.files) {
            self.snapshots.put_profiles(stored, profiles)?;
        }
        self.core.images.set_profiles(metadata, &profiles.encode()).map_err(failed)
    }
}

impl Library {
    /// What is known of how VMs use an image. Blocking: reads a file.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn image_profile(&self, image: &str) -> Result<ImageProfile, ErrorBody> {
        let metadata = self.core.images.metadata(image).map_err(|error| {
            SnapshotError::from(GuestImageError::Images(Box::new(error)))
                .to_body(format!("look at the profile of image `{image}`"))
        })?;
        let profiles = self.profiles(&metadata);
        Ok(ImageProfile { workloads: profiles.iter().map(shown).collect() })
    }

    /// Forget it. Blocking: writes a file.
    ///
    /// # Errors
    /// There is none of that name, or its folder cannot be changed.
    pub fn reset_image_profile(&self, image: &str) -> Result<(), ErrorBody> {
        let _turn = self.snapshots.learning.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |error| SnapshotError::from(GuestImageError::Images(Box::new(error)));
        let metadata = self.core.images.metadata(image).map_err(failed);
        let reset = metadata.and_then(|it| self.keep_profiles(&it, &ImageProfiles::new()));
        reset
            .map(drop)
            .map_err(|error| error.to_body(format!("reset the profile of image `{image}`")))
    }
}

fn shown((workload, profile): (&str, &Profile)) -> WorkloadProfile {
    let often = profile.clusters().filter(|cluster| cluster.frequency >= FREQUENCY_MIN);
    let mut often: Vec<_> = often.collect();
    often.sort_by_key(|cluster| cluster.first_access);
    let bytes = |pages: u64| pages * vmfork_image::PAGE_BYTES;
    let half = often.get(often.len() / 2).map_or(Duration::ZERO, |cluster| cluster.first_access);
    WorkloadProfile {
        workload: workload.to_owned(),
        runs: profile.runs(),
        read_bytes: bytes(often.iter().map(|cluster| cluster.pages.len()).sum()),
        read_bytes_any: bytes(profile.clusters().map(|cluster| cluster.pages.len()).sum()),
        half_ms: vmfork_fork::ms(half),
    }
}

/// Put profiles beside what a store has of an image, if they were learnt from more runs than those
/// there. That is a help and no more: it is logged if it fails.
pub(crate) fn offer_profiles(store: &Store, name: &str, profiles: &ImageProfiles) {
    let offer = || {
        let there = store.profile(name, &root_role()?)?;
        let there = there.and_then(|bytes| ImageProfiles::decode(&bytes).ok());
        if profiles.runs() > there.map_or(0, |there| there.runs()) {
            store.put_profile(name, &root_role()?, &profiles.encode())?;
        }
        Ok::<_, SnapshotError>(())
    };
    match offer() {
        // An image without a root.
        Ok(()) | Err(SnapshotError::Store(StoreError::NoImage { .. })) => {}
        Err(error) => {
            let (place, error) = (store.describe(), chain(&error));
            tracing::warn!(image = name, place, error, "its profiles are not put there");
        }
    }
}

fn root_role() -> Result<Role, SnapshotError> {
    Ok(Role::Disk(ROOT_DISK.parse()?))
}

impl Snapshots {
    /// Profiles go with what is stored of an image; none, if they are empty.
    fn put_profiles(&self, stored: &str, profiles: &ImageProfiles) -> Result<(), SnapshotError> {
        let descriptor = match self.store.descriptor(stored) {
            // It was removed meanwhile.
            Err(StoreError::NotFound { .. }) => return Ok(()),
            descriptor => descriptor?,
        };
        let role = root_role()?;
        if descriptor.image(&role).is_none() {
            return Ok(());
        }
        match profiles.runs() {
            0 => self.store.remove_profile(stored)?,
            _ => self.store.put_profile(stored, &role, &profiles.encode())?,
        }
        self.profile_runs().insert(descriptor.id, profiles.runs());
        Ok(())
    }

    /// How many runs the profiles of a stored image were learnt from.
    pub(crate) fn runs_of(&self, stored: &str, id: SnapshotId) -> u32 {
        if let Some(known) = self.profile_runs().get(&id) {
            return *known;
        }
        let runs = self.profiles_of(stored).map_or(0, |profiles| profiles.runs());
        let mut known = self.profile_runs();
        if known.len() >= RUNS_KNOWN_MAX {
            known.clear();
        }
        known.insert(id, runs);
        runs
    }

    /// The profiles that came with what is stored of an image.
    pub(crate) fn profiles_of(&self, stored: &str) -> Option<ImageProfiles> {
        let bytes = match self.store.profile(stored, &root_role().ok()?) {
            Ok(bytes) => bytes?,
            Err(StoreError::NoImage { .. }) => return None,
            Err(error) => {
                tracing::warn!(stored, %error, "its profiles are not used");
                return None;
            }
        };
        let profiles = ImageProfiles::decode(&bytes);
        profiles.inspect_err(|error| tracing::warn!(stored, %error, "no profiles")).ok()
    }

    /// What a pull is to fetch, and first what its profiles say.
    ///
    /// # Errors
    /// What is here of it is damaged. The pull has failed with that.
    pub(crate) fn plan(
        &self,
        name: &str,
        pull: Pulling,
        message: &str,
    ) -> Result<Pulling, SnapshotError> {
        match self.missing(name) {
            Ok(missing) => {
                pull.under_way.plan(Some(missing));
                Ok(pull)
            }
            Err(error) => {
                pull.ends(Some(&error), message.to_owned());
                Err(error)
            }
        }
    }

    fn missing(&self, name: &str) -> Result<Missing, SnapshotError> {
        let missing = self.store.missing(name, self.salt)?;
        let descriptor = self.store.descriptor(name)?;
        if is_guest_image(&descriptor) {
            let profiles = self.profiles_of(name).unwrap_or_default();
            // That of the most runs goes first.
            let mut all: Vec<_> = profiles.iter().collect();
            all.sort_by_key(|(_, profile)| profile.runs());
            all.into_iter()
                .for_each(|(_, profile)| prefer_profile(&missing, descriptor.id, profile));
            // No VM boots before it has the kernel and the initrd.
            let root = root_role()?;
            for image in descriptor.images.iter().filter(|image| image.role != root) {
                missing.prefer(descriptor.id, &image.role, &[PageRange::first(image.pages())]);
            }
        } else if descriptor.image(&Role::Memory).is_some()
            && let Ok(Some(set)) = self.store.working_set(name, &Role::Memory)
        {
            missing.prefer(descriptor.id, &Role::Memory, set.runs());
        }
        Ok(missing)
    }
}

/// What this workload reads comes first; of one that is not known, what most runs read.
fn prefer(missing: &Missing, id: SnapshotId, profiles: &ImageProfiles, workload: &str) {
    let most = || profiles.iter().map(|(_, profile)| profile).max_by_key(|it| it.runs());
    if let Some(profile) = profiles.get(workload).or_else(most) {
        prefer_profile(missing, id, profile);
    }
}

fn prefer_profile(missing: &Missing, id: SnapshotId, profile: &Profile) {
    let Ok(role) = ROOT_DISK.parse().map(Role::Disk) else { return };
    let all = |frequency: f64| -> Vec<PageRange> { profile.working_set(frequency, u64::MAX) };
    missing.prefer(id, &role, &all(0.0));
    missing.prefer(id, &role, &all(FREQUENCY_MIN));
}
