//! What `vmfork snapshot` is to do.

use std::path::PathBuf;

use vmfork_api::{Compression, LabelFilter, SnapshotRequest};

use super::{misuse, value};
use crate::args::{RawGlobal, RawProfile, RawSnapshot, RawSnapshotCreate, RawSnapshotName};
use crate::failure::Misuse;

/// What stands for standard input and output.
const STREAM: &str = "-";

#[derive(Debug)]
pub(crate) enum SnapshotAction {
    Create(SnapshotRequest),
    Ls {
        filters: Vec<LabelFilter>,
    },
    Inspect {
        name: String,
    },
    Rm {
        names: Vec<String>,
        cascade: bool,
    },
    Verify {
        name: String,
    },
    Flatten {
        name: String,
    },
    /// `to`: a file, or `None` for standard output.
    Export {
        name: String,
        to: Option<PathBuf>,
    },
    /// `from`: a file, or `None` for standard input.
    Import {
        name: Option<String>,
        from: Option<PathBuf>,
    },
    /// `location` as typed: whether a folder may be relative depends on where the daemon is.
    Push {
        name: String,
        location: String,
    },
    Pull {
        name: String,
        location: String,
        wait: bool,
    },
    ShowProfile {
        name: String,
    },
    ResetProfile {
        name: String,
    },
}

impl SnapshotAction {
    pub(super) fn new(raw: RawSnapshot, global: &RawGlobal) -> Result<Self, Misuse> {
        Ok(match raw {
            RawSnapshot::Create(raw) => Self::Create(create(raw)?),
            RawSnapshot::Ls(raw) => Self::Ls { filters: value::filters(&raw.labels)? },
            RawSnapshot::Inspect(raw) => Self::Inspect { name: one(raw)? },
            RawSnapshot::Rm { snapshots, cascade } => Self::Rm {
                names: snapshots.into_iter().map(name).collect::<Result<_, _>>()?,
                cascade,
            },
            RawSnapshot::Verify(raw) => Self::Verify { name: one(raw)? },
            RawSnapshot::Flatten(raw) => Self::Flatten { name: one(raw)? },
            RawSnapshot::Export { snapshot, file } => {
                let to = path(&file)?;
                if to.is_none() && global.json {
                    return misuse(
                        "snapshot export: --json uses standard output; name a file for the snapshot",
                    );
                }
                Self::Export { name: name(snapshot)?, to }
            }
            RawSnapshot::Import { file, name: given } => {
                Self::Import { name: given.map(name).transpose()?, from: path(&file)? }
            }
            RawSnapshot::Push { snapshot, location } => {
                Self::Push { name: name(snapshot)?, location: value::location(location)? }
            }
            RawSnapshot::Pull { snapshot, location, wait } => {
                Self::Pull { name: name(snapshot)?, location: value::location(location)?, wait }
            }
            RawSnapshot::Profile(RawProfile::Show(raw)) => Self::ShowProfile { name: one(raw)? },
            RawSnapshot::Profile(RawProfile::Reset(raw)) => Self::ResetProfile { name: one(raw)? },
        })
    }
}

fn name(name: String) -> Result<String, Misuse> {
    value::name(name, "snapshot's name")
}

fn one(raw: RawSnapshotName) -> Result<String, Misuse> {
    name(raw.snapshot)
}

fn path(text: &str) -> Result<Option<PathBuf>, Misuse> {
    match text {
        "" => misuse("snapshot: the path of the file is empty"),
        STREAM => Ok(None),
        path => Ok(Some(PathBuf::from(path))),
    }
}

fn create(raw: RawSnapshotCreate) -> Result<SnapshotRequest, Misuse> {
    let record = raw.record.as_deref().map(|text| value::time(text, "--record")).transpose()?;
    Ok(SnapshotRequest {
        vm: value::name(raw.vm, "VM's name")?,
        name: name(raw.name)?,
        wait: raw.wait,
        compression: raw.no_compression.then_some(Compression::None),
        full: raw.full,
        disk_only: raw.disk_only,
        keep_zero_pages: raw.keep_zero_pages,
        record_ms: record.map(value::millis),
        labels: value::labels(&raw.labels)?,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{RawArgs, RawCommand};

    fn parse(line: &str) -> Result<SnapshotAction, String> {
        let words = ["vmfork", "snapshot"].into_iter().chain(line.split(' '));
        let raw = RawArgs::try_parse_from(words).map_err(|error| error.to_string())?;
        match raw.command {
            RawCommand::Snapshot(action) => {
                SnapshotAction::new(action, &raw.global).map_err(|error| error.to_string())
            }
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn what_is_not_said_is_left_to_the_daemon() {
        let Ok(SnapshotAction::Create(plain)) = parse("create web warm") else { panic!("plain") };
        assert_eq!((plain.vm.as_str(), plain.name.as_str()), ("web", "warm"));
        assert!(plain.compression.is_none() && plain.record_ms.is_none() && !plain.wait);
        let all = "create web warm --wait --no-compression --full --keep-zero-pages --record 1.5";
        let Ok(SnapshotAction::Create(all)) = parse(all) else { panic!("all of them") };
        assert!(all.wait && all.full && all.keep_zero_pages);
        assert_eq!(all.compression, Some(Compression::None));
        assert_eq!(all.record_ms, Some(1500));
        let Ok(SnapshotAction::Create(disks)) = parse("create web warm --disk-only") else {
            panic!("the disks")
        };
        assert!(disks.disk_only && !all.disk_only);
        for of_memory in ["--keep-zero-pages", "--record 5"] {
            parse(&format!("create web warm --disk-only {of_memory}")).expect_err("no memory");
        }
    }

    #[test]
    fn a_dash_is_a_stream_which_holds_no_document_beside() {
        assert!(matches!(parse("export a -"), Ok(SnapshotAction::Export { to: None, .. })));
        assert!(matches!(parse("export a ./-"), Ok(SnapshotAction::Export { to: Some(_), .. })));
        assert!(matches!(parse("import - --json"), Ok(SnapshotAction::Import { from: None, .. })));
        assert!(parse("export a - --json").unwrap_err().contains("name a file"));
    }

    #[test]
    fn bad_names_and_times_are_refused_before_the_daemon_is_asked() {
        for bad in [
            "create ../x warm",
            "create web a/b",
            "create web warm --record soon",
            "inspect ..",
            "rm ok ..",
            "rm",
            "verify -x",
            "export a/b f",
            "import f --name a/b",
            "profile show a/b",
            "profile reset ..",
            "pull a/b s3://b/p",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let empty = SnapshotAction::new(
            RawSnapshot::Push { snapshot: "a".to_owned(), location: String::new() },
            &RawGlobal::default(),
        );
        assert!(empty.is_err());
    }
}
