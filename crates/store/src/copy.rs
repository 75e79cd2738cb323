//! Snapshots from one store to another: push, and pull in two parts.
//!
//! Pull: [`Store::adopt_from`] copies what is small. Then the snapshot can be started, and its
//! chunks come from the remote store as they are wanted ([`crate::SourceOptions::remote`]).
//! [`Store::fetch_chunks`] copies the rest.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use vmfork_image::PAGE_BYTES;

use crate::blobs::BlobError;
use crate::error::StoreError;
use crate::files::{Sections, read_section};
use crate::format::descriptor::{Descriptor, SnapshotId};
use crate::format::sealed::{SealedKind, unseal};
use crate::format::table::{Table, Window};
use crate::format::{Flaw, working_set};
use crate::names::{ORIGIN, PROFILE, WORKING_SET, chunk_key};
use crate::source::decode_chunk;
use crate::store::Store;
use crate::stored::Stored;
use crate::work::Work;
use crate::writing::{Commit, Writing};

/// What [`Store::copy_to`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copied {
    /// Snapshots that were copied, bases first.
    pub names: Vec<String>,
    /// Those that were there already, by their id, under the name that they have there.
    pub there: Vec<String>,
    /// Chunks that were copied.
    pub chunks: u64,
    /// Chunks that were there already.
    pub chunks_there: u64,
    /// Bytes of files that were copied.
    pub bytes: u64,
}

/// What snapshots that were copied are called in the other store.
#[derive(Debug, Default)]
pub(crate) struct Names(pub(crate) HashMap<SnapshotId, String>);

impl Names {
    /// Call what the images of `descriptor` are deltas on as it is called there. → these names.
    pub(crate) fn rename_bases(&self, descriptor: &mut Descriptor) -> Vec<String> {
        let bases = descriptor.images.iter_mut().filter_map(|image| image.base.as_mut());
        let renamed = bases.map(|base| {
            // One that is not known was not copied; then the commit finds no base.
            if let Some(name) = self.0.get(&base.id) {
                name.clone_into(&mut base.name);
            }
            base.name.clone()
        });
        renamed.collect()
    }
}

/// What is wrong with a file, if anything is.
type FlawOf<'a> = dyn Fn(&[u8]) -> Result<Option<Flaw>, StoreError> + 'a;

