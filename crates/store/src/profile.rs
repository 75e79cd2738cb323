//! What is learnt about a snapshot after it was written: its working set, and a profile.

use std::collections::BTreeMap;
use std::io;

use vmfork_image::{PageIdx, PageRange};

use crate::blobs::BlobError;
use crate::create::ReadPages;
use crate::error::StoreError;
use crate::files::read_descriptor;
use crate::format::descriptor::{Descriptor, ImageDescriptor, SnapshotId};
use crate::format::role::Role;
use crate::format::sealed::{SealedKind, seal, unseal};
use crate::format::working_set::{
    FRAME_BYTES, Frames, ReadError, WORKING_SET_BYTES_MAX, encode, pack_frame,
};
use crate::names::{PROFILE, WORKING_SET};
use crate::store::{Store, check_name};
use crate::stored::StoredImage;
use crate::work::Work;
use crate::writing::Reserved;

/// Written once, read at each start: worth no more than what keeps up with memory.
const LEVEL: i32 = 1;

/// A stored working set, opened: its runs are known, its pages are read by
/// [`WorkingSetReader::for_each`].
#[derive(Debug)]
pub struct WorkingSetReader {
    frames: Frames<'static>,
    key: String,
    store: Store,
}

impl WorkingSetReader {
    /// Of which snapshot.
    pub fn id(&self) -> SnapshotId {
        self.frames.header().id
    }

    /// The pages that it has, in the order in which they come.
    pub fn runs(&self) -> &[PageRange] {
        &self.frames.header().runs
    }

    pub fn pages(&self) -> u64 {
        self.runs().iter().map(PageRange::len).sum()
    }

    /// Hand all pages to `each`, while they are read: one sequential read, decompressed on several
    /// threads, each of which calls `each` with what it has. Pages come about in order.
    ///
    /// # Errors
    /// It is damaged, can't be read, or `each` has failed; pages that had come before may have been
    /// handed over.
    pub fn for_each(
        self,
        each: &(dyn Fn(PageRange, &[u8]) -> io::Result<()> + Sync),
        work: &Work,
    ) -> Result<(), StoreError> {
        work.expect(self.pages() * vmfork_image::PAGE_BYTES);
        let turns = vec![(); self.frames.len()];
        work.for_each(
            &turns,
            || Ok(()),
            |(), ()| {
                let raw_bytes = self.frames.next(each).map_err(|error| self.error(error))?;
                work.done(raw_bytes);
                Ok(())
            },
        )?;
        Ok(())
    }

    fn error(&self, error: ReadError) -> StoreError {
        error_of(&self.store, &self.key, error)
    }
}

fn error_of(store: &Store, key: &str, error: ReadError) -> StoreError {
    match error {
        ReadError::Flaw(flaw) => StoreError::damaged(store.inner.blobs(), key)(flaw),
        ReadError::Io(error) => {
            BlobError::io("read", key, &store.inner.blobs().describe())(error).into()
        }
        ReadError::Each(error) => StoreError::io("put pages of the working set in place")(error),
    }
}

/// In the same order, each page once, in runs as long as that lets them be.
fn normal(runs: &[PageRange]) -> Vec<PageRange> {
    // What has come already: starts, with ends. None overlaps another.
    let mut seen: BTreeMap<PageIdx, PageIdx> = BTreeMap::new();
    let mut out: Vec<PageRange> = Vec::with_capacity(runs.len());
    for run in runs {
        let mut rest = *run;
        while !rest.is_empty() {
            let before = seen.range(..=rest.start()).next_back().map(|(_, end)| *end);
            if let Some(end) = before.filter(|end| *end > rest.start()) {
                rest = rest.from_page(end);
                continue;
            }
            let next = seen.range(rest.start()..).next().map_or(rest.end(), |(start, _)| *start);
            let fresh = rest.until_page(next);
            rest = rest.from_page(fresh.end());
            seen.insert(fresh.start(), fresh.end());
            match out.last_mut() {
                Some(last) if last.end() == fresh.start() => {
                    *last = PageRange::between(last.start(), fresh.end());
                }
                _ => out.push(fresh),
            }
        }
    }
    out
}

