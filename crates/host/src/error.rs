//! What can go wrong with the VMs of this host, and what the API says about it.
//!
//! Each error is a value. Its wire form is made by [`Error::to_body`] alone, where an operation
//! ends and what was to be done is known.

mod refusal;
#[cfg(test)]
mod tests;
mod vm;

use std::fmt;

use tokio::task::{JoinError, JoinHandle};
use vmfork_api::labels::LabelError;
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_guest_image::{Remedy as _, StoreError};

pub use self::refusal::{Figure, Refusal};
pub(crate) use self::refusal::{MIB, mib};
pub use self::vm::VmError;

/// An error with all its causes, joined by `: `.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// What users can do about an error that should not be.
pub const BUG: &str = "this is a bug of vmfork: report it with the daemon's log";
/// What users can do where QEMU or the host fails for a reason that vmfork does not know.
pub const DOCTOR: &str = "`vmfork doctor` checks the host; the daemon's log has more";

/// Why an operation on the VMs of this host failed. With its sources ([`chain`]) it is the cause
/// that a user reads.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No VM has the name or id.
    #[error("no VM named `{name}` on this host")]
    NoVm { name: String },
    /// The VM can't do it now. The message names the VM's state, not the operation.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The VM ended before its life could be bound.
    #[error(transparent)]
    Over(VmError),
    /// A guest image does not open.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The labels of a request do not go with those that are inherited.
    #[error(transparent)]
    Labels(#[from] LabelError),
    /// The host, the family or the user has no room for it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// There is room for `granted` of `asked` clones.
    #[error("{why}")]
    Few { granted: u32, asked: u32, why: Refusal },
    /// A fork that was given up does not let go of its clones.
    #[error("a fork under way does not come to its end")]
    ForkStays,
    /// The host that counts what a user has refuses, or does not answer: as it says it.
    #[error("{0}")]
    Keeper(ErrorBody),
    /// The task that did it is gone: a bug.
    #[error(transparent)]
    Panicked(#[from] JoinError),
}

impl Error {
    fn code(&self) -> ErrorCode {
        match self {
            Self::NoVm { .. } => ErrorCode::NotFound,
            Self::Vm(_) | Self::Over(_) => ErrorCode::Conflict,
            Self::Image(ImageError { error, .. }) => store_code(error),
            Self::Labels(_) => ErrorCode::BadRequest,
            Self::Refused(_) | Self::Few { .. } => ErrorCode::NoCapacity,
            Self::ForkStays => ErrorCode::Timeout,
            Self::Keeper(body) => body.code,
            Self::Panicked(_) => ErrorCode::Internal,
        }
    }

    /// What failed: what the caller says, unless the error knows it better.
    fn message(&self, said: String) -> String {
        match self {
            Self::Vm(error) => error.message(),
            Self::Image(ImageError { name, .. }) => format!("open image `{name}`"),
            Self::Few { granted, asked, .. } => format!("{said}: {granted} of {asked} fit"),
            _ => said,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::NoVm { .. } => Some("`vmfork ps` lists the VMs that are here".to_owned()),
            Self::Vm(error) | Self::Over(error) => Some(error.remedy()),
            Self::Image(ImageError { error, .. }) => error.remedy(),
            Self::Labels(_) => {
                Some("give fewer labels; those of the same key are replaced".to_owned())
            }
            Self::Refused(why) | Self::Few { why, .. } => Some(why.remedy()),
            Self::ForkStays => {
                Some("`vmfork tree` shows what is left of it: kill it again".to_owned())
            }
            Self::Keeper(body) => body.remedy.clone(),
            Self::Panicked(_) => Some(BUG.to_owned()),
        }
    }

    /// For the API. `message` says what was to be done: "fork `web`".
    pub fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        if let Self::Keeper(body) = self {
            return body.clone();
        }
        ErrorBody {
            code: self.code(),
            message: self.message(message.into()),
            cause: Some(chain(self)),
            remedy: self.remedy(),
        }
    }
}

/// The message is the error's own.
impl From<VmError> for ErrorBody {
    fn from(error: VmError) -> Self {
        let message = error.message();
        Error::Vm(error).to_body(message)
    }
}

/// The message is the error's own.
impl From<ImageError> for ErrorBody {
    fn from(error: ImageError) -> Self {
        Error::Image(error).to_body("open an image")
    }
}

/// A guest image that does not open.
#[derive(Debug)]
pub struct ImageError {
    /// Of the image.
    pub name: String,
    pub error: StoreError,
}

/// What the image store says: the name is in the message.
impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ImageError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// The API's code for an error of the image store.
pub fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::NotFound { .. } => ErrorCode::NotFound,
        StoreError::BadName { .. } => ErrorCode::BadRequest,
        _ => ErrorCode::Host,
    }
}

/// What became of a task of its own, which `message` names.
///
/// # Errors
/// Its own; or it panicked.
pub async fn outcome<T>(
    task: JoinHandle<Result<T, ErrorBody>>,
    message: impl Into<String>,
) -> Result<T, ErrorBody> {
    task.await.unwrap_or_else(|error| Err(Error::Panicked(error).to_body(message)))
}
