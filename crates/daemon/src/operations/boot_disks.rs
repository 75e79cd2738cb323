//! Which disks a VM gets that boots, and what its root is.
//!
//! ```text
//!   root        drives, in their order
//!   tmpfs       the image's root (read-only)                   then the VM's own
//!   overlay     the image's root, a blank disk `root`
//!   disk        a disk `root` that begins with the image's
//! ```
//!
//! The image's root is a file, or a disk that all of its VMs share (`image`). That is one of the
//! store of snapshots, or an object of an object store.

use std::path::PathBuf;
use std::sync::Arc;

use vmfork_api::disk::{ROOT_NAME, RootDisk, root_disk};
use vmfork_api::{DiskSource, NewDisk, RunRequest};
use vmfork_guest_image::{ImageFiles, Metadata, RootElsewhere};
use vmfork_host::core::{Core, open_image};
use vmfork_host::disks::{DiskContent, DiskError};
use vmfork_host::error::Error as HostError;
use vmfork_host::vm::{DriveSpec, MachineSpec};
use vmfork_snapshots::guest_images::ROOT_DISK;

use super::error::RunError;

/// The name of the disk that is the root of an image without a file for it.
const IMAGE_NAME: &str = "image";

/// What a VM is to have.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) root: Option<RootDisk>,
    /// The first disk is the image's root, which its VMs share.
    shares_root: bool,
    pub(super) disks: Vec<NewDisk>,
}

impl Wanted {
    /// Whether the image's root, as a file, is a drive of the VM.
    pub(super) fn has_root_file(&self) -> bool {
        !self.shares_root && !matches!(self.root, Some(RootDisk::Whole { .. }))
    }
}

/// Of a VM that boots from these. If the image's root is a drive, it is among the files.
pub(super) fn drives(
    files: &ImageFiles,
    pmem_bytes: Option<u64>,
    disks: &[DiskContent],
) -> Vec<DriveSpec> {
    let root = files.root.as_ref().and(files.metadata.root_blake3());
    let root = root.map(|blake3| DriveSpec::Root { blake3: blake3.to_owned(), pmem_bytes });
    let disks = disks.iter().map(|disk| DriveSpec::Disk(disk.spec.clone()));
    root.into_iter().chain(disks).collect()
}

/// Whether the root of a VM with this machine is a disk that VMs of its image share.
pub(super) fn shares_root_disk(spec: &MachineSpec) -> bool {
    let first = spec.disks().next().filter(|(number, _)| *number == 0);
    first.is_some_and(|(_, disk)| disk.name == IMAGE_NAME && disk.read_only)
}

/// Whether VMs of an image can have such a root.
///
/// # Errors
/// They can't.
pub(super) fn check_root(
    root: Option<RootDisk>,
    of: &Metadata,
    image: &str,
) -> Result<(), RunError> {
    let image = || image.to_owned();
    match root {
        Some(RootDisk::Overlay { .. }) if !of.root_overlay => {
            Err(RunError::NoOverlay { image: image() })
        }
        Some(RootDisk::Whole { .. }) if !of.takes_root_disk() => {
            Err(RunError::NoRootDisk { image: image() })
        }
        _ => Ok(()),
    }
}

/// The disks that a VM is to have, and which of them is the root's.
///
/// # Errors
/// No VM of the image can have these.
pub(super) fn wanted(request: &RunRequest, of: &Metadata) -> Result<Wanted, RunError> {
    let root = root_disk(request.root, request.root_bytes)?;
    check_root(root, of, &request.image)?;
    let of_image = || match of.root_elsewhere() {
        Some(elsewhere) => disk_of(elsewhere),
        None => DiskSource::Image { image: request.image.clone() },
    };
    let own = match root {
        Some(RootDisk::Overlay { size_bytes }) => Some(DiskSource::Blank { size_bytes }),
        Some(RootDisk::Whole { .. }) => Some(of_image()),
        None => None,
    };
    let is_whole = matches!(root, Some(RootDisk::Whole { .. }));
    let shares_root = of.root_elsewhere().is_some() && !is_whole;
    if shares_root && request.disks.iter().any(|disk| disk.name == IMAGE_NAME) {
        return Err(vmfork_api::DiskError::Twice { name: IMAGE_NAME.to_owned() }.into());
    }
    let shared = shares_root.then(|| (IMAGE_NAME, of_image()));
    // These come first: the initrd knows them by their numbers.
    let firsts = shared.into_iter().chain(own.map(|source| (ROOT_NAME, source)));
    let firsts = firsts.map(|(name, source)| NewDisk { name: name.to_owned(), source });
    let disks = firsts.chain(request.disks.iter().cloned()).collect();
    Ok(Wanted { root, shares_root, disks })
}

fn disk_of(root: RootElsewhere) -> DiskSource {
    match root {
        RootElsewhere::Stored(snapshot) => {
            DiskSource::Snapshot { snapshot, disk: ROOT_DISK.to_owned() }
        }
        RootElsewhere::Object(location) => DiskSource::Object { location },
    }
}

