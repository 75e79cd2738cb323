//! The parent's part: quiesce, stop, freeze, save the device state, go on.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use vmfork_api::ForkStages;
use vmfork_engine::{Engine, EngineError, EngineOptions};

use crate::error::{Error, NotFrozen};
use crate::snapshot::{OnRun, Snapshot};
use crate::state::{self, Prepared, Saved};
use vmfork_guest_link::agent::Held;
use vmfork_host::core::Core;
use vmfork_host::disks::{DiskContent, MachineDisks};
use vmfork_host::metrics::{EndReason, Stage, ms};
use vmfork_host::vm::machine::Machine;
use vmfork_host::vm::{DeviceState, End, NotRun, Standstill, Vm};
use vmfork_qemu::QmpError;

/// How long the agent may take to fall silent. A guest that swaps or is starved of CPU takes its
/// time.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long disks may take to have on the medium what they promise, before the pause.
const SYNC_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a guest may take to write back what it has of its disks in memory.
const WRITE_BACK_TIMEOUT: Duration = Duration::from_secs(40);
/// How long the scan of an earlier freeze may still take.
const SEAL_TIMEOUT: Duration = Duration::from_secs(30);

/// What the freeze is for, and for how long it is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// What is done, for the text of errors.
    pub message: &'a str,
    pub began: Instant,
    pub deadline: Instant,
    pub given_up: &'a CancellationToken,
}

impl Wanted<'_> {
    /// A wait, no longer than all of it may take.
    fn at_most(&self, wait: Duration) -> Duration {
        wait.min(self.deadline.saturating_duration_since(Instant::now()))
    }
}

/// Freeze the parent. → the snapshot (the caller keeps its lease), where the time went, and the
/// pause.
///
/// # Errors
/// The parent goes on as before, unless its RAM was lost half-way, which ends it.
pub(super) async fn freeze(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    machine: &Arc<Machine>,
    wanted: Wanted<'_>,
) -> Result<(Snapshot, ForkStages, Duration), Error> {
    let engine = tokio::task::block_in_place(|| prepare_engine(core, machine, wanted))
        .map_err(NotFrozen::Engine)?;
    let engine = Arc::new(engine);
    core.add_engine(&engine);
    let still = parent.pause.now();
    let prepared = state::prepare(machine, still.as_deref()).await.map_err(NotFrozen::State)?;
    core.count(parent);
    let began = wanted.began;
    let mut stages = ForkStages { prepare_ms: ms(began.elapsed()), ..ForkStages::default() };
    core.metrics.observe_stage(Stage::Prepare, began.elapsed());

    sync_disks(machine, wanted).await?;
    let quiesce = Instant::now();
    let quiet = quiet(parent, wanted).await?;
    let (fork, held) = (quiet.still().fork, quiet.still().held.as_ref());
    let console = parent.console();
    let held_console = console.as_ref().map(|console| console.hold());
    stages.quiesce_ms = ms(quiesce.elapsed());
    core.metrics.observe_stage(Stage::Quiesce, quiesce.elapsed());

    if wanted.given_up.is_cancelled() {
        return Err(Error::GivenUp);
    }
    parent.set_frozen(true);
    let pause = Instant::now();
    let mut disks = Vec::new();
    let parts = Parts { engine: &engine, prepared, disks: &mut disks };
    let outcome = in_the_pause(core, machine, parts, held, &mut stages).await;
    let fatal = outcome.as_ref().is_err_and(NotFrozen::is_fatal);
    if !fatal && !quiet.is_paused() {
        let cont = Instant::now();
        go_on(core, parent, machine).await?;
        stages.cont_ms = step(core, Stage::Cont, cont);
    }
    let pause = pause.elapsed();
    parent.set_frozen(false);
    drop(held_console);
    let inheritance = held.map(|held| held.inheritance().clone());
    // The agent goes on, unless the VM stays paused.
    drop(quiet);
    let saved = outcome.map_err(|broken| {
        if fatal {
            core.end(parent, End::failed(EndReason::Fault, format!("lost its memory: {broken}")));
        }
        broken
    })?;
    let completed = saved.complete(machine, still.as_deref()).await;
    let DeviceState { content: state, lead } = completed.map_err(NotFrozen::State)?;
    core.parent_is_now_a_clone(parent);
    let provenance = parent.provenance();
    provenance.goes_on(&engine);
    let snapshot = Snapshot {
        state,
        lead,
        engine,
        drives: machine.drives(),
        disks,
        inheritance,
        fork,
        lease: None,
        provenance,
        on_run: OnRun::default(),
        is_watched: false,
    };
    Ok((snapshot, stages, pause))
}

