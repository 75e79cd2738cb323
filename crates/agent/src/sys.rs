//! The system calls that `std` and `rustix` have no safe form of, each in a function that is safe
//! to call. The only module of the agent with `unsafe` in it, but for the one `pre_exec` of `exec`.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
/// `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

/// Most bytes that [`add_entropy`] takes.
const ENTROPY_BYTES_MAX: usize = 512;

/// `struct rand_pool_info` with room for its array.
#[repr(C)]
struct RandPoolInfo {
    entropy_bits: libc::c_int,
    buffer_bytes: libc::c_int,
    buffer: [u8; ENTROPY_BYTES_MAX],
}

const _: () = assert!(size_of::<RandPoolInfo>() == 8 + ENTROPY_BYTES_MAX);

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Mix `bytes` into the kernel's random pool, credit them in full, and make the generator draw a
/// new key from it at once. `random` is an open `/dev/urandom`.
///
/// # Errors
/// `EPERM` without CAP_SYS_ADMIN; `EINVAL` for more than 512 bytes.
pub(crate) fn add_entropy(random: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let mut info =
        RandPoolInfo { entropy_bits: 0, buffer_bytes: 0, buffer: [0; ENTROPY_BYTES_MAX] };
    let Some(room) = info.buffer.get_mut(..bytes.len()) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    room.copy_from_slice(bytes);
    let length = i32::try_from(bytes.len()).unwrap_or(0);
    info.buffer_bytes = length;
    info.entropy_bits = length * 8;
    // SAFETY:
    // - `random` is open for the whole call, by its borrow.
    // - the kernel reads the two lengths and `buffer_bytes` bytes after them, all within `info`.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) })?;
    // SAFETY: `random` is open; this request takes no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) })?;
    Ok(())
}

/// Signals that this process inherited as ignored are ignored no longer, nor by the programs that
/// it starts. A shell that ignores SIGINT at its start, as those in the background do, can't trap
/// it. SIGPIPE is left as it is: std restores it in children. So are handlers: std has some, by
/// which it tells that a stack overflowed.
pub(crate) fn ignore_no_signals() {
    for signal in (1..=libc::SIGRTMAX()).filter(|signal| *signal != libc::SIGPIPE) {
        // SAFETY: an all-zero `sigaction` is a valid value.
        let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: a null second argument is allowed; `now` is ours and exclusively borrowed. The C
        // library refuses the two or three signals that it keeps to itself.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut now) };
        if asked == 0 && now.sa_sigaction == libc::SIG_IGN {
            // SAFETY: the default is no function of ours.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

/// Block `signals` for this process and return a descriptor that reports them, non-blocking.
/// Children inherit that: [`ChildSetup::apply`] unblocks everything.
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub(crate) fn signal_fd(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    // SAFETY: an all-zero `sigset_t` is a valid value; `sigemptyset` sets it up properly.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is ours and exclusively borrowed.
    unsafe { libc::sigemptyset(&raw mut set) };
    for signal in signals {
        // SAFETY: as above; a bad number gives an error and changes nothing.
        check(unsafe { libc::sigaddset(&raw mut set, *signal) })?;
    }
    // SAFETY: `set` is initialised; a null third argument is allowed.
    let rc = unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    check(rc)?;
    // SAFETY: `set` is initialised; -1 asks for a new descriptor.
    let fd = check(unsafe {
        libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC)
    })?;
    // SAFETY: `fd` was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The number of the next signal that waits in a [`signal_fd`], or `None`.
pub(crate) fn next_signal(fd: BorrowedFd<'_>) -> Option<i32> {
    const INFO_BYTES: usize = size_of::<libc::signalfd_siginfo>();
    let mut bytes = [0u8; INFO_BYTES];
    match rustix::io::read(fd, &mut bytes) {
        // `ssi_signo` is the first field.
        Ok(INFO_BYTES) => {
            i32::try_from(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).ok()
        }
        _ => None,
    }
}

/// Become the program in `program` (an open file). Returns only on failure.
pub(crate) fn exec_fd(program: BorrowedFd<'_>, argv: &[CString], env: &[CString]) -> io::Error {
    fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
    }
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY:
    // - `program` is open; the empty path with AT_EMPTY_PATH names it.
    // - both arrays end in null, and their strings outlive the call, being borrowed by our caller.
    unsafe {
        libc::execveat(
            program.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr().cast(),
            env.as_ptr().cast(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

/// Set the loopback interface up.
///
/// # Errors
/// Of `socket` and `ioctl`.
pub(crate) fn loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    // SAFETY: `ifreq` is plain data; all zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(c"lo".to_bytes()) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(0);
    // SAFETY: `socket` is open; the kernel reads one `ifreq`, which is live.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) })?;
    Ok(())
}

/// Signal a process (`pid` > 0), a process group (`pid` < -1) or everybody (-1).
///
/// # Errors
/// `ESRCH` if there is no such process, `EINVAL` for a bad signal.
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::kill(pid, signal) })?;
    Ok(())
}

/// Fork this process, which has one thread: 0 in the child.
///
/// # Errors
/// `EAGAIN`, `ENOMEM`.
pub(crate) fn fork() -> io::Result<i32> {
    // SAFETY: the agent has one thread, so the child may do whatever the parent may.
    check(unsafe { libc::fork() })
}

/// Raise the limit of open files to `files`, as far as the hard limit allows. Returns the old
/// limits.
///
/// # Errors
/// Of `getrlimit`.
pub(crate) fn raise_file_limit(files: u64) -> io::Result<libc::rlimit> {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `old` is ours and exclusively borrowed.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut old) })?;
    let new = libc::rlimit {
        rlim_cur: files.min(old.rlim_max).max(old.rlim_cur),
        rlim_max: old.rlim_max,
    };
    // SAFETY: `new` is initialised and live. A failure leaves the limit as it was, which is fine.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const new) };
    Ok(old)
}

