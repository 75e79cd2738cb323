//! The one folder that outlives a daemon, and what the next one makes of it.
//!
//! ```text
//!   /var/lib/vmfork/          0711: QEMUs pass through
//!   ├── vmforkd.lock          flock'ed while a daemon runs; holds its pid
//!   ├── vmforkd.log           0600, if `vmfork` started the daemon
//!   ├── holder.sock           0600: of the process that has a daemon's sockets while it restarts
//!   ├── journal.jsonl         0600: what exists (see `journal`)
//!   ├── images/               0700: guest images, which may hold secrets; the image store's
//!   ├── disks/                0700: what VMs wrote to their disks; gone with them
//!   ├── sockets/              0700: QEMUs get the folders in it as fds
//!   │   └── N/                0711: one QEMU's user passes through
//!   │       └── nbd           0600, that user's: the socket of its disks
//!   ├── snapshots/            0700: stored snapshots, which hold all that guests had in memory; their store's
//!   └── vms/ID/               0700: logs and sockets of one VM, gone with it
//! ```
//!
//! VMs do not survive their daemon: it holds the userfaultfds that their memory depends on. So a
//! daemon that starts after one that died kills what that one left (by the journal, told apart from
//! later processes by their beginnings; and by the mark in their environment, for what was started
//! but not yet written down), removes its folders, and remembers which VMs were lost. The holder
//! has another mark and is in no journal, since it outlives daemons.
//!
//! Promises: no two daemons on one folder; only our own processes are killed; another user's folder
//! is left as it is.

mod journal;
mod process;

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use vmfork_api::LostVm;

use self::journal::{Journal, Record};

pub use self::journal::ProcessKind;
pub use self::process::ProcessId;

/// Set for every process that a daemon starts, to the path of its state folder.
const MARK: &str = "VMFORK_OWNER";
const LOCK: &str = "vmforkd.lock";
const JOURNAL: &str = "journal.jsonl";
/// The name of a socket of disks, in a folder of its own below [`State::sockets`].
pub(crate) const DISK_SOCKET: &str = "nbd";
/// The log of a daemon that `vmfork` starts. It names VMs and what they are for.
const LOG: &str = "vmforkd.log";
/// What may be in a state folder that no daemon has had yet; the last is a new file system's.
const EARLY: [&str; 8] = [
    "images",
    "snapshots",
    "cache",
    LOG,
    "vmforkd.sock",
    vmfork_holder::SOCKET,
    "vmfork-start.lock",
    "lost+found",
];
/// How long killed leftovers may take to end. A QEMU with much memory takes a second or so.
const KILL_WAIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("vmforkd (pid {pid}) already runs on {path}")]
    Locked { path: PathBuf, pid: String },
    #[error("{doing} {path}")]
    Io {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{path} holds `{found}` and no journal of vmforkd, so it is not its state folder, in which it \
         would remove things: name an empty folder with --state, or one that does not exist yet"
    )]
    NotOurs { path: PathBuf, found: String },
    #[error(
        "processes of an earlier daemon do not end, though killed: {pids:?}; they hold their \
         memory until the kernel lets go of them"
    )]
    Stuck { pids: Vec<u32> },
}

/// The state folder, ours alone until this is dropped.
#[derive(Debug)]
pub struct State {
    root: PathBuf,
    journal: Mutex<Journal>,
    lock: File,
}

/// A process that is just being started has all open files until it executes its program, the lock
/// among them: closing is not enough.
impl Drop for State {
    fn drop(&mut self) {
        if let Err(error) = self.lock.unlock() {
            tracing::warn!(path = %self.root.display(), "unlock the state folder: {error}");
        }
    }
}

/// What was found of an earlier daemon.
#[derive(Debug, Default)]
pub struct Recovery {
    /// VMs that it had and did not stop.
    pub lost: Vec<LostVm>,
    pub processes_killed: usize,
    pub folders_removed: usize,
    /// Lines of the journal that made no sense.
    pub lines_skipped: usize,
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { doing, path, source }
}

/// Find out whether `root` may be made a state folder: it is missing or empty, has been one, or
/// holds only what `vmfork`, image builds and a holder put there before the first daemon starts.
fn check_owner(root: &Path) -> Result<(), StateError> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed("list", root))?,
    };
    let mut strange = None;
    for entry in entries {
        let name = entry.map_err(failed("list", root))?.file_name();
        if name == LOCK || name == JOURNAL {
            return Ok(());
        }
        if !EARLY.iter().any(|early| name == *early) {
            strange.get_or_insert(name);
        }
    }
    match strange {
        Some(found) => Err(StateError::NotOurs {
            path: root.to_owned(),
            found: found.to_string_lossy().into_owned(),
        }),
        None => Ok(()),
    }
}

