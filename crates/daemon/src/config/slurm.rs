//! The choice of the allocator, and the settings of Slurm.

use std::collections::BTreeMap;

use clap::{Args, ValueEnum};
use vmfork_cluster::slurm::Settings;

use super::ConfigError;

/// What chooses the hosts of clones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum AllocatorKind {
    /// vmfork, by the free capacity of each host
    #[default]
    BuiltIn,
    /// Slurm: a job holds the nodes while clones exist
    Slurm,
}

/// The flags as given.
#[derive(Debug, Clone, Args)]
pub struct AllocatorFlags {
    /// What chooses the hosts of clones in a cluster
    #[arg(long, value_name = "WHO", env = "VMFORK_ALLOCATOR", value_enum, default_value_t)]
    pub allocator: AllocatorKind,

    /// Partition of Slurm jobs [default: that of Slurm]
    #[arg(long, value_name = "NAME", env = "VMFORK_SLURM_PARTITION")]
    pub slurm_partition: Option<String>,

    /// Account of Slurm jobs [default: that of Slurm]
    #[arg(long, value_name = "NAME", env = "VMFORK_SLURM_ACCOUNT")]
    pub slurm_account: Option<String>,

    /// Feature that Slurm nodes must have
    #[arg(long, value_name = "FEATURE", env = "VMFORK_SLURM_CONSTRAINT")]
    pub slurm_constraint: Option<String>,

    /// Time limit of Slurm jobs in minutes; their clones end with them [default: that of the
    /// partition]
    #[arg(long, value_name = "MIN", env = "VMFORK_SLURM_TIME_MIN")]
    pub slurm_time_min: Option<u32>,

    /// Clones per Slurm task; a task has as many CPUs as a clone has vCPUs
    #[arg(long, value_name = "N", env = "VMFORK_SLURM_CLONES_PER_TASK", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub slurm_clones_per_task: u32,

    /// Host that is a Slurm node, if their names differ; repeat it or separate several with `;`
    #[arg(long, value_name = "NODE=HOST", env = "VMFORK_SLURM_NODE", value_delimiter = ';')]
    pub slurm_node: Vec<String>,
}

impl AllocatorFlags {
    /// Settings of the Slurm allocator; `None`: another allocator is chosen.
    ///
    /// # Errors
    /// A node has no host, or several.
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
