//! What deriving a table of 4 GiB costs: `cargo run --release -p vmfork-image --example
//! derive_cost`.

#![expect(clippy::print_stdout, reason = "a table for people is all it makes")]

use std::hint::black_box;
use std::time::Instant;

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};

/// Pages of 4 GiB.
const PAGES: u64 = 1 << 20;

/// Times each derive is repeated.
const ROUNDS: usize = 31;

fn image(n: u64) -> Source {
    ImageId::new(n).map_or(Source::Zero, Source::Image)
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::between(PageIdx(start), PageIdx(start + len))
}

/// `count` single pages, scattered but ascending, as a page map is read.
fn scattered(count: usize, seed: u64) -> Vec<PageRange> {
    let mut state = seed;
    let mut pages: Vec<u64> = (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % PAGES
        })
        .collect();
    pages.sort_unstable();
    pages.dedup();
    pages.into_iter().map(|page| range(page, 1)).collect()
}

/// Median time of `work`, in µs.
fn median_us<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            let result = work();
            let took = begin.elapsed();
            drop(black_box(result));
            took.as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn main() {
    let booted = PageTable::uniform(PAGES, Source::Zero)
        .derive(scattered(100_000, 3).into_iter().map(|range| (range, image(1))))
        .expect("within");
    let parents =
        [("uniform", PageTable::uniform(PAGES, image(1))), ("100k scattered pages", booted)];
    let dirty = [
        ("nothing", Vec::new()),
        ("100 scattered pages", scattered(100, 7)),
        ("2 GiB contiguous", vec![range(PAGES / 4 + 5, PAGES / 2)]),
        ("100k scattered pages", scattered(100_000, 9)),
    ];
    println!(
        "{:<22} {:<22} {:>11} {:>9} {:>9} {:>11} {:>11}",
        "parent", "dirty", "derive µs", "nodes", "mixed", "new KiB", "runs µs"
    );
    for (parent_name, parent) in &parents {
        for (name, changes) in &dirty {
            let derive = || {
                let changes = changes.iter().map(|range| (*range, image(2)));
                parent.derive(changes).expect("within")
            };
            let derive_us = median_us(derive);
            let child = derive();
            let runs_us = median_us(|| child.runs(child.range()).count());
            let new = child.size_beyond(parent);
            println!(
                "{parent_name:<22} {name:<22} {derive_us:>11.1} {:>9} {:>9} {:>11.1} {runs_us:>11.1}",
                new.inner_nodes,
                new.mixed_blocks,
                new.heap_bytes as f64 / 1024.0,
            );
        }
    }
    let (_, parent) = &parents[1];
    let pages = scattered(100_000, 11);
    let all_us = median_us(|| {
        pages.iter().filter(|page| parent.lookup(page.start()) == Source::Zero).count()
    });
    println!("\none lookup, scattered: {:.3} µs", all_us / pages.len() as f64);
}
