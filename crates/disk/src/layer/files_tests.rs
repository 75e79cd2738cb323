use std::time::Duration;

use proptest::prelude::*;

use super::*;

const PAGES: u64 = 64;
const PAGE: usize = 4096;

fn page(byte: u8) -> Vec<u8> {
    vec![byte; PAGE]
}

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

#[derive(Debug, Clone)]
enum Step {
    Write {
        page: u64,
        pages: usize,
        byte: u8,
    },
    Part {
        page: u64,
        at: usize,
        len: usize,
        byte: u8,
    },
    Zero {
        page: u64,
        pages: u64,
    },
    /// The daemon was killed, and the next one opens it.
    Open,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..PAGES, 1_usize..4, 1_u8..255).prop_map(|(page, pages, byte)| {
            let left = usize::try_from(PAGES - page).unwrap_or(1);
            Step::Write { page, pages: pages.min(left), byte }
        }),
        (0..PAGES, 0_usize..7, 1_usize..8, 1_u8..255).prop_map(|(page, at, len, byte)| {
            let (at, len) = (at * 512, len * 512);
            Step::Part { page, at, len: len.min(PAGE - at), byte }
        }),
        (0..PAGES, 1_u64..9)
            .prop_map(|(page, pages)| Step::Zero { page, pages: pages.min(PAGES - page) }),
        Just(Step::Open),
    ];
    proptest::collection::vec(step, 0..40)
}

/// What it lies on, in these tests.
const UNDER: u8 = 0xee;

proptest! {
    /// Against an array of bytes, over restarts.
    #[test]
    fn what_was_written_is_there_after_a_restart(steps in steps()) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut layer = LayerFiles::create(folder.path(), PAGES).expect("a layer");
        let mut model = vec![UNDER; usize::try_from(PAGES).expect("small") * PAGE];
        for step in steps {
            match step {
                Step::Write { page: start, pages, byte } => {
                    let bytes = vec![byte; pages * PAGE];
                    layer.write(PageIdx(start), &bytes).expect("written");
                    let at = usize::try_from(start).expect("small") * PAGE;
                    model[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                Step::Part { page: number, at, len, byte } => {
                    let part = vec![byte; len];
                    let under = |whole: &mut [u8]| { whole.copy_from_slice(&page(UNDER)); Ok(()) };
                    layer.write_part(PageIdx(number), at, &part, under).expect("written");
                    let begin = usize::try_from(number).expect("small") * PAGE + at;
                    model[begin..begin + len].copy_from_slice(&part);
                }
                Step::Zero { page: start, pages } => {
                    layer.zero(range(start, pages)).expect("zeroed");
                    let at = usize::try_from(start).expect("small") * PAGE;
                    let len = usize::try_from(pages).expect("small") * PAGE;
                    model[at..at + len].fill(0);
                }
                Step::Open => {
                    drop(layer);
                    layer = LayerFiles::open(folder.path()).expect("the layer");
                }
            }
        }
        for (run, state) in layer.map().runs(range(0, PAGES)) {
            let mut bytes = vec![0; usize::try_from(run.byte_len()).expect("small")];
            match state {
                PageState::Absent => bytes.fill(UNDER),
                PageState::Zero => {}
                PageState::Written => layer.read(run.start().byte_offset(), &mut bytes).expect("read"),
            }
            let at = usize::try_from(run.start().byte_offset()).expect("small");
            prop_assert_eq!(&bytes, &model[at..at + bytes.len()]);
        }
    }
}

#[test]
fn zeros_give_space_back() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir().expect("a folder");
    let layer = LayerFiles::create(folder.path(), PAGES).expect("a layer");
    layer.write(PageIdx(0), &vec![7; 32 * PAGE]).expect("written");
    let blocks = || folder.path().join("data").metadata().expect("a file").blocks();
    let before = blocks();
    layer.zero(range(0, 32)).expect("zeroed");
    assert!(blocks() < before, "{} of {before} blocks", blocks());
}

#[test]
fn files_of_another_size_version_or_kind_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let layer = LayerFiles::create(folder.path(), PAGES).expect("a layer");
    layer.write(PageIdx(3), &page(1)).expect("written");
    drop(layer);
    assert!(matches!(LayerFiles::create(folder.path(), PAGES), Err(LayerError::File { .. })));
    let opened = || LayerFiles::open(folder.path()).expect_err("refused");
    let path = folder.path().join("map");
    let good = std::fs::read(&path).expect("a file");
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        std::fs::write(&path, bytes).expect("written");
        opened()
    };
    assert!(matches!(with(0, 0), LayerError::Magic { .. }));
    assert!(matches!(with(8, 9), LayerError::Version { version: 9, .. }));
    assert!(matches!(with(4096, 3), LayerError::Map { .. }));
    assert!(matches!(with(23, 1), LayerError::Pages { .. }), "memory for it is not taken");
    std::fs::write(&path, &good[..good.len() - 1]).expect("cut");
    assert!(matches!(opened(), LayerError::Pages { pages: PAGES, .. }));
    std::fs::write(&path, &good[..9]).expect("cut");
    assert!(matches!(opened(), LayerError::File { .. }));
}

#[test]
fn an_error_of_what_lies_under_leaves_the_page_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let layer = LayerFiles::create(folder.path(), PAGES).expect("a layer");
    let failed = layer.write_part(PageIdx(1), 512, &[1; 512], |_| Err(io::Error::other("lost")));
    assert_eq!(failed.expect_err("lost").to_string(), "lost");
    assert_eq!(layer.map().state(PageIdx(1)), PageState::Absent);
}

