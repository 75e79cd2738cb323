//! Forks of forks: what generations share, what they cost, and what is freed when no image needs
//! it.

use std::sync::Arc;
use std::time::Duration;

use vmfork_engine::{Engine, HostImage, collect_garbage};
use vmfork_image::{BLOCK_PAGES, BlockIdx, PageIdx, PageRange};
use vmfork_tap_proto::Role;

use crate::common::{FakeVm, PAGE_BYTES, clone_of, freeze, needs_userfaultfd};

const SECONDS: Duration = Duration::from_secs(20);

fn drained(vm: &mut FakeVm, unit: u64) -> Arc<Engine> {
    let engine = freeze(vm, unit);
    assert!(engine.wait_drained(SECONDS), "drained");
    engine
}

fn block(number: u64) -> PageRange {
    BlockIdx(number).pages().expect("small")
}

fn present(engine: &Engine, range: PageRange) -> u64 {
    engine.image().cache().presence().count(range)
}

#[test]
fn a_block_is_served_from_the_image_that_changed_it_last() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(4 * BLOCK_PAGES, Role::Boot);
    parent.ask("fill 0 2048 1");
    let _first = drained(&mut parent, 16);
    parent.ask("poke 7 2");
    let second = drained(&mut parent, 16);
    // One of its views has read some of block 0.
    parent.sums(0, 160);
    assert_eq!(present(&second, block(0)), 160, "by whole units of 4");
    parent.ask("poke 600 3");
    let third = drained(&mut parent, 16);
    let expected = parent.sums(0, 2048);
    let mut child = clone_of(&third);
    assert_eq!(child.sums(0, 2048), expected);
    assert_eq!(present(&third, block(0)), 0, "block 0 is the second image's cache, mapped");
    assert_eq!(present(&second, block(0)), BLOCK_PAGES, "and was filled in there");
    assert_eq!(present(&third, block(1)), BLOCK_PAGES, "block 1 was written to");
    assert_eq!(present(&third, PageRange::between(PageIdx(1024), PageIdx(2048))), 0);
    // What a view writes there stays its own.
    child.ask("poke 8 9");
    assert_eq!(parent.sums(0, 2048), expected);
    assert_eq!(clone_of(&third).sums(0, 2048), expected);
}

/// Then its runs can't be mapped, and their pages are copied.
#[test]
fn a_vm_that_has_no_mapping_left_reads_the_same() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(4 * BLOCK_PAGES, Role::Boot);
    parent.ask("fill 0 2048 1");
    let _first = drained(&mut parent, 16);
    parent.ask("poke 7 2");
    let second = drained(&mut parent, 16);
    let expected = parent.sums(1000, 200);
    // The kernel asks for more room for some calls than for others, and refuses some before, some
    // after a change.
    for spare in 0..10 {
        let mut child = clone_of(&second);
        assert_eq!(child.ask(&format!("clutter {spare}")), "ok");
        assert_eq!(child.sums(1000, 200), expected, "{spare} mappings to spare");
    }
}

#[test]
fn a_copied_page_brings_a_quarter_of_its_unit() {
    needs_userfaultfd!();
    for (unit, pages) in [(1, 1), (16, 4), (512, 128)] {
        let mut parent = FakeVm::start(BLOCK_PAGES, Role::Boot);
        parent.ask("fill 0 512 1");
        let _first = drained(&mut parent, unit);
        parent.ask("poke 0 2"); // block 0 is of two images from now on
        let second = drained(&mut parent, unit);
        let before = second.image().counters().demand_bytes.get();
        clone_of(&second).sums(256, 1);
        let fetched = second.image().counters().demand_bytes.get() - before;
        assert_eq!(fetched, pages * PAGE_BYTES, "unit {unit}");
    }
}

