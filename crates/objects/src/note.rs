//! What is kept of an object: where it is, and which content of it.

use std::fs;
use std::io::{self, Write as _};
use std::num::NonZeroU64;
use std::path::Path;

use serde::{Deserialize, Serialize};
use vmfork_image::ImageId;
use vmfork_store_s3::ObjectVersion;

const FILE: &str = "object.json";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// As it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(crate) location: String,
    size_bytes: u64,
    etag: String,
    version: Option<String>,
    /// In which boot of the host its bytes were fetched: after a crash some may be lost.
    boot: Boot,
}

/// A boot of the host; empty: it can't be told which.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Boot(String);

impl Boot {
    /// This one. Read once for a daemon, so that all its notes are of one.
    pub(crate) fn this() -> Self {
        let read = fs::read_to_string(BOOT_ID);
        let id = read.unwrap_or_else(|error| {
            tracing::warn!(%error, "{BOOT_ID}: after a restart, objects are fetched again");
            String::new()
        });
        Self(id.trim().to_owned())
    }
}

impl Note {
    pub(crate) fn new(location: &str, version: ObjectVersion, boot: &Boot) -> Self {
        let ObjectVersion { size_bytes, etag, version } = version;
        Self { location: location.to_owned(), size_bytes, etag, version, boot: boot.clone() }
    }

    /// The same for each daemon.
    pub(crate) fn id(&self) -> ImageId {
        let Self { location, size_bytes, etag, version, .. } = self;
        let text = format!("{location}\n{size_bytes}\n{etag}\n{version:?}");
        let mut word = [0; 8];
        word.copy_from_slice(&blake3::hash(text.as_bytes()).as_bytes()[..8]);
        let id = NonZeroU64::new(u64::from_le_bytes(word)).unwrap_or(NonZeroU64::MIN);
        ImageId::from(id)
    }

    pub(crate) fn object_version(&self) -> ObjectVersion {
        let (size_bytes, etag) = (self.size_bytes, self.etag.clone());
        ObjectVersion { size_bytes, etag, version: self.version.clone() }
    }

    /// Whether both are of one content and one boot of the host, so that what was fetched is whole.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        self == other && !self.boot.0.is_empty()
    }

    /// `None`: there is none.
    pub(crate) fn read(folder: &Path) -> io::Result<Option<Self>> {
        match fs::read(folder.join(FILE)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whole or not at all, also after a crash of the host.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        let new = folder.join("object.new");
        let mut file = fs::File::create(&new)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(new, folder.join(FILE))?;
        fs::File::open(folder)?.sync_all()
    }

    /// What was fetched counts as absent from then on.
    pub(crate) fn remove(folder: &Path) -> io::Result<()> {
        match fs::remove_file(folder.join(FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
