//! Export and import, push and pull.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use proptest::prelude::*;
use vmfork_image::PageSource as _;
use vmfork_store::{
    Blobs, Descriptor, Draft, HotChunks, Role, SourceOptions, Store, StoreError, StoredPages, Work,
};

use crate::common::*;
use crate::images::{Images, draft_of, put, role};

struct Place {
    memory: Arc<Memory>,
    store: Store,
}

fn place() -> Place {
    let memory = Memory::new();
    Place { store: Store::new(memory.clone()).expect("store"), memory }
}

/// base ◄── top, of 64 pages, with all that a snapshot can have; some of their chunks are equal.
fn family() -> (Place, [Guest; 2]) {
    let place = place();
    let store = &place.store;
    let base: Guest = (0..64).map(|page| page / 16 + 1).collect();
    let mut top = base.clone();
    top[..8].fill(9);
    (top[60], top[62]) = (8, 0);
    let made = create(store, draft("base", &base), &base).expect("created");
    create(store, delta("top", &made, &base, &top), &top).expect("created");
    store.put_profile("top", &Role::Memory, b"profile").expect("put");
    let stored = memory_of(store, "top");
    store.put_working_set(&stored, &[range(0, 9)], &read_guest(&top), &Work::new(1)).expect("put");
    (place, [base, top])
}

fn export(store: &Store, name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    store.export(name, &mut out, &Work::new(2)).expect("exported");
    out
}

fn import(store: &Store, stream: &[u8], name: Option<&str>) -> Result<Vec<String>, StoreError> {
    let done = store.import(&mut &stream[..], name, &Work::new(2))?;
    Ok(done.into_iter().map(|descriptor| descriptor.name).collect())
}

/// That it is all there, byte by byte.
fn check(store: &Store, name: &str, guest: &Guest) {
    assert_eq!(&read_back(store, name), guest);
    let verified = store.verify(name, &Work::new(2)).expect("verified");
    assert_eq!((verified.damage, verified.chunks_elsewhere), (vec![], 0));
}

#[test]
fn what_is_exported_is_imported_elsewhere_as_it_was() {
    let (from, [base, top]) = family();
    let stream = export(&from.store, "top");
    let to = place();
    assert_eq!(import(&to.store, &stream, None).expect("imported"), ["base", "top"]);
    assert_eq!(to.memory.content(), from.memory.content());
    check(&to.store, "base", &base);
    check(&to.store, "top", &top);
    assert_eq!(
        to.store.profile("top", &Role::Memory).expect("reads").as_deref(),
        Some(&b"profile"[..])
    );
    assert_eq!(
        to.store.working_set("top", &Role::Memory).expect("opens").map(|set| set.pages()),
        Some(9)
    );
    // Again: it is there.
    let error = import(&to.store, &stream, Some("other")).expect_err("there");
    assert_eq!(error.to_string(), "a snapshot named `top` is in memory already");
}

#[test]
fn an_import_leaves_out_bases_that_are_there_whatever_they_are_called() {
    let (from, [base, top]) = family();
    let to = place();
    let made = import(&to.store, &export(&from.store, "base"), Some("renamed"));
    assert_eq!(made.expect("imported"), ["renamed"]);
    let made = import(&to.store, &export(&from.store, "top"), Some("mine")).expect("imported");
    assert_eq!(made, ["mine"]);
    assert_eq!(memory_of(&to.store, "mine").base().map(|b| b.name.clone()), Some("renamed".into()));
    check(&to.store, "renamed", &base);
    check(&to.store, "mine", &top);
    assert_eq!(from.memory.chunks(), to.memory.chunks());
}

