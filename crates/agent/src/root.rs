//! PID 1 of the root file system: what an init has to do before, and after, the agent serves.

use std::ffi::CString;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::mount::{MountFlags, mount};
use rustix::process::{WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

use crate::cmdline::Cmdline;
use crate::console::log;
use crate::machine::{ETC_MACHINE_ID, RUN_MACHINE_ID};
use crate::server::Stop;
use crate::sys;

/// Mounts of a running system: source and kind, target, options. Each is made unless something is
/// mounted there already.
const MOUNTS: [(&str, &str, &str); 7] = [
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("devtmpfs", "/dev", "mode=755"),
    ("devpts", "/dev/pts", "gid=5,mode=620,ptmxmode=666"),
    ("tmpfs", "/dev/shm", "mode=1777"),
    ("tmpfs", "/run", "mode=755"),
    ("cgroup2", "/sys/fs/cgroup", ""),
];
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];
const ETC_HOSTNAME: &str = "/etc/hostname";
const KERNEL_HOSTNAME: &str = "/proc/sys/kernel/hostname";
const REPORTING_ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
/// How long programs have between SIGTERM and SIGKILL when the VM is powered off.
const TERM_WAIT: Duration = Duration::from_secs(2);

/// Make the root usable. What fails is named on the console; the VM is of use without it.
pub(crate) fn set_up() {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    for (kind, target, options) in MOUNTS {
        if is_mounted(target) {
            continue;
        }
        // The folders of sysfs are the kernel's to make.
        let _ = std::fs::create_dir_all(target);
        let options = CString::new(options).unwrap_or_default();
        let flags = MountFlags::NOSUID;
        if let Err(errno) = mount(kind, target, kind, flags, Some(options.as_c_str())) {
            log!("mount {kind} on {target}: {errno}");
        }
    }
    for (target, link) in LINKS {
        let _ = std::os::unix::fs::symlink(target, link);
    }
    link_identity();
    if let Err(error) = sys::loopback_up() {
        log!("set lo up: {error}");
    }
    let cmdline = Cmdline::read();
    if let Some(order) = cmdline.reporting_order {
        apply_reporting_order(order);
    }
}

/// `/etc/machine-id` becomes a link to `/run/machine-id`: a clone writes one file, on a tmpfs, and
/// needs not go through the overlay. `/etc/hostname` becomes one to what the kernel says, which a
/// clone sets anyway.
fn link_identity() {
    for (target, link) in [(RUN_MACHINE_ID, ETC_MACHINE_ID), (KERNEL_HOSTNAME, ETC_HOSTNAME)] {
        let _ = std::fs::remove_file(link);
        if let Err(error) = std::os::unix::fs::symlink(target, link) {
            log!("{link}: {error}");
        }
    }
}

/// Have the guest report free blocks of 2^`order` pages and more to the host.
pub(crate) fn apply_reporting_order(order: u32) {
    if let Err(error) = std::fs::write(REPORTING_ORDER, order.to_string()) {
        log!("{REPORTING_ORDER}: {error}");
    }
}

/// Another device than its parent folder's: something is mounted.
fn is_mounted(target: &str) -> bool {
    let device = |path: &Path| rustix::fs::stat(path).map(|stat| stat.st_dev).ok();
    let path = Path::new(target);
    path.parent().is_some_and(|parent| device(path).is_some() && device(path) != device(parent))
}

/// End everything and leave. Doesn't return: if the kernel refuses, PID 1 stays and reaps.
pub(crate) fn stop(stop: Stop) -> ! {
    // ESRCH: no process is left.
    for (signal, wait_at_most) in [(libc::SIGTERM, TERM_WAIT), (libc::SIGKILL, TERM_WAIT / 2)] {
        let _ = sys::kill(-1, libc::SIGCONT);
        let _ = sys::kill(-1, signal);
        reap_all(wait_at_most);
    }
    rustix::fs::sync();
    let command =
        if stop == Stop::Reboot { RebootCommand::Restart } else { RebootCommand::PowerOff };
    if let Err(errno) = reboot(command) {
        log!("leave: {errno}");
    }
    loop {
        let _ = wait(WaitOptions::empty());
        reap_all(Duration::from_secs(1));
    }
}

fn reap_all(at_most: Duration) {
    let until = Instant::now() + at_most;
    while Instant::now() < until {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => {}
            Err(_) => return, // No children are left.
            Ok(None) => {
                let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                let _ = rustix::event::poll(&mut [], Some(&pause));
            }
        }
    }
}
