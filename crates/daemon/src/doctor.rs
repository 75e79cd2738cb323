//! What the host has and lacks for vmfork, a line and a remedy each.
//!
//! Each check is a function of what was read to a [`Check`]; [`examine`] reads. Checks look and
//! touch nothing. `failed` means that VMs can't run (or can't be forked) as it is, `warning` that
//! something is missing that not everybody needs.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use linux_raw_sys::general::{PAGE_IS_FILE, PAGE_IS_PRESENT, page_region, pm_scan_arg};
use rustix::fs::{MemfdFlags, memfd_create, statvfs};
use rustix::ioctl::{Opcode, Updater, opcode};
use rustix::process::{Resource, geteuid, getrlimit};
use vmfork_api::{Check, CheckStatus, DoctorReport, SCHEMA};
use vmfork_qemu::probe::{self, AccelChoice, Binary, KvmFacts, NoKvm, ProbeError};

use crate::config::find_program;
use crate::holder::HolderStatus;
use vmfork_host::admission::Admission;
use vmfork_host::config::Config;
use vmfork_host::disks::DiskHealth;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// `PAGEMAP_SCAN` came with it.
const KERNEL_MIN: (u32, u32) = (6, 7);
/// A view has at most a mapping for each 2 MiB block of its memory.
const MAP_COUNT_MIN: u64 = 65_530;
/// A VM takes about a dozen.
const FILES_MIN: u64 = 4096;
/// The smallest guest that does something.
const MEMORY_BYTES_MIN: u64 = 256 * MIB;

/// Look at everything. `cgroup` is what [`vmfork_host::cgroup::Cgroups::detect`] found at start,
/// and `disks` what [`vmfork_host::disks::HostDisks::health`] finds.
pub async fn examine(
    config: &Config,
    admission: &Admission,
    cgroup: Result<(), String>,
    disks: Result<DiskHealth, String>,
    holding: HolderStatus,
) -> DoctorReport {
    let qemu = qemu(probe::find(Some(&config.qemu)).await);
    let path = std::env::var_os("PATH");
    let host = admission.host();
    let mut checks = vec![
        privileges(geteuid().is_root()),
        kernel(&read("/proc/sys/kernel/osrelease")),
        userfaultfd(&open_userfaultfd()),
        pagemap_scan(&scan_own_pages()),
        memfd(&memfd_create("vmfork-doctor", MemfdFlags::CLOEXEC).map(drop)),
        overcommit(read("/proc/sys/vm/overcommit_memory").trim()),
        map_count(read("/proc/sys/vm/max_map_count").trim()),
        open_files(getrlimit(Resource::Nofile).maximum),
        qemu,
        part("shim", &config.shim(), "VMs can't be started without it"),
        kvm(&probe::choose_accel(None, &KvmFacts::gather())),
        memory(host.total_bytes, host.available_bytes, admission.admissible_bytes()),
        vcpus(admission.vcpus_max(), admission.room().vcpus),
        shared_memory(&free_bytes(Path::new("/dev/shm"))),
        cgroups(cgroup),
        disk(&config.state, &free_bytes(&config.state)),
        agent(&config.agent()),
        holder(holding),
        mmdebstrap(find_program(Path::new("mmdebstrap"), path.as_deref()).is_some()),
    ];
    match &disks {
        Ok(health) => checks.extend([left_disks(health), broken_disks(health), floor(health)]),
        Err(error) => checks.push(no_disks(error)),
    }
    DoctorReport { schema: SCHEMA.to_owned(), checks }
}

/// Empty if it can't be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn ok(name: &str, detail: impl Into<String>) -> Check {
    Check { name: name.into(), status: CheckStatus::Ok, detail: detail.into(), remedy: None }
}

