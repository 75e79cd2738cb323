//! A guest image that can't be had from another host, or not be given to one.

use std::sync::Arc;

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_guest_image::{ArrivalError, Remedy as _, StoreError};
use vmfork_host::error::chain;

use super::call::CallError;
use super::cluster::ClusterError;

/// An image can't be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("`{file}`: the connection broke off")]
    Broken {
        file: String,
        #[source]
        source: axum::Error,
    },
    #[error("host `{host}` describes it in a way that can't be: {why}")]
    Description { host: String, why: String },
    #[error(transparent)]
    Arrival(#[from] ArrivalError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("not all of it has come in the time that there was")]
    Late,
    /// What all that waited for one transfer get.
    #[error(transparent)]
    Shared(Arc<FetchError>),
    /// This host has no image with such a root disk. `hash`: enough of it to tell it from others.
    #[error("no image here has the root disk of hash {hash}…")]
    NoImage { hash: String },
    #[error("the image has no such file")]
    NoFile,
}

impl FetchError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Cluster(error) => error.code(),
            Self::Call(error) => error.code(),
            Self::Shared(error) => error.code(),
            Self::Late => ErrorCode::Timeout,
            Self::NoImage { .. } | Self::NoFile => ErrorCode::NotFound,
            Self::Broken { .. } | Self::Description { .. } | Self::Arrival(_) | Self::Store(_) => {
                ErrorCode::Host
            }
        }
    }

    fn remedy(&self) -> Option<String> {
        let fixed = match self {
            Self::Cluster(error) => return error.remedy(),
            Self::Call(error) => return error.remedy(),
            Self::Shared(error) => return error.remedy(),
            Self::Arrival(error) => return error.remedy(),
            Self::Store(error) => return error.remedy(),
            Self::Broken { .. } => "try again when the hosts reach each other",
            Self::Description { .. } => "do both hosts run the same version of vmfork?",
            Self::Late => "allow more with `--timeout`, or bring the image there before",
            Self::NoImage { .. } => {
                "was it removed, or built again? Fork a VM of the image that is there now"
            }
            Self::NoFile => return None,
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
