//! Export and import: a snapshot and all that it is a delta on, in one stream of bytes.
//!
//! ```text
//!    0   4  "VFEX"
//!    4   1  version, 1
//!    5   1  0
//!    6   2  snapshots
//!    8   …  entries: 1 kind, 1 bytes of the name, the name, 8 payload bytes, the payload
//!           for each snapshot, the one without a base first:
//!             kind 1  descriptor.json, by the snapshot's name
//!             kind 2  device state; page table, working set, profile of each image: by their names
//!           then kind 3, each chunk of any of them once, by its hash in hex
//!   -33   1  0, the kind of the end
//!   -32  32  blake3 of all before
//! ```
//!
//! Tables come before chunks. So the importing side knows what to expect, keeps only a few chunks
//! in memory, and skips what it has already.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};

use blake3::Hash;
use vmfork_image::PAGE_BYTES;

use crate::bounds::BLOB_BYTES_MAX;
use crate::copy::{Names, each_chunk_once};
use crate::error::StoreError;
use crate::files::table_flaw;
use crate::format::chunk::CHUNK_FILE_BYTES_MAX;
use crate::format::descriptor::{
    DESCRIPTOR_BYTES_MAX, Descriptor, FileRef, SnapshotId, Unreadable,
};
use crate::format::sealed::{SealedKind, unseal};
use crate::format::table::{Table, Window};
use crate::format::{Flaw, chunk, working_set};
use crate::names::{PROFILE, STATE, TABLE, WORKING_SET};
use crate::store::{CHAIN_MAX, Store, base_error, check_base, check_name};
use crate::work::Work;
use crate::writing::{Commit, Writing, encoded};

const MAGIC: [u8; 4] = *b"VFEX";
const VERSION: u8 = 1;

const END: u8 = 0;
const DESCRIPTOR: u8 = 1;
const FILE: u8 = 2;
const CHUNK: u8 = 3;

/// Chunks that are in memory at a time: some MiB, and enough for a few threads.
const BATCH_CHUNKS: usize = 32;

/// Writes a stream, and its hash behind it.
struct Out<'a> {
    to: &'a mut dyn Write,
    hasher: blake3::Hasher,
}

impl Out<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.hasher.update(bytes);
        self.to.write_all(bytes).map_err(StoreError::io("write the export"))
    }

    fn entry(&mut self, kind: u8, name: &str, payload: &[u8]) -> Result<(), StoreError> {
        let name_bytes = u8::try_from(name.len()).expect("names and hashes are far shorter");
        self.bytes(&[kind, name_bytes])?;
        self.bytes(name.as_bytes())?;
        self.bytes(&(payload.len() as u64).to_le_bytes())?;
        self.bytes(payload)
    }

    fn end(mut self) -> Result<(), StoreError> {
        self.bytes(&[END])?;
        let hash = self.hasher.finalize();
        self.to.write_all(hash.as_bytes()).map_err(StoreError::io("write the export"))?;
        self.to.flush().map_err(StoreError::io("write the export"))
    }
}

struct Entry {
    kind: u8,
    name: String,
    payload: Vec<u8>,
    /// Where the payload begins.
    offset: u64,
}

/// Reads a stream; every error has the offset.
struct In<'a> {
    from: &'a mut dyn Read,
    hasher: blake3::Hasher,
    offset: u64,
}

