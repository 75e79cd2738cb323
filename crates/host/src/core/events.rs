//! What happens by itself: page engines report, QEMUs end, memory of the dead is given back.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use vmfork_engine::{EngineEvent, collect_garbage};
use vmfork_image::ImageId;
use vmfork_qemu::spawn::ExitStatus;

use super::{Core, stalls};
use crate::cgroup::limit_bytes;
use crate::metrics::{EndReason, Stage};
use crate::vm::machine::Machine;
use crate::vm::{End, Vm};

/// Garbage is collected at most so often.
const GARBAGE_PAUSE: Duration = Duration::from_millis(500);
/// And keepers that outlived their QEMU are looked for so often.
const REAP_PERIOD: Duration = Duration::from_secs(5);

pub(super) fn start(core: &Arc<Core>, mut events: mpsc::UnboundedReceiver<EngineEvent>) {
    let weak = Arc::downgrade(core);
    tokio::spawn(async move {
        while let Some(event) = events.recv().await {
            let Some(core) = weak.upgrade() else { return };
            on_engine_event(&core, event);
        }
    });
    let weak = Arc::downgrade(core);
    tokio::spawn(async move {
        loop {
            {
                let Some(core) = weak.upgrade() else { return };
                tokio::select! {
                    () = core.garbage.notified() => {}
                    () = tokio::time::sleep(REAP_PERIOD) => {}
                }
                core.state.reap_keepers();
                collect(&core);
            }
            tokio::time::sleep(GARBAGE_PAUSE).await;
        }
    });
}

fn collect(core: &Arc<Core>) {
    let live = core.engines();
    let freed_bytes = tokio::task::block_in_place(|| collect_garbage(&live));
    if freed_bytes > 0 {
        tracing::debug!(freed_bytes, "memory of dead relatives given back");
    }
}

fn on_engine_event(core: &Arc<Core>, event: EngineEvent) {
    match event {
        EngineEvent::Sealed { image } => {
            tracing::debug!(%image, "page table complete");
            if let Some(took) = derive_time(core, image) {
                core.metrics.observe_stage(Stage::Derive, took);
            }
        }
        EngineEvent::Drained { image } => tracing::debug!(%image, "drained"),
        EngineEvent::ViewLost { image, view, reason } => {
            let lost = core
                .registry
                .live()
                .into_iter()
                .find(|vm| vm.machine().is_some_and(|machine| machine.view_id() == Some(view)));
            if let Some(vm) = lost {
                let reason = format!("a page of image {image} was lost: {reason}");
                core.end(&vm, End::failed(EndReason::PageLost, reason));
            }
        }
        EngineEvent::Died { image, reason } => {
            for vm in core.registry.live() {
                let engine = vm.machine().and_then(|machine| machine.engine());
                if engine.is_some_and(|engine| engine.image().id() == image) {
                    let reason = format!("the page engine of image {image} died: {reason}");
                    core.end(&vm, End::failed(EndReason::PageLost, reason));
                }
            }
        }
    }
}

/// How long finding what the VM had written took; `None` if the image is not held any more.
fn derive_time(core: &Core, image: ImageId) -> Option<Duration> {
    let engine = core.engines().into_iter().find(|engine| engine.image().id() == image)?;
    Some(Duration::from_micros(engine.image().counters().derive_us.get()))
}

/// Notice the end of a VM's QEMU.
pub fn watch(core: &Arc<Core>, vm: &Arc<Vm>, machine: &Arc<Machine>) {
    stalls::watch(vm, machine);
    let (weak, vm) = (Arc::downgrade(core), Arc::clone(vm));
    // Not the machine itself: it would live as long as this task.
    let machine = Arc::downgrade(machine);
    tokio::spawn(async move {
        let status = {
            let Some(strong) = machine.upgrade() else { return };
            let exit = strong.process.exit();
            drop(strong);
            tokio::select! {
                status = exit => status,
                _ = vm.wait_end() => return,
            }
        };
        let words = match machine.upgrade() {
            Some(machine) => machine.process.last_words().await,
            None => String::new(),
        };
        // Before the end, which lets go of the cgroup that counts them.
        let end = end_of(status, &words, vm.oom_kills(), vm.identity.spec().memory_bytes);
        if let Some(core) = weak.upgrade() {
            core.end(&vm, end);
        }
    });
}

/// What the end of its QEMU was to a VM with so much memory.
fn end_of(status: ExitStatus, words: &str, oom_kills: u64, memory_bytes: u64) -> End {
    match status {
        ExitStatus::Code(0) => End::exited("powered off"),
        _ if oom_kills > 0 => {
            let limit_mib = limit_bytes(memory_bytes) >> 20;
            let reason = format!(
                "out of memory: it came to its limit of {limit_mib} MiB, which is twice its memory and some; \
                 `vmfork run --memory` gives a VM more"
            );
            End::failed(EndReason::OutOfMemory, reason)
        }
        status if words.is_empty() => {
            End::failed(EndReason::QemuDied, format!("QEMU died ({status})"))
        }
        status => End::failed(EndReason::QemuDied, format!("QEMU died ({status}): {words}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::Cgroups;
    use crate::testing::{Host, SOON};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_the_cgroup_has_counted_is_read_before_it_is_let_go() {
        let (host, folder) = (Host::start().await, tempfile::tempdir().expect("folder"));
        std::fs::write(folder.path().join("cgroup.controllers"), "memory\n").expect("write");
        let cgroups = Cgroups::at(folder.path(), "").expect("as the kernel's");
        let vm = host.vm("web", None);
        let cgroup = cgroups.create(&vm.identity.id, 1 << 30).expect("made");
        let counts = folder.path().join("vmfork/vm-id-web/memory.events");
        std::fs::write(counts, "oom 1\noom_kill 1\n").expect("write");
        let machine = crate::vm::fake::machine(&folder.path().join("state")).await;
        vm.set_machine(Arc::clone(&machine));
        vm.set_cgroup(cgroup, &machine);
        watch(&host.core, &vm, &machine);
        machine.process.kill();
        let end = tokio::time::timeout(SOON, vm.wait_end()).await.expect("noticed");
        assert_eq!(end.kind, EndReason::OutOfMemory, "{}", end.reason);
    }

    #[test]
    fn a_vm_that_its_limit_killed_says_so_and_what_helps() {
        let killed = ExitStatus::Signal(9);
        let end = end_of(killed, "", 2, 512 << 20);
        assert_eq!(end.kind, EndReason::OutOfMemory);
        assert!(end.reason.contains("limit of 1280 MiB"), "{}", end.reason);
        assert!(end.reason.contains("--memory"), "{}", end.reason);
        // Without the limit, another process killed it; and a VM that powered off has lost nothing.
        assert_eq!(end_of(killed, "", 0, 512 << 20).reason, "QEMU died (signal 9)");
        assert_eq!(end_of(ExitStatus::Code(0), "", 1, 512 << 20).reason, "powered off");
        let end = end_of(ExitStatus::Code(1), "no room", 0, 512 << 20);
        assert_eq!(end.reason, "QEMU died (exit code 1): no room");
        assert_eq!(end.kind, EndReason::QemuDied);
    }
}
