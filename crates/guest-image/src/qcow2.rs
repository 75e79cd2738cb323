//! qcow2 files, converted to raw ones by `qemu-img`. Their content is not trusted: a guest may have
//! written it.
//!
//! Promises: what leads out of the file is refused: a backing file, a data file, a key. So is one
//! that is damaged or cut off, which `qemu-img` would complete with zeros. `qemu-img` runs in
//! namespaces of its own (bubblewrap), without a capability. There it sees `/usr`, the file and the
//! target; no network, and no other process. What it writes and says is bounded.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::OFlags;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::process::{self, Cancel, RunError};
use crate::remedy::{AtPath as _, PathError, Remedy};

/// What a qcow2 file begins with.
const MAGIC: &[u8] = b"QFI\xfb";
/// The part of the header that matters.
const HEADER_BYTES: u64 = 104;
/// Bits of its incompatible features.
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
/// Its tables are read in a moment; a network file system may take longer.
const ASK_LIMIT: Duration = Duration::from_secs(300);
/// What is kept of what it says.
const SAID_BYTES_MAX: usize = 64 << 10;
const CONVERT_LIMIT: Duration = Duration::from_secs(3600);
/// Bounds what `qemu-img` takes for tables that the file describes.
const ADDRESS_SPACE: &str = "--as=4294967296";
const DISK_BYTES: u64 = 512;
/// Paths in the sandbox.
const SOURCE: &str = "/source";
const TARGET: &str = "/target";

/// A qcow2 file that can't be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Qcow2Error {
    #[error("{} is not a qcow2 file", path.display())]
    Other { path: PathBuf },
    /// It leads out of the file, or lost something.
    #[error("{} {flaw}", path.display())]
    Refused { path: PathBuf, flaw: Flaw },
    #[error(
        "{} is a disk of {bytes} bytes: use one of {min} to {max}, in steps of 512",
        path.display()
    )]
    Range { path: PathBuf, bytes: u64, min: u64, max: u64 },
    #[error("{} has {bytes} bytes of data, and {free} are free here", path.display())]
    Full { path: PathBuf, bytes: u64, free: u64 },
    #[error("`qemu-img {command}` says nothing that can be read of {}", path.display())]
    Unreadable {
        path: PathBuf,
        command: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("convert {}", path.display())]
    Run {
        path: PathBuf,
        #[source]
        source: RunError,
    },
    #[error(transparent)]
    Path(#[from] PathError),
}

/// What is wrong with a qcow2 file, for `FILE {flaw}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    #[error("lies on a backing file, which may be any file")]
    Backing,
    #[error("has its data in another file, which may be any file")]
    DataFile,
    #[error("is encrypted")]
    Encrypted,
    #[error("is damaged, or cut off")]
    Damaged,
}

impl Remedy for Qcow2Error {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::Other { .. } => Some("a raw file is named without `qcow2`".into()),
            Self::Refused { flaw, .. } => Some(
                match flaw {
                    Flaw::Backing | Flaw::DataFile => {
                        "if you trust it and what it names, make a whole one of it: \
                         `qemu-img convert -O qcow2 OLD NEW`"
                    }
                    Flaw::Encrypted => "decrypt it where the key is, with `qemu-img convert`",
                    Flaw::Damaged => "copy it again, or restore it",
                }
                .into(),
            ),
            Self::Range { .. } | Self::Unreadable { .. } => None,
            Self::Full { .. } => Some("free space on the file system of the state folder".into()),
            Self::Run { source: RunError::NotFound { .. }, .. } => {
                Some("`apt-get install qemu-utils bubblewrap`".into())
            }
            Self::Run { source: RunError::TimedOut { .. }, .. } => {
                Some("convert it beforehand: `qemu-img convert -O raw OLD NEW`".into())
            }
            Self::Run { .. } => None,
            Self::Path(error) => error.remedy(),
        }
    }
}

/// What a converted disk may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Lengths of disks.
    pub min_bytes: u64,
    pub max_bytes: u64,
    /// What may be written to the target's file system.
    pub free_bytes: u64,
}

/// What the header tells, by QEMU's `docs/interop/qcow2.txt`.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    /// Length of the disk.
    bytes: u64,
    cluster_bytes: u64,
    refused: Option<Flaw>,
}