/// Cut into what fills a frame, each frame a list of pieces.
fn frames_of(runs: &[PageRange]) -> Vec<Vec<PageRange>> {
    let frame_pages = FRAME_BYTES / vmfork_image::PAGE_BYTES;
    let (mut frames, mut room): (Vec<Vec<PageRange>>, u64) = (Vec::new(), 0);
    for run in runs {
        let mut rest = *run;
        while !rest.is_empty() {
            if room == 0 {
                frames.push(Vec::new());
                room = frame_pages;
            }
            let piece = rest.truncate(room);
            room -= piece.len();
            rest = rest.from_page(piece.end());
            frames.last_mut().expect("one was pushed").push(piece);
        }
    }
    frames
}

impl Store {
    /// Store the pages of `runs`, in this order, as the working set of `image`, in place of what
    /// there was. `read` gives the bytes of any page, of any owner.
    ///
    /// # Errors
    /// The snapshot has been removed or is being written; pages beyond its end, that can't be read,
    /// or too many.
    pub fn put_working_set(
        &self,
        image: &StoredImage,
        runs: &[PageRange],
        read: &ReadPages<'_>,
        work: &Work,
    ) -> Result<(), StoreError> {
        let descriptor = image.stored().descriptor();
        let (role, pages) = (&image.image().role, image.image().pages());
        let runs = normal(runs);
        if let Some(run) = runs.iter().find(|run| run.end() > PageIdx(pages)) {
            let why = format!("its working set has pages {run}, of {pages}");
            return Err(StoreError::BadDraft { why });
        }
        let raw_bytes: u64 = runs.iter().map(PageRange::byte_len).sum();
        if raw_bytes > WORKING_SET_BYTES_MAX {
            let why =
                format!("its working set has {raw_bytes} bytes, above {WORKING_SET_BYTES_MAX}");
            return Err(StoreError::BadDraft { why });
        }
        let (_reserved, descriptor) = self.reserve(&descriptor.name, descriptor.id)?;
        work.expect(raw_bytes);
        let begin = || {
            let zstd = zstd::bulk::Compressor::new(LEVEL).map_err(StoreError::io("set up zstd"))?;
            Ok((zstd, Vec::new()))
        };
        let frames = work.for_each(&frames_of(&runs), begin, |(zstd, raw), pieces| {
            raw.clear();
            for piece in pieces {
                let from = raw.len();
                // A frame at most.
                raw.resize(from + usize::try_from(piece.byte_len()).unwrap_or(0), 0);
                read(*piece, &mut raw[from..])
                    .map_err(|source| StoreError::ReadPages { range: *piece, source })?;
            }
            work.done(raw.len() as u64);
            Ok(pack_frame(raw, Some(zstd)))
        })?;
        let file = encode(descriptor.id, &runs, &frames);
        drop(frames);
        if file.len() as u64 > crate::bounds::BLOB_BYTES_MAX {
            let why = format!("its working set would have {} bytes", file.len());
            return Err(StoreError::BadDraft { why });
        }
        self.inner
            .blobs()
            .put_for_good(&descriptor.key_beside(&role.ending(WORKING_SET)), &file)?;
        Ok(())
    }

    /// Bytes of the stored working set of that image of snapshot `name`, compressed; 0 if it has
    /// none.
    ///
    /// # Errors
    /// No such snapshot or image; the store can't be reached.
    pub fn working_set_bytes(&self, name: &str, role: &Role) -> Result<u64, StoreError> {
        let (descriptor, _) = self.descriptor_with(name, role)?;
        let key = descriptor.key_beside(&role.ending(WORKING_SET));
        Ok(self.inner.blobs().size(&key)?.unwrap_or(0))
    }

