//! QEMUs for clones: those that wait in the pool, and those that are started now.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use vmfork_qemu::Shape;
use vmfork_qemu::pool::Origin;

use super::Core;
use crate::vm::launch::LaunchError;
use crate::vm::machine::Machine;

/// A QEMU for a clone: there, or on its way.
pub type PendingMachine = tokio::sync::oneshot::Receiver<Result<(Machine, Origin), LaunchError>>;

/// QEMUs for `count` clones: those that wait in the pool at once, the others started beside the
/// freeze, as many at a time as the host has cores.
pub fn start_machines(
    core: &Arc<Core>,
    shape: &Shape,
    count: usize,
    given_up: &CancellationToken,
) -> Vec<PendingMachine> {
    let at_once = Arc::new(Semaphore::new(core.cores));
    (0..count)
        .map(|_| {
            let (tx, rx) = tokio::sync::oneshot::channel();
            if let Some(machine) = core.claim(shape) {
                let _waits = tx.send(Ok((machine, Origin::Pooled)));
                return rx;
            }
            let (core, shape) = (Arc::clone(core), shape.clone());
            let (at_once, given_up) = (Arc::clone(&at_once), given_up.clone());
            tokio::spawn(async move {
                let start = async {
                    let _turn = at_once.acquire().await;
                    core.take(&shape).await
                };
                tokio::select! {
                    outcome = start => { let _gone = tx.send(outcome); }
                    () = given_up.cancelled() => {}
                }
            });
            rx
        })
        .collect()
}
