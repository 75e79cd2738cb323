//! What every error of this crate has: a [`Remedy`], and often a [`PathError`] as its cause.
//!
//! Left to others: the enums of errors, which are next to what raises them or in `error`.

use std::io;
use std::path::PathBuf;

/// What the user can do about an error.
pub trait Remedy: std::error::Error {
    /// One line in the imperative; `None` if there is nothing to advise.
    fn remedy(&self) -> Option<String>;
}

/// An operation on a file or a folder that failed.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}", path.display())]
pub struct PathError {
    action: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl PathError {
    /// What kind of error it is.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

impl Remedy for PathError {
    fn remedy(&self) -> Option<String> {
        let remedy = match self.source.kind() {
            io::ErrorKind::PermissionDenied => "run it as root, for example with `sudo`",
            io::ErrorKind::StorageFull => "free space on the file system",
            io::ErrorKind::ReadOnlyFilesystem => "use a writable state folder",
            io::ErrorKind::NotFound => "check the path",
            _ => return None,
        };
        Some(remedy.to_owned())
    }
}

/// Makes any of the enums from an [`io::Error`].
pub(crate) trait AtPath: From<PathError> {
    /// For `map_err`: `action` on `path` failed.
    fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| PathError { action, path, source }.into()
    }
}

impl<E: From<PathError>> AtPath for E {}
