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
use std::fmt::Debug;
use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use vmfork_api::disk::DISK_BYTES_MAX;
use vmfork_disk::{DiskImage, OwnPages};
use vmfork_engine::{HostImage, StoredRun};
use vmfork_host::disks::{DiskContent, DiskSpec, HostDisks};
use vmfork_host::error::chain;
use vmfork_image::wire::{self, Limits};
use vmfork_image::{
    BLOCK_PAGES, ImageId, ImageName, PAGE_BYTES, PageIdx, PageRange, PageSource, PageTable, Source,
};
use vmfork_policy::Rate;

use crate::error::{ArrivalError, LendError};

/// How many pages are read together, as an aligned window: what a guest reads next is often beside.
const WINDOW_PAGES: u64 = 16;
/// How much is fetched at a time when all of it is.
const PIECE_PAGES: u64 = 256;
/// Most owners that a disk's table may name, and most runs that it may have.
const OWNERS_MAX: usize = 1024;
const RUNS_MAX: usize = 1 << 22;
/// A refusal that comes within this time is one, and not a host that fails.
const SOON: Duration = Duration::from_secs(1);
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

    /// Those of `range` that are known to be its own.
    fn own_runs(&self, range: PageRange) -> Vec<PageRange> {
        let own = self.own();
        let runs = own.runs(range.intersect(&own.range()));
        runs.filter(|(_, source)| *source != Source::Zero).map(|(run, _)| run).collect()
    }

    /// The run of its own pages that is fetched for a read of `range`: neighbours, too.
    fn window(&self, range: PageRange) -> PageRange {
        let start = range.start().0 / WINDOW_PAGES * WINDOW_PAGES;
        let end = range.end().0.next_multiple_of(WINDOW_PAGES);
        let window = PageRange::new(PageIdx(start), end.saturating_sub(start)).unwrap_or(range);
        let around = self.own_runs(window).into_iter().find(|run| run.covers(&range));
        around.unwrap_or(range)
    }

    /// How many pages it has.
    pub(crate) fn pages(&self) -> u64 {
        self.image.pages()
    }

    /// Calls `each` with the pages of `range` that need not be asked for: they are here. Pages that
    /// are not known to be its own count as here beside one that is.
    pub(crate) fn present(&self, range: PageRange, each: &mut dyn FnMut(PageRange)) {
        let own = self.own().clone();
        self.image.cached(range, &mut |run| {
            each(run);
            let start = run.start().0 / WINDOW_PAGES * WINDOW_PAGES;
            let end = run.end().0.next_multiple_of(WINDOW_PAGES);
            let Ok(units) = PageRange::new(PageIdx(start), end.saturating_sub(start)) else {
                return;
            };
            let beside = units.intersect(&range).intersect(&own.range());
            let others = own.runs(beside).filter(|(_, source)| *source == Source::Zero);
            others.for_each(|(run, _)| each(run));
        });
    }

    /// Have pages here. The host keeps its floor of free space.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] if it can't; or no host gives them.
    fn bring(&self, range: PageRange, is_ahead: bool) -> io::Result<()> {
        if self.is_here(range) {
            return Ok(());
        }
        if !self.disks.has_room(range.byte_len(), is_ahead) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let came = &mut |pages| {
            self.came_pages.fetch_add(pages, Ordering::Relaxed);
        };
        self.image.bring(range, is_ahead, came).map_err(io::Error::other)
    }

    /// Pages that came unasked. → how many are new.
    pub(crate) fn take(&self, range: PageRange, bytes: &[u8]) -> u64 {
        let presence = self.image.cache().presence();
        let absent = self.own_runs(range).into_iter().flat_map(|run| presence.absent(run));
        let mut new = 0;
        for run in absent {
            let from = usize::try_from(run.byte_offset() - range.byte_offset()).unwrap_or(0);
            let len = usize::try_from(run.byte_len()).unwrap_or(0);
            let part = bytes.get(from..from.saturating_add(len)).unwrap_or_default();
            let has_room = self.disks.has_room(run.byte_len(), true);
            if has_room && part.len() == len && self.image.keep(run, part) {
                new += run.len();
            }
        }
        self.came_pages.fetch_add(new, Ordering::Relaxed);
        new
    }

    /// Whether some of its pages that disks here name are not here.
    pub(crate) fn lacks(&self) -> bool {
        let all = PageRange::first(self.pages());
        self.own_runs(all).into_iter().any(|run| !self.is_here(run))
    }
}

