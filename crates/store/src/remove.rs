//! Removing snapshots, and what no snapshot needs any more.

use std::collections::{HashMap, HashSet};

use blake3::Hash;

use crate::error::StoreError;
use crate::files::read_descriptor;
use crate::format::descriptor::{Descriptor, SnapshotId};
use crate::names::{
    CHUNKS, DESCRIPTOR, ORIGIN, PROFILE, SNAPSHOTS, STATE, WORKING_SET, chunk_key, chunk_of,
    is_of_an_attempt, snapshot_key, snapshot_of,
};
use crate::pins::Collector;
use crate::references::{References, files_by_snapshot};
use crate::store::{Inner, Store, check_name};
use crate::work::Work;

/// What [`Store::remove`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// Deltas before what they are deltas on.
    pub names: Vec<String>,
    /// Of files that are gone. Chunks of a snapshot that is open stay until it is closed, for
    /// [`Store::collect`].
    pub freed_bytes: u64,
}

/// What [`Store::collect`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Chunks that no snapshot named.
    pub chunks: u64,
    /// Other files: of snapshots that were never finished, and of older tables.
    pub files: u64,
    pub freed_bytes: u64,
    /// Snapshots that are damaged, so that it is not known which chunks they have. As long as they
    /// are there, no chunk is removed.
    pub blocked_by: Vec<String>,
}

impl Store {
    /// Remove snapshot `name`, with its deltas if `cascade`, then the chunks that no snapshot names
    /// any more.
    ///
    /// # Errors
    /// There is no such snapshot. There are deltas on it, which are all named. Unless `cascade`,
    /// there are snapshots of which it can't be told whether they are its deltas. One of these, or
    /// a delta on it, is being written.
    pub fn remove(&self, name: &str, cascade: bool) -> Result<Removed, StoreError> {
        self.remove_if(name, cascade, &|_| true, &mut |_| ())
    }

    /// The same, if each of those that would be removed `may_go`; else nothing is removed. One
    /// whose descriptor is damaged is not asked for. `gone` is called with the name of each
    /// snapshot once it is not in the store any more, also if what follows fails.
    ///
    /// # Errors
    /// As [`Store::remove`], and [`StoreError::Changed`] names one that may not go.
    pub fn remove_if(
        &self,
        name: &str,
        cascade: bool,
        may_go: &dyn Fn(SnapshotId) -> bool,
        gone: &mut dyn FnMut(&str),
    ) -> Result<Removed, StoreError> {
        check_name(name)?;
        let inner = &*self.inner;
        let collector = inner.pins.collector();
        let mut removed = Removed::default();
        let mut candidates = HashSet::new();
        {
            let _catalogue = inner.catalogue.lock();
            let mut references = inner.references.lock();
            references.refresh(inner.blobs())?;
            let files = files_by_snapshot(inner.blobs())?;
            if !files.get(name).is_some_and(|files| files.contains(DESCRIPTOR)) {
                let place = inner.blobs().describe();
                return Err(StoreError::NotFound { name: name.to_owned(), place });
            }
            // Deltas first, so that a crash in between leaves nothing without its base.
            removed.names = removal_order(&references, name);
            let dependants: Vec<_> = removed.names.iter().rev().skip(1).cloned().collect();
            if !dependants.is_empty() && !cascade {
                return Err(StoreError::Dependants { name: name.to_owned(), dependants });
            }
            let unreadable = references.unreadable().filter(|other| *other != name);
            let unreadable: Vec<_> = unreadable.map(str::to_owned).collect();
            if !unreadable.is_empty() && !cascade {
                let name = name.to_owned();
                return Err(StoreError::UnknownDependants { name, unreadable });
            }
            let may_not = |one: &&Descriptor| removed.names.contains(&one.name) && !may_go(one.id);
            if let Some(other) = references.all_descriptors().find(may_not) {
                return Err(StoreError::Changed { name: other.name.clone() });
            }
            inner.check_not_written(&removed.names)?;
            for name in &removed.names {
                candidates.extend(references.chunks_of(name).iter().copied());
                inner.blobs().delete(&snapshot_key(name, DESCRIPTOR))?;
                gone(name);
            }
            // Before their chunks go, or a power cut might bring the snapshots back without.
            inner.blobs().sync()?;
            for name in &removed.names {
                for file in files.get(name).into_iter().flatten() {
                    let key = snapshot_key(name, file);
                    removed.freed_bytes += inner.delete_counted(&collector, &key)?.unwrap_or(0);
                }
            }
            references.refresh(inner.blobs())?;
        }
        let (_, freed_bytes, _) = inner.delete_unused(&collector, candidates)?;
        removed.freed_bytes += freed_bytes;
        Ok(removed)
    }

