//! What a VM is to its programs: random pool, clock, host name, machine id, `vmid`.
//!
//! [`Machine`] applies an identity in the order that `ForkIdentity` promises and stops at the first
//! failure. It runs between a clone's first instruction and its answer, so it makes few system
//! calls. It writes files in place instead of replacing them, and holds `/dev/urandom` open.
//!
//! With [`Effects::Dry`] every effect is a file under one folder, so that tests can look at it. A
//! line in the folder's `effects` tells the order.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::time::{ClockId, Timespec, clock_settime};
use vmfork_agent_proto::ForkIdentity;

use crate::options::Effects;

/// Fewest bytes of entropy that make a new identity.
const ENTROPY_BYTES_MIN: usize = 32;
pub(crate) const ETC_MACHINE_ID: &str = "/etc/machine-id";
pub(crate) const RUN_MACHINE_ID: &str = "/run/machine-id";
const MACHINE_ID_FILES: [&str; 2] = [ETC_MACHINE_ID, RUN_MACHINE_ID];
/// Longest host name of Linux.
const HOSTNAME_BYTES_MAX: usize = 64;

/// The part of an identity that a booting VM gets too.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Basics<'a> {
    pub(crate) name: &'a str,
    pub(crate) machine_id: &'a str,
    /// Hex.
    pub(crate) entropy: &'a str,
    pub(crate) realtime_ns: u64,
}

#[derive(Debug)]
pub(crate) struct Machine {
    effects: Effects,
    run_dir: PathBuf,
    /// `/dev/urandom`, with [`Effects::Real`].
    random: Option<File>,
    /// The identity's files, open since the VM booted, with their lengths: a clone only writes.
    /// Opening them again would have each clone under TCG translate the way through the file
    /// systems.
    files: RefCell<BTreeMap<PathBuf, (File, u64)>>,
}

impl Machine {
    pub(crate) fn new(effects: Effects, run_dir: PathBuf) -> Self {
        let random = (effects == Effects::Real).then(|| File::open("/dev/urandom").ok()).flatten();
        Self { effects, run_dir, random, files: RefCell::default() }
    }

    /// Whether this machine is the agent's to change.
    pub(crate) fn is_real(&self) -> bool {
        self.effects == Effects::Real
    }

    /// The identity of a VM that boots: `vmid` 0.
    ///
    /// # Errors
    /// A sentence that names the first step that failed. The rest of them was not tried.
    pub(crate) fn boot(&self, basics: Basics<'_>) -> Result<(), String> {
        if self.effects != Effects::Refused {
            self.basics(basics)?;
        }
        self.publish(
            0,
            &serde_json::json!({ "vmid": 0, "name": basics.name, "machine_id": basics.machine_id }),
        )
    }

    /// The identity of a clone.
    ///
    /// # Errors
    /// As [`Machine::boot`]; and if this agent was started without leave to apply one.
    pub(crate) fn become_clone(&self, identity: &ForkIdentity) -> Result<(), String> {
        if self.effects == Effects::Refused {
            return Err("the agent was started with --port and without --apply-identity".to_owned());
        }
        self.basics(Basics {
            name: &identity.name,
            machine_id: &identity.machine_id,
            entropy: &identity.entropy,
            realtime_ns: identity.realtime_ns,
        })?;
        let ticket = identity.ticket.as_ref();
        self.publish(
            identity.vmid,
            &serde_json::json!({
                "vmid": identity.vmid,
                "name": identity.name,
                "machine_id": identity.machine_id,
                "fork": identity.fork,
                "ticket": ticket.map(|ticket| ticket.ticket),
                "workers": ticket.map_or(1, |ticket| ticket.workers),
            }),
        )
    }

    fn basics(&self, basics: Basics<'_>) -> Result<(), String> {
        let entropy = from_hex(basics.entropy)
            .filter(|bytes| bytes.len() >= ENTROPY_BYTES_MIN)
            .ok_or_else(|| format!("entropy is not {ENTROPY_BYTES_MIN} bytes or more of hex"))?;
        if from_hex(basics.machine_id).is_none_or(|id| id.len() != 16) {
            return Err(format!("machine id `{}` is not 32 hex digits", basics.machine_id));
        }
        if basics.name.is_empty() || basics.name.len() > HOSTNAME_BYTES_MAX {
            return Err(format!("host name `{}` is not 1 to 64 bytes long", basics.name));
        }
        let machine_id = format!("{}\n", basics.machine_id);
        self.entropy(&entropy).map_err(|e| said("add entropy", &e))?;
        self.clock(basics.realtime_ns).map_err(|e| said("step the clock", &e))?;
        self.hostname(basics.name).map_err(|e| said("set the host name", &e))?;
        for path in MACHINE_ID_FILES {
            // As PID 1 the agent has made it a link to the other.
            if self.is_real() && path == ETC_MACHINE_ID && is_link(path) {
                continue;
            }
            self.file(path, machine_id.as_bytes(), 0o444).map_err(|e| said(path, &e))?;
        }
        Ok(())
    }

