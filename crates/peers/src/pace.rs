//! How fast a member's waits by the clock pass: tests of silence and death shorten them.

use std::num::NonZeroU32;
use std::time::Duration;

use vmfork_cluster::Timing;

/// Divides waits that begin when another host is silent.
///
/// The default divides by one. Waits that must outlast a few lost heartbeats are never divided: a
/// shortened one would end what is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace(NonZeroU32);

impl Default for Pace {
    fn default() -> Self {
        Self(NonZeroU32::MIN)
    }
}

impl Pace {
    /// Divide by `by`.
    pub fn new(by: NonZeroU32) -> Self {
        Self(by)
    }

    /// A wait at this pace.
    pub(crate) fn of(self, wait: Duration) -> Duration {
        wait / self.0.get()
    }

    /// Heartbeats at this pace. A silent host is suspect as late as ever, and gone after that.
    pub(crate) fn timing(self) -> Timing {
        let timing = Timing::default();
        let gone_after = self.of(timing.gone_after).max(timing.suspect_after + timing.every);
        Timing {
            gone_after,
            every_if_gone: self.of(timing.every_if_gone).max(timing.every),
            ..timing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_the_default_ones_unless_a_test_divides_them() {
        let wait = Duration::from_secs(20);
        assert_eq!(Pace::default().of(wait), wait);
        assert_eq!(Pace::default().timing(), Timing::default());
        let four = Pace::new(NonZeroU32::new(4).expect("not 0"));
        assert_eq!(four.of(wait), wait / 4);
    }

    #[test]
    fn a_host_is_suspect_before_it_is_gone_at_any_pace() {
        for by in [1, 2, 4, 100] {
            let timing = Pace::new(NonZeroU32::new(by).expect("not 0")).timing();
            assert_eq!(timing.suspect_after, Timing::default().suspect_after);
            assert!(timing.suspect_after < timing.gone_after, "{timing:?}");
            assert!(timing.every <= timing.every_if_gone, "{timing:?}");
        }
    }
}