#[test]
fn what_is_overwritten_is_copied_past_the_caches() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(2 * BLOCK_PAGES, Role::Boot);
    parent.ask("fill 0 1024 1");
    let first = drained(&mut parent, 16);
    parent.ask("poke 7 2");
    let second = drained(&mut parent, 16);
    let mut child = clone_of(&second);
    let before = parent.sums(600, 3);
    child.ask("poke 100 3");
    child.ask("poke 300 3");
    assert_eq!(present(&second, block(0)), 1, "the page that was frozen, no other");
    // One after the other: the third brings some with it.
    for page in 200..210 {
        child.ask(&format!("poke {page} {page}"));
    }
    assert_eq!(present(&second, block(0)), 1);
    let bytes = second.image().counters().demand_bytes.get();
    assert!((12 * PAGE_BYTES..20 * PAGE_BYTES).contains(&bytes), "{bytes}");
    assert_eq!(child.sums(600, 3), before);
    let third = drained(&mut child, 16);
    let (grandchild, parent) = (clone_of(&third).sums(0, 1024), parent.sums(0, 1024));
    assert_eq!(grandchild, child.sums(0, 1024));
    for (page, (of_child, of_parent)) in (0..1024).zip(grandchild.iter().zip(&parent)) {
        let is_changed = page == 100 || page == 300 || (200..210).contains(&page);
        assert_eq!(of_child != of_parent, is_changed, "page {page}");
    }
    assert_eq!(present(&first, block(0)), BLOCK_PAGES);
}

#[test]
fn vcpus_that_race_with_a_mapping_never_read_a_hole() {
    needs_userfaultfd!();
    const BLOCKS: u64 = 64;
    let mut parent = FakeVm::start(BLOCKS * BLOCK_PAGES, Role::Boot);
    parent.ask(&format!("fill 0 {} 1", BLOCKS * BLOCK_PAGES));
    let _first = drained(&mut parent, 1);
    // Every other block is at home in the second image, whose cache has one page of each.
    for number in (0..BLOCKS).step_by(2) {
        parent.ask(&format!("poke {} 2", number * BLOCK_PAGES));
    }
    let _second = drained(&mut parent, 1);
    let third = drained(&mut parent, 1);
    for round in 0..4 {
        let mut child = clone_of(&third);
        let answer = child.ask(&format!("race {BLOCKS} {} 4", 17 + round));
        assert_eq!(answer, "ok", "round {round}");
    }
}

#[test]
fn a_page_of_a_frozen_vm_brings_its_unit() {
    needs_userfaultfd!();
    for unit in [1, 16, 512] {
        let mut parent = FakeVm::start(8 * BLOCK_PAGES, Role::Boot);
        parent.ask("fill 0 4096 1");
        let engine = freeze(&mut parent, unit);
        // The drain comes there last, if at all before this.
        assert_eq!(
            parent.sums(7 * BLOCK_PAGES + 300, 1),
            clone_of(&engine).sums(7 * BLOCK_PAGES + 300, 1)
        );
        let fetched = engine.image().counters().demand_bytes.get();
        assert!([0, unit * PAGE_BYTES].contains(&fetched), "unit {unit}: {fetched} bytes");
    }
}

#[test]
fn memory_of_dead_generations_goes_but_not_what_is_mapped() {
    needs_userfaultfd!();
    const ROUNDS: u64 = 12;
    let mut parent = FakeVm::start(16 * BLOCK_PAGES, Role::Boot);
    parent.ask("fill 0 8192 1");
    let mut image = Arc::downgrade(drained(&mut parent, 16).image());
    let mut images = vec![image.clone()];
    for round in 0..ROUNDS {
        // Half a block of always the same place, half a block of a new one, one page of an old one:
        // that keeps each image alive, of which little is needed.
        parent.ask(&format!("fill 0 256 {}", round + 2));
        parent.ask(&format!("fill {} 256 {}", BLOCK_PAGES * (1 + round), round + 2));
        parent.ask(&format!("poke {} {}", 15 * BLOCK_PAGES + round, round + 2));
        let expected = parent.sums(0, 8192);
        image = Arc::downgrade(drained(&mut parent, 16).image());
        images.push(image.clone());
        assert_eq!(parent.sums(0, 8192), expected, "round {round}");
        let live = [Arc::clone(parent.memory().engine().expect("forked"))];
        collect_garbage(&live);
        assert_eq!(collect_garbage(&live), 0, "once is enough");
        assert_eq!(parent.sums(0, 8192), expected, "round {round}, garbage collected");
        assert_eq!(clone_of(&live[0]).sums(0, 8192), expected, "round {round}, a clone");
    }
    let resident: u64 = images
        .iter()
        .filter_map(std::sync::Weak::upgrade)
        .map(|image| image.cache().resident_bytes())
        .sum();
    let (ram, written) = (8192 * PAGE_BYTES, ROUNDS * 513 * PAGE_BYTES);
    eprintln!(
        "{} KiB resident for {} KiB of RAM, {} KiB written",
        resident >> 10,
        ram >> 10,
        written >> 10
    );
    // Each page of RAM once, and a copy of those that share a block with younger ones.
    assert!(resident < ram * 8 / 5, "{resident} bytes are held, RAM is {ram}");
}

