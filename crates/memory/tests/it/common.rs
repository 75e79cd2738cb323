//! Fake VMs under the real shim and the real engine.

#![allow(unreachable_pub, missing_debug_implementations, reason = "a module of tests")]

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmfork_engine::{Engine, EngineEvent, EngineOptions};
use vmfork_image::ImageId;
use vmfork_memory::{GuestMemory, Tap, USERFAULTFD_DEVICE};
use vmfork_tap_proto as proto;

pub const PAGE_BYTES: u64 = 4096;

/// Why the tests of this file can't run here; printed, and the test passes.
pub fn unsupported() -> Option<String> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(USERFAULTFD_DEVICE)
        .err()
        .map(|error| format!("SKIPPED: {USERFAULTFD_DEVICE}: {error}"))
}

/// Ends a test that can't run here, with a word why. With `VMFORK_TEST_STRICT=1` it fails.
macro_rules! needs_userfaultfd {
    () => {
        if let Some(why) = $crate::common::unsupported() {
            assert!(std::env::var_os("VMFORK_TEST_STRICT").is_none(), "{why}");
            eprintln!("{why}");
            return;
        }
    };
}
pub(crate) use needs_userfaultfd;

/// `up` folders above this program: …/target/debug/deps/this-test,
/// …/target/release/examples/this-example
fn above(up: usize) -> PathBuf {
    let exe = std::env::current_exe().expect("own path");
    exe.ancestors().nth(up).expect("a target folder").to_owned()
}

fn target_dir() -> PathBuf {
    above(3)
}

fn build(what: &[&str]) {
    let target = target_dir();
    let mut cargo = Command::new(env!("CARGO"));
    let built = cargo.args(["build", "-q"]).args(what).arg("--target-dir").arg(target).status();
    assert!(built.expect("cargo").success(), "build {what:?}");
}

/// The shim, built once by cargo under its own profile; and the fake VM, which `cargo test --test`
/// leaves out.
fn shim() -> PathBuf {
    static BUILD: std::sync::Once = std::sync::Once::new();
    BUILD.call_once(|| {
        build(&["--profile", "tap", "-p", "vmfork-tap"]);
        let profile = if above(2).ends_with("release") { "release" } else { "dev" };
        build(&["--profile", profile, "-p", "vmfork-memory", "--example", "fake_vm"]);
    });
    target_dir().join("tap/libvmfork_tap.so")
}

pub struct FakeVm {
    pub memory: Option<GuestMemory>,
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl FakeVm {
    pub fn start(pages: u64, role: proto::Role) -> Self {
        Self::start_with(pages, role, None)
    }

    /// With so much persistent memory.
    pub fn start_with(pages: u64, role: proto::Role, pmem_bytes: Option<u64>) -> Self {
        let bytes = pages * PAGE_BYTES;
        let (tap, ends) = Tap::new(bytes, pmem_bytes).expect("socket");
        let mut vm = Self::spawn(bytes, role, ends.control, ends.ram, ends.pmem);
        let memory = GuestMemory::connect(tap, vm.child.id(), bytes).expect("connect");
        vm.memory = Some(memory);
        vm
    }

    /// A fake VM whose keeper has this end of a control socket. No view or image has taken hold of
    /// its memory.
    pub fn spawn(
        bytes: u64,
        role: proto::Role,
        control: OwnedFd,
        ram: OwnedFd,
        pmem: Option<OwnedFd>,
    ) -> Self {
        let device: OwnedFd = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(USERFAULTFD_DEVICE)
            .expect("userfaultfd")
            .into();
        // Out of the way of the numbers that they get in the child.
        let has_pmem = pmem.is_some();
        let fds = [control, device, ram].into_iter().chain(pmem);
        let fds = fds.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 300).expect("duplicate"));
        let fds: Vec<OwnedFd> = fds.collect();
        let numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let mut command = Command::new(above(2).join("examples/fake_vm"));
        command
            .arg(bytes.to_string())
            .arg("102")
            .env("LD_PRELOAD", shim())
            .env(proto::ENV_CONTROL, "100")
            .env(proto::ENV_USERFAULTFD, "101")
            .env(proto::ENV_RAM, "102")
            .env(proto::ENV_ROLE, role.as_str())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if has_pmem {
            command.arg("103").env(proto::ENV_PMEM, "103");
        }
        // SAFETY: dup2 is async-signal-safe; nothing else happens between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for (number, to) in numbers.iter().zip(100..) {
                    if libc::dup2(*number, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let mut child = command.spawn().expect("fake VM");
        drop(fds);
        let stdin = child.stdin.take().expect("piped");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("ready");
        Self { memory: None, child, stdin, stdout }
    }

    pub fn memory(&mut self) -> &mut GuestMemory {
        self.memory.as_mut().expect("not ended")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn send(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").expect("alive");
    }

    /// The next answer; fails if there is none within a minute.
    pub fn receive(&mut self) -> String {
        if self.stdout.buffer().is_empty() {
            let mut fds = [PollFd::new(self.stdout.get_ref(), PollFlags::IN)];
            let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(poll(&mut fds, Some(&minute)), Ok(1), "the fake VM hangs");
        }
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("alive");
        line.trim_end().to_owned()
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.receive()
    }

    pub fn sums(&mut self, first: u64, count: u64) -> Vec<u64> {
        self.ask(&format!("sum {first} {count}"))
            .split(' ')
            .map(|word| u64::from_str_radix(word, 16).expect("hex"))
            .collect()
    }
}

impl Drop for FakeVm {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
        self.memory.take();
    }
}

pub type Events = Arc<Mutex<VecDeque<EngineEvent>>>;

/// A new engine, and what it reports.
pub fn engine(vm: &mut FakeVm, unit: u64) -> (Arc<Engine>, Events) {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = ImageId::new(NEXT.fetch_add(1, Ordering::Relaxed)).expect("not 0");
    let events = Events::default();
    let sink = Arc::clone(&events);
    let pages = vm.memory().pages();
    if let Some(engine) = vm.memory().engine() {
        assert!(engine.wait_sealed(Duration::from_secs(10)), "base sealed");
    }
    let base = vm.memory().engine().map(|engine| Arc::clone(engine.image()));
    let options = EngineOptions { fill_unit_pages: unit };
    let engine = Engine::prepare(
        id,
        pages,
        base.as_ref(),
        &options,
        Arc::new(move |event| sink.lock().expect("not poisoned").push_back(event)),
    )
    .expect("engine");
    (Arc::new(engine), events)
}

/// End a process that this test started.
pub fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
}

/// Wait, 10 s at most, for an event that `pick` makes something of.
pub fn await_event<T>(events: &Events, pick: impl Fn(&EngineEvent) -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(found) = events.lock().expect("not poisoned").iter().find_map(&pick) {
            return found;
        }
        assert!(Instant::now() < deadline, "no such event within 10 s");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// Freeze a VM.
pub fn freeze(vm: &mut FakeVm, unit: u64) -> Arc<Engine> {
    let (engine, _) = engine(vm, unit);
    vm.memory().freeze(&engine).expect("freeze");
    engine
}

/// Start a clone of which it can be told page by page what it touches.
pub fn watched_clone_of(engine: &Arc<Engine>) -> FakeVm {
    let mut vm = FakeVm::start(engine.image().pages(), proto::Role::Wait);
    vm.memory().attach_by_page(engine).expect("attach");
    vm
}

/// Start a clone.
pub fn clone_of(engine: &Arc<Engine>) -> FakeVm {
    let mut vm = FakeVm::start(engine.image().pages(), proto::Role::Wait);
    vm.memory().attach(engine).expect("attach");
    vm
}
