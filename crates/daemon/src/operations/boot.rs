//! A VM that boots from an image.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_agent_proto::Firstboot;
use vmfork_api::disk::RootDisk;
use vmfork_api::{ErrorBody, RunRequest};
use vmfork_cluster::Room;
use vmfork_guest_image::ImageFiles;
use vmfork_qemu::probe::{self, KvmFacts};
use vmfork_qemu::{Accel, AccelChoice, Boot, DriveContent, Drives, GuestKind, Shape};

use super::boot_disks::{self, drives, pmem_words, words};
use super::error::{NotReady, RunError, SizeError};
use super::{Hub, root_device};
use vmfork_fork::{Forker, start_channels};
use vmfork_guest_link::agent::{AgentInfo, AgentLink, HelloRequest, LinkError};
use vmfork_host::admission::{BootAsk, Lease};
use vmfork_host::core::{Core, Reservation, accel_word, open_image};
use vmfork_host::disks::DiskContent;
use vmfork_host::error::Error as HostError;
use vmfork_host::lifetime::Lifetime;
use vmfork_host::metrics::EndReason;
use vmfork_host::quotas::User;
use vmfork_host::vm::launch::Booting;
use vmfork_host::vm::{
    DriveSpec, End, Identity, Inherited, MachineSpec, Provenance, Vm, now_unix_ms, random_hex,
};
use vmfork_snapshots::workload_of;

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
/// How long until the death of a QEMU is known whose sockets are closed already.
const DEATH_WAIT: Duration = Duration::from_secs(1);
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
    let mut files = open_image(core, &request.image)?;
    let choice = choose_accel(request.accel).map_err(|error| error.to_body("run with KVM"))?;
    let memory_mib = request.memory_mib.unwrap_or_else(|| files.metadata.default_memory_mib.into());
    let cpus = request.cpus.unwrap_or(1);
    check_size(memory_mib, cpus).map_err(|error| RunError::from(error).to_body("run a VM"))?;
    let elsewhere = match hub.cluster.member() {
        Some(member) => member.locate.hosts_of_names().await,
        None => HashMap::new(),
    };
    let (reservation, name) = name_for(core, &request, &elsewhere).map_err(|error| {
        error.to_body(format!("run `{}`", request.name.as_ref().unwrap_or(&request.image)))
    })?;
    let message = format!("run `{name}`");
    let wanted = boot_disks::wanted(&request, &files.metadata);
    let wanted = wanted.map_err(|error| error.to_body(message.as_str()))?;
    let memory_bytes = memory_mib << 20;
    if !wanted.has_root_file() {
        files.root = None;
    }
    let chosen = root_device::choose(&core.config, request.root_device, &files, memory_bytes);
    let chosen = chosen.map_err(|error| error.to_body(message.as_str()))?;
    let id = random_hex::<8>();
    let ask = BootAsk { name: &name, family: &id, user, ram_bytes: memory_bytes, cpus };
    let lease = admit(core, ask, &message).await?;
    // After its admission: one that is refused makes no files.
    let disks = boot_disks::contents(core, &wanted).await;
    let disks = disks.map_err(|error| error.to_body(message.as_str()))?;
    hub.library.image_is_used(&request.image, workload_of(&request.labels), &disks);
    let spec = MachineSpec {
        image: request.image,
        drives: drives(&files, chosen.pmem_bytes, &disks),
        nics: 0,
        memory_bytes,
        cpus,
        accel: accel_word(choice.accel),
        accel_reason: choice.reason.clone(),
        root_device_reason: chosen.reason,
    };
    let order = Order {
        message,
        id,
        name,
        user,
        files,
        choice,
        root: wanted.root,
        disks,
        inherited: Inherited { spec, labels: request.labels },
        snapshot: None,
        lease,
        ttl: request.ttl_ms.map(Duration::from_millis),
        timeout: request.boot_timeout_ms.map(Duration::from_millis),
    };
    // Until it is ready, the name is kept.
    let vm = boot(hub, order).await;
    drop(reservation);
    vm
}

/// A VM that is to boot, with all that it gets.
pub(super) struct Order {
    /// What is done, for the text of errors.
    pub(super) message: String,
    /// Its own, and its family's.
    pub(super) id: String,
    pub(super) name: String,
    pub(super) user: User,
    /// Its root is the VM's first drive, if it is there.
    pub(super) files: ImageFiles,
    pub(super) choice: AccelChoice,
    /// Which of the disks is the root's: the first, if there is one.
    pub(super) root: Option<RootDisk>,
    pub(super) disks: Vec<DiskContent>,
    pub(super) inherited: Inherited,
    /// The stored snapshot that its disks are of, and what it comes of by that.
    pub(super) snapshot: Option<(String, Provenance)>,
    pub(super) lease: Lease,
    pub(super) ttl: Option<Duration>,
    /// For all of the boot.
    pub(super) timeout: Option<Duration>,
}

