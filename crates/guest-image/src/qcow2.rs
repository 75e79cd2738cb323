//! qcow2 files, converted to raw ones by `qemu-img`. Their content is not trusted: a guest may have
//! written it.
//!
//! Promises: what leads out of the file is refused: a backing file, a data file, a key. `qemu-img`
//! runs in namespaces of its own (bubblewrap). There it sees `/usr`, the file and the target; no
//! network, and no other process. The target's length and the space that it takes are bounded.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

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
const ASK_LIMIT: Duration = Duration::from_secs(60);
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
    #[error("{} {what}", path.display())]
    Refused { path: PathBuf, what: &'static str },
    #[error("{} is a disk of {bytes} bytes: use one of {min} to {max}", path.display())]
    Range { path: PathBuf, bytes: u64, min: u64, max: u64 },
    #[error("{} needs {bytes} bytes as a raw file, and {free} are free", path.display())]
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

impl Remedy for Qcow2Error {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::Other { .. } => Some("a raw file is named without `qcow2`".into()),
            Self::Refused { .. } => Some(
                "if you trust it, make a whole one of it: `qemu-img convert -O qcow2 OLD NEW`"
                    .into(),
            ),
            Self::Range { .. } => None,
            Self::Full { .. } => Some("free space on the file system of the state folder".into()),
            Self::Unreadable { path, .. } => {
                Some(format!("`qemu-img check -f qcow2 {}` may say more", path.display()))
            }
            Self::Run { source: RunError::NotFound { .. }, .. } => {
                Some("`apt-get install qemu-utils bubblewrap`".into())
            }
            Self::Run { path, .. } => {
                Some(format!("`qemu-img check -f qcow2 {}` may say more", path.display()))
            }
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
    /// What leads out of the file, for `path {what}`.
    refused: Option<&'static str>,
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
        let refused = [
            (backing_offset != 0, "lies on a backing file, which may be any file"),
            (features & DATA_FILE != 0, "has its data in another file, which may be any file"),
            (crypt != 0, "is encrypted"),
            (features & CORRUPT != 0, "is marked as corrupt"),
        ];
        let refused = refused.into_iter().find_map(|(is_so, what)| is_so.then_some(what));
        Some(Self { bytes, refused })
    }
}

/// `qemu-img measure`.
#[derive(Debug, Deserialize)]
struct Measure {
    required: u64,
}

/// `qemu-img check`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Check {
    #[serde(default)]
    corruptions: u64,
    check_errors: u64,
}

/// Whether a file begins as a qcow2 file does. A raw disk of a guest may do so, too.
///
/// # Errors
/// It can't be read.
pub fn looks_like_qcow2(path: &Path) -> Result<bool, PathError> {
    Ok(head(path)?.starts_with(MAGIC))
}

fn head(path: &Path) -> Result<Vec<u8>, PathError> {
    let file = File::open(path).map_err(PathError::io("open", path))?;
    let mut head = Vec::new();
    file.take(HEADER_BYTES).read_to_end(&mut head).map_err(PathError::io("read", path))?;
    Ok(head)
}

/// Write what the disk in a qcow2 file holds to `to`, which is there, as a raw file with holes.
/// Blocks for as long as that takes: an hour at most.
///
/// # Errors
/// [`Qcow2Error`]; what is in `to` is of no use then.
pub fn convert(from: &Path, to: &Path, bounds: Bounds, cancel: &Cancel) -> Result<(), Qcow2Error> {
    let path = || from.to_owned();
    let header = Header::parse(&head(from)?);
    let Header { bytes, refused } = header.ok_or_else(|| Qcow2Error::Other { path: path() })?;
    if let Some(what) = refused {
        return Err(Qcow2Error::Refused { path: path(), what });
    }
    let Bounds { min_bytes: min, max_bytes: max, free_bytes: free } = bounds;
    if !(min..=max).contains(&bytes) || !bytes.is_multiple_of(DISK_BYTES) {
        return Err(Qcow2Error::Range { path: path(), bytes, min, max });
    }
    check(from, cancel)?;
    let Measure { required: needed } = ask(from, "measure", &["-O", "raw"], cancel)?;
    if needed > free {
        return Err(Qcow2Error::Full { path: path(), bytes: needed, free });
    }
    let target = File::options().write(true).open(to).map_err(PathError::io("open", to))?;
    target.set_len(0).and_then(|()| target.set_len(bytes)).map_err(PathError::io("write", to))?;
    let options = ["-n", "--target-is-zero", "-f", "qcow2", "-O", "raw", SOURCE, TARGET];
    let command = sandboxed(from, Some(to), "convert", &options)?;
    let ran = process::run(command, cancel, CONVERT_LIMIT, &mut |_line| ());
    ran.map_err(|source| Qcow2Error::Run { path: path(), source })
}

