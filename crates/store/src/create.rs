//! Writing a new snapshot.

use std::collections::HashMap;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use blake3::Hash;
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};

use crate::error::StoreError;
use crate::format::chunk::ChunkEncoder;
use crate::format::descriptor::{
    BaseRef, Descriptor, IMAGES_MAX, ImageDescriptor, SCHEMA, SnapshotId, size_flaw,
};
use crate::format::role::Role;
use crate::format::sealed::{SealedKind, seal};
use crate::format::table::{Extent, Table, chunk_pages_flaw, own_runs, own_windows};
use crate::format::{Compression, PAGE_LEN};
use crate::names::{STATE, TABLE};
use crate::store::{CHAIN_MAX, Store, base_error, check_base};
use crate::work::Work;
use crate::writing::{Commit, Writing};

/// What a snapshot is to become.
#[derive(Debug, Clone)]
pub struct Draft {
    pub name: String,
    /// `None`: a random one.
    pub id: Option<SnapshotId>,
    /// At least one, none of a role twice.
    pub images: Vec<ImageDraft>,
    /// Device state; means nothing here. Empty for a snapshot without memory.
    pub state: Vec<u8>,
    /// What the VM was, in the caller's words.
    pub vm: serde_json::Value,
}

/// What one of its images is to become.
#[derive(Debug, Clone)]
pub struct ImageDraft {
    pub role: Role,
    /// Size: of memory whole pages, of a disk a multiple of 512.
    pub bytes: u64,
    /// What it is a delta on; must be in the same store and have as many pages.
    pub base: Option<BaseRef>,
    /// What differs from the base, or from zeros: ascending, without overlap.
    pub extents: Vec<(PageRange, Extent)>,
    pub compression: Compression,
    /// Pages of a window: a power of two, 1 to 512.
    pub chunk_pages: u64,
    /// Store own pages that are all zero as if they weren't.
    pub keep_zero_pages: bool,
}

impl ImageDraft {
    fn pages(&self) -> u64 {
        self.bytes.div_ceil(PAGE_BYTES)
    }
}

/// Reads pages of an image. Called by several threads at a time.
pub type ReadPages<'a> = dyn Fn(PageRange, &mut [u8]) -> io::Result<()> + Sync + 'a;

/// Reads own pages of that image of the new snapshot. Called by several threads at a time.
pub type ReadImages<'a> = dyn Fn(&Role, PageRange, &mut [u8]) -> io::Result<()> + Sync + 'a;

/// Gathers extents: ascending, none empty, none touching another of its kind.
#[derive(Debug, Default)]
pub(crate) struct Extents(Vec<(PageRange, Extent)>);

impl Extents {
    pub(crate) fn push(&mut self, range: PageRange, kind: Extent) {
        match self.0.last_mut() {
            _ if range.is_empty() => {}
            Some((last, of)) if *of == kind && last.end() == range.start() => {
                *last = PageRange::between(last.start(), range.end());
            }
            _ => self.0.push((range, kind)),
        }
    }

    pub(crate) fn into_inner(self) -> Vec<(PageRange, Extent)> {
        self.0
    }
}

/// The draft's extents as a table may have them.
fn check_extents(draft: &ImageDraft) -> Result<Vec<(PageRange, Extent)>, StoreError> {
    let mut extents = Extents::default();
    let mut end = PageIdx(0);
    for (range, kind) in &draft.extents {
        if range.start() < end || range.end().0 > draft.pages() {
            let why = format!("extent {range} after page {end}, of {} pages", draft.pages());
            return Err(StoreError::BadDraft { why });
        }
        end = range.end();
        // Without a base, what is in no extent is zero as well.
        if *kind == Extent::Own || draft.base.is_some() {
            extents.push(*range, *kind);
        }
    }
    Ok(extents.into_inner())
}

/// `extents` with the own pages in `zeros` made zero. `zeros` ascend, and lie within own extents.
fn with_zeros(
    extents: &[(PageRange, Extent)],
    zeros: &[PageRange],
    has_base: bool,
) -> Vec<(PageRange, Extent)> {
    let mut out = Extents::default();
    let mut zeros = zeros.iter().peekable();
    for (range, kind) in extents {
        let mut at = range.start();
        while *kind == Extent::Own
            && let Some(zero) = zeros.next_if(|zero| zero.start() < range.end())
        {
            out.push(PageRange::between(at, zero.start()), Extent::Own);
            if has_base {
                out.push(*zero, Extent::Zero);
            }
            at = zero.end();
        }
        out.push(PageRange::between(at, range.end()), *kind);
    }
    out.into_inner()
}

fn is_zero(page: &[u8]) -> bool {
    page == [0; PAGE_LEN]
}

/// Reads windows, leaves out what is zero, makes chunks.
pub(crate) struct WindowWriter<'a> {
    pub(crate) writing: &'a Writing<'a>,
    pub(crate) encoder: ChunkEncoder,
    /// Of one window, kept from one to the next.
    pub(crate) raw: Vec<u8>,
}

