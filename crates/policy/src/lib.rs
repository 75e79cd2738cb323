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
//! what it returns. The engine, the benchmarks and the simulator run the same code. Its [`Tally`] says what faults
//! found and what each [`Background`] was good for. [`Rate`] says how much of what nobody waits for may travel.
//!
//! Promises: demand goes before everything else, first come first served; a page is under way at
//! most once, or twice if the first was for nobody who waited, and takes too long, and never while present; whoever waits for a page is named exactly once, to be woken
//! or to be stopped; every queue has a bound.
//!
//! [`transfer`]: how pages travel between hosts, by multicast and in a swarm.
//!
//! Left to others: reading sources, writing caches, waking (`vmfork-engine`); looking at page maps
//! (`vmfork-memory`); where profiles are kept. No I/O, no threads, no clock (times are passed in), no unsafe code.

#![deny(unsafe_code)]

mod background;
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
pub use presence::Presence;
pub use profile::{Cluster, Profile, ProfileError, sequential};
pub use rate::Rate;
pub use recorder::{Recorder, RecorderConfig, Recording, RecordingEnd};
pub use scheduler::{
    BACKGROUNDS_MAX, Config, ConfigError, Faults, Fetch, Fetched, Outcome, Reason, Refusal,
    Scheduler, Tally, TooManyBackgrounds, ViewId,
};
