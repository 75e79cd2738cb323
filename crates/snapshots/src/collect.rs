//! Freeing what no snapshot needs any more, in the background.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use vmfork_store::Store;

/// What is left over comes in crowds: VMs of a snapshot end together. So much later all of it is
/// freed at once.
const AFTER: Duration = Duration::from_secs(1);

const IDLE: u8 = 0;
const ASKED: u8 = 1;
/// One runs that may have looked before the last was asked for.
const RUNS: u8 = 2;
const RUNS_AND_ASKED: u8 = 3;

/// Runs [`Store::collect`], one at a time, after whatever may have left something over.
#[derive(Debug)]
pub(super) struct Collector {
    store: Store,
    runtime: Handle,
    state: AtomicU8,
    /// Itself, for its task.
    this: Weak<Self>,
}

impl Collector {
    pub(super) fn new(store: &Store, runtime: &Handle) -> Arc<Self> {
        let (heard, runtime) = (store.clone(), runtime.clone());
        let it = Arc::new_cyclic(|this| Self {
            store: heard,
            runtime,
            state: AtomicU8::new(IDLE),
            this: Weak::clone(this),
        });
        let weak = Arc::downgrade(&it);
        store.on_leftovers(move || {
            if let Some(it) = weak.upgrade() {
                it.soon();
            }
        });
        it
    }

    /// Something may be left over. Does not wait, and may be called on any thread.
    pub(super) fn soon(&self) {
        let next = |state| match state {
            IDLE => Some(ASKED),
            RUNS => Some(RUNS_AND_ASKED),
            _ => None,
        };
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) == Ok(IDLE)
            && let Some(this) = self.this.upgrade()
        {
            let runtime = this.runtime.clone();
            runtime.spawn(this.run());
        }
    }

    async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(AFTER).await;
            self.state.store(RUNS, Ordering::Release);
            let store = self.store.clone();
            match tokio::task::spawn_blocking(move || store.collect()).await {
                Ok(Ok(cleared)) => tracing::debug!(?cleared, "what no snapshot needs is freed"),
                Ok(Err(error)) => {
                    tracing::warn!(
                        error = vmfork_host::error::chain(&error),
                        "what no snapshot needs stays"
                    );
                }
                Err(error) => tracing::error!(%error, "free what no snapshot needs"),
            }
            let ends = |from, to| {
                self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            };
            if ends(RUNS, IDLE).is_ok() {
                return;
            }
            self.state.store(ASKED, Ordering::Release);
        }
    }
}
