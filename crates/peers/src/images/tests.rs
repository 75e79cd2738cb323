use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmfork_engine::{EngineOptions, StoredRun};
use vmfork_image::{Origin, PageIdx};

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
    let second = HostImage::stored(next(), PAGES, own, Some(first.image()), Arc::new(Filled(5)));
    (images, first, serve(second.expect("opened")))
}

#[test]
fn an_image_is_the_same_on_every_host_and_at_home_it_is_itself() {
    let (a, _first, second) = two_generations();
    let expected = content(second.image());
    let (entries, _, _) = a.lend(Instant::now(), &second, &[], lender()).expect("sealed");
    assert_eq!(entries.len(), 2);
    let b = Arc::new(Images::new(2, 1));
    let there = arrives(&a, &b, &entries);
    assert_eq!(content(&there), expected);
    assert_eq!(b.held().len(), 2);
    // From there to a third, which asks the first, and back home.
    let engine = serve(there);
    let (onward, _, _) = b.lend(Instant::now(), &engine, &[], lender()).expect("sealed");
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
    let one = arrives(&a, &b, &a.lend(Instant::now(), &first, &[], lender()).expect("sealed").0);
    let two = arrives(&a, &b, &a.lend(Instant::now(), &second, &[], lender()).expect("sealed").0);
    let family = two.with_ancestors();
    assert!(family.iter().any(|image| Arc::ptr_eq(image, &one)));
    assert_eq!(two.table().expect("sealed").owners().get(one.id()), 678);
}

#[test]
fn a_host_that_has_nothing_gets_each_page_where_it_is_owned_and_where_it_is_at_home() {
    let (_, first, second) = two_generations();
    assert!(first.image().costs().into_iter().eq([(first.image().id(), 690)]));
    // Pages 10 to 512 are at home in the second, but for two zero ones.
    let costs = [(first.image().id(), 678), (second.image().id(), 500)];
    assert!(second.image().costs().into_iter().eq(costs), "{:?}", second.image().costs());
}

#[test]
fn what_is_cut_or_names_strangers_is_refused() {
    let (a, _first, second) = two_generations();
    let (entries, _, _) = a.lend(Instant::now(), &second, &[], lender()).expect("sealed");
    let refusal = |entries: &[Entry], pages| {
        let source = |_| Arc::new(Filled(0)) as Arc<dyn PageSource>;
        let error = Images::new(2, 1).open(entries, pages, next, source).expect_err("refused");
        vmfork_host::error::chain(&error)
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
    let _lent = a.lend(Instant::now(), &second, &[], lender()).expect("sealed");
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
        a.lend(Instant::now(), &second, &[], ours.clone()).expect("sealed"),
        a.lend(Instant::now(), &second, &[], ours.clone()).expect("sealed"),
    ];
    let of_another = serve(Arc::clone(first.image()));
    let of_first = a.asked(a.name(first.image().id()), range(50, 4), true);
    let pages = first.image().pages();
    assert_eq!(of_first, Some(Wanted { pages, is_own: true }), "it was frozen here");
    assert_eq!(a.asked(ImageName { host: 9, image: 1 }, range(50, 4), true), None);
    a.asked(a.name(first.image().id()), range(60, 4), false);
    let _lent = a.lend(Instant::now(), &of_another, &[], others.clone()).expect("sealed");
    a.asked(a.name(second.image().id()), range(100, 4), true);
    assert_eq!(ours.working_set.runs(), [range(50, 4), range(100, 4)]);
    assert_eq!(others.working_set.runs(), []);
}

#[test]
fn of_what_was_waited_for_stays_what_a_clone_has_touched() {
    let (a, first, second) = two_generations();
    let ours = lender();
    let _lent = a.lend(Instant::now(), &second, &[], ours.clone()).expect("sealed");
    let name = a.name(second.image().id());
    a.asked(name, range(48, 16), true);
    a.asked(name, range(96, 16), true);
    let pages = second.image().pages();
    // Of a snapshot that was not lent by itself, though its image is needed: it is another VM's.
    a.touched(a.name(first.image().id()), &[range(50, 1)]);
    a.touched(ImageName { host: 9, image: 1 }, &[range(50, 1)]);
    assert_eq!(ours.working_set.runs(), [range(48, 16), range(96, 16)]);
    a.touched(name, &[range(50, 2), range(pages, 1 << 40), range(pages - 1, 5)]);
    assert_eq!(ours.working_set.runs(), [range(50, 2), range(96, 16), range(pages - 1, 1)]);
}

#[test]
fn a_third_hosts_pages_are_given_on_only_if_they_are_here() {
    let (a, _first, second) = two_generations();
    let (entries, _, _) = a.lend(Instant::now(), &second, &[], lender()).expect("sealed");
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
    let (entries, _, _) = a.lend(Instant::now(), &second, &[], lender()).expect("sealed");
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
        let image = HostImage::stored(next(), PAGES, own.to_vec(), base, Arc::new(Filled(with)));
        serve(image.expect("opened"))
    };
    let a = stored(&[StoredRun::Own(range(0, 10))], None, 3);
    let b = stored(&[StoredRun::Own(range(20, 10))], Some(a.image()), 5);
    let d = stored(&[StoredRun::Own(range(0, 10))], Some(b.image()), 7);
    let (first, _, _) = images.lend(Instant::now(), &d, &[], lender()).expect("sealed");
    assert_eq!(first.iter().map(|entry| entry.is_partial).collect::<Vec<_>>(), [true, false]);
    let there = Arc::new(Images::new(2, 1));
    let of_d = arrives(&images, &there, &first);
    assert_eq!(content(&of_d), content(d.image()));
    let (second, _, _) = images.lend(Instant::now(), &b, &[], lender()).expect("sealed");
    let of_b = arrives(&images, &there, &second);
    assert_eq!(content(&of_b), content(b.image()), "with the pages of `a`");
    // And it is that one from now on.
    assert!(Arc::ptr_eq(&arrives(&images, &there, &second), &of_b));
}
