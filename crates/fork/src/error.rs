//! Why VMs are not frozen, or clones not started, and what the API says about it.
//!
//! Each error is a value. Its wire form is made by [`Error::to_body`] alone, where an operation
//! ends and what was to be done is known.

use std::io;
use std::time::Duration;

use vmfork_api::labels::LabelError;
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_engine::EngineError;
use vmfork_guest_link::agent::LinkError;
use vmfork_host::disks::{DiskError, LayerError};
use vmfork_host::error::{DOCTOR, Error as HostError, ImageError, Refusal, VmError, chain};
use vmfork_host::vm::NotRun;
use vmfork_host::vm::launch::LaunchError;
use vmfork_host::vm::machine::BindError;
use vmfork_memory::FreezeError;
use vmfork_qemu::QmpError;
use vmfork_qemu::probe::ProbeError;
use vmfork_qemu::shape::ShapeError;

/// Why a VM is not frozen, or VMs are not started from what a freeze yields. With its sources
/// ([`chain`]) it is the cause that a user reads.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Of the VMs of this host.
    #[error(transparent)]
    Host(HostError),
    /// There is no plan for clones on other hosts: as the part that makes it says it.
    #[error("{0}")]
    Remote(ErrorBody),
    /// No clone is left: one was not started and all were insisted on, or they were given up.
    /// The body is that of a clone's line in the reply.
    #[error("{0}")]
    Clone(ErrorBody),
    /// More VMs are asked for than there may be, or none.
    #[error("count {count} is not in 1 to {max}")]
    Count { count: u32, max: u32 },
    /// There is not a name for each VM.
    #[error("{names} names for {count} VMs")]
    Names { names: usize, count: u32 },
    /// Another VM has the name.
    #[error("there is a VM named `{name}` already")]
    NameTaken { name: String },
    /// The VM can't be frozen yet.
    #[error("its guest has not come up yet")]
    NotYet,
    /// A disk has stopped it.
    #[error("it is stalled: a disk can't answer its guest")]
    Stalled,
    /// The client has gone, or the family was killed.
    #[error("it was given up: its client has gone, or its family was killed")]
    GivenUp,
    /// The VM's turn to be frozen did not come before the deadline.
    #[error("other forks or snapshots of it went on all the time")]
    NoTurn,
    /// The VM was paused for as long as its guest's fork could wait.
    #[error("the VM is paused")]
    StillPaused { vm: String },
    /// A pause or its end has waited this long for a freeze.
    #[error("it was still being frozen after {} s", after.as_secs())]
    StillFrozen { after: Duration },
    /// A paused VM can't be frozen: its agent spoke when it was paused.
    #[error("the guest's agent did not fall silent before the VM was paused")]
    Unquiet { vm: String },
    /// A snapshot of disks alone has nothing to hold.
    #[error("it has no disks")]
    NoDisks,
    /// The volume's own setting.
    #[error("its disk `{disk}` is the volume `{volume}`, which no fork may have")]
    Unforkable { disk: String, volume: String },
    /// The guest's agent does not fall silent.
    #[error(transparent)]
    Agent(#[from] LinkError),
    /// QEMU does not stop or continue the VM.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Freeze(#[from] NotFrozen),
    /// This host is not what the frozen VM needs.
    #[error(transparent)]
    Unlike(#[from] Unlike),
    /// This host has no QEMU.
    #[error(transparent)]
    NoQemu(ProbeError),
    /// What the VM's drives hold can't be prepared.
    #[error(transparent)]
    Drives(io::Error),
    #[error(transparent)]
    Start(#[from] NotStarted),
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        Self::Host(error)
    }
}

/// Errors of the host's parts are errors of the host.
macro_rules! of_the_host {
    ($($part:ty),*) => {$(
        impl From<$part> for Error {
            fn from(error: $part) -> Self {
                Self::Host(error.into())
            }
        }
    )*};
}

of_the_host!(VmError, ImageError, LabelError, Refusal);

/// What broke a freeze.
#[derive(Debug, thiserror::Error)]
pub enum NotFrozen {
    /// There is no engine for the frozen memory.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// QEMU does not stop the VM.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Memory(#[from] FreezeError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("its disks")]
    Disks(#[source] io::Error),
    #[error("its disks")]
    Layer(#[from] LayerError),
    #[error("the guest's agent spoke before the VM stood still: its guest is very slow")]
    Unquiet,
    #[error("its guest does not write back what it has of its disks in memory")]
    WriteBack {
        vm: String,
        /// Why a disk keeps it from running.
        stalled: Option<String>,
        #[source]
        source: Box<NotRun>,
    },
    /// The guest's `sync` failed.
    #[error("`sync` ended with {exit_code} in its guest")]
    NotWrittenBack { vm: String, exit_code: i32 },
}

impl NotFrozen {
    /// Whether the VM has lost its memory, and can't go on.
    pub(crate) fn is_fatal(&self) -> bool {
        matches!(self, Self::Memory(error) if error.is_fatal())
    }
}

/// A device state that can't be saved, or read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("device state in memory")]
    Memory(#[from] io::Error),
    #[error("the device state that QEMU wrote is of no known form")]
    Form,
}

/// In what this host is not what a frozen VM needs.
#[derive(Debug, thiserror::Error)]
pub enum Unlike {
    #[error("it was taken on {what} `{taken}`, this host has `{here}`")]
    Differs { what: &'static str, taken: String, here: String },
    #[error("it was taken with KVM, which can't be used here: {reason}")]
    NoKvm { reason: String },
    /// The first digits of both hashes.
    #[error(
        "its guest runs from a root disk of hash {wanted}…, that of image `{image}` here is \
         {found}…"
    )]
    Root { image: String, wanted: String, found: String },
    #[error(
        "its guest runs from the root of image `{image}` as a file, and that is in this host's store"
    )]
    RootStored { image: String },
    /// This version of vmfork can't connect them.
    #[error("its VM has {}, and this version of vmfork can connect none", cards(*count))]
    Nics { count: u8 },
    #[error("{bytes} bytes of persistent memory are not what its root needs")]
    Pmem { bytes: u64 },
    /// No QEMU of this version has such a machine.
    #[error("its machine")]
    Shape(#[source] ShapeError),
}

fn cards(count: u8) -> String {
    match count {
        1 => "a network card".to_owned(),
        _ => format!("{count} network cards"),
    }
}

/// Why one clone was not started.
#[derive(Debug, thiserror::Error)]
pub enum NotStarted {
    #[error("not ready {} ms after the request", after.as_millis())]
    Late { after: Duration },
    /// No QEMU is started for it any more.
    #[error("it was given up")]
    GivenUp,
    /// No QEMU starts.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A QEMU that does not take the memory.
    #[error(transparent)]
    Memory(#[from] FreezeError),
    /// A QEMU that does not take the drives.
    #[error(transparent)]
    Drives(#[from] BindError),
    /// Its disks can't be made.
    #[error(transparent)]
    Disks(#[from] DiskError),
    /// The VM's folder can't be made.
    #[error(transparent)]
    Folder(io::Error),
    /// The device state can't be read, or the VM's console and agent can't be linked.
    #[error(transparent)]
    Channels(io::Error),
    /// QEMU does not load the device state, or does not let the VM run.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The guest's agent does not take its identity.
    #[error(transparent)]
    Identity(#[from] LinkError),
    /// The VM ended, because a page of its memory was lost.
    #[error("{reason}")]
    PageLost { reason: String },
}

impl Error {
    /// For the API. `message` says what was to be done: "fork `web`".
    pub fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        let (code, remedy) = match self {
            Self::Host(error) => return error.to_body(message),
            Self::Agent(error) => return error.to_body(message),
            Self::Remote(body) | Self::Clone(body) => return body.clone(),
            Self::Count { .. } | Self::Names { .. } => (ErrorCode::BadRequest, None),
            Self::NameTaken { name } => {
                (ErrorCode::Conflict, Some(format!("choose another name, or `vmfork rm {name}`")))
            }
            Self::NotYet => {
                (ErrorCode::Conflict, Some("wait until `vmfork ps` shows it running".to_owned()))
            }
            Self::Stalled => (
                ErrorCode::Conflict,
                Some("`vmfork ps` says why; it goes on by itself when the disk answers".to_owned()),
            ),
            Self::GivenUp => (ErrorCode::Conflict, None),
            Self::NoTurn | Self::StillFrozen { .. } => {
                (ErrorCode::Timeout, Some("try again when `vmfork ps` shows it running".to_owned()))
            }
            Self::StillPaused { vm } => {
                (ErrorCode::Timeout, Some(format!("`vmfork resume {vm}` lets it continue")))
            }
            Self::Unquiet { vm } => {
                (ErrorCode::Guest, Some(format!("`vmfork resume {vm}`, then pause it again")))
            }
            Self::Unforkable { volume, .. } => (
                ErrorCode::Conflict,
                Some(format!(
                    "start the VM without it; or, while no VM has it, `vmfork volume set {volume} --on-fork fork`"
                )),
            ),
            Self::Qmp(_) => (ErrorCode::Qemu, Some(DOCTOR.to_owned())),
            Self::NoDisks => (
                ErrorCode::Conflict,
                Some(
                    "leave out `--disk-only`; or run it with `--root disk` or `--disk`".to_owned(),
                ),
            ),
            Self::Freeze(error) => (error.code(), Some(error.remedy())),
            Self::Unlike(error) => (ErrorCode::Conflict, error.remedy()),
            Self::NoQemu(_) => {
                (ErrorCode::Host, Some("`apt-get install qemu-system-x86`".to_owned()))
            }
            Self::Drives(_) => (ErrorCode::Host, None),
            Self::Start(error) => (error.code(), Some(error.remedy().to_owned())),
        };
        ErrorBody { code, message: message.into(), cause: Some(chain(self)), remedy }
    }
}

impl NotFrozen {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Engine(_) | Self::Disks(_) | Self::Layer(_) => ErrorCode::Host,
            Self::Qmp(_) | Self::Memory(_) | Self::State(_) | Self::Unquiet => ErrorCode::Qemu,
            Self::WriteBack { .. } | Self::NotWrittenBack { .. } => ErrorCode::Guest,
        }
    }

    fn remedy(&self) -> String {
        match self {
            Self::WriteBack { stalled: Some(_), .. } => {
                "its disk can't answer: `vmfork ps` says why; try again when it runs".to_owned()
            }
            Self::WriteBack { vm, .. } | Self::NotWrittenBack { vm, .. } => format!(
                "`vmfork pause {vm}` first: then the disks are stored as a power cut would leave them"
            ),
            _ => DOCTOR.to_owned(),
        }
    }
}

impl Unlike {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::Differs { .. } => Some(
                "start it where it was taken, or try with --force: QEMU says if it can't"
                    .to_owned(),
            ),
            Self::NoKvm { .. } => Some(
                "start it where KVM is, or take one of a VM that runs with `--accel tcg`"
                    .to_owned(),
            ),
            Self::Root { image, .. } => Some(format!(
                "bring image `{image}` as it was when the snapshot was taken: `vmfork image import`"
            )),
            Self::RootStored { image } => Some(format!(
                "`vmfork image pull {image} LOCATION --wait` brings all of it, as a file"
            )),
            Self::Nics { .. } => Some(
                "install a newer version of vmfork; `vmfork version` shows this one's".to_owned(),
            ),
            Self::Shape(_) | Self::Pmem { .. } => None,
        }
    }
}

