//! The book as a file: JSON that people can read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Entry, EntryError, HOSTS_MAX, Membership};
use crate::id::HostId;

/// What a file of this layout begins with. What is added later as optional fields does not change
/// it.
const FORMAT: &str = "vmfork-members/1";

#[derive(Serialize, Deserialize)]
struct Book {
    format: String,
    own: HostId,
    hosts: Vec<Entry>,
}

/// Only the format, to tell a later version from damage.
#[derive(Deserialize)]
struct Header {
    format: String,
}

/// A written book that is not as it was written.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The cause names line and column.
    #[error("it is no list of members")]
    Json {
        #[source]
        source: serde_json::Error,
    },
    #[error("its format is `{found}`, this vmfork reads `{FORMAT}`")]
    Format { found: String },
    #[error("its entry {index}, of host {id}, can't be")]
    Entry {
        /// From 0.
        index: usize,
        id: HostId,
        #[source]
        source: EntryError,
    },
    #[error("it has host {id} twice")]
    Twice { id: HostId },
    #[error("it lacks this host, {own}")]
    Lacks { own: HostId },
    #[error("it has {count} hosts; a cluster can have {HOSTS_MAX}")]
    TooMany { count: usize },
}

impl Membership {
    /// The book, to be written down.
    pub fn to_json(&self) -> Vec<u8> {
        let book = Book {
            format: FORMAT.to_owned(),
            own: self.own,
            hosts: self.entries.values().cloned().collect(),
        };
        let mut json = serde_json::to_vec_pretty(&book).expect("plain data to memory");
        json.push(b'\n');
        json
    }

    /// What [`Membership::to_json`] wrote. Call [`Membership::begin`] next.
    ///
    /// # Errors
    /// It is not what was written, and where.
    pub fn from_json(json: &[u8]) -> Result<Self, LoadError> {
        let header: Header =
            serde_json::from_slice(json).map_err(|source| LoadError::Json { source })?;
        if header.format != FORMAT {
            return Err(LoadError::Format { found: crate::id::shortened(&header.format) });
        }
        let book: Book =
            serde_json::from_slice(json).map_err(|source| LoadError::Json { source })?;
        let own = book.own;
        if book.hosts.len() > HOSTS_MAX {
            return Err(LoadError::TooMany { count: book.hosts.len() });
        }
        let mut entries = BTreeMap::new();
        for (index, entry) in book.hosts.into_iter().enumerate() {
            let id = entry.id;
            entry.check().map_err(|source| LoadError::Entry { index, id, source })?;
            if entries.insert(id, entry).is_some() {
                return Err(LoadError::Twice { id });
            }
        }
        let own_entry = entries.remove(&own).ok_or(LoadError::Lacks { own })?;
        Ok(Self::of(own_entry, entries))
    }
}
