//! When the background may take its next step.

use std::time::{Duration, Instant};

/// Longest rest after a burst that was held up.
const REST_MAX: Duration = Duration::from_millis(5);

/// Steps are taken one after the other for so long, with a look for faults after each: a sleep
/// between any two would cost more than the step.
const BURST_MAX: Duration = Duration::from_millis(1);

/// How many times longer the background rests while faults come in.
const BUSY_FACTOR: u32 = 8;

/// After each burst of steps the background rests as long as the burst took, so that it takes at
/// most half of a CPU from the VMs. A fault ends the burst, and the rest is eight times as long:
/// demand goes first, but never starves the background.
#[derive(Debug)]
pub(super) struct Pace {
    /// Of the last step.
    ended: Instant,
    /// Time spent in the burst so far.
    burst: Duration,
    busy: bool,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { ended: now, burst: Duration::ZERO, busy: false }
    }

    /// How long until the next step may begin.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        let rest = match self.busy {
            true => self.burst.min(REST_MAX) * BUSY_FACTOR,
            false if self.burst < BURST_MAX => Duration::ZERO,
            false => self.burst.min(REST_MAX),
        };
        (self.ended + rest).saturating_duration_since(now)
    }

    /// A step was taken.
    pub(super) fn stepped(&mut self, began: Instant, ended: Instant) {
        let in_burst = !self.busy && self.burst < BURST_MAX;
        let before = if in_burst { self.burst } else { Duration::ZERO };
        *self = Self { ended, burst: before + (ended - began), busy: false };
    }

    /// A fault was served.
    pub(super) fn served(&mut self) {
        self.busy = true;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_micros(300);

    #[test]
    fn the_background_rests_as_long_as_it_worked() {
        let mut now = Instant::now();
        let mut pace = Pace::new(now);
        for _ in 0..4 {
            assert_eq!(pace.wait(now), Duration::ZERO);
            pace.stepped(now, now + STEP);
            now += STEP;
        }
        assert_eq!(pace.wait(now), 4 * STEP, "1.2 ms is a burst");
        now += 4 * STEP;
        assert_eq!(pace.wait(now), Duration::ZERO);
        pace.stepped(now, now + STEP);
        assert_eq!(pace.wait(now + STEP), Duration::ZERO, "a new burst");
    }

    #[test]
    fn faults_end_a_burst_and_make_the_rest_longer_but_not_endless() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        let ended = began + STEP;
        pace.stepped(began, ended);
        pace.served();
        pace.served();
        assert_eq!(pace.wait(ended), 8 * STEP);
        assert_eq!(pace.wait(ended + 8 * STEP), Duration::ZERO);
        pace.stepped(ended, ended + Duration::from_secs(1));
        assert_eq!(pace.wait(ended + Duration::from_secs(1)), REST_MAX);
    }
}
