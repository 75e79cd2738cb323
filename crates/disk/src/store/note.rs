//! What is written down of a layer, for the next daemon: JSON.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmfork_image::ImageId;

use crate::image::{Base, DiskImage};
use crate::raw::Stamp;

/// Notes of other versions are reported, and not read.
pub(super) const VERSION: u32 = 2;
/// Longest note that is read: names and paths are much shorter.
pub(super) const NOTE_BYTES_MAX: u64 = 64 << 10;

/// A layer's note: `layers/ID/note`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub version: u32,
    /// Which disk it is of: all layers of one have the ID of its first.
    #[serde(with = "hex")]
    pub disk_id: ImageId,
    /// Larger than those of the disk's layers that were made before.
    pub number: u64,
    /// The disk's name in its VM.
    pub disk: String,
    /// Which VM it is of, in the caller's words.
    pub vm: String,
    pub size_bytes: u64,
    /// The layer under it; none: it lies on its base.
    #[serde(with = "hex_or_none")]
    pub on: Option<ImageId>,
    pub base: BaseNote,
    /// Clones may lie on it. A layer on which others lie is frozen, whatever this says.
    pub frozen: bool,
    /// It was made in advance. It may be in use, whatever this says; with pages in it, it is.
    pub spare: bool,
    /// It has pages of several layers, for tables to name. It is no disk's content.
    #[serde(default)]
    pub merged: bool,
}

/// What a disk descends from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseNote {
    #[serde(with = "hex")]
    pub id: ImageId,
    pub size_bytes: u64,
    #[serde(flatten)]
    pub kind: BaseKind,
}

/// Where a base's bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum BaseKind {
    Blank,
    Raw {
        path: PathBuf,
        stamp: Stamp,
    },
    /// The caller knows.
    Given,
}

impl BaseNote {
    pub(super) fn of(image: &DiskImage) -> Self {
        let size_bytes = image.size_bytes();
        match image.base() {
            Base::Blank(id) => Self { id: *id, size_bytes, kind: BaseKind::Blank },
            Base::Given(id) => Self { id: *id, size_bytes, kind: BaseKind::Given },
            Base::Raw(id, file) => {
                let (path, stamp) = (file.path().to_owned(), file.stamp());
                Self { id: *id, size_bytes, kind: BaseKind::Raw { path, stamp } }
            }
        }
    }
}

mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use vmfork_image::ImageId;

    pub(super) fn serialize<S: Serializer>(id: &ImageId, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(id)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<ImageId, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

mod hex_or_none {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use vmfork_image::ImageId;

    pub(super) fn serialize<S: Serializer>(id: &Option<ImageId>, to: S) -> Result<S::Ok, S::Error> {
        match id {
            Some(id) => to.collect_str(id),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(
        from: D,
    ) -> Result<Option<ImageId>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_says_the_same_after_it_was_written() {
        let stamp = Stamp { size_bytes: 5, mtime_s: -1, mtime_ns: 7, inode: 9 };
        let kind = BaseKind::Raw { path: "/images/a \"disk\"".into(), stamp };
        let id = ImageId::new(0xab).expect("not 0");
        let note = Note {
            version: VERSION,
            disk_id: id,
            number: 3,
            disk: "data".to_owned(),
            vm: "vm 7".to_owned(),
            size_bytes: 1 << 40,
            on: Some(id),
            base: BaseNote { id, size_bytes: 512, kind },
            frozen: false,
            spare: true,
            merged: true,
        };
        let text = serde_json::to_string(&note).expect("JSON");
        assert!(text.contains(r#""on":"ab""#) && text.contains(r#""kind":"raw""#), "{text}");
        assert_eq!(serde_json::from_str::<Note>(&text).expect("the note"), note);
        let other = text.replace(r#""on":"ab""#, r#""on":"zz""#);
        assert!(serde_json::from_str::<Note>(&other).is_err());
    }
}