impl WindowWriter<'_> {
    /// Store the pages of `runs`, which are the own pages of a window. The hash of its chunk, if it
    /// needs one, and the pages that turned out zero.
    pub(crate) fn write(
        &mut self,
        runs: &[PageRange],
        read: &ReadPages<'_>,
        keep_zero_pages: bool,
    ) -> Result<(Option<Hash>, Vec<PageRange>), StoreError> {
        let mut zeros = Extents::default();
        let mut filled = 0;
        for run in runs {
            let bytes = as_usize(run.byte_len());
            self.raw.resize(self.raw.len().max(filled + bytes), 0);
            let into = &mut self.raw[filled..filled + bytes];
            read(*run, into).map_err(|source| StoreError::ReadPages { range: *run, source })?;
            if keep_zero_pages {
                filled += bytes;
                continue;
            }
            let mut from = filled;
            for page in run.pages() {
                if is_zero(&self.raw[from..from + PAGE_LEN]) {
                    zeros.push(page.range(), Extent::Zero);
                } else {
                    if from != filled {
                        self.raw.copy_within(from..from + PAGE_LEN, filled);
                    }
                    filled += PAGE_LEN;
                }
                from += PAGE_LEN;
            }
        }
        let zeros = zeros.into_inner().into_iter().map(|(range, _)| range).collect();
        if filled == 0 {
            return Ok((None, zeros));
        }
        let raw = &self.raw[..filled];
        let hash = blake3::hash(raw);
        self.writing.keep_chunk(&hash, || Ok(self.encoder.encode(raw)))?;
        Ok((Some(hash), zeros))
    }
}

fn as_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a window at most")
}

pub(crate) fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// An image of the draft, checked.
struct Checked {
    draft: ImageDraft,
    /// As a table may have them.
    extents: Vec<(PageRange, Extent)>,
    /// Windows that have own pages, with how many.
    windows: Vec<(u64, u64)>,
}

impl Checked {
    fn new(mut draft: ImageDraft) -> Result<Self, StoreError> {
        let bad = |why: String| {
            Err(StoreError::BadDraft { why: format!("its image `{}`: {why}", draft.role) })
        };
        if let Some(why) = size_flaw(&draft.role, draft.bytes) {
            return bad(why);
        }
        if let Some(why) = chunk_pages_flaw(draft.chunk_pages) {
            return bad(why);
        }
        if let Compression::Zstd { level } = draft.compression
            && !zstd::compression_level_range().contains(&level)
        {
            return bad(format!("zstd has no level {level}"));
        }
        if let Some(base) = draft.base.as_ref().filter(|it| !draft.role.is_of_the_kind_of(&it.role))
        {
            return bad(format!("a delta on an image of role `{}`", base.role));
        }
        let extents = check_extents(&draft)?;
        draft.extents = Vec::new();
        let windows = own_windows(&extents, draft.chunk_pages).collect();
        Ok(Self { draft, extents, windows })
    }

    fn own_bytes(&self) -> u64 {
        self.windows.iter().map(|(_, pages)| pages * PAGE_BYTES).sum()
    }

    /// Put its chunks and its table there.
    fn write(
        self,
        store: &Store,
        id: SnapshotId,
        writing: &Writing<'_>,
        read: &ReadImages<'_>,
        work: &Work,
    ) -> Result<ImageDescriptor, StoreError> {
        let Self { draft, extents, windows } = self;
        let pages = draft.pages();
        let ImageDraft { role, bytes, base, compression, chunk_pages, .. } = draft;
        let read = |range: PageRange, bytes: &mut [u8]| read(&role, range, bytes);
        let begin = || {
            let encoder = ChunkEncoder::new(compression).map_err(StoreError::io("set up zstd"))?;
            Ok(WindowWriter { writing, encoder, raw: Vec::new() })
        };
        let written = work.for_each_on(
            store.inner.threads(work),
            &windows,
            begin,
            |writer, (index, own_pages)| {
                let start = PageIdx(index * chunk_pages);
                let end = PageIdx((start.0 + chunk_pages).min(pages));
                let runs: Vec<_> = own_runs(&extents, PageRange::between(start, end)).collect();
                let done = writer.write(&runs, &read, draft.keep_zero_pages)?;
                work.done(own_pages * PAGE_BYTES);
                Ok(done)
            },
        )?;
        let (mut chunks, mut zeros) = (Vec::new(), Vec::new());
        for (hash, zero) in written {
            chunks.extend(hash);
            zeros.extend(zero);
        }
        let extents = with_zeros(&extents, &zeros, base.is_some());
        let table = table_of(writing, pages, chunk_pages, extents, chunks)?;
        let file = writing.put_section(id, &role.ending(TABLE), &table.encode())?;
        Ok(ImageDescriptor {
            bytes,
            page_bytes: PAGE_BYTES,
            chunk_pages,
            compression,
            counts: writing.take_counts(&table, base.is_some()),
            base,
            table: file,
            role,
        })
    }
}

