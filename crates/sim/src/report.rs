//! What came of a simulation.

use std::time::Duration;

use vmfork_image::PageIdx;
use vmfork_policy::transfer::multicast::Sent;

/// In which what is received is added up.
pub const SLICE: Duration = Duration::from_millis(250);

/// How a clone ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Its trace is through.
    Done { at: Duration },
    /// It waited for a page that no reachable host has.
    Stopped { at: Duration, page: PageIdx },
    /// Its host died.
    Died,
    /// It waits, and nothing will happen any more: promise 5 is broken.
    Waits { page: PageIdx },
}

/// What came of a simulation. Bytes are those on the wire, headers included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// One for each host with a clone.
    pub outcomes: Vec<Outcome>,
    /// What each host sent and received; the parent's first.
    pub sent_bytes: Vec<u64>,
    pub received_bytes: Vec<u64>,
    /// Of the bytes sent, those that TCP sent again.
    pub resent_bytes: u64,
    /// What all hosts with a clone took in, in each [`SLICE`] since the start; pages alone.
    pub received_bytes_by_slice: Vec<u64>,
    /// When the first host's clone was through with each step of its trace, since its start.
    pub played: Vec<Duration>,
    /// Datagrams that got lost, counted at each receiver.
    pub lost_datagrams: u64,
    /// Pages that came to hosts with a clone.
    pub arrived_pages: u64,
    /// Of these, had come before: after a loss, or what looked like one.
    pub duplicate_pages: u64,
    /// Pages that their asker stopped waiting for, and asked for elsewhere or again.
    pub given_up_pages: u64,
    /// Faults that found the page absent, of all clones.
    pub waits: u64,
    /// Of the multicast sender, if there was one.
    pub multicast: Option<Sent>,
    /// Broken promises, in words; the first few.
    pub violations: Vec<String>,
    /// How many events the simulation took.
    pub events: u64,
}

impl Report {
    /// When the last clone that lived was through.
    pub fn completion(&self) -> Duration {
        let ends = self.outcomes.iter().map(|outcome| match outcome {
            Outcome::Done { at } | Outcome::Stopped { at, .. } => *at,
            Outcome::Died | Outcome::Waits { .. } => Duration::ZERO,
        });
        ends.max().unwrap_or_default()
    }

    /// When the clones that lived were through, on average.
    pub fn mean_completion(&self) -> Duration {
        let ends = self.outcomes.iter().filter_map(|outcome| match outcome {
            Outcome::Done { at } | Outcome::Stopped { at, .. } => Some(*at),
            Outcome::Died | Outcome::Waits { .. } => None,
        });
        let (count, sum) = ends.fold((0, Duration::ZERO), |(count, sum), at| (count + 1, sum + at));
        sum.checked_div(count).unwrap_or_default()
    }

    /// Whether all clones are through.
    pub fn all_done(&self) -> bool {
        self.outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done { .. }))
    }

    /// What hosts with clones sent on average.
    pub fn mean_peer_sent_bytes(&self) -> u64 {
        mean(self.sent_bytes.get(1..).unwrap_or_default())
    }

    /// What hosts with clones received on average.
    pub fn mean_received_bytes(&self) -> u64 {
        mean(self.received_bytes.get(1..).unwrap_or_default())
    }
}

fn mean(list: &[u64]) -> u64 {
    list.iter().sum::<u64>() / (list.len() as u64).max(1)
}
