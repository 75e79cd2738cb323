//! The fork API's meaning: tickets, their workers, and the messages between workers and parent.
//!
//! ```text
//!   request            allocated m > 0             clone             cloned
//!      │ ──► Allocating ─────────► Granted ─────────► Starting ─────────► Cloned
//!      │                  │           │ expires,         │ kill             │ kill; join: all workers
//!      ▼ refused          ▼ refused   ▼ kill             ▼                  ▼ have ended
//!      ───────────────── the ticket is discarded: ESTALE from now on ─────────────────
//! ```
//!
//! A [`TicketBook`] belongs to one VM, the parent, and knows the clones that its tickets made. It
//! does no I/O and has no clock: feed it what happened, carry out the [`Action`]s it returns *in
//! their order*. A clone that forks itself has a book of its own, with numbers of its own
//! ([`TicketBook::numbered_from`]).
//!
//! Promises: each request is answered once, or waits for something that will come (a worker's end,
//! a message); a worker's messages are received in the order in which they came, each once; a
//! worker ends once, by `sf_exit` or with a reason.
//!
//! When a **parent ends**, or its agent does, its clones go on: they lose only whom to send to.
//! What they send from then on is answered `EPIPE`, what was not received is dropped, and `sf_exit`
//! ends them as before. Killing them with their parent is for the user to ask for
//! (`vmfork kill --family`).
//!
//! Left to others: what a VM costs and whether it fits (the allocator that `Allocate` asks), and
//! bounding what is sent (the clone's link).

mod book;
mod mailbox;
#[cfg(test)]
mod tests;

pub use book::{Action, Answer, COUNT_MAX, CloneSpec, LEASE, Refusal, TICKETS_MAX, TicketBook};
