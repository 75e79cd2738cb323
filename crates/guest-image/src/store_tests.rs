//! Whole or not at all, whatever happens when.

use std::collections::BTreeMap;

use super::*;
use crate::metadata::FileInfo;
use crate::remedy::Remedy as _;

fn metadata(name: &str, kernel: &[u8]) -> Metadata {
    let info = FileInfo {
        size_bytes: kernel.len() as u64,
        blake3: blake3::hash(kernel).to_hex().to_string(),
    };
    Metadata {
        schema: SCHEMA.into(),
        name: name.into(),
        created_unix_ms: 1,
        origin: "test".into(),
        kernel_version: "6.1".into(),
        cmdline: String::new(),
        packages: Vec::new(),
        agent: false,
        default_memory_mib: 512,
        vmgenid: None,
        root_overlay: false,
        root_disk: false,
        root_pmem: false,
        input_hash: None,
        tree_hash: None,
        root_stored: None,
        root_object: None,
        seeded: None,
        files: BTreeMap::from([(KERNEL_FILE.to_owned(), info)]),
    }
}

fn put(store: &Store, name: &str, kernel: &[u8]) {
    let staging = store.stage(name).unwrap();
    fs::write(staging.path().join(KERNEL_FILE), kernel).unwrap();
    store.commit(staging, &metadata(name, kernel)).unwrap();
}

fn hidden(store: &Store) -> usize {
    let names = fs::read_dir(store.root()).unwrap().flatten().map(|e| e.file_name());
    names.filter(|n| n.to_string_lossy().starts_with(TMP_PREFIX)).count()
}

#[test]
fn other_users_cannot_reach_images_by_path_but_qemu_can_by_descriptor() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("images");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    // As an earlier version, or `mkdir`, left it.
    fs::create_dir(&root).unwrap();
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
    let store = Store::new(&root);
    put(&store, "web", b"secret");
    assert_eq!(mode(&root), 0o700);
    // /proc/self/fd/N asks for this alone.
    assert_eq!(mode(&root.join("web").join(KERNEL_FILE)), 0o644);
}

#[test]
fn an_image_appears_is_replaced_and_goes() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path().join("images"));
    assert!(store.list().unwrap().is_empty());
    put(&store, "web", b"one");
    put(&store, "web", b"three");
    put(&store, "a", b"x");
    let names: Vec<_> = store.list().unwrap().into_iter().map(|m| m.name).collect();
    assert_eq!(names, ["a", "web"]);
    let files = store.open("web").unwrap();
    assert_eq!(io::read_to_string(files.kernel.as_ref().unwrap()).unwrap(), "three");
    assert!(files.initrd.is_none());
    store.remove("web").unwrap();
    assert!(matches!(store.remove("web"), Err(StoreError::NotFound { .. })));
    assert!(matches!(store.open("web"), Err(StoreError::NotFound { .. })));
    assert_eq!(hidden(&store), 0);
}

#[test]
fn open_files_outlive_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    put(&store, "web", b"bytes");
    let files = store.open("web").unwrap();
    store.remove("web").unwrap();
    assert_eq!(io::read_to_string(files.kernel.as_ref().unwrap()).unwrap(), "bytes");
}

#[test]
fn a_build_that_is_given_up_leaves_the_old_image_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    put(&store, "web", b"old");
    let staging = store.stage("web").unwrap();
    fs::write(staging.path().join(KERNEL_FILE), b"half").unwrap();
    drop(staging);
    assert_eq!(io::read_to_string(store.open("web").unwrap().kernel.unwrap()).unwrap(), "old");
    assert_eq!(hidden(&store), 0);
}

#[test]
fn the_next_build_sweeps_away_what_a_dead_one_left_but_not_a_live_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let live = store.stage("live").unwrap();
    let dead = dir.path().join(".tmp-web-99999-0");
    fs::create_dir_all(dead.join("root/etc")).unwrap();
    let other = store.stage("web").unwrap();
    assert!(!dead.exists());
    assert!(live.path().exists() && other.path().exists());
}

#[test]
fn files_are_world_readable() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let staging = store.stage("web").unwrap();
    let path = staging.path().join(KERNEL_FILE);
    fs::write(&path, b"k").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    store.commit(staging, &metadata("web", b"k")).unwrap();
    for name in [KERNEL_FILE, METADATA_FILE] {
        let mode = fs::metadata(dir.path().join("web").join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "{name}");
    }
}

#[test]
fn names_that_leave_the_folder_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    for name in ["..", "a/b", "", ".tmp-x"] {
        assert!(matches!(store.open(name), Err(StoreError::BadName { .. })), "{name}");
        assert!(matches!(store.remove(name), Err(StoreError::BadName { .. })), "{name}");
        assert!(matches!(store.stage(name), Err(StoreError::BadName { .. })), "{name}");
    }
}

#[test]
fn a_damaged_image_is_named_and_can_be_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    put(&store, "web", b"bytes");
    fs::write(dir.path().join("web").join(KERNEL_FILE), b"byt").unwrap();
    let error = store.open("web").unwrap_err();
    assert_eq!(error.to_string(), "image `web` is damaged: kernel has 3 bytes, not 5");
    assert!(error.remedy().unwrap().contains("vmfork image rm web"));
    fs::write(dir.path().join("web").join(METADATA_FILE), b"{").unwrap();
    assert!(matches!(store.open("web"), Err(StoreError::Damaged { .. })));
    assert!(store.list().unwrap().is_empty());
    store.remove("web").unwrap();
}

#[test]
fn where_other_hosts_pull_it_from_is_said_of_the_same_image_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    put(&store, "web", b"bytes");
    let first = store.metadata("web").unwrap();
    assert!(first.stored().is_none() && !first.to_api().seeded);
    assert!(store.set_seeded(&first, Some("web".to_owned())).unwrap());
    let seeded = store.metadata("web").unwrap();
    assert!(seeded.to_api().seeded && seeded.stored().is_some_and(|stored| stored == "web"));
    assert!(store.open("web").is_ok());
    // Another build has taken its place.
    put(&store, "web", b"other bytes");
    assert!(!store.set_seeded(&seeded, None).unwrap());
    assert!(store.metadata("web").unwrap().seeded.is_none());
    store.remove("web").unwrap();
    assert!(matches!(store.set_seeded(&first, None), Err(StoreError::NotFound { .. })));
}

#[test]
fn profiles_belong_to_an_image_and_stay_when_its_root_becomes_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    put(&store, "web", b"one");
    let web = store.metadata("web").unwrap();
    assert_eq!(store.profiles("web").unwrap(), b"");
    assert!(store.set_profiles(&web, b"learnt").unwrap());
    let staging = store.stage("web").unwrap();
    fs::write(staging.path().join(KERNEL_FILE), b"one").unwrap();
    assert!(store.commit_over(&staging, &web).unwrap());
    assert_eq!(store.profiles("web").unwrap(), b"learnt");
    // Another build has taken its place.
    put(&store, "web", b"two");
    assert_eq!(store.profiles("web").unwrap(), b"");
    assert!(!store.set_profiles(&web, b"late").unwrap());
    store.remove("web").unwrap();
    assert!(matches!(store.set_profiles(&web, b""), Err(StoreError::NotFound { .. })));
}
