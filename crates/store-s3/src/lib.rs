//! Stored snapshots in an object store: S3, and what speaks its protocol.
//!
//! ```text
//!   vmfork-store ──► Blobs for S3 ──► Handle::block_on ──► object_store ──► HTTP
//! ```
//!
//! [`S3`] is [`vmfork_store::Blobs`] below a prefix of a bucket. Keys are as docs/format.md has
//! them. A descriptor appears by a PUT with `If-None-Match: *`, so that of two hosts that push one
//! name, one is told.
//!
//! A [`RawObject`] is one object as it is, read in parts, and not a store.
//!
//! Promises: every call ends, within [`Settings::patience`] of the last sign of life, times a few
//! attempts. An error tells what isn't there from what isn't allowed, can't be reached, or has no
//! bucket.
//!
//! Calls block, on the runtime whose handle they were given. They come from plain threads: on a
//! thread of a runtime they would panic.

#![deny(unsafe_code)]

mod location;
mod object;
mod settings;
mod store;

pub use location::{Location, LocationError};
pub use object::{ObjectVersion, RawObject};
pub use settings::{OpenError, Settings};
pub use store::S3;