/// Whether all that the file refers to is in it. Without this look, `qemu-img` reads zeros after
/// the end of one that is cut off.
///
/// # Errors
/// It is not.
fn check(from: &Path, cancel: &Cancel) -> Result<(), Qcow2Error> {
    let found: Check = ask(from, "check", &[], cancel)?;
    if found.corruptions > 0 || found.check_errors > 0 {
        return Err(Qcow2Error::Refused { path: from.to_owned(), what: "is damaged, or cut off" });
    }
    Ok(())
}

/// What `qemu-img` says of it.
fn ask<T: DeserializeOwned>(
    from: &Path,
    what: &'static str,
    options: &[&str],
    cancel: &Cancel,
) -> Result<T, Qcow2Error> {
    let options = [&["-f", "qcow2", "--output=json"], options, &[SOURCE]].concat();
    let command = sandboxed(from, None, what, &options)?;
    let (path, mut said) = (|| from.to_owned(), String::new());
    let ran = process::run(command, cancel, ASK_LIMIT, &mut |line| said.push_str(line));
    match ran {
        Ok(()) => {}
        Err(RunError::Failed { status, .. }) if status.code().is_some_and(is_finding) => {}
        Err(source) => return Err(Qcow2Error::Run { path: path(), source }),
    }
    // A finding is told in words before.
    let json = said.find('{').and_then(|at| said.get(at..)).unwrap_or_default();
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

/// `qemu-img` with nothing around it but the files. Root's own rights are dropped, but for reading
/// files of others.
fn sandboxed(
    from: &Path,
    to: Option<&Path>,
    what: &str,
    options: &[&str],
) -> Result<Command, Qcow2Error> {
    if let Some(program) = ["bwrap", "qemu-img"].iter().find(|program| !process::on_path(program)) {
        let (path, program) = (from.to_owned(), (*program).to_owned());
        return Err(Qcow2Error::Run { path, source: RunError::NotFound { program } });
    }
    let mut command = Command::new("prlimit");
    command.args([ADDRESS_SPACE, "--core=0", "--", "bwrap"]);
    command.args(["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]);
    command.args(["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]);
    command.args(["--cap-drop", "ALL", "--cap-add", "CAP_DAC_READ_SEARCH"]);
    command.args(["--setenv", "PATH", "/usr/bin", "--ro-bind", "/usr", "/usr"]);
    command.args(["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]);
    command.args(["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]);
    command.args([OsStr::new("--ro-bind"), from.as_os_str(), OsStr::new(SOURCE)]);
    // QEMU tries locks on it.
    command.args(["--dev-bind", "/dev/null", "/dev/null"]);
    if let Some(to) = to {
        command.args([OsStr::new("--bind"), to.as_os_str(), OsStr::new(TARGET)]);
    }
    command.args(["--", "qemu-img", what]).args(options);
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
    fn what_does_not_fit_is_refused_before_it_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        raw(folder);
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "plain"], folder);
        let full = Bounds { free_bytes: 1 << 10, ..BOUNDS };
        let refused = converted(folder, "plain", full).expect_err("no room");
        assert!(matches!(refused, Qcow2Error::Full { free: 1024, .. }), "{refused:?}");
        let small = Bounds { max_bytes: 1 << 20, ..BOUNDS };
        let refused = converted(folder, "plain", small).expect_err("too large");
        assert!(matches!(refused, Qcow2Error::Range { bytes: 8_388_608, .. }), "{refused:?}");
        assert!(Header::parse(&head(&folder.join("plain")).expect("read")[..71]).is_none());
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
