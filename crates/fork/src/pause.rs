//! A VM stands still because a client asked for it, and continues.
//!
//! A pause begins as a freeze does: the agent falls silent, then the vCPUs stop. So a paused VM can
//! be forked and stored at once, as often as wanted, although its guest cannot answer.
//! A pause waits for a freeze in progress, and a freeze for a pause that begins or ends.
//! If its client disconnects while it waits, it does not begin.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::MutexGuard;
use tokio_util::sync::CancellationToken;
use vmfork_api::{ErrorBody, VmState};
use vmfork_guest_link::agent::Held;
use vmfork_host::core::Core;
use vmfork_host::error::outcome;
use vmfork_host::vm::{Standstill, Vm};
use vmfork_qemu::QmpError;

use crate::error::Error;

/// How long a pause waits for a freeze in progress.
const TURN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the agent may take to fall silent.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a VM may be noticed after the loss of its QEMU.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Stop a VM's vCPUs. One that is paused stays so. If this future is dropped before the vCPUs are
/// told to stop, they run on. After that the pause ends in order.
///
/// # Errors
/// It has not come up yet, has ended, or QEMU refuses. Then it runs as before.
pub async fn pause(core: &Arc<Core>, vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let core = Arc::clone(core);
    let (vm, message) = (Arc::clone(vm), format!("pause `{}`", vm.name()));
    let given_up = CancellationToken::new();
    let _on_drop = given_up.clone().drop_guard();
    outcome(tokio::spawn(ends(stop(core, vm, given_up), message.clone())), message).await
}

/// Let a paused VM's vCPUs continue. One that is not paused runs on. If this future is dropped
/// before they are told to continue, the VM stays paused.
///
/// # Errors
/// It has ended, or QEMU refuses: then it stays paused. QEMU does not answer in time: then it may
/// run later, and counts as paused until the next resume.
pub async fn resume(core: &Arc<Core>, vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let core = Arc::clone(core);
    let (vm, message) = (Arc::clone(vm), format!("resume `{}`", vm.name()));
    let given_up = CancellationToken::new();
    let _on_drop = given_up.clone().drop_guard();
    outcome(tokio::spawn(ends(go_on(core, vm, given_up), message.clone())), message).await
}

/// What an operation ends with, for the API.
async fn ends(
    operation: impl Future<Output = Result<(), Error>>,
    message: String,
) -> Result<(), ErrorBody> {
    operation.await.map_err(|error| error.to_body(message))
}

async fn stop(core: Arc<Core>, vm: Arc<Vm>, given_up: CancellationToken) -> Result<(), Error> {
    let _between_freezes = turn(&vm, &given_up).await?;
    let machine = vm.running_machine()?;
    match vm.state() {
        VmState::Paused => return Ok(()),
        VmState::Running => {}
        VmState::Stalled => return Err(Error::Stalled),
        _ => return Err(Error::NotYet),
    }
    let fork = vm.next_fork();
    let held = silence(&vm, fork).await;
    if given_up.is_cancelled() {
        return Err(Error::GivenUp);
    }
    let console = vm.console().map(|console| console.hold());
    if let Err(error) = machine.qmp.stop().await {
        // QEMU may have stopped all the same.
        let _as_before = machine.qmp.cont().await;
        return Err(refused(&vm, error).await);
    }
    // An agent that spoke before the vCPUs stood still cannot be forked here, but can be paused.
    let held = held.filter(Held::is_intact);
    core.pause_begins(&vm, Standstill { fork, held, console, ..Standstill::default() });
    if vm.end_now().is_some() {
        vm.pause.end();
        return Err(vm.ended().into());
    }
    tracing::info!(vm = vm.name(), "paused");
    Ok(())
}

