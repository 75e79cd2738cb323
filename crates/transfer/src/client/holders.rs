//! The hosts that have an image, in the order in which they are asked.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::peer::{Peer, PeerError};
use crate::lock;
use crate::proto::RefusalKind;

/// A host that does not have what it was asked for, or something else, comes last for so long: it may get it.
const AVOID_WITHOUT: Duration = Duration::from_secs(30);
/// One that is busy: others may be less so.
const AVOID_BUSY: Duration = Duration::from_millis(200);
/// One that is about to leave, or does not know who asks.
const AVOID_LEAVING: Duration = Duration::from_secs(10);

/// The hosts that have an image, the best first; may change at any time. One that failed is asked after the others for a
/// while.
#[derive(Debug)]
pub struct Holders {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    holders: Vec<Holder>,
    /// Grows with each change.
    version: u64,
}

#[derive(Debug)]
struct Holder {
    peer: Arc<Peer>,
    /// It refused, and is asked last until then.
    refused_until: Option<Instant>,
}

impl Holders {
    pub fn new(peers: impl IntoIterator<Item = Arc<Peer>>) -> Self {
        let holder = |peer| Holder { peer, refused_until: None };
        let holders = peers.into_iter().map(holder).collect();
        Self { state: Mutex::new(State { holders, version: 0 }), changed: Condvar::new() }
    }

    /// From now on ask these. Reads that found nobody to answer them begin anew.
    pub fn set(&self, peers: impl IntoIterator<Item = Arc<Peer>>) {
        let mut state = lock(&self.state);
        let before = std::mem::take(&mut state.holders);
        let refused_until = |peer: &Arc<Peer>| {
            before.iter().find(|holder| Arc::ptr_eq(&holder.peer, peer))?.refused_until
        };
        let holder = |peer| Holder { refused_until: refused_until(&peer), peer };
        state.holders = peers.into_iter().map(holder).collect();
        state.version += 1;
        drop(state);
        self.changed.notify_all();
        drop(before); // not under the lock: connections are closed with the last of a peer
    }

    /// All of them, in the order in which they were given.
    pub fn peers(&self) -> Vec<Arc<Peer>> {
        lock(&self.state).holders.iter().map(|holder| Arc::clone(&holder.peer)).collect()
    }

    /// In the order in which to ask now, and of which version of the list that is.
    pub(super) fn in_order(&self) -> (Vec<Arc<Peer>>, u64) {
        let state = lock(&self.state);
        let now = Instant::now();
        let mut peers: Vec<_> = state
            .holders
            .iter()
            .map(|Holder { peer, refused_until }| {
                let is_refusing = refused_until.is_some_and(|until| until > now);
                (peer.is_avoided() || is_refusing, Arc::clone(peer))
            })
            .collect();
        peers.sort_by_key(|(last, _)| *last);
        (peers.into_iter().map(|(_, peer)| peer).collect(), state.version)
    }

    /// What a peer was asked for it did not give.
    pub(super) fn on_failed(&self, peer: &Arc<Peer>, error: &PeerError) {
        let avoid = match error {
            PeerError::Refused(refusal) => match refusal.kind {
                RefusalKind::Busy => AVOID_BUSY,
                RefusalKind::Draining | RefusalKind::NotMember => AVOID_LEAVING,
                _ => AVOID_WITHOUT,
            },
            PeerError::Forged { .. } => AVOID_WITHOUT,
            _ => return,
        };
        let mut state = lock(&self.state);
        if let Some(holder) = state.holders.iter_mut().find(|h| Arc::ptr_eq(&h.peer, peer)) {
            holder.refused_until = Some(Instant::now() + avoid);
        }
    }

    /// Wait for another list than that of `version`, but no longer than `timeout`. → whether there is.
    pub(super) fn wait_changed(&self, version: u64, timeout: Duration) -> bool {
        let same = |state: &mut State| state.version == version;
        let waited = self.changed.wait_timeout_while(lock(&self.state), timeout, same);
        waited.unwrap_or_else(PoisonError::into_inner).0.version != version
    }
}
