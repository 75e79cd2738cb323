use std::sync::Mutex;

use proptest::prelude::*;
use vmfork_store::{Descriptor, Role, Store, StoreError, Work};

use crate::common::*;

fn one() -> (std::sync::Arc<Memory>, Store, Guest, Descriptor) {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let guest: Guest = (0..1000u32).map(|page| page.to_le_bytes()[0]).collect();
    let made = create(&store, draft("x", &guest), &guest).expect("created");
    (memory, store, guest, made)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn a_working_set_comes_back_whatever_the_order_it_was_told_in(
        runs in prop::collection::vec((0u64..1000, 0u64..400), 0..12),
        threads in 1usize..4,
    ) {
        let (_, store, guest, _) = one();
        let runs: Vec<_> = runs.iter().map(|(start, len)| range(*start, (*len).min(1000 - start))).collect();
        let stored = memory_of(&store, "x");
        let work = Work::new(threads);
        store.put_working_set(&stored, &runs, &read_guest(&guest), &work).expect("put");
        let mut told = vec![false; 1000];
        for page in runs.iter().flat_map(|run| run.pages()) {
            told[usize::try_from(page.0).expect("small")] = true;
        }
        let reader = store.working_set("x", &Role::Memory).expect("opens").expect("there");
        prop_assert_eq!(reader.pages(), told.iter().filter(|told| **told).count() as u64);
        let first = runs.iter().find_map(|run| run.pages().next());
        prop_assert_eq!(reader.runs().first().map(|run| run.start()), first);
        let found = Mutex::new(vec![false; 1000]);
        let each = |range: vmfork_image::PageRange, bytes: &[u8]| {
            for (page, bytes) in range.pages().zip(bytes.chunks_exact(PAGE)) {
                let page = usize::try_from(page.0).expect("small");
                assert!(bytes == page_of(guest[page]));
                let was = std::mem::replace(&mut found.lock().expect("no panic")[page], true);
                assert!(!was, "page {page} twice");
            }
            Ok(())
        };
        reader.for_each(&each, &work).expect("reads");
        prop_assert_eq!(found.into_inner().expect("no panic"), told);
    }
}

#[test]
fn a_working_set_is_its_own_snapshots() {
    let (memory, store, guest, _) = one();
    let stored = memory_of(&store, "x");
    assert!(store.working_set("x", &Role::Memory).expect("none yet").is_none());
    let put = |runs: &[vmfork_image::PageRange]| {
        store.put_working_set(&stored, runs, &read_guest(&guest), &Work::new(1))
    };
    put(&[range(3, 5)]).expect("put");
    put(&[range(4, 5)]).expect("replaced");
    assert_eq!(
        store.working_set("x", &Role::Memory).expect("opens").expect("there").runs(),
        [range(4, 5)]
    );
    let error = put(&[range(999, 2)]).expect_err("beyond the end");
    assert!(error.to_string().contains("pages 999+2, of 1000"), "{error}");
    // Somebody's else.
    create(&store, draft("y", &guest), &guest).expect("created");
    let file = memory.copy()[&memory.key_of("x", "working-set")].clone();
    let key = memory.key_of("y", "state").replace(".state", ".working-set");
    memory.map.lock().expect("no panic").insert(key.clone(), file);
    let error = store.working_set("y", &Role::Memory).expect_err("foreign");
    assert!(error.to_string().contains(&format!("`{key}` in memory is damaged: ")), "{error}");
    store.remove_profile("x").expect("removed");
    assert!(store.working_set("x", &Role::Memory).expect("none").is_none());
    // One that was removed meanwhile, and another by its name.
    store.remove("x", false).expect("removed");
    assert!(matches!(put(&[range(3, 5)]), Err(StoreError::NotFound { .. })));
    create(&store, draft("x", &guest), &guest).expect("created");
    assert!(matches!(put(&[range(3, 5)]), Err(StoreError::NotFound { .. })));
}

#[test]
fn what_goes_wrong_with_a_piece_is_told() {
    let (memory, store, guest, _) = one();
    let stored = memory_of(&store, "x");
    let work = Work::new(2);
    store.put_working_set(&stored, &[range(0, 900)], &read_guest(&guest), &work).expect("put");
    let fails = |_, _: &[u8]| Err(std::io::Error::other("no room"));
    let reader = store.working_set("x", &Role::Memory).expect("opens").expect("there");
    let error = reader.for_each(&fails, &work).expect_err("no room");
    assert_eq!(error.to_string(), "put pages of the working set in place");
    assert!(std::error::Error::source(&error).is_some_and(|e| e.to_string() == "no room"));
    let key = memory.key_of("x", "working-set");
    let last = memory.copy()[&key].len() - 1;
    memory.map.lock().expect("no panic").get_mut(&key).expect("there")[last] ^= 1;
    let reader =
        store.working_set("x", &Role::Memory).expect("the header is right").expect("there");
    let error = reader.for_each(&|_, _| Ok(()), &work).expect_err("damaged");
    assert!(error.to_string().contains("frame 3 was changed or cut"), "{error}");
}

#[test]
fn a_profile_is_kept_as_it_is() {
    let (memory, store, ..) = one();
    assert_eq!(store.profile("x", &Role::Memory).expect("none"), None);
    store.put_profile("x", &Role::Memory, b"first").expect("put");
    store.put_profile("x", &Role::Memory, b"second").expect("put");
    assert_eq!(store.profile("x", &Role::Memory).expect("reads").as_deref(), Some(&b"second"[..]));
    assert!(matches!(store.put_profile("y", &Role::Memory, b""), Err(StoreError::NotFound { .. })));
    assert!(matches!(store.profile("../x", &Role::Memory), Err(StoreError::BadName { .. })));
    let key = memory.key_of("x", "profile");
    memory.map.lock().expect("no panic").get_mut(&key).expect("there")[60] ^= 1;
    assert!(matches!(store.profile("x", &Role::Memory), Err(StoreError::Damaged(_))));
    store.remove_profile("x").expect("removed");
    assert_eq!(store.profile("x", &Role::Memory).expect("none"), None);
}
