//! Decisions against a model that knows, page by page, what each image holds.
//!
//! The model has a small family of images. Each image's *contents* is a list of words; a table entry of image k
//! is image k's word there. What a view would read after an answer is compared with what it must read.

use std::cell::RefCell;

use proptest::prelude::*;

use super::*;

const BLOCKS: u64 = 3;
const BLOCKS_LEN: usize = 3;
/// The last block is cut short: it is never mapped.
const PAGES: u64 = BLOCKS * BLOCK_PAGES - 100;

fn id(number: u64) -> ImageId {
    ImageId::new(number).expect("not 0")
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

/// An image of the family: number 1 booted, each other began from an earlier one.
struct Image {
    id: ImageId,
    table: PageTable,
    presence: Presence,
    homes: [Option<ImageId>; BLOCKS_LEN],
}

impl Image {
    fn held(&self) -> Held<'_> {
        Held { id: self.id, table: &self.table, presence: &self.presence }
    }
}

/// One generation: which it begins from, what it writes, what it gives back, what its cache holds besides what
/// is never fetched.
#[derive(Debug, Clone)]
struct Generation {
    base: prop::sample::Index,
    changes: Vec<(u64, u64, bool)>,
    present: Vec<(u64, u64)>,
    complete_blocks: Vec<u64>,
}

fn generation() -> impl Strategy<Value = Generation> {
    (
        any::<prop::sample::Index>(),
        prop::collection::vec((0..PAGES, 1..700u64, any::<bool>()), 0..3),
        prop::collection::vec((0..PAGES, 1..200u64), 0..3),
        prop::collection::vec(0..BLOCKS, 0..4),
    )
        .prop_map(|(base, changes, present, complete_blocks)| Generation {
            base,
            changes,
            present,
            complete_blocks,
        })
}

fn family(generations: &[Generation]) -> Vec<Image> {
    let mut images: Vec<Image> = Vec::new();
    for (number, generation) in (1..).zip(generations) {
        let own = id(number);
        let base = images.get(generation.base.index(images.len().max(1)));
        let from =
            base.map_or_else(|| PageTable::uniform(PAGES, Source::Zero), |base| base.table.clone());
        let changes = generation.changes.iter().map(|(start, len, zero)| {
            let changed = range(*start, (*len).min(PAGES - start));
            (changed, if *zero { Source::Zero } else { Source::Image(own) })
        });
        let table = from.derive(changes).expect("within the table");
        let mut homes = base.map_or([None; BLOCKS_LEN], |base| base.homes);
        for (block, home) in (0..).zip(&mut homes) {
            if in_block(block).any(|page| truth(&table, page) != truth(&from, page)) {
                *home = Some(own);
            }
        }
        let presence = Presence::new(PAGES);
        let blocks = generation.complete_blocks.iter().map(|block| {
            PageRange::between(PageIdx(block * BLOCK_PAGES), PageIdx((block + 1) * BLOCK_PAGES))
        });
        for some in generation.present.iter().map(|(start, len)| range(*start, *len)).chain(blocks)
        {
            for (run, source) in table.runs(some) {
                if source != Source::Zero {
                    presence.set(run);
                }
            }
        }
        images.push(Image { id: own, table, presence, homes });
    }
    images
}

/// The pages of a block that there are.
fn in_block(block: u64) -> impl Iterator<Item = PageIdx> {
    range(block * BLOCK_PAGES, BLOCK_PAGES).intersect(&PageRange::first(PAGES)).pages()
}

/// What a page of an image reads as: the image that wrote it, or 0.
fn truth(table: &PageTable, page: PageIdx) -> u64 {
    table.lookup(page).image().map_or(0, ImageId::get)
}

/// What a private mapping of an image's cache reads as there without a fault, if it does not fault.
fn cached(image: &Image, page: PageIdx) -> Option<u64> {
    image.presence.is_present(page).then(|| truth(&image.table, page))
}

fn decide(
    images: &[Image],
    states: &[BlockState],
    known: &[bool],
    page: PageIdx,
    is_write: bool,
) -> Answer {
    let (mine, others) = images.split_last().expect("some");
    let at = |block: BlockIdx| usize::try_from(block.0).expect("small");
    Sight {
        image: mine.held(),
        other: &|id| others.iter().find(|image| image.id == id).map(Image::held),
        home: &|block| mine.homes[at(block)],
        is_known: &|block| known[at(block)],
        state: &|block| states[at(block)],
        may_map: true,
    }
    .decide(page, is_write)
}

fn state(images: usize) -> impl Strategy<Value = BlockState> {
    prop_oneof![
        4 => Just(BlockState::Fresh),
        2 => Just(BlockState::Touched),
        1 => Just(BlockState::Zeros),
        2 => (1..=images as u64).prop_map(|number| BlockState::Mapped(id(number))),
    ]
}