/// After a pause.
///
/// # Errors
/// It can't, and is ended.
async fn go_on(core: &Arc<Core>, parent: &Arc<Vm>, machine: &Machine) -> Result<(), QmpError> {
    let outcome = machine.qmp.cont().await;
    outcome.inspect_err(|error| {
        core.end(parent, End::failed(EndReason::QemuDied, format!("could not go on: {error}")));
    })
}

/// Freeze the parent's disks alone, at one instant. → what they hold, and the pause.
///
/// # Errors
/// The parent goes on as before, unless QEMU does not let it, which ends it.
pub(super) async fn freeze_disks(
    core: &Arc<Core>,
    parent: &Arc<Vm>,
    machine: &Arc<Machine>,
    wanted: Wanted<'_>,
) -> Result<(Vec<DiskContent>, Duration), Error> {
    let is_paused = parent.pause.is_paused();
    sync_disks(machine, wanted).await?;
    if wanted.given_up.is_cancelled() {
        return Err(Error::GivenUp);
    }
    parent.set_frozen(true);
    let pause = Instant::now();
    let frozen = stop_and_freeze_disks(machine).await;
    let outcome = match is_paused {
        true => Ok(()),
        false => go_on(core, parent, machine).await,
    };
    let pause = pause.elapsed();
    parent.set_frozen(false);
    outcome?;
    Ok((frozen?, pause))
}

async fn stop_and_freeze_disks(machine: &Machine) -> Result<Vec<DiskContent>, NotFrozen> {
    machine.qmp.stop().await?;
    let disks = machine.disks();
    Ok(tokio::task::block_in_place(|| disks.map_or(Ok(Vec::new()), MachineDisks::freeze))?)
}

/// The guest writes to its disks what it has of them in its memory.
///
/// # Errors
/// It does not. It has ended meanwhile; the snapshot is given up, or the VM is paused: then its
/// guest can't go on.
pub(super) async fn write_back(parent: &Vm, wanted: Wanted<'_>) -> Result<(), Error> {
    let name = || parent.name().to_owned();
    let written = tokio::select! {
        written = parent.exit_code(&["sync"], wanted.at_most(WRITE_BACK_TIMEOUT)) => written,
        () = wanted.given_up.cancelled() => return Err(Error::GivenUp),
        _end = parent.wait_end() => return Err(parent.ended().into()),
    };
    match written {
        Ok(0) => Ok(()),
        Ok(exit_code) => Err(NotFrozen::NotWrittenBack { vm: name(), exit_code }.into()),
        Err(_) if parent.end_now().is_some() => Err(parent.ended().into()),
        Err(NotRun::Vm(error)) => Err(error.into()),
        Err(error) => {
            let stalled = parent.why_stalled();
            Err(NotFrozen::WriteBack { vm: name(), stalled, source: Box::new(error) }.into())
        }
    }
}

/// The flush that comes with `stop` finds little to do.
async fn sync_disks(machine: &Arc<Machine>, wanted: Wanted<'_>) -> Result<(), NotFrozen> {
    if machine.disks().is_none() {
        return Ok(());
    }
    let machine = Arc::clone(machine);
    let sync = move || machine.disks().map_or(Ok(()), MachineDisks::sync);
    let done = tokio::task::spawn_blocking(sync);
    // The flush in the pause waits for what is left, then.
    let Ok(done) = timeout(wanted.at_most(SYNC_TIMEOUT), done).await else { return Ok(()) };
    done.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(NotFrozen::Disks)
}

/// A guest whose agent is silent.
enum Quiet {
    /// For this freeze: it goes on after it.
    Briefly(Standstill),
    /// The VM is paused, and stays so.
    Paused(Arc<Standstill>),
}

