//! QEMU's control socket.
//!
//! ```text
//!   execute ──line, fd──► socket ──bytes──► reader task ──► Decoder ──► oldest waiter
//!                                                              ├──────► subscribers (events)
//!                                                              ├──────► migration watch
//!                                                              └──────► stall watch
//! ```
//!
//! [`wire`] parses and knows no socket; [`client`] is the connection; [`status`] types the answers.
//! [`migration`] saves and loads device state, [`devices`] saves it sooner. [`drives`] binds the
//! content of drives. [`stall`] tells that a VM has stopped because a drive failed.
//!
//! Replies carry no `id`: QEMU answers in-band commands in order, and each byte of a command costs
//! 4.5 µs on QEMU 7.2. A command whose caller gave up keeps its place in the queue, so that its
//! reply is not taken for another's.

pub mod client;
pub mod devices;
pub mod drives;
pub mod migration;
pub mod stall;
pub mod status;
pub mod wire;

pub use client::Qmp;
pub use devices::PreparedDevices;
pub use drives::{LateFd, NotReplaced};
pub use migration::{PreparedState, reopen_from_start};
pub use stall::{IoError, IoOperation};
pub use status::{RunState, Status};
pub use wire::{Event, Greeting};

/// Why a command got no good answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum QmpError {
    /// The connection is gone; so is QEMU, mostly. Every pending command gets this.
    #[error("the connection to QEMU is lost: {reason}")]
    Lost { reason: String },
    /// QEMU refused.
    #[error("QEMU refused `{command}`: {desc}")]
    Refused { command: String, class: String, desc: String },
    #[error("QEMU did not answer `{command}` within {timeout_ms} ms")]
    Timeout { command: String, timeout_ms: u128 },
    /// The answer has another form than this command's.
    #[error("QEMU's answer to `{command}` is not understood: {answer}")]
    Answer { command: String, answer: String },
    #[error("{outstanding} QMP commands wait for an answer already, `{command}` was not sent")]
    Busy { command: String, outstanding: usize },
    /// Saving or loading of the device state failed.
    #[error("QEMU could not {operation} the device state: {desc}")]
    Migration { operation: &'static str, desc: String },
    /// The server of a disk can't be reached, or has no such export.
    #[error(
        "QEMU could not open drive {index}, export {export:?} of socket {socket:?}: {desc}; check \
         that the disk's server answers and that QEMU's user may search the folder and write to \
         the socket"
    )]
    Disk { index: usize, socket: String, export: String, desc: String },
}

impl QmpError {
    /// QEMU is gone, rather than unwilling.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}
