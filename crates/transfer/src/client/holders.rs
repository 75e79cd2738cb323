//! The hosts that have an image, in the order in which they are asked.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use vmfork_policy::transfer::HostId;

use super::peer::{Peer, PeerError};
use crate::lock;
use crate::proto::RefusalKind;

/// A host that does not have what was requested, or has something else, comes last for this time:
/// it may get it.
const AVOID_WITHOUT: Duration = Duration::from_secs(30);
/// One that is busy: others may be less so.
const AVOID_BUSY: Duration = Duration::from_millis(200);
/// One that is about to leave, or does not know the client.
const AVOID_LEAVING: Duration = Duration::from_secs(10);

/// The hosts that have an image, the best first; may change at any time. One that failed is asked
/// after the others for a while.
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
    /// This many have been here.
    count: u64,
}

impl State {
    /// `refused_until`: of a host that was here before.
    fn add(&mut self, peer: Arc<Peer>, before: Option<&Holder>) {
        let (id, refused_until) = match before {
            Some(before) => (before.id, before.refused_until),
            None => {
                self.count += 1;
                // From the top: members' ids are random, and those of tests small.
                (HostId(u64::MAX - self.count), None)
            }
        };
        self.holders.push(Holder { id, peer, refused_until });
    }
}

#[derive(Debug)]
struct Holder {
    /// Its name where it is no member of a swarm.
    id: HostId,
    peer: Arc<Peer>,
    /// It refused, and is asked last until then.
    refused_until: Option<Instant>,
}

impl Holders {
    pub fn new(peers: impl IntoIterator<Item = Arc<Peer>>) -> Self {
        let mut state = State { holders: Vec::new(), version: 0, count: 0 };
        peers.into_iter().for_each(|peer| state.add(peer, None));
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// From now on ask these. Reads for which no host had an answer begin again.
    pub fn set(&self, peers: impl IntoIterator<Item = Arc<Peer>>) {
        let mut state = lock(&self.state);
        let before = std::mem::take(&mut state.holders);
        for peer in peers {
            let old = before.iter().find(|holder| Arc::ptr_eq(&holder.peer, &peer));
            state.add(peer, old);
        }
        state.version += 1;
        drop(state);
        self.changed.notify_all();
        drop(before); // not under the lock: connections are closed with the last of a peer
    }

    /// All of them, in the order in which they were given.
    pub fn peers(&self) -> Vec<Arc<Peer>> {
        lock(&self.state).holders.iter().map(|holder| Arc::clone(&holder.peer)).collect()
    }

    /// In the order in which to ask now, by the ids that `member` knows, or else by those of this
    /// list.
    pub(super) fn in_order(&self, member: impl Fn(&Arc<Peer>) -> Option<HostId>) -> Vec<HostId> {
        let state = lock(&self.state);
        let now = Instant::now();
        let mut hosts: Vec<_> = state
            .holders
            .iter()
            .map(|Holder { id, peer, refused_until }| {
                let is_refusing = refused_until.is_some_and(|until| until > now);
                (peer.is_avoided() || is_refusing, member(peer).unwrap_or(*id))
            })
            .collect();
        hosts.sort_by_key(|(last, _)| *last);
        hosts.into_iter().map(|(_, host)| host).collect()
    }

    /// Which version of the list this is.
    pub(super) fn version(&self) -> u64 {
        lock(&self.state).version
    }

    /// By its id of this list.
    pub(super) fn peer(&self, host: HostId) -> Option<Arc<Peer>> {
        let state = lock(&self.state);
        let holder = state.holders.iter().find(|holder| holder.id == host)?;
        Some(Arc::clone(&holder.peer))
    }

    pub(super) fn id_of(&self, peer: &Arc<Peer>) -> Option<HostId> {
        let state = lock(&self.state);
        state.holders.iter().find(|holder| Arc::ptr_eq(&holder.peer, peer)).map(|holder| holder.id)
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

    /// Wait for another list than that of `version`, but no longer than `timeout`.
    pub(super) fn wait_changed(&self, version: u64, timeout: Duration) {
        let same = |state: &mut State| state.version == version;
        let _late = self.changed.wait_timeout_while(lock(&self.state), timeout, same);
    }
}
