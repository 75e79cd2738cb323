//! What became of datagrams and pages.

use vmfork_policy::transfer::multicast::{Heard, Sent};
use vmfork_transfer::Counter;

/// What a host sent to groups, over all images.
#[derive(Debug, Default)]
pub struct GroupCounters {
    pub datagrams: Counter,
    /// Of those, without UDP's own and what is below it.
    pub bytes: Counter,
    /// Once for all listeners.
    pub pages: Counter,
    /// Of these, sent before.
    pub resent_pages: Counter,
    /// That could not be read.
    pub lacking: Counter,
    /// Datagrams that the system did not take.
    pub unsent: Counter,
    /// Datagrams that came and were no listener's, or came again.
    pub dropped: Counter,
    /// Requests for pages, of which a datagram may have several, …
    pub requests: Counter,
    /// … and the pages in them.
    pub requested_pages: Counter,
    /// Of these, not queued, since they were queued already or had just been sent: hosts run in
    /// lockstep.
    pub lockstep_pages: Counter,
    /// Of these, asked for again by a host that had asked before, …
    pub repeated_pages: Counter,
    /// … and, of those, sent before and to be sent again: lost in the network, or not read in time.
    pub lost_pages: Counter,
    /// Of these, not queued, since the queue was full.
    pub refused_pages: Counter,
    /// Times that the rate of a group was cut.
    pub cuts: Counter,
}

impl GroupCounters {
    /// What a group's sender has done of late. What it has sent is counted when it was read.
    pub(super) fn add(&self, sent: Sent) {
        self.requests.add(sent.requests);
        self.requested_pages.add(sent.requested);
        self.resent_pages.add(sent.resent);
        self.lockstep_pages.add(sent.lockstep);
        self.repeated_pages.add(sent.repeats);
        self.lost_pages.add(sent.lost);
        self.refused_pages.add(sent.refused);
        self.cuts.add(sent.cuts);
    }
}

/// What a host heard of one image's group, or of several that count together.
#[derive(Debug, Default)]
pub struct ListenerCounters {
    /// Datagrams of the sender.
    pub datagrams: Counter,
    /// Those of others: forged, of another image or another key, cut short.
    pub forged: Counter,
    /// Copies of what had come, and what is older than anything that a read still waits for.
    pub replayed: Counter,
    /// Those of the sender that make no sense.
    pub wrong: Counter,
    /// Pages that are others than the sender has: another host that hears the group sent them. None
    /// was used.
    pub false_pages: Counter,
    /// Pages that were not used since the sender did not say whether they are its own.
    pub undecided_pages: Counter,
    /// Pages that came, needed or not, …
    pub pages: Counter,
    /// … those that had come before or were here otherwise, …
    pub known_pages: Counter,
    /// … those that were not requested here, and that were taken, …
    pub kept_pages: Counter,
    /// … and those that a read here got.
    pub read_pages: Counter,
    /// Pages that came while too many waited to be taken: as good as lost.
    pub no_room_pages: Counter,
    /// Pages that the sender was asked for, …
    pub requested_pages: Counter,
    /// … those of them that it was asked for again, since they did not come in time, …
    pub repeated_pages: Counter,
    /// … and those that did not come after many attempts.
    pub given_up_pages: Counter,
    /// Batches that were handed on.
    pub batches: Counter,
    /// Reads that went to another host instead, since nothing came in time.
    pub in_vain: Counter,
}

impl ListenerCounters {
    /// What an image's receiver has done of late.
    pub(super) fn add(&self, heard: Heard) {
        self.pages.add(heard.pages);
        self.known_pages.add(heard.duplicates);
        self.requested_pages.add(heard.requested);
        self.repeated_pages.add(heard.repeats);
        self.given_up_pages.add(heard.gave_up);
        self.batches.add(heard.batches);
    }
}
