//! Writable disks on images: layers, and the server that QEMU's own client reads them from.
//!
//! ```text
//!   DiskStore ──creates──► Disk ──freeze──► DiskImage ──► Disk, Disk, …   clones
//!       │                   │                   │
//!   layers' folders     own layer         flat page table
//!                           ▲
//!   DiskServer ── DiskExport┘   NBD over a unix socket, by exact name
//! ```
//!
//! Promises: a freeze is O(1), and makes and unlinks no file. A read costs one table lookup at any
//! depth of clones. What was acknowledged survives the daemon.
//!
//! Left to others: QEMU, VMs' memory, HTTP; which process holds the listening socket.
#![deny(unsafe_code)]

mod background;
mod counters;
mod disk;
mod export;
mod holes;
mod image;
mod late;
pub mod layer;
mod lower;
mod merging;

mod raw;
mod server;
mod space;
mod store;

pub use counters::{DiskCounts, DiskTotals, Operation, RequestTimes};
pub use disk::Disk;
pub use export::{DiskExport, Durability};
pub use image::{Base, DiskImage, ImageError};
pub use lower::{Lower, OwnPages};
pub use raw::{RawError, RawFile, Stamp};
pub use server::{DiskServer, ServerCounts};
pub use space::DiskSet;
pub use store::{
    BadLayer, BaseKind, BaseNote, DiskSpec, DiskStore, FoundDisk, FoundLayer, Listing, Note,
    StoreCounts, StoreError, StoreOptions,
};
