//! Builds an image from a spec: the order of things, and when there is nothing to do.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::artifacts::Artifacts;
use crate::base::{self, Base};
use crate::error::BuildError;
use crate::kernel::Kernel;
use crate::metadata::{FileInfo, INITRD_FILE, KERNEL_FILE, Metadata, ROOT_FILE, SCHEMA};
use crate::process::{self, Cancel};
use crate::progress::{Progress, Stage};
use crate::remedy::AtPath as _;
use crate::spec::Spec;
use crate::store::{Staging, Store};
use crate::tree::{self, Tree};
use crate::{ext4, initrd};

/// Every image with the agent starts with these words.
///
/// - `console=ttyS0`: what the kernel says goes to the VM's log; `quiet` leaves oopses and panics.
/// - `panic=-1`: a guest that panics reboots at once, which the daemon takes for its end.
/// - `random.trust_cpu=on`: the first random numbers need not wait; after a fork the agent reseeds.
/// - `i8042.nokbd i8042.noaux`: no keyboard or mouse to wait for; `cryptomgr.notests`: Debian has
///   tested its kernel. Together they spare about a tenth of a boot's CPU time under TCG (3.3 s to
///   the agent's first word). `pti=off`, `mitigations=off`, `nokaslr`, `no_timer_check` and
///   `tsc=reliable` showed no gain beyond the noise.
const CMDLINE: &str =
    "console=ttyS0 quiet panic=-1 random.trust_cpu=on i8042.noaux i8042.nokbd cryptomgr.notests";

const TOOLS: [&str; 5] = ["mmdebstrap", "mke2fs", "depmod", "dpkg-deb", "tar"];

/// How to build.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The image's name.
    pub name: String,
    /// Where downloaded packages and base systems are kept between builds.
    pub cache_dir: PathBuf,
    /// Agent and libraries.
    pub artifacts: Artifacts,
    /// Build even if the image is there, from the archive as it is today.
    pub refresh: bool,
    /// Ends it from elsewhere.
    pub cancel: Cancel,
}

/// What came of a build.
#[derive(Debug, Clone)]
pub struct Built {
    /// The image as it is now.
    pub metadata: Metadata,
    /// False if it was there already, built from the same.
    pub fresh: bool,
}

