//! What fails of the operations of one host that the daemon puts together itself.

use std::io;
use std::time::Duration;

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_guest_image::{Remedy as _, StoreError};
use vmfork_guest_link::agent::LinkError;
use vmfork_host::core::store_code;
use vmfork_host::disks::DiskError;
use vmfork_host::error::{DOCTOR, Error as HostError, VmError, chain};
use vmfork_host::vm::launch::LaunchError;
use vmfork_qemu::probe::NoKvm;
use vmfork_qemu::shape::ShapeError;

use super::root_device::NoPmem;

/// An operation on an image or a VM that is there.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlError {
    #[error(transparent)]
    Images(#[from] StoreError),
    #[error("VM `{vm}` runs from it")]
    ImageInUse { vm: String },
    #[error("it is running")]
    Running { vm: String },
    /// A VM's console can't be attached to yet.
    #[error("it is still being started")]
    Starting,
    /// A VM's page engine is asked for.
    #[error("it was never forked: it has none")]
    NeverForked { vm: String },
    /// A VM's log can't be read.
    #[error(transparent)]
    Log(#[from] io::Error),
}

/// A VM does not start from an image.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    /// It ended, or what is needed of it is not there.
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error("there is a VM named `{name}`{} already", on(host.as_deref()))]
    NameTaken { name: String, host: Option<String> },
    #[error(transparent)]
    NoKvm(#[from] NoKvm),
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Its folder can't be made.
    #[error(transparent)]
    Folder(io::Error),
    /// A drive can't be opened as the guest needs it.
    #[error(transparent)]
    Drives(io::Error),
    /// A disk that it is to have.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// No VM has these disks.
    #[error(transparent)]
    Disks(#[from] vmfork_api::DiskError),
    /// Its initrd would use a tmpfs.
    #[error("the guest image `{image}` can't write its root to a disk")]
    NoOverlay { image: String },
    /// Its initrd would mount an overlay.
    #[error("the guest image `{image}` can't have a root on a disk")]
    NoRootDisk { image: String },
    #[error("its root can't be persistent memory: {0}")]
    NoPmem(NoPmem),
    #[error("a root of {size_bytes} bytes is smaller than the image's, which has {image_bytes}")]
    SmallRoot { size_bytes: u64, image_bytes: u64 },
    /// The image of a disk does not open.
    #[error(transparent)]
    Host(#[from] HostError),
    /// This host is not what VMs of a stored snapshot need.
    #[error(transparent)]
    Fork(#[from] vmfork_fork::Error),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Nothing reads what the QEMU that runs it says.
    #[error(transparent)]
    Channels(io::Error),
    #[error("{}", chain(why))]
    NotReady { vm: String, why: NotReady },
}

/// No VM has that size. Each bound is what a VM may have.
#[derive(Debug, thiserror::Error)]
pub(super) enum SizeError {
    #[error("memory of {mib} MiB is not an even number from {min_mib} to {max_mib}")]
    Memory { mib: u64, min_mib: u64, max_mib: u64 },
    #[error("{cpus} vCPUs are not in 1 to {max}")]
    Cpus { cpus: u32, max: u32 },
}

/// A guest that boots does not get ready.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotReady {
    #[error("the guest's agent did not answer within {} s of the VM's start", after.as_secs_f64())]
    NoAnswer { after: Duration },
    #[error(
        "the image's first-boot command still ran {} s after the VM's start: allow more with \
         --timeout, or have it leave what goes on to the background",
        after.as_secs_f64()
    )]
    FirstbootRuns { after: Duration },
    #[error("the image's first-boot command ended with exit code {exit_code}{}", said(last_lines))]
    FirstbootFailed { exit_code: i32, last_lines: Vec<String> },
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("the VM ended: {reason}")]
    Ended { reason: String },
    /// The link broke because the VM ended, for a reason that tells more.
    #[error("{reason}")]
    LinkEnded { reason: String },
}

fn on(host: Option<&str>) -> String {
    host.map_or(String::new(), |host| format!(" on host `{host}`"))
}

fn said(last_lines: &[String]) -> String {
    match last_lines {
        [] => String::new(),
        lines => format!("; the console's last lines: {}", lines.join(" / ")),
    }
}

