//! Page tables against the plainest model there is: one `Source` per page in a `Vec`.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vmfork_image::{
    BLOCK_PAGES, BlockIdx, BlockView, ImageId, PageIdx, PageRange, PageTable, Source, TableError,
};

fn image(n: u64) -> Source {
    ImageId::new(n).map_or(Source::Zero, Source::Image)
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn model_run(model: &[Source], page: usize, within: PageRange) -> (PageRange, Source) {
    let (mut start, mut end) = (page, page + 1);
    while start as u64 > within.start().0 && model[start - 1] == model[page] {
        start -= 1;
    }
    while (end as u64) < within.end().0 && end < model.len() && model[end] == model[page] {
        end += 1;
    }
    (range(start as u64, (end - start) as u64), model[page])
}

fn model_runs(model: &[Source], within: PageRange) -> Vec<(PageRange, Source)> {
    let (mut runs, mut at) = (Vec::new(), usize::try_from(within.start().0).expect("small"));
    while (at as u64) < within.end().0.min(model.len() as u64) {
        let rest = range(at as u64, within.end().0 - at as u64);
        let (run, source) = model_run(model, at, rest);
        runs.push((run, source));
        at = usize::try_from(run.end().0).expect("small");
    }
    runs
}

/// Everything a table says, against the model.
fn check(table: &PageTable, model: &[Source]) {
    let pages = model.len() as u64;
    assert_eq!(table.pages(), pages);
    assert_eq!(table.get(PageIdx(pages)), None);
    assert_eq!(table.get(PageIdx(u64::MAX)), None);

    let mut counts = BTreeMap::new();
    for id in model.iter().filter_map(|source| source.image()) {
        *counts.entry(id).or_insert(0) += 1;
    }
    assert_eq!(table.owners().iter().collect::<BTreeMap<_, u64>>(), counts);
    assert_eq!(table.zero_pages(), pages - counts.values().sum::<u64>());

    let runs = model_runs(model, table.range());
    assert_eq!(table.runs(table.range()).collect::<Vec<_>>(), runs);
    for (run, source) in &runs {
        assert_eq!(table.lookup(run.start()), *source);
        assert_eq!(table.lookup(PageIdx(run.end().0 - 1)), *source);
    }
    for id in counts.keys() {
        let of =
            |(run, source): &(PageRange, Source)| (source.image() == Some(*id)).then_some(*run);
        let own: Vec<PageRange> = runs.iter().filter_map(of).collect();
        assert_eq!(table.pages_of(*id).collect::<Vec<_>>(), own);
    }
    assert_eq!(table.pages_of(ImageId::new(0xdead).expect("not 0")).count(), 0);

    for (block, chunk) in (0..).zip(model.chunks(512)) {
        match table.block(BlockIdx(block)) {
            BlockView::Uniform(source) => assert!(chunk.iter().all(|s| *s == source)),
            BlockView::Mixed(mixed) => {
                assert!(chunk.iter().any(|s| *s != chunk[0]), "mixed, but all {}", chunk[0]);
                assert!(mixed.sources().eq(chunk.iter().copied()));
            }
        }
    }
    // The form is canonical: built from its runs in one go, the same tree comes out.
    let rebuilt = PageTable::uniform(pages, Source::Zero).derive(runs).expect("within");
    assert_eq!(&rebuilt, table);
    assert_eq!(rebuilt.size(), table.size());
}

#[derive(Debug, Clone)]
struct Step {
    /// Which of the tables so far to derive from.
    from: prop::sample::Index,
    changes: Vec<(prop::sample::Index, u64, u64)>,
    sorted: bool,
}

/// Lengths of a page, of parts of blocks, and of many blocks.
fn lengths() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), 2..40u64, 500..530u64, 0..20_000u64, Just(512), Just(1024)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let change = (any::<prop::sample::Index>(), lengths(), 0..5u64);
    let step = (any::<prop::sample::Index>(), prop::collection::vec(change, 0..8), any::<bool>())
        .prop_map(|(from, changes, sorted)| Step { from, changes, sorted });
    prop::collection::vec(step, 1..8)
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![1..600u64, Just(8192), 8189..8800u64, 9000..12_000u64]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn tables_say_what_the_model_says(
        pages in sizes(),
        first in 0..3u64,
        steps in steps(),
        probes in prop::collection::vec((any::<prop::sample::Index>(), lengths(), lengths()), 30),
    ) {
        let size = usize::try_from(pages).expect("small");
        let mut versions =
            vec![(PageTable::uniform(pages, image(first)), vec![image(first); size])];
        for step in &steps {
            let (table, model) = step.from.get(&versions);
            let mut model = model.clone();
            let mut changes: Vec<_> = step.changes.iter().map(|(at, len, n)| {
                let start = at.index(size) as u64;
                // Often on block borders, where whole blocks are.
                let start = if len % 512 == 0 { start / 512 * 512 } else { start };
                (range(start, *len.min(&(pages - start))), image(*n))
            }).collect();
            if step.sorted {
                changes.sort_by_key(|(range, _)| range.start());
            }
            for (range, source) in &changes {
                for page in range.pages() {
                    model[usize::try_from(page.0).expect("small")] = *source;
                }
            }
            let table = table.derive(changes).expect("within");
            versions.push((table, model));
        }
        // Also the old ones: a derive changes nothing that another table shares.
        for (table, model) in &versions {
            check(table, model);
            for (at, before, after) in &probes {
                let page = at.index(size);
                let start = (page as u64).saturating_sub(*before);
                let within = range(start, page as u64 - start + 1 + after);
                let probe = PageIdx(page as u64);
                prop_assert_eq!(table.run_at(probe, within), model_run(model, page, within));
                prop_assert_eq!(table.runs(within).collect::<Vec<_>>(), model_runs(model, within));
            }
        }
        for (a, model_a) in &versions {
            for (b, model_b) in &versions {
                prop_assert_eq!(a == b, model_a == model_b);
                for (block, (chunk_a, chunk_b)) in
                    (0..).zip(model_a.chunks(512).zip(model_b.chunks(512)))
                {
                    prop_assert_eq!(a.same_block(b, BlockIdx(block)), chunk_a == chunk_b);
                }
            }
        }
    }
}

