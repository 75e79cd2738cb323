use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// QEMU is up, the guest's agent has not answered yet.
    Starting,
    /// The agent has answered (or the VM was started without one).
    Running,
    /// A freeze is going on.
    Frozen,
    /// Its vCPUs stand still until it is resumed.
    Paused,
    /// A disk could not answer the guest, so QEMU has stopped the VM. `reason` says which. It goes
    /// on by itself once the disk answers, and the guest sees no error.
    Stalled,
    /// Ended in good order: powered off, `sf_exit`, killed on request.
    Exited,
    /// Ended by a fault; `reason` says which.
    Failed,
}

impl VmState {
    /// Whether there is no QEMU any more.
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Exited | Self::Failed)
    }
}
