//! A clone's part: a QEMU becomes a view of the snapshot, loads the device state, runs, takes its
//! identity.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_agent_proto::{ForkIdentity, TicketClone};
use vmfork_api::{CloneResult, ErrorBody, VmState};
use vmfork_qemu::qmp::reopen_from_start;
use vmfork_qemu::{DriveSlot, QmpError, pool};

use crate::channels::start_channels;
use crate::error::{Error, NotStarted};
use crate::forker::Forker;
use crate::messages::{message, start_message};
use crate::origin::{Event, TicketOrigin};
use crate::snapshot::Snapshot;
use vmfork_guest_link::agent::AgentInfo;
use vmfork_host::admission::Lease;
use vmfork_host::core::{Core, PendingMachine};
use vmfork_host::error::chain;
use vmfork_host::lifetime::Lifetime;
use vmfork_host::metrics::{EndReason, Stage, ms};
use vmfork_host::vm::launch::LaunchError;
use vmfork_host::vm::machine::{BindError, Machine};
use vmfork_host::vm::{End, Identity, Inherited, Job, Vm, now_unix_ms, random_hex};

/// How long QEMU may take to load a state that takes milliseconds.
const LOAD_TIMEOUT: Duration = Duration::from_secs(20);

/// How many QEMUs are tried for one clone.
const ATTACH_TRIES_MAX: u32 = 4;

/// What VMs that continue one snapshot have in common.
#[derive(Debug)]
pub struct Stem {
    /// What was asked for, for the text of errors.
    pub message: String,
    /// Of them all, but for id, name, number and birth. Its `id` is that of the VM they descend
    /// from; empty: each is the root of a family of its own.
    pub identity: Identity,
    /// What the guest's agent has said of itself.
    pub agent: Option<AgentInfo>,
}

impl Stem {
    /// Of the clones of a running VM, whose places a job holds.
    pub(super) fn of(
        parent: &Vm,
        inherited: Inherited,
        job: Option<Job>,
        lifetime: Lifetime,
    ) -> Self {
        let parents = &parent.identity;
        let identity = Identity {
            parent: Some((parents.id.clone(), parents.name.clone())),
            ancestors: parents.line(),
            job,
            inherited,
            lifetime,
            ..parents.clone()
        };
        Self { message: message(parent), identity, agent: parent.agent() }
    }

    fn identity(&self, name: String, vmid: u32) -> Identity {
        let id = random_hex::<8>();
        let family = match self.identity.id.is_empty() {
            true => id.clone(),
            false => self.identity.family.clone(),
        };
        let created_unix_ms = now_unix_ms();
        Identity { id, name, vmid, family, created_unix_ms, ..self.identity.clone() }
    }
}

#[derive(Debug)]
pub(super) struct CloneOrder {
    pub(super) name: String,
    /// The number of its first worker.
    pub(super) vmid: u32,
    pub(super) ticket: Option<TicketClone>,
    pub(super) lease: Lease,
    pub(super) began: Instant,
    pub(super) deadline: Instant,
    pub(super) origin: Option<TicketOrigin>,
}

/// Start one clone. → its line in the reply, and the VM if it is ready.
pub(super) async fn start(
    forker: Arc<Forker>,
    stem: Arc<Stem>,
    snapshot: Arc<Snapshot>,
    order: CloneOrder,
    machine: PendingMachine,
) -> (CloneResult, Option<Arc<Vm>>) {
    let core = &forker.core;
    let (name, vmid) = (order.name.clone(), order.vmid);
    let (began, deadline, origin) = (order.began, order.deadline, order.origin.clone());
    let starting = start_within(&forker, &stem, &snapshot, order, machine);
    let outcome = tokio::time::timeout_at(deadline.into(), starting).await;
    match outcome.unwrap_or(Err(NotStarted::Late { after: deadline - began })) {
        Ok((vm, from)) => {
            if let Some(origin) = &origin {
                let _desk_closed =
                    origin.parent.send(Event::Running { ticket: origin.ticket, vmid });
            }
            core.metrics.clone_started();
            let result = CloneResult {
                id: Some(vm.identity.id.clone()),
                vmid,
                name,
                state: vm.state(),
                running_ms: vm.runs_since().map(|since| ms(since - began)),
                ready_ms: Some(ms(began.elapsed())),
                pooled: from == pool::Origin::Pooled,
                host: None,
                error: None,
            };
            (result, Some(vm))
        }
        Err(error) => {
            let error = Error::from(error).to_body(start_message(&name));
            core.metrics.clone_failed(error.code);
            report_failure(origin.as_ref(), vmid, &error);
            tracing::warn!(clone = name, cause = error.cause, "clone not started");
            (failed(vmid, name, error), None)
        }
    }
}

