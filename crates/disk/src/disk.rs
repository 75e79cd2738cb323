//! A writable disk: a layer of its own on an image.
//!
//! ```text
//!   read   own layer ──absent──► image
//!   write  own layer
//!   freeze own layer and image ─► image; the next layer, made before, is its own
//! ```
//!
//! Promises: a freeze is O(1). It copies nothing, and makes and unlinks no file, if the next layer
//! exists. It waits for no read from below, unless several freezes overtake one write. A write of
//! whole pages reads nothing. What is read of a part of the disk was written there last, or lies
//! under it.
//!
//! Left to others: the protocol ([`crate::nbd`]); where an image's pages come from
//! ([`crate::Lower`]); when a disk is frozen.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

use vmfork_image::{ImageId, PAGE_BYTES, PageIdx, PageRange};

use crate::background::Job;
use crate::counters::{DiskCounters, DiskCounts};
use crate::image::DiskImage;
use crate::layer::{LayerError, PageState, StoredLayer};
use crate::lower::{Lower, OwnPages, split_mut};
use vmfork_nbd::{Extent, FilePart, Span};

/// Pages that a trim decides on together.
const STRETCH: u64 = crate::layer::CHUNK_PAGES;

/// Freezes during one write, after which the next one waits for what the write reads.
const BELOW_TRIES: u32 = 8;
/// A part of a file that is shorter is sent sooner from memory: each costs a system call, and wakes
/// the client.
const PART_BYTES_MIN: u32 = 32 << 10;

/// Where a disk's layers come from.
pub(crate) trait Layers: Debug + Send + Sync {
    /// That of the disk, once it has a layer.
    fn id(&self) -> Option<ImageId>;

    /// A new layer on the layer `on`. `spare`: it is made in advance.
    fn make(
        &self,
        on: ImageId,
        size_bytes: u64,
        spare: bool,
    ) -> Result<Arc<StoredLayer>, LayerError>;

    /// The same layer, for a disk of `size_bytes`.
    fn grow(&self, layer: &StoredLayer, size_bytes: u64) -> Result<Arc<StoredLayer>, LayerError>;

    /// `image` was frozen, and `own` is the disk's layer on it: what is left of it is done later.
    fn frozen(&self, image: DiskImage, own: Arc<StoredLayer>);

    /// Done in the background, soon: the next freeze waits for it.
    fn soon(&self, job: Job);

    /// Of one more disk.
    fn counters(&self) -> Arc<DiskCounters>;

    /// Merged layers survive the host, those that are made from now on too.
    fn sync_merged(&self) -> io::Result<()>;
}

/// A disk at one instant.
#[derive(Debug, Clone)]
struct Now {
    layer: Arc<StoredLayer>,
    image: DiskImage,
    size_bytes: u64,
}

impl Now {
    /// Whole pages are zeros from now on. Stretches that show zeros from below stay absent: a guest
    /// that trims an empty disk costs no memory for its map.
    fn zero(&self, range: PageRange) -> io::Result<()> {
        let mut rest = range;
        while !rest.is_empty() {
            let end = rest.end().min(PageIdx((rest.start().0 / STRETCH + 1) * STRETCH));
            let stretch = rest.until_page(end);
            if !self.shows_zeros(stretch) {
                self.layer.zero(stretch)?;
            }
            rest = rest.from_page(end);
        }
        Ok(())
    }

    /// Whether the own layer has nothing of the pages, and all below are zeros.
    fn shows_zeros(&self, range: PageRange) -> bool {
        let mut zeros = self.layer.map().run(range) == (range, PageState::Absent);
        if zeros {
            self.image.runs(range, &mut |_, zero| zeros &= zero);
        }
        zeros
    }
}

impl Lower for Now {
    fn runs(&self, range: PageRange, found: &mut dyn FnMut(PageRange, bool)) {
        for (run, state) in self.layer.map().runs(range) {
            match state {
                PageState::Absent => self.image.runs(run, found),
                PageState::Written => found(run, false),
                PageState::Zero => found(run, true),
            }
        }
    }

    fn is_here(&self, range: PageRange) -> bool {
        let mut runs = self.layer.map().runs(range);
        runs.all(|(run, state)| state != PageState::Absent || self.image.is_here(run))
    }

