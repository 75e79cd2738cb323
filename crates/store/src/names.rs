//! Names of snapshots and the keys of what a store holds.
//!
//! ```text
//! format                            one line: which layout
//! chunks/1f/1f…                     by the hash of the content
//! snapshots/NAME/ID-N.table, .state written before the descriptor, never changed
//! snapshots/NAME/ID-N.disk-DEVICE.table  as well; one of each image, that of memory without a word
//! snapshots/NAME/descriptor.json    written last: with it the snapshot is there
//! snapshots/NAME/ID-N.working-set   replaced as more is learnt; of a disk as with the table
//! snapshots/NAME/ID-N.profile       as well
//! snapshots/NAME/ID-N.origin        only while chunks are still elsewhere: where
//! ```
//!
//! Each writer of a snapshot draws a new `N`. Of two that write one, the one that the descriptor
//! names was first. The other can clear away what is its own, and what it leaves is never taken for
//! the first one's.

use blake3::Hash;

/// Most bytes of a snapshot's name.
pub const NAME_BYTES_MAX: usize = 63;

pub(crate) const FORMAT_KEY: &str = "format";
/// The layout of the keys, which is that of the store.
pub(crate) const FORMAT_LINE: &[u8] = b"vmfork-store/1\n";
pub(crate) const CHUNKS: &str = "chunks/";
pub(crate) const SNAPSHOTS: &str = "snapshots/";
pub(crate) const DESCRIPTOR: &str = "descriptor.json";
/// What a snapshot's files besides its descriptor end in.
pub(crate) const TABLE: &str = "table";
pub(crate) const STATE: &str = "state";
pub(crate) const WORKING_SET: &str = "working-set";
pub(crate) const PROFILE: &str = "profile";
pub(crate) const ORIGIN: &str = "origin";

/// Whether a file in a snapshot's folder is one that some attempt to write it has put there.
pub(crate) fn is_of_an_attempt(file: &str) -> bool {
    let ending = file.rsplit_once('.').map(|(_, ending)| ending);
    ending.is_some_and(|it| [TABLE, STATE, WORKING_SET, PROFILE, ORIGIN].contains(&it))
}

/// 1 to 63 of `a-z A-Z 0-9 . _ -`, the first a letter or digit.
pub fn name_is_valid(name: &str) -> bool {
    name.len() <= NAME_BYTES_MAX && part_is_valid(name)
}

fn part_is_valid(part: &str) -> bool {
    part.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
        && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// Parts like names, between slashes: no key leads out of the folder that keys are put into.
pub(crate) fn key_is_valid(key: &str) -> bool {
    key.len() <= 512 && key.split('/').count() <= 4 && key.split('/').all(part_is_valid)
}

pub(crate) fn chunk_key(hash: &Hash) -> String {
    let hex = hash.to_hex();
    format!("{CHUNKS}{}/{hex}", &hex[..2])
}

/// The chunk that a key names, if it is a chunk's.
pub(crate) fn chunk_of(key: &str) -> Option<Hash> {
    let hash = Hash::from_hex(key.rsplit('/').next()?).ok()?;
    (chunk_key(&hash) == key).then_some(hash)
}

pub(crate) fn snapshot_key(name: &str, file: &str) -> String {
    format!("{SNAPSHOTS}{name}/{file}")
}

/// Snapshot and file of a key under `snapshots/`.
pub(crate) fn snapshot_of(key: &str) -> Option<(&str, &str)> {
    key.strip_prefix(SNAPSHOTS)?.split_once('/').filter(|(name, _)| name_is_valid(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_lead_elsewhere_are_none() {
        for bad in
            ["", ".", "..", ".a", "-a", "a/b", "a b", "ä", "a\0", &"a".repeat(NAME_BYTES_MAX + 1)]
        {
            assert!(!name_is_valid(bad), "{bad:?}");
        }
        for good in ["web", "web.1", "a-b_c", "0", &"a".repeat(NAME_BYTES_MAX)] {
            assert!(name_is_valid(good), "{good:?}");
        }
        for bad in ["", "/", "a/", "/a", "a//b", "../a", "a/../b", "a/b/c/d/e", &"a".repeat(513)] {
            assert!(!key_is_valid(bad), "{bad:?}");
        }
    }

    #[test]
    fn keys_say_what_they_are_of() {
        let hash = blake3::hash(b"x");
        assert_eq!(chunk_of(&chunk_key(&hash)), Some(hash));
        assert_eq!(chunk_of(&format!("chunks/00/{hash}")), None);
        assert_eq!(snapshot_of(&snapshot_key("web", "x.origin")), Some(("web", "x.origin")));
        assert_eq!(snapshot_of("snapshots/.x/x.origin"), None);
        assert!(key_is_valid(&chunk_key(&hash)) && key_is_valid(&snapshot_key("web", DESCRIPTOR)));
    }
}
