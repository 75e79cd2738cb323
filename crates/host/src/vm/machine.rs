//! One QEMU and its RAM: what a running VM, or a waiting one of the pool, consists of.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use vmfork_engine::{Engine, ViewCounters};
use vmfork_memory::{Attachment, GuestMemory, MemorySample, TapError, pmem_bytes};
use vmfork_policy::ViewId;
use vmfork_qemu::{DriveSlot, Drives, Process, Qemu, Qmp, QmpError, Shape, Version};

use super::launch::Kept;
use crate::admission::Lease;
use crate::disks::MachineDisks;

/// What each stream of the device state of a VM, and of its clones, begins with.
pub type Lead = Arc<[u8]>;

/// A QEMU that answers and can be forked. Dropping it ends it and its keeper.
#[derive(Debug)]
pub struct Machine {
    pub qmp: Qmp,
    pub process: Process,
    pub shape: Shape,
    /// Of the QEMU that it runs in.
    pub version: Version,
    /// Our ends of the guest's ttyS0 and of the agent's port, until someone takes them.
    channels: Mutex<Channels>,
    /// Held while a keeper is asked something: 10 s if its QEMU is stuck. What others look at is
    /// beside it.
    memory: Mutex<GuestMemory>,
    attachment: Attachment,
    counters: Arc<ViewCounters>,
    keeper_pid: u32,
    kept: Kept,
    /// What its read-only drives hold: from its boot on, or from the time that it became a clone.
    drives: OnceLock<Drives>,
    /// Its disks. Those of one that waits are filled when it becomes a clone. They end after QEMU.
    disks: OnceLock<MachineDisks>,
    /// Of its device state's stream. `None` until a migration has shown it; `Some(None)`: of no use
    /// here.
    lead: Mutex<Option<Option<Lead>>>,
    /// Its memory's account while it waits in the pool.
    waiting: Mutex<Option<Lease>>,
}

