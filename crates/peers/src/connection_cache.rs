//! Connections to other hosts that are kept for what is said again and again: a handshake costs
//! both ends a hundred times a heartbeat.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmfork_cluster::HostId;

use super::client::{Connection, Peer};

/// Most that are kept: each takes one of the places that the other has for members.
const KEPT_MAX: usize = 256;

/// One for each host, but for those that are in use.
#[derive(Debug, Default)]
pub(super) struct ConnectionCache(Mutex<HashMap<HostId, (String, Connection)>>);

impl ConnectionCache {
    fn all(&self) -> MutexGuard<'_, HashMap<HostId, (String, Connection)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One to where the host is now.
    pub(super) fn take(&self, host: HostId, peer: &Peer) -> Option<Connection> {
        let (address, connection) = self.all().remove(&host)?;
        (address == peer.address).then_some(connection)
    }

    pub(super) fn put(&self, host: HostId, peer: &Peer, connection: Connection) {
        let mut all = self.all();
        if all.len() < KEPT_MAX {
            all.insert(host, (peer.address.clone(), connection));
        }
    }

    /// End those to hosts that are no members.
    pub(super) fn keep(&self, is_member: impl Fn(HostId) -> bool) {
        self.all().retain(|host, _| is_member(*host));
    }
}
