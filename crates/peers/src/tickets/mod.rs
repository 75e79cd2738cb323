//! Tickets whose clones run on other hosts: places there, and what clones and parent have to say to
//! each other.
//!
//! ```text
//!   parent's host                                          another
//!   Desk ◄─ events ─ Abroad ── Wire ═══ letters ═══ Wire ── Branch ◄─ events ─ desks and ends of clones
//!     └── kill, answers ──►                                   └──► answers, ends of VMs
//! ```
//!
//! A line is of one order to start clones: one ticket, one host.
//! The requests of a clone's programs (`sf_send`, `sf_exit`) and the clone's end go to the parent's
//! host.
//! It handles them as if the clone were there. Answers come back, and the order to end.
//!
//! Promises: messages arrive once and in order, whatever is lost on the way ([`line`]).
//! A host is lost if it is silent for 20 s, is no member any more or has forgotten the line.
//! No VM waits for a lost host any longer. For a program that joins, its clones have failed.
//! Its clones lose their parent as they would by its end ([`vmfork_guest_link::tickets`]).
//!
//! A message counts against its worker's allowance, and against a room of its line on its host,
//! until the parent has it; on the parent's host it counts against what may lie there over all VMs,
//! and is refused where that is full; until then against what is read there at a time ([`inbox`]).

mod abroad;
mod branch;
mod inbox;
mod leases;
mod letter;
mod line;
#[cfg(test)]
mod tests;
mod wire;

pub(super) use self::abroad::Abroad;
pub(super) use self::branch::begin;
pub(super) use self::inbox::Inbox;
pub(super) use self::leases::{LEASES, Leases, PlacesAsk, RELEASE};
pub(super) use self::wire::{LETTERS, Lines};
