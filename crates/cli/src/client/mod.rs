//! Talks to the daemon: one connection per request, over its unix socket or TCP.
//!
//! Dropping a request's future closes its connection. The daemon then cancels the request and
//! undoes its partial work. Every wait has a bound, except streams that last as long as something
//! in the guest (`logs -f`, `exec`, `console`).

mod connect;
mod exec;
mod http;
mod nbd;
mod socket;

pub(crate) use connect::{ConnectError, Stream, connect, find, find_now};
pub(crate) use exec::{ExecEvent, ExecInput, ExecSession, exit_status};
pub(crate) use http::{Answer, Body, Query, empty, is_not_found, understood, unreachable};
pub(crate) use socket::{Incoming, Sender, Socket};

use std::time::Duration;

use crate::config::Global;

/// Bound on answers that only look something up.
pub(crate) const QUICK: Duration = Duration::from_secs(30);

/// Bound on requests that read or write a whole snapshot: the longest wait that the daemon allows,
/// a day.
pub(crate) const WHOLE: Duration = Duration::from_secs(86_400);

/// Added to the timeout of a request, so that the daemon's own timeout, whose error says more,
/// comes first.
pub(crate) const SLACK: Duration = Duration::from_secs(15);

/// A daemon that requests go to.
#[derive(Debug)]
pub(crate) struct Client<'a> {
    pub(crate) global: &'a Global,
}

impl<'a> Client<'a> {
    /// A client that does not check whether the daemon listens.
    pub(crate) fn unchecked(global: &'a Global) -> Self {
        Self { global }
    }
}
