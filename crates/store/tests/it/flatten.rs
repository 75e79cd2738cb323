use vmfork_store::{Descriptor, Store, StoreError, Work};

use crate::common::*;

/// base ◄── mid ◄── top, of 64 pages in windows of 8.
fn deltas() -> (std::sync::Arc<Memory>, Store, [Guest; 3], Descriptor) {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let base: Guest = (0..64).map(|page| page / 8 + 1).collect();
    let (mut mid, mut top) = (base.clone(), base.clone());
    (mid[0], mid[16], mid[18]) = (50, 0, 51);
    top.clone_from(&mid);
    (top[1], top[40]) = (60, 0);
    let made = create(&store, draft("base", &base), &base).expect("created");
    let made = create(&store, delta("mid", &made, &base, &mid), &mid).expect("created");
    create(&store, delta("top", &made, &mid, &top), &top).expect("created");
    (memory, store, [base, mid, top], made)
}

#[test]
fn a_delta_becomes_whole_and_its_own_deltas_stay_right() {
    let (memory, store, [base, mid, top], was) = deltas();
    let is = store.flatten("mid", &Work::new(2)).expect("flattened");
    assert_eq!((is.id, &is.name, is.created_unix_ms), (was.id, &was.name, was.created_unix_ms));
    assert_eq!(is.bases().count(), 0);
    assert_eq!((is.counts().own_pages, is.counts().zero_pages), (63, 1));
    for (name, guest) in [("base", &base), ("mid", &mid), ("top", &top)] {
        assert_eq!(&read_back(&store, name), guest);
    }
    // What base has alone in its windows is shared, not stored again.
    assert!(is.counts().shared_bytes > is.counts().stored_bytes, "{:?}", is.counts());
    assert_eq!(store.remove("base", false).expect("no delta on it any more").names, ["base"]);
    assert_eq!(read_back(&store, "top"), top);
    assert_eq!(store.collect().expect("collected"), vmfork_store::Collected::default());
    assert_eq!(store.open("mid").expect("opens").state().expect("reads"), b"state of mid");
    store.remove("mid", true).expect("removed");
    assert_eq!(memory.keys(), ["format"]);
}

#[test]
fn what_is_whole_stays_as_it_is() {
    let (memory, store, ..) = deltas();
    let before = memory.copy();
    store.flatten("base", &Work::new(2)).expect("nothing to do");
    assert_eq!(memory.copy(), before);
}

#[test]
fn who_has_it_open_goes_on_reading() {
    let (_, store, [_, mid, _], _) = deltas();
    let open = chain(&store, "mid");
    store.flatten("mid", &Work::new(2)).expect("flattened");
    store.remove("base", false).expect("removed");
    store.collect().expect("collected");
    assert_eq!(read_chain(&open, &options()), mid);
    assert_eq!(open[0].stored().state().expect("reads"), b"state of mid");
}

#[test]
fn flattening_that_is_cancelled_or_fails_changes_nothing() {
    let (memory, store, [.., top], _) = deltas();
    let before = memory.copy();
    let work = Work::new(1);
    work.cancelled.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(store.flatten("top", &work), Err(StoreError::Cancelled)));
    assert_eq!(read_back(&store, "top"), top);
    store.collect().expect("collected");
    assert_eq!(memory.copy(), before);
    let key = "snapshots/base/descriptor.json";
    memory.map.lock().expect("no panic").remove(key);
    let error = store.flatten("top", &Work::new(1)).expect_err("no base");
    assert_eq!(error.to_string(), "the base of snapshot `mid`, `base`, is not there");
}
