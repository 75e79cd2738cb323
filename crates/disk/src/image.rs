//! The content of a disk at one instant: immutable.
//!
//! ```text
//!   at the freeze       own layer's map ──absent──► lower image ──► … ──► base
//!   after `flatten`     page table ──► pages of the images that it names
//! ```
//!
//! The first form is made in O(1). The second is derived in the background from the lower image's
//! table and the layer's map. It drops the link to the lower image. It keeps the own pages of
//! those images alone that the table names. A table may also name layers that are no image's: pages
//! of several layers are copied into one, before a table is made public.
//!
//! Promises: both forms say the same. Once it is flat, a read costs one lookup at any depth. No
//! read and no drop recurses, however long a chain of images that are not flat yet is.
//!
//! Left to others: where layers are kept ([`crate::DiskStore`]); when to derive.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use vmfork_image::{ImageId, PAGE_BYTES, PageRange, PageTable, Source};

use crate::layer::{PageState, StoredLayer};
use crate::lower::{Lower, OwnPages, split_mut};
use crate::raw::{RawError, RawFile};

/// How long the background may take for a table: it may be merging layers first.
const TABLE_WAIT: Duration = Duration::from_secs(5);

/// An image that can't be made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error(transparent)]
    Raw(#[from] RawError),
    #[error("`{}` can't be read", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("a name for the image")]
    Name(#[source] io::Error),
    #[error("the page table names image {0}, whose pages were not given")]
    Owner(ImageId),
    #[error("{pages} pages are not the {size_bytes} bytes of the disk")]
    Size { pages: u64, size_bytes: u64 },
}

/// What an image descends from: the end of its chain.
#[derive(Debug, Clone)]
pub enum Base {
    /// Zeros.
    Blank(ImageId),
    /// A raw file.
    Raw(ImageId, Arc<RawFile>),
    /// What the caller gave by [`DiskImage::from_table`].
    Given(ImageId),
}

/// The own pages of images, by name.
pub(crate) type Owners = BTreeMap<ImageId, Arc<dyn OwnPages>>;

/// An immutable content of a disk. A clone is another reference to it.
#[derive(Debug, Clone)]
pub struct DiskImage(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: ImageId,
    size_bytes: u64,
    base: Base,
    /// Of an image that was frozen from a layer. It outlives the table: its folder has the note.
    own: Option<Arc<StoredLayer>>,
    flat: OnceLock<Flat>,
    /// Until it is flat, and its table is stored.
    lower: Mutex<Option<DiskImage>>,
    /// `flat` was set.
    derived: Condvar,
}

/// What a flat image reads by.
#[derive(Debug)]
pub(crate) struct Flat {
    pub(crate) table: PageTable,
    pub(crate) owners: Owners,
}

/// Whether an image exists, without keeping it.
#[derive(Debug, Clone)]
pub(crate) struct WeakImage(Weak<Inner>);

impl WeakImage {
    pub(crate) fn get(&self) -> Option<DiskImage> {
        self.0.upgrade().map(DiskImage)
    }
}

/// Where the bytes of a run are.
#[derive(Clone, Copy)]
enum Place<'a> {
    Zero,
    Pages(&'a dyn OwnPages),
}

impl DiskImage {
    /// Zeros.
    ///
    /// # Errors
    /// The kernel gives no random number for its name.
    pub fn blank(size_bytes: u64) -> Result<Self, ImageError> {
        Ok(Self::blank_as(new_id().map_err(ImageError::Name)?, size_bytes))
    }

    pub(crate) fn blank_as(id: ImageId, size_bytes: u64) -> Self {
        let table = PageTable::uniform(pages_of(size_bytes), Source::Zero);
        Self::flat(id, size_bytes, Base::Blank(id), Flat { table, owners: Owners::new() })
    }

    /// What a raw file has; opened read-only, and used as it is. A size that is no multiple of 512
    /// is rounded up with zeros.
    ///
    /// # Errors
    /// It is no regular file, or can't be read.
    pub fn raw(path: &Path) -> Result<Self, ImageError> {
        Self::raw_as(new_id().map_err(ImageError::Name)?, RawFile::open(path)?)
    }

    pub(crate) fn raw_as(id: ImageId, file: RawFile) -> Result<Self, ImageError> {
        let size_bytes = file.stamp().size_bytes.next_multiple_of(512);
        let data = file
            .data()
            .map_err(|source| ImageError::Read { path: file.path().to_owned(), source })?;
        let written = data.into_iter().map(|run| (run, Source::Image(id)));
        let zeros = PageTable::uniform(pages_of(size_bytes), Source::Zero);
        let file = Arc::new(file);
        let pages: Arc<dyn OwnPages> = Arc::<RawFile>::clone(&file);
        let size = ImageError::Size { pages: zeros.pages(), size_bytes };
        let table = zeros.derive(written).map_err(|_beyond| size)?;
        Ok(Self::flat(
            id,
            size_bytes,
            Base::Raw(id, file),
            Flat { table, owners: [(id, pages)].into() },
        ))
    }

    /// From a page table, and the own pages of the images that it names: of another host, of a
    /// stored snapshot.
    ///
    /// # Errors
    /// The table is not of that size, or names another image.
    pub fn from_table(
        id: ImageId,
        size_bytes: u64,
        table: PageTable,
        owners: BTreeMap<ImageId, Arc<dyn OwnPages>>,
    ) -> Result<Self, ImageError> {
        if table.pages() != pages_of(size_bytes) {
            return Err(ImageError::Size { pages: table.pages(), size_bytes });
        }
        let owners = named(&table, |id| owners.get(&id).cloned()).map_err(ImageError::Owner)?;
        Ok(Self::flat(id, size_bytes, Base::Given(id), Flat { table, owners }))
    }

    fn flat(id: ImageId, size_bytes: u64, base: Base, flat: Flat) -> Self {
        let (flat, lower) = (OnceLock::from(flat), Mutex::new(None));
        let derived = Condvar::new();
        Self(Arc::new(Inner { id, size_bytes, base, own: None, flat, lower, derived }))
    }

    /// What a disk is whose own layer ends here. O(1).
    pub(crate) fn frozen(own: Arc<StoredLayer>, lower: Self, size_bytes: u64) -> Self {
        let (id, base) = (own.id(), lower.0.base.clone());
        let (flat, lower) = (OnceLock::new(), Mutex::new(Some(lower)));
        let (own, derived) = (Some(own), Condvar::new());
        Self(Arc::new(Inner { id, size_bytes, base, own, flat, lower, derived }))
    }

    /// The same, with the table that an earlier daemon stored.
    pub(crate) fn with_table(
        own: Arc<StoredLayer>,
        base: Base,
        size_bytes: u64,
        table: PageTable,
        owner: impl Fn(ImageId) -> Option<Arc<dyn OwnPages>>,
    ) -> Result<Self, ImageError> {
        if table.pages() != pages_of(size_bytes) {
            return Err(ImageError::Size { pages: table.pages(), size_bytes });
        }
        let owners = named(&table, owner).map_err(ImageError::Owner)?;
        let flat = OnceLock::from(Flat { table, owners });
        let (id, lower, derived) = (own.id(), Mutex::new(None), Condvar::new());
        let own = Some(own);
        Ok(Self(Arc::new(Inner { id, size_bytes, base, own, flat, lower, derived })))
    }

    pub fn id(&self) -> ImageId {
        self.0.id
    }

    pub fn size_bytes(&self) -> u64 {
        self.0.size_bytes
    }

    /// What it descends from.
    pub fn base(&self) -> &Base {
        &self.0.base
    }

    /// Whether its base still has the bytes that it had when it was opened.
    pub fn is_unchanged(&self) -> bool {
        match &self.0.base {
            Base::Raw(_, file) => file.is_unchanged(),
            Base::Blank(_) | Base::Given(_) => true,
        }
    }

    /// Its page table, once it is [flat](DiskImage::flatten).
    pub fn table(&self) -> Option<&PageTable> {
        self.0.flat.get().map(|flat| &flat.table)
    }

    /// Its page table, which is derived in the background after a freeze. Waits for that, and
    /// derives it itself after 5 s. `None`: pages have no owner, which is an error of this crate.
    pub fn table_soon(&self) -> Option<&PageTable> {
        let until = Instant::now() + TABLE_WAIT;
        let mut slot = self.lower_slot();
        while self.table().is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.0.derived.wait_timeout(slot, left);
            slot = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(slot);
        self.flatten();
        self.table()
    }

    /// The own pages of the images that its table names, once it is flat.
    pub fn owners(&self) -> impl Iterator<Item = (ImageId, &Arc<dyn OwnPages>)> {
        self.0
            .flat
            .get()
            .into_iter()
            .flat_map(|flat| flat.owners.iter().map(|(id, own)| (*id, own)))
    }

    /// Derive the page table of this image, and before of those below that have none, oldest first.
    /// Takes time for what their layers have.
    pub fn flatten(&self) {
        self.flatten_by(&mut |_, flat| flat);
    }

    /// The same. `edit` may give an image a table by which it has the same bytes from elsewhere.
    pub(crate) fn flatten_by(&self, edit: &mut dyn FnMut(&Self, Flat) -> Flat) {
        self.each_linked(&mut |image| {
            if let Some(flat) = image.derive() {
                // Another thread may have been quicker.
                let _same_bytes = image.0.flat.set(edit(image, flat));
                // A waiter has looked after this lock, or is woken.
                drop(image.lower_slot());
                image.0.derived.notify_all();
            }
        });
    }

    /// Calls `each` with this image and all below to which there still is a link, oldest first.
    pub(crate) fn each_linked(&self, each: &mut dyn FnMut(&Self)) {
        let mut chain = vec![self.clone()];
        while let Some(lower) = chain.last().and_then(Self::lower) {
            chain.push(lower);
        }
        while let Some(image) = chain.pop() {
            each(&image);
        }
    }

    /// With the lower image flat. `None`: this one is, too.
    fn derive(&self) -> Option<Flat> {
        if self.0.flat.get().is_some() {
            return None;
        }
        let own = self.0.own.as_ref()?;
        let lower = self.lower()?;
        let below = lower.0.flat.get()?;
        let pages = pages_of(self.0.size_bytes);
        let all = PageRange::first(pages);
        let changes = own.map().runs(all).filter_map(|(run, state)| match state {
            PageState::Absent => None,
            PageState::Written => Some((run, Source::Image(self.0.id))),
            PageState::Zero => Some((run, Source::Zero)),
        });
        let table = if below.table.pages() == pages {
            below.table.derive(changes)
        } else {
            // The disk has grown: its new pages are zeros.
            let zeros = PageTable::uniform(pages, Source::Zero);
            zeros.derive(below.table.runs(all)).and_then(|table| table.derive(changes))
        };
        // Every run lies within `all`.
        let table = table.ok()?;
        let of = |id| {
            let own: Arc<dyn OwnPages> = Arc::<StoredLayer>::clone(own);
            if id == self.0.id { Some(own) } else { below.owners.get(&id).cloned() }
        };
        match named(&table, of) {
            Ok(owners) => Some(Flat { table, owners }),
            Err(owner) => {
                tracing::error!(image = %self.0.id, %owner, "pages have no owner");
                None
            }
        }
    }

    /// The table is stored: what lies below is not needed any more.
    pub(crate) fn settle(&self) {
        if self.0.flat.get().is_some() {
            let lower = self.lower_slot().take();
            drop(lower);
        }
    }

    pub(crate) fn own(&self) -> Option<&Arc<StoredLayer>> {
        self.0.own.as_ref()
    }

    pub(crate) fn weak(&self) -> WeakImage {
        WeakImage(Arc::downgrade(&self.0))
    }

    fn lower_slot(&self) -> MutexGuard<'_, Option<Self>> {
        self.0.lower.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What lies below, as long as it is needed.
    pub(crate) fn lower(&self) -> Option<Self> {
        self.lower_slot().clone()
    }

    /// Calls `found` with each run of `range` and where its bytes are, in order.
    fn visit(&self, range: PageRange, found: &mut dyn FnMut(PageRange, Place<'_>)) {
        if let Some(flat) = self.0.flat.get() {
            return flat.visit(range, found);
        }
        // What is still to do is on a list, and not on the stack.
        let mut rest = vec![(range, self.clone())];
        while let Some((range, image)) = rest.pop() {
            if range.is_empty() {
                continue;
            }
            if let Some(flat) = image.0.flat.get() {
                flat.visit(range, found);
                continue;
            }
            let (Some(own), Some(lower)) = (image.0.own.clone(), image.lower()) else {
                // It has just become flat.
                rest.push((range, image));
                continue;
            };
            let (run, state) = own.map().run(range);
            rest.push((range.from_page(run.end()), image));
            match state {
                PageState::Absent => rest.push((run, lower)),
                PageState::Written => found(run, Place::Pages(&*own)),
                PageState::Zero => found(run, Place::Zero),
            }
        }
    }
}

impl Flat {
    /// The same bytes, of which `own` has those of `pages` too. They are in ascending order.
    pub(crate) fn with(&self, own: &Arc<StoredLayer>, pages: &[PageRange]) -> Option<Self> {
        let source = Source::Image(own.id());
        let table = self.table.derive(pages.iter().map(|run| (*run, source))).ok()?;
        let of = |id| {
            let new: Arc<dyn OwnPages> = Arc::<StoredLayer>::clone(own);
            if id == own.id() { Some(new) } else { self.owners.get(&id).cloned() }
        };
        let owners = named(&table, of).ok()?;
        Some(Self { table, owners })
    }

    fn visit(&self, range: PageRange, found: &mut dyn FnMut(PageRange, Place<'_>)) {
        let mut end = range.start();
        for (run, source) in self.table.runs(range) {
            let own = source.image().and_then(|id| self.owners.get(&id));
            end = run.end();
            found(run, own.map_or(Place::Zero, |own| Place::Pages(&**own)));
        }
        // The disk above has grown.
        let beyond = range.from_page(end);
        if !beyond.is_empty() {
            found(beyond, Place::Zero);
        }
    }
}

impl Lower for DiskImage {
    fn runs(&self, range: PageRange, found: &mut dyn FnMut(PageRange, bool)) {
        self.visit(range, &mut |run, place| found(run, matches!(place, Place::Zero)));
    }

    fn is_here(&self, range: PageRange) -> bool {
        let mut here = true;
        self.visit(range, &mut |run, place| {
            if let Place::Pages(own) = place {
                here &= own.is_here(run);
            }
        });
        here
    }

    fn files(&self, range: PageRange, found: &mut dyn FnMut(PageRange, Option<&Arc<File>>)) {
        self.visit(range, &mut |run, place| {
            if let Place::Pages(own) = place {
                found(run, own.file());
            }
        });
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let mut rest = bytes;
        let mut outcome = Ok(());
        self.visit(range, &mut |run, place| {
            if outcome.is_ok() {
                outcome = split_mut(&mut rest, run.byte_len()).and_then(|part| match place {
                    Place::Zero => {
                        part.fill(0);
                        Ok(())
                    }
                    Place::Pages(own) => own.read(run, part),
                });
            }
        });
        outcome
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // One after the other: a chain of thousands would overflow the stack.
        let take = |slot: &mut Mutex<Option<DiskImage>>| {
            slot.get_mut().unwrap_or_else(PoisonError::into_inner).take()
        };
        let mut next = take(&mut self.lower);
        while let Some(mut last) = next.and_then(|DiskImage(inner)| Arc::into_inner(inner)) {
            next = take(&mut last.lower);
        }
    }
}

/// The own pages of the images that a table names, or the first image for which there are none.
fn named(
    table: &PageTable,
    owner: impl Fn(ImageId) -> Option<Arc<dyn OwnPages>>,
) -> Result<Owners, ImageId> {
    table.owners().iter().map(|(id, _)| Ok((id, owner(id).ok_or(id)?))).collect()
}

fn pages_of(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(PAGE_BYTES)
}

/// A name that no image has.
///
/// # Errors
/// The kernel gives no random numbers.
pub(crate) fn new_id() -> io::Result<ImageId> {
    loop {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        if let Some(id) = ImageId::new(u64::from_le_bytes(bytes)) {
            return Ok(id);
        }
    }
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