fn warning(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Check {
    let remedy = Some(remedy.into());
    Check { name: name.into(), status: CheckStatus::Warning, detail: detail.into(), remedy }
}

fn failure(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check { status: CheckStatus::Failed, ..warning(name, detail, remedy) }
}

fn holder(status: HolderStatus) -> Check {
    let name = "holder";
    match status {
        HolderStatus::Keeps(count) => ok(
            name,
            format!("keeps {count} of the API's sockets: clients wait while vmforkd restarts"),
        ),
        HolderStatus::Lacks { held, of } => warning(
            name,
            format!(
                "keeps {held} of the API's {of} sockets: clients of the others are refused while vmforkd restarts"
            ),
            "the daemon's log tells why; `vmfork daemon restart` tries it again",
        ),
        HolderStatus::Off => ok(name, "off: clients are refused while vmforkd restarts"),
        HolderStatus::Missing => warning(
            name,
            "no holder runs: clients are refused while vmforkd restarts",
            "the daemon's log tells why; is vmfork-holder in the folder of --libdir?",
        ),
    }
}

fn privileges(is_root: bool) -> Check {
    let name = "privileges";
    if is_root {
        return ok(name, "vmforkd runs as root; its QEMUs do not");
    }
    failure(
        name,
        "vmforkd does not run as root",
        "start it as root: it opens /dev/userfaultfd and gives each QEMU a user of its own",
    )
}

fn kernel(release: &str) -> Check {
    let (name, release) = ("kernel", release.trim());
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let remedy = "boot a kernel of 6.7 or later; Debian 12 has one in bookworm-backports (linux-image-amd64)";
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= KERNEL_MIN => {
            ok(name, format!("Linux {release}"))
        }
        (Some(Ok(_)), Some(Ok(_))) => {
            failure(name, format!("Linux {release} is older than 6.7: no PAGEMAP_SCAN"), remedy)
        }
        _ => warning(name, format!("a version that can't be read: `{release}`"), remedy),
    }
}

fn open_userfaultfd() -> io::Result<()> {
    OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").map(drop)
}

fn userfaultfd(opened: &io::Result<()>) -> Check {
    let name = "userfaultfd";
    match opened {
        Ok(()) => ok(name, "/dev/userfaultfd opens"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => failure(
            name,
            format!("/dev/userfaultfd: {error}"),
            "start vmforkd as root, or let the container have the device /dev/userfaultfd",
        ),
        Err(error) => failure(
            name,
            format!("/dev/userfaultfd: {error}"),
            "use a kernel with CONFIG_USERFAULTFD, and devtmpfs on /dev",
        ),
    }
}

/// `_IOWR('f', 16, struct pm_scan_arg)`; linux-raw-sys lacks it.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);

/// Scan a page of our own.
fn scan_own_pages() -> io::Result<()> {
    let pagemap = fs::File::open("/proc/self/pagemap")?;
    let page = rustix::param::page_size();
    let seen = 7_u8;
    let start = (&raw const seen).addr() & !(page - 1);
    let mut region = page_region { start: 0, end: 0, categories: 0 };
    let mut argument = pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: 0,
        start: start as u64,
        end: (start + page) as u64,
        walk_end: 0,
        vec: (&raw mut region).expose_provenance() as u64,
        vec_len: 1,
        max_pages: 0,
        category_inverted: u64::from(PAGE_IS_FILE),
        category_mask: u64::from(PAGE_IS_FILE | PAGE_IS_PRESENT),
        category_anyof_mask: 0,
        return_mask: u64::from(PAGE_IS_PRESENT),
    };
    // SAFETY:
    // - PAGEMAP_SCAN reads and writes a `pm_scan_arg`, whose `size` is right.
    // - `argument.vec` points to `vec_len`, one, live and writable `page_region`.
    // - It changes no memory but these: no flag asks for write protection.
    let scanned = unsafe {
        rustix::ioctl::ioctl(pagemap.as_fd(), Updater::<PAGEMAP_SCAN, _>::new(&mut argument))
    };
    scanned?;
    if region.start == start as u64 {
        Ok(())
    } else {
        Err(io::Error::other("it did not find a page of our own stack"))
    }
}

fn pagemap_scan(scanned: &io::Result<()>) -> Check {
    let name = "pagemap_scan";
    match scanned {
        Ok(()) => ok(name, "tells which pages a process wrote"),
        Err(error) => failure(
            name,
            format!("PAGEMAP_SCAN: {error}"),
            "boot a kernel of 6.7 or later, with /proc/PID/pagemap open to root",
        ),
    }
}

fn memfd(made: &rustix::io::Result<()>) -> Check {
    match made {
        Ok(()) => ok("memfd", "memory files can be made"),
        Err(error) => failure(
            "memfd",
            format!("memfd_create: {error}"),
            "use a kernel with CONFIG_MEMFD_CREATE; look for a seccomp filter around vmforkd",
        ),
    }
}

