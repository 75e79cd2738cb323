//! How much a host has for clones.

use serde::{Deserialize, Serialize};

/// Memory and virtual CPUs: what a host has left, or what one clone needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    pub memory_bytes: u64,
    /// A host that lets more virtual CPUs run than it has cores counts them so.
    pub vcpus: u32,
}

impl Room {
    /// How many of `shape` fit. What needs nothing fits without end, up to `u32::MAX`.
    pub fn places(self, shape: Self) -> u32 {
        let by_memory = self.memory_bytes.checked_div(shape.memory_bytes).unwrap_or(u64::MAX);
        let by_vcpus = self.vcpus.checked_div(shape.vcpus).unwrap_or(u32::MAX);
        u32::try_from(by_memory).unwrap_or(u32::MAX).min(by_vcpus)
    }

    /// What is left after `other`; nothing where that is more.
    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_sub(other.memory_bytes),
            vcpus: self.vcpus.saturating_sub(other.vcpus),
        }
    }

    /// Both together, at most what the numbers can hold.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            vcpus: self.vcpus.saturating_add(other.vcpus),
        }
    }

    /// Room for `count` such.
    #[must_use]
    pub fn times(self, count: u32) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_mul(count.into()),
            vcpus: self.vcpus.saturating_mul(count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(memory_bytes: u64, vcpus: u32) -> Room {
        Room { memory_bytes, vcpus }
    }

    #[test]
    fn the_scarcer_decides() {
        assert_eq!(room(100, 4).places(room(10, 1)), 4);
        assert_eq!(room(35, 40).places(room(10, 1)), 3);
        assert_eq!(room(9, 40).places(room(10, 1)), 0);
        assert_eq!(room(u64::MAX, 7).places(room(0, 1)), 7);
        assert_eq!(room(u64::MAX, 0).places(room(1, 0)), u32::MAX);
        assert_eq!(room(5, 5).less(room(6, 2)), room(0, 3));
        assert_eq!(room(5, 5).times(3).plus(room(1, 0)), room(16, 15));
        assert_eq!(room(u64::MAX, 1).times(2), room(u64::MAX, 2));
    }
}
