//! The process ends, or the power fails, at each step of an operation. What existed before is
//! whole, and what is left is cleared away.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use vmfork_store::{BlobError, Blobs, Role, Store, StoreError, Work};

use crate::common::*;
use crate::images::{Images, check, draft_of, put, role};

/// Most calls that any operation here makes.
const CALLS_MAX: i64 = 1000;

/// Runs `act` over a copy of `before` for each number of calls after which nothing works any more,
/// and then `check` over what is left. Returns how many steps there were.
fn at_each_step(
    before: &Memory,
    act: impl Fn(&Store) -> Result<(), StoreError>,
    check: impl Fn(&Arc<Memory>, &Store, bool),
) -> i64 {
    for calls in 0..CALLS_MAX {
        let memory = Memory::of(before.copy());
        let store = Store::new(memory.clone()).expect("store");
        memory.fail_after(calls);
        let done = act(&store);
        for left in [memory.copy(), memory.after_power_cut(false), memory.after_power_cut(true)] {
            let left = Memory::of(left);
            let after = Store::new(left.clone()).expect("store");
            check(&left, &after, done.is_ok());
        }
        if done.is_ok() {
            assert!(calls > 3, "a crash was tried at no step");
            return calls;
        }
    }
    panic!("still failing after {CALLS_MAX} calls");
}

#[test]
fn a_crash_while_creating_leaves_the_old_and_nothing_of_the_new() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let old: Guest = (0..40).map(|page| page / 8).collect();
    let mut new = old.clone();
    (new[1], new[9], new[39]) = (70, 0, 71);
    let base = create(&store, draft("old", &old), &old).expect("created");
    let kept = memory.copy();
    at_each_step(
        &memory,
        |store| create(store, delta("new", &base, &old, &new), &new).map(drop),
        |left, after, done| {
            assert_eq!(read_back(after, "old"), old);
            match after.open("new") {
                // It may be there though the caller saw an error: then it is whole.
                Ok(_) => assert_eq!(read_back(after, "new"), new),
                Err(StoreError::NotFound { .. }) => {
                    assert!(!done);
                    after.collect().expect("collected");
                    assert_eq!(left.copy(), kept);
                    create(after, delta("new", &base, &old, &new), &new).expect("free again");
                    assert_eq!(read_back(after, "new"), new);
                }
                Err(error) => panic!("half there: {error}"),
            }
        },
    );
}

#[test]
fn a_crash_while_images_are_written_or_made_whole_leaves_all_of_them_or_none() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let old: Images = [("memory", 1), ("disk:data", 2)]
        .map(|(of, value)| (role(of), vec![value; 24]))
        .into_iter()
        .collect();
    let mut new = old.clone();
    for guest in new.values_mut() {
        (guest[1], guest[9], guest[20]) = (70, 0, guest[20] + 80);
    }
    let made = put(&store, draft_of("old", &old, &BTreeMap::new()), &old).expect("created");
    let bases = old.iter().map(|(role, was)| (role.clone(), (made.clone(), was.clone())));
    let bases = bases.collect::<BTreeMap<_, _>>();
    let kept = memory.copy();
    at_each_step(
        &memory,
        |store| put(store, draft_of("new", &new, &bases), &new).map(drop),
        |left, after, done| {
            check(after, "old", &old, &options());
            match after.open("new") {
                Ok(_) => check(after, "new", &new, &options()),
                Err(StoreError::NotFound { .. }) => {
                    assert!(!done);
                    after.collect().expect("collected");
                    assert_eq!(left.copy(), kept);
                }
                Err(error) => panic!("half there: {error}"),
            }
        },
    );
    put(&store, draft_of("new", &new, &bases), &new).expect("created");
    at_each_step(
        &memory,
        |store| store.flatten("new", &Work::new(1)).map(drop),
        |_, after, done| {
            check(after, "new", &new, &options());
            let left = after.descriptor("new").expect("whole").bases().count();
            assert!(left == 0 || (left == 2 && !done), "one image of two is whole");
        },
    );
}

/// Passes the descriptor on and then fails, as a server does whose answer is lost.
#[derive(Debug)]
struct LostAnswer(Arc<Memory>);

