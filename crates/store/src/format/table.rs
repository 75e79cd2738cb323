//! A snapshot's page table: what became of each page since the base, and which chunks hold the own
//! pages.
//!
//! ```text
//!   4 bytes  "VFTB"
//!   1 byte   version, 1
//!   varint   pages of the image
//!   varint   chunk_pages: pages of a window; a power of two, 1 to 512
//!   varint   number of extents, then each extent:
//!              varint  pages since the end of the one before (of the first: its start)
//!              varint  2 × pages + (0 own, 1 zero)
//!   for each window that has own pages, in order:
//!             32 bytes  blake3 of the own pages of the window, in order, which are one chunk
//!             varint    bytes of that chunk's file when the table was written
//!  32 bytes  blake3 of all before
//! ```
//!
//! Pages in no extent are the base's, or zero without a base: zero pages take nothing (Twinkle,
//! §4.1: its table's p2d = −1). Extents ascend, do not overlap, and two of a kind never touch: a
//! table has one encoding. How many windows there are follows from the extents. The length of a
//! chunk's file is a hint for progress and statistics: the same content may be stored otherwise in
//! another store.

use blake3::Hash;
use vmfork_image::{PageIdx, PageRange};

use super::{CHUNK_PAGES_MAX, IMAGE_PAGES_MAX};
use vmfork_image::bytes::{Cursor, Flaw, put_varint};

const MAGIC: [u8; 4] = *b"VFTB";
const VERSION: u8 = 1;
const HASH_BYTES: usize = 32;
/// An extent is two numbers of at least a byte.
const EXTENT_BYTES_MIN: usize = 2;
/// A window's entry has a hash and a number of at least a byte.
const WINDOW_BYTES_MIN: usize = HASH_BYTES + 1;

/// What a page is, relative to the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Held by this snapshot, in a chunk.
    Own,
    /// All bytes 0, whatever the base has.
    Zero,
}

/// Where the own pages of one window are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Which: it begins at page `index` × `chunk_pages`.
    pub index: u64,
    /// How many of its pages are own, so how many the chunk has.
    pub own_pages: u64,
    /// Of the chunk's content, which is its name.
    pub hash: Hash,
    /// Bytes of the chunk's file, when the table was written.
    pub stored_bytes: u64,
}

/// The page table of one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pages: u64,
    chunk_pages: u64,
    extents: Vec<(PageRange, Extent)>,
    windows: Vec<Window>,
}

/// Own pages by window: the window's index and how many of its pages are own, ascending.
pub(crate) fn own_windows(
    extents: &[(PageRange, Extent)],
    chunk_pages: u64,
) -> impl Iterator<Item = (u64, u64)> + '_ {
    let mut own = extents.iter().filter(|(_, e)| *e == Extent::Own).map(|(range, _)| *range);
    let mut rest: Option<PageRange> = None;
    std::iter::from_fn(move || {
        let mut found: Option<(u64, u64)> = None;
        loop {
            let Some(range) = rest.take().or_else(|| own.next()) else { return found };
            let index = range.start().0 / chunk_pages;
            if found.is_some_and(|(at, _)| at != index) {
                rest = Some(range);
                return found;
            }
            let piece = range.truncate(chunk_pages - range.start().0 % chunk_pages);
            found.get_or_insert((index, 0)).1 += piece.len();
            rest = Some(range.from_page(piece.end())).filter(|rest| !rest.is_empty());
        }
    })
}

/// How many windows [`own_windows`] yields, without going through them: a few bytes can name very
/// many.
fn window_count(extents: &[(PageRange, Extent)], chunk_pages: u64) -> u64 {
    let (mut count, mut last) = (0u64, None);
    for (range, _) in extents.iter().filter(|(_, extent)| *extent == Extent::Own) {
        let (from, to) = (range.start().0 / chunk_pages, (range.end().0 - 1) / chunk_pages);
        // At most as many as there are page numbers: windows are counted once, extents don't
        // overlap.
        count += to - from + u64::from(last != Some(from));
        last = Some(to);
    }
    count
}

