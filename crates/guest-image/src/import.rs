//! Takes over what the user brings: a kernel with an initrd and a root file system, or a disk that
//! boots by itself. A root or a disk that is an object of an object store stays there.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use vmfork_api::disk::{DISK_BYTES_MAX, object_location_is_valid};

use crate::build::{file_info, now_unix_ms};
use crate::error::{ImportError, StoreError};
use crate::metadata::{INITRD_FILE, KERNEL_FILE, Metadata, ROOT_FILE, SCHEMA};
use crate::process::Cancel;
use crate::qcow2;
use crate::remedy::AtPath as _;
use crate::store::Store;

/// For a root file system without the agent in an initrd.
const DEFAULT_CMDLINE: &str = "console=ttyS0 root=/dev/vda ro panic=-1";

const SECTOR_BYTES: u64 = 512;

/// How to import.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The kernel's command line; default: serial console, root on the first virtio disk.
    pub cmdline: Option<String>,
    /// The user says that the vmfork agent runs in it.
    pub agent: bool,
    /// Default guest memory, in MiB.
    pub default_memory_mib: u32,
    /// The root file system, or the disk that boots, is a qcow2 file.
    pub is_qcow2: bool,
    /// Put it in place of an image of that name.
    pub replace: bool,
    /// Ends it from elsewhere.
    pub cancel: Cancel,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self {
            cmdline: None,
            agent: false,
            default_memory_mib: 512,
            is_qcow2: false,
            replace: false,
            cancel: Cancel::default(),
        }
    }
}

/// Where a root file system is, or a disk that boots.
#[derive(Debug, Clone, Copy)]
pub enum RootFrom<'a> {
    File(&'a Path),
    /// A raw object of an object store, `s3://BUCKET/KEY`. VMs fetch what they read of it, so it is
    /// not looked at here.
    Object(&'a str),
}

/// What is brought.
#[derive(Debug, Clone, Copy)]
pub enum Brought<'a> {
    /// A kernel, and at least one of the others.
    Kernel { kernel: &'a Path, initrd: Option<&'a Path>, root: Option<RootFrom<'a>> },
    /// A disk with a boot sector. Its VMs have no devices but the disk and a serial port, and no
    /// agent.
    BootDisk(RootFrom<'a>),
}

impl<'a> Brought<'a> {
    fn root(self) -> Option<RootFrom<'a>> {
        match self {
            Self::Kernel { root, .. } => root,
            Self::BootDisk(disk) => Some(disk),
        }
    }

    fn object(self) -> Option<&'a str> {
        match self.root()? {
            RootFrom::Object(location) => Some(location),
            RootFrom::File(_) => None,
        }
    }

    /// The files, each with its name in the store.
    fn files(self) -> [(Option<&'a Path>, &'static str); 3] {
        let root = match self.root() {
            Some(RootFrom::File(file)) => Some(file),
            Some(RootFrom::Object(_)) | None => None,
        };
        let (kernel, initrd) = match self {
            Self::Kernel { kernel, initrd, .. } => (Some(kernel), initrd),
            Self::BootDisk(_) => (None, None),
        };
        [(kernel, KERNEL_FILE), (initrd, INITRD_FILE), (root, ROOT_FILE)]
    }

    /// All but the disk. → the kernel's version, as far as it tells.
    fn check(self) -> Result<String, ImportError> {
        match self {
            Self::Kernel { initrd: None, root: None, .. } => Err(ImportError::NothingToBoot),
            Self::Kernel { kernel, initrd, .. } => {
                let version = check_kernel(kernel)?;
                initrd.map_or(Ok(()), check_initrd)?;
                Ok(version)
            }
            Self::BootDisk(_) => Ok(String::new()),
        }
    }

    /// The disk, raw.
    fn check_disk(self, disk: &Path) -> Result<(), ImportError> {
        match self {
            Self::Kernel { .. } => check_root(disk),
            Self::BootDisk(_) => check_boot_disk(disk),
        }
    }
}

