//! Persistent memory: a file that a guest can read beside its RAM.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use vmfork_memory::{PMEM_FILE_OFFSET, TapError, pmem_bytes};
use vmfork_tap_proto::{BLOCK_BYTES, Role};

use crate::common::{FakeVm, clone_of, freeze, needs_userfaultfd};

const RAM_PAGES: u64 = 4 * BLOCK_BYTES / 4096;
const FILE_FIRST: u64 = PMEM_FILE_OFFSET / 4096;

/// Two pages and a half, which can be written.
fn writable(byte: u8) -> OwnedFd {
    let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    assert_eq!(rustix::io::write(&file, &[byte; 10_240]), Ok(10_240));
    file
}

/// The same, to be read.
fn file(byte: u8) -> OwnedFd {
    let writable = writable(byte);
    let path = format!("/proc/self/fd/{}", writable.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).expect("a file")
}

fn start(role: Role) -> FakeVm {
    FakeVm::start_with(RAM_PAGES, role, Some(pmem_bytes(10_240)))
}

fn sums(vm: &mut FakeVm, first: u64, count: u64) -> Vec<String> {
    let sums = vm.ask(&format!("pmem {first} {count}"));
    sums.split(' ').map(str::to_owned).collect()
}

#[test]
fn a_file_is_shown_behind_the_info_block_and_survives_a_freeze() {
    needs_userfaultfd!();
    let (mut vm, mut other) = (start(Role::Boot), start(Role::Wait));
    let info = sums(&mut vm, 0, 3);
    assert_ne!(info[1], "0", "the info block");
    assert_eq!((info[0].as_str(), info[2].as_str()), ("0", "0"));
    assert_eq!(sums(&mut vm, FILE_FIRST, 3), ["0"; 3], "nothing is shown yet");

    let (one, two) = (file(1), file(2));
    vm.memory().show_file(one.as_fd(), 10_240).expect("shown");
    let shown = sums(&mut vm, FILE_FIRST, 4);
    assert_eq!(shown[0], shown[1]);
    // Behind the file's end there are zeros.
    assert!(shown[2] != "0" && shown[2] != shown[1] && shown[3] == "0", "{shown:?}");

    assert_eq!(vm.ask("fill 0 16 3"), "ok");
    let ram = vm.sums(0, 16);
    let engine = freeze(&mut vm, 16);
    assert_eq!(sums(&mut vm, FILE_FIRST, 4), shown);
    assert_eq!(sums(&mut vm, 0, 3), info);
    other.memory().attach(&engine).expect("attached");
    other.memory().show_file(two.as_fd(), 10_240).expect("shown");
    assert_eq!((other.sums(0, 16), vm.sums(0, 16)), (ram.clone(), ram));
    assert_ne!(sums(&mut other, FILE_FIRST, 1), shown[..1], "its own file");
}

#[test]
fn what_does_not_fit_is_refused() {
    needs_userfaultfd!();
    let mut vm = start(Role::Boot);
    let file = file(1);
    let refused = vm.memory().show_file(file.as_fd(), BLOCK_BYTES + 4096);
    assert!(matches!(refused, Err(TapError::Refused { .. })), "{refused:?}");
    vm.memory().show_file(file.as_fd(), BLOCK_BYTES).expect("just fits");
    // A QEMU that was taken over could write to what all VMs read.
    let refused = vm.memory().show_file(writable(1).as_fd(), 4096);
    assert!(matches!(refused, Err(TapError::Refused { .. })), "{refused:?}");
    let engine = freeze(&mut vm, 16);
    let mut without = clone_of(&engine);
    let refused = without.memory().show_file(file.as_fd(), 4096);
    assert!(matches!(refused, Err(TapError::Refused { .. })), "it has none: {refused:?}");
}
