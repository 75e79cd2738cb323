//! One fork: freeze a running VM, start n clones from that instant.
//!
//! ```text
//!   plan: names, memory, QEMUs ─► quiesce the agent ─► stop ─ freeze ─ state ─ cont ─► clones, side by side
//!                                                      └──── the parent's pause ───┘    attach, load,
//!                                                                                       cont, identity
//! ```
//!
//! What fits is started; the rest is an error each. If the caller gives up, the parent goes on and
//! what was started of the clones is ended.

mod brood;
mod channels;
mod clone;
pub mod facts;
mod freeze;
mod remote;
mod snapshot;
mod starting;
pub mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tickets;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::MutexGuard;
use tokio_util::sync::CancellationToken;
use vmfork_agent_proto::TicketClone;
use vmfork_api::{ErrorBody, ErrorCode, ForkReply, ForkRequest, VmState};

pub use self::brood::{Brood, Granted, Wanted, failed};
pub use self::channels::start_channels;
pub use self::clone::{Stem, report_failure};
pub use self::freeze::Wanted as FreezeWanted;
pub use self::remote::{
    Abroad, Allotted, Away, Departure, Forker, Hold, Placement, PlanAsk, Remote, Reserved,
};
pub use self::snapshot::{OnRun, Snapshot};
use vmfork_host::admission::Loan;
use vmfork_host::core::{Core, Reservation, start_machines};
use vmfork_host::error::outcome;
use vmfork_host::metrics::Stage;
use vmfork_host::vm::{Vm, now_unix_ms};

/// Most clones of one fork.
pub const COUNT_MAX: u32 = 1024;
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// What a fork is asked to be.
#[derive(Debug)]
pub struct Order {
    /// Of each clone: the number of its first worker, and its part of a ticket.
    pub clones: Vec<(u32, Option<TicketClone>)>,
    /// As many as clones; without, they get the parent's with the next free numbers.
    pub names: Option<Vec<String>>,
    pub all_or_nothing: bool,
    pub timeout: Duration,
    /// Memory that was set aside for it; it is lent back if nothing was forked.
    pub memory: Option<Loan>,
    /// The ticket behind it, and what is notified of the fate of each clone.
    pub origin: Option<tickets::TicketOrigin>,
    pub placement: Placement,
}

/// Fork by the API.
///
/// # Errors
/// Nothing was forked.
pub async fn by_request(
    forker: &Arc<Forker>,
    parent: &Arc<Vm>,
    request: ForkRequest,
) -> Result<ForkReply, ErrorBody> {
    let names = request.names.as_deref();
    let timeout = check(&message(parent), request.count, names, request.timeout_ms)?;
    let order = Order {
        clones: (1..=request.count).map(|vmid| (vmid, None)).collect(),
        names: request.names,
        all_or_nothing: request.all_or_nothing,
        timeout,
        memory: None,
        origin: None,
        placement: Placement {
            place: request.place,
            hosts: request.hosts,
            hydrate_bytes_per_s: request.hydrate_mib_per_s.unwrap_or(0).saturating_mul(1 << 20),
            reserved: Arc::default(),
            hold: None,
        },
    };
    run(forker, parent, order).await
}

/// Whether this many VMs can be asked for, with these names. → how long all of it may take.
///
/// # Errors
/// They can't: with `message`.
pub fn check(
    message: &str,
    count: u32,
    names: Option<&[String]>,
    timeout_ms: Option<u64>,
) -> Result<Duration, ErrorBody> {
    let bad = |cause: String| Err(ErrorBody::new(ErrorCode::BadRequest, message).cause(cause));
    if count == 0 || count > COUNT_MAX {
        return bad(format!("count {count} is not in 1 to {COUNT_MAX}"));
    }
    if let Some(names) = names.filter(|names| names.len() != count as usize) {
        return bad(format!("{} names for {count} VMs", names.len()));
    }
    Ok(timeout_ms.map_or(TIMEOUT_DEFAULT, Duration::from_millis).min(TIMEOUT_MAX))
}

/// What a fork does, for the text of its errors.
fn message(parent: &Vm) -> String {
    format!("fork `{}`", parent.name())
}

/// The part of one of several VMs that are started, for the text of its errors.
pub fn start_message(name: &str) -> String {
    format!("start VM `{name}`")
}