/// Copy the files into the store as image `name`. Holes in them stay holes where the file system
/// can.
///
/// # Errors
/// A file that is not what it should be, or cannot be read; a name that is taken.
pub fn import(
    store: &Store,
    name: &str,
    brought: Brought<'_>,
    options: &ImportOptions,
) -> Result<Metadata, ImportError> {
    if let Some(location) = brought.object() {
        let location = || location.to_owned();
        if !object_location_is_valid(&location()) {
            return Err(ImportError::Location { location: location() });
        }
        if options.is_qcow2 {
            return Err(ImportError::RawObject { location: location() });
        }
    }
    if options.is_qcow2 && brought.root().is_none() {
        return Err(ImportError::NoDisk);
    }
    match store.metadata(name) {
        Err(StoreError::NotFound { .. }) => {}
        Ok(_) | Err(StoreError::Damaged { .. }) if options.replace => {}
        Ok(_) | Err(StoreError::Damaged { .. }) => {
            return Err(ImportError::Exists { name: name.into() });
        }
        Err(e) => return Err(e.into()),
    }
    let kernel_version = brought.check()?;
    let staging = store.stage(name)?;
    let mut files = BTreeMap::new();
    for (from, file_name) in brought.files() {
        let Some(from) = from else { continue };
        let to = staging.path().join(file_name);
        if file_name == ROOT_FILE && options.is_qcow2 {
            convert(from, &to, &options.cancel)?;
            brought.check_disk(&to).map_err(|error| error.of(from))?;
        } else {
            if file_name == ROOT_FILE {
                brought.check_disk(from)?;
            }
            copy(from, &to, &options.cancel)?;
        }
        let info = file_info(&to).map_err(ImportError::io("read back", &to))?;
        files.insert(file_name.to_owned(), info);
    }
    let metadata = Metadata {
        schema: SCHEMA.into(),
        name: name.into(),
        created_unix_ms: now_unix_ms(),
        origin: "imported".into(),
        kernel_version,
        cmdline: options.cmdline.clone().unwrap_or_else(|| DEFAULT_CMDLINE.into()),
        packages: Vec::new(),
        agent: options.agent && matches!(brought, Brought::Kernel { .. }),
        default_memory_mib: options.default_memory_mib,
        vmgenid: None,
        root_overlay: false,
        root_disk: false,
        root_pmem: false,
        input_hash: None,
        tree_hash: None,
        root_stored: None,
        root_object: brought.object().map(ToOwned::to_owned),
        seeded: None,
        files,
    };
    store.commit(staging, &metadata)?;
    Ok(metadata)
}

fn convert(from: &Path, to: &Path, cancel: &Cancel) -> Result<(), ImportError> {
    let target = File::create(to).map_err(ImportError::io("make", to))?;
    let found = rustix::fs::fstatvfs(&target);
    let found = found.map_err(|errno| ImportError::io("look at", to)(errno.into()))?;
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    let (min_bytes, max_bytes) = (SECTOR_BYTES, DISK_BYTES_MAX);
    let bounds = qcow2::Bounds { min_bytes, max_bytes, free_bytes };
    match qcow2::convert(from, to, bounds, cancel) {
        Err(_) if cancel.is_cancelled() => Err(ImportError::Cancelled),
        converted => Ok(converted?),
    }
}

fn head(path: &Path, bytes: u64) -> Result<(Vec<u8>, u64), ImportError> {
    let fail = |e| ImportError::io("read", path)(e);
    let file = File::open(path).map_err(fail)?;
    let found = file.metadata().map_err(fail)?;
    let mut head = Vec::new();
    if found.is_file() {
        file.take(bytes).read_to_end(&mut head).map_err(fail)?;
    }
    Ok((head, found.len()))
}