/// The same; of an image whose root is no file, that.
fn resolved(core: &Core, source: DiskSource) -> DiskSource {
    match &source {
        DiskSource::Image { image } => root_elsewhere(core, image).map_or(source, disk_of),
        _ => source,
    }
}

/// Where the root of an image is, if it is no file.
pub(super) fn root_elsewhere(core: &Core, image: &str) -> Option<RootElsewhere> {
    core.images.metadata(image).ok()?.root_elsewhere()
}

/// What they hold.
///
/// # Errors
/// One of them can't be had.
pub(super) async fn contents(core: &Core, wanted: &Wanted) -> Result<Vec<DiskContent>, RunError> {
    let disks = wanted.disks.iter().cloned();
    let disks = disks.map(|disk| NewDisk { source: resolved(core, disk.source), ..disk });
    let disks: Vec<_> = disks.collect();
    let mut contents = core.disks.contents(&disks, |image| root_of(core, image)).await?;
    if disks.iter().any(|disk| matches!(disk.source, DiskSource::Object { .. })) {
        // What was fetched for VMs that have ended gives its room to this one.
        let of_host = Arc::clone(&core.disks);
        drop(tokio::task::spawn_blocking(move || of_host.prune_objects()));
    }
    let Some(first) = contents.first_mut() else { return Ok(contents) };
    if let Some(RootDisk::Whole { size_bytes: Some(size_bytes) }) = wanted.root {
        let image_bytes = first.image.size_bytes();
        if size_bytes < image_bytes {
            return Err(RunError::SmallRoot { size_bytes, image_bytes });
        }
        // Beyond the image it has zeros.
        first.spec.size_bytes = size_bytes;
    }
    first.spec.read_only |= wanted.shares_root;
    Ok(contents)
}

/// What an image's root holds.
///
/// # Errors
/// It has none, or can't be had.
pub(super) async fn root_content(core: &Core, image: &str) -> Result<DiskContent, RunError> {
    let source = resolved(core, DiskSource::Image { image: image.to_owned() });
    let disk = NewDisk { name: ROOT_NAME.to_owned(), source };
    let contents = core.disks.contents(&[disk], |image| root_of(core, image)).await?;
    let none = || DiskError::NoRoot { image: image.to_owned() };
    Ok(contents.into_iter().next().ok_or_else(none)?)
}

/// The hash of what a guest image's root holds. Empty: it is older than such hashes.
pub(super) fn root_blake3(core: &Core, image: &str) -> Result<String, RunError> {
    let files = open_image(core, image).map_err(HostError::from)?;
    Ok(files.metadata.root_blake3().unwrap_or_default().to_owned())
}

/// Above so much memory devices may not reach all of it, and Linux needs its bounce buffers.
const ALL_LOW_BYTES: u64 = 3 << 30;

/// What the kernel's command line says of a root that is persistent memory.
pub(super) fn pmem_words(spec: &MachineSpec) -> &'static str {
    match spec.pmem_bytes() {
        None => "",
        // The guest believes that memory above 4 GiB may come. It would keep 64 MiB for devices
        // that can't reach that.
        Some(_) if spec.memory_bytes <= ALL_LOW_BYTES => " vmfork.pmem=/dev/pmem0 swiotlb=noforce",
        Some(_) => " vmfork.pmem=/dev/pmem0",
    }
}

/// What the kernel's command line says of a root with a disk of its own.
pub(super) fn words(root: Option<RootDisk>) -> &'static str {
    match root {
        None => "",
        Some(RootDisk::Overlay { .. }) => " vmfork.upper=/dev/vdb",
        // `rw` is for kernels and initrds that are not ours. Of `ro` and `rw`, the last one holds.
        Some(RootDisk::Whole { .. }) => " rw vmfork.rw=/dev/vda",
    }
}

