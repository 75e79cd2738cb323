//! A process that writes is killed at random moments: what it had acknowledged is there.
//! And a small medium gets full.
//!
//! Both run this program again as another process, with the ignored tests below as its work.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vmfork_disk::{Disk, DiskImage, DiskSet, DiskSpec, DiskStore, StoreOptions};
use vmfork_nbd::Span;

const FOLDER: &str = "VMFORK_DISK_TEST_FOLDER";
const PAGES: u64 = 256;
const SIZE: u64 = PAGES * 4096;
const ROUNDS: u64 = 12;

fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).expect("run by another test"))
}

fn open(folder: &Path, floor_bytes: u64) -> DiskStore {
    DiskStore::open(folder, StoreOptions { floor_bytes }).expect("a store")
}

fn create(store: &DiskStore) -> Disk {
    let (name, vm, set) = ("data".to_owned(), "a".to_owned(), DiskSet::new(None));
    let spec = DiskSpec { name, vm, size_bytes: SIZE, set };
    store.create(&spec, &DiskImage::blank(SIZE).expect("an image")).expect("a disk")
}

fn none(_: vmfork_image::ImageId) -> Option<DiskImage> {
    None
}

/// What step `number` does: where, and with which byte.
fn step(number: u64) -> (Span, u8) {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let at = mixed % (PAGES * 8);
    let len = (mixed >> 20) % 24 + 1;
    let len_bytes = u32::try_from(len.min(PAGES * 8 - at) * 512).expect("small");
    (Span { offset_bytes: at * 512, len_bytes }, u8::try_from(number % 255 + 1).expect("small"))
}

fn apply(bytes: &mut [u8], number: u64) {
    let (span, byte) = step(number);
    let at = usize::try_from(span.offset_bytes).expect("small");
    bytes[at..at + span.len_bytes as usize].fill(byte);
}

/// Writes and freezes until it is killed. Says each step before and after it.
#[test]
#[ignore = "the work of another test"]
fn child_writes() {
    let folder = folder();
    let store = open(&folder.join("store"), 0);
    let disk = create(&store);
    let log = std::fs::File::create(folder.join("log")).expect("a file");
    for number in 0.. {
        log.write_all_at(&u64::to_le_bytes(number + 1), 8).expect("written");
        let (span, byte) = step(number);
        disk.write(span, &vec![byte; span.len_bytes as usize]).expect("written");
        log.write_all_at(&u64::to_le_bytes(number + 1), 0).expect("written");
        if number == 20 {
            eprintln!("ready");
        }
        if number % 50 == 49 {
            let image = disk.freeze().expect("frozen");
            // Sometimes a table is written, sometimes a chain is left.
            if number % 100 == 99 {
                store.drain();
            }
            drop(image);
        }
    }
}

/// Freezes after each step, until it is killed: layers are merged all the time.
#[test]
#[ignore = "the work of another test"]
fn child_merges() {
    let folder = folder();
    let store = open(&folder.join("store"), 0);
    let disk = create(&store);
    let log = std::fs::File::create(folder.join("log")).expect("a file");
    for number in 0.. {
        log.write_all_at(&u64::to_le_bytes(number + 1), 8).expect("written");
        let (span, byte) = step(number);
        disk.write(span, &vec![byte; span.len_bytes as usize]).expect("written");
        log.write_all_at(&u64::to_le_bytes(number + 1), 0).expect("written");
        drop(disk.freeze().expect("frozen"));
        if number % 16 == 15 {
            store.drain();
        }
        if number == 100 {
            assert!(store.counts().merges > 0);
            eprintln!("ready");
        }
    }
}

/// How large the disk is after `steps` of a child that grows it.
fn grown(steps: u64) -> u64 {
    SIZE + steps / 5 * 3 * 512
}

/// As [`step`], anywhere on a disk that has grown.
fn grown_step(number: u64) -> (Span, u8) {
    let (span, byte) = step(number);
    let sectors = grown(number) / 512;
    let len = u64::from(span.len_bytes / 512);
    let at = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (sectors - len);
    (Span { offset_bytes: at * 512, ..span }, byte)
}

