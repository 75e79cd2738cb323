//! Disks of stored snapshots.
//!
//! ```text
//!   create  DiskContent ─► FrozenDisk ─► an image of role disk:NAME
//!   open    its chain, each a delta on the next ─► StoredDisk ─► DiskImage ─► VMs' disks
//! ```
//!
//! A stored disk is one image of disks, with one ID, however long its chain is. What lies on it
//! finds its bytes by that ID: after a restart, and after the snapshot was flattened. It is read
//! page by page from the chunks of the store, by threads that may wait.
//!
//! Promises: what is read was verified. As long as a disk may read from it, its chunks stay.
//!
//! Left to others: layers (`vmfork-disk`), which files a chunk is in (`vmfork-store`).

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use vmfork_disk::{DiskImage, Lower, OwnPages};
use vmfork_host::disks::{DiskContent, DiskSpec};
use vmfork_host::error::chain;
use vmfork_host::vm::{DriveSpec, MachineSpec};
use vmfork_image::{ImageId, PageRange, PageSource, PageTable, Source};
use vmfork_policy::{Recorder, RecorderConfig, Recording};
use vmfork_store::{BaseRef, Extent, Role, SnapshotId, StoredImage, StoredPages};

use crate::bases::Base;
use crate::error::SnapshotError;

/// What a disk of a stored snapshot is called among the images of disks, in each daemon's life.
pub(super) fn image_id(snapshot: SnapshotId, role: &Role) -> ImageId {
    let hash = blake3::hash(format!("{snapshot} {role}").as_bytes());
    let mut word = [0; 8];
    word.copy_from_slice(&hash.as_bytes()[..8]);
    ImageId::new(u64::from_le_bytes(word)).unwrap_or(ImageId::from(std::num::NonZeroU64::MIN))
}

/// A disk of a VM that was frozen, to be stored.
#[derive(Debug)]
pub(super) struct FrozenDisk {
    pub(super) role: Role,
    pub(super) image: DiskImage,
    pub(super) table: PageTable,
    content: DiskContent,
}

impl FrozenDisk {
    /// All disks of a VM. Blocking: waits for page tables.
    ///
    /// # Errors
    /// A shared volume can't be frozen, or there is no table.
    pub(super) fn all(contents: &[DiskContent]) -> Result<Vec<Self>, SnapshotError> {
        let one = |content: &DiskContent| {
            let image = content.whole()?;
            let table = image.table_soon().ok_or(SnapshotError::NoTable)?.clone();
            let role = Role::Disk(content.spec.name.parse()?);
            Ok(Self { role, image, table, content: content.clone() })
        };
        contents.iter().map(one).collect()
    }

    /// Pages as they were at the freeze.
    ///
    /// # Errors
    /// They can't be read; or a client's file has changed, so that they may be others.
    pub(super) fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.image.read(range, bytes)?;
        self.content.check_base().map_err(io::Error::other)
    }
}

/// The disks of VMs that are started from a snapshot, in place of those that its VM had.
pub(super) fn put_specs(spec: &mut MachineSpec, contents: &[DiskContent]) {
    let mut stored = contents
        .iter()
        .map(|content| DiskSpec { size_bytes: content.stored_bytes(), ..content.stored_spec() });
    for drive in &mut spec.drives {
        if let DriveSpec::Disk(disk) = drive
            && let Some(stored) = stored.next()
        {
            *disk = stored;
        }
    }
}

/// The content of a stored disk, and what lives as long as something reads from that.
///
/// # Errors
/// Its tables do not fit each other.
pub(super) fn image_of(
    chain: &[StoredImage],
    layers: Vec<Arc<StoredPages>>,
) -> Result<(DiskImage, Weak<StoredDisk>), SnapshotError> {
    let top = chain.first().ok_or(SnapshotError::Empty)?;
    let (snapshot, role) = (top.stored().descriptor(), &top.image().role);
    let id = image_id(snapshot.id, role);
    let disk = StoredDisk::new(id, snapshot.name.clone(), chain, layers)?;
    let table = disk.seen()?;
    let disk = Arc::new(disk);
    let is_read = Arc::downgrade(&disk);
    let own: Arc<dyn OwnPages> = disk;
    let image = DiskImage::from_table(id, top.image().bytes, table, BTreeMap::from([(id, own)]))?;
    Ok((image, is_read))
}

/// Where the pages of a stored disk are.
#[derive(Debug)]
pub(super) struct StoredDisk {
    id: ImageId,
    /// The snapshot and the disk, for messages.
    snapshot: String,
    role: Role,
    /// The snapshot, and those that its disk is a delta on.
    chain: Vec<SnapshotId>,
    /// Whose own each page is, as a number in `layers`, from 1 on.
    table: PageTable,
    /// The disk itself first, then what it is a delta on.
    layers: Vec<Arc<StoredPages>>,
    /// What is read of it, if that is recorded.
    watch: OnceLock<Arc<Watch>>,
}

/// Records what is read of a disk, and when.
#[derive(Debug)]
pub(super) struct Watch {
    began: Instant,
    is_over: AtomicBool,
    recorder: Mutex<Option<Recorder>>,
}

impl Watch {
    fn new(table: PageTable) -> Self {
        let recorder = Recorder::new(table, RecorderConfig::default());
        let (is_over, recorder) = (AtomicBool::new(false), Mutex::new(Some(recorder)));
        Self { began: Instant::now(), is_over, recorder }
    }