/// A clone of a ticket could not be started.
pub fn report_failure(origin: Option<&TicketOrigin>, vmid: u32, error: &ErrorBody) {
    if let Some(origin) = origin {
        let reason = error.cause.clone().unwrap_or_else(|| error.message.clone());
        let _desk_closed = origin.parent.send(Event::Ended { ticket: origin.ticket, vmid, reason });
    }
}

/// The line of a clone whose name another VM has.
pub fn name_taken(vmid: u32, name: String) -> CloneResult {
    let error = Error::NameTaken { name: name.clone() }.to_body(start_message(&name));
    failed(vmid, name, error)
}

/// The line of a clone that was not started.
pub fn failed(vmid: u32, name: String, error: ErrorBody) -> CloneResult {
    CloneResult {
        id: None,
        vmid,
        name,
        state: VmState::Failed,
        running_ms: None,
        ready_ms: None,
        pooled: false,
        host: None,
        error: Some(error),
    }
}

async fn start_within(
    forker: &Arc<Forker>,
    stem: &Stem,
    snapshot: &Arc<Snapshot>,
    order: CloneOrder,
    machine: PendingMachine,
) -> Result<(Arc<Vm>, pool::Origin), NotStarted> {
    let core = &forker.core;
    let CloneOrder { name, vmid, ticket, lease, deadline, origin, .. } = order;
    let first = machine.await.map_err(|_given_up| NotStarted::GivenUp)?;
    let (machine, from) = attached(core, snapshot, &name, first).await?;
    let machine = Arc::new(machine);
    if let Some(lead) = &snapshot.lead {
        machine.set_lead(Some(Arc::clone(lead)));
    }
    let identity = stem.identity(name.clone(), vmid);
    lease.belongs_to(&identity.family);
    let vm = core.add_vm(identity, Some(lease), origin.map(Into::into));
    let vm = vm.map_err(NotStarted::Folder)?;
    vm.set_machine(Arc::clone(&machine));
    vm.set_provenance(snapshot.provenance.clone());
    // From here on the VM is listed: whatever goes wrong ends it with the reason.
    let guard = EndOnDrop { core, vm: Some(&vm) };
    let outcome =
        bring_up(forker, &vm, &machine, snapshot, ticket, stem.agent.clone(), deadline).await;
    match outcome {
        Ok(()) => {
            guard.disarm();
            Ok((vm, from))
        }
        Err(error) => {
            let kind = match &error {
                NotStarted::Identity(_) => EndReason::Guest,
                _ => EndReason::QemuDied,
            };
            core.end(&vm, End::failed(kind, chain(&error)));
            // A page that could not be had has ended it, and what is seen here followed from that.
            match vm.end_now().filter(|end| end.kind == EndReason::PageLost) {
                Some(end) => Err(NotStarted::PageLost { reason: end.reason }),
                None => Err(error),
            }
        }
    }
}

