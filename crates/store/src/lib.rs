//! Stored snapshots: kept in a folder or an object store, read back page by page.
//!
//! ```text
//!   Store ──── create ──► chunks, tables, state, then the descriptor: with it the snapshot exists
//!     │  open
//!     ▼
//!   Stored ─── image ──► StoredImage ─── source ──► StoredPages, a PageSource
//!     │                                               window ──► HotChunks ──► chunk, local or remote
//!   Blobs ──── Folder, or an object store (crate `store-s3`)
//! ```
//!
//! A snapshot has one or more images, each with a role: the guest's memory, or one of its disks.
//! An image's own pages are cut into windows and stored as chunks under the hash of their content.
//! So equal ones are stored once across all images and snapshots. A page table says which pages
//! those are, which are zero, and which are the base's. The others are device state and a
//! descriptor. docs/format.md has the bytes.
//!
//! Promises: a snapshot is there whole or not at all, whatever crashes when. What is read was
//! verified. No file, whatever it says, makes a reader panic or take more memory than the file's
//! length warrants. What one operation needs, another of the same process doesn't remove.
//!
//! Left to others: what is in a snapshot's device state and `vm` (the daemon), when pages are read
//! (`vmfork-policy`). Threads and files, no async runtime.

#![deny(unsafe_code)]

mod blobs;
mod bounds;
mod copy;
mod create;
mod error;
mod fetch;
mod files;
mod flatten;
mod flights;
pub mod format;
mod give;
mod hot;
mod names;
mod pins;
mod profile;
mod references;
mod remove;
mod source;
mod store;
mod stored;
mod stream;
mod verify;
mod work;
mod writing;

pub use blobs::{BlobError, Blobs, Failure, Folder};
pub use bounds::bytes_max;
pub use copy::Copied;
pub use create::{Draft, ImageDraft, ReadImages, ReadPages};
pub use error::{Damage, StoreError};
pub use fetch::Missing;
pub use flights::Fetched;
pub use format::descriptor::{
    BaseRef, Counts, Descriptor, IMAGES_MAX, ImageDescriptor, SnapshotId, Unreadable,
};
pub use format::role::{DeviceName, Role, RoleError};
pub use format::table::{Extent, Table};
pub use format::{Compression, Flaw};
pub use give::{KeyOf, VerifiedChunk, is_origin, is_profile};
pub use hot::HotChunks;
pub use names::{NAME_BYTES_MAX, name_is_valid};
pub use profile::WorkingSetReader;
pub use remove::{Collected, Removed};
pub use source::{SourceOptions, StoredPages};
pub use store::{CHAIN_MAX, Listed, Store};
pub use stored::{Stored, StoredImage};
pub use verify::Verified;
pub use work::Work;
