//! Words that errors of all parts have in common.

use tokio::task::JoinHandle;
use vmfork_api::{ErrorBody, ErrorCode};

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

/// What became of a task of its own, which `message` names.
///
/// # Errors
/// Its own; or it panicked.
pub async fn outcome<T>(
    task: JoinHandle<Result<T, ErrorBody>>,
    message: impl Into<String>,
) -> Result<T, ErrorBody> {
    task.await.unwrap_or_else(|error| {
        Err(ErrorBody::new(ErrorCode::Internal, message).cause(error).remedy(BUG))
    })
}
