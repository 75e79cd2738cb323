//! Pages for many hosts at a time, each sent once to a UDP group that all hosts that need the image
//! hear. This is SnowFlock's mcdist, whose decisions are [`vmfork_policy::transfer::multicast`]'s.
//!
//! ```text
//!   host with the image                                      each host that needs it
//!   PageService ◄───────── TLS: invite me ─────────────────── Listener ◄── read ── PeerSource
//!        └──► Groups ────── TLS: group, keys ───────────────►    │
//!               │    ◄───── UDP: requests, what comes in ────────┤
//!               └═════════► UDP, to all: pages, once ════════════╪══► what was asked for ──► read
//!                                                                └──► all else ──► HeardPages (this host's cache)
//! ```
//!
//! The bytes are in [`datagram`]. Each is sealed (AES-256-GCM) under a key that came over TLS. The
//! sender's datagrams use one that all listeners have, each listener's use one of its own. What is
//! forged, cut short, of another image, or a copy of what came before is counted and dropped.
//! Members that have the group's key could forge: they are trusted with memory anyhow.
//!
//! Promises:
//! - A read here ends within a bound, soon for what a VM waits for. The reader then asks another
//!   host.
//! - Nothing is read while the group is not heard.
//! - A host that was removed from the cluster has no key of what is sent after that.
//! - Buffers are bounded.
//!
//! Left to others: which pages may be requested by which hosts ([`vmfork_transfer::Pages`]), and
//! which of those that come are kept ([`HeardPages`]).

#![deny(unsafe_code)]

mod config;
mod counters;
pub mod datagram;
mod groups;
mod listener;
mod reads;
mod seal;
mod socket;

#[cfg(test)]
mod tests;

pub use config::ListenerConfig;
pub use counters::{GroupCounters, ListenerCounters};
pub use groups::{Groups, GroupsConfig};
pub use listener::{HeardPages, Listener};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A panic elsewhere leaves what these locks guard as it is: numbers and lists.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
