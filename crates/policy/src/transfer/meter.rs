//! How many bytes per second, lately.

use std::time::Duration;

/// What is averaged: bytes of one slot (SnowFlock, EuroSys 2009, sections 4.3 and 4.4).
const SLOT: Duration = Duration::from_millis(10);

const SLOTS_PER_S: u64 = 100;

/// A slot has the weight of one in this many, so the average follows within about 80 ms.
const WEIGHT: u64 = 8;

/// After this many empty slots nothing worth counting is left.
const SLOTS_MAX: u128 = 128;

/// The weighted average of bytes per second over slots of 10 ms.
#[derive(Debug, Clone, Default)]
pub(super) struct Meter {
    /// When the current slot began.
    slot_at: Duration,
    slot_bytes: u64,
    bytes_per_s: u64,
}

impl Meter {
    pub(super) fn add(&mut self, bytes: u64, now: Duration) {
        self.roll(now);
        self.slot_bytes = self.slot_bytes.saturating_add(bytes);
    }

    /// As of the last slot that is over. Closes slots. Also returns how many, for callers that
    /// count by them.
    pub(super) fn roll(&mut self, now: Duration) -> u64 {
        let over = now.saturating_sub(self.slot_at).as_nanos() / SLOT.as_nanos();
        if over > SLOTS_MAX {
            *self = Self { slot_at: now, ..Self::default() };
            return u64::try_from(over).unwrap_or(u64::MAX);
        }
        let over = u64::try_from(over).unwrap_or(0);
        for _ in 0..over {
            let slot = self.slot_bytes.saturating_mul(SLOTS_PER_S);
            self.bytes_per_s = self.bytes_per_s - self.bytes_per_s / WEIGHT + slot / WEIGHT;
            self.slot_bytes = 0;
            self.slot_at += SLOT;
        }
        over
    }

    pub(super) fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_stream_is_measured_and_forgotten() {
        let mut meter = Meter::default();
        for ms in 0..1000 {
            meter.add(1000, Duration::from_millis(ms));
        }
        let steady = meter.bytes_per_s();
        assert!((950_000..=1_000_000).contains(&steady), "{steady}");
        meter.roll(Duration::from_millis(1100));
        assert!(meter.bytes_per_s() < steady / 2, "{}", meter.bytes_per_s());
        meter.roll(Duration::from_secs(1000));
        assert_eq!(meter.bytes_per_s(), 0);
        meter.add(u64::MAX, Duration::MAX);
        meter.roll(Duration::ZERO); // a clock that goes back does no harm
    }
}
