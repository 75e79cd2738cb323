//! What a host has promised and not given yet.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{LeaseAsk, LeaseId};
use crate::room::Room;

/// Longest time that places wait: who asks for more gets this. Guests hold tickets for minutes, not for hours.
const TTL_MAX: Duration = Duration::from_secs(3600);

/// Most leases at a time; each costs some 200 bytes.
const LEASES_MAX: usize = 16_384;

/// Places that a host holds for somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// How many were granted, used ones too.
    pub granted: u32,
    /// How many of them wait.
    pub unused: u32,
    pub shape: Room,
    pub user: String,
    pub family: String,
    /// When the unused ones are given to others, by the host's monotonic clock.
    pub expires: Duration,
}

/// Why a host grants nothing. Expected, not an error of anybody's: travels as an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    #[error("it is draining")]
    Draining,
    #[error("it has no room left")]
    NoRoom,
    #[error("it has {LEASES_MAX} leases out, more than it keeps")]
    TooMany,
}

/// A lease that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    #[error("lease {id} has expired, was given back, or never was")]
    Unknown { id: LeaseId },
    #[error("lease {id} has {unused} unused places, not {wanted}")]
    Short { id: LeaseId, unused: u32, wanted: u32 },
}

/// A host's book of places that are promised and not used yet.
///
/// What VMs have that run already the host's own admission counts, and tells as `free` what is left; the same that a lease
/// was used for is counted there from then on, and not here any more. So *promised ≤ free* at every grant, if
/// [`Leases::take`] and the admission of what it is for happen as one, under one lock.
#[derive(Debug, Clone, Default)]
pub struct Leases {
    leases: BTreeMap<LeaseId, Lease>,
}

impl Leases {
    /// What all unused places need together.
    pub fn held(&self) -> Room {
        let unused = self.leases.values().map(|it| it.shape.times(it.unused));
        unused.fold(Room::default(), Room::plus)
    }

    /// Grants as many places as asked for, or as fit into what of `free` is not promised: at least one. An ask that comes
    /// again gets the same answer again.
    ///
    /// # Errors
    /// There is no room, or the host gives nothing new.
    pub fn grant(
        &mut self,
        ask: &LeaseAsk,
        free: Room,
        draining: bool,
        now: Duration,
    ) -> Result<u32, Refusal> {
        self.expire(now);
        if let Some(lease) = self.leases.get(&ask.id) {
            return Ok(lease.granted);
        }
        if draining {
            return Err(Refusal::Draining);
        }
        let count = free.less(self.held()).places(ask.shape).min(ask.count);
        if count == 0 {
            return Err(Refusal::NoRoom);
        }
        if self.leases.len() >= LEASES_MAX {
            return Err(Refusal::TooMany);
        }
        let lease = Lease {
            granted: count,
            unused: count,
            shape: ask.shape,
            user: ask.user.clone(),
            family: ask.family.clone(),
            expires: expiry(now, ask.ttl_ms),
        };
        self.leases.insert(ask.id, lease);
        Ok(count)
    }

    /// Takes `count` places of a lease for clones that are admitted now.
    ///
    /// # Errors
    /// There is no such lease (any more), or it has not as many.
    pub fn take(&mut self, id: LeaseId, count: u32, now: Duration) -> Result<Lease, LeaseError> {
        self.expire(now);
        let lease = self.leases.get_mut(&id).ok_or(LeaseError::Unknown { id })?;
        let unused = lease.unused;
        lease.unused =
            unused.checked_sub(count).ok_or(LeaseError::Short { id, unused, wanted: count })?;
        let lease = lease.clone();
        if lease.unused == 0 {
            self.leases.remove(&id);
        }
        Ok(lease)
    }

    /// What is unused waits anew from now on.
    ///
    /// # Errors
    /// There is no such lease (any more).
    pub fn renew(&mut self, id: LeaseId, ttl_ms: u64, now: Duration) -> Result<(), LeaseError> {
        self.expire(now);
        let lease = self.leases.get_mut(&id).ok_or(LeaseError::Unknown { id })?;
        lease.expires = expiry(now, ttl_ms);
        Ok(())
    }

    /// Gives back what of a lease is unused. How many that were; 0 if there is no such lease, which is as good.
    pub fn release(&mut self, id: LeaseId) -> u32 {
        self.leases.remove(&id).map_or(0, |lease| lease.unused)
    }

    /// Ends the leases whose time is over; all other calls but [`Leases::held`] and [`Leases::release`] do so first.
    pub fn expire(&mut self, now: Duration) {
        self.leases.retain(|_, lease| lease.expires > now);
    }

    /// When the next one ends.
    pub fn next_expiry(&self) -> Option<Duration> {
        self.leases.values().map(|lease| lease.expires).min()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        self.leases.iter().map(|(id, lease)| (*id, lease))
    }
}

