//! Several writers of one store, each in a process of its own, and what those leave that didn't get
//! to the end.

use std::sync::Arc;

use vmfork_store::{Role, SnapshotId, Store, StoreError, Work};

use crate::common::*;

/// base, and `name` on it, with what was learnt about base.
fn family(name: &str, base_id: u8) -> (Store, Guest) {
    let store = Store::new(Memory::new()).expect("store");
    let base: Guest = (0..40).map(|page| page / 8 + 1).collect();
    let mut top = base.clone();
    top[1] = base_id + 100;
    let id = Some(SnapshotId([base_id; 16]));
    let base_draft = vmfork_store::Draft { id, ..draft("base", &base) };
    let made = create(&store, base_draft, &base).expect("created");
    create(&store, delta(name, &made, &base, &top), &top).expect("created");
    store.put_profile("base", &Role::Memory, name.as_bytes()).expect("put");
    let stored = memory_of(&store, "base");
    let runs = [range(0, u64::from(base_id))];
    store.put_working_set(&stored, &runs, &read_guest(&base), &Work::new(1)).expect("put");
    (store, top)
}

#[test]
fn who_loses_the_race_for_a_name_takes_nothing_of_the_winners_away() {
    // The same base, or another one by that name, of a push that loses or is given up.
    for (base_id, is_cancelled) in [(1, false), (1, true), (2, false), (2, true)] {
        let memory = Memory::new();
        let (first, guest) = family("first", 1);
        let (second, _) = family("second", base_id);
        let work = Arc::new(Work::new(1));
        let (there, told) = (Store::new(memory.clone()).expect("store"), work.clone());
        memory.at("put", ".profile", move || {
            first.copy_to("first", &there, &Work::new(1)).expect("pushed");
            told.cancelled.store(is_cancelled, std::sync::atomic::Ordering::Relaxed);
        });
        let there = Store::new(memory.clone()).expect("store");
        let error = second.copy_to("second", &there, &work).expect_err("there is one");
        match error {
            StoreError::Cancelled => assert!(is_cancelled),
            StoreError::Exists { name, .. } => assert!(!is_cancelled && name == "base"),
            error => panic!("{error}"),
        }
        let after = Store::new(memory.clone()).expect("store");
        assert_eq!(read_back(&after, "first"), guest);
        assert_eq!(after.open("base").expect("opens").state().expect("reads"), b"state of base");
        assert_eq!(
            after.profile("base", &Role::Memory).expect("reads").as_deref(),
            Some(&b"first"[..])
        );
        let set = after.working_set("base", &Role::Memory).expect("opens").expect("there");
        assert_eq!(set.runs(), [range(0, 1)]);
        assert_eq!(after.verify("first", &Work::new(1)).expect("verified").damage, []);
        // Nothing is left of the other.
        assert_eq!(after.collect().expect("collected").files, 0);
    }
}

#[test]
fn what_a_snapshot_by_the_same_name_has_left_is_not_taken_for_the_new_ones() {
    for keeps_its_id in [false, true] {
        let memory = Memory::new();
        let (from, guest) = family("top", 1);
        let store = Store::new(memory.clone()).expect("store");
        store.adopt_from("base", &from, "elsewhere", &Work::new(1)).expect("adopted");
        // A removal that ended half-way.
        memory.map.lock().expect("no panic").remove("snapshots/base/descriptor.json");
        let id = keeps_its_id.then_some(SnapshotId([1; 16]));
        let again = vmfork_store::Draft { id, ..draft("base", &guest) };
        create(&store, again, &guest).expect("created");
        assert_eq!(store.origin("base").expect("reads"), None);
        assert_eq!(store.profile("base", &Role::Memory).expect("reads"), None);
        assert!(store.working_set("base", &Role::Memory).expect("reads").is_none());
        assert_eq!(store.collect().expect("collected").files, 5);
        assert_eq!(read_back(&store, "base"), guest);
    }
}
