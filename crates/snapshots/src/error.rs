//! What can go wrong with stored snapshots.

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_engine::{EngineError, OpenError, PageLost};
use vmfork_qemu::QmpError;
use vmfork_store::{Role, StoreError};

use vmfork_fork::state::StateError;
use vmfork_host::error::chain;

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("what the daemon wrote down of `{name}` can't be read")]
    Facts {
        name: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("`{name}` says {said} bytes of memory, its page table has {pages} pages")]
    Size { name: String, said: u64, pages: u64 },
    #[error("`{name}` has an image of role `{role}`, which no VM of this version can be given")]
    OtherImage { name: String, role: Role },
    #[error("its image has no page table")]
    NoTable,
    #[error("it is a chain of no snapshots")]
    Empty,
    #[error("open its memory")]
    Image(#[from] OpenError),
    #[error("serve its memory")]
    Engine(#[from] EngineError),
    #[error("its device state")]
    State(#[from] StateError),
    #[error("ask QEMU")]
    Qmp(#[from] QmpError),
    #[error("what its VM had written was not known within {seconds} s")]
    NotSealed { seconds: u64 },
    #[error(transparent)]
    Page(#[from] PageLost),
    #[error("send it")]
    Stream {
        #[source]
        source: std::io::Error,
    },
    #[error("`{location}` is no place of a store: {why}")]
    Location { location: String, why: String },
    #[error("there is no folder `{location}` on the daemon's host")]
    NoFolder { location: String },
    #[error("its profile")]
    Profile(#[source] vmfork_policy::ProfileError),
    #[error(transparent)]
    S3(#[from] vmfork_store_s3::OpenError),
    #[error("its VM has ended")]
    Ended,
}

impl SnapshotError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Store(error) => store_code(error),
            Self::Facts { .. }
            | Self::Size { .. }
            | Self::OtherImage { .. }
            | Self::Empty
            | Self::Ended => ErrorCode::Conflict,
            Self::Location { .. } => ErrorCode::BadRequest,
            Self::NoFolder { .. } => ErrorCode::NotFound,
            Self::S3(vmfork_store_s3::OpenError::Location(_)) => ErrorCode::BadRequest,
            Self::S3(_) => ErrorCode::Host,
            Self::Qmp(_) => ErrorCode::Qemu,
            Self::Page(_) => ErrorCode::PageLost,
            Self::Image(_)
            | Self::Engine(_)
            | Self::State(_)
            | Self::Stream { .. }
            | Self::Profile(_)
            | Self::NotSealed { .. }
            | Self::NoTable => ErrorCode::Host,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Store(error) => error.remedy(),
            Self::Facts { name, .. } | Self::Size { name, .. } => Some(format!(
                "it was made by another version of vmfork, or tampered with: `vmfork snapshot verify {name}`"
            )),
            Self::OtherImage { .. } => Some(
                "start it with a version of vmfork that knows its disks, or start another snapshot"
                    .to_owned(),
            ),
            Self::S3(error) => error.remedy(),
            Self::Location { .. } | Self::NoFolder { .. } => {
                Some("name a folder of the daemon's host, or s3://BUCKET/PREFIX".to_owned())
            }
            _ => Some("`vmfork doctor` checks the host; the daemon's log has more".to_owned()),
        }
    }

    /// Whether it was given up, and nothing is wrong.
    pub(super) fn is_cancelled(&self) -> bool {
        matches!(self, Self::Store(StoreError::Cancelled))
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

/// The API's code for an error of the store.
fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::NotFound { .. } => ErrorCode::NotFound,
        StoreError::BadName { .. } | StoreError::BadDraft { .. } => ErrorCode::BadRequest,
        StoreError::Exists { .. }
        | StoreError::Busy { .. }
        | StoreError::Dependants { .. }
        | StoreError::UnknownDependants { .. }
        | StoreError::Base { .. }
        | StoreError::DeepChain { .. }
        | StoreError::Incomplete { .. }
        | StoreError::NoImage { .. }
        | StoreError::Newer { .. }
        | StoreError::Cancelled => ErrorCode::Conflict,
        StoreError::Stream { .. } => ErrorCode::BadRequest,
        _ => ErrorCode::Host,
    }
}
