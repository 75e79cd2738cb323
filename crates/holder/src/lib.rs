//! Keeps file descriptors while their daemon restarts.
//!
//! ```text
//!   vmforkd ──Hello, Put──► vmfork-holder ◄──Hello, List, Get── its successor
//!      │                     name ─► fd, kind, note
//!    (dies)                  ends: on End, by SIGTERM, or when no daemon came for the linger time
//! ```
//!
//! One holder belongs to one state folder. [`proto`] is what is said (bytes, no I/O), [`Table`]
//! decides (no I/O, no clock), [`serve`] is the program's loop, [`Owner`] the daemon's end of it.
//!
//! Promises: an fd that was put is there for a successor until it is dropped, replaced, or the
//! holder ends. Wrong input gets an error reply and changes nothing. All that it keeps is bounded.
//!
//! Left to others: what the fds mean. The holder reads, writes and accepts nothing, and closes its
//! own copies only. The lock of the state folder says which daemon is the right one; here, the one
//! that said hello last owns the entries.

#![forbid(unsafe_code)]

mod client;
mod packet;
pub mod proto;
mod server;
mod table;

pub use self::client::{Held, HolderError, Owner, kill_other, list, start};
pub use self::proto::{Kind, Name};
pub use self::server::{ServeError, serve};
pub use self::table::{ENTRIES_MAX, PeerId, Table};

/// The holder's socket, in the state folder.
pub const SOCKET: &str = "holder.sock";

/// Set for the holder's process, to the path of its state folder, so that scripts can find it. It
/// differs from the mark of processes that end with their daemon.
pub const MARK: &str = "VMFORK_HOLDER";
