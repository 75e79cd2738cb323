//! What of multicast is counted: by the host that has the pages (`served`), and by those that hear
//! it (`asked`).

use prometheus_client::encoding::EncodeLabelSet;

use super::Side;

/// One figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multicast {
    Pages(Side, GroupPages),
    Event(Side, GroupEvent),
}

/// What became of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupPages {
    /// Asked for, in all requests.
    Requested,
    /// Of these, asked for again, since they did not come in time.
    Repeated,
    /// Of these, sent before and to be sent again.
    Lost,
    /// Asked for while they were queued already, or had just been sent: not sent again for that.
    Lockstep,
    /// Asked for while the queue was full.
    Refused,
    /// Could not be read.
    Lacking,
    /// Sent, and not for the first time.
    Resent,
    /// Asked for again and again without success.
    GivenUp,
    /// Came, needed or not.
    Heard,
    /// Of these, had come before, or were here otherwise.
    Known,
    /// Got by a read that waited for them.
    Read,
    /// Taken into a cache, though no VM here had asked for them.
    Kept,
    /// Came while too many waited to be taken.
    NoRoom,
    /// Others than the sender has: none was used.
    Forged,
    /// Not used, since the sender did not say whether they are its own.
    Undecided,
}

/// What else happened: to datagrams, unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupEvent {
    /// Requests that came, of which a datagram has several.
    Requests,
    /// Times that the rate was cut.
    RateCuts,
    /// Not taken by the system.
    Unsent,
    /// Came and were no listener's, or came again.
    Dropped,
    /// Heard, of the sender.
    Datagrams,
    /// Of others: forged, cut short, under another key.
    Forged,
    /// Copies, or too old.
    Replayed,
    /// Of the sender, and without sense.
    Wrong,
    /// Batches of pages that were handed on.
    Batches,
    /// Reads that went to another host, since nothing came in time.
    InVain,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct GroupPagesLabel {
    pub(super) side: Side,
    pub(super) what: GroupPages,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct GroupEventLabel {
    pub(super) side: Side,
    pub(super) what: GroupEvent,
}
