//! What is in the folder of layers.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use vmfork_image::{ImageId, PAGE_BYTES};

use super::StoreError;
use super::images::read_table;
use super::note::{NOTE_BYTES_MAX, Note, VERSION};
use crate::layer::{LayerError, LayerFiles, PageState, remove_layer};

/// A layer on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundLayer {
    pub id: ImageId,
    pub note: Note,
    /// What it holds.
    pub written_bytes: u64,
    /// What it makes zeros of.
    pub zero_bytes: u64,
    /// Images whose pages its table names.
    pub names: Vec<ImageId>,
    /// Its table is stored, so nothing but what that names is needed below.
    pub has_table: bool,
}

/// A folder that is no layer any more, or that can't be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLayer {
    pub folder: PathBuf,
    pub reason: String,
    /// It could not be read now, and may be whole: the process has no fd left, or the medium fails.
    pub unread: bool,
}

/// Why a folder can't be used as a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Flaw {
    /// It can't be read now, and may be whole.
    Unread(String),
    Damaged(String),
}

impl Flaw {
    /// Of an error at `what`.
    fn of(what: &str, error: &io::Error) -> Self {
        match error.kind() {
            // It was read, and this is what it is.
            io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => {
                Self::Damaged(format!("{what}: {error}"))
            }
            _ => Self::Unread(format!("could not be read now: {what}: {error}")),
        }
    }

    fn of_layer(error: &LayerError) -> Self {
        match error {
            LayerError::File { path, source } => Self::of(&file_name(path), source),
            LayerError::Map { source, .. } => Self::Damaged(format!("{error}: {source}")),
            _ => Self::Damaged(error.to_string()),
        }
    }

    fn of_table(error: &StoreError) -> Self {
        match error {
            StoreError::Folder { path, source } => Self::of(&file_name(path), source),
            _ => Self::Damaged(error.to_string()),
        }
    }

    /// As an error of reading.
    pub(super) fn into_io(self) -> io::Error {
        match self {
            Self::Unread(reason) => io::Error::other(reason),
            Self::Damaged(reason) => io::Error::new(io::ErrorKind::InvalidData, reason),
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What is in a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub layers: BTreeMap<ImageId, FoundLayer>,
    pub bad: Vec<BadLayer>,
}

impl Listing {
    /// The newest layer of each disk, in the order of the disks' IDs. One that was made in advance
    /// counts if nothing else is left of its disk, or if all else is frozen. It may be in use and
    /// empty: a disk has the same bytes with and without it.
    ///
    /// A disk that has ended is not listed, although others may need its frozen layers. Nor is one
    /// that was made in advance on a layer that is damaged or has gone: it holds nothing.
    pub fn disks(&self) -> Vec<&FoundLayer> {
        let mut newest: BTreeMap<ImageId, &FoundLayer> = BTreeMap::new();
        for layer in self.layers.values().filter(|layer| !layer.note.merged) {
            let best = newest.entry(layer.note.disk_id).or_insert(layer);
            if rank(layer) > rank(best) {
                *best = layer;
            }
        }
        // What others lie on was frozen, whatever its note says. If that was not written down in
        // full, what was made in advance is in use.
        let current = newest.into_values().filter_map(|layer| match self.above(layer.id) {
            Some(_) => self.in_advance(layer),
            None => Some(layer),
        });
        let holds = |layer: &&FoundLayer| {
            !is_unused(layer) || layer.note.on.is_none_or(|on| self.layers.contains_key(&on))
        };
        current.filter(holds).collect()
    }

    /// The newest layer of a disk that has not ended, whatever lies on it.
    pub fn newest_of(&self, disk: ImageId) -> Option<&FoundLayer> {
        let own = |layer: &&FoundLayer| layer.note.disk_id == disk && !layer.note.merged;
        let layers = self.layers.values().filter(own);
        let newest = layers.max_by_key(|layer| rank(layer))?;
        Some(self.above(newest.id).and_then(|_| self.in_advance(newest)).unwrap_or(newest))
    }

    /// Whether the disk's newest layer may be a damaged one, so that this one has an older content.
    /// A frozen layer has another one above it, unless it was read for an export.
    pub fn is_suspect(&self, newest: &FoundLayer) -> bool {
        newest.note.frozen && !self.bad.is_empty()
    }

    /// The disk's next layer, made in advance. One that was made before the disk grew may be left.
    fn in_advance(&self, frozen: &FoundLayer) -> Option<&FoundLayer> {
        let next = self.layers.values().filter(|layer| {
            let (note, of) = (&layer.note, &frozen.note);
            is_unused(layer) && note.disk_id == of.disk_id && note.on == Some(frozen.id)
        });
        next.max_by_key(|layer| rank(layer))
    }

    /// These layers and all that they need under them.
    pub(super) fn needed_by(&self, heads: impl Iterator<Item = ImageId>) -> BTreeSet<ImageId> {
        let mut needed = BTreeSet::new();
        let mut wanted: Vec<ImageId> = heads.collect();
        while let Some(id) = wanted.pop() {
            let Some(layer) = self.layers.get(&id).filter(|_| needed.insert(id)) else { continue };
            wanted.extend(&layer.names);
            wanted.extend(layer.note.on.filter(|_| !layer.has_table));
        }
        needed
    }

    /// A layer that needs `id` under it.
    pub fn above(&self, id: ImageId) -> Option<ImageId> {
        let needs = |layer: &&FoundLayer| {
            layer.id != id
                && !is_unused(layer)
                && (layer.names.contains(&id) || (layer.note.on == Some(id) && !layer.has_table))
        };
        self.layers.values().find(needs).map(|layer| layer.id)
    }
}

/// The newest layer of a disk has the highest. A disk only grows.
fn rank(layer: &FoundLayer) -> (bool, u64, u64) {
    (!is_unused(layer), layer.note.size_bytes, layer.note.number)
}

/// It was made in advance, and not used.
fn is_unused(layer: &FoundLayer) -> bool {
    let Note { spare, frozen, .. } = layer.note;
    spare && !frozen && layer.written_bytes == 0 && layer.zero_bytes == 0
}

/// The layers' folders.
pub(super) fn ids(layers: &Path) -> io::Result<Vec<ImageId>> {
    let mut ids = Vec::new();
    for entry in std::fs::read_dir(layers)? {
        ids.extend(id_of(&entry?.file_name()));
    }
    Ok(ids)
}

fn id_of(name: &OsStr) -> Option<ImageId> {
    let name = name.to_str()?;
    name.parse::<ImageId>().ok().filter(|id| id.to_string() == name)
}

/// A layer in use that lies on `id`, or whose table names it.
///
/// # Errors
/// The folder can't be read, or what a layer in it lies on.
pub(super) fn used_above(layers: &Path, id: ImageId) -> io::Result<Option<ImageId>> {
    // A table that names a layer is stored after that layer's note says that it is frozen.
    let own = known(read_note(&layers.join(id.to_string())))?;
    let may_be_named = own.is_some_and(|note| note.frozen);
    for above in ids(layers)?.into_iter().filter(|above| *above != id) {
        let path = layers.join(above.to_string());
        let Some(note) = known(read_note(&path))? else { continue };
        let unused = || {
            note.spare
                && !note.frozen
                && LayerFiles::open(&path).is_ok_and(|files| is_empty(&files))
        };
        let table = || known(read_table(&path.join("table")).map_err(|e| Flaw::of_table(&e)));
        if (note.on == Some(id) && !unused())
            || (may_be_named && table()?.is_some_and(|table| table.owners().get(id) > 0))
        {
            return Ok(Some(above));
        }
    }
    Ok(None)
}

/// One that is damaged is reported by `list`: it names nothing. One that can't be read may.
fn known<T>(found: Result<Option<T>, Flaw>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(found),
        Err(Flaw::Damaged(_)) => Ok(None),
        Err(flaw @ Flaw::Unread(_)) => Err(flaw.into_io()),
    }
}

/// Removes folders without a note. → how many.
pub(super) fn remove_half_made(layers: &Path) -> io::Result<u64> {
    let mut removed = 0;
    for id in ids(layers)? {
        let path = layers.join(id.to_string());
        let half = match read_note(&path) {
            Ok(None) => true,
            // One that is damaged is reported, by `list`.
            Ok(Some(_)) | Err(_) => false,
        };
        if half {
            match remove_layer(&path) {
                Ok(()) => removed += 1,
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a layer can't be removed");
                }
            }
        }
    }
    Ok(removed)
}

