//! One fork, carried out.
//!
//! ```text
//!   turn ─► plan (who starts what) ─► admit (memory) ─► freeze ─► start, here and away ─► report
//! ```
//!
//! What fits is started; the rest is an error each. If the caller gives up, the parent goes on and
//! what was started of the clones is ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::MutexGuard;
use tokio_util::sync::CancellationToken;
use vmfork_agent_proto::TicketClone;
use vmfork_api::{CloneResult, ErrorBody, ForkReply, ForkRequest, ForkStages, Labels, VmState};
use vmfork_host::admission::{ForkGrant, Loan};
use vmfork_host::core::{Reservation, start_machines};
use vmfork_host::disks::MachineDisks;
use vmfork_host::error::outcome;
use vmfork_host::lifetime::{HeldLine, Lifetime};
use vmfork_host::metrics::{Stage, ms};
use vmfork_host::vm::machine::Machine;
use vmfork_host::vm::{End, Inherited, Job, Vm, now_unix_ms};

use crate::brood::{Brood, Granted};
use crate::clone::Stem;
use crate::error::Error;
use crate::forker::Forker;
use crate::freeze;
use crate::messages::message;
use crate::names::{Names, Wanted, reserve};
use crate::origin::TicketOrigin;
use crate::places::{Placement, Reserved};
use crate::remote::{Away, Departure, PlanAsk};
use crate::snapshot::Snapshot;

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
    /// How long each clone may live, counted from its start; `None`: as long as the parent's bound
    /// lets it.
    pub ttl: Option<Duration>,
    /// Memory that was set aside for it; it is lent back if nothing was forked.
    pub memory: Option<Loan>,
    /// The ticket behind it, and what is notified of the fate of each clone.
    pub origin: Option<TicketOrigin>,
    pub placement: Placement,
    /// Added to what the clones inherit.
    pub labels: Labels,
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
    let timeout = check(request.count, names, request.timeout_ms)
        .map_err(|error| error.to_body(message(parent)))?;
    let order = Order {
        clones: (1..=request.count).map(|vmid| (vmid, None)).collect(),
        names: request.names,
        all_or_nothing: request.all_or_nothing,
        timeout,
        ttl: request.ttl_ms.map(Duration::from_millis),
        memory: None,
        origin: None,
        placement: Placement {
            place: request.place,
            hosts: request.hosts,
            hydrate_bytes_per_s: request.hydrate_mib_per_s.unwrap_or(0).saturating_mul(1 << 20),
            reserved: Arc::default(),
            hold: None,
        },
        labels: request.labels,
    };
    run(forker, parent, order).await
}

/// Whether this many VMs can be asked for, with these names. → how long all of it may take.
///
/// # Errors
/// They can't.
pub fn check(
    count: u32,
    names: Option<&[String]>,
    timeout_ms: Option<u64>,
) -> Result<Duration, Error> {
    if count == 0 || count > COUNT_MAX {
        return Err(Error::Count { count, max: COUNT_MAX });
    }
    if let Some(names) = names.filter(|names| names.len() != count as usize) {
        return Err(Error::Names { names: names.len(), count });
    }
    Ok(timeout_ms.map_or(TIMEOUT_DEFAULT, Duration::from_millis).min(TIMEOUT_MAX))
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
    let (forker, parent, failed) = (Arc::clone(forker), Arc::clone(parent), message(parent));
    let message = failed.clone();
    let task = tokio::spawn(async move {
        let outcome = carry_out(forker, parent, order, given_up).await;
        outcome.map_err(|error| error.to_body(failed))
    });
    outcome(task, message).await
}

/// Wait until no other freeze of the VM is in progress, for as long as this one is wanted.
pub(crate) async fn turn<'a>(
    parent: &'a Vm,
    wanted: freeze::Wanted<'_>,
) -> Result<MutexGuard<'a, ()>, Error> {
    let freeze::Wanted { deadline, given_up, .. } = wanted;
    let turn = tokio::select! {
        biased;
        () = given_up.cancelled() => return Err(Error::GivenUp),
        turn = tokio::time::timeout_at(deadline.into(), parent.forking.lock()) => turn,
    };
    turn.ok().filter(|_| Instant::now() < deadline).ok_or(Error::NoTurn)
}

