//! Snapshots of several images, each with its role, its base and its working set.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use proptest::prelude::*;
use vmfork_image::PageRange;
use vmfork_store::{
    BaseRef, Collected, Compression, Descriptor, Draft, HotChunks, Role, SourceOptions, Store,
    StoreError, Work,
};

use crate::common::*;

/// What a VM has by role.
pub(crate) type Images = BTreeMap<Role, Guest>;

pub(crate) fn role(text: &str) -> Role {
    text.parse().expect("a role")
}

fn roles() -> [Role; 3] {
    ["memory", "disk:data", "disk:root"].map(role)
}

fn read_images(images: &Images) -> impl Fn(&Role, PageRange, &mut [u8]) -> io::Result<()> + Sync {
    move |role, range, bytes| read_guest(&images[role])(range, bytes)
}

/// Each image whole, or a delta on what `bases` has for its role.
pub(crate) fn draft_of(
    name: &str,
    images: &Images,
    bases: &BTreeMap<Role, (Descriptor, Guest)>,
) -> Draft {
    let image = |(role, guest): (&Role, &Guest)| match bases.get(role) {
        Some((base, was)) => delta_image(role.clone(), base, was, guest),
        None => image(role.clone(), guest),
    };
    Draft { images: images.iter().map(image).collect(), ..draft(name, &[]) }
}

pub(crate) fn put(store: &Store, draft: Draft, images: &Images) -> Result<Descriptor, StoreError> {
    store.create(draft, &read_images(images), &Work::new(2))
}

pub(crate) fn check(store: &Store, name: &str, images: &Images, options: &SourceOptions) {
    let stored = store.open(name).expect("opens");
    let found: BTreeSet<_> = stored.images().map(|image| image.image().role.clone()).collect();
    assert_eq!(found, images.keys().cloned().collect::<BTreeSet<_>>());
    for (role, guest) in images {
        let chain = store.open_chain(name, role).expect("opens");
        assert_eq!(&read_chain(&chain, options), guest, "{role} of {name}");
    }
}

/// base ◄── top, of memory and two disks; with all that a snapshot can have.
fn family() -> (std::sync::Arc<Memory>, Store, [Images; 2]) {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let base: Images = (1..)
        .zip(roles())
        .map(|(at, role)| (role, (0..32u8).map(|page| page / 8 + 10 * at).collect()))
        .collect();
    let mut top = base.clone();
    for (at, guest) in (0..).zip(top.values_mut()) {
        guest[at] = 200;
        guest[20 + at] = 0;
    }
    let made = put(&store, draft_of("base", &base, &BTreeMap::new()), &base).expect("created");
    let bases = base.iter().map(|(role, was)| (role.clone(), (made.clone(), was.clone())));
    put(&store, draft_of("top", &top, &bases.collect()), &top).expect("created");
    learn(&store, "top", &top);
    (memory, store, [base, top])
}

/// A working set and a profile for each image, none like another.
fn learn(store: &Store, name: &str, images: &Images) {
    for ((role, guest), pages) in images.iter().zip(3..) {
        let image = store.open(name).expect("opens").image(role).expect("has it");
        let runs = [range(1, pages)];
        store.put_working_set(&image, &runs, &read_guest(guest), &Work::new(1)).expect("put");
        store.put_profile(name, role, role.to_string().as_bytes()).expect("put");
    }
}

fn check_learnt(store: &Store, name: &str, images: &Images) {
    for (role, pages) in images.keys().zip(3..) {
        let set = store.working_set(name, role).expect("opens").expect("there");
        assert_eq!(set.runs(), [range(1, pages)]);
        let profile = store.profile(name, role).expect("reads");
        assert_eq!(profile, Some(role.to_string().into_bytes()));
    }
}

/// What is to be stored: sizes by role, then snapshots. Each says by role whether it has such an
/// image, whether that is a delta, and its content.
type Plan = (Vec<usize>, Vec<Vec<(bool, bool, Vec<u8>)>>);

