//! The VMs of one host.
//!
//! ```text
//!   core ─► vm ─┬─► admission ─► quotas
//!               └─► lifetime, disks, cgroup, state, metrics, config
//! ```
//!
//! | module | is |
//! |---|---|
//! | [`core`] | all VMs of this host, and what they share: pool, admission, images, events |
//! | [`vm`] | one VM; what it came of, without knowing the kinds |
//! | [`lifetime`] | how long VMs may live: their own bounds, and those that they inherit |
//! | [`disks`] | the writable disks of VMs: what they hold, and who serves them |
//! | [`admission`] | whether there is memory and vCPUs for more VMs |
//! | [`quotas`] | what a user may have on all hosts |
//! | [`cgroup`] | a memory limit per VM |
//! | [`state`] | the state folder: lock, journal, what a dead daemon left |
//! | [`metrics`] | all counters of the daemon |
//! | [`error`] | why an operation fails, and what the API says about it |
//!
//! Promises: a VM ends once, and its first reason stands. No two VMs have one name. A VM that was
//! admitted has its memory. What a killed daemon left is removed by the next one.
//!
//! It does not know how VMs are forked, stored or sent to other hosts, and no HTTP.

pub mod admission;
pub mod cgroup;
pub mod config;
pub mod core;
pub mod disks;
pub mod error;
pub mod lifetime;
pub mod metrics;
pub mod quotas;
pub mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod vm;
