//! `vmforkd`, one per host: puts the planes together.
//!
//! Top-level modules import each other in one direction, from the left to the right (`make check`
//! asserts it):
//!
//! ```text
//!   operations ─► lifecycle ─┬─► cluster ───┬─► fork ─► core ─► vm ─┬─► admission ─► quotas
//!         └─► doctor         └─► snapshots ─┴─► facts ──┘           └─► cgroup, state,
//!                                                                       metrics, config
//! ```
//!
//! | module | is |
//! |---|---|
//! | `operations` | [`vmfork_control::Control`] on the real host; puts all below together |
//! | `cluster` | this host among others: clones sent and received, images lent |
//! | `snapshots` | stored snapshots: taken, started, recorded, moved |
//! | `fork` | a freeze, and clones of it; other hosts are a trait |
//! | `facts` | what a frozen VM needs of a host |
//! | `core` | the VMs of this host, and what all of them share |
//! | `vm` | one VM; what it came of, without knowing the kinds |
//!
//! The REST API ([`vmfork_rest`]) knows nothing of QEMU: it turns requests into calls of
//! [`vmfork_control::Control`]. Links to guests' agents and the fork API's tickets are
//! [`vmfork_guest_link`]. Everything that outlives a daemon is in [`state`]. `main.rs` only names
//! the parts.

pub mod admission;
pub mod cgroup;
pub mod cluster;
pub mod config;
mod core;
pub mod doctor;
mod error;
mod facts;
mod fork;
pub mod lifecycle;
pub mod metrics;
pub mod operations;
pub mod quotas;
pub mod snapshots;
pub mod state;
pub mod vm;