/// The draft's images, in the order in which a descriptor has them.
fn check_draft(images: Vec<ImageDraft>, state: &[u8]) -> Result<Vec<Checked>, StoreError> {
    let bad = |why: String| Err(StoreError::BadDraft { why });
    if images.is_empty() || images.len() > IMAGES_MAX {
        return bad(format!("{} images, not 1 to {IMAGES_MAX}", images.len()));
    }
    let (bytes, most) = (state.len() as u64, SealedKind::State.raw_bytes_max());
    if bytes > most {
        return bad(format!("device state of {bytes} bytes, above {most}"));
    }
    let mut checked = images.into_iter().map(Checked::new).collect::<Result<Vec<_>, _>>()?;
    checked.sort_by(|one, other| one.draft.role.cmp(&other.draft.role));
    let twice = checked.windows(2).find(|pair| pair[0].draft.role == pair[1].draft.role);
    match twice {
        Some(pair) => bad(format!("two images of role `{}`", pair[0].draft.role)),
        None => Ok(checked),
    }
}

impl Store {
    /// Write a new snapshot. `read` gives the bytes of own pages; what of them is all zero is
    /// stored as zero, unless the draft says otherwise. Until this returns, the snapshot isn't
    /// there.
    ///
    /// # Errors
    /// A name that is taken or a draft that is no snapshot, before any work. A base that isn't
    /// there; pages that can't be read; a store that can't be written; [`StoreError::Cancelled`].
    /// Chunks that no snapshot names may be left, for [`Store::collect`].
    pub fn create(
        &self,
        draft: Draft,
        read: &ReadImages<'_>,
        work: &Work,
    ) -> Result<Descriptor, StoreError> {
        let Draft { name, id, images, state, vm } = draft;
        let checked = check_draft(images, &state)?;
        let bases = checked.iter().filter_map(|it| it.draft.base.as_ref());
        let bases = bases.map(|base| base.name.clone()).collect();
        let writing = Writing::begin(&self.inner, &name, Commit::New, bases)?;
        self.check_family(&name, &checked)?;
        let id = match id {
            Some(id) => id,
            None => SnapshotId::random().map_err(StoreError::io("get a random id"))?,
        };
        work.expect(checked.iter().map(Checked::own_bytes).sum());
        let mut images = Vec::new();
        for image in checked {
            images.push(image.write(self, id, &writing, read, work)?);
        }
        let descriptor = Descriptor {
            schema: SCHEMA.into(),
            id,
            name,
            created_unix_ms: now_unix_ms(),
            images,
            state: writing.put_section(id, STATE, &seal(SealedKind::State, &state))?,
            vm,
        };
        work.check()?;
        writing.commit(&descriptor)?;
        work.has_stored(&descriptor.name);
        Ok(descriptor)
    }

    /// That what the images are deltas on is there, with all that it is a delta on, and not too
    /// many snapshots of it.
    fn check_family(&self, name: &str, images: &[Checked]) -> Result<(), StoreError> {
        let mut family = HashMap::<String, Descriptor>::new();
        let bases = images.iter().filter_map(|image| {
            Some((name.to_owned(), image.draft.base.clone()?, image.draft.pages()))
        });
        let mut left: Vec<_> = bases.collect();
        while let Some((of, base, pages)) = left.pop() {
            let known = family.get(&base.name).cloned();
            let is_new = known.is_none();
            let found = match known.map_or_else(|| self.descriptor(&base.name), Ok) {
                Ok(found) => found,
                Err(StoreError::NotFound { .. }) => {
                    return Err(base_error(&of, &base, "not there".into()));
                }
                Err(error) => return Err(error),
            };
            check_base(&base, &found, pages).map_err(|why| base_error(&of, &base, why))?;
            if !is_new {
                continue;
            }
            left.extend(found.images.iter().filter_map(|image| {
                Some((found.name.clone(), image.base.clone()?, image.pages()))
            }));
            family.insert(base.name, found);
            if family.len() >= CHAIN_MAX {
                return Err(StoreError::DeepChain { name: name.to_owned(), most: CHAIN_MAX });
            }
        }
        Ok(())
    }
}

/// The table of what `writing` has kept: `chunks` in the order of the windows.
pub(crate) fn table_of(
    writing: &Writing<'_>,
    pages: u64,
    chunk_pages: u64,
    extents: Vec<(PageRange, Extent)>,
    chunks: Vec<Hash>,
) -> Result<Table, StoreError> {
    let mut chunks = chunks.into_iter();
    Table::new(pages, chunk_pages, extents, |_| {
        let hash = chunks.next()?;
        Some((hash, writing.chunk_bytes(&hash)?))
    })
    .map_err(|why| StoreError::BadDraft { why })
}
