//! What `vmfork image` is to do.

use std::path::{Path, PathBuf};

use vmfork_guest_image::{Brought, ExtraFile, ImportOptions, RootFrom, Spec};

use super::{misuse, value};
use crate::args::{RawFormat, RawImage, RawImageBuild, RawImageImport, RawImageProfile};
use crate::failure::{Misuse, with_remedy};

/// Name and contents of the image that is built when nothing is said.
const DEFAULT_NAME: &str = "default";
const DEFAULT_SPEC: &str = include_str!("../../../../guest/image/default.json");

#[derive(Debug)]
pub(crate) enum ImageAction {
    Build(BuildConfig),
    Ls,
    Rm {
        images: Vec<String>,
    },
    Import(ImportConfig),
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
    Seed {
        name: String,
        stop: bool,
    },
    ShowProfile {
        name: String,
    },
    ResetProfile {
        name: String,
    },
    Serve(ServeConfig),
}

/// Where an image is shown.
#[derive(Debug)]
pub(crate) struct ServeConfig {
    pub(crate) image: String,
    pub(crate) folder: Option<PathBuf>,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) writable: bool,
    pub(crate) allow_other: bool,
}

#[derive(Debug)]
pub(crate) struct BuildConfig {
    pub(crate) name: String,
    /// Read when the command runs: a file that is not there is a failure, not misuse.
    pub(crate) spec_file: Option<PathBuf>,
    pub(crate) packages: Vec<String>,
    pub(crate) files: Vec<ExtraFile>,
    pub(crate) firstboot: Option<String>,
    pub(crate) mirror: Option<String>,
    pub(crate) refresh: bool,
}

#[derive(Debug)]
pub(crate) struct ImportConfig {
    pub(crate) name: String,
    pub(crate) from: ImportFrom,
    pub(crate) options: ImportOptions,
}

#[derive(Debug)]
pub(crate) enum ImportFrom {
    Kernel { kernel: PathBuf, initrd: Option<PathBuf>, root: Option<PathBuf> },
    BootDisk(PathBuf),
}

/// `s3://BUCKET/KEY`, or a file.
fn root_from(typed: &Path) -> RootFrom<'_> {
    let object = typed.to_str().filter(|typed| typed.starts_with("s3://"));
    object.map_or(RootFrom::File(typed), RootFrom::Object)
}

impl ImportFrom {
    pub(crate) fn brought(&self) -> Brought<'_> {
        match self {
            Self::Kernel { kernel, initrd, root } => {
                let root = root.as_deref().map(root_from);
                Brought::Kernel { kernel, initrd: initrd.as_deref(), root }
            }
            Self::BootDisk(disk) => Brought::BootDisk(root_from(disk)),
        }
    }
}

impl ImageAction {
    pub(super) fn new(raw: RawImage) -> Result<Self, Misuse> {
        Ok(match raw {
            RawImage::Ls => Self::Ls,
            RawImage::Rm { images } => {
                Self::Rm { images: images.into_iter().map(name).collect::<Result<_, _>>()? }
            }
            RawImage::Build(raw) => Self::Build(build(raw)?),
            RawImage::Import(raw) => Self::Import(import(raw)?),
            RawImage::Push { image, location } => {
                Self::Push { name: name(image)?, location: value::location(location)? }
            }
            RawImage::Pull { image, location, wait } => {
                Self::Pull { name: name(image)?, location: value::location(location)?, wait }
            }
            RawImage::Seed { image, stop } => Self::Seed { name: name(image)?, stop },
            RawImage::Profile(RawImageProfile::Show { image }) => {
                Self::ShowProfile { name: name(image)? }
            }
            RawImage::Profile(RawImageProfile::Reset { image }) => {
                Self::ResetProfile { name: name(image)? }
            }
            RawImage::Serve { image, folder, nbd: socket, writable, allow_other } => {
                let image = name(image)?;
                Self::Serve(ServeConfig { image, folder, socket, writable, allow_other })
            }
        })
    }
}

