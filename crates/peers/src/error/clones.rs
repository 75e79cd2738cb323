//! What fails of a fork over hosts: its plan, what is sent, and what a host starts of it.

use std::fmt;

use tokio::task::JoinError;
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_cluster::allocate::{AllocateError, HostView};
use vmfork_engine::EngineError;
use vmfork_fork::Error as ForkError;
use vmfork_fork::state::StateError;
use vmfork_host::error::{BUG, DOCTOR, Error as HostError, Refusal, chain};
use vmfork_image::RangeError;
use vmfork_qemu::QmpError;

use super::call::CallError;
use super::cluster::ClusterError;
use super::sent::{ArrivalError, DescriptorError, LendError};

/// What to do about an order that a host can't read.
const SAME_VERSION: &str =
    "do both hosts run the same version of vmfork? `vmfork version` on each tells";
const OF_ITS_HOST: &str = "clones go on with the QEMU, the processor and the guest image of the VM's host: `--host` names \
     hosts that have them";

/// Clones do not start on other hosts, or those of another host not here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoteForkError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Call(#[from] CallError),
    /// Clones do not start, as on one host.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// The VMs of this host have no room, or one is in the wrong state.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No host gets the guest image, in the words of that operation.
    #[error(transparent)]
    Image(ErrorBody),
    #[error("it was given up")]
    GivenUp,
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Send(#[from] SendError),
    #[error(transparent)]
    Order(#[from] OrderError),
    /// This host is not what a VM needs. The parent's host words it for one that starts a stored
    /// snapshot, which may do something else about it than one that forks.
    #[error(transparent)]
    Unlike(ForkError),
    #[error(transparent)]
    Start(#[from] StartError),
}

impl From<Refusal> for RemoteForkError {
    fn from(why: Refusal) -> Self {
        Self::Host(why.into())
    }
}

/// No host is found for clones.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    /// The hosts that were asked for do not take all clones: why each takes no more.
    #[error("{placed} of {count} clones fit: {}", Each(views))]
    NoPlace { placed: u32, count: u32, views: Vec<HostView> },
    /// An engine holds less than was asked for.
    #[error("{placed} of {count} clones have nodes: {}", short.join("; "))]
    NotHeld { placed: u32, count: u32, short: Vec<String> },
    #[error("no nodes were given in time")]
    NodesLate,
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The task that asks the engine panicked.
    #[error(transparent)]
    Panicked(#[from] JoinError),
    /// What QEMU plays can't be told.
    #[error(transparent)]
    MachineType(#[from] QmpError),
}

/// What a frozen VM is can't be sent, or its answer not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error("what it had written is not known in time")]
    NotSealed,
    #[error(transparent)]
    Lend(#[from] LendError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Encode(DescriptorError),
    #[error(transparent)]
    Answer(serde_json::Error),
    #[error("it told of other clones")]
    OtherClones,
}

/// What another host sends can't be right.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OrderError {
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    #[error("`{name}` is no name of a VM")]
    Name { name: String },
    /// What a clone touched.
    #[error(transparent)]
    Touched(#[from] RangeError),
    #[error(transparent)]
    Image(#[from] ArrivalError),
}

/// This host can't start clones.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    State(#[from] StateError),
}

/// Each host, and why it takes no more clones.
struct Each<'a>(&'a [HostView]);

impl fmt::Display for Each<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, view) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str("; ")?;
            }
            let HostView { name, closed, free, once_bytes, .. } = view;
            match closed {
                Some(why) => write!(f, "`{name}`: {why}")?,
                None => {
                    let [left, once] = [free.memory_bytes, *once_bytes].map(|bytes| bytes >> 20);
                    write!(
                        f,
                        "`{name}` has {left} MiB left ({once} of them for memory that its clones share) and {} virtual CPUs",
                        free.vcpus
                    )?;
                }
            }
        }
        Ok(())
    }
}

impl PlanError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NoPlace { .. }
            | Self::NotHeld { .. }
            | Self::Allocate(AllocateError::NoRoom { .. }) => ErrorCode::NoCapacity,
            Self::NodesLate => ErrorCode::Timeout,
            Self::Allocate(_) => ErrorCode::Host,
            Self::Panicked(_) => ErrorCode::Internal,
            Self::MachineType(_) => ErrorCode::Qemu,
        }
    }

    fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::NoPlace { .. } => {
                Some("`vmfork cluster ls` shows which hosts take clones, and what they have left")
            }
            Self::NotHeld { .. } => Some("`sinfo` and `squeue` show what Slurm's nodes have"),
            Self::Allocate(error) => Some(error.remedy()),
            Self::Panicked(_) => Some(BUG),
            Self::NodesLate | Self::MachineType(_) => None,
        }
    }
}

impl SendError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Encode(_) => ErrorCode::Internal,
            _ => ErrorCode::Host,
        }
    }

    fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::NotSealed | Self::Lend(_) | Self::State(_) => Some("the daemon's log has more"),
            Self::Encode(_) | Self::Answer(_) | Self::OtherClones => None,
        }
    }
}

impl OrderError {
    fn remedy(&self) -> &'static str {
        match self {
            Self::Descriptor(_) | Self::Image(_) => SAME_VERSION,
            Self::Name { .. } | Self::Touched(_) => BUG,
        }
    }
}

impl RemoteForkError {
    /// For the API; `message` says what was to be done.
    pub(crate) fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        let (code, remedy) = match self {
            Self::Cluster(error) => (error.code(), error.remedy()),
            Self::Call(error) => (error.code(), error.remedy()),
            Self::Fork(error) => return error.to_body(message),
            Self::Host(error) => return error.to_body(message),
            Self::Image(body) => return body.clone(),
            Self::GivenUp => return ForkError::GivenUp.to_body(message),
            Self::Plan(error) => (error.code(), error.remedy().map(str::to_owned)),
            Self::Send(error) => (error.code(), error.remedy().map(str::to_owned)),
            Self::Order(error) => (ErrorCode::BadRequest, Some(error.remedy().to_owned())),
            Self::Unlike(error @ ForkError::Unlike(_)) => {
                return error.to_body(message).remedy(OF_ITS_HOST);
            }
            Self::Unlike(error) => return error.to_body(message),
            Self::Start(_) => (ErrorCode::Host, Some(DOCTOR.to_owned())),
        };
        ErrorBody { code, message: message.into(), cause: Some(chain(self)), remedy }
    }
}
