//! Images across hosts: what each is called, which of others are open here, and which are lent.
//!
//! ```text
//!   lend ── entries: layouts of an image and of all that it names, the oldest first ──► open
//!    │                                                                                   │
//!   read ◄──────────────────────── pages, as they are touched ───────────────────────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use vmfork_engine::{Engine, HostImage, Layout, PageLost};
use vmfork_image::wire::{self, Limits};
use vmfork_image::{BLOCK_PAGES, ImageId, ImageName, PageRange, PageSource, PageTable, Source};
use vmfork_transfer::Wanted;

use super::arrivals::Arrival;
use super::disks::{DiskEntry, Disks, LentDisk, LentPages};
use super::error::{ArrivalError, LendError};
use super::loans::Loans;
use vmfork_disk::OwnPages;
use vmfork_host::disks::DiskContent;
use vmfork_host::vm::WorkingSet;

/// An image as another host learns of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub name: ImageName,
    /// Pages of images that do not come along are left out of its table. Its own are not: those
    /// above it are whole.
    pub is_partial: bool,
    /// As bytes ([`vmfork_image::wire`]): its page table, and its blocks' homes.
    pub table: Vec<u8>,
    pub homes: Vec<u8>,
}

/// Of one host, for one life of its daemon.
#[derive(Debug)]
pub(crate) struct Images {
    host: u64,
    /// Told from those of other lives by the upper half of its number.
    epoch: u32,
    inner: Mutex<Inner>,
    /// Pages of others' disks that are here.
    disks: Disks,
}

#[derive(Debug, Default)]
struct Inner {
    /// Those of others that are open here.
    arrived: HashMap<ImageName, Arrived>,
    names: HashMap<ImageId, ImageName>,
    loans: Loans<Lent>,
}

/// An image of another host that is open here.
#[derive(Debug)]
struct Arrived {
    image: Weak<HostImage>,
    is_partial: bool,
}

/// What a loan keeps.
#[derive(Debug)]
struct Lent {
    engine: Arc<Engine>,
    of: Lender,
    disks: Vec<LentDisk>,
}

/// The VM whose snapshot is lent.
#[derive(Debug, Clone)]
pub(crate) struct Lender {
    /// That its own pages from other hosts are still needed.
    _arrival: Option<Arc<Arrival>>,
    /// What is asked for of it.
    working_set: Arc<WorkingSet>,
}

impl Lender {
    /// It came of `arrival`, if it did not boot here.
    pub(crate) fn new(arrival: Option<Arc<Arrival>>, working_set: Arc<WorkingSet>) -> Self {
        Self { _arrival: arrival, working_set }
    }
}

/// Why pages are not read for another host.
#[derive(Debug)]
pub(crate) enum NotRead {
    /// No such image is known here.
    Unknown,
    /// They are another host's, and not all of them have come here.
    Absent,
    Lost(PageLost),
    /// Of a disk.
    Disk(io::Error),
}

/// A loan is being sent while this lives.
#[derive(Debug)]
pub(crate) struct Sending {
    images: Arc<Images>,
    name: ImageName,
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.images.inner().loans.sent(Instant::now(), self.name);
    }
}

impl Inner {
    fn tidy(&mut self) {
        self.arrived.retain(|_, arrived| arrived.image.strong_count() > 0);
        let arrived = &self.arrived;
        self.names.retain(|_, name| arrived.contains_key(name));
    }

    fn arrived(&self, name: ImageName) -> Option<Arc<HostImage>> {
        self.arrived.get(&name)?.image.upgrade()
    }
}

