//! Images across hosts: what each is called, which of others are open here, and which are lent.
//!
//! ```text
//!   lend ── entries: layouts of an image and of all that it names, the oldest first ──► open
//!    │                                                                                   │
//!   read ◄──────────────────────── pages, as they are touched ───────────────────────────┘
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use vmfork_image::wire::{self, Limits, WireError};
use vmfork_image::{
    BLOCK_PAGES, ImageId, ImageName, PageRange, PageSource, PageTable, Source, TableError,
};
use vmfork_memory::{Engine, HostImage, Layout, OpenError, PageLost};

use super::arrivals::Arrival;
use super::loans::Loans;
use super::working_set::WorkingSet;

/// An image as another host learns of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: ImageName,
    /// Pages of images that do not come along are left out of its table. Its own are not: those above it are whole.
    pub(crate) is_partial: bool,
    /// As bytes ([`vmfork_image::wire`]): its page table, and its blocks' homes.
    pub(crate) table: Vec<u8>,
    pub(crate) homes: Vec<u8>,
}

/// An image of another host can't be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArrivalError {
    #[error("the page table of image {name}")]
    Table { name: ImageName, source: WireError },
    #[error("the homes of image {name}")]
    Homes { name: ImageName, source: WireError },
    #[error("image {name} names image {unknown}, which came neither with it nor before it")]
    Unknown { name: ImageName, unknown: ImageName },
    #[error("image {name} has {found} pages, the VM {pages}")]
    Size { name: ImageName, found: u64, pages: u64 },
    #[error("image {name}")]
    Open { name: ImageName, source: OpenError },
    #[error("it names no image")]
    Empty,
}

/// An image can't be lent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LendError {
    #[error("what its VM had written is not known yet")]
    NotSealed,
    #[error("its page table")]
    Table(#[from] TableError),
}

