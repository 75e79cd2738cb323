//! Guest memory on one host: caches, frozen ranges, views, and the page engine that ties them together.
//!
//! ```text
//!                freeze                       fault (userfaultfd)
//!   GuestMemory ────────► Engine thread ◄───────────────────────── views (QEMU processes)
//!    (a VM's RAM)           │   ▲ answer: wake | zeros | map a run of an ancestor | fill the cache
//!                           ▼   │
//!                       HostImage: Cache (memfd + Presence), PageTable, FrozenRange
//!                           ▲
//!                           └── read by the engines of images derived from it
//! ```
//!
//! One [`Engine`] per image: a thread that serves the image's views. It fills caches, once however many views
//! wait, and never a view by itself, so that all clones share one copy until they write (design.md §3.2). A block
//! of 2 MiB is served from the cache of its *home*, the image that changed it last, so that generations share
//! what they did not write. [`GuestMemory`] is a VM's RAM, by way of the shim's keeper: attach it to an image,
//! freeze it into a new one.
//!
//! Promises: a fault is answered or its view is reported lost; a page is brought into a cache once (twice, if it
//! takes long and a VM waits for it, or two engines' VMs at the same moment: the bytes are the same);
//! bytes in a cache never change while a table names them.
//!
//! Left to others: QEMU, which pages to prefetch, when to fork, what to do with a lost VM.

mod cache;
mod counters;
mod engine;
mod frozen;
mod garbage;
mod guest_memory;
mod handover;
mod homes;
mod host_image;
mod incoming;
mod layout;
mod pagemap;
mod presence;
mod stillness;
mod sync;
mod tap;
mod uffd;
mod view;

pub use cache::Cache;
pub use counters::{Counter, ImageCounters, Times, ViewCounters};
pub use engine::{Engine, EngineError, EngineEvent, EngineOptions, EventSink};
pub use garbage::collect_garbage;
pub use guest_memory::{
    Attachment, ConnectError, FreezeError, FreezeTimes, GuestMemory, MemorySample, TouchScan,
    USERFAULTFD_DEVICE,
};
pub use host_image::{HostImage, OpenError, PageLost, StoredRun};
pub use layout::Layout;
pub use presence::Presence;
pub use tap::{ShimEnds, Tap, TapError};
pub use uffd::Uffd;
pub use vmfork_policy::ViewId;
