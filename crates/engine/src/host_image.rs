//! What this host knows of one image: its cache, its page table, and where its own pages still are.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use vmfork_image::{
    AheadRead, BLOCK_PAGES, BlockIdx, ImageId, Origin, PageIdx, PageRange, PageSource, PageTable,
    Source, TableError,
};

use crate::backing::{Backing, Memfd};
use crate::cache::Cache;
use crate::counters::ImageCounters;
use crate::handover;
use crate::homes::Homes;
use crate::incoming::Incoming;
use crate::originals::Originals;

/// Images by id.
pub(crate) type Ancestors = BTreeMap<ImageId, Arc<HostImage>>;

/// A page could be had from nowhere.
#[derive(Debug, Clone, thiserror::Error)]
#[error("page {page} of image {image}: {reason}")]
pub struct PageLost {
    pub page: PageIdx,
    pub image: ImageId,
    /// What was tried, and what it answered.
    pub reason: String,
}

/// Where pages of an image came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Brought {
    /// The farthest place that was used.
    pub(crate) origin: Origin,
    /// How many pages came from there. The others were in the image's cache.
    pub(crate) pages: u64,
}

/// A run of pages by which a stored image differs from its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredRun {
    /// Their bytes are in the store.
    Own(PageRange),
    Zero(PageRange),
}