impl ControlError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Images(error) => store_code(error),
            Self::ImageInUse { .. }
            | Self::Running { .. }
            | Self::Starting
            | Self::NeverForked { .. } => ErrorCode::Conflict,
            Self::Log(_) => ErrorCode::Host,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Images(error) => error.remedy(),
            Self::ImageInUse { vm } => Some(format!("`vmfork kill --family {vm}` first")),
            Self::Running { vm } => Some(format!("`vmfork rm -f {vm}` ends it first")),
            Self::Starting => Some("try again in a moment".to_owned()),
            Self::NeverForked { vm } => Some(format!("`vmfork fork {vm}` first")),
            Self::Log(_) => None,
        }
    }

    /// For the API; `message` says what was to be done.
    pub(super) fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        ErrorBody {
            code: self.code(),
            message: message.into(),
            cause: Some(chain(self)),
            remedy: self.remedy(),
        }
    }
}

impl NotReady {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NoAnswer { .. } | Self::FirstbootRuns { .. } => ErrorCode::Timeout,
            Self::FirstbootFailed { .. }
            | Self::Link(_)
            | Self::Ended { .. }
            | Self::LinkEnded { .. } => ErrorCode::Guest,
        }
    }
}

impl RunError {
    /// For the API; `message` says what was to be done.
    pub(super) fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        let doctor = || Some(DOCTOR.to_owned());
        let (code, remedy) = match self {
            Self::Vm(error) => return error.clone().into(),
            Self::NameTaken { name, .. } => {
                let remedy = format!("choose another --name, or `vmfork rm -f {name}`");
                (ErrorCode::Conflict, Some(remedy))
            }
            Self::NoKvm(_) => {
                let remedy = "leave --accel out: vmfork works without KVM, slower";
                (ErrorCode::Host, Some(remedy.to_owned()))
            }
            Self::Size(_) | Self::Disks(_) => (ErrorCode::BadRequest, None),
            Self::SmallRoot { .. } => {
                (ErrorCode::BadRequest, Some("leave --root-size out, or give more".to_owned()))
            }
            Self::NoPmem(why) => (ErrorCode::BadRequest, Some(why.remedy().to_owned())),
            Self::NoRootDisk { .. } => {
                let remedy = "build the image again: `vmfork image build`; or leave --root out";
                (ErrorCode::BadRequest, Some(remedy.to_owned()))
            }
            Self::NoOverlay { .. } => {
                let remedy = "build the image again: `vmfork image build`; an imported one takes `--root disk`";
                (ErrorCode::BadRequest, Some(remedy.to_owned()))
            }
            Self::Disk(error) => (error.code(), error.remedy().map(ToOwned::to_owned)),
            Self::Host(error) => return error.to_body(message),
            Self::Fork(error) => return error.to_body(message),
            Self::Folder(_) => {
                (ErrorCode::Host, Some("is the disk of the state folder full?".to_owned()))
            }
            Self::Drives(_) | Self::Shape(_) | Self::Channels(_) => (ErrorCode::Qemu, doctor()),
            Self::Launch(error) => (error.code(), Some(error.remedy().to_owned())),
            Self::NotReady { vm, why } => {
                (why.code(), Some(format!("`vmfork logs {vm}` shows what the guest printed")))
            }
        };
        ErrorBody { code, message: message.into(), cause: Some(chain(self)), remedy }
    }
}

#[cfg(test)]
mod tests {
    use vmfork_api::ErrorCode::{BadRequest, Conflict, Guest, Host, NotFound, Qemu};

    use super::*;

    const DO: &str = "do it";

    #[track_caller]
    fn assert_body(body: &ErrorBody, code: ErrorCode, cause: &str, remedy: Option<&str>) {
        let expected = ErrorBody {
            code,
            message: DO.to_owned(),
            cause: Some(cause.to_owned()),
            remedy: remedy.map(str::to_owned),
        };
        assert_eq!(*body, expected);
    }

    fn denied() -> io::Error {
        io::ErrorKind::PermissionDenied.into()
    }

    fn web() -> String {
        "web".to_owned()
    }

