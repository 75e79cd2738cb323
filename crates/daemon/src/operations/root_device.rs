//! How a VM that boots reads the root of its image: as persistent memory, or from a block device.

use vmfork_api::disk::RootDevice;
use vmfork_guest_image::ImageFiles;
use vmfork_guest_link::agent::AgentInfo;
use vmfork_host::config::Config;
use vmfork_host::vm::{MachineSpec, pmem_bytes, pmem_cost_bytes};

use super::boot_disks::shares_root_disk;
use super::error::RunError;

/// A guest spends at most one part of this many of its memory on the pages of persistent memory.
const COST_PART: u64 = 8;

/// With 256 GiB of memory it fits into 39 bits of addresses, which the smallest processors have.
const PMEM_BYTES_MAX: u64 = 128 << 30;

/// What was chosen.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    /// Size of the persistent memory; `None`: a block device.
    pub(super) pmem_bytes: Option<u64>,
    pub(super) reason: String,
}

/// Why the root can't be persistent memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoPmem {
    #[error("its root is not a file of an image, but a disk")]
    NoFile,
    #[error("the image or its kernel does not know persistent memory")]
    NotKnown,
    #[error(
        "it would take {} MiB of the guest's {} MiB, and 1/{COST_PART} at most",
        cost_bytes >> 20,
        memory_bytes >> 20
    )]
    Large { cost_bytes: u64, memory_bytes: u64 },
    #[error("the root has more than {} GiB", PMEM_BYTES_MAX >> 30)]
    TooLarge,
}

impl NoPmem {
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            Self::NoFile => {
                "leave --root-device out, or start it without `--root disk`; for a pulled image, use `vmfork image pull --wait`"
            }
            Self::NotKnown => {
                "build the image again: `vmfork image build`; or leave --root-device out"
            }
            Self::Large { .. } => "give it more memory, or leave --root-device out",
            Self::TooLarge => "leave --root-device out",
        }
    }
}

/// How a VM with `memory_bytes` of memory reads the root among these files.
///
/// # Errors
/// The request insists on persistent memory, and that is impossible.
pub(super) fn choose(
    config: &Config,
    asked: Option<RootDevice>,
    files: &ImageFiles,
    memory_bytes: u64,
) -> Result<Chosen, RunError> {
    let reason = match (asked, config.root_device) {
        (Some(_), _) => "asked for",
        (None, Some(_)) => "vmforkd's --root-device",
        (None, None) => "image and memory allow it",
    };
    let chosen = |pmem_bytes, reason: &str| Chosen { pmem_bytes, reason: reason.to_owned() };
    match (asked.or(config.root_device), possible(files, memory_bytes)) {
        (Some(RootDevice::Block), _) => Ok(chosen(None, reason)),
        (_, Ok(bytes)) => Ok(chosen(Some(bytes), reason)),
        (_, Err(why)) if asked.is_some() => Err(RunError::NoPmem(why)),
        (_, Err(why)) => Ok(chosen(None, &why.to_string())),
    }
}

/// The same for a VM that boots with the disks of one with this machine: as that read it, if that
/// is still possible.
pub(super) fn choose_again(spec: &MachineSpec, files: &ImageFiles) -> Chosen {
    let reason = spec.root_device_reason.clone();
    match spec.pmem_bytes().map(|_| possible(files, spec.memory_bytes)) {
        None => Chosen { pmem_bytes: None, reason },
        Some(Ok(bytes)) => Chosen { pmem_bytes: Some(bytes), reason },
        Some(Err(why)) => Chosen { pmem_bytes: None, reason: why.to_string() },
    }
}

/// How a VM reads the root of its image, and why, for users. `agent` is what the guest said.
pub(super) fn shown(spec: &MachineSpec, agent: Option<&AgentInfo>) -> (Option<RootDevice>, String) {
    let reason = spec.root_device_reason.clone();
    let is_shared = shares_root_disk(spec);
    match (spec.pmem_bytes(), agent) {
        (Some(_), Some(agent)) if !agent.pmem_root => {
            (Some(RootDevice::Block), "the guest can't mount it with DAX: `vmfork logs`".to_owned())
        }
        (Some(_), _) => (Some(RootDevice::Pmem), reason),
        (None, _) if is_shared || spec.root_blake3().is_some() => (Some(RootDevice::Block), reason),
        (None, _) => (None, String::new()),
    }
}

