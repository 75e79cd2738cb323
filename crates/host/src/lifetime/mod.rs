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
        self.deadlines().nearest(id).cloned()
    }

    /// Whether this is still the newest that is known of the bound of its VM.
    pub fn is_newest(&self, setting: &Setting) -> bool {
        self.deadlines().is_newest(setting)
    }

    /// What clones of a VM inherit that are forked now. `own`: their own bound.
    pub fn of_clones(&self, parent: &str, own: Option<Duration>) -> Lifetime {
        Lifetime { own, inherited: self.of(parent) }
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
