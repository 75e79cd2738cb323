//! QEMUs that were started beforehand and wait for a state.
//!
//! [`state::PoolState`] decides; [`Pool`] does: it runs the starter, keeps what waits, drops what
//! is surplus or dead. The pool knows neither QEMU nor the shim: what it holds is made by the
//! starter that the daemon gives it.
//!
//! Promises: [`Pool::claim`] never waits and never hands out one that is known to be dead. With an
//! empty or turned off pool [`Pool::take`] starts one through the same starter. Dropping the pool
//! drops all that waits and gives up what starts.

pub mod state;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

pub use state::{Counts, ItemId, Limits};
use state::{Order, PoolState};

/// How often those that wait are asked whether they live.
const LIFE_CHECK: Duration = Duration::from_secs(2);
/// A starter that takes longer has failed.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// What a pool can hold. Dropping it ends it.
pub trait Pooled: Send + 'static {
    /// Whether it could still be used. Called under a lock: a glance, no waiting.
    fn is_alive(&self) -> bool;
}

impl Pooled for crate::Qemu {
    fn is_alive(&self) -> bool {
        Self::is_alive(self)
    }
}

/// What a start comes to. Dropping it must end what was begun.
pub type Starting<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

/// Where one came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Pooled,
    /// The pool had none.
    StartedNow,
}

struct Inner<K, T> {
    state: PoolState<K>,
    items: HashMap<ItemId, T>,
}

struct Shared<K, T, E> {
    inner: Mutex<Inner<K, T>>,
    changed: Notify,
    starter: Box<dyn Fn(K) -> Starting<T, E> + Send + Sync>,
    epoch: Instant,
}

impl<K, T, E> Shared<K, T, E> {
    fn inner(&self) -> MutexGuard<'_, Inner<K, T>> {
        self.inner.lock()
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }
}

/// While there is one, nothing is started to refill the pool: somebody needs the processors. See
/// [`Pool::hold`].
pub struct Hold<K, T, E>(Arc<Shared<K, T, E>>);

impl<K, T, E> Drop for Hold<K, T, E> {
    fn drop(&mut self) {
        self.0.inner().state.release();
        self.0.changed.notify_one();
    }
}

impl<K, T, E> fmt::Debug for Hold<K, T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}

/// A pool of `T`s by shape `K`.
pub struct Pool<K, T, E> {
    shared: Arc<Shared<K, T, E>>,
    refill: AbortHandle,
}

impl<K, T, E> Drop for Pool<K, T, E> {
    fn drop(&mut self) {
        self.refill.abort();
        let items = std::mem::take(&mut self.shared.inner().items);
        drop(items);
    }
}

impl<K: fmt::Debug, T, E> fmt::Debug for Pool<K, T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("state", &self.shared.inner().state).finish_non_exhaustive()
    }
}

impl<K, T, E> Pool<K, T, E>
where
    K: Clone + Eq + fmt::Debug + Send + Sync + 'static,
    T: Pooled,
    E: fmt::Display + Send + 'static,
{
    /// On a tokio runtime. Nothing is started before [`Pool::want`].
    pub fn new<S>(limits: Limits, starter: S) -> Self
    where
        S: Fn(K) -> Starting<T, E> + Send + Sync + 'static,
    {
        let state = PoolState::new(limits);
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner { state, items: HashMap::new() }),
            changed: Notify::new(),
            starter: Box::new(starter),
            epoch: Instant::now(),
        });
        let refill = tokio::spawn(refill(shared.clone())).abort_handle();
        Self { shared, refill }
    }

    /// Keep `target` of this shape waiting.
    pub fn want(&self, shape: &K, target: usize) {
        self.shared.inner().state.want(shape, target, self.shared.now());
        self.shared.changed.notify_one();
    }

    pub fn set_limits(&self, limits: Limits) {
        self.shared.inner().state.set_limits(limits);
        self.shared.changed.notify_one();
    }

    /// Put off the pool's refill while there are holds, but no shape's refill for longer than
    /// `HOLD_MAX` (2 s). So a client that forks all the time gets its QEMUs from the pool, too.
    pub fn hold(&self) -> Hold<K, T, E> {
        self.shared.inner().state.hold();
        Hold(Arc::clone(&self.shared))
    }

    /// One that waits, at once, if there is one.
    pub fn claim(&self, shape: &K) -> Option<T> {
        let mut dead = Vec::new();
        let claimed = {
            let mut inner = self.shared.inner();
            loop {
                let Some(item) = inner.state.claim(shape, self.shared.now()) else { break None };
                match inner.items.remove(&item) {
                    Some(item) if item.is_alive() => break Some(item),
                    other => dead.push(other),
                }
            }
        };
        self.shared.changed.notify_one();
        // `dead` goes here, outside the lock.
        claimed
    }

    /// One that waits, or one that is started now by the same starter.
    ///
    /// # Errors
    /// The starter's.
    pub async fn take(&self, shape: &K) -> Result<(T, Origin), E> {
        if let Some(item) = self.claim(shape) {
            return Ok((item, Origin::Pooled));
        }
        let item = (self.shared.starter)(shape.clone()).await?;
        Ok((item, Origin::StartedNow))
    }

    /// By shape, for metrics.
    pub fn counts(&self) -> Vec<(K, Counts)> {
        self.shared.inner().state.counts()
    }
}

