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

use super::loans::Loans;

/// An image as another host learns of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: ImageName,
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
    arrived: HashMap<ImageName, Weak<HostImage>>,
    names: HashMap<ImageId, ImageName>,
    loans: Loans<Arc<Engine>>,
}

impl Inner {
    fn tidy(&mut self) {
        self.arrived.retain(|_, image| image.strong_count() > 0);
        let arrived = &self.arrived;
        self.names.retain(|_, name| arrived.contains_key(name));
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
        if let Some(image) = inner.arrived.get(&name).and_then(Weak::upgrade) {
            return Some(image);
        }
        let family = inner.loans.find(name)?.image().with_ancestors();
        family.into_iter().find(|image| self.name_in(inner, image.id()) == name)
    }

    /// Lend the image of an engine, and all that it names, for as long as some host holds one of them. → what another host
    /// must know to open it, the image last.
    ///
    /// # Errors
    /// Its table is not complete.
    pub(crate) fn lend(&self, now: Instant, engine: &Arc<Engine>) -> Result<Vec<Entry>, LendError> {
        let mut family = engine.image().with_ancestors();
        // Who descends from an image was opened after it.
        family.sort_by_key(|image| image.id());
        let mut inner = self.inner();
        let names: BTreeMap<ImageId, ImageName> =
            family.iter().map(|image| (image.id(), self.name_in(&inner, image.id()))).collect();
        let entries = family.iter().map(|image| entry(image, &names));
        let entries = entries.collect::<Result<Vec<_>, LendError>>()?;
        let replaced = inner.loans.lend(now, names.into_values().collect(), Arc::clone(engine));
        drop(inner);
        drop(replaced); // not under the lock: may be an engine's last holder
        Ok(entries)
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
        // One at a time: of two that open the same, the second finds it open.
        let mut inner = self.inner();
        inner.tidy();
        let mut opened: HashMap<ImageName, Arc<HostImage>> = HashMap::new();
        let mut last = None;
        for entry in entries {
            let image = match self.find(&inner, entry.name) {
                Some(image) => image,
                None => {
                    let id = next();
                    let image = arrive(entry, pages, id, &opened, source(entry.name))?;
                    inner.names.insert(id, entry.name);
                    inner.arrived.insert(entry.name, Arc::downgrade(&image));
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

    /// A host has said what it holds.
    pub(crate) fn heard(&self, now: Instant, host: u64, held: BTreeSet<ImageName>) {
        self.inner().loans.heard(now, host, held);
    }

    /// Let go what no member needs any more.
    pub(crate) fn expire(&self, now: Instant, is_member: impl Fn(u64) -> bool) {
        let over = self.inner().loans.expire(now, is_member);
        drop(over); // not under the lock
    }

    /// Read an image's own pages for another host.
    ///
    /// # Errors
    /// `None`: no such image is known here; or why the pages can't be had.
    pub(crate) fn read(
        &self,
        name: ImageName,
        range: PageRange,
        bytes: &mut [u8],
    ) -> Result<(), Option<PageLost>> {
        let image = self.find(&self.inner(), name).ok_or(None)?;
        image.lend(range, bytes).map_err(Some)
    }

    /// Which pages of `range` of an image are in its cache here. `None`: there is no such image.
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
        Some(())
    }
}

/// What another host must know of an image, among those that it comes with. Pages of others are left out: where they count,
/// their images come, too.
fn entry(image: &HostImage, names: &BTreeMap<ImageId, ImageName>) -> Result<Entry, LendError> {
    let Layout { table, homes } = image.layout().ok_or(LendError::NotSealed)?;
    let is_left_out = |source: Source| source.image().is_some_and(|id| !names.contains_key(&id));
    let gone = table.runs(table.range()).filter(|(_, source)| is_left_out(*source));
    let gone: Vec<_> = gone.map(|(run, _)| (run, Source::Zero)).collect();
    let table = if gone.is_empty() { table } else { table.derive(gone)? };
    let nobody = ImageName { host: 0, image: 0 };
    let name = |id: ImageId| names.get(&id).copied().unwrap_or(nobody);
    let homes = homes.into_iter().map(|home| home.and_then(|id| names.get(&id).copied()));
    Ok(Entry {
        name: name(image.id()),
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
        let entries = a.lend(Instant::now(), &second).expect("sealed");
        assert_eq!(entries.len(), 2);
        let b = Arc::new(Images::new(2, 1));
        let there = arrives(&a, &b, &entries);
        assert_eq!(content(&there), expected);
        assert_eq!(b.held().len(), 2);
        // From there to a third, and back home.
        let engine = serve(there);
        let onward = b.lend(Instant::now(), &engine).expect("sealed");
        assert_eq!(onward, entries);
        assert_eq!(content(&arrives(&b, &Images::new(3, 1), &onward)), expected);
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
        let one = arrives(&a, &b, &a.lend(Instant::now(), &first).expect("sealed"));
        let two = arrives(&a, &b, &a.lend(Instant::now(), &second).expect("sealed"));
        let family = two.with_ancestors();
        assert!(family.iter().any(|image| Arc::ptr_eq(image, &one)));
        assert_eq!(two.table().expect("sealed").owners().get(one.id()), 678);
    }

    #[test]
    fn what_is_cut_or_names_strangers_is_refused() {
        let (a, _first, second) = two_generations();
        let entries = a.lend(Instant::now(), &second).expect("sealed");
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
        assert!(matches!(a.read(name, page, &mut bytes), Err(None)));
        a.lend(Instant::now(), &second).expect("sealed");
        a.read(name, page, &mut bytes).expect("lent");
        assert_eq!(bytes[0], 5);
        let of_before = ImageName { image: name.image ^ (1 << 32), ..name };
        assert!(matches!(a.read(of_before, page, &mut bytes), Err(None)));
        assert!(matches!(a.read(name, PageIdx(0).range(), &mut bytes), Err(Some(_))), "zero");
    }
}
