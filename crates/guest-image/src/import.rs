//! Takes over a kernel, an initrd and a root file system that the user brings.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use crate::build::{file_info, now_unix_ms};
use crate::error::{ImportError, StoreError};
use crate::metadata::{Metadata, SCHEMA};
use crate::process::Cancel;
use crate::store::{INITRD_FILE, KERNEL_FILE, ROOT_FILE, Store};

/// For a root file system without the agent in an initrd.
const DEFAULT_CMDLINE: &str = "console=ttyS0 root=/dev/vda ro panic=-1";

/// How to import.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The kernel's command line; default: serial console, root on the first virtio disk.
    pub cmdline: Option<String>,
    /// The user says that the vmfork agent runs in it.
    pub agent: bool,
    /// Memory of a VM for which nobody says, in MiB.
    pub default_memory_mib: u32,
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
            replace: false,
            cancel: Cancel::default(),
        }
    }
}

/// Copy the files into the store as image `name`. Holes in them stay holes where the file system can.
///
/// # Errors
/// A file that is not what it should be, or cannot be read; a name that is taken.
pub fn import(
    store: &Store,
    name: &str,
    kernel: &Path,
    initrd: Option<&Path>,
    root: Option<&Path>,
    options: &ImportOptions,
) -> Result<Metadata, ImportError> {
    if initrd.is_none() && root.is_none() {
        return Err(ImportError::NothingToBoot);
    }
    match store.metadata(name) {
        Err(StoreError::NotFound { .. }) => {}
        Ok(_) | Err(StoreError::Damaged { .. }) if options.replace => {}
        Ok(_) | Err(StoreError::Damaged { .. }) => {
            return Err(ImportError::Exists { name: name.into() });
        }
        Err(e) => return Err(e.into()),
    }
    let kernel_version = check_kernel(kernel)?;
    if let Some(initrd) = initrd {
        check_initrd(initrd)?;
    }
    if let Some(root) = root {
        check_root(root)?;
    }
    let staging = store.stage(name)?;
    let mut files = BTreeMap::new();
    for (from, file_name) in [(Some(kernel), KERNEL_FILE), (initrd, INITRD_FILE), (root, ROOT_FILE)]
    {
        let Some(from) = from else { continue };
        let to = staging.path().join(file_name);
        copy(from, &to, &options.cancel)?;
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
        agent: options.agent,
        default_memory_mib: options.default_memory_mib,
        vmgenid: None,
        input_hash: None,
        tree_hash: None,
        files,
    };
    store.commit(staging, &metadata)?;
    Ok(metadata)
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
            _ => refuse("an ELF for another machine"),
        };
    }
    if head.get(0x1fe..0x200) != Some(&[0x55, 0xaa]) || head.get(0x202..0x206) != Some(b"HdrS") {
        return refuse("neither a bzImage nor an ELF");
    }
    // kernel_version of the setup header: where the text is, less 0x200.
    let Some(&[low, high]) = head.get(0x20e..0x210) else { return refuse("cut short") };
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
        Err(ImportError::NotAnInitrd { path: path.into(), why: "no archive the kernel knows" })
    }
}

fn check_root(path: &Path) -> Result<(), ImportError> {
    let (head, bytes) = head(path, 16)?;
    let refuse = |why| Err(ImportError::NotADisk { path: path.into(), why });
    if head.is_empty() {
        refuse("no file, or an empty one")
    } else if head.starts_with(b"QFI\xfb") {
        refuse("a qcow2 image")
    } else if bytes % 512 != 0 {
        refuse("its length is no multiple of 512 bytes")
    } else {
        Ok(())
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
        let metadata = import(&store, "mine", &k, Some(&i), Some(&r), &options).unwrap();
        assert_eq!(metadata.kernel_version, "6.1.0-9");
        assert!(!metadata.agent);
        let mut files = store.open("mine").unwrap();
        let mut copy = Vec::new();
        files.root.as_mut().unwrap().read_to_end(&mut copy).unwrap();
        assert!(copy == root);
        let again = import(&store, "mine", &k, Some(&i), Some(&r), &options).unwrap_err();
        assert_eq!(again.to_string(), "an image named `mine` is there already");
        let replace = ImportOptions { replace: true, ..options };
        import(&store, "mine", &k, None, Some(&r), &replace).unwrap();
        assert!(store.open("mine").unwrap().initrd.is_none());
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
            format!("{what} is no kernel for x86-64: neither a bzImage nor an ELF")
        );
        let error = check_root(&path).unwrap_err();
        assert!(error.remedy().unwrap().contains("qemu-img convert"));
        assert_eq!(text(error), format!("{what} cannot be a root file system: a qcow2 image"));
        assert!(check_initrd(&path).is_err());
        assert!(check_root(Path::new("/dev/null")).is_err());
        fs::write(&path, &bzimage()[..0x208]).unwrap();
        assert!(check_kernel(&path).is_err());
    }
}
