//! Snapshots that were written by the version that knew one image: `tests/fixtures/format-1.json`
//! was made by that code. It has the keys of a store with `base` and a delta `top`, and the export
//! of `top`.

use std::collections::BTreeMap;

use vmfork_store::{Collected, Descriptor, Role, Store, StoreError, Unreadable, Work};

use crate::common::*;

const EXPORT: &str = "export";

fn fixture() -> BTreeMap<String, Vec<u8>> {
    let text = include_str!("../fixtures/format-1.json");
    let files: BTreeMap<String, BTreeMap<String, String>> =
        serde_json::from_str(text).expect("as it was made");
    let unhex = |hex: &str| {
        let pairs = hex.as_bytes().as_chunks::<2>().0;
        let digits = pairs.iter().map(|pair| std::str::from_utf8(pair).expect("ASCII"));
        digits.map(|digits| u8::from_str_radix(digits, 16).expect("hex")).collect()
    };
    let content = |file: BTreeMap<String, String>| match file.get("text") {
        Some(text) => text.clone().into_bytes(),
        None => unhex(&file["hex"]),
    };
    files.into_iter().map(|(key, file)| (key, content(file))).collect()
}

/// What it has of each page.
fn value(page: &[u8]) -> u8 {
    assert!(page.iter().all(|byte| *byte == page[0]), "a torn page");
    page[0]
}

fn guests() -> [Guest; 2] {
    let base: Guest = (0..32).map(|page| page / 8 + 1).collect();
    let mut top = base.clone();
    (top[1], top[20], top[31]) = (50, 0, 51);
    [base, top]
}

/// The memory of a snapshot of the fixture, whose pages are filled with one byte each.
fn read(store: &Store, name: &str) -> Guest {
    use vmfork_image::PageSource as _;
    use vmfork_store::Extent;

    let chain = chain(store, name);
    let mut bytes = vec![0; 32 * PAGE];
    for image in chain.iter().rev() {
        let source = image.source(options());
        for (range, extent) in image.extents() {
            let from = usize::try_from(range.byte_offset()).expect("small");
            let into = &mut bytes[from..from + usize::try_from(range.byte_len()).expect("small")];
            match extent {
                Extent::Zero => into.fill(0),
                Extent::Own => source.read(range, into).expect("reads"),
            }
        }
    }
    bytes.chunks_exact(PAGE).map(value).collect()
}

fn store() -> (std::sync::Arc<Memory>, Store) {
    let mut files = fixture();
    files.remove(EXPORT);
    let memory = Memory::of(files);
    (memory.clone(), Store::new(memory).expect("a store"))
}

fn check(store: &Store, name: &str, guest: &Guest) {
    assert_eq!(&read(store, name), guest);
    let verified = store.verify(name, &Work::new(2)).expect("verified");
    assert_eq!(verified.damage, []);
}

#[test]
fn old_snapshots_open_as_they_are() {
    let (memory, store) = store();
    let before = memory.copy();
    let [base, top] = guests();
    check(&store, "base", &base);
    check(&store, "top", &top);
    let stored = store.open("top").expect("opens");
    assert_eq!(stored.state().expect("reads"), b"state of top");
    let descriptor = stored.descriptor();
    let [image] = &descriptor.images[..] else { panic!("{descriptor:?}") };
    assert_eq!((&image.role, image.bytes, image.pages()), (&Role::Memory, 32 * 4096, 32));
    assert_eq!(
        image.base.as_ref().map(|base| (&*base.name, &base.role)),
        Some(("base", &Role::Memory))
    );
    let set = store.working_set("top", &Role::Memory).expect("opens").expect("there");
    assert_eq!(set.runs(), [range(30, 2), range(0, 3)]);
    let profile = store.profile("top", &Role::Memory).expect("reads");
    assert_eq!(profile.as_deref(), Some(&b"profile"[..]));
    // The totals are those that it was written with.
    let text: serde_json::Value =
        serde_json::from_slice(&before["snapshots/top/descriptor.json"]).expect("JSON");
    assert_eq!(text["schema"], "vmfork-snapshot/1");
    let counts = serde_json::to_value(descriptor.counts()).expect("plain");
    assert_eq!(counts, text["counts"]);
    assert_eq!(store.collect().expect("collected"), Collected::default());
    assert_eq!(memory.copy(), before);
}

