//! Page transfer between hosts under virtual time: the state machines that the daemon runs, on up
//! to a thousand hosts that there are not.
//!
//! ```text
//!   Scenario ──► World: events by time ──► hosts: Scheduler, Receiver, Read, Swarm; Sender, Spread (vmfork-policy)
//!      ▲           │        ▲                 │ requests, pages, what is held, who else has them
//!   Trace          │        └── Network: links, loss, deaths, partitions ◄──┘
//!                  └──► Ledger: are the promises kept? ──► Report ──► table, beside the model
//! ```
//!
//! One host, number 0, has the image: the parent's. Each other one runs a clone, which follows a
//! [`Trace`] and waits where it touches a page that has not come. Everything follows from the
//! [`Scenario`] and its seed: the same twice gives the same [`Report`].
//!
//! Every run checks:
//! - A page comes to a host once, but for retransmissions, which are counted (promise 4).
//! - Each wait ends: with the page, or with a clone that is stopped since no reachable host has it
//!   (promise 5).
//! - What is sent is present.
//! - Requests in lockstep are served once.
//!
//! The loop of a read is the daemon's own (`vmfork_policy::transfer::read`). What else blocks in a
//! daemon's threads, the loop of an answer (`service`), is followed here with the same bounds.
//!
//! Left out:
//! - connections and how many there may be;
//! - what hosts compute for each other's sake (encryption, copying);
//! - switches that are themselves a bottleneck;
//! - more than one clone of an image on a host (its cache makes them one).

#![deny(unsafe_code)]

mod cache;
mod chart;
mod client;
mod draw;
mod evaluation;
mod events;
mod figures;
mod host;
mod ledger;
mod model;
mod network;
mod random;
mod report;
mod scenario;
mod service;
mod table;
mod trace;
mod world;

pub use draw::svg;
pub use evaluation::{Evaluated, Evaluation, Ratio};
pub use figures::{Figure, Figures};
pub use model::{Distribution, Network, Playback, Policy, SERVICE};
pub use report::{Outcome, Report, SLICE};
pub use scenario::{Death, Link, Mode, Partition, Scenario, ScenarioError, Slow};
pub use table::{Row, table};
pub use trace::{RECORDED, Recorded, Step, Trace, TraceError};
pub use world::simulate;