/// Carry out an order. If this future is dropped, the parent goes on and started clones are ended.
///
/// # Errors
/// Nothing was forked.
pub async fn run(
    forker: &Arc<Forker>,
    parent: &Arc<Vm>,
    order: Order,
) -> Result<ForkReply, ErrorBody> {
    let given_up = CancellationToken::new();
    let _on_drop = given_up.clone().drop_guard();
    // A task of its own: a pause that has begun must end in order, also when the client
    // disconnects.
    let task = tokio::spawn(carry_out(Arc::clone(forker), Arc::clone(parent), order, given_up));
    outcome(task, message(parent)).await
}

/// Wait until no other freeze of the VM is in progress, for as long as this one is wanted.
async fn turn<'a>(
    parent: &'a Vm,
    wanted: freeze::Wanted<'_>,
) -> Result<MutexGuard<'a, ()>, ErrorBody> {
    let freeze::Wanted { message, deadline, given_up, .. } = wanted;
    let turn = tokio::select! {
        biased;
        () = given_up.cancelled() => return Err(was_given_up(message)),
        turn = tokio::time::timeout_at(deadline.into(), parent.forking.lock()) => turn,
    };
    turn.ok().filter(|_| Instant::now() < deadline).ok_or_else(|| ErrorBody {
        code: ErrorCode::Timeout,
        message: message.to_owned(),
        cause: Some("other forks or snapshots of it went on all the time".to_owned()),
        remedy: Some("try again when `vmfork ps` shows it running".to_owned()),
    })
}

/// What VMs that are started together are to be called.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    /// As many as VMs; without, they get `stem` with the next free numbers.
    pub wanted: Option<&'a [String]>,
    pub stem: &'a str,
    pub count: u32,
    /// Names that VMs of other hosts have.
    pub taken: Option<&'a HashSet<String>>,
}

/// Names for all VMs in their order, each with whether it is kept for it: if not, another VM has
/// it.
///
/// # Errors
/// None can be kept; or not all, if that is as bad.
pub fn reserve(
    core: &Core,
    names: Names<'_>,
    all_or_nothing: bool,
    message: &str,
) -> Result<(Reservation, Vec<(String, bool)>), ErrorBody> {
    let is_taken = |name: &str| names.taken.is_some_and(|taken| taken.contains(name));
    let Some(wanted) = names.wanted else {
        let reservation = core.registry.reserve_for_clones(names.stem, names.count, is_taken);
        let names = reservation.names().iter().map(|name| (name.clone(), true)).collect();
        return Ok((reservation, names));
    };
    let free = wanted.iter().map(String::as_str).filter(|name| !is_taken(name));
    let reservation = core.registry.reserve(&free.collect::<Vec<_>>());
    let names = which_are_kept(wanted, reservation.names());
    let taken = names.iter().find(|(_, is_kept)| !is_kept);
    match taken {
        Some((name, _)) if all_or_nothing || reservation.names().is_empty() => {
            Err(name_taken(message.to_owned(), name))
        }
        _ => Ok((reservation, names)),
    }
}

/// `kept` are some of `wanted`, in the same order.
fn which_are_kept(wanted: &[String], kept: &[String]) -> Vec<(String, bool)> {
    let mut kept = kept.iter().peekable();
    wanted.iter().map(|name| (name.clone(), kept.next_if_eq(&name).is_some())).collect()
}

