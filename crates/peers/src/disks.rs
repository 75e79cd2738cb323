//! Disks across hosts: what a host must know of the disks of clones that it starts, and pages of
//! other hosts' disks.
//!
//! ```text
//!   lend ── entries: size, page table with owners' names ──► open ─► DiskContent ─► a clone's disk
//!    │                                                                   │
//!   OwnPages ◄───────────── pages, as they are read ───────── ArrivedPages, one for each owner
//! ```
//!
//! A page table names the owner of each page: a frozen layer, or what the disk began with. An owner
//! has one name on all hosts. So disks of several forks share what came of it, and a page comes to
//! a host once. What came is in a sparse file, and not in memory.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use vmfork_disk::{DiskImage, OwnPages};
use vmfork_engine::{HostImage, StoredRun};
use vmfork_host::disks::{DiskContent, DiskSpec, HostDisks};
use vmfork_image::wire::{self, Limits};
use vmfork_image::{
    ImageId, ImageName, PAGE_BYTES, PageIdx, PageRange, PageSource, PageTable, Source,
};

use vmfork_policy::Rate;

use crate::error::{ArrivalError, LendError};

/// How many pages are read together, as an aligned window: what a guest reads next is often beside.
const WINDOW_PAGES: u64 = 16;
/// How much is fetched at a time when all of it is.
const PIECE_PAGES: u64 = 256;
/// How long what could not be fetched is left alone.
const PAUSE: Duration = Duration::from_secs(2);

/// A disk as another host learns of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskEntry {
    pub name: ImageName,
    pub size_bytes: u64,
    /// As bytes ([`vmfork_image::wire`]).
    pub table: Vec<u8>,
}

/// The own pages of a layer of another host's disk, or of what that disk began with.
#[derive(Debug)]
pub(crate) struct ArrivedPages {
    name: ImageName,
    /// Its cache is a sparse file. Of its table all pages are its own.
    image: Arc<HostImage>,
    /// Which pages really are: those that disks which came here name.
    own: Mutex<PageTable>,
    disks: Arc<HostDisks>,
    /// Of all of this host.
    came_pages: Arc<AtomicU64>,
}

impl ArrivedPages {
    fn own(&self) -> MutexGuard<'_, PageTable> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is fetched for a read of `range`: what lies around it, too.
    fn window(&self, range: PageRange) -> Vec<PageRange> {
        let start = range.start().0 / WINDOW_PAGES * WINDOW_PAGES;
        let end = range.end().0.next_multiple_of(WINDOW_PAGES).min(self.image.pages());
        let window = PageRange::new(PageIdx(start), end.saturating_sub(start));
        let own = self.own();
        let runs = own.runs(window.unwrap_or(range));
        runs.filter(|(_, source)| *source != Source::Zero).map(|(run, _)| run).collect()
    }

    /// How many pages it has.
    pub(crate) fn pages(&self) -> u64 {
        self.image.pages()
    }

    /// Calls `each` with the pages of `range` that need not be asked for: they are here, or not its
    /// own.
    pub(crate) fn present(&self, range: PageRange, each: &mut dyn FnMut(PageRange)) {
        self.image.cached(range, each);
        let own = self.own().clone();
        let others = own.runs(range.intersect(&own.range()));
        others.filter(|(_, source)| *source == Source::Zero).for_each(|(run, _)| each(run));
    }

    /// Have pages here. The host keeps its floor of free space.
    fn bring(&self, range: PageRange, is_ahead: bool) -> io::Result<()> {
        if self.is_here(range) {
            return Ok(());
        }
        self.disks.check_free(range.byte_len())?;
        let came = self.image.bring(range, is_ahead).map_err(io::Error::other)?;
        self.came_pages.fetch_add(came, Ordering::Relaxed);
        Ok(())
    }

    /// Pages that came unasked. → how many are new.
    pub(crate) fn take(&self, range: PageRange, bytes: &[u8]) -> u64 {
        let own: Vec<_> = {
            let own = self.own();
            let runs = own.runs(range).filter(|(_, source)| *source != Source::Zero);
            runs.map(|(run, _)| run).collect()
        };
        let absent = own.into_iter().filter(|run| self.image.cache().presence().count(*run) == 0);
        let mut new = 0;
        for run in absent {
            let from = usize::try_from(run.byte_offset() - range.byte_offset()).unwrap_or(0);
            let len = usize::try_from(run.byte_len()).unwrap_or(0);
            let part = bytes.get(from..from.saturating_add(len)).unwrap_or_default();
            let has_room = self.disks.check_free(run.byte_len()).is_ok();
            if has_room && part.len() == len && self.image.keep(run, part) {
                new += run.len();
            }
        }
        self.came_pages.fetch_add(new, Ordering::Relaxed);
        new
    }

