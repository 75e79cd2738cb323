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
    boot: String,
}

impl Note {
    /// Of this boot.
    pub(crate) fn new(location: &str, version: ObjectVersion) -> Self {
        let ObjectVersion { size_bytes, etag, version } = version;
        Self { location: location.to_owned(), size_bytes, etag, version, boot: this_boot() }
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

    /// Whether what was fetched is whole, as long as the host has not ended since.
    pub(crate) fn is_of_this_boot(&self) -> bool {
        !self.boot.is_empty() && self.boot == this_boot()
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
}

/// Empty: it can't be told.
fn this_boot() -> String {
    fs::read_to_string(BOOT_ID).map(|text| text.trim().to_owned()).unwrap_or_default()
}
