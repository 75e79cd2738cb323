//! What must not be removed right now, though no snapshot names it yet.
//!
//! ```text
//!   create ── pin ── is it there? ── (put) ── … ── descriptor ── unpin
//!   collect     begin ── list ── who names what? ── delete what is neither named nor pinned ── end
//! ```
//!
//! A collector looks at the snapshots once. What was pinned at any time while it runs, it leaves:
//! the snapshot it was pinned for may have appeared after the collector looked. A pin waits while
//! its key is being deleted, so that who pins and then finds the key there may rely on it.

use std::collections::{HashMap, HashSet};

use parking_lot::{Condvar, Mutex};

use crate::blobs::{BlobError, Blobs};

#[derive(Debug, Default)]
pub(crate) struct Pins {
    state: Mutex<State>,
    /// A key is no longer being deleted.
    deleted: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pinned: HashMap<String, u32>,
    /// Unpinned while a collector ran.
    retained: HashSet<String>,
    collectors: u32,
    deleting: HashSet<String>,
}

impl Pins {
    pub(crate) fn pin(&self, key: String) {
        let mut state = self.state.lock();
        // Bounded: by one call to delete, which has a bound.
        while state.deleting.contains(&key) {
            self.deleted.wait(&mut state);
        }
        *state.pinned.entry(key).or_default() += 1;
    }

    pub(crate) fn unpin(&self, keys: impl IntoIterator<Item = String>) {
        let mut state = self.state.lock();
        for key in keys {
            match state.pinned.get_mut(&key) {
                Some(count) if *count > 1 => *count -= 1,
                _ => {
                    state.pinned.remove(&key);
                }
            }
            if state.collectors > 0 {
                state.retained.insert(key);
            }
        }
    }

    /// Begin before looking at which snapshots there are.
    pub(crate) fn collector(&self) -> Collector<'_> {
        self.state.lock().collectors += 1;
        Collector { pins: self }
    }
}

/// Deletes what is not pinned.
#[derive(Debug)]
pub(crate) struct Collector<'a> {
    pins: &'a Pins,
}

impl Collector<'_> {
    /// Whether it was deleted; if not, somebody needs it.
    pub(crate) fn delete(&self, blobs: &dyn Blobs, key: &str) -> Result<bool, BlobError> {
        {
            let mut state = self.pins.state.lock();
            let needed = state.pinned.contains_key(key) || state.retained.contains(key);
            if needed || !state.deleting.insert(key.to_owned()) {
                return Ok(false);
            }
        }
        let done = blobs.delete(key);
        self.pins.state.lock().deleting.remove(key);
        self.pins.deleted.notify_all();
        done.map(|()| true)
    }
}

impl Drop for Collector<'_> {
    fn drop(&mut self) {
        let mut state = self.pins.state.lock();
        state.collectors -= 1;
        if state.collectors == 0 {
            state.retained.clear();
        }
    }
}
