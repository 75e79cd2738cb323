//! Snapshots on their way into the store, by name, and those that are being pulled, by id.
//!
//! ```text
//!   place ─► (taken: listed) ─┬► stored, or given up: gone from here
//!                             └► failed: shown until it is removed, or another takes the name
//!   pull, once it can be started ─┬► all is here: gone
//!                                 └► given up or failed: shown with the reason until the next pull
//! ```
//!
//! Each is ended by the drop of its guard, also when the task that held the guard has panicked.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use vmfork_host::error::chain;
use vmfork_store::{SnapshotId, StoreError};

use crate::error::{GuestImageError, SnapshotError};
use crate::kind::is_guest_image;
use crate::library::Snapshots;
use crate::under_way::{Doing, UnderWay};

/// A name that no other snapshot gets.
#[derive(Debug)]
pub(super) struct Placed {
    snapshots: Arc<Snapshots>,
    pub(super) under_way: Arc<UnderWay>,
    is_stored: bool,
}

impl Placed {
    /// It is in the store, or never will be. What failed after it was listed stays to be seen.
    pub(super) fn ends(mut self, error: Option<&SnapshotError>) {
        self.is_stored = error.is_none();
        if self.is_stored {
            self.unlist(&mut self.snapshots.under_way());
        }
        let Some(error) = error.filter(|error| !error.is_cancelled()) else { return };
        if self.under_way.listed().is_some() {
            let name = &self.under_way.name;
            tracing::error!(snapshot = name, error = chain(error), "snapshot not stored");
            self.under_way.fail(error.to_body(format!("store snapshot `{name}`")));
        }
    }

    /// It is not in progress any more. What failed stays.
    fn unlist(&self, all: &mut BTreeMap<String, Arc<UnderWay>>) {
        let found = all.get(&self.under_way.name);
        let is_mine = found.is_some_and(|found| Arc::ptr_eq(found, &self.under_way));
        if is_mine && self.under_way.error().is_none() {
            all.remove(&self.under_way.name);
        }
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let is_listed = self.under_way.listed().is_some();
        if is_listed {
            self.under_way.fail_if_panicking();
        }
        self.unlist(&mut self.snapshots.under_way());
        if is_listed && !self.is_stored {
            self.snapshots.collector.soon();
        }
        self.under_way.over.cancel();
    }
}

/// The pages of snapshots come from another store.
#[derive(Debug)]
pub(super) struct Pulling {
    snapshots: Arc<Snapshots>,
    pub(super) under_way: Arc<UnderWay>,
}

impl Pulling {
    /// All is here, or what is left comes as it is needed.
    pub(super) fn ends(self, error: Option<&SnapshotError>, message: String) {
        let Some(error) = error else { return };
        if !error.is_away() {
            self.under_way.be_final();
        }
        let reason = chain(error);
        tracing::warn!(snapshot = self.under_way.name, reason, "pages are left where they were");
        let given_up = error.is_cancelled().then_some(&SnapshotError::PullGivenUp);
        self.under_way.fail(given_up.unwrap_or(error).to_body(message));
    }
}

impl Drop for Pulling {
    fn drop(&mut self) {
        self.under_way.plan(None);
        self.under_way.fail_if_panicking();
        if self.under_way.error().is_none() {
            let mut pulls = self.snapshots.pulls();
            pulls.retain(|_, other| !Arc::ptr_eq(other, &self.under_way));
        } else {
            // It may have been removed meanwhile.
            self.snapshots.collector.soon();
        }
        self.under_way.over.cancel();
    }
}

impl Snapshots {
    pub(super) fn under_way(&self) -> MutexGuard<'_, BTreeMap<String, Arc<UnderWay>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn pulls(&self) -> MutexGuard<'_, BTreeMap<SnapshotId, Arc<UnderWay>>> {
        self.pulls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keep a name for a snapshot that is to be stored under it.
    ///
    /// # Errors
    /// It is taken, unless the snapshot is pulled: then it may be here.
    pub(super) fn place(
        self: &Arc<Self>,
        name: &str,
        doing: Doing,
    ) -> Result<Placed, SnapshotError> {
        let mine = Arc::new(UnderWay::new(name, doing, self.work()));
        {
            let mut all = self.under_way();
            if let Some(other) = all.get(name).filter(|other| other.error().is_none()) {
                return Err(not_yet(other));
            }
            all.insert(name.to_owned(), Arc::clone(&mine));
        }
        let placed = Placed { snapshots: Arc::clone(self), under_way: mine, is_stored: false };
        if doing == Doing::Pull {
            return Ok(placed);
        }
        // The work that had the name before has stored it, or never will. So look once no other
        // work can have the name.
        match self.store.descriptor(name) {
            Err(StoreError::NotFound { .. }) if self.store.is_being_written(name) => {
                Err(StoreError::Busy { name: name.to_owned() }.into())
            }
            Err(StoreError::NotFound { .. }) => Ok(placed),
            Ok(found) if is_guest_image(&found) => {
                Err(GuestImageError::HasName { name: name.to_owned() }.into())
            }
            Ok(_) => Err(SnapshotError::NameTaken { name: name.to_owned() }),
            Err(error) => Err(error.into()),
        }
    }

    /// The chunks of these, which are here but for them, begin to come. `Err`: they come already.
    pub(super) fn pull_begins(
        self: &Arc<Self>,
        name: &str,
        ids: Vec<SnapshotId>,
    ) -> Result<Pulling, Arc<UnderWay>> {
        let mut pulls = self.pulls();
        let others: Vec<_> = ids.iter().filter_map(|id| pulls.get(id)).collect();
        if let [first, rest @ ..] = others.as_slice()
            && others.len() == ids.len()
            && rest.iter().all(|other| Arc::ptr_eq(other, first))
            && first.goes_on()
        {
            return Err(Arc::clone(first));
        }
        let under_way = Arc::new(UnderWay::new(name, Doing::Pull, self.work()));
        for id in &ids {
            pulls.insert(*id, Arc::clone(&under_way));
        }
        drop(pulls);
        Ok(Pulling { snapshots: Arc::clone(self), under_way })
    }

    /// Whether a snapshot can be worked with: not while it is being written.
    ///
    /// # Errors
    /// It is.
    pub(super) fn check_written(&self, name: &str) -> Result<(), SnapshotError> {
        let under_way = self.under_way().get(name).cloned();
        match under_way.filter(|one| one.error().is_none()) {
            // One that is being pulled may be there.
            Some(other) if self.store.descriptor(name).is_err() => Err(not_yet(&other)),
            _ => Ok(()),
        }
    }

    /// Wait until a snapshot is not being written (any more).
    pub(super) async fn until_written(&self, name: &str) {
        let under_way = self.under_way().get(name).cloned();
        if let Some(under_way) = under_way {
            under_way.over.cancelled().await;
        }
    }
}

fn not_yet(under_way: &UnderWay) -> SnapshotError {
    let UnderWay { name, doing, .. } = under_way;
    SnapshotError::UnderWay { name: name.clone(), participle: doing.participle() }
}
