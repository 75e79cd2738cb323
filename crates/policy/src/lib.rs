//! What to fetch next, for one image on one host.
//!
//! ```text
//!   fault ──► Scheduler::on_fault ──► Outcome: zero, present, or it waits
//!                     │
//!   engine ──► Scheduler::next ──► Fetch { range, reason } ──► read a source, write the cache
//!                     ▲                                              │
//!   wake or stop ◄── on_filled / on_failed ◄─────────────────────────┘
//!                     ▲
//!     Background, by Priority:  Listed (a working set) ─ Segments (prediction) ─ Drain, Listed (the rest)
//!                                  ▲
//!   page map ──► Recorder ──► Recording ──► Profile, merged over starts ◄──► bytes
//! ```
//!
//! [`Scheduler`] holds every decision and does nothing itself: feed it what happened, carry out
//! what it returns. The engine, the benchmarks and the simulator run the same code. Its [`Tally`]
//! counts what faults found and what each [`Background`] was good for. [`Rate`] limits background
//! traffic.
//!
//! Promises:
//! - Demand goes before everything else, first come first served.
//! - A page is in flight at most once, and never while present. It is in flight twice if the first
//!   request was a background read that takes too long.
//! - Every waiter of a page is named exactly once, to be woken or to be stopped.
//! - Every queue has a bound.
//!
//! [`transfer`]: how pages travel between hosts, by multicast and in a swarm.
//!
//! Left to others: reading sources, writing caches, waking (`vmfork-engine`); looking at page maps
//! (`vmfork-memory`); where profiles are kept. No I/O, no threads, no clock (times are passed in),
//! no unsafe code.

#![deny(unsafe_code)]

mod background;
mod fetch_order;
mod page_set;
mod presence;
mod profile;
mod rate;
mod recorder;
mod scheduler;
pub mod transfer;

pub use background::{
    Background, Drain, Listed, Priority, Proposal, SEGMENT_PAGES_MAX, Segments, SegmentsConfig,
    SegmentsError,
};
pub use fetch_order::{AheadLimit, FetchOrder};
pub use presence::Presence;
pub use profile::{Cluster, ImageProfiles, Profile, ProfileError, sequential};
pub use rate::Rate;
pub use recorder::{Recorder, RecorderConfig, Recording, RecordingEnd};
pub use scheduler::{
    BACKGROUNDS_MAX, Config, ConfigError, Faults, Fetch, Fetched, Outcome, Reason, Refusal,
    Scheduler, Tally, TooManyBackgrounds, ViewId,
};
