//! What a store is kept in: byte strings by key, in a folder or an object store.

mod folder;

use std::fmt::Debug;
use std::io::{self, Read};

pub use folder::Folder;
use rustix::io::Errno;

/// A place for byte strings by key. Calls block, and each has a bound in time. Every error names
/// key and place.
///
/// Keys are parts of `a-z A-Z 0-9 . _ -` between slashes, each part beginning with a letter or
/// digit.
pub trait Blobs: Debug + Send + Sync {
    /// Where it is, for messages: a folder's path, an object store's location.
    fn describe(&self) -> String;

    /// # Errors
    /// [`BlobError::NotFound`] is told apart. More than [`crate::bytes_max`] of the key are not
    /// read.
    fn get(&self, key: &str) -> Result<Vec<u8>, BlobError>;

    /// The same, piece by piece.
    ///
    /// # Errors
    /// As `get`.
    fn reader(&self, key: &str) -> Result<Box<dyn Read + Send>, BlobError>;

    /// Put it there whole, or not at all. Replaces what was there.
    ///
    /// # Errors
    /// It isn't there; what was there before still is.
    fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError>;

    /// The same, and what is there outlasts a power cut once this returns: whole, or what was there
    /// before.
    ///
    /// # Errors
    /// As `put`; it may be there all the same.
    fn put_for_good(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError>;

    /// Put it there if nothing is, for good once this returns. `false`: there is something else
    /// already, which stays as it is. If what is there is just this, it may be what an attempt put
    /// whose answer was lost: `true`.
    ///
    /// # Errors
    /// It may or may not be there.
    fn put_new(&self, key: &str, bytes: &[u8]) -> Result<bool, BlobError>;

    /// Bytes, or `None` if there is no such key.
    ///
    /// # Errors
    /// It can't be told.
    fn size(&self, key: &str) -> Result<Option<u64>, BlobError>;

    /// All keys that begin with `prefix`, which is empty or ends in a slash. In no order.
    ///
    /// # Errors
    /// They can't all be listed.
    fn list(&self, prefix: &str) -> Result<Vec<String>, BlobError>;

    /// A key that isn't there is fine.
    ///
    /// # Errors
    /// It may still be there.
    fn delete(&self, key: &str) -> Result<(), BlobError>;

    /// Once this returns, all that was put and deleted before outlasts a power cut.
    ///
    /// # Errors
    /// It may not.
    fn sync(&self) -> Result<(), BlobError>;

    /// How many calls at a time are worth it though they wait rather than compute: a network's, not
    /// a disk's.
    fn in_flight(&self) -> usize {
        1
    }

    /// Whether `get` verifies chunks: one that it gives has the content that its name says.
    fn verifies_chunks(&self) -> bool {
        false
    }

    /// Remove what interrupted puts left. Returns the bytes.
    ///
    /// # Errors
    /// Some of it stays.
    fn sweep(&self) -> Result<u64, BlobError> {
        Ok(0)
    }
}

/// A call to [`Blobs`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    #[error("no `{key}` in {place}")]
    NotFound { key: String, place: String },
    #[error(
        "`{key}` in {place} has {bytes} bytes, where {} are the most",
        crate::bounds::bytes_max(key)
    )]
    TooLarge { key: String, place: String, bytes: u64 },
    #[error("`{key}` is no key")]
    BadKey { key: String },
    #[error("{action} `{key}` in {place}")]
    Failed {
        action: &'static str,
        key: String,
        place: String,
        why: Failure,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Whom a failure is to be blamed on, for the remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// Not allowed, or the credentials are wrong.
    Denied,
    /// No room.
    Full,
    ReadOnly,
    /// A bucket or folder that isn't there.
    NoPlace,
    /// No server answers, or not in time.
    Unreachable,
    /// This process has no more open files or memory.
    Exhausted,
    /// It is there, and is not what was written.
    Damaged,
    /// It has another content than the one that is wanted.
    Changed,
    Other,
}

impl BlobError {
    pub(crate) fn io(
        action: &'static str,
        key: &str,
        place: &str,
    ) -> impl FnOnce(io::Error) -> Self + use<> {
        let (key, place) = (key.to_owned(), place.to_owned());
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { key, place },
            kind => {
                let why = match kind {
                    io::ErrorKind::PermissionDenied => Failure::Denied,
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::Full,
                    io::ErrorKind::ReadOnlyFilesystem => Failure::ReadOnly,
                    io::ErrorKind::NotADirectory => Failure::NoPlace,
                    io::ErrorKind::TimedOut => Failure::Unreachable,
                    io::ErrorKind::OutOfMemory => Failure::Exhausted,
                    _ if matches!(
                        Errno::from_io_error(&source),
                        Some(Errno::MFILE | Errno::NFILE)
                    ) =>
                    {
                        Failure::Exhausted
                    }
                    _ => Failure::Other,
                };
                Self::Failed { action, key, place, why, source: Box::new(source) }
            }
        }
    }

    /// Whether it says that the key isn't there, and nothing else.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        let Self::Failed { why, place, .. } = self else { return None };
        Some(match why {
            Failure::Denied => format!("check who may read and write {place}, and the credentials"),
            Failure::Full => format!("free some space in {place}, or use another store"),
            Failure::ReadOnly => format!("{place} can't be written: use another store"),
            Failure::NoPlace => format!("check that {place} exists"),
            Failure::Unreachable => format!("check the address and that {place} can be reached"),
            Failure::Exhausted => "end some VMs, or give the daemon more open files".to_owned(),
            Failure::Damaged => format!("put a sound copy of it into {place}"),
            Failure::Changed => format!("restore the earlier content of {place}"),
            Failure::Other => return None,
        })
    }
}
