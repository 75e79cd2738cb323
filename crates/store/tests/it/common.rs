//! Blobs in memory, guests' memory that is easy to make up, and snapshots of it.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use vmfork_image::{PageIdx, PageRange, PageSource as _};
use vmfork_store::{
    BaseRef, BlobError, Blobs, Compression, Descriptor, Draft, Extent, Failure, HotChunks,
    ImageDraft, Role, SourceOptions, Store, StoreError, StoredImage, Work,
};

pub(crate) const PAGE: usize = 4096;

pub(crate) fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

/// Done once, at a moment that a test has chosen: before the first call of that name to a key with
/// that part.
#[derive(Default)]
pub(crate) struct Hook(Mutex<Option<(&'static str, &'static str, Action)>>);

type Action = Box<dyn FnOnce() + Send>;

impl Hook {
    fn run(&self, call: &str, key: &str) {
        let mut hook = self.0.lock().expect("no panic");
        let due = hook.take_if(|(of, part, _)| *of == call && key.contains(*part));
        drop(hook);
        if let Some((.., action)) = due {
            action();
        }
    }
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

/// In memory. Counts calls, and fails from a given one on, as if the power had gone.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) map: Mutex<BTreeMap<String, Vec<u8>>>,
    /// What outlasts a power cut.
    synced: Mutex<BTreeMap<String, Vec<u8>>>,
    hook: Hook,
    /// Chunks that were read, in order.
    read: Mutex<Vec<String>>,
    /// What can't be read, as on a bad sector.
    unreadable: Mutex<String>,
    /// Calls until the first that fails; negative once it has. Never, if it begins high.
    left: AtomicI64,
}

impl Memory {
    pub(crate) fn new() -> Arc<Self> {
        Self::of(BTreeMap::new())
    }

    pub(crate) fn of(map: BTreeMap<String, Vec<u8>>) -> Arc<Self> {
        let (synced, map) = (Mutex::new(map.clone()), Mutex::new(map));
        let left = AtomicI64::new(i64::MAX);
        let (hook, read, unreadable) = (Hook::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { map, synced, hook, read, unreadable, left })
    }

    /// The chunks that were read since the last call of this, in order, by hash.
    pub(crate) fn take_read(&self) -> Vec<String> {
        std::mem::take(&mut self.read.lock().expect("no panic"))
    }

    pub(crate) fn fail_after(&self, calls: i64) {
        self.left.store(calls, Ordering::SeqCst);
    }

    pub(crate) fn make_unreadable(&self, key: &str) {
        key.clone_into(&mut self.unreadable.lock().expect("no panic"));
    }

    /// Do `hook` before the first `call`, "get", "put" or "size", to a key with `part` in it.
    pub(crate) fn at(
        &self,
        call: &'static str,
        part: &'static str,
        hook: impl FnOnce() + Send + 'static,
    ) {
        *self.hook.0.lock().expect("no panic") = Some((call, part, Box::new(hook)));
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.map.lock().expect("no panic").keys().cloned().collect()
    }

    pub(crate) fn copy(&self) -> BTreeMap<String, Vec<u8>> {
        self.map.lock().expect("no panic").clone()
    }

    /// What is left after a power cut. Of a file that is new since the last sync only the name is
    /// left. What was deleted since exists again, unless `deleted` says that the deletion was
    /// quicker. What replaces something is whole, as [`vmfork_store::Folder`] has it.
    pub(crate) fn after_power_cut(&self, deleted: bool) -> BTreeMap<String, Vec<u8>> {
        let mut left = self.synced.lock().expect("no panic").clone();
        let now = self.copy();
        left.retain(|key, _| !deleted || now.contains_key(key));
        for (key, bytes) in now {
            match left.get_mut(&key) {
                Some(old) => *old = bytes,
                None => drop(left.insert(key, Vec::new())),
            }
        }
        left
    }

    /// The key of a snapshot's file that ends in `ending`.
    pub(crate) fn key_of(&self, name: &str, ending: &str) -> String {
        let is_it = |key: &String| {
            key.starts_with(&format!("snapshots/{name}/")) && key.ends_with(&format!(".{ending}"))
        };
        self.keys().into_iter().find(is_it).expect("there")
    }

