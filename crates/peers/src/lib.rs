//! This host in a cluster, or in none: members call each other's daemons, fork onto each other, and
//! lend each other pages.
//!
//! ```text
//!   init, join, leave ──► Cluster ── Member (of one life of the daemon) ──┬── life: heartbeats, what is lent ends
//!                            │                                           ├── server: TLS, REST API, routes
//!   fork ──► place ──► client ═══════ another host: routes ──► receive ──┴── page service ──► images
//! ```
//!
//! Promises: only members get anything. If two hosts ask for the same memory at once, its host
//! tells each whose it is.
//! A silent host costs a bounded wait.
//! Left to others: who is a member ([`vmfork_cluster`]), how pages travel ([`vmfork_transfer`]).

mod arrivals;
mod away;
mod client;
mod cluster;
mod coming;
mod context;
mod descriptor;
mod family;
mod finding;
mod guest_images;
mod hosts;
mod images;
mod jobs;
mod kept;
mod life;
mod lifetimes;
mod loans;
mod member;
mod multicast;
mod operations;
mod orders;
mod place;
mod places;
mod quotas;
mod receive;
mod records;
mod relay;
mod reserve;
mod routes;
mod server;
mod settings;
mod sources;
#[cfg(test)]
mod tests;
mod this_host;
mod tickets;
mod touched;

pub use self::cluster::Cluster;
pub use self::family::end_everywhere;
pub use self::lifetimes::tell_lifetime;
pub use self::member::Member;
pub use self::operations::Operations;
pub use self::settings::{PageTransfer, Settings, TicketPlace};
