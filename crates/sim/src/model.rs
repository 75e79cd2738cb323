//! What to expect: vmTorrent's model of a VM whose image streams to it (CoNEXT 2012, §3).
//!
//! *M(t)* is the bytes that a VM has accessed by time *t* if all of them are in memory, and *A* all
//! that it accesses. *P(t)* is the same if they come over a network at the effective rate *r*. The
//! model says *P⁻¹(A)*, when the VM is through:
//!
//! | equation | here |
//! |---|---|
//! | 1: P⁻¹(A) − M⁻¹(A), which a policy is to minimise | [`Playback::delay`] |
//! | 2 to 4: demand. dP/dt is the smaller of *r* and dM/dt | [`Playback::through`] |
//! | 5 to 7: profile. What comes before it is accessed is a buffer, beside *r* | [`Playback::through`] |
//! | 8, 9: *r* from one server, which *n* hosts share | [`Network::central`] |
//! | 10, 11: *r* from the swarm | [`Network::swarm`] |
//! | 12, 13: *r* from both; with one host, from the server alone | [`Network::rate`] |
//! | 14, 15: what a request waits | [`Network::central_wait`], [`Network::swarm_wait`] |
//!
//! *M* is a straight line between one access and the next. The model knows no multicast. Its row
//! here is equation 9 with one host, since all get what the server sends once.
//!
//! The paper says of its model: demand is bound tightly, profile is an upper bound, since all is
//! predicted; for fewer than 16 hosts piece diversity is over-estimated.

use std::time::Duration;

/// What is fetched, and when (§3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// What is accessed.
    Demand,
    /// What will be accessed, in that order.
    Profile,
}

/// Who sends it (§3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distribution {
    /// One server.
    Central,
    /// Hosts to each other, and one server.
    Peers,
    /// One server to all at the same time. Not in the paper.
    Multicast,
}

/// What pieces come over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    /// *n*: hosts that run a VM, beside the server.
    pub hosts: u64,
    /// *r_net*, of each host's link.
    pub bytes_per_s: u64,
    /// *S*: bytes of a piece, headers included.
    pub piece_bytes: u64,
    /// *RTT*.
    pub round_trip: Duration,
    /// *Q*: what a server needs for a request. vmTorrent's needed 0.5 ms (§4.3.1).
    pub service: Duration,
}

/// What vmTorrent's server needed for a request.
pub const SERVICE: Duration = Duration::from_micros(500);

impl Network {
    fn seconds(wait: Duration, pieces: f64, per_s: f64) -> f64 {
        wait.as_secs_f64() + pieces / per_s
    }

    /// Equation 14.
    pub fn central_wait(&self) -> Duration {
        self.round_trip + self.service
    }

    /// Equation 15, and for demand the one before it, which has no number.
    pub fn swarm_wait(&self, policy: Policy) -> Duration {
        let hosts = self.hosts as f64;
        let lack_of_diversity = match policy {
            Policy::Demand => hosts,
            Policy::Profile => hosts.sqrt(),
        };
        self.round_trip + self.service.mul_f64(lack_of_diversity)
    }

    /// Equation 9, in bytes per second: each host gets its part of the server's link.
    pub fn central(&self) -> f64 {
        let piece = self.piece_bytes as f64;
        let shared = self.bytes_per_s as f64 / (self.hosts as f64).max(1.0);
        piece / Self::seconds(self.central_wait(), piece, shared)
    }

    /// Equation 11, in bytes per second. One host has no peer (footnote 6).
    pub fn swarm(&self, policy: Policy) -> f64 {
        if self.hosts <= 1 {
            return 0.0;
        }
        let piece = self.piece_bytes as f64;
        piece / Self::seconds(self.swarm_wait(policy), piece, self.bytes_per_s as f64)
    }

    /// Equations 12 and 13: *r*, in bytes per second. A host's link carries no more.
    pub fn rate(&self, distribution: Distribution, policy: Policy) -> f64 {
        let rate = match distribution {
            Distribution::Central => self.central(),
            Distribution::Peers => self.swarm(policy) + self.central(),
            Distribution::Multicast => Self { hosts: 1, ..*self }.central(),
        };
        rate.min(self.bytes_per_s as f64)
    }
}

/// *M*: what a VM accesses, and when, if it waits for nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Playback {
    /// The time since the access before, and bytes that were not accessed before.
    steps: Vec<(Duration, u64)>,
}

impl Playback {
    /// Each access: the time since the one before, and its bytes.
    pub fn new(steps: Vec<(Duration, u64)>) -> Self {
        Self { steps }
    }

    /// *A*, in bytes.
    pub fn bytes(&self) -> u64 {
        self.steps.iter().map(|(_, bytes)| bytes).sum()
    }

    /// *M⁻¹(A)*.
    pub fn own(&self) -> Duration {
        self.steps.iter().map(|(time, _)| *time).sum()
    }

    /// *M*: when each access is made if nothing waits, and the bytes that are accessed by then.
    pub fn cached(&self) -> Vec<(Duration, u64)> {
        let sums = self.steps.iter().scan((Duration::ZERO, 0), |sum, (time, bytes)| {
            *sum = (sum.0 + *time, sum.1 + bytes);
            Some(*sum)
        });
        sums.collect()
    }

