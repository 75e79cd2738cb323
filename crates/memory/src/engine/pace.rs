//! When the background may take its next step.

use std::time::{Duration, Instant};

/// Longest rest after a step that was held up.
const REST_MAX: Duration = Duration::from_millis(5);

/// How many times longer the background rests while faults come in.
const BUSY_FACTOR: u32 = 8;

/// After each step the background rests as long as the step took, so that it takes at most half of a CPU from
/// the VMs; and eight times as long once a fault has come, so that demand goes first, but never starves it.
#[derive(Debug)]
pub(super) struct Pace {
    ended: Instant,
    rest: Duration,
    busy: bool,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { ended: now, rest: Duration::ZERO, busy: false }
    }

    /// How long until the next step may begin.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        let rest = if self.busy { self.rest * BUSY_FACTOR } else { self.rest };
        (self.ended + rest).saturating_duration_since(now)
    }

    /// A step was taken.
    pub(super) fn stepped(&mut self, began: Instant, ended: Instant) {
        *self = Self { ended, rest: (ended - began).min(REST_MAX), busy: false };
    }

    /// A fault was served.
    pub(super) fn served(&mut self) {
        self.busy = true;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_background_rests_longer_while_faults_come_but_not_for_ever() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        assert_eq!(pace.wait(began), Duration::ZERO);
        let ended = began + Duration::from_micros(60);
        pace.stepped(began, ended);
        assert_eq!(pace.wait(ended), Duration::from_micros(60));
        pace.served();
        pace.served();
        assert_eq!(pace.wait(ended), Duration::from_micros(480));
        assert_eq!(pace.wait(ended + Duration::from_micros(480)), Duration::ZERO);
        pace.stepped(ended, ended + Duration::from_secs(1));
        assert_eq!(pace.wait(ended + Duration::from_secs(1)), REST_MAX);
    }
}
