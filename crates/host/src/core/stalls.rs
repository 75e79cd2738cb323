//! VMs that a disk has stopped, and their going on.
//!
//! ```text
//!   runs ──a disk can't answer──► stalled ──cont──► tries ──runs for SETTLED──► runs
//!                                    ▲                │
//!                                    └── once more ───┘   each wait twice as long
//! ```
//!
//! What the guest asked of its disk is tried again with each `cont`, so it sees no error. A VM is
//! stalled until it has run for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch::Receiver;
use tokio::time::{sleep, timeout};
use vmfork_api::VmState;
use vmfork_qemu::qmp::IoError;

use crate::disks::MachineDisks;
use crate::metrics::{Metrics, StallReason};
use crate::vm::machine::Machine;
use crate::vm::{Stall, Vm};

/// How long until a stalled VM is tried again; longer after each failure.
const RETRY_MIN: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// A VM that has run for this long is not stalled any more.
const SETTLED: Duration = Duration::from_secs(2);

/// Let a VM with disks go on whenever one of them has stopped it.
pub(super) fn watch(vm: &Arc<Vm>, machine: &Arc<Machine>) {
    if machine.disks().is_none() {
        return;
    }
    let (vm, weak) = (Arc::clone(vm), Arc::downgrade(machine));
    let mut stall = machine.qmp.stall();
    tokio::spawn(async move {
        while let Some(error) = next(&mut stall).await {
            let machine = weak.upgrade();
            let disks = machine.as_ref().and_then(|machine| machine.disks());
            let (reason, since) = (reason(&vm, &error, disks), Instant::now());
            drop(machine);
            tracing::warn!(vm = vm.name(), reason, "stalled");
            let IoError { no_space, drive, .. } = error;
            vm.set_stalled(Some(Stall { reason, no_space, drive, since }));
            let mut wait = RETRY_MIN;
            loop {
                sleep(wait).await;
                wait = (wait * 2).min(RETRY_MAX);
                let Some(machine) = weak.upgrade() else { return };
                try_again(&vm, &machine).await;
                drop(machine);
                match timeout(SETTLED, next(&mut stall)).await {
                    Ok(Some(_again)) => {}
                    Ok(None) => return,
                    Err(_it_runs) => break,
                }
            }
            vm.set_stalled(None);
            tracing::info!(vm = vm.name(), "goes on");
        }
    });
}

/// What keeps the VM from running, once there is something. `None`: its QEMU has gone.
async fn next(stall: &mut Receiver<Option<IoError>>) -> Option<IoError> {
    stall.wait_for(Option::is_some).await.ok().and_then(|error| error.clone())
}

/// Not in the middle of a freeze, nor while a client has paused it: both go on by themselves.
async fn try_again(vm: &Vm, machine: &Machine) {
    let Ok(_between_freezes) = vm.forking.try_lock() else { return };
    if vm.pause.is_paused() || !machine.is_stalled() {
        return;
    }
    if let Err(error) = machine.qmp.cont().await {
        tracing::debug!(vm = vm.name(), %error, "a stalled VM does not go on");
    }
}

/// For people: which disk, and why.
fn reason(vm: &Vm, error: &IoError, served: Option<&MachineDisks>) -> String {
    let mut disks = vm.identity.spec().disks();
    let disk = disks.find(|(drive, _)| Some(*drive) == error.drive);
    let name = disk.map_or("?", |(_, disk)| disk.name.as_str());
    // The daemon's own words say more than QEMU's.
    let known = served.and_then(|served| match error.no_space {
        true => served.refusal(name),
        false => served.problem(name),
    });
    match (known, error.no_space) {
        (Some(known), _) => format!("disk `{name}`: {known}"),
        (None, true) => format!("disk `{name}` has no space on the host"),
        (None, false) => format!("disk `{name}`: {}", error.reason),
    }
}

/// Have the metrics know how many VMs are stalled now.
pub(super) fn count(vms: &[Arc<Vm>], metrics: &Metrics) {
    let stalled = vms.iter().filter(|vm| vm.state() == VmState::Stalled);
    let stalls: Vec<Stall> = stalled.filter_map(|vm| vm.stall()).collect();
    let full = stalls.iter().filter(|stall| stall.no_space).count();
    metrics.set_stalled(StallReason::NoSpace, full);
    metrics.set_stalled(StallReason::Error, stalls.len() - full);
}
