//! PID 1 of the initrd: from the kernel's first process to the root file system.
//!
//! ```text
//!   /modules/order ─► modules ─► /dev/vda (ro) ─┬─► overlay ─► / ─► the agent, or vmfork.init
//!               or vmfork.pmem (ro, DAX) ───────┤
//!                          tmpfs or vmfork.upper ┘
//!                       vmfork.rw (rw) ────────────────────► /
//! ```
//!
//! With DAX the guest reads and runs files from the persistent memory itself, without a copy in
//! its page cache. If that is impossible, the root is read from its other device.
//!
//! The root file system is shared by all VMs and never written. What a guest writes is in a tmpfs,
//! that is, in its memory, or on a disk of its own. A fork captures both. Or the root is a disk of
//! the guest's own, which is written itself. The tmpfs may fill
//! memory: what doesn't fit gets `ENOSPC`. The agent needs no file in the root: it has its program
//! open.
//!
//! The kernel must find `/dev/console` in the initrd (its built-in one has it). The initrd's files
//! are removed on the way, since they would stay in every clone's memory.

use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_move};

use crate::cmdline::Cmdline;
use crate::console::log;
use crate::exec::PATH;
use crate::sys;

/// The list of modules; its being there says that this is the initrd.
pub(crate) const MODULES: &str = "/modules/order";
/// More modules, for a root in persistent memory.
const PMEM_MODULES: &str = "/modules/pmem";
/// Set for the agent if the root is read from persistent memory.
pub(crate) const PMEM_ROOT: &str = "VMFORK_PMEM_ROOT";
/// How long the root device may take to appear.
const DEVICE_WAIT: Duration = Duration::from_secs(10);
const DEVICE_POLL: Duration = Duration::from_millis(5);
/// Lets the kernel unpack a compressed module (`MODULE_INIT_COMPRESSED_FILE`).
const COMPRESSED: i32 = 4;
/// Magic numbers of the file systems that an initrd is unpacked into.
const RAMFS_MAGIC: i64 = 0x8584_58f6;
const TMPFS_MAGIC: i64 = 0x0102_1994;

fn said(what: impl Display) -> impl FnOnce(Errno) -> String {
    move |errno| format!("{what}: {errno}")
}

/// Go all the way; returns only if something is missing.
///
/// # Errors
/// A sentence for the console.
pub(crate) fn run() -> Result<Infallible, String> {
    let program = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .or_else(|_| rustix::fs::open("/init", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()))
        .map_err(said("open /init"))?;
    for (folder, kind) in [("/dev", "devtmpfs"), ("/proc", "proc"), ("/sys", "sysfs")] {
        mount_at(kind, folder, kind, "")?;
    }
    load_modules(MODULES);
    let cmdline = Cmdline::read();
    let in_pmem = make_root(&cmdline)?;
    for folder in ["/dev", "/proc", "/sys"] {
        let target = format!("/newroot{folder}");
        make_folder(&target)?;
        mount_move(folder, target.as_str()).map_err(said(format!("move {folder}")))?;
    }
    make_folder("/newroot/run")?;
    mount_at("tmpfs", "/newroot/run", "tmpfs", "mode=755")?;
    switch_root()?;
    become_init(&program, cmdline.init.as_deref(), in_pmem)
}

fn make_folder(path: &str) -> Result<(), String> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(format!("make {path}: {errno}")),
    }
}

fn mount_at(source: &str, target: &str, kind: &str, options: &str) -> Result<(), String> {
    make_folder(target)?;
    let options = CString::new(options).unwrap_or_default();
    match mount(source, target, kind, MountFlags::empty(), Some(options.as_c_str())) {
        // The kernel mounts devtmpfs by itself if it was built so.
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(errno) => Err(format!("mount {kind} on {target}: {errno}")),
    }
}

/// Load the modules of a list, in order. One that fails is named, and what depends on it will be
/// missed later. → whether none failed.
fn load_modules(list: &str) -> bool {
    let mut all = true;
    let list = std::fs::read_to_string(list).unwrap_or_default();
    for name in
        list.lines().map(str::trim).filter(|name| !name.is_empty() && !name.starts_with('#'))
    {
        let path = Path::new("/modules").join(name);
        let packed = matches!(path.extension().and_then(|e| e.to_str()), Some("xz" | "zst" | "gz"));
        let flags = if packed { COMPRESSED } else { 0 };
        let result = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .and_then(|file| rustix::system::finit_module(file.as_fd(), c"", flags));
        match result {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => {
                log!("module {name}: {errno}");
                all = false;
            }
        }
    }
    all
}

