//! What is simulated.

use std::fmt;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

use vmfork_image::{PAGE_BYTES, PageRange};
use vmfork_policy::transfer::bounds::ANSWER;
use vmfork_policy::transfer::swarm::{READS_AHEAD, UNIT_PAGES};

use crate::trace::Trace;

/// Most hosts with a clone.
pub(crate) const HOSTS_MAX: usize = 4096;

/// Most pages of an image: 64 GiB.
pub(crate) const IMAGE_PAGES_MAX: u64 = 1 << 24;

/// What headers of a page's packets add: three of Ethernet, IP and TCP or UDP, and seals.
const PAGE_OVERHEAD_BYTES: u64 = 250;

/// Bytes of this many pages on a link.
pub(crate) fn wire_bytes(pages: u64) -> u64 {
    pages * (PAGE_BYTES + PAGE_OVERHEAD_BYTES)
}

/// How pages travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Each host asks the parent's.
    Unicast,
    /// The parent's host sends to all; what a host does not get so, it asks for by unicast.
    Multicast,
    /// Hosts serve each other.
    Swarm,
}

impl Mode {
    pub const ALL: [Self; 3] = [Self::Unicast, Self::Multicast, Self::Swarm];
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Unicast => "unicast",
            Self::Multicast => "multicast",
            Self::Swarm => "swarm",
        })
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|mode| mode.to_string() == text);
        known.ok_or_else(|| format!("`{text}` is no mode; there are unicast, multicast, swarm"))
    }
}

/// A host's link to a switch that is never the bottleneck. The same in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    pub bytes_per_s: u64,
    /// From host to host.
    pub latency: Duration,
    /// Random extra delay, up to this: messages overtake each other.
    pub jitter: Duration,
    pub loss_per_million: u32,
    /// What is small waits in line behind what is large, as in a queue of packets that knows no
    /// flows.
    pub one_line: bool,
    /// Of datagrams; TCP removes them.
    pub duplicates_per_million: u32,
}

impl Default for Link {
    /// Ethernet, 1 Gbit/s, in one rack.
    fn default() -> Self {
        Self {
            bytes_per_s: 125_000_000,
            latency: Duration::from_micros(100),
            jitter: Duration::ZERO,
            loss_per_million: 0,
            one_line: false,
            duplicates_per_million: 0,
        }
    }
}

/// A host that is `times` slower than the others. Host 0 is the parent's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slow {
    pub host: usize,
    pub times: u64,
}

/// A host ends at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    pub host: usize,
    pub at: Duration,
    /// No answer comes in its place: the host or its network ends, not only its daemon.
    pub silent: bool,
}

/// Hosts from number `first` on and those before can't reach each other for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    pub first: usize,
    pub from: Duration,
    pub until: Duration,
}

/// Everything that a simulation follows from.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub seed: u64,
    pub mode: Mode,
    pub pages: u64,
    /// One for each host with a clone.
    pub traces: Vec<Rc<Trace>>,
    /// What is fetched ahead, most urgent first, such as a working set.
    pub ahead: Vec<PageRange>,
    /// Everything is fetched in the background, in each host's own order.
    pub hydrates: bool,
    /// Clones begin at random within this time.
    pub start_within: Duration,
    /// A host's daemon announces to the others that it has the image within this time after its
    /// clone has begun.
    pub heard_within: Duration,
    pub link: Link,
    pub slow: Vec<Slow>,
    pub deaths: Vec<Death>,
    pub partition: Option<Partition>,
}

/// A scenario that can't be simulated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScenarioError {
    #[error("{hosts} hosts; it must be 1 to {HOSTS_MAX}")]
    Hosts { hosts: usize },
    #[error("an image of {pages} pages; it must be 1 to {IMAGE_PAGES_MAX}")]
    Pages { pages: u64 },
    #[error("a trace touches {pages}, which an image of {image} pages does not have")]
    Trace { pages: PageRange, image: u64 },
    #[error("a link of {bytes_per_s} bytes per second; it must be 1000 or more")]
    Link { bytes_per_s: u64 },
}

impl Scenario {
    /// All clones do the same, and everything works.
    pub fn new(mode: Mode, pages: u64, hosts: usize, trace: &Rc<Trace>) -> Self {
        Self {
            seed: 0,
            mode,
            pages,
            traces: vec![Rc::clone(trace); hosts],
            ahead: Vec::new(),
            hydrates: false,
            start_within: Duration::ZERO,
            heard_within: Duration::from_secs(1),
            link: Link::default(),
            slow: Vec::new(),
            deaths: Vec::new(),
            partition: None,
        }
    }

    /// # Errors
    /// If it makes no sense.
    pub fn check(&self) -> Result<(), ScenarioError> {
        let Self { pages, link, .. } = *self;
        if !(1..=HOSTS_MAX).contains(&self.traces.len()) {
            return Err(ScenarioError::Hosts { hosts: self.traces.len() });
        }
        if !(1..=IMAGE_PAGES_MAX).contains(&pages) {
            return Err(ScenarioError::Pages { pages });
        }
        if link.bytes_per_s < 1000 {
            return Err(ScenarioError::Link { bytes_per_s: link.bytes_per_s });
        }
        let image = PageRange::first(pages);
        let mut checked: Vec<&Rc<Trace>> = Vec::new();
        for trace in &self.traces {
            if checked.last().is_some_and(|last| Rc::ptr_eq(last, trace)) {
                continue;
            }
            checked.push(trace);
            if let Some(step) = trace.steps().iter().find(|step| !image.covers(&step.pages)) {
                return Err(ScenarioError::Trace { pages: step.pages, image: pages });
            }
        }
        Ok(())
    }

    /// Whether the parent's host takes so long to send all that may be in flight that answers come
    /// too late. Then reads fail, and clones are stopped, though every host lives. A limit of what
    /// is simulated, which has one time for an answer, whatever the link.
    pub fn is_narrow(&self) -> bool {
        let slow = self.slow.iter().find(|slow| slow.host == 0).map_or(1, |slow| slow.times.max(1));
        let reads = (self.traces.len() * (READS_AHEAD + 1)) as u64;
        let bytes = reads * wire_bytes(UNIT_PAGES);
        bytes / (self.link.bytes_per_s / slow).max(1) >= ANSWER.as_secs() / 2
    }

    /// Whether nothing gets lost, and nothing is so late that it looks lost.
    pub(crate) fn is_clean(&self) -> bool {
        let Link { bytes_per_s, loss_per_million, duplicates_per_million, jitter, .. } = self.link;
        // On a slower link, a few pages take as long as the lockstep window.
        bytes_per_s >= 4_000_000
            && loss_per_million == 0
            && duplicates_per_million == 0
            && jitter < Duration::from_millis(1)
            && self.slow.is_empty()
            && self.deaths.is_empty()
            && self.partition.is_none()
    }
}
