//! Decisions against a model that knows, page by page, what each image holds.
//!
//! The model has a small family of images. Each image's *contents* is a list of words; a table
//! entry of image k is image k's word there. What a view would read after an answer is compared
//! with what it must read.

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

/// One generation: which it begins from, what it writes, what it gives back, what its cache holds
/// besides what is never fetched.
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

/// A fault, and what the model knows of its page.
struct Scene<'a> {
    mine: &'a Image,
    others: &'a [Image],
    states: &'a [BlockState],
    known: &'a [bool],
    page: PageIdx,
    is_write: bool,
}

fn at(block: u64) -> usize {
    usize::try_from(block).expect("small")
}

impl Scene<'_> {
    fn block(&self) -> u64 {
        self.page.block().0
    }

    fn state(&self) -> BlockState {
        self.states[at(self.block())]
    }

    /// What the page must read as.
    fn word(&self) -> u64 {
        truth(&self.mine.table, self.page)
    }

    fn other(&self, id: ImageId) -> Option<&Image> {
        self.others.iter().find(|other| other.id == id)
    }

    fn is_zero(block: u64, image: &Image) -> bool {
        in_block(block).all(|page| truth(&image.table, page) == 0)
    }

    fn is_same(&self, other: &Image, block: u64) -> bool {
        in_block(block).all(|page| truth(&self.mine.table, page) == truth(&other.table, page))
    }

    fn is_usable(&self, block: u64) -> bool {
        (block + 1) * BLOCK_PAGES <= PAGES
            && self.states[at(block)] == BlockState::Fresh
            && self.known[at(block)]
            && in_block(block).all(|page| !self.mine.presence.is_present(page))
    }

    fn is_whole_run(&self, run: PageRange, fits: impl Fn(u64) -> bool) -> bool {
        run.start().0.is_multiple_of(BLOCK_PAGES)
            && run.len().is_multiple_of(BLOCK_PAGES)
            && run.contains(self.page)
            && run.by_block().all(|(block, _)| self.is_usable(block.0) && fits(block.0))
    }

    /// The view reads what its table says after this answer, or faults again.
    fn check(&self, answer: Answer) -> Result<(), TestCaseError> {
        match answer {
            Answer::Wake => self.check_wake(),
            Answer::Zeros(run) => {
                prop_assert!(run.contains(self.page));
                prop_assert!(run.pages().all(|page| truth(&self.mine.table, page) == 0));
                prop_assert_eq!(run.start().block(), PageIdx(run.end().0 - 1).block());
                Ok(())
            }
            Answer::MapZeros(run) => {
                prop_assert!(self.is_whole_run(run, |block| Self::is_zero(block, self.mine)));
                Ok(())
            }
            Answer::MapHome(id, run) => {
                let home = self.other(id).expect("an ancestor");
                prop_assert!(self.is_whole_run(run, |block| self.is_same(home, block)));
                Ok(())
            }
            Answer::Fetch(id) => self.check_fetch(id),
            Answer::Private(home, owner) => self.check_private(home, owner),
            Answer::Lost => self.check_lost(),
        }
    }

    fn check_wake(&self) -> Result<(), TestCaseError> {
        match self.state() {
            // Reads again, and finds it. (That the right image is mapped is the mapper's to see
            // to.)
            BlockState::Mapped(id) => {
                let found = self.other(id).and_then(|other| cached(other, self.page));
                prop_assert!(found.is_some());
            }
            _ => prop_assert_eq!(cached(self.mine, self.page), Some(self.word())),
        }
        Ok(())
    }

    fn check_fetch(&self, id: ImageId) -> Result<(), TestCaseError> {
        let (state, block) = (self.state(), self.block());
        prop_assert!(self.word() != 0);
        if id == self.mine.id {
            let is_own = self.word() == id.get();
            prop_assert!(!self.is_write || is_own, "a copy that no reader will read");
            prop_assert!(!self.mine.presence.is_present(self.page));
            prop_assert!(matches!(state, BlockState::Fresh | BlockState::Touched));
            let elsewhere = self.mine.homes[at(block)] != Some(self.mine.id);
            let could_share = self.is_usable(block) && elsewhere;
            prop_assert!(!could_share, "a block that could be shared is copied");
        } else {
            let home = self.other(id).expect("an ancestor");
            prop_assert_eq!(state, BlockState::Mapped(id));
            prop_assert!(self.is_same(home, block) && !home.presence.is_present(self.page));
        }
        Ok(())
    }

    fn check_private(&self, home: ImageId, owner: ImageId) -> Result<(), TestCaseError> {
        prop_assert!(self.is_write && owner.get() == self.word() && home != owner);
        let found = match home == self.mine.id {
            true => self.mine,
            false => self.other(home).expect("an ancestor"),
        };
        prop_assert!(!found.presence.is_present(self.page));
        match self.state() {
            BlockState::Mapped(id) => prop_assert_eq!(id, home),
            _ => prop_assert_eq!(home, self.mine.id),
        }
        Ok(())
    }

    fn check_lost(&self) -> Result<(), TestCaseError> {
        let BlockState::Mapped(id) = self.state() else {
            prop_assert_eq!(self.state(), BlockState::Zeros);
            return Ok(());
        };
        if let Some(other) = self.other(id) {
            prop_assert!(self.word() != 0);
            let is_present = other.presence.is_present(self.page);
            prop_assert!(!self.is_same(other, self.block()) && !is_present);
        }
        Ok(())
    }
}

proptest! {
    /// After any answer the view reads what its table says, or faults again; and a block that is at
    /// home elsewhere is never copied without need.
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
        known[at(page.block().0)] = true;
        let answer = decide(&images, &states, &known, page, is_write);
        let scene = Scene { mine, others, states: &states, known: &known, page, is_write };
        scene.check(answer)?;
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
