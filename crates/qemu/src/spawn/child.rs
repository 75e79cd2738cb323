//! From the daemon's address space into QEMU's: fds, identity, limits, exec.
//!
//! `clone(CLONE_VM | CLONE_VFORK)`, as `posix_spawn` does, and not `fork`. A fork copies the
//! daemon's page tables (28 ms at 512 MiB of 4 KiB pages, against 0.01). It leaves all of the
//! daemon's memory copy-on-write, which the fault threads would pay for. The calling thread stands
//! still until QEMU has begun. The child borrows its memory and does system calls only. The libc
//! wrappers of `setuid` and its like are avoided: they would signal the *daemon's* threads.
//!
//! Only ever called on the spawner thread: a parent-death signal is sent when the *thread* ends.
#![expect(unsafe_code, reason = "clone, and what runs between clone and exec")]

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::RunAs;
use super::command_line::SLOT_END;

/// Everything the child needs, made beforehand: it may not allocate.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) program: CString,
    pub(super) arguments: Vec<CString>,
    pub(super) environment: Vec<CString>,
    /// (number in QEMU, fd here).
    pub(super) fds: Vec<(c_int, OwnedFd)>,
    pub(super) run_as: Option<RunAs>,
}

/// A child that runs, or ran.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) pid: i32,
    pub(super) pidfd: OwnedFd,
}

/// Which step failed in the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
enum Step {
    Fds,
    Limits,
    Identity,
    Privileges,
    Orphaned,
    Exec,
}

const STACK_BYTES: usize = 64 << 10;

struct Context {
    program: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
    fds: *const (c_int, RawFd),
    fds_len: usize,
    run_as: Option<RunAs>,
    parent: c_int,
    /// Written by the child, read by the parent after it has gone on.
    failed: Option<(Step, c_int)>,
}

/// Start QEMU. Returns once `exec` has succeeded.
///
/// # Errors
/// What failed in words, with the errno.
pub(super) fn spawn(plan: &Plan) -> io::Result<Child> {
    // Numbers at or above the slots, so that filling one slot can't overwrite the source of
    // another.
    let high: Vec<(c_int, OwnedFd)> = plan
        .fds
        .iter()
        .map(|(slot, fd)| Ok((*slot, rustix::io::fcntl_dupfd_cloexec(fd, SLOT_END)?)))
        .collect::<io::Result<_>>()?;
    let fds: Vec<(c_int, RawFd)> = high.iter().map(|(slot, fd)| (*slot, fd.as_raw_fd())).collect();
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let argv = pointers(&plan.arguments);
    let envp = pointers(&plan.environment);
    let mut context = Context {
        program: plan.program.as_ptr(),
        argv: argv.as_ptr(),
        envp: envp.as_ptr(),
        fds: fds.as_ptr(),
        fds_len: fds.len(),
        run_as: plan.run_as,
        parent: rustix::process::getpid().as_raw_nonzero().get(),
        failed: None,
    };
    let child = clone_into(&mut context)?;
    let Some((step, errno)) = context.failed else { return Ok(child) };
    // It is gone already: reap it.
    let options = rustix::process::WaitIdOptions::EXITED;
    let _ = rustix::process::waitid(
        rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&child.pidfd)),
        options,
    );
    let what = match step {
        Step::Fds => "hand QEMU its file descriptors",
        Step::Limits => "set QEMU's limits",
        Step::Identity => "change to QEMU's user id",
        Step::Privileges => "give up privileges",
        Step::Orphaned => "the daemon is gone",
        Step::Exec => "execute QEMU",
    };
    let error = io::Error::from_raw_os_error(errno);
    Err(io::Error::new(error.kind(), format!("{what}: {error}")))
}

fn clone_into(context: &mut Context) -> io::Result<Child> {
    let mut stack = vec![0_u128; STACK_BYTES / 16];
    let top = stack.as_mut_ptr_range().end.cast::<c_void>();
    let mut pidfd: c_int = -1;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    let _masked = AllSignalsBlocked::new();
    // SAFETY:
    // - `child_main` has the signature that `clone` asks for and never returns.
    // - `top` is the upper, 16-byte aligned end of a live buffer with no other user, large enough
    //   for `child_main`. That has a few words of locals and calls system-call wrappers only.
    // - CLONE_VFORK: this thread stands still until the child has called exec or exit. So
    //   `context`, what its pointers point to, and the stack outlive the child's use, and nothing
    //   races on `context`.
    // - No signal handler runs in the child: all signals are blocked until it has reset their
    //   dispositions by exec.
    let pid = unsafe {
        libc::clone(
            child_main,
            top,
            flags,
            ptr::from_mut(context).cast::<c_void>(),
            ptr::from_mut(&mut pidfd),
        )
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: CLONE_PIDFD has stored a new fd in `pidfd`, which has no other owner.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Child { pid, pidfd })
}

