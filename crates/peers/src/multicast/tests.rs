use crate::disks::Needs;
use std::io;
use std::sync::atomic::AtomicU64;

use vmfork_engine::EngineOptions;
use vmfork_image::{BLOCK_PAGES, ImageId, Origin, PageIdx, PageSource, PageTable, Source, wire};

use super::super::arrivals::Arrival;
use super::*;
use crate::images::Entry;
use vmfork_host::admission::{Admission, HostMemory, Policy, Probe};
use vmfork_host::metrics::Metrics;

const PAGES: u64 = 2 * BLOCK_PAGES;
const OLD: ImageName = ImageName { host: 2, image: 7 };
const YOUNG: ImageName = ImageName { host: 2, image: 8 };

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

/// A source that is never asked.
#[derive(Debug)]
struct Silent;

impl PageSource for Silent {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, _: PageRange, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::TimedOut.into())
    }
}

struct Host {
    listeners: GroupListeners,
    images: Arc<Images>,
    arrivals: Arc<Arrivals>,
}

impl Host {
    fn new() -> Self {
        let images = Arc::new(Images::new(1, 1));
        let arrivals = Arc::new(Arrivals::default());
        let own = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listeners = GroupListeners::new(PageTransfer::Multicast, own, &images, &arrivals);
        Self { listeners, images, arrivals }
    }

    fn shelf(&self, name: ImageName) -> Shelf {
        Shelf {
            name,
            images: Arc::clone(&self.images),
            arrivals: Arc::clone(&self.arrivals),
            has_room: Arc::clone(&self.listeners.has_room),
            began: Instant::now(),
        }
    }

    /// A VM comes of the younger image, of which pages 100 to 110 are its own, and 10 to 700 the
    /// older's but for those.
    fn vm_comes(&self) -> (Arc<Engine>, Arc<Arrival>) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let next = || ImageId::new(NEXT.fetch_add(1, Ordering::Relaxed)).expect("not 0");
        let (old, young) = (next(), next());
        let name = |id| if id == old { OLD } else { YOUNG };
        let zeros = PageTable::uniform(PAGES, Source::Zero);
        let table = |runs: Vec<_>| zeros.derive(runs).expect("within");
        let old_run = (range(10, 690), Source::Image(old));
        let young_run = (range(100, 10), Source::Image(young));
        let entry = |of, runs, homes: [Option<ImageName>; 2]| Entry {
            name: name(of),
            is_partial: false,
            table: wire::encode(&table(runs), name),
            homes: wire::encode_homes(homes),
        };
        let entries = [
            entry(old, vec![old_run], [Some(OLD); 2]),
            entry(young, vec![old_run, young_run], [Some(YOUNG), Some(OLD)]),
        ];
        let source = |_| Arc::new(Silent) as Arc<dyn PageSource>;
        let image = self.images.open(&entries, PAGES, next, source).expect("opened");
        let engine = Engine::serve(image, &EngineOptions::default(), Arc::new(|_| ()));
        let engine = Arc::new(engine.expect("engine"));
        let policy = Policy {
            reserve_bytes: 0,
            clone_growth_percent: 10,
            family_vms_max: 256,
            family_memory_percent: 75,
            family_vcpus_percent: 75,
            cores: 4,
            vcpus_per_core: 64,
        };
        let admission = Admission::new(policy, Box::new(Made));
        let arrival = self.arrivals.of(YOUNG, &engine, &admission, &[], Needs::default());
        (engine, arrival.expect("room"))
    }
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

/// Every page has its number.
fn bytes(range: PageRange) -> Vec<u8> {
    let page = |page: PageIdx| vec![u8::try_from(page.0 % 251).expect("small"); 4096];
    range.pages().flat_map(page).collect()
}

