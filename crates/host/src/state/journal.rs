//! What exists, one line of JSON for each change, so that the next daemon knows what this one had.
//!
//! ```text
//!   {"event":"opened","boot_id":"…"}
//!   {"event":"vm_created","vm":{"name":"web","id":"…",…}}
//!   {"event":"process_started","vm":"…","kind":"qemu","pid":7,"start_ticks":8}
//!   {"event":"process_ended","pid":7,"start_ticks":8}
//!   {"event":"vm_ended","id":"…"}
//!   {"event":"vm_lost","vm":{…}}
//! ```
//!
//! [`Live`] is what the lines add up to, and does no I/O. [`Journal`] writes.
//! Lines are not synced: what matters is a daemon that dies, and a file outlives its writer.
//! After a host that dies nothing runs any more.
//! A line that makes no sense (torn by a full disk, or by hand) is skipped.
//! The file is rewritten, with only what is alive, at each start and when it has grown to
//! [`COMPACT_BYTES`].

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmfork_api::LostVm;

use super::process::ProcessId;

/// A line is about 200 bytes: some 20,000 changes.
const COMPACT_BYTES: u64 = 4 << 20;
/// More than [`COMPACT_BYTES`] and any live set; what is beyond in a file is not ours.
const READ_BYTES_MAX: u64 = 64 << 20;
/// Losses that are remembered, over all restarts; the oldest are forgotten.
const LOST_MAX: usize = 256;

/// What a recorded process is to its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    Qemu,
    /// Holds the frozen pages of a QEMU; ours only once that QEMU is gone.
    Keeper,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Record {
    Opened {
        boot_id: String,
    },
    VmCreated {
        vm: LostVm,
    },
    VmEnded {
        id: String,
    },
    ProcessStarted {
        /// Absent for a QEMU that waits in the pool.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vm: Option<String>,
        kind: ProcessKind,
        #[serde(flatten)]
        process: ProcessId,
    },
    ProcessEnded {
        #[serde(flatten)]
        process: ProcessId,
    },
    VmLost {
        vm: LostVm,
    },
    LostForgotten {
        id: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) vm: Option<String>,
    pub(super) kind: ProcessKind,
    pub(super) process: ProcessId,
}

/// What the records add up to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Live {
    pub(super) boot_id: String,
    pub(super) vms: BTreeMap<String, LostVm>,
    /// By number.
    pub(super) processes: BTreeMap<u32, Process>,
    /// Oldest first.
    pub(super) lost: VecDeque<LostVm>,
}

impl Live {
    pub(super) fn apply(&mut self, record: Record) {
        match record {
            Record::Opened { boot_id } => self.boot_id = boot_id,
            Record::VmCreated { vm } => {
                self.vms.insert(vm.id.clone(), vm);
            }
            Record::VmEnded { id } => {
                self.vms.remove(&id);
            }
            Record::ProcessStarted { vm, kind, process } => {
                self.processes.insert(process.pid, Process { vm, kind, process });
            }
            Record::ProcessEnded { process } => {
                if self.processes.get(&process.pid).is_some_and(|p| p.process == process) {
                    self.processes.remove(&process.pid);
                }
            }
            Record::VmLost { vm } => {
                self.lost.push_back(vm);
                if self.lost.len() > LOST_MAX {
                    self.lost.pop_front();
                }
            }
            Record::LostForgotten { id } => self.lost.retain(|vm| vm.id != id),
        }
    }

    /// The shortest list of records that adds up to this.
    fn records(&self) -> impl Iterator<Item = Record> {
        let opened = Record::Opened { boot_id: self.boot_id.clone() };
        let lost = self.lost.iter().map(|vm| Record::VmLost { vm: vm.clone() });
        let vms = self.vms.values().map(|vm| Record::VmCreated { vm: vm.clone() });
        let processes = self.processes.values().map(|process| Record::ProcessStarted {
            vm: process.vm.clone(),
            kind: process.kind,
            process: process.process,
        });
        std::iter::once(opened).chain(lost).chain(vms).chain(processes)
    }
}

fn line(record: &Record) -> Vec<u8> {
    let mut line = serde_json::to_vec(record)
        .unwrap_or_else(|error| unreachable!("records are plain structs: {error}"));
    line.push(b'\n');
    line
}

/// What the lines of `bytes` add up to, and how many of them made no sense.
pub(super) fn replay(bytes: &[u8]) -> (Live, usize) {
    let (mut live, mut skipped) = (Live::default(), 0);
    for line in bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        match serde_json::from_slice(line) {
            Ok(record) => live.apply(record),
            Err(_) => skipped += 1,
        }
    }
    (live, skipped)
}

/// What an earlier daemon wrote to `path`; nothing, if there was none.
pub(super) fn read(path: &Path) -> io::Result<(Live, usize)> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(READ_BYTES_MAX).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    Ok(replay(&bytes))
}

/// The file, open for writing.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    /// All of them in whole lines.
    bytes: u64,
    /// When it is this long it is rewritten.
    compact_at: u64,
    live: Live,
}

impl Journal {
    /// Begin a new `path` with what `live` contains.
    pub(super) fn create(path: &Path, live: Live) -> io::Result<Self> {
        let (file, bytes) = rewrite(path, &live)?;
        let path = path.to_owned();
        Ok(Self { path, file, bytes, compact_at: compact_at(bytes), live })
    }

