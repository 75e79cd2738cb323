//! How long VMs may live: a bound in time, a VM's own or its nearest ancestor's that has one.
//!
//! ```text
//!   run, fork, start ─► Lifetime ─► Deadlines (decides) ◄─ set, or another host's news
//!                                       │
//!                                       └─► due VMs, next wake ─► the timer in `core` ends them
//! ```
//!
//! Promises: a VM ends at the deadline of the nearest VM of its line that has a bound, also when
//! that VM has ended. A change of a bound moves all VMs that inherit it.
//!
//! Left to others: ending a VM (`core`), and telling other hosts.

mod deadlines;
mod setting;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

pub use self::deadlines::Deadlines;
pub use self::setting::{Lifetime, LifetimeTold, Setting, Told};

/// What a VM's end says when its time is over.
pub const OVER: &str = "its time to live is over";

/// A line whose bounds are kept until this is dropped.
#[derive(Debug)]
pub struct HeldLine {
    lifetimes: Arc<Lifetimes>,
    line: Arc<[String]>,
}

impl HeldLine {
    /// The bound of the nearest VM of the line that has one: what clones inherit that begin now.
    pub fn bound(&self) -> Option<Setting> {
        self.lifetimes.deadlines().nearest(&self.line).cloned()
    }
}

impl Drop for HeldLine {
    fn drop(&mut self) {
        self.lifetimes.deadlines().release(&self.line);
    }
}

/// The deadlines of this host's VMs, and what wakes their timer.
#[derive(Debug, Default)]
pub struct Lifetimes {
    deadlines: Mutex<Deadlines>,
    changed: Notify,
}

impl Lifetimes {
    fn deadlines(&self) -> MutexGuard<'_, Deadlines> {
        self.deadlines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A VM begins. `line`: what it descends from, the root first, and itself last.
    pub fn begin(&self, line: Arc<[String]>, lifetime: &Lifetime) {
        if self.deadlines().begin(line, lifetime, Instant::now()) {
            self.changed.notify_one();
        }
    }

    /// A VM has ended.
    pub fn ended(&self, id: &str) {
        self.deadlines().ended(id);
    }

    /// Keep the bounds of a line, and hear of their changes, while a fork makes VMs of it.
    /// That holds also if no VM of the line lives here (any more).
    pub fn hold(self: &Arc<Self>, line: Arc<[String]>) -> HeldLine {
        self.deadlines().hold(&line);
        HeldLine { lifetimes: Arc::clone(self), line }
    }

    /// Bound a VM from now on; `None`: it has no bound, whatever its ancestors have. → the new
    /// setting; `None`: there is no such VM.
    pub fn set(&self, id: &str, ttl: Option<Duration>) -> Option<Setting> {
        let now = Instant::now();
        let setting = self.deadlines().set(id, ttl.map(|ttl| now + ttl));
        self.changed.notify_one();
        setting
    }

    /// Another host tells of a bound. Older news, and bounds of strange families, change nothing.
    pub fn hear(&self, setting: Setting) {
        if self.deadlines().hear(setting) {
            self.changed.notify_one();
        }
    }

    /// The bound that a VM of this host has, its own or inherited.
    pub fn of(&self, id: &str) -> Option<Setting> {
        self.deadlines().of(id).cloned()
    }

    /// Whether a newer bound of its VM is known.
    pub fn is_outdated(&self, setting: &Setting) -> bool {
        self.deadlines().is_outdated(setting)
    }

    /// The VMs whose time is over, and when to look again.
    pub fn look(&self) -> (Vec<String>, Option<Instant>) {
        let deadlines = self.deadlines();
        (deadlines.due(Instant::now()), deadlines.next())
    }

    /// Waits until deadlines have changed since the last call.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}
