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

fn family(generations: &[Generation]) -> (Vec<Image>, Vec<usize>) {
    let mut images: Vec<Image> = Vec::new();
    let mut bases = Vec::new();
    for (number, generation) in (1..).zip(generations) {
        let own = id(number);
        let base = generation.base.index(images.len().max(1));
        let from = images
            .get(base)
            .map_or_else(|| PageTable::uniform(PAGES, Source::Zero), |base| base.table.clone());
        let changes = generation.changes.iter().map(|(start, len, zero)| {
            let changed = range(*start, (*len).min(PAGES - start));
            (changed, if *zero { Source::Zero } else { Source::Image(own) })
        });
        let table = from.derive(changes).expect("within the table");
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
        images.push(Image { id: own, table, presence });
        bases.push(base);
    }
    (images, bases)
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
    base: usize,
    states: &[BlockState],
    known: &[bool],
    page: PageIdx,
) -> Answer {
    let (mine, others) = images.split_last().expect("some");
    let find = |id: ImageId| others.iter().find(|image| image.id == id);
    let at = |block: BlockIdx| usize::try_from(block.0).expect("small");
    Sight {
        table: &mine.table,
        presence: &mine.presence,
        base: others.get(base).map(|base| base.id),
        lender: &|id| {
            find(id).map(|image| Lender { table: &image.table, presence: &image.presence })
        },
        is_lent: &|id, page| find(id).map(|image| image.presence.is_present(page)),
        is_known: &|block| known[at(block)],
        state: &|block| states[at(block)],
        may_map: true,
    }
    .decide(page)
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
    /// After any answer the view reads what its table says, or faults again; and a fetch is only chosen if no
    /// image could lend the block.
    #[test]
    fn no_answer_shows_a_wrong_byte(
        generations in prop::collection::vec(generation(), 1..5),
        states in prop::collection::vec(state(4), BLOCKS_LEN),
        known in prop::collection::vec(prop::bool::weighted(0.9), BLOCKS_LEN),
        page in 0..PAGES,
    ) {
        let (images, bases) = family(&generations);
        let (mine, others) = images.split_last().expect("some");
        let base = *bases.last().expect("some");
        let page = PageIdx(page);
        let mut known = known;
        let block_at = usize::try_from(page.block().0).expect("small");
        known[block_at] = true;
        let table = &mine.table;
        let usable = |block: u64| {
            let at = usize::try_from(block).expect("small");
            (block + 1) * BLOCK_PAGES <= PAGES
                && states[at] == BlockState::Fresh
                && known[at]
                && range(block * BLOCK_PAGES, BLOCK_PAGES)
                    .pages()
                    .all(|page| !mine.presence.is_present(page))
        };
        let could_lend = |other: &Image, block: u64| {
            range(block * BLOCK_PAGES, BLOCK_PAGES).pages().all(|page| {
                truth(table, page) == truth(&other.table, page)
                    && (truth(table, page) == 0 || other.presence.is_present(page))
            })
        };
        let whole_run = |run: PageRange, fits: &dyn Fn(u64) -> bool| {
            run.start().0.is_multiple_of(BLOCK_PAGES)
                && run.len().is_multiple_of(BLOCK_PAGES)
                && run.contains(page)
                && run.by_block().all(|(block, _)| usable(block.0) && fits(block.0))
        };
        let owners: Vec<u64> =
            range(page.block().0 * BLOCK_PAGES, BLOCK_PAGES).intersect(&table.range())
                .pages().map(|page| truth(table, page)).collect();
        let candidates = || others.iter().enumerate().filter(|(at, other)| {
            *at == base || owners.contains(&other.id.get())
        });
        match decide(&images, base, &states, &known, page) {
            Answer::Wake => {
                // Reads again, and finds it.
                let found = match states[block_at] {
                    BlockState::Mapped(id) => {
                        others.iter().find(|other| other.id == id).and_then(|other| cached(other, page))
                    }
                    _ => cached(mine, page),
                };
                if let BlockState::Mapped(_) = states[block_at] {
                    prop_assert!(found.is_some());
                } else {
                    prop_assert_eq!(found, Some(truth(table, page)));
                }
            }
            Answer::Zeros(run) => {
                prop_assert!(run.contains(page));
                prop_assert!(run.pages().all(|page| truth(table, page) == 0));
                prop_assert_eq!(run.start().block(), PageIdx(run.end().0 - 1).block());
            }
            Answer::MapZeros(run) => {
                let all_zero = |block: u64| range(block * BLOCK_PAGES, BLOCK_PAGES)
                    .pages().all(|page| truth(table, page) == 0);
                prop_assert!(whole_run(run, &all_zero));
            }
            Answer::MapCache(id, run) => {
                let lender = others.iter().find(|other| other.id == id).expect("an ancestor");
                prop_assert!(whole_run(run, &|block| could_lend(lender, block)));
            }
            Answer::Fetch => {
                prop_assert!(truth(table, page) != 0);
                prop_assert!(!matches!(states[block_at], BlockState::Mapped(_) | BlockState::Zeros));
                prop_assert!(!mine.presence.is_present(page));
                let lent = candidates().any(|(_, other)| could_lend(other, page.block().0));
                prop_assert!(!(usable(page.block().0) && lent), "a block that could be shared is copied");
            }
            Answer::Lost => {
                prop_assert!(truth(table, page) != 0);
                match states[block_at] {
                    BlockState::Mapped(id) => {
                        let lender = others.iter().find(|other| other.id == id);
                        prop_assert!(lender.is_none_or(|it| !it.presence.is_present(page)));
                    }
                    state => prop_assert_eq!(state, BlockState::Zeros),
                }
            }
        }
    }
}