    /// *P⁻¹(A)* at this rate, in bytes per second.
    pub fn through(&self, policy: Policy, rate: f64) -> Duration {
        self.curve(policy, rate).last().map_or(Duration::ZERO, |(time, _)| *time)
    }

    /// Equation 1.
    pub fn delay(&self, policy: Policy, rate: f64) -> Duration {
        self.through(policy, rate).saturating_sub(self.own())
    }

    /// *P*: when each access was made, and the bytes that were accessed by then.
    pub fn curve(&self, policy: Policy, rate: f64) -> Vec<(Duration, u64)> {
        let rate = rate.max(1.0);
        let (mut now, mut accessed, mut buffer) = (0.0, 0, 0.0_f64);
        let one = |(time, bytes): &(Duration, u64)| {
            let (own, wanted) = (time.as_secs_f64(), *bytes as f64);
            let took = match policy {
                // Equation 4.
                Policy::Demand => own.max(wanted / rate),
                // Equation 7: while there is a buffer, nothing waits.
                Policy::Profile => own.max((wanted - buffer).max(0.0) / rate),
            };
            // Equation 5.
            buffer = (buffer + rate * took - wanted).max(0.0);
            now += took;
            accessed += bytes;
            (Duration::from_secs_f64(now), accessed)
        };
        self.steps.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The paper's links of 100 Mbit/s, with its piece, round trip and service time (§4.3.1).
    fn emulab(hosts: u64) -> Network {
        Network {
            hosts,
            bytes_per_s: 12_500_000,
            piece_bytes: 16 << 10,
            round_trip: Duration::from_micros(500),
            service: SERVICE,
        }
    }

    fn near(value: f64, wanted: f64) -> bool {
        (value / wanted - 1.0).abs() < 0.001
    }

    #[test]
    fn rates_are_those_of_the_equations() {
        // S / (W + S/r_net), worked out by hand: 16384 / (0.001 + 16384/12.5e6).
        let one = emulab(1);
        assert!(near(one.central(), 7_090_200.0), "{}", one.central());
        for policy in [Policy::Demand, Policy::Profile] {
            assert!(near(one.rate(Distribution::Peers, policy), one.central()), "footnote 6");
        }
        // 16384 / (0.001 + 100 · 16384/12.5e6).
        let many = emulab(100);
        assert!(near(many.central(), 124_053.0), "{}", many.central());
        // 16384 / (0.0005 + 0.0005 · 10 + 16384/12.5e6), and with 100 in place of 10.
        assert!(near(many.swarm(Policy::Profile), 2_405_330.0), "{}", many.swarm(Policy::Profile));
        assert!(near(many.swarm(Policy::Demand), 316_271.0), "{}", many.swarm(Policy::Demand));
        let both = many.swarm(Policy::Profile) + many.central();
        assert!(near(many.rate(Distribution::Peers, Policy::Profile), both));
        assert!(near(many.rate(Distribution::Multicast, Policy::Demand), one.central()));
    }

    #[test]
    fn demand_is_as_slow_as_its_slowest_parts_and_a_profile_catches_up() {
        // 1 s of quiet, then 10 MiB in a second, then quiet again.
        let second = Duration::from_secs(1);
        let playback = Playback::new(vec![(second, 0), (second, 10 * MIB), (second, 0)]);
        let rate = (5 * MIB) as f64;
        assert_eq!((playback.bytes(), playback.own()), (10 * MIB, 3 * second));
        assert_eq!(playback.through(Policy::Demand, rate), 4 * second);
        // Half of it came before.
        assert_eq!(playback.through(Policy::Profile, rate), 3 * second);
        assert_eq!(playback.delay(Policy::Demand, rate), second);
        assert_eq!(playback.delay(Policy::Profile, rate), Duration::ZERO);
        // At a tenth of that, what is quiet helps a little.
        assert_eq!(playback.through(Policy::Profile, rate / 10.0), 21 * second);
        assert_eq!(playback.through(Policy::Demand, rate / 10.0), 22 * second);
        let curve = playback.curve(Policy::Demand, rate);
        assert_eq!(curve[1], (3 * second, 10 * MIB));
    }

    #[test]
    fn a_swarm_with_profiles_scales_and_a_server_does_not() {
        // As of a VM in the paper: 300 MiB in a minute.
        let step = (Duration::from_millis(200), MIB);
        let playback = Playback::new(vec![step; 300]);
        let over = |hosts, distribution, policy| {
            let rate = emulab(hosts).rate(distribution, policy);
            playback.through(policy, rate).as_secs_f64() / playback.own().as_secs_f64()
        };
        let central = over(100, Distribution::Central, Policy::Demand);
        let swarm = over(100, Distribution::Peers, Policy::Profile);
        // Figure 8: 40 to 70 times, and 2 to 3.
        assert!((40.0..70.0).contains(&central), "{central}");
        assert!((1.5..3.0).contains(&swarm), "{swarm}");
        let demand = over(100, Distribution::Peers, Policy::Demand);
        assert!((4.0..11.0).contains(&(demand / swarm)), "{demand}");
    }
}
