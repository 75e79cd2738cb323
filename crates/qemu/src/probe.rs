//! Which QEMU is installed, and whether KVM is of use.

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use crate::shape::Accel;

/// The program's name in `PATH`.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// The oldest that works.
pub const OLDEST: Version = Version { major: 7, minor: 2, micro: 0 };
/// Those that were tried: major and minor.
const TRIED: [(u32, u32); 2] = [(7, 2), (10, 0)];
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// A QEMU version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

impl Version {
    /// From the first line of `--version`.
    fn parse(text: &str) -> Option<Self> {
        let words = text.strip_prefix("QEMU emulator version ")?;
        let number = words.split([' ', '\n']).next()?;
        let mut parts = number.split(['.', '-']).map(str::parse);
        let mut next = || parts.next()?.ok();
        let (major, minor) = (next()?, next()?);
        Some(Self { major, minor, micro: next().unwrap_or(0) })
    }

    /// A sentence if this version works as far as anybody knows, but was not tried.
    pub fn warning(&self) -> Option<String> {
        let known = TRIED.contains(&(self.major, self.minor));
        (!known).then(|| format!("QEMU {self} was not tried with vmfork; 7.2 and 10.0 were"))
    }
}

/// An installed QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    pub path: PathBuf,
    pub version: Version,
    /// Folders that QEMU looks for its firmware in before its own (`-L`). Mostly empty.
    pub firmware: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("no {PROGRAM} in PATH; install the package qemu-system-x86")]
    NotFound,
    #[error("{path} can't be run as QEMU")]
    NotRunnable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} --version does not answer as QEMU does: {answer:?}")]
    NotQemu { path: PathBuf, answer: String },
    #[error("{path} is QEMU {version}; vmfork needs {OLDEST} or later")]
    TooOld { path: PathBuf, version: Version },
}

/// Find QEMU: the configured path, or the first in `PATH`. A version is asked for once per file and
/// change of it.
///
/// # Errors
/// [`ProbeError`].
pub async fn find(configured: Option<&Path>) -> Result<Binary, ProbeError> {
    let path = match configured {
        Some(path) => path.to_owned(),
        None => in_path(env::var_os("PATH").unwrap_or_default().as_os_str())
            .ok_or(ProbeError::NotFound)?,
    };
    let version = version_of(&path).await?;
    if version < OLDEST {
        return Err(ProbeError::TooOld { path, version });
    }
    Ok(Binary { path, version, firmware: Vec::new() })
}

fn in_path(folders: &std::ffi::OsStr) -> Option<PathBuf> {
    let runs = |path: &PathBuf| {
        fs::metadata(path)
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    env::split_paths(folders).map(|folder| folder.join(PROGRAM)).find(runs)
}

type Known = HashMap<(PathBuf, SystemTime), Version>;

async fn version_of(path: &Path) -> Result<Version, ProbeError> {
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let not_runnable = |source| ProbeError::NotRunnable { path: path.to_owned(), source };
    let changed = fs::metadata(path).and_then(|meta| meta.modified()).map_err(not_runnable)?;
    let key = (path.to_owned(), changed);
    if let Some(version) = KNOWN.lock().get(&key) {
        return Ok(*version);
    }
    let command = tokio::process::Command::new(path)
        .arg("--version")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(VERSION_TIMEOUT, command)
        .await
        .map_err(|_| not_runnable(io::ErrorKind::TimedOut.into()))?
        .map_err(not_runnable)?;
    let answer = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = Version::parse(&answer).ok_or_else(|| ProbeError::NotQemu {
        path: path.to_owned(),
        answer: answer.chars().take(200).collect(),
    })?;
    KNOWN.lock().insert(key, version);
    Ok(version)
}

/// An accelerator and why it was chosen, as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccelChoice {
    pub accel: Accel,
    pub reason: String,
}

/// KVM was insisted on and isn't there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("KVM can't be used: {reason}")]
pub struct NoKvm {
    pub reason: String,
}

/// What the host says about KVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvmFacts {
    /// Opening `/dev/kvm` for reading and writing: `Err` holds the reason.
    pub device: Result<(), String>,
    /// Modules below `/sys/module` whose names begin with `kvm`.
    pub modules: Vec<String>,
}

impl KvmFacts {
    /// Of this host.
    pub fn gather() -> Self {
        let device = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
        let names = fs::read_dir("/sys/module").into_iter().flatten().flatten();
        let mut modules: Vec<String> = names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.starts_with("kvm"))
            .collect();
        modules.sort();
        Self { device: device.map(drop).map_err(|e| e.to_string()), modules }
    }

    /// KVM runs stock kernels at full speed here, or the reason why not.
    ///
    /// The device alone proves nothing: with the backend `kvm_pvm` it opens, and interprets a stock
    /// kernel at about a million instructions a second.
    fn usable(&self) -> Result<&str, String> {
        if let Err(reason) = &self.device {
            return Err(format!("/dev/kvm does not open: {reason}"));
        }
        let hardware = self.modules.iter().find(|m| ["kvm_intel", "kvm_amd"].contains(&m.as_str()));
        hardware.map(String::as_str).ok_or_else(|| {
            let others: Vec<&str> =
                self.modules.iter().map(String::as_str).filter(|m| *m != "kvm").collect();
            let found = match others.as_slice() {
                [] => "no other KVM module".to_owned(),
                others => others.join(", "),
            };
            format!(
                "neither kvm_intel nor kvm_amd is loaded ({found}), so stock kernels would be far too slow"
            )
        })
    }
}

/// The model of a guest's processor under KVM: the host's own. Without `arch-capabilities`, which
/// is Intel's, where the host is not Intel. KVM offers it there all the same, but not all of its
/// backends take it, and then QEMU ends. (QEMU leaves it out itself from 10.1 on.)
pub(crate) fn kvm_cpu() -> &'static str {
    static MODEL: LazyLock<&str> =
        LazyLock::new(|| kvm_cpu_of(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()));
    *MODEL
}

