//! How quick a served disk is, beside a raw file:
//!
//! ```text
//!   cargo test --workspace --test speed -- --ignored --nocapture
//! ```

mod tools;

use tools::{Served, run, text};
use vmfork_disk::DiskImage;

const SIZE: u64 = 1 << 30;

/// Runs of which the quickest counts: other programs only make one slower.
const RUNS: u32 = 7;

/// µs per operation.
fn bench(target: &str, args: &[&str], count: u32) -> Option<f64> {
    let runs = (0..RUNS).map(|_| run_once(target, args, count / RUNS));
    runs.reduce(|one, two| Some(one?.min(two?))).flatten()
}

fn run_once(target: &str, args: &[&str], count: u32) -> Option<f64> {
    let count_text = count.to_string();
    let args = [&["bench", "-f", "raw", "-c", &count_text][..], args, &[target]].concat();
    let said = run("qemu-img", &args)?;
    let seconds = said.split("Run completed in ").nth(1)?.split(' ').next()?.parse::<f64>().ok()?;
    Some(seconds / f64::from(count) * 1e6)
}

#[test]
#[ignore = "a measurement"]
fn a_served_disk_and_a_raw_file() {
    let served = Served::new();
    let raw = served.path("raw");
    let fill = ["-f", "raw", "-c", "write -P 5 0 512M", "-c", "write -P 6 512M 512M"];
    std::fs::File::create_new(&raw).expect("a file").set_len(SIZE).expect("sized");
    let Some(_) = run("qemu-io", &[&fill[..], &[text(&raw)]].concat()) else { return };
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = served.add("new", &blank, SIZE);
    run("qemu-io", &[&fill[..], &[&served.uri("new")]].concat()).expect("filled");
    // 4099 pages: a step that meets all of them in no order.
    let random = ["-s", "4k", "-S", "16789504"];
    let sequential = ["-s", "1M", "-d", "4"];
    let cases: [(&str, Vec<&str>, u32); 6] = [
        ("4 KiB read, depth 1", [&random[..], &["-d", "1"]].concat(), 50_000),
        ("4 KiB read, depth 16", [&random[..], &["-d", "16"]].concat(), 200_000),
        ("4 KiB write, depth 1", [&random[..], &["-d", "1", "-w"]].concat(), 20_000),
        ("4 KiB write, depth 16", [&random[..], &["-d", "16", "-w"]].concat(), 50_000),
        ("1 MiB read, depth 4", sequential.to_vec(), 2000),
        ("1 MiB write, depth 4", [&sequential[..], &["-w"]].concat(), 1000),
    ];
    eprintln!("{:24} {:>10} {:>10}", "µs per operation", "raw file", "served");
    for (name, args, count) in &cases {
        let file = bench(text(&raw), args, *count).expect("told");
        let disk = bench(&served.uri("new"), args, *count).expect("told");
        eprintln!("{name:24} {file:10.1} {disk:10.1}");
    }
    for freezes in [0, 1, 50] {
        while disk.counts().freezes < freezes {
            disk.freeze().expect("frozen");
        }
        served.store.drain();
        for (name, args, count) in &cases[..2] {
            let disk = bench(&served.uri("new"), args, *count).expect("told");
            eprintln!("{name:24} {:>10} {disk:10.1}   after {freezes} freezes", "");
        }
    }
    eprintln!("{:?}, {:?}", disk.counts(), served.store.counts());
}
