use proptest::prelude::*;
use vmfork_store::{Role, Store, StoreError, Work};

use crate::common::*;

/// A delta with everything that a snapshot can have, on a base.
fn all() -> (std::sync::Arc<Memory>, Store) {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let base: Guest = (0..64).map(|page| page / 8 + 1).collect();
    let mut top = base.clone();
    (top[1], top[40]) = (60, 0);
    let made = create(&store, draft("base", &base), &base).expect("created");
    create(&store, delta("top", &made, &base, &top), &top).expect("created");
    store.put_profile("top", &Role::Memory, b"profile").expect("put");
    let stored = memory_of(&store, "top");
    let runs = [range(0, 3), range(40, 2)];
    store.put_working_set(&stored, &runs, &read_guest(&top), &Work::new(1)).expect("put");
    (memory, store)
}

#[test]
fn what_is_right_is_found_right() {
    let (_, store) = all();
    let work = Work::new(2);
    let verified = store.verify("top", &work).expect("verified");
    assert_eq!(verified.names, ["top", "base"]);
    assert_eq!((verified.chunks, verified.bytes), (9, 65 * 4096));
    assert_eq!(verified.damage, []);
    assert_eq!(work.done_bytes.into_inner(), work.total_bytes.into_inner());
    assert!(matches!(store.verify("nope", &Work::new(1)), Err(StoreError::NotFound { .. })));
}

#[test]
fn what_is_removed_meanwhile_is_not_taken_for_damaged() {
    for (call, part) in [("get", ".state"), ("get", ".table"), ("get", "chunks/")] {
        let (memory, store) = all();
        let there = store.clone();
        memory.at(call, part, move || {
            // The catalogue is held by who opens it.
            let removing = std::thread::spawn(move || there.remove("base", true));
            if part != ".table" {
                removing.join().expect("no panic").expect("removed");
            }
        });
        match store.verify("top", &Work::new(1)) {
            Ok(verified) => assert_eq!(verified.damage, []),
            Err(error) => assert!(matches!(error, StoreError::NotFound { .. }), "{error}"),
        }
    }
}

#[test]
fn what_is_made_whole_meanwhile_is_not_taken_for_damaged() {
    for part in [".state", "chunks/"] {
        for removes_base in [false, true] {
            let (memory, store) = all();
            let there = store.clone();
            memory.at("get", part, move || {
                there.flatten("top", &Work::new(1)).expect("flattened");
                if removes_base {
                    there.remove("base", false).expect("removed");
                }
            });
            let work = Work::new(1);
            let verified = store.verify("top", &work).expect("verified");
            assert_eq!(verified.damage, [], "at {part}");
            assert_eq!(work.done_bytes.into_inner(), work.total_bytes.into_inner());
            assert_eq!(store.descriptor("top").expect("there").bases().count(), 0);
        }
    }
}

#[test]
fn a_base_of_a_newer_version_is_a_finding_and_all_else_is_checked() {
    let (memory, store) = all();
    let (base, profile) = ("snapshots/base/descriptor.json", memory.key_of("top", "profile"));
    let mut map = memory.map.lock().expect("no panic");
    map.insert(base.into(), br#"{"schema": "vmfork-snapshot/3"}"#.to_vec());
    map.get_mut(&profile).expect("there").truncate(20);
    drop(map);
    let verified = store.verify("top", &Work::new(1)).expect("verified");
    let found: Vec<_> = verified.damage.iter().map(|damage| damage.key.as_str()).collect();
    assert_eq!(found, [&profile, base]);
    let what = &verified.damage[1].flaw.what;
    assert!(what.starts_with("of a newer version of vmfork: its layout is"), "{what}");
    let error = store.verify("base", &Work::new(1)).expect_err("newer");
    assert!(matches!(error, StoreError::Newer { .. }), "{error}");
}

#[test]
fn all_damage_is_listed() {
    let (memory, store) = all();
    let mut damaged: Vec<String> = memory
        .keys()
        .into_iter()
        .filter(|key| {
            key != "format" && !key.ends_with("descriptor.json") && !key.ends_with("table")
        })
        .collect();
    let mut map = memory.map.lock().expect("no panic");
    for (i, key) in damaged.iter().enumerate() {
        match i % 3 {
            0 if key.starts_with("chunks/") => drop(map.remove(key)),
            1 => map.get_mut(key).expect("there").truncate(20),
            _ => map.get_mut(key).expect("there")[8] ^= 1,
        }
    }
    drop(map);
    let verified = store.verify("top", &Work::new(2)).expect("verified");
    let mut found: Vec<_> = verified.damage.iter().map(|damage| damage.key.clone()).collect();
    found.sort();
    damaged.sort();
    assert_eq!(found, damaged);
    memory.map.lock().expect("no panic").remove("snapshots/base/descriptor.json");
    let verified = store.verify("top", &Work::new(2)).expect("verified");
    assert!(
        verified.damage.iter().any(|damage| damage.flaw.what == "it isn't there, and is a base")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_changed_bit_of_any_file_is_noticed(file: prop::sample::Index, at: prop::sample::Index, bit in 0..8u8) {
        let (memory, store) = all();
        let keys: Vec<_> = memory.keys().into_iter().filter(|key| key != "format").collect();
        let key = file.get(&keys);
        let mut map = memory.map.lock().expect("no panic");
        let bytes = map.get_mut(key).expect("there");
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        drop(map);
        let verified = store.verify("top", &Work::new(1)).expect("verified");
        prop_assert!(verified.damage.iter().any(|damage| damage.key == *key), "{:?}", verified.damage);
    }

    #[test]
    fn a_file_that_was_cut_is_noticed(file: prop::sample::Index, at: prop::sample::Index) {
        let (memory, store) = all();
        let keys: Vec<_> = memory.keys().into_iter().filter(|key| key != "format").collect();
        let key = file.get(&keys);
        let mut map = memory.map.lock().expect("no panic");
        let bytes = map.get_mut(key).expect("there");
        bytes.truncate(at.index(bytes.len()));
        drop(map);
        let verified = store.verify("top", &Work::new(1)).expect("verified");
        prop_assert!(verified.damage.iter().any(|damage| damage.key == *key), "{:?}", verified.damage);
    }
}