#[test]
fn copies_of_an_ancestors_pages_are_shared_with_the_next_generation() {
    let first = PageTable::uniform(1024, Source::Image(id(1)));
    let second = first.derive([(range(7, 1), Source::Image(id(2)))]).expect("within");
    let theirs = Presence::new(1024);
    let (none, states) = (Presence::new(1024), RefCell::new([BlockState::Fresh; 2]));
    let decide = |theirs: &Presence| {
        Sight {
            table: &second,
            presence: &none,
            base: None,
            lender: &|owner| {
                (owner == id(2)).then_some(Lender { table: &second, presence: theirs })
            },
            is_lent: &|_, page| Some(theirs.is_present(page)),
            is_known: &|_| true,
            state: &|block| states.borrow()[usize::try_from(block.0).expect("small")],
            may_map: true,
        }
        .decide(PageIdx(100))
    };
    theirs.set(range(0, 511));
    assert_eq!(decide(&theirs), Answer::Fetch, "a page is missing");
    theirs.set(range(511, 1));
    assert_eq!(decide(&theirs), Answer::MapCache(id(2), range(0, 512)));
    states.borrow_mut()[0] = BlockState::Mapped(id(2));
    assert_eq!(decide(&theirs), Answer::Wake);
    theirs.clear(range(100, 1));
    assert_eq!(decide(&theirs), Answer::Lost, "never zeros");
}

#[test]
fn the_lender_of_the_longest_run_is_chosen() {
    let first = PageTable::uniform(2048, Source::Image(id(1)));
    let all = Presence::new(2048);
    all.set(range(0, 2048));
    let one_block = Presence::new(2048);
    one_block.set(range(512, 512));
    let none = Presence::new(2048);
    let answer = Sight {
        table: &first,
        presence: &none,
        base: Some(id(2)),
        lender: &|owner| {
            let presence = if owner == id(2) { &one_block } else { &all };
            Some(Lender { table: &first, presence })
        },
        is_lent: &|_, _| None,
        is_known: &|_| true,
        state: &|_| BlockState::Fresh,
        may_map: true,
    }
    .decide(PageIdx(600));
    assert_eq!(answer, Answer::MapCache(id(1), range(0, 2048)));
}