impl In<'_> {
    fn flaw(&self, what: impl Into<String>) -> StoreError {
        StoreError::Stream { flaw: Flaw { what: what.into(), offset: self.offset } }
    }

    /// Memory is taken as bytes come, whatever a length says.
    fn raw(&mut self, bytes: u64, what: &str) -> Result<Vec<u8>, StoreError> {
        let mut out = Vec::new();
        (&mut self.from)
            .take(bytes)
            .read_to_end(&mut out)
            .map_err(StoreError::io("read the export"))?;
        if out.len() as u64 != bytes {
            return Err(self.flaw(format!("cut short in {what}")));
        }
        self.offset += bytes;
        Ok(out)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], StoreError> {
        let bytes = self.raw(N as u64, what)?;
        self.hasher.update(&bytes);
        let mut array = [0; N];
        array.copy_from_slice(&bytes);
        Ok(array)
    }

    /// How many snapshots follow.
    fn header(&mut self) -> Result<usize, StoreError> {
        let header = self.array::<8>("the header")?;
        let at = |offset, what: String| StoreError::Stream { flaw: Flaw { what, offset } };
        if header[..4] != MAGIC {
            return Err(at(0, "it does not begin with `VFEX`".into()));
        }
        if header[4] != VERSION || header[5] != 0 {
            return Err(at(4, format!("version {}, of which nothing is known here", header[4])));
        }
        match usize::from(u16::from_le_bytes([header[6], header[7]])) {
            count @ 1..=CHAIN_MAX => Ok(count),
            count => Err(at(6, format!("{count} snapshots, not 1 to {CHAIN_MAX}"))),
        }
    }

    /// The next entry, or `None` at the end, which has been checked.
    fn entry(&mut self) -> Result<Option<Entry>, StoreError> {
        let [kind] = self.array("an entry's kind")?;
        if kind == END {
            let hash = self.hasher.finalize();
            if self.raw(32, "the hash")? != hash.as_bytes() {
                return Err(self.flaw("the hash at the end is not that of the stream"));
            }
            // Until the end of the pipe: its writer isn't cut off.
            let mut more = Vec::new();
            let rest = (&mut self.from).take(1).read_to_end(&mut more);
            return match rest.map_err(StoreError::io("read the export"))? {
                0 => Ok(None),
                _ => Err(self.flaw("bytes after the end")),
            };
        }
        let bytes_max = match kind {
            DESCRIPTOR => DESCRIPTOR_BYTES_MAX,
            FILE => BLOB_BYTES_MAX,
            CHUNK => CHUNK_FILE_BYTES_MAX,
            other => return Err(self.flaw(format!("an entry of kind {other}"))),
        };
        let [name_bytes] = self.array("a name's length")?;
        let name = self.raw(u64::from(name_bytes), "a name")?;
        self.hasher.update(&name);
        let Ok(name) = String::from_utf8(name) else { return Err(self.flaw("a name of no text")) };
        let bytes = u64::from_le_bytes(self.array("a payload's length")?);
        if bytes > bytes_max {
            return Err(self.flaw(format!("`{name}` of {bytes} bytes, above {bytes_max}")));
        }
        let offset = self.offset;
        let payload = self.raw(bytes, &format!("`{name}`"))?;
        self.hasher.update(&payload);
        Ok(Some(Entry { kind, name, payload, offset }))
    }
}

/// A snapshot of the stream that isn't here yet.
struct Arriving<'a> {
    writing: Writing<'a>,
    descriptor: Descriptor,
    /// As the stream has it, with its names of files.
    told: Descriptor,
    /// Whether the table of each image has come.
    has_table: Vec<bool>,
    has_state: bool,
}

impl Arriving<'_> {
    fn is_complete(&self) -> bool {
        self.has_state && self.has_table.iter().all(|has| *has)
    }

    /// What a file of the stream is, if it is one that is still to come.
    fn kind_of(&self, file: &str) -> Option<Kind> {
        if file == self.told.state.file {
            return (!self.has_state).then_some(Kind::State);
        }
        (0..).zip(&self.told.images).find_map(|(at, image)| {
            let beside = |kind| self.told.beside(&image.role.ending(kind));
            if file == image.table.file {
                let is_new = self.has_table.get(at) == Some(&false);
                return is_new.then_some(Kind::Table(at));
            }
            if file == beside(WORKING_SET) {
                return Some(Kind::WorkingSet(at));
            }
            (file == beside(PROFILE)).then_some(Kind::Profile(at))
        })
    }
}

/// What a file of a snapshot is, with the number of the image that it is of.
#[derive(Clone, Copy)]
enum Kind {
    State,
    Table(usize),
    WorkingSet(usize),
    Profile(usize),
}

/// What is known about the snapshots of a stream, once their descriptors have come.
struct Import<'a> {
    store: &'a Store,
    /// What each of them is called here.
    names: Names,
    /// Each of them, by its id, as it is or will be here.
    known: HashMap<SnapshotId, Descriptor>,
    arriving: Vec<Arriving<'a>>,
    /// Chunks that a snapshot needs, with their pages, and whether one that arrives does.
    chunks: HashMap<Hash, (u64, bool)>,
    /// What the last one is called that has come so far, if it is here already.
    last_here: Option<String>,
}

