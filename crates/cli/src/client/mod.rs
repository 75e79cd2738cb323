//! Talks to the daemon: one connection per request, over its unix socket or TCP.
//!
//! Dropping a request's future closes its connection, by which the daemon learns that nobody waits
//! any more and undoes what is half done. Every wait has a bound, except those that stream for as
//! long as something in the guest goes on (`logs -f`, `exec`, `console`).

mod connect;
mod exec;
mod http;
mod socket;

pub(crate) use connect::{ConnectError, Stream, connect, find, find_now};
pub(crate) use exec::{ExecEvent, ExecInput, ExecSession, exit_status};
pub(crate) use http::{Answer, Body, Query, empty, is_not_found, understood, unreachable};
pub(crate) use socket::{Incoming, Sender, Socket};

use std::time::Duration;

use crate::config::Global;

/// Bound on answers that only look something up.
pub(crate) const QUICK: Duration = Duration::from_secs(30);

/// Bound on what reads or writes a whole snapshot: it takes as long as its size takes, and the daemon lets nobody wait
/// for longer than a day.
pub(crate) const WHOLE: Duration = Duration::from_secs(86_400);

/// What is given to the daemon on top of the time that a request itself may take, so that its own
/// bound, which has more to say, strikes first.
pub(crate) const SLACK: Duration = Duration::from_secs(15);

/// A daemon that has answered a connect.
#[derive(Debug)]
pub(crate) struct Client<'a> {
    pub(crate) global: &'a Global,
}

impl<'a> Client<'a> {
    /// Makes sure that a daemon listens, starting one if that is allowed.
    pub(crate) async fn new(global: &'a Global) -> anyhow::Result<Self> {
        crate::start::ensure(global).await?;
        Ok(Self { global })
    }

    /// Without looking whether anybody listens.
    pub(crate) fn unchecked(global: &'a Global) -> Self {
        Self { global }
    }
}
