//! Reading all of a snapshot, to see whether it is as it was written.

use std::collections::{BTreeMap, HashMap, VecDeque};

use blake3::Hash;
use vmfork_image::PAGE_BYTES;

use crate::blobs::{BlobError, Failure};
use crate::error::{Damage, StoreError};
use crate::files::{read_descriptor, read_origin, read_section, read_table};
use crate::format::descriptor::{BaseRef, Descriptor, ImageDescriptor};
use crate::format::sealed::{SealedKind, unseal};
use crate::format::table::Table;
use crate::format::{Flaw, working_set};
use crate::names::{DESCRIPTOR, PROFILE, WORKING_SET, chunk_key, snapshot_key};
use crate::source::decode_chunk;
use crate::store::{CHAIN_MAX, Store, check_base, check_name};
use crate::work::Work;

/// What [`Store::verify`] found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    /// The snapshot and all that it is a delta on.
    pub names: Vec<String>,
    /// Chunks that were read, each once.
    pub chunks: u64,
    /// Chunks that are still in the store that the snapshot was pulled from, and were not read.
    pub chunks_elsewhere: u64,
    /// Raw bytes of the chunks that were read.
    pub bytes: u64,
    /// All that is wrong. Empty: every byte is as it was written.
    pub damage: Vec<Damage>,
}

impl Store {
    /// Read and check every byte of snapshot `name` and all that it is a delta on.
    ///
    /// # Errors
    /// No such snapshot; it is of a newer version; the store can't be reached;
    /// [`StoreError::Cancelled`]. Damage is no error.
    pub fn verify(&self, name: &str, work: &Work) -> Result<Verified, StoreError> {
        check_name(name)?;
        let meant = match read_descriptor(self.inner.blobs(), name) {
            Err(error @ StoreError::NotFound { .. }) => return Err(error),
            found => found.ok(),
        };
        let mut tries = 0;
        loop {
            tries += 1;
            let (found, seen) = self.verify_as_it_is(name, work)?;
            if found.damage.is_empty() {
                return Ok(found);
            }
            // What is being removed looks damaged.
            if let Some(meant) = &meant
                && read_descriptor(self.inner.blobs(), name).map_or_else(
                    |error| matches!(error, StoreError::NotFound { .. }),
                    |now| now.id != meant.id,
                )
            {
                return Err(self.not_found(name));
            }
            // So does what is made whole: its table goes, and perhaps its base.
            if tries == TRIES_MAX || !self.has_changed(&seen) {
                return Ok(found);
            }
        }
    }

    /// Whether any of these snapshots is another one now.
    fn has_changed(&self, seen: &Seen) -> bool {
        let blobs = self.inner.blobs();
        seen.iter().any(|(name, was)| read_descriptor(blobs, name).ok() != *was)
    }

    fn verify_as_it_is(&self, name: &str, work: &Work) -> Result<(Verified, Seen), StoreError> {
        let mut found = Verified::default();
        let mut chunks = Chunks::new();
        // As long as they are open, their chunks stay, even if they are removed.
        let mut open = Vec::new();
        let mut seen = Seen::new();
        let mut left = VecDeque::from([(name.to_owned(), None)]);
        while let Some((name, expected)) = left.pop_front() {
            if !seen.contains_key(&name) {
                open.extend(self.open(&name).ok());
                let descriptor = self.verify_files(&mut found, &name, work, &mut chunks)?;
                left.extend(descriptor.iter().flat_map(expected_bases));
                seen.insert(name.clone(), descriptor);
            }
            if let Some(Some(descriptor)) = seen.get(&name)
                && let Some((base, pages)) = expected
                && let Err(why) = check_base(&base, descriptor, pages)
            {
                self.note(&mut found, &name, DESCRIPTOR, &format!("as a base it is {why}"));
            }
            if found.names.len() > CHAIN_MAX {
                return Err(StoreError::DeepChain { name, most: CHAIN_MAX });
            }
        }
        self.verify_chunks(&mut found, chunks, work)?;
        Ok((found, seen))
    }

    /// One snapshot without its chunks, which are gathered. → what it is, if that can be read.
    fn verify_files(
        &self,
        found: &mut Verified,
        name: &str,
        work: &Work,
        chunks: &mut Chunks,
    ) -> Result<Option<Descriptor>, StoreError> {
        let blobs = self.inner.blobs();
        let descriptor = match read_descriptor(blobs, name) {
            Ok(descriptor) => descriptor,
            Err(StoreError::NotFound { .. }) if !found.names.is_empty() => {
                self.note(found, name, DESCRIPTOR, "it isn't there, and is a base");
                return Ok(None);
            }
            // The one that was meant: there is nothing that could be checked.
            Err(error @ StoreError::Newer { .. }) if found.names.is_empty() => return Err(error),
            Err(error) => {
                self.keep_damage(found, error)?;
                found.names.push(name.to_owned());
                return Ok(None);
            }
        };
        found.names.push(name.to_owned());
        self.verify_state(found, &descriptor)?;
        let is_elsewhere = read_origin(blobs, &descriptor)?.is_some();
        for image in &descriptor.images {
            self.verify_extras(found, &descriptor, image, work)?;
            match read_table(blobs, name, image) {
                Ok(table) => gather(&table, is_elsewhere, chunks),
                Err(error) => self.keep_damage(found, error)?,
            }
        }
        Ok(Some(descriptor))
    }