#[test]
fn what_is_heard_is_kept_where_vms_look_for_it_and_nothing_else() {
    let host = Host::new();
    let (old, young) = (host.shelf(OLD), host.shelf(YOUNG));
    let heard = range(90, 30);
    assert_eq!(old.take(heard, &bytes(heard)), 0, "of an image that is not open here");
    assert!(old.lacks(), "it may be soon");
    let (engine, _arrival) = host.vm_comes();
    assert_eq!(engine.image().missing_pages(), 690);
    assert_eq!(old.take(heard, &bytes(heard)), 20, "100 to 110 are the younger's");
    assert_eq!(young.take(heard, &bytes(heard)), 10);
    assert_eq!(old.take(heard, &bytes(heard)), 0, "it is there");
    assert_eq!(old.take(range(0, 20), &bytes(range(0, 20))), 10, "the rest is zero");
    assert_eq!(engine.image().missing_pages(), 690 - 40);
    assert_eq!(engine.image().cache().presence().count(heard), 30, "home to their block");
    // And in the older's own cache for what descends from that.
    let mut found = vec![0; heard.byte_len().try_into().expect("small")];
    engine.image().read(heard, &mut found).expect("there");
    assert!(found == bytes(heard));
    assert!(old.lacks() && young.lacks());
    old.take(range(0, PAGES), &bytes(range(0, PAGES)));
    assert!(!old.lacks(), "all is there");
    for run in [range(100, 10), range(600, 50)] {
        let mut found = vec![0; run.byte_len().try_into().expect("small")];
        engine.image().read(run, &mut found).expect("there");
        assert!(found == bytes(run), "{run}");
    }
}

#[test]
fn without_memory_for_it_nothing_is_kept() {
    let host = Host::new();
    let (_engine, arrival) = host.vm_comes();
    let heard = range(90, 10);
    host.listeners.allow(false);
    assert_eq!(host.shelf(OLD).take(heard, &bytes(heard)), 0);
    host.listeners.allow(true);
    drop(arrival);
    assert_eq!(host.shelf(OLD).take(heard, &bytes(heard)), 0, "no VM came of it any more");
}

#[test]
fn groups_are_for_images_of_this_host_alone_and_where_they_are_allowed() {
    let refused =
        |listeners: &GroupListeners, image| listeners.invite(3, image).expect_err("none").kind;
    let host = Host::new();
    assert_eq!(refused(&host.listeners, OLD), RefusalKind::BadRequest, "it is not sending");
    let own = IpAddr::V4(Ipv4Addr::LOCALHOST);
    for form in [PageTransfer::Unicast, PageTransfer::Swarm] {
        assert!(GroupListeners::new(form, own, &host.images, &host.arrivals).own.is_none());
    }
    let six = "::1".parse().expect("an address");
    assert!(
        GroupListeners::new(PageTransfer::Multicast, six, &host.images, &host.arrivals)
            .own
            .is_none()
    );
}

#[test]
fn each_figure_is_told_once_and_documented() {
    let all: Vec<_> = sent(&GroupCounters::default())
        .into_iter()
        .chain(heard(&ListenerCounters::default()))
        .map(|(what, _)| what)
        .collect();
    let metrics = Metrics::new();
    all.iter().for_each(|what| metrics.add_multicast(*what, 1));
    let text = metrics.text();
    let told: Vec<&str> =
        text.lines().filter(|line| line.starts_with("vmfork_multicast_")).collect();
    assert_eq!(told.len(), all.len());
    let documented = include_str!("../../../../docs/metrics.md");
    let rows: Vec<Vec<&str>> =
        documented.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    for line in told {
        assert!(line.ends_with(" 1"), "{line}");
        let (name, labels) = line.split_once('{').expect("labels");
        let label = |key: &str| {
            let (_, value) = labels.split_once(&format!("{key}=\"")).expect("a label");
            format!("`{}`", value.split('"').next().expect("a value"))
        };
        let (side, what) = (label("side"), label("what"));
        let table = rows.iter().position(|row| row.get(1) == Some(&&*format!("`{name}`: `what`")));
        let table = rows[table.expect("a table")..].iter().take_while(|row| row.len() > 1);
        let mut of_it = table.filter(|row| row[1] == what && row[2].contains(&side));
        assert!(of_it.next().is_some(), "{line} is not in docs/metrics.md");
    }
}
