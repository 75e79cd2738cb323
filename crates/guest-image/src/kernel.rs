//! The kernel out of its package, which is unpacked and never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::base::tool_error;
use crate::error::BuildError;
use crate::modules::{FOR_PMEM, ModuleIndex, WANTED};
use crate::process::{self, Cancel};
use crate::remedy::AtPath as _;

const UNPACK_MAX: Duration = Duration::from_secs(600);
/// Unpacked modules of a cloud kernel are about 110 MB.
const NEED_BYTES: u64 = 400 << 20;

/// A kernel's package, unpacked.
pub(crate) struct Kernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    modules: PathBuf,
}

/// The modules of an initrd, each list in load order.
pub(crate) struct Modules {
    pub(crate) always: Vec<Module>,
    /// Loaded by guests that have their root as persistent memory; `None` if the kernel can't.
    pub(crate) for_pmem: Option<Vec<Module>>,
}

/// A module as it goes into the initrd.
pub(crate) struct Module {
    /// Such as `virtio_blk.ko`.
    pub(crate) file_name: String,
    pub(crate) data: Vec<u8>,
}

impl Kernel {
    /// Unpack `package` into the new folder `to`.
    pub(crate) fn unpack(package: &Path, to: &Path, cancel: &Cancel) -> Result<Self, BuildError> {
        let mut command = Command::new("dpkg-deb");
        command.arg("--extract").arg(package).arg(to);
        process::run(command, cancel, UNPACK_MAX, &mut |_| {})
            .map_err(|e| tool_error("unpack the kernel package", e, to, NEED_BYTES))?;
        let boot = to.join("boot");
        let missing = || BuildError::Kernel { what: "boot/vmlinuz-*".into() };
        let (version, image) = fs::read_dir(&boot)
            .map_err(|_| missing())?
            .flatten()
            .find_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                Some((name.strip_prefix("vmlinuz-")?.to_owned(), entry.path()))
            })
            .ok_or_else(missing)?;
        // bookworm's kernels have their modules in /lib, later ones in /usr/lib.
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|dir| to.join(dir).join(&version))
            .into_iter()
            .find(|dir| dir.is_dir())
            .ok_or_else(|| BuildError::Kernel { what: format!("lib/modules/{version}") })?;
        Ok(Self { version, image, modules })
    }

    /// Whether it has a driver for the vmgenid device, by its configuration.
    pub(crate) fn has_vmgenid(&self) -> Option<bool> {
        let config = self.config()?;
        Some(config.lines().any(|line| matches!(line, "CONFIG_VMGENID=y" | "CONFIG_VMGENID=m")))
    }

    fn config(&self) -> Option<String> {
        fs::read_to_string(self.image.with_file_name(format!("config-{}", self.version))).ok()
    }

    /// Whether file systems on persistent memory can do without the page cache.
    fn has_dax(&self) -> bool {
        let config = self.config().unwrap_or_default();
        let has = |option| config.lines().any(|line| line == option);
        has("CONFIG_FS_DAX=y") && has("CONFIG_NVDIMM_PFN=y")
    }

    /// The modules that the initrd needs, in load order, uncompressed.
    pub(crate) fn modules(&self, cancel: &Cancel) -> Result<Modules, BuildError> {
        // The package brings no modules.dep: its installation would make one. depmod looks below
        // BASE/lib/modules, so it gets such a path where the package has another.
        let base = self.modules.ancestors().nth(3).unwrap_or(Path::new("/"));
        let mut command = Command::new("depmod");
        command.arg("--basedir").arg(base).arg(&self.version);
        process::run(command, cancel, UNPACK_MAX, &mut |_| {})
            .map_err(|e| tool_error("resolve kernel modules", e, base, NEED_BYTES))?;
        let read = |name: &str| {
            let path = self.modules.join(name);
            fs::read_to_string(&path).map_err(BuildError::io("read", &path))
        };
        let index = ModuleIndex::parse(&read("modules.dep")?, &read("modules.builtin")?);
        let paths = index
            .load_order(&WANTED)
            .map_err(|module| BuildError::NoModule { version: self.version.clone(), module })?;
        let more = index.load_order(&FOR_PMEM).ok().filter(|_| self.has_dax());
        let read_all = |paths: Vec<String>| -> Result<Vec<Module>, BuildError> {
            paths.iter().map(|path| self.module(path, cancel)).collect()
        };
        Ok(Modules { always: read_all(paths)?, for_pmem: more.map(read_all).transpose()? })
    }

    fn module(&self, path: &str, cancel: &Cancel) -> Result<Module, BuildError> {
        let mut path = self.modules.join(path);
        let program = match path.extension().and_then(|e| e.to_str()) {
            Some("xz") => Some("xz"),
            Some("zst") => Some("zstd"),
            _ => None,
        };
        if let Some(program) = program {
            let mut command = Command::new(program);
            command.args(["--decompress", "--keep", "--force", "--quiet"]).arg(&path);
            process::run(command, cancel, UNPACK_MAX, &mut |_| {})
                .map_err(|e| tool_error("uncompress a kernel module", e, &path, NEED_BYTES))?;
            path.set_extension("");
        }
        let data = fs::read(&path).map_err(BuildError::io("read", &path))?;
        let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Module { file_name, data })
    }
}
