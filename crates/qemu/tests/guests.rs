//! More guests: a stock Linux kernel, the tiny one under KVM, and a library where the shim goes.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use support::{Bare, Counter, SOON, binary, clone, memfd, skip, unprivileged};
use vmfork_qemu::probe::KvmFacts;
use vmfork_qemu::qmp::reopen_from_start;
use vmfork_qemu::{Accel, Boot, GuestKind, Launch, Shape, ShimFds, spawn};

const MIB: u64 = 1 << 20;

/// The tiny guest moves between two QEMUs under KVM too, whatever KVM's backend.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tiny_guest_moves_under_kvm() {
    if let Err(reason) = KvmFacts::gather().device {
        return skip(&format!("/dev/kvm: {reason}"));
    }
    let Some(bare) = Bare::new(64 * MIB, Accel::Kvm).await else { return };
    let parent = bare.start(true).await;
    assert!(Counter::new(&parent).next().is_some(), "the guest counts");
    parent.qmp.stop().await.expect("stop");
    let state = memfd();
    parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    let clone = bare.start(false).await;
    let file = reopen_from_start(&state).expect("open");
    clone.qmp.load_state(file.as_fd(), SOON).await.expect("loaded");
    clone.qmp.cont().await.expect("cont");
    assert!(Counter::new(&clone).next().is_some(), "and goes on");
}

/// A file of a cpio archive in the form that the kernel unpacks ("newc").
fn cpio_entry(archive: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) {
    let header = [0, mode, 0, 0, 1, 0, u32::try_from(content.len()).expect("small"), 0, 0, 5, 1];
    archive.extend(b"070701");
    for field in header.into_iter().chain([u32::try_from(name.len()).expect("short") + 1, 0]) {
        archive.extend(format!("{field:08x}").into_bytes());
    }
    for part in [[name.as_bytes(), b"\0"].concat(), content.to_vec()] {
        archive.extend(part);
        archive.resize(archive.len().next_multiple_of(4), 0);
    }
}

fn initrd() -> OwnedFd {
    let busybox = fs::read("/bin/busybox").expect("checked");
    let init = b"#!/bin/busybox sh\ni=0; while true; do i=$((i+1)); echo tick $i; done\n";
    let mut archive = Vec::new();
    for folder in ["bin", "dev"] {
        cpio_entry(&mut archive, folder, 0o040_755, b"");
    }
    // /dev/console, so that init has an output: device 5:1, as the header above says.
    cpio_entry(&mut archive, "dev/console", 0o020_600, b"");
    cpio_entry(&mut archive, "bin/busybox", 0o100_755, &busybox);
    cpio_entry(&mut archive, "init", 0o100_755, init);
    cpio_entry(&mut archive, "TRAILER!!!", 0, b"");
    let file = memfd();
    fs::File::from(clone(&file)).write_all(&archive).expect("memory");
    file
}

/// Read the console until `found` says so; what was read.
fn read_until(serial: &OwnedFd, found: impl Fn(&str) -> bool) -> String {
    let mut serial = UnixStream::from(clone(serial));
    serial.set_read_timeout(Some(Duration::from_millis(200))).expect("a socket");
    let (began, mut text, mut bytes) = (Instant::now(), String::new(), [0; 4096]);
    while !found(&text) {
        assert!(began.elapsed() < 2 * SOON, "the guest says only {text:?}");
        if let Ok(count) = serial.read(&mut bytes) {
            text += &String::from_utf8_lossy(bytes.get(..count).unwrap_or_default());
        }
    }
    text
}

