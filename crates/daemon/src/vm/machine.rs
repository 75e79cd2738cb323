//! One QEMU and its RAM: what a running VM, or a waiting one of the pool, consists of.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmfork_memory::{Engine, GuestMemory, MemorySample, ViewId};
use vmfork_qemu::{Process, Qemu, Qmp, Shape, Version};

use crate::state::{ProcessId, State};

/// A QEMU that answers and can be forked. Dropping it ends it and its keeper.
#[derive(Debug)]
pub struct Machine {
    pub(crate) qmp: Qmp,
    pub(crate) process: Process,
    pub(crate) shape: Shape,
    /// Of the QEMU that it runs in.
    pub(crate) version: Version,
    /// Our ends of the guest's ttyS0 and of the agent's port, until someone takes them.
    channels: Mutex<Channels>,
    memory: Mutex<GuestMemory>,
    processes: Vec<ProcessId>,
    state: Arc<State>,
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
        processes: Vec<ProcessId>,
        state: Arc<State>,
    ) -> Self {
        let Qemu { process, qmp, serial, agent } = qemu;
        let channels = Mutex::new(Channels { serial: Some(serial), agent });
        let memory = Mutex::new(memory);
        Self { qmp, process, shape, version, channels, memory, processes, state }
    }

    /// The guest's serial console, once.
    pub fn take_serial(&self) -> Option<OwnedFd> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).serial.take()
    }

    /// The agent's port, once.
    pub fn take_agent(&self) -> Option<OwnedFd> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).agent.take()
    }

    pub fn is_alive(&self) -> bool {
        self.process.is_alive() && self.qmp.is_open()
    }

    pub fn pid(&self) -> u32 {
        self.process.pid().unsigned_abs()
    }

    /// Its RAM. Held for well under a millisecond at a time, but blocking: not across an await.
    pub fn memory(&self) -> MutexGuard<'_, GuestMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine of the image that RAM is a view of.
    pub fn engine(&self) -> Option<Arc<Engine>> {
        self.memory().engine().cloned()
    }

    pub fn view_id(&self) -> Option<ViewId> {
        self.memory().view_id()
    }

    /// How much of RAM is this VM's own; zeros if it has gone.
    pub fn sample(&self) -> MemorySample {
        self.memory().sample().unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.process.kill();
        for process in &self.processes {
            self.state.process_ended(*process);
        }
    }
}