/// Runs in the child, on the borrowed memory of the daemon.
extern "C" fn child_main(context: *mut c_void) -> c_int {
    // SAFETY: the pointer that `clone_into` passed: a live `Context` that its owner, who stands
    // still, won't touch.
    let context = unsafe { &mut *context.cast::<Context>() };
    if let Err(step) = prepare_and_exec(context) {
        // SAFETY: reads this thread's errno, which the failed call has set.
        let errno = unsafe { *libc::__errno_location() };
        context.failed = Some((step, errno));
    }
    // SAFETY: ends the child without running any of the daemon's exit handlers.
    unsafe { libc::_exit(127) }
}

fn prepare_and_exec(context: &Context) -> Result<(), Step> {
    let check = |rc: c_long, step: Step| if rc < 0 { Err(step) } else { Ok(()) };
    // SAFETY: for the whole block: raw system calls and async-signal-safe wrappers of such. They
    // get plain numbers, or pointers into `context`, which `spawn` has built: NUL-terminated
    // strings, NULL-terminated arrays, `fds_len` pairs. They change attributes of this child only.
    // It shares memory with the daemon but neither fds, signal handlers, credentials, nor limits.
    unsafe {
        // The daemon's fds are close-on-exec, and this makes sure of it. It comes first: a slot
        // that QEMU does not get may be the number of one of the daemon's, too.
        let first: libc::c_uint = 3;
        libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        for i in 0..context.fds_len {
            let (slot, fd) = *context.fds.add(i);
            check(c_long::from(libc::dup2(fd, slot)), Step::Fds)?;
        }
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        check(c_long::from(libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core)), Step::Limits)?;
        libc::umask(0o077);
        check(c_long::from(libc::chdir(c"/".as_ptr())), Step::Limits)?;
        // Ctrl-C at the daemon's terminal must not reach it, so it gets a process group of its own.
        // It gets no session: that is a scheduling group of its own (sched_autogroup), which on a
        // busy host doubles a fork's pause.
        check(c_long::from(libc::setpgid(0, 0)), Step::Limits)?;
        if let Some(RunAs { uid, gid }) = context.run_as {
            let none = ptr::null::<libc::gid_t>();
            check(libc::syscall(libc::SYS_setgroups, 0_usize, none), Step::Identity)?;
            check(libc::syscall(libc::SYS_setresgid, gid, gid, gid), Step::Identity)?;
            check(libc::syscall(libc::SYS_setresuid, uid, uid, uid), Step::Identity)?;
        }
        check(prctl(libc::PR_SET_NO_NEW_PRIVS, 1), Step::Privileges)?;
        // After the change of user, which would clear it.
        let sigkill = 9;
        check(prctl(libc::PR_SET_PDEATHSIG, sigkill), Step::Privileges)?;
        if libc::getppid() != context.parent {
            return Err(Step::Orphaned);
        }
        // Rust ignores SIGPIPE, and an ignored signal stays ignored across exec.
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGPIPE, &raw const default, ptr::null_mut());
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        // No handler of the daemon may run here, so first forget them all.
        forget_handlers();
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        libc::execve(context.program, context.argv, context.envp);
    }
    Err(Step::Exec)
}

/// `prctl` with one argument.
fn prctl(option: c_int, argument: libc::c_ulong) -> c_long {
    // SAFETY: the options passed take one number and no pointer.
    c_long::from(unsafe { libc::prctl(option, argument, 0, 0, 0) })
}

/// Set every signal that has a handler to its default, in this child.
fn forget_handlers() {
    for signal in 1..libc::SIGRTMAX() {
        // SAFETY: both structs are plain data of the right type; the child has its own table of
        // handlers, since CLONE_SIGHAND was not given. Signals that can't be changed answer with an
        // error, which is ignored.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, ptr::null(), &raw mut action) != 0
                || action.sa_sigaction == libc::SIG_IGN
                || action.sa_sigaction == libc::SIG_DFL
            {
                continue;
            }
            action.sa_sigaction = libc::SIG_DFL;
            action.sa_flags = 0;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
    }
}

/// Blocks all signals of this thread while it lives.
struct AllSignalsBlocked {
    before: libc::sigset_t,
}

impl AllSignalsBlocked {
    fn new() -> Self {
        // SAFETY: plain data, initialised by `sigfillset` or by the kernel before it is read.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before }
        }
    }
}

impl Drop for AllSignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `before` is the mask that this thread had.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}