    /// What is there, whichever attempts have put it there.
    pub(crate) fn content(&self) -> BTreeMap<String, Vec<u8>> {
        // ID-ATTEMPT.ENDING, of which the attempt has 16 digits.
        let anonymous = |file: &str| match file.split_once('-') {
            Some((front, rest)) if file.starts_with("snapshots/") => {
                format!("{front}{}", &rest[16..])
            }
            _ => file.to_owned(),
        };
        let one = |(key, bytes): (String, Vec<u8>)| {
            let Ok(mut descriptor) = Descriptor::decode(&bytes) else {
                return (anonymous(&key), bytes);
            };
            descriptor.state.file.replace_range(32..49, "");
            for image in &mut descriptor.images {
                image.table.file.replace_range(32..49, "");
            }
            (key, descriptor.encode().expect("small"))
        };
        self.copy().into_iter().map(one).collect()
    }

    pub(crate) fn chunks(&self) -> usize {
        self.keys().iter().filter(|key| key.starts_with("chunks/")).count()
    }

    fn call(&self, key: &str) -> Result<(), BlobError> {
        if self.left.fetch_sub(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        Err(self.failed("reach", key, "the power has gone"))
    }

    fn failed(&self, action: &'static str, key: &str, source: &str) -> BlobError {
        let (key, place, source) = (key.into(), self.describe(), source.into());
        BlobError::Failed { action, key, place, why: Failure::Other, source }
    }
}

impl Blobs for Memory {
    fn describe(&self) -> String {
        "memory".into()
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        self.call(key)?;
        if let Some(chunk) = key.strip_prefix("chunks/") {
            let hash = chunk.rsplit('/').next().unwrap_or_default();
            self.read.lock().expect("no panic").push(hash.to_owned());
        }
        self.hook.run("get", key);
        if *self.unreadable.lock().expect("no panic") == key {
            return Err(self.failed("read", key, "bad sector"));
        }
        let map = self.map.lock().expect("no panic");
        let missing = || BlobError::NotFound { key: key.into(), place: "memory".into() };
        map.get(key).cloned().ok_or_else(missing)
    }

    fn reader(&self, key: &str) -> Result<Box<dyn Read + Send>, BlobError> {
        Ok(Box::new(io::Cursor::new(self.get(key)?)))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.call(key)?;
        self.hook.run("put", key);
        self.map.lock().expect("no panic").insert(key.into(), bytes.to_vec());
        Ok(())
    }

    fn put_for_good(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.put(key, bytes)?;
        self.synced.lock().expect("no panic").insert(key.into(), bytes.to_vec());
        Ok(())
    }

    fn put_new(&self, key: &str, bytes: &[u8]) -> Result<bool, BlobError> {
        self.call(key)?;
        let mut map = self.map.lock().expect("no panic");
        let is_new = !map.contains_key(key);
        if is_new {
            map.insert(key.into(), bytes.to_vec());
            // For good once it returns.
            self.synced.lock().expect("no panic").insert(key.into(), bytes.to_vec());
        }
        Ok(map[key] == bytes)
    }