    fn files(&self, range: PageRange, found: &mut dyn FnMut(PageRange, Option<&Arc<File>>)) {
        for (run, state) in self.layer.map().runs(range) {
            match state {
                PageState::Absent => self.image.files(run, found),
                PageState::Written => found(run, self.layer.file()),
                PageState::Zero => {}
            }
        }
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let mut rest = bytes;
        for (run, state) in self.layer.map().runs(range) {
            let part = split_mut(&mut rest, run.byte_len())?;
            match state {
                PageState::Absent => self.image.read(run, part)?,
                PageState::Written => self.layer.read_at(run.byte_offset(), part)?,
                PageState::Zero => part.fill(0),
            }
        }
        Ok(())
    }
}

/// The layer that the next freeze uses, made in advance.
#[derive(Debug)]
struct Spare {
    /// The own layer on which it is to lie: its note says so.
    on: ImageId,
    size_bytes: u64,
    layer: Option<Arc<StoredLayer>>,
}

/// A writable disk.
#[derive(Debug)]
pub struct Disk {
    now: RwLock<Now>,
    spare: Arc<Mutex<Spare>>,
    layers: Arc<dyn Layers>,
    /// Frozen since the last sync: what was acknowledged may be there.
    unsynced: Mutex<Vec<Weak<StoredLayer>>>,
    /// Held for a whole sync: the next one must not end before the layers of this one are synced.
    syncing: Mutex<()>,
    counters: Arc<DiskCounters>,
    problem: Mutex<Option<(Instant, String)>>,
}

