//! One fork: freeze a running VM, start n clones from that instant.
//!
//! ```text
//!   plan: names, memory, QEMUs ─► quiesce the agent ─► stop ─ freeze ─ state ─ cont ─► clones, side by side
//!                                                      └──── the parent's pause ───┘    attach, load,
//!                                                                                       cont, identity
//! ```
//!
//! What fits is started; the rest is an error each. If the caller gives up, the parent goes on and what was
//! started of the clones is ended.

mod clone;
mod freeze;
mod snapshot;
pub(crate) mod tickets;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use vmfork_agent_proto::TicketClone;
use vmfork_api::{CloneResult, ErrorBody, ErrorCode, ForkReply, ForkRequest, VmState};
use vmfork_qemu::pool::Origin;

use self::clone::CloneOrder;
use self::snapshot::Snapshot;
use crate::admission::Loan;
use crate::hub::Core;
use crate::metrics::Stage;
use crate::vm::launch::LaunchError;
use crate::vm::machine::Machine;
use crate::vm::{Vm, now_unix_ms};

/// Most clones of one fork.
pub(crate) const COUNT_MAX: u32 = 1024;
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// What a fork is asked to be.
#[derive(Debug)]
pub(crate) struct Order {
    /// Of each clone: the number of its first worker, and its part of a ticket.
    pub(crate) clones: Vec<(u32, Option<TicketClone>)>,
    /// As many as clones; without, they get the parent's with the next free numbers.
    pub(crate) names: Option<Vec<String>>,
    pub(crate) all_or_nothing: bool,
    pub(crate) timeout: Duration,
    /// Memory that was set aside for it; it is lent back if nothing was forked.
    pub(crate) memory: Option<Loan>,
    /// The ticket behind it, and who is told what becomes of each clone.
    pub(crate) origin: Option<tickets::Origin>,
}

/// Fork by the API.
///
/// # Errors
/// Nothing was forked.
pub(crate) async fn by_request(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    request: ForkRequest,
) -> Result<ForkReply, ErrorBody> {
    if request.count == 0 || request.count > COUNT_MAX {
        return Err(bad_request(
            parent,
            format!("count {} is not in 1 to {COUNT_MAX}", request.count),
        ));
    }
    if let Some(names) =
        request.names.as_ref().filter(|names| names.len() != request.count as usize)
    {
        let text = format!("{} names for {} clones", names.len(), request.count);
        return Err(bad_request(parent, text));
    }
    let timeout =
        request.timeout_ms.map_or(TIMEOUT_DEFAULT, Duration::from_millis).min(TIMEOUT_MAX);
    let order = Order {
        clones: (1..=request.count).map(|vmid| (vmid, None)).collect(),
        names: request.names,
        all_or_nothing: request.all_or_nothing,
        timeout,
        memory: None,
        origin: None,
    };
    run(core, parent, order).await
}

fn bad_request(parent: &Vm, cause: String) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::BadRequest,
        message: format!("fork `{}`", parent.name()),
        cause: Some(cause),
        remedy: None,
    }
}

/// Carry out an order. If this future is dropped, the parent goes on and started clones are ended.
///
/// # Errors
/// Nothing was forked.
pub(crate) async fn run(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    order: Order,
) -> Result<ForkReply, ErrorBody> {
    let given_up = CancellationToken::new();
    let _on_drop = given_up.clone().drop_guard();
    // A task of its own: a pause that has begun must come to its end whoever goes away.
    let task = tokio::spawn(carry_out(Arc::clone(core), Arc::clone(parent), order, given_up));
    task.await.unwrap_or_else(|error| {
        Err(ErrorBody {
            code: ErrorCode::Internal,
            message: format!("fork `{}`", parent.name()),
            cause: Some(error.to_string()),
            remedy: Some("this is a bug of vmfork: report it with the daemon's log".to_owned()),
        })
    })
}

