//! Images of another host: their layouts travel, their pages come on demand, and generations share
//! there as they do here.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vmfork_engine::{Engine, EngineOptions, HostImage, Layout, OpenError};
use vmfork_image::{
    BLOCK_PAGES, ImageId, Origin, PageIdx, PageRange, PageSource, PageTable, Source,
};
use vmfork_tap_proto::Role;

use crate::common::{FakeVm, clone_of, freeze, needs_userfaultfd};

const PAGES: u64 = 4 * BLOCK_PAGES;

/// The other host, reached without a network.
#[derive(Debug)]
struct Lender {
    image: Arc<HostImage>,
    pages_lent: AtomicU64,
}

impl PageSource for Lender {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.pages_lent.fetch_add(range.len(), Ordering::Relaxed);
        self.image.lend(range, bytes).map_err(io::Error::other)
    }
}

/// A host: what it knows of others' images, by their ids there.
#[derive(Default)]
struct Host {
    known: Mutex<HashMap<ImageId, Known>>,
}

type Known = (Arc<HostImage>, Arc<Lender>);

impl Host {
    /// Learn of an image and those that it descends from, the oldest first, each once.
    fn learn(&self, image: &Arc<HostImage>) -> Arc<HostImage> {
        let mut known = self.known.lock().expect("not poisoned");
        let mut family = image.with_ancestors();
        family.sort_by_key(|image| image.with_ancestors().len());
        for theirs in family {
            if known.contains_key(&theirs.id()) {
                continue;
            }
            let id = next_id();
            let here = |there: ImageId| known.get(&there).map_or(id, |(image, _)| image.id());
            let layout = theirs.layout().expect("sealed");
            let runs = layout.table.runs(layout.table.range());
            let changes = runs.filter_map(|(run, source)| match source {
                Source::Zero => None,
                Source::Image(there) => Some((run, Source::Image(here(there)))),
            });
            let zeros = PageTable::uniform(layout.table.pages(), Source::Zero);
            let table = zeros.derive(changes).expect("fits");
            let homes = layout.homes.iter().map(|home| home.map(here)).collect();
            let lender =
                Arc::new(Lender { image: Arc::clone(&theirs), pages_lent: AtomicU64::new(0) });
            let relatives: Vec<_> = known.values().map(|(image, _)| Arc::clone(image)).collect();
            let source = Arc::clone(&lender) as Arc<dyn PageSource>;
            let ours = HostImage::remote(id, Layout { table, homes }, &relatives, source);
            known.insert(theirs.id(), (ours.expect("opened"), lender));
        }
        Arc::clone(&known[&image.id()].0)
    }

    fn lent(&self, image: &HostImage) -> u64 {
        let known = self.known.lock().expect("not poisoned");
        known[&image.id()].1.pages_lent.load(Ordering::Relaxed)
    }
}

fn next_id() -> ImageId {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 40);
    ImageId::new(NEXT.fetch_add(1, Ordering::Relaxed)).expect("not 0")
}

fn serve(image: &Arc<HostImage>) -> Arc<Engine> {
    let engine = Engine::serve(Arc::clone(image), &EngineOptions::default(), Arc::new(|_| ()));
    Arc::new(engine.expect("engine"))
}

/// A parent that runs on, frozen, with what a clone has to read.
fn parent() -> (FakeVm, Arc<Engine>, Vec<u64>) {
    let mut parent = FakeVm::start(PAGES, Role::Boot);
    parent.ask("fill 100 1400 1");
    let engine = freeze(&mut parent, 16);
    let expected = parent.sums(0, PAGES);
    assert!(engine.wait_sealed(std::time::Duration::from_secs(20)));
    (parent, engine, expected)
}

#[test]
fn a_clone_on_another_host_reads_what_the_parent_had_while_that_writes_on() {
    needs_userfaultfd!();
    let (mut parent, engine, expected) = parent();
    let host = Host::default();
    let remote = serve(&host.learn(engine.image()));
    let mut clone = clone_of(&remote);
    parent.ask("fill 0 2048 9");
    assert_eq!(clone.sums(0, PAGES), expected);
    clone.ask("poke 300 5");
    assert_eq!(clone_of(&remote).sums(0, PAGES), expected, "what a VM writes is its own");
    assert_eq!(host.lent(engine.image()), 1400, "each page crosses once, and no zeros");
}