/// Pages of 4 GiB.
const BIG: u64 = 1 << 20;

#[test]
fn a_table_of_one_source_has_no_nodes() {
    for n in [0, 7] {
        let table = PageTable::uniform(BIG, image(n));
        assert_eq!(table.size(), vmfork_image::TableSize::default());
        // And gets back there, however it was reached.
        let there = table.derive([(range(3, BIG - 1000), image(9))]).expect("within");
        assert!(there.size().inner_nodes > 0);
        let back = there.derive([(range(0, BIG / 2 + 5), image(n)), (range(7, BIG - 7), image(n))]);
        assert_eq!(back.expect("within").size(), table.size());
    }
}

#[test]
fn blocks_written_bit_by_bit_collapse_up_to_the_root() {
    // Cut short at both ends of the tree's shape: 17 blocks and a part of one.
    let pages = 17 * BLOCK_PAGES + 40;
    let mut table = PageTable::uniform(pages, Source::Zero);
    for start in (0..pages.div_ceil(128)).rev().map(|i| i * 128) {
        let piece = range(start, 128.min(pages - start));
        table = table.derive([(piece, image(1))]).expect("within");
    }
    assert_eq!(table.size(), vmfork_image::TableSize::default());
    assert_eq!(table, PageTable::uniform(pages, image(1)));
}