/// The same, once the VM is not paused: a program of its guest asks, whose time stands still.
async fn awake_turn<'a>(
    parent: &'a Vm,
    wanted: freeze::Wanted<'_>,
) -> Result<MutexGuard<'a, ()>, Error> {
    loop {
        let turn = turn(parent, wanted).await?;
        if !parent.pause.is_paused() {
            return Ok(turn);
        }
        drop(turn);
        tokio::select! {
            () = parent.pause.over() => {}
            // The next turn says why.
            () = wanted.given_up.cancelled() => {}
            () = tokio::time::sleep_until(wanted.deadline.into()) => {
                return Err(Error::StillPaused { vm: parent.name().to_owned() });
            }
        }
    }
}

/// Whether its volumes let it be frozen.
///
/// # Errors
/// One of them does not.
pub(crate) fn check_volumes(machine: &Machine) -> Result<(), Error> {
    match machine.disks().and_then(MachineDisks::unforkable) {
        Some((disk, volume)) => Err(Error::Unforkable { disk, volume }),
        None => Ok(()),
    }
}

/// A fork under way.
#[derive(Debug)]
struct Fork {
    forker: Arc<Forker>,
    parent: Arc<Vm>,
    /// Its clones are in the plan.
    order: Order,
    given_up: CancellationToken,
    message: String,
    /// What its clones inherit.
    inherited: Inherited,
    began: Instant,
    began_unix_ms: u64,
    deadline: Instant,
    requested: u32,
    /// What bounds the parent's life, and so its clones': kept if the parent ends meanwhile.
    bounds: HeldLine,
}

/// Who starts what, decided before the pause.
struct Plan {
    away: Option<Box<dyn Away>>,
    /// What holds the places of the clones.
    job: Option<Job>,
    /// The names, kept until the clones have them.
    reservation: Reservation,
    here: Vec<Wanted>,
    elsewhere: Vec<Wanted>,
}

async fn carry_out(
    forker: Arc<Forker>,
    parent: Arc<Vm>,
    mut order: Order,
    given_up: CancellationToken,
) -> Result<ForkReply, Error> {
    let clones = std::mem::take(&mut order.clones);
    let requested = u32::try_from(clones.len()).unwrap_or(u32::MAX);
    let fork = Fork::new(forker, parent, order, given_up, requested)?;
    let (core, parent) = (&fork.forker.core, &fork.parent);
    // Dropped last: when it is over, the end of the family finds all VMs that this fork started.
    let _under_way = core.registry.fork_begins(parent.identity.line(), fork.given_up.clone());
    let one_at_a_time = match fork.order.origin.is_some() {
        true => awake_turn(parent, fork.wanted()).await?,
        false => turn(parent, fork.wanted()).await?,
    };
    let machine = running(parent)?;
    check_volumes(&machine)?;
    core.metrics.forked();
    let plan = fork.plan(&machine, clones).await?;
    let grant = fork.admit(&plan.here).await?;
    // Until the last clone is ready.
    let _no_refill = core.hold_pool();
    let shape = machine.clones_shape();
    if !grant.clones.is_empty() {
        core.pool.want(&shape, core.config.pool as usize);
    }
    let pending = start_machines(core, &shape, grant.clones.len(), &fork.given_up);
    let frozen = freeze::freeze(core, parent, &machine, fork.wanted()).await;
    let (mut snapshot, stages, pause) = match frozen {
        Ok(frozen) => frozen,
        Err(error) => {
            if let Some(memory) = &fork.order.memory {
                memory.give_back(grant);
            }
            return Err(error);
        }
    };
    drop(one_at_a_time);
    fork.order.placement.reserved.iter().for_each(Reserved::sent);
    snapshot.lease = Some(grant.snapshot);
    let snapshot = Arc::new(snapshot);
    let granted = Granted { leases: grant.clones, refused: grant.refused, pending };
    let results = fork.start(&machine, plan, &snapshot, granted, pause).await?;
    Ok(fork.report(results, stages, &snapshot, pause))
}

/// The QEMU of a VM that can be frozen.
pub(crate) fn running(parent: &Vm) -> Result<Arc<Machine>, Error> {
    let machine = parent.running_machine()?;
    match parent.state() {
        VmState::Running | VmState::Paused => Ok(machine),
        VmState::Stalled => Err(Error::Stalled),
        _ => Err(Error::NotYet),
    }
}

