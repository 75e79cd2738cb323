//! Pages for many hosts at a time, one datagram for all of them: SnowFlock's mcdist (EuroSys 2009,
//! sections 4.3 and 4.4).
//!
//! ```text
//!   host 1: Receiver ──Request──►┐                         ┌──► Receiver::heard ──► batch ──► cache
//!   host 2: Receiver ──Request──►├─ Sender: queued, paced ─┼──► Receiver::heard ──► …
//!   host n: Receiver ──Request──►┘     (lost on the way: ✗)└──► …
//!        └──── feedback: what comes in per second ────►┘
//! ```
//!
//! The sender is flow control and a queue, no more. It serves first come, first served, and demand
//! before background. It keeps no state of any receiver's pages and repeats nothing by itself.
//! Clones that run in *lockstep* request the same page at nearly the same time. While it is queued,
//! and for a moment after it was sent, further requests for it are dropped.
//!
//! The receivers request lost pages again, when an answer takes longer than answers took so far. A
//! repeated request shows the sender the loss. After some attempts a receiver gives up, and its
//! host asks another host, by unicast.
//!
//! Three things are not SnowFlock's. A little loss, or a loss at few of the receivers, does not
//! slow the sender down ([`SenderConfig::loss_tolerated_permille`]). It is no sign that the rate is
//! too high for all, and among many receivers there is always one that has lost something. A page
//! that is requested again while it waits in the queue since its first request is no loss at all.
//! And the mean receive rate is compared with what was sent meanwhile. So a loss while little was
//! requested does not cut the rate to that.

mod receiver;
mod sender;
mod trust;

#[cfg(test)]
mod tests;

use vmfork_image::PageRange;

pub use self::receiver::{GaveUp, Heard, Receiver, ReceiverConfig, TooManyWants};
pub use self::sender::{Sender, SenderConfig, Sent};
pub use self::trust::{Trust, TrustConfig};

/// What a receiver asks the sender for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Never empty, from a [`Receiver`].
    pub pages: PageRange,
    /// A VM waits for at least one of them.
    pub demand: bool,
    /// It was asked for before, and nothing came in time.
    pub repeat: bool,
}
