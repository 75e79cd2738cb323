//! The second step of parsing: from words as typed ([`crate::args`]) and the environment to values
//! that are known to fit together. What is wrong here is [`Misuse`]: exit status 2.

mod cluster;
mod command;
mod disk;
mod events;
mod global;
mod image;
mod run;
mod snapshot;
mod value;
mod volume;

pub(crate) use cluster::ClusterAction;
pub(crate) use command::{
    Command, CpConfig, DaemonAction, ExecConfig, ForkConfig, KillConfig, Place, RmConfig, TopConfig,
};
pub(crate) use disk::{DiskAction, DiskName};
pub(crate) use events::EventsConfig;
pub(crate) use global::{Endpoint, Environment, Global};
pub(crate) use image::{BuildConfig, ImageAction, ImportConfig, ServeConfig};
pub(crate) use run::{BootConfig, RunConfig, StartConfig};
pub(crate) use snapshot::SnapshotAction;
pub(crate) use volume::VolumeAction;

use crate::failure::Misuse;

fn misuse<T>(text: impl Into<String>) -> Result<T, Misuse> {
    Err(Misuse(text.into()))
}
