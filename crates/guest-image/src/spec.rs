//! What a guest image is to hold, as the user writes it down (`guest/image/*.json`).

use std::io;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::remedy::{AtPath as _, PathError, Remedy};

/// More than any sensible image has; keeps a command line within what the kernel takes.
const PACKAGES_MAX: usize = 2000;
const FILES_MAX: usize = 10_000;
/// A spec is a page or two of JSON.
const SPEC_BYTES_MAX: u64 = 1 << 20;
const MEMORY_MIB_MIN: u32 = 64;

/// The contents of an image beyond Debian's minimal system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Spec {
    /// Debian release by its code name.
    pub suite: String,
    /// Package that brings the kernel; its newest version is taken.
    pub kernel: String,
    /// Packages besides the minimal system. Their dependencies come along, their recommendations
    /// not.
    pub packages: Vec<String>,
    /// Files and folders of the host.
    pub files: Vec<ExtraFile>,
    /// Shell command that the agent runs once after each boot, before the VM counts as ready.
    /// Clones go on where their parent stood, so it does not run in them again.
    pub firstboot: Option<String>,
    /// Where Debian is: a URL, a line for sources.list, or a file. Without one the host's own apt
    /// sources for `suite` are used.
    pub mirror: Option<String>,
    /// Added to the kernel's command line.
    pub cmdline: Option<String>,
    /// Default guest memory, in MiB.
    pub default_memory_mib: u32,
}

/// A file or folder of the host that goes into the image, owned by root there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraFile {
    /// On the host; relative to the spec's own folder. A folder is taken with all that is in it.
    pub from: PathBuf,
    /// In the guest, absolute.
    pub to: PathBuf,
    /// Permissions in octal, `"0755"`. Without it, those of the host's file. Folders keep theirs.
    #[serde(default)]
    pub mode: Option<String>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            suite: "bookworm".into(),
            kernel: "linux-image-cloud-amd64".into(),
            packages: Vec::new(),
            files: Vec::new(),
            firstboot: None,
            mirror: None,
            cmdline: None,
            default_memory_mib: 512,
        }
    }
}

/// A spec that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("{} is not an image spec", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{what} `{value}` in the image spec: {why}")]
    Bad { what: &'static str, value: String, why: String },
}

impl Remedy for SpecError {
    fn remedy(&self) -> Option<String> {
        match self {
            Self::Path(e) => e.remedy(),
            Self::Parse { .. } => Some(
                "compare it with `guest/image/default.json`; docs/configuration.md explains the fields"
                    .into(),
            ),
            Self::Bad { .. } => None,
        }
    }
}

fn bad(what: &'static str, value: impl Into<String>, why: impl Into<String>) -> SpecError {
    SpecError::Bad { what, value: value.into(), why: why.into() }
}

impl Spec {
    /// Read a spec from a JSON file and check it. Relative paths in it count from its folder.
    ///
    /// # Errors
    /// The file cannot be read, is no JSON of this form, or fails [`Spec::check`].
    pub fn read(path: &Path) -> Result<Self, SpecError> {
        let fail = |source| SpecError::io("read the image spec", path)(source);
        let size_bytes = std::fs::metadata(path).map_err(fail)?.len();
        if size_bytes > SPEC_BYTES_MAX {
            return Err(fail(io::Error::from(io::ErrorKind::FileTooLarge)));
        }
        let text = std::fs::read_to_string(path).map_err(fail)?;
        let mut spec: Self = serde_json::from_str(&text)
            .map_err(|source| SpecError::Parse { path: path.into(), source })?;
        let folder = path.parent().unwrap_or(Path::new("."));
        for file in &mut spec.files {
            file.from = folder.join(&file.from);
        }
        spec.check()?;
        Ok(spec)
    }

    /// Whether the values make sense: nothing here reaches a command line or a path unchecked.
    ///
    /// # Errors
    /// The first value that does not, with the reason.
    pub fn check(&self) -> Result<(), SpecError> {
        if !word(&self.suite, b"-._") {
            return Err(bad("suite", &self.suite, "not a Debian code name"));
        }
        for (what, list) in
            [("package", self.packages.as_slice()), ("kernel", std::slice::from_ref(&self.kernel))]
        {
            for package in list {
                if !word(package, b"+-.") {
                    return Err(bad(what, package, "not a package name"));
                }
            }
        }
        if self.packages.len() > PACKAGES_MAX || self.files.len() > FILES_MAX {
            let found = format!("{} packages, {} files", self.packages.len(), self.files.len());
            return Err(bad("size", found, format!("at most {PACKAGES_MAX} and {FILES_MAX}")));
        }
        for file in &self.files {
            let to = file.to.display().to_string();
            let plain = file.to.components().all(|c| !matches!(c, Component::ParentDir));
            if !file.to.is_absolute() || file.to.file_name().is_none() || !plain {
                return Err(bad("guest path", to, "must be absolute, without `..`"));
            }
            file.mode_bits()?;
            if let Err(e) = std::fs::symlink_metadata(&file.from) {
                return Err(bad("file", file.from.display().to_string(), e.to_string()));
            }
        }
        if self.default_memory_mib < MEMORY_MIB_MIN {
            let value = self.default_memory_mib.to_string();
            return Err(bad("default_memory_mib", value, format!("at least {MEMORY_MIB_MIN}")));
        }
        for (what, text) in [("cmdline", &self.cmdline), ("mirror", &self.mirror)] {
            if let Some(text) = text
                && text.bytes().any(|b| b.is_ascii_control())
            {
                return Err(bad(what, text.escape_debug().to_string(), "holds control characters"));
            }
        }
        if let Some(mirror) = &self.mirror
            && mirror.starts_with('-')
        {
            return Err(bad("mirror", mirror, "must be a URL, a line for sources.list or a file"));
        }
        Ok(())
    }

