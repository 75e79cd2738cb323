//! Exports of snapshots, as they come from elsewhere.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::sync::{Arc, Mutex, PoisonError};

use vmfork_image::{PageIdx, PageRange};
use vmfork_store::{
    BaseRef, BlobError, Blobs, Compression, Descriptor, Draft, Extent, ImageDraft, Role,
    SnapshotId, Store, Work,
};

/// A store in memory.
#[derive(Debug, Default)]
struct Memory(Mutex<BTreeMap<String, Vec<u8>>>);

impl Memory {
    fn map(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blobs for Memory {
    fn describe(&self) -> String {
        "memory".into()
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        let missing = || BlobError::NotFound { key: key.into(), place: self.describe() };
        self.map().get(key).cloned().ok_or_else(missing)
    }

    fn reader(&self, key: &str) -> Result<Box<dyn Read + Send>, BlobError> {
        Ok(Box::new(Cursor::new(self.get(key)?)))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.map().insert(key.into(), bytes.into());
        Ok(())
    }

    fn put_for_good(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.put(key, bytes)
    }

    fn put_new(&self, key: &str, bytes: &[u8]) -> Result<bool, BlobError> {
        let mut map = self.map();
        let is_new = !map.contains_key(key);
        map.entry(key.into()).or_insert_with(|| bytes.into());
        Ok(is_new)
    }

    fn size(&self, key: &str) -> Result<Option<u64>, BlobError> {
        Ok(self.map().get(key).map(|bytes| bytes.len() as u64))
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, BlobError> {
        Ok(self.map().keys().filter(|key| key.starts_with(prefix)).cloned().collect())
    }

    fn delete(&self, key: &str) -> Result<(), BlobError> {
        self.map().remove(key);
        Ok(())
    }

    fn sync(&self) -> Result<(), BlobError> {
        Ok(())
    }
}

/// An import is refused and leaves no snapshot, or what it took is whole; also a stream that ends
/// as it should.
pub fn run(data: &[u8]) {
    let ended = crate::sealed(&[data, &[0]].concat());
    for stream in [data, &ended] {
        let store = Store::new(Arc::new(Memory::default())).expect("a store in memory");
        let work = Work::new(1);
        match store.import(&mut &stream[..], None, &work) {
            Ok(snapshots) => {
                for snapshot in snapshots {
                    let verified = store.verify(&snapshot.name, &work).expect("it is there");
                    assert_eq!(verified.damage, []);
                }
            }
            Err(_) => assert_eq!(store.list().expect("listed").len(), 0),
        }
    }
}

/// A snapshot of memory and a disk on another, each with one own page. [`run`] adds the end.
pub fn seeds() -> Vec<Vec<u8>> {
    let store = Store::new(Arc::new(Memory::default())).expect("a store in memory");
    let roles = ["memory", "disk:data"].map(|role| role.parse::<Role>().expect("a role"));
    let mut base: Option<Descriptor> = None;
    for name in ["a", "b"] {
        let draft = Draft {
            name: name.into(),
            id: Some(SnapshotId([name.as_bytes()[0]; 16])),
            images: roles
                .iter()
                .map(|role| ImageDraft {
                    role: role.clone(),
                    bytes: 2 * 4096,
                    base: base.as_ref().map(|base| BaseRef {
                        name: base.name.clone(),
                        id: base.id,
                        role: role.clone(),
                    }),
                    extents: vec![(PageRange::between(PageIdx(0), PageIdx(1)), Extent::Own)],
                    compression: Compression::Zstd { level: 1 },
                    chunk_pages: 1,
                    keep_zero_pages: false,
                })
                .collect(),
            state: name.into(),
            vm: "".into(),
        };
        let fill = |_: &Role, _, bytes: &mut [u8]| {
            bytes.fill(name.as_bytes()[0]);
            Ok(())
        };
        let made = store.create(draft, &fill, &Work::new(1)).expect("created");
        base = Some(made);
    }
    ["a", "b"]
        .into_iter()
        .map(|name| {
            let mut stream = Vec::new();
            store.export(name, &mut stream, &Work::new(1)).expect("exported");
            stream.truncate(stream.len() - 33);
            stream
        })
        .collect()
}
