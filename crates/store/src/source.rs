//! A stored snapshot's own pages, as a source of an image.

use std::io;
use std::sync::Arc;

use vmfork_image::{Origin, PAGE_BYTES, PageRange, PageSource};

use crate::blobs::{BlobError, Blobs};
use crate::error::StoreError;
use crate::format::chunk;
use crate::format::table::Window;
use crate::hot::HotChunks;
use crate::names::chunk_key;
use crate::store::Store;
use crate::stored::StoredImage;

/// From a disk: while one is read another is decompressed.
const READS_AHEAD_MIN: usize = 2;

/// How a snapshot's pages are read.
#[derive(Debug, Clone)]
pub struct SourceOptions {
    /// Shared by all sources of a host.
    pub hot: Arc<HotChunks>,
    /// Of the store where a chunk is got from that isn't here, or is damaged here. It is kept.
    /// Nothing is asked of it before that.
    pub remote: Option<Arc<dyn Blobs>>,
}

/// Reads the own pages of one image of a snapshot; a base's pages are not among them.
#[derive(Debug)]
pub struct StoredPages {
    image: StoredImage,
    options: SourceOptions,
}

impl StoredImage {
    /// Its own pages, to be read by anyone.
    pub fn source(&self, options: SourceOptions) -> Arc<StoredPages> {
        Arc::new(StoredPages { image: self.clone(), options })
    }
}

impl StoredPages {
    pub fn image(&self) -> &StoredImage {
        &self.image
    }

    /// Whether all of `range` can be read without a file or a network: its chunks are in memory,
    /// decompressed. They may go at any time.
    pub fn is_hot(&self, range: PageRange) -> bool {
        let table = self.image.table();
        let chunk_pages = table.chunk_pages();
        let mut rest = range;
        while !rest.is_empty() {
            let piece = rest.truncate(chunk_pages - rest.start().0 % chunk_pages);
            let window = table.window_of(piece.start());
            if !window.is_some_and(|window| self.options.hot.has(&window.hash)) {
                return false;
            }
            rest = rest.from_page(piece.end());
        }
        true
    }

    fn store(&self) -> &Store {
        self.image.stored().store()
    }

    fn load(&self, window: &Window) -> Result<Vec<u8>, StoreError> {
        let (blobs, flights) = (self.store().inner.blobs(), &self.store().inner.flights);
        if let Ok((_, raw)) = self.load_from(blobs, window) {
            return Ok(raw);
        }
        let waiting = self.options.remote.as_ref().map(|remote| (remote, flights.wait()));
        let _flight = flights.begin(&window.hash);
        // It may have come just now.
        let here = match self.load_from(blobs, window) {
            Ok((_, raw)) => return Ok(raw),
            Err(error) => error,
        };
        let Some((remote, waiting)) = waiting else { return Err(here) };
        match &here {
            StoreError::Blob(BlobError::NotFound { .. }) => {}
            error => tracing::warn!(%error, "chunk is got from the remote store"),
        }
        let (file, raw) = self.load_from(&**remote, window)?;
        waiting.came();
        // A store that is full or broken is no reason to keep a VM waiting.
        if let Err(error) = blobs.put(&chunk_key(&window.hash), &file) {
            tracing::warn!(%error, "chunk is not kept");
        }
        Ok(raw)
    }

    fn load_from(
        &self,
        blobs: &dyn Blobs,
        window: &Window,
    ) -> Result<(Vec<u8>, Vec<u8>), StoreError> {
        let file = blobs.get(&chunk_key(&window.hash))?;
        let raw = decode_chunk(blobs, &file, &window.hash, Some(window.own_pages))?;
        Ok((file, raw))
    }

    /// Read the pages of `piece`, which lies in one window.
    fn read_in_window(&self, piece: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let table = self.image.table();
        let not_own = || {
            let (name, role) = (&self.image.stored().descriptor().name, &self.image.image().role);
            let text = format!("pages {piece} of {role} are not snapshot `{name}`'s own");
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        let window = table.window_of(piece.start()).ok_or_else(not_own)?;
        // Where the piece begins in the chunk: behind the own pages before it.
        let before = table.window_range(window.index).until_page(piece.start());
        let skipped: u64 = table.own_runs(before).map(|run| run.byte_len()).sum();
        if table.own_runs(piece).next() != Some(piece) {
            return Err(not_own());
        }
        let keep = piece.len() < window.own_pages;
        let (raw, _) = self
            .options
            .hot
            .get(&window.hash, keep, || self.load(window))
            .map_err(StoreError::into_io)?;
        let from = usize::try_from(skipped).unwrap_or(usize::MAX);
        // The length was checked when the chunk was loaded.
        let found = raw.get(from..).and_then(|raw| raw.get(..bytes.len())).ok_or_else(not_own)?;
        bytes.copy_from_slice(found);
        Ok(())
    }
}

impl PageSource for StoredPages {
    fn origin(&self) -> Origin {
        Origin::Chunk
    }

    fn unit_pages(&self) -> u64 {
        self.image.table().chunk_pages()
    }

    fn reads_ahead(&self) -> usize {
        let remote = self.options.remote.as_ref().map_or(0, |remote| remote.in_flight());
        remote.max(self.store().inner.blobs().in_flight()).max(READS_AHEAD_MIN)
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        if bytes.len() as u64 != range.byte_len() {
            let text = format!("{} bytes for pages {range}", bytes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let chunk_pages = self.unit_pages();
        let (mut rest, mut bytes) = (range, bytes);
        while !rest.is_empty() {
            let piece = rest.truncate(chunk_pages - rest.start().0 % chunk_pages);
            let len = usize::try_from(piece.byte_len()).unwrap_or(usize::MAX).min(bytes.len());
            let (front, back) = bytes.split_at_mut(len);
            self.read_in_window(piece, front)?;
            (rest, bytes) = (rest.from_page(piece.end()), back);
        }
        Ok(())
    }
}

/// The content of the chunk `hash`, of which `file` is the file in `blobs`, and which has `pages`
/// if that is known.
pub(crate) fn decode_chunk(
    blobs: &dyn Blobs,
    file: &[u8],
    hash: &blake3::Hash,
    pages: Option<u64>,
) -> Result<Vec<u8>, StoreError> {
    let raw = chunk::decode(file, hash).and_then(|raw| {
        let found = raw.len() as u64 / PAGE_BYTES;
        match pages {
            Some(pages) if pages != found => {
                let what = format!("{found} pages, where the table has {pages}");
                Err(crate::format::Flaw::at(6, what))
            }
            _ => Ok(raw),
        }
    });
    raw.map_err(StoreError::damaged(blobs, &chunk_key(hash)))
}
