//! Measures what chunk size and zstd level cost, on bytes like those of guests: the table in
//! docs/format.md.
//!
//! ```text
//! cargo run --release -p vmfork-store --example chunk_sizes [MIB]
//! ```
//!
//! Half of the pages are programs and libraries of this machine as they lie in a page cache, half
//! the heap of a Python process. They alternate with as many zero pages, which are left out, in
//! runs of 4 to 64. One thread; files are in the page cache. Times are the thread's own, so that a
//! busy machine shows the same.

#![expect(clippy::print_stdout, reason = "a program for people")]

use std::error::Error;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use vmfork_image::{PageIdx, PageRange, PageSource as _};
use vmfork_store::format::chunk::{self, ChunkEncoder};
use vmfork_store::{Compression, Draft, Extent, HotChunks, SourceOptions, Store, Stored, Work};

const PAGE: usize = 4096;
/// What one fault brings in by default.
const READ_PAGES: u64 = 16;
const READS: usize = 2000;

/// Objects as a service has them; then what is writable of it, as it lies in memory.
const HEAP: &str = r#"
import sys, re, random, json
random.seed(1)
keep = [{"id": i, "name": "user%d" % i, "tags": [random.random() for _ in range(6)], "text": ("lorem ipsum %d " % random.randrange(999)) * 4} for i in range(120000)]
cache = {str(i): json.dumps(k) for i, k in enumerate(keep)}
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as mem:
    for line in maps.readlines():
        m = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if m:
            at, end = int(m[1], 16), int(m[2], 16)
            while at < end:
                mem.seek(at)
                try: part = mem.read(min(1 << 20, end - at))
                except OSError: break
                sys.stdout.buffer.write(part)
                at += len(part)
"#;

fn files(folder: &Path, bytes: &mut Vec<u8>, most: usize) -> Result<(), Box<dyn Error>> {
    let mut entries: Vec<_> = std::fs::read_dir(folder)?.flatten().collect();
    entries.sort_by_key(std::fs::DirEntry::path);
    for entry in entries {
        if bytes.len() >= most {
            break;
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            files(&entry.path(), bytes, most)?;
        } else if kind.is_file() && entry.metadata()?.len() > 64 << 10 {
            let Ok(file) = std::fs::read(entry.path()) else { continue };
            bytes.extend_from_slice(&file[..file.len() - file.len() % PAGE]);
        }
    }
    Ok(())
}

fn not_zero(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.chunks_exact(PAGE).filter(|page| page.iter().any(|byte| *byte != 0))
}

fn pages(bytes_max: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut programs = Vec::new();
    for folder in ["/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib/python3"] {
        let most = programs.len() + bytes_max / 4;
        if Path::new(folder).exists() {
            files(Path::new(folder), &mut programs, most)?;
        }
    }
    let mut python = Command::new("python3").args(["-c", HEAP]).stdout(Stdio::piped()).spawn()?;
    let mut heap = Vec::new();
    python.stdout.take().ok_or("no pipe")?.read_to_end(&mut heap)?;
    python.wait()?;
    // In turns of 1 MiB, so that each chunk is of one kind, as in a guest.
    let (programs, heap): (Vec<_>, Vec<_>) =
        (not_zero(&programs).collect(), not_zero(&heap).collect());
    let mut all = Vec::new();
    for (programs, heap) in programs.chunks(256).zip(heap.chunks(256)) {
        if all.len() >= bytes_max {
            break;
        }
        programs.iter().chain(heap).for_each(|page| all.extend_from_slice(page));
    }
    Ok(all)
}

fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Where the own pages lie, and how many pages there are in all.
type Layout = (Vec<(PageRange, Extent)>, u64);

fn layout(own: u64) -> Result<Layout, Box<dyn Error>> {
    let (mut extents, mut at, mut left, mut state) = (Vec::new(), 0, own, 7);
    while left > 0 {
        at += 4 + random(&mut state) % 61;
        let len = (4 + random(&mut state) % 61).min(left);
        extents.push((PageRange::new(PageIdx(at), len)?, Extent::Own));
        at += len;
        left -= len;
    }
    Ok((extents, at))
}

fn mib_per_s(bytes: usize, took: Duration) -> u64 {
    let us = took.as_micros().max(1);
    u64::try_from((bytes as u128 * 1_000_000 / us) >> 20).unwrap_or(0)
}

/// What encoding and decoding took by themselves.
struct Coding {
    encode: Duration,
    decode: Duration,
    stored_bytes: usize,
}

