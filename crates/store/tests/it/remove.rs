use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use vmfork_image::PageSource as _;
use vmfork_store::{Store, StoreError, Work};

use crate::common::*;

/// base ◄── a ◄── b, and c on its own with half of base's chunks.
fn family() -> (std::sync::Arc<Memory>, Store, [Guest; 4]) {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let base: Guest = (0..32).map(|page| page / 8 + 1).collect();
    let (mut a, mut b) = (base.clone(), base.clone());
    a[0] = 50;
    (b[0], b[9]) = (50, 60);
    let c = [&base[..16], &[99; 16]].concat();
    let made = create(&store, draft("base", &base), &base).expect("created");
    let on_base = create(&store, delta("a", &made, &base, &a), &a).expect("created");
    create(&store, delta("b", &on_base, &a, &b), &b).expect("created");
    create(&store, draft("c", &c), &c).expect("created");
    (memory, store, [base, a, b, c])
}

#[test]
fn removing_what_others_need_is_refused_and_names_them() {
    let (memory, store, [base, a, b, _]) = family();
    let before = memory.copy();
    let error = store.remove("base", false).expect_err("needed");
    assert_eq!(error.to_string(), "`a`, `b` are deltas of snapshot `base`");
    assert!(error.remedy().is_some_and(|text| text.contains("--cascade base")));
    let error = store.remove("a", false).expect_err("needed");
    assert_eq!(error.to_string(), "`b` is a delta of snapshot `a`");
    assert_eq!(memory.copy(), before);
    for (name, guest) in [("base", base), ("a", a), ("b", b)] {
        assert_eq!(read_back(&store, name), guest);
    }
    assert!(matches!(store.remove("nope", false), Err(StoreError::NotFound { .. })));
    assert!(matches!(store.remove("../c", true), Err(StoreError::BadName { .. })));
}

#[test]
fn what_may_not_go_keeps_all_of_a_cascade() {
    let (memory, store, _) = family();
    let before = memory.copy();
    let b = store.open("b").expect("opens").descriptor().id;
    let mut gone = Vec::new();
    let mut tell = |name: &str| gone.push(name.to_owned());
    let error = store.remove_if("base", true, &|id| id != b, &mut tell).expect_err("not `b`");
    assert!(matches!(&error, StoreError::Changed { name } if name == "b"), "{error}");
    assert_eq!(memory.copy(), before);
    store.remove_if("base", true, &|_| true, &mut tell).expect("removed");
    assert_eq!(gone, ["b", "a", "base"]);
}

#[test]
fn a_base_stays_though_its_delta_is_damaged() {
    let (memory, _, _) = family();
    let change = |key: &str, change: &dyn Fn(&mut Vec<u8>)| {
        change(memory.map.lock().expect("no panic").get_mut(key).expect("there"));
    };
    let table = memory.key_of("a", "table");
    change(&table, &|bytes| bytes.truncate(20));
    let store = Store::new(memory.clone()).expect("store");
    let error = store.remove("base", false).expect_err("needed");
    assert_eq!(error.to_string(), "`a`, `b` are deltas of snapshot `base`");
    // What can't be read at all may be a delta on anything.
    change("snapshots/a/descriptor.json", &|bytes| bytes.truncate(20));
    let error = store.remove("base", false).expect_err("perhaps needed");
    let text = "the descriptor of `a` can't be read, and snapshot `base` may be needed";
    assert_eq!(error.to_string(), text);
    assert!(
        error.remedy().is_some_and(|text| text.contains("`a`") && text.contains("--cascade base"))
    );
    assert!(store.descriptor("base").is_ok());
    // That one itself can go, or the other all the same.
    assert_eq!(store.remove("c", true).expect("removed").names, ["c"]);
    assert_eq!(store.remove("a", true).expect("removed").names, ["b", "a"]);
    assert_eq!(store.remove("base", false).expect("removed").names, ["base"]);
    store.collect().expect("collected");
    assert_eq!(memory.keys(), ["format"]);
}

#[test]
fn a_bad_sector_under_one_snapshot_does_not_stop_the_store() {
    for ending in ["table", "json"] {
        let (memory, _, [base, ..]) = family();
        let key = match ending {
            "table" => memory.key_of("c", "table"),
            _ => "snapshots/c/descriptor.json".to_owned(),
        };
        memory.make_unreadable(&key);
        let store = Store::new(memory.clone()).expect("store");
        create(&store, draft("new", &base), &base).expect("created");
        assert_eq!(read_back(&store, "new"), base);
        assert_eq!(store.collect().expect("collected").blocked_by, ["c"]);
        store.remove("new", true).expect("removed");
        assert_eq!(store.remove("c", false).expect("removed").names, ["c"]);
        assert!(store.collect().expect("collected").blocked_by.is_empty());
        assert_eq!(read_back(&store, "base"), base);
    }
}

