//! How a command fails: error types the printer knows, hints, and the exit status.

use std::fmt;

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_guest_image::Remedy;

/// How a command ended, other than by an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    /// The command did its part, and what it reports is a failure (a clone's, a check's).
    Failed,
    /// The program's own exit status (`exec`).
    Program(u8),
}

/// The daemon answered with an error.
#[derive(Debug)]
pub(crate) struct ApiError(pub(crate) ErrorBody);

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for ApiError {}

/// The options contradict each other: exit status 2.
#[derive(Debug)]
pub(crate) struct Misuse(pub(crate) String);

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Misuse {}

/// The reader closed our standard output. Not a failure: exit status 0.
#[derive(Debug)]
pub(crate) struct StdoutClosed;

impl fmt::Display for StdoutClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for StdoutClosed {}

/// An error with its remedy.
#[derive(Debug)]
struct Hinted {
    hint: String,
    error: anyhow::Error,
}

impl fmt::Display for Hinted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)
    }
}

impl std::error::Error for Hinted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

pub(crate) trait HintExt<T> {
    /// Adds what the reader can do about it. Call it before any `.context(…)`.
    fn hint(self, hint: impl Into<String>) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> HintExt<T> for Result<T, E> {
    fn hint(self, hint: impl Into<String>) -> anyhow::Result<T> {
        self.map_err(|error| Hinted { hint: hint.into(), error: error.into() }.into())
    }
}

/// Turns a library's error into one of ours, its remedy into the hint.
pub(crate) fn with_remedy(error: impl Remedy + Send + Sync + 'static) -> anyhow::Error {
    match error.remedy() {
        Some(hint) => Hinted { hint, error: error.into() }.into(),
        None => error.into(),
    }
}

/// An error taken apart for printing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) message: String,
    pub(crate) causes: Vec<String>,
    pub(crate) hint: Option<String>,
    pub(crate) code: ErrorCode,
}

impl Report {
    pub(crate) fn of(error: &anyhow::Error) -> Self {
        let mut lines: Vec<String> = Vec::new();
        let mut hint = None;
        let mut code = None;
        for link in error.chain() {
            let line = link.to_string();
            // A wrapper that repeats its source's text says nothing new.
            if lines.last() != Some(&line) {
                lines.push(line);
            }
            if let Some(ApiError(body)) = link.downcast_ref() {
                lines.extend(body.cause.clone());
                hint = hint.or_else(|| body.remedy.clone());
                code = code.or(Some(body.code));
            } else if let Some(hinted) = link.downcast_ref::<Hinted>() {
                hint = hint.or_else(|| Some(hinted.hint.clone()));
                // `source()` skips the wrapped error itself.
                if let Some(ApiError(body)) = hinted.error.downcast_ref() {
                    lines.extend(body.cause.clone());
                    code = code.or(Some(body.code));
                }
            } else if link.is::<Misuse>() {
                code = code.or(Some(ErrorCode::BadRequest));
            }
        }
        let message = if lines.is_empty() { String::new() } else { lines.remove(0) };
        Self { message, causes: lines, hint, code: code.unwrap_or(ErrorCode::Host) }
    }

    /// The lines as a person reads them.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("error: {}\n", self.message);
        for cause in &self.causes {
            text.push_str(&format!("  caused by: {}\n", cause.replace('\n', "\n             ")));
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!("\nhint: {hint}\n"));
        }
        text
    }

    /// The same as the API's own error type, for `--json`.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody {
            code: self.code,
            message: self.message.clone(),
            cause: (!self.causes.is_empty()).then(|| self.causes.join(": ")),
            remedy: self.hint.clone(),
        }
    }
}

/// Whether the error means that the reader of our output has gone.
pub(crate) fn is_stdout_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|link| link.is::<StdoutClosed>())
}

/// Whether the error is the caller's misuse of the command line.
pub(crate) fn is_misuse(error: &anyhow::Error) -> bool {
    error.chain().any(|link| link.is::<Misuse>())
        || error
            .chain()
            .any(|link| link.downcast_ref::<Hinted>().is_some_and(|h| h.error.is::<Misuse>()))
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn an_api_error_reads_as_error_cause_and_hint() {
        let error = anyhow::Error::new(ApiError(ErrorBody {
            code: ErrorCode::NotFound,
            message: "fork `nope`".to_owned(),
            cause: Some("no VM named `nope` on this host".to_owned()),
            remedy: Some("`vmfork ps` lists the VMs that are here".to_owned()),
        }));
        assert_eq!(
            Report::of(&error).text(),
            "error: fork `nope`\n  caused by: no VM named `nope` on this host\n\n\
             hint: `vmfork ps` lists the VMs that are here\n"
        );
        assert_eq!(Report::of(&error).code, ErrorCode::NotFound);
    }

    #[test]
    fn a_hint_survives_contexts_and_its_error_is_printed_once() {
        let inner: anyhow::Result<()> = Err(anyhow!("no such file")).hint("look again");
        let error = inner.context("read the list").unwrap_err();
        assert_eq!(
            Report::of(&error).text(),
            "error: read the list\n  caused by: no such file\n\nhint: look again\n"
        );
    }

    #[test]
    fn misuse_is_found_below_a_hint() {
        let error = Err::<(), _>(Misuse("no".to_owned())).hint("yes").unwrap_err();
        assert!(is_misuse(&error));
        assert!(!is_misuse(&anyhow!("no")));
    }
}
