//! One content of an object, and what of it is in a file of this host.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use vmfork_disk::OwnPages;
use vmfork_image::{PAGE_BYTES, PageRange};
use vmfork_store::BlobError;
use vmfork_store_s3::ObjectVersion;

use crate::ahead::Ahead;
use crate::note::Note;
use crate::reader::Reader;

/// Its bytes, each unit at its place.
const DATA: &str = "data";
/// A byte for each unit: 1 if `DATA` has it.
const UNITS: &str = "units";

/// Fetched at a time: an object store takes 10 ms and more for an answer.
pub(crate) const UNIT_BYTES: u64 = 256 << 10;
/// Units that are fetched ahead of a read that follows on another one.
const AHEAD_UNITS: u64 = 4;

/// Units that are remembered of those that were not kept: a guest reads a unit in many parts.
pub(crate) const UNKEPT_MAX: usize = 4;

/// No unit, and none before the first.
const NONE: u64 = u64::MAX - 1;

/// Where a unit's bytes are.
#[derive(Debug, Clone)]
enum Unit {
    /// In the file.
    Here,
    /// There was no room for them.
    Bytes(Bytes),
}

/// A unit did not come.
#[derive(Debug, Clone)]
enum NotRead {
    Failed { location: String, error: Arc<BlobError> },
    GivenUp,
}

impl fmt::Display for NotRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { location, error } => {
                write!(f, "object `{location}`: {error}")?;
                error.remedy().map_or(Ok(()), |remedy| write!(f, ": {remedy}"))
            }
            Self::GivenUp => f.write_str("the fetch was given up"),
        }
    }
}

impl std::error::Error for NotRead {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed { error, .. } => error.source(),
            Self::GivenUp => None,
        }
    }
}

/// A fetch that is under way, and its outcome for all who wait for it.
#[derive(Debug, Default)]
struct Flight {
    landed: Mutex<Option<Result<Unit, NotRead>>>,
    lands: Condvar,
}

impl Flight {
    fn land(&self, outcome: Result<Unit, NotRead>) {
        self.landed.lock().get_or_insert(outcome);
        self.lands.notify_all();
    }

    fn wait(&self) -> Result<Unit, NotRead> {
        let mut outcome = self.landed.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            self.lands.wait(&mut outcome);
        }
    }
}

/// Lands however the fetch ends, also by a panic.
struct Landing<'a> {
    of: &'a Cached,
    unit: u64,
    flight: Arc<Flight>,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        self.of.state.lock().flying.remove(&self.unit);
        self.flight.land(Err(NotRead::GivenUp));
    }
}

#[derive(Debug, Default)]
struct State {
    here: Vec<u64>,
    /// Being fetched.
    flying: BTreeMap<u64, Arc<Flight>>,
    /// The last ones that were not kept.
    unkept: VecDeque<(u64, Bytes)>,
}

impl State {
    fn has(&self, unit: u64) -> bool {
        let word = usize::try_from(unit / 64).ok().and_then(|at| self.here.get(at));
        word.is_some_and(|word| word & 1 << (unit % 64) != 0)
    }

    fn set(&mut self, unit: u64) {
        if let Some(word) = usize::try_from(unit / 64).ok().and_then(|at| self.here.get_mut(at)) {
            *word |= 1 << (unit % 64);
        }
    }

    fn unkept(&self, unit: u64) -> Option<Bytes> {
        self.unkept.iter().find(|(of, _)| *of == unit).map(|(_, bytes)| bytes.clone())
    }

    fn remember(&mut self, unit: u64, bytes: Bytes) {
        self.unkept.push_back((unit, bytes));
        if self.unkept.len() > UNKEPT_MAX {
            self.unkept.pop_front();
        }
    }
}

/// Fetches each unit once.
#[derive(Debug)]
pub(crate) struct Cached {
    location: String,
    version: ObjectVersion,
    reader: Arc<dyn Reader>,
    file: File,
    /// A byte for each unit: 1 if the file has it.
    units: File,
    floor_bytes: u64,
    state: Mutex<State>,
    /// Whether it was said that bytes were not kept.
    was_unkept: AtomicBool,
    /// The unit that was read last.
    last: AtomicU64,
    ahead: Weak<Ahead>,
    this: Weak<Self>,
}