impl Blobs for LostAnswer {
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        self.0.get(key)
    }

    fn reader(&self, key: &str) -> Result<Box<dyn Read + Send>, BlobError> {
        self.0.reader(key)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.0.put(key, bytes)
    }

    fn put_for_good(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.0.put_for_good(key, bytes)
    }

    fn put_new(&self, key: &str, bytes: &[u8]) -> Result<bool, BlobError> {
        let done = self.0.put_new(key, bytes);
        if key.ends_with("descriptor.json") {
            self.0.fail_after(0);
            self.0.get(key)?;
        }
        done
    }

    fn size(&self, key: &str) -> Result<Option<u64>, BlobError> {
        self.0.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, BlobError> {
        self.0.list(prefix)
    }

    fn delete(&self, key: &str) -> Result<(), BlobError> {
        self.0.fail_after(i64::MAX);
        self.0.delete(key)
    }

    fn sync(&self) -> Result<(), BlobError> {
        self.0.sync()
    }
}

#[test]
fn a_snapshot_that_appeared_though_an_error_was_seen_is_whole() {
    let memory = Memory::new();
    let store = Store::new(Arc::new(LostAnswer(memory.clone()))).expect("store");
    let guest: Guest = vec![4; 20];
    create(&store, draft("x", &guest), &guest).expect_err("the answer is lost");
    memory.fail_after(i64::MAX);
    let after = Store::new(memory).expect("store");
    after.collect().expect("collected");
    assert_eq!(read_back(&after, "x"), guest);
    assert_eq!(after.open("x").expect("opens").state().expect("reads"), b"state of x");
}

#[test]
fn a_crash_while_something_is_learnt_leaves_that_or_what_was_learnt_before() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let guest: Guest = vec![4; 40];
    create(&store, draft("x", &guest), &guest).expect("created");
    let learn = |store: &Store, what: &[u8], pages| {
        store.put_profile("x", &Role::Memory, what)?;
        let runs = [range(0, pages)];
        let stored = store.open("x")?.image(&Role::Memory)?;
        store.put_working_set(&stored, &runs, &read_guest(&guest), &Work::new(1))
    };
    for before in [None, Some((&b"before"[..], 9))] {
        if let Some((what, pages)) = before {
            learn(&store, what, pages).expect("learnt");
        }
        at_each_step(
            &memory,
            |store| learn(store, b"now", 5),
            |_, after, done| {
                let profile = after.profile("x", &Role::Memory).expect("whole");
                let set =
                    after.working_set("x", &Role::Memory).expect("whole").map(|set| set.pages());
                if done {
                    assert_eq!((profile.as_deref(), set), (Some(&b"now"[..]), Some(5)));
                } else {
                    let was = before.unzip();
                    assert!(profile.as_deref() == was.0 || profile.as_deref() == Some(b"now"));
                    assert!(set == was.1 || set == Some(5));
                }
            },
        );
    }
}

#[test]
fn a_crash_while_removing_leaves_each_whole_or_gone() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let base: Guest = (0..40).map(|page| page / 8 + 1).collect();
    let mut top = base.clone();
    (top[1], top[39]) = (70, 71);
    let other = [&base[..16], &[80; 24]].concat();
    let made = create(&store, draft("base", &base), &base).expect("created");
    create(&store, draft("other", &other), &other).expect("created");
    let kept = memory.copy();
    create(&store, delta("top", &made, &base, &top), &top).expect("created");
    at_each_step(
        &memory,
        |store| store.remove("top", false).map(drop),
        |left, after, done| {
            assert_eq!(read_back(after, "base"), base);
            match after.open("top") {
                Ok(_) => {
                    assert!(!done);
                    assert_eq!(read_back(after, "top"), top);
                }
                Err(StoreError::NotFound { .. }) => {
                    after.collect().expect("collected");
                    assert_eq!(left.copy(), kept);
                }
                Err(error) => panic!("half there: {error}"),
            }
        },
    );
    at_each_step(
        &memory,
        |store| store.remove("base", true).map(drop),
        |_, after, _| {
            assert_eq!(read_back(after, "other"), other);
            after.collect().expect("collected");
            assert_eq!(read_back(after, "other"), other);
            for (name, guest) in [("base", &base), ("top", &top)] {
                if after.open(name).is_ok() {
                    assert_eq!(&read_back(after, name), guest);
                }
            }
            assert!(after.open("top").is_err() || after.open("base").is_ok());
        },
    );
}

