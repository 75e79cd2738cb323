//! The base of an image: Debian's minimal system and the packages asked for, as a tar file. The
//! kernel's package is beside it. mmdebstrap makes it. The cache keeps it under the hash of what
//! was asked for. So the next image of that kind needs neither network nor the half minute.
//!
//! ```text
//!   <cache>/base/HASH/{root.tar, kernel.deb, epoch}
//!   <cache>/archives/*.deb     for the next base with other packages
//! ```

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::apt;
use crate::error::BuildError;
use crate::process::{self, Cancel, RunError};
use crate::progress::{OutputReader, Progress};
use crate::remedy::AtPath as _;
use crate::spec::Spec;
use crate::store::Shelf;
use crate::tree::Tree;

/// A slow line and a thousand packages; not forever.
const MMDEBSTRAP_MAX: Duration = Duration::from_secs(3600);
const TAR_MAX: Duration = Duration::from_secs(900);
/// Unpacked tree, its tar and the downloads of an image with a few large packages.
pub(crate) const NEED_BYTES: u64 = 1536 << 20;
/// Base systems unused for this time leave the cache.
const KEEP: Duration = Duration::from_secs(60 * 24 * 3600);

/// A base in the cache.
#[derive(Debug)]
pub(crate) struct Base {
    folder: PathBuf,
    /// Date of the archive's index: no file in the image is younger.
    pub(crate) epoch_s: i64,
}

impl Base {
    pub(crate) fn kernel_package(&self) -> PathBuf {
        self.folder.join("kernel.deb")
    }

    /// Unpack the root file system into the new folder `to`.
    pub(crate) fn unpack(&self, to: &Path, cancel: &Cancel) -> Result<(), BuildError> {
        fs::create_dir(to).map_err(BuildError::io("make", to))?;
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--numeric-owner", "--same-owner", "--preserve-permissions"])
            .args(["--xattrs", "--xattrs-include=*", "--file"])
            .arg(self.folder.join("root.tar"))
            .arg("--directory")
            .arg(to);
        let mut quiet = |_: &str| {};
        process::run(tar, cancel, TAR_MAX, &mut quiet)
            .map_err(|e| tool_error("unpack the base system", e, to, NEED_BYTES))
    }

    fn open(folder: PathBuf) -> Option<Self> {
        let text = fs::read_to_string(folder.join("epoch")).ok()?;
        let epoch_s = text.trim().parse().ok().filter(|s| *s > 0)?;
        let whole = folder.join("root.tar").is_file() && folder.join("kernel.deb").is_file();
        whole.then_some(Self { folder, epoch_s })
    }
}

