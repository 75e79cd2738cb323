//! The host's end of the guest agent's protocol (`vmfork-agent-proto` is the contract).
//!
//! ```text
//!   core, fork ─► AgentLink ──Command──► driver (one task) ◄──socket──► QEMU ──► the guest's agent
//!                                          │  ▲
//!                                          ▼  │
//!                                          Mux: channels, windows, forks
//!        ◄── ExecSession, FileStream ── outlets
//!        ◄── GuestRequest (each with its Responder)
//! ```
//!
//! One task owns the socket and the `mux`.
//! A caller that wants something of the guest sends the task a command, and waits for the answer
//! without a limit.
//! Dropping a future or a session cancels what it began.
//! What a consumer does not take stays within its stream's window, and stops that program only.
//!
//! Forks: [`AgentLink::prepare`] brings both directions to a frame boundary and gives a [`Held`];
//! the VM may be frozen while it lives. A clone's link starts by [`AgentLink::start_clone`] with
//! the [`Held::inheritance`] and says nothing before [`AgentLink::identity`] was confirmed.
//!
//! Left to others: tickets and messages between workers ([`crate::tickets`]); who may be forked.

mod command;
mod driver;
mod error;
mod files;
mod link;
mod mux;
mod outlet;
mod outq;
mod programs;
mod request;
mod room;
mod watch;

pub use error::{CloseReason, LinkError, ProtocolError};
pub use link::{AgentInfo, AgentLink, Held, HelloRequest, LinkOptions};
pub use mux::{Inheritance, MailLimits};
pub use request::{Asker, Counted, Lease};
pub use request::{GuestRequest, Message, RequestId, Responder};
pub use room::HostShare;
pub use room::{HostMail, MailRoom, ROOM_BYTES};
pub use watch::{SETTLE, lost};