fn is_empty(files: &LayerFiles) -> bool {
    files.map().count(PageState::Absent) == files.map().pages()
}

/// `None`: there is none.
///
/// # Errors
/// Why it is no note, or can't be read.
pub(super) fn read_note(folder: &Path) -> Result<Option<Note>, Flaw> {
    let failed = |error: io::Error| Flaw::of("its note", &error);
    let file = match File::open(folder.join("note")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(NOTE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    let note: Note = serde_json::from_slice(&bytes)
        .map_err(|error| Flaw::Damaged(format!("its note: {error}")))?;
    if note.version != VERSION {
        let version = note.version;
        let reason = format!("its note has version {version}, this vmfork reads {VERSION}");
        return Err(Flaw::Damaged(reason));
    }
    Ok(Some(note))
}

pub(super) fn list(layers: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in std::fs::read_dir(layers)? {
        let entry = entry?;
        let folder = entry.path();
        let Some(id) = id_of(&entry.file_name()) else {
            let reason = "its name is no layer's".to_owned();
            listing.bad.push(BadLayer { folder, reason, unread: false });
            continue;
        };
        match look(id, &folder) {
            Ok(Some(layer)) => drop(listing.layers.insert(id, layer)),
            // It is being made, or being removed.
            Ok(None) => {}
            Err(Flaw::Damaged(reason)) => {
                listing.bad.push(BadLayer { folder, reason, unread: false });
            }
            Err(Flaw::Unread(reason)) => {
                listing.bad.push(BadLayer { folder, reason, unread: true });
            }
        }
    }
    Ok(listing)
}

/// `None`: there is no layer any more, or not yet.
///
/// # Errors
/// It is damaged, or can't be read now.
pub(super) fn look(id: ImageId, folder: &Path) -> Result<Option<FoundLayer>, Flaw> {
    let Some(note) = read_note(folder)? else { return Ok(None) };
    let files = LayerFiles::open(folder).map_err(|error| Flaw::of_layer(&error))?;
    if files.map().pages() < note.size_bytes.div_ceil(PAGE_BYTES) {
        let reason = format!("its map is too short for {} bytes", note.size_bytes);
        return Err(Flaw::Damaged(reason));
    }
    let table = read_table(&folder.join("table")).map_err(|error| Flaw::of_table(&error))?;
    let bytes = |state| files.map().count(state) * PAGE_BYTES;
    let owners = table.iter().flat_map(|table| table.owners().iter().map(|(id, _)| id));
    Ok(Some(FoundLayer {
        id,
        note,
        written_bytes: bytes(PageState::Written),
        zero_bytes: bytes(PageState::Zero),
        names: owners.collect(),
        has_table: table.is_some(),
    }))
}
