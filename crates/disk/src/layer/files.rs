//! A layer's files: the bytes of its pages, and their states.
//!
//! ```text
//!   ID/data   sparse; page p at p × 4096
//!   ID/map    sparse; head (4096 bytes), then two bits for each page
//! ```
//!
//! A change goes to the data first, then to the map, then to memory. So what was acknowledged is
//! there after a daemon was killed: the next one reads the files. Neither file is mapped into
//! memory: a medium that fails is an error of one disk then, and no signal that ends all.
//!
//! Promises: a page is in the state `Written` only after its bytes are in the file. Of a page that
//! is written in part, the rest is what the caller gives.
//!
//! Left to others: what a layer lies on; which layer is a disk's own ([`crate::disk`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use vmfork_image::{PAGE_BYTES, PAGES_MAX, PageIdx, PageRange};

use super::map::{CHUNK_BYTES, CHUNK_PAGES, LayerMap, MapFlaw, PageState};
use crate::holes::next_data;

const MAGIC: [u8; 8] = *b"VMFLAYER";
const VERSION: u32 = 1;
/// Before the bits: magic, version, pages; the rest is zero.
const HEAD_BYTES: u64 = 4096;
/// Changes of different parts of a map do not wait for each other.
const STRIPES: usize = 64;
/// Pages whose states one stripe's lock covers at a time: 4 KiB of the map's file.
const STRIPE_PAGES: u64 = CHUNK_PAGES;
/// Read of a map at a time.
const LOAD_BYTES: u64 = 64 * CHUNK_BYTES;

/// A layer's files can't be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("`{}`", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("`{}` is no map of a layer", path.display())]
    Magic { path: PathBuf },
    #[error("`{}` has version {version}, this vmfork reads version {VERSION}", path.display())]
    Version { path: PathBuf, version: u32 },
    #[error("`{}` is too short for {pages} pages", path.display())]
    Pages { path: PathBuf, pages: u64 },
    #[error("a disk of {now} bytes can't have {size_bytes} bytes: it only grows, by 512")]
    Size { size_bytes: u64, now: u64 },
    #[error("a name for the layer")]
    Name(#[source] io::Error),
    #[error("`{}` is damaged", path.display())]
    Map { path: PathBuf, source: MapFlaw },
}

/// A change that failed, perhaps after a part of it was done.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Partly {
    /// What the change would have returned, of the part that was done.
    pub pages: u64,
    /// Why the rest failed.
    pub error: io::Error,
}

impl From<io::Error> for Partly {
    /// Nothing was done.
    fn from(error: io::Error) -> Self {
        Self { pages: 0, error }
    }
}

/// Where a change of states stopped.
struct Stopped {
    /// How many pages before `at` were written before.
    written: u64,
    at: PageIdx,
    error: io::Error,
}

/// The files of one layer, and its map.
#[derive(Debug)]
pub struct LayerFiles {
    data: Arc<File>,
    map_file: File,
    map: LayerMap,
    /// Who changes states of a stretch holds its lock, so that the file has what memory has.
    stripes: [Mutex<()>; STRIPES],
}

impl LayerFiles {
    /// New files in a folder that is there. They take no space for pages that are absent.
    ///
    /// # Errors
    /// They exist, or can't be made.
    pub fn create(folder: &Path, pages: u64) -> Result<Self, LayerError> {
        let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let (data, _) = open(folder, "data", new)?;
        let (map_file, path) = open(folder, "map", new)?;
        let failed = |source| LayerError::File { path: path.clone(), source };
        data.set_len(pages * PAGE_BYTES).map_err(failed)?;
        map_file.set_len(HEAD_BYTES + LayerMap::byte_len(pages)).map_err(failed)?;
        let head = [&MAGIC[..], &VERSION.to_le_bytes(), &0_u32.to_le_bytes(), &pages.to_le_bytes()];
        map_file.write_all_at(&head.concat(), 0).map_err(failed)?;
        Ok(Self::with(Arc::new(data), map_file, LayerMap::new(pages)))
    }

