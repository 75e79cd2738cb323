//! What to expect: a fluid model of demand and prefetch, of a central server, a multicast and a
//! swarm.
//!
//! vmTorrent (CoNEXT 2012) has such a model in its equations 8 to 15. Their text was not available
//! here. So these are *not* its equations but a new derivation, for the same four things. Pages are
//! a fluid; links are shared evenly; nothing is lost.
//!
//! *S* is the bytes that each of *n* hosts needs, *b* the bytes per second of links at the hosts
//! and at the origin, and *C* the computing time. *F* is the number of faults, of *u* bytes each,
//! that find their page absent without prefetch, and *R* a round trip.
//!
//! - demand, central: each fault waits for a round trip and its bytes. When all ask at once the
//!   origin's link is shared: *C + F (R + u/b)*, and at least *n S/b*.
//! - prefetch, central: computing and fetching overlap: max(*C*, *n S/b*), plus *R*.
//! - prefetch, swarm: the origin sends everything once, each host takes in all, and all together
//!   send *n S* through *n + 1* links. So it takes max(*C*, *S/b*, *n S/((n + 1) b)*), plus *R*.
//!   This is the bound of Kumar and Ross, "Peer-assisted file distribution", 2006, which they show
//!   to be tight.
//! - demand, swarm: as central, but at least *n S/((n + 1) b)*.
//! - multicast: all take in what the origin sends once: max(*C*, *S/b'*), plus *R*, with *b'* what
//!   the sender makes of its link.

use std::time::Duration;

/// What each host needs, and what it has to get it by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Need {
    pub hosts: u64,
    /// Per host, headers included.
    pub bytes: u64,
    pub bytes_per_s: u64,
    pub compute: Duration,
    /// Faults that find their page absent if nothing is fetched ahead.
    pub faults: u64,
    pub round_trip: Duration,
}

/// When the last host is through.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fluid {
    pub demand_central: Duration,
    pub prefetch_central: Duration,
    pub demand_swarm: Duration,
    pub prefetch_swarm: Duration,
    pub multicast: Duration,
}

impl Need {
    pub fn fluid(&self) -> Fluid {
        let seconds = |bytes: u128| {
            let ns = bytes * 1_000_000_000 / u128::from(self.bytes_per_s.max(1));
            Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
        };
        let (hosts, bytes) = (u128::from(self.hosts), u128::from(self.bytes));
        let (one, central) = (seconds(bytes), seconds(bytes * hosts));
        let swarm = seconds(bytes * hosts / (hosts + 1)).max(one);
        let faults = u32::try_from(self.faults).unwrap_or(u32::MAX);
        let alone = self.compute + self.round_trip.saturating_mul(faults) + one;
        Fluid {
            demand_central: alone.max(central),
            prefetch_central: self.compute.max(central) + self.round_trip,
            demand_swarm: alone.max(swarm),
            prefetch_swarm: self.compute.max(swarm) + self.round_trip,
            multicast: self.compute.max(one) + self.round_trip,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn central_grows_with_hosts_and_the_others_do_not() {
        let need = |hosts| Need {
            hosts,
            bytes: 125_000_000,
            bytes_per_s: 125_000_000,
            compute: Duration::from_millis(500),
            faults: 1000,
            round_trip: Duration::from_micros(200),
        };
        let (one, many) = (need(1).fluid(), need(100).fluid());
        assert_eq!(one.demand_central, Duration::from_millis(500 + 200 + 1000));
        assert_eq!((one.prefetch_central, one.prefetch_swarm), (one.multicast, one.multicast));
        assert_eq!(many.demand_central, Duration::from_secs(100));
        assert_eq!((many.prefetch_swarm, many.multicast), (one.multicast, one.multicast));
        assert_eq!(many.demand_swarm, one.demand_swarm);
    }
}