async fn carry_out(
    forker: Arc<Forker>,
    parent: Arc<Vm>,
    order: Order,
    given_up: CancellationToken,
) -> Result<ForkReply, ErrorBody> {
    let Forker { core, remote } = &*forker;
    let (began, began_unix_ms) = (Instant::now(), now_unix_ms());
    let deadline = began + order.timeout;
    // Dropped last: when it is over, the end of the family finds all VMs that this fork started.
    let _under_way = core.registry.fork_begins(parent.identity.line(), given_up.clone());
    let message = message(&parent);
    let wanted = freeze::Wanted { message: &message, began, deadline, given_up: &given_up };
    let one_at_a_time = turn(&parent, wanted).await?;
    let machine = parent.running_machine()?;
    if parent.state() != VmState::Running {
        return Err(not_yet(&message));
    }
    core.metrics.forked();
    let requested = u32::try_from(order.clones.len()).unwrap_or(u32::MAX);
    let ask = PlanAsk {
        core,
        parent: &parent,
        machine: &machine,
        placement: &order.placement,
        count: requested,
        all_or_nothing: order.all_or_nothing,
        by_ticket: order.origin.is_some(),
        wanted,
    };
    let away = remote.plan(ask).await?;
    // A ticket's, or the fork's own; a clone of a clone that stays is where that has its place.
    let held = order.placement.hold.as_ref().or(away.as_deref().and_then(Away::hold));
    let job = held.map(|hold| hold.job.clone()).or_else(|| parent.identity.job.clone());
    let taken = remote.names().await;
    let names = Names {
        wanted: order.names.as_deref(),
        stem: parent.name(),
        count: requested,
        taken: taken.as_ref(),
    };
    let (reservation, names) = reserve(core, names, order.all_or_nothing, &message)?;
    let all = names.into_iter().zip(order.clones).map(|((name, is_kept), (vmid, ticket))| Wanted {
        name,
        is_kept,
        vmid,
        ticket,
    });
    let mut here: Vec<Wanted> = all.collect();
    let elsewhere = match &away {
        Some(away) => here.split_off(here.len().min(away.here() as usize)),
        None => Vec::new(),
    };
    let grant = match order.memory.as_ref().and_then(Loan::take) {
        Some(grant) => grant,
        None => {
            let count = here.iter().filter(|wanted| wanted.is_kept).count();
            let count = u32::try_from(count).unwrap_or(requested);
            let ask = parent.identity.ask(&message, count, order.origin.is_some());
            core.admit(ask, order.all_or_nothing).await?
        }
    };
    // Until the last clone is ready.
    let _no_refill = core.hold_pool();
    let pending = start_machines(core, &machine.shape, grant.clones.len(), &given_up);
    let frozen = freeze::freeze(core, &parent, &machine, wanted).await;
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
    order.placement.reserved.iter().for_each(Reserved::sent);
    snapshot.lease = Some(grant.snapshot);
    let snapshot = Arc::new(snapshot);
    let brood = Brood {
        forker: Arc::clone(&forker),
        stem: Arc::new(Stem::of(&parent, job.clone())),
        snapshot: Arc::clone(&snapshot),
        began,
        deadline,
        origin: order.origin.clone(),
        given_up: given_up.clone(),
    };
    let granted = Granted { leases: grant.clones, refused: grant.refused, pending };
    let all_or_nothing = order.all_or_nothing;
    let departed = async {
        let Some(away) = &away else { return Vec::new() };
        let departure = Departure {
            core,
            parent: &parent,
            machine: &machine,
            snapshot: &snapshot,
            pause_ms: ms(pause),
            all_or_nothing,
            deadline,
            given_up: &given_up,
            origin: order.origin.as_ref(),
            job: job.clone(),
        };
        away.start(departure, elsewhere).await
    };
    let (started, departed) = tokio::join!(brood.start(here, granted, all_or_nothing), departed);
    let first = departed.iter().find_map(|result| result.error.clone()).filter(|_| all_or_nothing);
    // Given up while only some hosts had started theirs: those go, too, here as there.
    let first = match away.is_some() && given_up.is_cancelled() {
        true => Some(was_given_up(&message)),
        false => first,
    };
    if let Some(away) = &away
        && (started.is_err() || first.is_some())
    {
        away.end().await;
    }
    let mut results = started?;
    if let Some(error) = first {
        let ids = results.iter().filter_map(|result| result.id.as_deref());
        for vm in ids.filter_map(|id| core.registry.find(&message, id).ok()) {
            core.end(&vm, vmfork_host::vm::End::killed("its start was given up"));
        }
        return Err(error);
    }
    // In a cluster all have a host.
    let here = remote.here();
    results.iter_mut().for_each(|result| result.host.clone_from(&here));
    results.extend(departed);
    results.sort_by_key(|result| result.vmid);
    drop(reservation);
    let failures = results.iter().filter(|result| result.error.is_some()).count();
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

/// A freeze from which nothing is started.
#[derive(Debug)]
pub struct Frozen {
    pub snapshot: Snapshot,
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
        let (began, given_up) = (Instant::now(), CancellationToken::new());
        let deadline = began + timeout;
        let _under_way = core.registry.fork_begins(parent.identity.line(), given_up.clone());
        let wanted = freeze::Wanted { message: &message, began, deadline, given_up: &given_up };
        let _one_at_a_time = turn(&parent, wanted).await?;
        let machine = parent.running_machine()?;
        if parent.state() != VmState::Running {
            return Err(not_yet(&message));
        }
        let identity = &parent.identity;
        let lease = core.admission.snapshot(
            &identity.name,
            &identity.family,
            identity.spec().memory_bytes,
        )?;
        let _no_refill = core.hold_pool();
        let (mut snapshot, _, pause) = freeze::freeze(&core, &parent, &machine, wanted).await?;
        snapshot.lease = Some(lease);
        core.metrics.observe_stage(Stage::Pause, pause);
        Ok(Frozen { snapshot, pause })
    });
    outcome(task, failed).await
}