fn overcommit(mode: &str) -> Check {
    let name = "overcommit";
    if mode == "2" {
        return warning(
            name,
            "vm.overcommit_memory is 2: each clone is charged for all of its memory",
            "sysctl vm.overcommit_memory=0 (vmfork keeps its own accounts)",
        );
    }
    ok(name, format!("vm.overcommit_memory is {mode}"))
}

fn map_count(count: &str) -> Check {
    let name = "max_map_count";
    match count.parse::<u64>() {
        Ok(count) if count >= MAP_COUNT_MIN => ok(name, format!("vm.max_map_count is {count}")),
        _ => warning(
            name,
            format!("vm.max_map_count is {count}: VMs that were forked often may run out"),
            format!("sysctl vm.max_map_count={MAP_COUNT_MIN}"),
        ),
    }
}

/// `None` is no limit.
fn open_files(limit: Option<u64>) -> Check {
    let name = "open_files";
    match limit {
        Some(limit) if limit < FILES_MIN => warning(
            name,
            format!("vmforkd may open {limit} files: enough for some {} VMs", limit / 12),
            "raise the limit: `LimitNOFILE=1048576` in the unit, or `ulimit -n`",
        ),
        Some(limit) => ok(name, format!("vmforkd may open {limit} files")),
        None => ok(name, "vmforkd may open any number of files"),
    }
}

fn qemu(found: Result<Binary, ProbeError>) -> Check {
    let name = "qemu";
    let install = "apt-get install qemu-system-x86, or name another by --qemu";
    match found {
        Ok(binary) => {
            let detail = format!("QEMU {} at {}", binary.version, binary.path.display());
            match binary.version.warning() {
                None => ok(name, detail),
                Some(doubt) => warning(
                    name,
                    format!("{detail}; {doubt}"),
                    "fine if it works; `make test` tells",
                ),
            }
        }
        Err(error) => {
            let source = std::error::Error::source(&error);
            let cause = source.map(|source| format!(": {source}")).unwrap_or_default();
            failure(name, format!("{error}{cause}"), install)
        }
    }
}

/// A file that is built with vmforkd.
fn part(name: &str, path: &Path, without: &str) -> Check {
    if path.is_file() {
        return ok(name, path.display().to_string());
    }
    failure(
        name,
        format!("{} is missing: {without}", path.display()),
        "`make build` makes it; --libdir or VMFORK_LIBDIR says where it is",
    )
}

fn agent(path: &Path) -> Check {
    let check = part("agent", path, "images can't be built");
    match check.status {
        CheckStatus::Failed => Check { status: CheckStatus::Warning, ..check },
        _ => check,
    }
}

fn kvm(choice: &Result<AccelChoice, NoKvm>) -> Check {
    use vmfork_qemu::Accel;
    let remedy = "nothing to do for TCG, which is slower; for KVM use a host with VT-x or AMD-V and load kvm_intel or kvm_amd";
    match choice {
        Ok(AccelChoice { accel: Accel::Kvm, reason }) => ok("kvm", reason.clone()),
        Ok(AccelChoice { reason, .. }) => warning("kvm", reason.clone(), remedy),
        Err(error) => warning("kvm", error.to_string(), remedy),
    }
}

fn memory(total_bytes: u64, available_bytes: u64, admissible_bytes: u64) -> Check {
    let name = "memory";
    let detail = format!(
        "{} MiB, {} MiB of it available, {} MiB admissible for VMs",
        total_bytes / MIB,
        available_bytes / MIB,
        admissible_bytes / MIB
    );
    let remedy = "end VMs or other programs, or lower --memory-reserve-mib";
    if admissible_bytes >= MEMORY_BYTES_MIN {
        ok(name, detail)
    } else {
        warning(name, detail, remedy)
    }
}

fn vcpus(max: u32, admissible: u32) -> Check {
    let name = "vcpus";
    let detail = format!("{max} virtual CPUs for VMs, {admissible} of them admissible");
    if admissible > 0 {
        ok(name, detail)
    } else {
        warning(name, detail, "end VMs, or raise --vcpus-per-core")
    }
}

/// Bytes free to us on the file system of `path`.
fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