    fn entropy(&self, bytes: &[u8]) -> io::Result<()> {
        match &self.effects {
            Effects::Dry(folder) => note(
                folder,
                "entropy",
                bytes.iter().map(|b| format!("{b:02x}")).collect::<String>(),
            ),
            _ => {
                let random =
                    self.random.as_ref().ok_or(io::Error::from_raw_os_error(libc::ENODEV))?;
                crate::sys::add_entropy(random.as_fd(), bytes)
            }
        }
    }

    fn clock(&self, realtime_ns: u64) -> io::Result<()> {
        if let Effects::Dry(folder) = &self.effects {
            return note(folder, "clock", realtime_ns);
        }
        let time = Timespec {
            tv_sec: i64::try_from(realtime_ns / 1_000_000_000).unwrap_or(0),
            tv_nsec: i64::try_from(realtime_ns % 1_000_000_000).unwrap_or(0),
        };
        Ok(clock_settime(ClockId::Realtime, time)?)
    }

    fn hostname(&self, name: &str) -> io::Result<()> {
        if let Effects::Dry(folder) = &self.effects {
            return note(folder, "hostname", name);
        }
        Ok(rustix::system::sethostname(name.as_bytes())?)
    }

    fn file(&self, path: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
        if let Effects::Dry(folder) = &self.effects {
            note_effect(folder, path)?;
            let path = folder.join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
            return overwrite(&path, bytes, 0o644);
        }
        self.overwrite(Path::new(path), bytes, mode)
    }

    /// Write a small file in place: a program that reads meanwhile sees the old text or the new
    /// one, never an empty file.
    fn overwrite(&self, path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
        let mut files = self.files.borrow_mut();
        // If a program removed or replaced the file, it gets a new one.
        let stands =
            files.get(path).map(|(file, _)| file.metadata().map(|found| found.nlink() > 0));
        if !stands.transpose()?.unwrap_or(false) {
            let file = create(path, mode)?;
            let length = file.metadata()?.len();
            files.insert(path.to_owned(), (file, length));
        }
        let Some((file, length)) = files.get_mut(path) else { return Ok(()) };
        file.write_all_at(bytes, 0)?;
        let now = bytes.len() as u64;
        if now < *length {
            file.set_len(now)?;
        }
        *length = now;
        Ok(())
    }

    fn publish(&self, vmid: u32, identity: &serde_json::Value) -> Result<(), String> {
        let files = [("vmid", format!("{vmid}\n")), ("identity.json", format!("{identity}\n"))];
        for (name, text) in files {
            let path = self.run_dir.join(name);
            if let Effects::Dry(folder) = &self.effects {
                note_effect(folder, name).map_err(|e| said(name, &e))?;
            }
            self.overwrite(&path, text.as_bytes(), 0o644).map_err(|e| said(path.display(), &e))?;
        }
        Ok(())
    }
}

fn said(what: impl Display, error: &io::Error) -> String {
    format!("{what}: {error}")
}

fn create(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(mode).open(path)
}

/// Write a small file in place.
fn overwrite(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = create(path, mode)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)
}

fn is_link(path: &str) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink())
}

/// The dry form of an effect: its value as a file.
fn note(folder: &Path, name: &str, value: impl Display) -> io::Result<()> {
    note_effect(folder, name)?;
    overwrite(&folder.join(name), value.to_string().as_bytes(), 0o644)
}

fn note_effect(folder: &Path, name: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(folder.join("effects"))?;
    writeln!(file, "{name}")
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_is_whole_bytes_or_nothing() {
        assert_eq!(from_hex("00fF"), Some(vec![0, 255]));
        assert_eq!(from_hex("00f"), None);
        assert_eq!(from_hex("0g"), None);
    }
}