    fn verify_chunks(
        &self,
        found: &mut Verified,
        chunks: Chunks,
        work: &Work,
    ) -> Result<(), StoreError> {
        let chunks: Vec<_> = chunks.into_iter().collect();
        work.expect(chunks.iter().map(|(_, (pages, _))| pages * PAGE_BYTES).sum());
        let read = work.for_each_on(
            self.inner.threads(work),
            &chunks,
            || Ok(()),
            |(), (hash, (pages, is_elsewhere))| {
                let read = self.verify_chunk(&Hash::from_bytes(*hash), *pages, *is_elsewhere);
                work.done(pages * PAGE_BYTES);
                read
            },
        )?;
        for chunk in read {
            match chunk {
                Chunk::Right(bytes) => {
                    found.chunks += 1;
                    found.bytes += bytes;
                }
                Chunk::Elsewhere => found.chunks_elsewhere += 1,
                Chunk::Damaged(damage) => found.damage.push(damage),
            }
        }
        Ok(())
    }

    fn verify_chunk(
        &self,
        hash: &Hash,
        pages: u64,
        is_elsewhere: bool,
    ) -> Result<Chunk, StoreError> {
        let key = chunk_key(hash);
        let read = self.inner.blobs().get(&key).map_err(StoreError::from);
        match read.and_then(|file| decode_chunk(self.inner.blobs(), &file, hash, Some(pages))) {
            Ok(raw) => Ok(Chunk::Right(raw.len() as u64)),
            Err(StoreError::Blob(BlobError::NotFound { .. })) if is_elsewhere => {
                Ok(Chunk::Elsewhere)
            }
            Err(error) => self.damage_of(error).map(Chunk::Damaged),
        }
    }

    fn verify_state(
        &self,
        found: &mut Verified,
        descriptor: &Descriptor,
    ) -> Result<(), StoreError> {
        let blobs = self.inner.blobs();
        let Descriptor { name, state, .. } = descriptor;
        let state = read_section(blobs, name, state).and_then(|file| {
            let damaged = StoreError::damaged(blobs, &snapshot_key(name, &state.file));
            unseal(SealedKind::State, &file).map_err(damaged)
        });
        match state {
            Ok(_) => Ok(()),
            Err(error) => self.keep_damage(found, error),
        }
    }

    /// Working set and profile of an image.
    fn verify_extras(
        &self,
        found: &mut Verified,
        descriptor: &Descriptor,
        image: &ImageDescriptor,
        work: &Work,
    ) -> Result<(), StoreError> {
        let blobs = self.inner.blobs();
        for what in [WORKING_SET, PROFILE] {
            let key = descriptor.key_beside(&image.role.ending(what));
            let file = match blobs.get(&key) {
                Ok(file) => file,
                Err(BlobError::NotFound { .. }) => continue,
                Err(error) => {
                    self.keep_damage(found, error.into())?;
                    continue;
                }
            };
            let flaw = match what {
                WORKING_SET => {
                    working_set::flaw_of(&file, descriptor.id, image.pages(), &work.cancelled)?
                }
                _ => unseal(SealedKind::Profile, &file).err(),
            };
            if let Some(flaw) = flaw {
                found.damage.push(Damage { key, place: blobs.describe(), flaw });
            }
        }
        Ok(())
    }

    fn note(&self, found: &mut Verified, name: &str, file: &str, what: &str) {
        let flaw = Flaw::at(0, what);
        let key = snapshot_key(name, file);
        found.damage.push(Damage { key, place: self.inner.blobs().describe(), flaw });
    }

    fn keep_damage(&self, found: &mut Verified, error: StoreError) -> Result<(), StoreError> {
        found.damage.push(self.damage_of(error)?);
        Ok(())
    }

    /// The damage that an error tells of. What says nothing about the bytes stays an error.
    fn damage_of(&self, error: StoreError) -> Result<Damage, StoreError> {
        match error {
            StoreError::Damaged(damage) => Ok(damage),
            StoreError::Newer { key, place, what } => {
                let what = format!("of a newer version of vmfork: {what}");
                Ok(Damage { key, place, flaw: Flaw::at(0, what) })
            }
            StoreError::Blob(BlobError::NotFound { key, place }) => {
                Ok(Damage { key, place, flaw: Flaw::at(0, "it isn't there") })
            }
            // A bad sector, a folder in its place: of this file, not of the store.
            StoreError::Blob(BlobError::Failed {
                key, place, why: Failure::Other, source, ..
            }) => {
                Ok(Damage { key, place, flaw: Flaw::at(0, format!("it can't be read: {source}")) })
            }
            other => Err(other),
        }
    }
}

/// How often a snapshot is verified that is another one at the end than at the beginning. Each is
/// made whole at most once.
const TRIES_MAX: u32 = 3;

/// The snapshots that were looked at. `None`: it can't be read.
type Seen = HashMap<String, Option<Descriptor>>;

/// By hash, with the number of pages and whether it may be elsewhere.
type Chunks = BTreeMap<[u8; 32], (u64, bool)>;

enum Chunk {
    Right(u64),
    Elsewhere,
    Damaged(Damage),
}

/// What the images of a snapshot need of others: which, with the number of pages.
fn expected_bases(descriptor: &Descriptor) -> Vec<(String, Option<(BaseRef, u64)>)> {
    let images = descriptor.images.iter();
    let bases = images.filter_map(|image| Some((image.base.clone()?, image.pages())));
    bases.map(|(base, pages)| (base.name.clone(), Some((base, pages)))).collect()
}

/// A chunk that one snapshot has here must be here, though another one's may be elsewhere.
fn gather(table: &Table, is_elsewhere: bool, chunks: &mut Chunks) {
    for window in table.windows() {
        let chunk = chunks.entry(*window.hash.as_bytes()).or_insert((window.own_pages, true));
        chunk.1 &= is_elsewhere;
    }
}
