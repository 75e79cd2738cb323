//! Page tables as bytes, for other hosts.
//!
//! ```text
//!   4 bytes  "VFPT", pages; "VFBH", blocks and their homes
//!   1 byte   version, 1
//!   varint   pages, or blocks
//!   varint   number of names, then each:
//!              8 bytes  host, little endian
//!              8 bytes  image, little endian
//!   varint   number of runs, then each:
//!              varint  pages, or blocks; at least 1
//!              varint  0: none (zero pages, blocks without a home); k: the k-th name, from 1
//! ```
//!
//! A *varint* is LEB128 in its shortest form. Names are in the order in which runs first say them,
//! each once. No two neighbours among the runs say the same. Together the runs are all pages. So
//! equal tables have equal bytes. A run takes two bytes, or three from 128 pages on: a table of
//! 1 GiB in 3,000 runs is about 7 kB. There is no checksum: the sender authenticates the bytes.
//!
//! An [`ImageId`] means something on its own host only; on the wire images have [`ImageName`]s.
//! [`decode`] gives those, and the reader says which images they are to him
//! ([`WireTable::to_table`]).

mod runs;

use std::fmt;

use self::runs::Coded;
use crate::bytes::Flaw;
use crate::{BLOCK_PAGES, BlockIdx, ImageId, PAGES_MAX, PageIdx, PageRange, PageTable, Source};

const PAGES_MAGIC: [u8; 4] = *b"VFPT";
const BLOCKS_MAGIC: [u8; 4] = *b"VFBH";

/// The name of an image across hosts. No two images that hosts of a cluster ever knew have the
/// same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName {
    /// The host that froze it.
    pub host: u64,
    /// Its number there.
    pub image: u64,
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}/{:x}", self.host, self.image)
    }
}

/// How large a table may be that somebody else sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub pages_max: u64,
    pub names_max: u64,
    pub runs_max: u64,
}

impl Default for Limits {
    /// Memory of 256 GiB, which is all that the keeper maps. Names and runs take 64 MiB at most.
    fn default() -> Self {
        Self { pages_max: 1 << 26, names_max: 1 << 16, runs_max: 1 << 22 }
    }
}

/// A table as bytes; `name` says what its images are called across hosts.
pub fn encode(table: &PageTable, name: impl Fn(ImageId) -> ImageName) -> Vec<u8> {
    let runs = table.runs(table.range());
    let named = runs.map(|(run, source)| (run.len(), source.image().map(&name)));
    runs::encode(PAGES_MAGIC, named)
}

/// Reads what [`encode`] wrote. Takes memory for what is there, not for what the bytes say there
/// is.
///
/// # Errors
/// If the bytes are anything else, or go beyond `limits`: what, and where.
pub fn decode(bytes: &[u8], limits: Limits) -> Result<WireTable, Flaw> {
    let pages_max = limits.pages_max.min(PAGES_MAX);
    let limits = Limits { pages_max, ..limits };
    runs::decode(bytes, PAGES_MAGIC, "page table", "pages", limits).map(WireTable)
}

/// Which image's cache serves each block, in order, as bytes.
pub fn encode_homes(homes: impl IntoIterator<Item = Option<ImageName>>) -> Vec<u8> {
    runs::encode(BLOCKS_MAGIC, homes.into_iter().map(|home| (1, home)))
}

/// Reads what [`encode_homes`] wrote; the blocks of as many pages as `limits` allows.
///
/// # Errors
/// As [`decode`].
pub fn decode_homes(bytes: &[u8], limits: Limits) -> Result<WireHomes, Flaw> {
    let blocks_max = limits.pages_max.min(PAGES_MAX).div_ceil(BLOCK_PAGES);
    let limits = Limits { pages_max: blocks_max, ..limits };
    runs::decode(bytes, BLOCKS_MAGIC, "list of homes", "blocks", limits).map(WireHomes)
}

/// A page table whose images have names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireTable(Coded);

impl WireTable {
    /// How many pages the image has.
    pub fn pages(&self) -> u64 {
        self.0.units
    }

    /// The images that own pages, each once.
    pub fn names(&self) -> &[ImageName] {
        &self.0.names
    }

    /// The runs of pages of one owner, in order; without an owner, they are zero.
    pub fn runs(&self) -> impl Iterator<Item = (PageRange, Option<ImageName>)> + '_ {
        self.0.runs().map(|(start, len, name)| {
            let end = PageIdx(start.saturating_add(len).min(PAGES_MAX));
            (PageRange::between(PageIdx(start), end), name)
        })
    }

    /// The table; `id` says which image a name is here.
    ///
    /// # Errors
    /// The first name for which there is none.
    pub fn to_table(
        &self,
        id: impl Fn(ImageName) -> Option<ImageId>,
    ) -> Result<PageTable, ImageName> {
        for name in self.names() {
            id(*name).ok_or(*name)?;
        }
        let owned = self.runs().filter_map(|(run, name)| Some((run, Source::Image(id(name?)?))));
        let zeros = PageTable::uniform(self.pages(), Source::Zero);
        Ok(zeros.derive(owned).expect("runs end where the table does: `decode` saw to it"))
    }
}

/// The home of each block, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireHomes(Coded);

impl WireHomes {
    /// How many blocks the image has.
    pub fn blocks(&self) -> u64 {
        self.0.units
    }

    /// The images that are home to blocks, each once.
    pub fn names(&self) -> &[ImageName] {
        &self.0.names
    }

    /// The runs of blocks of one home, in order: the first, how many, and which.
    pub fn runs(&self) -> impl Iterator<Item = (BlockIdx, u64, Option<ImageName>)> + '_ {
        self.0.runs().map(|(start, len, name)| (BlockIdx(start), len, name))
    }
}

#[cfg(test)]
mod tests;
