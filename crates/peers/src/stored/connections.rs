//! Connections to hosts that chunks come from: several to each, kept from one to the next.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use vmfork_cluster::HostId;

use crate::client::{Connection, Peer};
use crate::error::CallError;

/// Most that are kept to a host while they are not used.
const KEPT_MAX: usize = 16;

/// Those that are not used now, with the address that they lead to.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<HashMap<HostId, Vec<(String, Connection)>>>);

impl Connections {
    fn take(&self, host: HostId, peer: &Peer) -> Option<Connection> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = all.get_mut(&host)?;
        kept.retain(|(address, connection)| *address == peer.address && !connection.is_closed());
        kept.pop().map(|(_, connection)| connection)
    }

    fn put(&self, host: HostId, peer: &Peer, connection: Option<Connection>) {
        let Some(connection) = connection else { return };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = all.entry(host).or_default();
        if kept.len() < KEPT_MAX {
            kept.push((peer.address.clone(), connection));
        }
    }

    /// What a host has at a path. `None`: nothing.
    ///
    /// # Errors
    /// It does not answer, or refuses for another reason.
    pub(super) async fn get(
        &self,
        host: HostId,
        peer: &Peer,
        path: &str,
        wait: Duration,
    ) -> Result<Option<Bytes>, CallError> {
        let mut kept = self.take(host, peer);
        let got = peer.get_again(&mut kept, path, wait).await;
        self.put(host, peer, kept);
        match got {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ask a host something that it answers at once.
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub(super) async fn ask<A: Serialize + Sync, B: DeserializeOwned>(
        &self,
        host: HostId,
        peer: &Peer,
        path: &str,
        ask: &A,
        wait: Duration,
    ) -> Result<B, CallError> {
        let mut kept = self.take(host, peer);
        let answer = peer.ask_again(&mut kept, path, ask, wait).await;
        self.put(host, peer, kept);
        answer
    }

    /// End those to hosts that are no members.
    pub(super) fn keep(&self, is_member: impl Fn(HostId) -> bool) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|host, _| is_member(*host));
    }
}
