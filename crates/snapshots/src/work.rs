//! What takes a while with stored snapshots, so that all of it can be ended.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vmfork_store::Work;

use crate::error::SnapshotError;

/// Everything that is being done with a store: ended together when the daemon stops.
#[derive(Debug, Default)]
pub(super) struct Works {
    all: Mutex<All>,
}

#[derive(Debug, Default)]
struct All {
    is_stopped: bool,
    live: Vec<Weak<Work>>,
}

impl Works {
    /// Something begins. After [`Works::stop`] it is cancelled from the start.
    pub(super) fn begin(&self, work: Work) -> Arc<Work> {
        let work = Arc::new(work);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.live.retain(|other| other.strong_count() > 0);
        all.live.push(Arc::downgrade(&work));
        if all.is_stopped {
            cancel(&work);
        }
        work
    }

    /// Cancel what has begun, and what is yet to begin.
    pub(super) fn stop(&self) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.is_stopped = true;
        all.live.drain(..).filter_map(|work| work.upgrade()).for_each(|work| cancel(&work));
    }
}

pub(super) fn cancel(work: &Work) {
    work.cancelled.store(true, Ordering::Relaxed);
}

/// A waiter that disconnects does not want the work any more. (When the work has ended, this does
/// nothing.)
#[derive(Debug)]
pub(super) struct CancelOnDrop(pub(super) Arc<Work>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        cancel(&self.0);
    }
}

/// Something that takes a while, on a thread of its own. It begins with the call, and goes on to
/// its end even if the future is dropped.
pub(super) fn blocking<T: Send + 'static, F>(
    run: F,
) -> impl Future<Output = Result<T, SnapshotError>>
where
    F: FnOnce() -> Result<T, SnapshotError> + Send + 'static,
{
    let task = tokio::task::spawn_blocking(run);
    async { task.await? }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_begins_before_a_stop_or_after_it_is_cancelled() {
        let is_cancelled = |work: &Work| work.cancelled.load(Ordering::Relaxed);
        let works = Works::default();
        let (one, two) = (works.begin(Work::new(1)), works.begin(Work::new(1)));
        drop(CancelOnDrop(Arc::clone(&one)));
        assert!(is_cancelled(&one) && !is_cancelled(&two));
        works.stop();
        assert!(is_cancelled(&two));
        assert!(is_cancelled(&works.begin(Work::new(1))));
    }
}
