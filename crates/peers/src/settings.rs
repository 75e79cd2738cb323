//! How this host works with others: settings that the daemon makes of its flags.

use vmfork_cluster::allocate::Policy;
use vmfork_cluster::slurm;

use crate::pace::Pace;

/// The settings.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub page_transfer: PageTransfer,
    pub ticket_place: TicketPlace,
    /// Settings of the Slurm allocator; `None`: the built-in allocator.
    pub slurm: Option<slurm::Settings>,
    /// Of waits for silent hosts. Only tests change it.
    pub pace: Pace,
}

/// How pages reach clones on other hosts. Each host sends and requests pages by its own setting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PageTransfer {
    /// Each clone's host reads from the parent's host
    Unicast,
    /// Hosts also read from each other
    #[default]
    Swarm,
    /// Pages are sent once to all hosts by multicast; otherwise as swarm
    Multicast,
}

/// Where clones of tickets are placed. The setting of the requesting VM's host counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum TicketPlace {
    /// Over all hosts, by their free capacity
    #[default]
    Spread,
    /// On as few hosts as possible, the parent's host first
    Pack,
    /// On the parent's host only
    Here,
}

impl TicketPlace {
    /// The placement policy over all hosts; `None`: clones stay on the parent's host.
    pub fn policy(self) -> Option<Policy> {
        match self {
            Self::Spread => Some(Policy::Spread),
            Self::Pack => Some(Policy::Pack),
            Self::Here => None,
        }
    }
}
