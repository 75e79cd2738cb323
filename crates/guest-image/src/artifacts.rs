//! What vmfork itself puts into an image: the agent, and the libraries for programs in the guest.

use std::io;
use std::path::{Path, PathBuf};

use crate::remedy::{AtPath as _, PathError, Remedy};
use crate::tree;

/// Where the built pieces are, on the host.
#[derive(Debug, Clone)]
pub struct Artifacts {
    /// The agent, statically linked: it becomes `/init` in the initrd.
    pub agent: PathBuf,
    /// A folder laid over the root file system: `usr/include/vmfork.h`,
    /// `usr/lib/x86_64-linux-gnu/libvmfork.{a,so}`, `usr/lib/python3/dist-packages/vmfork*`.
    pub overlay: Option<PathBuf>,
}

/// A piece that is not there or not right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactsError {
    #[error("the guest agent is not at {}", path.display())]
    NoAgent { path: PathBuf },
    #[error("the guest agent {} is not a static x86-64 program", path.display())]
    NotStatic { path: PathBuf },
    #[error(transparent)]
    Path(#[from] PathError),
}

impl Remedy for ArtifactsError {
    fn remedy(&self) -> Option<String> {
        Some(
            "build it with `make build`, or set VMFORK_LIBDIR to the folder of agent and libraries"
                .into(),
        )
    }
}

impl Artifacts {
    /// The pieces in `libdir`, laid out as `make build` does it: `vmfork-agent` and `guest/`.
    ///
    /// # Errors
    /// There is no agent.
    pub fn in_libdir(libdir: &Path) -> Result<Self, ArtifactsError> {
        let agent = libdir.join("vmfork-agent");
        if !agent.is_file() {
            return Err(ArtifactsError::NoAgent { path: agent });
        }
        let overlay = libdir.join("guest");
        Ok(Self { agent, overlay: overlay.is_dir().then_some(overlay) })
    }

    /// The folder of companions of the running program: `VMFORK_LIBDIR`, or `../lib/vmfork` as seen
    /// from its binary.
    #[must_use]
    pub fn libdir() -> PathBuf {
        if let Some(dir) = std::env::var_os("VMFORK_LIBDIR").filter(|d| !d.is_empty()) {
            return dir.into();
        }
        let program = std::env::current_exe().unwrap_or_default();
        let bin = program.parent().unwrap_or(Path::new("."));
        bin.parent().unwrap_or(bin).join("lib/vmfork")
    }

    /// The agent's bytes, once seen to be a program that runs where nothing else is.
    pub(crate) fn read_agent(&self) -> Result<Vec<u8>, ArtifactsError> {
        let path = || self.agent.clone();
        let bytes = match std::fs::read(&self.agent) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(ArtifactsError::NoAgent { path: path() });
            }
            Err(source) => return Err(ArtifactsError::io("read", path())(source)),
        };
        if is_static_elf(&bytes) {
            Ok(bytes)
        } else {
            Err(ArtifactsError::NotStatic { path: path() })
        }
    }

    /// Hash over agent and overlay.
    pub(crate) fn hash(&self) -> Result<String, ArtifactsError> {
        let mut hash = blake3::Hasher::new();
        hash.update(blake3::hash(&self.read_agent()?).as_bytes());
        if let Some(overlay) = &self.overlay {
            let tree = tree::hash_of(overlay).map_err(ArtifactsError::io("read", overlay))?;
            hash.update(tree.as_bytes());
        }
        Ok(hash.finalize().to_hex().to_string())
    }
}

/// Whether these are an x86-64 ELF without an interpreter (`PT_INTERP`).
fn is_static_elf(bytes: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    const EM_X86_64: u16 = 62;
    let u16_at = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let headers = || {
        let at = usize::try_from(u64_at(0x20)?).ok()?;
        let size = usize::from(u16_at(0x36)?);
        let count = usize::from(u16_at(0x38)?);
        (0..count).map(|i| u32_at(at.checked_add(i * size)?)).collect::<Option<Vec<u32>>>()
    };
    bytes.starts_with(b"\x7fELF\x02\x01")
        && u16_at(0x12) == Some(EM_X86_64)
        && headers().is_some_and(|kinds| !kinds.is_empty() && !kinds.contains(&PT_INTERP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_static_programs_pass_for_an_agent() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert!(!is_static_elf(&own), "this test binary is dynamic");
        assert!(!is_static_elf(b"#!/bin/sh\n"));
        assert!(!is_static_elf(b"\x7fELF\x02\x01"));
        assert!(!is_static_elf(&[]));
    }

    #[test]
    fn a_missing_agent_comes_with_a_remedy() {
        let error = Artifacts::in_libdir(Path::new("/nonexistent")).unwrap_err();
        assert_eq!(error.to_string(), "the guest agent is not at /nonexistent/vmfork-agent");
        assert!(error.remedy().unwrap().contains("make build"));
    }
}
