//! The shim: preloaded into an unpatched QEMU, it gives `vmforkd` hold of the guest's RAM.
//!
//! ```text
//!   QEMU process                         keeper process (same memory, own fds, own stack)
//!   ┌───────────────────────────┐        ┌──────────────────────────────┐
//!   │ hooks: mmap of the RAM    │ shares │ keeper: one request at a time│◄──► vmforkd
//!   │ file, madvise, fallocate, │◄──────►│ mremap / mmap / userfaultfd  │  control socket
//!   │ pread, recvmsg, open(kvm) │ memory │ on QEMU's address space      │  (vmfork-tap-proto)
//!   └───────────────────────────┘        └──────────────────────────────┘
//! ```
//!
//! QEMU believes that its RAM is a shared file. What it really gets is a private mapping. So a
//! freeze can move its pages aside, and the VM can continue as a view of a cache. The constructor
//! starts the *keeper*, before QEMU installs its own seccomp filter. It does so by
//! `clone(CLONE_VM)` without `CLONE_FILES`. So the keeper acts on QEMU's memory, holds none of
//! QEMU's sockets, and outlives a killed QEMU together with the pages that were moved aside. It
//! ends when `vmforkd` closes the control socket, and takes QEMU with it: no process would be left
//! to answer its faults.
//!
//! Promises: hooks keep `errno`, take no locks, allocate nothing, never panic. What they don't
//! understand passes through, and the count of RAM mappings (`Status`) tells `vmforkd` to refuse
//! the VM.
//!
//! Left to others: which pages go where (crate `memory`), when to freeze (crate `daemon`).

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![expect(clippy::cast_possible_truncation, reason = "usize and u64 are one on x86-64")]

mod blocks;
#[expect(unreachable_pub, reason = "exported by name to the dynamic linker")]
mod hooks;
mod keeper;
mod pmem;
mod ram;
mod receive;
mod seccomp;
mod sys;

use core::ffi::{CStr, c_int};

use vmfork_tap_proto as proto;

/// Runs before QEMU's `main`.
extern "C" fn init() {
    hooks::resolve();
    let (Some(control), Some(userfaultfd), Some(ram)) = (
        env_number(c"VMFORK_TAP_CONTROL"),
        env_number(c"VMFORK_TAP_USERFAULTFD"),
        env_number(c"VMFORK_TAP_RAM"),
    ) else {
        return; // not started by vmforkd: nothing but pass-through
    };
    let waits = env_is(c"VMFORK_TAP_ROLE", proto::Role::Wait.as_str());
    if let Some(kvm) = env_number(c"VMFORK_TAP_KVM") {
        hooks::offer_kvm(kvm);
    }
    if let Some(file) = env_number(c"VMFORK_TAP_PMEM") {
        pmem::init(file);
    }
    // What QEMU might start must not be tapped.
    for name in [
        c"LD_PRELOAD",
        c"VMFORK_TAP_CONTROL",
        c"VMFORK_TAP_USERFAULTFD",
        c"VMFORK_TAP_RAM",
        c"VMFORK_TAP_PMEM",
        c"VMFORK_TAP_ROLE",
        c"VMFORK_TAP_KVM",
    ] {
        // SAFETY: a constructor runs before any other thread exists; the name is a C string.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
    if ram::init(userfaultfd, ram, waits) {
        keeper::start(control);
    }
    sys::close(userfaultfd);
    sys::close(control);
}

#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = init;

fn env(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: a constructor runs before any other thread exists. The name is a C string, and the
    // value, if there is one, is a C string of the process's environment.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        if value.is_null() { None } else { Some(CStr::from_ptr(value)) }
    }
}

fn env_number(name: &CStr) -> Option<c_int> {
    let text = env(name)?.to_bytes();
    if text.is_empty() || text.len() > 9 {
        return None;
    }
    text.iter().try_fold(0, |sum: c_int, digit| {
        digit.is_ascii_digit().then(|| sum * 10 + c_int::from(digit - b'0'))
    })
}

fn env_is(name: &CStr, value: &str) -> bool {
    env(name).is_some_and(|text| text.to_bytes() == value.as_bytes())
}