impl Store {
    /// Write snapshot `name` and all that it is a delta on into `out`.
    ///
    /// # Errors
    /// No such snapshot; damage; chunks that are not all here; `out` takes no more;
    /// [`StoreError::Cancelled`].
    pub fn export(&self, name: &str, out: &mut dyn Write, work: &Work) -> Result<(), StoreError> {
        let family = self.open_family(name)?;
        family.iter().try_for_each(|stored| stored.check_is_here())?;
        let mut out = Out { to: out, hasher: blake3::Hasher::new() };
        out.bytes(&MAGIC)?;
        out.bytes(&[VERSION, 0])?;
        out.bytes(&u16::try_from(family.len()).expect("at most CHAIN_MAX").to_le_bytes())?;
        let mut seen = HashSet::new();
        let mut windows = Vec::new();
        for stored in &family {
            let descriptor = stored.descriptor();
            let file = descriptor.encode().map_err(|why| StoreError::BadDraft { why })?;
            out.entry(DESCRIPTOR, &descriptor.name, &file)?;
            let sections = self.read_sections(stored, work)?;
            for (file, bytes) in sections.files(descriptor) {
                out.entry(FILE, &file, bytes)?;
            }
            windows.extend(each_chunk_once(stored).into_iter().filter(|w| seen.insert(w.hash)));
        }
        work.expect(windows.iter().map(|window| window.own_pages * PAGE_BYTES).sum());
        for windows in windows.chunks(BATCH_CHUNKS) {
            let read = |(): &mut (), window: &Window| self.read_chunk(window);
            let files = work.for_each_on(self.inner.threads(work), windows, || Ok(()), read)?;
            for (window, file) in windows.iter().zip(files) {
                out.entry(CHUNK, &window.hash.to_hex(), &file)?;
                work.done(window.own_pages * PAGE_BYTES);
            }
        }
        out.end()
    }

    /// Take the snapshots of an export into this store: the last one by the name `name`, if one is
    /// given, the others by their own. Those that are here already, by their id, are left out. All
    /// is verified before any of them is there.
    ///
    /// # Errors
    /// A stream that is damaged, cut or something else; a name that is taken; the last snapshot is
    /// here already, under whatever name; [`StoreError::Cancelled`]. No snapshot has appeared then,
    /// unless the store fails at the very end.
    pub fn import(
        &self,
        input: &mut dyn Read,
        name: Option<&str>,
        work: &Work,
    ) -> Result<Vec<Descriptor>, StoreError> {
        name.map_or(Ok(()), check_name)?;
        let mut input = In { from: input, hasher: blake3::Hasher::new(), offset: 0 };
        let count = input.header()?;
        let mut import = Import {
            store: self,
            names: Names::default(),
            known: HashMap::new(),
            arriving: Vec::new(),
            chunks: HashMap::new(),
            last_here: None,
        };
        let (mut batch, mut chunks_began) = (Vec::new(), false);
        while let Some(entry) = input.entry()? {
            work.check()?;
            let at = entry.offset;
            let left = count - import.names.0.len();
            let done = match entry.kind {
                DESCRIPTOR if left > 0 => {
                    import.descriptor(&entry, if left == 1 { name } else { None })
                }
                FILE if !chunks_began => import.file(&entry, work),
                CHUNK if left == 0 => {
                    chunks_began = true;
                    batch.extend(import.chunk(&entry)?.map(|hash| (hash, entry)));
                    if batch.len() == BATCH_CHUNKS {
                        import.keep(&std::mem::take(&mut batch), work)?;
                    }
                    Ok(())
                }
                kind => Err(at_flaw(at, format!("an entry of kind {kind} where none is expected"))),
            };
            done?;
        }
        if import.names.0.len() < count {
            return Err(input.flaw(format!("{} snapshots of {count}", import.names.0.len())));
        }
        import.keep(&batch, work)?;
        import.commit(&input, work)
    }
}

fn at_flaw(offset: u64, what: impl Into<String>) -> StoreError {
    StoreError::Stream { flaw: Flaw { what: what.into(), offset } }
}

/// A flaw in an entry, with the offset in the stream.
fn within(entry: &Entry) -> impl FnOnce(Flaw) -> StoreError + use<> {
    let (offset, name) = (entry.offset, entry.name.clone());
    move |flaw| at_flaw(offset + flaw.offset, format!("`{name}`: {}", flaw.what))
}

