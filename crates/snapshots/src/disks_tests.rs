//! Stored disks against arrays of bytes.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vmfork_disk::{DiskSet, DiskSpec as NewDisk, DiskStore, Lower, StoreOptions};
use vmfork_fork::facts::Facts;
use vmfork_host::disks::{DiskSpec, StoredBases};
use vmfork_host::testing::{Host, SOON};
use vmfork_host::vm::DriveSpec;
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};
use vmfork_nbd::Span;
use vmfork_store::{BaseRef, Compression, Descriptor, Draft, Extent, ImageDraft, Role, Work};

use super::image_id;
use crate::keep;
use crate::library::{Library, Snapshots};

/// The last page is one in part.
const BYTES: usize = 300 * 4096 - 1536;
const PAGES: u64 = 300;

/// Numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % most
    }
}

fn at(bytes: u64) -> usize {
    usize::try_from(bytes).expect("small")
}

fn role() -> Role {
    "disk:data".parse().expect("a role")
}

fn facts() -> Facts {
    let mut facts = Facts::of_a_test(PAGES * PAGE_BYTES);
    let (name, size_bytes) = ("data".to_owned(), BYTES as u64);
    let disk = DiskSpec {
        name,
        size_bytes,
        durability: vmfork_api::Durability::Host,
        volume: None,
        empty: false,
        read_only: false,
    };
    facts.inherited.spec.drives = vec![DriveSpec::Disk(disk)];
    facts
}

/// A snapshot of empty memory and of a disk with these bytes, of which `changed` differ from the
/// base.
fn put(
    snapshots: &Snapshots,
    name: &str,
    base: Option<&Descriptor>,
    (model, changed): (&[u8], &[(PageRange, Extent)]),
) -> Descriptor {
    let on = |role: &Role| {
        let role = role.clone();
        base.map(|base| BaseRef { name: base.name.clone(), id: base.id, role })
    };
    let image = |role: Role, bytes: u64, extents: Vec<(PageRange, Extent)>| ImageDraft {
        bytes,
        base: on(&role),
        extents,
        compression: Compression::Zstd { level: 1 },
        chunk_pages: 16,
        keep_zero_pages: false,
        role,
    };
    let draft = Draft {
        name: name.to_owned(),
        id: None,
        images: vec![
            image(Role::Memory, PAGES * PAGE_BYTES, Vec::new()),
            image(role(), BYTES as u64, changed.to_vec()),
        ],
        state: b"devices".to_vec(),
        vm: serde_json::to_value(facts()).expect("plain"),
    };
    let read = |_: &Role, range: PageRange, bytes: &mut [u8]| -> io::Result<()> {
        let from = at(range.byte_offset());
        let len = bytes.len().min(model.len() - from);
        bytes[..len].copy_from_slice(&model[from..from + len]);
        bytes[len..].fill(0);
        Ok(())
    };
    snapshots.store.create(draft, &read, &Work::new(1)).expect("stored")
}

/// Changes runs of pages of the model. → what it changed, ascending.
fn change(model: &mut [u8], random: &mut Random) -> Vec<(PageRange, Extent)> {
    let (mut changed, mut page) = (Vec::new(), 0);
    loop {
        page += random.below(40);
        let len = 1 + random.below(20);
        if page + len > PAGES {
            return changed;
        }
        let run = PageRange::new(PageIdx(page), len).expect("small");
        let zeros = random.below(3) == 0;
        for page in run.pages() {
            let from = at(page.0 * PAGE_BYTES);
            let to = (from + 4096).min(model.len());
            let seed = random.below(251) + 1;
            for (place, byte) in (0_u64..).zip(&mut model[from..to]) {
                let value = (place + seed) % 251;
                *byte = if zeros { 0 } else { u8::try_from(value).expect("below 251") };
            }
        }
        changed.push((run, if zeros { Extent::Zero } else { Extent::Own }));
        page += len;
    }
}

/// A line of snapshots, each a delta on the one before, with what each of their disks has.
fn line(snapshots: &Snapshots, seed: u64) -> Vec<(Descriptor, Vec<u8>)> {
    let (mut random, mut model) = (Random(seed), vec![0; BYTES]);
    let mut made: Vec<(Descriptor, Vec<u8>)> = Vec::new();
    for number in 0..4 {
        let mut changed = change(&mut model, &mut random);
        if number == 0 {
            changed.retain(|(_, extent)| *extent == Extent::Own);
        }
        let base = made.last().map(|(descriptor, _)| descriptor.clone());
        let name = format!("s{number}");
        let stored = put(snapshots, &name, base.as_ref(), (&model, &changed));
        made.push((stored, model.clone()));
    }
    made
}

