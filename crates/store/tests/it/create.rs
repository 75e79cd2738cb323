use std::io;
use std::sync::Barrier;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use vmfork_image::{Origin, PageSource as _};
use vmfork_store::{Compression, Extent, Role, Store, StoreError, Work};

use crate::common::*;

fn memory() -> (std::sync::Arc<Memory>, Store) {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    (memory, store)
}

#[test]
fn a_snapshot_is_there_and_reads_back() {
    let at = tempfile::tempdir().expect("folder");
    let store = Store::folder(at.path().join("s")).expect("store");
    let guest: Guest = (0..100).map(|page| if page % 3 == 0 { 0 } else { page }).collect();
    let made = create(&store, draft("web", &guest), &guest).expect("created");
    assert_eq!((made.counts().own_pages, made.counts().zero_pages), (66, 34));
    let list = store.list().expect("listed");
    assert!(matches!(&list[..], [(name, Ok(found))] if name == "web" && *found == made));
    // Another process.
    let store = Store::folder(at.path().join("s")).expect("store");
    let stored = store.open("web").expect("opens");
    assert_eq!(stored.descriptor(), &made);
    assert_eq!(stored.state().expect("reads"), b"state of web");
    assert_eq!(stored.descriptor().vm["of"], "web");
    assert_eq!(read_back(&store, "web"), guest);
    let mut files = std::fs::read_dir(at.path().join("s/snapshots/web")).expect("folder");
    assert!(files.all(|file| !file.expect("entry").file_name().to_string_lossy().starts_with('.')));
}

#[test]
fn zero_pages_take_nothing_and_equal_chunks_are_stored_once() {
    let (memory, store) = memory();
    // Two equal windows, two of zeros, one other.
    let guest = [vec![7; 8], vec![0; 8], vec![7; 8], vec![0; 8], vec![9; 8]].concat();
    let one = create(&store, draft("one", &guest), &guest).expect("created");
    assert_eq!((one.counts().own_pages, one.counts().zero_pages, one.counts().chunks), (24, 16, 3));
    assert_eq!((memory.chunks(), one.counts().shared_bytes), (2, 0));
    assert!(memory_of(&store, "one").extents().all(|(_, kind)| kind == Extent::Own));
    // The same content otherwise compressed is the same chunk.
    let none = with(draft("two", &guest), |it| it.compression = Compression::None);
    let two = create(&store, none, &guest).expect("created");
    assert_eq!(memory.chunks(), 2);
    let chunks = |key: &&String| key.starts_with("chunks/");
    let map = memory.copy();
    let chunk_bytes: usize = map.keys().filter(chunks).map(|key| map[key].len()).sum();
    assert_eq!(two.counts().shared_bytes, chunk_bytes as u64);
    assert_eq!(read_back(&store, "two"), guest);
    // As told, zeros are stored.
    let kept = with(draft("kept", &guest), |it| it.keep_zero_pages = true);
    let kept = create(&store, kept, &guest).expect("created");
    assert_eq!((kept.counts().own_pages, kept.counts().zero_pages), (40, 0));
    assert_eq!(read_back(&store, "kept"), guest);
}

