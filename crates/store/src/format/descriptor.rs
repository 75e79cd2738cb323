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

use super::first::{FIRST_SCHEMA, First};
use super::role::{Role, RoleError};
use super::{Compression, IMAGE_PAGES_MAX, table};
use crate::names::{STATE, TABLE, name_is_valid, snapshot_key};
use vmfork_image::bytes::Flaw;

/// The layout that is written. The first one is read, too.
pub const SCHEMA: &str = "vmfork-snapshot/2";

/// What all layouts are called, before their number.
const SCHEMA_STEM: &str = "vmfork-snapshot/";

/// Most images of a snapshot: the memory and more disks than QEMU's machine has slots for.
pub const IMAGES_MAX: usize = 64;

/// What the size of a disk is a multiple of, in bytes.
const SECTOR_BYTES: u64 = 512;

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

/// The image that a delta begins from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseRef {
    /// Of its snapshot.
    pub name: String,
    /// Of its snapshot.
    pub id: SnapshotId,
    /// Which of that snapshot's images.
    pub role: Role,
}

/// What an image is made of; bytes are those in the store that it was first written to.
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

impl Counts {
    fn plus(self, other: &Self) -> Self {
        Self {
            own_pages: self.own_pages.saturating_add(other.own_pages),
            zero_pages: self.zero_pages.saturating_add(other.zero_pages),
            chunks: self.chunks.saturating_add(other.chunks),
            stored_bytes: self.stored_bytes.saturating_add(other.stored_bytes),
            shared_bytes: self.shared_bytes.saturating_add(other.shared_bytes),
        }
    }
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

/// One image of a snapshot: pages with a role, each its own of all that follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageDescriptor {
    pub role: Role,
    /// Size, a multiple of 512; of memory, of whole pages. What a last page has beyond it is zero.
    pub bytes: u64,
    /// 4096.
    pub page_bytes: u64,
    /// Pages of a window.
    pub chunk_pages: u64,
    pub compression: Compression,
    /// The image that it is a delta on, in the same store.
    pub base: Option<BaseRef>,
    pub counts: Counts,
    /// Its page table, which names every chunk by hash: this hash is the root over its own content.
    pub table: FileRef,
}

impl ImageDescriptor {
    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        self.bytes.div_ceil(PAGE_BYTES)
    }

    fn flaw(&self) -> Option<String> {
        let Self { role, bytes, page_bytes, base, .. } = self;
        if *page_bytes != PAGE_BYTES {
            return Some(format!("pages of {page_bytes} bytes, not {PAGE_BYTES}"));
        }
        if let Some(why) = size_flaw(role, *bytes) {
            return Some(why);
        }
        if let Some(BaseRef { name, role: below, .. }) = base {
            if !name_is_valid(name) {
                return Some(format!("{name:?} is no name of a snapshot"));
            }
            if !role.is_of_the_kind_of(below) {
                return Some(format!("it is a delta on an image of role {below}"));
            }
        }
        table::chunk_pages_flaw(self.chunk_pages)
    }
}

/// Why no image of that role has this size, if none has.
pub(crate) fn size_flaw(role: &Role, bytes: u64) -> Option<String> {
    let unit = match role {
        Role::Memory => PAGE_BYTES,
        Role::Disk(_) => SECTOR_BYTES,
    };
    let pages = bytes.div_ceil(PAGE_BYTES);
    if pages == 0 || pages > IMAGE_PAGES_MAX {
        return Some(format!("an image of {pages} pages"));
    }
    (!bytes.is_multiple_of(unit)).then(|| format!("{bytes} bytes, not a multiple of {unit}"))
}

/// What a snapshot is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Descriptor {
    /// [`SCHEMA`], also of one that was read in the first layout.
    pub schema: String,
    pub id: SnapshotId,
    pub name: String,
    pub created_unix_ms: u64,
    /// At least one; ascending by role, none of a role twice.
    pub images: Vec<ImageDescriptor>,
    /// Device state; without memory an empty one.
    pub state: FileRef,
    /// What the VM was, in the words of the daemon. Means nothing here.
    pub vm: serde_json::Value,
}

