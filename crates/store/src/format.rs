//! The bytes of a store's files: what docs/format.md describes.
//!
//! Readers take any bytes. They check order, bounds and hashes before they use a number, and take
//! no memory that the file's own length does not warrant. They answer with a [`Flaw`]: what is
//! wrong, and at which byte.

pub mod chunk;
pub mod descriptor;
mod first;
pub mod role;
pub mod sealed;
pub mod table;
pub mod working_set;

pub use vmfork_image::bytes::Flaw;

/// Most pages of a window: 2 MiB, one block of an image.
pub const CHUNK_PAGES_MAX: u64 = vmfork_image::BLOCK_PAGES;

/// Most pages of an image, 4 TiB: who opens one keeps something for each of them, so a few bytes
/// must not promise more.
pub const IMAGE_PAGES_MAX: u64 = 1 << 30;

/// A page's bytes, for slices.
pub(crate) const PAGE_LEN: usize = 4096;
const _: () = assert!(PAGE_LEN as u64 == vmfork_image::PAGE_BYTES);

/// How chunks are written. How they are read is in each chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Compression {
    None,
    Zstd {
        /// -7 to 22; above 3 it does not keep up with a disk.
        level: i32,
    },
}
