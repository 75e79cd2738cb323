//! A minimal image, built from Debian's packages and booted under TCG, reaches its root file
//! system. A second build has nothing to do, and a third needs no network. What fails leaves
//! nothing behind.
//!
//! Takes a minute or two. Needs root, mmdebstrap, QEMU, a C compiler and, with a cold cache, the
//! network; says so and passes where they are missing. `VMFORK_TEST_CACHE` names a cache folder
//! that outlives the run.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vmfork_guest_image::{
    Artifacts, BuildError, BuildOptions, Cancel, ExtraFile, Progress, Remedy as _, Spec, Stage,
    Store, build,
};

/// Under TCG on a busy machine; 4 s on an idle one.
const BOOT_MAX: Duration = Duration::from_secs(120);

struct Bench {
    dir: tempfile::TempDir,
    cache: PathBuf,
    store: Store,
}

fn missing() -> Option<String> {
    let out = |program: &str, arg: &str| Command::new(program).arg(arg).output();
    for (program, arg) in [
        ("mmdebstrap", "--version"),
        ("mke2fs", "-V"),
        ("depmod", "--version"),
        ("gcc", "--version"),
        ("qemu-system-x86_64", "--version"),
    ] {
        if out(program, arg).is_err() {
            return Some(format!("{program} is not installed"));
        }
    }
    let id = out("id", "-u").ok()?;
    (id.stdout != b"0\n").then(|| "not root".to_owned())
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = std::env::var_os("VMFORK_TEST_CACHE")
            .map_or_else(|| dir.path().join("cache"), PathBuf::from);
        let store = Store::new(dir.path().join("images"));
        Self { dir, cache, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn stand_in(&self) -> Artifacts {
        let agent = self.path("stand-in");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in.c");
        let gcc =
            Command::new("gcc").args(["-static", "-O1", "-o"]).arg(&agent).arg(source).status();
        assert!(gcc.unwrap().success());
        let overlay = self.path("overlay");
        fs::create_dir_all(overlay.join("usr/include")).unwrap();
        fs::write(overlay.join("usr/include/vmfork.h"), "/* the header */\n").unwrap();
        Artifacts { agent, overlay: Some(overlay) }
    }

    fn options(&self, artifacts: Artifacts) -> BuildOptions {
        BuildOptions {
            name: "minimal".into(),
            cache_dir: self.cache.clone(),
            artifacts,
            refresh: false,
            cancel: Cancel::default(),
        }
    }

    fn hidden(&self) -> Vec<String> {
        let names = fs::read_dir(self.store.root()).into_iter().flatten().flatten();
        names
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .filter(|n| n.starts_with(".tmp-"))
            .collect()
    }
}

fn boot(folder: &Path, cmdline: &str) -> String {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg", "-m", "256", "-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-display", "none", "-serial", "stdio", "-append", cmdline])
        .arg("-kernel")
        .arg(folder.join("kernel"))
        .arg("-initrd")
        .arg(folder.join("initrd"))
        .arg("-drive")
        .arg(format!("file={},format=raw,if=virtio,readonly=on", folder.join("root.img").display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = qemu.spawn().unwrap();
    let stdout = child.stdout.take().unwrap();
    let (text_tx, text_rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut stdout = stdout;
        let mut bytes = Vec::new();
        let _ = std::io::Read::read_to_end(&mut stdout, &mut bytes);
        let _ = text_tx.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    let text = text_rx.recv_timeout(BOOT_MAX);
    let _ = child.kill();
    let _ = child.wait();
    text.expect("the guest ended in time")
}

/// Whether the guest has what the image was built with, and its kernel is quiet.
fn check_boot(folder: &Path, cmdline: &str) {
    let began = Instant::now();
    let console = boot(folder, cmdline);
    eprintln!("booted in {:.1} s", began.elapsed().as_secs_f64());
    for want in [
        "/etc/debian_version: 12",
        "/etc/hostname: vmfork",
        "/opt/extra/note: a note",
        "/usr/include/vmfork.h: /* the header */",
        "firstboot: 0",
        "/written: from firstboot",
        "STAND-IN: done",
    ] {
        assert!(console.contains(want), "no `{want}` in:\n{console}");
    }
    let kernel_talk =
        console.lines().take_while(|l| !l.contains("done")).find(|l| l.contains("] "));
    assert_eq!(kernel_talk, None, "the kernel was to be quiet:\n{console}");
}

/// Ctrl-C while packages are being fetched or installed leaves nothing behind.
fn check_cancel(bench: &Bench, spec: &Spec, options: &BuildOptions) {
    let refresh = BuildOptions { refresh: true, cancel: Cancel::default(), ..options.clone() };
    let cancel = refresh.cancel.clone();
    let result = build(spec, &bench.store, &refresh, &mut |news| {
        if matches!(news, Progress::Step { .. } | Progress::Stage(Stage::Download)) {
            cancel.cancel();
        }
    });
    assert!(matches!(result, Err(BuildError::Cancelled)), "{result:?}");
    assert!(bench.hidden().is_empty());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let dir = bench.dir.path().display().to_string();
    assert!(!mounts.contains(&dir), "still mounted:\n{mounts}");
}

#[test]
fn an_image_builds_boots_and_is_not_built_twice() {
    if let Some(why) = missing() {
        assert!(std::env::var_os("VMFORK_TEST_STRICT").is_none(), "{why}");
        eprintln!("SKIPPED: {why}");
        return;
    }
    let bench = Bench::new();
    fs::write(bench.path("note"), "a note\n").unwrap();
    let spec = Spec {
        files: vec![ExtraFile {
            from: bench.path("note"),
            to: "/opt/extra/note".into(),
            mode: Some("0600".into()),
        }],
        firstboot: Some("echo from firstboot > /written".into()),
        ..Spec::default()
    };
    let options = bench.options(bench.stand_in());
    let mut stages = Vec::new();
    let began = Instant::now();
    let built = build(&spec, &bench.store, &options, &mut |news| {
        if let Progress::Stage(stage) = news {
            eprintln!("{:6.1} s: {}", began.elapsed().as_secs_f64(), stage.label());
            stages.push(stage);
        }
    })
    .unwrap_or_else(|e| panic!("{e}: {e:?}"));
    eprintln!("built in {:.1} s: {stages:?}", began.elapsed().as_secs_f64());
    assert!(built.fresh && stages.is_sorted() && stages.ends_with(&[Stage::Store]), "{stages:?}");

    let folder = bench.store.open("minimal").unwrap().folder;
    for name in ["image.json", "kernel", "initrd", "root.img"] {
        let mode = fs::metadata(folder.join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "{name}");
    }
    assert!(bench.hidden().is_empty());

    check_boot(&folder, &built.metadata.cmdline);

    let again = build(&spec, &bench.store, &options, &mut |_| {}).unwrap();
    assert!(!again.fresh);
    assert_eq!(again.metadata, built.metadata);

    // From the cached base: other first boot command, no index read, same tree but for the command.
    let other = Spec { firstboot: None, ..spec.clone() };
    let mut stages = Vec::new();
    let warm = build(&other, &bench.store, &options, &mut |news| {
        if let Progress::Stage(stage) = news {
            stages.push(stage);
        }
    })
    .unwrap();
    assert!(warm.fresh);
    assert!(!stages.contains(&Stage::Index) && !stages.contains(&Stage::Download), "{stages:?}");
    let back = build(&spec, &bench.store, &options, &mut |_| {}).unwrap();
    assert_ne!(warm.metadata.tree_hash, back.metadata.tree_hash);
    assert_eq!(back.metadata.tree_hash, built.metadata.tree_hash);
    assert_eq!(back.metadata.files["initrd"], built.metadata.files["initrd"]);

    check_cancel(&bench, &spec, &options);
    assert_eq!(bench.store.metadata("minimal").unwrap(), back.metadata);

    // A package that is nowhere is named.
    let wrong = Spec { packages: vec!["vmfork-no-such-package".into()], ..spec };
    let error = build(&wrong, &bench.store, &options, &mut |_| {}).unwrap_err();
    assert_eq!(error.to_string(), "Debian bookworm has no package named `vmfork-no-such-package`");
    assert!(error.remedy().is_some());
    assert!(bench.hidden().is_empty());
}