async fn go_on(core: Arc<Core>, vm: Arc<Vm>, given_up: CancellationToken) -> Result<(), Error> {
    let _between_freezes = turn(&vm, &given_up).await?;
    let machine = vm.running_machine()?;
    if !vm.pause.is_paused() {
        return match machine.is_stalled() {
            true => Ok(machine.qmp.cont().await?),
            false => Ok(()),
        };
    }
    if let Err(error) = machine.qmp.cont().await {
        if may_run_later(&error)
            && let Some(still) = vm.pause.now()
        {
            still.saved.forget();
        }
        return Err(refused(&vm, error).await);
    }
    core.pause_ends(&vm);
    tracing::info!(vm = vm.name(), "resumed");
    Ok(())
}

/// Whether QEMU may still carry out a `cont` that failed. The VM counts as paused, and a freeze
/// stops it once more. But a device state that was saved before is not that of its memory then.
fn may_run_later(error: &QmpError) -> bool {
    !matches!(error, QmpError::Refused { .. } | QmpError::Busy { .. })
}

/// The agent, silent; `None`: there is none, or it does not answer, as in a guest that is starved.
async fn silence(vm: &Vm, fork: u64) -> Option<Held> {
    let link = vm.link().ok()?;
    let held = link.prepare(fork, QUIESCE_TIMEOUT).await;
    held.inspect_err(|error| tracing::warn!(vm = vm.name(), %error, "paused without its agent"))
        .ok()
}

/// Wait until no freeze is in progress, for as long as the client waits.
async fn turn<'a>(vm: &'a Vm, given_up: &CancellationToken) -> Result<MutexGuard<'a, ()>, Error> {
    let turn = tokio::select! {
        biased;
        () = given_up.cancelled() => return Err(Error::GivenUp),
        turn = tokio::time::timeout(TURN_TIMEOUT, vm.forking.lock()) => turn,
    };
    turn.map_err(|_elapsed| Error::StillFrozen { after: TURN_TIMEOUT })
}

