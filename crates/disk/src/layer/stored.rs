//! A layer in its folder, with what it holds on the account of its set.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmfork_image::{ImageId, PAGE_BYTES, PageIdx, PageRange};

use super::files::{LayerError, LayerFiles, Partly};
use super::folder::LayerFolder;
use super::map::{CHUNK_BYTES, LayerMap, PageState};
use crate::lower::OwnPages;
use crate::space::Charge;

/// A layer. The image that is frozen from it has its name.
#[derive(Debug)]
pub(crate) struct StoredLayer {
    id: ImageId,
    files: LayerFiles,
    /// Shared with the layer that this one has grown from.
    place: Arc<Place>,
}

#[derive(Debug)]
struct Place {
    /// The disk that made it.
    disk: ImageId,
    charge: Charge,
    folder: LayerFolder,
    /// Its note survives the host, too.
    durable: AtomicBool,
    /// What was written may be lost: a sync failed. Linux tells that once, so it is kept here.
    lost: AtomicBool,
}

impl StoredLayer {
    pub(crate) fn new(
        (id, disk): (ImageId, ImageId),
        files: LayerFiles,
        folder: LayerFolder,
        charge: Charge,
    ) -> Self {
        Self {
            id,
            files,
            place: Arc::new(Place {
                disk,
                charge,
                folder,
                durable: AtomicBool::new(false),
                lost: AtomicBool::new(false),
            }),
        }
    }

    pub(crate) fn id(&self) -> ImageId {
        self.id
    }

    /// The ID of the disk that made it.
    pub(crate) fn disk(&self) -> ImageId {
        self.place.disk
    }

    pub(crate) fn map(&self) -> &LayerMap {
        self.files.map()
    }

    pub(crate) fn folder(&self) -> &LayerFolder {
        &self.place.folder
    }

    pub(crate) fn charge(&self) -> &Charge {
        &self.place.charge
    }

    /// The same layer with room for more pages. This one must not be written any more.
    pub(crate) fn grown(&self, size_bytes: u64) -> Result<Self, LayerError> {
        let files = self
            .files
            .grown(size_bytes.div_ceil(PAGE_BYTES))
            .map_err(|source| LayerError::File { path: self.folder().path().to_owned(), source })?;
        Ok(Self { id: self.id, files, place: Arc::clone(&self.place) })
    }

    /// Reserve what `range` needs, write, and settle by what was really written.
    fn charged(
        &self,
        range: PageRange,
        write: impl FnOnce() -> Result<u64, Partly>,
    ) -> io::Result<()> {
        let map = self.map();
        self.charge().room(map.chunks_missing(range) * CHUNK_BYTES)?;
        let reserved = range.len() - map.written(range);
        self.charge().take(reserved)?;
        let (new, outcome) = split(write());
        // A trim at the same time may have made more of them new: they count, whatever the quota.
        self.charge().add(new.saturating_sub(reserved));
        self.charge().give(reserved.saturating_sub(new));
        outcome
    }

    pub(crate) fn write(&self, range: PageRange, bytes: &[u8]) -> io::Result<()> {
        self.charged(range, || self.files.write(range.start(), bytes))
    }

    pub(crate) fn write_part(
        &self,
        page: PageIdx,
        (at, part): (usize, &[u8]),
        rest: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.charged(page.range(), || self.files.write_part(page, at, part, rest))
    }

    /// Write pages that a layer has already, which this one is to replace. The floor counts them.
    /// The quota does not: see [`StoredLayer::count_copies`].
    pub(crate) fn copy_in(&self, range: PageRange, bytes: &[u8]) -> io::Result<()> {
        let map_bytes = self.map().chunks_missing(range) * CHUNK_BYTES;
        self.charge().room(map_bytes + range.byte_len())?;
        split(self.files.write(range.start(), bytes)).1
    }

    /// All that was copied into it is on the account from now on, whatever the quota is.
    pub(crate) fn count_copies(&self) {
        self.charge().add(self.map().count(PageState::Written));
    }

    pub(crate) fn zero(&self, range: PageRange) -> io::Result<()> {
        let (written, outcome) = split(self.files.zero(range));
        self.charge().give(written);
        outcome
    }

    pub(crate) fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.files.read(offset_bytes, bytes)
    }

    /// What was written survives the host from now on. The first time, so does the layer itself:
    /// what needs it waits for the medium, and not what makes it.
    ///
    /// # Errors
    /// The medium's. After one, every later sync of the layer fails. What was written before may be
    /// lost, and a later success of the medium does not change that.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if self.place.lost.load(Ordering::Acquire) {
            let text = format!(
                "an earlier sync of layer {} failed: what was written may be lost",
                self.id
            );
            return Err(io::Error::other(text));
        }
        let kept = |outcome: io::Result<()>| {
            outcome.inspect_err(|_| self.place.lost.store(true, Ordering::Release))
        };
        kept(self.files.sync())?;
        // A note or a table that is written meanwhile finds the layer durable, or is synced here.
        let _written = self.folder().writing();
        if !self.is_durable() {
            let folder = self.folder().path();
            let (note, table) = (folder.join("note"), folder.join("table"));
            for path in [&note, &table, folder, folder.parent().unwrap_or(folder)] {
                match File::open(path) {
                    Ok(file) => kept(file.sync_all())?,
                    Err(error) if *path == table && error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            self.place.durable.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether it was [synced](StoredLayer::sync) once.
    pub(crate) fn is_durable(&self) -> bool {
        self.place.durable.load(Ordering::Acquire)
    }
}

/// What was done, and how it ended.
fn split(outcome: Result<u64, Partly>) -> (u64, io::Result<()>) {
    match outcome {
        Ok(pages) => (pages, Ok(())),
        Err(Partly { pages, error }) => (pages, Err(error)),
    }
}

impl OwnPages for StoredLayer {
    fn is_here(&self, _: PageRange) -> bool {
        true
    }

    fn owned(&self, range: PageRange, found: &mut dyn FnMut(PageRange)) {
        let written = self.map().runs(range).filter(|(_, state)| *state == PageState::Written);
        written.for_each(|(run, _)| found(run));
    }

    fn file(&self) -> Option<&Arc<File>> {
        Some(self.files.data())
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.files.read(range.byte_offset(), bytes)
    }
}

#[cfg(test)]
#[path = "stored_tests.rs"]
mod tests;
