//! A memory limit for each VM, where the host has cgroup v2 with the memory controller.
//!
//! ```text
//!   BASE/                     our own service's cgroup (systemd, Delegate=memory), else /vmfork
//!   ├── daemon/               vmforkd itself: cgroup v2 wants processes in leaves only
//!   └── vm-ID/                memory.max, memory.oom.group = 1, and one QEMU
//! ```
//!
//! A QEMU enters the cgroup when it becomes a VM's. It started elsewhere, which took some 30 MB.
//! Its keeper stays outside. It has no memory but the QEMU's, which counts where the QEMU is.
//! The kernel also kills each process that shares the memory of one that it kills.
//! So an ended VM's cgroup can be removed at once, though the keeper still holds pages for its
//! clones.
//!
//! The limit is a net below admission ([`crate::admission`]), which decides what fits: a VM whose
//! QEMU runs wild is killed, not the host. It is twice the guest's memory and 256 MiB, since a
//! fork's frozen pages and those written since are both the QEMU's until the drain is done.
//!
//! Promises: nothing here fails a VM on a host without cgroup v2; [`Cgroups::detect`] then says
//! what is missing, for `doctor`.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use tokio::sync::watch;

const ROOT: &str = "/sys/fs/cgroup";
const SLACK_BYTES: u64 = 256 << 20;
const VM_PREFIX: &str = "vm-";
const DAEMON: &str = "daemon";

/// Why VMs get no limit of their own. The text is for `doctor`.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    #[error("{root} is no cgroup v2 hierarchy (the host uses v1, alone or beside v2)")]
    NotUnified { root: PathBuf },
    #[error("the memory controller is not to be had in {root} (it has `{controllers}`)")]
    NoMemory { root: PathBuf, controllers: String },
    #[error("make and use {path}")]
    Denied {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The limit of a VM with so much memory.
pub fn limit_bytes(ram_bytes: u64) -> u64 {
    ram_bytes.saturating_mul(2).saturating_add(SLACK_BYTES)
}

/// The cgroup below which VMs get theirs.
#[derive(Debug)]
pub struct Cgroups {
    base: PathBuf,
    /// How many [`VmCgroup`]s there are.
    count: watch::Sender<usize>,
}

impl Cgroups {
    /// Find out whether limits can be had, and make ready for them; moves this process into a leaf.
    ///
    /// # Errors
    /// If they can't be had.
    pub fn detect() -> Result<Self, Unavailable> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::at(Path::new(ROOT), &own)
    }

    /// `own` is our `/proc/self/cgroup`.
    pub fn at(root: &Path, own: &str) -> Result<Self, Unavailable> {
        let controllers = fs::read_to_string(root.join("cgroup.controllers"))
            .map_err(|_| Unavailable::NotUnified { root: root.to_owned() })?;
        let service = service_of(own);
        let base = root.join(service.unwrap_or("vmfork"));
        // In a container the root may be one without the controller; ask where it matters.
        if !controllers.split_ascii_whitespace().any(|one| one == "memory") {
            let controllers = controllers.trim().to_owned();
            return Err(Unavailable::NoMemory { root: root.to_owned(), controllers });
        }
        prepare(root, &base, service.is_some())
            .map_err(|source| Unavailable::Denied { path: base.clone(), source })?;
        Ok(Self { base, count: watch::Sender::new(0) })
    }

    /// The cgroup of one VM, with its limit; made, or taken over if a dead daemon left it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn create(&self, id: &str, limit_bytes: u64) -> io::Result<VmCgroup> {
        let path = self.base.join(format!("{VM_PREFIX}{id}"));
        make(&path)?;
        self.count.send_modify(|count| *count += 1);
        let cgroup = VmCgroup { path, count: self.count.clone() };
        cgroup.write("memory.max", &limit_bytes.to_string())?;
        // Whatever else comes to be in it is of no use without QEMU.
        cgroup.write("memory.oom.group", "1")?;
        Ok(cgroup)
    }

    /// Wait until all [`VmCgroup`]s are dropped.
    pub async fn all_removed(&self) {
        let mut count = self.count.subscribe();
        let _ours = count.wait_for(|count| *count == 0).await;
    }

    /// Remove the cgroups that a dead daemon left, once its processes are gone. Returns how many.
    pub fn remove_stale(&self) -> usize {
        let Ok(entries) = fs::read_dir(&self.base) else { return 0 };
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(VM_PREFIX))
            .filter(|entry| fs::remove_dir(entry.path()).is_ok())
            .count()
    }
}

/// One VM's cgroup; removed on drop, when its processes must be gone.
#[derive(Debug)]
pub struct VmCgroup {
    path: PathBuf,
    count: watch::Sender<usize>,
}

impl VmCgroup {
    /// Put a process into it, with the threads that it has and the children that it will have.
    ///
    /// # Errors
    /// If the process is gone, or the kernel refuses.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// How often the limit got a process of the VM killed.
    pub fn oom_kills(&self) -> u64 {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        event_count(&events, "oom_kill")
    }

    fn write(&self, file: &str, value: &str) -> io::Result<()> {
        fs::write(self.path.join(file), value)
    }
}