impl OwnPages for ArrivedPages {
    fn is_here(&self, range: PageRange) -> bool {
        self.image.cache().presence().count(range) == range.len()
    }

    fn owned(&self, range: PageRange, found: &mut dyn FnMut(PageRange)) {
        self.own_runs(range).into_iter().for_each(found);
    }

    fn name_elsewhere(&self) -> Option<ImageName> {
        Some(self.name)
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        if !self.is_here(range) {
            let (window, began) = (self.window(range), Instant::now());
            let mut brought = self.bring(window, false);
            // The other host may not have the neighbours any more. It says so at once.
            if brought.is_err() && window != range && began.elapsed() < SOON {
                brought = self.bring(range, false);
            }
            // Without space it is read and not kept.
            if let Err(error) = brought
                && error.kind() != io::ErrorKind::StorageFull
            {
                return Err(error);
            }
        }
        self.image.read(range, bytes).map_err(io::Error::other)
    }
}

/// Pages of another host for a disk that is read: as long as any reader of the disk is there, their
/// arrival is.
#[derive(Debug)]
struct Kept {
    pages: Arc<ArrivedPages>,
    _arrival: Keeper,
}

/// What readers of disks hold: the arrival that they came by, once it is known.
pub(crate) type Keeper = Arc<OnceLock<Arc<dyn Debug + Send + Sync>>>;

impl OwnPages for Kept {
    fn is_here(&self, range: PageRange) -> bool {
        self.pages.is_here(range)
    }

    fn owned(&self, range: PageRange, found: &mut dyn FnMut(PageRange)) {
        self.pages.owned(range, found);
    }

    fn name_elsewhere(&self) -> Option<ImageName> {
        self.pages.name_elsewhere()
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.pages.read(range, bytes)
    }
}

/// Pages of another host's disk that clones here need.
#[derive(Debug)]
pub(crate) struct Need {
    pages: Arc<ArrivedPages>,
    runs: Vec<PageRange>,
}

/// What clones of another host's snapshot need of its disks.
#[derive(Debug, Default)]
pub(crate) struct Needs(Vec<Need>);

impl Needs {
    /// Whether no page has to be fetched any more.
    pub(crate) fn are_here(&self) -> bool {
        let is_here = |need: &Need| need.runs.iter().all(|run| need.pages.is_here(*run));
        self.0.iter().all(is_here)
    }

