//! `descriptor.json`: what a snapshot is, in words, and the hashes of its other files.
//!
//! The file is one JSON object. Its last member is `check`, on a line of its own: blake3 of all
//! bytes of the file before that line. So a changed digit is noticed, and the file can still be
//! read by anything that reads JSON.

use std::fmt;
use std::str::FromStr;

use blake3::Hash;
use serde::{Deserialize, Serialize};
use vmfork_image::PAGE_BYTES;

use super::{Compression, IMAGE_PAGES_MAX, table};
use crate::names::{STATE, TABLE, name_is_valid, snapshot_key};
use vmfork_image::bytes::Flaw;

/// The layout that is written, and the only one that is read.
pub const SCHEMA: &str = "vmfork-snapshot/1";

/// A descriptor has a page or two; what the daemon puts into `vm` may need more.
pub const DESCRIPTOR_BYTES_MAX: u64 = 1 << 20;

/// Names one snapshot for good. A delta has its base's id written down, so that another snapshot by
/// the same name is not taken for the base. 32 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotId(pub [u8; 16]);

impl SnapshotId {
    /// A new one.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| std::io::Error::other(e.to_string()))?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SnapshotId({self})")
    }
}

/// A text that is no snapshot id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a snapshot id: 32 hex digits in lower case")]
pub struct SnapshotIdError {
    text: String,
}

impl FromStr for SnapshotId {
    type Err = SnapshotIdError;

    fn from_str(text: &str) -> Result<Self, SnapshotIdError> {
        let wrong = || SnapshotIdError { text: text.to_owned() };
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(wrong()),
        };
        let pairs = text.as_bytes().as_chunks::<2>();
        if pairs.0.len() != 16 || !pairs.1.is_empty() {
            return Err(wrong());
        }
        let mut id = [0; 16];
        for (byte, [high, low]) in id.iter_mut().zip(pairs.0) {
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Ok(Self(id))
    }
}

impl TryFrom<String> for SnapshotId {
    type Error = SnapshotIdError;

    fn try_from(text: String) -> Result<Self, SnapshotIdError> {
        text.parse()
    }
}

impl From<SnapshotId> for String {
    fn from(id: SnapshotId) -> Self {
        id.to_string()
    }
}

/// The snapshot that a delta begins from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseRef {
    pub name: String,
    pub id: SnapshotId,
}

/// What a snapshot is made of; bytes are those in the store that it was first written to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Pages that are in its chunks.
    pub own_pages: u64,
    /// Pages that are zero, other than in the base; without a base, all that are not own.
    pub zero_pages: u64,
    /// Windows that have a chunk. Equal ones share one.
    pub chunks: u64,
    /// Bytes of files that were written for it.
    pub stored_bytes: u64,
    /// Bytes of chunks that it uses and that were there already.
    pub shared_bytes: u64,
}

/// One of a snapshot's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRef {
    /// In the snapshot's folder.
    pub file: String,
    pub bytes: u64,
    /// Of the whole file.
    #[serde(with = "hash_hex")]
    pub blake3: Hash,
}

impl FileRef {
    pub(crate) fn of(file: String, content: &[u8]) -> Self {
        Self { file, bytes: content.len() as u64, blake3: blake3::hash(content) }
    }

    /// Why `content` is not that file, if it isn't.
    pub(crate) fn flaw_of(&self, content: &[u8]) -> Option<Flaw> {
        if content.len() as u64 != self.bytes {
            let what = format!("{} bytes, not {}", content.len(), self.bytes);
            return Some(Flaw::at(content.len(), what));
        }
        let found = blake3::hash(content);
        (found != self.blake3).then(|| {
            Flaw::at(0, format!("its hash is {found}, but {} in the descriptor", self.blake3))
        })
    }
}

/// The files that a snapshot has besides its descriptor, and that never change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    pub table: FileRef,
    pub state: FileRef,
}

impl Files {
    /// The file beside the device state that ends in `ending`. The device state's file stays the
    /// same for as long as the snapshot exists.
    pub(crate) fn beside(&self, ending: &str) -> String {
        let state = &self.state.file;
        let stem = state.rsplit_once('.').map_or(state.as_str(), |(stem, _)| stem);
        format!("{stem}.{ending}")
    }
}

/// Tells attempts to write a snapshot apart: 16 hex digits in its files' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attempt([u8; 8]);

impl Attempt {
    const DIGITS: usize = 16;

