//! What all clones of a VM inherit, wherever they run and whenever they are started.
//!
//! It goes as a whole: from the VM to its clones, to other hosts in the descriptor of a fork, and
//! into stored snapshots. So a new property is a field here, and a value where VMs boot; what is
//! read from a store needs a default, since older snapshots lack it.

use serde::{Deserialize, Serialize};
use vmfork_api::{Accel, ErrorBody, ErrorCode, Labels};

/// What clones inherit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inherited {
    #[serde(flatten)]
    pub spec: MachineSpec,
    /// What users call it, besides its name.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

impl Inherited {
    /// The same with a request's own labels. `message`: what is done, for the error's text.
    ///
    /// # Errors
    /// There are too many labels then.
    pub fn with_labels(&self, own: &Labels, message: &str) -> Result<Self, ErrorBody> {
        let labels = self.labels.with(own).map_err(|error| {
            ErrorBody::new(ErrorCode::BadRequest, message)
                .cause(error)
                .remedy("give fewer labels; those of the same key are replaced")
        })?;
        Ok(Self { labels, ..self.clone() })
    }
}

/// The machine that the guest knows, whichever QEMU plays it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// The guest image that the VM booted from.
    pub image: String,
    /// BLAKE3 of its root disk, in hex; the guest has parts of that disk in its memory.
    pub root_blake3: Option<String>,
    pub memory_bytes: u64,
    pub cpus: u32,
    pub accel: Accel,
    /// Why that one was chosen, then.
    pub accel_reason: String,
}

#[cfg(any(test, feature = "testing"))]
impl Inherited {
    /// Of a VM without a disk.
    pub fn of_a_test(memory_bytes: u64) -> Self {
        Self {
            spec: MachineSpec {
                image: "default".to_owned(),
                root_blake3: None,
                memory_bytes,
                cpus: 1,
                accel: Accel::Tcg,
                accel_reason: String::new(),
            },
            labels: Labels::default(),
        }
    }
}
