//! Errors of what several modules do together, one enum per family of operations, each with its
//! [`Remedy`].

use std::path::{Path, PathBuf};

use crate::artifacts::ArtifactsError;
use crate::process::RunError;
use crate::qcow2::Qcow2Error;
use crate::remedy::{PathError, Remedy};
use crate::spec::SpecError;

/// Opening, listing, removing and storing images.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("`{name}` is not a valid image name")]
    BadName { name: String },
    #[error("no image named `{name}`")]
    NotFound { name: String },
    #[error("image `{name}` is damaged: {why}")]
    Damaged { name: String, why: String },
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("the image store {} is locked by another process for {seconds} s", path.display())]
    Busy { path: PathBuf, seconds: u64 },
}

impl Remedy for StoreError {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::BadName { .. } => Some(format!(
                "use 1 to {} of a-z A-Z 0-9 . _ -, starting with a letter or digit",
                vmfork_api::NAME_BYTES_MAX
            )),
            Self::NotFound { .. } => Some(
                "list the images with `vmfork image ls`, or build one with `vmfork image build`"
                    .into(),
            ),
            Self::Damaged { name, .. } => {
                Some(format!("remove it with `vmfork image rm {name}` and build it again"))
            }
            Self::Path(e) => e.remedy(),
            Self::Busy { .. } => Some("try again when the other build has ended".into()),
        }
    }
}

/// Building an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    #[error("a build of a guest image needs root, to keep file owners")]
    NotRoot,
    #[error("`{program}` is not installed")]
    MissingTool { program: String, package: &'static str },
    #[error(
        "not enough space in {}: {} MiB free, about {} MiB needed",
        path.display(), free_bytes >> 20, need_bytes >> 20
    )]
    DiskFull { path: PathBuf, free_bytes: u64, need_bytes: u64 },
    #[error("the package archive cannot be reached: {detail}")]
    NoNetwork { detail: String },
    #[error("Debian {suite} has no package named `{package}`")]
    UnknownPackage { package: String, suite: String },
    #[error("the signature of the package archive is not valid: {detail}")]
    Keyring { detail: String },
    #[error("this host has no apt source for Debian {suite}")]
    NoSources { suite: String },
    #[error("cancelled")]
    Cancelled,
    #[error("the kernel package does not contain {what}")]
    Kernel { what: String },
    #[error("kernel {version} has no module `{module}`")]
    NoModule { version: String, module: String },
    #[error("{action}")]
    Tool {
        action: &'static str,
        #[source]
        source: RunError,
    },
    #[error(transparent)]
    Path(#[from] PathError),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Artifacts(#[from] ArtifactsError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Remedy for BuildError {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::NotRoot => Some("run it as root, for example with `sudo`".into()),
            Self::MissingTool { package, .. } => {
                Some(format!("install it with `apt-get install {package}`"))
            }
            Self::DiskFull { path, .. } => Some(format!(
                "free space on the file system of {}, or use another state folder",
                path.display()
            )),
            Self::NoNetwork { .. } => {
                Some("check the network and /etc/apt; packages in the cache need no network".into())
            }
            Self::UnknownPackage { package, .. } => {
                Some(format!("check the name with `apt-cache policy {package}`"))
            }
            Self::Keyring { .. } => {
                Some("run `apt-get install --reinstall debian-archive-keyring`".into())
            }
            Self::NoSources { .. } => {
                Some("set `mirror` in the spec, or use the suite of the host".into())
            }
            Self::Cancelled => None,
            Self::Kernel { .. } | Self::NoModule { .. } => Some(
                "set `kernel` in the spec to `linux-image-cloud-amd64`, the Debian kernel".into(),
            ),
            Self::Tool { .. } => None,
            Self::Path(e) => e.remedy(),
            Self::Spec(e) => e.remedy(),
            Self::Artifacts(e) => e.remedy(),
            Self::Store(e) => e.remedy(),
        }
    }
}