fn possible(files: &ImageFiles, memory_bytes: u64) -> Result<u64, NoPmem> {
    let file_bytes = files.metadata.root_bytes().filter(|_| files.root.is_some());
    let bytes = pmem_bytes(file_bytes.ok_or(NoPmem::NoFile)?);
    if !files.metadata.root_pmem {
        return Err(NoPmem::NotKnown);
    }
    if bytes > PMEM_BYTES_MAX {
        return Err(NoPmem::TooLarge);
    }
    let cost_bytes = pmem_cost_bytes(bytes);
    if cost_bytes > memory_bytes / COST_PART {
        return Err(NoPmem::Large { cost_bytes, memory_bytes });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::{Path, PathBuf};

    use vmfork_host::vm::{DriveSpec, Inherited};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn files(root_pmem: bool, root: bool) -> ImageFiles {
        let metadata = serde_json::json!({
            "schema": "", "name": "web", "created_unix_ms": 0, "origin": "", "kernel_version": "",
            "cmdline": "", "packages": [], "agent": true, "default_memory_mib": 512,
            "input_hash": null, "tree_hash": null, "root_pmem": root_pmem,
            "files": {"root.img": {"size_bytes": GIB - (2 << 20), "blake3": "ab12"}},
        });
        ImageFiles {
            metadata: serde_json::from_value(metadata).expect("an image"),
            kernel: None,
            initrd: None,
            root: root.then(|| File::open("/dev/null").expect("there")),
            folder: PathBuf::new(),
        }
    }

    #[test]
    fn persistent_memory_is_chosen_where_it_can_be_and_refused_with_the_reason_where_not() {
        let known = files(true, true);
        // 16 MiB for the pages of 1 GiB are an eighth of 128 MiB.
        let mut config = vmfork_host::testing::config(Path::new("/"));
        let choose = |asked, files: &ImageFiles, memory_bytes| {
            super::choose(&config, asked, files, memory_bytes)
        };
        let chosen = choose(None, &known, 128 << 20).expect("either");
        assert_eq!(chosen.pmem_bytes, Some(GIB));
        let asked = choose(Some(RootDevice::Pmem), &known, 128 << 20).expect("possible");
        assert_eq!((asked.pmem_bytes, asked.reason.as_str()), (Some(GIB), "asked for"));
        let asked = choose(Some(RootDevice::Block), &known, GIB).expect("always");
        assert_eq!((asked.pmem_bytes, asked.reason.as_str()), (None, "asked for"));
        for (files, memory_bytes, why) in [
            (files(true, true), 126 << 20, "it would take 16 MiB of the guest's 126 MiB"),
            (files(false, true), GIB, "does not know"),
            (files(true, false), GIB, "not a file of an image"),
        ] {
            let chosen = choose(None, &files, memory_bytes).expect("either");
            assert!(chosen.pmem_bytes.is_none() && chosen.reason.contains(why), "{chosen:?}");
            let refused = choose(Some(RootDevice::Pmem), &files, memory_bytes);
            let refused = refused.expect_err("impossible").to_body("run it");
            assert!(refused.cause.is_some_and(|cause| cause.contains(why)), "{why}");
            assert!(refused.remedy.is_some(), "{why}");
        }
        config.root_device = Some(RootDevice::Block);
        let of_host = super::choose(&config, None, &known, GIB).expect("either");
        assert_eq!(
            (of_host.pmem_bytes, of_host.reason.as_str()),
            (None, "vmforkd's --root-device")
        );
        let asked = super::choose(&config, Some(RootDevice::Pmem), &known, GIB);
        assert_eq!(asked.expect("possible").pmem_bytes, Some(GIB));
    }

    #[test]
    fn a_vm_that_boots_again_reads_its_root_as_before_if_it_can() {
        let spec = |pmem_bytes| {
            let drives = vec![DriveSpec::Root { blake3: "ab".to_owned(), pmem_bytes }];
            let root_device_reason = "so it is".to_owned();
            MachineSpec { drives, root_device_reason, ..Inherited::of_a_test(GIB).spec }
        };
        let known = files(true, true);
        let again = |pmem_bytes, files| {
            let Chosen { pmem_bytes, reason } = choose_again(&spec(pmem_bytes), files);
            (pmem_bytes, reason)
        };
        assert_eq!(again(None, &known), (None, "so it is".to_owned()));
        // The image has another size now.
        assert_eq!(again(Some(4 << 20), &known), (Some(GIB), "so it is".to_owned()));
        let (bytes, reason) = again(Some(GIB), &files(false, true));
        assert!(bytes.is_none() && reason.contains("does not know"), "{reason}");
    }

    #[test]
    fn what_the_guest_says_of_its_root_counts() {
        let spec = |pmem_bytes| {
            let drives = vec![DriveSpec::Root { blake3: "ab".to_owned(), pmem_bytes }];
            let root_device_reason = "so it is".to_owned();
            MachineSpec { drives, root_device_reason, ..Inherited::of_a_test(64 << 20).spec }
        };
        let agent = |pmem_root| AgentInfo {
            agent_version: String::new(),
            kernel: String::new(),
            cpus: 1,
            firstboot: None,
            pmem_root,
        };
        let (block, pmem) = (spec(None), spec(Some(GIB)));
        assert_eq!(shown(&block, Some(&agent(false))).0, Some(RootDevice::Block));
        assert_eq!(shown(&pmem, None).0, Some(RootDevice::Pmem));
        assert_eq!(shown(&pmem, Some(&agent(true))), (Some(RootDevice::Pmem), "so it is".into()));
        let (device, reason) = shown(&pmem, Some(&agent(false)));
        assert!(device == Some(RootDevice::Block) && reason.contains("DAX"), "{reason}");
        assert_eq!(shown(&Inherited::of_a_test(64 << 20).spec, None).0, None);
    }
}