pub(super) fn expiry(now: Duration, ttl_ms: u64) -> Duration {
    now.saturating_add(Duration::from_millis(ttl_ms).min(TTL_MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Room = Room { memory_bytes: 10, vcpus: 1 };

    fn id(n: u8) -> LeaseId {
        LeaseId::from_bytes([n; 16])
    }

    fn ask(n: u8, count: u32, ttl_ms: u64) -> LeaseAsk {
        LeaseAsk { id: id(n), count, shape: SHAPE, user: "u".into(), family: "f".into(), ttl_ms }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn room(places: u32) -> Room {
        SHAPE.times(places)
    }

    #[test]
    fn a_host_promises_what_it_has_and_takes_back_what_is_unused() {
        let mut leases = Leases::default();
        assert_eq!(leases.grant(&ask(1, 6, 1000), room(10), false, ms(0)), Ok(6));
        assert_eq!(leases.grant(&ask(1, 6, 1000), room(10), false, ms(1)), Ok(6), "sent again");
        assert_eq!(leases.held(), room(6));
        assert_eq!(leases.grant(&ask(2, 6, 2000), room(10), false, ms(1)), Ok(4), "less");
        assert_eq!(leases.grant(&ask(3, 1, 1000), room(10), false, ms(2)), Err(Refusal::NoRoom));
        // Two run now: the host's own books have them.
        assert_eq!(leases.take(id(1), 2, ms(3)).expect("six").unused, 4);
        assert_eq!(leases.grant(&ask(3, 1, 1000), room(8), false, ms(3)), Err(Refusal::NoRoom));
        let error = leases.take(id(1), 5, ms(3)).expect_err("four").to_string();
        assert_eq!(error, format!("lease {} has 4 unused places, not 5", id(1)));
        assert_eq!(leases.next_expiry(), Some(ms(1000)));
        assert_eq!(leases.grant(&ask(3, 9, 1000), room(8), false, ms(1000)), Ok(4), "expired");
        assert_eq!(leases.take(id(1), 1, ms(1000)), Err(LeaseError::Unknown { id: id(1) }));
        assert_eq!((leases.release(id(2)), leases.release(id(2))), (4, 0));
        leases.renew(id(3), 1000, ms(1900)).expect("there");
        leases.take(id(3), 4, ms(2500)).expect("renewed");
        assert_eq!((leases.held(), leases.next_expiry()), (Room::default(), None));
    }

    #[test]
    fn a_draining_host_grants_nothing_and_keeps_its_word() {
        let mut leases = Leases::default();
        assert_eq!(leases.grant(&ask(1, 2, 1000), room(10), false, ms(0)), Ok(2));
        assert_eq!(leases.grant(&ask(2, 2, 1000), room(10), true, ms(0)), Err(Refusal::Draining));
        leases.take(id(1), 2, ms(1)).expect("promised before");
    }

    #[test]
    fn no_lease_waits_for_ever() {
        let mut leases = Leases::default();
        leases.grant(&ask(1, 1, u64::MAX), room(1), false, ms(0)).expect("room");
        assert_eq!(leases.next_expiry(), Some(TTL_MAX));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Ask { lease: u8, count: u32, ttl_ms: u64 },
        Use { lease: u8, count: u32 },
        Release { lease: u8 },
        EndVms { count: u32 },
        Pass { ms: u64 },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let lease = 0..12u8;
        prop::collection::vec(
            prop_oneof![
                4 => (lease.clone(), 0..12u32, 0..50u64)
                    .prop_map(|(lease, count, ttl_ms)| Step::Ask { lease, count, ttl_ms }),
                3 => (lease.clone(), 0..6u32).prop_map(|(lease, count)| Step::Use { lease, count }),
                1 => lease.prop_map(|lease| Step::Release { lease }),
                2 => (0..6u32).prop_map(|count| Step::EndVms { count }),
                2 => (0..30u64).prop_map(|ms| Step::Pass { ms }),
            ],
            1..80,
        )
    }

    proptest! {
        /// Twelve allocators on one host, whose admission counts what runs.
        #[test]
        fn what_is_promised_and_what_runs_is_never_more_than_there_is(
            capacity in 0..20u32,
            steps in steps(),
        ) {
            let mut leases = Leases::default();
            let mut running = 0;
            let mut now = ms(0);
            for step in steps {
                let free = room(capacity - running);
                match step {
                    Step::Ask { lease, count, ttl_ms } => {
                        if let Ok(granted) = leases.grant(&ask(lease, count, ttl_ms), free, false, now) {
                            prop_assert!(granted > 0);
                        }
                    }
                    Step::Use { lease, count } => {
                        if leases.take(id(lease), count, now).is_ok() {
                            running += count;
                        }
                    }
                    Step::Release { lease } => {
                        leases.release(id(lease));
                    }
                    Step::EndVms { count } => running -= count.min(running),
                    Step::Pass { ms: passed } => now += ms(passed),
                }
                let promised: u32 = leases.iter().map(|(_, lease)| lease.unused).sum();
                prop_assert!(running + promised <= capacity, "{} + {}", running, promised);
                prop_assert_eq!(leases.held(), room(promised));
            }
            // Nothing stays behind.
            leases.expire(now + TTL_MAX);
            prop_assert_eq!(leases.held(), Room::default());
        }
    }
}
