//! Snapshots of no VM, in a store that is one.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use tokio::sync::mpsc;
use vmfork_api::{ErrorCode, Happening, SnapshotState, TransferRequest};
use vmfork_image::{PageIdx, PageRange};
use vmfork_store::{
    BaseRef, Compression, Descriptor, Draft, Extent, ImageDraft, ReadImages, Role, Store,
    StoreError,
};

use crate::error::SnapshotError;
use crate::guest_images::Known;
use crate::keep;
use crate::library::{Library, Snapshots};
use crate::placing::Placed;
use crate::transfer;
use crate::under_way::{Doing, Listed, UnderWay};
use vmfork_fork::facts::Facts;
use vmfork_host::testing::{Host, SOON};

const PAGES: u64 = 256;

fn draft(name: &str, base: Option<&Descriptor>) -> Draft {
    Draft {
        name: name.to_owned(),
        id: None,
        images: vec![ImageDraft {
            role: Role::Memory,
            bytes: PAGES * 4096,
            base: base.map(|base| BaseRef {
                name: base.name.clone(),
                id: base.id,
                role: Role::Memory,
            }),
            extents: vec![(PageRange::between(PageIdx(0), PageIdx(PAGES)), Extent::Own)],
            compression: Compression::None,
            chunk_pages: 64,
            keep_zero_pages: false,
        }],
        state: b"devices".to_vec(),
        vm: serde_json::to_value(Facts::of_a_test(PAGES * 4096)).expect("plain"),
    }
}

/// Pages of `seed`, none like another.
fn pages(seed: u8) -> impl Fn(&Role, PageRange, &mut [u8]) -> io::Result<()> + Sync {
    move |_, range, bytes| {
        for (page, bytes) in (range.start().0..).zip(bytes.chunks_mut(4096)) {
            bytes.fill(seed);
            bytes[..8].copy_from_slice(&page.to_le_bytes());
        }
        Ok(())
    }
}

fn put(library: &Library, store: &Store, name: &str, seed: u8) -> Descriptor {
    store.create(draft(name, None), &pages(seed), &library.snapshots.work()).expect("stored")
}

/// Chunks in the store of a host.
fn chunks(library: &Library) -> usize {
    let root = Path::new(&library.snapshots.store.describe()).join("chunks");
    let folders = std::fs::read_dir(root).into_iter().flatten().flatten();
    folders.flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten()).count()
}

/// Wait for something that is looked for.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    let looks = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(SOON, looks).await.is_ok(), "{what}");
}

fn library(host: &Host) -> Arc<Library> {
    let snapshots = Arc::new(Snapshots::new(&host.folder().join("snapshots")).expect("made"));
    let forker = vmfork_fork::testing::forker(&host.core);
    Arc::new(Library { core: Arc::clone(&host.core), forker, snapshots })
}