fn make_folder(path: &Path, mode: u32) -> Result<(), StateError> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(failed("make the folder", path))
}

impl State {
    /// Take the folder `root`, making it where it is missing, and clear away what an earlier daemon
    /// left there and in the process table.
    ///
    /// # Errors
    /// If another daemon has it, it is no state folder but holds something, it can't be written, or
    /// a leftover process can't be ended.
    pub fn open(root: &Path) -> Result<(Self, Recovery), StateError> {
        check_owner(root)?;
        make_folder(root, 0o711)?;
        let root = fs::canonicalize(root).map_err(failed("resolve", root))?;
        let lock = lock(&root)?;
        // QEMUs get images as open files: no other user needs access.
        make_folder(&root.join("images"), 0o700)?;
        make_folder(&root.join("snapshots"), 0o700)?;
        make_folder(&root.join("disks"), 0o700)?;
        make_folder(&root.join("sockets"), 0o700)?;
        make_folder(&root.join("vms"), 0o711)?;
        close_log(&root.join(LOG))?;

        let path = root.join(JOURNAL);
        let (mut live, lines_skipped) = journal::read(&path).map_err(failed("read", &path))?;
        let boot_id = boot_id();
        let mut leftovers: Vec<ProcessId> = if live.boot_id == boot_id {
            live.processes.values().map(|process| process.process).collect()
        } else {
            Vec::new()
        };
        for marked in process::with_environment(&mark_entry(&root)) {
            if !leftovers.contains(&marked) {
                leftovers.push(marked);
            }
        }
        let (killed, stuck) = process::kill_all(&leftovers, KILL_WAIT);
        if !stuck.is_empty() {
            return Err(StateError::Stuck { pids: stuck.iter().map(|p| p.pid).collect() });
        }

        let lost: Vec<LostVm> = std::mem::take(&mut live.vms).into_values().collect();
        live.processes.clear();
        live.apply(Record::Opened { boot_id });
        for vm in &lost {
            live.apply(Record::VmLost { vm: vm.clone() });
        }
        let folders_removed = clear(&root.join("vms"))?;
        clear_sockets(&root.join("sockets"));
        let journal = Journal::create(&path, live).map_err(failed("write", &path))?;
        let recovery =
            Recovery { lost, processes_killed: killed.len(), folders_removed, lines_skipped };
        Ok((Self { root, journal: Mutex::new(journal), lock }, recovery))
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// Where layers of VMs' disks are.
    pub fn disks(&self) -> PathBuf {
        self.root.join("disks")
    }

    /// Where QEMUs find their disks.
    pub fn sockets(&self) -> PathBuf {
        self.root.join("sockets")
    }

    /// The folder of one VM, whether it is there or not. `id` must be one of ours: it is not
    /// checked.
    pub fn vm_folder(&self, id: &str) -> PathBuf {
        self.root.join("vms").join(id)
    }

    /// Make a VM's folder, for us alone (0700).
    ///
    /// # Errors
    /// If it is there already, or can't be made.
    pub fn create_vm_folder(&self, id: &str) -> io::Result<PathBuf> {
        let path = self.vm_folder(id);
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(path)
    }

    /// Remove a VM's folder with all that is in it; none is fine.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_vm_folder(&self, id: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.vm_folder(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Key and value to be put into the environment of every process that is started for a VM, so
    /// that it is found even if this daemon dies before it writes the process down.
    pub fn process_mark(&self) -> (&'static str, OsString) {
        (MARK, self.root.as_os_str().to_owned())
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        // A panic while appending leaves at worst a line that is skipped.
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Write down a VM, before its QEMU is started.
    ///
    /// # Errors
    /// If the disk is full or failing: better not start it then.
    pub fn vm_created(&self, vm: LostVm) -> io::Result<()> {
        self.journal().append(Record::VmCreated { vm })
    }

    /// A VM came to its end, and that is no loss.
    pub fn vm_ended(&self, id: &str) {
        self.append(Record::VmEnded { id: id.to_owned() });
    }

    /// Write down a process that was just started, of a VM or (`None`) of the pool. To give a
    /// waiting QEMU to a VM, say this again with the VM.
    ///
    /// # Errors
    /// If the process is gone already, or the disk is full or failing.
    pub fn process_started(
        &self,
        vm: Option<&str>,
        kind: ProcessKind,
        pid: u32,
    ) -> io::Result<ProcessId> {
        let process = ProcessId::of(pid)?;
        let vm = vm.map(ToOwned::to_owned);
        self.journal().append(Record::ProcessStarted { vm, kind, process })?;
        Ok(process)
    }

    /// A process was waited for, or seen to be gone.
    pub fn process_ended(&self, process: ProcessId) {
        self.append(Record::ProcessEnded { process });
    }

    /// Wait for keepers that have ended and became our children when their QEMU died. Does not
    /// block. Children that are waited for elsewhere (QEMUs) are left alone.
    pub fn reap_keepers(&self) -> Vec<ProcessId> {
        let keepers: Vec<ProcessId> = {
            let journal = self.journal();
            let processes = journal.live().processes.values();
            processes.filter(|p| p.kind == ProcessKind::Keeper).map(|p| p.process).collect()
        };
        let mut ended = Vec::new();
        for keeper in keepers {
            let Some(pid) = i32::try_from(keeper.pid).ok().and_then(Pid::from_raw) else {
                continue;
            };
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            // Not (yet) our child is an error here, and everyday.
            if let Ok(Some(_)) = waitid(WaitId::Pid(pid), options) {
                self.process_ended(keeper);
                ended.push(keeper);
            }
        }
        ended
    }

    /// VMs that earlier daemons lost, oldest first.
    pub fn lost(&self) -> Vec<LostVm> {
        self.journal().live().lost.iter().cloned().collect()
    }

    /// Whether an earlier daemon has lost a VM of this id or name.
    pub fn is_lost(&self, name_or_id: &str) -> bool {
        let journal = self.journal();
        journal.live().lost.iter().any(|vm| vm.id == name_or_id || vm.name == name_or_id)
    }

    /// Forget the lost VM with this id, or all lost VMs of this name. Returns whether there was
    /// one.
    pub fn forget_lost(&self, name_or_id: &str) -> bool {
        let mut journal = self.journal();
        let lost = journal.live().lost.iter();
        let ids: Vec<String> = lost
            .filter(|vm| vm.id == name_or_id || vm.name == name_or_id)
            .map(|vm| vm.id.clone())
            .collect();
        for id in &ids {
            warn_if_failed(journal.append(Record::LostForgotten { id: id.clone() }));
        }
        !ids.is_empty()
    }

    fn append(&self, record: Record) {
        warn_if_failed(self.journal().append(record));
    }
}

/// Not knowing that something ended costs the next daemon a look; it is no reason to fail now.
fn warn_if_failed(appended: io::Result<()>) {
    if let Err(error) = appended {
        tracing::warn!(
            "the journal can't be written, a later daemon may report VMs as lost that were not: {error}"
        );
    }
}

/// One that an earlier version made is open to everybody.
fn close_log(path: &Path) -> Result<(), StateError> {
    match fs::set_permissions(path, Permissions::from_mode(0o600)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("close", path)(error)),
        _ => Ok(()),
    }
}

fn lock(root: &Path) -> Result<File, StateError> {
    let path = root.join(LOCK);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(failed("open", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let _ = (&mut file).take(20).read_to_string(&mut pid);
            let pid = if pid.is_empty() { "unknown".into() } else { pid.trim().to_owned() };
            return Err(StateError::Locked { path: root.to_owned(), pid });
        }
        Err(TryLockError::Error(error)) => return Err(failed("lock", &path)(error)),
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(failed("write", &path))?;
    Ok(file)
}

/// Changes with every boot of the host; empty where it can't be read, which then counts as the
/// same.
fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

fn mark_entry(root: &Path) -> Vec<u8> {
    [MARK.as_bytes(), b"=", root.as_os_str().as_bytes()].concat()
}

/// Remove all that is in `folder`; returns how much that was.
fn clear(folder: &Path) -> Result<usize, StateError> {
    let mut count = 0;
    for entry in fs::read_dir(folder).map_err(failed("list", folder))? {
        let entry = entry.map_err(failed("list", folder))?;
        let path = entry.path();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }
            .map_err(failed("remove the leftover", &path))?;
        count += 1;
    }
    Ok(count)
}

/// Remove the sockets of disks with their folders. Nothing else is removed: a folder that holds
/// more than its socket stays, and does no harm.
fn clear_sockets(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder)
        .inspect_err(|error| tracing::warn!(path = %folder.display(), %error, "list the sockets"))
    else {
        return;
    };
    let mut kept = 0_u64;
    for path in entries.flatten().map(|entry| entry.path()) {
        let _none_is_fine = fs::remove_file(path.join(DISK_SOCKET));
        if fs::remove_dir(&path).is_err() {
            kept += 1;
        }
    }
    if kept > 0 {
        let path = folder.display();
        tracing::warn!(%path, kept, "folders of sockets are not empty: remove them by hand");
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn vm(id: &str) -> LostVm {
        LostVm {
            name: "web".into(),
            id: id.into(),
            image: "debian".into(),
            parent: None,
            created_unix_ms: 7,
        }
    }

    fn open(root: &Path) -> (State, Recovery) {
        State::open(root).expect("the folder is free")
    }

    fn sleeper(state: Option<&State>) -> Child {
        let mut command = Command::new("sleep");
        command.arg("60");
        if let Some(state) = state {
            let (key, value) = state.process_mark();
            command.env(key, value);
        }
        command.spawn().expect("sleep")
    }

    #[test]
    fn two_daemons_do_not_share_a_folder() {
        let folder = tempfile::tempdir().expect("temp dir");
        let (first, _) = open(folder.path());
        let error = State::open(folder.path()).expect_err("taken").to_string();
        assert!(
            error.starts_with(&format!("vmforkd (pid {}) already runs on /", std::process::id())),
            "{error}"
        );
        drop(first);
        open(folder.path());
    }

    #[test]
    fn the_folder_is_free_though_a_process_that_is_being_started_has_the_lock_open() {
        let folder = tempfile::tempdir().expect("temp dir");
        let (state, _) = open(folder.path());
        let inherited = state.lock.try_clone().expect("dup");
        drop(state);
        open(folder.path());
        drop(inherited);
    }

    fn mode(path: &Path) -> u32 {
        path.metadata().expect("metadata").permissions().mode() & 0o7777
    }

    #[test]
    fn images_journal_and_log_are_closed_to_other_users() {
        let folder = tempfile::tempdir().expect("temp dir");
        // As an earlier version left them.
        fs::write(folder.path().join("vmforkd.log"), "web").expect("write");
        fs::create_dir(folder.path().join("images")).expect("folder");
        for path in ["vmforkd.log", "images"] {
            let open = Permissions::from_mode(0o755);
            fs::set_permissions(folder.path().join(path), open).expect("chmod");
        }
        let (state, _) = open(folder.path());
        state.vm_created(vm("a")).expect("append");
        assert_eq!(mode(&state.images()), 0o700);
        for file in ["journal.jsonl", "vmforkd.log"] {
            assert_eq!(mode(&folder.path().join(file)), 0o600, "{file}");
        }
    }

    #[test]
    fn a_folder_that_is_somebody_elses_is_refused_and_left_alone() {
        for found in ["vms", "thesis.tex"] {
            let home = tempfile::tempdir().expect("temp dir");
            fs::set_permissions(home.path(), Permissions::from_mode(0o750)).expect("chmod");
            fs::create_dir(home.path().join(found)).expect("folder");
            fs::write(home.path().join(found).join("work"), "years of it").expect("write");
            let error = State::open(home.path()).expect_err("not ours").to_string();
            assert!(error.contains(&format!("holds `{found}` and no journal")), "{error}");
            assert!(error.contains("--state"), "{error}");
            assert_eq!(mode(home.path()), 0o750);
            assert!(home.path().join(found).join("work").exists());
            assert_eq!(fs::read_dir(home.path()).expect("list").count(), 1, "nothing was added");
        }
    }

    #[test]
    fn a_folder_is_ours_if_new_empty_or_used_before() {
        let folder = tempfile::tempdir().expect("temp dir");
        open(&folder.path().join("not/there/yet"));
        let fresh = folder.path().join("fresh");
        // An image was built before the first daemon, which `vmfork` starts.
        for early in ["images", "cache"] {
            fs::create_dir_all(fresh.join(early)).expect("folder");
        }
        fs::write(fresh.join("vmfork-start.lock"), "").expect("write");
        drop(open(&fresh));
        // What users put there later is theirs, and no hindrance.
        fs::write(fresh.join("token"), "").expect("write");
        open(&fresh);
        assert!(fresh.join("token").exists());
    }

    #[test]
    fn a_daemon_that_died_leaves_its_losses_and_nothing_else() {
        let folder = tempfile::tempdir().expect("temp dir");
        let (state, _) = open(folder.path());
        for id in ["a", "b", "c"] {
            state.vm_created(vm(id)).expect("append");
            fs::write(state.create_vm_folder(id).expect("folder").join("log"), "x").expect("write");
        }
        state.vm_ended("b");
        // One that was recorded, one that was not yet, one that is not ours.
        let (mut known, mut marked, mut other) =
            (sleeper(None), sleeper(Some(&state)), sleeper(None));
        state.process_started(Some("a"), ProcessKind::Qemu, known.id()).expect("append");
        drop(state);

        let (state, recovery) = open(folder.path());
        let ids: Vec<_> = recovery.lost.iter().map(|vm| vm.id.as_str()).collect();
        assert_eq!(ids, ["a", "c"]);
        assert_eq!((recovery.processes_killed, recovery.folders_removed), (2, 3));
        for child in [&mut known, &mut marked] {
            assert!(!child.wait().expect("wait").success());
        }
        assert!(other.try_wait().expect("wait").is_none(), "somebody else's process was killed");
        other.kill().expect("kill");
        other.wait().expect("wait");
        assert!(!state.vm_folder("a").exists());

        // Reported until a caller confirms it.
        drop(state);
        let (state, recovery) = open(folder.path());
        assert!(recovery.lost.is_empty());
        assert_eq!(state.lost().len(), 2);
        assert!(state.forget_lost("a") && !state.forget_lost("a"));
        drop(state);
        assert_eq!(open(folder.path()).0.lost().len(), 1);
    }

    #[test]
    fn sockets_of_an_earlier_daemon_go_and_what_else_is_there_does_not_stop_us() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("state");
        let sockets = open(&root).0.sockets();
        assert_eq!(mode(&sockets), 0o700);
        for name in ["0", "1"] {
            fs::create_dir(sockets.join(name)).unwrap();
            fs::write(sockets.join(name).join(DISK_SOCKET), "").unwrap();
        }
        fs::create_dir(sockets.join("1").join("deep")).unwrap();
        drop(open(&root));
        assert!(!sockets.join("0").exists());
        assert!(sockets.join("1").join("deep").exists(), "not ours to remove");
        assert!(!sockets.join("1").join(DISK_SOCKET).exists());
    }

