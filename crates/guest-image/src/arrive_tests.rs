//! All of it as described, or nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;

use super::*;
use crate::error::StoreError;

fn info(content: &[u8]) -> FileInfo {
    FileInfo {
        size_bytes: content.len() as u64,
        blake3: blake3::hash(content).to_hex().to_string(),
    }
}

fn described(name: &str, files: &[(&str, &[u8])]) -> Metadata {
    Metadata {
        schema: SCHEMA.into(),
        name: name.into(),
        created_unix_ms: 1,
        origin: "test".into(),
        kernel_version: "6.1".into(),
        cmdline: String::new(),
        packages: Vec::new(),
        agent: true,
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
        files: files.iter().map(|(name, content)| ((*name).to_owned(), info(content))).collect(),
    }
}

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("images"));
    (folder, store)
}

fn entries(store: &Store) -> Vec<String> {
    let entries = fs::read_dir(store.root()).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != ".lock").collect();
    names.sort();
    names
}

/// All of an image, in pieces.
fn take(store: &Store, name: &str, files: &[(&str, &[u8])]) -> Result<String, ArrivalError> {
    let mut arrival = store.arrive(described(name, files))?;
    for (name, content) in files {
        let mut file = arrival.begin(name)?;
        content.chunks(70_001).try_for_each(|piece| file.write(piece))?;
        arrival.end(file)?;
    }
    arrival.commit()
}

#[test]
fn an_image_is_the_same_where_it_arrives_and_its_holes_are_holes() {
    let (_folder, store) = store();
    let mut root = vec![0; 4 << 20];
    root[3 << 20] = 7;
    let files: [(&str, &[u8]); 3] = [("kernel", b"k"), ("initrd", b"i"), ("root.img", &root)];
    assert_eq!(take(&store, "web", &files).unwrap(), "web");
    let opened = store.open("web").unwrap();
    assert_eq!(opened.metadata, described("web", &files));
    assert!(fs::read(opened.folder.join("root.img")).unwrap() == root);
    let taken = fs::metadata(opened.folder.join("root.img")).unwrap().blocks() * 512;
    assert!(taken < 1 << 20, "{taken} bytes");
    assert_eq!(entries(&store), ["web"]);
    let hash = blake3::hash(&root).to_hex();
    for name in ["web", "other", "../web", ""] {
        let found = store.open_root(name, &hash).unwrap().expect("it is there");
        assert_eq!(found.metadata.name, "web");
        assert!(found.file("initrd").is_some());
    }
    assert!(store.open_root("web", &hash[1..]).unwrap().is_none());
}

#[test]
fn another_image_of_that_name_stays_and_the_new_one_gets_another() {
    let (_folder, store) = store();
    let long = "w".repeat(63);
    for name in ["web", &long] {
        let one: &[(&str, &[u8])] = &[("root.img", b"one")];
        let root = format!("two of {name}");
        let two: &[(&str, &[u8])] = &[("root.img", root.as_bytes())];
        let hash = info(root.as_bytes()).blake3;
        assert_eq!(take(&store, name, one).unwrap(), name);
        let second = take(&store, name, two).unwrap();
        assert_eq!(second, format!("{}-{}", &name[..name.len().min(50)], &hash[..12]));
        assert_eq!(store.metadata(name).unwrap().files["root.img"], info(b"one"));
        assert_eq!(store.metadata(&second).unwrap().name, second);
        // What is there already is not there twice.
        assert_eq!(take(&store, name, two).unwrap(), second);
        assert_eq!(take(&store, name, one).unwrap(), name);
        let found = store.open_root(name, &hash).unwrap().unwrap();
        assert_eq!(found.metadata.name, second);
    }
    let three: &[(&str, &[u8])] = &[("root.img", b"three")];
    let word = &info(b"three").blake3[..12];
    take(&store, &format!("web-{word}"), &[("root.img", b"four")]).unwrap();
    let error = take(&store, "web", three).unwrap_err();
    let text = format!("other images already have the names `web` and `web-{word}`");
    assert_eq!(error.to_string(), text);
    assert_eq!(entries(&store).iter().filter(|name| name.starts_with('.')).count(), 0);
}

