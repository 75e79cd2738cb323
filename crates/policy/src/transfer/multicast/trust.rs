//! Whether reads are for a group at all.

use std::time::Duration;

use crate::transfer::Urgency;

/// After this many demand reads in a row for which pages were not heard in time, the group is asked
/// for none for a while.
const DEMAND_IN_VAIN_MAX: u32 = 3;
/// The same for prefetches, several of which are in flight at a time.
const AHEAD_IN_VAIN_MAX: u32 = 16;

/// Times of [`Trust`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrustConfig {
    /// How long no demand read is for the group after several failed.
    pub distrust: Duration,
    /// The same for prefetches.
    pub distrust_ahead: Duration,
}

impl Default for TrustConfig {
    fn default() -> Self {
        Self { distrust: Duration::from_secs(1), distrust_ahead: Duration::from_secs(10) }
    }
}

/// Whether one host's reads of one image are for its group. They are not for a while after several
/// in a row whose pages were not heard in time. Demand and prefetch are judged apart.
#[derive(Debug)]
pub struct Trust {
    config: TrustConfig,
    demand: Kind,
    ahead: Kind,
}

#[derive(Debug, Default)]
struct Kind {
    in_vain: u32,
    /// Not before.
    from: Duration,
}

impl Trust {
    pub fn new(config: TrustConfig) -> Self {
        Self { config, demand: Kind::default(), ahead: Kind::default() }
    }

    fn kind(&mut self, urgency: Urgency) -> &mut Kind {
        match urgency {
            Urgency::Demand => &mut self.demand,
            Urgency::Ahead => &mut self.ahead,
        }
    }

    /// Whether a read is for the group now.
    pub fn allows(&mut self, urgency: Urgency, now: Duration) -> bool {
        now >= self.kind(urgency).from
    }

    /// A read's pages were heard in time.
    pub fn heard(&mut self, urgency: Urgency) {
        self.kind(urgency).in_vain = 0;
    }

    /// They were not.
    pub fn in_vain(&mut self, urgency: Urgency, now: Duration) {
        let TrustConfig { distrust, distrust_ahead } = self.config;
        let (most, wait) = match urgency {
            Urgency::Demand => (DEMAND_IN_VAIN_MAX, distrust),
            Urgency::Ahead => (AHEAD_IN_VAIN_MAX, distrust_ahead),
        };
        let kind = self.kind(urgency);
        kind.in_vain += 1;
        if kind.in_vain >= most {
            *kind = Kind { in_vain: 0, from: now + wait };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_in_a_row_in_vain_and_reads_go_elsewhere_for_a_while() {
        let ms = Duration::from_millis;
        let mut trust = Trust::new(TrustConfig::default());
        for _ in 1..DEMAND_IN_VAIN_MAX {
            trust.in_vain(Urgency::Demand, ms(5));
        }
        trust.heard(Urgency::Demand);
        for _ in 0..DEMAND_IN_VAIN_MAX {
            assert!(trust.allows(Urgency::Demand, ms(5)), "one was heard between");
            trust.in_vain(Urgency::Demand, ms(5));
        }
        assert!(!trust.allows(Urgency::Demand, ms(1004)));
        assert!(trust.allows(Urgency::Ahead, ms(1004)), "that is another matter");
        assert!(trust.allows(Urgency::Demand, ms(1005)));
        (0..AHEAD_IN_VAIN_MAX).for_each(|_| trust.in_vain(Urgency::Ahead, ms(5)));
        assert!(!trust.allows(Urgency::Ahead, ms(10_004)));
    }
}
