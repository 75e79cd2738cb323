//! Everything that knows QEMU: how to find it, start it, talk to it, and keep some waiting.
//!
//! ```text
//!   probe ── Binary, Accel ──► Launch::start ──► Qemu { process, qmp, serial, agent }
//!                                  ▲                          │
//!   pool ── Start(shape) ──────────┘            save_state / load_state / cont
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`qmp`] | the client of QEMU's control socket; its parser does no I/O |
//! | [`shape`] | what two QEMUs must have in common for a state of one to load in the other |
//! | [`drives`] | what the drives of a machine hold, bound at its start or at clone time |
//! | [`spawn`] | the command line (a pure function), the unprivileged process, its handle |
//! | [`probe`] | which QEMU is installed, whether KVM is of use |
//! | [`pool`] | QEMUs started beforehand; its decisions are a pure state machine |
//!
//! Promises: every wait has a bound. A QEMU that ends makes every pending call fail with the
//! reason, and its last words on stderr are in the error. A dropped handle leaves no process
//! behind.
//!
//! Left to others: guest memory (the `memory` crate talks to the shim over the control socket that
//! passes through here unread), pages, hosts, tickets.

#![deny(unsafe_code)]

pub mod drives;
pub mod pool;
pub mod probe;
pub mod qmp;
pub mod shape;
pub mod spawn;

pub use drives::{DriveContent, Drives, NbdSocket, NbdSocketError};
pub use probe::{AccelChoice, Binary, Version};
pub use qmp::{LateFd, NotReplaced, Qmp, QmpError};
pub use shape::{Accel, DiskSlot, DriveSlot, GuestKind, Machine, Shape};
pub use spawn::{AGENT_DEVICE, Boot, Launch, Process, Qemu, RunAs, ShimFds, StartError};