impl Cached {
    /// With what an earlier daemon fetched, unless the host has ended since. `floor_bytes`: what
    /// the host keeps free.
    ///
    /// # Errors
    /// The folder's files can't be made or read.
    pub(crate) fn open(
        folder: &Path,
        note: &Note,
        reader: Arc<dyn Reader>,
        (floor_bytes, ahead): (u64, &Arc<Ahead>),
    ) -> io::Result<Arc<Self>> {
        make_private(folder)?;
        let version = note.object_version();
        let known = match known(folder, note) {
            Ok(known) => known,
            Err(why) => {
                let location = &note.location;
                tracing::warn!(location, why, "an object is fetched again");
                None
            }
        };
        let (file, list, floor_bytes) = match known {
            Some((file, list)) => (file, list, floor_bytes),
            None => {
                let (file, list) = empty(folder, &version)?;
                let noted = note.write(folder);
                // Nothing is kept that no note speaks of.
                let floor_bytes = match noted {
                    Err(error) if error.kind() == io::ErrorKind::StorageFull => u64::MAX,
                    noted => noted.map(|()| floor_bytes)?,
                };
                (file, list, floor_bytes)
            }
        };
        let units = version.size_bytes.div_ceil(UNIT_BYTES);
        let words = usize::try_from(units.div_ceil(64)).map_err(io::Error::other)?;
        let mut state = State { here: vec![0; words], ..State::default() };
        let mut marks = Vec::new();
        (&list).take(units).read_to_end(&mut marks)?;
        let here = (0..).zip(marks).filter(|(_, byte)| *byte == 1);
        here.for_each(|(unit, _)| state.set(unit));
        Ok(Arc::new_cyclic(|this| Self {
            location: note.location.clone(),
            version,
            reader,
            file,
            units: list,
            floor_bytes,
            state: Mutex::new(state),
            was_unkept: AtomicBool::new(false),
            last: AtomicU64::new(NONE),
            ahead: Arc::downgrade(ahead),
            this: Weak::clone(this),
        }))
    }

    /// Of the object.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.version.size_bytes
    }

    /// If another thread fetches it, waits for that, and has its outcome.
    ///
    /// # Errors
    /// The object store does not give it.
    fn unit(&self, unit: u64) -> io::Result<Unit> {
        let mut state = self.state.lock();
        if state.has(unit) {
            return Ok(Unit::Here);
        }
        if let Some(bytes) = state.unkept(unit) {
            return Ok(Unit::Bytes(bytes));
        }
        if let Some(flight) = state.flying.get(&unit) {
            let flight = Arc::clone(flight);
            drop(state);
            return flight.wait().map_err(io::Error::other);
        }
        let flight = Arc::new(Flight::default());
        state.flying.insert(unit, Arc::clone(&flight));
        drop(state);
        let landing = Landing { of: self, unit, flight };
        let outcome = self.get(unit).map(|bytes| match self.keep(unit, &bytes) {
            true => Unit::Here,
            false => Unit::Bytes(bytes),
        });
        match &outcome {
            Ok(Unit::Here) => self.state.lock().set(unit),
            Ok(Unit::Bytes(bytes)) => self.state.lock().remember(unit, bytes.clone()),
            Err(_) => {}
        }
        landing.flight.land(outcome.clone());
        outcome.map_err(io::Error::other)
    }

    fn get(&self, unit: u64) -> Result<Bytes, NotRead> {
        let start = unit * UNIT_BYTES;
        let end = (start + UNIT_BYTES).min(self.version.size_bytes);
        let read = self.reader.read(&self.version, start..end);
        let location = || self.location.clone();
        read.map_err(|error| NotRead::Failed { location: location(), error: Arc::new(error) })
    }

    /// → whether it is in the file.
    fn keep(&self, unit: u64, bytes: &[u8]) -> bool {
        let write = || -> io::Result<()> {
            let found = rustix::fs::fstatvfs(&self.file)?;
            let free = found.f_bavail.saturating_mul(found.f_frsize);
            if free.saturating_sub(UNIT_BYTES) < self.floor_bytes {
                let text = format!("the host keeps {} bytes free", self.floor_bytes);
                return Err(io::Error::other(text));
            }
            self.file.write_all_at(bytes, unit * UNIT_BYTES)?;
            self.units.write_all_at(&[1], unit)
        };
        let why = match write() {
            Ok(()) => return true,
            Err(error) => error.to_string(),
        };
        if !self.was_unkept.swap(true, Ordering::Relaxed) {
            let location = &self.location;
            tracing::warn!(location, why, "bytes of an object are not kept, and are fetched again");
        }
        false
    }

    /// A read that follows on another one has more units fetched.
    fn follow(&self, unit: u64) {
        let before = self.last.swap(unit, Ordering::Relaxed);
        if before.wrapping_add(1) != unit {
            return;
        }
        let Some(ahead) = self.ahead.upgrade() else { return };
        let units = self.version.size_bytes.div_ceil(UNIT_BYTES);
        for next in (unit + 1..units).take(usize::try_from(AHEAD_UNITS).unwrap_or(0)) {
            let state = self.state.lock();
            let is_asked = state.has(next) || state.flying.contains_key(&next);
            drop(state);
            let this = Weak::clone(&self.this);
            let fetch = move || {
                if let Some(Err(error)) = this.upgrade().map(|cached| cached.unit(next)) {
                    // Who reads it asks again, and is told.
                    tracing::debug!(unit = next, %error, "not fetched ahead");
                }
            };
            if !is_asked && !ahead.put(Box::new(fetch)) {
                return;
            }
        }
    }
}