/// An image that was not frozen here can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("its base, image {base}, has no complete table of {pages} pages")]
    Base { base: ImageId, pages: u64 },
    #[error("it names image {image}, of which this host knows none of {pages} pages")]
    Relative { image: ImageId, pages: u64 },
    #[error("it says of {found} blocks which image serves them, and has {blocks}")]
    Homes { found: u64, blocks: u64 },
    #[error("its page table")]
    Table(#[from] TableError),
    #[error("a cache for it")]
    Cache(#[source] io::Error),
}

/// An image on this host. Shared by its engine (which fills it), its views, and the images derived
/// from it.
#[derive(Debug)]
pub struct HostImage {
    id: ImageId,
    pages: u64,
    cache: Cache,
    frozen: Mutex<Option<Arc<dyn Originals>>>,
    /// Of an image that was not frozen here but stored.
    stored: Option<Arc<dyn PageSource>>,
    sealed: OnceLock<(PageTable, Homes)>,
    /// The images that the table or the homes name, without this one; while another image may
    /// derive from it.
    ancestors: Mutex<Ancestors>,
    /// Of every engine that ever served this image or one that descends from it.
    needed_by: Mutex<Vec<Weak<Reach>>>,
    /// Of what it is read from, by whichever engine.
    pub(crate) incoming: Incoming,
    pub(crate) counters: ImageCounters,
}

/// What a live engine may still read, of its own image and of others.
#[derive(Debug)]
pub(crate) struct Reach {
    pub(crate) image: Arc<HostImage>,
    /// Of the image that its VM began from.
    pub(crate) base_table: PageTable,
    pub(crate) base_homes: Homes,
}

impl Reach {
    /// What its views may read of the cache and the originals of an image: by the engine's own
    /// table or, while that is being derived, by the one that it is derived from.
    pub(crate) fn needed_of(&self, image: ImageId) -> Vec<PageRange> {
        let (table, homes) = match self.image.sealed.get() {
            Some((table, homes)) => (table, homes),
            None => (&self.base_table, &self.base_homes),
        };
        table.pages_of(image).chain(homes.blocks_of(image)).collect()
    }
}

impl HostImage {
    /// An image of which nothing is known yet.
    ///
    /// # Errors
    /// No memory or no fds left.
    pub(crate) fn new(id: ImageId, pages: u64) -> io::Result<Self> {
        Self::with_source(id, pages, None)
    }

    pub(crate) fn with_source(
        id: ImageId,
        pages: u64,
        stored: Option<Arc<dyn PageSource>>,
    ) -> io::Result<Self> {
        let backing = Memfd::new(&format!("vmfork-{id}"), pages)?;
        Self::on(Box::new(backing), id, pages, stored)
    }

    fn on(
        backing: Box<dyn Backing>,
        id: ImageId,
        pages: u64,
        stored: Option<Arc<dyn PageSource>>,
    ) -> io::Result<Self> {
        Ok(Self {
            id,
            pages,
            cache: Cache::new(backing, pages)?,
            frozen: Mutex::new(None),
            stored,
            sealed: OnceLock::new(),
            ancestors: Mutex::default(),
            needed_by: Mutex::default(),
            incoming: Incoming::default(),
            counters: ImageCounters::default(),
        })
    }

    /// An image whose own pages are in `source`: `own` and `zero` are the runs by which it differs
    /// from `base`, or from zeros without one. Its cache is in memory. An engine brings it to
    /// readers (`Engine::serve`).
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn stored(
        id: ImageId,
        pages: u64,
        runs: impl IntoIterator<Item = StoredRun>,
        base: Option<&Arc<Self>>,
        source: Arc<dyn PageSource>,
    ) -> Result<Arc<Self>, OpenError> {
        let memfd = Memfd::new(&format!("vmfork-{id}"), pages).map_err(OpenError::Cache)?;
        Self::stored_on(Box::new(memfd), id, pages, runs, base, source)
    }

    /// As [`HostImage::stored`], with its cache in `backing`, which is one hole.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn stored_on(
        backing: Box<dyn Backing>,
        id: ImageId,
        pages: u64,
        runs: impl IntoIterator<Item = StoredRun>,
        base: Option<&Arc<Self>>,
        source: Arc<dyn PageSource>,
    ) -> Result<Arc<Self>, OpenError> {
        let (base_table, mut homes, mut ancestors) = match base {
            None => {
                let zeros = PageTable::uniform(pages, Source::Zero);
                (zeros, Homes::none(pages), Ancestors::new())
            }
            Some(base) => {
                let sealed = base.sealed.get().filter(|(table, _)| table.pages() == pages);
                let (table, homes) = sealed.ok_or(OpenError::Base { base: base.id, pages })?;
                let mut ancestors = base.ancestors();
                ancestors.insert(base.id, Arc::clone(base));
                (table.clone(), homes.clone(), ancestors)
            }
        };
        let changes = runs.into_iter().map(|run| match run {
            StoredRun::Own(range) => (range, Source::Image(id)),
            StoredRun::Zero(range) => (range, Source::Zero),
        });
        let table = base_table.derive(changes)?;
        for block in (0..pages.div_ceil(BLOCK_PAGES)).map(BlockIdx) {
            if !table.same_block(&base_table, block) {
                homes.set(block, id);
            }
        }
        let image = Self::on(backing, id, pages, Some(source)).map_err(OpenError::Cache)?;
        ancestors = image.seal(table, homes, ancestors);
        tracing::debug!(image = %id, ancestors = ancestors.len(), "stored image opened");
        Ok(Arc::new(image))
    }

    /// Whether its own pages are in a store, so that they can be read again and again.
    pub fn is_stored(&self) -> bool {
        self.stored.is_some()
    }

    pub(crate) fn source(&self) -> Option<&Arc<dyn PageSource>> {
        self.stored.as_ref()
    }

    /// Whether reading pages of its own takes as long as a disk or a network does.
    pub(crate) fn is_far(&self, range: PageRange) -> bool {
        self.stored.is_some() && self.cache.presence().count(range) < range.len()
    }

    pub fn id(&self) -> ImageId {
        self.id
    }

    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What was brought into the cache, and from where.
    pub fn counters(&self) -> &ImageCounters {
        &self.counters
    }

    /// Its page table, once that is complete.
    pub fn table(&self) -> Option<&PageTable> {
        self.sealed.get().map(|(table, _)| table)
    }

    pub(crate) fn sealed(&self) -> Option<&(PageTable, Homes)> {
        self.sealed.get()
    }

    pub(crate) fn homes(&self) -> Option<&Homes> {
        self.sealed.get().map(|(_, homes)| homes)
    }

    /// This image, and every image that its table names, or that is home to one of its blocks: all
    /// whose caches hold a part of its bytes. Itself alone while its table is not complete, and
    /// after its engine has ended.
    pub fn with_ancestors(self: &Arc<Self>) -> Vec<Arc<HostImage>> {
        let ancestors = lock(&self.ancestors);
        std::iter::once(self).chain(ancestors.values()).map(Arc::clone).collect()
    }

    /// The images that the table or the homes name, without this one.
    pub(crate) fn ancestors(&self) -> Ancestors {
        lock(&self.ancestors).clone()
    }

    /// The table is complete; `ancestors` has at least the images that it and the homes name. →
    /// those.
    pub(crate) fn seal(
        &self,
        table: PageTable,
        homes: Homes,
        mut ancestors: Ancestors,
    ) -> Ancestors {
        ancestors.retain(|id, _| *id != self.id && (table.owners().get(*id) > 0 || homes.has(*id)));
        *lock(&self.ancestors) = ancestors.clone();
        let _first = self.sealed.set((table, homes));
        ancestors
    }

    /// The engine has ended: no image will derive from this one any more. Ancestors that only it
    /// knew are dropped.
    /// (Ancestors of a stored image, which may be served again, stay.)
    pub(crate) fn retire(&self) {
        if self.is_stored() {
            return;
        }
        let gone = std::mem::take(&mut *lock(&self.ancestors));
        drop(gone); // not under the lock
    }

    /// An engine begins to depend on this image.
    pub(crate) fn add_reach(&self, reach: &Arc<Reach>) {
        let mut needed_by = lock(&self.needed_by);
        needed_by.retain(|reach| reach.strong_count() > 0);
        needed_by.push(Arc::downgrade(reach));
    }

    /// The live engines that depend on this image.
    pub(crate) fn needed_by(&self) -> Vec<Arc<Reach>> {
        lock(&self.needed_by).iter().filter_map(Weak::upgrade).collect()
    }

    /// In whose caches the pages of `range` belong that are absent there, and not zero: each in
    /// that of its block's home. Nothing while the table is not complete.
    pub(crate) fn places(self: &Arc<Self>, range: PageRange) -> Vec<(Arc<Self>, PageRange)> {
        let Some((table, homes)) = self.sealed.get() else { return Vec::new() };
        let ancestors = lock(&self.ancestors);
        let mut places = Vec::new();
        for (block, piece) in range.by_block() {
            let home = match homes.get(block) {
                Some(id) if id != self.id => ancestors.get(&id),
                Some(_) => Some(self),
                None => None,
            };
            let Some(home) = home else { continue };
            for (run, _) in table.runs(piece).filter(|(_, source)| *source != Source::Zero) {
                let presence = home.cache().presence();
                let mut rest = run;
                while !rest.is_empty() {
                    let (same, present) = presence.run(rest);
                    if !present {
                        places.push((Arc::clone(home), same));
                    }
                    rest = rest.from_page(same.end());
                }
            }
        }
        places
    }

    /// How many pages its views would have to fetch: not zero, and absent where they look for them.
    /// 0 while the table is not complete. Takes well under a millisecond per GiB.
    pub fn missing_pages(self: &Arc<Self>) -> u64 {
        self.places(PageRange::first(self.pages)).iter().map(|(_, run)| run.len()).sum()
    }

    /// What comes into which caches if its views need all of it: where they look for it, and pages
    /// of another host's image that they look for elsewhere also in that image's own, from where
    /// they are given on. Nothing while the table is not complete.
    pub fn lacks(self: &Arc<Self>) -> Vec<(Arc<Self>, PageRange)> {
        let mut lacks = self.places(PageRange::first(self.pages));
        let Some(table) = self.table() else { return lacks };
        let ancestors = self.ancestors();
        let mut kept = Vec::new();
        // Each of these runs has one source.
        for (home, run) in &lacks {
            let Some(owner) = table.get(run.start()).and_then(Source::image) else { continue };
            let owner = if owner == self.id { Some(self) } else { ancestors.get(&owner) };
            let is_kept = |owner: &&Arc<Self>| {
                owner.id != home.id
                    && owner.source().is_some_and(|source| source.origin() == Origin::Peer)
            };
            if let Some(owner) = owner.filter(is_kept) {
                let absent = owner.cache.presence().absent(*run).into_iter();
                kept.extend(absent.map(|run| (Arc::clone(owner), run)));
            }
        }
        lacks.extend(kept);
        lacks
    }

    /// How many pages a host that has none of it would come to have in the caches of this and of
    /// other images: those of an image that are at home in another's are in both. Nothing while the
    /// table is not complete.
    pub fn costs(&self) -> BTreeMap<ImageId, u64> {
        let mut costs = BTreeMap::new();
        let Some((table, homes)) = self.sealed.get() else { return costs };
        for (block, piece) in PageRange::first(self.pages).by_block() {
            let home = homes.get(block);
            for (run, source) in table.runs(piece) {
                let Some(owner) = source.image() else { continue };
                let elsewhere = home.filter(|home| *home != owner);
                for cache in std::iter::once(owner).chain(elsewhere) {
                    *costs.entry(cache).or_default() += run.len();
                }
            }
        }
        costs
    }

    /// Whether this image's own engine is held.
    pub(crate) fn has_engine(&self) -> bool {
        self.needed_by().iter().any(|reach| reach.image.id == self.id)
    }

    pub(crate) fn set_frozen(&self, originals: Arc<dyn Originals>) {
        *lock(&self.frozen) = Some(originals);
    }

    /// Everything is in the cache.
    pub(crate) fn take_frozen(&self) -> Option<Arc<dyn Originals>> {
        lock(&self.frozen).take()
    }

    pub(crate) fn frozen(&self) -> Option<Arc<dyn Originals>> {
        lock(&self.frozen).clone()
    }

    /// Which pages of `range` are in its cache: each run of them is given to `each`.
    pub fn cached(&self, range: PageRange, each: &mut dyn FnMut(PageRange)) {
        let mut rest = range.intersect(&PageRange::first(self.pages));
        while !rest.is_empty() {
            let (run, is_present) = self.cache.presence().run(rest);
            if is_present {
                each(run);
            }
            rest = rest.from_page(run.end());
        }
    }

    /// Which of its own pages in `range` can be read without being fetched: each run of them is
    /// given to `each`. Of an image that was frozen here that is all of them, but for what was
    /// given back since no image needs it (`collect_garbage`); none before its table is complete.
    pub fn own_here(&self, range: PageRange, each: &mut dyn FnMut(PageRange)) {
        let Some(table) = self.table() else { return };
        let own = Source::Image(self.id);
        let runs = table.runs(range.intersect(&table.range()));
        // Taken before a look at the cache: what is not in it then will not be.
        let is_frozen = self.frozen().is_some();
        for (run, _) in runs.filter(|(_, source)| *source == own) {
            match is_frozen {
                true => each(run),
                false => self.cached(run, each),
            }
        }
    }

    /// Reads pages by the image's table, of any owner; nothing enters a cache.
    /// From any thread, but not after the engine of an image that was frozen here has ended.
    ///
    /// # Errors
    /// [`PageLost`]; also while the table is not complete.
    pub fn read(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), PageLost> {
        let table = self.table().ok_or_else(|| {
            self.lost(range.start(), "what the VM had written is not known yet".to_owned())
        })?;
        if bytes.len() as u64 != range.byte_len() || !table.range().covers(&range) {
            return Err(self.lost(range.start(), format!("{range} is not what was asked for")));
        }
        for (run, source) in table.runs(range) {
            let from = usize::try_from(run.byte_offset() - range.byte_offset()).unwrap_or(0);
            let len = usize::try_from(run.byte_len()).unwrap_or(0);
            let part = &mut bytes[from..from + len];
            match source {
                Source::Zero => part.fill(0),
                Source::Image(id) if id == self.id => {
                    self.read_owned(run, part)?;
                }
                Source::Image(id) => {
                    let owner = lock(&self.ancestors).get(&id).cloned();
                    let gone = || self.lost(run.start(), format!("its owner {id} has gone"));
                    owner.ok_or_else(gone)?.read_owned(run, part)?;
                }
            }
        }
        Ok(())
    }

    /// Read pages whose bytes are this image's own. → where they were.
    ///
    /// # Errors
    /// [`PageLost`].
    pub(crate) fn read_owned(
        &self,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<Brought, PageLost> {
        self.read_owned_by(range, bytes, |stored, run, part| stored.read(run, part))
    }

    /// The same for pages of which one is waited for: as [`PageSource::read_first`], if it is far.
    ///
    /// # Errors
    /// [`PageLost`].
    pub(crate) fn read_owned_first(
        &self,
        range: PageRange,
        page: PageIdx,
        bytes: &mut [u8],
        came: &mut dyn FnMut(&[u8]),
    ) -> Result<Brought, PageLost> {
        let came = RefCell::new(came);
        self.read_owned_by(range, bytes, |stored, run, part| match run.contains(page) {
            true => stored.read_first(run, page, part, &mut **came.borrow_mut()),
            false => stored.read(run, part),
        })
    }

    /// The same as a prefetch.
    ///
    /// # Errors
    /// [`PageLost`].
    pub(crate) fn read_owned_ahead(
        &self,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<Brought, PageLost> {
        self.read_owned_by(range, bytes, |stored, run, part| stored.read_ahead(run, part))
    }

    fn read_owned_by(
        &self,
        range: PageRange,
        bytes: &mut [u8],
        read: impl Fn(&dyn PageSource, PageRange, &mut [u8]) -> io::Result<()>,
    ) -> Result<Brought, PageLost> {
        if bytes.len() as u64 != range.byte_len() {
            return Err(self.lost(range.start(), "buffer of another size".to_owned()));
        }
        let bytes = RefCell::new(bytes);
        let with = |run: PageRange, read: &dyn Fn(&mut [u8]) -> io::Result<()>| {
            let from = usize::try_from(run.byte_offset() - range.byte_offset());
            let len = usize::try_from(run.byte_len());
            let (from, len) = from.and_then(|from| len.map(|len| (from, len))).unwrap_or((0, 0));
            read(&mut bytes.borrow_mut()[from..from + len])
        };
        let pages = handover::read(
            self.cache.presence(),
            range,
            self.stored.is_some(),
            |run| {
                with(run, &|part| self.cache.read(run, part))
                    .map_err(|error| format!("cache: {error}"))
            },
            |run| {
                if let Some(stored) = &self.stored {
                    return with(run, &|part| read(&**stored, run, part))
                        .map_err(|error| format!("{}: {error}", stored.origin()));
                }
                let frozen = self.frozen().ok_or("nothing holds it any more")?;
                with(run, &|part| frozen.read(run, part))
                    .map_err(|error| format!("{}: {error}", frozen.place_of(run.start())))
            },
        )
        .map_err(|(page, reason)| self.lost(page, reason))?;
        let original = self.stored.as_ref().map_or(Origin::Frozen, |stored| stored.origin());
        Ok(Brought { origin: if pages == 0 { Origin::Cache } else { original }, pages })
    }

    /// Several of them, all where the image is read from. `done` is called for each once, with its
    /// place.
    pub(crate) fn read_far_ahead(
        &self,
        ranges: &[PageRange],
        buffer: &mut Vec<u8>,
        mut done: impl FnMut(usize, Result<&[u8], PageLost>),
    ) {
        let Some(stored) = &self.stored else {
            let why = || "nothing holds it any more".to_owned();
            let lost = |run: &PageRange| self.lost(run.start(), why());
            return ranges.iter().enumerate().for_each(|(at, run)| done(at, Err(lost(run))));
        };
        let origin = stored.origin();
        let bytes = ranges.iter().map(PageRange::byte_len).sum::<u64>();
        buffer.resize(usize::try_from(bytes).unwrap_or(0), 0);
        let mut rest = buffer.as_mut_slice();
        let mut reads = Vec::with_capacity(ranges.len());
        for range in ranges {
            let len = usize::try_from(range.byte_len()).unwrap_or(0);
            let (bytes, later) = rest.split_at_mut(len);
            reads.push(AheadRead { range: *range, bytes });
            rest = later;
        }
        stored.read_ahead_all(&mut reads, &mut |at, came| {
            let Some(range) = ranges.get(at) else { return };
            let lost = |error| self.lost(range.start(), format!("{origin}: {error}"));
            done(at, came.map_err(lost));
        });
    }

    /// Keeps bytes of its own pages that came from elsewhere in its cache. If the cache has no
    /// room, the host handles that.
    pub fn keep(&self, run: PageRange, bytes: &[u8]) -> bool {
        let kept = self.cache.add(run, bytes);
        kept.inspect_err(|error| tracing::warn!(image = %self.id, %run, %error, "keep what came"))
            .is_ok()
    }

    pub(crate) fn lost(&self, page: PageIdx, reason: String) -> PageLost {
        PageLost { page, image: self.id, reason }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