    /// These, too.
    pub(crate) fn add(&mut self, more: Self) {
        for need in more.0 {
            let is_same = |it: &Need| Arc::ptr_eq(&it.pages, &need.pages) && it.runs == need.runs;
            if !self.0.iter().any(is_same) {
                self.0.push(need);
            }
        }
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

/// Who has disks fetched as a whole.
pub(crate) trait Hydrated: Send + Sync + 'static {
    /// What is missing of them.
    fn missing(&self) -> Vec<(Arc<ArrivedPages>, PageRange)>;

    /// Bytes per second.
    fn rate(&self) -> Option<NonZeroU64>;

    /// The thread has ended.
    fn over(&self);
}

/// Fetch all that is missing, in a thread of its own. It ends when all is here, or when nothing
/// needs it any more.
///
/// # Errors
/// There is no thread left.
pub(crate) fn hydrate<H: Hydrated>(of: &Arc<H>) -> io::Result<()> {
    let of = Arc::downgrade(of);
    let thread = std::thread::Builder::new().name("disk-hydrate".to_owned());
    let started = thread.spawn(move || {
        let mut failures = 0_u64;
        while let Err(error) = hydrate_once(&of) {
            if failures == 0 {
                tracing::warn!(
                    error = chain(&error),
                    "another host's disks do not come; trying on"
                );
            }
            failures += 1;
            std::thread::park_timeout(PAUSE);
        }
        of.upgrade().inspect(|of| of.over());
    });
    started.map(drop)
}

/// Fetch what is missing now, as far as some host gives it.
///
/// # Errors
/// The last failure: some is still missing.
fn hydrate_once<H: Hydrated>(of: &Weak<H>) -> io::Result<()> {
    let now = of.upgrade().and_then(|of| Some((of.missing(), of.rate()?)));
    let Some((missing, rate)) = now else { return Ok(()) };
    let (began, burst) = (Instant::now(), PageRange::first(PIECE_PAGES).byte_len());
    let (mut rate, mut outcome) = (Rate::new(rate, burst), Ok(()));
    for (pages, piece) in missing {
        if of.strong_count() == 0 {
            return Ok(());
        }
        if let Err(error) = pages.bring(piece, true) {
            tracing::debug!(name = %pages.name, %piece, %error, "hydrate");
            outcome = Err(error);
        }
        rate.spend(began.elapsed(), piece.byte_len());
        let due = rate.ready_at(piece.byte_len());
        std::thread::park_timeout(due.saturating_sub(began.elapsed()).min(PAUSE));
    }
    outcome
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
}

/// What is lent of a disk: for as long as it lives, its pages can be read.
#[derive(Debug)]
pub(crate) struct LentDisk {
    /// Without a lease of its volume: what it held is frozen.
    content: DiskContent,
    owners: BTreeMap<ImageName, Arc<dyn OwnPages>>,
}

impl LentDisk {
    /// A disk of a VM that was frozen, and what another host must know of it. `host` is this one.
    /// Blocking: waits for its page table.
    ///
    /// # Errors
    /// It has none, or one that is too large; or the file that it lies on has changed.
    pub(crate) fn new(host: u64, content: &DiskContent) -> Result<(Self, DiskEntry), LendError> {
        content.check_base().map_err(LendError::Disk)?;
        let image = content.whole().map_err(LendError::Layer)?;
        let table = image.table_soon().ok_or(LendError::NotSealed)?;
        let here = |id: ImageId| ImageName { host, image: id.get() };
        let names: BTreeMap<ImageId, ImageName> = image
            .owners()
            .map(|(id, own)| (id, own.name_elsewhere().unwrap_or_else(|| here(id))))
            .collect();
        if names.len() > OWNERS_MAX || table.runs(table.range()).nth(RUNS_MAX).is_some() {
            return Err(LendError::Scattered { disk: content.spec.name.clone() });
        }
        let entry = DiskEntry {
            name: here(image.id()),
            size_bytes: image.size_bytes(),
            table: wire::encode(table, |id| names.get(&id).copied().unwrap_or_else(|| here(id))),
        };
        let named =
            image.owners().filter_map(|(id, own)| Some((*names.get(&id)?, Arc::clone(own))));
        let owners = named.collect();
        let content = DiskContent { lease: None, image, ..content.clone() };
        Ok((Self { content, owners }, entry))
    }

    /// The names of those whose pages it has.
    pub(crate) fn names(&self) -> impl Iterator<Item = ImageName> {
        self.owners.keys().copied()
    }

    /// The own pages of an owner.
    pub(crate) fn owner(&self, name: ImageName) -> Option<LentPages> {
        let own = self.owners.get(&name).cloned()?;
        Some(LentPages { own, content: self.content.clone() })
    }
}

/// Pages of a disk that is lent, to be read outside any lock.
#[derive(Debug)]
pub(crate) struct LentPages {
    own: Arc<dyn OwnPages>,
    content: DiskContent,
}

impl LentPages {
    /// How many pages the disk has.
    pub(crate) fn pages(&self) -> u64 {
        self.content.image.size_bytes().div_ceil(PAGE_BYTES)
    }

    /// For a disk on this host.
    pub(crate) fn into_owner(self) -> Arc<dyn OwnPages> {
        self.own
    }

    /// The pages of `range` that are its own. It may have others that no disk here names.
    pub(crate) fn owned(&self, range: PageRange) -> Vec<PageRange> {
        let mut runs = Vec::<PageRange>::new();
        let within = range.intersect(&PageRange::first(self.pages()));
        self.own.owned(within, &mut |run| match runs.last_mut() {
            Some(last) if last.end() == run.start() => {
                let joined = PageRange::new(last.start(), last.len() + run.len());
                *last = joined.unwrap_or(*last);
            }
            _ => runs.push(run),
        });
        runs
    }

    pub(crate) fn is_here(&self, range: PageRange) -> bool {
        self.own.is_here(range)
    }