#[test]
fn a_name_that_is_taken_fails_an_import_and_leaves_nothing() {
    let (from, _) = family();
    let to = place();
    create(&to.store, draft("base", &[1; 8]), &[1; 8]).expect("created");
    let before = to.memory.copy();
    let error = import(&to.store, &export(&from.store, "top"), None).expect_err("taken");
    assert!(matches!(error, StoreError::Exists { name, .. } if name == "base"));
    let error = import(&to.store, &export(&from.store, "top"), Some("../x")).expect_err("no name");
    assert!(matches!(error, StoreError::BadName { .. }));
    assert_eq!(to.memory.copy(), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_stream_that_was_changed_or_cut_is_refused_and_leaves_nothing(
        at: prop::sample::Index, bit in 0..8u8, cut: bool,
    ) {
        let (from, _) = family();
        let mut stream = export(&from.store, "top");
        let at = at.index(stream.len());
        if cut { stream.truncate(at) } else { stream[at] ^= 1 << bit }
        let to = place();
        let error = import(&to.store, &stream, None).expect_err("damaged");
        let is_told = matches!(error, StoreError::Stream { .. } | StoreError::BadName { .. });
        prop_assert!(is_told, "{}", error);
        prop_assert!(to.store.list().expect("listed").is_empty());
        to.store.collect().expect("collected");
        prop_assert_eq!(to.memory.keys(), ["format"]);
    }

    #[test]
    fn any_bytes_are_survived(bytes: Vec<u8>, count in 0u8..4) {
        let to = place();
        prop_assert!(import(&to.store, &bytes, None).is_err());
        let header = [b'V', b'F', b'E', b'X', 1, 0, count, 0];
        prop_assert!(import(&to.store, &[&header[..], &bytes].concat(), None).is_err());
    }
}

/// The stream with another descriptor of `name`, and the right hash at its end.
fn with_descriptor(stream: &[u8], name: &str, change: impl Fn(&mut Descriptor)) -> Vec<u8> {
    let (header, mut rest) = stream.split_at(8);
    let mut out = header.to_vec();
    // The end has kind 0, a descriptor kind 1.
    while rest[0] != 0 {
        let (head, after) = rest.split_at(2 + usize::from(rest[1]));
        let (length, after) = after.split_first_chunk().expect("a length");
        let bytes = usize::try_from(u64::from_le_bytes(*length)).expect("small");
        let (payload, after) = after.split_at(bytes);
        let mut payload = payload.to_vec();
        if head[0] == 1 && &head[2..] == name.as_bytes() {
            let mut descriptor = Descriptor::decode(&payload).expect("right");
            change(&mut descriptor);
            payload = descriptor.encode().expect("small");
        }
        out.extend_from_slice(head);
        out.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        out.extend_from_slice(&payload);
        rest = after;
    }
    out.push(0);
    let hash = blake3::hash(&out);
    out.extend_from_slice(hash.as_bytes());
    out
}

#[test]
fn an_import_without_the_image_that_is_needed_leaves_no_base() {
    let disk = role("disk:a");
    let (base, top): (Images, Images) =
        ([(disk.clone(), vec![5; 16])].into(), [(disk.clone(), vec![6; 16])].into());
    let from = place();
    let made = put(&from.store, draft_of("base", &base, &[].into()), &base).expect("created");
    let bases = [(disk.clone(), (made, base[&disk].clone()))].into();
    put(&from.store, draft_of("top", &top, &bases), &top).expect("created");
    let stream = export(&from.store, "top");
    let same = with_descriptor(&stream, "top", |_| ());
    assert!(same == stream, "the stream is taken apart as it is put together");
    let other = with_descriptor(&stream, "top", |descriptor| {
        descriptor.images[0].base.as_mut().expect("a delta").role = role("disk:b");
    });
    let to = place();
    let error = import(&to.store, &other, None).expect_err("no such image").to_string();
    assert!(error.contains("`base`, is without an image of role `disk:b`"), "{error}");
    // The same if the base is here already.
    assert_eq!(to.memory.keys(), ["format"]);
    import(&to.store, &export(&from.store, "base"), None).expect("imported");
    let before = to.memory.copy();
    import(&to.store, &other, None).expect_err("no such image");
    assert_eq!(to.memory.copy(), before);
    import(&to.store, &same, None).expect("imported");
}

#[test]
fn an_import_that_can_not_be_written_down_leaves_no_base() {
    const MOST: usize = 1 << 20;
    let family = |padding: usize| {
        let (from, base, top) = (place(), vec![5; 16], vec![6; 16]);
        let made = create(&from.store, draft("base", &base), &base).expect("created");
        let vm = serde_json::json!({"padding": "x".repeat(padding)});
        let top = Draft { vm, ..delta("top", &made, &base, &top) };
        (create(&from.store, top, &[6; 16]).expect("created"), from)
    };
    let room = MOST - family(0).0.encode().expect("small").len();
    let (made, from) = family(room - 5);
    assert_eq!(made.encode().expect("fits").len(), MOST - 5);
    let stream = export(&from.store, "top");
    let to = place();
    let error = import(&to.store, &stream, Some("longer-name")).expect_err("too long").to_string();
    assert!(error.contains("above 1048576"), "{error}");
    assert!(to.store.list().expect("listed").is_empty());
    import(&to.store, &stream, None).expect("its own name fits");
}

#[test]
fn export_to_who_takes_no_more_says_so() {
    struct Full;
    impl io::Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (from, _) = family();
    let error = from.store.export("top", &mut Full, &Work::new(1)).expect_err("full");
    assert_eq!(error.to_string(), "write the export");
}

#[test]
fn damage_is_never_passed_on() {
    let (from, _) = family();
    let key = from.memory.keys().into_iter().find(|key| key.starts_with("chunks/")).expect("one");
    from.memory.map.lock().expect("no panic").get_mut(&key).expect("there")[30] ^= 1;
    let error = from.store.export("top", &mut Vec::new(), &Work::new(1)).expect_err("damaged");
    assert!(error.to_string().contains(&key), "{error}");
    let to = place();
    let error = from.store.copy_to("top", &to.store, &Work::new(1)).expect_err("damaged");
    assert!(error.to_string().contains(&key), "{error}");
    assert!(to.store.open("top").is_err());
}

#[test]
fn what_is_made_whole_meanwhile_is_exported_and_pushed_as_it_was() {
    for is_push in [false, true] {
        let (from, [base, top]) = family();
        let there = from.store.clone();
        // The base's, which is read first.
        from.memory.at("get", ".state", move || {
            there.flatten("top", &Work::new(1)).expect("flattened");
        });
        let to = place();
        if is_push {
            from.store.copy_to("top", &to.store, &Work::new(1)).expect("pushed");
        } else {
            import(&to.store, &export(&from.store, "top"), None).expect("imported");
        }
        assert_eq!(from.store.descriptor("top").expect("there").bases().count(), 0);
        assert_eq!(to.store.descriptor("top").expect("there").bases().count(), 1);
        check(&to.store, "base", &base);
        check(&to.store, "top", &top);
        check(&from.store, "top", &top);
    }
}

#[test]
fn a_push_copies_what_is_not_there() {
    let (from, [base, top]) = family();
    let to = place();
    let copied = from.store.copy_to("base", &to.store, &Work::new(2)).expect("pushed");
    assert_eq!((copied.names, copied.chunks), (vec!["base".to_owned()], 4));
    let copied = from.store.copy_to("top", &to.store, &Work::new(2)).expect("pushed");
    assert_eq!(
        (&copied.names[..], &copied.there[..]),
        (&["top".to_owned()][..], &["base".to_owned()][..])
    );
    check(&to.store, "base", &base);
    check(&to.store, "top", &top);
    assert_eq!(to.memory.content(), from.memory.content());
    // Again, after more was learnt on both sides: that alone is copied which the other has nothing
    // of.
    from.store.put_profile("top", &Role::Memory, b"from").expect("put");
    from.store.put_profile("base", &Role::Memory, b"from").expect("put");
    to.store.put_profile("top", &Role::Memory, b"to").expect("put");
    let copied = from.store.copy_to("top", &to.store, &Work::new(2)).expect("pushed");
    assert_eq!((copied.names.len(), copied.chunks, copied.there.len()), (0, 0, 2));
    assert_eq!(to.store.profile("top", &Role::Memory).expect("reads").as_deref(), Some(&b"to"[..]));
    assert_eq!(
        to.store.profile("base", &Role::Memory).expect("reads").as_deref(),
        Some(&b"from"[..])
    );
}

#[test]
fn chunks_that_are_there_are_not_sent_again() {
    let (from, [base, _]) = family();
    let to = place();
    create(&to.store, draft("equal", &base), &base).expect("created");
    let copied = from.store.copy_to("base", &to.store, &Work::new(2)).expect("pushed");
    assert_eq!((copied.chunks, copied.chunks_there), (0, 4));
    check(&to.store, "base", &base);
}

#[test]
fn a_pulled_snapshot_is_read_before_its_chunks_are_here_and_then_completed() {
    let (remote, [base, top]) = family();
    let here = place();
    let stored = here
        .store
        .adopt_from("top", &remote.store, "s3://bucket/x", &Work::new(1))
        .expect("adopted");
    assert_eq!(stored.origin(), Some("s3://bucket/x"));
    assert_eq!(stored.state().expect("reads"), b"state of top");
    assert_eq!(here.memory.chunks(), 0);
    assert_eq!(
        here.store.working_set("top", &Role::Memory).expect("opens").map(|set| set.pages()),
        Some(9)
    );
    // Not all here: it can't be passed on, nor made whole.
    for error in [
        here.store.export("top", &mut Vec::new(), &Work::new(1)).expect_err("not here"),
        here.store.copy_to("top", &place().store, &Work::new(1)).expect_err("not here"),
        here.store.flatten("top", &Work::new(1)).expect_err("not here"),
        place().store.adopt_from("top", &here.store, "x", &Work::new(1)).expect_err("not there"),
    ] {
        assert!(matches!(error, StoreError::Incomplete { .. }), "{error}");
    }
    let verified = here.store.verify("top", &Work::new(1)).expect("verified");
    assert_eq!((verified.chunks, verified.chunks_elsewhere, verified.damage), (0, 6, vec![]));
    // Without the remote store there is nothing to read from; with it, what is read is kept.
    let memory = stored.image(&Role::Memory).expect("has one");
    let alone = memory.source(options());
    assert_eq!(
        alone.read(range(0, 1), &mut [0; PAGE]).expect_err("not here").kind(),
        io::ErrorKind::NotFound
    );
    let options =
        SourceOptions { hot: HotChunks::new(1 << 20), remote: Some(remote.memory.clone()) };
    let source = memory.source(options.clone());
    source.read(range(0, 1), &mut [0; PAGE]).expect("reads");
    source.read(range(0, 8), &mut [0; 8 * PAGE]).expect("reads");
    assert_eq!(here.memory.chunks(), 1);
    // One that is torn here is got again.
    let key = here.memory.keys().into_iter().find(|key| key.starts_with("chunks/")).expect("one");
    here.memory.map.lock().expect("no panic").insert(key, vec![1, 2, 3]);
    assert_eq!(read_chain(&chain(&here.store, "top"), &options), top);
    here.store.collect().expect("collected");
    assert_eq!(here.memory.chunks(), 6);
    here.store
        .fetch_chunks(&here.store.missing("top", 0).expect("there"), &remote.store, &Work::new(2))
        .expect("fetched");
    assert_eq!(here.store.open("top").expect("opens").origin(), None);
    check(&here.store, "top", &top);
    check(&here.store, "base", &base);
    assert_eq!(here.memory.content(), remote.memory.content());
}

/// `top` elsewhere, of 240 pages that differ, adopted here.
fn adopted() -> (Place, Place, Guest) {
    let (remote, here) = (place(), place());
    let guest: Guest = (1..=240).collect();
    create(&remote.store, draft("top", &guest), &guest).expect("created");
    here.store.adopt_from("top", &remote.store, "r", &Work::new(1)).expect("adopted");
    remote.memory.take_read();
    (remote, here, guest)
}

/// A reader of what is adopted. The first chunk that is got from the remote store is told of, and
/// held until it may go on.
fn held(remote: &Place, here: &Place) -> (Arc<StoredPages>, Receiver<()>, Sender<()>) {
    let remote_blobs = Some(remote.memory.clone() as Arc<dyn Blobs>);
    let options = SourceOptions { hot: HotChunks::new(1 << 20), remote: remote_blobs };
    let source = memory_of(&here.store, "top").source(options);
    let (begun, has_begun) = channel();
    let (go_on, may_go_on) = channel::<()>();
    remote.memory.at("get", "chunks/", move || {
        begun.send(()).expect("waited for");
        may_go_on.recv_timeout(Duration::from_secs(10)).expect("in time");
    });
    (source, has_begun, go_on)
}

fn chunk_of(store: &Store, page: u64) -> String {
    let memory = memory_of(store, "top");
    let window = memory.table().window_of(range(page, 1).start()).expect("it has one");
    window.hash.to_hex().to_string()
}

#[test]
fn what_is_preferred_is_fetched_first() {
    let (remote, here, guest) = adopted();
    let id = here.store.descriptor("top").expect("there").id;
    let missing = here.store.missing("top", 0).expect("there");
    missing.prefer(id, &Role::Memory, &[range(60, 4), range(4_000, 9)]);
    // What is preferred later is more urgent.
    missing.prefer(id, &Role::Memory, &[range(40, 1)]);
    here.store.fetch_chunks(&missing, &remote.store, &Work::new(1)).expect("fetched");
    let first: Vec<_> = [40, 60, 0].map(|page| chunk_of(&here.store, page)).into();
    assert_eq!(remote.memory.take_read()[..3], first);
    check(&here.store, "top", &guest);
}

#[test]
fn a_chunk_that_is_read_while_it_is_fetched_comes_once() {
    let (remote, here, guest) = adopted();
    let (source, has_begun, go_on) = held(&remote, &here);
    std::thread::scope(|scope| {
        let missing = here.store.missing("top", 0).expect("there");
        let (store, other) = (&here.store, &remote.store);
        let fetch = scope.spawn(move || store.fetch_chunks(&missing, other, &Work::new(1)));
        has_begun.recv_timeout(Duration::from_secs(10)).expect("in time");
        // It reads the chunk that comes just now.
        let read = scope.spawn(|| {
            let mut bytes = vec![0; PAGE];
            source.read(range(0, 1), &mut bytes).map(|()| bytes)
        });
        std::thread::park_timeout(Duration::from_millis(50));
        assert!(!read.is_finished());
        go_on.send(()).expect("waits");
        assert_eq!(read.join().expect("ended").expect("reads"), page_of(guest[0]));
        fetch.join().expect("ended").expect("fetched");
    });
    let mut read = remote.memory.take_read();
    let count = read.len();
    read.sort_unstable();
    read.dedup();
    assert_eq!(read.len(), count, "no chunk comes twice");
    let fetched = here.store.take_fetched();
    assert_eq!((fetched.waited, fetched.ahead), (0, count as u64));
    assert_eq!(here.store.take_fetched(), vmfork_store::Fetched::default());
}

#[test]
fn what_is_preferred_late_goes_before_what_has_no_turn_yet() {
    let (remote, here, guest) = adopted();
    let (source, has_begun, go_on) = held(&remote, &here);
    let id = here.store.descriptor("top").expect("there").id;
    let missing = here.store.missing("top", 0).expect("there");
    let chunk_pages = memory_of(&here.store, "top").table().chunk_pages();
    let next: Vec<_> = (1..4).map(|chunk| range(chunk * chunk_pages, 1)).collect();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| source.read(range(0, 1), &mut [0; PAGE]));
        has_begun.recv_timeout(Duration::from_secs(10)).expect("in time");
        // While that waits, one thread has a turn, and a chunk.
        let fetch = || here.store.fetch_chunks(&missing, &remote.store, &Work::new(4));
        let fetch = scope.spawn(fetch);
        std::thread::park_timeout(Duration::from_millis(50));
        // The threads that wait for a turn have picked none of the next ones.
        missing.prefer(id, &Role::Memory, &[range(200, 1)]);
        missing.prefer(id, &Role::Memory, &next);
        go_on.send(()).expect("waits");
        read.join().expect("ended").expect("reads");
        fetch.join().expect("ended").expect("fetched");
    });
    let mut came = remote.memory.take_read()[1..5].to_vec();
    came.sort_unstable();
    let preferred = next.iter().map(|run| run.start().0).chain([200]);
    let mut wanted: Vec<_> = preferred.map(|page| chunk_of(&here.store, page)).collect();
    wanted.sort_unstable();
    assert_eq!(came, wanted);
    check(&here.store, "top", &guest);
}