    /// The packages without repetition, sorted: their order in the spec means nothing.
    pub(crate) fn sorted_packages(&self) -> Vec<String> {
        let mut packages = self.packages.clone();
        packages.sort();
        packages.dedup();
        packages
    }

    /// Hash of what decides about the base tree: what mmdebstrap is asked for.
    pub(crate) fn base_hash(&self) -> blake3::Hash {
        let mut hash = Fields::new("base");
        hash.add(&self.suite);
        hash.add(&self.kernel);
        hash.add(self.mirror.as_deref().unwrap_or(""));
        for package in self.sorted_packages() {
            hash.add(&package);
        }
        hash.done()
    }

    /// Hash of all that decides about the image; `files_hash` covers the contents of the extra
    /// files, `artifacts_hash` those of agent and libraries.
    pub(crate) fn input_hash(&self, files_hash: &str, artifacts_hash: &str) -> blake3::Hash {
        let mut hash = Fields::new("image");
        // An image without it in its metadata is built again.
        hash.add("root_overlay");
        hash.add("root_disk");
        hash.add("root_pmem");
        hash.add(self.base_hash().to_hex().as_str());
        hash.add(artifacts_hash);
        hash.add(files_hash);
        for file in &self.files {
            hash.add(&file.to.to_string_lossy());
            hash.add(file.mode.as_deref().unwrap_or(""));
        }
        hash.add(self.firstboot.as_deref().unwrap_or(""));
        hash.add(self.cmdline.as_deref().unwrap_or(""));
        hash.add(&self.default_memory_mib.to_string());
        hash.done()
    }
}

impl ExtraFile {
    /// The permissions asked for.
    pub(crate) fn mode_bits(&self) -> Result<Option<u32>, SpecError> {
        let Some(mode) = &self.mode else { return Ok(None) };
        match u32::from_str_radix(mode, 8) {
            Ok(bits) if bits <= 0o7777 => Ok(Some(bits)),
            _ => Err(bad("mode", mode, "must be octal, such as 0644")),
        }
    }
}

fn word(text: &str, also: &[u8]) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || also.contains(&b);
    text.len() <= 128
        && text.bytes().all(fits)
        && text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
}

/// Bumped when the recipe (not the spec) changes what comes out, so that old results are not taken
/// for new ones.
const RECIPE_VERSION: &str = "1";

/// Hashes a list of strings such that no two lists run together.
struct Fields(blake3::Hasher);

impl Fields {
    fn new(kind: &str) -> Self {
        let mut fields = Self(blake3::Hasher::new());
        fields.add(kind);
        fields.add(RECIPE_VERSION);
        fields
    }

    fn add(&mut self, text: &str) {
        self.0.update(&(text.len() as u64).to_le_bytes());
        self.0.update(text.as_bytes());
    }

    fn done(self) -> blake3::Hash {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(packages: &[&str]) -> Spec {
        Spec { packages: packages.iter().map(|p| (*p).to_owned()).collect(), ..Spec::default() }
    }

    #[test]
    fn the_order_of_packages_does_not_matter_but_their_set_does() {
        assert_eq!(spec(&["a", "b"]).base_hash(), spec(&["b", "a", "b"]).base_hash());
        assert_ne!(spec(&["a", "b"]).base_hash(), spec(&["ab"]).base_hash());
        assert_ne!(spec(&["a"]).base_hash(), spec(&[]).base_hash());
    }

    #[test]
    fn firstboot_changes_the_image_but_not_its_base() {
        let plain = spec(&["a"]);
        let with = Spec { firstboot: Some("true".into()), ..plain.clone() };
        assert_eq!(plain.base_hash(), with.base_hash());
        assert_ne!(plain.input_hash("f", "a"), with.input_hash("f", "a"));
        assert_ne!(plain.input_hash("f", "a"), plain.input_hash("f", "b"));
        assert_ne!(plain.input_hash("fa", "a"), plain.input_hash("f", "aa"));
    }

    #[test]
    fn what_could_leave_the_root_or_reach_a_command_line_is_refused() {
        let file = |to: &str, mode: Option<&str>| Spec {
            files: vec![ExtraFile {
                from: "/etc/hostname".into(),
                to: to.into(),
                mode: mode.map(Into::into),
            }],
            ..Spec::default()
        };
        for bad in [
            spec(&["--include=x"]),
            spec(&["a b"]),
            spec(&[""]),
            Spec { suite: "../x".into(), ..Spec::default() },
            Spec { mirror: Some("--setup-hook=id".into()), ..Spec::default() },
            Spec { cmdline: Some("a\nb".into()), ..Spec::default() },
            Spec { default_memory_mib: 1, ..Spec::default() },
            file("etc/x", None),
            file("/etc/../../x", None),
            file("/", None),
            file("/etc/x", Some("rwx")),
            file("/etc/x", Some("17777")),
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        assert!(file("/etc/x", Some("0600")).check().is_ok());
        assert!(spec(&["g++-12", "libc6.1-dev"]).check().is_ok());
    }

    #[test]
    fn an_unknown_field_is_an_error_that_names_it() {
        let error = serde_json::from_str::<Spec>(r#"{"package": []}"#).unwrap_err().to_string();
        assert!(error.contains("package"), "{error}");
    }

    #[test]
    fn the_specs_in_the_repository_are_good() {
        for name in ["default", "demo"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(format!("../../guest/image/{name}.json"));
            Spec::read(&path).unwrap();
        }
    }
}