    fn size(&self, key: &str) -> Result<Option<u64>, BlobError> {
        self.call(key)?;
        self.hook.run("size", key);
        Ok(self.map.lock().expect("no panic").get(key).map(|bytes| bytes.len() as u64))
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, BlobError> {
        self.call(prefix)?;
        Ok(self.keys().into_iter().filter(|key| key.starts_with(prefix)).collect())
    }

    fn delete(&self, key: &str) -> Result<(), BlobError> {
        self.call(key)?;
        self.map.lock().expect("no panic").remove(key);
        Ok(())
    }

    fn sync(&self) -> Result<(), BlobError> {
        self.call("sync")?;
        *self.synced.lock().expect("no panic") = self.copy();
        Ok(())
    }
}

/// A guest's memory: one number a page, 0 a page of zeros.
pub(crate) type Guest = Vec<u8>;

pub(crate) fn page_of(value: u8) -> Vec<u8> {
    if value == 0 {
        return vec![0; PAGE];
    }
    // Half of it compresses.
    let mut page = vec![value; PAGE];
    blake3::Hasher::new().update(&[value]).finalize_xof().fill(&mut page[..PAGE / 2]);
    page
}

pub(crate) fn read_guest(
    guest: &[u8],
) -> impl Fn(PageRange, &mut [u8]) -> io::Result<()> + Sync + '_ {
    move |range, bytes| {
        assert_eq!(bytes.len() as u64, range.byte_len());
        for (page, into) in range.pages().zip(bytes.chunks_exact_mut(PAGE)) {
            into.copy_from_slice(&page_of(guest[usize::try_from(page.0).expect("small")]));
        }
        Ok(())
    }
}

/// What reads the memory, of a snapshot that has no other image.
pub(crate) fn of_memory(
    read: impl Fn(PageRange, &mut [u8]) -> io::Result<()> + Sync,
) -> impl Fn(&Role, PageRange, &mut [u8]) -> io::Result<()> + Sync {
    move |role, range, bytes| {
        assert_eq!(*role, Role::Memory);
        read(range, bytes)
    }
}

/// All pages own.
pub(crate) fn image(role: Role, guest: &[u8]) -> ImageDraft {
    let pages = guest.len() as u64;
    ImageDraft {
        role,
        bytes: pages * PAGE as u64,
        base: None,
        extents: vec![(range(0, pages), Extent::Own)],
        compression: Compression::Zstd { level: 1 },
        chunk_pages: 8,
        keep_zero_pages: false,
    }
}

/// Memory, all pages own.
pub(crate) fn draft(name: &str, guest: &[u8]) -> Draft {
    Draft {
        name: name.into(),
        id: None,
        images: vec![image(Role::Memory, guest)],
        state: format!("state of {name}").into_bytes(),
        vm: serde_json::json!({"of": name}),
    }
}

/// The draft with another memory.
pub(crate) fn with(draft: Draft, change: impl FnOnce(&mut ImageDraft)) -> Draft {
    let mut draft = draft;
    change(&mut draft.images[0]);
    draft
}

/// What changed since the base is own, or zero.
pub(crate) fn delta(name: &str, base: &Descriptor, was: &[u8], is: &[u8]) -> Draft {
    Draft { images: vec![delta_image(Role::Memory, base, was, is)], ..draft(name, is) }
}

pub(crate) fn delta_image(role: Role, base: &Descriptor, was: &[u8], is: &[u8]) -> ImageDraft {
    let mut extents = Vec::new();
    for (page, (was, is)) in (0..).zip(was.iter().zip(is)) {
        if was != is {
            let kind = if *is == 0 && page % 2 == 0 { Extent::Zero } else { Extent::Own };
            extents.push((range(page, 1), kind));
        }
    }
    let base = Some(BaseRef { name: base.name.clone(), id: base.id, role: role.clone() });
    ImageDraft { base, extents, ..image(role, is) }
}

pub(crate) fn create(store: &Store, draft: Draft, guest: &[u8]) -> Result<Descriptor, StoreError> {
    store.create(draft, &of_memory(read_guest(guest)), &Work::new(2))
}

pub(crate) fn options() -> SourceOptions {
    SourceOptions { hot: HotChunks::new(1 << 20), remote: None }
}

/// The guest's memory as a snapshot and its bases have it, read page by page and again in long
/// runs.
pub(crate) fn read_back(store: &Store, name: &str) -> Guest {
    read_chain(&chain(store, name), &options())
}

/// Its memory, and what that is a delta on.
pub(crate) fn chain(store: &Store, name: &str) -> Vec<StoredImage> {
    store.open_chain(name, &Role::Memory).expect("opens")
}

/// Its memory.
pub(crate) fn memory_of(store: &Store, name: &str) -> StoredImage {
    store.open(name).expect("opens").image(&Role::Memory).expect("has one")
}

pub(crate) fn read_chain(chain: &[StoredImage], options: &SourceOptions) -> Guest {
    let pages = usize::try_from(chain[0].image().pages()).expect("small");
    let mut memory = vec![0; pages * PAGE];
    for stored in chain.iter().rev() {
        let source = stored.source(options.clone());
        for (range, kind) in stored.extents() {
            let from = usize::try_from(range.byte_offset()).expect("small");
            let into = &mut memory[from..from + usize::try_from(range.byte_len()).expect("small")];
            match kind {
                Extent::Zero => into.fill(0),
                Extent::Own => {
                    source.read(range, into).expect("reads");
                    for (page, whole) in range.pages().zip(into.chunks_exact(PAGE)) {
                        let mut bytes = vec![1; PAGE];
                        source.read(page.range(), &mut bytes).expect("reads");
                        assert!(bytes == whole, "page {page}");
                    }
                }
            }
        }
    }
    let value = |page: &[u8]| {
        let value = page[PAGE - 1];
        assert!(page == page_of(value), "a page of {value} is torn");
        value
    };
    memory.chunks_exact(PAGE).map(value).collect()
}
