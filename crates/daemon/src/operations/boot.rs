//! A VM that boots from an image.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_agent_proto::Firstboot;
use vmfork_api::{ErrorBody, ErrorCode, RunRequest};
use vmfork_cluster::Room;
use vmfork_guest_image::ImageFiles;
use vmfork_qemu::probe::{self, KvmFacts};
use vmfork_qemu::{Accel, AccelChoice, Boot, DriveSlot, Drives, GuestKind, Shape};

use super::Hub;
use vmfork_fork::{Forker, start_channels};
use vmfork_guest_link::agent::{AgentInfo, AgentLink, HelloRequest, LinkError};
use vmfork_host::admission::{BootAsk, Lease};
use vmfork_host::core::{Core, Reservation, accel_word, open_image};
use vmfork_host::error::chain;
use vmfork_host::lifetime::Lifetime;
use vmfork_host::metrics::EndReason;
use vmfork_host::quotas::User;
use vmfork_host::vm::{
    DriveSpec, End, Identity, Inherited, MachineSpec, Vm, now_unix_ms, random_hex,
};

const MEMORY_MIB_MIN: u64 = 64;
const MEMORY_MIB_MAX: u64 = 262_144;
const CPUS_MAX: u32 = 64;
/// A guest under TCG on a busy host may take half a minute.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// What an image's first-boot command may take on top where the request gives no time.
/// It may load a data set, but one that never ends must not block `run` forever.
const FIRSTBOOT_TIMEOUT: Duration = Duration::from_secs(600);
/// How many of a VM's last words go into the error of a first-boot command that failed.
const LAST_LINES: usize = 5;
/// The console is slower than the agent's port: what the command printed last is still on its way.
const CONSOLE_LAG: Duration = Duration::from_millis(200);

/// How long a VM that boots is waited for.
#[derive(Debug, Clone, Copy)]
struct Patience {
    began: Instant,
    /// Until its agent answers.
    answer: Duration,
    /// Until its first-boot command has ended, too.
    ready: Duration,
}

impl Patience {
    /// From now on. `timeout`, if given, is for all together.
    fn new(timeout: Option<Duration>) -> Self {
        let answer = timeout.unwrap_or(BOOT_TIMEOUT);
        let ready = timeout.unwrap_or(BOOT_TIMEOUT + FIRSTBOOT_TIMEOUT);
        Self { began: Instant::now(), answer, ready }
    }

    fn left(&self, limit: Duration) -> Duration {
        limit.saturating_sub(self.began.elapsed())
    }
}