/// A bzImage tells its version, an ELF does not.
fn check_kernel(path: &Path) -> Result<String, ImportError> {
    const HEAD_BYTES: u64 = 64 << 10;
    let (head, _) = head(path, HEAD_BYTES)?;
    let refuse = |why| Err(ImportError::NotAKernel { path: path.into(), why });
    if head.starts_with(b"\x7fELF") {
        return match head.get(4..6) {
            Some([2, 1]) if head.get(18..20) == Some(&[62, 0]) => Ok(String::new()),
            _ => refuse("an ELF of another architecture"),
        };
    }
    if head.get(0x1fe..0x200) != Some(&[0x55, 0xaa]) || head.get(0x202..0x206) != Some(b"HdrS") {
        return refuse("neither a bzImage nor an ELF");
    }
    // kernel_version of the setup header: where the text is, less 0x200.
    let Some(&[low, high]) = head.get(0x20e..0x210) else { return refuse("truncated") };
    let at = usize::from(u16::from_le_bytes([low, high])) + 0x200;
    let text = head.get(at..).unwrap_or_default();
    let version: Vec<u8> =
        text.iter().copied().take(128).take_while(|b| b.is_ascii_graphic()).collect();
    Ok(String::from_utf8(version).unwrap_or_default())
}

fn check_initrd(path: &Path) -> Result<(), ImportError> {
    const MAGIC: [&[u8]; 9] = [
        b"070701",
        b"070702",
        b"\x1f\x8b",
        b"\xfd7zXZ\0",
        b"\x28\xb5\x2f\xfd",
        b"\x02\x21\x4c\x18",
        b"\x89LZO",
        b"BZh",
        b"\x5d\x00\x00",
    ];
    let (head, _) = head(path, 16)?;
    if MAGIC.iter().any(|m| head.starts_with(m)) {
        Ok(())
    } else {
        Err(ImportError::NotAnInitrd { path: path.into(), why: "unknown archive format" })
    }
}

fn check_root(path: &Path) -> Result<(), ImportError> {
    let (head, bytes) = head(path, 16)?;
    let refuse = |why| Err(ImportError::NotADisk { path: path.into(), why });
    if head.is_empty() {
        refuse("not a file, or empty")
    } else if head.starts_with(b"QFI\xfb") {
        refuse("a qcow2 file")
    } else if bytes % SECTOR_BYTES != 0 {
        refuse("its length is not a multiple of 512 bytes")
    } else {
        Ok(())
    }
}

/// The firmware starts a disk only by this mark at the end of its first sector.
fn check_boot_disk(path: &Path) -> Result<(), ImportError> {
    let (head, _) = head(path, SECTOR_BYTES)?;
    if head.get(510..512) == Some(&[0x55, 0xaa]) {
        check_root(path)
    } else {
        Err(ImportError::NotBootable { path: path.into() })
    }
}