    pub(super) fn live(&self) -> &Live {
        &self.live
    }

    /// # Errors
    /// If the line can't be written, as on a full disk. It then counts all the same until the
    /// daemon ends: what exists, exists.
    pub(super) fn append(&mut self, record: Record) -> io::Result<()> {
        let line = line(&record);
        self.live.apply(record);
        if let Err(error) = self.file.write_all(&line) {
            // Half a line must not spoil the next one.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += u64::try_from(line.len()).unwrap_or(u64::MAX);
        if self.bytes >= self.compact_at {
            (self.file, self.bytes) = rewrite(&self.path, &self.live)?;
            self.compact_at = compact_at(self.bytes);
        }
        Ok(())
    }
}

/// At least twice what is alive, so that rewriting is rare whatever that is.
fn compact_at(bytes: u64) -> u64 {
    COMPACT_BYTES.max(bytes * 2)
}

/// Put a file with `live` in the place of `path`, in one step.
fn rewrite(path: &Path, live: &Live) -> io::Result<(File, u64)> {
    let beside = path.with_extension("new");
    let lines: Vec<u8> = live.records().flat_map(|record| line(&record)).collect();
    let _left_by_a_dead_daemon = fs::remove_file(&beside);
    let mut file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&beside)?;
    let written = file.write_all(&lines).and_then(|()| fs::rename(&beside, path));
    if let Err(error) = written {
        let _ = fs::remove_file(&beside);
        return Err(error);
    }
    Ok((file, u64::try_from(lines.len()).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vm(id: &str) -> LostVm {
        LostVm {
            name: format!("name-{id}"),
            id: id.into(),
            image: "debian".into(),
            parent: None,
            created_unix_ms: 7,
        }
    }

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid, start_ticks: u64::from(pid) * 10 }
    }

    fn records() -> impl Strategy<Value = Record> {
        let id = "[ab]{1,2}";
        prop_oneof![
            id.prop_map(|id| Record::VmCreated { vm: vm(&id) }),
            id.prop_map(|id| Record::VmEnded { id }),
            id.prop_map(|id| Record::VmLost { vm: vm(&id) }),
            id.prop_map(|id| Record::LostForgotten { id }),
            (1u32..5, proptest::option::of(id)).prop_map(|(pid, vm)| Record::ProcessStarted {
                vm,
                kind: ProcessKind::Keeper,
                process: process(pid)
            }),
            (1u32..5).prop_map(|pid| Record::ProcessEnded { process: process(pid) }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_was_appended(list in prop::collection::vec(records(), 0..40)) {
            let folder = tempfile::tempdir().expect("temp dir");
            let path = folder.path().join("journal");
            let mut journal = Journal::create(&path, Live::default()).expect("create");
            // Compacts all the time.
            journal.compact_at = 0;
            let mut model = Live::default();
            for record in list {
                model.apply(record.clone());
                journal.append(record).expect("append");
            }
            prop_assert_eq!(read(&path).expect("read"), (model, 0));
        }

        #[test]
        fn garbage_between_lines_costs_no_other_line(
            list in prop::collection::vec(records(), 0..10),
            garbage in prop::collection::vec("[^\n]{1,30}", 0..10),
            torn in 0usize..40,
        ) {
            let mut model = Live::default();
            let mut bytes = Vec::new();
            let mut garbage = garbage.into_iter();
            for record in list {
                bytes.extend(line(&record));
                model.apply(record);
                if let Some(garbage) = garbage.next() {
                    bytes.extend(garbage.as_bytes());
                    bytes.push(b'\n');
                }
            }
            let last = line(&Record::VmCreated { vm: vm("torn") });
            bytes.extend(&last[..torn.min(last.len() - 2)]);
            prop_assert_eq!(replay(&bytes).0, model);
        }

        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            replay(&bytes);
        }
    }

    #[test]
    fn the_file_stays_small_however_much_happens() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, Live::default()).expect("create");
        for i in 0..60_000 {
            let id = format!("{i}");
            journal.append(Record::VmCreated { vm: vm(&id) }).expect("append");
            journal.append(Record::VmEnded { id }).expect("append");
        }
        let bytes = path.metadata().expect("metadata").len();
        assert!(bytes <= COMPACT_BYTES, "{bytes}");
    }

    #[test]
    fn losses_are_bounded() {
        let mut live = Live::default();
        for i in 0..300 {
            live.apply(Record::VmLost { vm: vm(&i.to_string()) });
        }
        assert_eq!(live.lost.len(), LOST_MAX);
        assert_eq!(live.lost.back().map(|vm| vm.id.as_str()), Some("299"));
    }

    #[test]
    fn the_end_of_an_earlier_namesake_does_not_end_a_process() {
        let mut live = Live::default();
        let started =
            Record::ProcessStarted { vm: None, kind: ProcessKind::Qemu, process: process(3) };
        live.apply(started);
        live.apply(Record::ProcessEnded { process: ProcessId { pid: 3, start_ticks: 1 } });
        assert_eq!(live.processes.len(), 1);
    }
}
