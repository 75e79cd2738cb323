//! What became of datagrams and pages.

use crate::counters::Counter;

/// What a host sent to groups.
#[derive(Debug, Default)]
pub struct GroupCounters {
    pub datagrams: Counter,
    /// Of those, without UDP's own and what is below it.
    pub bytes: Counter,
    /// Once for all who listen.
    pub pages: Counter,
    /// That could not be read.
    pub lacking: Counter,
    /// Datagrams that the system did not take.
    pub unsent: Counter,
    /// Datagrams that came and were no listener's, or came again.
    pub dropped: Counter,
}

/// What a host heard of one image's group.
#[derive(Debug, Default)]
pub struct ListenerCounters {
    /// Datagrams of the sender.
    pub datagrams: Counter,
    /// Those of others: forged, of another image or another key, cut short.
    pub forged: Counter,
    /// Copies of what had come, and what is older than anything that is still waited for.
    pub replayed: Counter,
    /// Those of the sender that make no sense.
    pub wrong: Counter,
    /// Pages that are others than the sender has: somebody who hears the group sent them. None was used.
    pub false_pages: Counter,
    /// Pages that were not used since the sender did not say whether they are its own.
    pub undecided_pages: Counter,
    /// Pages that came, …
    pub pages: Counter,
    /// … those that nobody here had asked for, and that were taken, …
    pub kept_pages: Counter,
    /// … and those that a read here got.
    pub read_pages: Counter,
    /// Reads that went to another host instead, since nothing came in time.
    pub in_vain: Counter,
}