impl Quiet {
    fn still(&self) -> &Standstill {
        match self {
            Self::Briefly(still) => still,
            Self::Paused(still) => still,
        }
    }

    fn is_paused(&self) -> bool {
        matches!(self, Self::Paused(_))
    }
}

/// The guest's agent falls silent, so that no frame is cut. In a paused VM it is silent already.
async fn quiet(parent: &Vm, wanted: Wanted<'_>) -> Result<Quiet, Error> {
    if let Some(still) = parent.pause.now() {
        return match still.held.is_none() && parent.identity.has_agent {
            true => Err(Error::Unquiet { vm: parent.name().to_owned() }),
            false => Ok(Quiet::Paused(still)),
        };
    }
    let fork = parent.next_fork();
    let held = match parent.identity.has_agent {
        true => Some(parent.link()?.prepare(fork, wanted.at_most(QUIESCE_TIMEOUT)).await?),
        false => None,
    };
    Ok(Quiet::Briefly(Standstill { fork, held, ..Standstill::default() }))
}

/// How long a step took, for the reply; counted, too.
fn step(core: &Core, stage: Stage, since: Instant) -> f64 {
    core.metrics.observe_stage(stage, since.elapsed());
    ms(since.elapsed())
}

/// What a pause works on.
struct Parts<'a> {
    engine: &'a Arc<Engine>,
    prepared: Prepared,
    /// What the disks hold then.
    disks: &'a mut Vec<DiskContent>,
}

/// Stop the vCPUs, freeze the disks, move the memory aside, save the device state. Disks and memory
/// are of one instant, since no vCPU runs. After an error a disk may have been frozen all the same,
/// which the guest does not notice.
///
/// # Errors
/// The VM can go on, unless the error of the freeze is fatal.
async fn in_the_pause(
    core: &Core,
    machine: &Machine,
    parts: Parts<'_>,
    held: Option<&Held>,
    stages: &mut ForkStages,
) -> Result<Saved, NotFrozen> {
    let stop = Instant::now();
    machine.qmp.stop().await?;
    stages.stop_ms = step(core, Stage::Stop, stop);
    if held.is_some_and(|held| !held.is_intact()) {
        return Err(NotFrozen::Unquiet);
    }
    let Parts { engine, prepared, disks } = parts;
    if let Some(served) = machine.disks() {
        let began = Instant::now();
        *disks = tokio::task::block_in_place(|| served.freeze())?;
        stages.disks_ms = step(core, Stage::Disks, began);
    }
    let freeze = Instant::now();
    tokio::task::block_in_place(|| machine.memory().freeze(engine))?;
    stages.freeze_ms = step(core, Stage::Freeze, freeze);
    let state = Instant::now();
    let saved = prepared.save(machine).await?;
    stages.state_ms = step(core, Stage::State, state);
    Ok(saved)
}

fn prepare_engine(
    core: &Core,
    machine: &Machine,
    wanted: Wanted<'_>,
) -> Result<Engine, EngineError> {
    let base = machine.engine();
    if let Some(base) = &base {
        base.wait_sealed(wanted.at_most(SEAL_TIMEOUT));
    }
    let options = EngineOptions { fill_unit_pages: core.config.fill_unit_pages.into() };
    let pages = machine.memory().pages();
    Engine::prepare(
        core.next_image(),
        pages,
        base.as_ref().map(|engine| engine.image()),
        &options,
        core.event_sink(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_wait_is_longer_than_the_fork_may_take() {
        let (began, given_up) = (Instant::now(), CancellationToken::new());
        let message = "fork `web`";
        let wanted = |bound| {
            let deadline = began + bound;
            Wanted { message, began, deadline, given_up: &given_up }
        };
        assert_eq!(wanted(Duration::from_secs(60)).at_most(QUIESCE_TIMEOUT), QUIESCE_TIMEOUT);
        assert!(wanted(Duration::from_secs(1)).at_most(QUIESCE_TIMEOUT) <= Duration::from_secs(1));
        assert_eq!(wanted(Duration::ZERO).at_most(QUIESCE_TIMEOUT), Duration::ZERO);
    }
}