impl OwnPages for Cached {
    fn is_here(&self, range: PageRange) -> bool {
        let state = self.state.lock();
        let mut units = units_of(range);
        units.all(|unit| state.has(unit))
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        let (begin, size) = (range.byte_offset(), self.version.size_bytes);
        for unit in units_of(range) {
            let start = (unit * UNIT_BYTES).max(begin);
            let end = ((unit + 1) * UNIT_BYTES).min(begin + range.byte_len());
            let at = |offset: u64| usize::try_from(offset - begin).map_err(io::Error::other);
            let into = bytes.get_mut(at(start)?..at(end)?).ok_or(io::ErrorKind::InvalidInput)?;
            // The last page may lie beyond the end in part.
            let there = usize::try_from(end.min(size).saturating_sub(start));
            let (data, beyond) = into.split_at_mut(there.map_err(io::Error::other)?);
            beyond.fill(0);
            if data.is_empty() {
                continue;
            }
            match self.unit(unit)? {
                Unit::Here => {
                    self.file.read_exact_at(data, start)?;
                    self.follow(unit);
                }
                Unit::Bytes(all) => {
                    let skip = usize::try_from(start - unit * UNIT_BYTES);
                    let skip = skip.map_err(io::Error::other)?;
                    let found = all.get(skip..skip + data.len());
                    data.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
                }
            }
        }
        Ok(())
    }
}

fn units_of(range: PageRange) -> std::ops::Range<u64> {
    let end = range.byte_offset() + range.byte_len();
    range.byte_offset() / UNIT_BYTES..end.div_ceil(UNIT_BYTES)
}

/// Length of the file of its bytes.
fn data_bytes(version: &ObjectVersion) -> u64 {
    version.size_bytes.next_multiple_of(PAGE_BYTES)
}

/// The files of what an earlier daemon fetched. `None`: it was nothing.
///
/// # Errors
/// Why it can't be used, in words.
fn known(folder: &Path, note: &Note) -> Result<Option<(File, File)>, String> {
    let damaged = |error: io::Error| format!("what is here of it can't be read: {error}");
    let Some(old) = Note::read(folder).map_err(damaged)? else { return Ok(None) };
    if !old.is_as(note) {
        return Err("the host was started since, or can't tell".to_owned());
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let file = options.open(folder.join(DATA)).map_err(damaged)?;
    // Of a file that was made since, or cut, no unit is there.
    let (found, wanted) =
        (file.metadata().map_err(damaged)?.len(), data_bytes(&note.object_version()));
    if found != wanted {
        return Err(format!("what is here of it has {found} bytes in place of {wanted}"));
    }
    let units = options.open(folder.join(UNITS)).map_err(damaged)?;
    Ok(Some((file, units)))
}

/// Files without a unit. Those of an earlier daemon lose their marks before their bytes.
fn empty(folder: &Path, version: &ObjectVersion) -> io::Result<(File, File)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let units = options.open(folder.join(UNITS))?;
    let file = options.open(folder.join(DATA))?;
    file.set_len(data_bytes(version))?;
    Ok((file, units))
}

/// A folder that only the daemon's user can enter.
pub(crate) fn make_private(folder: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}
