//! What faults, freezes and derivations cost here, on fake VMs under the real shim and engine.
//!
//! ```text
//! cargo build --release -p vmfork-memory --examples
//! cargo run --release -p vmfork-memory --example fault_cost [faults | map | freeze | scattered]
//! ```

#![allow(clippy::print_stdout, reason = "a program that prints a table")]
#![allow(dead_code, unused_imports, unused_macros, reason = "the tests' module is used in part")]

#[path = "../tests/it/common.rs"]
mod common;

use std::time::Duration;

use common::{FakeVm, clone_of, engine, freeze};
use vmfork_image::BLOCK_PAGES;
use vmfork_tap_proto::Role;

const MINUTE: Duration = Duration::from_mins(1);

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    if let Some(why) = common::unsupported() {
        println!("{why}");
        return;
    }
    if what.is_empty() || what == "faults" {
        faults();
    }
    if what.is_empty() || what == "map" {
        map();
    }
    if what.is_empty() || what == "scattered" {
        scattered(512);
        scattered(4096);
    }
    if what.is_empty() || what == "freeze" {
        for (mib, dirty_mib, huge) in
            [(512, 256, false), (512, 256, true), (4096, 2048, false), (4096, 2048, true)]
        {
            freezes(mib, dirty_mib, huge);
        }
    }
}

/// Median, 99th percentile and sum of `touch`, in µs.
fn touch(vm: &mut FakeVm, first: u64, count: u64, stride: u64) -> [f64; 3] {
    let answer = vm.ask(&format!("touch {first} {count} {stride}"));
    let mut words = answer.split(' ').map(|word| word.parse::<f64>().expect("ns") / 1e3);
    std::array::from_fn(|_| words.next().expect("three numbers"))
}

/// Each touched page is the first of its unit.
fn faults() {
    println!("fault, µs p50/p99      from a cache    from a freeze   touched by a sibling   ratio");
    for unit in [1u64, 2, 4, 8, 16, 32, 64, 128, 512] {
        // Blocks of two images, one of which is drained: pages come from a cache, and are copied.
        let blocks = (unit * 200).div_ceil(BLOCK_PAGES).clamp(8, 200);
        let pages = blocks * BLOCK_PAGES;
        let mut parent = FakeVm::start(pages, Role::Boot);
        parent.ask(&format!("fill 0 {pages} 1"));
        let first = freeze(&mut parent, unit);
        assert!(first.wait_drained(MINUTE));
        for block in 0..blocks {
            parent.ask(&format!("poke {} 2", block * BLOCK_PAGES + BLOCK_PAGES - 1));
        }
        let second = freeze(&mut parent, unit);
        assert!(second.wait_drained(MINUTE));
        let count = (unit * 200).min(pages);
        let [cache50, cache99, _] = touch(&mut clone_of(&second), 0, count, unit);
        let [sibling50, sibling99, _] = touch(&mut clone_of(&second), 0, count, unit);
        drop(parent);

        // Pages of a VM that was frozen just now.
        let pages = 65536;
        let mut parent = FakeVm::start(pages, Role::Boot);
        parent.ask(&format!("fill 0 {pages} 1"));
        let mut waiting = FakeVm::start(pages, Role::Wait);
        let (third, _) = engine(&mut parent, unit);
        parent.memory().freeze(&third).expect("freeze");
        assert!(third.wait_sealed(MINUTE));
        waiting.memory().attach(&third).expect("attach");
        let count = unit * 100;
        let first = pages - count; // the drain comes there last
        let [frozen50, frozen99, _] =
            touch(&mut waiting, first.max(pages / 2), count.min(pages / 2), unit);
        println!(
            "unit {unit:3} pages    {cache50:7.1}/{cache99:7.1} {frozen50:7.1}/{frozen99:7.1}     {sibling50:7.2}/{sibling99:7.2}     {:.3}",
            sibling50 / cache50
        );
    }
}

/// Every second block is mapped by itself.
fn map() {
    const BLOCKS: u64 = 200;
    let pages = BLOCKS * BLOCK_PAGES;
    let mut parent = FakeVm::start(pages, Role::Boot);
    parent.ask(&format!("fill 0 {pages} 1"));
    let first = freeze(&mut parent, 16);
    assert!(first.wait_drained(MINUTE));
    for block in (0..BLOCKS).step_by(2) {
        parent.ask(&format!("poke {} 2", block * BLOCK_PAGES));
    }
    let second = freeze(&mut parent, 16);
    assert!(second.wait_drained(MINUTE));
    let mut child = clone_of(&second);
    let [p50, p99, _] = touch(&mut child, BLOCK_PAGES, pages - BLOCK_PAGES, 2 * BLOCK_PAGES);
    println!(
        "map a block of another cache: {p50:.1}/{p99:.1} µs p50/p99, {} mapped",
        child.memory().counters().mapped.get()
    );
    let mut child = clone_of(&first);
    let [_, _, sum] = touch(&mut child, 0, pages, 1);
    println!(
        "all of {} MiB touched, in the cache: {:.2} µs a page",
        pages / 256,
        sum / f64::from(u32::try_from(pages).expect("small"))
    );
}

fn freezes(mib: u64, dirty_mib: u64, huge: bool) {
    let (pages, dirty) = (mib * 256, dirty_mib * 256);
    let mut parent = FakeVm::start(pages, Role::Boot);
    if huge {
        parent.ask("huge");
    }
    parent.ask(&format!("fill 0 {dirty} 1"));
    for round in 0..3 {
        let (next, _) = engine(&mut parent, 16);
        let times = parent.memory().freeze(&next).expect("freeze");
        assert!(next.wait_sealed(MINUTE));
        let derive = next.image().counters().derive_us.get();
        let began = std::time::Instant::now();
        assert!(next.wait_drained(MINUTE));
        println!(
            "{mib} MiB, {dirty_mib} dirty{}, freeze {round}: moving {:?}, mapping {:?}, all {:?}; derive {derive} µs, drain {:.0?}, {} mappings",
            if huge { " (huge pages)" } else { "" },
            times.moving,
            times.mapping,
            times.total,
            began.elapsed(),
            times.mappings,
        );
    }
}

/// A parent that is forked 50 times, and writes here and there in between.
fn scattered(mib: u64) {
    let pages = mib * 256;
    let mut parent = FakeVm::start(pages, Role::Boot);
    parent.ask("huge");
    parent.ask(&format!("fill 0 {} 1", pages / 2));
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    let mut engines = Vec::new();
    // Not all of it: each round copies the touched part of the blocks that were written to.
    let touched = (pages / 2).min(65536);
    for round in 1..=50u64 {
        let (next, _) = engine(&mut parent, 16);
        let times = parent.memory().freeze(&next).expect("freeze");
        assert!(next.wait_drained(MINUTE));
        for _ in 0..64 {
            parent.ask(&format!("poke {} {round}", random(touched)));
        }
        touch(&mut parent, 0, touched, 16);
        engines.push(next);
        if [1, 2, 3, 5, 10, 20, 30, 40, 50].contains(&round) {
            let held: u64 = engines.iter().map(|it| it.image().cache().resident_bytes()).sum();
            println!(
                "{mib} MiB, scattered, freeze {round:2}: {:4} mappings, moving {:?}, mapping {:?}, all {:?}; {} MiB in all caches",
                times.mappings,
                times.moving,
                times.mapping,
                times.total,
                held >> 20
            );
        }
    }
}
