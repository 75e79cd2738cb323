//! A VM that boots from an image.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_api::{ErrorBody, ErrorCode, RunRequest};
use vmfork_guest_image::ImageFiles;
use vmfork_qemu::probe::{self, KvmFacts};
use vmfork_qemu::{Accel, AccelChoice, Boot, DiskId, GuestKind, Shape};

use super::{Core, accel_word, chain};
use crate::agent::HelloRequest;
use crate::metrics::EndReason;
use crate::vm::{End, Identity, Vm, now_unix_ms, random_hex};

const MEMORY_MIB_MIN: u64 = 64;
const MEMORY_MIB_MAX: u64 = 262_144;
const CPUS_MAX: u32 = 64;
/// A guest under TCG on a busy host may take half a minute.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// Start a VM, and wait until its agent has answered.
///
/// # Errors
/// Nothing is left running.
pub(super) async fn run(core: &Arc<Core>, request: RunRequest) -> Result<Arc<Vm>, ErrorBody> {
    let began = Instant::now();
    let files = open_image(core, &request.image)?;
    let choice = choose_accel(&request)?;
    let memory_mib = request.memory_mib.unwrap_or_else(|| files.metadata.default_memory_mib.into());
    let cpus = request.cpus.unwrap_or(1);
    check_size(memory_mib, cpus)?;
    let reservation = match &request.name {
        Some(name) => core.registry.reserve(&[name]),
        None => core.registry.reserve_for_image(&request.image),
    };
    let Some(name) = reservation.names().first().cloned() else {
        let taken = request.name.unwrap_or(request.image);
        return Err(ErrorBody {
            code: ErrorCode::Conflict,
            message: format!("run `{taken}`"),
            cause: Some(format!("there is a VM named `{taken}` already")),
            remedy: Some(format!("choose another --name, or `vmfork rm -f {taken}`")),
        });
    };
    let memory_bytes = memory_mib << 20;
    let lease = core.admission.boot(&name, memory_bytes)?;
    let id = random_hex::<8>();
    let identity = Identity {
        family: id.clone(),
        id,
        name: name.clone(),
        image: request.image,
        parent: None,
        ancestors: Arc::default(),
        vmid: 0,
        accel: accel_word(choice.accel),
        accel_reason: choice.reason.clone(),
        cpus,
        memory_bytes,
        has_agent: files.metadata.agent,
        created_unix_ms: now_unix_ms(),
    };
    let vm = core.add_vm(identity, Some(lease), None).map_err(|error| ErrorBody {
        code: ErrorCode::Host,
        message: format!("run `{name}`"),
        cause: Some(chain(&error)),
        remedy: Some("is the disk of the state folder full?".to_owned()),
    })?;
    drop(reservation);
    tracing::info!(vm = name, image = vm.identity.image, memory_mib, cpus, accel = %choice.accel, reason = choice.reason, "VM starts");
    let guard = EndOnDrop { core, vm: &vm, armed: true };
    let timeout = request.boot_timeout_ms.map_or(BOOT_TIMEOUT, Duration::from_millis);
    let outcome = bring_up(core, &vm, files, &choice, timeout).await;
    guard.disarm();
    match outcome {
        Ok(()) => {
            core.metrics.observe_boot(began.elapsed());
            tracing::info!(vm = name, ready_ms = began.elapsed().as_millis(), "VM is ready");
            Ok(vm)
        }
        Err(error) => {
            let reason = error.cause.clone().unwrap_or_else(|| error.message.clone());
            core.end(&vm, End::failed(EndReason::Guest, reason));
            Err(error)
        }
    }
}

/// The image's files, open.
pub(super) fn open_image(core: &Core, name: &str) -> Result<ImageFiles, ErrorBody> {
    core.images.open(name).map_err(|error| ErrorBody {
        code: super::store_code(&error),
        message: format!("open image `{name}`"),
        cause: Some(chain(&error)),
        remedy: error.remedy(),
    })
}

fn choose_accel(request: &RunRequest) -> Result<AccelChoice, ErrorBody> {
    let wanted = request.accel.map(|accel| match accel {
        vmfork_api::Accel::Kvm => Accel::Kvm,
        vmfork_api::Accel::Tcg => Accel::Tcg,
    });
    probe::choose_accel(wanted, &KvmFacts::gather()).map_err(|error| ErrorBody {
        code: ErrorCode::Host,
        message: "run with KVM".to_owned(),
        cause: Some(chain(&error)),
        remedy: Some("leave --accel out: vmfork works without KVM, slower".to_owned()),
    })
}

fn check_size(memory_mib: u64, cpus: u32) -> Result<(), ErrorBody> {
    let bad = |cause: String| ErrorBody {
        code: ErrorCode::BadRequest,
        message: "run a VM".to_owned(),
        cause: Some(cause),
        remedy: None,
    };
    if !(MEMORY_MIB_MIN..=MEMORY_MIB_MAX).contains(&memory_mib) || !memory_mib.is_multiple_of(2) {
        return Err(bad(format!(
            "memory of {memory_mib} MiB is not an even number from {MEMORY_MIB_MIN} to {MEMORY_MIB_MAX}"
        )));
    }
    if !(1..=CPUS_MAX).contains(&cpus) {
        return Err(bad(format!("{cpus} vCPUs are not in 1 to {CPUS_MAX}")));
    }
    Ok(())
}

