//! Reads pages from other hosts.
//!
//! ```text
//!   PeerSource ──► Read ──────► Peer ──► Pool ──► Link
//!   one image      one read,    one host          one connection,
//!        │         or several                     one request at a time, or several together
//!        │         (pipelined)
//!        ├───────► Holders: the hosts named with the image, and which of them failed
//!        ├───────► Swarm: which hosts have which pages
//!        ├───────► PageGroup: pages that are sent to all who need them
//!        └───────► Verifier: what the pages should be, by the origin
//! ```
//!
//! What a read does in turn is decided in [`vmfork_policy::transfer::read`].
//!
//! Promises: a read ends within a bound. A host that fails is asked last for a while, and what
//! failed there is read from the next. Bytes come from a member, whole, or not at all.

mod group;
mod holders;
mod link;
mod peer;
mod pipelined;
mod pool;
mod read;
mod source;
mod swarm;
pub(crate) mod verify;

pub use group::PageGroup;
pub use holders::Holders;
pub use peer::{Peer, PeerConfig, PeerError, PeerLimits};
pub use source::{PeerSource, SourceCounters};
pub use swarm::{Swarm, SwarmMember};
pub use vmfork_policy::transfer::swarm::SwarmConfig;
