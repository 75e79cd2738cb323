//! Whose disks hold how much: sets of disks within those of their user, within the host's.
//!
//! A family's disks count on the user who began the family. Volumes are the host's. Disks that an
//! earlier daemon left count on the host alone: their notes name no user.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vmfork_disk::{DiskSet, DiskStore, StoreError};

use crate::quotas::{DiskBounds, User};

/// The accounts of a host's disks.
#[derive(Debug)]
pub(super) struct Accounts {
    host: Arc<DiskSet>,
    bounds: DiskBounds,
    /// Of users that have disks.
    users: Mutex<BTreeMap<User, Weak<DiskSet>>>,
    /// Held while what is left is counted, so that the last count is the one that is kept.
    counting: Mutex<()>,
}

impl Accounts {
    /// Without a bound.
    pub(super) fn new() -> Self {
        let host = DiskSet::named("the host's disk quota", None, None);
        Self {
            host,
            bounds: DiskBounds::default(),
            users: Mutex::default(),
            counting: Mutex::default(),
        }
    }

    pub(super) fn bound(&mut self, host_bytes: Option<u64>, users: DiskBounds) {
        self.host.set_quota_bytes(host_bytes);
        self.bounds = users;
    }

    /// A set of the host's own.
    pub(super) fn of_host(&self) -> Arc<DiskSet> {
        DiskSet::within(&self.host)
    }

    /// A set for a family that a user begins.
    pub(super) fn of_user(&self, user: User) -> Arc<DiskSet> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|_, set| set.strong_count() > 0);
        let found = users.get(&user).and_then(Weak::upgrade);
        let set = found.unwrap_or_else(|| {
            let name = match user {
                User::Uid(uid) => format!("the disk quota of user {uid}"),
                User::Token => "the disk quota of clients with the token".to_owned(),
            };
            let host = Some(Arc::clone(&self.host));
            let set = DiskSet::named(name, self.bounds.of(user), host);
            users.insert(user, Arc::downgrade(&set));
            set
        });
        DiskSet::within(&set)
    }

    /// Counts again what earlier daemons left. Reads the maps of all layers, if there is a bound.
    ///
    /// # Errors
    /// Their folder can't be read.
    pub(super) fn count_left(&self, store: &DiskStore) -> Result<(), StoreError> {
        if self.host.quota_bytes().is_some() {
            let _counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
            self.host.set_others_bytes(store.uncounted_bytes(&self.host)?);
        }
        Ok(())
    }
}