/// Importing files of the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    #[error("{} is not an x86-64 kernel: {why}", path.display())]
    NotAKernel { path: PathBuf, why: &'static str },
    #[error("{} cannot be a root file system: {why}", path.display())]
    NotADisk { path: PathBuf, why: &'static str },
    #[error("{} cannot be an initrd: {why}", path.display())]
    NotAnInitrd { path: PathBuf, why: &'static str },
    #[error("{} has no boot sector", path.display())]
    NotBootable { path: PathBuf },
    #[error("the image has neither an initrd nor a root file system")]
    NothingToBoot,
    #[error("--format is given, and no disk that is of it")]
    NoDisk,
    #[error("`{location}` is no object: write s3://BUCKET/KEY")]
    Location { location: String },
    #[error("`{location}` is raw, as all objects are, and not qcow2")]
    RawObject { location: String },
    #[error("an image named `{name}` already exists")]
    Exists { name: String },
    #[error("cancelled")]
    Cancelled,
    #[error(transparent)]
    Qcow2(#[from] Qcow2Error),
    #[error(transparent)]
    Path(#[from] PathError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ImportError {
    /// The same, of the file that the user brought.
    pub(crate) fn of(self, brought: &Path) -> Self {
        let path = brought.to_owned();
        match self {
            Self::NotADisk { why, .. } => Self::NotADisk { path, why },
            Self::NotBootable { .. } => Self::NotBootable { path },
            other => other,
        }
    }
}

impl Remedy for ImportError {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::NotAKernel { .. } => {
                Some("use a bzImage (such as /boot/vmlinuz-…) or an uncompressed vmlinux".into())
            }
            Self::NotADisk { .. } => Some(
                "use a raw file system image, or add --format qcow2 for one of that format".into(),
            ),
            Self::NotBootable { .. } => Some(
                "use a raw disk whose first sector ends in the bytes 55 aa, or add --kernel".into(),
            ),
            Self::NotAnInitrd { .. } => {
                Some("use a newc archive, compressed or not (such as /boot/initrd.img-…)".into())
            }
            Self::NothingToBoot => Some("add --initrd or --root".into()),
            Self::Location { .. } => None,
            Self::RawObject { .. } => {
                Some("convert it with `qemu-img convert -O raw` before you upload it".into())
            }
            Self::NoDisk => Some("add --root or --boot-disk, or leave --format out".into()),
            Self::Exists { name } => Some(format!(
                "remove it with `vmfork image rm {name}`, or replace it with --replace"
            )),
            Self::Cancelled => None,
            Self::Qcow2(e) => e.remedy(),
            Self::Path(e) => e.remedy(),
            Self::Store(e) => e.remedy(),
        }
    }
}

/// Receiving an image from another host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrivalError {
    #[error("this version cannot receive the image: {why}")]
    NoImage { why: String },
    #[error("`{file}` has {wanted} bytes, but {found} bytes arrived")]
    Size { file: String, wanted: u64, found: u64 },
    #[error("`{file}` arrived damaged: its hash is {found}, not {wanted}")]
    Hash { file: String, wanted: String, found: String },
    #[error("`{file}` did not arrive")]
    Missing { file: String },
    #[error("other images already have the names `{}`", names.join("` and `"))]
    Names { names: Vec<String> },
    #[error(transparent)]
    Path(#[from] PathError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Remedy for ArrivalError {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::NoImage { .. } => {
                Some("check that both hosts run the same version of vmfork".to_owned())
            }
            Self::Size { .. } | Self::Hash { .. } => {
                Some("check the image on its host; build or import it there again".into())
            }
            Self::Missing { .. } => None,
            Self::Names { names } => {
                Some(format!("remove one of them: `vmfork image rm {}`", names.join(" ")))
            }
            Self::Path(e) => e.remedy(),
            Self::Store(e) => e.remedy(),
        }
    }
}