/// Why numbers make no table, if they don't.
pub(crate) fn chunk_pages_flaw(chunk_pages: u64) -> Option<String> {
    let fits = (1..=CHUNK_PAGES_MAX).contains(&chunk_pages) && chunk_pages.is_power_of_two();
    (!fits).then(|| {
        format!("windows of {chunk_pages} pages, not a power of two from 1 to {CHUNK_PAGES_MAX}")
    })
}

impl Table {
    /// `chunk` gives hash and stored bytes of each window's chunk, by the window's index.
    ///
    /// # Errors
    /// Extents that are empty, overlap, don't ascend, lie beyond `pages`, or touch another of their
    /// kind.
    pub(crate) fn new(
        pages: u64,
        chunk_pages: u64,
        extents: Vec<(PageRange, Extent)>,
        mut chunk: impl FnMut(u64) -> Option<(Hash, u64)>,
    ) -> Result<Self, String> {
        if pages == 0 || pages > IMAGE_PAGES_MAX {
            return Err(format!("an image of {pages} pages"));
        }
        if let Some(flaw) = chunk_pages_flaw(chunk_pages) {
            return Err(flaw);
        }
        let mut last: Option<(PageRange, Extent)> = None;
        for (range, extent) in &extents {
            let (end, of_a_kind) =
                last.map_or((PageIdx(0), false), |(r, e)| (r.end(), e == *extent));
            let touches = of_a_kind && range.start() == end;
            if range.is_empty() || range.start() < end || range.end().0 > pages || touches {
                return Err(format!("extent {range} after {end}, of {pages} pages"));
            }
            last = Some((*range, *extent));
        }
        let mut windows = Vec::new();
        for (index, own_pages) in own_windows(&extents, chunk_pages) {
            let Some((hash, stored_bytes)) = chunk(index) else {
                return Err(format!("no chunk for window {index}"));
            };
            windows.push(Window { index, own_pages, hash, stored_bytes });
        }
        Ok(Self { pages, chunk_pages, extents, windows })
    }

    /// Pages of the image.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages of a window.
    pub fn chunk_pages(&self) -> u64 {
        self.chunk_pages
    }

    /// What differs from the base, ascending.
    pub fn extents(&self) -> &[(PageRange, Extent)] {
        &self.extents
    }

    /// Windows with own pages, ascending.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// Pages in extents of that kind.
    pub fn count(&self, extent: Extent) -> u64 {
        let of_it = self.extents.iter().filter(|(_, found)| *found == extent);
        of_it.map(|(range, _)| range.len()).sum()
    }

    /// The window that `page` is in, if it has own pages.
    pub fn window_of(&self, page: PageIdx) -> Option<&Window> {
        let index = page.0 / self.chunk_pages;
        let at = self.windows.binary_search_by_key(&index, |window| window.index).ok()?;
        self.windows.get(at)
    }

    /// The pages of window `index`, cut at the image's end.
    pub fn window_range(&self, index: u64) -> PageRange {
        let start = index.saturating_mul(self.chunk_pages).min(self.pages);
        let end = start.saturating_add(self.chunk_pages).min(self.pages);
        PageRange::between(PageIdx(start), PageIdx(end))
    }