impl NotStarted {
    /// QEMU is gone, rather than unwilling.
    pub(crate) fn is_lost(&self) -> bool {
        match self {
            Self::Memory(error) => error.is_lost(),
            Self::Drives(error) => error.is_lost(),
            _ => false,
        }
    }

    fn code(&self) -> ErrorCode {
        match self {
            Self::Late { .. } | Self::GivenUp => ErrorCode::Timeout,
            Self::Launch(error) => error.code(),
            Self::Memory(_) | Self::Drives(_) | Self::Channels(_) | Self::Qmp(_) => ErrorCode::Qemu,
            Self::Folder(_) => ErrorCode::Host,
            Self::Disks(error) => error.code(),
            Self::Identity(_) => ErrorCode::Guest,
            Self::PageLost { .. } => ErrorCode::PageLost,
        }
    }

    fn remedy(&self) -> &str {
        match self {
            Self::Late { .. } => "give it a longer `--timeout`, or start fewer at once",
            Self::Launch(error) => error.remedy(),
            Self::GivenUp
            | Self::Memory(_)
            | Self::Drives(_)
            | Self::Channels(_)
            | Self::Qmp(_) => DOCTOR,
            Self::Disks(error) => error.remedy().unwrap_or(DOCTOR),
            Self::Folder(_) => "is the disk of the state folder full?",
            Self::Identity(_) => {
                "a VM that can't confirm its identity is never released; is the guest starved?"
            }
            Self::PageLost { .. } => {
                "of a stored snapshot, `vmfork snapshot verify` tells what else is damaged"
            }
        }
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
