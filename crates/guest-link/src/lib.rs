//! The host's end of a guest: the link to its agent, and what tickets of the fork API mean.
//!
//! ```text
//!   agent: one task per socket, the protocol as a state machine without I/O
//!   tickets: who may fork, which call waits for which: a state machine without I/O or clock
//! ```
//!
//! Promises: what a guest sends is bounded and believed nothing of; a request of a guest is
//! answered once. Left to others: what a VM is and where it runs, whether a fork fits, and how it
//! is carried out.

pub mod agent;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tickets;
