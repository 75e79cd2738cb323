use super::*;

fn folder() -> (tempfile::TempDir, Folder) {
    let at = tempfile::tempdir().expect("temporary folder");
    let folder = Folder::new(at.path().join("store")).expect("folder");
    (at, folder)
}

#[test]
fn what_is_put_is_there_and_replaced_whole() {
    let (_at, folder) = folder();
    assert!(folder.get("a/b").expect_err("nothing").is_not_found());
    assert_eq!(folder.size("a/b").expect("readable"), None);
    folder.put("a/b", b"one").expect("put");
    folder.put("a/b", b"two!").expect("put");
    assert_eq!(folder.get("a/b").expect("there"), b"two!");
    assert_eq!(folder.size("a/b").expect("there"), Some(4));
    assert!(!folder.put_new("a/b", b"three").expect("put"));
    assert_eq!(folder.get("a/b").expect("there"), b"two!");
    assert!(folder.put_new("a/b", b"two!").expect("put"), "it is what was to be put");
    assert!(folder.put_new("a/c", b"four").expect("put"));
    let mut keys = folder.list("a/").expect("listed");
    keys.sort();
    assert_eq!(keys, ["a/b", "a/c"]);
    let mut text = String::new();
    folder.reader("a/c").expect("there").read_to_string(&mut text).expect("read");
    assert_eq!(text, "four");
    folder.sync().expect("sync");
}

#[test]
fn deleting_leaves_no_empty_folder_and_may_be_done_twice() {
    let (_at, folder) = folder();
    folder.put("a/b", b"1").expect("put");
    folder.delete("a/b").expect("delete");
    folder.delete("a/b").expect("again");
    assert!(!folder.root().join("a").exists());
    assert_eq!(folder.list("").expect("listed"), Vec::<String>::new());
    assert_eq!(folder.list("a/").expect("listed"), Vec::<String>::new());
}

#[test]
fn keys_do_not_lead_out_of_the_folder() {
    let (at, folder) = folder();
    fs::write(at.path().join("outside"), "x").expect("write");
    std::os::unix::fs::symlink(at.path().join("outside"), folder.root().join("link"))
        .expect("link");
    for key in ["../outside", "a/../../outside", "/etc/passwd", ".hidden", ""] {
        let error = folder.get(key).expect_err(key);
        assert!(matches!(error, BlobError::BadKey { .. }), "{error}");
        assert!(folder.put(key, b"x").is_err() && folder.delete(key).is_err(), "{key}");
    }
    assert!(matches!(folder.get("link"), Err(BlobError::Failed { .. })));
    assert_eq!(folder.list("").expect("listed"), Vec::<String>::new());
}

#[test]
fn only_the_owner_may_look_in() {
    use std::os::unix::fs::PermissionsExt as _;
    let (_at, folder) = folder();
    folder.put("a/b", b"1").expect("put");
    let mode = |path: &str| {
        fs::metadata(folder.root().join(path)).expect("there").permissions().mode() & 0o777
    };
    assert_eq!((mode(""), mode("a"), mode("a/b")), (0o700, 0o700, 0o600));
}

#[test]
fn sweeping_removes_dead_writers_files_and_not_those_of_live_ones() {
    let (_at, folder) = folder();
    folder.put("a/b", b"1").expect("put");
    let live = Temporary::create(&folder.root().join("a")).expect("temporary file");
    let dead = folder.root().join("a/.tmp-1-1");
    fs::write(&dead, "half").expect("write");
    assert_eq!(folder.sweep().expect("swept"), 4);
    assert!(live.path.exists() && !dead.exists());
    assert_eq!(folder.list("").expect("listed"), ["a/b"]);
}

#[test]
fn a_put_that_fails_leaves_nothing_and_says_where() {
    let (_at, folder) = folder();
    folder.put("a/b", b"1").expect("put");
    let error = folder.put("a/b/c", b"1").expect_err("a file is no folder");
    let text = error.to_string();
    assert!(text.contains("write `a/b/c` in ") && text.contains("store"), "{text}");
    // A folder that stands where the file should go: fails at the rename.
    fs::create_dir_all(folder.root().join("a/d/e")).expect("folder");
    assert!(folder.put("a/d", b"1").is_err() && folder.put_new("a/d", b"1").is_ok_and(|put| !put));
    assert_eq!(folder.sweep().expect("swept"), 0);
    assert_eq!(folder.list("").expect("listed"), ["a/b"]);
}

#[test]
fn concurrent_puts_and_deletes_in_one_folder_all_end_well() {
    let (_at, folder) = folder();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let folder = &folder;
            scope.spawn(move || {
                for round in 0..200 {
                    let key = format!("a/{thread}");
                    folder.put(&key, format!("{round}").as_bytes()).expect("put");
                    assert_eq!(folder.get(&key).expect("there"), format!("{round}").as_bytes());
                    folder.delete(&key).expect("delete");
                    folder.sweep().expect("swept");
                }
            });
        }
    });
    assert!(!folder.root().join("a").exists());
}

#[test]
fn no_more_is_read_than_a_key_is_for() {
    let (_at, folder) = folder();
    folder.put("snapshots/x/descriptor.json", &vec![b' '; (1 << 20) + 1]).expect("put");
    let error = folder.get("snapshots/x/descriptor.json").expect_err("too much");
    assert!(
        error.to_string().ends_with("has 1048577 bytes, where 1048576 are the most"),
        "{error}"
    );
}