/// A QEMU that is a view of the snapshot and has its drives. One that waited may have died
/// unnoticed: then another. What a live one refuses, another would refuse, too.
async fn attached(
    core: &Arc<Core>,
    snapshot: &Snapshot,
    name: &str,
    first: Result<(Machine, pool::Origin), LaunchError>,
) -> Result<(Machine, pool::Origin), NotStarted> {
    let mut next = first;
    let mut attempt = 1;
    loop {
        let (machine, from) = next?;
        match become_view(core, snapshot, name, &machine).await {
            Ok(()) => return Ok((machine, from)),
            Err(error)
                if from == pool::Origin::Pooled
                    && attempt < ATTACH_TRIES_MAX
                    && (error.is_lost() || !machine.is_alive()) =>
            {
                tracing::info!(error = chain(&error), "a waiting QEMU has died; taking another");
                let shape = machine.shape.clone();
                drop(machine);
                next = core.take(&shape).await;
                attempt += 1;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Bind memory and drives of a QEMU that waited. The parent runs already: it is no part of the
/// pause.
async fn become_view(
    core: &Core,
    snapshot: &Snapshot,
    name: &str,
    machine: &Machine,
) -> Result<(), NotStarted> {
    // QEMU opens the root's file while its keeper maps the memory.
    let bind = async {
        let began = Instant::now();
        tokio::task::block_in_place(|| fill(core, snapshot, name, machine))?;
        machine.bind(&snapshot.drives).await?;
        core.metrics.observe_stage(Stage::CloneBind, began.elapsed());
        Ok::<_, NotStarted>(())
    };
    let attach = async {
        let began = Instant::now();
        tokio::task::block_in_place(|| match snapshot.is_watched {
            true => machine.memory().attach_by_page(&snapshot.engine),
            false => machine.memory().attach(&snapshot.engine),
        })?;
        core.metrics.observe_stage(Stage::CloneAttach, began.elapsed());
        Ok::<_, NotStarted>(())
    };
    let (bound, attached) = tokio::join!(biased; bind, attach);
    bound.and(attached)
}

/// Make its disks: QEMU is connected to their server already.
fn fill(core: &Core, snapshot: &Snapshot, name: &str, machine: &Machine) -> Result<(), NotStarted> {
    let filled = match machine.disks() {
        Some(disks) => core.disks.fill(disks, name, &snapshot.disks)?,
        None => snapshot.disks.is_empty(),
    };
    if filled {
        return Ok(());
    }
    let given = snapshot.disks.iter().map(|content| DriveSlot::Disk(content.spec.slot()));
    let given = snapshot.drives.slots().into_iter().chain(given).collect();
    Err(BindError::Other { given, shape: machine.shape.drives.clone() }.into())
}

async fn bring_up(
    forker: &Arc<Forker>,
    vm: &Arc<Vm>,
    machine: &Arc<Machine>,
    snapshot: &Snapshot,
    ticket: Option<TicketClone>,
    agent: Option<AgentInfo>,
    deadline: Instant,
) -> Result<(), NotStarted> {
    let core = &forker.core;
    let load = Instant::now();
    {
        // Loading is CPU-bound: more at a time than cores would only make all of them late.
        let _turn = core.loading.acquire().await;
        let state = reopen_from_start(snapshot.state.as_fd()).map_err(NotStarted::Channels)?;
        machine.qmp.load_state(state.as_fd(), LOAD_TIMEOUT).await?;
    }
    start_channels(forker, vm, machine, snapshot.inheritance.as_ref())
        .map_err(NotStarted::Channels)?;
    core.metrics.observe_stage(Stage::CloneLoad, load.elapsed());

    let identity = Instant::now();
    match vm.link() {
        Ok(link) => {
            let fork_identity = ForkIdentity {
                fork: snapshot.fork,
                vmid: vm.identity.vmid,
                name: vm.name().to_owned(),
                machine_id: random_hex::<16>(),
                entropy: random_hex::<64>(),
                realtime_ns: realtime_ns(),
                ticket,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let taken = link.identity(fork_identity, left);
            let (taken, running) = tokio::join!(taken, run(vm, machine, snapshot));
            running?;
            taken?;
        }
        Err(_no_agent) => run(vm, machine, snapshot).await?,
    }
    core.metrics.observe_stage(Stage::CloneIdentity, identity.elapsed());
    core.set_ready(vm, agent);
    Ok(())
}

async fn run(vm: &Arc<Vm>, machine: &Machine, snapshot: &Snapshot) -> Result<(), QmpError> {
    machine.qmp.cont().await?;
    vm.set_runs();
    // What it touches from its first instruction on, whatever else takes its time.
    snapshot.on_run.runs(vm);
    Ok(())
}

fn realtime_ns() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Ends a clone whose start is given up half-way.
struct EndOnDrop<'a> {
    core: &'a Arc<Core>,
    vm: Option<&'a Arc<Vm>>,
}

impl EndOnDrop<'_> {
    fn disarm(mut self) {
        self.vm = None;
    }
}

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(vm) = self.vm {
            self.core.end(
                vm,
                End::failed(EndReason::Guest, "its start was given up before it was ready"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use vmfork_host::vm::machine::BindError;
    use vmfork_memory::FreezeError;
    use vmfork_qemu::QmpError;

    use super::*;

    #[test]
    fn a_qemu_that_refuses_is_told_from_one_that_is_gone() {
        let lost = QmpError::Lost { reason: "closed".into() };
        let (command, class, desc) = ("c".into(), "GenericError".into(), "no".into());
        let refused = QmpError::Refused { command, class, desc };
        let still = FreezeError::Still(std::io::Error::other("no"));
        for (error, is_lost) in [
            (NotStarted::from(BindError::from(lost)), true),
            (BindError::from(refused).into(), false),
            (BindError::Other { given: Vec::new(), shape: Vec::new() }.into(), false),
            (still.into(), false),
        ] {
            assert_eq!(error.is_lost(), is_lost, "{error}");
        }
    }
}
