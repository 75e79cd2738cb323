//! A QEMU to test with, and the 512-byte guest that counts and prints.

#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod disks;

use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use vmfork_qemu::qmp::reopen_from_start;
use vmfork_qemu::{
    Accel, Binary, Boot, DriveContent, Drives, GuestKind, Launch, Qemu, QmpError, RunAs, Shape,
    probe, spawn,
};

pub(crate) const SOON: Duration = Duration::from_secs(20);

/// `VMFORK_TEST_QEMU`, or the one in PATH; firmware folders from `VMFORK_TEST_QEMU_FIRMWARE`.
/// `None`, said loudly: skip.
pub(crate) async fn binary() -> Option<Binary> {
    let path = std::env::var_os("VMFORK_TEST_QEMU").map(PathBuf::from);
    match probe::find(path.as_deref()).await {
        Ok(mut binary) => {
            let folders = std::env::var_os("VMFORK_TEST_QEMU_FIRMWARE").unwrap_or_default();
            binary.firmware =
                std::env::split_paths(&folders).filter(|p| !p.as_os_str().is_empty()).collect();
            Some(binary)
        }
        Err(error) => {
            skip(&error.to_string());
            None
        }
    }
}

/// With `VMFORK_TEST_STRICT=1` it is a failure.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var_os("VMFORK_TEST_STRICT").is_none(), "{why}");
    eprintln!("SKIPPED: {why}");
}

/// A boot sector, assembled from `tests/NAME.S`. `None`, said loudly, without an assembler.
pub(crate) fn boot_sector(folder: &Path, name: &str) -> Option<OwnedFd> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    let source = source.with_extension("S");
    let (object, image) = (folder.join("boot.o"), folder.join("boot.bin"));
    let run = |command: &mut Command| match command.status() {
        Ok(status) if status.success() => true,
        other => {
            skip(&format!("{command:?}: {other:?}"));
            false
        }
    };
    let assembled = run(Command::new("gcc").args(["-c", "-m32", "-o"]).arg(&object).arg(&source))
        && run(Command::new("ld")
            .args(["-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-o"])
            .args([&image, &object]));
    assembled.then(|| fs::File::open(&image).expect("just linked").into())
}

/// The user for QEMU: a number that no account has, if we may become it.
pub(crate) fn unprivileged() -> Option<RunAs> {
    rustix::process::geteuid().is_root().then_some(RunAs { uid: 812_345, gid: 812_345 })
}

/// The bare guest, ready to be started many times over one RAM.
pub(crate) struct Bare {
    pub(crate) binary: Binary,
    pub(crate) shape: Shape,
    pub(crate) drives: Drives,
    pub(crate) ram: OwnedFd,
    _folder: tempfile::TempDir,
}

impl Bare {
    pub(crate) async fn new(memory_bytes: u64, accel: Accel) -> Option<Self> {
        let folder = tempfile::tempdir().expect("temp dir");
        let disk = boot_sector(folder.path(), "boot")?;
        let binary = binary().await?;
        let drives = Drives::new(GuestKind::Bare, vec![DriveContent::ReadOnly(disk)]);
        let drives = drives.expect("readable");
        let shape = Shape::new(memory_bytes, 1, accel, GuestKind::Bare, drives.slots());
        let shape = shape.expect("possible");
        let ram = spawn::ram_file(&shape).expect("memfd");
        Some(Self { binary, shape, drives, ram, _folder: folder })
    }

    pub(crate) fn launch(&self, boot: bool) -> Launch {
        let (binary, shape, ram) = (self.binary.clone(), self.shape.clone(), clone(&self.ram));
        let launch = if boot {
            Launch::boot(binary, shape, ram, Boot::Disk).drives(self.drives.clone())
        } else {
            Launch::wait(binary, shape, ram)
        };
        // Without the shim QEMU opens /dev/kvm itself.
        match unprivileged() {
            Some(user) if self.shape.accel == Accel::Tcg => launch.run_as(user),
            _ => launch,
        }
    }

    /// A QEMU that waits takes over a state, with this guest's drives.
    pub(crate) async fn load(&self, qemu: &Qemu, state: impl AsFd) -> Result<(), QmpError> {
        qemu.qmp.bind_files(&self.drives).await?;
        let file = reopen_from_start(state).expect("open");
        qemu.qmp.load_state(file.as_fd(), SOON).await
    }

    pub(crate) async fn start(&self, boot: bool) -> Qemu {
        self.launch(boot).start().await.expect("QEMU starts")
    }
}

pub(crate) fn clone(fd: &OwnedFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().expect("fds left")
}

pub(crate) fn memfd() -> OwnedFd {
    rustix::fs::memfd_create("state", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd")
}

/// Reads the guest's counter lines.
pub(crate) struct Counter {
    serial: UnixStream,
    text: String,
    /// The next line may have begun before we listened.
    torn: bool,
}

impl Counter {
    pub(crate) fn new(qemu: &Qemu) -> Self {
        let mut serial = UnixStream::from(clone(&qemu.serial));
        // Lines from before: what is read after them tells that the guest runs now.
        serial.set_nonblocking(true).expect("a socket");
        let began = Instant::now();
        while matches!(serial.read(&mut [0; 1 << 16]), Ok(1..)) {
            assert!(began.elapsed() < SOON, "the guest prints faster than it is read");
        }
        serial.set_nonblocking(false).expect("a socket");
        serial.set_read_timeout(Some(Duration::from_millis(100))).expect("a socket");
        Self { serial, text: String::new(), torn: true }
    }

    /// The next whole line's number. Panics if the guest has found its memory wrong (it prints an
    /// X).
    pub(crate) fn next(&mut self) -> Option<u64> {
        let began = Instant::now();
        // SeaBIOS takes 10 s on a busy host where KVM interprets.
        while began.elapsed() < 3 * SOON {
            if let Some((line, rest)) = self.text.split_once('\n') {
                let line = line.trim().to_owned();
                self.text = rest.to_owned();
                assert!(!line.contains('X'), "the guest found its memory wrong");
                if std::mem::take(&mut self.torn) {
                    continue;
                }
                let number = u64::from_str_radix(&line, 16);
                return Some(number.unwrap_or_else(|_| panic!("the guest says {line:?}")));
            }
            let mut bytes = [0; 4096];
            match self.serial.read(&mut bytes) {
                Ok(0) => return None,
                Ok(count) => {
                    self.text += &String::from_utf8_lossy(bytes.get(..count).unwrap_or_default());
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => panic!("serial: {error}"),
            }
        }
        None
    }

    /// Throw away what has been printed so far.
    pub(crate) fn forget(&mut self) {
        self.serial.set_nonblocking(true).expect("a socket");
        let mut bytes = [0; 65536];
        while self.serial.read(&mut bytes).is_ok_and(|count| count > 0) {}
        self.serial.set_nonblocking(false).expect("a socket");
        self.text.clear();
        self.torn = true;
    }
}

pub(crate) fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Median and largest.
pub(crate) fn spread(mut samples: Vec<f64>) -> String {
    samples.sort_by(f64::total_cmp);
    let at = |part: usize| samples.get(samples.len() * part / 100).copied().unwrap_or(f64::NAN);
    format!("p50 {:.2} p90 {:.2} max {:.2} ms", at(50), at(90), samples.last().unwrap_or(&0.0))
}