/// How long finding what the parent had written took, if that is done.
fn derive_ms(snapshot: &Snapshot) -> Option<f64> {
    let image = snapshot.engine.image();
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a few milliseconds")]
    image.table().map(|_| image.counters().derive_us.get() as f64 / 1e3)
}

pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn not_yet(message: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message: message.to_owned(),
        cause: Some("its guest has not come up yet".to_owned()),
        remedy: Some("wait until `vmfork ps` shows it running".to_owned()),
    }
}

pub fn was_given_up(message: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message: message.to_owned(),
        cause: Some("it was given up: who asked has gone, or its family was killed".to_owned()),
        remedy: None,
    }
}

pub fn name_taken(message: String, name: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message,
        cause: Some(format!("there is a VM named `{name}` already")),
        remedy: Some(format!("choose another name, or `vmfork rm {name}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmfork_host::vm::log::Log;
    use vmfork_host::vm::test_identity;

    fn vm(folder: &std::path::Path) -> Arc<Vm> {
        Vm::new(test_identity("web", None), Log::create(folder).expect("log"), None, None)
    }

    const MESSAGE: &str = "take a snapshot of `web`";

    fn wanted(deadline: Instant, given_up: &CancellationToken) -> freeze::Wanted<'_> {
        freeze::Wanted { message: MESSAGE, began: Instant::now(), deadline, given_up }
    }

    #[tokio::test]
    async fn a_fork_that_nobody_waits_for_any_more_does_not_get_its_turn() {
        let folder = tempfile::tempdir().expect("folder");
        let vm = vm(folder.path());
        let (mine, given_up) = (CancellationToken::new(), CancellationToken::new());
        given_up.cancel();
        let later = Instant::now() + Duration::from_secs(60);
        drop(turn(&vm, wanted(later, &mine)).await.expect("it is free"));
        // Though it is free:
        let error = turn(&vm, wanted(later, &given_up)).await.expect_err("given up");
        assert_eq!(error.code, ErrorCode::Conflict);
        let error = turn(&vm, wanted(Instant::now(), &mine)).await.expect_err("too late");
        assert_eq!((error.code, error.message.as_str()), (ErrorCode::Timeout, MESSAGE));
    }

    #[tokio::test]
    async fn a_fork_waits_for_another_no_longer_than_its_own_bound() {
        let folder = tempfile::tempdir().expect("folder");
        let vm = vm(folder.path());
        let other = vm.forking.lock().await;
        let soon = Instant::now() + Duration::from_millis(20);
        let given_up = CancellationToken::new();
        let error = turn(&vm, wanted(soon, &given_up)).await.expect_err("too late");
        assert_eq!(error.code, ErrorCode::Timeout);
        drop(other);
    }

    #[test]
    fn no_more_vms_than_may_be_are_asked_for_each_with_a_name_or_none() {
        let names = ["a", "b"].map(ToOwned::to_owned);
        let text =
            |count, names| check(MESSAGE, count, names, None).expect_err("refused").to_string();
        assert_eq!(text(0, None), format!("{MESSAGE}: count 0 is not in 1 to 1024"));
        assert_eq!(text(1025, None), format!("{MESSAGE}: count 1025 is not in 1 to 1024"));
        assert_eq!(text(3, Some(&names[..])), format!("{MESSAGE}: 2 names for 3 VMs"));
        let timeout = |ms| check(MESSAGE, 2, Some(&names), ms).expect("fits");
        assert_eq!(timeout(None), TIMEOUT_DEFAULT);
        assert_eq!(
            (timeout(Some(5)), timeout(Some(u64::MAX))),
            (Duration::from_millis(5), TIMEOUT_MAX)
        );
    }

    #[test]
    fn a_taken_name_is_the_affair_of_its_clone() {
        let [a, b, c] = ["a", "b", "c"].map(ToOwned::to_owned);
        let wanted = [a.clone(), b.clone(), c.clone()];
        let kept =
            |kept: &[String]| which_are_kept(&wanted, kept).into_iter().map(|(_, kept)| kept);
        assert!(kept(&[a.clone(), c]).eq([true, false, true]));
        assert!(kept(&[b]).eq([false, true, false]));
        let twice = which_are_kept(&[a.clone(), a.clone()], std::slice::from_ref(&a));
        assert_eq!(twice, [(a.clone(), true), (a, false)]);
    }
}