fn lock(spare: &Mutex<Spare>) -> MutexGuard<'_, Spare> {
    spare.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// A disk of `size_bytes`, a multiple of 512, with a layer of as many pages or more.
    pub(crate) fn new(
        size_bytes: u64,
        layer: Arc<StoredLayer>,
        image: DiskImage,
        layers: Arc<dyn Layers>,
    ) -> Self {
        let spare = Arc::new(Mutex::new(Spare { on: layer.id(), size_bytes, layer: None }));
        let now = RwLock::new(Now { layer, image, size_bytes });
        let counters = layers.counters();
        let disk = Self {
            now,
            spare,
            layers,
            unsynced: Mutex::default(),
            syncing: Mutex::default(),
            counters,
            problem: Mutex::default(),
        };
        disk.prepare();
        disk
    }

    /// Stays the same through freezes and restarts.
    pub fn id(&self) -> ImageId {
        self.layers.id().unwrap_or_else(|| self.layer())
    }

    pub fn size_bytes(&self) -> u64 {
        self.now().size_bytes
    }

    /// The name of its own layer: what the next freeze makes has it.
    pub fn layer(&self) -> ImageId {
        self.now().layer.id()
    }

    /// What its own layer lies on.
    pub fn image(&self) -> DiskImage {
        self.now().image.clone()
    }

    /// What its own layer holds, in bytes.
    pub fn layer_bytes(&self) -> u64 {
        self.now().layer.map().count(PageState::Written) * PAGE_BYTES
    }

    /// What it has that is not zeros, in bytes, whichever layer holds it.
    pub fn data_bytes(&self) -> u64 {
        let now = self.now().clone();
        let mut pages = 0;
        let all = PageRange::first(now.size_bytes.div_ceil(PAGE_BYTES));
        now.runs(all, &mut |run, zero| pages += if zero { 0 } else { run.len() });
        pages * PAGE_BYTES
    }

    /// What it did since it was opened.
    pub fn counts(&self) -> DiskCounts {
        self.counters.counts()
    }

    pub(crate) fn counters(&self) -> &DiskCounters {
        &self.counters
    }

    /// Why a request failed within the last `within`, and at which page.
    pub fn problem(&self, within: Duration) -> Option<String> {
        let problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        problem.as_ref().filter(|(at, _)| at.elapsed() < within).map(|(_, text)| text.clone())
    }

    pub(crate) fn has_problem(&self, text: String) {
        let mut problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        *problem = Some((Instant::now(), text));
    }

    fn now(&self) -> RwLockReadGuard<'_, Now> {
        self.now.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn unsynced(&self) -> MutexGuard<'_, Vec<Weak<StoredLayer>>> {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its own layer is frozen. → the disk's content. The VM stands still: nothing is in flight.
    ///
    /// # Errors
    /// There was no next layer yet, and it can't be made. The disk is as it was.
    pub fn freeze(&self) -> Result<DiskImage, LayerError> {
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        let mut spare = lock(&self.spare);
        let next = match spare.layer.take() {
            Some(layer) => layer,
            None => {
                self.counters.late_layers.add(1);
                self.layers.make(now.layer.id(), now.size_bytes, false)?
            }
        };
        let size_bytes = now.size_bytes;
        let image = DiskImage::frozen(Arc::clone(&now.layer), now.image.clone(), size_bytes);
        let mut unsynced = self.unsynced();
        unsynced.retain(|layer| layer.strong_count() > 0);
        unsynced.push(Arc::downgrade(&now.layer));
        drop(unsynced);
        *spare = Spare { on: next.id(), size_bytes, layer: None };
        *now = Now { layer: Arc::clone(&next), image: image.clone(), size_bytes };
        drop((spare, now));
        self.counters.freezes.add(1);
        self.layers.frozen(image.clone(), next);
        self.prepare();
        Ok(image)
    }

    /// The next layer is made in the background.
    fn prepare(&self) {
        let (spare, layers) = (Arc::downgrade(&self.spare), Arc::clone(&self.layers));
        self.layers.soon(Box::new(move || {
            let Some(slot) = spare.upgrade() else { return };
            let (on, size_bytes) = {
                let spare = lock(&slot);
                if spare.layer.is_some() {
                    return;
                }
                (spare.on, spare.size_bytes)
            };
            match layers.make(on, size_bytes, true) {
                Ok(layer) => {
                    let mut spare = lock(&slot);
                    // A freeze or a growth may have come between: then it is dropped.
                    if (spare.on, spare.size_bytes) == (on, size_bytes) {
                        spare.layer = Some(layer);
                    }
                }
                Err(error) => tracing::warn!(%on, %error, "the next layer can't be made"),
            }
        }));
    }

    /// The disk gets larger; the new bytes are zeros. Clients see the new size at their next
    /// connection.
    ///
    /// # Errors
    /// It would be smaller or is no multiple of 512, or the medium fails. The disk is as it was.
    pub fn grow(&self, size_bytes: u64) -> Result<(), LayerError> {
        let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
        if size_bytes < now.size_bytes || !size_bytes.is_multiple_of(512) {
            return Err(LayerError::Size { size_bytes, now: now.size_bytes });
        }
        if size_bytes == now.size_bytes {
            return Ok(());
        }
        now.layer = self.layers.grow(&now.layer, size_bytes)?;
        now.size_bytes = size_bytes;
        let old = std::mem::replace(
            &mut *lock(&self.spare),
            Spare { on: now.layer.id(), size_bytes, layer: None },
        );
        drop((now, old));
        self.prepare();
        Ok(())
    }

    /// What the bytes of a span are, in order.
    pub fn extents(&self, span: Span) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let cover = cover(span);
        self.now().runs(cover, &mut |run, zero| {
            let from = run.start().byte_offset().max(span.offset_bytes);
            let to = run.end().byte_offset().min(span.end());
            let len_bytes = to.saturating_sub(from);
            match extents.last_mut() {
                Some(last) if last.zero == zero => last.len_bytes += len_bytes,
                _ => extents.push(Extent { len_bytes, zero }),
            }
        });
        extents
    }

    /// Whether a span can be read at once.
    pub fn is_here(&self, span: Span) -> bool {
        self.now().is_here(cover(span))
    }

    /// Whether a write must read first what is not here: of the pages that it covers in part.
    pub fn is_here_for_write(&self, span: Span) -> bool {
        let now = self.now();
        let mut parts = Vec::new();
        by_page(span, &mut |piece| {
            if let Piece::Part { page, .. } = piece {
                parts.push(page);
            }
        });
        parts.iter().all(|page| now.is_here(page.range()))
    }

    /// Read a span. May wait for pages from elsewhere.
    ///
    /// # Errors
    /// They can't be had, or the medium fails.
    pub fn read(&self, span: Span, bytes: &mut [u8]) -> io::Result<()> {
        // What is slow to read must not delay a freeze.
        let now = self.now().clone();
        let mut rest = bytes;
        let mut outcome = Ok(());
        by_page(span, &mut |piece| {
            if outcome.is_ok() {
                outcome = read_piece(&now, piece, &mut rest);
            }
        });
        outcome
    }

    /// Where the bytes of a span are, none of which are zeros: parts of the store's own files.
    /// `None` if some are elsewhere, or if the parts are shorter than [`PART_BYTES_MIN`] on
    /// average.
    pub(crate) fn files(&self, span: Span) -> Option<Vec<FilePart>> {
        let parts_max = span.len_bytes / PART_BYTES_MIN;
        if parts_max == 0 {
            return None;
        }
        let mut parts: Vec<FilePart> = Vec::new();
        let (mut at, mut all) = (span.offset_bytes, true);
        self.now().files(cover(span), &mut |run, file| {
            let from = run.byte_offset().max(span.offset_bytes);
            let to = run.end().byte_offset().min(span.end());
            let Some(file) = file.filter(|_| from == at && parts.len() < parts_max as usize) else {
                all = false;
                return;
            };
            let len_bytes = usize::try_from(to.saturating_sub(from)).unwrap_or(0);
            parts.push(FilePart { file: Arc::clone(file), offset_bytes: from, len_bytes });
            at = to;
        });
        (all && at == span.end()).then_some(parts)
    }

    /// Write a span. What lies below a page that is written in part is read first, while the disk
    /// can be frozen. A write that a freeze overtakes goes to the next layer.
    ///
    /// # Errors
    /// The medium's, or it is full; what is written in part can't be had.
    pub fn write(&self, span: Span, bytes: &[u8]) -> io::Result<()> {
        let (now, below) = self.with_below(span)?;
        let mut rest = bytes;
        let mut outcome = Ok(());
        let mut partial = false;
        by_page(span, &mut |piece| {
            partial |= matches!(piece, Piece::Part { .. });
            if outcome.is_ok() {
                outcome = write_piece(&now, &below, piece, &mut rest);
            }
        });
        self.counters.partial_writes.add(u64::from(partial));
        outcome
    }

    /// The disk, and what lies below the pages that a change of `span` covers in part. As long as
    /// the disk is held, it is not frozen.
    fn with_below(&self, span: Span) -> io::Result<(RwLockReadGuard<'_, Now>, Below)> {
        let mut parts = Vec::new();
        by_page(span, &mut |piece| {
            if let Piece::Part { page, .. } = piece {
                parts.push(page);
            }
        });
        let mut below = Below::default();
        for _ in 0..BELOW_TRIES {
            let now = self.now();
            if parts.iter().all(|page| !below.lacks(&now, *page)) {
                return Ok((now, below));
            }
            let seen = now.clone();
            drop(now);
            below = Below::read(&seen, &parts)?;
        }
        // What is missing is read with the disk held: a freeze waits for that once.
        Ok((self.now(), below))
    }

    /// The whole pages of a span are zeros, and need no space. The edges stay as they are.
    ///
    /// # Errors
    /// The medium's.
    pub fn trim(&self, span: Span) -> io::Result<()> {
        let now = self.now();
        let mut outcome = Ok(());
        by_page(span, &mut |piece| {
            if let (Ok(()), Piece::Whole(range)) = (&outcome, piece) {
                outcome = now.zero(range);
            }
        });
        outcome
    }

    /// All bytes of a span are zeros.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub fn zero(&self, span: Span) -> io::Result<()> {
        let (now, below) = self.with_below(span)?;
        let mut outcome = Ok(());
        by_page(span, &mut |piece| {
            if outcome.is_err() {
                return;
            }
            outcome = match piece {
                Piece::Whole(range) => now.zero(range),
                Piece::Part { len, .. } => write_piece(&now, &below, piece, &mut &vec![0; len][..]),
            };
        });
        outcome
    }

    /// What was acknowledged survives the host, also if a freeze came between.
    ///
    /// # Errors
    /// The medium's. After one, every later sync fails too, until the disk is dropped.
    pub fn sync(&self) -> io::Result<()> {
        let _one_at_a_time = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        // Before frozen layers: one that is gone by then was merged into a layer that is synced.
        self.layers.sync_merged()?;
        let layer = Arc::clone(&self.now().layer);
        let frozen = std::mem::take(&mut *self.unsynced());
        for (number, frozen_layer) in frozen.iter().enumerate() {
            if let Some(Err(error)) = frozen_layer.upgrade().map(|layer| layer.sync()) {
                // The one that failed stays in the list, so the next sync fails by it.
                let rest = frozen.get(number..).unwrap_or_default();
                self.unsynced().extend_from_slice(rest);
                return Err(error);
            }
        }
        layer.sync()
    }
}

