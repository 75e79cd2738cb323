//! What fails of tickets over hosts, and of what users may have on all hosts.

use std::time::Duration;

use tokio::sync::AcquireError;
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_host::error::{BUG, Error as HostError, Refusal, chain};

use super::call::CallError;
use super::cluster::ClusterError;

/// A ticket gets no places on other hosts, its hosts don't hear each other, or a quota can't be
/// counted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TicketError {
    /// Of the VMs of this host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Places that are set aside here for one host.
    #[error("{limit} tickets of that host wait to be used")]
    TooMany { limit: usize },
    /// An engine holds less than was asked for.
    #[error("{}", short.join("; "))]
    Short { short: Vec<String> },
    /// This host reads no letter any more.
    #[error(transparent)]
    Closed(#[from] AcquireError),
    #[error("it has not come within {} s", after.as_secs())]
    Late { after: Duration },
    /// A letter breaks off, or is too long.
    #[error("{what}")]
    Broken { what: String },
    #[error(transparent)]
    Letter(#[from] LetterError),
    #[error("the ticket is not known here (any more)")]
    Unknown,
    #[error(transparent)]
    Unsettled(#[from] Unsettled),
    #[error("what user {user} has can't be told now")]
    Untold {
        user: String,
        #[source]
        source: Box<NotTold>,
    },
}

/// Bytes that are no letter.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LetterError {
    #[error("cut short")]
    Short,
    #[error("{left} bytes follow its end")]
    Long { left: usize },
    #[error("its head")]
    Json(#[from] serde_json::Error),
}

/// Why a host does not count now what a user has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unsettled {
    #[error("hosts have come or gone just now")]
    JustChanged,
    #[error("a host has not told yet what it has")]
    NotAllTold,
    #[error("another host counts that, as this one sees it")]
    OtherKeeper,
}

/// Why a user's keeper gives no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotTold {
    #[error("no host counts it")]
    NoKeeper,
    /// This host is the keeper.
    #[error("count what a user has")]
    Here(#[from] Unsettled),
    #[error("ask what a user has")]
    NoMember(#[from] ClusterError),
    #[error(transparent)]
    Call(#[from] CallError),
}

impl From<Refusal> for TicketError {
    fn from(why: Refusal) -> Self {
        Self::Host(why.into())
    }
}

impl TicketError {
    /// For the API; `message` says what was to be done.
    pub(crate) fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        let (code, remedy) = match self {
            Self::Host(error) => return error.to_body(message),
            Self::TooMany { .. } | Self::Short { .. } => (ErrorCode::NoCapacity, None),
            Self::Closed(_) => (ErrorCode::Internal, None),
            Self::Late { .. } => (ErrorCode::Timeout, None),
            Self::Broken { .. } => (ErrorCode::BadRequest, None),
            Self::Letter(_) => (ErrorCode::BadRequest, Some(BUG)),
            Self::Unknown => (ErrorCode::NotFound, None),
            Self::Unsettled(_) => (ErrorCode::Conflict, None),
            Self::Untold { .. } => (
                ErrorCode::Host,
                Some("try again in some seconds; `vmfork cluster ls` tells which hosts are there"),
            ),
        };
        let (cause, remedy) = (Some(chain(self)), remedy.map(str::to_owned));
        ErrorBody { code, message: message.into(), cause, remedy }
    }
}
