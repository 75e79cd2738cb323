//! What can fail among hosts, as enums, and the form that the API has for each.
//!
//! | enum | of |
//! |---|---|
//! | [`CallError`] | a call of another host |
//! | [`ClusterError`] | membership: which hosts there are, how one joins, where a VM is |
//!
//! Functions inside return the enum. An outermost operation knows what was to be done, and makes
//! the API's form by the enum's `to_body`.
//! It depends on no other module of this crate.

mod call;
mod cluster;
#[cfg(test)]
mod tests;

pub(crate) use self::call::{CallError, of_host};
pub(crate) use self::cluster::{BeginError, ClusterError, Hindrance};