#[test]
fn what_did_not_change_since_an_earlier_fork_crosses_once() {
    needs_userfaultfd!();
    let (mut parent, first, expected) = parent();
    let host = Host::default();
    let remote = serve(&host.learn(first.image()));
    assert_eq!(clone_of(&remote).sums(0, PAGES), expected);
    parent.ask("poke 700 3");
    let second = freeze(&mut parent, 16);
    assert!(second.wait_sealed(std::time::Duration::from_secs(20)));
    let changed = parent.sums(0, PAGES);
    assert_ne!(changed, expected);
    let remote = serve(&host.learn(second.image()));
    assert_eq!(clone_of(&remote).sums(0, PAGES), changed);
    assert_eq!(host.lent(first.image()), 1400);
    assert_eq!(host.lent(second.image()), 1);
}

#[test]
fn pages_of_a_block_that_every_generation_changes_cross_once() {
    needs_userfaultfd!();
    let (mut parent, first, _) = parent();
    let host = Host::default();
    let mut kept = Vec::new();
    for page in [700, 701, 702] {
        parent.ask(&format!("poke {page} 3"));
        let engine = freeze(&mut parent, 16);
        assert!(engine.wait_sealed(std::time::Duration::from_secs(20)));
        let remote = serve(&host.learn(engine.image()));
        assert_eq!(clone_of(&remote).sums(0, PAGES), parent.sums(0, PAGES));
        kept.push((engine, remote));
    }
    // 700 came as the second's. Each generation has a cache of its own for the block.
    assert_eq!(host.lent(first.image()), 1399);
}

#[test]
fn a_clone_is_forked_onto_a_third_host_and_pages_pass_through_the_second() {
    needs_userfaultfd!();
    let (_parent, engine, expected) = parent();
    let (second, third) = (Host::default(), Host::default());
    let remote = serve(&second.learn(engine.image()));
    let mut clone = clone_of(&remote);
    clone.ask("poke 130 5");
    let next = freeze(&mut clone, 16);
    assert!(next.wait_sealed(std::time::Duration::from_secs(20)));
    let there = serve(&third.learn(next.image()));
    let grandchild = clone_of(&there).sums(0, PAGES);
    for (page, (now, then)) in grandchild.iter().zip(&expected).enumerate() {
        assert_eq!(now != then, page == 130, "page {page}");
    }
    // What the third asked the second for is there now.
    let before = second.lent(engine.image());
    assert_eq!(clone.sums(0, PAGES), grandchild);
    assert_eq!(second.lent(engine.image()), before);
}

#[test]
fn what_is_not_its_own_is_not_lent() {
    needs_userfaultfd!();
    let (_parent, engine, _) = parent();
    let range = PageRange::new(PageIdx(90), 20).expect("small");
    let lost =
        engine.image().lend(range, &mut vec![0; 20 * 4096]).expect_err("zeros are among them");
    assert_eq!(lost.page, PageIdx(90));
    let beyond = PageRange::new(PageIdx(PAGES), 1).expect("small");
    engine.image().lend(beyond, &mut vec![0; 4096]).expect_err("beyond the image");
}

#[test]
fn a_layout_that_names_what_is_not_known_is_refused() {
    needs_userfaultfd!();
    let (_parent, engine, _) = parent();
    let layout = engine.image().layout().expect("sealed");
    let image = Arc::clone(engine.image());
    let source = || Arc::new(Lender { image: Arc::clone(&image), pages_lent: AtomicU64::new(0) });
    let refused = HostImage::remote(next_id(), layout.clone(), &[], source());
    assert!(
        matches!(refused, Err(OpenError::Relative { image, .. }) if image == engine.image().id())
    );
    let cut = Layout { homes: Vec::new(), ..layout };
    let refused = HostImage::remote(image.id(), cut, &[], source());
    assert!(matches!(refused, Err(OpenError::Homes { found: 0, blocks: 4 })));
}