impl Header {
    /// `None`: it is none.
    fn parse(head: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(head.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_be_bytes(head.get(at..at + 8)?.try_into().ok()?));
        if !head.starts_with(MAGIC) {
            return None;
        }
        let (version, backing_offset, bytes, crypt) = (word(4)?, long(8)?, long(24)?, word(32)?);
        // Version 2 has none.
        let features = if version >= 3 { long(72)? } else { 0 };
        let cluster_bytes = 1_u64.checked_shl(word(20)?)?;
        let refused = [
            (backing_offset != 0, Flaw::Backing),
            (features & DATA_FILE != 0, Flaw::DataFile),
            (crypt != 0, Flaw::Encrypted),
            (features & CORRUPT != 0, Flaw::Damaged),
        ];
        let refused = refused.into_iter().find_map(|(is_so, flaw)| is_so.then_some(flaw));
        Some(Self { bytes, cluster_bytes, refused })
    }
}

/// `qemu-img check`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Check {
    #[serde(default)]
    allocated_clusters: u64,
    #[serde(default)]
    corruptions: u64,
    check_errors: u64,
}

/// A regular file, opened for reading without waiting for a writer.
fn open(path: &Path) -> Result<File, PathError> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let opened = File::options().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(PathError::io("open", path))?;
    let is_file = file.metadata().map_err(PathError::io("look at", path))?.is_file();
    let other = || io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file");
    if is_file { Ok(file) } else { Err(PathError::io("read", path)(other())) }
}

fn head(file: &File, path: &Path) -> Result<Vec<u8>, PathError> {
    let mut head = Vec::new();
    let mut part = file.take(HEADER_BYTES);
    part.read_to_end(&mut head).map_err(PathError::io("read", path))?;
    Ok(head)
}

/// Write what the disk in a qcow2 file holds to `to`, which is there, as a raw file with holes.
/// Blocks for as long as that takes: an hour at most.
///
/// # Errors
/// [`Qcow2Error`]; what is in `to` is of no use then.
pub fn convert(from: &Path, to: &Path, bounds: Bounds, cancel: &Cancel) -> Result<(), Qcow2Error> {
    let path = || from.to_owned();
    let file = open(from)?;
    let header = Header::parse(&head(&file, from)?);
    let header = header.ok_or_else(|| Qcow2Error::Other { path: path() })?;
    let Header { bytes, cluster_bytes, refused } = header;
    if let Some(flaw) = refused {
        return Err(Qcow2Error::Refused { path: path(), flaw });
    }
    let Bounds { min_bytes: min, max_bytes: max, free_bytes: free } = bounds;
    if !(min..=max).contains(&bytes) || !bytes.is_multiple_of(DISK_BYTES) {
        return Err(Qcow2Error::Range { path: path(), bytes, min, max });
    }
    // It finds what is cut off, but for less than a cluster.
    let found: Check = ask(from, "check", cancel)?;
    if found.corruptions > 0 || found.check_errors > 0 {
        return Err(Qcow2Error::Refused { path: path(), flaw: Flaw::Damaged });
    }
    let data = found.allocated_clusters.saturating_mul(cluster_bytes).min(bytes);
    if data > free {
        return Err(Qcow2Error::Full { path: path(), bytes: data, free });
    }
    let target = File::options().write(true).open(to).map_err(PathError::io("open", to))?;
    target.set_len(0).and_then(|()| target.set_len(bytes)).map_err(PathError::io("write", to))?;
    let options = ["-n", "--target-is-zero", "-f", "qcow2", "-O", "raw", SOURCE, TARGET];
    let command = sandboxed(from, Some((to, bytes)), "convert", &options)?;
    let ran = process::run(command, cancel, CONVERT_LIMIT, &mut |_line| ());
    ran.map_err(|source| Qcow2Error::Run { path: path(), source })
}

/// What `qemu-img` says of it: its last words, since a finding of `check` is a line before them.
fn ask<T: DeserializeOwned>(
    from: &Path,
    what: &'static str,
    cancel: &Cancel,
) -> Result<T, Qcow2Error> {
    let command = sandboxed(from, None, what, &["-f", "qcow2", "--output=json", SOURCE])?;
    let (path, mut said) = (|| from.to_owned(), String::new());
    let ran = process::run(command, cancel, ASK_LIMIT, &mut |line| {
        if said.len() > SAID_BYTES_MAX {
            said.clear();
        }
        said.push_str(line);
    });
    match ran {
        Ok(()) => {}
        Err(RunError::Failed { status, .. }) if status.code().is_some_and(is_finding) => {}
        Err(source) => return Err(Qcow2Error::Run { path: path(), source }),
    }
    let json = said.rfind('{').and_then(|at| said.get(at..)).unwrap_or_default();
    serde_json::from_str(json).map_err(|source| Qcow2Error::Unreadable {
        path: path(),
        command: what,
        source,
    })
}

