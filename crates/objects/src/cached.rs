//! One content of an object, and what of it is in a file of this host.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use vmfork_disk::OwnPages;
use vmfork_image::{PAGE_BYTES, PageRange};
use vmfork_store_s3::ObjectVersion;

use crate::ahead::Ahead;
use crate::note::Note;
use crate::reader::Reader;

/// Fetched at a time: an object store takes 10 ms and more for an answer.
pub(crate) const UNIT_BYTES: u64 = 256 << 10;
/// Units that are fetched ahead of a read that follows on another one.
const AHEAD_UNITS: u64 = 4;

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

/// A fetch that is under way, and its outcome for all who wait for it.
#[derive(Debug, Default)]
struct Flight {
    landed: Mutex<Option<Result<Unit, String>>>,
    lands: Condvar,
}

impl Flight {
    fn land(&self, outcome: Result<Unit, String>) {
        self.landed.lock().get_or_insert(outcome);
        self.lands.notify_all();
    }

    fn wait(&self) -> Result<Unit, String> {
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
        self.flight.land(Err("the fetch was given up".to_owned()));
    }
}

#[derive(Debug, Default)]
struct State {
    here: Vec<u64>,
    /// Being fetched.
    flying: BTreeMap<u64, Arc<Flight>>,
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
        let is_known = match Note::read(folder) {
            Ok(None) => false,
            Ok(Some(old)) if old.is_of_this_boot() => true,
            Ok(Some(old)) => {
                tracing::info!(
                    ?old,
                    "an object is fetched again: it is of no boot, or of an earlier one"
                );
                false
            }
            Err(error) => {
                let location = &note.location;
                tracing::warn!(location, %error, "an object is fetched again: its note is damaged");
                false
            }
        };
        let version = note.object_version();
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(!is_known);
        let (file, list) =
            (options.open(folder.join("data"))?, options.open(folder.join("units"))?);
        file.set_len(version.size_bytes.next_multiple_of(PAGE_BYTES))?;
        let units = version.size_bytes.div_ceil(UNIT_BYTES);
        let words = usize::try_from(units.div_ceil(64)).map_err(io::Error::other)?;
        let mut state = State { here: vec![0; words], flying: BTreeMap::new() };
        if is_known {
            let mut known = Vec::new();
            (&list).take(units).read_to_end(&mut known)?;
            let here = (0..).zip(known).filter(|(_, byte)| *byte == 1);
            here.for_each(|(unit, _)| state.set(unit));
        } else {
            Note::new(&note.location, version.clone()).write(folder)?;
        }
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
        if matches!(outcome, Ok(Unit::Here)) {
            self.state.lock().set(unit);
        }
        landing.flight.land(outcome.clone());
        outcome.map_err(io::Error::other)
    }

    fn get(&self, unit: u64) -> Result<Bytes, String> {
        let start = unit * UNIT_BYTES;
        let end = (start + UNIT_BYTES).min(self.version.size_bytes);
        self.reader.read(&self.version, start..end).map_err(|error| {
            let remedy = error.remedy().map(|remedy| format!(": {remedy}")).unwrap_or_default();
            format!("object `{}`: {error}{remedy}", self.location)
        })
    }

    /// → whether it is in the file.
    fn keep(&self, unit: u64, bytes: &[u8]) -> bool {
        let has_room = rustix::fs::fstatvfs(&self.file).is_ok_and(|found| {
            let free = found.f_bavail.saturating_mul(found.f_frsize);
            free.saturating_sub(UNIT_BYTES) >= self.floor_bytes
        });
        let write = || {
            self.file.write_all_at(bytes, unit * UNIT_BYTES)?;
            self.units.write_all_at(&[1], unit)
        };
        let why = match has_room.then(write) {
            Some(Ok(())) => return true,
            Some(Err(error)) => error.to_string(),
            None => format!("the host keeps {} bytes free", self.floor_bytes),
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

/// A folder that only the daemon's user can enter.
pub(crate) fn make_private(folder: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}