    #[test]
    fn processes_of_an_earlier_boot_are_not_ours() {
        let folder = tempfile::tempdir().expect("temp dir");
        let mut other = sleeper(None);
        let process = ProcessId::of(other.id()).expect("there");
        let mut live = journal::Live::default();
        live.apply(Record::Opened { boot_id: "another boot".into() });
        live.apply(Record::VmCreated { vm: vm("a") });
        live.apply(Record::ProcessStarted { vm: None, kind: ProcessKind::Qemu, process });
        Journal::create(&folder.path().join("journal.jsonl"), live).expect("write");

        let (_state, recovery) = open(folder.path());
        assert_eq!((recovery.lost.len(), recovery.processes_killed), (1, 0));
        assert!(other.try_wait().expect("wait").is_none());
        other.kill().expect("kill");
        other.wait().expect("wait");
    }

    #[test]
    fn keepers_are_reaped_and_other_children_are_not() {
        let folder = tempfile::tempdir().expect("temp dir");
        let (state, _) = open(folder.path());
        let (mut keeper, mut qemu) = (sleeper(None), sleeper(None));
        let id = state.process_started(None, ProcessKind::Keeper, keeper.id()).expect("append");
        state.process_started(None, ProcessKind::Qemu, qemu.id()).expect("append");
        assert!(state.reap_keepers().is_empty());
        keeper.kill().expect("kill");
        qemu.kill().expect("kill");
        let mut reaped = Vec::new();
        for _ in 0..1000 {
            reaped = state.reap_keepers();
            if !reaped.is_empty() {
                break;
            }
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 5_000_000,
            });
        }
        assert_eq!(reaped, [id]);
        assert!(qemu.wait().is_ok(), "the QEMU's own waiter was robbed");
    }

    #[test]
    fn a_vm_folder_is_for_us_alone_and_goes_with_the_vm() {
        let folder = tempfile::tempdir().expect("temp dir");
        let (state, _) = open(folder.path());
        let path = state.create_vm_folder("a").expect("folder");
        assert_eq!(mode(&path), 0o700);
        assert!(state.create_vm_folder("a").is_err());
        state.remove_vm_folder("a").expect("remove");
        state.remove_vm_folder("a").expect("again is fine");
    }
}
