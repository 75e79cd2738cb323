//! Looking after what is stored: remove, verify, flatten.

use std::sync::{Arc, PoisonError};

use vmfork_api::{ErrorBody, ErrorCode, RemovedSnapshots, Snapshot, VerifyReply};
use vmfork_store::{StoreError, Work};

use super::work::CancelOnDrop;
use super::{SnapshotError, Snapshots};
use crate::hub::{Core, chain};

impl Snapshots {
    /// Remove a snapshot; `cascade`: those that are deltas of it, too. VMs that were started from it go on: what they
    /// have not read yet stays in the store until they have ended.
    ///
    /// # Errors
    /// Other snapshots depend on it, or it is being written.
    pub(crate) fn remove(&self, name: &str, cascade: bool) -> Result<RemovedSnapshots, ErrorBody> {
        let message = format!("remove snapshot `{name}`");
        let failed = |error: StoreError| SnapshotError::from(error).to_body(&message);
        {
            let mut under_way = self.under_way();
            match under_way.get(name).map(|one| one.reason().is_some()) {
                Some(false) => {
                    let cause = "it is being written, or pulled";
                    let remedy = format!("wait until `vmfork snapshot ls` shows `{name}` ready");
                    let error = ErrorBody::new(ErrorCode::Conflict, message);
                    return Err(error.cause(cause).remedy(remedy));
                }
                // It never came to be.
                Some(true) => {
                    under_way.remove(name);
                    if matches!(self.store.descriptor(name), Err(StoreError::NotFound { .. })) {
                        let names = vec![name.to_owned()];
                        return Ok(RemovedSnapshots { names, freed_bytes: 0 });
                    }
                }
                None => {}
            }
        }
        // What is learnt of a VM that has just ended is written to its snapshot: that is waited for.
        let _not_while_learning = self.learning.lock().unwrap_or_else(PoisonError::into_inner);
        let removed = self.store.remove(name, cascade).map_err(failed)?;
        Ok(RemovedSnapshots { names: removed.names, freed_bytes: removed.freed_bytes })
    }
}

/// Read and check every byte. If the caller gives up, so does this.
pub(super) async fn verify(core: &Arc<Core>, name: &str) -> Result<VerifyReply, ErrorBody> {
    let message = format!("verify snapshot `{name}`");
    let verified = with_work(core, name, message, |core, name, work| {
        Ok(core.snapshots.store.verify(name, work)?)
    })
    .await?;
    let damage = verified.damage.iter().map(|damage| {
        let error = StoreError::Damaged(damage.clone());
        ErrorBody {
            code: ErrorCode::Host,
            message: format!("snapshot `{name}` is damaged"),
            cause: Some(chain(&error)),
            remedy: error.remedy(),
        }
    });
    Ok(VerifyReply {
        schema: vmfork_api::SCHEMA.to_owned(),
        snapshot: name.to_owned(),
        chunks: verified.chunks,
        read_bytes: verified.bytes,
        damage: damage.collect(),
    })
}

/// Make a delta whole.
pub(super) async fn flatten(core: &Arc<Core>, name: &str) -> Result<Snapshot, ErrorBody> {
    let message = format!("flatten snapshot `{name}`");
    with_work(core, name, message, |core, name, work| {
        let learning = &core.snapshots.learning;
        let _not_while_learning = learning.lock().unwrap_or_else(PoisonError::into_inner);
        core.snapshots.store.flatten(name, work)?;
        Ok(())
    })
    .await?;
    core.snapshots.listed(core, name)
}

/// Something that takes a while, on a thread of its own, given up with this future.
pub(super) async fn with_work<T: Send + 'static>(
    core: &Arc<Core>,
    name: &str,
    message: String,
    run: impl FnOnce(&Arc<Core>, &str, &Work) -> Result<T, SnapshotError> + Send + 'static,
) -> Result<T, ErrorBody> {
    let work = core.snapshots.work();
    let _on_drop = CancelOnDrop(Arc::clone(&work));
    let (core, name) = (Arc::clone(core), name.to_owned());
    let failed = message.clone();
    let task = tokio::task::spawn_blocking(move || {
        core.snapshots.check_written(&name, &message)?;
        run(&core, &name, &work).map_err(|error| error.to_body(message))
    });
    task.await.unwrap_or_else(|error| Err(ErrorBody::new(ErrorCode::Internal, failed).cause(error)))
}