    /// These pages are read now. → whether the recording goes on.
    pub(super) fn saw(&self, range: Option<PageRange>) -> bool {
        if self.is_over.load(Ordering::Relaxed) {
            return false;
        }
        let at = self.began.elapsed();
        if let Some(range) = range {
            let at_us = at.as_micros();
            tracing::trace!(target: "vmfork_snapshots::reads", %range, at_us, "reads");
        }
        let mut recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(recorder) = &mut *recorder else { return false };
        recorder.observe(at, range);
        self.is_over.store(recorder.end().is_some(), Ordering::Relaxed);
        recorder.end().is_none()
    }

    /// What was recorded. Nothing is from now on.
    pub(super) fn finish(&self) -> Recording {
        self.is_over.store(true, Ordering::Relaxed);
        let recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner).take();
        recorder.map(Recorder::finish).unwrap_or_default()
    }
}

impl StoredDisk {
    fn new(
        id: ImageId,
        snapshot: String,
        chain: &[StoredImage],
        layers: Vec<Arc<StoredPages>>,
    ) -> Result<Self, SnapshotError> {
        let top = chain.first().ok_or(SnapshotError::Empty)?.image();
        let mut table = PageTable::uniform(top.pages(), Source::Zero);
        for (number, image) in (1..).zip(chain).collect::<Vec<_>>().into_iter().rev() {
            let own = ImageId::new(number).ok_or(SnapshotError::Empty)?;
            let runs = image.extents().map(|(run, extent)| match extent {
                Extent::Own => (run, Source::Image(own)),
                Extent::Zero => (run, Source::Zero),
            });
            table = table.derive(runs).map_err(SnapshotError::Table)?;
        }
        let chain = chain.iter().map(|image| image.stored().descriptor().id).collect();
        let (role, watch) = (top.role.clone(), OnceLock::new());
        Ok(Self { id, snapshot, role, chain, table, layers, watch })
    }

    /// As layers that lie on it call it.
    pub(super) fn id(&self) -> ImageId {
        self.id
    }

    /// What disks on it see: whose own its pages are.
    fn seen(&self) -> Result<PageTable, SnapshotError> {
        let zeros = PageTable::uniform(self.table.pages(), Source::Zero);
        let data = self.table.runs(self.table.range());
        let data = data.filter(|(_, source)| *source != Source::Zero);
        let table = zeros.derive(data.map(|(run, _)| (run, Source::Image(self.id))));
        table.map_err(SnapshotError::Table)
    }

    /// What a delta on it is written on.
    ///
    /// # Errors
    /// Its table does not fit.
    pub(super) fn base(&self) -> Result<Base, SnapshotError> {
        let id = *self.chain.first().ok_or(SnapshotError::Empty)?;
        let at = BaseRef { name: self.snapshot.clone(), id, role: self.role.clone() };
        Ok(Base { at, table: self.seen()? })
    }

    /// Whether it is a disk of the snapshot `id`.
    pub(super) fn is_of(&self, id: SnapshotId) -> bool {
        self.chain.first() == Some(&id)
    }

    /// Whether it may need pages of the snapshot `id`.
    pub(super) fn needs(&self, id: SnapshotId) -> bool {
        self.chain.contains(&id)
    }

    /// Record from now on what is read of it. `None`: that is done already.
    pub(super) fn watch(&self) -> Option<Arc<Watch>> {
        let watch = Arc::new(Watch::new(self.table.clone()));
        self.watch.set(Arc::clone(&watch)).is_ok().then_some(watch)
    }

    pub(super) fn pages(&self) -> u64 {
        self.table.pages()
    }

    /// `None`: zeros.
    fn layer(&self, source: Source) -> Option<&StoredPages> {
        let number = usize::try_from(source.image()?.get()).ok()?;
        self.layers.get(number.checked_sub(1)?).map(|layer| &**layer)
    }
}

impl OwnPages for StoredDisk {
    fn is_here(&self, range: PageRange) -> bool {
        let mut runs = self.table.runs(range);
        runs.all(|(run, source)| self.layer(source).is_none_or(|layer| layer.is_hot(run)))
    }

    fn owned(&self, range: PageRange, found: &mut dyn FnMut(PageRange)) {
        let data = self.table.runs(range.intersect(&self.table.range()));
        data.filter(|(_, source)| *source != Source::Zero).for_each(|(run, _)| found(run));
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        if let Some(watch) = self.watch.get() {
            watch.saw(Some(range));
        }
        let mut rest = bytes;
        for (run, source) in self.table.runs(range) {
            let len = usize::try_from(run.byte_len()).unwrap_or(usize::MAX);
            let parts = std::mem::take(&mut rest).split_at_mut_checked(len);
            let (part, after) = parts.ok_or(io::ErrorKind::InvalidInput)?;
            rest = after;
            match self.layer(source) {
                Some(layer) => layer.read(run, part).map_err(|error| self.failed(run, &error))?,
                None => part.fill(0),
            }
        }
        Ok(())
    }
}

impl StoredDisk {
    fn failed(&self, run: PageRange, error: &io::Error) -> io::Error {
        let Self { snapshot, role, .. } = self;
        let text = format!("pages {run} of `{role}` of snapshot `{snapshot}`: {}", chain(error));
        io::Error::new(error.kind(), text)
    }
}

#[cfg(test)]
#[path = "disks_tests.rs"]
mod tests;