    #[test]
    fn an_operation_on_what_is_there_says_what_to_do_first() {
        let shows = |error: ControlError, code, cause: &str, remedy| {
            assert_body(&error.to_body(DO), code, cause, remedy);
        };
        let build =
            "list the images with `vmfork image ls`, or build one with `vmfork image build`";
        let missing = StoreError::NotFound { name: web() };
        shows(missing.into(), NotFound, "no image named `web`", Some(build));
        let kill = Some("`vmfork kill --family web` first");
        shows(ControlError::ImageInUse { vm: web() }, Conflict, "VM `web` runs from it", kill);
        let force = Some("`vmfork rm -f web` ends it first");
        shows(ControlError::Running { vm: web() }, Conflict, "it is running", force);
        let soon = Some("try again in a moment");
        shows(ControlError::Starting, Conflict, "it is still being started", soon);
        let never = ControlError::NeverForked { vm: web() };
        let fork = Some("`vmfork fork web` first");
        shows(never, Conflict, "it was never forked: it has none", fork);
        shows(denied().into(), Host, "permission denied", None);
    }

    #[test]
    fn a_vm_that_can_not_be_made_says_what_the_host_or_the_request_lacks() {
        let shows = |error: RunError, code, cause: &str, remedy| {
            assert_body(&error.to_body(DO), code, cause, remedy);
        };
        let ended = VmError::Ended { name: web(), reason: "killed".to_owned() };
        assert_eq!(RunError::from(ended.clone()).to_body(DO), ErrorBody::from(ended));
        let other = Some("choose another --name, or `vmfork rm -f web`");
        let here = RunError::NameTaken { name: web(), host: None };
        shows(here, Conflict, "there is a VM named `web` already", other);
        let there = RunError::NameTaken { name: web(), host: Some("h1".to_owned()) };
        shows(there, Conflict, "there is a VM named `web` on host `h1` already", other);
        let no_kvm = NoKvm { reason: "no /dev/kvm".to_owned() };
        let slower = Some("leave --accel out: vmfork works without KVM, slower");
        shows(no_kvm.into(), Host, "KVM can't be used: no /dev/kvm", slower);
        let memory = SizeError::Memory { mib: 65, min_mib: 64, max_mib: 128 };
        let even = "memory of 65 MiB is not an even number from 64 to 128";
        shows(memory.into(), BadRequest, even, None);
        let cpus = SizeError::Cpus { cpus: 9, max: 8 };
        shows(cpus.into(), BadRequest, "9 vCPUs are not in 1 to 8", None);
        let full = Some("is the disk of the state folder full?");
        shows(RunError::Folder(denied()), Host, "permission denied", full);
        shows(RunError::Drives(denied()), Qemu, "permission denied", Some(DOCTOR));
        shows(RunError::Channels(denied()), Qemu, "permission denied", Some(DOCTOR));
        let boot = "a bare guest has no disk to boot from";
        shows(ShapeError::NoBootDisk.into(), Qemu, boot, Some(DOCTOR));
        let journal = "write the journal: permission denied";
        let room = Some("make room on the disk of the state folder");
        shows(LaunchError::Journal(denied()).into(), Host, journal, room);
        let start = LaunchError::Prepare(denied());
        shows(start.into(), Host, "prepare the shim's socket: permission denied", Some(DOCTOR));
    }

    #[test]
    fn a_guest_that_does_not_get_ready_points_to_its_log() {
        let shows = |why: NotReady, code, cause: &str| {
            let logs = Some("`vmfork logs web` shows what the guest printed");
            assert_body(&RunError::NotReady { vm: web(), why }.to_body(DO), code, cause, logs);
        };
        let after = Duration::from_millis(1500);
        let silent = "the guest's agent did not answer within 1.5 s of the VM's start";
        shows(NotReady::NoAnswer { after }, ErrorCode::Timeout, silent);
        let runs = "the image's first-boot command still ran 1.5 s after the VM's start: allow more with --timeout, or have it leave what goes on to the background";
        shows(NotReady::FirstbootRuns { after }, ErrorCode::Timeout, runs);
        let failed = |last_lines| NotReady::FirstbootFailed { exit_code: 6, last_lines };
        let code = "the image's first-boot command ended with exit code 6";
        shows(failed(Vec::new()), Guest, code);
        let lines = format!("{code}; the console's last lines: loading / no network");
        shows(failed(vec!["loading".to_owned(), "no network".to_owned()]), Guest, &lines);
        shows(LinkError::HungUp.into(), Guest, "it was hung up");
        let reason = || "QEMU was killed".to_owned();
        shows(NotReady::Ended { reason: reason() }, Guest, "the VM ended: QEMU was killed");
        shows(NotReady::LinkEnded { reason: reason() }, Guest, "QEMU was killed");
    }
}
