//! Stored snapshots: taken from running VMs, kept in a store, started any number of times.
//!
//! ```text
//!   create: freeze (as a fork) ─► VM runs on ─► store written in the background ─► Ready ─► record what it touches
//!   start:  open (descriptor, table, state) ─► engine, prefetch ─► QEMUs attach, load, run, take identities
//! ```
//!
//! | module | is |
//! |---|---|
//! | [`create`], `record` | a snapshot taken and written; what its VM touches next |
//! | [`start`], [`prefetch`] | VMs started from one; what is fetched before they ask |
//! | [`transfer`], [`keep`] | export, import, push, pull; remove, verify, flatten |
//! | [`guest_images`], `kind` | guest images in stores of snapshots |
//! | `image_use` | what VMs read of guest images, and in which order they are fetched |
//! | `query` | what is known of them |
//! | `disks`, `bases` | disks of VMs, written and read; what of a VM is stored already |
//! | `opening`, `placing` | opening one; keeping a name while it is written or pulled |
//! | [`library`] | the store, what is open of it, and the host |
//! | `opened`, `under_way`, `turns`, `collect`, `work`, `location` | the parts of that |
//! | `error` | why an operation fails, and what the API says about it |
//!
//! Promises: a snapshot is open as long as a VM may need its pages. If it is removed meanwhile, its
//! VMs go on, and what they may need stays in the store until they have ended. What is being
//! written is listed from the first moment, and nothing of it is left if that fails.
//!
//! It knows other hosts as [`ClusterImages`] alone, and of HTTP only the bodies of replies.

mod bases;
mod collect;
pub mod create;
mod disks;
mod error;
pub mod guest_images;
mod image_use;
pub mod keep;
mod kind;
pub mod library;
mod location;
mod opened;
mod opening;
mod placing;
pub mod prefetch;
mod query;
mod record;
pub mod start;
mod tell;
#[cfg(test)]
mod tests;
pub mod transfer;
mod turns;
mod under_way;
mod work;

pub use self::error::SnapshotError;
pub use self::image_use::workload_of;
pub use self::library::{Library, Snapshots};
pub use self::location::{ClusterImages, Found};
pub use self::opened::Opened;
pub use self::opening::StoredDisks;