/// Exit codes of `qemu-img check` that tell what it found: damage, clusters that are lost.
fn is_finding(exit_code: i32) -> bool {
    matches!(exit_code, 2 | 3)
}

/// `qemu-img` with nothing around it but the files. It is root without any right of root. With the
/// one to read files of others it could open them by handle, through what is mounted here.
///
/// `unshare` makes the network. Bubblewrap would bring up its loopback, which a unit's filter of
/// addresses may forbid.
fn sandboxed(
    from: &Path,
    to: Option<(&Path, u64)>,
    what: &str,
    options: &[&str],
) -> Result<Command, Qcow2Error> {
    if let Some(program) = ["bwrap", "qemu-img"].iter().find(|program| !process::on_path(program)) {
        let (path, program) = (from.to_owned(), (*program).to_owned());
        return Err(Qcow2Error::Run { path, source: RunError::NotFound { program } });
    }
    let file_bytes = format!("--fsize={}", to.map_or(0, |(_, bytes)| bytes));
    let mut command = Command::new("unshare");
    command.args(["--net", "--", "prlimit", ADDRESS_SPACE, "--core=0", &file_bytes, "--"]);
    command.args(["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-uts"]);
    command.args(["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]);
    command.args(["--cap-drop", "ALL", "--setenv", "PATH", "/usr/bin"]);
    command.args(["--ro-bind", "/usr", "/usr"]);
    command.args(["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]);
    command.args(["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]);
    // QEMU tries locks on it.
    command.args(["--dev-bind", "/dev/null", "/dev/null"]);
    command.args([OsStr::new("--ro-bind"), from.as_os_str(), OsStr::new(SOURCE)]);
    if let Some((to, _)) = to {
        command.args([OsStr::new("--bind"), to.as_os_str(), OsStr::new(TARGET)]);
    }
    command.args(["--remount-ro", "/", "--", "qemu-img", what]).args(options);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    const BOUNDS: Bounds = Bounds { min_bytes: 1 << 20, max_bytes: 1 << 40, free_bytes: 64 << 20 };

    fn qemu_img(args: &[&str], folder: &Path) {
        let ran = Command::new("qemu-img").args(args).current_dir(folder).output().expect("run");
        assert!(ran.status.success(), "{args:?}: {ran:?}");
    }

    fn converted(folder: &Path, name: &str, bounds: Bounds) -> Result<Vec<u8>, Qcow2Error> {
        let to = folder.join("target");
        fs::write(&to, b"what was there").expect("written");
        convert(&folder.join(name), &to, bounds, &Cancel::default())?;
        Ok(fs::read(&to).expect("read"))
    }

    /// A raw disk of 8 MiB with some data.
    fn raw(folder: &Path) -> Vec<u8> {
        let file = File::create_new(folder.join("raw")).expect("made");
        file.set_len(8 << 20).expect("room");
        for at in [0, 70_000, 5 << 20] {
            file.write_all_at(b"some bytes", at).expect("written");
        }
        fs::read(folder.join("raw")).expect("read")
    }

    #[test]
    fn a_qcow2_file_becomes_the_raw_file_that_it_was_made_of() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let wanted = raw(folder);
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "plain"], folder);
        qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "raw", "compressed"], folder);
        for name in ["plain", "compressed"] {
            assert!(converted(folder, name, BOUNDS).expect(name) == wanted, "{name}");
        }
        use std::os::unix::fs::MetadataExt as _;
        let taken = fs::metadata(folder.join("target")).expect("there").blocks() * 512;
        assert!(taken < 2 << 20, "{taken} bytes: zeros are holes");
    }

    #[test]
    fn what_leads_out_of_the_file_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        raw(folder);
        qemu_img(&["create", "-f", "qcow2", "-b", "raw", "-F", "raw", "backed"], folder);
        let data = "data_file=outside,data_file_raw=on";
        qemu_img(&["create", "-f", "qcow2", "-o", data, "split", "8M"], folder);
        let key = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
        let secret = "secret,id=key,data=abc";
        qemu_img(&["create", "-f", "qcow2", "--object", secret, "-o", key, "locked", "8M"], folder);
        for (name, what) in
            [("backed", "a backing file"), ("split", "in another file"), ("locked", "encrypted")]
        {
            let refused = converted(folder, name, BOUNDS).expect_err(name);
            assert!(matches!(refused, Qcow2Error::Refused { .. }), "{refused:?}");
            assert!(refused.to_string().contains(what), "{refused}");
        }
        let refused = converted(folder, "raw", BOUNDS).expect_err("it is raw");
        assert!(matches!(refused, Qcow2Error::Other { .. }), "{refused:?}");
        assert!(fs::read(folder.join("target")).expect("read") == b"what was there");
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let made = Command::new("mkfifo").arg(folder.path().join("pipe")).status().expect("run");
        assert!(made.success());
        let refused = converted(folder.path(), "pipe", BOUNDS).expect_err("it is no file");
        assert!(matches!(refused, Qcow2Error::Path(_)), "{refused:?}");
    }

    /// What `qemu-img` could do if a file took it over: open any file by its handle.
    #[test]
    fn the_sandbox_has_no_right_of_root_and_no_network() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        raw(folder);
        let command = sandboxed(&folder.join("raw"), None, "info", &[]).expect("installed");
        let args: Vec<_> = command.get_args().map(OsStr::to_owned).collect();
        let program = args.iter().position(|arg| arg == "qemu-img").expect("it runs that");
        let run = |words: &[&str]| {
            let mut other = Command::new(command.get_program());
            other.args(&args[..program]).args(words).output().expect("run")
        };
        assert!(run(&["true"]).status.success());
        let seen = run(&["setpriv", "--dump"]);
        let seen = String::from_utf8_lossy(&seen.stdout).into_owned();
        assert!(seen.contains("no_new_privs: 1"), "{seen}");
        let refused = run(&["setpriv", "--reuid", "1", "--", "true"]);
        assert!(!refused.status.success(), "it has the right to become another user");
        // The loopback is down, too.
        let connects = "import socket; print(socket.socket().connect_ex(('127.0.0.1', 1)))";
        let seen = run(&["python3", "-c", connects]);
        let unreachable = format!("{}\n", rustix::io::Errno::NETUNREACH.raw_os_error());
        assert_eq!(String::from_utf8_lossy(&seen.stdout), unreachable, "{seen:?}");
        let seen = run(&["ls", "/"]);
        let seen = String::from_utf8_lossy(&seen.stdout).into_owned();
        assert_eq!(
            seen.split_whitespace().collect::<Vec<_>>(),
            ["dev", "etc", "lib", "lib64", "source", "usr"]
        );
    }

    #[test]
    fn what_does_not_fit_is_refused_before_it_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        raw(folder);
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "plain"], folder);
        let full = Bounds { free_bytes: 1 << 10, ..BOUNDS };
        let refused = converted(folder, "plain", full).expect_err("no room");
        assert!(matches!(refused, Qcow2Error::Full { free: 1024, .. }), "{refused:?}");
        // Holes take no space.
        qemu_img(&["create", "-f", "qcow2", "sparse", "10G"], folder);
        let to = folder.join("large");
        File::create(&to).expect("made");
        convert(&folder.join("sparse"), &to, BOUNDS, &Cancel::default()).expect("it has no data");
        assert_eq!(fs::metadata(&to).expect("there").len(), 10 << 30);
        let small = Bounds { max_bytes: 1 << 20, ..BOUNDS };
        let refused = converted(folder, "plain", small).expect_err("too large");
        assert!(matches!(refused, Qcow2Error::Range { bytes: 8_388_608, .. }), "{refused:?}");
        let head = fs::read(folder.join("plain")).expect("read")[..71].to_vec();
        assert!(Header::parse(&head).is_none());
        // Of an interrupted download.
        let whole = fs::read(folder.join("plain")).expect("read");
        for bytes in [whole.len() - 140_000, 200] {
            fs::write(folder.join("cut"), &whole[..bytes]).expect("written");
            let refused = converted(folder, "cut", BOUNDS).map(|bytes| bytes.len());
            let refused = refused.expect_err("it is cut");
            assert!(refused.to_string().contains("is damaged, or cut off"), "{bytes}: {refused}");
        }
    }
}