fn shared_memory(free: &io::Result<u64>) -> Check {
    let name = "shm";
    let remedy =
        "mount -t tmpfs tmpfs /dev/shm (programs beside vmfork want it; VMs' memory is in memfds)";
    match free {
        Ok(free) if *free >= 64 * MIB => ok(name, format!("/dev/shm has {} MiB free", free / MIB)),
        Ok(free) => warning(name, format!("/dev/shm has {} MiB free", free / MIB), remedy),
        Err(error) => warning(name, format!("/dev/shm: {error}"), remedy),
    }
}

fn cgroups(found: Result<(), String>) -> Check {
    match found {
        Ok(()) => ok("cgroup", "each VM has a memory limit of its own (cgroup v2)"),
        Err(reason) => warning(
            "cgroup",
            format!("VMs have no memory limit of their own: {reason}"),
            "boot with systemd.unified_cgroup_hierarchy=1, and run vmforkd by its unit",
        ),
    }
}

fn disk(state: &Path, free: &io::Result<u64>) -> Check {
    let (name, state) = ("disk", state.display());
    let remedy = "make room, or choose another folder by --state";
    match free {
        Ok(free) if *free >= 2 * GIB => ok(name, format!("{state} has {:.1} GiB free", gib(*free))),
        Ok(free) if *free >= 64 * MIB => warning(
            name,
            format!("{state} has {} MiB free; an image takes 200 to 1000", free / MIB),
            remedy,
        ),
        Ok(free) => failure(name, format!("{state} has {} MiB free", free / MIB), remedy),
        Err(error) => failure(name, format!("{state}: {error}"), remedy),
    }
}

fn left_disks(health: &DiskHealth) -> Check {
    let name = "left_disks";
    let DiskHealth { left, left_bytes, .. } = health;
    if *left == 0 {
        return ok(name, "no VM of an earlier daemon has left a disk");
    }
    warning(
        name,
        format!("{left} left by VMs of earlier daemons, with {:.1} GiB", gib(*left_bytes)),
        "`vmfork disk ls` lists them; `vmfork disk export` saves one; `vmfork disk prune` removes all",
    )
}

fn broken_disks(health: &DiskHealth) -> Check {
    let name = "damaged_disks";
    let DiskHealth { damaged, broken_volumes, .. } = health;
    let all = [("disk", damaged), ("volume", broken_volumes)];
    let named = all.into_iter().filter(|(_, names)| !names.is_empty());
    let named: Vec<String> = named.map(|(what, names)| counted(what, names)).collect();
    if named.is_empty() {
        return ok(name, "all disks and volumes can be read");
    }
    warning(
        name,
        format!("can't be used: {}", named.join("; ")),
        "`vmfork disk ls` and `vmfork volume ls` tell why; `rm` of both removes what is lost",
    )
}

/// Names that are shown of many.
const SHOWN: usize = 4;

fn counted(what: &str, names: &[String]) -> String {
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = if names.len() > SHOWN { ", …" } else { "" };
    let plural = if names.len() == 1 { "" } else { "s" };
    format!("{} {what}{plural} ({shown}{more})", names.len())
}

/// With less than this above the floor, the next large write of a guest stalls its VM.
const ROOM: u64 = 16 * MIB;

fn floor(health: &DiskHealth) -> Check {
    let name = "disk_space";
    let remedy = "make room: `vmfork disk prune`, `vmfork image rm`, `vmfork snapshot rm`";
    let floor = health.floor_bytes / MIB;
    match &health.free_bytes {
        Ok(free) if *free >= health.floor_bytes + ROOM => {
            ok(name, format!("{:.1} GiB free for disks, which leave {floor} MiB", gib(*free)))
        }
        Ok(free) => failure(
            name,
            format!(
                "{} MiB free, and disks leave {floor} to the host: VMs that write to theirs stall",
                free / MIB
            ),
            remedy,
        ),
        Err(error) => failure(name, format!("the file system of disks: {error}"), remedy),
    }
}

fn no_disks(error: &str) -> Check {
    let detail = format!("disks can't be listed: {error}");
    failure("disk_space", detail, "is the medium of the state folder there? The log has more")
}

#[expect(clippy::cast_precision_loss, reason = "for people, to one digit")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