impl Fork {
    fn new(
        forker: Arc<Forker>,
        parent: Arc<Vm>,
        order: Order,
        given_up: CancellationToken,
        requested: u32,
    ) -> Result<Self, Error> {
        let (began, message) = (Instant::now(), message(&parent));
        let inherited = parent.identity.inherited.with_labels(&order.labels)?;
        Ok(Self {
            began_unix_ms: now_unix_ms(),
            deadline: began + order.timeout,
            message,
            inherited,
            requested,
            bounds: forker.core.lifetimes.hold(parent.identity.line()),
            forker,
            parent,
            order,
            given_up,
            began,
        })
    }

    fn wanted(&self) -> freeze::Wanted<'_> {
        let Self { message, began, deadline, given_up, .. } = self;
        freeze::Wanted { message, began: *began, deadline: *deadline, given_up }
    }

    /// Names for all, and which go to other hosts.
    async fn plan(
        &self,
        machine: &Machine,
        clones: Vec<(u32, Option<TicketClone>)>,
    ) -> Result<Plan, Error> {
        let Self { forker, parent, order, .. } = self;
        let Forker { core, remote, .. } = &**forker;
        let ask = PlanAsk {
            core,
            parent,
            machine,
            placement: &order.placement,
            count: self.requested,
            all_or_nothing: order.all_or_nothing,
            by_ticket: order.origin.is_some(),
            wanted: self.wanted(),
        };
        let away = remote.plan(ask).await.map_err(Error::Remote)?;
        // A ticket's, or the fork's own; a clone of a clone that stays is where that has its place.
        let held = order.placement.hold.as_ref().or(away.as_deref().and_then(Away::hold));
        let job = held.map(|hold| hold.job.clone()).or_else(|| parent.identity.job.clone());
        let taken = remote.names().await;
        let names = Names {
            wanted: order.names.as_deref(),
            stem: parent.name(),
            count: self.requested,
            taken: taken.as_ref(),
        };
        let (reservation, names) = reserve(core, names, order.all_or_nothing)?;
        let all = names.into_iter().zip(clones);
        let mut here: Vec<Wanted> = all
            .map(|((name, is_kept), (vmid, ticket))| Wanted { name, is_kept, vmid, ticket })
            .collect();
        let elsewhere = match &away {
            Some(away) => here.split_off(here.len().min(away.here() as usize)),
            None => Vec::new(),
        };
        Ok(Plan { away, job, reservation, here, elsewhere })
    }

    /// Memory for the clones that stay: a ticket's own, or new.
    async fn admit(&self, here: &[Wanted]) -> Result<ForkGrant, Error> {
        let Self { order, parent, .. } = self;
        if let Some(grant) = order.memory.as_ref().and_then(Loan::take) {
            return Ok(grant);
        }
        let count = here.iter().filter(|wanted| wanted.is_kept).count();
        let count = u32::try_from(count).unwrap_or(self.requested);
        let ask = parent.identity.ask(&self.message, count, order.origin.is_some());
        Ok(self.forker.core.admit(ask, order.all_or_nothing).await?)
    }

    /// Of the clones, by what bounds the parent now. A fork may wait for long before its freeze, so
    /// this is not decided before.
    fn lifetime(&self) -> Lifetime {
        Lifetime { own: self.order.ttl, inherited: self.bounds.bound() }
    }

    /// Start all clones, here and on other hosts. → what became of each, by number.
    ///
    /// # Errors
    /// One failed and all were insisted on, or the fork was given up: none is left.
    async fn start(
        &self,
        machine: &Machine,
        plan: Plan,
        snapshot: &Arc<Snapshot>,
        granted: Granted,
        pause: Duration,
    ) -> Result<Vec<CloneResult>, Error> {
        let Self { forker, parent, order, given_up, deadline, .. } = self;
        let Plan { away, job, reservation: _names, here, elsewhere } = plan;
        let lifetime = self.lifetime();
        let disks = snapshot.disks.iter().map(|content| content.spec.clone());
        let inherited = self.inherited.with_disks(disks);
        let brood = Brood {
            forker: Arc::clone(forker),
            stem: Arc::new(Stem::of(parent, inherited, job.clone(), lifetime.clone())),
            snapshot: Arc::clone(snapshot),
            began: self.began,
            deadline: *deadline,
            origin: order.origin.clone(),
            given_up: given_up.clone(),
        };
        let all_or_nothing = order.all_or_nothing;
        let departed = async {
            let Some(away) = &away else { return Vec::new() };
            let departure = Departure {
                core: &forker.core,
                parent,
                machine,
                snapshot,
                inherited: &self.inherited,
                pause_ms: ms(pause),
                all_or_nothing,
                deadline: *deadline,
                given_up,
                origin: order.origin.as_ref(),
                job,
                lifetime: &lifetime,
                bounds: &self.bounds,
            };
            away.start(departure, elsewhere).await
        };
        let (started, departed) =
            tokio::join!(brood.start(here, granted, all_or_nothing), departed);
        // Given up while only some hosts had started theirs: those go, too, here as there.
        let failure = match away.is_some() && given_up.is_cancelled() {
            true => Some(Error::GivenUp),
            false if all_or_nothing => {
                departed.iter().find_map(|result| result.error.clone()).map(Error::Clone)
            }
            false => None,
        };
        if let Some(away) = &away
            && (started.is_err() || failure.is_some())
        {
            away.end().await;
        }
        let mut results = started.map_err(Error::Clone)?;
        if let Some(error) = failure {
            self.end(&results);
            return Err(error);
        }
        // In a cluster all have a host.
        let here = forker.remote.here();
        results.iter_mut().for_each(|result| result.host.clone_from(&here));
        results.extend(departed);
        results.sort_by_key(|result| result.vmid);
        Ok(results)
    }

    /// End what was started here.
    fn end(&self, results: &[CloneResult]) {
        let core = &self.forker.core;
        let ids = results.iter().filter_map(|result| result.id.as_deref());
        for vm in ids.filter_map(|id| core.registry.find(&self.message, id).ok()) {
            core.end(&vm, End::killed("its start was given up"));
        }
    }

    /// The reply, which the parent keeps for `inspect`.
    fn report(
        &self,
        clones: Vec<CloneResult>,
        mut stages: ForkStages,
        snapshot: &Snapshot,
        pause: Duration,
    ) -> ForkReply {
        let Self { forker, parent, requested, .. } = self;
        let failures = clones.iter().filter(|result| result.error.is_some()).count();
        stages.derive_ms = derive_ms(snapshot);
        let total = self.began.elapsed();
        forker.core.metrics.observe_stage(Stage::Total, total);
        forker.core.metrics.observe_stage(Stage::Pause, pause);
        let granted = requested - u32::try_from(failures).unwrap_or(*requested);
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
            requested: *requested,
            granted,
            began_unix_ms: self.began_unix_ms,
            pause_ms: ms(pause),
            total_ms: ms(total),
            stages,
            clones,
        };
        parent.set_last_fork(reply.clone());
        forker.core.tell_forked(parent, &reply);
        reply
    }
}