/// The file of an image's root file system.
pub(super) fn root_of(core: &Core, image: &str) -> Result<PathBuf, RunError> {
    let files = open_image(core, image).map_err(HostError::from)?;
    match &files.root {
        Some(_) => Ok(files.root_path()),
        None => Err(DiskError::NoRoot { image: image.to_owned() }.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn metadata(more: &serde_json::Value) -> Metadata {
        let mut metadata = serde_json::json!({
            "schema": "", "name": "web", "created_unix_ms": 0, "origin": "", "kernel_version": "",
            "cmdline": "", "packages": [], "agent": true, "default_memory_mib": 512,
            "input_hash": null, "tree_hash": null,
            "files": {"root.img": {"size_bytes": 1 << 20, "blake3": "ab12"}},
        });
        for (key, value) in more.as_object().expect("an object") {
            metadata[key] = value.clone();
        }
        serde_json::from_value(metadata).expect("an image")
    }

    #[test]
    fn a_root_on_a_disk_takes_the_place_of_the_images() {
        let request = |root: &str| -> RunRequest {
            let disk = serde_json::json!({"name": "data", "source": {"type": "empty"}});
            let request = serde_json::json!({"image": "web", "disks": [disk], "root": root});
            serde_json::from_value(request).expect("a request")
        };
        let old = metadata(&serde_json::json!({"input_hash": "1f"}));
        let built =
            serde_json::json!({"input_hash": "1f", "root_overlay": true, "root_disk": true});
        let (built, imported) = (metadata(&built), metadata(&serde_json::json!({})));
        for of in [&built, &imported] {
            let Wanted { root, disks, .. } = wanted(&request("disk"), of).expect("it can");
            assert_eq!(root, Some(RootDisk::Whole { size_bytes: None }));
            let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
            assert_eq!(names, ["root", "data"]);
            assert_eq!(disks[0].source, DiskSource::Image { image: "web".to_owned() });
            assert!(!wanted(&request("disk"), of).expect("it can").has_root_file());
            assert_eq!(words(root), " rw vmfork.rw=/dev/vda");
        }
        let root = wanted(&request("overlay"), &built).expect("it can").root;
        assert!(wanted(&request("overlay"), &built).expect("it can").has_root_file());
        let root_file = || File::open("/dev/null").expect("a file");
        let files = |root| ImageFiles {
            metadata: built.clone(),
            kernel: None,
            initrd: None,
            root,
            folder: PathBuf::new(),
        };
        let blake3 = "ab12".to_owned();
        let pmem_bytes = Some(4 << 20);
        let drive = DriveSpec::Root { blake3, pmem_bytes };
        assert_eq!(drives(&files(Some(root_file())), pmem_bytes, &[]), [drive]);
        assert_eq!(drives(&files(None), pmem_bytes, &[]), []);
        assert_eq!(words(root), " vmfork.upper=/dev/vdb");
        for (of, root) in [(&old, "disk"), (&old, "overlay"), (&imported, "overlay")] {
            let refused = wanted(&request(root), of).expect_err("it can't").to_body("run it");
            assert!(refused.remedy.is_some_and(|remedy| remedy.contains("image build")), "{root}");
        }
        let root = wanted(&request("tmpfs"), &imported).expect("it can").root;
        assert_eq!((root, words(root)), (None, ""));
    }

    #[test]
    fn a_root_in_persistent_memory_needs_no_bounce_buffers_in_low_memory() {
        let spec = |pmem_bytes, memory_bytes| {
            let drives = vec![DriveSpec::Root { blake3: "ab".to_owned(), pmem_bytes }];
            MachineSpec { drives, ..vmfork_host::vm::Inherited::of_a_test(memory_bytes).spec }
        };
        assert_eq!(pmem_words(&spec(None, 1 << 30)), "");
        let low = pmem_words(&spec(Some(4 << 20), 3 << 30));
        assert_eq!(low, " vmfork.pmem=/dev/pmem0 swiotlb=noforce");
        let high = pmem_words(&spec(Some(4 << 20), (3 << 30) + 1));
        assert_eq!(high, " vmfork.pmem=/dev/pmem0");
    }

    #[test]
    fn the_root_of_a_stored_image_is_a_disk_that_its_vms_share() {
        let stored = serde_json::json!({"root_overlay": true, "root_stored": "kept"});
        let of = metadata(&stored);
        let wanted = |root: &str, disk: &str| {
            let disk = serde_json::json!({"name": disk, "source": {"type": "empty"}});
            let request = serde_json::json!({"image": "web", "disks": [disk], "root": root});
            super::wanted(&serde_json::from_value(request).expect("a request"), &of)
        };
        let of_store = |disk: &NewDisk| matches!(&disk.source, DiskSource::Snapshot { snapshot, disk } if snapshot == "kept" && disk == "root");
        for (root, names, shares) in [
            ("tmpfs", &["image", "data"][..], true),
            ("overlay", &["image", "root", "data"], true),
            ("disk", &["root", "data"], false),
        ] {
            let wanted = wanted(root, "data").expect("it can");
            assert!(wanted.disks.iter().map(|disk| disk.name.as_str()).eq(names.iter().copied()));
            assert_eq!((of_store(&wanted.disks[0]), wanted.shares_root), (true, shares), "{root}");
            assert!(!wanted.has_root_file(), "{root}");
        }
        wanted("tmpfs", "image").expect_err("the name is taken");
        assert!(wanted("disk", "image").is_ok());
    }

    #[test]
    fn a_root_that_is_an_object_is_a_disk_too() {
        let location = "s3://bases/root.raw";
        let of = metadata(&serde_json::json!({"root_overlay": true, "root_object": location}));
        for (root, shares) in [("tmpfs", true), ("overlay", true), ("disk", false)] {
            let request = serde_json::json!({"image": "far", "root": root});
            let request = serde_json::from_value(request).expect("a request");
            let wanted = super::wanted(&request, &of).expect("it can");
            let object = DiskSource::Object { location: location.to_owned() };
            assert_eq!((&wanted.disks[0].source, wanted.shares_root), (&object, shares), "{root}");
            assert!(!wanted.has_root_file(), "{root}");
        }
    }
}