/// Drives of a waiting QEMU that did not get their content.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("the drives {given:?} are not for a QEMU with {shape:?}, or it has others already")]
    Other { given: Vec<DriveSlot>, shape: Vec<DriveSlot> },
    #[error("give a waiting QEMU its drives")]
    Qmp(#[from] QmpError),
    #[error("look at the root's file")]
    RootFile(#[source] io::Error),
    #[error("show the root's file in persistent memory")]
    Pmem(#[from] TapError),
}

impl BindError {
    /// QEMU is gone, rather than unwilling.
    pub fn is_lost(&self) -> bool {
        match self {
            Self::Qmp(error) => error.is_lost(),
            Self::Pmem(error) => matches!(error, TapError::Gone { .. } | TapError::Socket { .. }),
            _ => false,
        }
    }
}

#[derive(Debug)]
struct Channels {
    serial: Option<OwnedFd>,
    agent: Option<OwnedFd>,
}

impl Machine {
    pub(super) fn new(
        qemu: Qemu,
        memory: GuestMemory,
        shape: Shape,
        version: Version,
        kept: Kept,
    ) -> Self {
        let Qemu { process, qmp, serial, agent } = qemu;
        let channels = Mutex::new(Channels { serial: Some(serial), agent });
        let (attachment, counters) = (memory.attachment().clone(), Arc::clone(memory.counters()));
        let keeper_pid = memory.keeper_pid();
        let memory = Mutex::new(memory);
        Self {
            qmp,
            process,
            shape,
            version,
            channels,
            memory,
            attachment,
            counters,
            keeper_pid,
            kept,
            drives: OnceLock::new(),
            disks: OnceLock::new(),
            lead: Mutex::default(),
            waiting: Mutex::default(),
        }
    }

    /// It waits in the pool: `lease` is for its memory until [`Machine::claimed`].
    pub fn waits(&self, lease: Lease) {
        lease.used_by(self.pid());
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(lease);
    }

    /// It becomes a clone, whose own lease is for its memory from now on.
    pub fn claimed(&self) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// It boots with these. With persistent memory it has waited for this.
    ///
    /// # Errors
    /// [`BindError`]: it does not boot.
    pub(super) async fn boots_with(
        &self,
        drives: Drives,
        disks: Option<MachineDisks>,
    ) -> Result<(), BindError> {
        let _first = self.drives.set(drives);
        if let Some(disks) = disks {
            let _first = self.disks.set(disks);
        }
        if self.shape.pmem_bytes.is_some() {
            self.show_root()?;
            if let Err(error) = self.qmp.cont().await {
                return Err(self.process.explain(error).await.into());
            }
        }
        Ok(())
    }

    /// What the first drive holds is what persistent memory shows.
    fn show_root(&self) -> Result<(), BindError> {
        let Some(file) = self.drives.get().and_then(Drives::first_file) else {
            return Err(BindError::RootFile(io::ErrorKind::NotFound.into()));
        };
        let stat = rustix::fs::fstat(file).map_err(|errno| BindError::RootFile(errno.into()))?;
        let file_bytes = stat.st_size.unsigned_abs();
        if self.shape.pmem_bytes != Some(pmem_bytes(file_bytes)) {
            return Err(BindError::RootFile(io::ErrorKind::InvalidInput.into()));
        }
        tokio::task::block_in_place(|| self.memory().show_file(file, file_bytes))?;
        Ok(())
    }

    /// It waits, connected to these.
    pub(super) fn waits_with(&self, disks: MachineDisks) {
        let _first = self.disks.set(disks);
    }

    /// Give the drives of a QEMU that waited their content, once, before a state is loaded. Its
    /// disks have theirs already ([`HostDisks::fill`](crate::disks::HostDisks::fill)).
    ///
    /// # Errors
    /// [`BindError`]: this QEMU is of no use then.
    pub async fn bind(&self, read_only: &Drives) -> Result<(), BindError> {
        let given = read_only.slots();
        let files = self.shape.drives.iter().filter(|slot| **slot == DriveSlot::ReadOnly);
        if !given.iter().eq(files) || self.drives.set(read_only.clone()).is_err() {
            return Err(BindError::Other { given, shape: self.shape.drives.clone() });
        }
        if self.shape.pmem_bytes.is_some() {
            self.show_root()?;
        }
        Ok(self.qmp.bind_files(read_only).await?)
    }

    /// That of QEMUs which its clones can have, as its disks are now.
    pub fn clones_shape(&self) -> Shape {
        let disks = self.disks().map(MachineDisks::clones_slots).unwrap_or_default();
        self.shape.clone().with_disks(disks)
    }

    /// What its read-only drives hold; clones of it get the same.
    pub fn drives(&self) -> Drives {
        self.drives.get().cloned().unwrap_or_default()
    }

    /// Its writable disks, if it has any.
    pub fn disks(&self) -> Option<&MachineDisks> {
        self.disks.get()
    }

    /// Whether a disk has stopped it.
    pub fn is_stalled(&self) -> bool {
        self.disks.get().is_some() && self.qmp.stall().borrow().is_some()
    }

    /// The user that QEMU runs as.
    pub fn uid(&self) -> u32 {
        self.kept.user.run_as().uid
    }

    /// The guest's serial console, once.
    pub fn take_serial(&self) -> Option<OwnedFd> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).serial.take()
    }

    /// The agent's port, once.
    pub fn take_agent(&self) -> Option<OwnedFd> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).agent.take()
    }

    /// What the stream of its device state begins with, if that is known and of use.
    pub fn lead(&self) -> Option<Lead> {
        self.lead.lock().unwrap_or_else(PoisonError::into_inner).clone().flatten()
    }

    /// Whether it is known if there is a lead.
    pub fn has_lead(&self) -> bool {
        self.lead.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub fn set_lead(&self, lead: Option<Lead>) {
        *self.lead.lock().unwrap_or_else(PoisonError::into_inner) = Some(lead);
    }

    pub fn is_alive(&self) -> bool {
        self.process.is_alive() && self.qmp.is_open()
    }

    pub fn pid(&self) -> u32 {
        self.process.pid().unsigned_abs()
    }

    /// Its RAM. Held for well under a millisecond at a time, for seconds if QEMU is stuck;
    /// blocking: not across an await, and not by who serves other VMs too.
    pub fn memory(&self) -> MutexGuard<'_, GuestMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine of the image that RAM is a view of.
    pub fn engine(&self) -> Option<Arc<Engine>> {
        self.attachment.engine()
    }

    /// The number of its view of that image.
    pub fn view_id(&self) -> Option<ViewId> {
        self.attachment.view_id()
    }

    /// Faults that page engines answered for it.
    pub fn counters(&self) -> &ViewCounters {
        &self.counters
    }

    pub fn keeper_pid(&self) -> u32 {
        self.keeper_pid
    }

    /// How much of RAM is this VM's own; zeros if it has gone.
    pub fn sample(&self) -> MemorySample {
        self.memory().sample().unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Before its disks are dropped, which end after it.
        self.process.kill();
        for process in &self.kept.processes {
            self.kept.state.process_ended(*process);
        }
    }
}