#[test]
fn parts_of_one_page_by_two_threads_are_both_there() {
    for _ in 0..50 {
        let folder = tempfile::tempdir().expect("a folder");
        let layer = LayerFiles::create(folder.path(), PAGES).expect("a layer");
        std::thread::scope(|scope| {
            for part in 0..8_u8 {
                let layer = &layer;
                scope.spawn(move || {
                    let under = |whole: &mut [u8]| {
                        whole.fill(UNDER);
                        Ok(())
                    };
                    let at = usize::from(part) * 512;
                    layer.write_part(PageIdx(9), at, &[part; 512], under).expect("written");
                });
            }
        });
        let mut bytes = page(0);
        layer.read(9 * 4096, &mut bytes).expect("read");
        assert!((0..8_u8).all(|part| bytes[usize::from(part) * 512] == part));
    }
}

#[test]
fn a_smaller_growth_after_a_larger_one_cuts_no_file() {
    let folder = tempfile::tempdir().expect("folder");
    let small = LayerFiles::create(folder.path(), PAGES).expect("made");
    // The note of the larger one was not written: the disk has the layer that it had.
    drop(small.grown(PAGES * 40).expect("grown"));
    let long = |name| std::fs::metadata(folder.path().join(name)).expect("there").len();
    let (data, map) = (long("data"), long("map"));
    small.grown(PAGES * 2).expect("grown");
    assert_eq!((long("data"), long("map")), (data, map));
    LayerFiles::open(folder.path()).expect("opens");
}

#[test]
fn a_layer_that_has_grown_has_what_it_had_and_says_so_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let small = LayerFiles::create(folder.path(), PAGES).expect("a layer");
    assert_eq!(small.write(PageIdx(63), &page(5)).expect("written"), 1);
    assert_eq!(small.write(PageIdx(63), &page(6)).expect("written"), 0, "no new page");
    let grown = small.grown(PAGES * 40).expect("grown");
    assert_eq!(grown.write(PageIdx(PAGES * 40 - 1), &page(7)).expect("written"), 1);
    drop((small, grown));
    let layer = LayerFiles::open(folder.path()).expect("the layer");
    assert_eq!((layer.map().pages(), layer.map().count(PageState::Written)), (PAGES * 40, 2));
    let mut bytes = page(0);
    layer.read(63 * 4096, &mut bytes).expect("read");
    assert_eq!(bytes, page(6));
    assert_eq!(layer.zero(range(60, 10)).expect("zeroed"), 1);
}

/// No wait of these tests takes as long, unless one waits for another without end.
const LONG: Duration = Duration::from_secs(10);

/// What `change` does to the layer while a part of page 1 waits for what lies under it.
fn while_a_part_waits(layer: &LayerFiles, change: impl Fn(&LayerFiles) + Sync) {
    std::thread::scope(|scope| {
        let change = &change;
        let under = |whole: &mut [u8]| {
            let (ended, end) = std::sync::mpsc::channel();
            scope.spawn(move || {
                change(layer);
                ended.send(()).expect("heard");
            });
            end.recv_timeout(LONG).expect("it does not wait for the page");
            whole.copy_from_slice(&page(UNDER));
            Ok(())
        };
        layer.write_part(PageIdx(1), 512, &[1; 512], under).expect("written");
    });
}

#[test]
fn a_part_that_waits_for_a_page_delays_no_other_and_overwrites_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let layer = LayerFiles::create(folder.path(), PAGES).expect("a layer");
    while_a_part_waits(&layer, |layer| {
        layer.write(PageIdx(0), &vec![5; 3 * PAGE]).expect("written");
    });
    let mut bytes = page(0);
    layer.read(4096, &mut bytes).expect("read");
    assert_eq!((bytes[0], bytes[512], bytes[1024]), (5, 1, 5));
    layer.zero(range(0, 3)).expect("zeroed");
    drop(layer);
    std::fs::remove_dir_all(folder.path()).expect("removed");
    std::fs::create_dir(folder.path()).expect("a folder");
    let layer = LayerFiles::create(folder.path(), PAGES).expect("a layer");
    while_a_part_waits(&layer, |layer| {
        layer.zero(range(0, 3)).expect("zeroed");
    });
    layer.read(4096, &mut bytes).expect("read");
    assert_eq!((bytes[0], bytes[512], bytes[1024]), (0, 1, 0));
}

#[test]
fn a_large_layer_takes_no_space_for_what_is_absent() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir().expect("a folder");
    // 2 TiB: its map would take 128 MiB.
    let pages = 1 << 29;
    let blocks = || folder.path().join("map").metadata().expect("a file").blocks();
    let layer = LayerFiles::create(folder.path(), pages).expect("a layer");
    layer.write(PageIdx(pages / 2), &page(7)).expect("written");
    layer.write(PageIdx(pages - 1), &page(8)).expect("written");
    assert!(blocks() * 512 < 1 << 20, "{} blocks", blocks());
    drop(layer);
    let layer = LayerFiles::open(folder.path()).expect("the layer");
    assert_eq!(layer.map().count(PageState::Written), 2);
    let grown = layer.grown(pages * 2).expect("grown");
    assert_eq!(grown.map().count(PageState::Written), 2);
    assert_eq!(grown.map().state(PageIdx(pages - 1)), PageState::Written);
    assert!(blocks() * 512 < 1 << 20, "{} blocks", blocks());
}
