//! The NBD protocol: fixed newstyle, structured replies, `base:allocation`.
//!
//! ```text
//!   Handshake ─► Request ─► Replies      bytes in, bytes out; no I/O
//!   serve                                a socket, its workers, and a Target
//! ```
//!
//! A connection is of one of the [`Exports`] that it may name.

mod buffer;
mod handshake;
mod pulse;
mod request;
mod serve;
mod wire;
mod workers;

pub use buffer::{FilePart, Out};
pub use handshake::{Agreed, Export, Flaw, Handshake, OPTION_BYTES_MAX, Step};
pub use pulse::Pulse;
pub use request::{BLOCK_BYTES_MAX, Command, Extent, NbdError, Replies, Request, Span};
pub use serve::{Exports, ServeError, serve};
pub use wire::REQUEST_BYTES;
pub use workers::Target;
