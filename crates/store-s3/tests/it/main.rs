//! Against a real S3 server, versitygw, which mk/versitygw.sh builds; and against what is none.

mod server;

use std::io::{self, Read as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use server::{Server, free_address};
use tokio::runtime::Runtime;
use vmfork_image::{PageIdx, PageRange, PageSource as _};
use vmfork_store::{
    BlobError, Blobs, Compression, Draft, Extent, Failure, HotChunks, ImageDraft, Role,
    SourceOptions, Store, StoreError, Work,
};
use vmfork_store_s3::{OpenError, S3, Settings};

const PAGE: usize = 4096;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("runtime")
}

fn settings(endpoint: &str) -> Settings {
    Settings {
        access_key_id: server::ACCESS.into(),
        secret_access_key: server::SECRET.into(),
        session_token: None,
        endpoint: Some(endpoint.into()),
        region: "us-east-1".into(),
        allow_http: true,
        patience: Duration::from_secs(10),
    }
}

fn open(server: &Server, location: &str, runtime: &Runtime) -> S3 {
    let location = location.parse().expect("a location");
    S3::open(&location, &settings(&server.endpoint), runtime.handle().clone()).expect("opens")
}

fn failure(error: OpenError) -> (Failure, String) {
    let remedy = error.remedy();
    match error {
        OpenError::Blob(BlobError::Failed { why, source, place, .. }) => {
            assert!(place.starts_with("s3://"), "{place}");
            let remedy = remedy.is_some_and(|text| text.contains(&place));
            assert!(remedy, "{why:?}: {source}");
            (why, source.to_string())
        }
        other => panic!("{other}"),
    }
}

#[test]
fn objects_are_blobs() {
    let runtime = runtime();
    let Some(server) = Server::start(&runtime) else { return };
    let blobs = open(&server, "s3://snapshots/some/where", &runtime);
    let beside = open(&server, "s3://snapshots/some/wherever", &runtime);
    beside.put("a/c", b"another store's").expect("put");
    assert!(blobs.get("a/b").expect_err("nothing").is_not_found());
    assert!(blobs.reader("a/b").is_err_and(|error| error.is_not_found()));
    assert_eq!(blobs.size("a/b").expect("told"), None);
    blobs.put("a/b", b"one").expect("put");
    blobs.put("a/b", b"two!").expect("put");
    assert_eq!(blobs.get("a/b").expect("there"), b"two!");
    assert_eq!(blobs.size("a/b").expect("told"), Some(4));
    assert!(!blobs.put_new("a/b", b"three").expect("told"));
    assert!(blobs.put_new("a/b", b"two!").expect("told"), "it is what was to be put");
    assert!(blobs.put_new("a/d", b"").expect("put"));
    let mut keys = blobs.list("").expect("listed");
    keys.sort();
    assert_eq!(keys, ["a/b", "a/d"]);
    assert_eq!(blobs.list("a/").expect("listed").len(), 2);
    assert_eq!(blobs.list("x/").expect("listed"), Vec::<String>::new());
    blobs.delete("a/b").expect("deleted");
    blobs.delete("a/b").expect("again");
    assert_eq!(blobs.list("").expect("listed"), ["a/d"]);
    assert_eq!(blobs.get("a/d").expect("there"), b"");
    for key in ["../x", "a//b", "/a", "a/.hidden", ""] {
        assert!(matches!(blobs.get(key), Err(BlobError::BadKey { .. })), "{key}");
    }
}

#[test]
fn what_is_large_goes_in_parts_and_is_read_as_it_comes() {
    let runtime = runtime();
    let Some(server) = Server::start(&runtime) else { return };
    let blobs = open(&server, "s3://snapshots", &runtime);
    let bytes: Vec<u8> = (0..20_000_001u32).map(|i| (i >> 7).to_le_bytes()[0]).collect();
    blobs.put("large", &bytes).expect("put");
    assert!(blobs.get("large").expect("there") == bytes);
    let (mut reader, mut read) = (blobs.reader("large").expect("there"), Vec::new());
    let mut piece = vec![0; 70_001];
    loop {
        match reader.read(&mut piece).expect("reads") {
            0 => break,
            n => read.extend_from_slice(&piece[..n]),
        }
    }
    assert!(read == bytes);
}

