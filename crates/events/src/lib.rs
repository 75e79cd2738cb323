//! A bounded log of events, and cursors into it.
//!
//! ```text
//!   push ──► [ lost … | first ──── window ──── newest ]
//!                          ▲
//!   read(after) ───────────┴──► Events | Gap (fell out of the window) | OtherEpoch | Ahead
//! ```
//!
//! Promises: sequence numbers have no gaps and begin with 1. A reader gets each event after its
//! cursor once and in order, or is told exactly which ones it lost. The log never holds more events
//! or bytes than its limits. Left to others: waiting for an event, what an event is, and the clock.
//! No I/O, no threads.

#![forbid(unsafe_code)]

mod cursor;
mod log;

pub use cursor::{Cursor, CursorError};
pub use log::{Limits, Log, Read};
