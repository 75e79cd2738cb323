//! Who gives room to whom: n clones asked for, m ≤ n places on named hosts.
//!
//! ```text
//!   Ask ──► Allocator ──► which hosts, up to how many on each ──► Plan ──► each host grants
//!             ├── BuiltIn: all hosts, by what they told
//!             └── Slurm: a job, the nodes that it has
//! ```
//!
//! Only a host itself knows what it has free, and only it gives that away, by its own books. It
//! does so in leases, which expire if they are not used. A [`Plan`] is a guess which hosts to ask
//! for how much, by what they last reported. So any host may allocate, also two at once, and no
//! host promises more than it has. Each host checks users' quotas when it grants ([`Counts`]).
//!
//! Left to others: asking hosts, what a clone needs and a host has, starting anything (the
//! daemon's).

mod plan;
mod quota;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use crate::id::{HostId, RandomError};
use crate::room::Room;

pub use plan::{HostView, Plan, Policy};
pub use quota::{Amount, Bounds, Counts, QuotaAnswer, QuotaAsk, Tally, keeper_of};

/// Most places that one ticket can have: a bound for what plans compute, ten times what 1024 hosts
/// were made for.
pub const PLACES_MAX: u32 = 65_536;

/// What a future of a trait object is.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// How many clones.
    pub count: u32,
    /// What each needs.
    pub shape: Room,
    /// Whose clones they are: the id of their family's root.
    pub family: String,
    /// How they are to be laid out.
    pub policy: Policy,
}

/// What an engine holds for one ticket: at least one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The engine's name for it.
    pub job: String,
    /// How many clones each host may have.
    pub places: BTreeMap<HostId, u32>,
    /// Why there are not as many as were asked for, one line each; empty if there are.
    pub short: Vec<String>,
}

/// A command of an engine that could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("run `{program}`")]
    Run {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("`{program}` did not end within {} s", bound.as_secs())]
    TimedOut { program: String, bound: Duration },
}

/// An engine that can't be asked, or that has nothing.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    #[error("no room for any of {asked} clones of {} MiB and {} CPUs: {}", shape.memory_bytes >> 20, shape.vcpus, why.join("; "))]
    NoRoom { asked: u32, shape: Room, why: Vec<String> },
    #[error("ask {engine}")]
    Command {
        engine: &'static str,
        #[source]
        source: CommandError,
    },
    /// The engine answered, and not as it should.
    #[error("{engine}: {what}")]
    Engine { engine: &'static str, what: String },
    #[error(transparent)]
    Random(#[from] RandomError),
}

impl AllocateError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NoRoom { .. } => {
                "`sinfo` and `squeue` show what Slurm's nodes have; ask for less, or wait"
            }
            Self::Command { .. } | Self::Engine { .. } => {
                "do Slurm's commands work on this host, for the user that vmforkd runs as?"
            }
            Self::Random(_) => "try again",
        }
    }
}

/// Says which hosts a ticket may have: the built-in one, or an engine that the site has.
pub trait Allocator: Send + Sync + fmt::Debug {
    /// Gets nodes for as many of the clones as can be. `None`: all hosts may be asked.
    fn hold<'a>(
        &'a self,
        ask: &'a Ask,
        views: &'a [HostView],
    ) -> Boxed<'a, Result<Option<Held>, AllocateError>>;

    /// Gives back what a job holds. May be called again.
    fn release<'a>(&'a self, job: &'a str) -> Boxed<'a, Result<(), AllocateError>>;

    /// Why a job holds nothing any more; `None`: it holds its nodes.
    fn ended<'a>(&'a self, job: &'a str) -> Boxed<'a, Result<Option<String>, AllocateError>>;

    /// The jobs of this host's daemon, in whatever life of it.
    fn jobs(&self) -> Boxed<'_, Result<BTreeSet<String>, AllocateError>>;
}

/// The allocator that needs nothing but the hosts themselves.
#[derive(Debug, Clone, Copy, Default)]
pub struct BuiltIn;

impl Allocator for BuiltIn {
    fn hold<'a>(
        &'a self,
        _ask: &'a Ask,
        _views: &'a [HostView],
    ) -> Boxed<'a, Result<Option<Held>, AllocateError>> {
        Box::pin(async { Ok(None) })
    }

    fn release<'a>(&'a self, _job: &'a str) -> Boxed<'a, Result<(), AllocateError>> {
        Box::pin(async { Ok(()) })
    }

    fn ended<'a>(&'a self, _job: &'a str) -> Boxed<'a, Result<Option<String>, AllocateError>> {
        Box::pin(async { Ok(None) })
    }

    fn jobs(&self) -> Boxed<'_, Result<BTreeSet<String>, AllocateError>> {
        Box::pin(async { Ok(BTreeSet::new()) })
    }
}