#[test]
fn a_crash_while_a_cascade_removes_leaves_no_delta_without_its_base() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let disk = role("disk:data");
    let of = |ram: u8, data: Option<u8>| -> Images {
        let data = data.map(|value| (disk.clone(), vec![value; 16]));
        [(Role::Memory, vec![ram; 16])].into_iter().chain(data).collect()
    };
    // `b` is a delta on `c` and, as `c` is, on `a`: by their names, `c` would go before `b`.
    let (a, mut c, mut b) = (of(1, None), of(1, Some(2)), of(1, Some(2)));
    c.values_mut().for_each(|guest| guest[1] = 70);
    b.clone_from(&c);
    b.values_mut().for_each(|guest| guest[9] = 71);
    let made_a = put(&store, draft_of("a", &a, &BTreeMap::new()), &a).expect("created");
    let on_a = (Role::Memory, (made_a, a[&Role::Memory].clone()));
    let bases = BTreeMap::from([on_a.clone()]);
    let made_c = put(&store, draft_of("c", &c, &bases), &c).expect("created");
    let bases = BTreeMap::from([on_a, (disk.clone(), (made_c, c[&disk].clone()))]);
    put(&store, draft_of("b", &b, &bases), &b).expect("created");
    at_each_step(
        &memory,
        |store| {
            let removed = store.remove("a", true)?;
            assert_eq!(removed.names, ["b", "c", "a"]);
            Ok(())
        },
        |_, after, done| {
            for (name, images) in [("a", &a), ("b", &b), ("c", &c)] {
                match after.descriptor(name) {
                    Ok(_) => check(after, name, images, &options()),
                    Err(StoreError::NotFound { .. }) => {}
                    Err(error) => panic!("half there: {error}"),
                }
            }
            after.collect().expect("collected");
            let left = after.list().expect("listed").len();
            assert!(!done || left == 0);
        },
    );
}

#[test]
fn a_crash_while_flattening_leaves_the_delta_or_the_whole() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let base: Guest = (0..40).map(|page| page / 8 + 1).collect();
    let mut mid = base.clone();
    (mid[1], mid[39]) = (70, 0);
    let mut top = mid.clone();
    top[20] = 90;
    let made = create(&store, draft("base", &base), &base).expect("created");
    let made = create(&store, delta("mid", &made, &base, &mid), &mid).expect("created");
    create(&store, delta("top", &made, &mid, &top), &top).expect("created");
    at_each_step(
        &memory,
        |store| store.flatten("mid", &Work::new(1)).map(drop),
        |left, after, done| {
            for (name, guest) in [("base", &base), ("mid", &mid), ("top", &top)] {
                assert_eq!(&read_back(after, name), guest);
            }
            let is_whole = memory_of(after, "mid").base().is_none();
            assert!(is_whole || !done);
            after.collect().expect("collected");
            if !is_whole {
                assert_eq!(left.copy(), memory.copy());
            }
            assert_eq!(read_back(after, "top"), top);
        },
    );
}

#[test]
fn a_crash_while_pulling_leaves_nothing_or_what_can_be_completed() {
    let remote = Store::new(Memory::new()).expect("store");
    let base: Guest = (0..40).map(|page| page / 8 + 1).collect();
    let mut top = base.clone();
    top[1] = 70;
    let made = create(&remote, draft("base", &base), &base).expect("created");
    create(&remote, delta("top", &made, &base, &top), &top).expect("created");
    let pull = |store: &Store| {
        store.adopt_from("top", &remote, "r", &Work::new(1))?;
        store.fetch_chunks(&store.missing("top", 0)?, &remote, &Work::new(1))
    };
    at_each_step(&Memory::new(), pull, |_, after, _| {
        after.collect().expect("collected");
        pull(after).expect("again");
        assert_eq!(read_back(after, "top"), top);
        let verified = after.verify("top", &Work::new(1)).expect("verified");
        assert_eq!((verified.damage, verified.chunks_elsewhere), (vec![], 0));
    });
}