impl Store {
    /// The small files of a snapshot, as they were when it was opened. A flatten since then has
    /// removed the tables of that time.
    pub(crate) fn read_sections(
        &self,
        stored: &Stored,
        work: &Work,
    ) -> Result<Sections, StoreError> {
        let (blobs, descriptor) = (self.inner.blobs(), stored.descriptor());
        let extra = |ending: String, flaw_of: &FlawOf<'_>| {
            let key = descriptor.key_beside(&ending);
            match blobs.get(&key) {
                Ok(bytes) => Ok(match flaw_of(&bytes)? {
                    None => Some((ending, bytes)),
                    Some(flaw) => {
                        let error = StoreError::damaged(blobs, &key)(flaw);
                        tracing::warn!(%error, "left out");
                        None
                    }
                }),
                Err(BlobError::NotFound { .. }) => Ok(None),
                Err(error) => Err(StoreError::from(error)),
            }
        };
        let mut extras = Vec::new();
        for image in &descriptor.images {
            let (role, pages) = (&image.role, image.pages());
            extras.extend(extra(role.ending(WORKING_SET), &|file| {
                Ok(working_set::flaw_of(file, descriptor.id, pages, &work.cancelled)?)
            })?);
            extras.extend(extra(role.ending(PROFILE), &|file| {
                Ok(unseal(SealedKind::Profile, file).err())
            })?);
        }
        let state = read_section(blobs, &descriptor.name, &descriptor.state)?;
        // A table has one encoding.
        let tables = stored.tables().iter().map(Table::encode).collect();
        Ok(Sections { tables, state, extras })
    }

    /// The snapshot with this id, whatever its name.
    pub(crate) fn find_by_id(&self, id: SnapshotId) -> Result<Option<Descriptor>, StoreError> {
        let mut references = self.inner.references.lock();
        references.refresh(self.inner.blobs())?;
        Ok(references.descriptors().find(|found| found.id == id).cloned())
    }

    /// A chunk's file, verified.
    pub(crate) fn read_chunk(&self, window: &Window) -> Result<Vec<u8>, StoreError> {
        let blobs = self.inner.blobs();
        let file = blobs.get(&chunk_key(&window.hash))?;
        if !blobs.verifies_chunks() {
            decode_chunk(blobs, &file, &window.hash, Some(window.own_pages))?;
        }
        Ok(file)
    }

    /// Copy snapshot `name` and all that it is a delta on to `other`: bases first, and only what
    /// `other` lacks. What was learnt about a snapshot that is there already is copied if nothing
    /// was learnt there.
    ///
    /// # Errors
    /// No such snapshot; damage; chunks that are not here themselves; a name that is taken in
    /// `other`; [`StoreError::Cancelled`]. Snapshots that were copied before that are in `other`,
    /// whole.
    pub fn copy_to(&self, name: &str, other: &Store, work: &Work) -> Result<Copied, StoreError> {
        let family = self.open_family(name)?;
        family.iter().try_for_each(|stored| stored.check_is_here())?;
        let mut copied = Copied::default();
        let mut names = Names::default();
        for stored in &family {
            let descriptor = stored.descriptor();
            let sections = self.read_sections(stored, work)?;
            let name = match other.find_by_id(descriptor.id)? {
                Some(there) => {
                    copied.bytes += other.add_extras(&there, &sections)?;
                    copied.there.push(there.name.clone());
                    there.name
                }
                None => {
                    self.copy_one(stored, &sections, &names, other, work, &mut copied)?;
                    copied.names.push(descriptor.name.clone());
                    descriptor.name.clone()
                }
            };
            names.0.insert(descriptor.id, name);
        }
        Ok(copied)
    }

    /// What was learnt elsewhere about a snapshot that is here, as far as nothing was learnt here:
    /// that may be from more runs. Returns the bytes.
    fn add_extras(&self, here: &Descriptor, sections: &Sections) -> Result<u64, StoreError> {
        let (_reserved, here) = self.reserve(&here.name, here.id)?;
        let blobs = self.inner.blobs();
        let mut added = 0;
        for (ending, bytes) in &sections.extras {
            let key = here.key_beside(ending);
            if blobs.size(&key)?.is_none() {
                blobs.put_for_good(&key, bytes)?;
                added += bytes.len() as u64;
            }
        }
        Ok(added)
    }

    fn copy_one(
        &self,
        stored: &Stored,
        sections: &Sections,
        names: &Names,
        other: &Store,
        work: &Work,
        copied: &mut Copied,
    ) -> Result<(), StoreError> {
        let mut descriptor = stored.descriptor().clone();
        let bases = names.rename_bases(&mut descriptor);
        let writing = Writing::begin(&other.inner, &descriptor.name, Commit::New, bases)?;
        let windows = each_chunk_once(stored);
        work.expect(windows.iter().map(|window| window.own_pages * PAGE_BYTES).sum());
        let sizes = work.for_each_on(
            self.inner.threads(work).max(other.inner.threads(work)),
            &windows,
            || Ok(()),
            |(), window| {
                let mut sent = None;
                writing.keep_chunk(&window.hash, || {
                    let file = self.read_chunk(window)?;
                    sent = Some(file.len() as u64);
                    Ok(file)
                })?;
                work.done(window.own_pages * PAGE_BYTES);
                Ok(sent)
            },
        )?;
        for sent in sizes {
            copied.chunks += u64::from(sent.is_some());
            copied.chunks_there += u64::from(sent.is_none());
            copied.bytes += sent.unwrap_or(0);
        }
        copied.bytes += writing.put_sections(&mut descriptor, sections)?;
        work.check()?;
        writing.commit(&descriptor)
    }

    /// Let snapshot `name` of `remote`, and all that it is a delta on, be here too, with all but
    /// their chunks. `origin` says where `remote` is, in the caller's words; [`Stored::origin`]
    /// gives it back. What is here already, by its id, stays as it is.
    ///
    /// # Errors
    /// No such snapshot there, or one that isn't all there; damage; a name that is taken here by
    /// another; [`StoreError::Cancelled`].
    pub fn adopt_from(
        &self,
        name: &str,
        remote: &Store,
        origin: &str,
        work: &Work,
    ) -> Result<Arc<Stored>, StoreError> {
        let family = remote.open_family(name)?;
        family.iter().try_for_each(|stored| stored.check_is_here())?;
        let mut names = Names::default();
        let mut top = name.to_owned();
        for stored in &family {
            let mut descriptor = stored.descriptor().clone();
            let here = match self.find_by_id(descriptor.id)? {
                Some(here) => here.name,
                None => {
                    let sections = remote.read_sections(stored, work)?;
                    let bases = names.rename_bases(&mut descriptor);
                    let name = descriptor.name.clone();
                    let writing = Writing::begin(&self.inner, &name, Commit::New, bases)?;
                    writing.put_sections(&mut descriptor, &sections)?;
                    writing.put_section(descriptor.id, ORIGIN, origin.as_bytes())?;
                    work.check()?;
                    writing.commit(&descriptor)?;
                    work.has_stored(&name);
                    name
                }
            };
            top.clone_from(&here);
            names.0.insert(descriptor.id, here);
        }
        self.open(&top)
    }
}

/// Windows with different chunks.
pub(crate) fn each_chunk_once(stored: &Stored) -> Vec<Window> {
    let mut seen = HashSet::new();
    let windows = stored.tables().iter().flat_map(Table::windows).copied();
    windows.filter(|window| seen.insert(window.hash)).collect()
}
