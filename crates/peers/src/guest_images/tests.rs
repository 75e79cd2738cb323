//! Two hosts' folders of images, and plain HTTP between them.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use futures_util::future::join_all;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, copy, duplex, split};
use tokio::sync::{Semaphore, watch};
use vmfork_api::ErrorCode;
use vmfork_guest_image::FileInfo;

use super::*;
use vmfork_rest::http::connection;

const SOON: Duration = Duration::from_secs(20);

struct Host {
    folder: TempDir,
    store: Store,
    images: Fetches,
}

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let store = Store::new(folder.path().join("images"));
        Self { folder, store, images: Fetches::default() }
    }

    /// Put an image there. → the hash of its root disk.
    fn put(&self, name: &str, root: &[u8]) -> String {
        let files = [("kernel", b"the kernel".as_slice()), ("initrd", b"i"), ("root.img", root)];
        let info = |content: &[u8]| FileInfo {
            size_bytes: content.len() as u64,
            blake3: blake3::hash(content).to_hex().to_string(),
        };
        let metadata = Metadata {
            schema: "vmfork-guest-image/1".to_owned(),
            name: name.to_owned(),
            created_unix_ms: 1,
            origin: "test".to_owned(),
            kernel_version: "6.1".to_owned(),
            cmdline: "quiet".to_owned(),
            packages: Vec::new(),
            agent: true,
            default_memory_mib: 512,
            vmgenid: Some(true),
            root_overlay: true,
            root_disk: true,
            root_pmem: false,
            input_hash: None,
            tree_hash: None,
            root_stored: None,
            root_object: None,
            seeded: None,
            files: BTreeMap::from(files.map(|(name, content)| (name.to_owned(), info(content)))),
        };
        let root = info(root).blake3;
        let mut arrival = self.store.arrive(metadata).expect("an image");
        for (name, content) in files {
            let mut file = arrival.begin(name).expect("begun");
            file.write(content).and_then(|()| arrival.end(file)).expect("whole");
        }
        assert_eq!(arrival.commit().expect("there"), name);
        root
    }

    fn giver(&self) -> Plain {
        let unbounded = Semaphore::MAX_PERMITS;
        Plain {
            router: giving(self.store.clone()),
            asked: Arc::default(),
            root_bytes_max: u64::MAX,
            gate: Arc::new(Semaphore::new(unbounded)),
        }
    }

    async fn ensure(&self, root: &str, giver: &Plain) -> Result<String, ErrorBody> {
        let (wanted, until) = (wanted(root), Instant::now() + SOON);
        let had = self.images.ensure(&self.store, &wanted, giver.clone(), until).await;
        had.map_err(|error| error.to_body(wanted.message(giver.name())))
    }

    /// All names in its folder but the lock's.
    fn entries(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.folder.path().join("images")) else {
            return Vec::new();
        };
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.filter(|name| name != ".lock").collect();
        names.sort();
        names
    }

    async fn until_it_has(&self, entries: usize) {
        let there = async {
            while self.entries().len() != entries {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(SOON, there).await;
        assert!(waited.is_ok(), "{:?} are there, not {entries}", self.entries());
    }
}

/// Without TLS.
#[derive(Clone)]
struct Plain {
    router: Router,
    asked: Arc<Mutex<Vec<String>>>,
    /// The connection that a root disk comes on ends after this many bytes.
    root_bytes_max: u64,
    /// Each root disk takes one.
    gate: Arc<Semaphore>,
}

impl Plain {
    fn asked_for(&self, what: &str) -> usize {
        self.asked.lock().expect("whole").iter().filter(|path| path.ends_with(what)).count()
    }
}

impl Giver for Plain {
    fn name(&self) -> &str {
        "h0"
    }

    fn get(&self, path: String) -> BoxFuture<'_, Result<Response, CallError>> {
        async move {
            self.asked.lock().expect("whole").push(path.clone());
            let mut bytes_max = u64::MAX;
            if path.ends_with("root.img") {
                self.gate.acquire().await.expect("open").forget();
                bytes_max = self.root_bytes_max;
            }
            let ((client, near), (far, server)) = (duplex(65_536), duplex(65_536));
            let router = self.router.clone();
            tokio::spawn(async move {
                let (_runs_on, stop) = watch::channel(false);
                connection(server, None, router, stop).await;
            });
            tokio::spawn(async move {
                let ((mut asks, mut hears), (answers, mut takes)) = (split(near), split(far));
                let mut answers = answers.take(bytes_max);
                tokio::select! {
                    _ = copy(&mut answers, &mut hears) => {}
                    _ = async {
                        let _ended = copy(&mut asks, &mut takes).await;
                        std::future::pending::<()>().await;
                    } => {}
                }
            });
            let broken = |source| CallError::Broken { host: self.name().to_owned(), source };
            let (mut sender, sending) =
                http1::handshake(TokioIo::new(client)).await.map_err(broken)?;
            tokio::spawn(sending);
            let mut request = Request::new(Body::empty());
            *request.uri_mut() = path.parse().expect("a path");
            Ok(sender.send_request(request).await.map_err(broken)?.map(Body::new))
        }
        .boxed()
    }
}

