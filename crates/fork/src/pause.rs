//! A VM stands still because a client asked for it, and continues.
//!
//! A pause begins as a freeze does: the agent falls silent, then the vCPUs stop. So a paused VM can
//! be forked and stored at once, as often as wanted, although its guest cannot answer.
//! A pause waits for a freeze in progress, and a freeze for a pause that begins or ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::MutexGuard;
use vmfork_api::{ErrorBody, VmState};
use vmfork_guest_link::agent::Held;
use vmfork_host::error::outcome;
use vmfork_host::vm::{Standstill, Vm};

use crate::error::Error;

/// How long a pause waits for a freeze in progress.
const TURN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the agent may take to fall silent.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);

/// Stop a VM's vCPUs. One that is paused stays so. What has begun ends in order, also when the
/// client disconnects.
///
/// # Errors
/// It has not come up yet, has ended, or QEMU refuses. Then it runs as before.
pub async fn pause(vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let (vm, message) = (Arc::clone(vm), format!("pause `{}`", vm.name()));
    outcome(tokio::spawn(ends(stop(vm), message.clone())), message).await
}

/// Let a paused VM's vCPUs continue. One that is not paused runs on.
///
/// # Errors
/// It has ended, or QEMU refuses. Then it stays paused.
pub async fn resume(vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let (vm, message) = (Arc::clone(vm), format!("resume `{}`", vm.name()));
    outcome(tokio::spawn(ends(go_on(vm), message.clone())), message).await
}

/// What an operation ends with, for the API.
async fn ends(
    operation: impl Future<Output = Result<(), Error>>,
    message: String,
) -> Result<(), ErrorBody> {
    operation.await.map_err(|error| error.to_body(message))
}

async fn stop(vm: Arc<Vm>) -> Result<(), Error> {
    let _between_freezes = turn(&vm).await?;
    let machine = vm.running_machine()?;
    match vm.state() {
        VmState::Paused => return Ok(()),
        VmState::Running => {}
        _ => return Err(Error::NotYet),
    }
    let fork = vm.next_fork();
    let held = silence(&vm, fork).await;
    if let Err(error) = machine.qmp.stop().await {
        // QEMU may have stopped all the same.
        let _as_before = machine.qmp.cont().await;
        return Err(error.into());
    }
    // An agent that spoke before the vCPUs stood still cannot be forked here, but can be paused.
    let held = held.filter(Held::is_intact);
    vm.pause.begin(Standstill { fork, held });
    if vm.end_now().is_some() {
        vm.pause.end();
    }
    tracing::info!(vm = vm.name(), "paused");
    Ok(())
}

async fn go_on(vm: Arc<Vm>) -> Result<(), Error> {
    let _between_freezes = turn(&vm).await?;
    let machine = vm.running_machine()?;
    if !vm.pause.is_paused() {
        return Ok(());
    }
    machine.qmp.cont().await?;
    vm.pause.end();
    tracing::info!(vm = vm.name(), "resumed");
    Ok(())
}

/// The agent, silent; `None`: there is none, or it does not answer, as in a guest that is starved.
async fn silence(vm: &Vm, fork: u64) -> Option<Held> {
    let link = vm.link().ok()?;
    let held = link.prepare(fork, QUIESCE_TIMEOUT).await;
    held.inspect_err(|error| tracing::warn!(vm = vm.name(), %error, "paused without its agent"))
        .ok()
}

async fn turn(vm: &Vm) -> Result<MutexGuard<'_, ()>, Error> {
    let turn = tokio::time::timeout(TURN_TIMEOUT, vm.forking.lock()).await;
    turn.map_err(|_elapsed| Error::StillFrozen { after: TURN_TIMEOUT })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmfork_api::ErrorCode;
    use vmfork_host::testing::Host;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn only_a_vm_that_is_up_is_paused_and_an_ended_one_is_neither_paused_nor_resumed() {
        let host = Host::start().await;
        let web = host.vm("web", None);
        let error = pause(&web).await.expect_err("it has no QEMU yet");
        assert_eq!(error.code, ErrorCode::Conflict);
        host.core.end(&web, vmfork_host::vm::End::killed("in this test"));
        for error in [pause(&web).await, resume(&web).await] {
            let error = error.expect_err("it has ended");
            assert!(error.to_string().contains("is not running"), "{error}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_paused_vm_refuses_its_agents_work_at_once_and_its_end_ends_the_pause() {
        let host = Host::start().await;
        let web = host.vm("web", None);
        let (link, _guest, _requests) = vmfork_host::testing::link();
        web.set_link(link);
        host.core.set_ready(&web, None);
        web.pause.begin(Standstill { fork: 1, held: None });
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
