//! The NBD protocol: fixed newstyle, structured replies, `base:allocation`. A server and a client.
//!
//! ```text
//!   Handshake ─► Request ─► Replies      bytes in, bytes out; no I/O
//!   serve                                a socket, its workers, and a Target
//!   Client                               one export, by a connection that is made again
//! ```
//!
//! A connection is of one of the [`Exports`] that it may name.
//!
//! Promises: whatever the other side says, what is kept of it is bounded, and nothing panics.
//!
//! Left to others: what an export holds, who may connect, and where sockets are.
#![deny(unsafe_code)]

mod buffer;
mod client;
mod handshake;
mod pulse;
mod request;
mod serve;
mod wire;
mod workers;

pub use buffer::{FilePart, Out};
pub use client::{Answer, Client, ClientError, Connect, Done, GreetError};
pub use handshake::{Agreed, Export, Flaw, Handshake, OPTION_BYTES_MAX, Step};
pub use pulse::Pulse;
pub use request::{BLOCK_BYTES_MAX, Command, Extent, NbdError, Replies, Request, Span};
pub use serve::{Exports, ServeError, serve};
pub use wire::REQUEST_BYTES;
pub use workers::Target;
