//! Starting a QEMU that can be forked: the process, the shim's keeper, and hold of its RAM.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};
use vmfork_api::ErrorCode;
use vmfork_memory::{ConnectError, GuestMemory, Tap, USERFAULTFD_DEVICE};
use vmfork_qemu::probe::{self, ProbeError};
use vmfork_qemu::{Accel, Boot, Launch, Qemu, RunAs, Shape, ShimFds, StartError, Version};

use super::machine::Machine;
use crate::config::QEMU_UIDS;
use crate::state::{ProcessKind, State};

/// A QEMU that could not be started, or whose RAM can't be taken hold of.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error("there is no QEMU to run it in")]
    NoQemu(#[from] ProbeError),
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
    #[error("QEMU {version} ({path}) can't be forked")]
    Unforkable {
        path: PathBuf,
        version: Version,
        #[source]
        source: ConnectError,
    },
    #[error("write the journal")]
    Journal(#[source] io::Error),
}

impl LaunchError {
    /// Whether the host lacks something, rather than QEMU having failed.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NoQemu(_) | Self::Open { .. } | Self::Prepare(_) | Self::Journal(_) => {
                ErrorCode::Host
            }
            Self::Start(_) | Self::Unforkable { .. } => ErrorCode::Qemu,
        }
    }

    /// What to do about it.
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            Self::NoQemu(_) => {
                "`apt-get install qemu-system-x86`, or name a QEMU of 7.2 or later with `vmforkd --qemu`"
            }
            Self::Open { path, .. } if path.as_os_str() == USERFAULTFD_DEVICE => {
                "vmforkd must run as root on a kernel with CONFIG_USERFAULTFD, and a container must be given the device /dev/userfaultfd"
            }
            Self::Unforkable { .. } => {
                "name another QEMU with `vmforkd --qemu`: those of Debian 12 and of its backports work"
            }
            Self::Journal(_) => "make room on the disk of the state folder",
            Self::Open { .. } | Self::Prepare(_) | Self::Start(_) => {
                "`vmfork doctor` checks the host; the daemon's log has more"
            }
        }
    }
}

/// What every QEMU of this daemon has in common.
#[derive(Debug)]
pub(crate) struct Launcher {
    /// Looked at anew for each VM: it may be installed or replaced while we run.
    pub(crate) qemu: PathBuf,
    pub(crate) shim: PathBuf,
    pub(crate) uid_base: u32,
    pub(crate) state: Arc<State>,
    next_uid: AtomicU32,
}

impl Launcher {
    pub(crate) fn new(qemu: PathBuf, shim: PathBuf, uid_base: u32, state: Arc<State>) -> Self {
        Self { qemu, shim, uid_base, state, next_uid: AtomicU32::new(0) }
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
        let binary = probe::find(Some(&self.qemu)).await?;
        let version = binary.version;
        let (tap, ends) = Tap::new(shape.memory_bytes).map_err(LaunchError::Prepare)?;
        let kvm = (shape.accel == Accel::Kvm).then(|| open_device("/dev/kvm")).transpose()?;
        let shim = ShimFds {
            library: self.shim.clone(),
            control: ends.control,
            userfaultfd: open_device(USERFAULTFD_DEVICE)?,
            kvm,
        };
        let mut launch = match boot {
            Some(boot) => Launch::boot(binary, shape.clone(), ends.ram, boot),
            None => Launch::wait(binary, shape.clone(), ends.ram),
        };
        if let Some(disk) = disk {
            launch = launch.disk(disk);
        }
        let (key, value) = self.state.process_mark();
        let mut mark = OsString::from(key);
        mark.push("=");
        mark.push(value);
        let qemu = launch.shim(shim).run_as(self.next_user()).environment(mark).start().await?;
        self.take_hold(tap, qemu, shape, version)
    }

    fn take_hold(
        &self,
        tap: Tap,
        qemu: Qemu,
        shape: Shape,
        version: Version,
    ) -> Result<Machine, LaunchError> {
        let pid = qemu.process.pid().unsigned_abs();
        let memory = tokio::task::block_in_place(|| {
            GuestMemory::connect(tap, pid, shape.memory_bytes).map_err(|source| {
                LaunchError::Unforkable { path: self.qemu.clone(), version, source }
            })
        })?;
        let started =
            |kind, pid| self.state.process_started(None, kind, pid).map_err(LaunchError::Journal);
        let processes = vec![
            started(ProcessKind::Qemu, pid)?,
            started(ProcessKind::Keeper, memory.keeper_pid())?,
        ];
        Ok(Machine::new(qemu, memory, shape, version, processes, Arc::clone(&self.state)))
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
