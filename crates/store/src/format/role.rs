//! What an image of a snapshot is for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Most bytes of a device's name.
pub const DEVICE_NAME_BYTES_MAX: usize = 32;

const MEMORY: &str = "memory";
const DISK: &str = "disk:";

/// The name of a VM's device: 1 to 32 of `a-z 0-9 _ -`, the first a letter or digit. It is part of
/// file names, so it has one form on every file system.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName(String);

impl DeviceName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DeviceName {
    type Err = RoleError;

    fn from_str(text: &str) -> Result<Self, RoleError> {
        let first = text.bytes().next();
        let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let fits = text.len() <= DEVICE_NAME_BYTES_MAX
            && first.is_some_and(is_plain)
            && text.bytes().all(|b| is_plain(b) || matches!(b, b'_' | b'-'));
        if fits { Ok(Self(text.to_owned())) } else { Err(RoleError::Device(text.to_owned())) }
    }
}

/// What an image of a snapshot holds. A snapshot has at most one image of each role.
///
/// Its text is `memory`, or `disk:` and the name of the device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Role {
    /// The guest's memory.
    Memory,
    /// The content of one of its disks.
    Disk(DeviceName),
}

impl Role {
    /// What its file of that kind ends in, behind the name that all files of a snapshot share.
    /// Those of the memory are called as they were when there was no other image.
    pub(crate) fn ending(&self, kind: &str) -> String {
        match self {
            Self::Memory => kind.to_owned(),
            Self::Disk(DeviceName(device)) => format!("disk-{device}.{kind}"),
        }
    }

    /// Whether an image of this role can be a delta on one of the role `base`.
    pub(crate) fn is_of_the_kind_of(&self, base: &Self) -> bool {
        matches!((self, base), (Self::Memory, Self::Memory) | (Self::Disk(_), Self::Disk(_)))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str(MEMORY),
            Self::Disk(DeviceName(device)) => write!(f, "{DISK}{device}"),
        }
    }
}

/// A text that is no role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoleError {
    /// Perhaps one of a newer version.
    #[error("`{0}` is no role of an image that this version knows: `memory`, or `disk:DEVICE`")]
    Unknown(String),
    #[error(
        "`{0}` is no name of a device: 1 to {DEVICE_NAME_BYTES_MAX} of a-z 0-9 _ -, the first a \
         letter or digit"
    )]
    Device(String),
}

impl FromStr for Role {
    type Err = RoleError;

    fn from_str(text: &str) -> Result<Self, RoleError> {
        match text.strip_prefix(DISK) {
            Some(device) => device.parse().map(Self::Disk),
            None if text == MEMORY => Ok(Self::Memory),
            None => Err(RoleError::Unknown(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Role {
    type Error = RoleError;

    fn try_from(text: String) -> Result<Self, RoleError> {
        text.parse()
    }
}

impl From<Role> for String {
    fn from(role: Role) -> Self {
        role.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_role_that_is_not_known_is_told_from_a_bad_device() {
        for text in ["", "gpu", "Memory", "disk", "memory:x", "tape:a"] {
            assert_eq!(text.parse::<Role>(), Err(RoleError::Unknown(text.into())), "{text}");
        }
        for device in ["", "-a", "a/b", "../a", "A", "a.b", "ä", &"a".repeat(33)] {
            let text = format!("disk:{device}");
            assert_eq!(text.parse::<Role>(), Err(RoleError::Device(device.into())), "{text}");
        }
    }

    #[test]
    fn files_of_memory_are_called_as_ever() {
        let disk: Role = "disk:data".parse().expect("a role");
        assert_eq!(Role::Memory.ending("table"), "table");
        assert_eq!(disk.ending("table"), "disk-data.table");
        assert!(Role::Memory < disk && !disk.is_of_the_kind_of(&Role::Memory));
        assert!(disk.is_of_the_kind_of(&"disk:root".parse().expect("a role")));
    }

    proptest! {
        #[test]
        fn a_role_reads_back(text in "memory|disk:[a-z0-9][a-z0-9_-]{0,31}") {
            let role: Role = text.parse().expect("a role");
            prop_assert_eq!(role.to_string(), text);
        }
    }
}
