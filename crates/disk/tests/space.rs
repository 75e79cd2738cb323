//! What a disk that is frozen on and on costs:
//!
//! ```text
//!   cargo test --workspace --test space -- --ignored --nocapture
//! ```

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use vmfork_disk::{DiskImage, DiskSet, DiskSpec, DiskStore, StoreOptions};
use vmfork_nbd::Span;

const SIZE: u64 = 1 << 30;
const FREEZES: u64 = 10_000;
/// Written in one piece: 1 MiB are 16 of them, anywhere on the disk.
const PIECE: u32 = 64 << 10;

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

/// → folders of layers, and allocated bytes in them.
fn on_disk(layers: &Path) -> (usize, u64) {
    let (mut count, mut bytes) = (0, 0);
    for layer in std::fs::read_dir(layers).expect("a folder").flatten() {
        count += 1;
        for file in std::fs::read_dir(layer.path()).into_iter().flatten().flatten() {
            bytes += file.metadata().map_or(0, |found| found.blocks() * 512);
        }
    }
    (count, bytes)
}

/// A number without a pattern: splitmix64.
fn mixed(number: u64) -> u64 {
    let once = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let twice = (once ^ once >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let thrice = (twice ^ twice >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    thrice ^ thrice >> 31
}

#[test]
#[ignore = "a measurement"]
fn ten_thousand_freezes_of_one_mebibyte_each() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files).expect("more files");
    let folder = tempfile::tempdir().expect("a folder");
    let store = DiskStore::open(folder.path(), StoreOptions { floor_bytes: 0 }).expect("a store");
    let set = DiskSet::new(None);
    let (name, vm) = ("data".to_owned(), "a".to_owned());
    let spec = DiskSpec { name, vm, size_bytes: SIZE, set: std::sync::Arc::clone(&set) };
    let blank = DiskImage::blank(SIZE).expect("an image");
    let disk = store.create(&spec, &blank).expect("a disk");
    let bytes = vec![7; PIECE as usize];
    let began = Instant::now();
    let mut slowest = std::time::Duration::ZERO;
    eprintln!("  freezes    s layers    fds  RSS MiB  disk MiB  charged MiB");
    for number in 0..=FREEZES {
        if number.is_power_of_two() || number % 2000 == 0 {
            store.drain();
            let (layers, allocated) = on_disk(&folder.path().join("layers"));
            eprintln!(
                "{number:9} {:4} {layers:6} {:6} {:8} {:9} {:12}",
                began.elapsed().as_secs(),
                open_files(),
                resident_kib() >> 10,
                allocated >> 20,
                set.used_bytes() >> 20,
            );
        }
        for piece in 0..16 {
            let mixed = mixed(number * 16 + piece);
            let offset_bytes = mixed % (SIZE / u64::from(PIECE)) * u64::from(PIECE);
            disk.write(Span { offset_bytes, len_bytes: PIECE }, &bytes).expect("written");
        }
        store.drain();
        let before = Instant::now();
        drop(disk.freeze().expect("frozen"));
        slowest = slowest.max(before.elapsed());
    }
    eprintln!("slowest freeze: {slowest:?}; {:?}, {:?}", disk.counts(), store.counts());
}
