//! Clones of a VM on other hosts than its own.
//!
//! ```text
//!   the parent's host                                       the clones' host
//!   send ── Descriptor: an Order, page tables, devices ══► Orders ── receive ──► clones
//!     └──── give up an Order, until the host confirms it ═════╝
//! ```
//!
//! Promises: an order is carried out at most once. One that its sender gives up leaves no VM,
//! whichever message arrives first.
//! Left to others: which host gets how many ([`super::away`]), and requests of hosts
//! ([`super::routes`]).

/// What to do about an order that a host can't read.
pub(super) const SAME_VERSION: &str =
    "do both hosts run the same version of vmfork? `vmfork version` on each tells";

mod descriptor;
mod orders;
pub(super) mod receive;
pub(super) mod send;

pub(super) use self::descriptor::{CloneOrder, DESCRIPTOR_BYTES_MAX, Descriptor, Order};
pub(super) use self::orders::Orders;