fn kvm_cpu_of(cpuinfo: &str) -> &'static str {
    let vendor =
        cpuinfo.lines().find_map(|line| line.strip_prefix("vendor_id")?.split(": ").nth(1));
    match vendor {
        None | Some("GenuineIntel") => "host",
        Some(_) => "host,arch-capabilities=off",
    }
}

/// Choose. `wanted`: the user insists on one. KVM that is insisted on needs the device only: small
/// guests of their own kind run on any backend.
///
/// # Errors
/// [`NoKvm`] if KVM is wanted and its device doesn't open.
pub fn choose_accel(wanted: Option<Accel>, facts: &KvmFacts) -> Result<AccelChoice, NoKvm> {
    let choice = |accel, reason| Ok(AccelChoice { accel, reason });
    match (wanted, facts.usable()) {
        (Some(Accel::Tcg), _) => choice(Accel::Tcg, "TCG as asked for".to_owned()),
        (Some(Accel::Kvm), Ok(_)) => choice(Accel::Kvm, "KVM as asked for".to_owned()),
        (Some(Accel::Kvm), Err(reason)) => match facts.device {
            Ok(()) => choice(Accel::Kvm, format!("KVM as asked for, although {reason}")),
            Err(_) => Err(NoKvm { reason }),
        },
        (None, Ok(module)) => {
            choice(Accel::Kvm, format!("KVM: /dev/kvm opens and {module} is loaded"))
        }
        (None, Err(reason)) => choice(Accel::Tcg, format!("TCG, since {reason}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(device: Result<(), &str>, modules: &[&str]) -> KvmFacts {
        let modules = modules.iter().map(|&m| m.to_owned()).collect();
        KvmFacts { device: device.map_err(str::to_owned), modules }
    }

    #[test]
    fn what_is_intels_is_not_asked_of_others() {
        let of = |vendor| {
            kvm_cpu_of(&format!("processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 6\n"))
        };
        assert_eq!(of("GenuineIntel"), "host");
        assert_eq!(of("AuthenticAMD"), "host,arch-capabilities=off");
        assert_eq!(kvm_cpu_of(""), "host");
    }

    #[test]
    fn versions_are_read_as_distributions_write_them() {
        let version = |text| Version::parse(text).map(|v| v.to_string());
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright";
        assert_eq!(version(debian).as_deref(), Some("7.2.22"));
        assert_eq!(version("QEMU emulator version 10.0.2\n").as_deref(), Some("10.0.2"));
        assert_eq!(version("QEMU emulator version 9.1\n").as_deref(), Some("9.1.0"));
        let candidate = "QEMU emulator version 11.0.0-rc1";
        assert_eq!(version(candidate).as_deref(), Some("11.0.0"));
        assert_eq!(version("busybox"), None);
    }

    #[test]
    fn versions_not_tried_are_said_so() {
        let warning = |major, minor| Version { major, minor, micro: 1 }.warning();
        assert_eq!((warning(7, 2), warning(10, 0)), (None, None));
        assert_eq!(
            warning(9, 1).as_deref(),
            Some("QEMU 9.1.1 was not tried with vmfork; 7.2 and 10.0 were")
        );
    }

    #[test]
    fn a_device_that_opens_is_not_enough_for_kvm() {
        let pvm = facts(Ok(()), &["kvm", "kvm_pvm"]);
        let choice = choose_accel(None, &pvm).expect("TCG is always there");
        assert_eq!(choice.accel, Accel::Tcg);
        assert_eq!(
            choice.reason,
            "TCG, since neither kvm_intel nor kvm_amd is loaded (kvm_pvm), so stock kernels would be far too slow"
        );
        assert_eq!(choose_accel(Some(Accel::Kvm), &pvm).expect("insisted").accel, Accel::Kvm);
    }

    #[test]
    fn kvm_is_chosen_where_hardware_serves_it() {
        let intel = facts(Ok(()), &["kvm", "kvm_intel"]);
        let choice = choose_accel(None, &intel).expect("there");
        assert_eq!(
            (choice.accel, choice.reason.as_str()),
            (Accel::Kvm, "KVM: /dev/kvm opens and kvm_intel is loaded")
        );
        assert_eq!(choose_accel(Some(Accel::Tcg), &intel).expect("asked").accel, Accel::Tcg);
    }

    #[test]
    fn insisting_on_kvm_without_its_device_is_an_error() {
        let none = facts(Err("No such file or directory (os error 2)"), &[]);
        assert_eq!(
            choose_accel(Some(Accel::Kvm), &none).expect_err("no device").to_string(),
            "KVM can't be used: /dev/kvm does not open: No such file or directory (os error 2)"
        );
        assert_eq!(choose_accel(None, &none).expect("TCG").accel, Accel::Tcg);
    }

    #[tokio::test]
    async fn what_is_not_qemu_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join(PROGRAM);
        fs::write(&path, "#!/bin/sh\necho QEMU emulator version 6.2.0\n").expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
        assert_eq!(in_path(folder.path().as_os_str()), Some(path.clone()));
        let error = find(Some(&path)).await.expect_err("too old").to_string();
        assert_eq!(error, format!("{} is QEMU 6.2.0; vmfork needs 7.2.0 or later", path.display()));
        let error = find(Some(Path::new("/bin/true"))).await.expect_err("not QEMU").to_string();
        assert!(error.contains("does not answer as QEMU does"), "{error}");
        let error = find(Some(Path::new("/nonexistent"))).await.expect_err("absent").to_string();
        assert_eq!(error, "/nonexistent can't be run as QEMU");
    }
}
