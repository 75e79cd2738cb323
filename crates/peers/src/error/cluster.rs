//! What fails of a membership: of this host's own, and of what it asks of others as a member.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_cluster::{
    FolderError, HeartbeatError, HostId, IssueError, JoinError, KeyError, MemberError, TokenError,
};
use vmfork_host::error::chain;

use super::call::CallError;

/// An operation on the cluster, or on its members, fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    #[error("this host is in no cluster")]
    InNone,
    #[error("this host is in a cluster already")]
    InOne,
    /// It was in one when the operation began.
    #[error("this host is in no cluster any more")]
    NoMore,
    #[error("this host is leaving the cluster")]
    Leaving,
    /// This host is not the member that it should be.
    #[error(transparent)]
    Hindered(Arc<Hindrance>),
    #[error("this host takes no more clones: it drains")]
    Drains,
    #[error("host {host} is no member of the cluster any more")]
    NoMember { host: HostId },
    /// A host that was named.
    #[error(transparent)]
    NoHost(#[from] MemberError),
    /// A host has been silent for so long that it isn't asked.
    #[error("it is gone")]
    Gone,
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("several hosts have one of that name: {}", hosts.join(", "))]
    SeveralHave { hosts: Vec<String> },
    /// No host that answers has a VM.
    #[error("no host that answers has it; these do not answer: {}", hosts.join(", "))]
    Silent { hosts: Vec<String> },
    /// VMs of a family that is ended.
    #[error("more of it is started on the hosts all the time")]
    KeepsStarting,
    /// This host can't make a cluster, or join one.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A newcomer that asked this host is refused.
    #[error(transparent)]
    NotAdmitted(JoinError),
    /// The text that a user joins with is no token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// A newcomer has no way to call the member that it joins by.
    #[error(transparent)]
    JoinKeys(KeyError),
    #[error("{ttl_s} s are not in 1 to {max_s}")]
    TokenLife { ttl_s: u64, max_s: u64 },
    #[error(transparent)]
    Issue(#[from] IssueError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The folder of a membership that can't begin.
    #[error("{}", chain(error))]
    Forget { folder: PathBuf, error: Box<FolderError> },
    #[error(transparent)]
    Begin(#[from] BeginError),
    #[error(transparent)]
    Heartbeat(#[from] HeartbeatError),
}

/// Why this host is not the member that it should be, by its folder.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Hindrance {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Begin(#[from] BeginError),
}

/// A membership can't begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BeginError {
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error("`{address}` is no address of this host")]
    Address { address: String },
    #[error("listen for other hosts on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("serve pages on {address}")]
    Pages {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

impl Hindrance {
    pub(crate) fn remedy(&self) -> String {
        let own = match self {
            Self::Folder(error) => error.remedy(),
            Self::Begin(_) => None,
        };
        own.unwrap_or_else(|| {
            "put that right: it is tried again every few seconds; or `vmfork cluster leave`"
                .to_owned()
        })
    }
}

impl ClusterError {
    pub(super) fn code(&self) -> ErrorCode {
        match self {
            Self::InNone | Self::InOne | Self::SeveralHave { .. } | Self::NotAdmitted(_) => {
                ErrorCode::Conflict
            }
            Self::NoMore | Self::NoMember { .. } | Self::NoHost(_) => ErrorCode::NotFound,
            Self::Join(_)
            | Self::Token(_)
            | Self::JoinKeys(_)
            | Self::TokenLife { .. }
            | Self::Heartbeat(_) => ErrorCode::BadRequest,
            Self::Leaving
            | Self::Hindered(_)
            | Self::Gone
            | Self::Silent { .. }
            | Self::Issue(_)
            | Self::Folder(_)
            | Self::Forget { .. }
            | Self::Begin(_) => ErrorCode::Host,
            Self::Drains => ErrorCode::NoCapacity,
            Self::KeepsStarting => ErrorCode::Timeout,
            Self::Call(error) => error.code(),
        }
    }

    pub(super) fn remedy(&self) -> Option<String> {
        let fixed = match self {
            Self::InNone => "`vmfork cluster init` makes one, `vmfork cluster join` joins one",
            Self::InOne => "`vmfork cluster leave` first",
            Self::Drains => "`vmfork cluster activate` takes it back into use",
            Self::SeveralHave { .. } => "name it by its id: `vmfork ps --json` tells",
            Self::Silent { .. } => {
                "`vmfork cluster ls` tells when they are back; `vmfork cluster leave HOST` takes one out that will not come back"
            }
            Self::KeepsStarting => "`vmfork tree` shows what is left of it: kill it again",
            Self::Token(_) => "`vmfork cluster token` on a member prints one, for one host",
            Self::Begin(_) => {
                "name an address of this host with two free ports, `--address IP:PORT`"
            }
            Self::NoHost(error) => return error.remedy().map(str::to_owned),
            Self::Join(error) | Self::NotAdmitted(error) => {
                return error.remedy().map(str::to_owned);
            }
            Self::Hindered(hindrance) => return Some(hindrance.remedy()),
            Self::Folder(error) => return error.remedy(),
            Self::Forget { folder, .. } => {
                return Some(format!("remove {} by hand", folder.display()));
            }
            Self::Call(error) => return error.remedy(),
            Self::NoMore
            | Self::Leaving
            | Self::NoMember { .. }
            | Self::Gone
            | Self::JoinKeys(_)
            | Self::TokenLife { .. }
            | Self::Issue(_)
            | Self::Heartbeat(_) => return None,
        };
        Some(fixed.to_owned())
    }

    /// For the API; `message` says what was to be done.
    pub(crate) fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        ErrorBody {
            code: self.code(),
            message: message.into(),
            cause: Some(chain(self)),
            remedy: self.remedy(),
        }
    }
}