async fn bring_up(
    core: &Arc<Core>,
    vm: &Arc<Vm>,
    files: ImageFiles,
    choice: &AccelChoice,
    timeout: Duration,
) -> Result<(), ErrorBody> {
    let deadline = Instant::now() + timeout;
    let message = format!("run `{}`", vm.name());
    let host_error = |error: &dyn std::error::Error| ErrorBody {
        code: ErrorCode::Qemu,
        message: message.clone(),
        cause: Some(chain(error)),
        remedy: Some("`vmfork doctor` checks the host; the daemon's log has more".to_owned()),
    };
    let guest = if files.kernel.is_some() { GuestKind::Linux } else { GuestKind::Bare };
    let disk = files.root.map(OwnedFd::from);
    let disk_id = disk.as_ref().map(DiskId::of).transpose().map_err(|error| host_error(&error))?;
    let shape =
        Shape::new(vm.identity.memory_bytes, vm.identity.cpus, choice.accel, guest, disk_id)
            .map_err(|error| host_error(&error))?;
    let shape = if files.metadata.vmgenid == Some(false) { shape.without_vmgenid() } else { shape };
    let disk = disk_id.zip(disk).map(|(id, disk)| core.disks.share(id, disk));
    let append = OsString::from(&files.metadata.cmdline);
    let boot = match files.kernel {
        Some(kernel) => {
            Boot::Kernel { kernel: kernel.into(), initrd: files.initrd.map(Into::into), append }
        }
        None => Boot::Disk,
    };
    let machine = core.launcher.boot(shape.clone(), disk, boot).await;
    let machine = machine.map_err(|error| ErrorBody {
        code: error.code(),
        remedy: Some(error.remedy().to_owned()),
        ..host_error(&error)
    })?;
    let machine = Arc::new(machine);
    vm.set_machine(Arc::clone(&machine));
    core.start_channels(vm, &machine, None).map_err(|error| host_error(&error))?;
    // Clones of it will want QEMUs of this shape.
    core.pool.want(&shape, core.config.pool as usize);
    if !vm.identity.has_agent || timeout.is_zero() {
        if vm.identity.has_agent {
            greet_in_background(core, vm);
        } else {
            vm.set_ready(None);
        }
        return Ok(());
    }
    greet(vm, deadline, timeout).await
}

/// Wait for the guest's agent until `deadline`, which is `timeout` after the start.
async fn greet(vm: &Arc<Vm>, deadline: Instant, timeout: Duration) -> Result<(), ErrorBody> {
    let link = vm.link()?;
    let hello = HelloRequest {
        name: vm.name().to_owned(),
        machine_id: random_hex::<16>(),
        entropy: random_hex::<64>(),
    };
    let message = format!("run `{}`", vm.name());
    let guest_error = |code, cause: String| ErrorBody {
        code,
        message: message.clone(),
        cause: Some(cause),
        remedy: Some(format!("`vmfork logs {}` shows what the guest printed", vm.name())),
    };
    tokio::select! {
        answer = link.hello(hello, deadline.saturating_duration_since(Instant::now())) => match answer {
            Ok(info) => {
                vm.set_ready(Some(info));
                Ok(())
            }
            Err(crate::agent::LinkError::Timeout { .. }) => {
                let text = format!(
                    "the guest's agent did not answer within {} s of the VM's start",
                    timeout.as_secs_f64()
                );
                Err(guest_error(ErrorCode::Timeout, text))
            }
            Err(error) => Err(match vm.end_now() {
                Some(end) => guest_error(ErrorCode::Guest, end.reason),
                None => guest_error(ErrorCode::Guest, error.to_string()),
            }),
        },
        end = vm.wait_end() => Err(guest_error(ErrorCode::Guest, format!("the VM ended: {}", end.reason))),
    }
}

fn greet_in_background(core: &Arc<Core>, vm: &Arc<Vm>) {
    let (core, vm) = (Arc::clone(core), Arc::clone(vm));
    tokio::spawn(async move {
        if let Err(error) = greet(&vm, Instant::now() + BOOT_TIMEOUT, BOOT_TIMEOUT).await {
            let reason = error.cause.unwrap_or(error.message);
            core.end(&vm, End::failed(EndReason::Guest, reason));
        }
    });
}

/// Ends a VM whose start is given up half-way.
struct EndOnDrop<'a> {
    core: &'a Arc<Core>,
    vm: &'a Arc<Vm>,
    armed: bool,
}

impl EndOnDrop<'_> {
    fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.core.end(self.vm, End::killed("its start was given up"));
        }
    }
}
