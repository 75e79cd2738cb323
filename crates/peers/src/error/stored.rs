//! Stored images that can't be had from other hosts, or not be given to one.

use std::sync::Arc;

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_host::error::chain;
use vmfork_store::BlobError;

use super::call::CallError;
use super::cluster::ClusterError;

/// A stored image, or a part of one, can't be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoredError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// In the store of this host.
    #[error(transparent)]
    Blob(#[from] BlobError),
    #[error(transparent)]
    Missing(Arc<Missing>),
    #[error("no other host offers an image `{name}`")]
    NoHost { name: String },
    #[error("host `{host}` offers no image `{name}`")]
    NotThere { name: String, host: String },
    #[error("hosts `{first}` and `{second}` have different images of the name `{name}`")]
    Several { name: String, first: String, second: String },
    #[error("this host has no such file")]
    NoFile,
    #[error("hosts only read from each other's stores")]
    ReadOnly,
}

/// Why a file of an image has not come from other hosts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Missing {
    #[error("no other host has the image")]
    NoHolder,
    #[error("none of {asked} hosts gives it")]
    Failed {
        asked: usize,
        /// What the last one said that failed.
        #[source]
        last: Option<CallError>,
    },
}

impl StoredError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Cluster(error) => error.code(),
            Self::NoHost { .. } | Self::NotThere { .. } | Self::NoFile => ErrorCode::NotFound,
            Self::Several { .. } | Self::ReadOnly => ErrorCode::Conflict,
            Self::Blob(_) | Self::Missing(_) => ErrorCode::Host,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Cluster(error) => error.remedy(),
            Self::Blob(error) => error.remedy(),
            Self::NoHost { name } | Self::NotThere { name, .. } => {
                Some(format!("on a host that has it: `vmfork image seed {name}`"))
            }
            Self::Several { first, .. } => Some(format!("name one: `cluster://{first}`")),
            Self::Missing(_) => Some(
                "`vmfork cluster ls` tells which hosts are there; start a host that has the image"
                    .to_owned(),
            ),
            Self::NoFile | Self::ReadOnly => None,
        }
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