#[test]
fn fetching_replaces_what_is_torn_and_stops_when_told() {
    let (remote, [_, top]) = family();
    let here = place();
    here.store.adopt_from("top", &remote.store, "r", &Work::new(1)).expect("adopted");
    let torn = remote.memory.keys().into_iter().filter(|key| key.starts_with("chunks/"));
    here.memory.map.lock().expect("no panic").extend(torn.map(|key| (key, Vec::new())));
    let cancelled = Work::new(2);
    cancelled.cancelled.store(true, std::sync::atomic::Ordering::Relaxed);
    let error = here
        .store
        .fetch_chunks(&here.store.missing("top", 0).expect("there"), &remote.store, &cancelled)
        .expect_err("cancelled");
    assert!(matches!(error, StoreError::Cancelled));
    assert!(here.store.open("top").expect("opens").origin().is_some());
    // What was adopted is no reason to believe that a chunk is whole.
    create(&here.store, draft("other", &top), &top).expect("created");
    check(&here.store, "other", &top);
    here.store
        .fetch_chunks(&here.store.missing("top", 0).expect("there"), &remote.store, &Work::new(2))
        .expect("fetched");
    check(&here.store, "top", &top);
    let again =
        here.store.adopt_from("top", &remote.store, "r", &Work::new(1)).expect("here already");
    assert_eq!(again.origin(), None);
}

