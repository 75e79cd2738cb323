//! What a stored snapshot is of.

use serde_json::Value;
use vmfork_guest_image::Metadata;
use vmfork_store::Descriptor;

use crate::error::{GuestImageError, SnapshotError};

/// The member of a descriptor's `vm` that says that it is of a guest image.
const MEMBER: &str = "guest_image";
/// The disk of a stored image that is its root.
pub const ROOT_DISK: &str = "root";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Vm,
    GuestImage,
}

impl Kind {
    pub(super) fn of(descriptor: &Descriptor) -> Self {
        match descriptor.vm.get(MEMBER) {
            Some(_) => Self::GuestImage,
            None => Self::Vm,
        }
    }

    /// # Errors
    /// It is of another kind than is wanted.
    pub(super) fn check(self, descriptor: &Descriptor) -> Result<(), SnapshotError> {
        let name = || descriptor.name.clone();
        match (self, Self::of(descriptor)) {
            (Self::Vm, Self::GuestImage) => Err(GuestImageError::Image { name: name() }.into()),
            (Self::GuestImage, Self::Vm) => Err(GuestImageError::Snapshot { name: name() }.into()),
            _ => Ok(()),
        }
    }
}

pub(super) fn is_guest_image(descriptor: &Descriptor) -> bool {
    Kind::of(descriptor) == Kind::GuestImage
}

/// What a descriptor tells of a guest image, if it is of one and can be read.
pub(super) fn metadata_of(descriptor: &Descriptor) -> Option<Metadata> {
    serde_json::from_value(descriptor.vm.get(MEMBER)?.clone()).ok()
}

/// What the descriptor of a guest image holds.
pub(super) fn described(metadata: &Metadata) -> Value {
    serde_json::json!({ MEMBER: metadata })
}