#[test]
fn of_many_that_put_something_new_one_does() {
    let runtime = runtime();
    let Some(server) = Server::start(&runtime) else { return };
    let blobs = open(&server, "s3://snapshots", &runtime);
    let done: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|i| {
                let blobs = &blobs;
                scope.spawn(move || blobs.put_new("x", &[i]))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let winners: Vec<_> = (0..8u8).filter(|i| matches!(done[usize::from(*i)], Ok(true))).collect();
    assert_eq!(winners.len(), 1, "{done:?}");
    assert_eq!(blobs.get("x").expect("there"), winners);
}

fn page_of(page: PageIdx) -> Vec<u8> {
    let mut bytes = vec![7; PAGE];
    bytes[..8].copy_from_slice(&page.0.to_le_bytes());
    bytes
}

fn read_pages(range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
    for (page, into) in range.pages().zip(bytes.chunks_exact_mut(PAGE)) {
        into.copy_from_slice(&page_of(page));
    }
    Ok(())
}

fn draft(name: &str) -> Draft {
    Draft {
        name: name.into(),
        id: None,
        images: [Role::Memory, disk()].map(image).to_vec(),
        state: b"state".to_vec(),
        vm: serde_json::json!({"memory_mib": 1}),
    }
}

fn disk() -> Role {
    "disk:data".parse().expect("a role")
}

fn image(role: Role) -> ImageDraft {
    ImageDraft {
        role,
        bytes: 200 * PAGE as u64,
        base: None,
        extents: vec![(PageRange::first(200), Extent::Own)],
        compression: Compression::Zstd { level: 1 },
        chunk_pages: 16,
        keep_zero_pages: false,
    }
}

/// Of the disk there is more in each page.
fn read_images(role: &Role, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
    read_pages(range, bytes)?;
    if *role != Role::Memory {
        bytes.chunks_exact_mut(PAGE).for_each(|page| page[8] = 9);
    }
    Ok(())
}

#[test]
fn a_snapshot_is_pushed_pulled_and_read_before_it_is_here() {
    let runtime = runtime();
    let Some(server) = Server::start(&runtime) else { return };
    let remote =
        Store::new(Arc::new(open(&server, "s3://snapshots/team", &runtime))).expect("store");
    let at = tempfile::tempdir().expect("folder");
    let here = Store::folder(at.path().join("here")).expect("store");
    let made = here.create(draft("web"), &read_images, &Work::new(2)).expect("created");
    let stored = here.open("web").expect("opens").image(&Role::Memory).expect("has one");
    let runs = [PageRange::first(40)];
    here.put_working_set(&stored, &runs, &read_pages, &Work::new(2)).expect("put");
    let copied = here.copy_to("web", &remote, &Work::new(2)).expect("pushed");
    assert_eq!((copied.names, copied.chunks), (vec!["web".to_owned()], 26));
    let verified = remote.verify("web", &Work::new(2)).expect("verified");
    assert_eq!((verified.chunks, verified.damage), (26, vec![]));
    let error = remote.create(draft("web"), &read_images, &Work::new(1)).expect_err("taken");
    assert!(matches!(error, StoreError::Exists { .. }), "{error}");

    let there = Store::folder(at.path().join("there")).expect("store");
    let pulled =
        there.adopt_from("web", &remote, "s3://snapshots/team", &Work::new(1)).expect("adopted");
    assert_eq!((pulled.descriptor().id, pulled.origin()), (made.id, Some("s3://snapshots/team")));
    let blobs = Arc::new(open(&server, "s3://snapshots/team", &runtime));
    let options = SourceOptions { hot: HotChunks::new(1 << 20), remote: Some(blobs) };
    let source = pulled.image(&Role::Memory).expect("has one").source(options);
    let mut bytes = vec![0; 20 * PAGE];
    source.read(PageRange::between(PageIdx(30), PageIdx(50)), &mut bytes).expect("reads");
    for (page, bytes) in (30..).zip(bytes.chunks_exact(PAGE)) {
        assert_eq!(bytes, page_of(PageIdx(page)));
    }
    let kept = std::fs::read_dir(at.path().join("there/chunks")).expect("there");
    assert!((1..=3).contains(&kept.count()), "what was read of three windows is kept");
    there
        .fetch_chunks(&there.missing("web", 0).expect("there"), &remote, &Work::new(2))
        .expect("fetched");
    assert_eq!(there.open("web").expect("opens").origin(), None);
    // Nothing of the remote store is needed any more.
    remote.remove("web", false).expect("removed");
    assert_eq!(remote.collect().expect("collected"), vmfork_store::Collected::default());
    drop(server);
    let verified = there.verify("web", &Work::new(2)).expect("verified");
    assert_eq!((verified.chunks, verified.damage), (26, vec![]));
}

#[test]
fn a_server_that_goes_away_fails_the_read_and_not_more() {
    let runtime = runtime();
    let Some(server) = Server::start(&runtime) else { return };
    let remote = Store::new(Arc::new(open(&server, "s3://snapshots", &runtime))).expect("store");
    remote.create(draft("web"), &read_images, &Work::new(2)).expect("created");
    let stored = remote.open("web").expect("opens").image(&disk()).expect("has one");
    let source = stored.source(SourceOptions { hot: HotChunks::new(0), remote: None });
    source.read(PageIdx(0).range(), &mut [0; PAGE]).expect("reads");
    drop(server);
    let error = source.read(PageIdx(0).range(), &mut [0; PAGE]).expect_err("gone");
    let error = error.into_inner().and_then(|e| e.downcast::<StoreError>().ok()).expect("ours");
    assert!(
        matches!(*error, StoreError::Blob(BlobError::Failed { why: Failure::Unreachable, .. })),
        "{error}"
    );
}

#[test]
fn wrong_credentials_and_a_bucket_that_is_missing_are_told_apart() {
    let runtime = runtime();
    let Some(server) = Server::start(&runtime) else { return };
    let here = "s3://snapshots/x".parse().expect("a location");
    let mut wrong = settings(&server.endpoint);
    wrong.secret_access_key = "not the secret".into();
    let refused = S3::open(&here, &wrong, runtime.handle().clone()).expect_err("denied");
    assert_eq!(failure(refused).0, Failure::Denied);
    let nowhere = "s3://no-such-bucket/x".parse().expect("a location");
    let right = settings(&server.endpoint);
    let refused = S3::open(&nowhere, &right, runtime.handle().clone()).expect_err("no bucket");
    assert_eq!(failure(refused).0, Failure::NoPlace);
    // A place that is no store yet is not made one by who only wants to read.
    let empty = Arc::new(open(&server, "s3://snapshots/empty", &runtime));
    let error = Store::existing(empty).expect_err("no store");
    assert!(error.to_string().contains("there is no `format`"), "{error}");
}

#[test]
fn who_is_not_there_or_does_not_answer_is_given_up() {
    let runtime = runtime();
    let location = "s3://snapshots/x".parse().expect("a location");
    let absent = settings(&format!("http://{}", free_address()));
    let error = S3::open(&location, &absent, runtime.handle().clone()).expect_err("no server");
    assert_eq!(failure(error).0, Failure::Unreachable);
    // What nothing is asked of need not be there.
    let later = S3::new(&location, &absent, runtime.handle().clone()).expect("set up");
    let error = later.get("format").expect_err("no server");
    assert_eq!(failure(error.into()).0, Failure::Unreachable);
    // Takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("listens");
    let address = silent.local_addr().expect("bound");
    let mut settings = settings(&format!("http://{address}"));
    settings.patience = Duration::from_millis(100);
    let error = S3::open(&location, &settings, runtime.handle().clone()).expect_err("silent");
    assert_eq!(failure(error).0, Failure::Unreachable);
}