    /// Own pages within `range`, in order.
    pub fn own_runs(&self, range: PageRange) -> impl Iterator<Item = PageRange> + '_ {
        own_runs(&self.extents, range)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut file = Vec::with_capacity(64 + self.extents.len() * 4 + self.windows.len() * 36);
        file.extend_from_slice(&MAGIC);
        file.push(VERSION);
        put_varint(&mut file, self.pages);
        put_varint(&mut file, self.chunk_pages);
        put_varint(&mut file, self.extents.len() as u64);
        let mut end = 0;
        for (range, extent) in &self.extents {
            put_varint(&mut file, range.start().0 - end);
            put_varint(&mut file, range.len() << 1 | u64::from(*extent == Extent::Zero));
            end = range.end().0;
        }
        for window in &self.windows {
            file.extend_from_slice(window.hash.as_bytes());
            put_varint(&mut file, window.stored_bytes);
        }
        let hash = blake3::hash(&file);
        file.extend_from_slice(hash.as_bytes());
        file
    }

    /// # Errors
    /// The file is no table, or not as it was written: what, and where.
    pub fn decode(file: &[u8]) -> Result<Self, Flaw> {
        let mut cursor = Cursor::new(file);
        cursor.magic(MAGIC, VERSION, "page table")?;
        let Some((body, hash)) = file.split_last_chunk::<HASH_BYTES>() else {
            return Err(Flaw::at(file.len(), "cut short: no room for a hash"));
        };
        if blake3::hash(body) != Hash::from_bytes(*hash) {
            let what = "changed or cut: the hash at the end is not that of the file";
            return Err(Flaw::at(body.len(), what));
        }
        let mut cursor = Cursor::new(body);
        cursor.take(MAGIC.len() + 1, "the header")?;
        let pages = cursor.varint("the number of pages")?;
        let chunk_pages = cursor.varint("the pages of a window")?;
        if let Some(flaw) = chunk_pages_flaw(chunk_pages) {
            return Err(Flaw::at(cursor.offset(), flaw));
        }
        let extents = Self::decode_extents(&mut cursor, pages)?;
        let window_count = window_count(&extents, chunk_pages);
        let room = cursor.rest_bytes() / WINDOW_BYTES_MIN;
        if window_count > room as u64 {
            let what =
                format!("{window_count} windows have own pages, {room} chunks at most follow");
            return Err(Flaw::at(cursor.offset(), what));
        }
        let mut chunks =
            Vec::with_capacity(room.min(usize::try_from(window_count).unwrap_or(room)));
        for _ in 0..window_count {
            let hash = Hash::from_bytes(cursor.array("a chunk's hash")?);
            chunks.push((hash, cursor.varint("a chunk's length")?));
        }
        cursor.end("page table")?;
        let mut chunks = chunks.into_iter();
        // What is left to go wrong is in the extents, which begin after a header of a few bytes.
        Self::new(pages, chunk_pages, extents, |_| chunks.next())
            .map_err(|what| Flaw::at(MAGIC.len() + 1, what))
    }

    fn decode_extents(
        cursor: &mut Cursor<'_>,
        pages: u64,
    ) -> Result<Vec<(PageRange, Extent)>, Flaw> {
        let at = cursor.offset();
        let count = cursor.varint("the number of extents")?;
        let room = cursor.rest_bytes() / EXTENT_BYTES_MIN;
        let count = match usize::try_from(count) {
            Ok(count) if count <= room => count,
            _ => return Err(Flaw::at(at, format!("{count} extents, {room} at most follow"))),
        };
        let mut extents = Vec::with_capacity(count);
        let mut end = 0u64;
        for _ in 0..count {
            let at = cursor.offset();
            let gap = cursor.varint("an extent's start")?;
            let len = cursor.varint("an extent's length")?;
            let extent = if len & 1 == 0 { Extent::Own } else { Extent::Zero };
            let range = end
                .checked_add(gap)
                .and_then(|start| PageRange::new(PageIdx(start), len >> 1).ok())
                .filter(|range| !range.is_empty() && range.end().0 <= pages);
            let Some(range) = range else {
                let what = format!("an extent of {} pages, {gap} after page {end}", len >> 1);
                return Err(Flaw::at(at, format!("{what}, in an image of {pages}")));
            };
            end = range.end().0;
            extents.push((range, extent));
        }
        Ok(extents)
    }
}

/// Own pages within `range`, in order.
pub(crate) fn own_runs(
    extents: &[(PageRange, Extent)],
    range: PageRange,
) -> impl Iterator<Item = PageRange> + '_ {
    let from = extents.partition_point(|(extent, _)| extent.end() <= range.start());
    extents[from..]
        .iter()
        .take_while(move |(extent, _)| extent.start() < range.end())
        .filter(|(_, kind)| *kind == Extent::Own)
        .map(move |(extent, _)| extent.intersect(&range))
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