    /// Whether some of its pages that disks here name are not here.
    pub(crate) fn lacks(&self) -> bool {
        let own = self.own().clone();
        let mut runs = own.runs(own.range()).filter(|(_, source)| *source != Source::Zero);
        runs.any(|(run, _)| !self.is_here(run))
    }
}

impl OwnPages for ArrivedPages {
    fn is_here(&self, range: PageRange) -> bool {
        self.image.cache().presence().count(range) == range.len()
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        if !self.is_here(range) {
            for run in self.window(range) {
                let wanted = self.bring(run, false);
                // What is beside is not waited for.
                if !run.intersect(&range).is_empty() {
                    wanted?;
                }
            }
        }
        self.image.read(range, bytes).map_err(io::Error::other)
    }
}

/// Pages of another host's disk that clones here need.
#[derive(Debug)]
pub(crate) struct Need {
    pages: Arc<ArrivedPages>,
    runs: Vec<PageRange>,
}

impl Need {
    pub(crate) fn missing_pages(&self) -> u64 {
        let presence = self.pages.image.cache().presence();
        self.runs.iter().map(|run| run.len() - presence.count(*run)).sum()
    }
}

/// What clones of another host's snapshot need of its disks.
#[derive(Debug, Default)]
pub(crate) struct Needs(Vec<Need>);

impl Needs {
    /// Whether no page has to be fetched any more.
    pub(crate) fn are_here(&self) -> bool {
        self.0.iter().all(|need| need.missing_pages() == 0)
    }