/// Grows the disk after each fifth step, until it is killed.
#[test]
#[ignore = "the work of another test"]
fn child_grows() {
    let folder = folder();
    let store = open(&folder.join("store"), 0);
    let disk = create(&store);
    let log = std::fs::File::create(folder.join("log")).expect("a file");
    for number in 0.. {
        log.write_all_at(&u64::to_le_bytes(number + 1), 8).expect("written");
        let (span, byte) = grown_step(number);
        disk.write(span, &vec![byte; span.len_bytes as usize]).expect("written");
        if number % 7 == 6 {
            drop(disk.freeze().expect("frozen"));
        }
        disk.grow(grown(number + 1)).expect("grown");
        log.write_all_at(&u64::to_le_bytes(number + 1), 0).expect("written");
        if number == 40 {
            eprintln!("ready");
        }
    }
}

fn again(test: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--ignored", "--nocapture"]).env(FOLDER, folder);
    command.stderr(Stdio::piped()).stdout(Stdio::null());
    command
}

/// Waits until it is ready, and then for `more`.
fn until_ready(child: &mut Child, more: Duration) {
    let errors = BufReader::new(child.stderr.take().expect("piped"));
    let ready = errors.lines().map_while(Result::ok).any(|line| line.contains("ready"));
    assert!(ready, "it ended before: {:?}", child.wait());
    let (_never, wait) = std::sync::mpsc::channel::<()>();
    std::sync::mpsc::Receiver::recv_timeout(&wait, more).expect_err("nothing comes");
}

#[test]
fn what_was_acknowledged_before_a_kill_is_there() {
    let steps = killed_at_random("child_writes");
    assert!(steps > 21 * ROUNDS, "they did something: {steps} steps");
}

#[test]
fn a_kill_while_layers_are_merged_loses_nothing() {
    let steps = killed_at_random("child_merges");
    assert!(steps > 100 * ROUNDS, "they did something: {steps} steps");
}

#[test]
fn a_kill_while_a_disk_grows_leaves_the_old_size_or_the_new() {
    let mut steps = 0;
    for round in 0..ROUNDS {
        let folder = tempfile::tempdir().expect("a folder");
        let (done, begun) = kill("child_grows", folder.path(), round);
        let store = open(&folder.path().join("store"), 0);
        let listing = store.list().expect("a list");
        assert!(listing.bad.is_empty(), "{:?}", listing.bad);
        let heads = listing.disks();
        assert_eq!(heads.len(), 1, "{heads:?}");
        let disk = store.reopen(heads[0].id, &DiskSet::new(None), &none).expect("the disk");
        let size_bytes = disk.size_bytes();
        assert_eq!(heads[0].note.size_bytes, size_bytes, "note and disk agree");
        let sizes = [grown(done), grown(begun)];
        assert!(sizes.contains(&size_bytes), "{size_bytes} is none of {sizes:?}, round {round}");
        let all = Span { offset_bytes: 0, len_bytes: u32::try_from(size_bytes).expect("small") };
        let mut found = vec![0xaa; all.len_bytes as usize];
        disk.read(all, &mut found).expect("read");
        let mut model = vec![0; found.len()];
        for number in 0..done {
            let (span, byte) = grown_step(number);
            let at = usize::try_from(span.offset_bytes).expect("small");
            model[at..at + span.len_bytes as usize].fill(byte);
        }
        // Of the step that was not acknowledged, each sector is old or new.
        let (next, byte) = grown_step(done);
        let next = next.offset_bytes / 512..next.end() / 512;
        for (at, (found, old)) in found.chunks(512).zip(model.chunks(512)).enumerate() {
            let is_new = begun > done && next.contains(&(at as u64)) && found == [byte; 512];
            assert!(found == old || is_new, "sector {at} after {done} steps, round {round}");
        }
        steps += done;
    }
    assert!(steps > 40 * ROUNDS, "they did something: {steps} steps");
}

/// Runs a child, and kills it at a moment. → the steps that it had done, and those begun.
fn kill(test: &str, folder: &Path, round: u64) -> (u64, u64) {
    let mut child = again(test, folder).spawn().expect("a child");
    until_ready(&mut child, Duration::from_micros(round * round * 1500));
    child.kill().expect("killed");
    child.wait().expect("ended");
    let log = std::fs::read(folder.join("log")).expect("a log");
    let word = |at: usize| u64::from_le_bytes(log[at..at + 8].try_into().expect("eight"));
    let (done, begun) = (word(0), word(8));
    assert!(begun == done || begun == done + 1);
    (done, begun)
}