#[test]
fn a_page_that_became_zero_hides_that_of_the_base() {
    let (_, store) = memory();
    let was: Guest = vec![5; 32];
    let mut is = was.clone();
    (is[3], is[4], is[9], is[20]) = (0, 0, 6, 0);
    let base = create(&store, draft("base", &was), &was).expect("created");
    let made = create(&store, delta("top", &base, &was, &is), &is).expect("created");
    assert_eq!((made.counts().own_pages, made.counts().zero_pages), (1, 3));
    assert_eq!(read_back(&store, "top"), is);
    assert_eq!(read_back(&store, "base"), was);
    assert_eq!(memory_of(&store, "top").base().map(|base| base.name.as_str()), Some("base"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_chain_of_deltas_reads_back_and_flattened_too(
        guests in (1usize..60).prop_flat_map(|pages| {
            prop::collection::vec(prop::collection::vec(0u8..4, pages), 1..5)
        }),
        shifts in prop::collection::vec(0u32..=5, 5),
        keep: bool,
    ) {
        let (_, store) = memory();
        let mut last: Option<(vmfork_store::Descriptor, Guest)> = None;
        for (i, guest) in guests.iter().enumerate() {
            let name = format!("g{i}");
            let draft = match &last {
                None => draft(&name, guest),
                Some((base, was)) => delta(&name, base, was, guest),
            };
            let chunk_pages = 1 << shifts[i];
            let draft = with(draft, |it| {
                (it.chunk_pages, it.keep_zero_pages) = (chunk_pages, keep);
            });
            let made = create(&store, draft, guest).expect("created");
            last = Some((made, guest.clone()));
        }
        for (i, guest) in guests.iter().enumerate() {
            prop_assert_eq!(&read_back(&store, &format!("g{i}")), guest);
        }
        for (i, guest) in guests.iter().enumerate().rev() {
            let name = format!("g{i}");
            let made = store.flatten(&name, &Work::new(2)).expect("flattened");
            prop_assert_eq!(made.bases().count(), 0);
            prop_assert_eq!(&read_back(&store, &name), guest);
            let verified = store.verify(&name, &Work::new(2)).expect("verified");
            prop_assert_eq!((verified.names.len(), verified.damage), (1, vec![]));
        }
    }
}

#[test]
fn what_is_no_snapshot_is_refused_before_any_work() {
    let (memory, store) = memory();
    let guest: Guest = vec![1; 16];
    let base = create(&store, draft("base", &guest), &guest).expect("created");
    let before = memory.copy();
    let never = |_: &Role, _, _: &mut [u8]| -> io::Result<()> { panic!("work was begun") };
    let refused = |draft| {
        let error = store.create(draft, &never, &Work::default()).expect_err("refused");
        assert!(
            error.remedy().is_some() || matches!(error, StoreError::BadDraft { .. }),
            "{error}"
        );
        error.to_string()
    };
    let on_base = || delta("x", &base, &guest, &guest);
    let mut deep = draft("deep", &guest);
    for _ in 0..200 {
        deep.vm = serde_json::json!([deep.vm]);
    }
    let error = create(&store, deep, &guest).expect_err("too deep to be read back");
    assert!(error.to_string().contains("recursion limit"), "{error}");
    store.collect().expect("collected");
    let mut bad = [
        (draft("../x", &guest), "`../x` is no name"),
        (draft("base", &guest), "a snapshot named `base` is in memory already"),
        (draft("x", &guest), "windows of 3 pages"),
        (draft("x", &guest), "extent 10+10 after page 0, of 16 pages"),
        (draft("x", &guest), "extent 3+2 after page 4"),
        (draft("x", &[]), "an image of 0 pages"),
        (draft("x", &guest), "zstd has no level 99"),
        (on_base(), "the base of snapshot `x`, `gone`, is not there"),
        (on_base(), "another snapshot by that name: its id is "),
        (on_base(), "of 16 pages, not 17"),
    ];
    bad[2].0.images[0].chunk_pages = 3;
    bad[3].0.images[0].extents = vec![(range(10, 10), Extent::Own)];
    bad[4].0.images[0].extents = vec![(range(0, 4), Extent::Own), (range(3, 2), Extent::Own)];
    bad[6].0.images[0].compression = Compression::Zstd { level: 99 };
    bad[7].0.images[0].base.as_mut().expect("one").name = "gone".into();
    bad[8].0.images[0].base.as_mut().expect("one").id.0[0] ^= 1;
    bad[9].0.images[0].bytes = 17 * 4096;
    for (draft, says) in bad {
        let text = refused(draft);
        assert!(text.contains(says), "{text}, not {says}");
    }
    assert_eq!(memory.copy(), before);
}

#[test]
fn pages_that_cant_be_read_fail_it_with_which_and_why() {
    let (memory, store) = memory();
    let guest: Guest = vec![1; 64];
    let read = |range: vmfork_image::PageRange, bytes: &mut [u8]| {
        if range.start().0 >= 32 {
            return Err(io::Error::other("lost"));
        }
        read_guest(&guest)(range, bytes)
    };
    let error =
        store.create(draft("x", &guest), &of_memory(read), &Work::new(1)).expect_err("lost");
    assert_eq!(error.to_string(), "read pages 32+8 to store them");
    assert!(std::error::Error::source(&error).is_some_and(|e| e.to_string() == "lost"));
    assert!(store.list().expect("listed").is_empty());
    assert!(!memory.keys().iter().any(|key| key.starts_with("snapshots/")));
    store.collect().expect("collected");
    assert_eq!(memory.keys(), ["format"]);
    create(&store, draft("x", &guest), &guest).expect("the name is free again");
}

#[test]
fn cancelling_leaves_nothing_but_chunks() {
    let (memory, store) = memory();
    let guest: Guest = (0..64).map(|page| page + 1).collect();
    let work = Work::new(2);
    let read = |range: vmfork_image::PageRange, bytes: &mut [u8]| {
        if range.start().0 >= 16 {
            work.cancelled.store(true, Ordering::Relaxed);
        }
        read_guest(&guest)(range, bytes)
    };
    let error = store.create(draft("x", &guest), &of_memory(read), &work).expect_err("cancelled");
    assert!(matches!(error, StoreError::Cancelled));
    assert!(memory.keys().iter().all(|key| key == "format" || key.starts_with("chunks/")));
    assert_eq!(work.total_bytes.load(Ordering::Relaxed), 64 * 4096);
    assert!(work.done_bytes.load(Ordering::Relaxed) < 64 * 4096);
    let collected = store.collect().expect("collected");
    assert!(collected.chunks > 0 && collected.freed_bytes > 0);
    assert_eq!(memory.keys(), ["format"]);
}

#[test]
fn of_many_that_want_one_name_one_gets_it() {
    let (_, store) = memory();
    let start = Barrier::new(6);
    let made: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=6)
            .map(|value| {
                let (store, start) = (&store, &start);
                scope.spawn(move || {
                    let guest: Guest = vec![value; 40];
                    start.wait();
                    create(store, draft("x", &guest), &guest).map(|_| guest)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let winners: Vec<_> = made.iter().flatten().collect();
    assert_eq!(winners.len(), 1, "{made:?}");
    assert_eq!(&read_back(&store, "x"), winners[0]);
    let losers = made.iter().filter_map(|made| made.as_ref().err());
    for error in losers {
        assert!(matches!(error, StoreError::Exists { .. } | StoreError::Busy { .. }), "{error}");
    }
}

#[test]
fn a_chunk_that_a_power_cut_left_torn_is_not_believed() {
    let (memory, store) = memory();
    let guest: Guest = vec![3; 8];
    create(&store, draft("first", &guest), &guest).expect("created");
    store.remove("first", false).expect("removed");
    let key = memory.keys().into_iter().find(|key| key.starts_with("chunks/"));
    assert_eq!(key, None);
    // What could be there after the cut: the name, not the bytes.
    create(&store, draft("probe", &guest), &guest).expect("created");
    let key = memory.keys().into_iter().find(|key| key.starts_with("chunks/")).expect("one");
    store.remove("probe", false).expect("removed");
    memory.map.lock().expect("no panic").insert(key, Vec::new());
    create(&store, draft("second", &guest), &guest).expect("created");
    assert_eq!(read_back(&store, "second"), guest);
}

#[test]
fn a_source_says_where_it_reads_and_refuses_what_it_has_not() {
    let (memory, store) = memory();
    let guest: Guest = [vec![1; 12], vec![0; 4], vec![2; 4]].concat();
    create(&store, draft("x", &guest), &guest).expect("created");
    let source = memory_of(&store, "x").source(options());
    assert_eq!((source.origin(), source.unit_pages()), (Origin::Chunk, 8));
    let read = |start, len: u64, bytes: usize| {
        source.read(range(start, len), &mut vec![0; bytes]).map_err(|e| (e.kind(), e.to_string()))
    };
    read(10, 2, 2 * PAGE).expect("own");
    read(7, 5, 5 * PAGE).expect("own, in two windows");
    for (start, len, bytes) in [(11, 2, 2), (12, 1, 1), (20, 1, 1), (15, 2, 2), (0, 2, 1)] {
        let (kind, text) = read(start, len, bytes * PAGE).expect_err("refused");
        assert_eq!(kind, io::ErrorKind::InvalidInput, "{text}");
    }
    // A chunk that is gone or damaged is told apart.
    let fresh = memory_of(&store, "x").source(options());
    let chunks: Vec<_> = memory.keys().into_iter().filter(|k| k.starts_with("chunks/")).collect();
    for key in &chunks {
        memory.map.lock().expect("no panic").get_mut(key).expect("there")[30] ^= 1;
    }
    let error = fresh.read(range(0, 1), &mut [0; PAGE]).expect_err("damaged");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert!(chunks.iter().any(|key| error.to_string().contains(key.as_str())), "{error}");
    for key in &chunks {
        memory.map.lock().expect("no panic").remove(key);
    }
    let error = fresh.read(range(0, 1), &mut [0; PAGE]).expect_err("gone");
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[test]
fn what_is_no_store_is_refused() {
    let at = tempfile::tempdir().expect("folder");
    std::fs::write(at.path().join("letters"), "mine").expect("write");
    let error = Store::folder(at.path()).expect_err("somebody else's");
    assert!(error.to_string().contains("not empty, and has no `format`"), "{error}");
    let later = Memory::new();
    later.map.lock().expect("no panic").insert("format".into(), b"vmfork-store/2\n".to_vec());
    let error = Store::new(later).expect_err("of another version");
    assert!(error.to_string().contains(r#"`format` is "vmfork-store/2\n", not "#), "{error}");
    let error = Store::existing(Memory::new()).expect_err("none");
    assert!(error.to_string().contains("there is no `format`"), "{error}");
}

#[test]
fn a_damaged_snapshot_is_listed_with_what_is_wrong_and_can_be_removed() {
    let (memory, store) = memory();
    let guest: Guest = vec![1; 16];
    for name in ["good", "bad"] {
        create(&store, draft(name, &guest), &guest).expect("created");
    }
    let key = "snapshots/bad/descriptor.json";
    memory.map.lock().expect("no panic").get_mut(key).expect("there")[50] ^= 1;
    let list = store.list().expect("listed");
    assert!(list[1].1.is_ok());
    let error = list[0].1.as_ref().expect_err("damaged");
    assert!(
        error.to_string().starts_with("`snapshots/bad/descriptor.json` in memory is damaged: ")
    );
    assert!(store.open("bad").is_err() && store.open("good").is_ok());
    // It can't be known any more what chunks it has.
    let other = Store::new(memory.clone()).expect("store");
    assert_eq!(other.collect().expect("collected").blocked_by, ["bad"]);
    assert_eq!(other.remove("bad", false).expect("removed").names, ["bad"]);
    assert_eq!(read_back(&other, "good"), guest);
    assert!(other.collect().expect("collected").blocked_by.is_empty());
}
