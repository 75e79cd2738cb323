//! Disks as QEMU's and libnbd's programs see them.

mod tools;

use std::os::unix::fs::MetadataExt;

use tools::{Served, run, text, try_run};
use vmfork_disk::{DiskImage, Durability};

const MIB: u64 = 1 << 20;

#[test]
fn qemu_img_finds_size_and_holes_and_copies_out_sparse() {
    let served = Served::new();
    let blank = DiskImage::blank(64 * MIB).expect("an image");
    served.add("data", &blank, 64 * MIB);
    let uri = served.uri("data");
    let Some(info) = run("qemu-img", &["info", "--output=json", &uri]) else { return };
    assert!(info.contains("\"virtual-size\": 67108864"), "{info}");
    let write = "write -P 0x5a 1M 3M";
    let part = "write -P 0x33 4097K 512";
    run("qemu-io", &["-f", "raw", "-c", write, "-c", part, "-c", "flush", &uri]).expect("qemu-io");
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).expect("a map");
    assert!(
        map.contains(
            r#""start": 0, "length": 1048576, "depth": 0, "present": false, "zero": true"#
        ) || map.contains(
            r#""start": 0, "length": 1048576, "depth": 0, "present": true, "zero": true"#
        ),
        "{map}"
    );
    let out = served.path("out");
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, text(&out)]).expect("copied");
    let found = out.metadata().expect("a file");
    assert_eq!(found.size(), 64 * MIB);
    assert!(found.blocks() * 512 < 8 * MIB, "{} bytes", found.blocks() * 512);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &uri, text(&out)]).expect("the same");
    let bytes = std::fs::read(&out).expect("a file");
    assert!(bytes[1 << 20..4 << 20].iter().all(|byte| *byte == 0x5a));
    let at = 4097 << 10;
    assert_eq!([bytes[at - 1], bytes[at], bytes[at + 511], bytes[at + 512]], [0, 0x33, 0x33, 0]);
}

#[test]
fn qemu_io_writes_zeroes_discards_and_reads_what_a_freeze_left() {
    let served = Served::new();
    let blank = DiskImage::blank(16 * MIB).expect("an image");
    let disk = served.add_as("data", &blank, 16 * MIB, Durability::Medium);
    let uri = served.uri("data");
    let write = ["-c", "write -P 1 0 8M", "-c", "write -z 1M 1M", "-c", "discard 2M 1M"];
    let tell = ["-c", "write -z -u 3M 4K", "-c", "write -f -P 2 4M 64K", "-c", "flush"];
    let args: Vec<&str> =
        ["-f", "raw", "-d", "unmap"].into_iter().chain(write).chain(tell).collect();
    let ask = |args: &[&str], uri: &str| run("qemu-io", &[args, &[uri]].concat());
    if ask(&args, &uri).is_none() {
        return;
    }
    let image = disk.freeze().expect("frozen");
    ask(&["-f", "raw", "-c", "write -P 9 0 1M"], &uri).expect("written");
    served.add("clone", &image, 16 * MIB);
    let same = |name: &str, first: &str| {
        let read = [
            "-f",
            "raw",
            "-c",
            first,
            "-c",
            "read -P 0 1M 2M",
            "-c",
            "read -P 0 3M 4K",
            "-c",
            "read -P 2 4M 64K",
            "-c",
            "read -P 1 5M 3M",
            "-c",
            "read -P 0 8M 8M",
        ];
        let said = ask(&read, &served.uri(name)).expect("read");
        assert!(!said.contains("verification failed"), "{name}: {said}");
    };
    same("clone", "read -P 1 0 1M");
    same("data", "read -P 9 0 1M");
    served.store.drain();
    same("clone", "read -P 1 0 1M");
    // Of an ordinary disk nothing is flushed: see `Durability::Host`.
    let clone = served.add("own", &image, 16 * MIB);
    ask(&["-f", "raw", "-c", "write -f -P 3 0 4K", "-c", "flush"], &served.uri("own"))
        .expect("done");
    assert_eq!((clone.counts().writes, clone.counts().flushes), (1, 0));
    let counts = disk.counts();
    assert!(counts.trims >= 3 && counts.flushes > 0 && counts.errors == 0, "{counts:?}");
}

#[test]
fn qemu_img_converts_onto_a_disk_and_a_raw_base_reads_the_same() {
    let served = Served::new();
    let raw = served.path("raw");
    let make = ["-f", "raw", "-c", "write -P 7 3M 2M", "-c", "write -P 8 9000K 5K", text(&raw)];
    let file = std::fs::File::create_new(&raw).expect("a file");
    file.set_len(20 * MIB + 512).expect("sized");
    if run("qemu-io", &make).is_none() {
        return;
    }
    let base = DiskImage::raw(&raw).expect("a base");
    served.add("base", &base, base.size_bytes());
    let (one, two) = (served.uri("base"), served.uri("copy"));
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", text(&raw), &one]).expect("the same");
    let blank = DiskImage::blank(base.size_bytes()).expect("an image");
    let copy = served.add("copy", &blank, base.size_bytes());
    let onto = ["convert", "-n", "-W", "-f", "raw", "-O", "raw", text(&raw), two.as_str()];
    run("qemu-img", &onto).expect("copied");
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &one, &two]).expect("the same");
    assert!(copy.layer_bytes() < 4 * MIB, "holes take no space: {}", copy.layer_bytes());
}

#[test]
fn libnbd_finds_each_disk_and_copies_it() {
    let served = Served::new();
    let blank = DiskImage::blank(8 * MIB).expect("an image");
    served.add("root", &blank, 8 * MIB);
    let disk = served.add("data", &blank, 8 * MIB);
    served.add_as("volume", &blank, 8 * MIB, Durability::Medium);
    let Some(listed) = run("nbdinfo", &["--list", &served.uri("")]) else { return };
    assert!(listed.contains("root") && listed.contains("data"), "{listed}");
    for (name, flush, fua) in [
        ("data", "can_flush: false", "can_fua: false"),
        ("volume", "can_flush: true", "can_fua: true"),
    ] {
        let told = run("nbdinfo", &[&served.uri(name)]).expect("told");
        for wanted in ["export-size: 8388608", "can_trim: true", flush, fua, "base:allocation"] {
            assert!(told.contains(wanted), "{wanted}: {told}");
        }
    }
    let refused = try_run("nbdinfo", &[&served.uri("other")]).expect("it is there");
    assert!(!refused.status.success());
    let source = served.path("source");
    let bytes: Vec<u8> =
        (0..8 * MIB).map(|at| u8::try_from(at / 65536 % 7).expect("small")).collect();
    std::fs::write(&source, &bytes).expect("written");
    run("nbdcopy", &[text(&source), &served.uri("data")]).expect("copied");
    disk.freeze().expect("frozen");
    let back = served.path("back");
    run("nbdcopy", &[&served.uri("data"), text(&back)]).expect("copied");
    assert!(std::fs::read(&back).expect("a file") == bytes);
}
