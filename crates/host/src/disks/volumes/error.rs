//! What can't be done with a volume, and what the API says about it.

use std::io;

use vmfork_api::{ErrorBody, ErrorCode, VOLUMES_MAX};

use crate::error::{DOCTOR, chain};

/// A volume that can't be had, made or removed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("no volume named `{name}`")]
    Missing { name: String },
    #[error("there is a volume named `{name}` already")]
    NameTaken { name: String },
    #[error("this host has {VOLUMES_MAX} volumes, the most that it may have")]
    Many,
    #[error("VM `{vm}` has the volume `{volume}`")]
    InUse { volume: String, vm: String },
    #[error("the last writes of VM `{vm}` to the volume `{volume}` are not done")]
    GivenBack { volume: String, vm: String },
    #[error("the volume `{name}` has become one of another kind meanwhile")]
    Changed { name: String },
    #[error("the record of the volume `{name}` is being written")]
    Changes { name: String },
    #[error("the volume `{name}` can't be used: {reason}")]
    Broken { name: String, reason: String },
    #[error("write down the volume `{name}`")]
    Record { name: String, source: io::Error },
    #[error("fill the volume `{name}`")]
    Fill { name: String, source: io::Error },
}

impl VolumeError {
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Missing { .. } => ErrorCode::NotFound,
            Self::NameTaken { .. }
            | Self::InUse { .. }
            | Self::GivenBack { .. }
            | Self::Changes { .. }
            | Self::Changed { .. } => ErrorCode::Conflict,
            Self::Many => ErrorCode::NoCapacity,
            Self::Broken { .. } | Self::Record { .. } | Self::Fill { .. } => ErrorCode::Host,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "`vmfork volume ls` lists the volumes that are here",
            Self::NameTaken { .. } => "choose another name, or `vmfork volume rm` the other one",
            Self::Many => "`vmfork volume rm` those that are not needed",
            Self::InUse { .. } => "end that VM first, or `vmfork volume detach` it",
            Self::GivenBack { .. } => "try again in a moment; is the host's disk very slow?",
            Self::Changed { .. } | Self::Changes { .. } => "try again",
            Self::Broken { .. } => {
                "the daemon's log has more; after a restart of the daemon it may be usable again"
            }
            Self::Fill { source, .. } if source.kind() == io::ErrorKind::Interrupted => DOCTOR,
            Self::Record { .. } | Self::Fill { .. } => "is the disk of the state folder full?",
        }
    }

    /// For the API; `message` says what was to be done.
    pub fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        ErrorBody::new(self.code(), message).cause(chain(self)).remedy(self.remedy())
    }
}
