//! `vmforkd`, one per host: settings, wiring, life and diagnosis of the daemon.
//!
//! Top-level modules import each other in one direction, from the left to the right (`make check`
//! asserts it):
//!
//! ```text
//!   operations ─► lifecycle ─┬─► holder ─► config
//!         └─► doctor         └─► objects
//! ```
//!
//! | module | is |
//! |---|---|
//! | [`operations`] | [`vmfork_control::Control`] on the real host; puts the crates below together |
//! | [`lifecycle`] | from the settings to the end: lock, sockets, signals |
//! | [`holder`] | what a successor finds when this daemon is gone |
//! | `objects` | objects of an object store, as the host's disks ask for them |
//! | [`doctor`] | what of this host keeps VMs from running, and what helps |
//! | [`config`] | flags and environment, checked |
//! | [`counted`] | counters as the REST server asks for them |
//!
//! What the daemon does has crates of its own:
//!
//! ```text
//!   daemon ─┬─► peers ───────┐
//!           ├─► snapshots ───┴─► fork ─► host ─► qemu, memory, engine
//!           └─► rest ─► control
//! ```
//!
//! `main.rs` only names the parts.

pub mod config;
pub mod counted;
pub mod doctor;
pub mod holder;
pub mod lifecycle;
mod objects;
pub mod operations;
