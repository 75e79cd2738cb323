//! Whether a VM's vCPUs stand still because a client asked for it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use vmfork_guest_link::agent::Held;

use super::console::HeldConsole;
use super::machine::Lead;

/// What a paused VM is in. Forks of it continue this instant.
#[derive(Debug, Default)]
pub struct Standstill {
    /// The number by which the guest's agent knows the forks of this instant.
    pub fork: u64,
    /// The agent, silent. `None`: there is none, or it did not fall silent.
    pub held: Option<Held>,
    /// What is typed would become device state, and forks of this instant would differ.
    pub console: Option<HeldConsole>,
    /// What the first freeze of this instant saved. The later ones need not ask QEMU, which can do
    /// only one migration between two `cont`.
    pub saved: SavedState,
}

/// The device state of an instant, once a freeze has saved it.
#[derive(Debug, Default)]
pub struct SavedState(Mutex<Option<DeviceState>>);

impl SavedState {
    fn state(&self) -> MutexGuard<'_, Option<DeviceState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was saved, by another fd.
    ///
    /// # Errors
    /// The host is out of fds.
    pub fn get(&self) -> io::Result<Option<DeviceState>> {
        self.state().as_ref().map(DeviceState::try_clone).transpose()
    }

    /// Keep what a freeze has saved.
    pub fn keep(&self, state: DeviceState) {
        *self.state() = Some(state);
    }

    /// Nothing is known of the instant any more, as the vCPUs may have run.
    pub fn forget(&self) {
        drop(self.state().take());
    }
}

/// The device state of an instant.
#[derive(Debug)]
pub struct DeviceState {
    /// As QEMU reads it, in memory.
    pub content: OwnedFd,
    /// What the stream of each clone's own state begins with, too.
    pub lead: Option<Lead>,
}

impl DeviceState {
    /// The same content by another fd.
    ///
    /// # Errors
    /// The host is out of fds.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { content: self.content.try_clone()?, lead: self.lead.clone() })
    }
}

/// A VM's pause. It changes only while the VM's `forking` is locked, and when the VM ends.
#[derive(Debug)]
pub struct Pause {
    still: Mutex<Option<Arc<Standstill>>>,
    is_paused: watch::Sender<bool>,
}

impl Default for Pause {
    fn default() -> Self {
        Self { still: Mutex::default(), is_paused: watch::Sender::new(false) }
    }
}

impl Pause {
    fn still(&self) -> MutexGuard<'_, Option<Arc<Standstill>>> {
        self.still.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The vCPUs stand still.
    pub fn begin(&self, still: Standstill) {
        *self.still() = Some(Arc::new(still));
        self.is_paused.send_replace(true);
    }

    /// The vCPUs run again, or the VM has ended. The agent may speak, unless a freeze of this
    /// instant is in progress: then after it.
    pub fn end(&self) {
        drop(self.still().take());
        self.is_paused.send_replace(false);
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        *self.is_paused.borrow()
    }

    /// The instant that it is in, if it is paused.
    pub fn now(&self) -> Option<Arc<Standstill>> {
        self.still().clone()
    }

    /// Waits until it is not paused (any more).
    pub async fn over(&self) {
        let mut paused = self.is_paused.subscribe();
        // The sender lives as long as this.
        let _not_paused = paused.wait_for(|paused| !paused).await;
    }
}