/// A stock kernel boots from fds, as another user, in the sandbox; its parent is killed, and a QEMU
/// without kernel takes it over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn linux_boots_and_moves() {
    let Some(kernel) = std::env::var_os("VMFORK_TEST_KERNEL") else {
        return skip("VMFORK_TEST_KERNEL names no vmlinuz");
    };
    if !Path::new("/bin/busybox").exists() {
        return skip("no /bin/busybox (package busybox-static)");
    }
    let Some(binary) = binary().await else { return };
    let shape =
        Shape::new(256 * MIB, 2, Accel::Tcg, GuestKind::Linux, Vec::new()).expect("possible");
    let ram = spawn::ram_file(&shape).expect("memfd");
    let user = |launch: Launch| match unprivileged() {
        Some(user) => launch.run_as(user),
        None => launch,
    };
    let boot = Boot::Kernel {
        kernel: fs::File::open(kernel).expect("readable").into(),
        initrd: Some(initrd()),
        append: "console=ttyS0 quiet panic=-1".into(),
    };
    let launch = Launch::boot(binary.clone(), shape.clone(), clone(&ram), boot);
    let parent = user(launch).start().await.expect("starts");
    let waiting = user(Launch::wait(binary, shape, ram)).start().await.expect("starts");
    let serial = clone(&parent.serial);
    let read = move || {
        read_until(&serial, |text| text.contains("tick 20\n") || text.contains("tick 20\r"))
    };
    tokio::task::spawn_blocking(read).await.expect("Linux is up");

    let before = waiting.qmp.vm_generation_id().await.expect("a vmgenid");
    parent.qmp.stop().await.expect("stop");
    let state = memfd();
    parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    parent.process.kill();
    parent.process.wait().await;

    let file = reopen_from_start(&state).expect("open");
    if let Err(error) = waiting.qmp.load_state(file.as_fd(), SOON).await {
        panic!("{}", waiting.explain(error).await);
    }
    waiting.qmp.cont().await.expect("cont");
    let serial = clone(&waiting.serial);
    let read = move || read_until(&serial, |text| text.matches("tick").count() > 50);
    let text = tokio::task::spawn_blocking(read).await.expect("it goes on");
    let ticks: Vec<u64> = text
        .lines()
        .skip(1)
        .filter_map(|line| line.trim().strip_prefix("tick ")?.parse().ok())
        .collect();
    assert!(ticks.first().is_some_and(|first| *first >= 20), "not from the start: {text}");
    assert_eq!(waiting.qmp.vm_generation_id().await.expect("a vmgenid"), before);
}

/// A library for `LD_PRELOAD`, in a folder that QEMU's user can't enter, finds its fds by the
/// environment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shim_is_loaded_and_finds_its_fds() {
    const SOURCE: &str = r#"
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <sys/stat.h>
        #include <unistd.h>
        __attribute__((constructor)) static void begin(void) {
            const char *names[] = { "CONTROL", "USERFAULTFD", "RAM" };
            char line[256] = "", name[64];
            for (int i = 0; i < 3; i++) {
                struct stat st;
                snprintf(name, sizeof name, "VMFORK_TAP_%s", names[i]);
                const char *fd = getenv(name);
                int ok = fd && fstat(atoi(fd), &st) == 0;
                snprintf(line + strlen(line), 64, "%s %s %ld;", names[i], ok ? "open" : "absent", ok ? (long)st.st_size : -1L);
            }
            snprintf(line + strlen(line), 64, "%s %d", getenv("VMFORK_TAP_ROLE"), (int)getuid());
            write(atoi(getenv("VMFORK_TAP_CONTROL")), line, strlen(line));
        }"#;
    let folder = tempfile::tempdir().expect("temp dir");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).expect("ours");
    let (source, library) = (folder.path().join("shim.c"), folder.path().join("shim.so"));
    fs::write(&source, SOURCE).expect("write");
    let built =
        Command::new("gcc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    if !built.is_ok_and(|status| status.success()) {
        return skip("no gcc");
    }
    let Some(binary) = binary().await else { return };
    let shape =
        Shape::new(64 * MIB, 1, Accel::Tcg, GuestKind::Linux, Vec::new()).expect("possible");
    let ram = spawn::ram_file(&shape).expect("memfd");
    let (ours, control) = UnixStream::pair().expect("socketpair");
    let fds =
        ShimFds { library, control: control.into(), userfaultfd: memfd(), kvm: None, pmem: None };
    let launch = Launch::wait(binary, shape, ram).shim(fds);
    let (launch, uid) = match unprivileged() {
        Some(user) => (launch.run_as(user), user.uid),
        None => (launch, rustix::process::getuid().as_raw()),
    };
    let qemu = launch.start().await.expect("starts");
    let mut bytes = [0; 512];
    let count = (&ours).read(&mut bytes).expect("it wrote before QEMU's main");
    let text = String::from_utf8_lossy(bytes.get(..count).unwrap_or_default()).into_owned();
    assert_eq!(text, format!("CONTROL open 0;USERFAULTFD open 0;RAM open 67108864;wait {uid}"));
    assert!(qemu.is_alive());
}
