//! Starting a QEMU: command line, unprivileged process, sockets, greeting.
//!
//! ```text
//!   Launch::boot / Launch::wait ─► command_line ─► spawner thread ─► child (vfork, setuid, exec)
//!                                                                        │
//!          Qemu { process, qmp, serial, agent } ◄── greeting, capabilities
//! ```
//!
//! QEMU gets the fds that it needs, at fixed numbers ([`Slot`]), and the environment that the shim
//! needs; nothing else. As another user it can open no file of the daemon's. Files come as fds, but
//! QEMU opens them again by `/proc/self/fd/N`. So *their own* mode must let that user read them
//! (memfds do).

mod child;
pub mod command_line;
mod process;
mod spawner;

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, Stat};
use rustix::io::Errno;
use vmfork_tap_proto::{ENV_CONTROL, ENV_KVM, ENV_PMEM, ENV_RAM, ENV_ROLE, ENV_USERFAULTFD, Role};

use crate::drives::{DriveContent, Drives, NbdSocket};
use crate::probe::{Binary, kvm_cpu};
use crate::qmp::{Qmp, QmpError};
use crate::shape::{DriveSlot, GuestKind, Shape};
use child::Plan;
pub use command_line::{AGENT_DEVICE, AGENT_PORT, Begin, Slot, command_line};
pub use process::{ExitStatus, Process};

/// From `exec` to the greeting: 20 to 45 ms on an idle host.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// The user that a QEMU runs as. Needs no entry in `/etc/passwd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunAs {
    pub uid: u32,
    pub gid: u32,
}

/// What a booting VM begins with.
#[derive(Debug)]
pub enum Boot {
    Kernel {
        kernel: OwnedFd,
        initrd: Option<OwnedFd>,
        /// The kernel's command line.
        append: OsString,
    },
    /// The boot sector of the first drive.
    Disk,
}

/// What the shim inside QEMU needs.
#[derive(Debug)]
pub struct ShimFds {
    /// The shared library. Opened here and named by its fd: QEMU's user needn't reach its folder.
    pub library: PathBuf,
    /// The keeper's end of the control socket.
    pub control: OwnedFd,
    /// An open `/dev/userfaultfd`.
    pub userfaultfd: OwnedFd,
    /// An open `/dev/kvm`, with [`Accel::Kvm`](crate::Accel::Kvm).
    pub kvm: Option<OwnedFd>,
    /// The file that persistent memory is said to be, of the shape's size.
    pub pmem: Option<OwnedFd>,
}