/// Start a VM, and wait until its agent has answered and the image's first-boot command has ended.
///
/// # Errors
/// Nothing is left running.
pub(super) async fn run(hub: &Hub, user: User, request: RunRequest) -> Result<Arc<Vm>, ErrorBody> {
    let core = &hub.core;
    let began = Instant::now();
    let files = open_image(core, &request.image)?;
    let choice = choose_accel(&request)?;
    let memory_mib = request.memory_mib.unwrap_or_else(|| files.metadata.default_memory_mib.into());
    let cpus = request.cpus.unwrap_or(1);
    check_size(memory_mib, cpus)?;
    let elsewhere = match hub.cluster.member() {
        Some(member) => member.locate.hosts_of_names().await,
        None => HashMap::new(),
    };
    let reservation = name_for(core, &request, &elsewhere)?;
    let Some(name) = reservation.names().first().cloned() else {
        return Err(name_taken(request.name.as_ref().unwrap_or(&request.image), None));
    };
    let memory_bytes = memory_mib << 20;
    let id = random_hex::<8>();
    let lease =
        admit(core, BootAsk { name: &name, family: &id, user, ram_bytes: memory_bytes, cpus })
            .await?;
    let identity = Identity {
        family: id.clone(),
        user,
        job: None,
        lifetime: Lifetime { own: request.ttl_ms.map(Duration::from_millis), inherited: None },
        id,
        name: name.clone(),
        inherited: Inherited {
            spec: MachineSpec {
                image: request.image,
                drives: drives(&files),
                nics: 0,
                memory_bytes,
                cpus,
                accel: accel_word(choice.accel),
                accel_reason: choice.reason.clone(),
            },
            labels: request.labels,
        },
        snapshot: None,
        parent: None,
        ancestors: Arc::default(),
        vmid: 0,
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
    tracing::info!(vm = name, image = vm.identity.spec().image, memory_mib, cpus, accel = %choice.accel, reason = choice.reason, "VM starts");
    let guard = EndOnDrop { core, vm: &vm, armed: true };
    let timeout = request.boot_timeout_ms.map(Duration::from_millis);
    let outcome = bring_up(&hub.forker, &vm, files, &choice, timeout).await;
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

/// Of a VM that boots from these.
fn drives(files: &ImageFiles) -> Vec<DriveSpec> {
    let root = files.metadata.root_blake3().map(ToOwned::to_owned);
    root.map(|blake3| DriveSpec::Root { blake3 }).into_iter().collect()
}

/// Memory for it, if its user may have one more.
async fn admit(core: &Core, ask: BootAsk<'_>) -> Result<Lease, ErrorBody> {
    let message = format!("run `{}`", ask.name);
    let shape = Room { memory_bytes: core.admission.boot_bytes(ask.ram_bytes), vcpus: ask.cpus };
    let turn = core.turn(ask.user, (1, shape), &message).await?;
    match turn.allowed() {
        Some(allowed) if allowed.count == 0 => Err(allowed.refusal(message)),
        _ => core.admission.boot(ask),
    }
}

/// Keep its name, or one made from the image's. `elsewhere`: names that VMs of other hosts have,
/// each with its host's.
///
/// # Errors
/// Another host has a VM of that name.
fn name_for(
    core: &Core,
    request: &RunRequest,
    elsewhere: &HashMap<String, String>,
) -> Result<Reservation, ErrorBody> {
    let Some(name) = &request.name else {
        let is_taken = |name: &str| elsewhere.contains_key(name);
        return Ok(core.registry.reserve_for_image(&request.image, is_taken));
    };
    match elsewhere.get(name) {
        Some(host) => Err(name_taken(name, Some(host))),
        None => Ok(core.registry.reserve(&[name])),
    }
}

fn name_taken(name: &str, host: Option<&str>) -> ErrorBody {
    let place = host.map_or(String::new(), |host| format!(" on host `{host}`"));
    ErrorBody {
        code: ErrorCode::Conflict,
        message: format!("run `{name}`"),
        cause: Some(format!("there is a VM named `{name}`{place} already")),
        remedy: Some(format!("choose another --name, or `vmfork rm -f {name}`")),
    }
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
    forker: &Arc<Forker>,
    vm: &Arc<Vm>,
    files: ImageFiles,
    choice: &AccelChoice,
    timeout: Option<Duration>,
) -> Result<(), ErrorBody> {
    let core = &forker.core;
    let patience = Patience::new(timeout);
    let message = format!("run `{}`", vm.name());
    let host_error = |error: &dyn std::error::Error| ErrorBody {
        code: ErrorCode::Qemu,
        message: message.clone(),
        cause: Some(chain(error)),
        remedy: Some("`vmfork doctor` checks the host; the daemon's log has more".to_owned()),
    };
    let guest = if files.kernel.is_some() { GuestKind::Linux } else { GuestKind::Bare };
    let root = files.root.map(|root| (DriveSlot::ReadOnly, OwnedFd::from(root)));
    let drives = Drives::new(guest, root.into_iter().collect());
    let drives = drives.map_err(|error| host_error(&error))?;
    let shape = Shape::new(
        vm.identity.spec().memory_bytes,
        vm.identity.spec().cpus,
        choice.accel,
        guest,
        drives.slots(),
    )
    .map_err(|error| host_error(&error))?;
    let shape = if files.metadata.vmgenid == Some(false) { shape.without_vmgenid() } else { shape };
    let append = OsString::from(&files.metadata.cmdline);
    let boot = match files.kernel {
        Some(kernel) => {
            Boot::Kernel { kernel: kernel.into(), initrd: files.initrd.map(Into::into), append }
        }
        None => Boot::Disk,
    };
    let machine = core.launcher.boot(shape.clone(), drives, boot).await;
    let machine = machine.map_err(|error| ErrorBody {
        code: error.code(),
        remedy: Some(error.remedy().to_owned()),
        ..host_error(&error)
    })?;
    let machine = Arc::new(machine);
    vm.set_machine(Arc::clone(&machine));
    start_channels(forker, vm, &machine, None).map_err(|error| host_error(&error))?;
    // Clones of it will want QEMUs of this shape.
    core.pool.want(&shape, core.config.pool as usize);
    if !vm.identity.has_agent || timeout == Some(Duration::ZERO) {
        if vm.identity.has_agent {
            greet_in_background(core, vm);
        } else {
            core.set_ready(vm, None);
        }
        return Ok(());
    }
    greet(core, vm, patience).await
}

/// Wait until the guest is ready. The VM is not ended here if that fails.
async fn greet(core: &Core, vm: &Arc<Vm>, patience: Patience) -> Result<(), ErrorBody> {
    let link = vm.link()?;
    let outcome = tokio::select! {
        outcome = until_ready(&link, vm.name(), patience) => outcome.map_err(|failed| match vm.end_now() {
            Some(end) if failed.0 == ErrorCode::Guest => (failed.0, end.reason),
            _ => failed,
        }),
        end = vm.wait_end() => Err((ErrorCode::Guest, format!("the VM ended: {}", end.reason))),
    };
    let (code, cause) = match outcome {
        Ok(info) => match info.firstboot {
            Some(Firstboot::Ended { exit_code }) if exit_code != 0 => {
                tokio::time::sleep(CONSOLE_LAG).await;
                (ErrorCode::Guest, firstboot_failed(exit_code, &vm.log.last_lines(LAST_LINES)))
            }
            _ => {
                core.set_ready(vm, Some(info));
                return Ok(());
            }
        },
        Err(failed) => failed,
    };
    Err(ErrorBody {
        code,
        message: format!("run `{}`", vm.name()),
        cause: Some(cause),
        remedy: Some(format!("`vmfork logs {}` shows what the guest printed", vm.name())),
    })
}

/// What the agent says when the guest is ready, or why it is not.
async fn until_ready(
    link: &AgentLink,
    name: &str,
    patience: Patience,
) -> Result<AgentInfo, (ErrorCode, String)> {
    let hello = HelloRequest {
        name: name.to_owned(),
        machine_id: random_hex::<16>(),
        entropy: random_hex::<64>(),
    };
    let failed = |error: LinkError, late: String| match error {
        LinkError::Timeout { .. } => (ErrorCode::Timeout, late),
        error => (ErrorCode::Guest, error.to_string()),
    };
    let answered = link.hello(hello, patience.left(patience.answer)).await;
    let info = answered.map_err(|error| {
        let limit_s = patience.answer.as_secs_f64();
        failed(
            error,
            format!("the guest's agent did not answer within {limit_s} s of the VM's start"),
        )
    })?;
    if info.is_ready() {
        return Ok(info);
    }
    tracing::info!(vm = name, "the guest is up, its first-boot command runs");
    link.ready(patience.left(patience.ready)).await.map_err(|error| {
        let limit_s = patience.ready.as_secs_f64();
        failed(
            error,
            format!(
                "the image's first-boot command still ran {limit_s} s after the VM's start: allow more \
                 with --timeout, or have it leave what goes on to the background"
            ),
        )
    })
}

fn firstboot_failed(exit_code: i32, last_lines: &[String]) -> String {
    let mut text = format!("the image's first-boot command ended with exit code {exit_code}");
    if !last_lines.is_empty() {
        text.push_str("; the console's last lines: ");
        text.push_str(&last_lines.join(" / "));
    }
    text
}

fn greet_in_background(core: &Arc<Core>, vm: &Arc<Vm>) {
    let (core, vm) = (Arc::clone(core), Arc::clone(vm));
    tokio::spawn(async move {
        if let Err(error) = greet(&core, &vm, Patience::new(None)).await {
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

#[cfg(test)]
#[path = "boot_tests.rs"]
mod tests;
