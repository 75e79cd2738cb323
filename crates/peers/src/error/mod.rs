//! What can fail among hosts, as enums, and the form that the API has for each.
//!
//! | enum | of |
//! |---|---|
//! | [`CallError`] | a call of another host |
//! | [`ClusterError`] | membership: which hosts there are, how one joins, where a VM is |
//! | [`RemoteForkError`] | clones on other hosts, and those of others here |
//! | [`FetchError`] | a guest image that another host is to have |
//! | [`StoredError`] | a stored image that hosts pull from each other |
//! | [`TicketError`] | tickets over hosts, and what users may have on all hosts |
//!
//! Functions inside return the enum. An outermost operation knows what was to be done, and makes
//! the API's form by the enum's `to_body`.
//! It depends on no other module of this crate.

mod call;
mod clones;
mod cluster;
mod fetch;
mod sent;
mod stored;
#[cfg(test)]
mod tests;
mod tickets;

pub(crate) use self::call::{CallError, of_host};
pub(crate) use self::clones::{OrderError, PlanError, RemoteForkError, SendError, StartError};
pub(crate) use self::cluster::{BeginError, ClusterError, Hindrance};
pub(crate) use self::fetch::FetchError;
pub(crate) use self::sent::{ArrivalError, DescriptorError, LendError};
pub(crate) use self::stored::{Missing, StoredError};
pub(crate) use self::tickets::{LetterError, NotTold, TicketError, Unsettled};
