//! Files of a store for stores of other hosts, and chunks that come from those.

use blake3::Hash;

use crate::blobs::BlobError;
use crate::error::StoreError;
use crate::files::read_descriptor;
use crate::format::chunk;
use crate::format::descriptor::{Descriptor, SnapshotId};
use crate::names::{FORMAT_KEY, ORIGIN, PROFILE, chunk_key, chunk_of, snapshot_of};
use crate::store::Store;

/// What a key of a store names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyOf<'a> {
    /// The layout.
    Format,
    /// By the hash of its content.
    Chunk(Hash),
    /// A file of this snapshot.
    Snapshot(&'a str),
}

impl<'a> KeyOf<'a> {
    /// What it names; `None`: nothing.
    #[must_use]
    pub fn parse(key: &'a str) -> Option<Self> {
        if key == FORMAT_KEY {
            return Some(Self::Format);
        }
        if let Some(hash) = chunk_of(key) {
            return Some(Self::Chunk(hash));
        }
        snapshot_of(key).map(|(name, _)| Self::Snapshot(name))
    }
}

/// Whether a key names where the chunks of a snapshot are. Another host looks for them itself.
#[must_use]
pub fn is_origin(key: &str) -> bool {
    ending(key) == Some(ORIGIN)
}

/// Whether a key names what was learnt of how an image of a snapshot is read.
#[must_use]
pub fn is_profile(key: &str) -> bool {
    ending(key) == Some(PROFILE)
}

fn ending(key: &str) -> Option<&str> {
    snapshot_of(key).and_then(|(_, file)| Some(file.rsplit_once('.')?.1))
}

/// The file of a chunk that has the content that its name says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedChunk<B> {
    hash: Hash,
    file: B,
}

impl<B: AsRef<[u8]>> VerifiedChunk<B> {
    /// `None`: these bytes have another content, or none.
    pub fn verify(hash: Hash, file: B) -> Option<Self> {
        chunk::decode(file.as_ref(), &hash).is_ok().then_some(Self { hash, file })
    }

    /// What the chunk is called.
    pub fn hash(&self) -> &Hash {
        &self.hash
    }

    /// As it is stored.
    pub fn file(&self) -> &B {
        &self.file
    }
}

impl Store {
    /// A file, as it is here. Who asked verifies it. A profile is that of the snapshot here, which
    /// another store has under another key.
    ///
    /// # Errors
    /// There is none of that key, or it can't be read.
    pub fn give(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        let blobs = self.inner.blobs();
        if is_profile(key)
            && let Some((name, file)) = snapshot_of(key)
            && let Some((_, ending)) = file.split_once('.')
            && let Ok(descriptor) = read_descriptor(blobs, name)
        {
            return blobs.get(&descriptor.key_beside(ending));
        }
        blobs.get(key)
    }

    /// Keep a chunk that came from another store.
    ///
    /// # Errors
    /// It can't be written.
    pub fn keep_chunk(&self, chunk: &VerifiedChunk<impl AsRef<[u8]>>) -> Result<(), StoreError> {
        Ok(self.inner.blobs().put(&chunk_key(&chunk.hash), chunk.file.as_ref())?)
    }

    /// The snapshot of this id, whatever it is called.
    ///
    /// # Errors
    /// The store can't be listed.
    pub fn by_id(&self, id: SnapshotId) -> Result<Option<Descriptor>, StoreError> {
        self.find_by_id(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Compression;
    use crate::format::chunk::ChunkEncoder;

    #[test]
    fn keys_are_told_apart() {
        let hash = blake3::hash(b"x");
        assert_eq!(KeyOf::parse("format"), Some(KeyOf::Format));
        assert_eq!(KeyOf::parse(&chunk_key(&hash)), Some(KeyOf::Chunk(hash)));
        let file = KeyOf::parse("snapshots/web/descriptor.json");
        assert_eq!(file, Some(KeyOf::Snapshot("web")));
        for none in ["", "chunks/1f/xx", "snapshots/../x", "snapshots/web", "other/web/x"] {
            assert_eq!(KeyOf::parse(none), None, "{none}");
        }
        assert!(is_origin("snapshots/web/1f-3.origin") && !is_origin("snapshots/web/1f-3.table"));
        assert!(!is_origin("chunks/1f/1f.origin"));
    }

    #[test]
    fn a_chunk_of_another_content_is_not_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::folder(folder.path().join("s")).expect("a store");
        let raw = vec![7; 4096];
        let hash = blake3::hash(&raw);
        let file = ChunkEncoder::new(Compression::None).expect("memory").encode(&raw);
        assert_eq!(VerifiedChunk::verify(blake3::hash(b"y"), &file), None, "another one");
        let mut changed = file.clone();
        changed[100] ^= 1;
        assert_eq!(VerifiedChunk::verify(hash, &changed), None, "damaged");
        assert!(store.give(&chunk_key(&hash)).expect_err("nothing").is_not_found());
        let chunk = VerifiedChunk::verify(hash, &file).expect("it is");
        store.keep_chunk(&chunk).expect("kept");
        assert_eq!(store.give(&chunk_key(&hash)).expect("there"), file);
        assert!(matches!(store.give("../x"), Err(BlobError::BadKey { .. })));
    }
}