/// Why a descriptor's file is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// It is not as it was written, or no descriptor.
    #[error("{0}")]
    Flaw(#[from] Flaw),
    /// It is right, as far as that can be told, but of a newer version of vmfork.
    #[error("{0}")]
    Newer(String),
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

    /// Read the file, of this layout or the first.
    ///
    /// # Errors
    /// It is no descriptor, not as it was written, or of a newer version.
    pub fn decode(file: &[u8]) -> Result<Self, Unreadable> {
        if file.len() as u64 > DESCRIPTOR_BYTES_MAX {
            let what = format!("{} bytes, where {DESCRIPTOR_BYTES_MAX} are the most", file.len());
            return Err(Flaw::at(0, what).into());
        }
        let schema = serde_json::from_slice(file).ok().map(|Head { schema }| schema);
        // A newer version may have its check elsewhere. That it is newer is the better answer,
        // unless there is a check where it belongs and it tells of damage.
        if let Some(schema) = schema.filter(|schema| schema != SCHEMA && schema != FIRST_SCHEMA)
            && (checked(file).is_ok() || !ends_with_a_check(file))
        {
            return Err(unknown_schema(&schema));
        }
        let body = checked(file)?;
        let Some(body) = body.strip_suffix(b",\n") else {
            return Err(Flaw::at(body.len(), "no comma before the check").into());
        };
        let text = [body, b"\n}"].concat();
        let none = |e: serde_json::Error| Flaw::at(0, format!("no descriptor of a snapshot: {e}"));
        let Head { schema } = serde_json::from_slice(&text).map_err(none)?;
        let it: Self = match schema.as_str() {
            SCHEMA => {
                refuse_unknown_roles(&text)?;
                serde_json::from_slice(&text).map_err(none)?
            }
            FIRST_SCHEMA => serde_json::from_slice::<First>(&text).map_err(none)?.into(),
            other => return Err(unknown_schema(other)),
        };
        match it.flaw() {
            Some(what) => Err(Flaw::at(0, what).into()),
            None => Ok(it),
        }
    }

    /// The image of that role, if it has one.
    pub fn image(&self, role: &Role) -> Option<&ImageDescriptor> {
        self.images.iter().find(|image| image.role == *role)
    }

    /// Of all its images together, with the device state among the bytes.
    pub fn counts(&self) -> Counts {
        let state = Counts { stored_bytes: self.state.bytes, ..Counts::default() };
        self.images.iter().fold(state, |sum, image| sum.plus(&image.counts))
    }

    /// What its images are deltas on.
    pub fn bases(&self) -> impl Iterator<Item = &BaseRef> {
        self.images.iter().filter_map(|image| image.base.as_ref())
    }

    /// The file beside the device state that ends in `ending`. The device state's file stays the
    /// same for as long as the snapshot exists.
    pub(crate) fn beside(&self, ending: &str) -> String {
        let state = &self.state.file;
        let stem = state.rsplit_once('.').map_or(state.as_str(), |(stem, _)| stem);
        format!("{stem}.{ending}")
    }

    /// The key of its file that ends in `ending`.
    pub(crate) fn key_beside(&self, ending: &str) -> String {
        snapshot_key(&self.name, &self.beside(ending))
    }

    fn flaw(&self) -> Option<String> {
        let Self { schema, name, images, state, .. } = self;
        if schema != SCHEMA {
            return Some(format!("its layout is {schema}, not {SCHEMA}"));
        }
        if !name_is_valid(name) {
            return Some(format!("{name:?} is no name of a snapshot"));
        }
        if images.is_empty() || images.len() > IMAGES_MAX {
            return Some(format!("{} images, not 1 to {IMAGES_MAX}", images.len()));
        }
        if !images.is_sorted_by(|one, next| one.role < next.role) {
            return Some("its images do not ascend by role".to_owned());
        }
        let flaw_of = |image: &ImageDescriptor| {
            let of_file = || self.name_flaw(&image.table.file, &image.role.ending(TABLE));
            let what = image.flaw().or_else(of_file)?;
            Some(format!("{}: {what}", image.role))
        };
        images.iter().find_map(flaw_of).or_else(|| self.name_flaw(&state.file, STATE))
    }

    /// A name that is put together with others to a key must not lead elsewhere.
    fn name_flaw(&self, file: &str, ending: &str) -> Option<String> {
        let id = self.id.to_string();
        let attempt = file.strip_prefix(&id).and_then(|rest| rest.strip_prefix('-'));
        let attempt = attempt.and_then(|rest| rest.strip_suffix(ending)?.strip_suffix('.'));
        let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        let is_right =
            attempt.is_some_and(|it| it.len() == Attempt::DIGITS && it.bytes().all(is_digit));
        (!is_right).then(|| format!("{file:?} is no file of snapshot {id}"))
    }
}

/// What comes before the check, which is right.
fn checked(file: &[u8]) -> Result<&[u8], Flaw> {
    let Some(at) = file.len().checked_sub(CHECK_BYTES) else {
        return Err(Flaw::at(file.len(), "cut short: no room for its check"));
    };
    let (body, tail) = file.split_at(at);
    let check = format!("{CHECK_HEAD}{}{CHECK_TAIL}", blake3::hash(body).to_hex());
    if tail != check.as_bytes() {
        let what = "changed or cut: the check at its end is not that of the file";
        return Err(Flaw::at(at, what));
    }
    Ok(body)
}

fn ends_with_a_check(file: &[u8]) -> bool {
    let tail = file.len().checked_sub(CHECK_BYTES).and_then(|at| file.get(at..));
    tail.is_some_and(|tail| tail.starts_with(CHECK_HEAD.as_bytes()))
}

fn unknown_schema(schema: &str) -> Unreadable {
    if schema.starts_with(SCHEMA_STEM) {
        Unreadable::Newer(format!("its layout is {schema}, and {SCHEMA} is the newest known here"))
    } else {
        Flaw::at(0, format!("its layout is {schema}, not {SCHEMA}")).into()
    }
}

/// Roles may be added without a new layout, because a reader can name what it does not know.
fn refuse_unknown_roles(text: &[u8]) -> Result<(), Unreadable> {
    let Ok(Roles { images }) = serde_json::from_slice(text) else { return Ok(()) };
    for RoleOf { role } in images {
        if let Err(RoleError::Unknown(role)) = role.parse::<Role>() {
            let what = format!("it has an image of role `{role}`, which is not known here");
            return Err(Unreadable::Newer(what));
        }
    }
    Ok(())
}

#[derive(Deserialize)]
struct RoleOf {
    role: String,
}

#[derive(Deserialize)]
struct Roles {
    images: Vec<RoleOf>,
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
#[path = "descriptor_tests.rs"]
mod tests;