impl Images {
    pub(crate) fn new(host: u64, epoch: u32) -> Self {
        Self { host, epoch, inner: Mutex::default(), disks: Disks::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages of others' disks that are here.
    pub(crate) fn disks(&self) -> &Disks {
        &self.disks
    }

    /// What an image that is open here is called across hosts.
    pub(crate) fn name(&self, id: ImageId) -> ImageName {
        self.name_in(&self.inner(), id)
    }

    /// Frozen by this life of the daemon. One of an earlier life may have come back from another
    /// host.
    fn is_own(&self, name: ImageName) -> bool {
        name.host == self.host && name.image >> 32 == u64::from(self.epoch)
    }

    fn name_in(&self, inner: &Inner, id: ImageId) -> ImageName {
        let own = ImageName { host: self.host, image: u64::from(self.epoch) << 32 | id.get() };
        inner.names.get(&id).copied().unwrap_or(own)
    }

    /// One of another host that is open here, or one that is lent.
    fn find(&self, inner: &Inner, name: ImageName) -> Option<Arc<HostImage>> {
        if let Some(image) = inner.arrived(name) {
            return Some(image);
        }
        let family = inner.loans.find(name)?.engine.image().with_ancestors();
        family.into_iter().find(|image| self.name_in(inner, image.id()) == name)
    }

    /// Lend the image of an engine and all that it names, and disks, for as long as some host has
    /// VMs of it. → what another host must know to open it, the image last; and what is held while
    /// that is sent.
    ///
    /// # Errors
    /// Its table is not complete, or that of a disk.
    pub(crate) fn lend(
        self: &Arc<Self>,
        now: Instant,
        engine: &Arc<Engine>,
        contents: &[DiskContent],
        of: Lender,
    ) -> Result<(Vec<Entry>, Vec<DiskEntry>, Sending), LendError> {
        let disks = contents.iter().map(|disk| LentDisk::new(self.host, disk));
        let (disks, disk_entries): (Vec<_>, Vec<_>) =
            disks.collect::<Result<Vec<_>, LendError>>()?.into_iter().unzip();
        let mut family = engine.image().with_ancestors();
        // Who descends from an image was opened after it.
        family.sort_by_key(|image| image.id());
        let (names, partial) = {
            let inner = self.inner();
            let names: BTreeMap<ImageId, ImageName> =
                family.iter().map(|image| (image.id(), self.name_in(&inner, image.id()))).collect();
            let is_partial = |name: &ImageName| {
                inner.arrived.get(name).is_some_and(|arrived| arrived.is_partial)
            };
            let partial: BTreeSet<ImageName> = names.values().copied().filter(is_partial).collect();
            (names, partial)
        };
        let entries = family.iter().map(|image| entry(image, &names, &partial));
        let entries = entries.collect::<Result<Vec<_>, LendError>>()?;
        let name = names.get(&engine.image().id()).copied().ok_or(LendError::NotSealed)?;
        let all = names.into_values().chain(disks.iter().flat_map(LentDisk::names)).collect();
        let lent = Lent { engine: Arc::clone(engine), of, disks };
        let replaced = self.inner().loans.lend(now, name, all, lent);
        drop(replaced); // not under the lock: may be an engine's last holder
        Ok((entries, disk_entries, Sending { images: Arc::clone(self), name }))
    }

    /// Open the last of `entries`, each of which may name those before it and those that are open
    /// here. `source` says where an image's own pages come from, `next` gives ids.
    ///
    /// # Errors
    /// [`ArrivalError`].
    pub(crate) fn open(
        &self,
        entries: &[Entry],
        pages: u64,
        mut next: impl FnMut() -> ImageId,
        source: impl Fn(ImageName) -> Arc<dyn PageSource>,
    ) -> Result<Arc<HostImage>, ArrivalError> {
        // Finding a host may take its time: not under the lock.
        let sources: Vec<_> = entries.iter().map(|entry| source(entry.name)).collect();
        // One at a time: of two that open the same, the second finds it open.
        let mut inner = self.inner();
        inner.tidy();
        let mut opened: HashMap<ImageName, Arc<HostImage>> = HashMap::new();
        let mut last = None;
        for (number, (entry, source)) in (1..).zip(entries.iter().zip(sources)) {
            let is_whole = inner.arrived.get(&entry.name).is_none_or(|arrived| !arrived.is_partial);
            // What was left out of a table counts for VMs of that image, not for those that descend
            // from it.
            let known = match is_whole || number < entries.len() {
                true => self.find(&inner, entry.name),
                false => None,
            };
            let image = match known {
                Some(image) => image,
                None => {
                    let id = next();
                    let image = arrive(entry, pages, id, &opened, source)?;
                    inner.names.insert(id, entry.name);
                    let arrived =
                        Arrived { image: Arc::downgrade(&image), is_partial: entry.is_partial };
                    inner.arrived.insert(entry.name, arrived);
                    image
                }
            };
            opened.insert(entry.name, Arc::clone(&image));
            last = Some(image);
        }
        last.ok_or(ArrivalError::Empty)
    }

    /// The images of other hosts that some VM here may still need pages of.
    pub(crate) fn held(&self) -> BTreeSet<ImageName> {
        let of_disks = self.disks.held();
        let mut inner = self.inner();
        inner.tidy();
        inner.arrived.keys().copied().chain(of_disks).collect()
    }

    /// What is lent of a disk's owner.
    fn lent_pages(&self, name: ImageName) -> Option<LentPages> {
        let inner = self.inner();
        let disks = inner.loans.all_of(name).flat_map(|lent| &lent.disks);
        // One loan may have the layer itself, and another what came of it from elsewhere.
        disks.filter_map(|disk| disk.owner(name)).min_by_key(|own| !own.began_here())
    }

    /// The own pages of a disk of this host that is lent, or of what it lies on.
    pub(crate) fn lent_owner(&self, name: ImageName) -> Option<Arc<dyn OwnPages>> {
        self.lent_pages(name).filter(LentPages::began_here).map(LentPages::into_owner)
    }

    /// An image of another host that is open here.
    pub(super) fn arrived(&self, name: ImageName) -> Option<Arc<HostImage>> {
        self.inner().arrived(name)
    }

    /// A host has said which snapshots VMs there came of.
    pub(crate) fn heard(&self, now: Instant, host: u64, snapshots: BTreeSet<ImageName>) {
        self.inner().loans.heard(now, host, snapshots);
    }

    /// Let go what no member needs any more.
    pub(crate) fn expire(&self, now: Instant, is_member: impl Fn(u64) -> bool) {
        let over = self.inner().loans.expire(now, is_member);
        drop(over); // not under the lock
    }

    /// Another host asks for pages of an image, because a VM waits for them or not. → what that
    /// image is, if it is known here.
    pub(crate) fn asked(&self, name: ImageName, range: PageRange, demand: bool) -> Option<Wanted> {
        let inner = self.inner();
        if let Some(image) = self.find(&inner, name) {
            if demand {
                inner.loans.all_of(name).for_each(|lent| lent.of.working_set.record(range));
            }
            return Some(Wanted { pages: image.pages(), is_own: self.is_own(name) });
        }
        drop(inner);
        // Layers of disks outlive a daemon.
        let is_own = name.host == self.host;
        let pages = self.lent_pages(name).map(|own| own.pages());
        let pages = pages.or_else(|| self.disks.find(name).map(|arrived| arrived.pages()))?;
        Some(Wanted { pages, is_own })
    }

    /// A clone of a snapshot that is lent has touched these pages and no others.
    pub(crate) fn touched(&self, snapshot: ImageName, runs: &[PageRange]) {
        let lent = self
            .inner()
            .loans
            .lent(snapshot)
            .map(|lent| (lent.engine.image().pages(), Arc::clone(&lent.of.working_set)));
        let Some((pages, working_set)) = lent else { return };
        let all = PageRange::first(pages);
        let runs = runs.iter().map(|run| run.intersect(&all)).filter(|run| !run.is_empty());
        working_set.refine(&runs.collect::<Vec<_>>());
    }

    /// Read an image's own pages for another host. Those of a third host are given only if they are
    /// here: of two hosts that lack a page neither asks the other, and so on in a circle.
    ///
    /// # Errors
    /// [`NotRead`].
    pub(crate) fn read(
        &self,
        name: ImageName,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<(), NotRead> {
        let Some(image) = self.find(&self.inner(), name) else {
            return self.read_disk(name, range, bytes);
        };
        if !self.is_own(name) && image.cache().presence().run(range) != (range, true) {
            return Err(NotRead::Absent);
        }
        image.lend(range, bytes).map_err(NotRead::Lost)
    }

    fn read_disk(
        &self,
        name: ImageName,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<(), NotRead> {
        let lent = self.lent_pages(name);
        if let Some(own) = lent.filter(LentPages::began_here) {
            return match own.owned(range)[..] == [range] {
                true => own.read(range, bytes).map_err(NotRead::Disk),
                false => Err(NotRead::Unknown),
            };
        }
        match self.disks.find(name) {
            Some(arrived) if arrived.is_here(range) => {
                arrived.read(range, bytes).map_err(NotRead::Disk)
            }
            Some(_) => Err(NotRead::Absent),
            None => Err(NotRead::Unknown),
        }
    }

    /// Whether all pages of `range` can be read here without being fetched.
    pub(crate) fn has(&self, name: ImageName, range: PageRange) -> bool {
        let Some(image) = self.find(&self.inner(), name) else {
            let lent = self.lent_pages(name);
            return match lent.filter(LentPages::began_here) {
                Some(own) => own.owned(range)[..] == [range] && own.is_here(range),
                None => self.disks.find(name).is_some_and(|arrived| arrived.is_here(range)),
            };
        };
        if !self.is_own(name) {
            return image.cache().presence().run(range) == (range, true);
        }
        let mut pages = 0;
        image.own_here(range, &mut |run| pages += run.len());
        pages == range.len()
    }

    /// Which pages of `range` of an image that was frozen here are its own, and need not be fetched
    /// to be read. `None`: there is no such image.
    pub(crate) fn own(
        &self,
        name: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Option<()> {
        if let Some(image) = self.find(&self.inner(), name) {
            return self.is_own(name).then(|| image.own_here(range, each));
        }
        if name.host != self.host {
            return None;
        }
        let own = self.lent_pages(name).filter(LentPages::began_here)?;
        let runs = own.owned(range).into_iter().filter(|run| own.is_here(*run));
        runs.for_each(each);
        Some(())
    }

    /// Which pages of `range` need not be asked for: they are in the image's cache here, or are not
    /// its own.
    /// `None`: there is no such image.
    pub(crate) fn present(
        &self,
        name: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Option<()> {
        let Some(image) = self.find(&self.inner(), name) else {
            self.disks.find(name)?.present(range, each);
            return Some(());
        };
        image.cached(range, each);
        if let Some(table) = image.table() {
            let own = Source::Image(image.id());
            let others = table.runs(range.intersect(&table.range()));
            others.filter(|(_, source)| *source != own).for_each(|(run, _)| each(run));
        }
        Some(())
    }
}

/// What another host must know of an image, among those that it comes with. Pages of others are
/// left out: where they count, their images come, too.
fn entry(
    image: &HostImage,
    names: &BTreeMap<ImageId, ImageName>,
    partial: &BTreeSet<ImageName>,
) -> Result<Entry, LendError> {
    let Layout { table, homes } = image.layout().ok_or(LendError::NotSealed)?;
    let is_left_out = |source: Source| source.image().is_some_and(|id| !names.contains_key(&id));
    let gone = table.runs(table.range()).filter(|(_, source)| is_left_out(*source));
    let gone: Vec<_> = gone.map(|(run, _)| (run, Source::Zero)).collect();
    let leaves_out = !gone.is_empty();
    let table = if leaves_out { table.derive(gone)? } else { table };
    let nobody = ImageName { host: 0, image: 0 };
    let name = |id: ImageId| names.get(&id).copied().unwrap_or(nobody);
    let homes = homes.into_iter().map(|home| home.and_then(|id| names.get(&id).copied()));
    Ok(Entry {
        name: name(image.id()),
        is_partial: leaves_out || partial.contains(&name(image.id())),
        table: wire::encode(&table, name),
        homes: wire::encode_homes(homes),
    })
}

fn arrive(
    entry: &Entry,
    pages: u64,
    id: ImageId,
    opened: &HashMap<ImageName, Arc<HostImage>>,
    source: Arc<dyn PageSource>,
) -> Result<Arc<HostImage>, ArrivalError> {
    let name = entry.name;
    let limits = Limits { pages_max: pages, ..Limits::default() };
    let table = wire::decode(&entry.table, limits)
        .map_err(|source| ArrivalError::Table { name, source })?;
    if table.pages() != pages {
        return Err(ArrivalError::Size { name, found: table.pages(), pages });
    }
    let here = |other: ImageName| match other == name {
        true => Some(id),
        false => opened.get(&other).map(|image| image.id()),
    };
    let table: PageTable =
        table.to_table(here).map_err(|unknown| ArrivalError::Unknown { name, unknown })?;
    let homes = wire::decode_homes(&entry.homes, limits)
        .map_err(|source| ArrivalError::Homes { name, source })?;
    if homes.blocks() != pages.div_ceil(BLOCK_PAGES) {
        return Err(ArrivalError::Size { name, found: homes.blocks() * BLOCK_PAGES, pages });
    }
    let each = homes
        .runs()
        .flat_map(|(_, len, home)| std::iter::repeat_n(home, usize::try_from(len).unwrap_or(0)));
    // Of a home that is unknown here its own cache takes the place.
    let homes = each.map(|home| home.and_then(here)).collect();
    let relatives: Vec<_> = opened.values().map(Arc::clone).collect();
    HostImage::remote(id, Layout { table, homes }, &relatives, source)
        .map_err(|source| ArrivalError::Open { name, source })
}

#[cfg(test)]
mod tests;