/// At `/newroot`: the root device, read-only, below what takes writes; or one that takes them.
/// → whether it is persistent memory.
fn make_root(cmdline: &Cmdline) -> Result<bool, String> {
    let kind = cmdline.root_type.as_deref().unwrap_or("ext4");
    if let Some(device) = cmdline.writable.as_deref() {
        wait_for(device)?;
        make_folder("/newroot")?;
        // Others may not know the option.
        let options = (kind == "ext4").then_some(c"discard");
        mount(device, "/newroot", kind, MountFlags::NOATIME, options)
            .map_err(said(format!("mount {device} ({kind})")))?;
        return Ok(false);
    }
    for folder in ["/lower", "/rw", "/newroot"] {
        make_folder(folder)?;
    }
    let lower = |device: &str, options: Option<&CStr>| {
        wait_for(device)?;
        mount(device, "/lower", kind, MountFlags::RDONLY | MountFlags::NOATIME, options)
            .map_err(said(format!("mount {device} ({kind})")))
    };
    let in_pmem = cmdline.pmem.as_deref().is_some_and(|device| {
        // Without its driver the device does not come.
        let mounted = match load_modules(PMEM_MODULES) {
            true => lower(device, Some(c"dax=always")),
            false => Err(format!("no driver for {device}")),
        };
        mounted.inspect_err(|reason| log!("root: {reason}; using the disk")).is_ok()
    });
    if !in_pmem {
        lower(cmdline.root.as_deref().unwrap_or("/dev/vda"), None)?;
    }
    match cmdline.upper.as_deref() {
        Some(disk) => {
            wait_for(disk)?;
            mount(disk, "/rw", "ext4", MountFlags::NOATIME, Some(c"discard"))
                .map_err(said(format!("mount {disk} (ext4)")))?;
        }
        None => mount_at("tmpfs", "/rw", "tmpfs", "mode=755,size=100%")?,
    }
    make_folder("/rw/upper")?;
    make_folder("/rw/work")?;
    mount_at(
        "overlay",
        "/newroot",
        "overlay",
        "lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work",
    )?;
    Ok(in_pmem)
}

/// Until the kernel has found a device.
fn wait_for(device: &str) -> Result<(), String> {
    let began = Instant::now();
    while !Path::new(device).exists() {
        if began.elapsed() > DEVICE_WAIT {
            return Err(format!("no device {device} after {DEVICE_WAIT:?}"));
        }
        // Nothing says when devtmpfs gets a node; the timeout of an empty poll is the wait.
        let wait =
            rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(DEVICE_POLL.subsec_nanos()) };
        let _ = rustix::event::poll(&mut [], Some(&wait));
    }
    Ok(())
}

/// Empty the initrd, and let `/newroot` take its place.
fn switch_root() -> Result<(), String> {
    let initrd =
        rustix::fs::open("/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(said("open /"))?;
    rustix::process::chdir("/newroot").map_err(said("enter the root"))?;
    empty(&initrd);
    mount_move(".", "/").map_err(said("move the root"))?;
    rustix::process::chroot(".").map_err(said("change root"))?;
    rustix::process::chdir("/").map_err(said("enter the new root"))
}

/// Remove the initrd's files: those of its own file system only, and only if it is one in memory.
fn empty(initrd: &OwnedFd) {
    let in_memory =
        rustix::fs::fstatfs(initrd).is_ok_and(|fs| [RAMFS_MAGIC, TMPFS_MAGIC].contains(&fs.f_type));
    let Ok(device) = rustix::fs::fstat(initrd).map(|stat| stat.st_dev) else { return };
    if in_memory {
        remove_all(Path::new("/"), device);
    }
}

fn remove_all(folder: &Path, device: u64) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(stat) = rustix::fs::statat(CWD, &path, rustix::fs::AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        if stat.st_dev != device {
            continue;
        }
        if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
            remove_all(&path, device);
            let _ = std::fs::remove_dir(&path);
        } else {
            let _ = std::fs::remove_file(&path);
        }
    }
}

fn become_init(program: &OwnedFd, init: Option<&str>, in_pmem: bool) -> Result<Infallible, String> {
    let mut env = vec![format!("PATH={PATH}"), "HOME=/root".to_owned()];
    env.extend(in_pmem.then(|| format!("{PMEM_ROOT}=1")));
    let env: Vec<CString> =
        env.into_iter().map(|word| CString::new(word).unwrap_or_default()).collect();
    let agent = |words: [&CStr; 2]| -> io::Error {
        let argv: Vec<CString> = words.iter().map(|&word| word.to_owned()).collect();
        sys::exec_fd(program.as_fd(), &argv, &env)
    };
    let Some(init) = init else {
        return Err(format!("start the agent in its root: {}", agent([c"vmfork-agent", c"root"])));
    };
    // The '@' tells systemd to leave it alone while it shuts down.
    if sys::fork().map_err(|error| format!("fork: {error}"))? == 0 {
        let _ = rustix::process::setsid();
        return Err(format!("start the agent: {}", agent([c"@vmfork-agent", c"beside-init"])));
    }
    let mut command = std::process::Command::new(init);
    command.env_clear().env("PATH", PATH).env("HOME", "/root");
    Err(format!("start {init}: {}", command.exec()))
}
