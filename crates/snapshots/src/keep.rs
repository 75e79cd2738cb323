//! Looking after what is stored: remove, verify, flatten.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use vmfork_api::{ErrorBody, RemovedSnapshots, Snapshot, VerifyReply};
use vmfork_store::{SnapshotId, StoreError, Work};

use crate::error::SnapshotError;
use crate::kind::is_guest_image;
use crate::library::{Library, Snapshots};
use crate::turns::Change;
use crate::work::{CancelOnDrop, blocking};
use vmfork_host::disks::OnBase;

/// How long a pull is waited for that has been given up: a request to a store may take longer.
const PULL_ENDS: Duration = Duration::from_secs(5);
/// How long the disks of VMs that have ended may take to go.
const DISKS_END: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often a removal begins again because deltas have been made meanwhile.
const ATTEMPTS_MAX: u32 = 8;

/// Remove a snapshot; `cascade`: those that are deltas of it, too. VMs that were started from it go
/// on: what they have not read yet stays in the store until they have ended. One that is being
/// written or pulled is given up.
///
/// # Errors
/// Other snapshots depend on it, or one that is being written does.
pub async fn remove(
    library: &Arc<Library>,
    name: &str,
    cascade: bool,
) -> Result<RemovedSnapshots, ErrorBody> {
    let failed = |error: SnapshotError| error.to_body(format!("remove snapshot `{name}`"));
    // `vmfork image rm` removes those.
    if library.snapshots.store.descriptor(name).is_ok_and(|found| is_guest_image(&found)) {
        return Err(failed(library.snapshots.not_found(name)));
    }
    remove_all(library, name, cascade).await.map_err(failed)
}

pub(super) async fn remove_all(
    library: &Arc<Library>,
    name: &str,
    cascade: bool,
) -> Result<RemovedSnapshots, SnapshotError> {
    let was_under_way = library.snapshots.give_up(name).await;
    for _attempt in 0..ATTEMPTS_MAX {
        let ids = {
            let (library, name) = (Arc::clone(library), name.to_owned());
            blocking(move || {
                let ids = library.snapshots.to_remove(&name, cascade)?;
                // No pull is ended for what is refused then.
                ids.iter().try_for_each(|ids| library.when_disks_are_free(ids).map(drop))?;
                Ok(ids)
            })
            .await?
        };
        let Some(ids) = ids else {
            if was_under_way {
                return Ok(RemovedSnapshots { names: vec![name.to_owned()], freed_bytes: 0 });
            }
            return Err(library.snapshots.not_found(name));
        };
        match remove_these(library, name, cascade, ids).await {
            // A delta that was made meanwhile: its disks were not asked for.
            Err(SnapshotError::Store(StoreError::Changed { .. })) => {}
            done => return done,
        }
    }
    Err(StoreError::Changed { name: name.to_owned() }.into())
}

/// Remove a snapshot and its deltas, if these are all.
async fn remove_these(
    library: &Arc<Library>,
    name: &str,
    cascade: bool,
    ids: BTreeSet<SnapshotId>,
) -> Result<RemovedSnapshots, SnapshotError> {
    library.snapshots.end_pulls(&ids).await;
    let work = library.snapshots.work();
    let mut turns = Vec::new();
    for id in &ids {
        turns.push(library.snapshots.turns.take(*id, Change::Remove, &work).await);
    }
    let (library, name) = (Arc::clone(library), name.to_owned());
    blocking(move || {
        let tell = library.tell();
        let _none_begins = library.when_disks_are_free(&ids)?;
        let store = &library.snapshots.store;
        let may_go = |id| ids.contains(&id);
        let removed = store.remove_if(&name, cascade, &may_go, &mut |name| tell.removed(name))?;
        library.snapshots.pulls().retain(|id, _| !ids.contains(id));
        drop(turns);
        Ok(RemovedSnapshots { names: removed.names, freed_bytes: removed.freed_bytes })
    })
    .await
}

impl Library {
    /// Wait until disks that end soon have ended. As long as the answer lives, no disk begins to
    /// read from a snapshot. `None`: these snapshots have no disks.
    ///
    /// A disk that reads from one of them outlives its VM, if the daemon ends first. What it lacks
    /// would be lost with the snapshot.
    ///
    /// # Errors
    /// Disks need one of these.
    fn when_disks_are_free(
        &self,
        ids: &BTreeSet<SnapshotId>,
    ) -> Result<Option<MutexGuard<'_, ()>>, SnapshotError> {
        let snapshots = &self.snapshots;
        let bases = snapshots.disk_ids(ids)?;
        if bases.is_empty() {
            return Ok(None);
        }
        let until = Instant::now() + DISKS_END;
        loop {
            let gate = snapshots.keep_for_disks();
            let is_read = snapshots.disk_is_read(ids);
            let on = self.core.disks.on_bases(&bases)?;
            if !is_read && on.is_empty() {
                return Ok(Some(gate));
            }
            let live = self.core.registry.live();
            let stays = |disk: &OnBase| !disk.in_use || live.iter().any(|vm| vm.name() == disk.vm);
            if on.iter().any(stays) || Instant::now() >= until {
                let name = |disk: &OnBase| format!("{}/{}", disk.vm, disk.name);
                return Err(SnapshotError::DisksNeedIt { disks: on.iter().map(name).collect() });
            }
            drop(gate);
            snapshots.runtime.block_on(tokio::time::sleep(LOOK_EVERY));
        }
    }
}

impl Snapshots {
    /// End what is on its way into the store by this name, and forget what failed. Whether there
    /// was something.
    async fn give_up(&self, name: &str) -> bool {
        let Some(under_way) = self.under_way().get(name).cloned() else { return false };
        under_way.give_up();
        under_way.over.cancelled().await;
        let mut all = self.under_way();
        if all.get(name).is_some_and(|other| Arc::ptr_eq(other, &under_way)) {
            all.remove(name);
        }
        true
    }

