//! What is in the folder of layers.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use vmfork_image::{ImageId, PAGE_BYTES};

use super::note::{NOTE_BYTES_MAX, Note, VERSION};
use super::read_table;
use crate::layer::{LayerFiles, PageState, remove_layer};

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

/// A folder that is no layer any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLayer {
    pub folder: PathBuf,
    pub reason: String,
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
    /// A disk that has ended is not listed, although others may need its frozen layers.
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
        current.collect()
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
pub(super) fn used_above(layers: &Path, id: ImageId) -> io::Result<Option<ImageId>> {
    // A table that names a layer is stored after that layer's note says that it is frozen.
    let own = read_note(&layers.join(id.to_string()));
    let may_be_named = own.is_ok_and(|note| note.is_some_and(|note| note.frozen));
    for above in ids(layers)?.into_iter().filter(|above| *above != id) {
        let path = layers.join(above.to_string());
        // One that is damaged is reported by `list`.
        let Ok(Some(note)) = read_note(&path) else { continue };
        let unused = || {
            note.spare
                && !note.frozen
                && LayerFiles::open(&path).is_ok_and(|files| is_empty(&files))
        };
        let names = || {
            let table = read_table(&path.join("table"));
            table.is_ok_and(|table| table.is_some_and(|table| table.owners().get(id) > 0))
        };
        if (note.on == Some(id) && !unused()) || (may_be_named && names()) {
            return Ok(Some(above));
        }
    }
    Ok(None)
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
/// Why it is no note.
pub(super) fn read_note(folder: &Path) -> Result<Option<Note>, String> {
    let file = match File::open(folder.join("note")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("its note: {error}")),
    };
    let mut bytes = Vec::new();
    file.take(NOTE_BYTES_MAX)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("its note: {error}"))?;
    let note: Note =
        serde_json::from_slice(&bytes).map_err(|error| format!("its note: {error}"))?;
    if note.version != VERSION {
        return Err(format!("its note has version {}, this vmfork reads {VERSION}", note.version));
    }
    Ok(Some(note))
}

pub(super) fn list(layers: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in std::fs::read_dir(layers)? {
        let entry = entry?;
        let folder = entry.path();
        let Some(id) = id_of(&entry.file_name()) else {
            listing.bad.push(BadLayer { folder, reason: "its name is no layer's".to_owned() });
            continue;
        };
        match look(id, &folder) {
            Ok(Some(layer)) => drop(listing.layers.insert(id, layer)),
            // It is being made, or being removed.
            Ok(None) => {}
            Err(reason) => listing.bad.push(BadLayer { folder, reason }),
        }
    }
    Ok(listing)
}

fn look(id: ImageId, folder: &Path) -> Result<Option<FoundLayer>, String> {
    let Some(note) = read_note(folder)? else { return Ok(None) };
    let chain = |error: &dyn std::error::Error| match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    let files = LayerFiles::open(folder).map_err(|error| chain(&error))?;
    if files.map().pages() < note.size_bytes.div_ceil(PAGE_BYTES) {
        return Err(format!("its map is too short for {} bytes", note.size_bytes));
    }
    let table = read_table(&folder.join("table")).map_err(|error| chain(&error))?;
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
