//! What `vmfork disk` is to do.

use std::path::PathBuf;

use vmfork_api::{ResizeRequest, name_is_valid};

use super::{misuse, value};
use crate::args::RawDisk;
use crate::failure::Misuse;

#[derive(Debug)]
pub(crate) enum DiskAction {
    Ls,
    Inspect {
        disk: DiskName,
    },
    /// `to`: a file, or `None` for standard output.
    Export {
        disk: DiskName,
        to: Option<PathBuf>,
    },
    Resize {
        disk: DiskName,
        request: ResizeRequest,
    },
    Rm {
        disks: Vec<DiskName>,
    },
    Prune,
}

/// How a command names a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DiskName {
    OfVm { vm: String, name: String },
    Id(String),
}

impl std::fmt::Display for DiskName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OfVm { vm, name } => write!(f, "{vm}/{name}"),
            Self::Id(id) => f.write_str(id),
        }
    }
}

impl DiskName {
    fn new(text: &str) -> Result<Self, Misuse> {
        let is_id = (1..=16).contains(&text.len())
            && !text.starts_with('0')
            && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        match text.split_once('/') {
            Some((vm, name)) if name_is_valid(vm) && name_is_valid(name) => {
                Ok(Self::OfVm { vm: vm.to_owned(), name: name.to_owned() })
            }
            None if is_id => Ok(Self::Id(text.to_owned())),
            _ => misuse(format!(
                "disk `{}`: it has the form VM/NAME, or is an ID that `vmfork disk ls` prints",
                text.escape_debug()
            )),
        }
    }
}

impl DiskAction {
    pub(super) fn new(raw: RawDisk, json: bool) -> Result<Self, Misuse> {
        Ok(match raw {
            RawDisk::Ls => Self::Ls,
            RawDisk::Prune => Self::Prune,
            RawDisk::Inspect { disk } => Self::Inspect { disk: DiskName::new(&disk)? },
            RawDisk::Resize { disk, size } => {
                let request = value::new_size("disk resize", &size)?;
                Self::Resize { disk: DiskName::new(&disk)?, request }
            }
            RawDisk::Rm { disks } => {
                let disks = disks.iter().map(|disk| DiskName::new(disk));
                Self::Rm { disks: disks.collect::<Result<_, _>>()? }
            }
            RawDisk::Export { disk, file } => {
                if file.is_empty() {
                    return misuse("disk export: FILE is empty");
                }
                let to = (file != "-").then(|| PathBuf::from(file));
                if to.is_none() && json {
                    return misuse(
                        "disk export: --json uses standard output; name a file for the disk",
                    );
                }
                Self::Export { disk: DiskName::new(&disk)?, to }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_size_is_read_as_it_is_typed() {
        let resize = |size: &str| {
            let (disk, size) = ("web/data".to_owned(), size.to_owned());
            DiskAction::new(RawDisk::Resize { disk, size }, false)
        };
        let Ok(DiskAction::Resize { disk, request }) = resize("20G") else { panic!("a size") };
        assert_eq!((disk.to_string(), request.size_bytes), ("web/data".to_owned(), 20 << 30));
        for (odd, cause) in [("+1G", "not a size"), ("1K", "1 MiB to 2 TiB"), ("", "not a size")] {
            let refused = resize(odd).map(drop).expect_err("refused").to_string();
            assert!(refused.contains(cause), "{odd}: {refused}");
        }
    }

    #[test]
    fn a_disk_is_named_by_its_vm_or_its_id() {
        let of_vm = DiskName::OfVm { vm: "web".to_owned(), name: "data".to_owned() };
        assert_eq!(DiskName::new("web/data").unwrap(), of_vm);
        assert_eq!(DiskName::new("1f").unwrap(), DiskName::Id("1f".to_owned()));
        for wrong in ["", "web", "web/", "/data", "web/data/x", "01f", "1F", "../x", "a\nb/c"] {
            assert!(DiskName::new(wrong).is_err(), "{wrong}");
        }
    }
}