/// A QEMU that could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("prepare to start QEMU: {what}")]
    Prepare {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the machine's shape has the drives {shape:?}, {given:?} were handed over")]
    WrongDrives { shape: Vec<DriveSlot>, given: Vec<DriveSlot> },
    #[error("the machine's shape has {shape} network cards, {given} taps were handed over")]
    WrongNics { shape: u8, given: usize },
    #[error("the machine's shape and its shim differ in whether there is persistent memory")]
    WrongPmem,
    #[error("QEMU runs as user {uid}, who may not {access} the {what}: its mode is {mode:o}")]
    Forbidden { access: &'static str, what: &'static str, uid: u32, mode: u32 },
    #[error("start {binary}")]
    Spawn {
        binary: PathBuf,
        #[source]
        source: io::Error,
    },
    /// `words`: the end of its stderr.
    #[error("QEMU could not start ({status}): {words}")]
    Ended { status: ExitStatus, words: String },
    #[error("QEMU started but does not answer")]
    Qmp(#[source] QmpError),
}

/// A QEMU about to be started.
#[derive(Debug)]
pub struct Launch {
    binary: Binary,
    shape: Shape,
    ram: OwnedFd,
    drives: Drives,
    nics: Vec<OwnedFd>,
    boot: Option<Boot>,
    shim: Option<ShimFds>,
    run_as: Option<RunAs>,
    environment: Vec<OsString>,
}

impl Launch {
    fn new(binary: Binary, shape: Shape, ram: OwnedFd, boot: Option<Boot>) -> Self {
        let (shim, run_as, environment) = (None, None, Vec::new());
        let (drives, nics) = (Drives::default(), Vec::new());
        Self { binary, shape, ram, drives, nics, boot, shim, run_as, environment }
    }

    /// A VM that boots. `ram` is a memfd of the shape's memory size: with the shim a placeholder
    /// that is never written, without it the guest's RAM, shared. With persistent memory, the VM
    /// stands still until [`Qmp::cont`].
    pub fn boot(binary: Binary, shape: Shape, ram: OwnedFd, boot: Boot) -> Self {
        Self::new(binary, shape, ram, Some(boot))
    }

    /// A QEMU that waits for [`Qmp::bind_files`] and [`Qmp::load_state`]. Its files are
    /// placeholders, and [`Launch::drives`] are its disks alone.
    pub fn wait(binary: Binary, shape: Shape, ram: OwnedFd) -> Self {
        Self::new(binary, shape, ram, None)
    }

    /// What the drives of the shape hold.
    #[must_use]
    pub fn drives(mut self, drives: Drives) -> Self {
        self.drives = drives;
        self
    }

    /// The tap of the shape's next network card: an fd that is attached to it. A QEMU that
    /// waits needs it, too. Outside QEMU it joins a network, and is set up or down.
    #[must_use]
    pub fn nic(mut self, tap: OwnedFd) -> Self {
        self.nics.push(tap);
        self
    }

    /// Preload the shim. Its role follows from [`Launch::boot`] or [`Launch::wait`].
    #[must_use]
    pub fn shim(mut self, shim: ShimFds) -> Self {
        self.shim = Some(shim);
        self
    }

    /// Run as this user, without groups; needs privilege. Else QEMU runs as the daemon does.
    #[must_use]
    pub fn run_as(mut self, user: RunAs) -> Self {
        self.run_as = Some(user);
        self
    }

    /// Add `KEY=value` to the environment, which is empty but for what the shim needs.
    #[must_use]
    pub fn environment(mut self, variable: OsString) -> Self {
        self.environment.push(variable);
        self
    }

    /// Start it, and wait until it answers, with the migration capabilities set. On a tokio
    /// runtime. Dropping the future ends the QEMU.
    ///
    /// # Errors
    /// [`StartError`]; if QEMU ended by itself, with what it said.
    pub async fn start(self) -> Result<Qemu, StartError> {
        let binary = self.binary.path.clone();
        let has_nics = self.shape.nics > 0;
        let (plan, ends) = self.plan()?;
        let child = spawner::start(plan)
            .await
            .map_err(|source| StartError::Spawn { binary: binary.clone(), source })?;
        let process = Process::adopt(child, ends.stderr)
            .map_err(|source| StartError::Prepare { what: "watch the process", source })?;
        let greeted = async {
            let qmp = Qmp::connect(ends.qmp, GREETING_TIMEOUT).await?;
            qmp.set_migration_capabilities().await?;
            if has_nics {
                qmp.announce_nothing().await?;
            }
            Ok(qmp)
        };
        match greeted.await {
            Ok(qmp) => Ok(Qemu { process, qmp, serial: ends.serial, agent: ends.agent }),
            Err(error @ QmpError::Lost { .. }) => Err(ended(&process, error).await),
            Err(error) => {
                process.kill();
                let _late = tokio::time::timeout(END_TIMEOUT, process.wait()).await;
                Err(StartError::Qmp(error))
            }
        }
    }

    fn plan(self) -> Result<(Plan, Ends), StartError> {
        let prepare = |what| move |source| StartError::Prepare { what, source };
        self.check_files()?;
        let pair = || UnixStream::pair().map_err(prepare("make a socket pair"));
        let (qmp, qemu_qmp) = pair()?;
        let (serial, qemu_serial) = pair()?;
        let mut fds: Vec<(Slot, OwnedFd)> = vec![
            (Slot::Qmp, qemu_qmp.into()),
            (Slot::Serial, qemu_serial.into()),
            (Slot::Ram, self.ram),
        ];
        let agent = match self.shape.guest {
            GuestKind::Linux => {
                let (agent, qemu_agent) = pair()?;
                fds.push((Slot::Agent, qemu_agent.into()));
                Some(OwnedFd::from(agent))
            }
            GuestKind::Bare => None,
        };
        let waits = self.boot.is_none();
        for (index, _, drive) in self.drives.by_slot(&self.shape.drives, waits) {
            let Some(drive) = drive else { continue };
            let fd =
                drive.fd().try_clone_to_owned().map_err(prepare("duplicate a drive's file"))?;
            fds.push((Slot::Drive(index), fd));
        }
        fds.extend((0..).zip(self.nics).map(|(index, tap)| (Slot::Nic(index), tap)));

        let role = if self.boot.is_some() { Role::Boot } else { Role::Wait };
        let (firmware, cpu) = (&self.binary.firmware, kvm_cpu());
        let line = |begin| command_line(&self.shape, begin, &self.drives, firmware, cpu);
        let arguments = match self.boot {
            Some(Boot::Kernel { kernel, initrd, append }) => {
                fds.push((Slot::Kernel, kernel));
                let begin = Begin::Kernel { append: &append, initrd: initrd.is_some() };
                fds.extend(initrd.map(|initrd| (Slot::Initrd, initrd)));
                line(begin)
            }
            Some(Boot::Disk) => line(Begin::Disk),
            None => line(Begin::Wait),
        };
        let mut environment = self.environment;
        if let Some(shim) = self.shim {
            let of_shim = shim_environment(shim, role, &mut fds)
                .map_err(prepare("open the shim's library"))?;
            environment.extend(of_shim);
        }

        let dev_null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| prepare("open /dev/null")(e.into()))?;
        let dev_null_2 = dev_null.try_clone().map_err(prepare("duplicate /dev/null"))?;
        let (stderr, qemu_stderr) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|e| prepare("make a pipe")(e.into()))?;
        let standard = [(0, dev_null), (1, dev_null_2), (2, qemu_stderr)];
        let fds = fds.into_iter().map(|(slot, fd)| (slot.number(), fd)).chain(standard).collect();

        let c_string = |text: OsString| {
            CString::new(text.into_vec())
                .map_err(|e| prepare("make the command line: it holds a zero byte")(e.into()))
        };
        let program = c_string(self.binary.path.into_os_string())?;
        let arguments: Result<Vec<CString>, StartError> = std::iter::once(Ok(program.clone()))
            .chain(arguments.into_iter().map(c_string))
            .collect();
        let plan = Plan {
            program,
            arguments: arguments?,
            environment: environment.into_iter().map(c_string).collect::<Result<_, _>>()?,
            fds,
            run_as: self.run_as,
        };
        Ok((plan, Ends { qmp: qmp.into(), serial: serial.into(), agent, stderr }))
    }

    fn check_files(&self) -> Result<(), StartError> {
        let given = self.drives.slots();
        // The files of one that waits are placeholders.
        let expected = match self.boot {
            Some(_) => self.shape.drives.clone(),
            None => self.shape.disks().map(DriveSlot::Disk).collect(),
        };
        if given != expected {
            return Err(StartError::WrongDrives { shape: expected, given });
        }
        if self.nics.len() != usize::from(self.shape.nics) {
            let (shape, given) = (self.shape.nics, self.nics.len());
            return Err(StartError::WrongNics { shape, given });
        }
        let pmem = self.shim.as_ref().and_then(|shim| shim.pmem.as_ref());
        if pmem.is_some() != self.shape.pmem_bytes.is_some() {
            return Err(StartError::WrongPmem);
        }
        let Some(user) = self.run_as else { return Ok(()) };
        let (kernel, initrd) = match &self.boot {
            Some(Boot::Kernel { kernel, initrd, .. }) => (Some(kernel), initrd.as_ref()),
            _ => (None, None),
        };
        for (what, file) in [("kernel", kernel), ("initrd", initrd)] {
            if let Some(file) = file {
                user.may(READ, what, rustix::fs::fstat(file))?;
            }
        }
        for drive in self.drives.iter() {
            match drive {
                DriveContent::ReadOnly(file) => user.may(READ, "disk", rustix::fs::fstat(file))?,
                DriveContent::Disk(disk) => user.may_connect(disk)?,
            }
        }
        Ok(())
    }
}