/// A span by pages: whole ones together, and those that it covers in part.
#[derive(Debug, Clone, Copy)]
enum Piece {
    Whole(PageRange),
    Part { page: PageIdx, at: usize, len: usize },
}

/// The pages that a span touches.
fn cover(span: Span) -> PageRange {
    let end = PageIdx(span.end().div_ceil(PAGE_BYTES));
    PageRange::between(PageIdx::of_byte(span.offset_bytes), end)
}

fn by_page(span: Span, piece: &mut dyn FnMut(Piece)) {
    let (mut at, end) = (span.offset_bytes, span.end());
    while at < end {
        let page = PageIdx::of_byte(at);
        let within = at % PAGE_BYTES;
        let whole = (end - at) / PAGE_BYTES;
        let len = if within == 0 && whole > 0 {
            piece(Piece::Whole(PageRange::between(page, PageIdx(page.0 + whole))));
            whole * PAGE_BYTES
        } else {
            let len = (PAGE_BYTES - within).min(end - at);
            let small = |bytes| usize::try_from(bytes).unwrap_or(0);
            piece(Piece::Part { page, at: small(within), len: small(len) });
            len
        };
        at += len;
    }
}

fn read_piece(now: &Now, piece: Piece, rest: &mut &mut [u8]) -> io::Result<()> {
    match piece {
        Piece::Whole(range) => {
            let part = split_mut(rest, range.byte_len())?;
            now.read(range, part)
        }
        Piece::Part { page, at, len } => {
            let part = split_mut(rest, len as u64)?;
            let mut whole = vec![0; usize::try_from(PAGE_BYTES).unwrap_or(0)];
            now.read(page.range(), &mut whole)?;
            part.copy_from_slice(whole.get(at..at + len).ok_or(io::ErrorKind::InvalidInput)?);
            Ok(())
        }
    }
}

