//! Which hosts are connected, with limits in all, in the handshake, and for each member.
//!
//! ```text
//!   begin ──► in its handshake ──of_member──► a member's ──┐
//!               └─────────────────────────────────────────┴──► dropped
//! ```

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::ServiceLimits;
use crate::lock;

#[derive(Debug)]
pub(super) struct Connections {
    limits: ServiceLimits,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    open: BTreeMap<u64, Open>,
    next: u64,
    closed: bool,
}

#[derive(Debug)]
struct Open {
    /// To end it from outside.
    tcp: TcpStream,
    /// `None`: it is in its handshake.
    member: Option<u64>,
}

/// One connection's place, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    connections: Arc<Connections>,
    number: u64,
}

impl Connections {
    pub(super) fn new(limits: ServiceLimits) -> Self {
        Self { limits, state: Mutex::default(), ended: Condvar::new() }
    }

    pub(super) fn count(&self) -> usize {
        lock(&self.state).open.len()
    }

    /// A place for a new connection; `None`: there is none.
    pub(super) fn begin(self: &Arc<Self>, tcp: TcpStream) -> Option<Place> {
        let mut state = lock(&self.state);
        let handshakes = state.open.values().filter(|open| open.member.is_none()).count();
        let is_full = state.open.len() >= self.limits.connections_max
            || handshakes >= self.limits.handshakes_max;
        if state.closed || is_full {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Open { tcp, member: None });
        drop(state);
        Some(Place { connections: Arc::clone(self), number })
    }

    /// No connection begins any more, and all reads and writes fail.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        for open in state.open.values() {
            // Fails if the other side was faster.
            let _ended = open.tcp.shutdown(Shutdown::Both);
        }
        drop(state);
        self.ended.notify_all();
    }

    /// Wait for [`Connections::close`]. → whether it has been called.
    pub(super) fn wait_closed(&self, timeout: Duration) -> bool {
        let is_open = |state: &mut State| !state.closed;
        let waited = self.ended.wait_timeout_while(lock(&self.state), timeout, is_open);
        waited.unwrap_or_else(PoisonError::into_inner).0.closed
    }

    /// No reads and writes of those succeed that are no members any more.
    pub(super) fn keep(&self, is_member: &impl Fn(u64) -> bool) {
        let state = lock(&self.state);
        let left = |open: &&Open| open.member.is_some_and(|member| !is_member(member));
        for open in state.open.values().filter(left) {
            // Fails if the other side was faster.
            let _ended = open.tcp.shutdown(Shutdown::Both);
        }
    }

    /// Wait until there are none. → how many there are.
    pub(super) fn wait_ended(&self, timeout: Duration) -> usize {
        let some_left = |state: &mut State| !state.open.is_empty();
        let waited = self.ended.wait_timeout_while(lock(&self.state), timeout, some_left);
        waited.unwrap_or_else(PoisonError::into_inner).0.open.len()
    }
}

impl Place {
    /// The handshake is done. → whether that member may have one more.
    pub(super) fn of_member(&self, member: u64) -> bool {
        let mut state = lock(&self.connections.state);
        let has = state.open.values().filter(|open| open.member == Some(member)).count();
        if let Some(open) = state.open.get_mut(&self.number) {
            open.member = Some(member);
        }
        has < self.connections.limits.connections_per_member_max
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.connections.state).open.remove(&self.number);
        self.connections.ended.notify_all();
    }
}