#[test]
fn a_derive_makes_nodes_for_what_changed_only() {
    // A table with every block mixed: whatever a derive copies too much, shows.
    let busy = (0..BIG / BLOCK_PAGES).map(|block| (range(block * BLOCK_PAGES + 9, 3), image(1)));
    let parent = PageTable::uniform(BIG, Source::Zero).derive(busy).expect("within");
    assert_eq!(parent.size().mixed_blocks, 2048);

    for dirty_blocks in [1u64, 5, 60] {
        let stride = 2048 / dirty_blocks;
        let changes = (0..dirty_blocks).flat_map(|i| {
            let first = i * stride * BLOCK_PAGES;
            [(range(first + 20, 2), image(2)), (range(first + 300, 1), image(2))]
        });
        let child = parent.derive(changes).expect("within");
        let new = child.size_beyond(&parent);
        assert_eq!(new.mixed_blocks, dirty_blocks);
        // The tree of 4 GiB is three inner nodes high.
        assert!(new.inner_nodes <= 3 * dirty_blocks, "{new:?} for {dirty_blocks} blocks");
        assert_eq!(child.owners().get(ImageId::new(2).expect("not 0")), 3 * dirty_blocks);
    }
}

#[test]
fn a_change_to_the_same_is_no_change() {
    let parent = PageTable::uniform(BIG, Source::Zero)
        .derive([(range(700, 9), image(1)), (range(5120, 51_200), image(2))])
        .expect("within");
    let same =
        [(range(702, 4), image(1)), (range(6000, 20_000), image(2)), (range(0, 0), image(3))];
    let child = parent.derive(same).expect("within");
    assert_eq!(child.size_beyond(&parent), vmfork_image::TableSize::default());
}

#[test]
fn a_change_beyond_the_table_is_refused() {
    let table = PageTable::uniform(1000, Source::Zero);
    for bad in [range(999, 2), range(1000, 1), range(5000, 0)] {
        let error = table.derive([(range(0, 5), image(1)), (bad, image(2))]).expect_err("beyond");
        assert_eq!(error, TableError::OutOfBounds { range: bad, pages: 1000 });
        assert_eq!(error.to_string(), format!("pages {bad} are not all in a table of 1000 pages"));
    }
    assert_eq!(table.owners().len(), 0);
}

#[test]
fn tables_of_the_largest_and_of_no_size_work() {
    let table = PageTable::uniform(vmfork_image::PAGES_MAX, Source::Zero);
    let last = PageIdx(vmfork_image::PAGES_MAX - 1);
    let child = table.derive([(last.range(), image(1))]).expect("within");
    assert_eq!(child.lookup(last), image(1));
    assert_eq!(child.runs(child.range()).count(), 2);
    assert_eq!(child.size().inner_nodes, 11);

    let none = PageTable::uniform(0, image(1));
    assert_eq!(none.runs(none.range()).count(), 0);
    assert!(none.owners().is_empty());
    assert_eq!(none.derive([(range(0, 0), image(2))]).expect("nothing"), none);
    assert!(none.same_block(&none, BlockIdx(0)));
}

#[test]
fn a_hundred_generations_cost_what_they_wrote() {
    // A chain of 100 forks of 512 MiB, 512 scattered pages (2 MiB) written between each: as
    // thinly spread as 16 MiB over 4 GiB.
    let mut chain = vec![PageTable::uniform(BIG / 8, image(1))];
    let (mut state, mut bytes) = (1u64, 0);
    for generation in 2..102 {
        let mut pages: Vec<u64> = (0..512)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % (BIG / 8)
            })
            .collect();
        pages.sort_unstable();
        let parent = chain.last().expect("never empty");
        let child = parent
            .derive(pages.iter().map(|page| (range(*page, 1), image(generation))))
            .expect("within");
        bytes += child.size_beyond(parent).heap_bytes;
        chain.push(child);
    }
    // The tables of all generations, over the pages they stand for.
    let share = bytes as f64 / (100.0 * 512.0 * 4096.0);
    assert!(share < 0.12, "tables take {share:.3} of what was written");
}
