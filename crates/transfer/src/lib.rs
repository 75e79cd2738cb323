//! Pages from one host to another: one host asks one other at a time. Of several hosts that have
//! them, it asks the best ([`Swarm`]). Or they are sent once to all that need them ([`PageGroup`],
//! which `vmfork-multicast` implements).
//!
//! ```text
//!   this host                                    another host
//!   PeerSource ──► Holders ──► Peer ═══ TLS ═══► PageService ──► Pages
//!   (a PageSource)  who has    a pool of         a thread for     the images
//!                   the image  connections       each connection  that it holds
//! ```
//!
//! A connection carries one request at a time, and both ends block on it. A remote fault costs a
//! switch to the thread that serves it and one back, and nothing in between. Many requests at a
//! time are many connections. The bytes are in [`proto`] and in `docs/protocol.md`.
//!
//! Promises:
//! - A read is answered or fails within a bound. What it returns is what the other host's [`Pages`]
//!   gave, whole.
//! - TLS authenticates it. If the giver did not freeze the image, what it passes on is compared
//!   with the sums of the host that did, as long as that one answers.
//! - Only members get anything, and a member that was removed gets nothing more.
//! - What the other side sends is checked before memory is taken for it.
//! - [`PageService::stop`] and dropping leave no thread behind that does not wait for [`Pages`].
//!
//! Left to others: what a page is for; which hosts are members, and TLS's keys (the configurations
//! are handed in); which hosts have an image.

#![deny(unsafe_code)]

mod channel;
mod choice;
mod client;
mod counters;
mod pack;
pub mod proto;
mod service;
mod sums;

pub use client::{
    Holders, PageGroup, Peer, PeerConfig, PeerError, PeerLimits, PeerSource, SourceCounters, Swarm,
    SwarmConfig, SwarmMember,
};
pub use counters::{AheadCounters, Counter, Histogram, PeerCounters, ServiceCounters};
pub use pack::{Scratch, receive};
pub use vmfork_policy::transfer::HostId;

pub use client::verify::{Comparison, Verifier};
pub use proto::{Invitation, Refusal, RefusalKind, Urgency};
pub use service::{PageService, Pages, ServiceLimits, Wanted};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A panic elsewhere leaves what these locks guard as it is: numbers and lists.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