/// Build an image and put it into `store`, in place of one of that name.
///
/// # Errors
/// See [`BuildError`]. Nothing is left behind, and an image that was there stays as it was.
pub fn build(
    spec: &Spec,
    store: &Store,
    options: &BuildOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Built, BuildError> {
    spec.check()?;
    let input_hash = input_hash(spec, &options.artifacts)?;
    if !options.refresh
        && let Ok(files) = store.open(&options.name)
        && files.metadata.input_hash.as_deref() == Some(&input_hash)
    {
        return Ok(Built { metadata: files.metadata, fresh: false });
    }
    if !rustix::process::geteuid().is_root() {
        return Err(BuildError::NotRoot);
    }
    for program in TOOLS {
        if !process::on_path(program) {
            let package = base::package_of(program);
            return Err(BuildError::MissingTool { program: program.into(), package });
        }
    }
    let staging = store.stage(&options.name)?;
    base::check_room(staging.path(), base::NEED_BYTES / 2)?;
    let mut last = None;
    let mut progress = |news: Progress| {
        // Report each stage once: several sources announce it.
        if let Progress::Stage(stage) = &news {
            if last.is_some_and(|l| l >= *stage) {
                return;
            }
            last = Some(*stage);
        }
        progress(news);
    };
    let base =
        base::ensure(spec, &options.cache_dir, options.refresh, &options.cancel, &mut progress)?;
    let metadata = assemble(spec, options, &base, &staging, input_hash, &mut progress)?;
    if options.cancel.is_cancelled() {
        return Err(BuildError::Cancelled);
    }
    progress(Progress::Stage(Stage::Store));
    store.commit(staging, &metadata)?;
    Ok(Built { metadata, fresh: true })
}

fn assemble(
    spec: &Spec,
    options: &BuildOptions,
    base: &Base,
    staging: &Staging,
    input_hash: String,
    progress: &mut dyn FnMut(Progress),
) -> Result<Metadata, BuildError> {
    let cancel = &options.cancel;
    let out = staging.path();

    progress(Progress::Stage(Stage::Kernel));
    let kernel_dir = out.join("kernel-package");
    let kernel = Kernel::unpack(&base.kernel_package(), &kernel_dir, cancel)?;
    let modules = kernel.modules(cancel)?;
    let vmgenid = kernel.has_vmgenid();
    let kernel_file = out.join(KERNEL_FILE);
    fs::copy(&kernel.image, &kernel_file).map_err(BuildError::io("write", &kernel_file))?;
    let initrd_file = out.join(INITRD_FILE);
    let agent = options.artifacts.read_agent()?;
    let epoch_u32 = u32::try_from(base.epoch_s).unwrap_or(u32::MAX);
    initrd::write(&initrd_file, &agent, &modules, epoch_u32)
        .map_err(BuildError::io("write", &initrd_file))?;
    remove_tree(&kernel_dir)?;

    progress(Progress::Stage(Stage::Assemble));
    let root = out.join("root");
    base.unpack(&root, cancel)?;
    let tree = Tree::open(&root).map_err(BuildError::io("open", &root))?;
    add_files(&tree, spec, &options.artifacts)?;
    let size = tree.measure(base.epoch_s).map_err(BuildError::io("measure", &root))?;
    let tree_hash = tree.hash().map_err(BuildError::io("read", &root))?;

    progress(Progress::Stage(Stage::Filesystem));
    let root_file = out.join(ROOT_FILE);
    ext4::write(&root, &root_file, size, base.epoch_s, cancel)?;
    remove_tree(&root)?;

    let mut files = BTreeMap::new();
    for name in [KERNEL_FILE, INITRD_FILE, ROOT_FILE] {
        let path = out.join(name);
        let info = file_info(&path).map_err(BuildError::io("read", &path))?;
        files.insert(name.to_owned(), info);
    }
    let cmdline = match &spec.cmdline {
        Some(more) => format!("{CMDLINE} {more}"),
        None => CMDLINE.to_owned(),
    };
    Ok(Metadata {
        schema: SCHEMA.into(),
        name: options.name.clone(),
        created_unix_ms: now_unix_ms(),
        origin: format!("debian {}", spec.suite),
        kernel_version: kernel.version,
        cmdline,
        packages: spec.sorted_packages(),
        agent: true,
        default_memory_mib: spec.default_memory_mib,
        vmgenid,
        root_overlay: true,
        root_disk: true,
        root_pmem: modules.for_pmem.is_some(),
        input_hash: Some(input_hash),
        tree_hash: Some(tree_hash),
        root_stored: None,
        root_object: None,
        seeded: None,
        files,
    })
}

fn add_files(tree: &Tree, spec: &Spec, artifacts: &Artifacts) -> Result<(), BuildError> {
    let put = |from: &Path, to: &Path, mode| {
        tree.copy(from, to, mode).map_err(BuildError::io("add to the image", from))
    };
    if let Some(overlay) = &artifacts.overlay {
        put(overlay, Path::new("/"), None)?;
    }
    for file in &spec.files {
        put(&file.from, &file.to, file.mode_bits()?)?;
    }
    if let Some(command) = &spec.firstboot {
        let to = Path::new("/etc/vmfork/firstboot");
        let script = format!("#!/bin/sh\nset -e\n{command}\n");
        tree.write(to, script.as_bytes(), 0o755).map_err(BuildError::io("add to the image", to))?;
    }
    Ok(())
}

fn input_hash(spec: &Spec, artifacts: &Artifacts) -> Result<String, BuildError> {
    let mut files = blake3::Hasher::new();
    for file in &spec.files {
        let hash = tree::hash_of(&file.from).map_err(BuildError::io("read", &file.from))?;
        files.update(hash.as_bytes());
    }
    let files = files.finalize().to_hex();
    Ok(spec.input_hash(files.as_str(), &artifacts.hash()?).to_hex().to_string())
}

fn remove_tree(path: &Path) -> Result<(), BuildError> {
    fs::remove_dir_all(path).map_err(BuildError::io("remove", path))
}

/// Length and hash of a file.
pub(crate) fn file_info(path: &Path) -> io::Result<FileInfo> {
    let mut file = File::open(path)?;
    let mut hash = blake3::Hasher::new();
    let mut buffer = vec![0_u8; 1 << 20];
    let mut size_bytes = 0_u64;
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => {
                hash.update(&buffer[..n]);
                size_bytes += n as u64;
            }
        }
    }
    Ok(FileInfo { size_bytes, blake3: hash.finalize().to_hex().to_string() })
}

pub(crate) fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
