//! Starting a QEMU that can be forked: the process, the shim's keeper, and hold of its RAM.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tokio::time::timeout;
use vmfork_api::ErrorCode;
use vmfork_memory::{ConnectError, GuestMemory, Tap, USERFAULTFD_DEVICE};
use vmfork_qemu::probe::{self, ProbeError};
use vmfork_qemu::{
    Accel, Boot, Drives, Launch, NbdSocketError, Qemu, Shape, ShimFds, StartError, Version,
};

use super::machine::{BindError, Machine};
use super::users::{User, Users};
use crate::config::QEMU_UIDS;
use crate::disks::{DiskContent, DiskError, HostDisks, MachineDisks};
use crate::error::{DOCTOR, Refusal};
use crate::state::{ProcessId, ProcessKind, State};

/// A QEMU that could not be started, or whose RAM can't be taken hold of.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
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
    #[error("all {QEMU_UIDS} user ids for QEMUs are in use")]
    NoUser,
    #[error("there is no memory for it now: start a QEMU for the pool: {0}")]
    NoRoom(Refusal),
    #[error("give it its disks")]
    Disks(#[from] DiskError),
    #[error("give it its disks' socket")]
    Socket(#[from] NbdSocketError),
    #[error("give it what it boots with")]
    Begin(#[from] BindError),
}

/// How long a QEMU that was killed may take to be gone.
const END_WAIT: Duration = Duration::from_secs(5);

impl LaunchError {
    /// Whether the host lacks something, rather than QEMU having failed.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NoQemu(_)
            | Self::Open { .. }
            | Self::Prepare(_)
            | Self::Journal(_)
            | Self::Socket(_)
            | Self::Begin(BindError::RootFile(_)) => ErrorCode::Host,
            Self::Disks(error) => error.code(),
            Self::NoUser | Self::NoRoom(_) => ErrorCode::NoCapacity,
            Self::Start(_) | Self::Unforkable { .. } | Self::Begin(_) => ErrorCode::Qemu,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> &str {
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
            Self::NoRoom(_) => "end VMs, or lower vmforkd's --pool",
            Self::Disks(error) => error.remedy().unwrap_or(DOCTOR),
            Self::Journal(_) => "make room on the disk of the state folder",
            Self::NoUser => "end VMs (`vmfork ps`, `vmfork kill`)",
            Self::Open { .. }
            | Self::Prepare(_)
            | Self::Start(_)
            | Self::Socket(_)
            | Self::Begin(_) => DOCTOR,
        }
    }
}

/// What a machine has as long as it is there, beside its QEMU.
#[derive(Debug)]
pub(super) struct Kept {
    /// No other QEMU gets it.
    pub(super) user: User,
    /// Written down in `state`.
    pub(super) processes: Vec<ProcessId>,
    pub(super) state: Arc<State>,
}

/// What every QEMU of this daemon has in common.
#[derive(Debug)]
pub struct Launcher {
    /// Looked at again for each VM: it may be installed or replaced while we run.
    pub qemu: PathBuf,
    pub shim: PathBuf,
    users: Arc<Users>,
    pub state: Arc<State>,
    disks: Arc<HostDisks>,
}

/// A VM that boots: what its drives hold, and how it begins.
#[derive(Debug)]
pub struct Booting<'a> {
    /// Of the read-only ones.
    pub drives: Drives,
    /// Of the writable ones, which come after them.
    pub disks: &'a [DiskContent],
    /// Its name, for the notes on the disks' files.
    pub vm: &'a str,
    pub boot: Boot,
}

impl Launcher {
    pub fn new(
        qemu: PathBuf,
        shim: PathBuf,
        uid_base: u32,
        state: Arc<State>,
        disks: Arc<HostDisks>,
    ) -> Self {
        Self { qemu, shim, users: Users::new(uid_base, QEMU_UIDS), state, disks }
    }

    /// A VM that boots.
    ///
    /// # Errors
    /// [`LaunchError`]; nothing is left running.
    pub async fn boot(&self, shape: Shape, booting: Booting<'_>) -> Result<Machine, LaunchError> {
        self.start(shape, Some(booting)).await
    }

    /// A QEMU that waits for a snapshot. [`Machine::bind`] gives its drives their content. It is
    /// connected to the server of its disks.
    ///
    /// # Errors
    /// [`LaunchError`]; nothing is left running.
    pub async fn wait(&self, shape: Shape) -> Result<Machine, LaunchError> {
        self.start(shape, None).await
    }

    async fn start(
        &self,
        mut shape: Shape,
        booting: Option<Booting<'_>>,
    ) -> Result<Machine, LaunchError> {
        let user = self.users.take().ok_or(LaunchError::NoUser)?;
        let binary = probe::find(Some(&self.qemu)).await?;
        let version = binary.version;
        let (tap, ends) =
            Tap::new(shape.memory_bytes, shape.pmem_bytes).map_err(LaunchError::Prepare)?;
        let kvm = (shape.accel == Accel::Kvm).then(|| open_device("/dev/kvm")).transpose()?;
        let shim = ShimFds {
            library: self.shim.clone(),
            control: ends.control,
            userfaultfd: open_device(USERFAULTFD_DEVICE)?,
            kvm,
            pmem: ends.pmem,
        };
        let (launch, holds, waiting) = match booting {
            Some(Booting { drives, disks, vm, boot }) => {
                let uid = user.run_as().uid;
                let disks = tokio::task::block_in_place(|| self.disks.attach(vm, uid, disks))?;
                // A volume may have grown since it was asked for.
                shape = shape.with_disks(disks.iter().flat_map(MachineDisks::slots));
                let sockets = disks.as_ref().map(MachineDisks::sockets).transpose();
                let sockets = sockets?.unwrap_or_default();
                let launch = Launch::boot(binary, shape.clone(), ends.ram, boot);
                (launch.drives(drives.with_disks(sockets)), Some((drives, disks)), None)
            }
            None => {
                let uid = user.run_as().uid;
                let waits = || self.disks.wait(uid, shape.disks());
                let (disks, sockets) = tokio::task::block_in_place(waits)?.unzip();
                let sockets = sockets.unwrap_or_default();
                let launch = Launch::wait(binary, shape.clone(), ends.ram);
                (launch.drives(Drives::default().with_disks(sockets)), None, disks)
            }
        };
        let (key, value) = self.state.process_mark();
        let mut mark = OsString::from(key);
        mark.push("=");
        mark.push(value);
        let launch = launch.shim(shim).run_as(user.run_as()).environment(mark);
        let qemu = launch.start().await?;
        let end = qemu.process.exit();
        let started = async {
            let machine = self.take_hold(tap, qemu, shape, version, user)?;
            if let Some((drives, disks)) = holds {
                machine.boots_with(drives, disks).await?;
            }
            if let Some(disks) = waiting {
                machine.waits_with(disks);
            }
            Ok(machine)
        };
        let started = started.await;
        if started.is_err() {
            // It was killed: after the notice nothing is left of it.
            let _late = timeout(END_WAIT, end).await;
        }
        started
    }

    fn take_hold(
        &self,
        tap: Tap,
        qemu: Qemu,
        shape: Shape,
        version: Version,
        user: User,
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
        let state = Arc::clone(&self.state);
        let kept = Kept { user, processes, state };
        Ok(Machine::new(qemu, memory, shape, version, kept))
    }
}

fn open_device(path: &str) -> Result<OwnedFd, LaunchError> {
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| LaunchError::Open { path: path.into(), source: errno.into() })
}
