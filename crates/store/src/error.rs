//! What can go wrong with a store, with what to do about it.

use std::io;

use vmfork_image::PageRange;
use vmfork_image::bytes::Flaw;

use crate::blobs::{BlobError, Blobs, Failure};
use crate::format::role::Role;
use crate::format::working_set::Cancelled;

/// A file of a store that is not as it was written, or not there where it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` in {place} is damaged: {flaw}")]
pub struct Damage {
    pub key: String,
    /// Which store.
    pub place: String,
    /// What is wrong, and at which byte.
    pub flaw: Flaw,
}

/// Anything a store does.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("`{name}` is no name of a snapshot")]
    BadName { name: String },
    #[error("no snapshot named `{name}` in {place}")]
    NotFound { name: String, place: String },
    #[error("a snapshot named `{name}` is in {place} already")]
    Exists { name: String, place: String },
    #[error("snapshot `{name}` is being written")]
    Busy { name: String },
    #[error("this can't be a snapshot: {why}")]
    BadDraft { why: String },
    #[error("{0}")]
    Damaged(Damage),
    /// Not damaged, as far as that can be told.
    #[error("`{key}` in {place} is of a newer version of vmfork: {what}")]
    Newer { key: String, place: String, what: String },
    #[error("snapshot `{name}` has no image of role `{role}`")]
    NoImage { name: String, role: Role },
    #[error("{place} holds something else than a store of snapshots: {why}")]
    Foreign { place: String, why: String },
    #[error("{} of snapshot `{name}`", dependants_text(dependants))]
    Dependants { name: String, dependants: Vec<String> },
    #[error("{} can't be read, and snapshot `{name}` may be needed", descriptors_text(unreadable))]
    UnknownDependants { name: String, unreadable: Vec<String> },
    #[error("snapshot `{name}` appeared, or was replaced, in the meantime")]
    Changed { name: String },
    #[error("the base of snapshot `{name}`, `{base}`, is {why}")]
    Base { name: String, base: String, why: String },
    #[error("snapshot `{name}` is a delta on more than {most} others")]
    DeepChain { name: String, most: usize },
    #[error("the chunks of snapshot `{name}` are not all here yet, but in {origin}")]
    Incomplete { name: String, origin: String },
    #[error("read pages {range} to store them")]
    ReadPages {
        range: PageRange,
        #[source]
        source: io::Error,
    },
    #[error("the stream is no export of snapshots: {flaw}")]
    Stream { flaw: Flaw },
    #[error("{action}")]
    Io {
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cancelled")]
    Cancelled,
    #[error(transparent)]
    Blob(#[from] BlobError),
}

fn quoted(names: &[String]) -> Vec<String> {
    names.iter().map(|name| format!("`{name}`")).collect()
}

fn dependants_text(names: &[String]) -> String {
    match quoted(names).as_slice() {
        [one] => format!("{one} is a delta"),
        all => format!("{} are deltas", all.join(", ")),
    }
}

fn descriptors_text(names: &[String]) -> String {
    match quoted(names).as_slice() {
        [one] => format!("the descriptor of {one}"),
        all => format!("the descriptors of {}", all.join(", ")),
    }
}

impl From<Cancelled> for StoreError {
    fn from(Cancelled: Cancelled) -> Self {
        Self::Cancelled
    }
}

impl StoreError {
    pub(crate) fn damaged(blobs: &dyn Blobs, key: &str) -> impl FnOnce(Flaw) -> Self + use<> {
        let (key, place) = (key.to_owned(), blobs.describe());
        move |flaw| Self::Damaged(Damage { key, place, flaw })
    }

    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }

    /// Whether one file is not as it should be, is of a version that is not known, or can't be
    /// read though the store can.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Damaged(_)
                | Self::Newer { .. }
                | Self::Blob(
                    BlobError::NotFound { .. }
                        | BlobError::TooLarge { .. }
                        // A bad sector, a folder in its place.
                        | BlobError::Failed { why: Failure::Other, .. }
                )
        )
    }

    /// As an answer to who reads pages: the kind tells what is gone from what is damaged.
    pub(crate) fn into_io(self) -> io::Error {
        let kind = match &self {
            Self::Damaged(_) => io::ErrorKind::InvalidData,
            Self::Blob(BlobError::NotFound { .. }) => io::ErrorKind::NotFound,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, self)
    }

    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::BadName { .. } => Some(format!(
                "use 1 to {} of a-z A-Z 0-9 . _ -, the first a letter or digit",
                crate::names::NAME_BYTES_MAX
            )),
            Self::NotFound { .. } => Some("`vmfork snapshot ls` lists the snapshots".into()),
            Self::Exists { name, .. } => Some(format!(
                "use another name, or remove it first with `vmfork snapshot rm {name}`"
            )),
            Self::Busy { .. } => Some("wait until it is ready, then try again".into()),
            Self::Damaged(_) => Some(
                "`vmfork snapshot verify` shows all that is damaged; restore the file, pull or import the snapshot again, or remove it"
                    .into(),
            ),
            Self::Newer { .. } => Some(
                "install the version of vmfork that wrote it, or a newer one; `vmfork version` shows this one's"
                    .into(),
            ),
            Self::NoImage { name, .. } => {
                Some(format!("`vmfork snapshot inspect {name}` lists its images; use one that has it"))
            }
            Self::Foreign { .. } => {
                Some("give a store of this version of vmfork, or an empty place for a new one".into())
            }
            Self::Dependants { name, dependants } => Some(match dependants.as_slice() {
                [one] => format!(
                    "make it whole with `vmfork snapshot flatten {one}`, or remove both with `vmfork snapshot rm --cascade {name}`"
                ),
                _ => format!(
                    "make each whole with `vmfork snapshot flatten`, or remove all with `vmfork snapshot rm --cascade {name}`"
                ),
            }),
            Self::UnknownDependants { name, unreadable } => Some(format!(
                "restore or remove {} first, or remove `{name}` all the same with `vmfork snapshot rm --cascade {name}`",
                quoted(unreadable).join(", ")
            )),
            Self::Changed { .. } => Some("try again".into()),
            Self::Base { base, .. } => Some(format!("restore, pull or import `{base}`")),
            Self::DeepChain { name, .. } => {
                Some(format!("make it whole with `vmfork snapshot flatten {name}`"))
            }
            Self::Incomplete { name, .. } => {
                Some(format!("wait until the pull of `{name}` has ended, or pull it again"))
            }
            Self::Stream { .. } => {
                Some("give what `vmfork snapshot export` wrote, whole".into())
            }
            Self::Blob(error) => error.remedy(),
            Self::BadDraft { .. } | Self::ReadPages { .. } | Self::Io { .. } | Self::Cancelled => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_was_told_to_stop_is_cancelled_work() {
        assert!(matches!(StoreError::from(Cancelled), StoreError::Cancelled));
    }
}
