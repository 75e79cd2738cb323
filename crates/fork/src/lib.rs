//! Forks of running VMs: freeze one, start n clones from that instant.
//!
//! ```text
//!   plan: names, memory, QEMUs ─► quiesce the agent ─► stop ─ freeze ─ state ─ cont ─► clones, in parallel
//!                                                      └──── the parent's pause ───┘    attach, load,
//!                                                                                       cont, identity
//! ```
//!
//! | module | is |
//! |---|---|
//! | [`tickets`] | the fork API of programs in guests: one task per VM |
//! | `forking` | one fork, carried out |
//! | `storing` | a freeze for a stored snapshot |
//! | `brood`, `starting`, `clone`, `channels` | VMs that continue one snapshot, started side by side |
//! | `freeze`, `state`, `snapshot` | the parent's part, and what it yields |
//! | `pause` | a VM stands still on request, and continues |
//! | `remote`, `places`, `origin` | other hosts as a trait; places set aside; what tickets hear |
//! | [`facts`] | what a frozen VM needs of a host |
//! | `error`, `messages` | why something failed, and what the API says about it |
//!
//! Promises: a fork that fails leaves the parent running, unless its RAM was lost half-way, which
//! ends it. A clone runs only after its identity was sent, and is reported once. A fork that is
//! given up leaves no clone.
//!
//! It does not know where other hosts are, or how snapshots are stored.

mod brood;
mod channels;
mod clone;
mod error;
pub mod facts;
mod forker;
mod forking;
mod freeze;
mod messages;
mod names;
mod origin;
mod pause;
mod places;
mod remote;
mod snapshot;
mod starting;
pub mod state;
mod storing;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tickets;

pub use self::brood::{Brood, Granted};
pub use self::channels::start_channels;
pub use self::clone::{Stem, failed, name_taken, report_failure};
pub use self::error::{Error, NotFrozen, NotStarted, Unlike};
pub use self::forker::{Forker, TicketService};
pub use self::forking::{COUNT_MAX, Order, by_request, check, run};
pub use self::freeze::Wanted as FreezeWanted;
pub use self::messages::start_message;
pub use self::names::{Names, Wanted, reserve};
pub use self::origin::Abroad;
pub use self::pause::{pause, resume};
pub use self::places::{Allotted, Hold, Placement, Reserved};
pub use self::remote::{Away, Departure, PlanAsk, Remote};
pub use self::snapshot::{OnRun, Snapshot};
pub use self::storing::{Frozen, FrozenDisks, freeze_disks_only, freeze_only};
pub use vmfork_host::metrics::ms;