/// Start a VM, and wait until it is ready.
///
/// # Errors
/// Nothing is left running.
pub(super) async fn boot(hub: &Hub, order: Order) -> Result<Arc<Vm>, ErrorBody> {
    let (core, began) = (&hub.core, Instant::now());
    let Order { message, id, name, user, files, choice, root, mut disks, .. } = order;
    core.disks.count_on(user, &mut disks);
    let (snapshot, came_of) = order.snapshot.unzip();
    let identity = Identity {
        family: id.clone(),
        user,
        job: None,
        lifetime: Lifetime { own: order.ttl, inherited: None },
        id,
        name: name.clone(),
        inherited: order.inherited,
        snapshot,
        parent: None,
        ancestors: Arc::default(),
        vmid: 0,
        has_agent: files.metadata.agent,
        created_unix_ms: now_unix_ms(),
    };
    let vm = core.add_vm(identity, Some(order.lease), None).map_err(RunError::Folder);
    let vm = vm.map_err(|error| error.to_body(message.as_str()))?;
    if let Some(came_of) = came_of {
        vm.set_provenance(came_of);
    }
    let MachineSpec { image, memory_bytes, cpus, .. } = vm.identity.spec();
    let memory_mib = memory_bytes >> 20;
    tracing::info!(vm = name, image, memory_mib, cpus, accel = %choice.accel, reason = choice.reason, "VM starts");
    let mut guard = EndOnDrop::new(core);
    guard.add(Arc::clone(&vm));
    let outcome = bring_up(&hub.forker, &vm, (files, root, disks), &choice, order.timeout).await;
    guard.disarm();
    match outcome {
        Ok(()) => {
            core.metrics.observe_boot(began.elapsed());
            tracing::info!(vm = name, ready_ms = began.elapsed().as_millis(), "VM is ready");
            Ok(vm)
        }
        Err(error) => {
            let error = error.to_body(message);
            let reason = error.cause.clone().unwrap_or_else(|| error.message.clone());
            core.end(&vm, End::failed(EndReason::Guest, reason));
            Err(error)
        }
    }
}

/// Memory for it, if its user may have one more.
pub(super) async fn admit(
    core: &Core,
    ask: BootAsk<'_>,
    message: &str,
) -> Result<Lease, ErrorBody> {
    let shape = Room { memory_bytes: core.admission.boot_bytes(ask.ram_bytes), vcpus: ask.cpus };
    let turn = core.turn(ask.user, (1, shape), message).await;
    match turn.map_err(|error| error.to_body(message))?.allowed() {
        Some(allowed) if allowed.count == 0 => {
            Err(HostError::from(allowed.refused()).to_body(message))
        }
        _ => core.admission.boot(ask),
    }
}

/// Keep its name, or one made from the image's. `elsewhere`: names that VMs of other hosts have,
/// each with its host's.
///
/// # Errors
/// A VM here or on another host has that name.
fn name_for(
    core: &Core,
    request: &RunRequest,
    elsewhere: &HashMap<String, String>,
) -> Result<(Reservation, String), RunError> {
    let asked = request.name.as_ref().unwrap_or(&request.image);
    let taken = |host| RunError::NameTaken { name: asked.clone(), host };
    let reservation = match &request.name {
        None => {
            let is_taken = |name: &str| elsewhere.contains_key(name);
            core.registry.reserve_for_image(&request.image, is_taken)
        }
        Some(name) => match elsewhere.get(name) {
            Some(host) => return Err(taken(Some(host.clone()))),
            None => core.registry.reserve(&[name]),
        },
    };
    match reservation.names().first().cloned() {
        Some(name) => Ok((reservation, name)),
        None => Err(taken(None)),
    }
}

pub(super) fn choose_accel(wanted: Option<vmfork_api::Accel>) -> Result<AccelChoice, RunError> {
    let wanted = wanted.map(|accel| match accel {
        vmfork_api::Accel::Kvm => Accel::Kvm,
        vmfork_api::Accel::Tcg => Accel::Tcg,
    });
    Ok(probe::choose_accel(wanted, &KvmFacts::gather())?)
}

fn check_size(memory_mib: u64, cpus: u32) -> Result<(), SizeError> {
    if !(MEMORY_MIB_MIN..=MEMORY_MIB_MAX).contains(&memory_mib) || !memory_mib.is_multiple_of(2) {
        let (min_mib, max_mib) = (MEMORY_MIB_MIN, MEMORY_MIB_MAX);
        return Err(SizeError::Memory { mib: memory_mib, min_mib, max_mib });
    }
    if !(1..=CPUS_MAX).contains(&cpus) {
        return Err(SizeError::Cpus { cpus, max: CPUS_MAX });
    }
    Ok(())
}

