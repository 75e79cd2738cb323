//! Images, by name and number: pages, their sources, and the table that says which page has which.
//!
//! ```text
//!   PageIdx, BlockIdx, PageRange      where in an image
//!   ImageId, Source, Origin           whose bytes, and where that image keeps them
//!   PageTable                         for every page its Source; persistent, shared, derived
//!   wire                              the same as bytes, for other hosts; ImageName
//!   bytes                             reading bytes that may say anything
//! ```
//!
//! An image is an immutable array of pages, of memory or of a disk: nothing here knows which. A
//! freeze *derives* the new image's [`PageTable`] from the one its VM began with. Both share what
//! did not change. So a table costs what was written, and neither its image's size nor the depth of
//! its ancestry.
//!
//! Left to others: the bytes themselves (`vmfork-engine`), which to fetch next (`vmfork-policy`).
//! No I/O, no threads, no clock, no unsafe code.

#![deny(unsafe_code)]

pub mod bytes;
mod page;
mod page_source;
mod source;
mod table;
pub mod wire;

pub use page::{
    BLOCK_BYTES, BLOCK_PAGES, BlockIdx, PAGE_BYTES, PAGES_MAX, PageIdx, PageRange, RangeError,
};
pub use page_source::{AheadOrder, AheadRead, NextAhead, PageSource};
pub use source::{ImageId, ImageIdError, Origin, Source};
pub use table::{BlockView, MixedBlock, Owners, PageTable, Runs, TableError, TableSize};
pub use wire::ImageName;
