//! How pages travel between hosts, as state machines without sockets or clocks.
//!
//! ```text
//!   multicast   Receiver ──Request──► Sender ──runs, paced──► all Receivers ──batches──► cache
//!               (on each host)        (on the host that has the image)  ──GaveUp──► unicast
//!
//!   unicast,    Holders::choose ──► whom to ask ──► answered, failed, expired
//!   swarm          ▲        ▲
//!                  │        └── Pick::next, background reads
//!               announced ◄── Swarm, which asks all others what they hold
//!
//!   one read    Read: group, swarm, named hosts, comparison with the origin, retries ──► done or given up
//! ```
//!
//! All times are of one clock of the caller's that does not go back. The caller owns sockets, bytes
//! and timers. It feeds in what came, asks what to do next until there is nothing, and sleeps until
//! the `wake_at` of each.
//!
//! Promises:
//! - Every queue and every retry has a bound.
//! - A request for a page ends with the page, or with a give-up to act on.
//! - A page that is in flight to a host is requested again only after a timeout.
//!
//! Left to others: bytes and their authenticity, which hosts are members, when a VM is stopped.

pub mod bounds;
pub mod multicast;
pub mod read;
pub mod swarm;

mod answer_times;
mod demanded;
mod meter;
mod run_map;

use std::fmt;

pub(crate) use self::answer_times::AnswerTimes;
pub use self::demanded::Demanded;

/// Whether a VM waits for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Urgency {
    /// A VM waits: a demand read.
    Demand,
    /// No VM waits yet: a prefetch. It gives way to demand.
    Ahead,
}

/// A host of a cluster: random, chosen when it is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u64);

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