/// What lies below pages, read while a freeze may come.
#[derive(Debug, Default)]
struct Below {
    /// The own layer above, when it was read.
    layer: Option<ImageId>,
    pages: Vec<(PageIdx, Vec<u8>)>,
}

impl Below {
    /// Those of `pages` that the own layer does not have.
    fn read(now: &Now, pages: &[PageIdx]) -> io::Result<Self> {
        let mut read = Vec::new();
        for page in pages {
            if now.layer.map().state(*page) == PageState::Absent {
                let mut whole = vec![0; usize::try_from(PAGE_BYTES).unwrap_or(0)];
                now.image.read(page.range(), &mut whole)?;
                read.push((*page, whole));
            }
        }
        Ok(Self { layer: Some(now.layer.id()), pages: read })
    }

    /// A layer lies on the same image as long as it is a disk's own.
    fn get(&self, now: &Now, page: PageIdx) -> Option<&[u8]> {
        let found = self.pages.iter().find(|(read, _)| *read == page);
        found.filter(|_| self.layer == Some(now.layer.id())).map(|(_, whole)| &**whole)
    }

    /// No page becomes absent again: what a layer has is not read from below.
    fn lacks(&self, now: &Now, page: PageIdx) -> bool {
        now.layer.map().state(page) == PageState::Absent && self.get(now, page).is_none()
    }
}

fn write_piece(now: &Now, below: &Below, piece: Piece, rest: &mut &[u8]) -> io::Result<()> {
    let mut next = |len: usize| {
        let (part, after) = rest.split_at_checked(len).ok_or(io::ErrorKind::InvalidInput)?;
        *rest = after;
        Ok::<_, io::Error>(part)
    };
    match piece {
        Piece::Whole(range) => {
            let part = next(usize::try_from(range.byte_len()).unwrap_or(usize::MAX))?;
            now.layer.write(range, part)
        }
        Piece::Part { page, at, len } => {
            let part = next(len)?;
            let under = |whole: &mut [u8]| match below.get(now, page) {
                Some(read) => {
                    whole.copy_from_slice(read);
                    Ok(())
                }
                None => now.image.read(page.range(), whole),
            };
            now.layer.write_part(page, (at, part), under)
        }
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "growth_tests.rs"]
mod growth_tests;