fn plans() -> impl Strategy<Value = Plan> {
    let sizes = prop::collection::vec(1usize..30, 3);
    sizes.prop_flat_map(|sizes| {
        let images: Vec<_> = sizes
            .iter()
            .map(|size| (any::<bool>(), any::<bool>(), prop::collection::vec(0u8..4, *size)))
            .collect();
        (Just(sizes), prop::collection::vec(images, 1..5))
    })
}

/// Store all of a plan. Each delta is on the newest snapshot that has an image of its role. So the
/// images of one snapshot may have different bases.
fn store_all(store: &Store, (_, snapshots): &Plan) -> Vec<(String, Images)> {
    let mut newest = BTreeMap::<Role, (Descriptor, Guest)>::new();
    let mut all = Vec::new();
    for (i, plan) in snapshots.iter().enumerate() {
        let has_none = plan.iter().all(|(is_there, ..)| !is_there);
        let (mut images, mut bases) = (Images::new(), BTreeMap::new());
        for (role, (is_there, is_delta, guest)) in roles().into_iter().zip(plan) {
            if *is_there || has_none {
                if let Some(base) = newest.get(&role).filter(|_| *is_delta) {
                    bases.insert(role.clone(), base.clone());
                }
                images.insert(role, guest.clone());
            }
        }
        let name = format!("s{i}");
        let made = put(store, draft_of(&name, &images, &bases), &images).expect("created");
        for (role, guest) in &images {
            newest.insert(role.clone(), (made.clone(), guest.clone()));
        }
        all.push((name, images));
    }
    all
}