fn mmdebstrap(is_there: bool) -> Check {
    if is_there {
        return ok("mmdebstrap", "images can be built");
    }
    warning(
        "mmdebstrap",
        "not installed: images can't be built, only imported",
        "apt-get install mmdebstrap",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statuses(checks: &[Check]) -> Vec<CheckStatus> {
        checks.iter().map(|check| check.status).collect()
    }

    /// Of a host with this much free space, and this many disks that were left.
    fn health(free_bytes: u64, left: usize) -> DiskHealth {
        DiskHealth {
            left,
            left_bytes: 3 * GIB / 2,
            damaged: Vec::new(),
            broken_volumes: Vec::new(),
            free_bytes: Ok(free_bytes),
            floor_bytes: GIB,
        }
    }

    #[test]
    fn of_many_damaged_disks_a_few_are_named() {
        let damaged = (0..6).map(|id| id.to_string()).collect();
        let broken_volumes = vec!["db".to_owned()];
        let check = broken_disks(&DiskHealth { damaged, broken_volumes, ..health(0, 0) });
        let wanted = "can't be used: 6 disks (0, 1, 2, 3, …); 1 volume (db)";
        assert_eq!(check.detail, wanted);
        let check = left_disks(&health(0, 2));
        assert_eq!(check.detail, "2 left by VMs of earlier daemons, with 1.5 GiB");
    }

    #[test]
    fn kernels_are_told_apart_by_their_numbers() {
        use CheckStatus::{Failed, Ok, Warning};
        let seen =
            ["6.7.0", "6.18.44-fc\n", "7.0", "6.1.0-56-cloud-amd64", "5.15", "x"].map(kernel);
        assert_eq!(statuses(&seen), [Ok, Ok, Ok, Failed, Failed, Warning]);
    }

    #[test]
    fn this_host_can_scan_pages_or_says_why_not() {
        let release = read("/proc/sys/kernel/osrelease");
        assert_eq!(pagemap_scan(&scan_own_pages()).status, kernel(&release).status);
    }

    #[test]
    fn what_is_not_there_is_said_with_a_remedy() {
        let none = || Err(io::Error::from(io::ErrorKind::NotFound));
        let checks = [
            privileges(false),
            kernel("4.19"),
            userfaultfd(&none()),
            userfaultfd(&Err(io::ErrorKind::PermissionDenied.into())),
            pagemap_scan(&none()),
            memfd(&Err(rustix::io::Errno::NOSYS)),
            overcommit("2"),
            map_count("100"),
            open_files(Some(1024)),
            qemu(Err(ProbeError::NotFound)),
            part("shim", Path::new("/no/such/file"), "…"),
            agent(Path::new("/no/such/file")),
            holder(HolderStatus::Missing),
            holder(HolderStatus::Lacks { held: 1, of: 2 }),
            kvm(&Err(NoKvm { reason: "…".into() })),
            memory(GIB, MIB, 0),
            vcpus(128, 0),
            shared_memory(&Ok(MIB)),
            cgroups(Err("…".into())),
            disk(Path::new("/"), &Ok(0)),
            disk(Path::new("/"), &Ok(GIB)),
            mmdebstrap(false),
            left_disks(&health(0, 1)),
            broken_disks(&DiskHealth { damaged: vec!["a".into()], ..health(0, 0) }),
            broken_disks(&DiskHealth { broken_volumes: vec!["db".into()], ..health(0, 0) }),
            floor(&health(GIB + ROOM - 1, 0)),
            no_disks("…"),
        ];
        for check in checks {
            assert_ne!(check.status, CheckStatus::Ok, "{check:?}");
            let remedy = check.remedy.as_deref().unwrap_or_default();
            assert!(!remedy.is_empty() && !remedy.contains('\n'), "{check:?}");
            assert!(!check.detail.contains('\n'), "{check:?}");
        }
    }

    #[test]
    fn a_fit_host_needs_no_remedy() {
        let checks = [
            privileges(true),
            holder(HolderStatus::Keeps(1)),
            holder(HolderStatus::Off),
            userfaultfd(&Ok(())),
            overcommit("0"),
            map_count("65530"),
            open_files(None),
            memory(8 * GIB, 8 * GIB, 7 * GIB),
            vcpus(128, 1),
            disk(Path::new("/"), &Ok(3 * GIB)),
            cgroups(Ok(())),
            left_disks(&health(0, 0)),
            broken_disks(&health(0, 0)),
            floor(&health(GIB + ROOM, 7)),
        ];
        for check in checks {
            assert_eq!((check.status, &check.remedy), (CheckStatus::Ok, &None), "{check:?}");
        }
    }
}