    /// Whether it is this host's, and may be waited for. What came from another host is asked of
    /// that one.
    pub(crate) fn began_here(&self) -> bool {
        self.own.name_elsewhere().is_none()
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
) -> Result<(Vec<DiskContent>, Needs, Keeper), ArrivalError> {
    let keeper = Keeper::default();
    if specs.len() != entries.len() {
        return Err(ArrivalError::Disks { specs: specs.len(), entries: entries.len() });
    }
    let (mut contents, mut needs) = (Vec::new(), Vec::new());
    for (spec, entry) in specs.into_iter().zip(entries) {
        let name = entry.name;
        let unknown = || ArrivalError::Unknown { name, unknown: name };
        let pages = entry.size_bytes.div_ceil(PAGE_BYTES);
        if entry.size_bytes > DISK_BYTES_MAX || spec.size_bytes != entry.size_bytes {
            let (found, size_bytes) = (entry.size_bytes, spec.size_bytes);
            return Err(ArrivalError::DiskSize { name, found, size_bytes });
        }
        let limits =
            Limits { pages_max: pages, names_max: OWNERS_MAX as u64, runs_max: RUNS_MAX as u64 };
        let table = wire::decode(&entry.table, limits)
            .map_err(|source| ArrivalError::Table { name, source })?;
        if table.pages() != pages {
            return Err(ArrivalError::Size { name, found: table.pages(), pages });
        }
        let owners: Vec<ImageName> = table.names().to_vec();
        let table: PageTable = table
            .to_table(|name| ImageId::new(name.image))
            .map_err(|unknown| ArrivalError::Unknown { name, unknown })?;
        let mut of = BTreeMap::new();
        for owner in owners {
            let id = ImageId::new(owner.image).ok_or_else(unknown)?;
            let pages: Arc<dyn OwnPages> = match own(owner) {
                Some(own) => own,
                None => {
                    let runs: Vec<_> = table.pages_of(id).collect();
                    let arrived = here.arrive((owner, id), &runs, host_disks, &source)?;
                    needs.push(Need { pages: Arc::clone(&arrived), runs });
                    Arc::new(Kept { pages: arrived, _arrival: Arc::clone(&keeper) })
                }
            };
            if of.insert(id, pages).is_some() {
                return Err(ArrivalError::Unknown { name, unknown: owner });
            }
        }
        let id = ImageId::new(name.image).ok_or_else(unknown)?;
        let image = DiskImage::from_table(id, entry.size_bytes, table, of)
            .map_err(|source| ArrivalError::Disk { name, source })?;
        contents.push(DiskContent::from_elsewhere(spec, image));
    }
    Ok((contents, Needs(needs), keeper))
}

impl Disks {
    /// The pages of one owner. A disk names `runs` of them.
    fn arrive(
        &self,
        (name, id): (ImageName, ImageId),
        runs: &[PageRange],
        host_disks: &Arc<HostDisks>,
        source: &impl Fn(ImageName, u64) -> Arc<dyn PageSource>,
    ) -> Result<Arc<ArrivedPages>, ArrivalError> {
        // A layer has pages up to some of the disk's.
        let end = runs.iter().map(|run| run.end().0).max().unwrap_or(0);
        let pages = end.next_multiple_of(BLOCK_PAGES);
        let more = |own: &PageTable| {
            let derived = own.derive(runs.iter().map(|run| (*run, Source::Image(id))));
            derived.map_err(|_beyond| ArrivalError::Size { name, found: end, pages: own.pages() })
        };
        let known = |known: Arc<ArrivedPages>| {
            if known.pages() < pages {
                return Ok(None);
            }
            let mut own = known.own();
            *own = more(&own)?;
            drop(own);
            Ok(Some(known))
        };
        if let Some(found) = self.find(name).map(known).transpose()?.flatten() {
            // The host that lends it now may be asked, too.
            let _asks_more_hosts = source(name, found.pages());
            return Ok(found);
        }
        // Finding a host and making a file take their time: not under the lock.
        let own = Mutex::new(more(&PageTable::uniform(pages, Source::Zero))?);
        let file = host_disks.cache_file(pages).map_err(ArrivalError::DiskCache)?;
        let (all, source) = ([StoredRun::Own(PageRange::first(pages))], source(name, pages));
        let image = HostImage::stored_on(Box::new(file), id, pages, all, None, source)
            .map_err(|source| ArrivalError::Open { name, source })?;
        let (disks, came_pages) = (Arc::clone(host_disks), Arc::clone(&self.came_pages));
        let made = Arc::new(ArrivedPages { name, image, own, disks, came_pages });
        let mut arrived = self.arrived();
        // Another order may have been quicker.
        let quicker = arrived.get(&name).and_then(Weak::upgrade);
        if let Some(found) = quicker.map(known).transpose()?.flatten() {
            return Ok(found);
        }
        arrived.insert(name, Arc::downgrade(&made));
        Ok(made)
    }
}

#[cfg(test)]
#[path = "disks_tests.rs"]
mod tests;
