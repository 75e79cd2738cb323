//! Images on one host: their caches, and the page engine that brings pages to whatever reads them.
//!
//! ```text
//!              fault                     wake | zeros | map a run
//!   Reader ─────────► Engine thread ─────────────────────────────► Reader
//!                        │  fill
//!                        ▼
//!                    HostImage: Cache (Backing + Presence), PageTable
//!                        ▲ read                       ▲ read
//!                        └── Originals, PageSource    └── engines of images derived from it
//! ```
//!
//! One [`Engine`] serves one image: a thread that answers the faults of the image's readers. A
//! [`Reader`] is what waits for pages: the memory of a VM, a file server, a disk. The engine fills
//! caches, each page once however many readers wait, so that all readers share one copy. The *home*
//! of a block of 2 MiB is the image that changed it last. The home's cache serves the block, so
//! that generations share what they did not write.
//!
//! A cache keeps its bytes in a [`Backing`]: memory ([`Memfd`]) or a file with holes
//! ([`SparseFile`]). An image's own pages come from its [`Originals`] until they are in the cache,
//! or from a [`vmfork_image::PageSource`].
//!
//! Promises: a fault is answered, or its page is refused with a reason, or its view is reported
//! lost. Bytes in a cache never change while a table names them. A page is brought into a cache
//! once. It is brought twice if it takes long and a reader waits for it, or if two engines' readers
//! want it at the same moment. The bytes are the same then.
//!
//! Left to others: what reads, and how it is told (`vmfork-memory` for VMs); how an image is
//! frozen; which pages to prefetch (`vmfork-policy`).

mod answer;
mod backing;
mod cache;
mod counters;
mod engine;
mod fill;
mod garbage;
mod handover;
mod homes;
mod host_image;
mod incoming;
mod layout;
mod originals;
mod presence;
mod reader;
mod sync;
mod view;

pub use backing::{Backing, Memfd, SparseFile};
pub use cache::Cache;
pub use counters::{Counter, ImageCounters, Times, ViewCounters};
pub use engine::{Engine, EngineError, EngineEvent, EngineOptions, EventSink, next_view_id};
pub use garbage::collect_garbage;
pub use host_image::{HostImage, OpenError, PageLost, StoredRun};
pub use layout::Layout;
pub use originals::{Change, Originals, Release};
pub use presence::Presence;
pub use reader::{MapError, Reader, Waker};
pub use view::View;