#[test]
fn what_is_not_as_described_leaves_nothing() {
    let (_folder, store) = store();
    let content: &[u8] = b"right";
    let begin = || store.arrive(described("web", &[("kernel", b"k"), ("root.img", content)]));
    let end_with = |bytes: &[u8]| {
        let mut arrival = begin().unwrap();
        let mut file = arrival.begin("root.img").unwrap();
        file.write(bytes).and_then(|()| arrival.end(file)).unwrap_err().to_string()
    };
    assert_eq!(end_with(b"righ"), "`root.img` has 5 bytes, but 4 bytes arrived");
    assert_eq!(end_with(b"rights"), "`root.img` has 5 bytes, but 6 bytes arrived");
    assert!(end_with(b"wrong").starts_with("`root.img` arrived damaged: its hash is "));
    let mut arrival = begin().unwrap();
    let mut file = arrival.begin("root.img").unwrap();
    file.write(content).unwrap();
    arrival.end(file).unwrap();
    assert_eq!(arrival.commit().unwrap_err().to_string(), "`kernel` did not arrive");
    assert!(entries(&store).is_empty());
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn a_description_of_no_image_is_refused() {
    let (_folder, store) = store();
    let why = |metadata: Metadata| match store.arrive(metadata).unwrap_err() {
        ArrivalError::NoImage { why } => why,
        error => panic!("{error}"),
    };
    let good = || described("web", &[("kernel", b"k")]);
    assert_eq!(why(Metadata { name: "../x".into(), ..good() }), "`../x` is not a valid image name");
    let other = Metadata { schema: "vmfork-guest-image/9".into(), ..good() };
    assert_eq!(why(other), "its layout is vmfork-guest-image/9, not vmfork-guest-image/1");
    for name in ["../evil", "image.json", "", "/etc/passwd"] {
        let files: [(&str, &[u8]); 2] = [("kernel", b"k"), (name, b"x")];
        assert_eq!(why(described("web", &files)), format!("an image has no file `{name}`"));
    }
    let no_hash = FileInfo { size_bytes: 1, blake3: "../../é".into() };
    let files = BTreeMap::from([("kernel".to_owned(), no_hash)]);
    assert_eq!(why(Metadata { files, ..good() }), "`../../é` is not a hash");
    assert_eq!(why(described("web", &[("initrd", b"i")])), "it has no kernel");
    assert_eq!(why(described("web", &[])), "it has no kernel");
    let arrival = store.arrive(good()).unwrap();
    assert!(arrival.begin("../kernel").is_err() && arrival.begin("root.img").is_err());
}

#[test]
fn what_died_half_way_is_swept_and_what_lives_is_not() {
    let (_folder, store) = store();
    store.sweep().unwrap();
    let live = store.arrive(described("web", &[("kernel", b"k")])).unwrap();
    let dead = store.root().join(".tmp-web-99999-0");
    fs::create_dir(&dead).unwrap();
    store.sweep().unwrap();
    assert!(!dead.exists());
    let mut live = live;
    let mut file = live.begin("kernel").unwrap();
    file.write(b"k").unwrap();
    live.end(file).unwrap();
    assert_eq!(live.commit().unwrap(), "web");
}

#[test]
fn a_damaged_image_is_not_taken_for_the_one_that_is_looked_for() {
    let (_folder, store) = store();
    let files: &[(&str, &[u8])] = &[("root.img", b"bytes")];
    take(&store, "web", files).unwrap();
    fs::write(store.root().join("web/root.img"), b"byt").unwrap();
    assert!(matches!(store.open("web"), Err(StoreError::Damaged { .. })));
    let hash = info(b"bytes").blake3;
    assert!(store.open_root("web", &hash).unwrap().is_none());
    let second = take(&store, "web", files).unwrap();
    assert_eq!(second, format!("web-{}", &hash[..12]));
    let found = store.open_root("web", &hash).unwrap().unwrap();
    assert_eq!(found.metadata.name, second);
}
