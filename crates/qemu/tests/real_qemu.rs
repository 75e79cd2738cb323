//! With a real QEMU under TCG, as an unprivileged user (when run as root), in its sandbox.

mod support;

use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use support::{Bare, Counter, SOON, binary, clone, memfd, millis, unprivileged};
use vmfork_qemu::pool::{Limits, Origin, Pool, Starting};
use vmfork_qemu::qmp::{RunState, devices, reopen_from_start};
use vmfork_qemu::spawn::{self, ExitStatus};
use vmfork_qemu::{
    Accel, Boot, DriveContent, Drives, GuestKind, Launch, Qemu, QmpError, Shape, StartError,
};

const MIB: u64 = 1 << 20;
type Test = tokio::runtime::Runtime;

fn runtime() -> Test {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("runtime")
}

fn proc_file(qemu: &Qemu, name: &str) -> String {
    fs::read_to_string(format!("/proc/{}/{name}", qemu.process.pid())).expect("it runs")
}

/// A VM is saved while stopped, its state loads in one that waits, and both go on from the very
/// same count.
#[test]
fn a_state_goes_from_one_qemu_to_another_without_ram() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let parent = bare.start(true).await;
        let mut counter = Counter::new(&parent);
        assert!(counter.next().is_some(), "the guest counts");

        let state = memfd();
        let mut events = parent.qmp.events();
        let prepared = parent.qmp.prepare_state_fd(state.as_fd()).await.expect("getfd");
        parent.qmp.stop().await.expect("stop");
        counter.forget();
        assert_eq!(parent.qmp.query_status().await.expect("status").state, RunState::Paused);
        parent.qmp.migrate(prepared, SOON).await.expect("saved");
        parent.qmp.wait_postmigrate().await.expect("postmigrate");
        assert_eq!(events.recv().await.expect("an event").name, "STOP");
        let size = rustix::fs::fstat(&state).expect("open").st_size;
        assert!((10_000..1_000_000).contains(&size), "RAM is left out: {size} bytes");

        let clone = bare.start(false).await;
        assert_eq!(clone.qmp.query_status().await.expect("status").state, RunState::InMigrate);
        bare.load(&clone, &state).await.expect("loaded");
        assert!(!clone.qmp.query_status().await.expect("status").running, "it was saved stopped");

        // Both over the same shared RAM, so one after the other.
        clone.qmp.cont().await.expect("cont");
        let mut counts = Counter::new(&clone);
        let first = counts.next().expect("the clone counts");
        assert!(counts.next().expect("and goes on") > first);
        clone.qmp.quit().await.expect("quit");
        assert_eq!(clone.process.wait().await, ExitStatus::Code(0));
    });
}

/// The parent goes on after it was saved, and can be saved again and again.
#[test]
fn a_parent_is_saved_many_times() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let parent = bare.start(true).await;
        let mut counter = Counter::new(&parent);
        let mut last = counter.next().expect("the guest counts");
        for round in 0..10 {
            let state = memfd();
            let prepared = parent.qmp.prepare_state_fd(state.as_fd()).await.expect("getfd");
            parent.qmp.stop().await.expect("stop");
            parent.qmp.migrate(prepared, SOON).await.expect("saved");
            parent.qmp.cont().await.expect("cont");
            counter.forget();
            let now = counter.next().expect("it goes on");
            assert!(now > last, "round {round}: {now:x} after {last:x}");
            last = now;
        }
    });
}

#[test]
fn qemu_is_locked_in() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let Some(user) = unprivileged() else {
            return support::skip("not root: QEMU runs as the same user");
        };
        let qemu = bare.start(true).await;
        let status = proc_file(&qemu, "status");
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(field("Uid:"), vec![user.uid.to_string(); 4]);
        assert_eq!(field("Gid:"), vec![user.gid.to_string(); 4]);
        assert_eq!(field("Groups:"), Vec::<String>::new());
        assert_eq!(field("NoNewPrivs:"), ["1"]);
        assert_eq!(field("Seccomp:"), ["2"]);
        assert_eq!(field("CapEff:"), ["0000000000000000"]);
        assert_eq!(field("CapPrm:"), ["0000000000000000"]);
        // QEMU blocks some signals itself; SIGINT and SIGTERM are not among them.
        let blocked = field("SigBlk:").concat();
        let blocked = u64::from_str_radix(&blocked, 16).expect("a mask");
        assert_eq!(blocked & 0x4002, 0, "signals came unblocked");

        let limits = proc_file(&qemu, "limits");
        let core = limits.lines().find(|line| line.starts_with("Max core")).unwrap_or_default();
        assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
        assert_eq!(proc_file(&qemu, "environ"), "");
        let link = |name: &str| fs::read_link(format!("/proc/{}/{name}", qemu.process.pid()));
        assert_eq!(link("cwd").expect("it runs").as_os_str(), "/");
        assert_ne!(
            link("ns/net").expect("it runs"),
            fs::read_link("/proc/self/ns/net").expect("proc"),
            "a network of its own"
        );
        let devices = proc_file(&qemu, "net/dev");
        assert_eq!(devices.lines().count(), 3, "two lines of heading and lo: {devices}");
    });
}

