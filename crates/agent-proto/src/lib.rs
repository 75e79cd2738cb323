//! Frames between `vmforkd` and the agent in the guest, over one virtio-serial port.
//!
//! ```text
//!   0        4      5       6          8           12
//!   +--------+------+-------+----------+-----------+---------- - - -
//!   | length | kind | flags | reserved |  channel  | payload (length bytes)
//!   +--------+------+-------+----------+-----------+---------- - - -
//!   little endian; length counts the payload alone and is at most PAYLOAD_BYTES_MAX
//! ```
//!
//! A frame is either a message ([`ToGuest`] or [`ToHost`] as JSON, kind [`Kind::Message`]) or raw
//! bytes of a stream. A *channel* is one exec, one file transfer or one request. Its opener picks
//! the number: the daemon takes even ones from 2, the agent odd ones from 1. Channel 0 is for
//! messages that belong to none.
//!
//! **Streams** are flow-controlled: a sender may have [`WINDOW_BYTES`] of a stream on its way that
//! the receiver has not credited ([`ToGuest::Credit`], [`ToHost::Credit`]). The last frame of a
//! stream carries [`FLAG_END`] (it may be empty).
//!
//! **Boots.** The agent answers `Hello` at once, with what has become of the image's first-boot
//! command; when that ends later, it says `Hello` once more. Until then the VM is up, but not
//! ready.
//!
//! **Forks.** Both directions must stand at a frame boundary when the VM freezes, since each
//! clone talks on over a socket of its own:
//!
//! ```text
//!   daemon                                agent
//!     | -- Prepare{fork} ------------------> |   the daemon sends nothing more
//!     | <------------------ Prepared{fork} - |   the agent sends nothing more
//!     |           (freeze; clones start)     |
//!     | -- Continue{fork} -----------------> |   in the parent
//!     | -- Identity{fork, vmid, …} --------> |   in each clone
//!     | <---- Confirmed{fork} (or Refused) - |
//! ```
//!
//! In a clone all channels of the parent stay open on the guest's side. Their programs run on, and
//! their output arrives as stream frames of channels that the clone's daemon side never opened. It
//! goes to the clone's log, and is credited. Their windows are full again in a clone, since what
//! was in flight at the freeze went to the parent's daemon side. Streams towards the guest are
//! ended in a clone (a terminal stays open, without input); file transfers are given up. Channel
//! numbers continue from the parent's. The daemon must not open one in a clone that the parent had
//! open when it froze: the agent answers `Failed` with `EEXIST`. Replies to requests that a program
//! of the parent had in flight are not repeated in a clone. The agent fails them with `ECANCELED`,
//! except for the `Clone` that made it.
//!
//! If neither `Continue` nor `Identity` comes within 30 s of guest time, the agent continues as if
//! `Continue` had come. It ignores a later `Continue`.
//!
//! No I/O here: [`Decoder`] is fed bytes and gives frames; [`encode`] makes bytes.

mod frame;
mod message;

pub use frame::{Decoder, FLAG_END, Frame, FrameError, HEADER_BYTES, Kind, encode, encode_message};
pub use message::{
    FileInfo, Firstboot, ForkIdentity, MessageInfo, RequestError, TerminalSize, TicketClone,
    ToGuest, ToHost, Worker,
};

/// Name of the virtio-serial port: `/dev/virtio-ports/org.vmfork.agent.0` in the guest.
pub const PORT_NAME: &str = "org.vmfork.agent.0";

/// Version of this protocol; both sides refuse another's.
pub const PROTOCOL_VERSION: u32 = 1;

/// Most payload bytes of a frame. A virtio-serial port moves 4 to 32 KiB at a time under QEMU;
/// larger frames only delay others on the same port.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;

/// How much of a stream may be on its way without credit.
pub const WINDOW_BYTES: u32 = 256 * 1024;