/// How long finding what the parent had written took, if that is done.
fn derive_ms(snapshot: &Snapshot) -> Option<f64> {
    let image = snapshot.engine.image();
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a few milliseconds")]
    image.table().map(|_| image.counters().derive_us.get() as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmfork_api::ErrorCode;
    use vmfork_host::testing::Host;
    use vmfork_host::vm::log::Log;
    use vmfork_host::vm::{Standstill, test_identity};

    fn vm(folder: &std::path::Path) -> Arc<Vm> {
        Vm::new(test_identity("web", None), Log::create(folder).expect("log"), None, None)
    }

    const MESSAGE: &str = "take a snapshot of `web`";

    fn wanted(deadline: Instant, given_up: &CancellationToken) -> freeze::Wanted<'_> {
        freeze::Wanted { message: MESSAGE, began: Instant::now(), deadline, given_up }
    }

    #[tokio::test]
    async fn a_fork_whose_client_has_gone_does_not_get_its_turn() {
        let folder = tempfile::tempdir().expect("folder");
        let vm = vm(folder.path());
        let (mine, given_up) = (CancellationToken::new(), CancellationToken::new());
        given_up.cancel();
        let later = Instant::now() + Duration::from_secs(60);
        drop(turn(&vm, wanted(later, &mine)).await.expect("it is free"));
        // Though it is free:
        let error = turn(&vm, wanted(later, &given_up)).await.expect_err("given up");
        assert!(matches!(error, Error::GivenUp), "{error}");
        let error = turn(&vm, wanted(Instant::now(), &mine)).await.expect_err("too late");
        assert_eq!(error.to_body(MESSAGE).code, ErrorCode::Timeout);
    }

    #[tokio::test]
    async fn a_fork_waits_for_another_no_longer_than_its_own_bound() {
        let folder = tempfile::tempdir().expect("folder");
        let vm = vm(folder.path());
        let other = vm.forking.lock().await;
        let soon = Instant::now() + Duration::from_millis(20);
        let given_up = CancellationToken::new();
        let error = turn(&vm, wanted(soon, &given_up)).await.expect_err("too late");
        assert!(matches!(error, Error::NoTurn), "{error}");
        drop(other);
    }

    #[tokio::test]
    async fn what_a_guest_forks_waits_while_its_vm_is_paused_and_what_a_client_forks_does_not() {
        let folder = tempfile::tempdir().expect("folder");
        let vm = vm(folder.path());
        vm.pause.begin(Standstill { fork: 1, ..Standstill::default() });
        let given_up = CancellationToken::new();
        let soon = Instant::now() + Duration::from_millis(20);
        drop(turn(&vm, wanted(soon, &given_up)).await.expect("its client may fork it"));
        let error = awake_turn(&vm, wanted(soon, &given_up)).await.expect_err("still paused");
        assert!(matches!(error, Error::StillPaused { ref vm } if vm == "web"), "{error}");
        let later = Instant::now() + Duration::from_secs(60);
        let (forks, resumes) = tokio::join!(awake_turn(&vm, wanted(later, &given_up)), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(vm.forking.try_lock().is_ok(), "a resume gets its turn");
            vm.pause.end();
        });
        drop((forks.expect("resumed"), resumes));
        // It ends the wait, too, that the fork is given up.
        vm.pause.begin(Standstill { fork: 2, ..Standstill::default() });
        let (forks, ()) = tokio::join!(awake_turn(&vm, wanted(later, &given_up)), async {
            given_up.cancel();
        });
        assert!(matches!(forks.expect_err("given up"), Error::GivenUp));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn clones_inherit_what_bounds_the_parent_when_they_start_though_it_has_ended() {
        let host = Host::start().await;
        let (core, web) = (&host.core, host.vm("web", None));
        let order = Order {
            clones: Vec::new(),
            names: None,
            all_or_nothing: false,
            timeout: TIMEOUT_DEFAULT,
            ttl: None,
            memory: None,
            origin: None,
            placement: Placement::default(),
            labels: Labels::default(),
        };
        let forker = crate::testing::forker(core);
        let fork = Fork::new(forker, Arc::clone(&web), order, CancellationToken::new(), 1);
        let fork = fork.expect("a fork");
        assert_eq!(fork.lifetime(), Lifetime::default());
        // It waits for its turn meanwhile.
        let set = core.set_ttl(&web, Some(TIMEOUT_MAX)).expect("it lives");
        core.end(&web, End::killed("in this test"));
        assert_eq!(fork.lifetime(), Lifetime { own: None, inherited: Some(set) });
        drop(fork);
        let held = core.lifetimes.hold(web.identity.line());
        assert_eq!(held.bound(), None, "nothing is kept of a family that has ended");
    }

    #[test]
    fn no_more_vms_than_may_be_are_asked_for_each_with_a_name_or_none() {
        let names = ["a", "b"].map(ToOwned::to_owned);
        let text = |count, names| check(count, names, None).expect_err("refused").to_string();
        assert_eq!(text(0, None), "count 0 is not in 1 to 1024");
        assert_eq!(text(1025, None), "count 1025 is not in 1 to 1024");
        assert_eq!(text(3, Some(&names[..])), "2 names for 3 VMs");
        let timeout = |ms| check(2, Some(&names), ms).expect("fits");
        assert_eq!(timeout(None), TIMEOUT_DEFAULT);
        assert_eq!(
            (timeout(Some(5)), timeout(Some(u64::MAX))),
            (Duration::from_millis(5), TIMEOUT_MAX)
        );
    }
}