/// Of the daemon's fds QEMU has none but those it was given.
#[test]
fn no_other_fd_reaches_qemu() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let secret = tempfile::NamedTempFile::new().expect("temp file");
        // Not close-on-exec, as a careless library would leave it.
        rustix::io::fcntl_setfd(secret.as_file(), rustix::io::FdFlags::empty()).expect("fcntl");
        let qemu = bare.start(true).await;
        let fds = fs::read_dir(format!("/proc/{}/fd", qemu.process.pid())).expect("it runs");
        for fd in fds.flatten() {
            let target = fs::read_link(fd.path()).unwrap_or_default();
            assert_ne!(target, secret.path());
        }
    });
}

#[test]
fn a_dropped_qemu_is_gone() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let qemu = bare.start(false).await;
        let path = format!("/proc/{}", qemu.process.pid());
        drop(qemu);
        let began = Instant::now();
        while fs::exists(&path).expect("proc") {
            assert!(began.elapsed() < SOON, "neither ended nor reaped");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
}

#[test]
fn a_runtime_that_ends_leaves_no_qemu() {
    let runtime = runtime();
    let Some((pid, qemu)) = runtime.block_on(async {
        let bare = Bare::new(64 * MIB, Accel::Tcg).await?;
        let qemu = bare.start(false).await;
        Some((qemu.process.pid(), qemu))
    }) else {
        return;
    };
    drop(runtime);
    assert!(!fs::exists(format!("/proc/{pid}")).expect("proc"), "reaped with the runtime");
    drop(qemu);
}

/// `kill -9` of QEMU: every waiting call fails at once, with the reason.
#[test]
fn a_killed_qemu_fails_every_waiting_call() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let qemu = bare.start(true).await;
        let began = Instant::now();
        qemu.process.kill();
        let error = loop {
            match qemu.qmp.query_status().await {
                Ok(_) => assert!(began.elapsed() < SOON),
                Err(error) => break qemu.explain(error).await,
            }
        };
        assert_eq!(
            error.to_string(),
            "the connection to QEMU is lost: QEMU ended (signal 9): it said nothing"
        );
        assert_eq!(qemu.process.wait().await, ExitStatus::Signal(9));
        assert!(!qemu.is_alive());
        assert!(millis(began) < 5000.0);
    });
}

/// When the daemon is killed, its QEMUs go with it.
#[test]
fn qemus_end_with_the_daemon() {
    const CHILD: &str = "VMFORK_TEST_DAEMON";
    if std::env::var_os(CHILD).is_some() {
        return runtime().block_on(async {
            let bare = Bare::new(64 * MIB, Accel::Tcg).await.expect("checked by the parent");
            let qemu = bare.start(true).await;
            eprintln!("qemu={}", qemu.process.pid());
            // Its parent kills this process long before.
            tokio::time::sleep(SOON).await;
        });
    }
    if runtime().block_on(Bare::new(64 * MIB, Accel::Tcg)).is_none() {
        return;
    }
    // What it has in folders goes with this one.
    let folder = tempfile::tempdir().expect("temp dir");
    let mut daemon = std::process::Command::new(std::env::current_exe().expect("known"))
        .args(["--exact", "qemus_end_with_the_daemon", "--nocapture"])
        .env(CHILD, "1")
        .env("TMPDIR", folder.path())
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("itself");
    let lines = std::io::BufReader::new(daemon.stderr.take().expect("piped"));
    let mut lines = std::io::BufRead::lines(lines).map_while(Result::ok);
    let pid =
        lines.find_map(|line| line.strip_prefix("qemu=").map(str::to_owned)).expect("started");
    daemon.kill().expect("still there");
    assert_eq!(daemon.wait().expect("ours").signal(), Some(9));
    let began = Instant::now();
    // The process that adopts orphans reaps it; until then it is a zombie.
    let gone = || match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.contains(") Z "),
        Err(_) => true,
    };
    while !gone() {
        assert!(began.elapsed() < SOON, "QEMU {pid} outlived its daemon");
        std::thread::yield_now();
    }
}

