use std::io;
use std::time::{Duration, Instant};

use vmfork_engine::{EngineOptions, StoredRun};
use vmfork_image::{BLOCK_PAGES, ImageId, Origin, PageIdx, PageRange, PageSource};

use super::*;
use vmfork_host::admission::{HostMemory, Policy, Probe};

const PAGES: u64 = 2 * BLOCK_PAGES;
const NAME: ImageName = ImageName { host: 2, image: 7 };
const SOON: Duration = Duration::from_secs(10);

/// A host with 1 GiB.
struct Made;

impl Probe for Made {
    fn host(&self) -> HostMemory {
        HostMemory { total_bytes: 1 << 30, available_bytes: 1 << 30 }
    }

    fn private_bytes(&self, _: u32) -> u64 {
        0
    }
}

fn admission() -> Admission {
    let policy = Policy {
        reserve_bytes: 0,
        clone_growth_percent: 10,
        family_vms_max: 256,
        family_memory_percent: 75,
        family_vcpus_percent: 75,
        cores: 4,
        vcpus_per_core: 64,
    };
    Admission::new(policy, Box::new(Made))
}

/// The other host, which can be cut off.
#[derive(Debug, Default)]
struct There {
    is_cut_off: AtomicBool,
    refused: AtomicU64,
}

impl PageSource for There {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, _: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        if self.is_cut_off.load(Ordering::SeqCst) {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return Err(io::ErrorKind::TimedOut.into());
        }
        bytes.fill(3);
        Ok(())
    }
}

fn id() -> ImageId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    ImageId::new(NEXT.fetch_add(1, Ordering::Relaxed)).expect("not 0")
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

/// An image of 100 pages from there.
fn came(there: &Arc<There>) -> Arc<Engine> {
    let own = [StoredRun::Own(range(10, 100))];
    let source = Arc::clone(there) as Arc<dyn PageSource>;
    let image = HostImage::stored(id(), PAGES, own, None, source).expect("opened");
    let engine = Engine::serve(image, &EngineOptions::default(), Arc::new(|_| ()));
    Arc::new(engine.expect("engine"))
}

/// The same, with this range of its pages changed in the image of a VM that continued.
fn went_on(base: &Engine, own: PageRange) -> Arc<Engine> {
    let source = Arc::new(There::default()) as Arc<dyn PageSource>;
    let own = [StoredRun::Own(own)];
    let image = HostImage::stored(id(), PAGES, own, Some(base.image()), source).expect("opened");
    let engine = Engine::serve(image, &EngineOptions::default(), Arc::new(|_| ()));
    Arc::new(engine.expect("engine"))
}

fn promised(arrival: &Arrival) -> u64 {
    arrival.needs.iter().map(|need| need.promise.memory.bytes()).sum()
}

/// What a VM of `base` is being frozen into. Its page table is not known yet.
fn being_frozen(base: &Engine) -> Arc<Engine> {
    let options = EngineOptions::default();
    let engine = Engine::prepare(id(), PAGES, Some(base.image()), &options, Arc::new(|_| ()));
    Arc::new(engine.expect("engine"))
}

fn all_come(engine: &Engine) {
    engine
        .insert(range(0, PAGES), &vec![3; usize::try_from(PAGES * 4096).expect("small")])
        .expect("room");
}

fn of(arrivals: &Arrivals, engine: &Arc<Engine>) -> Arc<Arrival> {
    arrivals.of(NAME, engine, &admission(), &[], Needs::default()).expect("room")
}