async fn bring_up(
    forker: &Arc<Forker>,
    vm: &Arc<Vm>,
    (files, root_disk, disks): (ImageFiles, Option<RootDisk>, Vec<DiskContent>),
    choice: &AccelChoice,
    timeout: Option<Duration>,
) -> Result<(), RunError> {
    let core = &forker.core;
    let patience = Patience::new(timeout);
    let guest = if files.kernel.is_some() { GuestKind::Linux } else { GuestKind::Bare };
    let root = files.root.map(|root| DriveContent::ReadOnly(root.into()));
    let drives = Drives::new(guest, root.into_iter().collect()).map_err(RunError::Drives)?;
    let shape = Shape::new(
        vm.identity.spec().memory_bytes,
        vm.identity.spec().cpus,
        choice.accel,
        guest,
        vm.identity.spec().drives.iter().map(DriveSpec::slot).collect(),
    )?;
    let shape = shape.with_pmem(vm.identity.spec().pmem_bytes())?;
    let shape = if files.metadata.vmgenid == Some(false) { shape.without_vmgenid() } else { shape };
    let mut append = OsString::from(&files.metadata.cmdline);
    append.push(words(root_disk));
    append.push(pmem_words(vm.identity.spec()));
    let boot = match files.kernel {
        Some(kernel) => {
            Boot::Kernel { kernel: kernel.into(), initrd: files.initrd.map(Into::into), append }
        }
        None => Boot::Disk,
    };
    let booting = Booting { drives, disks: &disks, vm: vm.name(), boot };
    let machine = Arc::new(core.launcher.boot(shape, booting).await?);
    vm.set_machine(Arc::clone(&machine));
    start_channels(forker, vm, &machine, None).map_err(RunError::Channels)?;
    // Clones of it will want QEMUs of this shape.
    if machine.disks().is_none_or(|disks| disks.unforkable().is_none()) {
        core.pool.want(&machine.clones_shape(), core.config.pool as usize);
    }
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
async fn greet(core: &Core, vm: &Arc<Vm>, patience: Patience) -> Result<(), RunError> {
    let link = vm.link()?;
    let outcome = tokio::select! {
        outcome = until_ready(&link, vm.name(), patience) => match outcome {
            // The link of a QEMU that dies is closed before its death is known, which says more.
            Err(NotReady::Link(error)) => {
                match tokio::time::timeout(DEATH_WAIT, vm.wait_end()).await {
                    Ok(end) => Err(NotReady::LinkEnded { reason: end.reason }),
                    Err(_lives) => Err(NotReady::Link(error)),
                }
            }
            outcome => outcome,
        },
        end = vm.wait_end() => Err(NotReady::Ended { reason: end.reason }),
    };
    let why = match outcome {
        Ok(info) => match info.firstboot {
            Some(Firstboot::Ended { exit_code }) if exit_code != 0 => {
                tokio::time::sleep(CONSOLE_LAG).await;
                NotReady::FirstbootFailed { exit_code, last_lines: vm.log.last_lines(LAST_LINES) }
            }
            _ => {
                core.set_ready(vm, Some(info));
                return Ok(());
            }
        },
        Err(why) => why,
    };
    Err(RunError::NotReady { vm: vm.name().to_owned(), why })
}

/// What the agent says when the guest is ready, or why it is not.
async fn until_ready(
    link: &AgentLink,
    name: &str,
    patience: Patience,
) -> Result<AgentInfo, NotReady> {
    let hello = HelloRequest {
        name: name.to_owned(),
        machine_id: random_hex::<16>(),
        entropy: random_hex::<64>(),
    };
    let failed = |error: LinkError, late: NotReady| match error {
        LinkError::Timeout { .. } => late,
        error => NotReady::Link(error),
    };
    let answered = link.hello(hello, patience.left(patience.answer)).await;
    let info =
        answered.map_err(|error| failed(error, NotReady::NoAnswer { after: patience.answer }))?;
    if info.is_ready() {
        return Ok(info);
    }
    tracing::info!(vm = name, "the guest is up, its first-boot command runs");
    let ready = link.ready(patience.left(patience.ready)).await;
    ready.map_err(|error| failed(error, NotReady::FirstbootRuns { after: patience.ready }))
}

fn greet_in_background(core: &Arc<Core>, vm: &Arc<Vm>) {
    let (core, vm) = (Arc::clone(core), Arc::clone(vm));
    tokio::spawn(async move {
        if let Err(error) = greet(&core, &vm, Patience::new(None)).await {
            let error = error.to_body(format!("run `{}`", vm.name()));
            let reason = error.cause.unwrap_or(error.message);
            core.end(&vm, End::failed(EndReason::Guest, reason));
        }
    });
}

/// Ends VMs whose start is given up half-way.
pub(super) struct EndOnDrop<'a> {
    core: &'a Arc<Core>,
    vms: Vec<Arc<Vm>>,
}

impl<'a> EndOnDrop<'a> {
    pub(super) fn new(core: &'a Arc<Core>) -> Self {
        Self { core, vms: Vec::new() }
    }

    pub(super) fn add(&mut self, vm: Arc<Vm>) {
        self.vms.push(vm);
    }

    /// Their start is over.
    pub(super) fn disarm(mut self) {
        self.vms.clear();
    }
}

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        for vm in &self.vms {
            self.core.end(vm, End::killed("its start was given up"));
        }
    }
}

#[cfg(test)]
#[path = "boot_tests.rs"]
mod tests;