#[test]
fn an_import_mends_chunks_that_are_damaged_here() {
    let (from, [base, _]) = family();
    let to = place();
    create(&to.store, draft("equal", &base), &base).expect("created");
    let keys: Vec<_> =
        to.memory.keys().into_iter().filter(|key| key.starts_with("chunks/")).collect();
    for (key, bytes) in to.memory.map.lock().expect("no panic").iter_mut() {
        if *key == keys[0] {
            bytes[40] ^= 1;
        } else if *key == keys[1] {
            bytes.clear();
        }
    }
    import(&to.store, &export(&from.store, "base"), None).expect("imported");
    check(&to.store, "base", &base);
    check(&to.store, "equal", &base);
}

#[test]
fn what_is_adopted_anew_while_chunks_are_fetched_is_not_taken_for_complete() {
    let (other, _) = family();
    let (remote, here) = (place(), place());
    other.store.copy_to("top", &remote.store, &Work::new(1)).expect("pushed");
    // The same snapshot, with other chunks.
    remote.store.flatten("top", &Work::new(1)).expect("flattened");
    here.store.adopt_from("top", &remote.store, "r", &Work::new(1)).expect("adopted");
    let there = here.store.clone();
    remote.memory.at("get", "chunks/", move || {
        there.remove("top", false).expect("removed");
        there.adopt_from("top", &other.store, "other", &Work::new(1)).expect("adopted");
        there.collect().expect("collected");
    });
    let error = here
        .store
        .fetch_chunks(&here.store.missing("top", 0).expect("there"), &remote.store, &Work::new(1))
        .expect_err("another");
    assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    assert_eq!(here.store.origin("top").expect("reads").as_deref(), Some("other"));
}

#[test]
fn a_remote_chunk_that_is_damaged_is_neither_served_nor_kept() {
    let (remote, _) = family();
    let here = place();
    let stored = here.store.adopt_from("top", &remote.store, "r", &Work::new(1)).expect("adopted");
    for (key, bytes) in remote.memory.map.lock().expect("no panic").iter_mut() {
        if key.starts_with("chunks/") {
            bytes[40] ^= 1;
        }
    }
    let options = SourceOptions { hot: HotChunks::new(0), remote: Some(remote.memory.clone()) };
    let source = stored.image(&Role::Memory).expect("has one").source(options);
    let error = source.read(range(0, 1), &mut [0; PAGE]).expect_err("damaged");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    let error = here
        .store
        .fetch_chunks(&here.store.missing("top", 0).expect("there"), &remote.store, &Work::new(2))
        .expect_err("damaged");
    assert!(matches!(error, StoreError::Damaged(_)), "{error}");
    assert_eq!(here.memory.chunks(), 0);
}