#[test]
fn old_snapshots_are_bases_and_become_whole() {
    let (memory, store) = store();
    let [_, top] = guests();
    let made = store.flatten("top", &Work::new(2)).expect("flattened");
    assert_eq!(made.bases().count(), 0);
    check(&store, "top", &top);
    assert!(store.working_set("top", &Role::Memory).expect("opens").is_some());
    store.remove("base", false).expect("no delta on it any more");
    check(&store, "top", &top);
    assert_eq!(store.collect().expect("collected"), Collected::default());
    let mut is = top.clone();
    is[9] = 77;
    let draft = delta("new", &made, &top, &is);
    let read_filled = |page_range: vmfork_image::PageRange, bytes: &mut [u8]| {
        for (page, into) in page_range.pages().zip(bytes.chunks_exact_mut(PAGE)) {
            into.fill(is[usize::try_from(page.0).expect("small")]);
        }
        Ok(())
    };
    store.create(draft, &of_memory(read_filled), &Work::new(1)).expect("created");
    check(&store, "new", &is);
    store.remove("top", true).expect("removed");
    assert_eq!(memory.keys(), ["format"]);
}

#[test]
fn old_snapshots_and_exports_go_to_other_stores() {
    let (_, from) = store();
    let [base, top] = guests();
    let (pushed, pulled, imported) = (Memory::new(), Memory::new(), Memory::new());
    let [pushed, pulled, imported] =
        [pushed, pulled, imported].map(|memory| Store::new(memory).expect("store"));
    from.copy_to("top", &pushed, &Work::new(2)).expect("pushed");
    pulled.adopt_from("top", &from, "there", &Work::new(1)).expect("adopted");
    pulled
        .fetch_chunks(&pulled.missing("top", 0).expect("there"), &from, &Work::new(2))
        .expect("fetched");
    let stream = &fixture()[EXPORT];
    imported.import(&mut &stream[..], None, &Work::new(2)).expect("imported");
    for store in [pushed, pulled, imported] {
        check(&store, "base", &base);
        check(&store, "top", &top);
        assert!(store.working_set("top", &Role::Memory).expect("opens").is_some());
    }
}

#[test]
fn a_changed_bit_or_a_cut_of_an_old_descriptor_is_noticed() {
    let file = &fixture()["snapshots/top/descriptor.json"];
    assert!(Descriptor::decode(file).is_ok());
    for bit in 0..file.len() * 8 {
        let mut bad = file.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let error = Descriptor::decode(&bad).expect_err("changed");
        assert!(matches!(error, Unreadable::Flaw(_)), "bit {bit}: {error}");
    }
    for bytes in 0..file.len() {
        assert!(Descriptor::decode(&file[..bytes]).is_err(), "{bytes}");
    }
}

#[test]
fn a_newer_snapshot_is_refused_with_a_remedy_and_keeps_its_chunks() {
    let (memory, _) = store();
    let key = "snapshots/top/descriptor.json";
    let newer = br#"{"schema": "vmfork-snapshot/3", "layers": []}"#.to_vec();
    memory.map.lock().expect("no panic").insert(key.into(), newer);
    let store = Store::new(memory.clone()).expect("a store");
    let before = memory.chunks();
    for error in [
        store.open("top").expect_err("newer"),
        store.verify("top", &Work::new(1)).expect_err("newer"),
        store.remove("base", false).expect_err("perhaps needed"),
    ] {
        assert!(error.remedy().is_some(), "{error}");
    }
    let error = store.open("top").expect_err("newer");
    assert_eq!(
        error.to_string(),
        "`snapshots/top/descriptor.json` in memory is of a newer version of vmfork: its layout is \
         vmfork-snapshot/3, and vmfork-snapshot/2 is the newest known here"
    );
    assert!(error.remedy().is_some_and(|text| text.contains("or a newer one")));
    assert!(matches!(error, StoreError::Newer { .. }));
    let listed = store.list().expect("listed");
    assert!(listed.iter().any(|(name, found)| name == "top" && found.is_err()));
    assert_eq!(store.collect().expect("collected").blocked_by, ["top"]);
    assert_eq!(memory.chunks(), before);
    check(&store, "base", &guests()[0]);
}