#[test]
fn a_qemu_that_cannot_start_says_why() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let small = memfd();
        rustix::fs::ftruncate(&small, 4096).expect("memfd");
        let launch = Launch::boot(bare.binary.clone(), bare.shape.clone(), small, Boot::Disk);
        let error = launch.drives(bare.drives.clone()).start().await.expect_err("RAM is too small");
        let text = error.to_string();
        assert!(text.starts_with("QEMU could not start (exit code 1): "), "{text}");
        assert!(text.contains("backing store size 0x1000"), "{text}");

        let mut nowhere = bare.binary.clone();
        nowhere.path = "/nonexistent/qemu".into();
        let launch = Launch::wait(nowhere, bare.shape.clone(), memfd());
        let error = launch.start().await.expect_err("no such program");
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert_eq!(error.to_string(), "start /nonexistent/qemu");
        assert_eq!(source.as_deref(), Some("execute QEMU: No such file or directory (os error 2)"));

        let boot = || {
            let ram = clone(&bare.ram);
            Launch::boot(bare.binary.clone(), bare.shape.clone(), ram, Boot::Disk)
        };
        let error = boot().start().await.expect_err("no disk");
        assert!(matches!(error, StartError::WrongDrives { .. }), "{error}");
        let launch = boot().drives(bare.drives.clone()).nic(memfd());
        let error = launch.start().await.expect_err("no network card is in the shape");
        assert!(matches!(error, StartError::WrongNics { .. }), "{error}");
    });
}

#[test]
fn a_file_that_qemus_user_may_not_read_is_named() {
    runtime().block_on(async {
        let (Some(binary), Some(user)) = (binary().await, unprivileged()) else { return };
        let secret = OwnedFd::from(tempfile::tempfile().expect("temp file"));
        rustix::fs::fchmod(&secret, rustix::fs::Mode::from_raw_mode(0o600)).expect("ours");
        let shape =
            Shape::new(64 * MIB, 1, Accel::Tcg, GuestKind::Linux, Vec::new()).expect("possible");
        let ram = spawn::ram_file(&shape).expect("memfd");
        let boot = Boot::Kernel { kernel: secret, initrd: None, append: OsString::new() };
        let launch = Launch::boot(binary, shape, ram, boot).run_as(user);
        let error = launch.start().await.expect_err("refused").to_string();
        assert_eq!(error, "QEMU runs as user 812345, who may not read the kernel: its mode is 600");
    });
}

/// A state that doesn't fit ends QEMU 7.2; its words are in the error.
#[test]
fn a_state_that_does_not_load_says_why() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let clone = bare.start(false).await;
        let garbage = memfd();
        rustix::io::write(&garbage, &[0x5a; 4096]).expect("memfd");
        let garbage = reopen_from_start(&garbage).expect("open");
        let error = clone.qmp.load_state(garbage.as_fd(), SOON).await.expect_err("garbage");
        let lost = matches!(error, QmpError::Lost { .. });
        let text = clone.explain(error).await.to_string();
        assert!(lost == text.contains("QEMU ended (exit code 1)"), "{text}");
        assert!(
            text.contains("Not a migration stream") || text.contains("Invalid argument"),
            "{text}"
        );
    });
}

/// Everything a Linux guest has: two QEMUs differ in the generation id, before and after a state
/// was loaded.
#[test]
fn a_linux_machine_moves_and_keeps_its_own_generation_id() {
    runtime().block_on(async {
        let Some(binary) = binary().await else { return };
        let disk = tempfile::NamedTempFile::new().expect("temp file");
        disk.as_file().set_len(MIB).expect("room");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        disk.as_file().set_permissions(mode).expect("ours");
        let root = disk.reopen().expect("open").into();
        let drives = Drives::new(GuestKind::Linux, vec![DriveContent::ReadOnly(root)]);
        let drives = drives.expect("readable");
        let shape = Shape::new(64 * MIB, 2, Accel::Tcg, GuestKind::Linux, drives.slots());
        let shape = shape.expect("possible");
        let ram = spawn::ram_file(&shape).expect("memfd");
        let start = async |boot: bool| {
            let (binary, shape, ram) = (binary.clone(), shape.clone(), clone(&ram));
            let launch = match boot {
                // The firmware runs, finds nothing to boot from, and waits: enough for the devices.
                true => Launch::boot(binary, shape, ram, Boot::Disk).drives(drives.clone()),
                false => Launch::wait(binary, shape, ram),
            };
            let launch = match unprivileged() {
                Some(user) => launch.run_as(user),
                None => launch,
            };
            launch.start().await.expect("starts")
        };
        let parent = start(true).await;
        assert!(parent.agent.is_some());
        assert_eq!(parent.qmp.vcpu_threads().await.expect("asked").len(), 2);
        tokio::time::sleep(Duration::from_millis(500)).await;
        parent.qmp.stop().await.expect("stop");
        let state = memfd();
        parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
        let clone = start(false).await;
        let before = clone.qmp.vm_generation_id().await.expect("a vmgenid");
        clone.qmp.bind_files(&drives).await.expect("bound");
        let file = reopen_from_start(&state).expect("open");
        let loaded = clone.qmp.load_state(file.as_fd(), SOON).await;
        if let Err(error) = loaded {
            panic!("{}", clone.explain(error).await);
        }
        clone.qmp.cont().await.expect("cont");
        assert!(clone.qmp.query_status().await.expect("status").running);
        assert_eq!(clone.qmp.vm_generation_id().await.expect("a vmgenid"), before);
        assert_ne!(parent.qmp.vm_generation_id().await.expect("a vmgenid"), before);
    });
}