    /// The working set of that image of snapshot `name`, if it has one.
    ///
    /// # Errors
    /// No such snapshot or image; the working set is damaged or another snapshot's.
    pub fn working_set(
        &self,
        name: &str,
        role: &Role,
    ) -> Result<Option<WorkingSetReader>, StoreError> {
        let (descriptor, pages) = self.descriptor_with(name, role)?;
        let key = descriptor.key_beside(&role.ending(WORKING_SET));
        let from = match self.inner.blobs().reader(&key) {
            Ok(from) => from,
            Err(BlobError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let frames = Frames::open(from).map_err(|error| error_of(self, &key, error))?;
        if let Some(flaw) = frames.header().flaw_for(descriptor.id, pages) {
            return Err(StoreError::damaged(self.inner.blobs(), &key)(flaw));
        }
        Ok(Some(WorkingSetReader { frames, key, store: self.clone() }))
    }

    /// A snapshot's descriptor, and how many pages its image of that role has.
    fn descriptor_with(&self, name: &str, role: &Role) -> Result<(Descriptor, u64), StoreError> {
        let descriptor = self.descriptor(name)?;
        match descriptor.image(role).map(ImageDescriptor::pages) {
            Some(pages) => Ok((descriptor, pages)),
            None => Err(StoreError::NoImage { name: name.to_owned(), role: role.clone() }),
        }
    }

    /// The profile of that image of snapshot `name`, as it was put, if it has one.
    ///
    /// # Errors
    /// No such snapshot or image; the profile is damaged.
    pub fn profile(&self, name: &str, role: &Role) -> Result<Option<Vec<u8>>, StoreError> {
        let (descriptor, _) = self.descriptor_with(name, role)?;
        let key = descriptor.key_beside(&role.ending(PROFILE));
        match self.inner.blobs().get(&key) {
            Ok(file) => unseal(SealedKind::Profile, &file)
                .map(Some)
                .map_err(StoreError::damaged(self.inner.blobs(), &key)),
            Err(BlobError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Store the profile of that image of snapshot `name`, in place of what there was.
    ///
    /// # Errors
    /// No such snapshot or image; a profile that is too large.
    pub fn put_profile(&self, name: &str, role: &Role, profile: &[u8]) -> Result<(), StoreError> {
        if profile.len() as u64 > SealedKind::Profile.raw_bytes_max() {
            let why = format!("a profile of {} bytes", profile.len());
            return Err(StoreError::BadDraft { why });
        }
        let file = seal(SealedKind::Profile, profile);
        // So that the snapshot isn't removed in between.
        let _catalogue = self.inner.catalogue.lock();
        let (descriptor, _) = self.descriptor_with(name, role)?;
        let key = descriptor.key_beside(&role.ending(PROFILE));
        Ok(self.inner.blobs().put_for_good(&key, &file)?)
    }

    /// Forget what was learnt about snapshot `name`: working sets and profiles of its images.
    ///
    /// # Errors
    /// No such snapshot.
    pub fn remove_profile(&self, name: &str) -> Result<(), StoreError> {
        check_name(name)?;
        let _catalogue = self.inner.catalogue.lock();
        let descriptor = read_descriptor(self.inner.blobs(), name)?;
        for image in &descriptor.images {
            for kind in [WORKING_SET, PROFILE] {
                self.inner.blobs().delete(&descriptor.key_beside(&image.role.ending(kind)))?;
            }
        }
        Ok(())
    }

    /// See to it that `name`, which must still be the snapshot `id`, stays as it is.
    pub(crate) fn reserve(
        &self,
        name: &str,
        id: SnapshotId,
    ) -> Result<(Reserved<'_>, Descriptor), StoreError> {
        // Or it could be removed in between.
        let _catalogue = self.inner.catalogue.lock();
        match read_descriptor(self.inner.blobs(), name) {
            Ok(found) if found.id == id => {
                Ok((Reserved::new(&self.inner, name, Vec::new())?, found))
            }
            Ok(_) => Err(self.not_found(name)),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range((start, len): (u64, u64)) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn what_comes_first_stays_first() {
        let runs = [(40, 2), (7, 9), (10, 20), (42, 1), (0, 0), (5, 40)].map(range);
        let expected = [(40, 2), (7, 23), (42, 1), (5, 2), (30, 10), (43, 2)].map(range);
        assert_eq!(normal(&runs), expected);
    }

    proptest! {
        #[test]
        fn each_page_comes_once_and_in_order(runs in prop::collection::vec((0u64..60, 0u64..9), 0..20)) {
            let runs: Vec<_> = runs.into_iter().map(range).collect();
            let mut expected = Vec::new();
            for page in runs.iter().flat_map(PageRange::pages) {
                if !expected.contains(&page) {
                    expected.push(page);
                }
            }
            let made = normal(&runs);
            prop_assert_eq!(made.iter().flat_map(PageRange::pages).collect::<Vec<_>>(), expected);
            prop_assert!(made.windows(2).all(|pair| pair[0].end() != pair[1].start()));
            prop_assert!(made.iter().all(|run| !run.is_empty()));
        }
    }
}