    pub(crate) fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|e| std::io::Error::other(e.to_string()))?;
        Ok(Self(bytes))
    }

    /// The name of its file that ends in `ending`, of snapshot `id`.
    pub(crate) fn file(self, id: SnapshotId, ending: &str) -> String {
        format!("{id}-{:016x}.{ending}", u64::from_be_bytes(self.0))
    }
}

/// What a snapshot is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Descriptor {
    /// [`SCHEMA`].
    pub schema: String,
    pub id: SnapshotId,
    pub name: String,
    pub created_unix_ms: u64,
    /// Pages of the image.
    pub pages: u64,
    /// 4096.
    pub page_bytes: u64,
    /// Pages of a window.
    pub chunk_pages: u64,
    pub compression: Compression,
    pub base: Option<BaseRef>,
    pub counts: Counts,
    pub files: Files,
    /// What the VM was, in the words of the daemon. Means nothing here.
    pub vm: serde_json::Value,
}

/// What comes before the digits of the check, and after.
const CHECK_HEAD: &str = "  \"check\": \"";
const CHECK_TAIL: &str = "\"\n}\n";
const CHECK_BYTES: usize = CHECK_HEAD.len() + 2 * blake3::OUT_LEN + CHECK_TAIL.len();

impl Descriptor {
    /// The file.
    ///
    /// # Errors
    /// `vm` is too large.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let mut text = serde_json::to_string_pretty(self).map_err(|e| e.to_string())?;
        // It ends with "\n}": the check goes there, as one more member.
        text.truncate(text.len() - "\n}".len());
        text.push_str(",\n");
        let check = blake3::hash(text.as_bytes()).to_hex();
        text.push_str(CHECK_HEAD);
        text.push_str(&check);
        text.push_str(CHECK_TAIL);
        if text.len() as u64 > DESCRIPTOR_BYTES_MAX {
            return Err(format!(
                "a descriptor of {} bytes, above {DESCRIPTOR_BYTES_MAX}",
                text.len()
            ));
        }
        Ok(text.into_bytes())
    }

    /// # Errors
    /// It is no descriptor, not as it was written, or of a version that is not known.
    pub fn decode(file: &[u8]) -> Result<Self, Flaw> {
        if file.len() as u64 > DESCRIPTOR_BYTES_MAX {
            let what = format!("{} bytes, where {DESCRIPTOR_BYTES_MAX} are the most", file.len());
            return Err(Flaw::at(0, what));
        }
        // A version that is not known may have its check elsewhere: that it is unknown is the
        // better answer.
        if let Ok(Head { schema }) = serde_json::from_slice(file)
            && schema != SCHEMA
        {
            return Err(Flaw::at(0, format!("its layout is {schema}, not {SCHEMA}")));
        }
        let Some(at) = file.len().checked_sub(CHECK_BYTES) else {
            return Err(Flaw::at(file.len(), "cut short: no room for its check"));
        };
        let (body, tail) = file.split_at(at);
        let check = format!("{CHECK_HEAD}{}{CHECK_TAIL}", blake3::hash(body).to_hex());
        if tail != check.as_bytes() {
            return Err(Flaw::at(
                at,
                "changed or cut: the check at its end is not that of the file",
            ));
        }
        let Some(body) = body.strip_suffix(b",\n") else {
            return Err(Flaw::at(at, "no comma before the check"));
        };
        let text = [body, b"\n}"].concat();
        let it: Self = serde_json::from_slice(&text)
            .map_err(|e| Flaw::at(0, format!("no descriptor of a snapshot: {e}")))?;
        match it.flaw() {
            Some(what) => Err(Flaw::at(0, what)),
            None => Ok(it),
        }
    }

    /// The key of its file that ends in `ending`.
    pub(crate) fn key_beside(&self, ending: &str) -> String {
        snapshot_key(&self.name, &self.files.beside(ending))
    }

    fn flaw(&self) -> Option<String> {
        let Self { schema, name, pages, page_bytes, base, files, .. } = self;
        if schema != SCHEMA {
            return Some(format!("its layout is {schema}, not {SCHEMA}"));
        }
        for name in std::iter::once(name).chain(base.as_ref().map(|base| &base.name)) {
            if !name_is_valid(name) {
                return Some(format!("{name:?} is no name of a snapshot"));
            }
        }
        if *page_bytes != PAGE_BYTES {
            return Some(format!("pages of {page_bytes} bytes, not {PAGE_BYTES}"));
        }
        if *pages == 0 || *pages > IMAGE_PAGES_MAX {
            return Some(format!("an image of {pages} pages"));
        }
        // A name that is put together with others to a key must not lead elsewhere.
        let id = self.id.to_string();
        for (file, ending) in [(&files.table.file, TABLE), (&files.state.file, STATE)] {
            let attempt = file.strip_prefix(&id).and_then(|rest| rest.strip_prefix('-'));
            let attempt = attempt.and_then(|rest| rest.strip_suffix(ending)?.strip_suffix('.'));
            let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
            if !attempt.is_some_and(|it| it.len() == Attempt::DIGITS && it.bytes().all(is_digit)) {
                return Some(format!("{file:?} is no file of snapshot {id}"));
            }
        }
        table::chunk_pages_flaw(self.chunk_pages)
    }
}