/// The whole chain: a pool of waiting QEMUs, one taken, state loaded, running.
#[test]
fn a_pooled_qemu_takes_over_a_state() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let bare = std::sync::Arc::new(bare);
        let starter = bare.clone();
        let pool = Pool::new(Limits::default(), move |_: Shape| -> Starting<Qemu, StartError> {
            Box::pin(starter.launch(false).start())
        });
        pool.want(&bare.shape, 2);
        let parent = bare.start(true).await;
        assert!(Counter::new(&parent).next().is_some());
        let began = Instant::now();
        while pool.counts().iter().map(|(_, c)| c.waiting).sum::<usize>() < 2 {
            assert!(began.elapsed() < SOON, "the pool fills");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        parent.qmp.stop().await.expect("stop");
        let state = memfd();
        parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
        let (clone, origin) = pool.take(&bare.shape).await.expect("there");
        assert_eq!(origin, Origin::Pooled);
        bare.load(&clone, &state).await.expect("loaded");
        clone.qmp.cont().await.expect("cont");
        assert!(Counter::new(&clone).next().is_some());
    });
}

/// Devices saved without a migration, behind the lead of one: as often as one likes, and a clone of
/// a clone, too.
#[test]
fn a_state_saved_without_a_migration_is_loaded_by_one() {
    runtime().block_on(async {
        let Some(bare) = Bare::new(64 * MIB, Accel::Tcg).await else { return };
        let parent = bare.start(true).await;
        assert!(Counter::new(&parent).next().is_some());
        parent.qmp.stop().await.expect("stop");
        let first = memfd();
        parent.qmp.save_state(first.as_fd(), SOON).await.expect("saved");
        parent.qmp.cont().await.expect("cont");
        let lead = devices::lead(&content(&first)).expect("a known stream").to_vec();

        // One that is prepared and not used must not be taken for the next.
        let _unused = parent.qmp.prepare_devices(memfd().as_fd()).await.expect("prepared");
        for round in 0..3 {
            let written = memfd();
            let prepared = parent.qmp.prepare_devices(written.as_fd()).await.expect("prepared");
            parent.qmp.stop().await.expect("stop");
            parent.qmp.save_devices(&prepared, SOON).await.expect("saved");
            parent.qmp.end_devices(prepared).await.expect("closed");
            let written = content(&written);
            let rest = devices::rest(&written).expect("of a known form");
            let state = memfd();
            std::fs::File::from(state.try_clone().expect("fd"))
                .write_all_at(&[&lead, rest].concat(), 0)
                .expect("memory");
            // RAM is shared here, so only one of the two may go on.
            if round < 2 {
                parent.qmp.cont().await.expect("cont");
                assert!(Counter::new(&parent).next().is_some(), "goes on");
                continue;
            }
            let clone = bare.start(false).await;
            if let Err(error) = bare.load(&clone, &state).await {
                panic!("{}", clone.explain(error).await);
            }
            clone.qmp.cont().await.expect("cont");
            assert!(Counter::new(&clone).next().is_some(), "goes on");
        }
    });
}

fn content(file: &OwnedFd) -> Vec<u8> {
    let file = std::fs::File::from(file.try_clone().expect("fd"));
    let mut content =
        vec![0; usize::try_from(file.metadata().expect("memory").len()).expect("small")];
    file.read_exact_at(&mut content, 0).expect("memory");
    content
}