/// Of one host, for one life of its daemon.
#[derive(Debug)]
pub(crate) struct Images {
    host: u64,
    /// Told from those of other lives by the upper half of its number.
    epoch: u32,
    inner: Mutex<Inner>,
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
        Self { host, epoch, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What an image that is open here is called across hosts.
    #[cfg(test)]
    pub(crate) fn name(&self, id: ImageId) -> ImageName {
        self.name_in(&self.inner(), id)
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

    /// Lend the image of an engine, and all that it names, for as long as some host has VMs of it. → what another host must know to open it, the image last; and what is held while that is sent.
    ///
    /// # Errors
    /// Its table is not complete.
    pub(crate) fn lend(
        self: &Arc<Self>,
        now: Instant,
        engine: &Arc<Engine>,
        of: Lender,
    ) -> Result<(Vec<Entry>, Sending), LendError> {
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
        let lent = Lent { engine: Arc::clone(engine), of };
        let replaced = self.inner().loans.lend(now, name, names.into_values().collect(), lent);
        drop(replaced); // not under the lock: may be an engine's last holder
        Ok((entries, Sending { images: Arc::clone(self), name }))
    }

    /// Open the last of `entries`, each of which may name those before it and those that are open here. `source` says where an
    /// image's own pages come from, `next` gives ids.
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
            // What was left out of a table counts for VMs of that image, not for those that descend from it.
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
        let mut inner = self.inner();
        inner.tidy();
        inner.arrived.keys().copied().collect()
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

    /// Another host waits for pages of an image.
    pub(crate) fn demanded(&self, name: ImageName, range: PageRange) {
        let inner = self.inner();
        inner.loans.all_of(name).for_each(|lent| lent.of.working_set.record(range));
    }

    /// Read an image's own pages for another host. Those of a third host are given only if they are here: of two hosts that
    /// lack a page neither asks the other, and so on in a circle.
    ///
    /// # Errors
    /// [`NotRead`].
    pub(crate) fn read(
        &self,
        name: ImageName,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<(), NotRead> {
        let image = self.find(&self.inner(), name).ok_or(NotRead::Unknown)?;
        if name.host != self.host && image.cache().presence().run(range) != (range, true) {
            return Err(NotRead::Absent);
        }
        image.lend(range, bytes).map_err(NotRead::Lost)
    }

    /// Which pages of `range` of an image are in its cache here, or are not its own, so that nobody will ask for them. `None`: there is
    /// no such image.
    pub(crate) fn present(
        &self,
        name: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Option<()> {
        let image = self.find(&self.inner(), name)?;
        let presence = image.cache().presence();
        let mut rest = range.intersect(&PageRange::first(image.pages()));
        while !rest.is_empty() {
            let (run, is_present) = presence.run(rest);
            if is_present {
                each(run);
            }
            rest = rest.from_page(run.end());
        }
        if let Some(table) = image.table() {
            let own = Source::Image(image.id());
            let others = table.runs(range.intersect(&table.range()));
            others.filter(|(_, source)| *source != own).for_each(|(run, _)| each(run));
        }
        Some(())
    }
}

/// What another host must know of an image, among those that it comes with. Pages of others are left out: where they count,
/// their images come, too.
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
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use vmfork_image::{Origin, PageIdx};
    use vmfork_memory::{EngineOptions, StoredRun};

    use super::*;

    const PAGES: u64 = 4 * BLOCK_PAGES;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    fn next() -> ImageId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        ImageId::new(NEXT.fetch_add(1, Ordering::Relaxed)).expect("not 0")
    }

    /// Every byte of a page is this.
    #[derive(Debug)]
    struct Filled(u8);

    impl PageSource for Filled {
        fn origin(&self) -> Origin {
            Origin::Chunk
        }

        fn unit_pages(&self) -> u64 {
            16
        }

        fn read(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
            bytes.fill(self.0);
            Ok(())
        }
    }

    /// The images of another host, without a network.
    #[derive(Debug)]
    struct Asked(Arc<Images>, ImageName);

    impl PageSource for Asked {
        fn origin(&self) -> Origin {
            Origin::Peer
        }

        fn unit_pages(&self) -> u64 {
            16
        }

        fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
            let read = self.0.read(self.1, range, bytes);
            read.map_err(|lost| io::Error::other(format!("{lost:?}")))
        }
    }

    fn lender() -> Lender {
        Lender::new(None, Arc::default())
    }

    fn serve(image: Arc<HostImage>) -> Arc<Engine> {
        let engine = Engine::serve(image, &EngineOptions::default(), Arc::new(|_| ()));
        Arc::new(engine.expect("engine"))
    }

    fn arrives(from: &Arc<Images>, at: &Images, entries: &[Entry]) -> Arc<HostImage> {
        let source = |name| Arc::new(Asked(Arc::clone(from), name)) as Arc<dyn PageSource>;
        at.open(entries, PAGES, next, source).expect("opened")
    }

    fn content(image: &HostImage) -> Vec<u8> {
        let mut bytes = vec![1; usize::try_from(PAGES * 4096).expect("small")];
        image.read(PageRange::first(PAGES), &mut bytes).expect("there");
        bytes.chunks(4096).map(|page| page[0]).collect()
    }

    /// An image of pages 10 to 700, and one on it that overwrote 100 to 110, on a host.
    fn two_generations() -> (Arc<Images>, Arc<Engine>, Arc<Engine>) {
        let images = Arc::new(Images::new(1, 77));
        let own = [StoredRun::Own(range(10, 690))];
        let first = HostImage::stored(next(), PAGES, own, None, Arc::new(Filled(3)));
        let first = serve(first.expect("opened"));
        let own = [StoredRun::Own(range(100, 10)), StoredRun::Zero(range(120, 2))];
        let second =
            HostImage::stored(next(), PAGES, own, Some(first.image()), Arc::new(Filled(5)));
        (images, first, serve(second.expect("opened")))
    }

    #[test]
    fn an_image_is_the_same_on_every_host_and_at_home_it_is_itself() {
        let (a, _first, second) = two_generations();
        let expected = content(second.image());
        let (entries, _) = a.lend(Instant::now(), &second, lender()).expect("sealed");
        assert_eq!(entries.len(), 2);
        let b = Arc::new(Images::new(2, 1));
        let there = arrives(&a, &b, &entries);
        assert_eq!(content(&there), expected);
        assert_eq!(b.held().len(), 2);
        // From there to a third, which asks the first, and back home.
        let engine = serve(there);
        let (onward, _) = b.lend(Instant::now(), &engine, lender()).expect("sealed");
        assert_eq!(onward, entries);
        assert_eq!(content(&arrives(&a, &Images::new(3, 1), &onward)), expected);
        assert!(Arc::ptr_eq(&arrives(&b, &a, &onward), second.image()));
        assert!(a.held().is_empty(), "its own");
        drop(engine);
        b.expire(Instant::now() + Duration::from_secs(61), |_| true);
        // Its engine ends by itself.
        let deadline = Instant::now() + Duration::from_secs(10);
        while !b.held().is_empty() {
            assert!(Instant::now() < deadline, "nobody there needs it any more, nor elsewhere");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    #[test]
    fn generations_share_where_they_arrive() {
        let (a, first, second) = two_generations();
        let b = Images::new(2, 1);
        let one = arrives(&a, &b, &a.lend(Instant::now(), &first, lender()).expect("sealed").0);
        let two = arrives(&a, &b, &a.lend(Instant::now(), &second, lender()).expect("sealed").0);
        let family = two.with_ancestors();
        assert!(family.iter().any(|image| Arc::ptr_eq(image, &one)));
        assert_eq!(two.table().expect("sealed").owners().get(one.id()), 678);
    }

    #[test]
    fn what_is_cut_or_names_strangers_is_refused() {
        let (a, _first, second) = two_generations();
        let (entries, _) = a.lend(Instant::now(), &second, lender()).expect("sealed");
        let refusal = |entries: &[Entry], pages| {
            let source = |_| Arc::new(Filled(0)) as Arc<dyn PageSource>;
            let error = Images::new(2, 1).open(entries, pages, next, source).expect_err("refused");
            crate::hub::chain(&error)
        };
        assert!(refusal(&entries[1..], PAGES).contains("came neither with it nor before it"));
        assert!(refusal(&entries, 2 * PAGES).contains("has 2048 pages, the VM 4096"));
        assert_eq!(refusal(&[], PAGES), "it names no image");
        let cut = Entry { homes: vec![0; 3], ..entries[0].clone() };
        assert!(refusal(&[cut], PAGES).starts_with("the homes of image 0000000000000001/"));
    }

    #[test]
    fn what_is_not_lent_or_of_another_life_is_not_read() {
        let (a, _first, second) = two_generations();
        let name = a.name(second.image().id());
        let mut bytes = vec![0; 4096];
        let page = PageIdx(100).range();
        assert!(matches!(a.read(name, page, &mut bytes), Err(NotRead::Unknown)));
        let _lent = a.lend(Instant::now(), &second, lender()).expect("sealed");
        a.read(name, page, &mut bytes).expect("lent");
        assert_eq!(bytes[0], 5);
        let of_before = ImageName { image: name.image ^ (1 << 32), ..name };
        assert!(matches!(a.read(of_before, page, &mut bytes), Err(NotRead::Unknown)));
        let zero = a.read(name, PageIdx(0).range(), &mut bytes);
        assert!(matches!(zero, Err(NotRead::Lost(_))), "{zero:?}");
    }

    #[test]
    fn what_other_hosts_wait_for_is_the_working_set_of_the_vm_that_lent_it() {
        let (a, first, second) = two_generations();
        let [ours, others] = [lender(), lender()];
        let _lent = [
            a.lend(Instant::now(), &second, ours.clone()).expect("sealed"),
            a.lend(Instant::now(), &second, ours.clone()).expect("sealed"),
        ];
        let of_another = serve(Arc::clone(first.image()));
        a.demanded(a.name(first.image().id()), range(50, 4));
        let _lent = a.lend(Instant::now(), &of_another, others.clone()).expect("sealed");
        a.demanded(a.name(second.image().id()), range(100, 4));
        assert_eq!(ours.working_set.runs(), [range(50, 4), range(100, 4)]);
        assert_eq!(others.working_set.runs(), []);
    }

    #[test]
    fn a_third_hosts_pages_are_given_on_only_if_they_are_here() {
        let (a, _first, second) = two_generations();
        let (entries, _) = a.lend(Instant::now(), &second, lender()).expect("sealed");
        let b = Images::new(2, 1);
        let there = arrives(&a, &b, &entries);
        let name = a.name(second.image().id());
        let mut bytes = vec![0; 4096];
        assert!(matches!(b.read(name, PageIdx(100).range(), &mut bytes), Err(NotRead::Absent)));
        there.lend(PageIdx(100).range(), &mut bytes).expect("fetched");
        b.read(name, PageIdx(100).range(), &mut bytes).expect("here");
        assert_eq!(bytes[0], 5);
        assert!(matches!(b.read(name, range(100, 9), &mut [0; 9 * 4096]), Err(NotRead::Absent)));
    }

    #[test]
    fn what_is_held_is_what_has_come_and_what_nobody_will_ask_for() {
        let (a, _first, second) = two_generations();
        let (entries, _) = a.lend(Instant::now(), &second, lender()).expect("sealed");
        let b = Images::new(2, 1);
        let there = arrives(&a, &b, &entries);
        let name = a.name(second.image().id());
        let held = |range: PageRange| {
            let mut held = BTreeSet::new();
            b.present(name, range, &mut |run| held.extend(run.pages().map(|page| page.0)));
            held
        };
        // Its own are 100 to 110.
        assert_eq!(held(range(96, 16)), [96, 97, 98, 99, 110, 111].into());
        there.lend(range(104, 2), &mut [0; 2 * 4096]).expect("fetched");
        assert_eq!(held(range(102, 10)), [104, 105, 110, 111].into());
    }

    #[test]
    fn an_image_whose_table_came_in_part_is_opened_anew_for_vms_of_its_own() {
        // `b` needs `a` and `c`; `d`, on `b`, overwrote all that `b` had of `a`.
        let images = Arc::new(Images::new(1, 77));
        let stored = |own: &[StoredRun], base: Option<&Arc<HostImage>>, with| {
            let image =
                HostImage::stored(next(), PAGES, own.to_vec(), base, Arc::new(Filled(with)));
            serve(image.expect("opened"))
        };
        let a = stored(&[StoredRun::Own(range(0, 10))], None, 3);
        let b = stored(&[StoredRun::Own(range(20, 10))], Some(a.image()), 5);
        let d = stored(&[StoredRun::Own(range(0, 10))], Some(b.image()), 7);
        let (first, _) = images.lend(Instant::now(), &d, lender()).expect("sealed");
        assert_eq!(first.iter().map(|entry| entry.is_partial).collect::<Vec<_>>(), [true, false]);
        let there = Arc::new(Images::new(2, 1));
        let of_d = arrives(&images, &there, &first);
        assert_eq!(content(&of_d), content(d.image()));
        let (second, _) = images.lend(Instant::now(), &b, lender()).expect("sealed");
        let of_b = arrives(&images, &there, &second);
        assert_eq!(content(&of_b), content(b.image()), "with the pages of `a`");
        // And it is that one from now on.
        assert!(Arc::ptr_eq(&arrives(&images, &there, &second), &of_b));
    }
}
