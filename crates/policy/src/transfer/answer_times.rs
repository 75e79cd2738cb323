//! How long answers take, and when to stop waiting for one.

use std::time::Duration;

/// Longer ones count as this.
const TOOK_MAX: Duration = Duration::from_secs(3600);

/// Mean and deviation of the times that answers took, as TCP keeps them (RFC 6298).
#[derive(Debug, Clone, Default)]
pub(crate) struct AnswerTimes {
    /// Mean and mean deviation; `None` before the first answer.
    known: Option<(Duration, Duration)>,
}

impl AnswerTimes {
    /// An answer took this long. Not to be called for what was requested twice: it is unknown which
    /// of the two was answered (Karn's rule).
    pub(crate) fn sample(&mut self, took: Duration) {
        let took = took.min(TOOK_MAX);
        self.known = Some(match self.known {
            None => (took, took / 2),
            Some((mean, deviation)) => {
                ((mean * 7 + took) / 8, (deviation * 3 + mean.abs_diff(took)) / 4)
            }
        });
    }

    /// What an answer takes at most, nearly always; `first` as long as nothing is known.
    pub(crate) fn bound(&self, first: Duration) -> Duration {
        self.known.map_or(first, |(mean, deviation)| mean + deviation * 4)
    }

    /// What an answer takes on average, if there was one.
    pub(super) fn measured(&self) -> Option<Duration> {
        self.known.map(|(mean, _)| mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_follows_mean_and_deviation() {
        let ms = Duration::from_millis;
        let mut times = AnswerTimes::default();
        assert_eq!((times.bound(ms(50)), times.measured()), (ms(50), None));
        times.sample(ms(8));
        assert_eq!((times.bound(ms(50)), times.measured()), (ms(24), Some(ms(8))));
        for _ in 0..50 {
            times.sample(ms(8));
        }
        assert!(times.bound(ms(50)) < ms(9));
        times.sample(ms(40));
        assert!(times.bound(ms(50)) > ms(40));
    }
}