    /// End what brings pages of these.
    async fn end_pulls(&self, ids: &BTreeSet<SnapshotId>) {
        let all: Vec<_> = self.pulls().clone().into_iter().collect();
        for (_, pull) in all.iter().filter(|(id, _)| ids.contains(id)) {
            pull.give_up();
            // What comes later is collected.
            let _late = tokio::time::timeout(PULL_ENDS, pull.over.cancelled()).await;
        }
    }

    /// The snapshot, and with `cascade` those that are deltas of it, without those that are
    /// damaged; `None`: there is none.
    fn to_remove(
        &self,
        name: &str,
        cascade: bool,
    ) -> Result<Option<BTreeSet<SnapshotId>>, StoreError> {
        let all = self.store.list()?;
        if !all.iter().any(|(other, _)| other == name) {
            return Ok(None);
        }
        let mut readable = Vec::new();
        for (_, descriptor) in all {
            match descriptor {
                Ok(descriptor) => readable.push(descriptor),
                Err(error) if error.is_damage() => {}
                // It can be read another time, and disks may need it.
                Err(error) => return Err(error),
            }
        }
        let mut ids = BTreeSet::new();
        let mut names = vec![name.to_owned()];
        while let Some(of) = names.pop() {
            ids.extend(readable.iter().filter(|one| one.name == of).map(|one| one.id));
            let on = readable.iter().filter(|one| one.bases().any(|base| base.name == of));
            names.extend(on.filter(|one| !ids.contains(&one.id)).map(|one| one.name.clone()));
        }
        if !cascade && ids.len() > 1 {
            // Nothing is ended for what is refused then.
            return Err(StoreError::Dependants {
                name: name.to_owned(),
                dependants: readable
                    .into_iter()
                    .filter(|one| ids.contains(&one.id) && one.name != name)
                    .map(|one| one.name)
                    .collect(),
            });
        }
        Ok(Some(ids))
    }
}

/// Read and check every byte. If the caller gives up, so does this.
pub async fn verify(library: &Arc<Library>, name: &str) -> Result<VerifyReply, ErrorBody> {
    let failed = |error: SnapshotError| error.to_body(format!("verify snapshot `{name}`"));
    library.snapshots.check_written(name).map_err(failed)?;
    let verified = {
        let name = name.to_owned();
        with_work(library, move |library, work| Ok(library.snapshots.store.verify(&name, work)?))
            .await
            .map_err(failed)?
    };
    let damage = verified.damage.iter().map(|damage| {
        let error = SnapshotError::from(StoreError::Damaged(damage.clone()));
        error.to_body(format!("snapshot `{name}` is damaged"))
    });
    Ok(VerifyReply {
        schema: vmfork_api::SCHEMA.to_owned(),
        snapshot: name.to_owned(),
        chunks: verified.chunks,
        chunks_elsewhere: verified.chunks_elsewhere,
        read_bytes: verified.bytes,
        damage: damage.collect(),
    })
}

/// Make a delta whole.
pub async fn flatten(library: &Arc<Library>, name: &str) -> Result<Snapshot, ErrorBody> {
    let made_whole = make_whole(library, name).await;
    made_whole.map_err(|error| error.to_body(format!("flatten snapshot `{name}`")))?;
    library.snapshots.listed(&library.core, name)
}

async fn make_whole(library: &Arc<Library>, name: &str) -> Result<(), SnapshotError> {
    let id = library.snapshots.id_of(name)?;
    let work = library.snapshots.work();
    let _on_drop = CancelOnDrop(Arc::clone(&work));
    let turn = library.snapshots.turns.take(id, Change::Flatten, &work).await;
    let (library, name) = (Arc::clone(library), name.to_owned());
    blocking(move || {
        let flattened = library.snapshots.store.flatten(&name, &work);
        if flattened.is_err() {
            library.snapshots.collector.soon();
        }
        drop(turn);
        flattened?;
        Ok(())
    })
    .await
}

/// Forget what VMs touch first.
///
/// # Errors
/// There is no such snapshot, or the store can't be written to.
pub async fn reset_profile(library: &Arc<Library>, name: &str) -> Result<(), ErrorBody> {
    let forgotten = forget_profile(library, name).await;
    forgotten.map_err(|error| error.to_body(format!("reset the profile of snapshot `{name}`")))
}

async fn forget_profile(library: &Arc<Library>, name: &str) -> Result<(), SnapshotError> {
    let id = library.snapshots.id_of(name)?;
    let turn = library.snapshots.turns.take(id, Change::Forget, &library.snapshots.work()).await;
    let (library, name) = (Arc::clone(library), name.to_owned());
    blocking(move || {
        let reset = library.snapshots.store.remove_profile(&name);
        drop(turn);
        Ok(reset?)
    })
    .await
}

impl Snapshots {
    /// Which snapshot this is, which can be worked with.
    fn id_of(&self, name: &str) -> Result<SnapshotId, SnapshotError> {
        self.check_written(name)?;
        Ok(tokio::task::block_in_place(|| self.store.descriptor(name))?.id)
    }
}

/// Something that takes a while, on a thread of its own, given up with this future.
pub(super) async fn with_work<T: Send + 'static>(
    library: &Arc<Library>,
    run: impl FnOnce(&Arc<Library>, &Work) -> Result<T, SnapshotError> + Send + 'static,
) -> Result<T, SnapshotError> {
    let work = library.snapshots.work();
    let _on_drop = CancelOnDrop(Arc::clone(&work));
    let library = Arc::clone(library);
    blocking(move || run(&library, &work)).await
}