fn is_told(arrivals: &Arrivals) -> bool {
    arrivals.look();
    arrivals.names().contains(&NAME)
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
fn it_is_told_until_its_vms_have_ended_or_have_all_pages() {
    let (arrivals, engine) = (Arrivals::default(), came(&Arc::default()));
    let arrival = of(&arrivals, &engine);
    assert_eq!(promised(&arrival), 100 * 4096, "what is to come is promised");
    assert!(Arc::ptr_eq(&of(&arrivals, &engine), &arrival), "once for all of them");
    assert!(is_told(&arrivals));
    drop(arrival);
    assert!(!is_told(&arrivals), "nobody came of it any more");
    let arrival = of(&arrivals, &engine);
    all_come(&engine);
    assert!(!is_told(&arrivals), "they depend on nobody");
    assert_eq!(promised(&arrival), 0);
}

#[test]
fn vms_that_went_on_are_counted_when_the_snapshot_has_gone() {
    let (arrivals, engine) = (Arrivals::default(), came(&Arc::default()));
    let arrival = of(&arrivals, &engine);
    let later = being_frozen(&engine);
    arrival.goes_on(&later);
    assert!(is_told(&arrivals));
    // Its VM overwrote all that was the snapshot's own, say.
    drop(later);
    drop(engine);
    eventually("the image goes", || arrival.image.upgrade().is_none());
    assert!(is_told(&arrivals), "what they need of others is not known");
}

#[test]
fn what_is_being_frozen_does_not_count_as_whole() {
    let (arrivals, engine) = (Arrivals::default(), came(&Arc::default()));
    let later = being_frozen(&engine);
    let arrival = of(&arrivals, &engine);
    *arrival.engines.lock().expect("lock") = vec![Arc::downgrade(&later)];
    assert_eq!(later.image().missing_pages(), 0, "as far as it is known");
    assert!(is_told(&arrivals));
}

#[test]
fn one_that_comes_again_when_its_image_has_gone_is_another() {
    let arrivals = Arrivals::default();
    let engine = came(&Arc::default());
    let old = of(&arrivals, &engine);
    drop(engine);
    eventually("the image goes", || old.image.upgrade().is_none());
    let engine = came(&Arc::default());
    let new = of(&arrivals, &engine);
    assert!(!Arc::ptr_eq(&old, &new));
    all_come(&engine);
    assert!(is_told(&arrivals), "for the old one's VMs");
    drop(old);
    assert!(!is_told(&arrivals));
}

#[test]
fn hydration_goes_on_when_the_other_host_is_back() {
    let there = Arc::new(There::default());
    there.is_cut_off.store(true, Ordering::SeqCst);
    let (arrivals, engine) = (Arrivals::default(), came(&there));
    let arrival = of(&arrivals, &engine);
    arrival.hydrate(NonZeroU64::new(1 << 30).expect("not 0"));
    // All its pieces, none of which is tried again by itself.
    eventually("all is tried", || there.refused.load(Ordering::SeqCst) >= 7);
    there.is_cut_off.store(false, Ordering::SeqCst);
    assert!(engine.image().missing_pages() > 0);
    eventually("all comes", || !is_told(&arrivals));
}

#[test]
fn what_several_arrivals_wait_for_is_promised_once() {
    let (arrivals, admission) = (Arrivals::default(), admission());
    let all = admission.admissible_bytes();
    let left = |pages: u64, why| {
        assert_eq!(admission.admissible_bytes(), all - pages * 4096, "{why}");
    };
    let of = |image, engine: &Arc<Engine>| {
        let name = ImageName { host: 2, image };
        arrivals.of(name, engine, &admission, &[], Needs::default()).expect("room")
    };
    let first = came(&Arc::default());
    // Its VM wrote to the second block only, twice.
    let [second, third] = [600, 700].map(|at| went_on(&first, range(at, 20)));
    let one = of(1, &first);
    left(100, "its own");
    let two = of(2, &second);
    left(120, "of the second what is new");
    let three = of(3, &third);
    left(140, "and of the third");
    drop(one);
    left(140, "others need it");
    second.insert(range(10, 30), &vec![3; 30 * 4096]).expect("room");
    arrivals.look();
    left(110, "some have come");
    drop(two);
    arrivals.look();
    left(90, "the third's, and what it has in common");
    drop((three, first, second, third));
    left(0, "nobody");
}

#[test]
fn a_page_that_comes_into_two_caches_is_promised_for_both() {
    let (arrivals, admission) = (Arrivals::default(), admission());
    let all = admission.admissible_bytes();
    let left = |pages: u64, why| {
        arrivals.look();
        assert_eq!(admission.admissible_bytes(), all - pages * 4096, "{why}");
    };
    let of = |image, engine: &Arc<Engine>| {
        let name = ImageName { host: 2, image };
        arrivals.of(name, engine, &admission, &[], Needs::default()).expect("room")
    };
    // Pages 10 to 110, in the same block as what was written later.
    let first = came(&Arc::default());
    let second = went_on(&first, range(200, 20));
    let one = of(1, &second);
    left(220, "100 in both caches, 20 in one");
    let two = of(2, &first);
    left(220, "those of the first are promised already");
    first.insert(range(10, 50), &vec![3; 50 * 4096]).expect("room");
    left(170, "copied from there");
    all_come(&second);
    drop(one);
    left(50, "what the first still lacks");
    drop(two);
    left(0, "nobody");
}