fn wanted(root: &str) -> Wanted {
    Wanted { root_blake3: root.to_owned(), name: "web".to_owned(), timeout_ms: 0 }
}

/// Several blocks, and no two bytes in a row the same.
fn disk(seed: usize) -> Vec<u8> {
    (0..3_000_001_usize)
        .map(|n| u8::try_from((n * 7 + n / 251 + seed) % 256).unwrap_or(0))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_comes_whole_and_once() {
    let (h0, h1) = (Host::new(), Host::new());
    let root = h0.put("web", &disk(0));
    let giver = h0.giver();
    assert_eq!(h1.ensure(&root, &giver).await.expect("had"), "web");
    let (there, here) =
        (h0.store.open("web").expect("whole"), h1.store.open("web").expect("whole"));
    assert_eq!(there.metadata, here.metadata);
    for name in here.metadata.files.keys() {
        let read = |folder: &std::path::Path| fs::read(folder.join(name)).expect("read");
        assert!(read(&there.folder) == read(&here.folder), "{name}");
    }
    assert_eq!(h1.entries(), ["web"]);
    assert_eq!(giver.asked.lock().expect("whole").len(), 4);
    h1.ensure(&root, &giver).await.expect("it is there");
    assert_eq!(giver.asked.lock().expect("whole").len(), 4, "nobody is asked for it again");
    // From there to a third.
    let h2 = Host::new();
    h2.ensure(&root, &h1.giver()).await.expect("had");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_of_that_name_stays() {
    let (h0, h1) = (Host::new(), Host::new());
    let (root, other) = (h0.put("web", &disk(0)), h1.put("web", &disk(1)));
    let name = h1.ensure(&root, &h0.giver()).await.expect("had");
    assert_eq!(name, format!("web-{}", &root[..12]));
    assert_eq!(h1.store.metadata("web").expect("there").root_blake3(), Some(other.as_str()));
    assert_eq!(h1.ensure(&root, &h0.giver()).await.expect("it is there"), name);
    // Back home it has its name.
    assert_eq!(h0.ensure(&root, &h1.giver()).await.expect("it is there"), "web");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_want_it_at_once_wait_for_one_fetch() {
    let (h0, h1) = (Host::new(), Host::new());
    let root = h0.put("web", &disk(0));
    let giver = Plain { gate: Arc::new(Semaphore::new(0)), ..h0.giver() };
    let all = join_all((0..8).map(|_| h1.ensure(&root, &giver)));
    let opens = async {
        h1.until_it_has(1).await;
        giver.gate.add_permits(1);
    };
    let (names, ()) = tokio::join!(all, opens);
    assert!(names.into_iter().all(|name| name.expect("had") == "web"));
    assert_eq!(giver.asked_for("/root.img"), 1);
    assert_eq!(h1.entries(), ["web"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_breaks_off_or_is_damaged_leaves_nothing_and_is_tried_again() {
    let (h0, h1) = (Host::new(), Host::new());
    let root = h0.put("web", &disk(0));
    let cut = Plain { root_bytes_max: 2_000_000, ..h0.giver() };
    let error = h1.ensure(&root, &cut).await.expect_err("cut");
    assert_eq!(error.code, ErrorCode::Host);
    let text = error.to_string();
    let expected = "take guest image `web` from host `h0`: `root.img`: the connection broke off: ";
    assert!(text.starts_with(expected), "{text}");
    assert!(h1.entries().is_empty(), "{:?}", h1.entries());

    let path = h0.folder.path().join("images/web/root.img");
    fs::write(&path, disk(1)).expect("written");
    let error = h1.ensure(&root, &h0.giver()).await.expect_err("another one");
    assert!(error.to_string().contains("`root.img` arrived damaged: its hash is "), "{error}");
    assert!(error.remedy.is_some());
    assert!(h1.entries().is_empty(), "{:?}", h1.entries());

    fs::write(&path, disk(0)).expect("written");
    assert_eq!(h1.ensure(&root, &h0.giver()).await.expect("had"), "web");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waited_for_anothers_fetch_that_failed_tries_its_own() {
    let (h0, h1) = (Host::new(), Host::new());
    let root = h0.put("web", &disk(0));
    let gate = Arc::new(Semaphore::new(0));
    let cut = Plain { root_bytes_max: 10, gate: Arc::clone(&gate), ..h0.giver() };
    let good = h0.giver();
    let second = async {
        h1.until_it_has(1).await;
        let had = h1.ensure(&root, &good);
        let opens = async {
            tokio::task::yield_now().await;
            assert_eq!(good.asked_for(""), 0, "it waits for the first");
            gate.add_permits(1);
        };
        tokio::join!(had, opens).0
    };
    let (first, second) = tokio::join!(h1.ensure(&root, &cut), second);
    first.expect_err("cut");
    assert_eq!(second.expect("had"), "web");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_waits_for_any_more_goes_on_and_is_there_for_the_next() {
    let (h0, h1) = (Host::new(), Host::new());
    let root = h0.put("web", &disk(0));
    let closed = Plain { gate: Arc::new(Semaphore::new(0)), ..h0.giver() };
    let (wanted, soon) = (wanted(&root), Instant::now() + Duration::from_millis(100));
    let early = h1.images.ensure(&h1.store, &wanted, closed.clone(), soon);
    let early = early.await.expect_err("too late");
    assert!(matches!(early, FetchError::Late), "{early}");
    assert_eq!(h1.entries().len(), 1, "what has come of it by then");
    let late = h1.ensure(&root, &closed);
    let opens = async {
        tokio::task::yield_now().await;
        closed.gate.add_permits(1);
    };
    assert_eq!(tokio::join!(late, opens).0.expect("had"), "web");
    assert_eq!(closed.asked_for("/root.img"), 1, "it was not begun anew");
    let none_is_left = async {
        let left =
            || h1.images.under_way.lock().expect("whole").values().any(|it| it.upgrade().is_some());
        while left() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(SOON, none_is_left).await.expect("it has ended");
}

#[tokio::test]
async fn a_fork_waits_no_longer_for_one_host_than_others_took_and_again() {
    let ms = Duration::from_millis;
    let host = |took: Duration, had: Result<(), &'static str>| async move {
        tokio::time::sleep(took).await;
        (took, had)
    };
    let never = Duration::from_secs(3600);
    let names =
        |answers: Vec<(Duration, _)>| answers.into_iter().map(|it| it.0).collect::<Vec<_>>();
    let began = Instant::now();
    let answers = until_slow([host(ms(100), Ok(())), host(never, Ok(()))], false, ms(10)).await;
    assert_eq!(names(answers), [ms(100)]);
    assert!(began.elapsed() >= ms(200), "as long again");
    // Of three each of which is in time for the one before.
    let three = [ms(30), ms(70), ms(130)].map(|took| host(took, Ok(())));
    assert_eq!(names(until_slow(three, false, ms(50)).await), [ms(30), ms(70), ms(130)]);
    // Who fails is no measure, and who has it already is.
    let two = || [host(ms(1), Err("full")), host(ms(200), Ok(()))];
    assert_eq!(names(until_slow(two(), false, ms(10)).await), [ms(1), ms(200)]);
    assert_eq!(names(until_slow(two(), true, ms(50)).await), [ms(1)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_image_names_is_not_given() {
    let h0 = Host::new();
    let root = h0.put("web", &disk(0));
    fs::write(h0.folder.path().join("images/web/secret"), "x").expect("written");
    let giver = h0.giver();
    let other = "0".repeat(64);
    for path in [
        "web",
        "..",
        "..%2Fweb",
        &other,
        &format!("{other}/root.img"),
        "web/root.img",
        &format!("{root}/image.json"),
        &format!("{root}/secret"),
        &format!("{root}/.."),
        &format!("{root}/..%2Fweb%2Froot.img"),
        &format!("{root}/%2Fetc%2Fpasswd"),
        &format!("{root}/%00"),
    ] {
        let error = answer(&giver, format!("{GUEST_IMAGES}/{path}")).await.expect_err(path);
        let CallError::Refused { source, .. } = &error else { panic!("{path}: {error}") };
        assert_eq!(source.code, ErrorCode::NotFound, "{path}");
    }
    let error = Host::new().ensure(&other, &giver).await.expect_err("it is nowhere");
    assert_eq!(error.code, ErrorCode::NotFound);
    assert_eq!(
        error.to_string(),
        "take guest image `web` from host `h0`: host `h0`: give a guest image: no image here has the root disk of \
         hash 0000000000000000…"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_describes_another_image_is_refused() {
    let (h0, h1) = (Host::new(), Host::new());
    let root = h0.put("web", &disk(0));
    let described = h0.store.metadata("web").expect("there");
    let says = |metadata: Metadata| {
        let answer = Json(metadata);
        let router = Router::new().route(&format!("{GUEST_IMAGES}/{{root}}"), get(async || answer));
        Plain { router, ..h0.giver() }
    };
    let refused = async |metadata: Metadata| {
        h1.ensure(&root, &says(metadata)).await.expect_err("refused").to_string()
    };
    let text = refused(Metadata { name: "../../evil".to_owned(), ..described.clone() }).await;
    assert!(
        text.ends_with("cannot receive the image: `../../evil` is not a valid image name"),
        "{text}"
    );
    let mut other = described.clone();
    other.files.insert("../evil".to_owned(), described.files["kernel"].clone());
    let text = refused(other).await;
    assert!(text.ends_with("cannot receive the image: an image has no file `../evil`"), "{text}");
    let mut other = described.clone();
    other.files.insert("root.img".to_owned(), described.files["kernel"].clone());
    let text = refused(other).await;
    assert!(text.ends_with("its root disk is another one than was asked for"), "{text}");
    assert!(h1.entries().is_empty());
}