/// Those of `all` that are in `store`, which must be what `name` needs, read back.
fn check_family(store: &Store, name: &str, all: &[(String, Images)], options: &SourceOptions) {
    let family = store.open_family(name).expect("opens");
    for stored in &family {
        let name = &stored.descriptor().name;
        let (_, images) = all.iter().find(|(of, _)| of == name).expect("one of them");
        check(store, name, images, options);
    }
    assert_eq!(store.list().expect("listed").len(), family.len());
    assert_eq!(family.last().map(|it| it.descriptor().name.as_str()), Some(name));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn images_read_back_wherever_they_are_taken(plan in plans()) {
        let memory = Memory::new();
        let store = Store::new(memory.clone()).expect("store");
        let all = store_all(&store, &plan);
        let top = &all.last().expect("one").0;
        for (name, images) in &all {
            check(&store, name, images, &options());
            let verified = store.verify(name, &Work::new(2)).expect("verified");
            prop_assert_eq!(verified.damage, vec![]);
        }
        prop_assert_eq!(store.collect().expect("collected"), Collected::default());

        let pushed = Store::new(Memory::new()).expect("store");
        store.copy_to(top, &pushed, &Work::new(2)).expect("pushed");
        check_family(&pushed, top, &all, &options());

        let mut stream = Vec::new();
        store.export(top, &mut stream, &Work::new(2)).expect("exported");
        let imported = Store::new(Memory::new()).expect("store");
        imported.import(&mut &stream[..], None, &Work::new(2)).expect("imported");
        check_family(&imported, top, &all, &options());

        let here = Memory::new();
        let pulled = Store::new(here.clone()).expect("store");
        pulled.adopt_from(top, &store, "there", &Work::new(1)).expect("adopted");
        prop_assert_eq!(here.chunks(), 0);
        let remote: std::sync::Arc<dyn vmfork_store::Blobs> = memory.clone();
        let with_remote = SourceOptions { hot: HotChunks::new(1 << 20), remote: Some(remote) };
        check_family(&pulled, top, &all, &with_remote);
        // What was read is kept, so another one shows what is fetched.
        let fetched = Store::new(Memory::new()).expect("store");
        fetched.adopt_from(top, &store, "there", &Work::new(1)).expect("adopted");
        fetched.fetch_chunks(&fetched.missing(top, 0).expect("there"), &store, &Work::new(2)).expect("fetched");
        check_family(&fetched, top, &all, &options());
    }

    #[test]
    fn what_is_removed_takes_no_chunk_of_others_along(plan in plans(), kept: prop::sample::Index) {
        let memory = Memory::new();
        let store = Store::new(memory.clone()).expect("store");
        let all = store_all(&store, &plan);
        let (kept, images) = kept.get(&all);
        let made = store.flatten(kept, &Work::new(2)).expect("flattened");
        prop_assert_eq!(made.bases().count(), 0);
        for (name, images) in &all {
            check(&store, name, images, &options());
        }
        // Deltas on it become whole, too, so that all others can go.
        for (name, _) in all.iter().filter(|(name, _)| name != kept) {
            store.flatten(name, &Work::new(2)).expect("flattened");
        }
        for (name, _) in all.iter().filter(|(name, _)| name != kept) {
            store.remove(name, false).expect("no delta on it");
        }
        check(&store, kept, images, &options());
        let verified = store.verify(kept, &Work::new(2)).expect("verified");
        prop_assert_eq!((verified.names.len(), verified.damage), (1, vec![]));
        prop_assert_eq!(store.collect().expect("collected"), Collected::default());
        store.remove(kept, false).expect("removed");
        prop_assert_eq!(memory.keys(), ["format"]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn damage_in_any_image_is_found(file: prop::sample::Index, at: prop::sample::Index, bit in 0..8u8) {
        let (memory, store, _) = family();
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
}

#[test]
fn each_image_has_its_own_working_set_and_profile_which_travel() {
    let (memory, store, [_, top]) = family();
    check_learnt(&store, "top", &top);
    let files = memory.keys().into_iter().filter(|key| key.starts_with("snapshots/top/"));
    assert_eq!(files.count(), 1 + 1 + 3 * 3, "descriptor, state; table, working set, profile");
    let (to, imported) = (Memory::new(), Memory::new());
    let there = Store::new(to.clone()).expect("store");
    store.copy_to("top", &there, &Work::new(2)).expect("pushed");
    check_learnt(&there, "top", &top);
    let mut stream = Vec::new();
    store.export("top", &mut stream, &Work::new(1)).expect("exported");
    let there = Store::new(imported.clone()).expect("store");
    there.import(&mut &stream[..], None, &Work::new(1)).expect("imported");
    check_learnt(&there, "top", &top);
    assert_eq!((to.content(), imported.content()), (memory.content(), memory.content()));
    store.remove_profile("top").expect("removed");
    for role in roles() {
        assert!(store.working_set("top", &role).expect("reads").is_none());
        assert_eq!(store.profile("top", &role).expect("reads"), None);
    }
    assert_eq!(store.collect().expect("collected"), Collected::default());
}

#[test]
fn equal_windows_of_two_images_are_one_chunk() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let guest: Guest = vec![7; 16];
    let images: Images = roles().into_iter().map(|role| (role, guest.clone())).collect();
    let made = put(&store, draft_of("x", &images, &BTreeMap::new()), &images).expect("created");
    assert_eq!((made.counts().own_pages, made.counts().chunks, memory.chunks()), (48, 6, 1));
    let chunk_bytes = memory.copy().into_iter().find(|(key, _)| key.starts_with("chunks/"));
    let chunk_bytes = chunk_bytes.expect("one").1.len() as u64;
    // The first image is the memory, which wrote it.
    for (image, chunk_bytes) in made.images.iter().zip([chunk_bytes, 0, 0]) {
        assert_eq!(image.counts.stored_bytes, image.table.bytes + chunk_bytes, "{}", image.role);
    }
    // An image of one snapshot is deduplicated with another role of another one.
    let disk = Images::from([(role("disk:other"), guest)]);
    let made = put(&store, draft_of("y", &disk, &BTreeMap::new()), &disk).expect("created");
    assert_eq!((memory.chunks(), made.counts().shared_bytes), (1, chunk_bytes));
    store.remove("x", false).expect("removed");
    check(&store, "y", &disk, &options());
}

#[test]
fn a_disk_has_a_size_in_sectors_and_its_own_windows() {
    let store = Store::new(Memory::new()).expect("store");
    let images: Images = roles().into_iter().map(|role| (role, vec![1, 2, 3])).collect();
    let mut draft = draft_of("x", &images, &BTreeMap::new());
    draft.images[1].bytes = 2 * 4096 + 512;
    draft.images[1].chunk_pages = 1;
    draft.images[2].compression = Compression::None;
    let made = put(&store, draft, &images).expect("created");
    let (disk, root) = (&made.images[1], &made.images[2]);
    assert_eq!((disk.bytes, disk.pages(), disk.chunk_pages), (8704, 3, 1));
    assert_eq!(root.compression, Compression::None);
    check(&store, "x", &images, &options());
}

#[test]
fn an_image_may_be_a_delta_on_that_of_another_device_but_not_of_another_kind() {
    let memory = Memory::new();
    let store = Store::new(memory.clone()).expect("store");
    let image = role("disk:root");
    let base = Images::from([(image.clone(), vec![5; 20])]);
    let made = put(&store, draft_of("debian", &base, &BTreeMap::new()), &base).expect("created");
    let mut is = vec![5; 20];
    is[3] = 6;
    let top = Images::from([(Role::Memory, vec![9; 4]), (role("disk:vda"), is)]);
    let bases = BTreeMap::from([(role("disk:vda"), (made.clone(), vec![5; 20]))]);
    let mut draft = draft_of("vm", &top, &bases);
    draft.images[1].base.as_mut().expect("a delta").role = image.clone();
    let made = put(&store, draft, &top).expect("created");
    check(&store, "vm", &top, &options());
    assert_eq!(made.images[1].counts.own_pages, 1);
    let error = store.remove("debian", false).expect_err("needed");
    assert!(matches!(error, StoreError::Dependants { dependants, .. } if dependants == ["vm"]));
    // What is there has no memory.
    let error = store.open_chain("debian", &Role::Memory).expect_err("none");
    assert_eq!(error.to_string(), "snapshot `debian` has no image of role `memory`");
    assert!(error.remedy().is_some_and(|text| text.contains("snapshot inspect debian")));
    let before = memory.copy();
    let on = |of: Role, base: Role| {
        let mut draft = draft_of("x", &Images::from([(of, vec![5; 20])]), &BTreeMap::new());
        let (name, id) = ("debian".to_owned(), store.descriptor("debian").expect("there").id);
        draft.images[0].base = Some(BaseRef { name, id, role: base });
        draft
    };
    let twice = {
        let mut draft = on(image.clone(), image.clone());
        draft.images.push(draft.images[0].clone());
        draft
    };
    let mut odd = on(image.clone(), image.clone());
    odd.images[0].bytes += 1;
    let none = Draft { images: vec![], ..odd.clone() };
    for (draft, says) in [
        (on(Role::Memory, image.clone()), "`memory`: a delta on an image of role `disk:root`"),
        (on(image.clone(), role("disk:b")), "`debian`, is without an image of role `disk:b`"),
        (twice, "two images of role `disk:root`"),
        (odd, "81921 bytes, not a multiple of 512"),
        (none, "0 images, not 1 to 64"),
    ] {
        let images = Images::from([(image.clone(), vec![5; 20])]);
        let error = put(&store, draft, &images).expect_err("refused").to_string();
        assert!(error.contains(says), "{error}, not {says}");
    }
    assert_eq!(memory.copy(), before);
}

#[test]
fn what_is_missing_of_one_image_stops_the_snapshot_not_the_store() {
    let (memory, _, _) = family();
    let key = memory.key_of("top", "disk-root.table");
    memory.map.lock().expect("no panic").get_mut(&key).expect("there").truncate(9);
    let store = Store::new(memory.clone()).expect("store");
    let error = store.open("top").expect_err("damaged").to_string();
    assert!(error.starts_with(&format!("`{key}` in memory is damaged")), "{error}");
    assert_eq!(store.collect().expect("collected").blocked_by, ["top"]);
    let error = store.remove("base", false).expect_err("needed");
    assert!(matches!(error, StoreError::Dependants { .. }), "{error}");
    assert_eq!(store.remove("base", true).expect("removed").names, ["top", "base"]);
    // Which chunks the damaged one had was not known.
    store.collect().expect("collected");
    assert_eq!(memory.keys(), ["format"]);
}
