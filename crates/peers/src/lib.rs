//! This host in a cluster: members call each other's daemons, fork onto each other, and lend each
//! other pages.
//!
//! ```text
//!   init, join, leave ─► operations ─► cluster ─► life ─► member ─► hosts, images, jobs, …
//!
//!   this host                                                   another host
//!   fork ───► away ─► remote_fork::send ─► client ════► server ─► routes ─► remote_fork::receive
//!   ticket ─► reserve ───────────────────► client ════► server ─► routes ─► tickets
//!   page service ─► images ◄════════════════════════ sources ◄─ engines of its clones
//! ```
//!
//! | module | is |
//! |---|---|
//! | `operations` | what users do with a cluster: make one, join, look at it, drain, leave |
//! | `cluster` | this host in a cluster, or in none |
//! | `life` | one membership: the port for other hosts, the page service, heartbeats |
//! | `member` | what a member holds: the other hosts, images, leases, orders |
//! | `error` | what fails, as enums; the API's form of each |
//! | `this_host`, `settings`, `records` | what does not depend on the cluster; flags; files |
//! | `server`, `connection_slots` | the port: TLS, who may connect, and how many |
//! | `routes`, `context` | what hosts ask each other, and the state of the answers |
//! | `client`, `connection_cache`, `relay` | calls of other hosts, and requests passed on |
//! | `hosts`, `locate`, `family` | who is there, where a VM is, how a family ends |
//! | `watched` | which changes of other hosts readers of events are told |
//! | `away`, `remote_fork` | a fork onto other hosts: the plan; orders sent and received |
//! | `reserve`, `tickets` | places for a ticket's clones; messages of clones and parent |
//! | `transfer_estimate`, `guest_images` | what a host lacks for clones: memory, a disk |
//! | `images`, `loans`, `arrivals` | names of images; how long lent and borrowed ones stay |
//! | `disks` | disks of clones on other hosts: page tables, and pages as they are read |
//! | `stored`, `stored_blobs`, `stored_routes` | images that hosts pull from each other, chunk by chunk |
//! | `sources`, `multicast` | where missing pages come from: one host, or sent to all |
//! | `touch_feedback` | what clones touch, reported to the parent's host |
//! | `quotas`, `jobs` | what a user has on all hosts; nodes that an engine holds |
//!
//! Promises: only members get anything. Of two hosts that ask for the same memory, at most one
//! gets it. An order is carried out once, and one that is given up leaves no VM. A silent host
//! costs a bounded wait. A lent page stays until no VM needs it, or until its borrower is silent
//! for too long.
//!
//! It does not know who may be a member ([`vmfork_cluster`]) or how pages travel
//! ([`vmfork_transfer`]). It does not know how a VM is frozen or a clone started
//! ([`vmfork_fork`]). Of stored snapshots it knows the files of guest images.

mod arrivals;
mod away;
mod client;
mod cluster;
mod connection_cache;
mod connection_slots;
mod context;
mod disks;
mod error;
mod family;
mod guest_images;
mod hosts;
mod images;
mod jobs;
mod life;
mod lifetimes;
mod loans;
mod locate;
mod member;
mod multicast;
mod operations;
mod pace;
mod quotas;
mod records;
mod relay;
mod remote_fork;
mod reserve;
mod routes;
mod server;
mod settings;
mod sources;
mod stored;
mod stored_blobs;
mod stored_routes;
#[cfg(test)]
mod tests;
mod this_host;
mod tickets;
mod touch_feedback;
mod transfer_estimate;
mod watched;

pub use self::cluster::Cluster;
pub use self::family::end_everywhere;
pub use self::lifetimes::tell_lifetime;
pub use self::member::Member;
pub use self::operations::Operations;
pub use self::pace::Pace;
pub use self::settings::{PageTransfer, Settings, TicketPlace};
pub use self::stored::{Images as StoredImages, Told, Wanted};