fn own_here(image: &HostImage) -> Vec<PageRange> {
    let mut runs = Vec::new();
    image.own_here(PageRange::first(image.pages()), &mut |run| runs.push(run));
    runs
}

/// A fork in progress is in no list of live VMs.
#[test]
fn garbage_collection_spares_engines_that_it_was_not_told_of() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(2048, Role::Boot);
    parent.ask("fill 0 2048 1");
    let first = drained(&mut parent, 16);
    parent.ask("fill 0 1024 2");
    let second = drained(&mut parent, 16);
    let expected = parent.sums(0, 2048);
    let first_image = Arc::clone(first.image());
    assert_eq!(own_here(&first_image), [PageRange::first(2048)]);
    drop(first);
    parent.ask("fill 0 2047 3");
    let third = drained(&mut parent, 16);
    // The clone of the second image has not attached yet.
    let freed = collect_garbage(&[Arc::clone(&third)]);
    assert_eq!(freed, 1024 * PAGE_BYTES, "what of the first image only the first engine needed");
    assert_eq!(clone_of(&second).sums(0, 2048), expected);
    drop(second);
    let freed = collect_garbage(&[Arc::clone(&third)]);
    assert_eq!(freed, 1023 * PAGE_BYTES, "one page of the first image is needed still");
    assert_eq!(
        own_here(&first_image),
        [PageIdx(2047).range()],
        "of the rest other hosts are told nothing"
    );
    let sums = parent.sums(0, 2048);
    assert_eq!(sums[2047], expected[2047]);
    assert_eq!(clone_of(&third).sums(0, 2048), sums);
}

#[test]
fn the_fiftieth_freeze_moves_a_bounded_number_of_mappings() {
    needs_userfaultfd!();
    const BLOCKS: u64 = 128;
    let mut parent = FakeVm::start(BLOCKS * BLOCK_PAGES, Role::Boot);
    parent.ask(&format!("fill 0 {} 1", BLOCKS * BLOCK_PAGES));
    let mut times = Vec::new();
    let mut state = 1u64;
    for round in 0..50u64 {
        if let Some(engine) = parent.memory().engine().cloned() {
            assert!(engine.wait_drained(SECONDS), "drained");
        }
        for _ in 0..20 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            parent.ask(&format!("poke {} {round}", (state >> 33) % (BLOCKS * BLOCK_PAGES)));
        }
        // The guest touches every block.
        parent.ask(&format!("touch 0 {} 64", BLOCKS * BLOCK_PAGES));
        let (engine, _) = crate::common::engine(&mut parent, 16);
        times.push(parent.memory().freeze(&engine).expect("freeze"));
    }
    let (first, last) = (times[0], times[49]);
    eprintln!(
        "1st freeze: {} mappings, {:?} moving, {:?} mapping, {:?} in all",
        first.mappings, first.moving, first.mapping, first.total
    );
    eprintln!(
        "50th freeze: {} mappings, {:?} moving, {:?} mapping, {:?} in all",
        last.mappings, last.moving, last.mapping, last.total
    );
    assert_eq!(first.mappings, 1);
    assert!(
        times.iter().all(|times| times.mappings <= 2 * BLOCKS),
        "at most one per block, and between"
    );
}
