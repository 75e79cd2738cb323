//! The connections to one host: made when they are needed, kept for a while, never more than a
//! limit.
//!
//! ```text
//!            lease: the one used last, else a new one if there may be, else wait
//!   idle ─────────────────────────────────────► in use
//!    ▲ └──idle too long──► closed                 │  └──any error──► closed
//!    └───────────────────keep─────────────────────┘
//! ```
//!
//! A host that can't be connected to is not tried again for a while, which doubles with each
//! failure.

use std::io::ErrorKind;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::link::{Link, NotOpen};
use super::peer::{PeerConfig, PeerError, PeerLimits};
use crate::lock;

/// After the first failure to connect; doubled by each further one …
const BACK_OFF_MIN: Duration = Duration::from_millis(100);
/// … up to this: a host that is there again is found within it.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Pool {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The one used last at the end.
    idle: Vec<(Link, Instant)>,
    /// In use or being made.
    in_use: usize,
    backing_off: Option<BackOff>,
}

#[derive(Debug, Clone)]
struct BackOff {
    failures: u32,
    until: Instant,
    why: String,
    /// It was not there.
    is_gone: bool,
}

/// A connection, for one request. Unless it is kept it is closed.
#[derive(Debug)]
pub(super) struct Lease<'a> {
    pool: &'a Pool,
    pub(super) link: Option<Link>,
    /// It was used before: it may have ended meanwhile.
    pub(super) was_idle: bool,
}

/// How a connection is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// A new one: those that are idle are taken to have ended.
    pub(super) fresh: bool,
    /// Waiting for one, connecting and shaking hands may each take no longer, whatever the limits
    /// say.
    pub(super) within: Duration,
    /// If fewer are in use.
    pub(super) connections_max: usize,
}

impl Pool {
    /// A connection.
    ///
    /// # Errors
    /// There is none, and none can be made. One that took longer than is wanted, though less than
    /// the limits give it, is a timeout. That is no sign that the host is absent.
    pub(super) fn lease(
        &self,
        config: &PeerConfig,
        limits: &PeerLimits,
        wanted: Wanted,
    ) -> Result<Lease<'_>, PeerError> {
        let idle = self.take(config, limits, wanted)?;
        let mut lease = Lease { pool: self, was_idle: idle.is_some(), link: idle };
        if lease.link.is_none() {
            let timeout = limits.connect.min(wanted.within);
            match Link::open(config, timeout) {
                Ok(link) => {
                    lock(&self.state).backing_off = None;
                    lease.link = Some(link);
                }
                Err(NotOpen { error, .. })
                    if error.kind() == ErrorKind::TimedOut && timeout < limits.connect =>
                {
                    return Err(PeerError::Timeout { timeout });
                }
                Err(NotOpen { error: source, is_gone }) => {
                    self.on_failure(&source.to_string(), is_gone);
                    return Err(PeerError::Connect { address: config.address, source, is_gone });
                }
            }
        }
        Ok(lease)
    }

    /// Wait until there may be one more in use. → an idle one, or none if one is to be made.
    fn take(
        &self,
        config: &PeerConfig,
        limits: &PeerLimits,
        wanted: Wanted,
    ) -> Result<Option<Link>, PeerError> {
        let Wanted { fresh, connections_max, .. } = wanted;
        let waited = limits.answer.min(wanted.within);
        let give_up = Instant::now() + waited;
        let mut state = lock(&self.state);
        loop {
            let now = Instant::now();
            let is_old = |since: &Instant| fresh || now.duration_since(*since) >= limits.idle;
            let old = state.idle.partition_point(|(_, since)| is_old(since));
            let old: Vec<_> = state.idle.drain(..old).collect();
            if !old.is_empty() {
                drop(state);
                old.into_iter().for_each(|(link, _)| link.close());
                state = lock(&self.state);
                continue;
            }
            if state.in_use < connections_max
                && let Some((link, _)) = state.idle.pop()
            {
                state.in_use += 1;
                return Ok(Some(link));
            }
            if state.in_use < connections_max {
                if let Some(BackOff { until, why, is_gone, .. }) = &state.backing_off
                    && *until > now
                {
                    let (address, left, is_gone) = (config.address, *until - now, *is_gone);
                    return Err(PeerError::BackingOff { address, left, why: why.clone(), is_gone });
                }
                state.in_use += 1;
                return Ok(None);
            }
            let left = give_up.saturating_duration_since(now);
            if left.is_zero() {
                return Err(PeerError::AllInUse { connections: connections_max, waited });
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn on_failure(&self, why: &str, is_gone: bool) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        // Several may have tried at the same time: that is one failure.
        let failures = match &state.backing_off {
            Some(before) if before.until > now => before.failures,
            Some(before) => before.failures.saturating_add(1),
            None => 0,
        };
        let wait = BACK_OFF_MIN.saturating_mul(1 << failures.min(16)).min(BACK_OFF_MAX);
        let (until, why) = (now + wait, why.to_owned());
        state.backing_off = Some(BackOff { failures, until, why, is_gone });
    }

    /// How many connections there are: idle ones, and those in use.
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = lock(&self.state);
        (state.idle.len(), state.in_use)
    }
}

impl Lease<'_> {
    /// The request is done: the connection serves for the next.
    pub(super) fn keep(mut self) {
        if let Some(link) = self.link.take() {
            lock(&self.pool.state).idle.push((link, Instant::now()));
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        lock(&self.pool.state).in_use -= 1;
        // Not all that wait may have it.
        self.pool.changed.notify_all();
    }
}