#[derive(Deserialize)]
struct Head {
    schema: String,
}

mod hash_hex {
    use blake3::Hash;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(hash: &Hash, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&hash.to_hex())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
        let text = String::deserialize(from)?;
        Hash::from_hex(&text).map_err(|_| D::Error::custom(format!("{text:?} is no blake3 hash")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor() -> Descriptor {
        let id = SnapshotId([0x1f; 16]);
        Descriptor {
            schema: SCHEMA.into(),
            id,
            name: "web".into(),
            created_unix_ms: 1,
            pages: 1024,
            page_bytes: PAGE_BYTES,
            chunk_pages: 64,
            compression: Compression::Zstd { level: 1 },
            base: Some(BaseRef { name: "base".into(), id: SnapshotId([2; 16]) }),
            counts: Counts { own_pages: 3, ..Counts::default() },
            files: Files {
                table: FileRef::of(Attempt([0xab; 8]).file(id, TABLE), b"t"),
                state: FileRef::of(Attempt([1; 8]).file(id, STATE), b"s"),
            },
            vm: serde_json::json!({"memory_mib": 4, "text": "\",\n  \"check\": \"0\"\n}"}),
        }
    }

    #[test]
    fn a_descriptor_reads_back_and_is_json() {
        let it = descriptor();
        let file = it.encode().expect("small");
        assert_eq!(Descriptor::decode(&file).as_ref(), Ok(&it));
        let value: serde_json::Value = serde_json::from_slice(&file).expect("JSON");
        assert_eq!(value["name"], "web");
        assert_eq!(value["id"], "1f".repeat(16));
        assert_eq!(value["check"].as_str().map(str::len), Some(64));
    }

    #[test]
    fn every_changed_bit_and_every_cut_is_noticed() {
        let file = descriptor().encode().expect("small");
        for bit in 0..file.len() * 8 {
            let mut bad = file.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Descriptor::decode(&bad).is_err(), "bit {bit}");
        }
        for bytes in 0..file.len() {
            assert!(Descriptor::decode(&file[..bytes]).is_err(), "{bytes}");
        }
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let later = br#"{"schema": "vmfork-snapshot/2", "anything": 1}"#;
        let flaw = Descriptor::decode(later).expect_err("not known");
        assert!(flaw.what.contains("vmfork-snapshot/2, not vmfork-snapshot/1"), "{flaw}");
    }

    #[test]
    fn a_descriptor_that_leads_elsewhere_is_refused() {
        for change in [
            |d: &mut Descriptor| d.name = "../x".into(),
            |d: &mut Descriptor| d.base.as_mut().expect("one").name = "a/b".into(),
            |d: &mut Descriptor| d.files.table.file = "../../etc/passwd.table".into(),
            |d: &mut Descriptor| d.files.state.file = format!("{}/../x.state", d.id),
            |d: &mut Descriptor| d.files.state.file = format!("{}.state", d.id),
            |d: &mut Descriptor| d.files.state.file = d.files.table.file.clone(),
            |d: &mut Descriptor| d.files.table.file = d.files.table.file.replace('a', "A"),
            |d: &mut Descriptor| d.page_bytes = 512,
            |d: &mut Descriptor| d.chunk_pages = 48,
            |d: &mut Descriptor| d.pages = 0,
            |d: &mut Descriptor| d.pages = IMAGE_PAGES_MAX + 1,
            |d: &mut Descriptor| d.schema = "other/1".into(),
        ] {
            let mut it = descriptor();
            change(&mut it);
            let file = it.encode().expect("small");
            assert!(Descriptor::decode(&file).is_err(), "{it:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            prop_assert!(Descriptor::decode(&bytes).is_err());
        }

        #[test]
        fn an_id_reads_back(bytes: [u8; 16], text in "[0-9a-g]{31,33}") {
            let id = SnapshotId(bytes);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
            if let Ok(id) = text.parse::<SnapshotId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }
    }
}
