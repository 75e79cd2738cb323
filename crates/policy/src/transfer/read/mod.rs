//! One read of pages from other hosts, as a state machine. The daemon's threads and the simulation
//! drive the same one.
//!
//! ```text
//!   begin ──► Hear ──not heard in time──┐
//!     │        └──heard──► Done         │
//!     └───────────────────────────┬─────┘
//!    ┌────────────────────────────▼────────────────────────────────────────────────────┐
//!    │ round: Ask a host of the swarm ──► the next ──► Ask each named host ──► Ask each │
//!    │          │  ▲ Wait (prefetch)                    with a part (second round) ─────┼─┐
//!    │          └──┴ elsewhere: Ask the host it names                                   │ │
//!    └───────▲─────────┬───────────────────────────────────────────▲───────────────────┘ │
//!            │         │ reply                                     │ wrong, undecided     │ all failed
//!            │         ├──of the origin──► Done                    │                      │
//!            │         └──of another──► Compare ──right──► Done    │                      │
//!            │                            └──undecided──► Ask the origin ──reply──► Done  │
//!            └──── Refresh, once ◄──── Wait, up to the patience ◄─────────────────────────┤
//!                                                                              GiveUp ◄───┘
//! ```
//!
//! [`Read::begin`] and [`Read::on`] return the [`Action`] that is to be carried out; what comes of
//! it is the next [`Event`]. What is known of hosts is in [`Hosts`]: the swarm, and the hosts that
//! were named with the image. [`SumRequests`] says which of the origin's sums to ask for, so that
//! reads side by side do not ask for the same.
//!
//! Promises:
//! - A read ends, with its pages or with a [`FailedRead`]. Once its patience is over it asks no
//!   host more than once in each of two more rounds.
//! - Pages are handed on only if the origin gave them, or if they were compared with its sums, or
//!   if it has gone and the driver believes others. Without a swarm and without a known origin the
//!   named hosts are believed.
//! - A read asks one host at a time.
//! - A host that gave a page other than the origin's is not asked again by the read.
//! - A demand read never waits for a host that is busy: it asks another one, or the origin. A
//!   prefetch waits.
//!
//! Left to others:
//! - bytes, sockets, threads, clocks and sums themselves;
//! - the order in which reads begin (demand first: `Scheduler` and the fetchers of the image);
//! - that two reads of a page begin only if the second is demand.

mod machine;
mod sums;

use std::fmt;
use std::time::Duration;

use vmfork_image::{ImageName, PageRange};

pub use self::machine::Read;
pub use self::sums::{SumRequests, sums_wait};
use super::swarm::{Failure, Route, Swarm};
use super::{HostId, Urgency};

/// What a read is to bring, and how long it tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub image: ImageName,
    pub pages: PageRange,
    pub urgency: Urgency,
    /// Hosts that all failed are asked again until then.
    pub give_up: Duration,
    /// The image's group is heard: wait for the pages there first, up to this time.
    pub hear_until: Option<Duration>,
}

/// What is known of the hosts that have the image.
pub trait Hosts {
    /// The hosts that serve each other the image.
    fn swarm(&mut self) -> Option<&mut Swarm>;

    /// The hosts that were named with the image, the one to ask first in front. A host that is no
    /// member of the swarm has an id that no member has.
    fn named(&mut self) -> Vec<HostId>;

    /// Grows when other hosts are named.
    fn named_version(&self) -> u64;

    /// Without a swarm: the host that froze the image. `None`: each named host is believed.
    fn origin(&self) -> Option<HostId>;

    /// Whether a host gave no reply a while ago.
    fn is_avoided(&self, host: HostId) -> bool;
}

