//! The parent's part: quiesce, stop, freeze, save the device state, go on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_api::{ErrorBody, ErrorCode, ForkStages};
use vmfork_engine::{Engine, EngineOptions};
use vmfork_memory::FreezeError;
use vmfork_qemu::QmpError;

use crate::messages::was_given_up;
use crate::snapshot::{OnRun, Snapshot};
use crate::state::{self, Prepared, Saved, StateError};
use vmfork_guest_link::agent::Held;
use vmfork_host::core::Core;
use vmfork_host::metrics::{EndReason, Stage, ms};
use vmfork_host::vm::machine::Machine;
use vmfork_host::vm::{DeviceState, End, Standstill, Vm};

/// How long the agent may take to fall silent. A guest that swaps or is starved of CPU takes its
/// time.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the scan of an earlier freeze may still take.
const SEAL_TIMEOUT: Duration = Duration::from_secs(30);

/// What the freeze is for, and for how long it is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// For the error's text.
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
) -> Result<(Snapshot, ForkStages, Duration), ErrorBody> {
    let failed = |code, error: &dyn std::error::Error| failure(wanted.message, code, error);
    let engine = tokio::task::block_in_place(|| prepare_engine(core, machine, wanted))
        .map_err(|error| failed(ErrorCode::Host, &error))?;
    let engine = Arc::new(engine);
    core.add_engine(&engine);
    let still = parent.pause.now();
    let prepared = state::prepare(machine, still.as_deref()).await;
    let prepared = prepared.map_err(|error| failed(ErrorCode::Qemu, &error))?;
    core.count(parent);
    let began = wanted.began;
    let mut stages = ForkStages { prepare_ms: ms(began.elapsed()), ..ForkStages::default() };
    core.metrics.observe_stage(Stage::Prepare, began.elapsed());

    let quiesce = Instant::now();
    let quiet = quiet(parent, wanted).await?;
    let (fork, held) = (quiet.still().fork, quiet.still().held.as_ref());
    let console = parent.console();
    let held_console = console.as_ref().map(|console| console.hold());
    stages.quiesce_ms = ms(quiesce.elapsed());
    core.metrics.observe_stage(Stage::Quiesce, quiesce.elapsed());

    if wanted.given_up.is_cancelled() {
        return Err(was_given_up(wanted.message));
    }
    parent.set_frozen(true);
    let pause = Instant::now();
    let outcome = in_the_pause(core, machine, &engine, prepared, held, &mut stages).await;
    let fatal = matches!(&outcome, Err(Broken::Freeze(error)) if error.is_fatal());
    if !fatal && !quiet.is_paused() {
        let cont = Instant::now();
        if let Err(error) = machine.qmp.cont().await {
            core.end(parent, End::failed(EndReason::QemuDied, format!("could not go on: {error}")));
            return Err(failed(ErrorCode::Qemu, &error));
        }
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
        failed(ErrorCode::Qemu, &broken)
    })?;
    let completed = saved.complete(machine, still.as_deref()).await;
    let completed = completed.map_err(|error| failed(ErrorCode::Qemu, &error))?;
    let DeviceState { content: state, lead } = completed;
    core.parent_is_now_a_clone(parent);
    let provenance = parent.provenance();
    provenance.goes_on(&engine);
    let snapshot = Snapshot {
        state,
        lead,
        engine,
        drives: machine.drives(),
        inheritance,
        fork,
        lease: None,
        provenance,
        on_run: OnRun::default(),
        is_watched: false,
    };
    Ok((snapshot, stages, pause))
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
async fn quiet(parent: &Vm, wanted: Wanted<'_>) -> Result<Quiet, ErrorBody> {
    if let Some(still) = parent.pause.now() {
        return match still.held.is_none() && parent.identity.has_agent {
            true => Err(paused_without_agent(parent, wanted.message)),
            false => Ok(Quiet::Paused(still)),
        };
    }
    let fork = parent.next_fork();
    let held = match parent.identity.has_agent {
        true => Some(
            parent
                .link()?
                .prepare(fork, wanted.at_most(QUIESCE_TIMEOUT))
                .await
                .map_err(|error| error.to_body(wanted.message.to_owned()))?,
        ),
        false => None,
    };
    Ok(Quiet::Briefly(Standstill { fork, held, ..Standstill::default() }))
}

fn paused_without_agent(parent: &Vm, message: &str) -> ErrorBody {
    ErrorBody::new(ErrorCode::Guest, message)
        .cause("the guest's agent did not fall silent before the VM was paused")
        .remedy(format!("`vmfork resume {}`, then pause it again", parent.name()))
}

/// How long a step took, for the reply; counted, too.
fn step(core: &Core, stage: Stage, since: Instant) -> f64 {
    core.metrics.observe_stage(stage, since.elapsed());
    ms(since.elapsed())
}

/// Stop the vCPUs, move the memory aside, save the device state.
///
/// # Errors
/// The VM can go on, unless the error of the freeze is fatal.
async fn in_the_pause(
    core: &Core,
    machine: &Machine,
    engine: &Arc<Engine>,
    prepared: Prepared,
    held: Option<&Held>,
    stages: &mut ForkStages,
) -> Result<Saved, Broken> {
    let stop = Instant::now();
    machine.qmp.stop().await.map_err(Broken::Qmp)?;
    stages.stop_ms = step(core, Stage::Stop, stop);
    if held.is_some_and(|held| !held.is_intact()) {
        return Err(Broken::Unquiet);
    }
    let freeze = Instant::now();
    tokio::task::block_in_place(|| machine.memory().freeze(engine)).map_err(Broken::Freeze)?;
    stages.freeze_ms = step(core, Stage::Freeze, freeze);
    let state = Instant::now();
    let saved = prepared.save(machine).await.map_err(Broken::State)?;
    stages.state_ms = step(core, Stage::State, state);
    Ok(saved)
}

/// What went wrong in the pause.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Qmp(QmpError),
    #[error(transparent)]
    Freeze(FreezeError),
    #[error(transparent)]
    State(StateError),
    #[error("the guest's agent spoke before the VM stood still: its guest is very slow")]
    Unquiet,
}

fn prepare_engine(
    core: &Core,
    machine: &Machine,
    wanted: Wanted<'_>,
) -> Result<Engine, vmfork_engine::EngineError> {
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

/// An error, with its whole chain as the cause.
fn failure(message: &str, code: ErrorCode, error: &dyn std::error::Error) -> ErrorBody {
    ErrorBody {
        code,
        message: message.to_owned(),
        cause: Some(vmfork_host::error::chain(error)),
        remedy: Some("`vmfork doctor` checks the host; the daemon's log has more".to_owned()),
    }
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