/// The base for `spec`, from the cache if it is there and `refresh` is not asked for.
pub(crate) fn ensure(
    spec: &Spec,
    cache_dir: &Path,
    refresh: bool,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<Base, BuildError> {
    let shelf = Shelf::new(cache_dir.join("base"));
    let name = spec.base_hash().to_hex().to_string();
    if !refresh && let Some(base) = Base::open(shelf.path(&name)) {
        touch(&base.folder);
        progress(Progress::Note("base system taken from the cache".into()));
        return Ok(base);
    }
    let staging = shelf.stage(&name)?;
    check_room(cache_dir, NEED_BYTES)?;
    make(spec, cache_dir, staging.path(), cancel, progress)?;
    shelf.commit(staging, &name)?;
    prune(&shelf, &name);
    Base::open(shelf.path(&name)).ok_or_else(|| {
        BuildError::io("read back", shelf.path(&name))(io::ErrorKind::InvalidData.into())
    })
}

fn make(
    spec: &Spec,
    cache_dir: &Path,
    out: &Path,
    cancel: &Cancel,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), BuildError> {
    let absolute = |path: &Path| std::path::absolute(path).map_err(BuildError::io("find", path));
    let out = absolute(out)?;
    let archives = absolute(&cache_dir.join("archives"))?;
    fs::create_dir_all(&archives).map_err(BuildError::io("make", &archives))?;
    let before = script(&out, "before-install", include_str!("hooks/before-install.sh"))?;
    let after = script(&out, "after-install", include_str!("hooks/after-install.sh"))?;
    let root = out.join("root");
    // mmdebstrap leaves its key rings behind when it is stopped; it keeps this from what it runs
    // inside.
    let temporary = out.join("tmp");
    fs::create_dir_all(&temporary).map_err(BuildError::io("make", &temporary))?;

    let mut command = Command::new("mmdebstrap");
    command
        .env("LC_ALL", "C")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("VMFORK_OUT", &out)
        .env("VMFORK_ARCHIVES", &archives)
        .env("VMFORK_KERNEL", &spec.kernel)
        .env("TMPDIR", &temporary)
        .args(["--mode=root", "--format=directory", "--variant=minbase", "--verbose"])
        .args(["--skip=essential/unlink", "--skip=cleanup/apt/lists"])
        .arg("--aptopt=APT::Keep-Downloaded-Packages \"true\"")
        .arg("--aptopt=Acquire::Retries \"2\"")
        .arg("--aptopt=Acquire::http::Timeout \"30\"")
        // Examples stay: they are what the demonstration works on.
        .arg("--dpkgopt=path-exclude=/usr/share/man/*")
        .arg("--dpkgopt=path-exclude=/usr/share/info/*")
        .arg("--dpkgopt=path-exclude=/usr/share/locale/*")
        .arg("--dpkgopt=path-exclude=/usr/share/doc/*")
        .arg("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        .arg("--dpkgopt=path-include=/usr/share/doc/*/examples/*")
        .arg(format!("--setup-hook={} \"$1\"", quote(&before)))
        .arg(format!("--customize-hook={} \"$1\"", quote(&after)));
    for line in apt::host_transport(cancel) {
        command.arg(format!("--aptopt={line}"));
    }
    let packages = spec.sorted_packages();
    if !packages.is_empty() {
        command.arg(format!("--include={}", packages.join(",")));
    }
    command.arg(&spec.suite).arg(&root);
    if let Some(mirror) = &spec.mirror {
        command.arg(mirror);
    } else {
        let sources = apt::host_sources(Path::new("/etc/apt"), &spec.suite);
        if sources.is_empty() {
            return Err(BuildError::NoSources { suite: spec.suite.clone() });
        }
        let path = out.join("debian.sources");
        fs::write(&path, sources).map_err(BuildError::io("write", &path))?;
        command.arg(path);
    }

    let mut reader = OutputReader::default();
    let mut trouble = Trouble::default();
    process::run_sealed(command, cancel, MMDEBSTRAP_MAX, &mut |line| {
        trouble.line(line);
        reader.line(line, progress);
    })
    .map_err(|e| trouble.explain(e, spec, &out))?;
    progress(Progress::Step { done: 0, total: None, what: "packing the base system".into() });
    finish(&out, &root, cancel)
}

/// Tidy the tree, pack it, and leave only what belongs into the cache.
fn finish(out: &Path, root: &Path, cancel: &Cancel) -> Result<(), BuildError> {
    let path = out.join("epoch");
    let epoch = fs::read_to_string(&path).map_err(BuildError::io("read", &path))?;
    let epoch_s: i64 = epoch
        .trim()
        .parse()
        .map_err(|_| BuildError::io("read", path)(io::ErrorKind::InvalidData.into()))?;
    Tree::open(root).and_then(|t| tidy(&t, epoch_s)).map_err(BuildError::io("tidy", root))?;
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--numeric-owner", "--xattrs", "--xattrs-include=*"])
        .arg(format!("--mtime=@{epoch_s}"))
        .args(["--clamp-mtime", "--file"])
        .arg(out.join("root.tar"))
        .arg("--directory")
        .arg(root)
        .arg(".");
    process::run(tar, cancel, TAR_MAX, &mut |_| {})
        .map_err(|e| tool_error("pack the base system", e, out, NEED_BYTES))?;

    let kernels = out.join("kernel");
    let kernel = fs::read_dir(&kernels)
        .map_err(BuildError::io("read", &kernels))?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| BuildError::Kernel { what: "package file".into() })?;
    let to = out.join("kernel.deb");
    fs::rename(&kernel, &to).map_err(BuildError::io("move", &kernel))?;
    for folder in [kernels, root.to_owned(), out.join("tmp")] {
        fs::remove_dir_all(&folder).map_err(BuildError::io("remove", &folder))?;
    }
    for file in ["before-install", "after-install", "debian.sources"] {
        match fs::remove_file(out.join(file)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(BuildError::io("remove", out.join(file))(e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Remove what belongs to the build: identity, logs, caches, today's dates.
fn tidy(tree: &Tree, epoch_s: i64) -> io::Result<()> {
    for file in [
        "/etc/apt/apt.conf.d/99mmdebstrap", // the host's proxies
        "/etc/resolv.conf",
        "/var/lib/dbus/machine-id",
        "/var/lib/systemd/random-seed",
        "/var/cache/ldconfig/aux-cache",
        "/var/cache/apt/pkgcache.bin",
        "/var/cache/apt/srcpkgcache.bin",
        "/etc/.pwd.lock",
    ] {
        tree.remove(Path::new(file))?;
    }
    for folder in ["/var/lib/apt/lists", "/var/log", "/var/log/apt", "/var/cache/debconf"] {
        for name in tree.names(Path::new(folder))? {
            let path = Path::new(folder).join(&name);
            let is_log = folder.starts_with("/var/log") && tree.read(&path).is_ok();
            let is_list = folder == "/var/lib/apt/lists" && name.contains("_dists_");
            if is_log || is_list || name.ends_with("-old") {
                tree.remove(&path)?;
            }
        }
    }
    for folder in ["/etc", "/var/lib/dpkg"] {
        for name in tree.names(Path::new(folder))? {
            if name.ends_with("-old") || (folder == "/etc" && name.ends_with('-')) {
                tree.remove(&Path::new(folder).join(name))?;
            }
        }
    }
    tree.write(Path::new("/etc/machine-id"), b"", 0o444)?;
    tree.write(Path::new("/etc/hostname"), b"vmfork\n", 0o644)?;
    let hosts = b"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";
    tree.write(Path::new("/etc/hosts"), hosts, 0o644)?;
    if let Some(shadow) = tree.read(Path::new("/etc/shadow"))? {
        let days = (epoch_s / 86_400).to_string();
        let gid = 42; // shadow's number is fixed by base-passwd
        tree.write(Path::new("/etc/shadow"), with_days(&shadow, &days).as_bytes(), 0o640)?;
        tree.chown(Path::new("/etc/shadow"), 0, gid)?;
    }
    Ok(())
}

/// The third field of each line is the day on which the password changed: that of the build.
fn with_days(shadow: &str, days: &str) -> String {
    let mut text = String::new();
    for line in shadow.lines() {
        let mut fields: Vec<&str> = line.split(':').collect();
        if fields.len() > 2 && !fields[2].is_empty() {
            fields[2] = days;
        }
        text.push_str(&fields.join(":"));
        text.push('\n');
    }
    text
}

fn script(out: &Path, name: &str, text: &str) -> Result<PathBuf, BuildError> {
    let path = out.join(name);
    fs::write(&path, text)
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
        .map_err(BuildError::io("write", &path))?;
    Ok(path)
}

fn quote(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

/// The cause of a failure according to the output: the exit code does not tell.
#[derive(Debug, Default)]
struct Trouble {
    unknown_package: Option<String>,
    network: Option<String>,
    keyring: Option<String>,
    full: bool,
}

impl Trouble {
    fn line(&mut self, line: &str) {
        if let Some((_, package)) = line.split_once("Unable to locate package ") {
            self.unknown_package.get_or_insert_with(|| package.trim().to_owned());
        } else if let Some(package) = line
            .strip_prefix("E: Package '")
            .and_then(|r| r.split_once("' has no installation candidate"))
            .map(|(package, _)| package)
        {
            self.unknown_package.get_or_insert_with(|| package.to_owned());
        } else if line.contains("No space left on device")
            || line.contains("You don't have enough free space")
        {
            self.full = true;
        } else if line.contains("NO_PUBKEY") || line.contains("is not signed") {
            self.keyring.get_or_insert_with(|| line.trim().to_owned());
        } else if [
            "Could not resolve",
            "Temporary failure resolving",
            "Could not connect",
            "Failed to fetch",
            "Connection failed",
            "Unable to connect",
        ]
        .iter()
        .any(|m| line.contains(m))
        {
            self.network.get_or_insert_with(|| line.trim().to_owned());
        }
    }

    fn explain(self, error: RunError, spec: &Spec, out: &Path) -> BuildError {
        if !matches!(error, RunError::Failed { .. }) {
            return tool_error("install the base system", error, out, NEED_BYTES);
        }
        if self.full {
            disk_full(out, NEED_BYTES)
        } else if let Some(package) = self.unknown_package {
            BuildError::UnknownPackage { package, suite: spec.suite.clone() }
        } else if let Some(detail) = self.keyring {
            BuildError::Keyring { detail }
        } else if let Some(detail) = self.network {
            BuildError::NoNetwork { detail }
        } else {
            tool_error("install the base system", error, out, NEED_BYTES)
        }
    }
}

/// A program's failure in the words of a build.
pub(crate) fn tool_error(
    action: &'static str,
    error: RunError,
    path: &Path,
    need_bytes: u64,
) -> BuildError {
    match error {
        RunError::Cancelled => BuildError::Cancelled,
        RunError::NotFound { program } => {
            let package = package_of(&program);
            BuildError::MissingTool { program, package }
        }
        RunError::Failed { ref tail, .. }
            if tail.iter().any(|l| l.contains("No space left on device")) =>
        {
            disk_full(path, need_bytes)
        }
        source => BuildError::Tool { action, source },
    }
}

/// The Debian package that brings `program`.
pub(crate) fn package_of(program: &str) -> &'static str {
    match program {
        "mke2fs" => "e2fsprogs",
        "depmod" => "kmod",
        "dpkg-deb" => "dpkg",
        "xz" => "xz-utils",
        "zstd" => "zstd",
        "tar" => "tar",
        "setpriv" | "unshare" => "util-linux",
        _ => "mmdebstrap",
    }
}

/// Refuse early what cannot fit.
pub(crate) fn check_room(folder: &Path, need_bytes: u64) -> Result<(), BuildError> {
    let free_bytes = free_bytes(folder).map_err(BuildError::io("look at", folder))?;
    if free_bytes < need_bytes {
        return Err(BuildError::DiskFull { path: folder.into(), free_bytes, need_bytes });
    }
    Ok(())
}

fn disk_full(path: &Path, need_bytes: u64) -> BuildError {
    let free_bytes = free_bytes(path).unwrap_or(0);
    BuildError::DiskFull { path: path.into(), free_bytes, need_bytes }
}

fn free_bytes(folder: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

fn touch(path: &Path) {
    // Only the pruning of the cache looks at it.
    let _ = File::open(path).and_then(|f| f.set_modified(SystemTime::now()));
}

/// Remove base systems from the cache that were unused for [`KEEP`].
fn prune(shelf: &Shelf, except: &str) {
    let old = |path: &Path| {
        let age = fs::metadata(path).and_then(|m| m.modified()).map(|t| t.elapsed());
        matches!(age, Ok(Ok(age)) if age > KEEP)
    };
    for name in shelf.names().unwrap_or_default() {
        if name != except && old(&shelf.path(&name)) {
            let _ = shelf.remove(&name);
        }
    }
    let archives = shelf.path("../archives");
    for entry in fs::read_dir(archives).into_iter().flatten().flatten() {
        if old(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(lines: &[&str]) -> String {
        let mut trouble = Trouble::default();
        lines.iter().for_each(|l| trouble.line(l));
        let status = std::os::unix::process::ExitStatusExt::from_raw(256);
        let error = RunError::Failed { program: "mmdebstrap".into(), status, tail: Vec::new() };
        trouble.explain(error, &Spec::default(), Path::new("/")).to_string()
    }

    #[test]
    fn the_cause_is_read_from_the_output() {
        assert_eq!(
            explained(&["E: Unable to locate package nosuch", "E: apt-get failed"]),
            "Debian bookworm has no package named `nosuch`"
        );
        assert_eq!(
            explained(&["  Temporary failure resolving 'x.test'"]),
            "the package archive cannot be reached: Temporary failure resolving 'x.test'"
        );
        assert!(explained(&["cp: write: No space left on device"]).starts_with("not enough space"));
        assert_eq!(explained(&["?"]), "install the base system");
    }

    #[test]
    fn shadow_tells_nothing_of_the_day_of_the_build() {
        assert_eq!(
            with_days("root:*:20000:0:99999:7:::\nx::\n", "7"),
            "root:*:7:0:99999:7:::\nx::\n"
        );
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused_with_figures() {
        let error = check_room(Path::new("/"), u64::MAX).unwrap_err().to_string();
        assert!(error.contains("MiB free, about 17592186044415 MiB needed"), "{error}");
    }
}
