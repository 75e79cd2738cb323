//! A freeze from which nothing is started: what it yields is kept in a stored snapshot.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_api::ErrorBody;
use vmfork_host::core::Core;
use vmfork_host::disks::DiskContent;
use vmfork_host::error::outcome;
use vmfork_host::metrics::Stage;
use vmfork_host::vm::Vm;

use crate::error::Error;
use crate::forking::{check_volumes, running, turn};
use crate::freeze;
use crate::snapshot::Snapshot;

/// Memory, device state and disks of one instant.
#[derive(Debug)]
pub struct Frozen {
    pub snapshot: Snapshot,
    pub pause: Duration,
}

/// The disks of one instant, without the memory that goes with them.
#[derive(Debug)]
pub struct FrozenDisks {
    pub disks: Vec<DiskContent>,
    pub pause: Duration,
}

/// Freezes a VM for a snapshot that is kept. A freeze that has begun ends in order, also when the
/// client disconnects.
///
/// # Errors
/// The VM goes on as before, unless its RAM was lost half-way, which ends it.
pub async fn freeze_only(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    timeout: Duration,
) -> Result<Frozen, ErrorBody> {
    let (core, parent) = (Arc::clone(core), Arc::clone(parent));
    let message = format!("take a snapshot of `{}`", parent.name());
    let failed = message.clone();
    let task = tokio::spawn(async move {
        let frozen = freeze_within(&core, &parent, timeout, &message).await;
        frozen.map_err(|error| error.to_body(message))
    });
    outcome(task, failed).await
}

/// Freezes the disks of a VM. Before that its guest writes back what it has in memory of them. The
/// guest of a paused VM can't, and one without an agent is not asked: its disks are as a power cut
/// would leave them. If this future is dropped before the freeze, nothing is frozen.
///
/// # Errors
/// It has no disks, or its guest does not write back. The VM goes on as before, unless QEMU does
/// not let it, which ends it.
pub async fn freeze_disks_only(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    timeout: Duration,
) -> Result<FrozenDisks, ErrorBody> {
    let (core, parent) = (Arc::clone(core), Arc::clone(parent));
    let message = format!("take a snapshot of the disks of `{}`", parent.name());
    let failed = message.clone();
    let given_up = CancellationToken::new();
    let _on_drop = given_up.clone().drop_guard();
    let task = tokio::spawn(async move {
        let began = Instant::now();
        let deadline = began + timeout;
        let wanted = freeze::Wanted { message: &message, began, deadline, given_up: &given_up };
        let frozen = freeze_disks_within(&core, &parent, wanted).await;
        frozen.map_err(|error| error.to_body(message))
    });
    outcome(task, failed).await
}

async fn freeze_within(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    timeout: Duration,
    message: &str,
) -> Result<Frozen, Error> {
    let (began, given_up) = (Instant::now(), CancellationToken::new());
    let deadline = began + timeout;
    let _under_way = core.registry.fork_begins(parent.identity.line(), given_up.clone());
    let wanted = freeze::Wanted { message, began, deadline, given_up: &given_up };
    let _one_at_a_time = turn(parent, wanted).await?;
    let machine = running(parent)?;
    check_volumes(&machine)?;
    let identity = &parent.identity;
    let lease = core.admission.snapshot(&identity.family, identity.spec().memory_bytes)?;
    let _no_refill = core.hold_pool();
    let (mut snapshot, _, pause) = freeze::freeze(core, parent, &machine, wanted).await?;
    snapshot.lease = Some(lease);
    core.metrics.observe_stage(Stage::Pause, pause);
    Ok(Frozen { snapshot, pause })
}

async fn freeze_disks_within(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    wanted: freeze::Wanted<'_>,
) -> Result<FrozenDisks, Error> {
    let _under_way = core.registry.fork_begins(parent.identity.line(), wanted.given_up.clone());
    let machine = running(parent)?;
    if machine.disks().is_none() {
        return Err(Error::NoDisks);
    }
    // Not in its turn: a guest that writes may stall, and needs its turn to go on.
    if parent.identity.has_agent && !parent.pause.is_paused() {
        freeze::write_back(parent, wanted).await?;
    }
    let _one_at_a_time = turn(parent, wanted).await?;
    let machine = running(parent)?;
    check_volumes(&machine)?;
    let (disks, pause) = freeze::freeze_disks(core, parent, &machine, wanted).await?;
    core.metrics.observe_stage(Stage::Pause, pause);
    Ok(FrozenDisks { disks, pause })
}