/// QEMU did not do it. If the VM ended meanwhile, that is the reason.
async fn refused(vm: &Vm, error: QmpError) -> Error {
    if error.is_lost() {
        let _not_noticed = tokio::time::timeout(END_TIMEOUT, vm.wait_end()).await;
    }
    match vm.end_now() {
        Some(_) => vm.ended().into(),
        None => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    use vmfork_api::ErrorCode;
    use vmfork_host::testing::Host;
    use vmfork_host::vm::console::Console;
    use vmfork_host::vm::machine::Machine;

    #[test]
    fn what_was_saved_is_forgotten_where_the_vm_may_have_run() {
        let command = || "cont".to_owned();
        let late = QmpError::Timeout { command: command(), timeout_ms: 10_000 };
        assert!(may_run_later(&late));
        let (class, desc) = ("GenericError".to_owned(), "no".to_owned());
        assert!(!may_run_later(&QmpError::Refused { command: command(), class, desc }));

        let saved = vmfork_host::vm::SavedState::default();
        assert!(saved.get().expect("no fd is needed").is_none());
        let file = std::fs::File::open("/dev/null").expect("a file");
        saved.keep(vmfork_host::vm::DeviceState { content: file.into(), lead: None });
        assert!(saved.get().expect("an fd").is_some());
        saved.forget();
        assert!(saved.get().expect("no fd is needed").is_none());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn only_a_vm_that_is_up_is_paused_and_an_ended_one_is_neither_paused_nor_resumed() {
        let host = Host::start().await;
        let web = host.vm("web", None);
        let error = pause(&host.core, &web).await.expect_err("it has no QEMU yet");
        assert_eq!(error.code, ErrorCode::Conflict);
        host.core.end(&web, vmfork_host::vm::End::killed("in this test"));
        for error in [pause(&host.core, &web).await, resume(&host.core, &web).await] {
            let error = error.expect_err("it has ended");
            assert!(error.to_string().contains("is not running"), "{error}");
        }
    }

    /// How long a client of a test waits for what cannot be.
    const SHORT: Duration = Duration::from_millis(50);

    /// A VM that is up, in a QEMU that agrees to all.
    async fn up(host: &Host, name: &str) -> (Arc<Vm>, Arc<Machine>) {
        let vm = host.vm(name, None);
        let machine = vmfork_host::testing::machine(&host.folder().join(name)).await;
        vm.set_machine(Arc::clone(&machine));
        host.core.set_ready(&vm, None);
        (vm, machine)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_its_client_gave_up_while_it_waited_is_not_carried_out_later() {
        let host = Host::start().await;
        let (web, _machine) = up(&host, "web").await;
        let freeze = web.forking.lock().await;
        assert!(
            tokio::time::timeout(SHORT, pause(&host.core, &web)).await.is_err(),
            "a freeze is in progress"
        );
        drop(freeze);
        // The lock is fair: who waited before has had it.
        let freeze = web.forking.lock().await;
        assert_eq!(web.state(), VmState::Running);
        drop(freeze);
        pause(&host.core, &web).await.expect("paused");
        assert_eq!(web.state(), VmState::Paused);
        let freeze = web.forking.lock().await;
        assert!(
            tokio::time::timeout(SHORT, resume(&host.core, &web)).await.is_err(),
            "a freeze is in progress"
        );
        drop(freeze);
        let freeze = web.forking.lock().await;
        assert_eq!(web.state(), VmState::Paused);
        drop(freeze);
        resume(&host.core, &web).await.expect("resumed");
        assert_eq!(web.state(), VmState::Running);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_typed_reaches_qemu_only_after_the_pause() {
        let host = Host::start().await;
        let (web, _machine) = up(&host, "web").await;
        let (ours, mut qemus) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let console = Console::start(ours.into(), Arc::clone(&web.log)).expect("started");
        let typing = console.attach().input;
        web.set_console(Arc::new(console));
        pause(&host.core, &web).await.expect("paused");
        typing.send(bytes::Bytes::from_static(b"x")).await.expect("room");
        let mut typed = [0];
        qemus.set_read_timeout(Some(SHORT)).expect("set");
        qemus.read(&mut typed).expect_err("it would differ from its clones");
        resume(&host.core, &web).await.expect("resumed");
        qemus.set_read_timeout(Some(vmfork_host::testing::SOON)).expect("set");
        tokio::task::block_in_place(|| qemus.read_exact(&mut typed)).expect("typed");
        assert_eq!(&typed, b"x");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_vm_that_ends_meanwhile_is_a_conflict_and_no_fault_of_qemu() {
        let host = Host::start().await;
        for is_paused in [false, true] {
            let (web, machine) = up(&host, &format!("web.{is_paused}")).await;
            if is_paused {
                pause(&host.core, &web).await.expect("paused");
            }
            machine.process.kill();
            machine.process.exit().await;
            let asked = async {
                if is_paused {
                    resume(&host.core, &web).await
                } else {
                    pause(&host.core, &web).await
                }
            };
            let ends = async {
                tokio::time::sleep(SHORT).await;
                host.core.end(&web, vmfork_host::vm::End::exited("powered off"));
            };
            let (asked, ()) = tokio::join!(asked, ends);
            let error = asked.expect_err("it has ended");
            assert_eq!(error.code, ErrorCode::Conflict, "{error}");
            assert_eq!(error.cause.as_deref(), Some("powered off"));
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_paused_vm_refuses_its_agents_work_at_once_and_its_end_ends_the_pause() {
        let host = Host::start().await;
        let web = host.vm("web", None);
        let (link, _guest, _requests) = vmfork_host::testing::link();
        web.set_link(link);
        host.core.set_ready(&web, None);
        web.pause.begin(Standstill { fork: 1, ..Standstill::default() });
        assert_eq!(web.state(), VmState::Paused);
        let error = ErrorBody::from(web.awake_link().expect_err("it could not answer"));
        assert!(error.remedy.expect("a remedy").contains("vmfork resume web"));
        let waits = tokio::spawn({
            let web = Arc::clone(&web);
            async move { web.pause.over().await }
        });
        host.core.end(&web, vmfork_host::vm::End::killed("in this test"));
        tokio::time::timeout(vmfork_host::testing::SOON, waits).await.expect("over").expect("ok");
        assert!(web.pause.now().is_none());
    }
}
