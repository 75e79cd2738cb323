//! Stored images that hosts pull from each other.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blake3::Hash;
use bytes::Bytes;
use tokio::runtime::Handle;
use vmfork_api::ErrorBody;
use vmfork_host::metrics::ImageChunk;
use vmfork_store::format::Compression;
use vmfork_store::format::chunk::ChunkEncoder;
use vmfork_store::{BlobError, Blobs, SnapshotId, VerifiedChunk};

use super::{One, cluster, silence};
use crate::stored::{Images, Told, Wanted};

const ID: SnapshotId = SnapshotId([7; 16]);
const CHUNKS: u8 = 40;

/// What a host's store has.
#[derive(Debug, Default)]
struct Shelf {
    files: Mutex<HashMap<String, Vec<u8>>>,
    /// It is one of those that pull the image, or have it.
    has: AtomicBool,
    is_whole: AtomicBool,
    /// Chunks that were brought for others.
    kept: AtomicU64,
}

impl Shelf {
    fn files(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<u8>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Images for Shelf {
    fn find(&self, wanted: &Wanted) -> Option<Told> {
        let is_it = match wanted {
            Wanted::Name(name) => name == "web",
            Wanted::Id(id) => *id == ID,
        };
        let told = Told {
            name: "web".to_owned(),
            id: ID,
            is_whole: self.is_whole.load(Ordering::Relaxed),
            runs: 0,
        };
        (is_it && self.has.load(Ordering::Relaxed)).then_some(told)
    }

    fn give(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        let absent = || BlobError::NotFound { key: key.to_owned(), place: "here".to_owned() };
        self.files().get(key).cloned().ok_or_else(absent)
    }

    fn keep(&self, chunk: &VerifiedChunk<Bytes>) -> Result<(), ErrorBody> {
        self.files().insert(key_of(chunk.hash()), chunk.file().to_vec());
        self.kept.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn key_of(chunk: &Hash) -> String {
    let hex = chunk.to_hex();
    format!("chunks/{}/{hex}", &hex[..2])
}

/// The chunks of an image: key and file.
fn chunks() -> Vec<(String, Vec<u8>)> {
    let mut encoder = ChunkEncoder::new(Compression::None).expect("memory");
    let chunk = |number: u8| {
        let raw = vec![number; 8192];
        (key_of(&blake3::hash(&raw)), encoder.encode(&raw))
    };
    (0..CHUNKS).map(chunk).collect()
}

/// Hosts of which the first has the image, and the others pull it.
async fn pulling(count: usize) -> (Vec<One>, Vec<Arc<Shelf>>) {
    let hosts = cluster(count).await;
    let shelves: Vec<_> = hosts.iter().map(|_| Arc::new(Shelf::default())).collect();
    for (number, (host, shelf)) in hosts.iter().zip(&shelves).enumerate() {
        shelf.has.store(true, Ordering::Relaxed);
        shelf.is_whole.store(number == 0, Ordering::Relaxed);
        host.cluster().set_images(Arc::clone(shelf) as Arc<dyn Images>);
    }
    shelves[0].files().extend(chunks());
    let table = ("snapshots/web/1f-1.table".to_owned(), b"table".to_vec());
    let origin = ("snapshots/web/1f-1.origin".to_owned(), b"s3://elsewhere".to_vec());
    shelves[0].files().extend([table, origin]);
    (hosts, shelves)
}

fn store(host: &One) -> Arc<dyn Blobs> {
    host.cluster().image_store(&Handle::current(), ID)
}

/// As a store does: read a file, and keep what is a chunk.
async fn read(host: &One, shelf: &Arc<Shelf>, key: &str) -> Result<Vec<u8>, BlobError> {
    let (store, shelf, key) = (store(host), Arc::clone(shelf), key.to_owned());
    let reads = move || {
        let here = shelf.give(&key);
        here.or_else(|_| {
            let file = store.get(&key)?;
            shelf.files().insert(key, file.clone());
            Ok(file)
        })
    };
    tokio::task::spawn_blocking(reads).await.expect("no panic")
}

fn count(host: &One, what: ImageChunk) -> u64 {
    let counts = host.cluster().image_chunks();
    counts.into_iter().find(|(of, _)| *of == what).map_or(0, |(_, count)| count)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_chunk_leaves_the_host_that_has_all_once() {
    let (hosts, shelves) = pulling(4).await;
    // All of them at the same moment, and each in an order of its own.
    let all = chunks();
    let reads =
        hosts.iter().zip(&shelves).enumerate().skip(1).flat_map(|(number, (host, shelf))| {
            let turned = all.iter().cycle().skip(number * 13).take(all.len());
            turned.map(move |(key, file)| async move {
                assert_eq!(&read(host, shelf, key).await.expect("it comes"), file);
            })
        });
    futures_util::future::join_all(reads).await;
    let given: Vec<_> = hosts.iter().map(|host| count(host, ImageChunk::Given)).collect();
    assert_eq!(given[0], u64::from(CHUNKS), "of {given:?}");
    let relayed: u64 = hosts.iter().map(|host| count(host, ImageChunk::Relayed)).sum();
    assert!(relayed > 0 && given[1..].iter().all(|given| *given > 0), "{given:?}");
    // One that several hosts wait for at the same moment is verified and written once, soon after.
    let kept = || shelves.iter().map(|shelf| shelf.kept.load(Ordering::Relaxed)).sum::<u64>();
    for _ in 0..500 {
        if kept() > 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!((1..=u64::from(CHUNKS)).contains(&kept()), "{}", kept());
    // Its small files come from there, too; where its chunks are, each decides for itself.
    let table = read(&hosts[1], &shelves[1], "snapshots/web/1f-1.table").await;
    assert_eq!(table.expect("there"), b"table");
    let origin = read(&hosts[1], &shelves[1], "snapshots/web/1f-1.origin").await;
    assert!(origin.expect_err("hidden").is_not_found());
    let none = read(&hosts[1], &shelves[1], "snapshots/web/9f-1.table").await;
    assert!(none.expect_err("none").is_not_found());
    for host in &hosts {
        host.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_and_silence_of_others_cost_no_chunk() {
    let (hosts, shelves) = pulling(4).await;
    // One has all of it, and all of it is damaged; another answers nothing.
    for (key, mut file) in chunks() {
        *file.last_mut().expect("bytes") ^= 1;
        shelves[2].files().insert(key, file);
    }
    shelves[2].is_whole.store(true, Ordering::Relaxed);
    let _silent = silence(&hosts[3]).await;
    for (key, file) in chunks().into_iter().take(12) {
        assert_eq!(read(&hosts[1], &shelves[1], &key).await.expect("it comes"), file);
    }
    // Without the one that has it whole, what is missing is told with a remedy.
    shelves[0].files().clear();
    let (key, _) = chunks().pop().expect("some");
    let error = read(&hosts[1], &shelves[1], &key).await.expect_err("no host has it");
    assert!(!error.is_not_found() && error.remedy().is_some(), "{error:?}");
    for host in &hosts[..3] {
        host.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_a_part_of_the_image_brings_nothing_for_others() {
    let (hosts, shelves) = pulling(2).await;
    shelves[1].has.store(false, Ordering::Relaxed);
    let member = hosts[0].cluster().member().expect("a member");
    let peer = member.hosts.peer_of(hosts[1].id().expect("a member")).expect("one");
    let (key, _) = chunks().pop().expect("some");
    let path = format!("/cluster/v1/stored-images/{ID}/brought/{key}");
    let error = peer.get_again(&mut None, &path, super::SOON).await.expect_err("it has none");
    assert!(error.is_not_found(), "{error}");
    assert_eq!(count(&hosts[0], ImageChunk::Given), 0);
    // A name that means another image there than was asked for.
    let other = "snapshots/other/descriptor.json".to_owned();
    shelves[1].files().insert(other, b"another's".to_vec());
    for bad in ["..%2f..%2fetc%2fpasswd", "chunks/1f/../../x", "snapshots/other/descriptor.json"] {
        let path = format!("/cluster/v1/stored-images/{ID}/here/{bad}");
        peer.get_again(&mut None, &path, super::SOON).await.expect_err(bad);
    }
    for host in &hosts {
        host.stop().await;
    }
}
