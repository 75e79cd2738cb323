//! Which allocator, and how Slurm is asked.

use std::collections::BTreeMap;

use clap::{Args, ValueEnum};
use vmfork_cluster::slurm::Settings;

use super::ConfigError;

/// Who says which hosts clones may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum AllocatorKind {
    /// The hosts themselves, by what they have left
    #[default]
    BuiltIn,
    /// Slurm: a job holds the nodes, for as long as there are clones
    Slurm,
}

/// The flags as given.
#[derive(Debug, Clone, Args)]
pub struct AllocatorFlags {
    /// Who says which hosts of the cluster clones may have
    #[arg(long, value_name = "WHO", env = "VMFORK_ALLOCATOR", value_enum, default_value_t)]
    pub allocator: AllocatorKind,

    /// Partition of Slurm's jobs [default: Slurm's]
    #[arg(long, value_name = "NAME", env = "VMFORK_SLURM_PARTITION")]
    pub slurm_partition: Option<String>,

    /// Account of Slurm's jobs [default: Slurm's]
    #[arg(long, value_name = "NAME", env = "VMFORK_SLURM_ACCOUNT")]
    pub slurm_account: Option<String>,

    /// A feature that Slurm's nodes must have
    #[arg(long, value_name = "FEATURE", env = "VMFORK_SLURM_CONSTRAINT")]
    pub slurm_constraint: Option<String>,

    /// After how many minutes Slurm ends a job, and with it its clones [default: the partition's]
    #[arg(long, value_name = "MIN", env = "VMFORK_SLURM_TIME_MIN")]
    pub slurm_time_min: Option<u32>,

    /// How many clones share a task, which has as many of Slurm's CPUs as a clone has virtual ones
    #[arg(long, value_name = "N", env = "VMFORK_SLURM_CLONES_PER_TASK", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub slurm_clones_per_task: u32,

    /// The host that a node of Slurm is, where their names differ. More than one: several times, or with `;`
    #[arg(long, value_name = "NODE=HOST", env = "VMFORK_SLURM_NODE", value_delimiter = ';')]
    pub slurm_node: Vec<String>,
}

impl AllocatorFlags {
    /// How Slurm is asked; `None`: it is not.
    ///
    /// # Errors
    /// A node is said to be no host, or two.
    pub(super) fn check(self) -> Result<Option<Settings>, ConfigError> {
        let mut nodes = BTreeMap::new();
        for text in self.slurm_node {
            let bad = || ConfigError::SlurmNode { text: text.clone() };
            let (node, host) = text.split_once('=').ok_or_else(bad)?;
            let is_named = !node.is_empty() && !host.is_empty();
            if !is_named || nodes.insert(node.to_owned(), host.to_owned()).is_some() {
                return Err(bad());
            }
        }
        Ok((self.allocator == AllocatorKind::Slurm).then(|| Settings {
            partition: self.slurm_partition,
            constraint: self.slurm_constraint,
            account: self.slurm_account,
            time_limit_min: self.slurm_time_min,
            clones_per_task: self.slurm_clones_per_task,
            nodes,
            ..Settings::default()
        }))
    }
}