async fn carry_out(
    core: Arc<Core>,
    parent: Arc<Vm>,
    order: Order,
    given_up: CancellationToken,
) -> Result<ForkReply, ErrorBody> {
    let (began, began_unix_ms) = (Instant::now(), now_unix_ms());
    let deadline = began + order.timeout;
    let one_at_a_time = parent.forking.lock().await;
    let machine = parent.running_machine()?;
    if parent.state() != VmState::Running {
        return Err(not_yet(&parent));
    }
    core.metrics.forked();
    let requested = u32::try_from(order.clones.len()).unwrap_or(u32::MAX);
    let grant = match order.memory.as_ref().and_then(Loan::take) {
        Some(grant) => grant,
        None => core.admission.fork(
            parent.name(),
            parent.identity.memory_bytes,
            requested,
            order.all_or_nothing,
        )?,
    };
    let reservation = match &order.names {
        Some(names) => {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            core.registry.reserve(&names).map_err(|name| name_taken(&parent, &name))?
        }
        None => core.registry.reserve_for_clones(parent.name(), requested),
    };
    let mut pending = start_machines(&core, &machine, grant.clones.len(), &given_up);
    let frozen = freeze::freeze(&core, &parent, &machine, began).await;
    let (mut snapshot, mut stages, pause) = match frozen {
        Ok(frozen) => frozen,
        Err(error) => {
            if let Some(memory) = &order.memory {
                memory.give_back(grant);
            }
            return Err(error);
        }
    };
    drop(one_at_a_time);
    snapshot.lease = Some(grant.snapshot);
    let snapshot = Arc::new(snapshot);
    let origin = order.origin;
    let mut leases = grant.clones.into_iter();
    let mut clones = JoinSet::new();
    let mut results = Vec::new();
    for (name, (vmid, ticket)) in reservation.names().iter().cloned().zip(order.clones) {
        let Some((lease, machine)) = leases.next().zip(pending.next()) else {
            let error = grant.refused.clone().unwrap_or_else(|| no_place(&parent));
            core.metrics.clone_failed(error.code);
            clone::report_failure(origin.as_ref(), vmid, &error);
            results.push(failed(vmid, name, error));
            continue;
        };
        let order =
            CloneOrder { name, vmid, ticket, lease, began, deadline, origin: origin.clone() };
        let (core, parent, snapshot) =
            (Arc::clone(&core), Arc::clone(&parent), Arc::clone(&snapshot));
        clones.spawn(clone::start(core, parent, snapshot, order, machine));
    }
    let mut started = Vec::new();
    let mut dropped = false;
    loop {
        let joined = tokio::select! {
            joined = clones.join_next() => joined,
            // Nobody waits: what is half-way ends here, not when it would be ready.
            () = given_up.cancelled(), if !dropped => {
                dropped = true;
                clones.abort_all();
                continue;
            }
        };
        let Some(joined) = joined else { break };
        match joined {
            Ok((result, vm)) => {
                results.push(result);
                started.extend(vm);
            }
            Err(error) if error.is_cancelled() => {}
            Err(error) => tracing::error!(%error, "a clone's start panicked"),
        }
    }
    drop(reservation);
    results.sort_by_key(|result| result.vmid);
    let failures = results.iter().filter(|result| result.error.is_some()).count();
    if given_up.is_cancelled() || (order.all_or_nothing && failures > 0) {
        for vm in &started {
            core.end(vm, crate::vm::End::killed("its fork was given up"));
        }
        let first = results.iter().find_map(|result| result.error.clone());
        return Err(first.unwrap_or_else(|| no_place(&parent)));
    }
    stages.derive_ms = derive_ms(&snapshot);
    let total = began.elapsed();
    core.metrics.observe_stage(Stage::Total, total);
    core.metrics.observe_stage(Stage::Pause, pause);
    let granted = requested - u32::try_from(failures).unwrap_or(requested);
    tracing::info!(
        parent = parent.name(),
        requested,
        granted,
        pause_ms = ms(pause),
        total_ms = ms(total),
        "forked"
    );
    let reply = ForkReply {
        schema: vmfork_api::SCHEMA.to_owned(),
        parent: parent.name().to_owned(),
        requested,
        granted,
        began_unix_ms,
        pause_ms: ms(pause),
        total_ms: ms(total),
        stages,
        clones: results,
    };
    parent.set_last_fork(reply.clone());
    Ok(reply)
}

/// How long finding what the parent had written took, if that is done.
fn derive_ms(snapshot: &Snapshot) -> Option<f64> {
    let image = snapshot.engine.image();
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a few milliseconds")]
    image.table().map(|_| image.counters().derive_us.get() as f64 / 1e3)
}

pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn failed(vmid: u32, name: String, error: ErrorBody) -> CloneResult {
    CloneResult {
        id: None,
        vmid,
        name,
        state: VmState::Failed,
        ready_ms: None,
        pooled: false,
        error: Some(error),
    }
}

fn not_yet(parent: &Vm) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message: format!("fork `{}`", parent.name()),
        cause: Some("its guest has not come up yet".to_owned()),
        remedy: Some("wait until `vmfork ps` shows it running".to_owned()),
    }
}

fn no_place(parent: &Vm) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::NoCapacity,
        message: format!("start a clone of `{}`", parent.name()),
        cause: Some("the fork was given up".to_owned()),
        remedy: None,
    }
}

fn name_taken(parent: &Vm, name: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message: format!("fork `{}`", parent.name()),
        cause: Some(format!("there is a VM named `{name}` already")),
        remedy: Some(format!("choose another name, or `vmfork rm {name}`")),
    }
}

/// A QEMU for a clone: there, or on its way.
pub(crate) type PendingMachine =
    tokio::sync::oneshot::Receiver<Result<(Machine, Origin), LaunchError>>;

/// QEMUs for `count` clones: those that wait in the pool at once, the others started beside the freeze, as many
/// at a time as the host has cores.
fn start_machines(
    core: &Arc<Core>,
    parent: &Arc<Machine>,
    count: usize,
    given_up: &CancellationToken,
) -> impl Iterator<Item = PendingMachine> + use<> {
    let shape = parent.shape.clone();
    let at_once = Arc::new(Semaphore::new(core.cores));
    let pending: Vec<_> = (0..count)
        .map(|_| {
            let (tx, rx) = tokio::sync::oneshot::channel();
            if let Some(machine) = core.claim(&shape) {
                let _waits = tx.send(Ok((machine, Origin::Pooled)));
                return rx;
            }
            let (core, shape) = (Arc::clone(core), shape.clone());
            let (at_once, given_up) = (Arc::clone(&at_once), given_up.clone());
            tokio::spawn(async move {
                let start = async {
                    let _turn = at_once.acquire().await;
                    core.pool.take(&shape).await
                };
                tokio::select! {
                    outcome = start => { let _gone = tx.send(outcome); }
                    () = given_up.cancelled() => {}
                }
            });
            rx
        })
        .collect();
    pending.into_iter()
}
