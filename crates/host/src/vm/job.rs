//! The job of an allocation engine that holds the places of VMs.

use serde::{Deserialize, Serialize};

/// A job, and the host whose daemon got it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Job {
    pub host: u64,
    /// The engine's name for it.
    pub id: String,
}
