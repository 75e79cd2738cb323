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
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("no other host offers an image `{name}`{}", of_silent(silent))]
    NoHost {
        name: String,
        /// Hosts that have not answered.
        silent: Vec<String>,
    },
    #[error("host `{host}` is this one")]
    Own { host: String },
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
    #[error("none of {asked} hosts gives it{}", of_damaged(damaged))]
    Failed {
        asked: usize,
        /// Hosts whose copy of it is damaged.
        damaged: Vec<String>,
        /// What the last one said that failed.
        #[source]
        last: Option<CallError>,
    },
    #[error("the task that was to bring it has failed")]
    Broken,
}

fn of_silent(hosts: &[String]) -> String {
    let hosts = listed(hosts);
    if hosts.is_empty() { hosts } else { format!("; no answer from {hosts}") }
}

fn of_damaged(hosts: &[String]) -> String {
    let hosts = listed(hosts);
    if hosts.is_empty() { hosts } else { format!(": it is damaged on {hosts}") }
}

fn listed(hosts: &[String]) -> String {
    let quoted: Vec<_> = hosts.iter().map(|host| format!("`{host}`")).collect();
    quoted.join(", ")
}

impl StoredError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Cluster(error) => error.code(),
            Self::Call(error) => error.code(),
            Self::NoHost { .. } | Self::NotThere { .. } | Self::NoFile => ErrorCode::NotFound,
            Self::Own { .. } => ErrorCode::BadRequest,
            Self::Several { .. } | Self::ReadOnly => ErrorCode::Conflict,
            Self::Blob(_) | Self::Missing(_) => ErrorCode::Host,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Cluster(error) => error.remedy(),
            Self::Blob(error) => error.remedy(),
            Self::Call(error) => error.remedy(),
            Self::Own { .. } => Some("name another host, or none: `cluster://`".to_owned()),
            Self::NoHost { name, .. } | Self::NotThere { name, .. } => {
                Some(format!("on a host that has it: `vmfork image seed {name}`"))
            }
            Self::Several { first, .. } => Some(format!("name one: `cluster://{first}`")),
            _ if self.is_damage() => {
                Some("let a host seed the image that has a sound copy of it".to_owned())
            }
            Self::Missing(_) => Some(
                "`vmfork cluster ls` tells which hosts are there; start a host that has the image"
                    .to_owned(),
            ),
            Self::NoFile | Self::ReadOnly => None,
        }
    }

    /// Whether all hosts that could be asked have it damaged, or not at all.
    pub(crate) fn is_damage(&self) -> bool {
        let Self::Missing(missing) = self else { return false };
        matches!(&**missing, Missing::Failed { damaged, last: None, .. } if !damaged.is_empty())
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