    /// Files that an earlier daemon left.
    ///
    /// # Errors
    /// They are not there, too short, or damaged.
    pub fn open(folder: &Path) -> Result<Self, LayerError> {
        let (data, _) = open(folder, "data", OFlags::RDWR)?;
        let (map_file, path) = open(folder, "map", OFlags::RDWR)?;
        let failed = |source| LayerError::File { path: path.clone(), source };
        let mut head = [0; 24];
        map_file.read_exact_at(&mut head, 0).map_err(failed)?;
        let word = |at: usize| -> [u8; 4] { std::array::from_fn(|index| head[at + index]) };
        if head[..8] != MAGIC {
            return Err(LayerError::Magic { path });
        }
        let version = u32::from_le_bytes(word(8));
        if version != VERSION {
            return Err(LayerError::Version { path, version });
        }
        let (low, high) = (u32::from_le_bytes(word(16)), u32::from_le_bytes(word(20)));
        let pages = u64::from(high) << 32 | u64::from(low);
        // What is allocated of the map is read, so memory for it is bounded by what is there.
        let there = map_file.metadata().map_err(failed)?.len();
        if pages > PAGES_MAX || there < HEAD_BYTES + LayerMap::byte_len(pages) {
            return Err(LayerError::Pages { path, pages });
        }
        let map = LayerMap::new(pages);
        let end = HEAD_BYTES + LayerMap::byte_len(pages);
        let mut bytes = Vec::new();
        let mut at = HEAD_BYTES;
        while let Some(found) = next_data(&map_file, at, end).map_err(failed)? {
            // Whole words of it.
            at = found.start / CHUNK_BYTES * CHUNK_BYTES;
            let next = found.end.next_multiple_of(CHUNK_BYTES).min(end).min(at + LOAD_BYTES);
            bytes.resize(usize::try_from(next - at).unwrap_or(usize::MAX), 0);
            map_file.read_exact_at(&mut bytes, at).map_err(failed)?;
            map.load(at - HEAD_BYTES, &bytes)
                .map_err(|source| LayerError::Map { path: path.clone(), source })?;
            at = next;
        }
        Ok(Self::with(Arc::new(data), map_file, map))
    }

    /// The same files with more pages, which are absent. Nothing may be written meanwhile.
    ///
    /// The data grows first, then the map, then what the map's head says: whenever the daemon is
    /// killed, the head says what is there. Nothing is cut, as an earlier growth may have failed
    /// after the head said more.
    ///
    /// # Errors
    /// The medium's, or it is full.
    pub fn grown(&self, pages: u64) -> io::Result<Self> {
        let pages = pages.max(self.map.pages());
        let (data, map_file) = (Arc::clone(&self.data), self.map_file.try_clone()?);
        lengthen(&data, pages * PAGE_BYTES)?;
        lengthen(&map_file, HEAD_BYTES + LayerMap::byte_len(pages))?;
        map_file.write_all_at(&pages.to_le_bytes(), 16)?;
        Ok(Self::with(data, map_file, self.map.grown(pages)))
    }

    fn with(data: Arc<File>, map_file: File, map: LayerMap) -> Self {
        Self { data, map_file, map, stripes: std::array::from_fn(|_| Mutex::default()) }
    }

    /// The states of its pages.
    pub fn map(&self) -> &LayerMap {
        &self.map
    }

    /// Page p is at p × 4096, if it is written. The file is never cut.
    pub(super) fn data(&self) -> &Arc<File> {
        &self.data
    }