/// → steps that were acknowledged and found.
fn killed_at_random(test: &str) -> u64 {
    let mut steps = 0;
    for round in 0..ROUNDS {
        let folder = tempfile::tempdir().expect("a folder");
        let (done, begun) = kill(test, folder.path(), round);
        let store = open(&folder.path().join("store"), 0);
        let listing = store.list().expect("a list");
        assert!(listing.bad.is_empty(), "{:?}", listing.bad);
        let heads = listing.disks();
        assert_eq!(heads.len(), 1, "{heads:?}");
        let disk = store.reopen(heads[0].id, &DiskSet::new(None), &none).expect("the disk");
        let mut found = vec![0; usize::try_from(SIZE).expect("small")];
        let all = Span { offset_bytes: 0, len_bytes: u32::try_from(SIZE).expect("small") };
        disk.read(all, &mut found).expect("read");
        let mut model = vec![0; found.len()];
        (0..done).for_each(|number| apply(&mut model, number));
        // Of the step that was not acknowledged, each sector is old or new.
        let mut next = model.clone();
        if begun > done {
            apply(&mut next, done);
        }
        for (at, ((found, old), new)) in
            found.chunks(512).zip(model.chunks(512)).zip(next.chunks(512)).enumerate()
        {
            assert!(found == old || found == new, "sector {at} after {done} steps, round {round}");
        }
        // What was left of a merge is not needed.
        store.remove_unneeded().expect("removed");
        let mut again = vec![0; found.len()];
        disk.read(all, &mut again).expect("read");
        assert!(found == again, "round {round}");
        steps += done;
    }
    steps
}

/// On a medium of 4 MiB.
#[test]
#[ignore = "the work of another test"]
fn child_fills() {
    let folder = folder();
    for floor_bytes in [0, 1 << 20] {
        let store = open(&folder.join(format!("store{floor_bytes}")), floor_bytes);
        let blank = DiskImage::blank(64 << 20).expect("an image");
        let (name, vm, set) = ("data".to_owned(), "a".to_owned(), DiskSet::new(None));
        let spec = DiskSpec { name, vm, size_bytes: 64 << 20, set };
        let disk = store.create(&spec, &blank).expect("a disk");
        // The layer made in advance takes its space before it is looked at.
        store.drain();
        let page = |number: u64| Span { offset_bytes: number * 4096, len_bytes: 4096 };
        let mut written = 0;
        let full = loop {
            match disk.write(page(written), &[7; 4096]) {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull, "{full}");
        let free = || {
            let found = rustix::fs::statvfs(&folder).expect("told");
            found.f_bavail * found.f_frsize
        };
        assert!(written > 100, "{written} pages");
        assert!(free() >= floor_bytes, "{} bytes free", free());
        // What was written is there, and can be written again.
        disk.write(page(3), &[8; 4096]).expect("it needs no space");
        let mut bytes = [0; 4096];
        for number in 0..written {
            disk.read(page(number), &mut bytes).expect("read");
            assert_eq!(bytes, [if number == 3 { 8 } else { 7 }; 4096]);
        }
        // Space that comes back is used.
        disk.trim(Span { offset_bytes: 0, len_bytes: 64 * 4096 }).expect("trimmed");
        let until = Instant::now() + Duration::from_secs(10);
        while let Err(error) = disk.write(page(1), &[9; 4096]) {
            assert!(Instant::now() < until, "{error}");
            std::thread::yield_now();
        }
        drop(disk);
        drop(store);
    }
    eprintln!("all is well");
}

#[test]
fn a_full_medium_is_an_error_of_the_write_and_a_floor_comes_before() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can mount");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let script = r#"mount -t tmpfs -o size=4m none "$1" && shift && exec "$@""#;
    let child = again("child_fills", folder.path());
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    command.arg(folder.path()).arg(child.get_program()).args(child.get_args());
    let output = command.env(FOLDER, folder.path()).output().expect("unshare");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("all is well"), "{output:?}");
}
