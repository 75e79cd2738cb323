//! Who changes a stored snapshot: one at a time of each.
//!
//! What is learnt of a VM is the least of it, and gives way to all that a user asks for; what is to
//! be removed need not be made whole first.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;
use vmfork_store::{SnapshotId, Work};

use crate::work::cancel;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Learn,
    /// What was learnt.
    Forget,
    Flatten,
    Remove,
}

impl Change {
    /// Whether it is cancelled when `other` is wanted.
    fn yields_to(self, other: Self) -> bool {
        match self {
            Self::Learn => other != Self::Learn,
            Self::Flatten => other == Self::Remove,
            Self::Forget | Self::Remove => false,
        }
    }
}

type Queues = Arc<Mutex<HashMap<SnapshotId, Queue>>>;

#[derive(Debug, Default)]
pub(super) struct Turns {
    queues: Queues,
}

#[derive(Debug, Default)]
struct Queue {
    lock: Arc<tokio::sync::Mutex<()>>,
    /// Who has the lock, or waits for it.
    all: Vec<(Change, Arc<Work>)>,
}

/// As long as it lives, no other task changes the snapshot.
#[derive(Debug)]
pub(super) struct Turn {
    // Dropped in this order.
    _place: Place,
    _lock: OwnedMutexGuard<()>,
}

#[derive(Debug)]
struct Place {
    queues: Queues,
    id: SnapshotId,
    work: Arc<Work>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get_mut(&self.id) {
            queue.all.retain(|(_, work)| !Arc::ptr_eq(work, &self.work));
            if queue.all.is_empty() {
                queues.remove(&self.id);
            }
        }
    }
}

impl Turns {
    /// Wait for the turn to do something, having cancelled what gives way to it. `work` may have
    /// been cancelled itself meanwhile.
    pub(super) async fn take(&self, id: SnapshotId, change: Change, work: &Arc<Work>) -> Turn {
        let (place, lock) = {
            let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
            let queue = queues.entry(id).or_default();
            let yielding = queue.all.iter().filter(|(other, _)| other.yields_to(change));
            yielding.for_each(|(_, work)| cancel(work));
            queue.all.push((change, Arc::clone(work)));
            let place = Place { queues: Arc::clone(&self.queues), id, work: Arc::clone(work) };
            (place, Arc::clone(&queue.lock))
        };
        Turn { _lock: lock.lock_owned().await, _place: place }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn what_is_learnt_gives_way_and_other_snapshots_are_not_waited_for() {
        let turns = Turns::default();
        let work = || Arc::new(Work::new(1));
        let is_cancelled = |work: &Work| work.cancelled.load(Ordering::Relaxed);
        let (one, two) = (SnapshotId::random().expect("id"), SnapshotId::random().expect("id"));
        let works = [work(), work(), work()];
        let learning = turns.take(one, Change::Learn, &works[0]).await;
        let mut next = Box::pin(turns.take(one, Change::Learn, &works[1]));
        assert!(next.as_mut().now_or_never().is_none());
        assert!(!is_cancelled(&works[0]));
        drop(turns.take(two, Change::Flatten, &work()).await);

        let mut flatten = Box::pin(turns.take(one, Change::Flatten, &works[2]));
        assert!(flatten.as_mut().now_or_never().is_none());
        assert!(is_cancelled(&works[0]) && is_cancelled(&works[1]));
        drop(learning);
        drop(next.await);
        let flatten = flatten.await;
        let mut forget = Box::pin(turns.take(one, Change::Forget, &works[0]));
        assert!(forget.as_mut().now_or_never().is_none());
        assert!(!is_cancelled(&works[2]), "whole it may stay");
        drop(forget);
        let removing = work();
        let mut remove = Box::pin(turns.take(one, Change::Remove, &removing));
        assert!(remove.as_mut().now_or_never().is_none());
        assert!(is_cancelled(&works[2]));
        drop(flatten);
        drop(remove.await);
        assert!(turns.queues.lock().expect("no panic").is_empty());
    }
}