fn read(image: &dyn Lower, range: PageRange) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0xee; at(range.byte_len())];
    image.read(range, &mut bytes).map(|()| bytes)
}

/// The pages of a model, with zeros behind its end.
fn wanted(model: &[u8], range: PageRange) -> Vec<u8> {
    let from = at(range.byte_offset());
    let mut bytes = model[from..(from + at(range.byte_len())).min(model.len())].to_vec();
    bytes.resize(at(range.byte_len()), 0);
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_disk_has_the_bytes_that_were_frozen_in_any_delta() {
    let folder = tempfile::tempdir().expect("a folder");
    for seed in 1..6 {
        let snapshots = Snapshots::new(&folder.path().join(seed.to_string())).expect("made");
        let mut random = Random(seed * 77);
        for (descriptor, model) in line(&snapshots, seed) {
            let image = snapshots.image(image_id(descriptor.id, &role())).expect("found");
            assert_eq!(image.size_bytes(), BYTES as u64);
            for _ in 0..40 {
                let start = random.below(PAGES);
                let len = 1 + random.below((PAGES - start).min(50));
                let range = PageRange::new(PageIdx(start), len).expect("within");
                let found = read(&image, range).expect("read");
                assert!(found == wanted(&model, range), "seed {seed}, {range}");
            }
            image.runs(PageRange::first(PAGES), &mut |run, zero| {
                for page in run.pages() {
                    let is_zero = wanted(&model, page.range()).iter().all(|byte| *byte == 0);
                    assert_eq!(zero, is_zero, "page {page}: what is zeros needs no read");
                }
            });
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_in_memory_is_read_without_waiting() {
    let folder = tempfile::tempdir().expect("a folder");
    let snapshots = Snapshots::new(folder.path()).expect("made");
    // Each page has its number, so that no two chunks are one.
    let page = |at: usize| u8::try_from(at / 4096 % 251).expect("small");
    let model: Vec<u8> = (0..BYTES).map(|at| page(at) ^ 0x55).collect();
    let all = [(PageRange::first(PAGES), Extent::Own)];
    let stored = put(&snapshots, "full", None, (&model, &all));
    let image = snapshots.image(image_id(stored.id, &role())).expect("found");
    let pages = |start, len| PageRange::new(PageIdx(start), len).expect("within");
    assert!(!image.is_here(pages(0, 1)));
    read(&image, pages(3, 2)).expect("read");
    assert!(image.is_here(pages(0, 16)), "its chunk is decompressed");
    assert!(!image.is_here(pages(15, 2)), "the next one is not");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_chunk_is_an_error_that_says_where() {
    let folder = tempfile::tempdir().expect("a folder");
    let snapshots = Snapshots::new(folder.path()).expect("made");
    let mut model = vec![0; BYTES];
    let mut random = Random(5);
    let changed: Vec<_> = change(&mut model, &mut random);
    let own: Vec<_> = changed.into_iter().filter(|(_, kind)| *kind == Extent::Own).collect();
    let stored = put(&snapshots, "warm", None, (&model, &own));
    damage(&folder.path().join("chunks"));
    let image = snapshots.image(image_id(stored.id, &role())).expect("its tables are whole");
    let (run, _) = own.first().expect("some");
    let failed = read(&image, run.truncate(1)).expect_err("damaged").to_string();
    for says in ["disk:data", "snapshot `warm`", "chunks/", &format!("pages {}", run.truncate(1))] {
        assert!(failed.contains(says), "{failed}");
    }
    assert!(!snapshots.store.verify("warm", &Work::new(1)).expect("read").damage.is_empty());
}

/// Changes the last byte of each chunk.
fn damage(chunks: &Path) {
    for folder in std::fs::read_dir(chunks).expect("there").flatten() {
        for file in std::fs::read_dir(folder.path()).expect("a folder").flatten() {
            let mut bytes = std::fs::read(file.path()).expect("read");
            *bytes.last_mut().expect("not empty") ^= 1;
            std::fs::write(file.path(), bytes).expect("written");
        }
    }
}

/// The next daemon reads what an earlier one left of a disk. Meanwhile the snapshot that it lies on
/// was made whole, and the base of that was removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_was_left_finds_its_stored_base_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let (stored, layers) = (folder.path().join("snapshots"), folder.path().join("disks"));
    let options = StoreOptions { floor_bytes: 0 };
    let span = |page: u64| Span { offset_bytes: page * PAGE_BYTES, len_bytes: 4096 };
    let model = {
        let snapshots = Snapshots::new(&stored).expect("made");
        let (descriptor, mut model) = line(&snapshots, 9).pop().expect("some");
        let image = snapshots.image(image_id(descriptor.id, &role())).expect("found");
        let store = DiskStore::open(&layers, options).expect("a store");
        let (name, vm) = ("data".to_owned(), "web".to_owned());
        let new = NewDisk { name, vm, size_bytes: BYTES as u64, set: DiskSet::new(None) };
        let disk = store.create(&new, &image).expect("a disk");
        for page in [0, 17, 298] {
            disk.write(span(page), &[9; 4096]).expect("written");
            model[at(page * PAGE_BYTES)..][..4096].fill(9);
            // The second layer lies on a table, which names the stored disk.
            disk.freeze().expect("frozen");
        }
        let part = Span { offset_bytes: 100 * PAGE_BYTES + 512, len_bytes: 512 };
        disk.write(part, &[8; 512]).expect("written, and the rest of its page read");
        model[at(part.offset_bytes)..][..512].fill(8);
        store.drain();
        store.keep_all();
        model
    };
    for life in 0..2 {
        let snapshots = Snapshots::new(&stored).expect("there");
        if life == 1 {
            snapshots.store.flatten("s3", &Work::new(1)).expect("made whole");
            for base in ["s2", "s1", "s0"] {
                snapshots.store.remove(base, false).expect("not needed");
            }
        }
        let store = DiskStore::open(&layers, options).expect("a store");
        let [found] = store.disks().expect("read").try_into().expect("one");
        let given = |id| snapshots.image(id);
        let image = store.image(found.newest, &given).expect("whole");
        let all = PageRange::first(PAGES);
        assert!(read(&image, all).expect("read") == wanted(&model, all), "life {life}");
        store.keep_all();
    }
    let store = DiskStore::open(&layers, options).expect("a store");
    let [found] = store.disks().expect("read").try_into().expect("one");
    let refused = store.image(found.newest, &|_| None).expect_err("its base is unknown");
    assert!(refused.to_string().contains("stored snapshot"), "{refused}");
}

fn library(host: &Host) -> Arc<Library> {
    let snapshots = Arc::new(Snapshots::new(&host.folder().join("snapshots")).expect("made"));
    host.core.disks.know_stored(Arc::<Snapshots>::clone(&snapshots));
    let forker = vmfork_fork::testing::forker(&host.core);
    Arc::new(Library { core: Arc::clone(&host.core), forker, snapshots })
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_snapshot_without_memory_vms_get_the_disks_alone() {
    let host = Host::start().await;
    let library = &library(&host);
    let snapshots = &library.snapshots;
    let mut model = vec![0; BYTES];
    let changed = change(&mut model, &mut Random(7));
    let with_memory = put(snapshots, "all", None, (&model, &changed));
    assert!(library.disks_to_boot("all").expect("it opens").is_none(), "it need not boot");

    let (state, vm) = (Vec::new(), with_memory.vm.clone());
    let on = BaseRef { name: "all".to_owned(), id: with_memory.id, role: role() };
    let image = ImageDraft {
        role: role(),
        bytes: BYTES as u64,
        base: Some(on),
        extents: Vec::new(),
        compression: Compression::Zstd { level: 1 },
        chunk_pages: 16,
        keep_zero_pages: false,
    };
    let draft = Draft { name: "disks".to_owned(), id: None, images: vec![image], state, vm };
    let none = |_: &Role, _: PageRange, _: &mut [u8]| Err(io::Error::other("it is a delta"));
    snapshots.store.create(draft, &none, &Work::new(1)).expect("stored");

    let stored = library.disks_to_boot("disks").expect("it opens").expect("no memory");
    let [content] = &stored.contents[..] else { panic!("one disk: {stored:?}") };
    let mut bytes = vec![1; at(PAGES * PAGE_BYTES)];
    content.image.read(PageRange::first(PAGES), &mut bytes).expect("read");
    assert!(bytes[..BYTES] == model[..], "other bytes than were stored");
    let bases = stored.came_of.get::<crate::bases::Bases>().expect("of the disks");
    assert_eq!(bases.name(), Some("disks"), "the next snapshot is a delta on it");
    let listed = snapshots.listed(&library.core, "disks").expect("listed");
    assert!(listed.disk_only && !snapshots.listed(&library.core, "all").expect("it").disk_only);
    assert_eq!(listed.memory_mib, (PAGES * PAGE_BYTES) >> 20);
    snapshots.open(&library.core, "disks").expect_err("there is nothing to go on from");
    let missing = library.disks_to_boot("nope").expect_err("there is none");
    assert_eq!(missing.code, vmfork_api::ErrorCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_stays_as_long_as_a_disk_reads_from_it() {
    let host = Host::start().await;
    let library = &library(&host);
    line(&library.snapshots, 3);
    let opened = library.snapshots.open(&library.core, "s3").expect("opens");
    assert_eq!(opened.disks.len(), 1);
    let on = opened.bases("s3").image(&role(), PAGES).map(|(base, _)| base.name);
    assert_eq!(on.as_deref(), Some("s3"));
    let _vm = host.vm("web", None);
    let uid = rustix::process::getuid().as_raw();
    let machine = library.core.disks.attach("web", uid, &opened.disks).expect("served");
    drop(opened);
    for (name, cascade) in [("s3", false), ("s0", true)] {
        let refused = keep::remove(library, name, cascade).await.expect_err("needed");
        assert_eq!(refused.code, vmfork_api::ErrorCode::Conflict, "{refused}");
        assert!(refused.to_string().contains("the disk `web/data`"), "{refused}");
        assert!(refused.remedy.is_some_and(|remedy| remedy.contains("vmfork disk rm")));
    }
    let frozen = machine.as_ref().expect("disks").freeze().expect("frozen");
    drop(machine);
    let refused = keep::remove(library, "s3", false).await.expect_err("a clone may begin with it");
    assert!(refused.to_string().contains("the disk `web/data`"), "{refused}");
    drop(frozen);
    // Its layers go in the background.
    let removed = async {
        while keep::remove(library, "s3", false).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, removed).await.expect("no disk needs it any more");
    keep::remove(library, "s2", false).await.expect("none needs this");
}

/// From when it is opened: a VM that boots with it makes files of its own some time later.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_a_vm_is_to_begin_with_keeps_its_snapshot() {
    let host = Host::start().await;
    let library = &library(&host);
    let model = line(&library.snapshots, 5).pop().expect("some").1;
    let all = PageRange::first(PAGES);
    let image = library.snapshots.disk("s3", "data").expect("there");
    assert!(read(&image, all).expect("read") == wanted(&model, all));
    for (name, cascade) in [("s3", false), ("s0", true)] {
        let refused = keep::remove(library, name, cascade).await.expect_err("needed");
        assert_eq!(refused.code, vmfork_api::ErrorCode::Conflict, "{refused}");
        assert!(refused.to_string().contains("VMs that are being started"), "{refused}");
    }
    drop(image);
    keep::remove(library, "s3", false).await.expect("nothing reads from it");
    let refused = |name, disk| library.snapshots.disk(name, disk).expect_err("there is none");
    let error = refused("s3", "data");
    assert_eq!(error.code, vmfork_api::ErrorCode::NotFound, "{error}");
    let error = refused("s2", "other");
    assert_eq!(error.code, vmfork_api::ErrorCode::NotFound, "{error}");
    assert_eq!(error.cause, "the snapshot `s2` has no disk `other`");
    assert!(error.remedy.is_some_and(|remedy| remedy.contains("snapshot inspect s2")));
    assert_eq!(refused("s2", "memory").code, vmfork_api::ErrorCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_left_disk_keeps_its_snapshot_until_it_is_removed() {
    let host = Host::start().await;
    let library = &library(&host);
    line(&library.snapshots, 4);
    let disks = &library.core.disks;
    let left = {
        let opened = library.snapshots.open(&library.core, "s1").expect("opens");
        let machine = disks.attach("web", rustix::process::getuid().as_raw(), &opened.disks);
        let all = disks.list().expect("read");
        disks.keep_all();
        drop(machine.expect("served"));
        all.first().expect("one").id.clone()
    };
    let refused = keep::remove(library, "s1", true).await.expect_err("needed");
    assert!(refused.to_string().contains("the disk `web/data`"), "{refused}");
    disks.remove(&left).expect("no VM has it");
    keep::remove(library, "s1", true).await.expect("no disk needs it any more");
}