    /// What is not here, in pieces.
    pub(crate) fn missing(&self) -> Vec<(Arc<ArrivedPages>, PageRange)> {
        let absent = |need: &Need| {
            let presence = need.pages.image.cache().presence();
            let pieces = need.runs.iter().flat_map(|run| pieces(*run));
            let absent = pieces.filter(|piece| presence.count(*piece) < piece.len());
            absent.map(|piece| (Arc::clone(&need.pages), piece)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(absent).collect()
    }
}

fn pieces(run: PageRange) -> impl Iterator<Item = PageRange> {
    let starts = (run.start().0..run.end().0).step_by(usize::try_from(PIECE_PAGES).unwrap_or(1));
    starts.filter_map(move |start| {
        let len = PIECE_PAGES.min(run.end().0.saturating_sub(start));
        PageRange::new(PageIdx(start), len).ok()
    })
}

/// Fetch all that is missing at this rate, in a thread of its own. It ends when all is here, or
/// when `needs` says that nothing needs it any more.
pub(crate) fn hydrate(
    bytes_per_s: NonZeroU64,
    needs: impl Fn() -> Option<Vec<(Arc<ArrivedPages>, PageRange)>> + Send + 'static,
) {
    let thread = std::thread::Builder::new().name("disk-hydrate".to_owned());
    let started = thread.spawn(move || {
        while let Some(missing) = needs().filter(|missing| !missing.is_empty()) {
            let (began, mut came) = (Instant::now(), false);
            let mut rate = Rate::new(bytes_per_s, PageRange::first(PIECE_PAGES).byte_len());
            for (pages, piece) in missing {
                if needs().is_none() {
                    return;
                }
                match pages.bring(piece, true) {
                    Ok(()) => came = true,
                    Err(error) => tracing::debug!(name = %pages.name, %piece, %error, "hydrate"),
                }
                rate.spend(began.elapsed(), piece.byte_len());
                let due = rate.ready_at(piece.byte_len());
                std::thread::park_timeout(due.saturating_sub(began.elapsed()).min(PAUSE));
            }
            if !came {
                std::thread::park_timeout(PAUSE);
            }
        }
    });
    if let Err(error) = started {
        tracing::warn!(%error, "disks of another host come on demand alone");
    }
}

/// Of this host.
#[derive(Debug, Default)]
pub(crate) struct Disks {
    /// Owners of other hosts, by name. Their IDs are the same on all hosts.
    arrived: Mutex<HashMap<ImageName, Weak<ArrivedPages>>>,
    came_pages: Arc<AtomicU64>,
}

impl Disks {
    /// How many pages have come here.
    pub(crate) fn came_pages(&self) -> u64 {
        self.came_pages.load(Ordering::Relaxed)
    }

    fn arrived(&self) -> MutexGuard<'_, HashMap<ImageName, Weak<ArrivedPages>>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages of another host that some disk here may need.
    pub(crate) fn find(&self, name: ImageName) -> Option<Arc<ArrivedPages>> {
        self.arrived().get(&name)?.upgrade()
    }

    /// The names of all of them.
    pub(crate) fn held(&self) -> Vec<ImageName> {
        let mut arrived = self.arrived();
        arrived.retain(|_, pages| pages.strong_count() > 0);
        arrived.keys().copied().collect()
    }

    /// What the owner `id` is called across hosts, if it is another host's.
    fn name(&self, id: ImageId) -> Option<ImageName> {
        let arrived = self.arrived();
        let mut names = arrived.iter().filter(|(name, _)| name.image == id.get());
        names.find(|(_, pages)| pages.strong_count() > 0).map(|(name, _)| *name)
    }
}

/// What is lent of a disk: for as long as it lives, its pages can be read.
#[derive(Debug)]
pub(crate) struct LentDisk {
    content: DiskContent,
    image: DiskImage,
    owners: BTreeMap<ImageName, Arc<dyn OwnPages>>,
}

impl LentDisk {
    /// A disk of a VM that was frozen, and what another host must know of it. `host` is this one.
    /// Blocking: waits for its page table.
    ///
    /// # Errors
    /// It has none, or the file that it lies on has changed.
    pub(crate) fn new(
        host: u64,
        disks: &Disks,
        content: &DiskContent,
    ) -> Result<(Self, DiskEntry), LendError> {
        content.check_base().map_err(LendError::Disk)?;
        let image = content.whole().map_err(LendError::Layer)?;
        let name = |id: ImageId| disks.name(id).unwrap_or(ImageName { host, image: id.get() });
        let table = image.table_soon().ok_or(LendError::NotSealed)?;
        let entry = DiskEntry {
            name: name(image.id()),
            size_bytes: image.size_bytes(),
            table: wire::encode(table, name),
        };
        let owners = image.owners().map(|(id, own)| (name(id), Arc::clone(own))).collect();
        Ok((Self { content: content.clone(), image, owners }, entry))
    }

    /// The names of those whose pages it has.
    pub(crate) fn names(&self) -> impl Iterator<Item = ImageName> {
        self.owners.keys().copied()
    }

    /// How many pages it has, if it has pages of that owner.
    pub(crate) fn pages(&self, name: ImageName) -> Option<u64> {
        self.owners.get(&name).map(|_| self.image.size_bytes().div_ceil(PAGE_BYTES))
    }

    /// The own pages of an owner.
    pub(crate) fn owner(&self, name: ImageName) -> Option<Arc<dyn OwnPages>> {
        self.owners.get(&name).cloned()
    }

    /// That owner, if all of `range` is its.
    pub(crate) fn own(&self, name: ImageName, range: PageRange) -> Option<LentOwner> {
        let own = self.owner(name).filter(|_| self.own_runs(name, range) == [range])?;
        Some(LentOwner { own, content: self.content.clone() })
    }

    /// The pages of `range` that are that owner's.
    pub(crate) fn own_runs(&self, name: ImageName, range: PageRange) -> Vec<PageRange> {
        let Some(table) = self.image.table() else { return Vec::new() };
        let own = ImageId::new(name.image).map(Source::Image);
        let runs = table.runs(range.intersect(&table.range()));
        runs.filter(|(_, source)| Some(*source) == own).map(|(run, _)| run).collect()
    }
}

/// Pages of a disk that is lent, to be read outside any lock.
#[derive(Debug)]
pub(crate) struct LentOwner {
    own: Arc<dyn OwnPages>,
    content: DiskContent,
}

impl LentOwner {
    pub(crate) fn is_here(&self, range: PageRange) -> bool {
        self.own.is_here(range)
    }

    /// Read its pages.
    ///
    /// # Errors
    /// They are not available; or a client's file has changed, so that they may be others.
    pub(crate) fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.own.read(range, bytes)?;
        self.content.check_base().map_err(io::Error::other)
    }
}

/// A disk as a clone on another host has it: one of its own.
pub(crate) fn spec_elsewhere(content: &DiskContent) -> DiskSpec {
    DiskSpec { size_bytes: content.stored_bytes(), ..content.stored_spec() }
}

/// Open the disks of a descriptor, for VMs with these. `own` finds pages of this host's own, which
/// have come back. `source` says where an owner's pages come from. → what they hold, and what is to
/// come of that.
///
/// # Errors
/// They do not fit the disks that the VMs have, or what came is no table.
pub(crate) fn open(
    here: &Disks,
    host_disks: &Arc<HostDisks>,
    (specs, entries): (Vec<DiskSpec>, &[DiskEntry]),
    own: impl Fn(ImageName) -> Option<Arc<dyn OwnPages>>,
    source: impl Fn(ImageName, u64) -> Arc<dyn PageSource>,
) -> Result<(Vec<DiskContent>, Needs), ArrivalError> {
    if specs.len() != entries.len() {
        return Err(ArrivalError::Disks { specs: specs.len(), entries: entries.len() });
    }
    let (mut contents, mut needs) = (Vec::new(), Vec::new());
    for (spec, entry) in specs.into_iter().zip(entries) {
        let name = entry.name;
        let unknown = || ArrivalError::Unknown { name, unknown: name };
        let pages = entry.size_bytes.div_ceil(PAGE_BYTES);
        let limits = Limits { pages_max: pages, ..Limits::default() };
        let table = wire::decode(&entry.table, limits)
            .map_err(|source| ArrivalError::Table { name, source })?;
        if table.pages() != pages || spec.size_bytes != entry.size_bytes {
            return Err(ArrivalError::Size { name, found: table.pages(), pages });
        }
        let owners: Vec<ImageName> = table.names().to_vec();
        let table: PageTable = table
            .to_table(|name| ImageId::new(name.image))
            .map_err(|unknown| ArrivalError::Unknown { name, unknown })?;
        let mut of = BTreeMap::new();
        for owner in owners {
            let id = ImageId::new(owner.image).ok_or_else(unknown)?;
            if let Some(own) = own(owner).filter(|_| here.find(owner).is_none()) {
                of.insert(id, own);
                continue;
            }
            let runs: Vec<_> = table.pages_of(id).collect();
            let arrived = here.arrive((owner, id), &runs, pages, host_disks, &source)?;
            let own: Arc<dyn OwnPages> = Arc::<ArrivedPages>::clone(&arrived);
            of.insert(id, own);
            needs.push(Need { pages: arrived, runs });
        }
        let id = ImageId::new(name.image).ok_or_else(unknown)?;
        let image = DiskImage::from_table(id, entry.size_bytes, table, of)
            .map_err(|source| ArrivalError::Disk { name, source })?;
        contents.push(DiskContent::from_elsewhere(spec, image));
    }
    Ok((contents, Needs(needs)))
}

impl Disks {
    /// Pages of an owner, of which a disk names `runs`.
    fn arrive(
        &self,
        (name, id): (ImageName, ImageId),
        runs: &[PageRange],
        pages: u64,
        host_disks: &Arc<HostDisks>,
        source: &impl Fn(ImageName, u64) -> Arc<dyn PageSource>,
    ) -> Result<Arc<ArrivedPages>, ArrivalError> {
        // Finding a host may take its time: not under the lock.
        let source = source(name, pages);
        let changes = || runs.iter().map(|run| (*run, Source::Image(id)));
        let mut arrived = self.arrived();
        if let Some(known) = arrived.get(&name).and_then(Weak::upgrade) {
            let mut own = known.own();
            let more = own.derive(changes());
            *own =
                more.map_err(|_| ArrivalError::Size { name, found: pages, pages: own.pages() })?;
            drop(own);
            return Ok(known);
        }
        let own = PageTable::uniform(pages, Source::Zero).derive(changes());
        let own = own.map_err(|_beyond| ArrivalError::Size { name, found: pages, pages })?;
        let file = host_disks.cache_file(pages).map_err(ArrivalError::DiskCache)?;
        let all = [StoredRun::Own(PageRange::first(pages))];
        let image = HostImage::stored_on(Box::new(file), id, pages, all, None, source)
            .map_err(|source| ArrivalError::Open { name, source })?;
        let disks = Arc::clone(host_disks);
        let (own, came_pages) = (Mutex::new(own), Arc::clone(&self.came_pages));
        let pages = Arc::new(ArrivedPages { name, image, own, disks, came_pages });
        arrived.insert(name, Arc::downgrade(&pages));
        Ok(pages)
    }
}

#[cfg(test)]
#[path = "disks_tests.rs"]
mod tests;
