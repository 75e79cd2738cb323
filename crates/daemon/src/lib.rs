//! `vmforkd`, one per host: puts the planes together, serves the REST API.
//!
//! ```text
//!   http ──► control::Control ──► (hub: VMs, forks, pool, images, snapshots)
//!    │                                │        │
//!    └── metrics ◄────────────────────┘        ├── agent, tickets (the guests' side)
//!   lifecycle ──► state (folder, journal)      └── admission, cgroup (what fits)
//!      └── config, doctor                      └── quotas (what users may have, on all hosts)
//! ```
//!
//! `cluster` has requests about other hosts' VMs passed on, and clones started there.
//!
//! [`http`] knows nothing of QEMU: it turns requests into calls of [`control::Control`]. Everything
//! that outlives a daemon is in [`state`]. `main.rs` only names the parts.

pub mod admission;
pub mod agent;
pub mod cgroup;
pub mod cluster;
pub mod config;
pub mod control;
pub mod core;
pub mod doctor;
mod error;
mod facts;
mod fork;
pub mod http;
pub mod lifecycle;
pub mod metrics;
pub mod quotas;
pub mod snapshots;
pub mod state;
pub mod tickets;
pub mod vm;