proptest! {
    /// After any answer the view reads what its table says, or faults again; and a block that is at home elsewhere
    /// is never copied without need.
    #[test]
    fn no_answer_shows_a_wrong_byte(
        generations in prop::collection::vec(generation(), 1..5),
        states in prop::collection::vec(state(4), BLOCKS_LEN),
        known in prop::collection::vec(prop::bool::weighted(0.9), BLOCKS_LEN),
        page in 0..PAGES,
        is_write in any::<bool>(),
    ) {
        let images = family(&generations);
        let (mine, others) = images.split_last().expect("some");
        let page = PageIdx(page);
        let mut known = known;
        let at = |block: u64| usize::try_from(block).expect("small");
        let block = page.block().0;
        known[at(block)] = true;
        let mine_is = |page: PageIdx| truth(&mine.table, page);
        let other = |id: ImageId| others.iter().find(|other| other.id == id);
        let same = |other: &Image, block: u64| {
            in_block(block).all(|page| mine_is(page) == truth(&other.table, page))
        };
        let usable = |block: u64| {
            (block + 1) * BLOCK_PAGES <= PAGES
                && states[at(block)] == BlockState::Fresh
                && known[at(block)]
                && in_block(block).all(|page| !mine.presence.is_present(page))
        };
        let whole_run = |run: PageRange, fits: &dyn Fn(u64) -> bool| {
            run.start().0.is_multiple_of(BLOCK_PAGES)
                && run.len().is_multiple_of(BLOCK_PAGES)
                && run.contains(page)
                && run.by_block().all(|(block, _)| usable(block.0) && fits(block.0))
        };
        let state = states[at(block)];
        match decide(&images, &states, &known, page, is_write) {
            Answer::Wake => match state {
                // Reads again, and finds it. (That the right image is mapped is the mapper's to see to.)
                BlockState::Mapped(id) => {
                    prop_assert!(other(id).and_then(|other| cached(other, page)).is_some());
                }
                _ => prop_assert_eq!(cached(mine, page), Some(mine_is(page))),
            },
            Answer::Zeros(run) => {
                prop_assert!(run.contains(page));
                prop_assert!(run.pages().all(|page| mine_is(page) == 0));
                prop_assert_eq!(run.start().block(), PageIdx(run.end().0 - 1).block());
            }
            Answer::MapZeros(run) => {
                prop_assert!(whole_run(run, &|block| in_block(block).all(|page| mine_is(page) == 0)));
            }
            Answer::MapHome(id, run) => {
                let home = other(id).expect("an ancestor");
                prop_assert!(whole_run(run, &|block| same(home, block)));
            }
            Answer::Fetch(id) if id == mine.id => {
                prop_assert!(!is_write || mine_is(page) == id.get(), "a copy for nobody");
                prop_assert!(mine_is(page) != 0 && !mine.presence.is_present(page));
                prop_assert!(matches!(state, BlockState::Fresh | BlockState::Touched));
                let elsewhere = mine.homes[at(block)] != Some(mine.id);
                prop_assert!(!(usable(block) && elsewhere), "a block that could be shared is copied");
            }
            Answer::Fetch(id) => {
                let home = other(id).expect("an ancestor");
                prop_assert_eq!(state, BlockState::Mapped(id));
                prop_assert!(same(home, block) && !home.presence.is_present(page));
                prop_assert!(mine_is(page) != 0);
            }
            Answer::Private(home, owner) => {
                prop_assert!(is_write && owner.get() == mine_is(page) && home != owner);
                let found = if home == mine.id { mine } else { other(home).expect("an ancestor") };
                prop_assert!(!found.presence.is_present(page));
                match state {
                    BlockState::Mapped(id) => prop_assert_eq!(id, home),
                    _ => prop_assert_eq!(home, mine.id),
                }
            }
            Answer::Lost => {
                match state {
                    BlockState::Mapped(id) if other(id).is_none() => {}
                    BlockState::Mapped(id) => {
                        prop_assert!(mine_is(page) != 0);
                        let unfit = |other: &Image| {
                            !same(other, block) && !other.presence.is_present(page)
                        };
                        let lost = other(id).is_none_or(unfit);
                        prop_assert!(lost);
                    }
                    state => prop_assert_eq!(state, BlockState::Zeros),
                }
            }
        }
    }

    /// By the tables of an image and of a block's home the block is the same: what homes rest on.
    #[test]
    fn a_block_is_the_same_in_its_home(generations in prop::collection::vec(generation(), 1..6)) {
        let images = family(&generations);
        for image in &images {
            for (block, home) in (0..).zip(image.homes) {
                let Some(home) = home else {
                    prop_assert!(in_block(block).all(|page| truth(&image.table, page) == 0));
                    continue;
                };
                let home = images.iter().find(|other| other.id == home).expect("older");
                prop_assert!(image.table.same_block(&home.table, BlockIdx(block)));
            }
        }
    }
}

#[test]
fn a_block_is_shared_from_its_home_and_filled_in_there() {
    let table = PageTable::uniform(1024, Source::Image(id(1)))
        .derive([(range(7, 1), Source::Image(id(2)))])
        .expect("within");
    let (theirs, none) = (Presence::new(1024), Presence::new(1024));
    let states = RefCell::new([BlockState::Fresh; 2]);
    let decide = |page: u64| {
        Sight {
            image: Held { id: id(3), table: &table, presence: &none },
            other: &|owner| {
                (owner == id(2)).then_some(Held { id: id(2), table: &table, presence: &theirs })
            },
            home: &|_| Some(id(2)),
            is_known: &|_| true,
            state: &|block| states.borrow()[usize::try_from(block.0).expect("small")],
            may_map: true,
        }
        .decide(PageIdx(page), false)
    };
    assert_eq!(decide(100), Answer::MapHome(id(2), range(0, 1024)));
    *states.borrow_mut() = [BlockState::Mapped(id(2)), BlockState::Touched];
    assert_eq!(decide(100), Answer::Fetch(id(2)), "never zeros");
    theirs.set(range(100, 1));
    assert_eq!(decide(100), Answer::Wake);
    assert_eq!(decide(600), Answer::Fetch(id(3)), "QEMU has touched that block");
    states.borrow_mut()[0] = BlockState::Mapped(id(9));
    assert_eq!(decide(100), Answer::Lost);
}