#[test]
fn cascade_removes_deltas_first_and_keeps_shared_chunks() {
    let (memory, store, [.., c]) = family();
    let removed = store.remove("base", true).expect("removed");
    assert_eq!(removed.names, ["b", "a", "base"]);
    assert!(removed.freed_bytes > 0);
    assert_eq!(read_back(&store, "c"), c);
    assert_eq!(memory.chunks(), 3);
    assert_eq!(store.collect().expect("collected"), vmfork_store::Collected::default());
    store.remove("c", false).expect("removed");
    assert_eq!(memory.keys(), ["format"]);
}

#[test]
fn an_open_snapshot_stays_readable_when_it_is_removed() {
    let (memory, store, [.., c]) = family();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    store.on_leftovers(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    drop(chain(&store, "c"));
    let (chain, other) = (chain(&store, "c"), store.open("c").expect("opens"));
    store.remove("c", false).expect("removed");
    assert_eq!(read_chain(&chain, &options()), c);
    store.collect().expect("collected");
    assert_eq!(read_chain(&chain, &options()), c);
    drop(other);
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    drop(chain);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert_eq!(store.collect().expect("collected").chunks, 1);
    store.remove("base", true).expect("removed");
    assert_eq!(memory.keys(), ["format"]);
}

#[test]
fn what_is_opened_and_removed_while_chunks_are_collected_stays_readable() {
    let (memory, store, [.., c]) = family();
    // Chunks that no snapshot names, for the collector to be busy with.
    let work = Work::new(1);
    let garbage: Guest = (100..228).collect();
    let read = |range: vmfork_image::PageRange, bytes: &mut [u8]| {
        work.cancelled.store(range.start().0 >= 120, Ordering::Relaxed);
        read_guest(&garbage)(range, bytes)
    };
    store.create(draft("garbage", &garbage), &of_memory(read), &work).expect_err("cancelled");
    let open = Arc::new(Mutex::new(None));
    let (there, kept) = (store.clone(), open.clone());
    memory.at("size", "chunks/", move || {
        let chain = chain(&there, "c");
        there.remove("c", false).expect("removed");
        *kept.lock().expect("no panic") = Some(chain);
    });
    assert!(store.collect().expect("collected").chunks > 10);
    let chain = open.lock().expect("no panic").take().expect("opened meanwhile");
    assert_eq!(read_chain(&chain, &options()), c);
}

#[test]
fn a_base_stays_while_a_delta_on_it_is_written() {
    let (_, store, [base, ..]) = family();
    let found = store.open("c").expect("opens").descriptor().clone();
    let mut is = vec![99; 32];
    is[3] = 98;
    let read = |range, bytes: &mut [u8]| {
        let error = store.remove("c", true).expect_err("in use");
        assert_eq!(error.to_string(), "snapshot `on-c` is being written");
        read_guest(&is)(range, bytes)
    };
    store
        .create(delta("on-c", &found, &base, &is), &of_memory(read), &Work::new(1))
        .expect("created");
    let error = store.remove("c", false).expect_err("needed");
    assert!(matches!(error, StoreError::Dependants { dependants, .. } if dependants == ["on-c"]));
}

#[test]
fn writing_and_removing_at_the_same_time_loses_no_chunk() {
    let store = Store::new(Memory::new()).expect("store");
    // All of them share most of their chunks.
    let guest = |thread: u8, round: u8| -> Guest {
        let mut guest: Guest = (0..64).map(|page| page / 8 + 1).collect();
        guest[0] = 100 + thread;
        guest[63] = round + 1;
        guest
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let collect = || {
            while !stop.load(Ordering::Relaxed) {
                store.collect().expect("collected");
            }
        };
        let collectors = [scope.spawn(collect), scope.spawn(collect), scope.spawn(collect)];
        let writers: Vec<_> = (0..3)
            .map(|thread| {
                let (store, guest) = (&store, &guest);
                scope.spawn(move || {
                    for round in 0..25 {
                        let guest = guest(thread, round);
                        let name = format!("t{thread}-{round}");
                        create(store, draft(&name, &guest), &guest).expect("created");
                        let stored = memory_of(store, &name);
                        assert_eq!(read_back(store, &name), guest);
                        store.remove(&name, false).expect("removed");
                        let source = stored.source(options());
                        source.read(range(0, 64), &mut vec![0; 64 * PAGE]).expect("still open");
                    }
                })
            })
            .collect();
        // The collectors end even if a writer has failed.
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, Ordering::Relaxed);
        collectors.into_iter().for_each(|collector| collector.join().expect("no panic"));
        ended.into_iter().for_each(|ended| ended.expect("no panic"));
    });
    store.collect().expect("collected");
    assert!(store.list().expect("listed").is_empty());
}