enum Outcome<T, E> {
    Up(T),
    Failed(E),
    TimedOut,
}

async fn refill<K, T, E>(shared: Arc<Shared<K, T, E>>)
where
    K: Clone + Eq + fmt::Debug + Send + Sync + 'static,
    T: Pooled,
    E: fmt::Display + Send + 'static,
{
    let mut starting: JoinSet<(ItemId, Outcome<T, E>)> = JoinSet::new();
    // A starter that panics must not leave its item "starting" forever.
    let mut by_task: HashMap<tokio::task::Id, ItemId> = HashMap::new();
    loop {
        let sleep = {
            let (orders, surplus, sleep) = plan(&shared);
            drop(surplus);
            for (item, shape) in orders {
                let start = (shared.starter)(shape);
                let task = starting.spawn(async move {
                    let outcome = match tokio::time::timeout(START_TIMEOUT, start).await {
                        Ok(Ok(up)) => Outcome::Up(up),
                        Ok(Err(error)) => Outcome::Failed(error),
                        Err(_) => Outcome::TimedOut,
                    };
                    (item, outcome)
                });
                by_task.insert(task.id(), item);
            }
            sleep
        };
        tokio::select! {
            () = shared.changed.notified() => {}
            () = tokio::time::sleep(sleep) => {}
            Some(ended) = starting.join_next_with_id() => match ended {
                Ok((task, (item, outcome))) => {
                    by_task.remove(&task);
                    finish(&shared, item, outcome);
                }
                Err(error) => {
                    tracing::error!(%error, "starting a QEMU for the pool ended abnormally");
                    if let Some(item) = by_task.remove(&error.id()) {
                        shared.inner().state.failed(item, shared.now());
                    }
                }
            }
        }
    }
}

/// The starts to make, what is to be dropped outside the lock, and how long to sleep.
fn plan<K, T, E>(shared: &Shared<K, T, E>) -> (Vec<(ItemId, K)>, Vec<T>, Duration)
where
    K: Clone + Eq,
    T: Pooled,
{
    let now = shared.now();
    let mut inner = shared.inner();
    let Inner { state, items } = &mut *inner;
    let dead: Vec<ItemId> =
        items.iter().filter(|(_, item)| !item.is_alive()).map(|(id, _)| *id).collect();
    let mut surplus = Vec::new();
    for item in dead {
        tracing::warn!("a waiting QEMU has died");
        state.lost(item, now);
        surplus.extend(items.remove(&item));
    }
    let mut starts = Vec::new();
    for order in state.plan(now) {
        match order {
            Order::Start(item, shape) => starts.push((item, shape)),
            Order::Discard(item) => surplus.extend(items.remove(&item)),
        }
    }
    let next = state.next_plan_at(now).map_or(Duration::MAX, |at| at.saturating_sub(now));
    let check = if items.is_empty() { Duration::MAX } else { LIFE_CHECK };
    // An hour at most: the timer takes no unbounded times.
    (starts, surplus, next.min(check).min(Duration::from_secs(3600)))
}

fn finish<K, T, E>(shared: &Shared<K, T, E>, item: ItemId, outcome: Outcome<T, E>)
where
    K: Clone + Eq,
    E: fmt::Display + Send + 'static,
{
    let mut inner = shared.inner();
    let why = match outcome {
        Outcome::Up(up) => {
            let unwanted =
                if inner.state.started(item) { inner.items.insert(item, up) } else { Some(up) };
            drop(inner);
            drop(unwanted);
            return;
        }
        Outcome::Failed(error) => error.to_string(),
        Outcome::TimedOut => format!("not up within {START_TIMEOUT:?}"),
    };
    let pause = inner.state.failed(item, shared.now());
    drop(inner);
    tracing::warn!(why, pause_ms = pause.as_millis(), "a QEMU for the pool did not start");
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
