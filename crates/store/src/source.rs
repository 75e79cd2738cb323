//! A stored snapshot's own pages, as a source of an image.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmfork_image::{Origin, PAGE_BYTES, PageRange, PageSource};

use crate::blobs::{BlobError, Blobs};
use crate::error::StoreError;
use crate::format::chunk;
use crate::format::table::Window;
use crate::hot::HotChunks;
use crate::names::chunk_key;
use crate::stored::Stored;

/// From a disk: while one is read another is decompressed.
const READS_AHEAD_MIN: usize = 2;

/// How a snapshot's pages are read.
#[derive(Debug, Clone)]
pub struct SourceOptions {
    /// Shared by all sources of a host.
    pub hot: Arc<HotChunks>,
    /// Of the store where a chunk is got from that isn't here, or is damaged here. It is kept. Nothing is asked of it
    /// before that.
    pub remote: Option<Arc<dyn Blobs>>,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    stored_bytes: AtomicU64,
    raw_bytes: AtomicU64,
    hot_hits: AtomicU64,
    remote_gets: AtomicU64,
    get_us: AtomicU64,
    decompress_us: AtomicU64,
}

/// What a source has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceStats {
    /// Calls to `read`.
    pub reads: u64,
    /// Of chunks' files that were read.
    pub stored_bytes: u64,
    /// What became of them.
    pub raw_bytes: u64,
    /// Chunks that were still decompressed.
    pub hot_hits: u64,
    /// Chunks that were got from the remote store.
    pub remote_gets: u64,
    /// How long getting files took.
    pub get_us: u64,
    /// How long decompressing and verifying took.
    pub decompress_us: u64,
}

/// Reads one snapshot's own pages; a base's pages are not among them.
#[derive(Debug)]
pub struct StoredPages {
    stored: Arc<Stored>,
    options: SourceOptions,
    counters: Counters,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl StoredPages {
    pub(crate) fn new(stored: Arc<Stored>, options: SourceOptions) -> Self {
        Self { stored, options, counters: Counters::default() }
    }

    pub fn stored(&self) -> &Arc<Stored> {
        &self.stored
    }

    pub fn stats(&self) -> SourceStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        SourceStats {
            reads: get(&c.reads),
            stored_bytes: get(&c.stored_bytes),
            raw_bytes: get(&c.raw_bytes),
            hot_hits: get(&c.hot_hits),
            remote_gets: get(&c.remote_gets),
            get_us: get(&c.get_us),
            decompress_us: get(&c.decompress_us),
        }
    }

    fn load(&self, window: &Window) -> Result<Vec<u8>, StoreError> {
        let blobs = self.stored.store().inner.blobs();
        let here = match self.load_from(blobs, window) {
            Ok((_, raw)) => return Ok(raw),
            Err(error) => error,
        };
        let Some(remote) = &self.options.remote else { return Err(here) };
        match &here {
            StoreError::Blob(BlobError::NotFound { .. }) => {}
            error => tracing::warn!(%error, "chunk is got from the remote store"),
        }
        let (file, raw) = self.load_from(&**remote, window)?;
        add(&self.counters.remote_gets, 1);
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
        let begin = Instant::now();
        let file = blobs.get(&chunk_key(&window.hash))?;
        let got = Instant::now();
        add(&self.counters.get_us, micros(got - begin));
        add(&self.counters.stored_bytes, file.len() as u64);
        let raw = decode_chunk(blobs, &file, &window.hash, Some(window.own_pages))?;
        add(&self.counters.decompress_us, micros(got.elapsed()));
        add(&self.counters.raw_bytes, raw.len() as u64);
        Ok((file, raw))
    }

    /// Read the pages of `piece`, which lies in one window.
    fn read_in_window(&self, piece: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let table = self.stored.table();
        let not_own = || {
            let name = &self.stored.descriptor().name;
            let text = format!("pages {piece} are not snapshot `{name}`'s own");
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
        let (raw, was_hot) = self
            .options
            .hot
            .get(&window.hash, keep, || self.load(window))
            .map_err(StoreError::into_io)?;
        if was_hot {
            add(&self.counters.hot_hits, 1);
        }
        let from = usize::try_from(skipped).unwrap_or(usize::MAX);
        // The length was checked when the chunk was loaded, by whoever did.
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
        self.stored.table().chunk_pages()
    }

    fn reads_ahead(&self) -> usize {
        let remote = self.options.remote.as_ref().map_or(0, |remote| remote.in_flight());
        remote.max(self.stored.store().inner.blobs().in_flight()).max(READS_AHEAD_MIN)
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        if bytes.len() as u64 != range.byte_len() {
            let text = format!("{} bytes for pages {range}", bytes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        add(&self.counters.reads, 1);
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

/// The content of the chunk `hash`, of which `file` is the file in `blobs`, and which has `pages` if that is known.
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