/// Copy with holes: a block of zeros is skipped, not written.
fn copy(from: &Path, to: &Path, cancel: &Cancel) -> Result<(), ImportError> {
    const BLOCK_BYTES: usize = 1 << 20;
    let mut source = File::open(from).map_err(ImportError::io("open", from))?;
    let mut target = File::create(to).map_err(ImportError::io("make", to))?;
    let mut block = vec![0_u8; BLOCK_BYTES];
    let mut length = 0_u64;
    loop {
        if cancel.is_cancelled() {
            return Err(ImportError::Cancelled);
        }
        let n = source.read(&mut block).map_err(ImportError::io("read", from))?;
        if n == 0 {
            break;
        }
        length += n as u64;
        if block[..n].iter().all(|b| *b == 0) {
            target.seek(SeekFrom::Start(length)).map(drop)
        } else {
            target.write_all(&block[..n])
        }
        .map_err(ImportError::io("write", to))?;
    }
    target.set_len(length).map_err(ImportError::io("write", to))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::metadata::RootElsewhere;
    use crate::remedy::Remedy as _;

    fn bzimage() -> Vec<u8> {
        let mut kernel = vec![0_u8; 0x1000];
        kernel[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        kernel[0x202..0x206].copy_from_slice(b"HdrS");
        kernel[0x20e..0x210].copy_from_slice(&0x300_u16.to_le_bytes());
        kernel[0x500..0x50c].copy_from_slice(b"6.1.0-9 (x)\0");
        kernel
    }

    #[test]
    fn what_the_user_brings_is_copied_and_described() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("images"));
        let path = |name: &str| dir.path().join(name);
        fs::write(path("k"), bzimage()).unwrap();
        fs::write(path("i"), b"070701rest").unwrap();
        let mut root = vec![0_u8; 3 << 20];
        root[2 << 20] = 7;
        fs::write(path("r"), &root).unwrap();
        let options = ImportOptions::default();
        let (k, i, r) = (path("k"), path("i"), path("r"));
        let whole =
            Brought::Kernel { kernel: &k, initrd: Some(&i), root: Some(RootFrom::File(&r)) };
        let metadata = import(&store, "mine", whole, &options).unwrap();
        assert_eq!(metadata.kernel_version, "6.1.0-9");
        assert!(!metadata.agent);
        let mut files = store.open("mine").unwrap();
        let mut copy = Vec::new();
        files.root.as_mut().unwrap().read_to_end(&mut copy).unwrap();
        assert!(copy == root);
        let again = import(&store, "mine", whole, &options).unwrap_err();
        assert_eq!(again.to_string(), "an image named `mine` already exists");
        let replace = ImportOptions { replace: true, ..options };
        let root = Some(RootFrom::File(&r));
        let no_initrd = Brought::Kernel { kernel: &k, initrd: None, root };
        import(&store, "mine", no_initrd, &replace).unwrap();
        assert!(store.open("mine").unwrap().initrd.is_none());
    }

    #[test]
    fn a_disk_that_boots_needs_no_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("images"));
        let disk = dir.path().join("disk");
        let mut sector = vec![0_u8; 512];
        fs::write(&disk, &sector).unwrap();
        let options = ImportOptions { agent: true, ..ImportOptions::default() };
        let brought = Brought::BootDisk(RootFrom::File(&disk));
        let bring = |options| import(&store, "tiny", brought, options);
        let error = bring(&options).unwrap_err();
        assert!(error.to_string().ends_with("disk has no boot sector"), "{error}");
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        fs::write(&disk, &sector).unwrap();
        assert!(!bring(&options).unwrap().agent, "no agent could reply");
        let files = store.open("tiny").unwrap();
        assert!(files.kernel.is_none() && files.initrd.is_none() && files.root.is_some());
    }

    #[test]
    fn a_root_that_is_an_object_stays_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("images"));
        let kernel = dir.path().join("k");
        fs::write(&kernel, bzimage()).unwrap();
        let of = |location| {
            let root = Some(RootFrom::Object(location));
            Brought::Kernel { kernel: &kernel, initrd: None, root }
        };
        let options = ImportOptions::default();
        let location = "s3://bases/debian.raw";
        import(&store, "far", of(location), &options).unwrap();
        let files = store.open("far").unwrap();
        assert!(files.root.is_none() && files.kernel.is_some());
        let elsewhere = RootElsewhere::Object(location.to_owned());
        assert_eq!(files.metadata.root_elsewhere(), Some(elsewhere));
        let disk = Brought::BootDisk(RootFrom::Object(location));
        import(&store, "disk", disk, &options).unwrap();
        assert!(store.open("disk").unwrap().kernel.is_none(), "it boots by itself");
        let qcow2 = ImportOptions { is_qcow2: true, ..options.clone() };
        let refused = import(&store, "q", of(location), &qcow2).unwrap_err();
        assert!(refused.to_string().contains("is raw") && refused.remedy().is_some(), "{refused}");
        let refused = import(&store, "q", of("s3://bases"), &options).unwrap_err();
        assert!(refused.to_string().contains("s3://BUCKET/KEY"), "{refused}");
        assert!(store.metadata("q").is_err());
    }

    #[test]
    fn files_that_are_something_else_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, b"QFI\xfb............").unwrap();
        let what = path.display().to_string();
        let text = |e: ImportError| e.to_string();
        assert_eq!(
            text(check_kernel(&path).unwrap_err()),
            format!("{what} is not an x86-64 kernel: neither a bzImage nor an ELF")
        );
        let error = check_root(&path).unwrap_err();
        assert!(error.remedy().unwrap().contains("--format qcow2"));
        assert_eq!(text(error), format!("{what} cannot be a root file system: a qcow2 file"));
        assert!(check_initrd(&path).is_err());
        assert!(check_root(Path::new("/dev/null")).is_err());
        fs::write(&path, &bzimage()[..0x208]).unwrap();
        assert!(check_kernel(&path).is_err());
    }
}
