//! What this host knows of one memory image: its cache, its page table, and where its own pages still are.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use vmfork_image::{ImageId, Origin, PageIdx, PageRange, PageTable};

use crate::cache::Cache;
use crate::counters::ImageCounters;
use crate::frozen::FrozenRange;
use crate::handover;
use crate::homes::Homes;

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

/// An image on this host. Shared by its engine (which fills it), its views, and the images derived from it.
#[derive(Debug)]
pub struct HostImage {
    id: ImageId,
    pages: u64,
    cache: Cache,
    frozen: Mutex<Option<Arc<FrozenRange>>>,
    sealed: OnceLock<(PageTable, Homes)>,
    /// The images that the table or the homes name, without this one; while somebody may derive from it.
    ancestors: Mutex<Ancestors>,
    /// Of every engine that ever served this image or one that descends from it.
    needed_by: Mutex<Vec<Weak<Reach>>>,
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
    /// What its views may read of the cache and the originals of an image: by the engine's own table or, while
    /// that is being derived, by the one that it is derived from.
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
        Ok(Self {
            id,
            pages,
            cache: Cache::new(&format!("vmfork-{id}"), pages)?,
            frozen: Mutex::new(None),
            sealed: OnceLock::new(),
            ancestors: Mutex::default(),
            needed_by: Mutex::default(),
            counters: ImageCounters::default(),
        })
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

    pub(crate) fn homes(&self) -> Option<&Homes> {
        self.sealed.get().map(|(_, homes)| homes)
    }

    /// This image, and every image that its table names, or that is home to one of its blocks: all whose caches
    /// hold a part of its bytes. Itself alone while its table is not complete, and after its engine has ended.
    pub fn with_ancestors(self: &Arc<Self>) -> Vec<Arc<HostImage>> {
        let ancestors = lock(&self.ancestors);
        std::iter::once(self).chain(ancestors.values()).map(Arc::clone).collect()
    }

    /// The images that the table or the homes name, without this one.
    pub(crate) fn ancestors(&self) -> Ancestors {
        lock(&self.ancestors).clone()
    }

    /// The table is complete; `ancestors` has at least the images that it and the homes name. → those.
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

    /// The engine has ended: nobody will derive from this image any more. Ancestors that only it knew go.
    pub(crate) fn retire(&self) {
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

    /// Whether somebody holds this image's own engine.
    pub(crate) fn has_engine(&self) -> bool {
        self.needed_by().iter().any(|reach| reach.image.id == self.id)
    }

    pub(crate) fn set_frozen(&self, range: Arc<FrozenRange>) {
        *lock(&self.frozen) = Some(range);
    }

    /// Everything is in the cache.
    pub(crate) fn take_frozen(&self) -> Option<Arc<FrozenRange>> {
        lock(&self.frozen).take()
    }

    pub(crate) fn frozen(&self) -> Option<Arc<FrozenRange>> {
        lock(&self.frozen).clone()
    }

    /// Read pages whose bytes are this image's own. → where they were.
    ///
    /// # Errors
    /// [`PageLost`].
    pub(crate) fn read_owned(
        &self,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<Origin, PageLost> {
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
        handover::read(
            self.cache.presence(),
            range,
            |run| {
                with(run, &|part| self.cache.read(run, part))
                    .map_err(|error| format!("cache: {error}"))
            },
            |run| {
                let frozen = self.frozen().ok_or("nothing holds it any more")?;
                with(run, &|part| frozen.read(run, part)).map_err(|error| {
                    format!("frozen at {:#x}: {error}", frozen.address_of(run.start()))
                })
            },
        )
        .map_err(|(page, reason)| self.lost(page, reason))
    }

    fn lost(&self, page: PageIdx, reason: String) -> PageLost {
        PageLost { page, image: self.id, reason }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
