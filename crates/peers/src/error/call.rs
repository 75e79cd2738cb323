//! A host that can't be called, or that refuses what it is asked for.

use std::io;

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_host::error::chain;

/// A host can't be called.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("host `{host}` at {address} does not answer")]
    Connect {
        host: String,
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("host `{host}` is gone: nothing has been heard of it for a while")]
    Gone { host: String },
    #[error("host `{host}`: the connection broke off")]
    Broken {
        host: String,
        #[source]
        source: hyper::Error,
    },
    #[error("host `{host}` has not answered within {seconds} s")]
    Late { host: String, seconds: u64 },
    #[error("host `{host}` answered something else than was asked for: {what}")]
    Answer { host: String, what: String },
    /// What it said itself.
    #[error("host `{host}`")]
    Refused {
        host: String,
        #[source]
        source: ErrorBody,
    },
}

impl CallError {
    pub(super) fn code(&self) -> ErrorCode {
        match self {
            Self::Refused { source, .. } => source.code,
            Self::Late { .. } => ErrorCode::Timeout,
            Self::Connect { .. }
            | Self::Gone { .. }
            | Self::Broken { .. }
            | Self::Answer { .. } => ErrorCode::Host,
        }
    }

    /// Whether the host says that there is no such thing.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.code == ErrorCode::NotFound)
    }

    pub(super) fn remedy(&self) -> Option<String> {
        match self {
            Self::Refused { host, source } => of_host(host, source.clone()).remedy,
            _ => Some(
                "`vmfork cluster ls` tells which hosts are there; each daemon's log has more"
                    .to_owned(),
            ),
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

/// What a host says, for a reader on another one: what it says of itself names it.
pub(crate) fn of_host(host: &str, mut error: ErrorBody) -> ErrorBody {
    use ErrorCode::{Host, Internal, NoCapacity, Qemu};
    if matches!(error.code, Host | Internal | NoCapacity | Qemu) {
        let named = |text: String| format!("on host `{host}`: {text}");
        error.cause = error.cause.map(named);
        error.remedy = error.remedy.map(named);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_says_of_itself_names_it_to_readers_elsewhere() {
        let error = |code| ErrorBody::new(code, "m").cause("no KVM").remedy("`vmfork doctor`");
        let host = of_host("h1", error(ErrorCode::Host));
        assert_eq!(host.to_string(), "m: on host `h1`: no KVM");
        assert_eq!(host.remedy.as_deref(), Some("on host `h1`: `vmfork doctor`"));
        assert_eq!(of_host("h1", error(ErrorCode::Guest)), error(ErrorCode::Guest));
        let call = CallError::Refused { host: "h1".to_owned(), source: error(ErrorCode::Host) };
        let body = call.to_body("start clones");
        assert_eq!(body.to_string(), "start clones: host `h1`: m: no KVM");
        assert_eq!(body.remedy.as_deref(), Some("on host `h1`: `vmfork doctor`"));
    }
}
