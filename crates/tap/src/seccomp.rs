//! The keeper's system-call filter.
//!
//! The keeper shares QEMU's memory, so a guest that has taken over QEMU can take over the keeper,
//! too. The keeper is not under QEMU's own `-sandbox`. This filter leaves it nothing beyond
//! what it needs.

use libc::{sock_filter, sock_fprog};

use crate::sys;

const ALLOWED: [libc::c_long; 14] = [
    libc::SYS_getpid,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_ioctl,
    libc::SYS_close,
    libc::SYS_pidfd_send_signal,
    libc::SYS_clock_gettime,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigreturn,
];

const AUDIT_ARCH_X86_64: u32 = 0xC000_003E;
const LOAD_WORD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K
const KILL: u32 = 0x8000_0000; // SECCOMP_RET_KILL_PROCESS
const ALLOW: u32 = 0x7FFF_0000; // SECCOMP_RET_ALLOW
const LEN: usize = ALLOWED.len() + 6;

const fn filter() -> [sock_filter; LEN] {
    const fn op(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
        sock_filter { code, jt, jf, k }
    }
    let mut program = [op(RETURN, 0, 0, KILL); LEN];
    program[0] = op(LOAD_WORD, 0, 0, 4); // seccomp_data.arch
    program[1] = op(JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64);
    program[2] = op(RETURN, 0, 0, KILL);
    program[3] = op(LOAD_WORD, 0, 0, 0); // seccomp_data.nr
    let mut i = 0;
    while i < ALLOWED.len() {
        // To the last instruction (ALLOW) if equal; the one before it is KILL.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        {
            program[4 + i] = op(JUMP_EQUAL, (ALLOWED.len() - i) as u8, 0, ALLOWED[i] as u32);
        }
        i += 1;
    }
    program[LEN - 1] = op(RETURN, 0, 0, ALLOW);
    program
}

static FILTER: [sock_filter; LEN] = filter();

/// Confine the calling process. False if the kernel will not.
pub(crate) fn confine() -> bool {
    #[allow(clippy::cast_possible_truncation)]
    let program = sock_fprog {
        len: LEN as u16,
        filter: (&raw const FILTER).cast::<sock_filter>().cast_mut(),
    };
    let argument: *const sock_fprog = &raw const program;
    // SAFETY: PR_SET_NO_NEW_PRIVS takes numbers.
    let no_new_privileges = unsafe { sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0) };
    // SAFETY: PR_SET_SECCOMP with SECCOMP_MODE_FILTER (2) takes a `sock_fprog`, alive here, that
    // points to a static program of the length it says. The kernel only reads them.
    let filtered = unsafe { sys::prctl(libc::PR_SET_SECCOMP, 2, argument.expose_provenance()) };
    no_new_privileges.is_ok() && filtered.is_ok()
}
