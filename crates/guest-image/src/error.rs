//! What can go wrong, per family of operations, with what to do about it.

use std::io;
use std::path::PathBuf;

use crate::artifacts::ArtifactsError;
use crate::process::RunError;
use crate::spec::SpecError;

/// Opening, listing, removing and storing images.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("`{name}` is no image name")]
    BadName { name: String },
    #[error("no image named `{name}`")]
    NotFound { name: String },
    #[error("image `{name}` is damaged: {why}")]
    Damaged { name: String, why: String },
    #[error("{action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another process holds the image store {} for {seconds} s", path.display())]
    Busy { path: PathBuf, seconds: u64 },
}

impl StoreError {
    /// For `map_err`: what was being done to which path.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::BadName { .. } => Some(format!(
                "use 1 to {} of a-z A-Z 0-9 . _ -, the first a letter or digit",
                vmfork_api::NAME_BYTES_MAX
            )),
            Self::NotFound { .. } => {
                Some("`vmfork image ls` lists the images; `vmfork image build` makes one".into())
            }
            Self::Damaged { name, .. } => {
                Some(format!("remove it with `vmfork image rm {name}` and build it again"))
            }
            Self::Io { source, .. } => io_remedy(source).map(str::to_owned),
            Self::Busy { .. } => Some("wait for the other build to end, then try again".into()),
        }
    }
}

/// Building an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    #[error("building a guest image needs root, to keep file owners")]
    NotRoot,
    #[error("`{program}` is not installed")]
    MissingTool { program: String, package: &'static str },
    #[error(
        "not enough room in {}: {} MiB free, about {} MiB needed",
        path.display(), free_bytes >> 20, need_bytes >> 20
    )]
    DiskFull { path: PathBuf, free_bytes: u64, need_bytes: u64 },
    #[error("the package archive cannot be reached: {detail}")]
    NoNetwork { detail: String },
    #[error("Debian {suite} has no package named `{package}`")]
    UnknownPackage { package: String, suite: String },
    #[error("the archive's signature does not check out: {detail}")]
    Keyring { detail: String },
    #[error("this host has no apt source for Debian {suite}")]
    NoSources { suite: String },
    #[error("cancelled")]
    Cancelled,
    #[error("the kernel package holds no {what}")]
    Kernel { what: String },
    #[error("kernel {version} has no module `{module}`")]
    NoModule { version: String, module: String },
    #[error("{action}")]
    Tool {
        action: &'static str,
        #[source]
        source: RunError,
    },
    #[error("{action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Artifacts(#[from] ArtifactsError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl BuildError {
    /// For `map_err`: what was being done to which path.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::NotRoot => Some("run it as root, for instance with `sudo`".into()),
            Self::MissingTool { package, .. } => Some(format!("`apt-get install {package}`")),
            Self::DiskFull { path, .. } => Some(format!(
                "free some space on the file system of {}, or use another state folder",
                path.display()
            )),
            Self::NoNetwork { .. } => Some(
                "check the network and /etc/apt; a set of packages that was built before needs none"
                    .into(),
            ),
            Self::UnknownPackage { package, .. } => Some(format!(
                "check the spelling: `apt-cache policy {package}` shows what the archive has"
            )),
            Self::Keyring { .. } => {
                Some("`apt-get install --reinstall debian-archive-keyring`".into())
            }
            Self::NoSources { .. } => {
                Some("give the image's spec a `mirror`, or choose the host's own suite".into())
            }
            Self::Cancelled => None,
            Self::Kernel { .. } | Self::NoModule { .. } => {
                Some("use Debian's own `linux-image-cloud-amd64` as the spec's `kernel`".into())
            }
            Self::Tool { .. } => None,
            Self::Io { source, .. } => io_remedy(source).map(str::to_owned),
            Self::Spec(e) => e.remedy(),
            Self::Artifacts(e) => e.remedy(),
            Self::Store(e) => e.remedy(),
        }
    }
}

/// Importing files that the user brings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    #[error("{} is no kernel for x86-64: {why}", path.display())]
    NotAKernel { path: PathBuf, why: &'static str },
    #[error("{} cannot be a root file system: {why}", path.display())]
    NotADisk { path: PathBuf, why: &'static str },
    #[error("{} cannot be an initrd: {why}", path.display())]
    NotAnInitrd { path: PathBuf, why: &'static str },
    #[error("{} has no boot sector", path.display())]
    NotBootable { path: PathBuf },
    #[error("neither an initrd nor a root file system was given")]
    NothingToBoot,
    #[error("an image named `{name}` is there already")]
    Exists { name: String },
    #[error("cancelled")]
    Cancelled,
    #[error("{action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ImportError {
    /// For `map_err`: what was being done to which path.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::NotAKernel { .. } => {
                Some("give a bzImage (Debian's /boot/vmlinuz-…) or an uncompressed vmlinux".into())
            }
            Self::NotADisk { .. } => Some(
                "give a raw file system image; `qemu-img convert -O raw` makes one of a qcow2"
                    .into(),
            ),
            Self::NotBootable { .. } => Some(
                "give a raw disk whose first sector ends in the bytes 55 aa; without one, bring a --kernel"
                    .into(),
            ),
            Self::NotAnInitrd { .. } => {
                Some("give a newc archive, compressed or not (Debian's /boot/initrd.img-…)".into())
            }
            Self::NothingToBoot => Some("add --initrd or --root".into()),
            Self::Exists { name } => {
                Some(format!("remove it first with `vmfork image rm {name}`, or ask to replace it"))
            }
            Self::Cancelled => None,
            Self::Io { source, .. } => io_remedy(source).map(str::to_owned),
            Self::Store(e) => e.remedy(),
        }
    }
}

/// Taking in an image from another host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrivalError {
    #[error("it is no image that this version can take in: {why}")]
    NoImage { why: String },
    #[error("`{file}` has {wanted} bytes, {found} have come")]
    Size { file: String, wanted: u64, found: u64 },
    #[error("`{file}` came damaged: its hash is {found}, not {wanted}")]
    Hash { file: String, wanted: String, found: String },
    #[error("`{file}` has not come")]
    Missing { file: String },
    #[error("there are other images named `{}` already", names.join("` and `"))]
    Names { names: Vec<String> },
    #[error("{action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ArrivalError {
    /// For `map_err`: what was being done to which path.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::NoImage { .. } => {
                Some("do both hosts run the same version of vmfork?".to_owned())
            }
            Self::Size { .. } | Self::Hash { .. } => Some(
                "is the image whole where it comes from? build or import it again there".into(),
            ),
            Self::Missing { .. } => None,
            Self::Names { names } => {
                Some(format!("remove one of them with `vmfork image rm {}`", names.join(" ")))
            }
            Self::Io { source, .. } => io_remedy(source).map(str::to_owned),
            Self::Store(e) => e.remedy(),
        }
    }
}

fn io_remedy(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Some("run it as root, for instance with `sudo`"),
        io::ErrorKind::StorageFull => Some("free some space on that file system"),
        io::ErrorKind::ReadOnlyFilesystem => Some("use a state folder that can be written"),
        io::ErrorKind::NotFound => Some("check the path"),
        _ => None,
    }
}
