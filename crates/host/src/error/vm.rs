//! What a VM can't do in the state that it is in.

/// Why a VM can't do what is asked of it now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VmError {
    #[error("{reason}")]
    Ended { name: String, reason: String },
    #[error("its QEMU is being started")]
    NoQemu { name: String },
    /// Its agent is not linked yet.
    #[error("the VM is still starting")]
    Starting { name: String },
    #[error("image `{image}` has no agent")]
    NoAgent { name: String, image: String },
    /// Its agent could not answer.
    #[error("the VM is paused")]
    Paused { name: String },
    /// Nor this.
    #[error("the VM is stalled: {reason}")]
    Stalled { name: String, reason: String },
}

impl VmError {
    /// What of the VM is not available.
    pub(super) fn message(&self) -> String {
        match self {
            Self::Ended { name, .. } | Self::NoQemu { name } => format!("`{name}` is not running"),
            Self::Starting { name }
            | Self::NoAgent { name, .. }
            | Self::Paused { name }
            | Self::Stalled { name, .. } => format!("reach the agent of `{name}`"),
        }
    }

    pub(super) fn remedy(&self) -> String {
        match self {
            Self::Ended { name, .. } => format!("`vmfork logs {name}` shows its last words"),
            Self::NoQemu { .. } | Self::Starting { .. } => {
                "try again when `vmfork ps` shows it running".to_owned()
            }
            Self::NoAgent { .. } => "`vmfork console` still works".to_owned(),
            Self::Stalled { .. } => {
                "it goes on by itself once its disk answers; is the host's disk full?".to_owned()
            }
            Self::Paused { name } => format!("`vmfork resume {name}` lets it continue"),
        }
    }
}
