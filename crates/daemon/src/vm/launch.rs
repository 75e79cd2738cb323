//! Starting a QEMU that can be forked: the process, the shim's keeper, and hold of its RAM.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};
use vmfork_memory::{ConnectError, GuestMemory, Tap, USERFAULTFD_DEVICE};
use vmfork_qemu::{Accel, Binary, Boot, Launch, Qemu, RunAs, Shape, ShimFds, StartError};

use super::machine::Machine;
use crate::config::QEMU_UIDS;
use crate::state::{ProcessKind, State};

/// A QEMU that could not be started, or whose RAM can't be taken hold of.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error("open {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("prepare the shim's socket")]
    Prepare(#[source] io::Error),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("QEMU {version} can't be forked")]
    Unforkable {
        version: String,
        #[source]
        source: ConnectError,
    },
    #[error("write the journal")]
    Journal(#[source] io::Error),
}

/// What every QEMU of this daemon has in common.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) binary: Binary,
    pub(crate) shim: PathBuf,
    pub(crate) uid_base: u32,
    pub(crate) state: Arc<State>,
    next_uid: AtomicU32,
}

impl Launcher {
    pub(crate) fn new(binary: Binary, shim: PathBuf, uid_base: u32, state: Arc<State>) -> Self {
        Self { binary, shim, uid_base, state, next_uid: AtomicU32::new(0) }
    }

    /// A VM that boots.
    ///
    /// # Errors
    /// [`LaunchError`]; nothing is left running.
    pub(crate) async fn boot(
        &self,
        shape: Shape,
        disk: Option<OwnedFd>,
        boot: Boot,
    ) -> Result<Machine, LaunchError> {
        self.start(shape, disk, Some(boot)).await
    }

    /// A QEMU that waits for a snapshot.
    ///
    /// # Errors
    /// [`LaunchError`]; nothing is left running.
    pub(crate) async fn wait(
        &self,
        shape: Shape,
        disk: Option<OwnedFd>,
    ) -> Result<Machine, LaunchError> {
        self.start(shape, disk, None).await
    }

    async fn start(
        &self,
        shape: Shape,
        disk: Option<OwnedFd>,
        boot: Option<Boot>,
    ) -> Result<Machine, LaunchError> {
        let (tap, ends) = Tap::new(shape.memory_bytes).map_err(LaunchError::Prepare)?;
        let kvm = (shape.accel == Accel::Kvm).then(|| open_device("/dev/kvm")).transpose()?;
        let shim = ShimFds {
            library: self.shim.clone(),
            control: ends.control,
            userfaultfd: open_device(USERFAULTFD_DEVICE)?,
            kvm,
        };
        let mut launch = match boot {
            Some(boot) => Launch::boot(self.binary.clone(), shape.clone(), ends.ram, boot),
            None => Launch::wait(self.binary.clone(), shape.clone(), ends.ram),
        };
        if let Some(disk) = disk {
            launch = launch.disk(disk);
        }
        let (key, value) = self.state.process_mark();
        let mut mark = OsString::from(key);
        mark.push("=");
        mark.push(value);
        let qemu = launch.shim(shim).run_as(self.next_user()).environment(mark).start().await?;
        self.take_hold(tap, qemu, shape)
    }

    fn take_hold(&self, tap: Tap, qemu: Qemu, shape: Shape) -> Result<Machine, LaunchError> {
        let pid = qemu.process.pid().unsigned_abs();
        let memory = tokio::task::block_in_place(|| {
            GuestMemory::connect(tap, pid, shape.memory_bytes).map_err(|source| {
                LaunchError::Unforkable { version: self.binary.version.to_string(), source }
            })
        })?;
        let started =
            |kind, pid| self.state.process_started(None, kind, pid).map_err(LaunchError::Journal);
        let processes = vec![
            started(ProcessKind::Qemu, pid)?,
            started(ProcessKind::Keeper, memory.keeper_pid())?,
        ];
        Ok(Machine::new(qemu, memory, shape, processes, Arc::clone(&self.state)))
    }

    /// A user of its own for each QEMU, so that none can signal or trace another.
    fn next_user(&self) -> RunAs {
        let id = self.uid_base + self.next_uid.fetch_add(1, Ordering::Relaxed) % QEMU_UIDS;
        RunAs { uid: id, gid: id }
    }
}

fn open_device(path: &str) -> Result<OwnedFd, LaunchError> {
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| LaunchError::Open { path: path.into(), source: errno.into() })
}
