//! What this host knows of one memory image: its cache, its page table, and where its own pages still are.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use vmfork_image::{ImageId, Origin, PageIdx, PageRange, PageTable};

use crate::cache::Cache;
use crate::counters::ImageCounters;
use crate::frozen::FrozenRange;

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
    sealed: OnceLock<Sealed>,
    pub(crate) counters: ImageCounters,
}

/// What is known once the freeze's pages have been told apart.
#[derive(Debug)]
pub(crate) struct Sealed {
    pub(crate) table: PageTable,
    /// The images that the table names, without this one.
    pub(crate) ancestors: Ancestors,
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
        self.sealed.get().map(|sealed| &sealed.table)
    }

    /// This image, and every image that its table names: all whose caches hold a part of its bytes. Itself alone
    /// while its table is not complete.
    pub fn with_ancestors(self: &Arc<Self>) -> Vec<Arc<HostImage>> {
        let ancestors = self.sealed().into_iter().flat_map(|sealed| sealed.ancestors.values());
        std::iter::once(self).chain(ancestors).map(Arc::clone).collect()
    }

    pub(crate) fn sealed(&self) -> Option<&Sealed> {
        self.sealed.get()
    }

    pub(crate) fn seal(&self, table: PageTable, mut ancestors: Ancestors) {
        ancestors.retain(|id, _| *id != self.id && table.owners().get(*id) > 0);
        let _first = self.sealed.set(Sealed { table, ancestors });
    }

    pub(crate) fn set_frozen(&self, range: Option<Arc<FrozenRange>>) {
        *self.frozen.lock().unwrap_or_else(PoisonError::into_inner) = range;
    }

    pub(crate) fn frozen(&self) -> Option<Arc<FrozenRange>> {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Read pages whose bytes are this image's own. → where they were.
    ///
    /// From the cache, or from where the freeze moved them. The drain may move a page from there to the cache
    /// meanwhile: it sets the page's presence *before* it gives the original back, so bytes from there count only
    /// if the page is still absent afterwards.
    ///
    /// # Errors
    /// [`PageLost`].
    pub(crate) fn read_owned(
        &self,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<Origin, PageLost> {
        let mut at = range.start();
        let mut origin = Origin::Cache;
        while at < range.end() {
            let (run, present) = self.cache.presence().run(range.from_page(at));
            let from = usize::try_from((at.0 - range.start().0) * vmfork_image::PAGE_BYTES);
            let len = usize::try_from(run.byte_len());
            let part = from
                .ok()
                .zip(len.ok())
                .and_then(|(from, len)| bytes.get_mut(from..from + len))
                .ok_or_else(|| self.lost(at, "buffer too small".to_owned()))?;
            if present {
                self.cache
                    .read(run, part)
                    .map_err(|error| self.lost(at, format!("cache: {error}")))?;
                at = run.end();
                continue;
            }
            let outcome = match self.frozen() {
                Some(frozen) => frozen
                    .read(run, part)
                    .map_err(|error| format!("frozen at {:#x}: {error}", frozen.address_of(at))),
                None => Err("nothing holds it any more".to_owned()),
            };
            let (after, present) = self.cache.presence().run(run);
            if present {
                continue; // drained meanwhile: take it from the cache
            }
            outcome.map_err(|reason| self.lost(at, reason))?;
            origin = Origin::Frozen;
            at = after.end();
        }
        Ok(origin)
    }

    fn lost(&self, page: PageIdx, reason: String) -> PageLost {
        PageLost { page, image: self.id, reason }
    }
}
