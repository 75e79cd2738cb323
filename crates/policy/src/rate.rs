//! A limit in bytes per second.

use std::num::NonZeroU64;
use std::time::Duration;

const NS_PER_S: u128 = 1_000_000_000;

/// A token bucket: bytes come in at a steady rate, up to a burst, and are spent. For what must
/// leave room to others: hydration.
///
/// Kept as one time, when the bucket would be full again (the generic cell rate algorithm, ITU-T
/// I.371, inverted). In any stretch of time no more is spent than the burst and what came in
/// meanwhile, if no spender exceeds what is available. A spender that exceeds it is in debt, which
/// is paid off first. Rounding costs less than 1 ns of rate each time.
///
/// All times are of one clock of the caller's that does not go back; to an earlier one, less is
/// available.
#[derive(Debug, Clone)]
pub struct Rate {
    bytes_per_s: NonZeroU64,
    burst_bytes: u64,
    full_at: Duration,
}

impl Rate {
    /// A full bucket.
    pub fn new(bytes_per_s: NonZeroU64, burst_bytes: u64) -> Self {
        Self { bytes_per_s, burst_bytes, full_at: Duration::ZERO }
    }

    /// How many bytes may be spent at `now`.
    pub fn available(&self, now: Duration) -> u64 {
        // Rounded up, so that what is available has really come in.
        let missing = self.full_at.saturating_sub(now).as_nanos();
        let missing = missing.saturating_mul(self.bytes_per_s.get().into()).div_ceil(NS_PER_S);
        self.burst_bytes.saturating_sub(u64::try_from(missing).unwrap_or(u64::MAX))
    }

    /// Spends bytes, more than are available if need be.
    pub fn spend(&mut self, now: Duration, bytes: u64) {
        self.full_at = self.full_at.max(now).saturating_add(self.time_for(bytes));
    }

    /// From when on `bytes` are available if nothing is spent meanwhile; if the burst is less, when
    /// the bucket is full.
    pub fn ready_at(&self, bytes: u64) -> Duration {
        let short = self.burst_bytes.saturating_sub(bytes);
        // What may still be missing then has to take less time than that, not more.
        let ns = u128::from(short) * NS_PER_S / u128::from(self.bytes_per_s.get());
        self.full_at.saturating_sub(duration(ns))
    }

    fn time_for(&self, bytes: u64) -> Duration {
        duration((u128::from(bytes) * NS_PER_S).div_ceil(u128::from(self.bytes_per_s.get())))
    }
}

fn duration(ns: u128) -> Duration {
    let nanos = u32::try_from(ns % NS_PER_S).unwrap_or(0);
    u64::try_from(ns / NS_PER_S).map_or(Duration::MAX, |secs| Duration::new(secs, nanos))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rate(bytes_per_s: u64, burst_bytes: u64) -> Rate {
        Rate::new(NonZeroU64::new(bytes_per_s).expect("not 0"), burst_bytes)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut rate = rate(1000, 500);
        assert_eq!(rate.available(ms(0)), 500);
        assert_eq!(rate.ready_at(500), ms(0));
        rate.spend(ms(0), 500);
        assert_eq!(rate.available(ms(0)), 0);
        assert_eq!((rate.ready_at(200), rate.available(ms(200))), (ms(200), 200));
        assert_eq!(rate.available(ms(60_000)), 500, "no more than the burst");
        // Debt is paid off first.
        rate.spend(ms(1000), 700);
        assert_eq!((rate.available(ms(1200)), rate.available(ms(1300))), (0, 100));
        assert_eq!(rate.ready_at(100), ms(1300));
        assert_eq!(rate.ready_at(9999), ms(1700), "when the bucket is full");
    }

    #[test]
    fn no_number_is_too_large() {
        let mut slow = rate(1, u64::MAX);
        slow.spend(Duration::MAX, u64::MAX);
        assert_eq!(slow.available(Duration::ZERO), 0);
        assert_eq!(slow.available(Duration::MAX), u64::MAX);
        let mut fast = rate(u64::MAX, u64::MAX);
        fast.spend(ms(5), u64::MAX);
        fast.spend(ms(5), u64::MAX);
        assert_eq!(fast.available(ms(5)), 0);
        assert_eq!(fast.ready_at(u64::MAX), ms(2005));
        fast.spend(Duration::MAX, 1);
        assert_eq!(fast.available(Duration::ZERO), 0);
    }

    proptest! {
        #[test]
        fn no_stretch_of_time_sees_more_than_burst_and_rate(
            bytes_per_s in prop_oneof![1..20u64, 1..u64::MAX >> 20],
            burst_bytes in prop_oneof![0..20u64, 0..u64::MAX >> 20],
            steps in prop::collection::vec((0..3_000_000_000u64, 0..5u64), 1..40),
        ) {
            let mut rate = rate(bytes_per_s, burst_bytes);
            let mut now = Duration::ZERO;
            let mut spent: Vec<(Duration, u128)> = Vec::new();
            for (ns, part) in steps {
                now += Duration::from_nanos(ns);
                let available = rate.available(now);
                prop_assert!(available <= burst_bytes);
                let bytes = available / 4 * part.min(4);
                rate.spend(now, bytes);
                // To the byte, but for rounding.
                prop_assert!((available - bytes).abs_diff(rate.available(now)) <= 1 + bytes_per_s / 1_000_000_000);
                spent.push((now, u128::from(bytes)));
                let wanted = burst_bytes / 3 + 1;
                let at = rate.ready_at(wanted.min(burst_bytes)).max(now);
                prop_assert!(rate.available(at) >= wanted.min(burst_bytes), "ready at {:?}: {}", at, rate.available(at));
            }
            for (from, (start, _)) in spent.iter().enumerate() {
                let mut sum = 0;
                for (end, bytes) in &spent[from..] {
                    sum += bytes;
                    let came = (end.as_nanos() - start.as_nanos()) * u128::from(bytes_per_s) / NS_PER_S;
                    prop_assert!(sum <= u128::from(burst_bytes) + came + 1, "{} in {:?}", sum, *end - *start);
                }
            }
        }
    }
}