fn name(name: String) -> Result<String, Misuse> {
    value::name(name, "image's name")
}

fn build(raw: RawImageBuild) -> Result<BuildConfig, Misuse> {
    let stem = raw.spec.as_deref().and_then(Path::file_stem).and_then(|stem| stem.to_str());
    Ok(BuildConfig {
        name: name(raw.name.unwrap_or_else(|| stem.unwrap_or(DEFAULT_NAME).to_owned()))?,
        spec_file: raw.spec,
        packages: raw.packages,
        files: raw.files.iter().map(|text| extra_file(text)).collect::<Result<_, _>>()?,
        firstboot: raw.run,
        mirror: raw.mirror,
        refresh: raw.refresh,
    })
}

/// `FROM:TO`; the host's path may hold colons, the guest's not.
fn extra_file(text: &str) -> Result<ExtraFile, Misuse> {
    match text.rsplit_once(':') {
        Some((from, to)) if !from.is_empty() && to.starts_with('/') => {
            Ok(ExtraFile { from: from.into(), to: to.into(), mode: None })
        }
        _ => misuse(format!("--file {text}: write it as FROM:TO, with an absolute path TO")),
    }
}

fn import(raw: RawImageImport) -> Result<ImportConfig, Misuse> {
    let mut options = ImportOptions {
        cmdline: raw.cmdline,
        agent: raw.agent,
        replace: raw.replace,
        is_qcow2: raw.format == RawFormat::Qcow2,
        ..ImportOptions::default()
    };
    if let Some(text) = raw.memory {
        options.default_memory_mib =
            u32::try_from(value::memory_mib(&text)?).map_err(|error| Misuse(error.to_string()))?;
    }
    let from = match (raw.kernel, raw.boot_disk) {
        (Some(kernel), _) => ImportFrom::Kernel { kernel, initrd: raw.initrd, root: raw.root },
        (None, Some(disk)) => ImportFrom::BootDisk(disk),
        (None, None) => {
            return misuse(
                "image import: no kernel and no disk; add --kernel or --boot-disk".to_owned(),
            );
        }
    };
    Ok(ImportConfig { name: name(raw.name)?, from, options })
}

impl BuildConfig {
    /// The spec with what the command line adds to it.
    pub(crate) fn spec(&self) -> anyhow::Result<Spec> {
        let mut spec = match &self.spec_file {
            Some(path) => Spec::read(path).map_err(with_remedy)?,
            None => serde_json::from_str(DEFAULT_SPEC)?,
        };
        spec.packages.extend(self.packages.iter().cloned());
        spec.files.extend(self.files.iter().cloned());
        if self.firstboot.is_some() {
            spec.firstboot.clone_from(&self.firstboot);
        }
        if self.mirror.is_some() {
            spec.mirror.clone_from(&self.mirror);
        }
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw() -> RawImageBuild {
        RawImageBuild {
            name: None,
            spec: None,
            packages: vec!["vim".to_owned()],
            files: vec!["/a:b:/c".to_owned()],
            run: Some("true".to_owned()),
            mirror: None,
            refresh: false,
        }
    }

    #[test]
    fn flags_add_to_the_default_image() {
        let config = build(raw()).unwrap();
        assert_eq!(config.name, "default");
        let spec = config.spec().unwrap();
        assert!(spec.packages.contains(&"vim".to_owned()) && spec.packages.len() > 1);
        assert_eq!(spec.files[0].from, Path::new("/a:b"));
        assert_eq!(spec.firstboot.as_deref(), Some("true"));
    }

    #[test]
    fn a_spec_names_its_image() {
        let config = build(RawImageBuild { spec: Some("x/demo.json".into()), ..raw() }).unwrap();
        assert_eq!(config.name, "demo");
        assert!(extra_file("/a:b").is_err());
        assert!(extra_file("/a").is_err());
    }
}
