//! Why an operation on a guest's agent failed, and what the REST layer says about it.

use std::time::Duration;

use rustix::io::Errno;
use vmfork_agent_proto::{FrameError, Kind, PROTOCOL_VERSION, RequestError};
use vmfork_api::{ErrorBody, ErrorCode};

/// Why a link ended. Its text is what a user reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    #[error("the guest's serial port was closed (its QEMU has ended)")]
    Eof,
    #[error("serial port: {0}")]
    Io(String),
    #[error("the guest broke the agent protocol: {0}")]
    Protocol(#[from] ProtocolError),
    #[error("it has ended, or closed its port")]
    AgentGone,
    #[error("the daemon let go of the guest")]
    Dropped,
}

/// What a guest sent that it must not. The link is closed: there is no way to know what else is
/// wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("message on channel {channel} can't be read: {cause}")]
    Message { channel: u32, cause: String },
    #[error("`{what}` is out of place on channel {channel}")]
    OutOfPlace { channel: u32, what: &'static str },
    #[error("{kind:?} bytes are out of place on channel {channel}")]
    StreamOutOfPlace { channel: u32, kind: Kind },
    #[error("{kind:?} bytes on channel {channel} beyond its window")]
    Overrun { channel: u32, kind: Kind },
    #[error("credit of {bytes} bytes on channel {channel} for what was never sent")]
    OverCredit { channel: u32, bytes: u32 },
    #[error("request on channel {channel}, which is in use")]
    ChannelInUse { channel: u32 },
    #[error("it has not read {bytes} bytes that wait for it")]
    NotReading { bytes: usize },
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("no connection to the guest's agent: {0}")]
    Closed(CloseReason),
    #[error("the guest's agent did not answer `{what}` within {} ms", after.as_millis())]
    Timeout { what: &'static str, after: Duration },
    #[error("{}", .0.message)]
    Guest(RequestError),
    #[error("the guest could not take its identity: {message}")]
    Refused { message: String },
    #[error("the guest's agent speaks protocol {agent}, this daemon {PROTOCOL_VERSION}")]
    Version { agent: u32 },
    #[error(
        "command line, environment or path of more than {} bytes",
        vmfork_agent_proto::PAYLOAD_BYTES_MAX
    )]
    TooLong,
    #[error("{limit} programs and transfers are open in this guest already")]
    TooManyChannels { limit: usize },
    #[error("another fork of this VM is under way, or it has no identity yet")]
    Busy,
    #[error("it was hung up")]
    HungUp,
    #[error("the sender of the file gave up: {}", .0.message)]
    Abandoned(ErrorBody),
}

impl LinkError {
    /// The error as the REST layer shows it; `what` names the operation: "run `ls` in `web`".
    pub fn to_body(&self, what: impl Into<String>) -> ErrorBody {
        let code = match self {
            Self::Guest(error) => errno_code(error.errno),
            Self::Timeout { .. } => ErrorCode::Timeout,
            Self::TooLong => ErrorCode::BadRequest,
            Self::TooManyChannels { .. } => ErrorCode::NoCapacity,
            Self::Busy => ErrorCode::Conflict,
            Self::Abandoned(body) => body.code,
            Self::Closed(_) | Self::HungUp | Self::Refused { .. } | Self::Version { .. } => {
                ErrorCode::Guest
            }
        };
        let remedy = match self {
            Self::Version { .. } => Some("build the image again with this version's `vmfork`"),
            Self::Closed(CloseReason::AgentGone | CloseReason::Protocol(_)) => Some(
                "the VM runs on without its agent: `vmfork logs` and `vmfork console` show what the guest does; `vmfork kill` the VM and run it anew",
            ),
            Self::Closed(_) => Some("`vmfork ps -a` says whether the VM still runs"),
            Self::Timeout { .. } => Some(
                "`vmfork logs` and `vmfork console` show what the guest does; if it is only slow, try again; if its agent has ended, `vmfork kill` the VM and run it anew",
            ),
            Self::Refused { .. } => Some("`vmfork logs` shows what the guest printed"),
            Self::Busy => Some("try again when the other fork is done"),
            Self::TooManyChannels { .. } => Some("try again when some of them have ended"),
            _ => None,
        };
        ErrorBody {
            code,
            message: what.into(),
            cause: Some(self.to_string()),
            remedy: remedy.map(str::to_owned),
        }
    }
}

/// The stable code for an errno of the guest.
fn errno_code(errno: i32) -> ErrorCode {
    match Errno::from_raw_os_error(errno) {
        Errno::NOENT => ErrorCode::NotFound,
        Errno::ISDIR
        | Errno::NOTDIR
        | Errno::INVAL
        | Errno::ACCESS
        | Errno::PERM
        | Errno::NAMETOOLONG
        | Errno::NOEXEC => ErrorCode::BadRequest,
        Errno::NOSPC | Errno::NOMEM | Errno::FBIG => ErrorCode::NoCapacity,
        _ => ErrorCode::Guest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_not_found_and_says_so() {
        let error =
            LinkError::Guest(RequestError { errno: 2, message: "no such file: /etc/x".to_owned() });
        let body = error.to_body("read `/etc/x` in `web`");
        assert_eq!(body.code, ErrorCode::NotFound);
        assert_eq!(body.cause.as_deref(), Some("no such file: /etc/x"));
    }

    #[test]
    fn a_broken_protocol_names_what_broke_it() {
        let error = LinkError::Closed(CloseReason::Protocol(ProtocolError::Overrun {
            channel: 4,
            kind: Kind::Stdout,
        }));
        assert_eq!(
            error.to_string(),
            "no connection to the guest's agent: the guest broke the agent protocol: \
             Stdout bytes on channel 4 beyond its window"
        );
    }
}
