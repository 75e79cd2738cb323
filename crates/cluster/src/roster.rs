//! The membership, shared: by who changes it and by who must know, at each handshake, who belongs
//! here.

use std::sync::Arc;

use parking_lot::RwLock;

use crate::id::{Fingerprint, HostId};
use crate::membership::Membership;

/// A handle to the one [`Membership`] of a daemon. Clones share it.
#[derive(Debug, Clone)]
pub struct Roster(Arc<RwLock<Membership>>);

impl Roster {
    pub fn new(membership: Membership) -> Self {
        Self(Arc::new(RwLock::new(membership)))
    }

    /// Looks something up. Short, and without waiting for anything: handshakes wait meanwhile if
    /// somebody writes.
    pub fn read<T>(&self, look: impl FnOnce(&Membership) -> T) -> T {
        // A panic in `change` may have lost that change; the book is whole between any two of its
        // own steps.
        look(&self.0.read())
    }

    /// Changes something. Short, as [`Roster::read`].
    pub fn change<T>(&self, change: impl FnOnce(&mut Membership) -> T) -> T {
        change(&mut self.0.write())
    }

    /// The member that shows this certificate now.
    pub fn member_by_fingerprint(&self, fingerprint: Fingerprint) -> Option<HostId> {
        self.read(|book| book.member_by_fingerprint(fingerprint).map(|entry| entry.id))
    }

    /// The certificate that a host has to show now; `None` if it is no member.
    pub fn fingerprint_of(&self, host: HostId) -> Option<Fingerprint> {
        self.read(|book| book.member(host).map(|entry| entry.fingerprint))
    }
}