    /// Remove all that no snapshot names and no writer is about to name. That is what crashes and
    /// cancelled work have left, and chunks of removed snapshots that had been open.
    ///
    /// # Errors
    /// The store can't be listed or written.
    pub fn collect(&self) -> Result<Collected, StoreError> {
        let inner = &*self.inner;
        let collector = inner.pins.collector();
        let mut collected = Collected::default();
        // First what is there, then who names it.
        let sections = inner.blobs().list(SNAPSHOTS)?;
        let chunks = inner.blobs().list(CHUNKS)?.iter().filter_map(|key| chunk_of(key)).collect();
        inner.references.lock().refresh(inner.blobs())?;
        let named = inner.named_files(&sections)?;
        for key in sections.iter().filter(|key| !named.contains(*key)) {
            if let Some(bytes) = inner.delete_counted(&collector, key)? {
                collected.files += 1;
                collected.freed_bytes += bytes;
            }
        }
        let (count, freed_bytes, blocked_by) = inner.delete_unused(&collector, chunks)?;
        collected.chunks = count;
        collected.freed_bytes += freed_bytes + inner.blobs().sweep()?;
        collected.blocked_by = blocked_by;
        Ok(collected)
    }
}

impl Inner {
    /// That none of `names` is being written or about to become a base.
    fn check_not_written(&self, names: &[String]) -> Result<(), StoreError> {
        let writing = self.writing.lock();
        let in_the_way = |(name, bases): &(&String, &Vec<String>)| {
            names.contains(name) || bases.iter().any(|base| names.contains(base))
        };
        match writing.iter().find(in_the_way) {
            Some((name, _)) => Err(StoreError::Busy { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// Its bytes, if it was there and could go.
    fn delete_counted(
        &self,
        collector: &Collector<'_>,
        key: &str,
    ) -> Result<Option<u64>, StoreError> {
        let Some(bytes) = self.blobs().size(key)? else { return Ok(None) };
        Ok(collector.delete(self.blobs(), key)?.then_some(bytes))
    }

    /// Delete those of `chunks` that no snapshot names. How many, their bytes, and which snapshots
    /// keep all from being removed.
    pub(crate) fn delete_unused(
        &self,
        collector: &Collector<'_>,
        chunks: HashSet<Hash>,
    ) -> Result<(u64, u64, Vec<String>), StoreError> {
        let damaged: Vec<_> = self.references.lock().damaged().map(str::to_owned).collect();
        if !damaged.is_empty() {
            tracing::warn!(snapshots = ?damaged, "no chunk is removed: these are damaged, and may need any");
            return Ok((0, 0, damaged));
        }
        let chunks: Vec<_> = chunks.into_iter().collect();
        let work = Work::new(1);
        let freed = work.for_each_on(
            self.threads(&work),
            &chunks,
            || Ok(()),
            |(), hash| {
                // In this order: once no snapshot names it, none can be opened any more that has it. And now, not
                // before: meanwhile one may have been opened and removed.
                if self.references.lock().is_used(hash) {
                    return Ok(None);
                }
                if let Some(users) = self.open.lock().get_mut(hash) {
                    users.is_leftover = true;
                    return Ok(None);
                }
                self.delete_counted(collector, &chunk_key(hash))
            },
        )?;
        let freed: Vec<u64> = freed.into_iter().flatten().collect();
        let (count, freed_bytes) = (freed.len() as u64, freed.iter().sum());
        Ok((count, freed_bytes, damaged))
    }

    /// Those of `keys` that belong to a snapshot that is there; of one that is damaged, all.
    fn named_files(&self, keys: &[String]) -> Result<HashSet<String>, StoreError> {
        let mut by_name = HashMap::<&str, Vec<&str>>::new();
        for (name, file) in keys.iter().filter_map(|key| snapshot_of(key)) {
            by_name.entry(name).or_default().push(file);
        }
        let mut named = HashSet::new();
        for (name, files) in by_name {
            match read_descriptor(self.blobs(), name) {
                Ok(descriptor) => {
                    let its = its_files(&descriptor);
                    let is_its = |file: &str| its.contains(file);
                    let kept = files.iter().filter(|file| !is_of_an_attempt(file) || is_its(file));
                    named.extend(kept.map(|file| snapshot_key(name, file)));
                }
                Err(StoreError::NotFound { .. }) => {}
                Err(error) if error.is_damage() => {
                    named.extend(files.iter().map(|file| snapshot_key(name, file)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(named)
    }
}

/// The files that a snapshot may have besides its descriptor.
fn its_files(descriptor: &Descriptor) -> HashSet<String> {
    let mut files = HashSet::from([STATE, ORIGIN].map(|kind| descriptor.beside(kind)));
    for image in &descriptor.images {
        files.insert(image.table.file.clone());
        files.extend([WORKING_SET, PROFILE].map(|it| descriptor.beside(&image.role.ending(it))));
    }
    files
}

/// `name` and all deltas on it, each before all that it is a delta on.
fn removal_order(references: &References, name: &str) -> Vec<String> {
    let mut deltas_on = HashMap::<&str, Vec<&str>>::new();
    for descriptor in references.all_descriptors() {
        for base in descriptor.bases() {
            deltas_on.entry(&base.name).or_default().push(&descriptor.name);
        }
    }
    // Depth first, since each image has its own base: a snapshot may be a delta on `name` and on
    // another delta on it. A circle, which only damaged descriptors make, ends by `seen`.
    let mut order = Vec::new();
    let mut seen = HashSet::from([name]);
    let mut path = vec![name];
    while let Some(top) = path.last().copied() {
        match deltas_on.get_mut(top).and_then(Vec::pop) {
            Some(delta) if seen.insert(delta) => path.push(delta),
            Some(_) => {}
            None => {
                order.push(top.to_owned());
                path.pop();
            }
        }
    }
    order
}