fn taken(library: &Library, name: &str) -> Placed {
    let placed = library.snapshots.place(name, Doing::Write).expect("free");
    let facts = Facts::of_a_test(PAGES * 4096);
    placed.under_way.list(Listed { facts, base: None, disk_only: false });
    placed
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_write_leaves_that_failed_is_freed() {
    let host = Host::start().await;
    let library = &library(&host);
    let placed = taken(library, "warm");
    let full = |role: &Role, range: PageRange, bytes: &mut [u8]| match range.start().0 {
        0..128 => pages(1)(role, range, bytes),
        _ => Err(io::ErrorKind::StorageFull.into()),
    };
    let work = vmfork_store::Work::new(1);
    let failed = library.snapshots.store.create(draft("warm", None), &full, &work);
    let failed = SnapshotError::from(failed.expect_err("no space"));
    assert_eq!(chunks(library), 2);
    placed.ends(Some(&failed));
    let listed = library.snapshots.listed(&library.core, "warm").expect("listed");
    assert_eq!(listed.state, SnapshotState::Failed);
    assert!(listed.reason.is_some_and(|reason| reason.contains("read pages")));
    until("its chunks are freed", || chunks(library) == 0).await;
    assert_eq!(keep::remove(library, "warm", false).await.expect("removed").names, ["warm"]);
    let gone = keep::remove(library, "warm", false).await.expect_err("gone");
    assert_eq!(gone.code, ErrorCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_open_when_it_was_removed_is_freed_when_it_is_closed() {
    let host = Host::start().await;
    let library = &library(&host);
    put(library, &library.snapshots.store, "warm", 1);
    let open = library.snapshots.store.open("warm").expect("opens");
    keep::remove(library, "warm", false).await.expect("removed");
    assert_eq!(chunks(library), 4);
    drop(open);
    until("its chunks are freed", || chunks(library) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_panics_leaves_its_name_to_others() {
    let host = Host::start().await;
    let library = &library(&host);
    let placed = taken(library, "warm");
    let writing = tokio::task::spawn_blocking(move || {
        let _placed = placed;
        panic!("on purpose");
    });
    assert!(writing.await.is_err_and(|error| error.is_panic()));
    let listed = library.snapshots.listed(&library.core, "warm").expect("listed");
    assert_eq!(listed.state, SnapshotState::Failed);
    library.snapshots.check_written("warm").expect("not being written");
    taken(library, "warm").ends(None);
    assert!(library.snapshots.under_way().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_had_by_one_at_a_time() {
    let host = Host::start().await;
    let library = &library(&host);
    let placed = taken(library, "warm");
    for doing in [Doing::Write, Doing::Import, Doing::Pull] {
        let refused = library.snapshots.place("warm", doing).expect_err("taken");
        assert!(matches!(refused, SnapshotError::UnderWay { .. }), "{refused}");
        assert!(refused.to_string().contains("being written"), "{refused}");
    }
    // One that failed may be replaced, and its end does not end the next.
    let error = SnapshotError::from(StoreError::Busy { name: "x".to_owned() });
    placed.ends(Some(&error));
    let next = taken(library, "warm");
    let other = library.snapshots.place("cold", Doing::Import).expect("free");
    put(library, &library.snapshots.store, "warm", 1);
    drop((next, other));
    assert!(library.snapshots.under_way().is_empty());
    let refused = library.snapshots.place("warm", Doing::Write).expect_err("there");
    assert!(refused.to_string().contains("already"), "{refused}");
    assert!(library.snapshots.under_way().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_given_up_by_rm() {
    let host = Host::start().await;
    let library = &library(&host);
    let placed = taken(library, "warm");
    let work = Arc::clone(&placed.under_way.work);
    let writing = {
        let library = Arc::clone(library);
        tokio::task::spawn_blocking(move || {
            let work = Arc::clone(&placed.under_way.work);
            let slow = |role: &Role, range: PageRange, bytes: &mut [u8]| {
                let give_up = || work.cancelled.load(Ordering::Relaxed);
                while range.start().0 >= 64 && !give_up() {
                    std::hint::spin_loop();
                }
                pages(1)(role, range, bytes)
            };
            let outcome = library.snapshots.store.create(draft("warm", None), &slow, &work);
            let outcome = outcome.map_err(SnapshotError::from);
            placed.ends(outcome.as_ref().err());
            outcome
        })
    };
    until("a chunk is written", || work.done_bytes.load(Ordering::Relaxed) > 0).await;
    let removed = keep::remove(library, "warm", false).await.expect("removed");
    assert_eq!(removed.names, ["warm"]);
    assert!(writing.await.expect("no panic").expect_err("cancelled").is_cancelled());
    assert!(library.snapshots.under_way().is_empty());
    until("its chunks are freed", || chunks(library) == 0).await;
}

fn from(folder: &Path) -> TransferRequest {
    TransferRequest { location: folder.display().to_string(), wait: true }
}

/// A store elsewhere, with `base` and `warm`, which is a delta of that.
fn elsewhere(library: &Library) -> (TempDir, Store) {
    let folder = tempfile::tempdir().expect("folder");
    let store = Store::folder(folder.path()).expect("store");
    let base = put(library, &store, "base", 1);
    let work = library.snapshots.work();
    store.create(draft("warm", Some(&base)), &pages(2), &work).expect("stored");
    (folder, store)
}

fn lose_chunks(folder: &Path) {
    std::fs::rename(folder.join("chunks"), folder.join("lost")).expect("renamed");
}

fn find_chunks(folder: &Path) {
    std::fs::rename(folder.join("lost"), folder.join("chunks")).expect("renamed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_failed_says_so_until_it_is_done_again() {
    let host = Host::start().await;
    let library = &library(&host);
    let (folder, _store) = elsewhere(library);
    lose_chunks(folder.path());
    transfer::pull(library, "warm", from(folder.path())).await.expect_err("no chunks");
    for name in ["base", "warm"] {
        let listed = library.snapshots.listed(&library.core, name).expect("listed");
        assert_eq!(listed.state, SnapshotState::Pulling);
        assert!(listed.progress.done_bytes < listed.progress.total_bytes, "{listed:?}");
        let reason = listed.reason.expect("told");
        assert!(reason.contains("chunks/"), "{reason}");
    }
    // As a daemon that starts finds it.
    library.snapshots.pulls().clear();
    let listed = library.snapshots.listed(&library.core, "warm").expect("listed");
    assert!(listed.reason.is_some_and(|reason| reason.contains("interrupted")));
    assert_eq!(listed.progress.done_bytes, 0);

    find_chunks(folder.path());
    let pulled = transfer::pull(library, "warm", from(folder.path())).await.expect("pulled");
    assert_eq!((pulled.state, pulled.reason), (SnapshotState::Ready, None));
    assert!(library.snapshots.pulls().is_empty() && library.snapshots.under_way().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_goes_by_what_the_snapshot_is_called_here() {
    let host = Host::start().await;
    let library = &library(&host);
    let (folder, store) = elsewhere(library);
    let mut stream = Vec::new();
    store.export("base", &mut stream, &library.snapshots.work()).expect("exported");
    let (pieces_tx, pieces) = mpsc::channel(1);
    pieces_tx.send(Ok(stream.into())).await.expect("room");
    drop(pieces_tx);
    let imported =
        transfer::import(library, Some("web".to_owned()), pieces).await.expect("imported");
    assert_eq!(imported.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["web"]);

    let pulled = transfer::pull(library, "base", from(folder.path())).await.expect("it is here");
    assert_eq!((pulled.name.as_str(), pulled.state), ("web", SnapshotState::Ready));
    put(library, &library.snapshots.store, "base", 3);
    let refused = transfer::pull(library, "base", from(folder.path())).await.expect_err("another");
    assert_eq!(refused.code, ErrorCode::Conflict);
    let text = refused.to_string();
    assert!(text.contains("`web`") && text.contains("`base`"), "{text}");
}

/// What readers of events were told so far.
fn told(library: &Library) -> Vec<String> {
    let events = &library.core.events;
    let page = events.read(events.start()).expect("ours");
    let told = page.iter().map(|told| match &told.event.what {
        Happening::SnapshotStored { snapshot } => format!("+{}", snapshot.name),
        Happening::SnapshotRemoved { snapshot } => format!("-{}", snapshot.name),
        other => panic!("{other:?} is of no snapshot"),
    });
    told.collect()
}

/// As [`create::create`] and `pull` do, without a VM.
fn written(library: &Library, name: &str, read: &ReadImages<'_>) {
    let placed = taken(library, name);
    let work = Arc::clone(&placed.under_way.work);
    library.tell().stored_by(&work);
    let outcome = library.snapshots.store.create(draft(name, None), read, &work);
    let outcome = outcome.map_err(SnapshotError::from);
    placed.ends(outcome.as_ref().err());
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_are_told_of_each_snapshot_that_comes_and_goes_once() {
    let host = Host::start().await;
    let library = &library(&host);
    written(library, "warm", &pages(1));
    assert_eq!(told(library), ["+warm"]);
    written(library, "full", &|_, _, _| Err(io::ErrorKind::StorageFull.into()));
    keep::remove(library, "full", false).await.expect("the failed one is forgotten");
    assert_eq!(told(library), ["+warm"], "what never was in the store is not told");
    // The second time it is here already.
    let elsewhere = tempfile::tempdir().expect("folder");
    let other = Store::folder(elsewhere.path()).expect("made");
    put(library, &other, "cold", 2);
    let location = elsewhere.path().to_str().expect("text").to_owned();
    for _ in 0..2 {
        let request = TransferRequest { location: location.clone(), wait: true };
        transfer::pull(library, "cold", request).await.expect("pulled");
    }
    assert_eq!(told(library), ["+warm", "+cold"]);
    keep::remove(library, "warm", false).await.expect("removed");
    keep::remove(library, "warm", false).await.expect_err("gone");
    assert_eq!(told(library), ["+warm", "+cold", "-warm"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_snapshot_is_told_before_it_can_be_removed_and_a_base_before_its_delta_comes() {
    let host = Host::start().await;
    let library = &library(&host);
    let (folder, _store) = elsewhere(library);
    let other = Store::folder(folder.path()).expect("made");
    let (work, found) = (library.snapshots.work(), Arc::new(Mutex::new(Vec::new())));
    let (store, seen) = (library.snapshots.store.clone(), Arc::clone(&found));
    work.on_stored(move |name| {
        let is_busy = matches!(store.remove(name, true), Err(StoreError::Busy { .. }));
        let has_delta = store.descriptor("warm").is_ok();
        seen.lock().expect("lock").push((name.to_owned(), is_busy, has_delta));
    });
    library.snapshots.store.adopt_from("warm", &other, "elsewhere", &work).expect("adopted");
    let expected = [("base".to_owned(), true, false), ("warm".to_owned(), true, true)];
    assert_eq!(*found.lock().expect("lock"), expected);
}

/// Files of a store of folders, by their keys.
fn keys(library: &Library, below: &str) -> Vec<String> {
    let root = Path::new(&library.snapshots.store.describe()).join(below);
    let files = std::fs::read_dir(root).expect("a folder").map(|entry| entry.expect("read"));
    files.map(|file| format!("{below}/{}", file.file_name().display())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn other_hosts_get_the_files_of_guest_images_alone() {
    let host = Host::start().await;
    let library = &library(&host);
    let store = &library.snapshots.store;
    put(library, store, "warm", 1);
    let mut image = draft("web", None);
    image.images[0].role = Role::Disk("root".parse().expect("a name"));
    image.state = Vec::new();
    image.vm = serde_json::json!({ "guest_image": { "name": "web" } });
    store.create(image, &pages(2), &library.snapshots.work()).expect("stored");
    let (of_image, of_vm) = (keys(library, "snapshots/web"), keys(library, "snapshots/warm"));
    assert!(of_image.len() >= 2 && of_vm.len() >= 3, "{of_image:?}, {of_vm:?}");
    for key in of_image {
        library.give(&key).expect("of a guest image");
    }
    // Where this host has it from is not told.
    let table = keys(library, "snapshots/web").into_iter().find(|key| key.ends_with(".table"));
    let origin = table.expect("one").replace(".table", ".origin");
    std::fs::write(Path::new(&store.describe()).join(&origin), b"s3://elsewhere").expect("written");
    let hidden = ["snapshots/../format.json", "/etc/passwd", "", &origin];
    for key in of_vm.iter().map(String::as_str).chain(hidden) {
        library.give(key).expect_err(key);
    }
    assert!(library.stored_image(Known::Id(store.descriptor("warm").expect("there").id)).is_none());
}

#[test]
fn what_clients_wait_for_is_given_up_with_the_last_one() {
    let one = || Arc::new(UnderWay::new("web", Doing::Pull, Arc::new(vmfork_store::Work::new(1))));
    let under_way = one();
    let waiters = [under_way.wait(), under_way.wait()];
    let [first, second] = waiters;
    drop(first);
    assert!(under_way.goes_on());
    drop(second);
    assert!(!under_way.goes_on());
    // One that does not wait wants it to its end.
    let under_way = one();
    let waiter = under_way.wait();
    under_way.want();
    drop(waiter);
    assert!(under_way.goes_on());
}
