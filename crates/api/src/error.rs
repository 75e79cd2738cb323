use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What every failed request answers with, and what a failed clone carries in a fork's reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    pub code: ErrorCode,
    /// What failed, naming the values: "fork `web`".
    pub message: String,
    /// Why, as a chain joined by ": ".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// What the reader can do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl ErrorBody {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), cause: None, remedy: None }
    }

    #[must_use]
    pub fn cause(mut self, cause: impl std::fmt::Display) -> Self {
        self.cause = Some(cause.to_string());
        self
    }

    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

/// `message: cause`, without the remedy.
impl std::fmt::Display for ErrorBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        self.cause.as_ref().map_or(Ok(()), |cause| write!(f, ": {cause}"))
    }
}

impl std::error::Error for ErrorBody {}

/// Stable words for programs to switch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is malformed or a value is out of range (400).
    BadRequest,
    /// The token is missing or wrong (401).
    Unauthorized,
    /// No VM, image or file of that name (404).
    NotFound,
    /// The name is taken, the VM is in the wrong state, the image is in use (409).
    Conflict,
    /// It does not fit into memory, or into a limit (507).
    NoCapacity,
    /// The guest's agent did not answer in time, or refused (502).
    Guest,
    /// QEMU or its shim failed, or is of a version that can't be used (502).
    Qemu,
    /// The host lacks something: userfaultfd, QEMU, disk space (503).
    Host,
    /// A page could be had from no source; the VM was stopped (500).
    PageLost,
    /// Something took longer than its bound (504).
    Timeout,
    /// A bug of vmfork (500).
    Internal,
}

impl ErrorCode {
    /// The HTTP status that goes with the code.
    pub fn http_status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Unauthorized => 401,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::PageLost | Self::Internal => 500,
            Self::Guest | Self::Qemu => 502,
            Self::Host => 503,
            Self::Timeout => 504,
            Self::NoCapacity => 507,
        }
    }
}