/// Encodes and decodes the chunks of a snapshot.
fn code(
    stored: &Stored,
    compression: Compression,
    read: &impl Fn(PageRange, &mut [u8]) -> io::Result<()>,
) -> Result<Coding, Box<dyn Error>> {
    let mut encoder = ChunkEncoder::new(compression)?;
    let mut coding = Coding { encode: Duration::ZERO, decode: Duration::ZERO, stored_bytes: 0 };
    for window in stored.table().windows() {
        let mut raw = Vec::new();
        for run in stored.table().own_runs(stored.table().window_range(window.index)) {
            let from = raw.len();
            raw.resize(from + usize::try_from(run.byte_len())?, 0);
            read(run, &mut raw[from..])?;
        }
        let begin = cpu_time();
        let hash = blake3::hash(&raw);
        let file = encoder.encode(&raw);
        coding.encode += cpu_time() - begin;
        let begin = cpu_time();
        let again = chunk::decode(&file, &hash)?;
        coding.decode += cpu_time() - begin;
        assert!(again == raw, "a chunk came back as another");
        coding.stored_bytes += file.len();
    }
    Ok(coding)
}

/// How long the reads of single faults took, in µs and sorted. Each reads 64 KiB of own pages, at a
/// random place of one extent.
fn read_times(
    stored: &Arc<Stored>,
    extents: &[(PageRange, Extent)],
) -> Result<Vec<u128>, Box<dyn Error>> {
    let source = stored.source(SourceOptions { hot: HotChunks::new(0), remote: None });
    let long: Vec<_> = extents.iter().filter(|(range, _)| range.len() >= READ_PAGES).collect();
    let (mut took, mut state) = (Vec::with_capacity(READS), 3);
    let mut bytes = vec![0; 64 << 10];
    for _ in 0..READS {
        let (range, _) = long[usize::try_from(random(&mut state) % long.len() as u64)?];
        let skip = random(&mut state) % (range.len() - READ_PAGES + 1);
        let run = range.from_page(PageIdx(range.start().0 + skip)).truncate(READ_PAGES);
        let begin = cpu_time();
        source.read(run, &mut bytes)?;
        took.push((cpu_time() - begin).as_micros());
    }
    took.sort_unstable();
    Ok(took)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mib: usize = std::env::args().nth(1).map_or(Ok(128), |text| text.parse())?;
    let all = pages(mib << 20)?;
    let own = (all.len() / PAGE) as u64;
    let (extents, pages) = layout(own)?;
    // Where each own page's bytes are.
    let mut place = vec![usize::MAX; usize::try_from(pages)?];
    for (i, page) in extents.iter().flat_map(|(range, _)| range.pages()).enumerate() {
        place[usize::try_from(page.0)?] = i * PAGE;
    }
    let read = |range: PageRange, bytes: &mut [u8]| {
        for (page, into) in range.pages().zip(bytes.chunks_exact_mut(PAGE)) {
            let from = usize::try_from(page.0).map_or(usize::MAX, |page| place[page]);
            into.copy_from_slice(&all[from..from + PAGE]);
        }
        Ok(())
    };
    println!("{} MiB of own pages", all.len() >> 20);
    println!("| pages | zstd | encode MiB/s | decode MiB/s | stored | 64 KiB read, p50 / p99 µs |");
    println!("|---|---|---|---|---|---|");
    for compression in
        [Compression::None, Compression::Zstd { level: 1 }, Compression::Zstd { level: 3 }]
    {
        for chunk_pages in [16, 32, 64, 128, 256] {
            let folder = tempfile::tempdir()?;
            let store = Store::folder(folder.path().join("store"))?;
            let draft = Draft {
                name: "x".into(),
                id: None,
                base: None,
                pages,
                extents: extents.clone(),
                state: Vec::new(),
                vm: serde_json::Value::Null,
                compression,
                chunk_pages,
                keep_zero_pages: false,
            };
            store.create(draft, &read, &Work::new(1))?;
            let stored = store.open("x")?;
            let Coding { encode, decode, stored_bytes } = code(&stored, compression, &read)?;
            let took = read_times(&stored, &extents)?;
            let level = match compression {
                Compression::None => "none".to_owned(),
                Compression::Zstd { level } => level.to_string(),
            };
            println!(
                "| {chunk_pages} | {level} | {} | {} | {} % | {} / {} |",
                mib_per_s(all.len(), encode),
                mib_per_s(all.len(), decode),
                stored_bytes * 100 / all.len(),
                took[READS / 2],
                took[READS * 99 / 100],
            );
        }
    }
    Ok(())
}