/// What to do for a read now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Wait for the pages in the image's group: [`Event::Heard`] or [`Event::NotHeard`] follows.
    Hear { until: Duration },
    /// Ask a host for the pages: [`Event::Reply`], [`Event::Elsewhere`] or [`Event::Failed`]
    /// follows.
    Ask {
        host: HostId,
        route: Route,
        /// No reply within this time is a failure.
        within: Duration,
        /// It is the origin, or is believed: a part of its reply may be used before the rest has
        /// come.
        believed: bool,
    },
    /// Compare the pages that came with the origin's sums, which may have to be asked for first:
    /// [`Event::Compared`] follows.
    Compare {
        giver: HostId,
        /// `None`: no host is the origin any more.
        origin: Option<HostId>,
        within: Duration,
    },
    /// Ask other hosts what they hold: [`Event::Refreshed`] follows.
    Refresh { until: Duration },
    /// Do nothing until then: [`Event::Tick`] follows.
    Wait {
        until: Duration,
        /// It follows as soon as [`Hosts::named_version`] is another.
        version: Option<u64>,
    },
    /// The pages are here: hand them on.
    Done(Done),
    /// They are not available.
    GiveUp(FailedRead),
}

/// What came of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The pages came in the group, and are what the sender has.
    Heard,
    /// They did not, or not in time.
    NotHeard,
    /// The host that was asked gave the pages.
    Reply { from: HostId },
    /// It said that host `at` has them, or is about to.
    Elsewhere { from: HostId, at: HostId },
    /// It gave no pages.
    Failed { from: HostId, why: ReplyError },
    /// The pages were compared.
    Compared(Verdict),
    /// Other hosts have reported what they hold, as far as they will.
    Refreshed,
    /// Time has passed, or other hosts are named.
    Tick,
}

/// Why a host's reply brought no pages that can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplyError {
    /// It has too much to do.
    Busy,
    /// It does not have the pages.
    Lacks,
    /// It was not reached, gave no reply in time, or broke off.
    Broken,
    /// The same, and the swarm was notified of it once for all that it had been asked for
    /// ([`Swarm::cut_off`]).
    CutOff,
    /// It does not answer this host, or not such requests.
    Rejected,
    /// It gave a page other than the origin has.
    Forged,
    /// What it gave cannot be compared with what the origin has.
    Undecided,
}

impl ReplyError {
    /// Whether it may be otherwise in a moment, though nothing is done about it.
    pub fn is_passing(self) -> bool {
        match self {
            Self::Busy | Self::Broken | Self::CutOff | Self::Undecided => true,
            Self::Lacks | Self::Rejected | Self::Forged => false,
        }
    }

    /// What the swarm learns from it.
    fn for_swarm(self) -> Option<Failure> {
        match self {
            Self::Busy | Self::Undecided => Some(Failure::Busy),
            Self::Lacks => Some(Failure::Lacks),
            Self::Broken | Self::Rejected => Some(Failure::Broken),
            Self::Forged => Some(Failure::Forged),
            Self::CutOff => None,
        }
    }
}

impl fmt::Display for ReplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "it is busy",
            Self::Lacks => "it does not have them",
            Self::Broken | Self::CutOff => "it gave no reply",
            Self::Rejected => "it rejected the request",
            Self::Forged => "it gave a page other than the origin has",
            Self::Undecided => "what it gave cannot be compared with what the origin has",
        })
    }
}

/// What came of comparing pages with the origin's sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Right,
    /// A page is other than the origin has.
    Wrong,
    /// The origin does not say now what the pages are.
    Undecided,
    /// The origin has gone, so that it cannot confirm pages any more: other hosts are believed.
    Believed,
}

/// How a read got its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub giver: Giver,
    /// Another host gave them than the one that was asked first, or that it named.
    pub resourced: bool,
}

/// Which host gave the pages of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Giver {
    /// They were sent to all hosts that need them.
    Group,
    Origin,
    /// Another host, and they are what the origin has.
    Holder,
    /// Another host, and the origin has gone.
    Believed,
    /// A named host, where no host is known to be the origin.
    Named,
}

/// No host gave the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedRead {
    pub image: ImageName,
    pub pages: PageRange,
    /// Each host that was asked in the last round, and why it gave none.
    pub tried: Vec<(HostId, ReplyError)>,
}

impl fmt::Display for FailedRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { image, pages, tried } = self;
        if tried.is_empty() {
            return write!(f, "no other host has pages {pages} of image {image}");
        }
        write!(f, "pages {pages} of image {image} from no host: ")?;
        for (at, (host, why)) in tried.iter().enumerate() {
            write!(f, "{}host {host}: {why}", if at > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

impl std::error::Error for FailedRead {}
