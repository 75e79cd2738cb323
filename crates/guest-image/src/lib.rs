//! Guest images: what a VM boots from. Building one from Debian's packages, importing one that the
//! user brings, taking one in from another host, listing, opening and removing them. Besides, qcow2
//! files that users bring, for images and disks.
//!
//! ```text
//!   <store>/NAME/image.json   Metadata: kernel version, command line, hashes
//!               kernel        bzImage or ELF
//!               initrd        newc archive: the agent as /init, kernel modules
//!               root.img      ext4, read-only, shared by every VM
//!   <store>/.tmp-NAME-PID-N/  a build or an arrival in progress, locked;
//!                             removed by the next one after a crash
//!   <store>/.lock             held for the moments when names change
//! ```
//!
//! ```text
//!   Spec ─► base tree (mmdebstrap, cached) ─► + artifacts, files ─► mke2fs ─┐
//!        └► kernel package (unpacked) ─► modules ─► newc archive ───────────┴─► Store::commit
//! ```
//!
//! Promises:
//!
//! - An image exists whole or not at all, whichever process dies at whichever moment.
//! - A build that would yield what exists already does nothing.
//! - No file system is mounted.
//! - A cancelled build leaves neither processes nor files.
//! - Everything blocks, and every wait has a bound: call it from a thread that may wait.
//!
//! Left to others: what runs as `/init` (`vmfork-agent`), QEMU's own arguments (`vmfork-qemu`), who
//! may remove an image in use (the daemon).

#![forbid(unsafe_code)]

mod apt;
mod arrive;
mod artifacts;
mod base;
mod build;
mod cpio;
mod error;
mod ext4;
mod import;
mod initrd;
mod kernel;
mod metadata;
mod modules;
mod process;
mod progress;
pub mod qcow2;
mod remedy;
mod spec;
mod store;
mod tree;

pub use arrive::{Arrival, ArrivingFile};
pub use artifacts::{Artifacts, ArtifactsError};
pub use build::{BuildOptions, Built, build};
pub use error::{ArrivalError, BuildError, ImportError, StoreError};
pub use import::{Brought, ImportOptions, RootFrom, import};
pub use metadata::{FileInfo, INITRD_FILE, KERNEL_FILE, Metadata, ROOT_FILE, RootElsewhere};
pub use process::Cancel;
pub use progress::{Progress, Stage};
pub use remedy::{PathError, Remedy};
pub use spec::{ExtraFile, Spec, SpecError};
pub use store::{ImageFiles, Store};
