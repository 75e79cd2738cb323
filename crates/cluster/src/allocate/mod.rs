//! Who gives room to whom: n clones asked for, m ≤ n places on named hosts.
//!
//! ```text
//!   Ask ──► Allocator ──► Ticket: places on hosts, each a lease
//!             ├── BuiltIn: quota of the user ──► Plan over all hosts' views ─┐
//!             └── Slurm: a job ────────────────► Plan over the job's nodes ──┤
//!                                                                            ▼
//!                                           each host: Leases::grant, by its own books
//! ```
//!
//! Only a host itself knows what it has free, and only it gives that away: a [`Plan`] is a guess, by what hosts last told,
//! whom to ask for how much; [`Leases`] decides. So any host may allocate, two may at once, and what is promised is never
//! more than there is. A lease that is not used ends by itself.
//!
//! What a user may have in the whole cluster is counted by one host for each user, the one that [`keeper_of`] names; that
//! host's [`Quotas`] are rebuilt by renewals if another becomes the keeper.
//!
//! Left to others: carrying asks to hosts ([`Peers`]), what a clone needs and a host has (admission), starting anything.

mod built_in;
mod leases;
mod plan;
mod quota;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::id::{HostId, RandomError, hex, random, shortened, unhex};
use crate::room::Room;
use crate::slurm::CommandError;

pub(crate) use built_in::shorten;
pub use built_in::{BuiltIn, take_places};
pub use leases::{Lease, LeaseError, Leases, Refusal};
pub use plan::{HostView, Plan, Policy};
pub use quota::{Quota, QuotaAsk, Quotas, keeper_of};

/// Most places that one ticket can have: a bound for what plans compute, ten times what 1024 hosts were made for.
pub const PLACES_MAX: u32 = 65_536;

/// What a future of a trait object is.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// How many clones.
    pub count: u32,
    /// What each needs.
    pub shape: Room,
    /// Whose they are, for quotas.
    pub user: String,
    /// Whose clones they are: the id of their family's root.
    pub family: String,
    /// The host of the VM that is forked, where its pages are.
    pub near: Option<HostId>,
}

/// Names a lease, and what it holds of a quota. Drawn by who asks, so that an ask can be sent again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId([u8; 16]);

impl LeaseId {
    /// A new one.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub fn random() -> Result<Self, RandomError> {
        random().map(Self)
    }

    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseId({self})")
    }
}

impl FromStr for LeaseId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let why = || format!("`{}` is no lease: it has 32 hex digits", shortened(text));
        unhex(text).map(Self).ok_or_else(why)
    }
}

impl Serialize for LeaseId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LeaseId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What one host is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseAsk {
    pub id: LeaseId,
    pub count: u32,
    pub shape: Room,
    pub user: String,
    pub family: String,
    /// How long the places wait to be used.
    pub ttl_ms: u64,
}

/// Places on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Places {
    pub host: HostId,
    pub count: u32,
    pub lease: LeaseId,
}

/// What was granted: at least one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The allocator's name for it: Slurm's job number, or of the built-in one what it holds of the user's quota.
    pub id: String,
    pub asked: u32,
    pub places: Vec<Places>,
    /// What it holds of the user's quota, if users have quotas.
    pub quota: Option<LeaseId>,
    /// Why there are not as many as were asked for, one line each; empty if there are.
    pub short: Vec<String>,
}

impl Ticket {
    /// How many places there are on all hosts.
    pub fn count(&self) -> u32 {
        self.places.iter().map(|places| places.count).fold(0, u32::saturating_add)
    }
}

/// Why there is no ticket, or it can't be given back.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    #[error("0 clones asked for; a ticket is for 1 to {PLACES_MAX}")]
    Zero,
    #[error("no room for any of {asked} clones of {} MiB and {} CPUs: {}", shape.memory_bytes >> 20, shape.vcpus, why.join("; "))]
    NoRoom { asked: u32, shape: Room, why: Vec<String> },
    #[error("user `{user}` has all that the quota allows")]
    Quota { user: String },
    #[error("look up the quota of user `{user}`")]
    Keeper {
        user: String,
        #[source]
        source: PeerFailure,
    },
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
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::NoRoom { .. } => {
                Some("`vmfork cluster ls` shows what hosts have; end VMs, or ask for smaller ones")
            }
            Self::Quota { .. } => Some("end clones of this user, or raise the quota"),
            Self::Keeper { .. } => {
                Some("the host that counts it may be down; try again in some seconds")
            }
            Self::Zero | Self::Command { .. } | Self::Engine { .. } | Self::Random(_) => None,
        }
    }
}

/// Why a host gave nothing, or could not be asked. The text is shown beside the host's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct PeerFailure {
    pub why: String,
}

/// How an allocator reaches hosts, this one too. Every call has a bound in time, of the implementer's.
pub trait Peers: Send + Sync + fmt::Debug {
    /// All members, as this host last heard of them.
    fn views(&self) -> Vec<HostView>;

    /// Asks a host for a lease; how many places it granted, 0 to those asked for.
    fn lease(&self, host: HostId, ask: LeaseAsk) -> Boxed<'_, Result<u32, PeerFailure>>;

    /// Gives the unused rest of a lease back. If the host can't be reached, the lease ends by itself.
    fn release(&self, host: HostId, lease: LeaseId) -> Boxed<'_, ()>;

    /// Asks the user's keeper for a part of his quota; how much he gets. All of it if there are no quotas.
    fn take_quota(&self, ask: QuotaAsk) -> Boxed<'_, Result<u32, PeerFailure>>;

    /// What is kept from now on of what was taken by this id; 0: nothing.
    fn keep_quota(&self, ask: QuotaAsk) -> Boxed<'_, ()>;
}

/// Grants tickets: the built-in one, or an engine that the site has.
pub trait Allocator: Send + Sync + fmt::Debug {
    /// Gets up to as many places as asked for. Fewer are no error, and [`Ticket::short`] tells why; none are.
    fn allocate<'a>(&'a self, ask: &'a Ask) -> Boxed<'a, Result<Ticket, AllocateError>>;

    /// The ticket is over: gives back what of it is unused, and what the engine holds for it. May be called again.
    fn release<'a>(&'a self, ticket: &'a Ticket) -> Boxed<'a, Result<(), AllocateError>>;

    /// Ends when the engine has ended the ticket by itself, with the reason: its clones have to go. The built-in
    /// allocator never does that.
    fn ended<'a>(&'a self, ticket: &'a Ticket) -> Boxed<'a, String>;
}