    /// Read pages that are written.
    ///
    /// # Errors
    /// The medium's.
    pub fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.data.read_exact_at(bytes, offset_bytes)
    }

    /// Write whole pages from `start` on. → how many were not written before.
    ///
    /// # Errors
    /// The medium's, or it is full. Some of the pages may have been written.
    pub fn write(&self, start: PageIdx, bytes: &[u8]) -> Result<u64, Partly> {
        let range = PageRange::from_bytes(start.byte_offset(), bytes.len() as u64)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        self.data.write_all_at(bytes, start.byte_offset())?;
        match self.set(range, PageState::Written) {
            Ok(written) => Ok(range.len() - written),
            Err(Stopped { written, at, error }) => {
                Err(Partly { pages: range.until_page(at).len() - written, error })
            }
        }
    }

    /// Write a part of a page. `rest` gives the whole page as it was, unless the layer has it. No
    /// other change waits for it. → how many pages were not written before.
    ///
    /// # Errors
    /// The medium's; those of `rest`.
    pub fn write_part(
        &self,
        page: PageIdx,
        at: usize,
        part: &[u8],
        rest: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> Result<u64, Partly> {
        let mut whole = vec![0; usize::try_from(PAGE_BYTES).unwrap_or(0)];
        if self.map.state(page) == PageState::Absent {
            rest(&mut whole)?;
        }
        // Two parts of one page at the same time: the second finds what the first has written.
        let _one_at_a_time = self.stripe(page);
        match self.map.state(page) {
            PageState::Written => {
                self.data.write_all_at(part, page.byte_offset() + at as u64)?;
                return Ok(0);
            }
            PageState::Zero => whole.fill(0),
            // No page becomes absent again, so it has been read.
            PageState::Absent => {}
        }
        let place = whole.get_mut(at..at + part.len());
        let place = place.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        place.copy_from_slice(part);
        self.data.write_all_at(&whole, page.byte_offset())?;
        Ok(1 - self.set_locked(page.range(), PageState::Written)?)
    }

    /// The pages are zeros from now on, and their space is given back. → how many were written.
    ///
    /// # Errors
    /// The medium's, or it has no space for the map. Some of the pages may be zeros then, and count
    /// as given back.
    pub fn zero(&self, range: PageRange) -> Result<u64, Partly> {
        let (written, done, failed) = match self.set(range, PageState::Zero) {
            Ok(written) => (written, range, None),
            Err(stopped) => (stopped.written, range.until_page(stopped.at), Some(stopped.error)),
        };
        let mut punched = Ok(());
        if written > 0 {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let (at, len) = (done.start().byte_offset(), done.byte_len());
            punched = rustix::fs::fallocate(&self.data, flags, at, len);
        }
        match failed.or_else(|| punched.err().map(io::Error::from)) {
            None => Ok(written),
            Some(error) => Err(Partly { pages: written, error }),
        }
    }

    /// What was written survives the host from now on.
    ///
    /// # Errors
    /// The medium's.
    pub fn sync(&self) -> io::Result<()> {
        self.data.sync_data()?;
        self.map_file.sync_data()
    }

    fn stripe(&self, page: PageIdx) -> MutexGuard<'_, ()> {
        let number = usize::try_from(page.0 / STRIPE_PAGES).unwrap_or(0) % STRIPES;
        self.stripes[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// → how many of the pages were written before.
    fn set(&self, range: PageRange, state: PageState) -> Result<u64, Stopped> {
        let mut rest = range;
        let mut written = 0;
        while !rest.is_empty() {
            let end = (rest.start().0 / STRIPE_PAGES + 1) * STRIPE_PAGES;
            let part = rest.until_page(PageIdx(end.min(rest.end().0)));
            let _in_turn = self.stripe(part.start());
            match self.set_locked(part, state) {
                Ok(before) => written += before,
                Err(error) => return Err(Stopped { written, at: part.start(), error }),
            }
            rest = rest.from_page(part.end());
        }
        Ok(written)
    }

    /// With the stripe locked. The file has the state before a reader can see it. → how many of the
    /// pages were written before.
    fn set_locked(&self, range: PageRange, state: PageState) -> io::Result<u64> {
        // Most writes are to pages that are written already.
        if self.map.run(range) == (range, state) {
            return Ok(if state == PageState::Written { range.len() } else { 0 });
        }
        let (at, bytes) = self.map.bytes_with(range, state);
        self.map_file.write_all_at(&bytes, HEAD_BYTES + at)?;
        Ok(self.map.set(range, state))
    }

    /// Another file in place of the data's, or of the map's: one that fails.
    #[cfg(test)]
    pub(super) fn swap(&mut self, of_map: bool, file: &mut File) {
        let data = Arc::get_mut(&mut self.data).expect("no reply is being sent");
        std::mem::swap(if of_map { &mut self.map_file } else { data }, file);
    }
}

fn open(folder: &Path, name: &str, flags: OFlags) -> Result<(File, PathBuf), LayerError> {
    let path = folder.join(name);
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok((file.into(), path)),
        Err(error) => Err(LayerError::File { path, source: error.into() }),
    }
}

/// Never cuts it.
fn lengthen(file: &File, bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() < bytes { file.set_len(bytes) } else { Ok(()) }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