fn decode_descriptor(entry: &Entry) -> Result<Descriptor, StoreError> {
    Descriptor::decode(&entry.payload).map_err(|error| match error {
        Unreadable::Flaw(flaw) => within(entry)(flaw),
        Unreadable::Newer(what) => {
            let (key, place) = (entry.name.clone(), "the stream".to_owned());
            StoreError::Newer { key, place, what }
        }
    })
}

fn note_chunks(
    chunks: &mut HashMap<Hash, (u64, bool)>,
    table: &Table,
    is_needed: bool,
    entry: &Entry,
) -> Result<(), StoreError> {
    for Window { hash, own_pages, .. } in table.windows() {
        let (pages, needed) = chunks.entry(*hash).or_insert((*own_pages, is_needed));
        if pages != own_pages {
            let what =
                format!("`{}`: chunk {hash} of {own_pages} pages and of {pages}", entry.name);
            return Err(at_flaw(entry.offset, what));
        }
        *needed |= is_needed;
    }
    Ok(())
}

impl Import<'_> {
    fn descriptor(&mut self, entry: &Entry, name: Option<&str>) -> Result<(), StoreError> {
        let mut descriptor = decode_descriptor(entry)?;
        self.check_complete(entry.offset)?;
        if self.names.0.contains_key(&descriptor.id) {
            return Err(at_flaw(entry.offset, format!("snapshot {} twice", descriptor.id)));
        }
        self.check_bases(entry, &descriptor)?;
        let told = descriptor.clone();
        let bases = self.names.rename_bases(&mut descriptor);
        if let Some(here) = self.store.find_by_id(descriptor.id)? {
            self.names.0.insert(descriptor.id, here.name.clone());
            self.last_here = Some(here.name.clone());
            self.known.insert(descriptor.id, here);
            return Ok(());
        }
        self.last_here = None;
        if let Some(name) = name {
            name.clone_into(&mut descriptor.name);
        }
        let inner = &self.store.inner;
        let writing = Writing::begin(inner, &descriptor.name, Commit::New, bases)?;
        self.names.0.insert(descriptor.id, descriptor.name.clone());
        self.known.insert(descriptor.id, descriptor.clone());
        let has_table = vec![false; told.images.len()];
        self.arriving.push(Arriving { writing, descriptor, told, has_table, has_state: false });
        Ok(())
    }

    /// That what its images are deltas on has come before it, and has such images.
    fn check_bases(&self, entry: &Entry, descriptor: &Descriptor) -> Result<(), StoreError> {
        for image in &descriptor.images {
            let Some(base) = &image.base else { continue };
            let Some(found) = self.known.get(&base.id) else {
                let what = format!("`{}` comes without its base", entry.name);
                return Err(at_flaw(entry.offset, what));
            };
            check_base(base, found, image.pages()).map_err(|why| {
                let error = base_error(&entry.name, base, why);
                at_flaw(entry.offset, error.to_string())
            })?;
        }
        Ok(())
    }

    /// That the last snapshot, if it arrives, has all that it must have.
    fn check_complete(&self, offset: u64) -> Result<(), StoreError> {
        match self.arriving.last() {
            Some(last) if !last.is_complete() => {
                let name = &last.descriptor.name;
                Err(at_flaw(offset, format!("`{name}` comes without its tables or state")))
            }
            _ => Ok(()),
        }
    }

    fn file(&mut self, entry: &Entry, work: &Work) -> Result<(), StoreError> {
        if self.last_here.is_some() {
            return self.file_of_one_that_is_here(entry);
        }
        let not_expected = || at_flaw(entry.offset, format!("`{}` is not expected", entry.name));
        let Some(last) = self.arriving.last_mut() else { return Err(not_expected()) };
        let check_file = |file: &FileRef| match file.flaw_of(&entry.payload) {
            None => Ok(()),
            Some(flaw) => Err(within(entry)(flaw)),
        };
        let id = last.descriptor.id;
        match last.kind_of(&entry.name).ok_or_else(not_expected)? {
            Kind::WorkingSet(at) => {
                let image = &last.descriptor.images[at];
                working_set::flaw_of(&entry.payload, id, image.pages(), &work.cancelled)?
                    .map_or(Ok(()), |flaw| Err(within(entry)(flaw)))?;
                let ending = image.role.ending(WORKING_SET);
                last.writing.put_section(id, &ending, &entry.payload)?;
            }
            Kind::Profile(at) => {
                unseal(SealedKind::Profile, &entry.payload).map_err(within(entry))?;
                let ending = last.descriptor.images[at].role.ending(PROFILE);
                last.writing.put_section(id, &ending, &entry.payload)?;
            }
            Kind::State => {
                check_file(&last.told.state)?;
                unseal(SealedKind::State, &entry.payload).map_err(within(entry))?;
                last.has_state = true;
                last.descriptor.state = last.writing.put_section(id, STATE, &entry.payload)?;
            }
            Kind::Table(at) => {
                let image = &mut last.descriptor.images[at];
                check_file(&image.table)?;
                let table = Table::decode(&entry.payload).map_err(within(entry))?;
                if let Some(what) = table_flaw(&table, image) {
                    return Err(at_flaw(entry.offset, format!("`{}`: {what}", entry.name)));
                }
                note_chunks(&mut self.chunks, &table, true, entry)?;
                last.has_table[at] = true;
                let ending = image.role.ending(TABLE);
                image.table = last.writing.put_section(id, &ending, &entry.payload)?;
            }
        }
        Ok(())
    }

    /// Its chunks come, too, and some may be another's.
    fn file_of_one_that_is_here(&mut self, entry: &Entry) -> Result<(), StoreError> {
        if entry.name.rsplit_once('.').is_some_and(|(_, ending)| ending == TABLE) {
            let table = Table::decode(&entry.payload).map_err(within(entry))?;
            note_chunks(&mut self.chunks, &table, false, entry)?;
        }
        Ok(())
    }

    /// Which chunk it is, if it is needed.
    fn chunk(&self, entry: &Entry) -> Result<Option<Hash>, StoreError> {
        let hash = Hash::from_hex(&entry.name).ok();
        match hash.and_then(|hash| Some((hash, self.chunks.get(&hash)?))) {
            Some((hash, (_, true))) => Ok(Some(hash)),
            Some((_, (_, false))) => Ok(None),
            None => Err(at_flaw(entry.offset, format!("`{}`: no snapshot has that", entry.name))),
        }
    }

    /// Verify chunks and put them into the store.
    fn keep(&self, batch: &[(Hash, Entry)], work: &Work) -> Result<(), StoreError> {
        // Any of those that arrive may keep it: all are there until the last is committed.
        let Some(Arriving { writing, .. }) = self.arriving.last() else { return Ok(()) };
        work.for_each_on(
            self.store.inner.threads(work),
            batch,
            || Ok(()),
            |(), (hash, entry)| {
                let raw = chunk::decode(&entry.payload, hash).map_err(within(entry))?;
                let pages = raw.len() as u64 / PAGE_BYTES;
                let told = self.chunks.get(hash).map_or(0, |(pages, _)| *pages);
                if pages != told {
                    let what = format!("`{}`: {pages} pages, not {told}", entry.name);
                    return Err(at_flaw(entry.offset, what));
                }
                writing.keep_or_mend_chunk(hash, &entry.payload)?;
                work.expect(raw.len() as u64);
                work.done(raw.len() as u64);
                Ok(())
            },
        )?;
        Ok(())
    }

    fn commit(self, input: &In<'_>, work: &Work) -> Result<Vec<Descriptor>, StoreError> {
        self.check_complete(input.offset)?;
        // The stream's last snapshot is the one that was meant.
        if let Some(name) = self.last_here {
            return Err(StoreError::Exists { name, place: self.store.describe() });
        }
        let Some(Arriving { writing, .. }) = self.arriving.last() else {
            return Err(input.flaw("no snapshot"));
        };
        for (hash, _) in self.chunks.iter().filter(|(_, (_, is_needed))| *is_needed) {
            if writing.chunk_bytes(hash).is_none() {
                return Err(input.flaw(format!("chunk {hash} is missing")));
            }
        }
        // What can be refused is, before the first is there.
        for Arriving { descriptor, .. } in &self.arriving {
            encoded(descriptor)?;
        }
        // Each holds what it has pinned until all are there.
        let (mut done, mut held) = (Vec::new(), Vec::new());
        for Arriving { writing, descriptor, .. } in self.arriving {
            writing.commit(&descriptor)?;
            work.has_stored(&descriptor.name);
            done.push(descriptor);
            held.push(writing);
        }
        Ok(done)
    }
}