/// What a child does between `fork` and `exec`, prepared beforehand: [`ChildSetup::apply`] neither
/// allocates nor locks.
#[derive(Debug)]
pub(crate) struct ChildSetup {
    pub(crate) terminal: bool,
    pub(crate) reset_oom: bool,
    pub(crate) file_limit: Option<libc::rlimit>,
    /// uid, gid, supplementary groups; `None` leaves them.
    pub(crate) ids: Option<(u32, u32, Vec<u32>)>,
    pub(crate) cwd: CString,
}

impl ChildSetup {
    /// No blocked signals, own session, controlling terminal (standard input), limits, user,
    /// working directory.
    ///
    /// # Errors
    /// The first call that failed.
    pub(crate) fn apply(&self) -> io::Result<()> {
        // SAFETY: an all-zero `sigset_t` is valid; `sigemptyset` sets it up properly.
        let mut none: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `none` is ours and exclusively borrowed.
        unsafe { libc::sigemptyset(&raw mut none) };
        // SAFETY: `none` is initialised; a null third argument is allowed.
        check(unsafe {
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut())
        })?;
        // SAFETY: no memory is passed.
        check(unsafe { libc::setsid() })?;
        if self.terminal {
            // SAFETY: descriptor 0 is the terminal's slave; the argument is a plain number.
            check(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) })?;
        }
        if self.reset_oom {
            write_raw(c"/proc/self/oom_score_adj", b"0");
        }
        if let Some(limit) = &self.file_limit {
            // SAFETY: `limit` is live for the call.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) };
        }
        if let Some((uid, gid, groups)) = &self.ids {
            // SAFETY: the pointer and the count describe one live slice.
            check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
            // SAFETY: no memory is passed.
            check(unsafe { libc::setgid(*gid) })?;
            // SAFETY: no memory is passed.
            check(unsafe { libc::setuid(*uid) })?;
        }
        // SAFETY: `cwd` is a live, terminated string.
        check(unsafe { libc::chdir(self.cwd.as_ptr()) })?;
        Ok(())
    }
}

/// Write `bytes` to a file without allocating; a failure is ignored.
fn write_raw(path: &CStr, bytes: &[u8]) {
    // SAFETY: `path` is a live, terminated string.
    let fd: RawFd = unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
    if fd >= 0 {
        // SAFETY: `fd` is open, pointer and length describe one live slice.
        unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        // SAFETY: `fd` is ours and not used after this.
        unsafe { libc::close(fd) };
    }
}
