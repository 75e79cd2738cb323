//! Reads pages from other hosts.
//!
//! ```text
//!   PeerSource ──► Holders ──► Peer ──► Pool ──► Link
//!   one image      in order,    one host          one connection,
//!        │         who failed     ▲               one request at a time, or several together
//!        └──────► Swarm ──────────┘
//!                 who has which pages
//! ```
//!
//! Promises: a read ends within a bound; a host that fails is asked last for a while, and what failed there is read
//! from the next. Bytes come from a member, whole, or not at all.

mod beside;
mod holders;
mod link;
mod peer;
mod pool;
mod source;
mod swarm;
mod together;
pub(crate) mod verify;

pub use holders::Holders;
pub use peer::{Peer, PeerConfig, PeerError, PeerLimits};
pub use source::{PeerSource, SourceCounters};
pub use swarm::{Swarm, SwarmMember};
pub use vmfork_policy::transfer::swarm::SwarmConfig;