impl Drop for VmCgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!("remove {}: {error}", self.path.display());
        }
        self.count.send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// Our own cgroup below the root, if it is a systemd service, whose subtree is ours to divide.
fn service_of(own: &str) -> Option<&str> {
    // v2's line: `0::/system.slice/vmforkd.service`, with `/daemon` once we have moved.
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let path = path.strip_suffix("/daemon").unwrap_or(path);
    (path.ends_with(".service") && !path.split('/').any(|part| part == "..")).then_some(path)
}

fn make(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn prepare(root: &Path, base: &Path, is_delegated: bool) -> io::Result<()> {
    if is_delegated {
        let leaf = base.join(DAEMON);
        make(&leaf)?;
        fs::write(leaf.join("cgroup.procs"), std::process::id().to_string())?;
    } else {
        // The root alone may have processes and divide its subtree.
        fs::write(root.join("cgroup.subtree_control"), "+memory")?;
        make(base)?;
    }
    fs::write(base.join("cgroup.subtree_control"), "+memory")
}

/// memory.events: `name count`, a line each.
fn event_count(events: &str, name: &str) -> u64 {
    let count = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    events.lines().find_map(count).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that looks like a cgroup root. The kernel would make the files of new ones.
    fn root(controllers: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temp dir");
        fs::write(root.path().join("cgroup.controllers"), controllers).expect("write");
        root
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).expect("written")
    }

    #[test]
    fn hosts_without_it_are_told_apart() {
        let none = tempfile::tempdir().expect("temp dir");
        let error = Cgroups::at(none.path(), "").expect_err("no cgroup v2");
        assert!(matches!(error, Unavailable::NotUnified { .. }));
        let error = Cgroups::at(root("cpu io\n").path(), "").expect_err("no memory controller");
        assert!(error.to_string().ends_with("(it has `cpu io`)"), "{error}");
    }

    #[test]
    fn limits_go_below_vmfork_without_delegation() {
        let root = root("cpu memory\n");
        let cgroups = Cgroups::at(root.path(), "0::/user.slice/session-1.scope\n").expect("ready");
        assert_eq!(read(&root.path().join("cgroup.subtree_control")), "+memory");
        assert_eq!(read(&root.path().join("vmfork/cgroup.subtree_control")), "+memory");

        let vm = cgroups.create("a1", limit_bytes(512 << 20)).expect("made");
        let path = root.path().join("vmfork/vm-a1");
        assert_eq!(read(&path.join("memory.max")), "1342177280");
        assert_eq!(read(&path.join("memory.oom.group")), "1");
        vm.add(77).expect("added");
        assert_eq!(read(&path.join("cgroup.procs")), "77");
        fs::write(path.join("memory.events"), "low 0\noom 3\noom_kill 2\n").expect("write");
        assert_eq!(vm.oom_kills(), 2);
    }

    #[tokio::test]
    async fn who_waits_for_their_removal_finds_none_left() {
        let root = root("memory\n");
        let cgroups = Cgroups::at(root.path(), "").expect("ready");
        cgroups.all_removed().await;
        let vm = cgroups.create("a1", 1).expect("made");
        let path = root.path().join("vmfork/vm-a1");
        // The kernel's files go by themselves.
        for file in ["memory.max", "memory.oom.group"] {
            fs::remove_file(path.join(file)).expect("written");
        }
        let end = std::thread::Builder::new().spawn(move || drop(vm)).expect("a thread");
        cgroups.all_removed().await;
        assert!(!path.exists());
        end.join().expect("dropped");
    }

    #[test]
    fn a_delegated_service_divides_its_own() {
        let root = root("memory\n");
        let base = root.path().join("system.slice/vmforkd.service");
        fs::create_dir_all(&base).expect("folder");
        let own = "1:name=x:/\n0::/system.slice/vmforkd.service\n";
        Cgroups::at(root.path(), own).expect("ready");
        let we = std::process::id().to_string();
        assert_eq!(read(&base.join("daemon/cgroup.procs")), we);
        assert_eq!(read(&base.join("cgroup.subtree_control")), "+memory");
        assert!(!root.path().join("cgroup.subtree_control").exists());
        assert_eq!(service_of("0::/a.service/daemon\n"), Some("a.service"));
        for no in ["", "0::/\n", "0::/a.scope\n", "0::/../a.service\n", "4:memory:/a.service\n"] {
            assert_eq!(service_of(no), None, "{no}");
        }
    }

    #[test]
    fn only_empty_cgroups_of_vms_are_removed() {
        let root = root("memory\n");
        let cgroups = Cgroups::at(root.path(), "").expect("ready");
        for name in ["vm-a", "vm-b", "daemon", "other"] {
            fs::create_dir(root.path().join("vmfork").join(name)).expect("folder");
        }
        // To the kernel a cgroup with processes is busy; a folder with a file will do.
        fs::write(root.path().join("vmfork/vm-b/busy"), "").expect("write");
        assert_eq!(cgroups.remove_stale(), 1);
        assert!(root.path().join("vmfork/vm-b").exists());
        assert!(root.path().join("vmfork/other").exists());
    }
}