/// A right to a file: what others would need in its mode, and its name.
type Access = (u32, &'static str);
const READ: Access = (0o4, "read");
const WRITE: Access = (0o2, "write to");
const SEARCH: Access = (0o1, "search");

impl RunAs {
    fn may(
        self,
        (bit, access): Access,
        what: &'static str,
        stat: rustix::io::Result<Stat>,
    ) -> Result<(), StartError> {
        let stat =
            stat.map_err(|e| StartError::Prepare { what: "examine a file", source: e.into() })?;
        let Self { uid, gid } = self;
        let mask = match () {
            () if stat.st_uid == uid => bit << 6,
            () if stat.st_gid == gid => bit << 3,
            () => bit,
        };
        if uid != 0 && stat.st_mode & mask == 0 {
            return Err(StartError::Forbidden { access, what, uid, mode: stat.st_mode & 0o7777 });
        }
        Ok(())
    }

    fn may_connect(self, disk: &NbdSocket) -> Result<(), StartError> {
        self.may(SEARCH, "folder of a disk's socket", rustix::fs::fstat(disk.folder()))?;
        match rustix::fs::statat(disk.folder(), disk.socket(), AtFlags::empty()) {
            // A server that starts just now.
            Err(Errno::NOENT) => Ok(()),
            stat => self.may(WRITE, "socket of a disk", stat),
        }
    }
}

/// Our ends of what QEMU got.
#[derive(Debug)]
struct Ends {
    qmp: OwnedFd,
    serial: OwnedFd,
    agent: Option<OwnedFd>,
    stderr: OwnedFd,
}

/// A QEMU that answers. Dropping it ends it.
#[derive(Debug)]
pub struct Qemu {
    pub process: Process,
    pub qmp: Qmp,
    /// The guest's ttyS0: a connected stream socket, blocking. Read it, or the guest's output is
    /// lost.
    pub serial: OwnedFd,
    /// The agent's virtio-serial port: a connected stream socket, blocking. With a Linux guest.
    pub agent: Option<OwnedFd>,
}

impl Qemu {
    /// Alive, and its control socket too.
    pub fn is_alive(&self) -> bool {
        self.process.is_alive() && self.qmp.is_open()
    }

    /// If the error is that QEMU is gone, say how it ended and its last words, which tell why.
    /// (QEMU exits when a state doesn't load.)
    pub async fn explain(&self, error: QmpError) -> QmpError {
        self.process.explain(error).await
    }
}

impl Process {
    /// As [`Qemu::explain`], of an error of this process's QMP connection.
    pub async fn explain(&self, error: QmpError) -> QmpError {
        if !error.is_lost() {
            return error;
        }
        match tokio::time::timeout(END_TIMEOUT, self.wait()).await {
            Ok(status) => {
                let words = or_silence(self.last_words().await);
                QmpError::Lost { reason: format!("QEMU ended ({status}): {words}") }
            }
            Err(_) => error,
        }
    }
}

/// A socket closes before its process has ended: wait this long for the status.
const END_TIMEOUT: Duration = Duration::from_secs(1);

async fn ended(process: &Process, error: QmpError) -> StartError {
    match tokio::time::timeout(END_TIMEOUT, process.wait()).await {
        Ok(status) => StartError::Ended { status, words: or_silence(process.last_words().await) },
        Err(_) => StartError::Qmp(error),
    }
}

fn or_silence(words: String) -> String {
    if words.is_empty() { "it said nothing".to_owned() } else { words }
}

fn shim_environment(
    shim: ShimFds,
    role: Role,
    fds: &mut Vec<(Slot, OwnedFd)>,
) -> io::Result<Vec<OsString>> {
    let library = std::fs::File::open(&shim.library)
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", shim.library.display())))?;
    fds.push((Slot::TapLibrary, library.into()));
    fds.push((Slot::TapControl, shim.control));
    fds.push((Slot::TapUserfaultfd, shim.userfaultfd));
    let number = |name: &str, slot: Slot| format!("{name}={}", slot.number()).into();
    let mut environment = vec![
        format!("LD_PRELOAD={}", Slot::TapLibrary.path()).into(),
        number(ENV_CONTROL, Slot::TapControl),
        number(ENV_USERFAULTFD, Slot::TapUserfaultfd),
        number(ENV_RAM, Slot::Ram),
        format!("{ENV_ROLE}={}", role.as_str()).into(),
    ];
    if let Some(pmem) = shim.pmem {
        fds.push((Slot::Pmem, pmem));
        environment.push(number(ENV_PMEM, Slot::Pmem));
    }
    if let Some(kvm) = shim.kvm {
        fds.push((Slot::TapKvm, kvm));
        environment.push(number(ENV_KVM, Slot::TapKvm));
    }
    Ok(environment)
}

/// A memfd to tell QEMU that its RAM is: of the shape's size, empty.
///
/// # Errors
/// If the host has no fd left.
pub fn ram_file(shape: &Shape) -> io::Result<OwnedFd> {
    let ram = rustix::fs::memfd_create("vmfork-ram", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(ram.as_fd(), shape.memory_bytes)?;
    Ok(ram)
}
